"""Read images with boxes, as COCO writes them: one JSON file of images, categories and annotations.

https://cocodataset.org/#format-data: boxes are left, top, width and height in pixels of the image. They become corners
in pixels of the model's input, by the same steps as the images.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.calibration.image_files import ImageFile, describe_orientations, read_header
from enginesmith.calibration.images import ImageRows, only_input, preprocessing_for
from enginesmith.calibration.preprocessing import Preprocessing, Size
from enginesmith.calibration.sources import RawData, Request
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array

_KEYS = ("images", "annotations", "categories")
_FORMAT = "give a COCO file of boxes (images, annotations, categories), or another form of data"
_NO_BOX, _FIRST_CROWD = -1.0, -2


def read_coco(reference: str, request: Request) -> RawData:
    """Read images and boxes: labels are float32[images, boxes, 5], class and corners; class −1 where there is no box.

    Classes are numbered from 0 in the order of the categories' ids; a crowd of class n has the number −2 − n. Boxes
    without an area are left out, and what a crop cuts off; where none does, boxes may reach past the edge of an image,
    as those that pycocotools judges.

    Raises:
        DataError: it is no such file, or an image is missing, damaged or of another size than the file says.
        MissingCapability: Pillow is not installed.
    """
    spec, path = only_input(reference, request), Path(reference)
    document = read_file(path)
    headers = {image["id"]: read_header(find_image(path, str(image["file_name"]))) for image in document["images"]}
    if len(headers) < len(document["images"]):
        raise DataError(f"{reference} gives an id to several images", _FORMAT)
    steps = preprocessing_for(spec, path.parent, request.options)
    numbers = {identity: number for number, identity in enumerate(_sorted_ids(path, document["categories"]))}
    stated = {image["id"]: _read_size(image) for image in document["images"]}
    files = {identity: _fit_size(reference, stated[identity], header) for identity, header in headers.items()}
    boxes: dict[Any, list[Array]] = {identity: [] for identity in files}
    flat = cut = crowds = outside = 0
    for entry in document["annotations"]:
        if not entry.get("bbox"):
            continue
        if entry.get("image_id") not in files or entry.get("category_id") not in numbers:
            raise DataError(
                f"{reference}: annotation {entry.get('id')} names an image or category that is not there", _FORMAT
            )
        box = _check_box(reference, entry)
        size = files[entry["image_id"]].size
        corners = _place_box(box, steps, size)
        if min(box[2:]) <= 0:
            flat += 1
        elif corners is None:
            cut += 1
        else:
            number = numbers[entry["category_id"]]
            crowd = bool(entry.get("iscrowd"))
            crowds += crowd
            outside += _is_outside(box, size)
            boxes[entry["image_id"]].append(np.append(_FIRST_CROWD - number if crowd else number, corners))
    most = max(1, *map(len, boxes.values()))
    labels = np.full((len(files), most, 5), _NO_BOX, np.float32)
    for row, listed in enumerate(boxes.values()):
        if listed:
            labels[row, : len(listed)] = listed
    box_count = sum(map(len, boxes.values()))
    lost = {"without an area": flat, "outside of the crop": cut}
    unsure = [
        file for identity, file in files.items() if file.is_turned and stated[identity] in (None, file.as_stored.size)
    ]
    notes = (
        f"images as {steps}",
        *describe_orientations([*headers.values()], [*files.values()], unsure, "boxes"),
        f"labels: {box_count} boxes of {len(numbers)} categories, numbered in order of their ids",
        *([f"crowds among these boxes, in which detections are not judged: {crowds}"] if crowds else []),
        *(f"boxes {why}: {count} of {box_count + flat + cut}, left out" for why, count in lost.items() if count),
        *([f"boxes outside of their image, which count: {outside} of {box_count}"] if outside else []),
    )
    folders = tuple(dict.fromkeys(file.path.parent.absolute() for file in files.values()))
    return RawData(path.name, {spec.name: ImageRows(list(files.values()), steps)}, labels, notes, folders)


def check_coco(reference: str, _: Request) -> None:
    """Read the file, and look the images up; none is opened.

    Raises:
        DataError: it is no such file, or an image is missing.
    """
    for image in read_file(Path(reference))["images"]:
        find_image(Path(reference), str(image["file_name"]))


def read_file(path: Path) -> Mapping[str, list[dict[str, Any]]]:
    """Read the lists of images, annotations and categories.

    Raises:
        DataError: it is no such file.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "check the path") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", _FORMAT) from error
    lacking = [key for key in _KEYS if not isinstance(document, dict) or not isinstance(document.get(key), list)]
    if lacking:
        raise DataError(f"{path} has no list {lacking[0]!r}, so it is no COCO file of boxes", _FORMAT)
    if not document["images"] or not all("id" in each and "file_name" in each for each in document["images"]):
        raise DataError(f"{path} names no images, or some without id or file_name", _FORMAT)
    checked: Mapping[str, list[dict[str, Any]]] = document
    return checked


