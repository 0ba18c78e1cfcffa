"""Texts in a .jsonl file: one object a line, made into token ids of one length."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from enginesmith.calibration.options import DataOptions
from enginesmith.calibration.source import Found, Request
from enginesmith.calibration.tokens import Tokens, find_tokenizer, tokens_for
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array

_OTHER_PAIR = ("sentence1", "sentence2")
_MADE = ("input_ids", "attention_mask", "token_type_ids")
_FORM = 'write one JSON object a line, as in {"text": "…", "label": 1}'

Text = tuple[str, ...]
"""One text, or two that belong together."""


class Line(NamedTuple):
    """What stands in a line of the file."""

    number: int
    text: Text
    label: Any


def read_texts(reference: str, request: Request) -> Found:
    """The texts of a file as token ids.

    Raises:
        DataError: a line is not of the form, the model takes something else, or there is no tokenizer.
        MissingCapability: the tokenizers package is not installed.
    """
    path = Path(reference)
    _hold_inputs(request)
    lines = list(read_lines(path, request.options))
    if not lines:
        raise DataError(f"{path.name} is empty", _FORM)
    tokens = tokens_for(path, request.options)
    length, why = _length(request, tokens)
    made, cut = tokens.encode([line.text for line in lines], length)
    rows = {spec.name: made[spec.name].astype(spec.dtype, copy=False) for spec in request.inputs}
    labels, classes = _labels(path, lines)
    notes = [f"texts as {next(iter(rows.values())).shape[1]} tokens each ({why}), by {tokens.name}"]
    notes += [f"{cut} of {len(lines)} texts are longer and were cut off"] if cut else []
    notes += [f"labels are numbered in order: {', '.join(classes)}"] if classes else []
    return Found(path.name, rows, labels, tuple(notes))


def check_texts(reference: str, request: Request) -> None:
    """Look at the first line, and for a tokenizer.

    Raises:
        DataError: the line is not of the form, or there is no tokenizer.
    """
    path = Path(reference)
    if next(read_lines(path, request.options), None) is None:
        raise DataError(f"{path.name} is empty", _FORM)
    find_tokenizer(path, request.options)


def read_lines(path: Path, options: DataOptions) -> Iterator[Line]:
    """The texts and labels of a file, line by line; blank lines are left out.

    Raises:
        DataError: names the line that is not of the form.
    """
    if not path.is_file():
        raise DataError(f"there is no data file {path}", "check the path")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _line(f"{path.name}, line {number}", number, line, options)


def _line(place: str, number: int, line: bytes, options: DataOptions) -> Line:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is no JSON: {error}", _FORM) from error
    if not isinstance(entry, dict):
        raise DataError(f"{place} is a JSON {type(entry).__name__}, expected an object", _FORM)
    text, pair = options.text_field, f"{options.text_field}_pair"
    if text not in entry and options.text_field == "text":
        text, pair = _OTHER_PAIR
    if text not in entry:
        raise DataError(f"{place} has the keys {', '.join(map(repr, entry))}, and no {options.text_field!r}", _FORM)
    texts = (entry[text], *([entry[pair]] if entry.get(pair) is not None else []))
    if not all(isinstance(one, str) for one in texts):
        raise DataError(f"{place}: {text!r} is no text", _FORM)
    return Line(number, texts, entry.get(options.labels or "label"))


def _hold_inputs(request: Request) -> None:
    unfit = [
        spec
        for spec in request.inputs
        if spec.name not in _MADE or len(spec.shape) != 2 or spec.dtype not in ("int32", "int64")
    ]
    if unfit or not any(spec.name == _MADE[0] for spec in request.inputs):
        listed = ", ".join(map(str, unfit or request.inputs))
        raise DataError(
            f"the model takes {listed}, and texts are made into {', '.join(_MADE)}",
            "name the model's inputs so, in int64 or int32 of [batch, sequence], or give arrays for them",
        )


def _length(request: Request, tokens: Tokens) -> tuple[int | None, str]:
    """Tokens in each row, None for the longest; and why so many."""
    wanted = request.options.max_length
    for spec in request.inputs:
        if isinstance(spec.shape[1], int):
            if wanted not in (None, spec.shape[1]):
                raise DataError(f"max_length is {wanted}, and the model takes {spec}", "leave max_length out")
            return spec.shape[1], "the model's length"
    if wanted is not None:
        return wanted, "max_length"
    return None, f"the longest, or the tokenizer's limit of {tokens.limit}" if tokens.limit else "the longest"


def _labels(path: Path, lines: list[Line]) -> tuple[Array | None, list[str]]:
    """Labels by row, and the classes where they are words."""
    values = [line.label for line in lines]
    if all(value is None for value in values):
        return None, []
    kinds = {int: "a number", float: "a number", bool: "a number", str: "a word"}
    first = kinds.get(type(values[0]), "no number and no word")
    for line in lines:
        kind = kinds.get(type(line.label), "not there" if line.label is None else "no number and no word")
        if kind != first or type(line.label) not in kinds:
            raise DataError(
                f"{path.name}, line {line.number}: the label is {kind}, and the first one is {first}",
                "give every line a label of one kind, a number or a word, or none at all",
            )
    if first == "a word":
        classes = sorted(set(values))
        return np.searchsorted(classes, values).astype(np.int64), classes
    whole = not any(isinstance(value, float) for value in values)
    return np.asarray(values, np.int64 if whole else np.float64), []
