"""Define the request and the answer of every form of data, and open files of arrays."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from enginesmith.calibration.lazy_arrays import Rows
from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import TensorSpec, find_misfit

Split = Literal["train", "calibration", "test"]
Arrays = Mapping[str, Rows]

_UNREADABLE = (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error, SafetensorError)


@dataclass(frozen=True)
class Request:
    """The inputs that data is for, and how to read it."""

    inputs: Sequence[TensorSpec]
    split: Split = "calibration"
    options: DataOptions = AS_FOUND


@dataclass(frozen=True)
class RawData:
    """Data as it was read, before it is checked with the model's inputs."""

    name: str
    arrays: Arrays
    labels: Rows | None = None
    """Labels without a name of their own; others are among the arrays."""
    notes: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    """Folders that were read as a whole: a file that is added there is data."""
    class_names: Mapping[int, str] = field(default_factory=dict)
    """Names of the labels, where classes were numbered in the order of their names."""
    label_keys: Sequence[str] = ()
    """Keys that lines have, where one of them is named as the label and none of them has it."""


def find_moved(shapes: Mapping[str, Sequence[int]], inputs: Sequence[TensorSpec]) -> dict[str, list[int]]:
    """Find arrays that fit a model which has its batch in another dimension, instead of having samples first.

    ``inputs`` have theirs first. Returns the shapes that the arrays should have.
    """
    right = dict[str, list[int]]()
    for spec in inputs:
        shape = shapes.get(spec.name, ())
        if len(shape) != len(spec.shape) or find_misfit(spec.shape[1:], shape[1:], {}) is None:
            continue
        moved = [[size, *shape[:axis], *shape[axis + 1 :]] for axis, size in enumerate(shape)]
        if fitting := [each for each in moved if find_misfit(spec.shape[1:], each[1:], {}) is None]:
            right[spec.name] = fitting[0]
    return right


def describe_moved(moved: Mapping[str, Sequence[int]]) -> str:
    """Say how the arrays of :func:`find_moved` are to be given."""
    return "samples come first, wherever the model has its batch: give " + ", ".join(
        f"{name!r} as {list(shape)}" for name, shape in moved.items()
    )


@contextmanager
def open_arrays(reference: str) -> Iterator[Path]:
    """Open a file of arrays, and translate the errors of reading it.

    Raises:
        DataError: the file is not there or cannot be read.
    """
    path = Path(reference)
    if not path.is_file():
        raise DataError(f"there is no data file {reference}", "check the path")
    try:
        yield path
    except _UNREADABLE as error:
        cause = str(error).partition(". ")[0] or type(error).__name__  # numpy goes on to advise unpickling
        raise DataError(
            f"cannot read {reference}: {cause}",
            "save plain numeric arrays with numpy.save, numpy.savez or safetensors; pickled objects are never loaded",
        ) from error