def find_image(path: Path, name: str) -> Path:
    """Look an image up beside the file, in a folder ``images`` there, or in the folder above.

    Raises:
        DataError: it is in none of them.
    """
    places = (path.parent / name, path.parent / "images" / name, path.parent.parent / name)
    for place in places:
        if place.is_file():
            return place
    searched = f"{path.parent}, in images/ there, or in the folder above"
    raise DataError(f"{path} names the image {name!r}, which is not in {searched}", "put the images there")


def _sorted_ids(path: Path, categories: list[dict[str, Any]]) -> list[Any]:
    try:
        return sorted(each["id"] for each in categories)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} has categories without an id, or with ids of several kinds", _FORMAT) from error


def _read_size(image: dict[str, Any]) -> Size | None:
    """Return the height and width that the file states of an image, if it does."""
    height, width = image.get("height"), image.get("width")
    return (height, width) if height and width else None


def _fit_size(reference: str, stated: Size | None, image: ImageFile) -> ImageFile:
    """Return an image upright, or as it is stored where only that has the stated size.

    Raises:
        DataError: it has another size in both ways.
    """
    for read in (image, image.as_stored):
        if stated in (None, read.size):
            return read
    assert stated is not None
    raise DataError(
        "{} says that {} has {}×{} pixels, and it has {}×{}".format(reference, image.path.name, *stated, *image.size),
        "give the images that the boxes were drawn in, or boxes and sizes in pixels of these",
    )


def _check_box(reference: str, entry: dict[str, Any]) -> list[float]:
    try:
        left, top, width, height = map(float, entry["bbox"])
    except (TypeError, ValueError) as error:
        message = f"{reference}: annotation {entry.get('id')} has the bbox {entry['bbox']!r}, and not four numbers"
        raise DataError(message, _FORMAT) from error
    return [left, top, width, height]


def _is_outside(box: list[float], size: Size) -> bool:
    """Tell whether nothing of a box is in its image."""
    left, top, width, height = box
    return left + width <= 0 or top + height <= 0 or top >= size[0] or left >= size[1]


def _place_box(box: list[float], steps: Preprocessing, size: Size) -> Array | None:
    """Return left, top, right and bottom in pixels of the sample; None where a crop leaves nothing of the box."""
    left, top, width, height = box
    (tall, wide), (above, before) = steps.place(size)
    corners = np.asarray([left * wide, top * tall, (left + width) * wide, (top + height) * tall])
    corners -= (before, above, before, above)
    for axis, is_cut in enumerate(steps.cuts(size)):
        ends = corners[1 - axis :: 2]  # top and bottom of the height, left and right of the width
        if is_cut:
            ends[:] = ends.clip(0, steps.size[axis])
    return corners if (corners[2:] > corners[:2]).all() else None
