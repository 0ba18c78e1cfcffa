"""Read a folder of images and one of masks: maps of classes, of the same names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.calibration.image_files import (
    GIVE_IMAGES,
    ImageFile,
    describe_orientations,
    describe_other_files,
    list_images,
    list_other_files,
    list_tree,
    read_header,
)
from enginesmith.calibration.images import ImageRows, only_input, preprocessing_for
from enginesmith.calibration.preprocessing import MASK_MODES, Preprocessing
from enginesmith.calibration.sources import RawData, Request
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array

_IMAGES, _MASKS = "images", "masks"
_UNLABELED = 255
"""Number of pixels that the mask says nothing of, as around an image that is smaller than the crop."""
BINARY_MASKS = f"pixels are 0 and {_UNLABELED} only, so {_UNLABELED} is class 1"
_LOSSY = ("JPEG", "MPO")
_MANY, _RARE = 16, 0.01
"""Number of classes from which on, and share of pixels up to which, JPEG made those that are rare."""
_ONE_NUMBER = "save the class of each pixel as its only number: PNG in gray, or with a palette"


def has_masks(reference: str) -> bool:
    """Tell whether a folder has one of images, and one of masks."""
    return all((Path(reference) / name).is_dir() for name in (_IMAGES, _MASKS))


def are_binary_masks(labels: Array) -> bool:
    """Tell whether labels are masks, [samples, height, width], of black and white pixels: 0 and 255 only."""
    if labels.ndim != 3 or labels.dtype.kind not in "iu" or not labels.size or labels.max() != _UNLABELED:
        return False
    return bool(np.isin(labels, (0, _UNLABELED)).all() and (labels == 0).any())


def pair_masks(folder: Path) -> list[tuple[Path, Path]]:
    """List the images, each with its mask: of the same name in the same sub-folder, in the order of their names.

    Raises:
        DataError: there are none, several have one name, or one has no other half.
    """
    images, masks = (_list_by_name(folder / name) for name in (_IMAGES, _MASKS))
    if not images:
        raise DataError(f"the folder {folder / _IMAGES} holds no images", GIVE_IMAGES)
    if lacking := sorted(images.keys() ^ masks.keys()):
        where = _MASKS if lacking[0] in images else _IMAGES
        raise DataError(
            f"{len(lacking)} of the images and masks in {folder} have no other half, the first {lacking[0]!r}",
            f"put a file of this name into {where}/, or take the other one away",
        )
    return [(images[name], masks[name]) for name in sorted(images)]


def read_masks(reference: str, request: Request) -> RawData:
    """Read images as the model's one input, and their masks as labels.

    Raises:
        DataError: they are no pairs, one is damaged or no mask, or the model takes something else.
        MissingCapability: Pillow is not installed.
    """
    spec, folder = only_input(reference, request), Path(reference)
    headers = [(read_header(image), read_header(mask)) for image, mask in pair_masks(folder)]
    pairs = [_turn_alike(image, mask) for image, mask in headers]
    steps = preprocessing_for(spec, folder, request.options)
    labels, notes = _read_maps(folder, [mask for _, mask in pairs], steps)
    folders = [each for name in (_IMAGES, _MASKS) for each in list_tree(folder / name)]
    read = tuple(each.absolute() for each in folders)
    images = [image for image, _ in pairs]
    unsure = [
        image for image, mask in pairs if image.is_turned and not mask.is_turned and image.size == image.as_stored.size
    ]
    notes = [
        f"images as {steps}",
        *describe_orientations([image for image, _ in headers], images, unsure, "masks"),
        *notes,
        *describe_other_files(folder, list_other_files(folders)),
    ]
    return RawData(folder.resolve().name, {spec.name: ImageRows(images, steps)}, labels, tuple(notes), read)


def _list_by_name(folder: Path) -> dict[str, Path]:
    """List the images in a folder and below it by their names: with their sub-folder, without their suffix."""
    by_name: dict[str, Path] = {}
    for path in (image for each in list_tree(folder) for image in list_images(each)):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name in by_name:
            raise DataError(
                f"{by_name[name].name} and {path.name} in {path.parent} have one name, by which images and masks are "
                "paired",
                "take one of them away, or rename it and its other half",
            )
        by_name[name] = path
    return by_name


def _turn_alike(image: ImageFile, mask: ImageFile) -> tuple[ImageFile, ImageFile]:
    """Return both upright, as their orientations say; as they are stored, where only these sizes agree."""
    for pair in ((image, mask), (image.as_stored, mask.as_stored)):
        if pair[0].size == pair[1].size:
            return pair
    sizes = ["{}×{}".format(*each.size) for each in (image, mask)]
    raise DataError(
        f"{image.path.name} has {sizes[0]} pixels, and its mask {sizes[1]}", "give both the same height and width"
    )


def _read_maps(folder: Path, masks: Sequence[ImageFile], steps: Preprocessing) -> tuple[Array, list[str]]:
    """Read the masks, [samples, height, width], and describe their classes."""
    maps, lossy = [], 0
    for mask in masks:
        with mask.open() as image:
            _check_channels(mask.path, image)
            lossy += image.format in _LOSSY
            maps.append(steps.apply_to_mask(image, _UNLABELED))
    labels = np.stack(maps)
    binary = set(np.unique(labels)) == {0, _UNLABELED}
    if binary:  # what is outside of an image has that number, too
        for row, mask in zip(labels, masks, strict=True):
            row[(row == _UNLABELED) & steps.covers(mask.size)] = 1
    classes = [int(number) for number in np.unique(labels) if number != _UNLABELED]
    if not classes:
        message = f"the masks in {folder / _MASKS} label nothing: each pixel is {_UNLABELED}, or cut off"
        raise DataError(message, "number the classes from 0")
    summary = f"labels from masks: {len(classes)} classes from {min(classes)} to {max(classes)}"
    notes = [summary + (f"; {BINARY_MASKS}" if 1 in classes and binary else "")]
    if lossy and len(classes) > 2:
        notes.append(_describe_lossy(folder, labels, lossy, len(masks)))
    return labels, notes


def _describe_lossy(folder: Path, labels: Array, lossy: int, masks: int) -> str:
    """Note that so many of the masks are JPEG files.

    Raises:
        DataError: most of many classes are rare, as those that JPEG makes are.
    """
    counts = np.unique(labels[labels != _UNLABELED], return_counts=True)[1]
    rare = int((counts < _RARE * counts.sum()).sum())
    problem = f"{lossy} of {masks} masks are JPEG files, which change the numbers of pixels at edges"
    if len(counts) > _MANY and rare > len(counts) / 2:
        raise DataError(
            f"in {folder / _MASKS}, {problem}: of {len(counts)} classes, {rare} have less than {_RARE:.0%} of the "
            "pixels each",
            "save masks as PNG, from what they were drawn in; or, if they are black and white, make them so again: "
            "image.point(lambda number: 255 * (number > 127)) of Pillow",
        )
    return f"{problem}: some of the {len(counts)} classes may come from that. Save masks as PNG"


def _check_channels(path: Path, image: Any) -> None:
    """Check that an image has one whole number for each pixel.

    Raises:
        DataError: it has several channels, or other numbers.
    """
    if image.mode in MASK_MODES:
        return
    bands = image.getbands()
    if len(bands) == 1:
        raise DataError(f"the mask {path} has floating-point numbers ({image.mode}), expected classes", _ONE_NUMBER)
    colors = [np.asarray(image.getchannel(band)) for band in bands if band != "A"]
    alike = all(np.array_equal(color, colors[0]) for color in colors)
    raise DataError(
        f"the mask {path} has {len(bands)} channels ({image.mode}), expected one: the class of each pixel",
        _ONE_NUMBER
        + (
            f'. The channel {bands[0]} alone has the same numbers: Image.open(path).getchannel("{bands[0]}") of Pillow'
            if alike
            else ". Where each color is a class, replace it by the number of the class"
        ),
    )
