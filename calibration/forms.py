"""The forms that data comes in: each is one function and one line in FORMS."""

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array, TensorSpec

Split = Literal["train", "calibration", "test"]
Arrays = Mapping[str, Array]

_EMBEDDED: Mapping[str, tuple[str, float]] = {"digits": ("image", 16.0)}  # the input's name, and the largest pixel
_DATA = Path(__file__).parent / "data"
_UNREADABLE = (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error, SafetensorError)


class Form(NamedTuple):
    """A way to write down data: what it is called, whether a reference is of it, and how it is read."""

    title: str
    accepts: Callable[[str], bool]
    read: Callable[[str, Sequence[TensorSpec], Split], tuple[str, Arrays]]


def read(reference: str, inputs: Sequence[TensorSpec], split: Split) -> tuple[str, Arrays]:
    """The name of the data and its arrays, labels among them, in whatever form it is.

    Raises:
        DataError: no form fits, or the file cannot be read.
    """
    for form in FORMS:
        if form.accepts(reference):
            return form.read(reference, inputs, split)
    known = ", ".join(form.title for form in FORMS)
    raise DataError(f"cannot tell what data {reference!r} is", f"give one of: {known}")


def read_embedded(name: str, split: Split) -> Arrays:
    """One split of an embedded set: its input as float32 from 0 to 1, and int64 ``labels``.

    Raises:
        DataError: there is no such set or split.
    """
    if name not in _EMBEDDED or split not in get_args(Split):
        known = ", ".join(f"{each}/{part}" for each in _EMBEDDED for part in get_args(Split))
        raise DataError(f"there is no embedded data set {name}/{split}", f"give one of: {known}")
    key, largest = _EMBEDDED[name]
    with np.load(_DATA / f"{name}.npz", allow_pickle=False) as archive:
        images, labels = archive[f"{split}_images"], archive[f"{split}_labels"]
    return {key: images[:, np.newaxis].astype(np.float32) / np.float32(largest), "labels": labels.astype(np.int64)}


def _embedded(reference: str, inputs: Sequence[TensorSpec], split: Split) -> tuple[str, Arrays]:
    name, _, part = reference.partition("/")
    chosen: Split = part or split  # type: ignore[assignment]  # read_embedded refuses any other word
    return f"{name}/{chosen}", read_embedded(name, chosen)


def _npz(reference: str, inputs: Sequence[TensorSpec], split: Split) -> tuple[str, Arrays]:
    # numpy leaves a file that it opened itself open when the archive is damaged.
    with _opened(reference) as path, path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds one array without a name, as an .npy file does")
        return path.name, {key: archive[key] for key in archive.files}


def _npy(reference: str, inputs: Sequence[TensorSpec], split: Split) -> tuple[str, Arrays]:
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise DataError(
            f"{reference} is one array, and the model takes {len(inputs)} inputs: {names}",
            "give an .npz or .safetensors file with one array for each input",
        )
    with _opened(reference) as path:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("it holds named arrays, as an .npz file does")
        return path.name, {inputs[0].name: array}


def _safetensors(reference: str, inputs: Sequence[TensorSpec], split: Split) -> tuple[str, Arrays]:
    with _opened(reference) as path:
        return path.name, load_file(path)


@contextmanager
def _opened(reference: str) -> Iterator[Path]:
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


def _ends_with(suffix: str) -> Callable[[str], bool]:
    return lambda reference: reference.lower().endswith(suffix)


FORMS: tuple[Form, ...] = (
    Form("an .npz file (one array for each input)", _ends_with(".npz"), _npz),
    Form("an .npy file (for models with one input)", _ends_with(".npy"), _npy),
    Form("a .safetensors file (one tensor for each input)", _ends_with(".safetensors"), _safetensors),
    Form("an embedded set (digits/test)", lambda reference: reference.partition("/")[0] in _EMBEDDED, _embedded),
)
