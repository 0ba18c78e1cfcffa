"""Mean average precision: against pycocotools, and which outputs are boxes, scores and classes."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.measure.metrics.boxes import _suppress
from enginesmith.pipeline.measure.metrics.table import METRICS
from enginesmith.pipeline.measure.quality import evaluate

Arrays = NDArray[Any]
CASES = range(20)


def compute(output: Arrays, labels: Arrays) -> float:
    outputs = {"detections": output}
    return evaluate("map", outputs, outputs, labels).value


def make_boxes(seed: int) -> tuple[Arrays, Arrays]:
    """Two boxes of three classes in each of six images, found at a little distance, and as many that are not there."""
    generator = np.random.default_rng(seed)
    corner = generator.uniform(0, 400, (6, 2, 2))
    kind = generator.integers(0, 3, (6, 2, 1))
    labels = np.concatenate([kind, corner, corner + 100], 2)
    labels[0, 1, 0] = -1
    found = labels[..., 1:] + generator.normal(0, 8, (6, 2, 4))
    false = np.tile(generator.uniform(0, 400, (6, 2, 2)), 2) + np.array([0, 0, 100, 100])
    boxes = np.concatenate([found, false], 1)
    scores, kinds = generator.uniform(0.1, 1, (6, 4, 1)), np.concatenate([kind, generator.integers(0, 3, (6, 2, 1))], 1)
    return np.concatenate([boxes, scores, kinds], 2), labels


@pytest.mark.parametrize("crowds", [False, True])
@pytest.mark.parametrize("seed", CASES)
def test_precision_of_boxes_is_that_of_pycocotools(seed: int, crowds: bool) -> None:
    """pycocotools is called as documented: a COCO file of the truth, and ``loadRes`` with the detections."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    output, labels = make_boxes(seed)
    if crowds:
        labels[2:4, 0, 0] = -2 - labels[2:4, 0, 0]
    truth, found = COCO(), []
    truth.dataset = {"images": [{"id": image} for image in range(6)], "categories": [{"id": kind} for kind in range(3)]}
    truth.dataset |= {"annotations": [], "info": {}}
    for image, (boxes, wanted) in enumerate(zip(output, labels, strict=True)):
        for number, left, top, right, bottom in wanted[wanted[:, 0] != -1]:
            kind, crowd = (number, 0) if number >= 0 else (-2 - number, 1)
            sides = [left, top, right - left, bottom - top]
            one = {"id": len(truth.dataset["annotations"]) + 1, "image_id": image, "category_id": int(kind)}
            truth.dataset["annotations"].append(one | {"bbox": sides, "area": sides[2] * sides[3], "iscrowd": crowd})
        for left, top, right, bottom, score, kind in boxes:
            one = {"image_id": image, "category_id": int(kind), "score": score}
            found.append(one | {"bbox": [left, top, right - left, bottom - top]})
    truth.createIndex()
    judge = COCOeval(truth, truth.loadRes(found), "bbox")
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    assert compute(output, labels) == pytest.approx(judge.stats[0], abs=1e-6)


def test_boxes_scores_and_classes_may_be_outputs_of_their_own() -> None:
    output, labels = make_boxes(0)
    parts = {"scores": output[..., 4], "classes": output[..., 5].astype(np.int64), "boxes": output[..., :4]}
    judged = evaluate("map", parts, parts, labels)
    assert judged.output == "boxes,scores,classes"
    assert judged.value == pytest.approx(compute(output, labels))
    floats = parts | {"classes": output[..., 5]}
    with pytest.raises(DataError, match=r"^map needs .*, and it is not clear which") as error:
        evaluate("map", floats, floats, labels)
    assert error.value.remedy == "name them in that order, such as --metric map:boxes,scores,classes"
    assert evaluate("map:boxes,scores,classes", floats, floats, labels).value == judged.value


