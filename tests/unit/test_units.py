"""Sizes and durations as people write them."""

import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.units import format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("256MiB", 256 << 20), ("2GB", 2 * 10**9), (" 1.5 KiB ", 1536), ("3kb", 3000), ("7 B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5ms", 0.005), ("250us", 0.00025), ("10s", 10), ("2.5", 2.5), ("30m", 1800), ("2min", 120), ("1h", 3600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1,5GiB", "1e9", "5 6"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the size"):
        parse_bytes(text)
    with pytest.raises(UsageError, match="cannot read the duration"):
        parse_seconds(text)


def test_unknown_units_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown unit 'XiB'"):
        parse_bytes("3XiB")
    with pytest.raises(UsageError, match="unknown unit 'MS'"):  # milliseconds or megaseconds?
        parse_seconds("3MS")


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 << 20, "300 MiB"), (5 << 40, "5120 GiB")],
)
def test_sizes_for_people(size: float | None, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.31, "0.3 s"), (12.4, "12 s"), (185, "3 m 05 s")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
