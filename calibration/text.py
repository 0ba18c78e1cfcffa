"""Read texts as arrays of token ids, by the tokenizer that is beside them."""

import importlib.util
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from enginesmith.calibration.options import DataOptions
from enginesmith.calibration.sources import RawData, Request
from enginesmith.pipeline.errors import DataError, MissingCapability, install_command
from enginesmith.pipeline.tensors import Array

_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_OTHERS = ("vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
"""Vocabularies that transformers makes a tokenizer of."""
_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
_NO_LIMIT = 1_000_000
"""Hugging Face writes 10³⁰ for no limit."""
_AT_ONCE = 1024
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
"""A label that is a number, written as text."""


@dataclass(frozen=True)
class Tokens:
    """A tokenizer and how it pads."""

    tokenizer: Any
    name: str
    limit: int | None
    """The most tokens that the model it belongs to can take, where that is known."""
    pad: int
    left: bool

    def encode(self, texts: Sequence[tuple[str, ...]], length: int | None) -> tuple[dict[str, Array], int]:
        """Return ``input_ids``, ``attention_mask`` and ``token_type_ids`` of [texts, length], and the number cut off.

        Raises:
            DataError: the length has no room for a token of the text.
        """
        most = length or self.limit
        special = self.tokenizer.num_special_tokens_to_add(any(len(text) > 1 for text in texts))
        if most is not None and most <= special:
            raise DataError(f"{most} tokens a row have no room beside {special} special ones", "give a longer length")
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if most is not None:
            self.tokenizer.enable_truncation(most)
        token_rows: list[tuple[Array, Array]] = []
        cut = 0
        for start in range(0, len(texts), _AT_ONCE):
            batch = [text if len(text) > 1 else text[0] for text in texts[start : start + _AT_ONCE]]
            for encoding in self.tokenizer.encode_batch(batch):
                cut += bool(encoding.overflowing)
                token_rows.append((np.asarray(encoding.ids, np.int32), np.asarray(encoding.type_ids, np.int32)))
        return self._pad(token_rows, length or max(1, *(len(ids) for ids, _ in token_rows))), cut

    def _pad(self, token_rows: Sequence[tuple[Array, Array]], length: int) -> dict[str, Array]:
        rows = (len(token_rows), length)
        ids, mask, types = np.full(rows, self.pad, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        for row, (own, own_types) in enumerate(token_rows):
            place = slice(length - len(own), None) if self.left else slice(0, len(own))
            ids[row, place], mask[row, place], types[row, place] = own, 1, own_types
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def load_tokens(texts: Path, options: DataOptions) -> Tokens:
    """Load the tokenizer that is given, else the one beside the texts.

    Raises:
        DataError: there is none, or it cannot be read.
        MissingCapability: the tokenizers package is not installed.
    """
    place = find_tokenizer(texts, options)
    if importlib.util.find_spec("tokenizers") is None:
        raise MissingCapability(
            "texts need the package tokenizers, which is not installed", install_command("transformers")
        )
    from tokenizers import Tokenizer

    if place.is_dir():
        return _make_tokens(_load_by_transformers(place), place, {}, options)
    try:
        text = place.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing more special
        raise DataError(f"cannot read the tokenizer {place}: {error}", "save it again with save_pretrained") from error
    return _make_tokens(tokenizer, place.parent, json.loads(text), options)


def find_tokenizer(texts: Path, options: DataOptions) -> Path:
    """Find a tokenizer.json, or a folder that transformers makes a tokenizer of.

    Raises:
        DataError: there is none.
    """
    given = options.tokenizer
    places = [Path(given)] if given else [texts.parent, texts.parent / "tokenizer"]
    for place in places:
        if place.is_file():
            return place
        if (place / _FILE).is_file():
            return place / _FILE
        if any((place / name).is_file() for name in _OTHERS):
            return place
    raise DataError(
        f"there is no tokenizer {given}" if given else f"there is no tokenizer beside {texts}",
        f"give the folder or the {_FILE} that tokenizer.save_pretrained of transformers writes",
    )


def _load_by_transformers(folder: Path) -> Any:
    """Make the tokenizer of a folder that has a vocabulary and no tokenizer.json."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingCapability(
            f"{folder} has no {_FILE}, and transformers, which could make one, is not installed",
            install_command("transformers"),
        )
    from transformers import AutoTokenizer

    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".model"):
            path.open("rb").close()  # native code reads them, which the tracking of files does not see
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return tokenizer.backend_tokenizer
    except Exception as error:  # whatever the tokenizer's own class raises
        raise DataError(
            f"transformers makes no tokenizer of {folder}: {type(error).__name__}: {error}",
            f"save it as {_FILE}: AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(folder)",
        ) from error


def _make_tokens(tokenizer: Any, folder: Path, content: Mapping[str, Any], options: DataOptions) -> Tokens:
    settings = _read_settings(folder)
    padding, truncation = content.get("padding") or {}, content.get("truncation") or {}
    limit = settings.get("model_max_length") or truncation.get("max_length")
    side = options.padding or settings.get("padding_side") or str(padding.get("direction", "right")).lower()
    word = settings.get("pad_token")
    words = [word.get("content") if isinstance(word, dict) else word, *_PADS]
    known = (tokenizer.token_to_id(word) for word in words if word)
    pad = next((number for number in known if number is not None), padding.get("pad_id", 0))
    limit = limit if limit and limit < _NO_LIMIT else None
    return Tokens(tokenizer, folder.resolve().name, limit, pad, side == "left")


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS
    try:
        settings: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise DataError(f"cannot read {path}: {error}", "save the tokenizer again with save_pretrained") from error
    return settings


# Texts in a .jsonl file: one object a line, made into token ids of one length.

_OTHER_PAIR = ("sentence1", "sentence2")
_MADE = ("input_ids", "attention_mask", "token_type_ids")
_FORM = 'write one JSON object a line, as in {"text": "…", "label": 1}'

Text = tuple[str, ...]
"""One text, or two that belong together."""


class Line(NamedTuple):
    """A line of the file."""

    number: int
    text: Text
    label: Any


def read_texts(reference: str, request: Request) -> RawData:
    """Read the texts of a file as token ids.

    Raises:
        DataError: a line is not of the form, the model takes something else, or there is no tokenizer.
        MissingCapability: the tokenizers package is not installed.
    """
    path = Path(reference)
    _check_inputs(request)
    lines = list(read_lines(path, request.options))
    if not lines:
        raise DataError(f"{path.name} is empty", _FORM)
    tokens = load_tokens(path, request.options)
    length, why = _choose_length(request, tokens)
    arrays, cut = tokens.encode([line.text for line in lines], length)
    rows = {spec.name: arrays[spec.name].astype(spec.dtype, copy=False) for spec in request.inputs}
    labels, words = _number_labels(path, lines)
    notes = [f"texts as {next(iter(rows.values())).shape[1]} tokens each ({why}), by {tokens.name}"]
    notes += [f"{cut} of {len(lines)} texts are longer and were cut off"] if cut else []
    keys = _list_keys(path) if labels is None and request.options.labels else []
    names = dict(enumerate(words))
    return RawData(path.name, rows, labels, tuple(notes), class_names=names, label_keys=keys)


def check_texts(reference: str, request: Request) -> None:
    """Check the first line, and look for a tokenizer.

    Raises:
        DataError: the line is not of the form, or there is no tokenizer.
    """
    path = Path(reference)
    if len(request.options.label_keys) > 1:
        raise DataError(f"{path.name} has one label in each line, and --labels names several keys", "name one of them")
    if next(read_lines(path, request.options), None) is None:
        raise DataError(f"{path.name} is empty", _FORM)
    find_tokenizer(path, request.options)


def read_lines(path: Path, options: DataOptions) -> Iterator[Line]:
    """Read the texts and labels of a file, line by line; blank lines are left out.

    Raises:
        DataError: names the line that is not of the form.
    """
    if not path.is_file():
        raise DataError(f"there is no data file {path}", "check the path")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse_line(f"{path.name}, line {number}", number, line, options)


def _list_keys(path: Path) -> list[str]:
    """List the keys of all lines, in the order in which they occur first."""
    with path.open("rb") as file:
        return list(dict.fromkeys(key for line in file if line.strip() for key in json.loads(line)))


def _parse_line(place: str, number: int, line: bytes, options: DataOptions) -> Line:
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
    if not all(isinstance(value, str) for value in texts):
        raise DataError(f"{place}: {text!r} is no text", _FORM)
    return Line(number, texts, entry.get(options.labels or "label"))


def _check_inputs(request: Request) -> None:
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


def _choose_length(request: Request, tokens: Tokens) -> tuple[int | None, str]:
    """Return the number of tokens in each row, None for the longest, and why so many."""
    wanted = request.options.max_length
    for spec in request.inputs:
        if isinstance(spec.shape[1], int):
            if wanted not in (None, spec.shape[1]):
                raise DataError(f"max_length is {wanted}, and the model takes {spec}", "leave max_length out")
            return spec.shape[1], "the model's length"
    if wanted is not None:
        return wanted, "max_length"
    return None, f"the longest, or the tokenizer's limit of {tokens.limit}" if tokens.limit else "the longest"


def _number_labels(path: Path, lines: list[Line]) -> tuple[Array | None, list[str]]:
    """Return labels by row, and the words that they are the numbers of; those are none where labels are numbers."""
    values = [line.label for line in lines]
    if all(value is None for value in values):
        return None, []
    kinds = {int: "a number", float: "a number", bool: "a number", str: "a word"}
    first = kinds.get(type(values[0]), "not there")
    for line in lines:
        if isinstance(line.label, list | dict):
            shown = textwrap.shorten(json.dumps(line.label), 40, placeholder="…")
            raise DataError(
                f"{path.name}, line {line.number}: the label is {shown}, expected a number or a word",
                "give each text the number or the name of one class; for several labels of a text (tags of its words, "
                "or classes of which each is there or not), give an .npz of input_ids and the other inputs, with "
                "labels as an array",
            )
        kind = kinds.get(type(line.label), "not there")
        if kind != first or type(line.label) not in kinds:
            raise DataError(
                f"{path.name}, line {line.number}: the label is {kind}, and the first one is {first}",
                "give every line a label of one kind, a number or a word, or none at all",
            )
    if first == "a word":
        if all(_NUMBER.fullmatch(value) for value in values):
            whole = all(value.strip().lstrip("+-").isdecimal() for value in values)
            return np.asarray([*map(int if whole else float, values)], np.int64 if whole else np.float64), []
        words = sorted(set(values))
        return np.searchsorted(words, values).astype(np.int64), words
    whole = not any(isinstance(value, float) for value in values)
    return np.asarray(values, np.int64 if whole else np.float64), []