@pytest.mark.parametrize("classes", [92, 6])
@pytest.mark.parametrize("softmax", [False, True])
def test_scores_of_classes_beside_corners_are_no_boxes(classes: int, softmax: bool) -> None:
    """DETR: logits of classes, and corners as shares of the picture. Rows of 100 boxes are no 4 + 96 classes."""
    generator, labels = np.random.default_rng(0), make_boxes(0)[1]
    logits = generator.standard_normal((6, 100, classes))
    scores = np.exp(logits) / np.exp(logits).sum(2, keepdims=True) if softmax else logits
    outputs = {"logits": scores, "pred_boxes": generator.random((6, 100, 4))}
    with pytest.raises(
        DataError, match=r"beside 'pred_boxes', the corners, there are 'logits' float64\[6, 100"
    ) as error:
        evaluate("map", outputs, outputs, labels)
    assert "two outputs [images, boxes]" in error.value.remedy
    if classes != 6:
        with pytest.raises(DataError, match=r"^map needs .*'logits' is not that"):
            evaluate("map", {"logits": scores}, {"logits": scores}, labels)


def test_of_three_floats_the_names_are_asked_for() -> None:
    """Whole numbers are the classes, and named last; corners of many boxes alone are no grid of classes."""
    output, labels = make_boxes(0)
    many = np.concatenate([output, np.zeros((6, 96, 6))], axis=1)
    parts = {"labels": many[..., 5], "scores": many[..., 4], "boxes": many[..., :4]}
    with pytest.raises(DataError, match=r"^map needs .* not clear which outputs those are: beside 'boxes'") as error:
        evaluate("map", parts, parts, labels)
    assert error.value.remedy == "name them in that order, such as --metric map:boxes,scores,labels"
    assert evaluate("map:boxes,scores,labels", parts, parts, labels).value == pytest.approx(compute(output, labels))
    for others, listed in (({}, "no others"), ({"scores": np.zeros((6, 3, 100))}, r"'scores' float64\[6, 3, 100\]")):
        alone = {"boxes": many[..., :4], **others}
        with pytest.raises(DataError, match=f"beside 'boxes', the corners, there are {listed}") as error:
            evaluate("map", alone, alone, labels)
        assert "two outputs [images, boxes]" in error.value.remedy


def test_boxes_beside_corners_of_others_are_judged() -> None:
    output, labels = make_boxes(0)
    outputs = {"detections": output, "boxes": output[..., :4], "features": np.zeros((6, 4, 256))}
    judged = evaluate("map", outputs, outputs, labels)
    assert (judged.output, judged.value) == ("detections", compute(output, labels))


def test_rows_behind_the_classes_of_a_grid_may_be_anything() -> None:
    """Coefficients of masks, say; and quantized scores may be beyond 1 a little."""
    labels = make_boxes(0)[1]
    grid = np.concatenate([np.full((6, 4, 50), 30.0), np.full((6, 3, 50), 1.004), np.full((6, 32, 50), -7.0)], axis=1)
    assert METRICS["map"].accepts(grid, labels)
    assert not METRICS["map"].accepts(np.where(grid == 30, 0.5, grid), labels), "no box of a pixel is in a picture"
    assert METRICS["map"].accepts(np.where(grid == 30, 0.5, grid), labels / 1000)
    labels[0, 0, 0] = np.nan
    assert not METRICS["map"].accepts(grid, labels)


def test_boxes_of_a_grid_are_the_same_after_suppression() -> None:
    """Centers and extents with a score for each class, every box twice: the second is suppressed."""
    output, labels = make_boxes(0)
    output = output[:, :2]
    output[:, 1, :4] += 500  # far from the other one
    labels[:, 1, 1:] += 500
    grid = np.zeros((6, 4 + 3, 8))
    for image, boxes in enumerate(output):
        for place, (left, top, right, bottom, score, kind) in enumerate(boxes):
            for column, less in ((place, 0.0), (place + 4, 0.01)):
                grid[image, :4, column] = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
                grid[image, 4 + int(kind), column] = score - less
    assert compute(grid, labels) == pytest.approx(compute(output, labels))


def test_a_hundred_boxes_of_each_class_are_judged() -> None:
    """COCO's rule: of 150 boxes that do not touch in each of two classes, those with the highest scores count."""
    grid = np.zeros((6, 300))
    grid[0], grid[1], grid[2:4] = np.arange(300) * 10, 5, 4
    grid[4, :150], grid[5, 150:] = 0.9, 0.5
    kept = _suppress(grid.T)
    assert [int((kept[:, 5] == number).sum()) for number in (0, 1)] == [100, 100]
