"""Judge boxes that were found in images, as COCO does."""

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginesmith.calibration.dataset import Labels, describe_arrays
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.measure.metrics.own_metric import OwnMetric, are_probabilities, import_library, put_first
from enginesmith.pipeline.tensors import Array, Feeds

_BOX_SIDES = 4
_MOST_BOXES = 100
"""Boxes of an image that COCO's evaluation looks at."""
_OVERLAP = 0.6
"""Intersection over union from which a box is suppressed by a better one of its class."""
_LEAST_SCORE = 1e-3
_NO_BOX_RIGHT = 1e-3
"""Mean average precision up to which hardly any box lies where one is."""
_NO_BOX = -1
"""Class where there is no box; below it, crowds: −2 is one of class 0, in which detections do not count as wrong."""


def _match_boxes(output: Array, labels: Array) -> Array:
    """Match what was found in each image with what there is: lists of pycocotools' records, one of each class."""
    coco, evaluation = import_library("pycocotools.coco"), import_library("pycocotools.cocoeval")
    truth = [_box(place, box[0], box[1:]) for place, image in enumerate(labels) for box in image if box[0] != _NO_BOX]
    detections = [
        _box(place, box[5], box[:4]) | {"score": float(box[4])}
        for place, image in enumerate(_find_boxes(output))
        for box in image
    ]
    classes = sorted({each["category_id"] for each in truth})
    sides = []
    for boxes in (truth, detections):
        side = coco.COCO()
        side.dataset = {
            "images": [{"id": place} for place in range(len(labels))],
            "categories": [{"id": number} for number in classes],
            "annotations": [box | {"id": number} for number, box in enumerate(boxes, 1)],
        }
        _silently(side.createIndex)
        sides.append(side)
    judge = evaluation.COCOeval(*sides, "bbox")
    _restrict(judge)
    _silently(judge.evaluate)
    records = np.empty(len(labels), object)
    for place in range(len(labels)):
        records[place] = judge.evalImgs[place :: len(labels)]
    return records


def _compute_map(records: Array) -> float:
    """Compute COCO's mean average precision: overlaps of 0.5 to 0.95, 100 boxes in each image."""
    evaluation = import_library("pycocotools.cocoeval")
    judge, classes = evaluation.COCOeval(iouType="bbox"), range(len(records[0]))
    _restrict(judge)
    judge.params.imgIds, judge.params.catIds = list(range(len(records))), list(classes)
    judge.evalImgs, judge._paramsEval = [image[number] for number in classes for image in records], judge.params
    _silently(judge.accumulate)
    precision = judge.eval["precision"]
    return float(precision[precision > -1].mean()) if (precision > -1).any() else math.nan


def _restrict(judge: Any) -> None:
    """Leave out what COCO's evaluation counts beside: small and large boxes, and fewer of them."""
    judge.params.areaRng, judge.params.areaRngLbl = judge.params.areaRng[:1], judge.params.areaRngLbl[:1]
    judge.params.maxDets = [_MOST_BOXES]


def _silently(function: Callable[[], None]) -> None:
    """Call what prints what it does."""
    with contextlib.redirect_stdout(io.StringIO()):
        function()


def _box(image: int, number: float, corners: Array) -> dict[str, Any]:
    """Make a record of COCO; ``number`` is that of a class, or of a crowd of one."""
    left, top, right, bottom = map(float, corners)
    sides = [left, top, right - left, bottom - top]
    crowd = number < _NO_BOX
    category = int(2 * _NO_BOX - number if crowd else number)
    area = sides[2] * sides[3]
    return {"image_id": image, "category_id": category, "bbox": sides, "area": area, "iscrowd": int(crowd)}


def _find_boxes(output: Array) -> list[Array]:
    """List [boxes, 6] of each image: corners, score and class, from either layout."""
    if output.shape[2] == _BOX_SIDES + 2:
        return [image[image[:, _BOX_SIDES] > _LEAST_SCORE] for image in output.astype(np.float64)]
    return [_suppress(image.T) for image in output.astype(np.float64)]


def _suppress(boxes: Array) -> Array:
    """Keep the best of boxes that overlap, of one image and class by class; [boxes, 4 + classes] → [boxes, 6]."""
    half = boxes[:, 2:4] / 2
    corners = np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    selection: list[NDArray[np.float64]] = []
    for number, scores in enumerate(boxes[:, _BOX_SIDES:].T):
        order = np.argsort(-scores, kind="stable")
        order = order[scores[order] > _LEAST_SCORE][: 3 * _MOST_BOXES]
        most = len(selection) + _MOST_BOXES
        while len(order) and len(selection) < most:
            best, order = order[0], order[1:]
            selection.append(np.array([*corners[best], scores[best], number]))
            order = order[_overlap(corners[best], corners[order]) <= _OVERLAP]
    selection.sort(key=lambda box: -box[_BOX_SIDES])
    return np.array(selection).reshape(-1, _BOX_SIDES + 2)


