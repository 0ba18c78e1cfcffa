"""Describe a data set for people, as far as that can be done without a model."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.calibration import lazy_arrays
from enginesmith.calibration.coco import find_image, read_file
from enginesmith.calibration.feeds import first_feed
from enginesmith.calibration.file_formats import is_embedded, read
from enginesmith.calibration.image_files import CONFIGURATION, read_header
from enginesmith.calibration.images import listing
from enginesmith.calibration.masks import has_masks, pair_masks
from enginesmith.calibration.options import AS_FOUND
from enginesmith.calibration.sources import Request, open_arrays
from enginesmith.calibration.text import find_tokenizer, read_lines
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.errors import DataError

Facts = dict[str, Any]
_LABELS = "labels"
_SHOWN = 10


def is_data(reference: str) -> bool:
    """Check that a reference is of a form that can be described; a folder may be something else."""
    path = Path(reference)
    return (
        path.is_dir()
        or path.suffix in (".npz", ".npy", ".jsonl", ".json")
        or is_embedded(reference)
        or is_reference(reference)
    )


def describe(reference: str) -> Facts:
    """Describe names, dtypes, shapes, rows and labels.

    Raises:
        DataError: the data cannot be read.
        MissingCapability: reading it needs a package that is not installed.
    """
    path = Path(reference)
    if path.is_dir():
        return _describe_images(path)
    if path.suffix == ".json":
        return _describe_boxes(path)
    if path.suffix == ".jsonl":
        return _describe_texts(path)
    if is_embedded(reference):
        raw = read(reference, Request(()))
        named = {**raw.arrays, **({} if raw.labels is None else {_LABELS: raw.labels})}
        return _describe_arrays({name: (array.dtype, array.shape) for name, array in named.items()}, raw.labels)
    if is_reference(reference):
        feed = first_feed(reference)
        return {"kind": "data set: a function that yields feeds", "first": _show(_headers(feed))}
    with open_arrays(reference):
        if path.suffix == ".npz":
            return _describe_arrays(lazy_arrays.npz_headers(path), lazy_arrays.npz(path, _LABELS).get(_LABELS))
        return _describe_arrays(_headers({"array": lazy_arrays.npy(path)}), None)


def _describe_images(folder: Path) -> Facts:
    if has_masks(str(folder)):
        images = [image for image, _ in pair_masks(folder)]
        return {**_describe_files("images and masks", images, folder), _LABELS: "a mask for each image"}
    contents = listing(folder)
    labels = "none: there are no sub-folders" if contents.labels is None else _count(contents.labels, contents.classes)
    return {**_describe_files("a folder of images", contents.files, folder), _LABELS: labels}


def _describe_boxes(path: Path) -> Facts:
    document = read_file(path)
    images = [find_image(path, str(image["file_name"])) for image in document["images"]]
    names = {category["id"]: str(category.get("name", category["id"])) for category in document["categories"]}
    boxes = Counter(names.get(entry.get("category_id"), "unknown") for entry in document["annotations"])
    labels = {name: boxes[name] for _, name in sorted(names.items())}
    return {**_describe_files("images and boxes (COCO)", images, path.parent), "boxes": _show_first(labels.items())}


def _describe_files(kind: str, files: Sequence[Path], folder: Path) -> Facts:
    sizes = Counter("{}×{}".format(*read_header(file).size) for file in files)
    places = [place for place in (folder, folder.absolute().parent) if (place / CONFIGURATION).is_file()]
    return {
        "kind": f"data set: {kind}",
        "samples": len(files),
        "sizes": _show_first(sizes.most_common()),
        "preprocessing": str(places[0] / CONFIGURATION) if places else "none: by default, or as given",
    }


def _describe_texts(path: Path) -> Facts:
    lines = list(read_lines(path, AS_FOUND))
    try:
        tokenizer = str(find_tokenizer(path, AS_FOUND))
    except DataError as error:
        tokenizer = f"none: {error.message}"
    labels = Counter(str(line.label) for line in lines if line.label is not None)
    return {
        "kind": "data set: texts",
        "samples": len(lines),
        "pairs": sum(len(line.text) > 1 for line in lines),
        "longest": f"{max((sum(map(len, line.text)) for line in lines), default=0)} characters",
        "tokenizer": tokenizer,
        _LABELS: _show_first(sorted(labels.items())) or "none",
    }


def _headers(arrays: Mapping[str, Any]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def _describe_arrays(headers: Mapping[str, tuple[Any, tuple[int, ...]]], labels: Any) -> Facts:
    rows = {shape[0] for _, shape in headers.values() if shape}
    counted = labels is not None and labels.ndim == 1 and labels.dtype.kind in "iub"
    return {
        "kind": "data set",
        "samples": rows.pop() if len(rows) == 1 else None,
        "arrays": _show(headers),
        _LABELS: _count(labels, {}) if counted else f"none: there is no array {_LABELS!r} of classes",
    }


def _show(headers: Mapping[str, tuple[Any, tuple[int, ...]]]) -> list[str]:
    return [f"{name}: {dtype}{list(shape)}" for name, (dtype, shape) in headers.items()]


def _count(labels: Any, classes: Mapping[int, str]) -> list[str]:
    """Count how often each class occurs."""
    values, counts = np.unique(labels, return_counts=True)
    return _show_first(
        (f"{value} {classes.get(value, '')}".strip(), int(count)) for value, count in zip(values, counts, strict=True)
    )


def _show_first(counts: Iterable[tuple[str, int]]) -> list[str]:
    lines = [f"{name}: {count}" for name, count in counts]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"… and {len(lines) - _SHOWN} more"]
