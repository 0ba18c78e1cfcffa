"""Sizes and durations as people write them: ``256MiB``, ``5ms``, ``30m``."""

import math
import re

from enginesmith.pipeline.errors import UsageError

_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes in ``256MiB``, ``2GB`` or ``4096``.

    Raises:
        UsageError: not a size.
    """
    number, unit = _split(text, "size", "256MiB, 2GiB or 4096")
    if unit.lower() not in _BYTES:
        raise UsageError(f"{text!r} has the unknown unit {unit!r}", "use B, KiB, MiB, GiB, kB, MB or GB")
    return int(number * _BYTES[unit.lower()])


def parse_seconds(text: str) -> float:
    """Seconds in ``5ms``, ``30m``, ``1h`` or ``2.5``.

    Raises:
        UsageError: not a duration.
    """
    number, unit = _split(text, "duration", "5ms, 10s, 30m or 1h")
    if unit not in _SECONDS:
        raise UsageError(f"{text!r} has the unknown unit {unit!r}", "use us, ms, s, m, h or d")
    return number * _SECONDS[unit]


def _split(text: str, what: str, examples: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if not match:
        raise UsageError(f"cannot read the {what} {text!r}", f"write it like {examples}")
    return float(match[1]), match[2]


def format_bytes(size: float | None) -> str:
    """``1.5 GiB``; an unknown size is a dash."""
    if size is None:
        return "–"
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """``0.3 s``, ``12 s``, ``3 m 05 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{int(seconds // 60)} m {int(seconds % 60):02d} s"


def format_si(value: float, unit: str) -> str:
    """Write a number with three significant digits and an SI prefix: ``95 GFLOP/s``."""
    power = min(5, max(0, int(math.log10(value) // 3))) if value >= 1 else 0
    return f"{float(f'{value / 1000**power:.3g}'):g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"


def ms(value: float | None) -> str:
    """Milliseconds with three digits that count."""
    if value is None:
        return "–"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