def _overlap(box: Array, others: Array) -> NDArray[np.float64]:
    """Compute intersection over union of one box with each of the others."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    both = np.prod(np.maximum(high - low, 0), axis=1)
    areas = np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], axis=1)
    return np.asarray(both / np.maximum(areas - both, 1e-12))


def _join_detections(outputs: Feeds, labels: Labels, names: Sequence[str]) -> tuple[Feeds, Labels]:
    """Join corners [images, boxes, 4], scores and classes [images, boxes] that are outputs of their own.

    Without ``names``, which are in this order, scores are the only floats of that form, and classes the only integers.

    Raises:
        DataError: no names are given, and beside corners nothing is clearly their scores and classes.
    """
    if not names:
        corners = [key for key, array in outputs.items() if array.shape[2:] == (_BOX_SIDES,)]
        beside = {
            key: array
            for key, array in outputs.items()
            if corners and key not in corners and array.shape[:2] == outputs[corners[0]].shape[:2]
        }
        flat = {key: array for key, array in beside.items() if array.ndim == len("NB")}
        scores, numbers = ([key for key, array in flat.items() if array.dtype.kind in kinds] for kinds in ("f", "iu"))
        names = [*corners, *scores, *numbers] if len(corners) == len(scores) == len(numbers) == 1 else ()
        if not names and corners and not _have_detections(outputs, beside, labels):
            raise _explain_unclear(corners[0], outputs, flat)
    arrays = [outputs[key] for key in names if key in outputs]
    if [array.ndim for array in arrays] != [3, 2, 2] or any(array.shape != arrays[0].shape[:2] for array in arrays[1:]):
        return outputs, labels
    columns = [arrays[0], *(array[:, :, np.newaxis] for array in arrays[1:])]
    return put_first(outputs, names, np.concatenate(columns, axis=2, dtype=np.float64)), labels


def _have_detections(outputs: Feeds, beside: Feeds, labels: Labels) -> bool:
    """Tell whether one output has all of its boxes, also where others are ``beside`` corners of their own.

    Six numbers of a box that has its corners elsewhere may be the scores of six classes.
    """
    if isinstance(labels, Mapping) or not _are_true_boxes(labels):
        return True  # the labels are what tells them, or what is wrong
    fitting = {key: array for key, array in outputs.items() if _are_boxes(array, labels)}
    return any(key not in beside or _have_classes(array) for key, array in fitting.items())


def _have_classes(output: Array) -> bool:
    """Tell whether the last of six numbers of each box is a class, and the one before it a score."""
    if output.shape[2] != _BOX_SIDES + 2:
        return False
    scores, numbers = output[:, :, _BOX_SIDES], output[:, :, _BOX_SIDES + 1]
    return are_probabilities(scores) and bool((numbers == np.round(numbers)).all())


def _explain_unclear(corners: str, outputs: Feeds, flat: Feeds) -> DataError:
    """Explain that corners have no clear scores and classes beside them; ``flat`` are numbers of the same boxes."""
    others = describe_arrays({key: array for key, array in outputs.items() if key != corners})
    ordered = sorted(flat, key=lambda key: bool((flat[key] == np.round(flat[key])).all()))  # classes are the last
    message = (
        f"map needs the corners, scores and classes of boxes, and it is not clear which outputs those are: beside "
        f"{corners!r}, the corners, there are {others or 'no others'}"
    )
    if len(ordered) > 1:
        return DataError(message, f"name them in that order, such as --metric map:{','.join((corners, *ordered[:2]))}")
    return DataError(
        message,
        "have the model answer the score and the class of each box as two outputs [images, boxes], and the corners in "
        "pixels, as a detector's post-processing makes them",
    )


def _are_boxes(output: Array, labels: Array) -> bool:
    """Tell whether there are boxes in one of the layouts: [images, boxes, 6] or [images, 4 + classes, boxes].

    In the second one, the scores of classes that labels have are probabilities, and the others lie in the pixels that
    labels lie in, so that scores of boxes [images, boxes, classes] are not taken for it.
    """
    if output.ndim != len("NBC") or not _are_true_boxes(labels):
        return False
    if output.shape[2] == _BOX_SIDES + 2:
        return True
    if output.shape[1] <= _BOX_SIDES or output.shape[2] == _BOX_SIDES:
        return False
    classes = 1 + max(0, int(labels[:, :, 0].max(initial=0)))
    in_pixels = _are_fractions(labels[:, :, 1:]) or not _are_fractions(output[:, :_BOX_SIDES])
    return in_pixels and are_probabilities(output[:, _BOX_SIDES : _BOX_SIDES + classes])


def _are_true_boxes(labels: Array) -> bool:
    """Tell whether labels are boxes, [images, boxes, 5], with a number as the class of each."""
    boxes = labels.ndim == len("NBC") and labels.shape[2] == _BOX_SIDES + 1 and labels.dtype.kind in "iuf"
    return boxes and bool(np.isfinite(labels[:, :, 0]).all())


def _are_fractions(corners: Array) -> bool:
    """Tell whether boxes are given as shares of the picture, or of a single pixel."""
    return bool(corners.max(initial=0) <= 1)


METRICS: dict[str, OwnMetric] = {
    "map": OwnMetric(
        _match_boxes,
        _are_boxes,
        "boxes of shape [images, boxes, 6] (corners, score, class), or [images, 4 + classes, boxes] (center, extent, "
        "scores from 0 to 1), or three outputs: corners [images, boxes, 4], scores and classes [images, boxes], named "
        "as in map:boxes,scores,classes where classes are floats; labels [images, boxes, 5] (class, corners), class -1 "
        "where there is none, -2 and less for crowds of class 0 and on",
        _compute_map,
        draws=50,
        worst=_NO_BOX_RIGHT,
        doubt="labels and boxes may be in different pixels (with --prepend resize, boxes are in those of the resized "
        "images), or classes numbered otherwise (from 0 in labels of a COCO file, from 1 in detectors of torchvision)",
        join=_join_detections,
        rows_vary=True,
    ),
}
"""Name → metric."""
