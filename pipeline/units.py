"""Read and write sizes and durations (``256MiB``, ``5ms``), and annotate fields with units and options."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from enginesmith.pipeline.errors import UsageError

Key = TypeVar("Key")
Value = TypeVar("Value")

_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*")


def parse_bytes(text: str) -> int:
    """Read the bytes in ``256MiB``, ``2GB`` or ``4096``.

    Raises:
        UsageError: not a size.
    """
    number, unit = _split(text, "size", "256MiB, 2GiB or 4096")
    if unit.lower() not in _BYTES:
        raise UsageError(f"{text!r} has the unknown unit {unit!r}", "use B, KiB, MiB, GiB, kB, MB or GB")
    return int(number * _BYTES[unit.lower()])


def parse_seconds(text: str) -> float:
    """Read the seconds in ``5ms``, ``30m``, ``1h`` or ``2.5``.

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
    """Write ``1.5 GiB``; an unknown size is a dash."""
    if size is None:
        return "–"
    power = min(3, max(0, int(abs(size)).bit_length() - 1) // 10)
    value, unit = size / 1024**power, ("B", "KiB", "MiB", "GiB")[power]
    return f"{value:.0f} {unit}" if power == 0 or abs(value) >= 100 else f"{value:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Write ``0.3 s``, ``12 s``, ``3 m 05 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{int(seconds // 60)} m {int(seconds % 60):02d} s"


def format_si(value: float, unit: str) -> str:
    """Write a number with three significant digits and an SI prefix: ``95 GFLOP/s``."""
    power = min(5, max(0, int(math.log10(value) // 3))) if value >= 1 else 0
    return f"{float(f'{value / 1000**power:.3g}'):g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"


def format_share(share: float, digits: int = 2) -> str:
    """Write a share with so many digits that count: ``0.31 %``, ``100 %``, ``260 %``."""
    return f"{float(f'{100 * share:.{digits}g}'):g} %"


def ms(value: float | None) -> str:
    """Write milliseconds with three digits that count."""
    if value is None:
        return "–"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def format_metric(value: float, sign: Literal["", "+"] = "", least: float = 0.0) -> str:
    """Write a metric or its drop with four decimals, or two digits that count below 0.001, and as 0 up to ``least``.

    Below a millionth it has an exponent: ``9.8e-18``. ``sign`` is written before what is not negative.
    """
    size = abs(value)
    digits = 1 - math.floor(math.log10(size)) if least < size < 0.001 else 4
    form = ".1e" if least < size < 1e-6 else f".{digits}f"
    text = f"{value:{sign}z{form}}"
    return "−" + text[1:] if text.startswith("-") else text


def count_words(number: int, singular: str) -> str:
    """Write a count with its noun: ``1 variant``, ``3 variants``."""
    return f"{number} {singular}{'' if number == 1 else 's'}"


def name_some(names: Sequence[str], most: int, link: str = ", ") -> str:
    """Join names, of which those beyond ``most`` are only counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return link.join(names[:most]) + more


def group_values(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Collect the values of each key: names by the reason that they share, say; keys and values keep their order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def shorten(text: str, longest: int = 400) -> str:
    """Cut text to so many characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


# Metadata of a recipe's fields: the units that text is read in, and the options of the command line.

Heading = Literal[
    "Model and inputs",
    "Variants",
    "Data and accuracy",
    "Budgets",
    "Building engines",
    "Measuring",
    "Where and how it runs",
]
"""The headings of ``--help``, in their order."""


@dataclass(frozen=True)
class Option:
    """Declare the option of the command line that fills a field."""

    heading: Heading
    flags: str = ""
    """``--max-memory``, ``--no-simplify`` or ``--tf32/--no-tf32``; the field's name where it is empty."""
    everyday: bool = False
    """``--help`` shows it; the others are shown by ``--help-all``."""
    metavar: str = ""


class AddedOption(BaseModel, frozen=True):
    """Name a value that a recipe can add to one of its lists, or put in place of another, against a wrong answer."""

    field: str
    """Field of the recipe: ``onnxruntime.disabled_optimizers``."""
    value: str | int | bool
    instead_of: str | int | bool | None = None
    """The value that it replaces; None where it is added to a list."""
    words: str
    """Option on the command line: ``--ort-disable QuickGeluFusion``."""


def flag_of(part: type[BaseModel], field: str) -> str:
    """Spell the option that fills a field of a part of the recipe; empty where there is none."""
    option = next((item for item in part.model_fields[field].metadata if isinstance(item, Option)), None)
    if option is None:
        return ""
    return option.flags.partition("/")[0] or "--" + field.replace("_", "-")


def _of_text(read: Callable[[str], Any]) -> BeforeValidator:
    """Make a validator that reads text and leaves other values alone; its errors become pydantic's, with a remedy."""

    def validate(value: Any) -> Any:
        try:
            return read(value) if isinstance(value, str) else value
        except UsageError as error:
            raise PydanticCustomError("unit", "{said}", {"said": error.message, "remedy": error.remedy}) from error

    return BeforeValidator(validate)


COMMA_LIST = _of_text(lambda text: [part.strip() for part in text.split(",")])
"""Annotates lists that may be written as ``1,8,64``."""
UNIQUE = AfterValidator(lambda values: tuple(dict.fromkeys(values)))
"""Annotates lists that have each entry once."""
SIZE = _of_text(parse_bytes)
DURATION = _of_text(parse_seconds)


def _parse_milliseconds(text: str) -> float:
    """Read milliseconds. A number alone is refused: seconds are meant elsewhere, and 5 s is no limit for 5 ms."""
    if _split(text, "duration", "5ms or 1s")[1] == "":
        raise UsageError(f"{text!r} has no unit", f"write {text}ms or {text}s")
    return parse_seconds(text) * 1e3


_MILLISECONDS = _of_text(_parse_milliseconds)
METAVARS = {SIZE: "SIZE", DURATION: "TIME", _MILLISECONDS: "TIME"}
"""Unit → word of ``--help`` for a value in it."""

Bytes = Annotated[int, Field(gt=0), SIZE]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), DURATION]
SecondsOrNone = Annotated[float, Field(ge=0, allow_inf_nan=False), DURATION]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False), _MILLISECONDS]
