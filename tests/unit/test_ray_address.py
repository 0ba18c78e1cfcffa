"""What is taken for the address of a Ray cluster; nothing is asked of Ray."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.execution.ray import connection


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


@pytest.mark.parametrize(
    ("answer", "is_one"),
    [(b"HTTP/1.0 400 Bad Request\r\n\r\n", False), (b"", False), (b"\0\0\x06\x04\0\0\0\0\0\0\x03", True)],
    ids=["web", "silent", "grpc"],
)
def test_a_port_of_another_service_is_noticed(answer: bytes, is_one: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(100)
                client.sendall(answer)

        serving = pool.submit(serve)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if is_one:
            connection._validate_reachable(address)
        else:
            with pytest.raises(MissingCapability, match="another service"):
                connection._validate_reachable(address)
        serving.result()
