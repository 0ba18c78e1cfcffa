"""What is taken for the address of a Ray cluster; nothing is asked of Ray."""

import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.executors import connection


@pytest.mark.parametrize(
    "address", ["", "local", "12345", "http://head:8265", "ray://", "ray://head", "head", "ray:head:1", "a b:6379"]
)
def test_what_is_no_address_is_wrong_usage(address: str) -> None:
    with pytest.raises(UsageError, match="is no address of a Ray cluster"):
        connection.connect(address, [])


@pytest.mark.parametrize(
    "address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379", "ray://head.example:10001", "ray://[::1]:10001"]
)
def test_addresses(address: str) -> None:
    assert connection._ADDRESS.fullmatch(address)
