"""Folders of images, decoded when they are needed; sub-folders are classes."""

import hashlib
import importlib.util
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from enginesmith.calibration.image_settings import CONFIGURATION, preprocessing_for
from enginesmith.calibration.preprocessing import Preprocessing
from enginesmith.calibration.rows import LazyRows
from enginesmith.calibration.source import Found, Request
from enginesmith.pipeline.errors import DataError, MissingCapability, install_command
from enginesmith.pipeline.tensors import Array

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SHOWN_CLASSES = 3
_DAMAGED = (OSError, EOFError, SyntaxError, ValueError, IndexError, struct.error)  # Pillow raises all of these


class Listing(NamedTuple):
    """The images of a folder, sorted by class and name."""

    files: tuple[Path, ...]
    labels: Array | None
    classes: Mapping[int, str]
    """Names by label."""
    folders: tuple[Path, ...]


class ImageRows(LazyRows):
    """Images as one array; only those that are asked for are decoded."""

    finite = True  # pixels are, and so is what the preprocessing makes of them

    def __init__(self, files: Sequence[Path], steps: Preprocessing) -> None:
        self._files = np.asarray(files, object)
        self._steps = steps
        super().__init__((len(files), *steps.row), steps.dtype)

    def __getitem__(self, key: Any) -> Array:
        chosen = self._files[key]
        if isinstance(chosen, Path):
            return _decoded(chosen, self._steps)
        made = np.empty((len(chosen), *self.shape[1:]), self.dtype)
        for index, path in enumerate(chosen):
            made[index] = _decoded(path, self._steps)
        return made

    def origin(self, rows: Array | slice) -> Iterator[bytes]:
        """The steps and the files' bytes: what they decode to follows from that."""
        yield self._steps.model_dump_json(exclude={"origin"}).encode()
        for path in self._files[rows]:
            with path.open("rb") as file:
                yield hashlib.file_digest(file, "sha256").digest()


def read_images(reference: str, request: Request) -> Found:
    """The images of a folder as the model's one input.

    Raises:
        DataError: there are none, one is damaged, or the model takes something else.
        MissingCapability: Pillow is not installed.
    """
    folder = Path(reference)
    if len(request.inputs) != 1:
        names = ", ".join(spec.name for spec in request.inputs)
        raise DataError(f"{reference} holds images, and the model takes {names}", "give one array for each input")
    found = listing(folder)
    for path in found.files:
        size_of(path)  # so that what is no image is told now, and every file is known to have been read
    spec = request.inputs[0]
    steps = preprocessing_for(spec, folder, request.options)
    notes = [f"images as {steps}"]
    if found.labels is not None:
        shown = ", ".join(f"{name} = {label}" for label, name in list(found.classes.items())[:_SHOWN_CLASSES])
        more = ", …" if len(found.classes) > _SHOWN_CLASSES else ""
        notes.append(f"labels from {len(found.classes)} sub-folders: {shown}{more}")
    beside = () if (folder / CONFIGURATION).is_file() else (folder.absolute().parent,)  # it may appear there
    return Found(
        folder.resolve().name,
        {spec.name: ImageRows(found.files, steps)},
        found.labels,
        tuple(notes),
        tuple(each.absolute() for each in (*found.folders, *beside)),
    )


def check_images(reference: str, _: Request) -> None:
    """List the images of a folder; none is opened.

    Raises:
        DataError: there are none, or some beside sub-folders of some.
    """
    listing(Path(reference))


def listing(folder: Path) -> Listing:
    """The images in a folder, or in its sub-folders: then those are classes, numbered in order or by their own number.

    Raises:
        DataError: there are none, or some in both places.
    """
    flat = _images_in(folder)
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    by_class = {path.name: _images_below(path) for path in subfolders}
    nested = [image for images in by_class.values() for image in images]
    folders = (folder, *subfolders, *(below for each in subfolders for below in _folders_below(each)))
    if not flat and not nested:
        raise DataError(f"the folder {folder} holds no images", f"give one with files of {', '.join(SUFFIXES)}")
    if flat and nested:
        raise DataError(
            f"the folder {folder} holds images itself and in sub-folders ({nested[0].relative_to(folder)})",
            "give one folder for each class, or all images in one folder without labels",
        )
    named = _numbered(tuple(by_class))
    empty = [name for name, images in by_class.items() if not images]
    if empty and not flat and not _are_numbers(by_class):
        raise DataError(
            f"the sub-folder {empty[0]} of {folder} holds no images, and classes are numbered by their folders",
            "take it away, or put the images of that class into it",
        )
    if flat or len(by_class) == 1:
        return Listing(tuple(flat or nested), None, {}, folders)
    labels = [label for name, label in named for _ in by_class[name]]
    files = tuple(image for name, _ in named for image in by_class[name])
    return Listing(files, np.asarray(labels, np.int64), {label: name for name, label in named}, folders)


def size_of(path: Path) -> tuple[int, int]:
    """Height and width, from the file's header.

    Raises:
        DataError: it is no image.
        MissingCapability: Pillow is not installed.
    """
    with _opened(path) as image:
        return image.size[1], image.size[0]


def _decoded(path: Path, steps: Preprocessing) -> Array:
    with _opened(path) as image:
        return steps.apply(image)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if importlib.util.find_spec("PIL") is None:
        raise MissingCapability("images need the package pillow, which is not installed", install_command("pillow"))
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except (*_DAMAGED, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image {path}: {error}", "mend it, or take it out of the folder") from error


def _numbered(classes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Classes with their labels, in order."""
    if _are_numbers(classes):
        return sorted(((name, int(name)) for name in classes), key=lambda item: (item[1], item[0]))
    return [(name, label) for label, name in enumerate(sorted(classes))]


def _are_numbers(names: Iterable[str]) -> bool:
    return all(name.isascii() and name.isdigit() for name in names)


def _images_in(folder: Path) -> list[Path]:
    found = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def _images_below(folder: Path) -> list[Path]:
    return [image for place in (folder, *_folders_below(folder)) for image in _images_in(place)]


def _folders_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_dir() and not path.name.startswith("."))
