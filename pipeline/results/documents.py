"""Read JSON documents of this and of other versions, naming invalid and unknown fields.

What is wrong is a ``ValueError`` with a sentence; who knows what the document is for makes a ``UsageError`` of it.
"""

import functools
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from enginesmith.pipeline.artifact import write_whole
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.units import format_bytes, shorten

Model = TypeVar("Model", bound=BaseModel)

_MOST_BYTES = 1 << 30
"""A run of 200 variants of a model of 10 000 nodes takes less than half of it."""
_LONGEST_SHOWN = 60
MOST_NAMED = 8
"""Unknown fields that a message names."""


def read(
    kind: type[Model],
    path: Path,
    schema: str,
    command: str,
    explain: Callable[[OSError], UsageError],
    again: str = "run optimize again",
) -> tuple[Model, tuple[str, ...]]:
    """Read a document of a schema that ``command`` writes; also return the names of fields that it does not have.

    ``explain`` says what it means that the file cannot be read, and ``again`` how to get rid of a damaged one.

    Raises:
        UsageError: it cannot be read, is damaged, or of another schema; the message names the field.
    """
    try:
        values = load(path)
        check_schema(path, values, schema, command)
        return parse_known_fields(kind, values)
    except OSError as error:
        raise explain(error) from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}", again) from error


def require_known(path: Path, unknown: Sequence[str], again: str) -> None:
    """Refuse to carry out a document that asks for ``unknown`` fields; the command ``again`` begins a new run.

    Raises:
        UsageError: it does.
    """
    if unknown:
        names = ", ".join(unknown[:MOST_NAMED])
        raise UsageError(
            f"{path} has fields that this version of enginesmith does not have: {names}",
            f"begin a new run: `{again}`, or resume this one with the enginesmith that wrote it",
        )


def load(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or too large to be a document.
    """
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"it has {format_bytes(size)}, and no document is larger than {format_bytes(_MOST_BYTES)}")
    if not path.is_file():
        raise ValueError("it is no file")
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        ended = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated")
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it ends in the middle, at {where}" if ended else f"{error.msg} at {where}") from error
    except RecursionError as error:
        raise ValueError("its lists and mappings are nested too deeply") from error


def parse_known_fields(kind: type[Model], values: Any) -> tuple[Model, tuple[str, ...]]:
    """Validate plain values as a model, taking out fields that it does not have; also returns their dotted names.

    Raises:
        ValueError: a field is missing, or of the wrong type; says which.
    """
    unknown: list[str] = []
    while True:
        try:
            document = kind.model_validate(values)
            break
        except ValidationError as error:
            errors = error.errors(include_url=False)
            wrong = next((error for error in errors if error["type"] != "extra_forbidden"), None)
            if wrong is not None:
                raise ValueError(_sentence(wrong)) from error
            for problem in errors:
                unknown.append(_name_field(problem["loc"], indices=False))
                *above, last = problem["loc"]
                del functools.reduce(operator.getitem, above, values)[last]
    unknown += _left_out(values, document.model_dump(mode="json", by_alias=True), ())
    return document, tuple(dict.fromkeys(unknown))


def parse(kind: type[Model], values: Any) -> Model:
    """Validate plain values as a model.

    Raises:
        ValueError: a field is invalid; says which.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(_sentence(error.errors(include_url=False)[0])) from error


def write_text(path: Path, text: str) -> None:
    """Write a file that people read, whole or not at all."""
    write_whole(path, text.encode(errors="replace"))


def parse_fields(kind: type[Model], fields: Any, what: str) -> Model:
    """Validate fields that a document keeps as they came.

    Raises:
        UsageError: they are not of that kind, or of another version's.
    """
    try:
        return parse(kind, fields)
    except ValueError as error:
        raise UsageError(f"{what} cannot be read: {error}", "run optimize again with this version") from error


def check_schema(path: Path, values: Any, schema: str, command: str) -> None:
    """Insist on the schema that this version reads: ``enginesmith.run/1``, which ``command`` writes.

    Raises:
        UsageError: it is another one; says whether that is older or newer.
    """
    named = values.get("schema") if isinstance(values, Mapping) else None
    if named == schema:
        return
    family, _, given = named.rpartition("/") if isinstance(named, str) else ("", "", "")
    known, _, number = schema.rpartition("/")
    if family != known or not given.isdecimal():
        problem = "it names no schema" if named is None else f"its schema is {_shorten_value(named)}"
        raise UsageError(f"{path} is not of the schema {schema}: {problem}", f"give the folder that {command} wrote")
    older = int(given) < int(number)
    raise UsageError(
        f"{path} is of the {'older' if older else 'newer'} schema {named}, and this version reads {schema}",
        f"run {command} again" if older else "install the enginesmith that wrote it, or a later one",
    )


def _sentence(wrong: ErrorDetails) -> str:
    name = _name_field(wrong["loc"]) or "the document"
    if wrong["type"] == "missing":
        return f"{name} is missing"
    sentence = f"{name}: {wrong['msg'].removeprefix('Value error, ')}"
    return (
        sentence if isinstance(wrong["input"], dict | list) else f"{sentence} (it is {_shorten_value(wrong['input'])})"
    )


def _shorten_value(value: Any) -> str:
    return shorten(json.dumps(value, default=str), _LONGEST_SHOWN)


def _name_field(place: Sequence[str | int], *, indices: bool = True) -> str:
    """Name a field: ``variants[2].latency[0].p50_ms``; without indices it is one name for that of all variants."""
    parts = (f"[{key if indices else ''}]" if isinstance(key, int) else f".{key}" for key in place)
    return "".join(parts).removeprefix(".")


def _left_out(values: Any, model_values: Any, place: tuple[str | int, ...]) -> Iterator[str]:
    if values == model_values:  # most of a large document, and quicker than going through it
        return
    if isinstance(values, dict) and isinstance(model_values, dict):
        for name, value in values.items():
            if name not in model_values:
                yield _name_field((*place, name), indices=False)
            else:
                yield from _left_out(value, model_values[name], (*place, name))
    elif isinstance(values, list) and isinstance(model_values, list):
        for index, (value, other) in enumerate(zip(values, model_values, strict=False)):
            yield from _left_out(value, other, (*place, index))


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that JSON has")
