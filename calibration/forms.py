"""The forms that data comes in: each is one function and one line in FORMS."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from enginesmith.calibration import mapped
from enginesmith.calibration.checks import check_names
from enginesmith.calibration.feeds import read_feeds
from enginesmith.calibration.images import check_images, read_images
from enginesmith.calibration.source import Found, Request, Split, opened
from enginesmith.calibration.texts import check_texts, read_texts
from enginesmith.calibration.user_code import check_reference, is_reference
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array

_EMBEDDED: Mapping[str, tuple[str, float]] = {"digits": ("image", 16.0)}  # the input's name, and the largest pixel
_DATA = Path(__file__).parent / "data"


class Form(NamedTuple):
    """A way to write down data: what it is called, whether a reference is of it, how it is read and looked at."""

    title: str
    accepts: Callable[[str], bool]
    read: Callable[[str, Request], Found]
    check: Callable[[str, Request], None]
    """Raises where the data cannot be read, as far as headers and first entries show; no code of the user's runs."""


def check_readable(reference: str, request: Request) -> None:
    """Look at the data as far as is cheap: the file is there, of a known form, and its header can be read.

    Where the request has inputs, arrays of these names have to be in it.

    Raises:
        DataError: no form fits, or the data cannot be read.
    """
    _form(reference).check(reference, request)


def read(reference: str, request: Request) -> Found:
    """The data in whatever form it is.

    Raises:
        DataError: no form fits, or the data cannot be read.
        MissingCapability: the form needs a package that is not installed.
    """
    return _form(reference).read(reference, request)


def _form(reference: str) -> Form:
    for form in FORMS:
        if form.accepts(reference):
            return form
    known = ", ".join(form.title for form in FORMS)
    raise DataError(f"cannot tell what data {reference!r} is", f"give one of: {known}")


def read_embedded(name: str, split: Split) -> dict[str, Array]:
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


def is_embedded(reference: str) -> bool:
    """Whether the reference names a set that comes with enginesmith."""
    return reference.partition("/")[0] in _EMBEDDED


def _embedded(reference: str, request: Request) -> Found:
    name, _, part = reference.partition("/")
    chosen: Split = part or request.split  # type: ignore[assignment]  # read_embedded refuses any other word
    arrays = read_embedded(name, chosen)
    labels = arrays.pop("labels")
    return Found(f"{name}/{chosen}", arrays, labels)


def _npz(reference: str, request: Request) -> Found:
    with opened(reference) as path:
        return Found(path.name, mapped.npz(path))


def _check_npz(reference: str, request: Request) -> None:
    with opened(reference) as path:
        headers = mapped.npz_headers(path)
    check_names(path.name, headers, request.inputs, request.options.labels)


def _check_npy(reference: str, _: Request) -> None:
    with opened(reference) as path:
        mapped.npy(path)


def _check_safetensors(reference: str, request: Request) -> None:
    found = _safetensors(reference, request)
    check_names(found.name, found.arrays, request.inputs, request.options.labels)


def _check_embedded(reference: str, request: Request) -> None:
    _embedded(reference, request)


def _check_function(reference: str, _: Request) -> None:
    check_reference(reference, "data")


def _npy(reference: str, request: Request) -> Found:
    if len(request.inputs) != 1:
        names = ", ".join(spec.name for spec in request.inputs)
        raise DataError(
            f"{reference} is one array, and the model takes {len(request.inputs)} inputs: {names}",
            "give an .npz or .safetensors file with one array for each input",
        )
    with opened(reference) as path:
        return Found(path.name, {request.inputs[0].name: mapped.npy(path)})


def _safetensors(reference: str, request: Request) -> Found:
    with opened(reference) as path:
        return Found(path.name, mapped.safetensors(path))


def _ends_with(suffix: str) -> Callable[[str], bool]:
    return lambda reference: reference.lower().endswith(suffix)


FORMS: tuple[Form, ...] = (
    Form("an .npz file (one array for each input)", _ends_with(".npz"), _npz, _check_npz),
    Form("an .npy file (for models with one input)", _ends_with(".npy"), _npy, _check_npy),
    Form(
        "a .safetensors file (one tensor for each input)", _ends_with(".safetensors"), _safetensors, _check_safetensors
    ),
    Form("a .jsonl file of texts, with a tokenizer", _ends_with(".jsonl"), read_texts, check_texts),
    Form("an embedded set (digits/test)", is_embedded, _embedded, _check_embedded),
    Form(
        "a folder of images, sub-folders being classes",
        lambda reference: Path(reference).is_dir(),
        read_images,
        check_images,
    ),
    Form("module:function or file.py:function that yields feeds", is_reference, read_feeds, _check_function),
)
