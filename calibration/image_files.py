"""List image files, and read their sizes and pixels: upright, as their EXIF orientation says."""

import functools
import importlib.util
import struct
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enginesmith.calibration.preprocessing import Size
from enginesmith.pipeline.errors import DataError, MissingCapability, install_command

CONFIGURATION = "preprocessor_config.json"
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")
"""Formats of pictures, as Pillow calls them; of other files that it reads (PDF, HDF5), no samples are made."""
GIVE_IMAGES = f"give files of {', '.join(FORMATS)}, with the usual suffixes"
_NO_RANGE = ".pfm"
"""Floating-point numbers, whose range nobody knows."""
_DAMAGED = (OSError, EOFError, SyntaxError, ValueError, IndexError, struct.error)  # Pillow raises all of these
_HIDDEN = (".", "__")
"""Beginnings of names that systems and tools give to files of their own: .DS_Store, ._a.jpg, .thumbs, __MACOSX."""
_SHOWN_SUFFIXES = 3

_ORIENTATION = 0x0112
_HOLD_ORIENTATION = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")
_UPRIGHT = 1
_ORIENTATIONS = range(1, 9)
_SIDEWAYS = (5, 6, 7, 8)
"""Orientations that swap height and width."""


# Listing: hidden files and folders are left out, and what is below these.


@functools.cache
def list_suffixes() -> frozenset[str]:
    """List the suffixes of images that the installed Pillow reads.

    Raises:
        MissingCapability: it is not installed.
    """
    _require_pillow()
    from PIL import Image

    by_suffix = Image.registered_extensions()
    return frozenset(suffix for suffix, form in by_suffix.items() if form in FORMATS) - {_NO_RANGE}


def list_images(folder: Path) -> list[Path]:
    """List the images in a folder, in order; none below it."""
    return [path for path in _list_files(folder) if path.suffix.lower() in list_suffixes()]


def list_folders(folder: Path) -> list[Path]:
    """List the folders in a folder, in order."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(_HIDDEN))


def list_tree(folder: Path) -> list[Path]:
    """List a folder and all below it, in order; none below a link, which may lead back up."""
    below = (list_tree(each) if not each.is_symlink() else [each] for each in list_folders(folder))
    return [folder, *(each for tree in below for each in tree)]


def list_other_files(folders: Iterable[Path]) -> list[Path]:
    """List the files in these folders that are no images by their suffix."""
    files = (path for folder in folders for path in _list_files(folder) if path.name != CONFIGURATION)
    return [path for path in files if path.suffix.lower() not in list_suffixes()]


def describe_other_files(folder: Path, others: Sequence[Path]) -> list[str]:
    """Note the files that were left out, with an example; nothing if there are none."""
    if not others:
        return []
    counts = Counter(path.suffix.lower() for path in others).most_common()
    shown = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in counts[:_SHOWN_SUFFIXES])
    more = ", …" if len(counts) > _SHOWN_SUFFIXES else ""
    example = next(path for path in others if path.suffix.lower() == counts[0][0])
    return [
        f"files left out, since Pillow reads no images of their suffixes: {len(others)} ({shown}{more}), such as "
        f"{example.relative_to(folder)}"
    ]


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith(_HIDDEN[0]) and path.is_file())


# Reading: pixels are turned as viewers turn them, unless what belongs to them is of the pixels as they are stored.


@dataclass(frozen=True)
class ImageFile:
    """An image, its size by the file's header, and how its pixels are turned when they are read."""

    path: Path
    stored_size: Size
    """Height and width of the pixels in the file, in that order."""
    orientation: int = _UPRIGHT
    """EXIF's number of how the pixels have to be turned or mirrored, 1 to 8."""

    @property
    def size(self) -> Size:
        """Height and width in pixels of the image as it is read."""
        return self.stored_size[::-1] if self.orientation in _SIDEWAYS else self.stored_size

    @property
    def is_turned(self) -> bool:
        """True where the image is read in another orientation than it is stored."""
        return self.orientation != _UPRIGHT

    @property
    def as_stored(self) -> "ImageFile":
        """Return the same file, to be read without turning it."""
        return replace(self, orientation=_UPRIGHT)

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Open it as an upright Pillow image, and translate the errors of reading it.

        Raises:
            DataError: it is damaged, or its pixels are of another kind than is needed.
            MissingCapability: Pillow is not installed.
        """
        with _open(self.path) as image:
            yield _turn(image) if self.is_turned else image


def read_header(path: Path) -> ImageFile:
    """Read size and orientation from a file's header.

    Raises:
        DataError: it is no image.
        MissingCapability: Pillow is not installed.
    """
    with _open(path) as image:
        return ImageFile(path, (image.size[1], image.size[0]), _read_orientation(image))


def describe_turned(images: Sequence[ImageFile]) -> list[str]:
    """Note the images that are turned, with an example; nothing if there are none."""
    turned = [image for image in images if image.is_turned]
    return [f"images turned by their EXIF orientation: {_count(turned, images)}"] if turned else []


def describe_orientations(
    headers: Sequence[ImageFile], images: Sequence[ImageFile], unsure: Sequence[ImageFile], labels: str
) -> list[str]:
    """Note which images of those in ``headers`` are turned, and which are not since their labels are of stored pixels.

    ``labels`` are masks or boxes; ``unsure`` are the images that are turned though these may be of the stored pixels.
    """
    stored = [image for image, header in zip(images, headers, strict=True) if header.is_turned and not image.is_turned]
    notes = describe_turned(images)
    if stored:
        notes.append(
            f"images not turned by their EXIF orientation, as their {labels} are of the size that is stored: "
            f"{_count(stored, images)}"
        )
    if unsure:
        notes.append(
            f"images that were turned, and no size tells whether their {labels} are of the turned or of the stored "
            f"pixels: {_count(unsure, images)}; if they are of the stored ones, remove the orientation from the files"
        )
    return notes


def _count(some: Sequence[ImageFile], images: Sequence[ImageFile]) -> str:
    return f"{len(some)} of {len(images)}, such as {some[0].path.name}"


def _read_orientation(image: Any) -> int:
    """Read the orientation that is left to be applied; a damaged one is none, as the pixels may be whole."""
    if image.format == "TIFF" or not any(key in image.info for key in _HOLD_ORIENTATION):
        return _UPRIGHT  # Pillow turns TIFF itself, and would decode a whole PNG to look for what its header lacks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged tags
        try:
            orientation = image.getexif().get(_ORIENTATION, _UPRIGHT)
        except _DAMAGED:
            return _UPRIGHT
    return orientation if orientation in _ORIENTATIONS else _UPRIGHT


def _turn(image: Any) -> Any:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    upright.format = image.format  # on which depends what its numbers mean
    return upright


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    _require_pillow()
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except (*_DAMAGED, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image {path}: {error}", "fix it, or take it out of the folder") from error


def _require_pillow() -> None:
    if importlib.util.find_spec("PIL") is None:
        raise MissingCapability("images need the package pillow, which is not installed", install_command("pillow"))
