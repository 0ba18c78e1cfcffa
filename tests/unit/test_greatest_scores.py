"""Test metrics of outputs that are the greatest scores and their classes."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginesmith.pipeline.measure.quality import evaluate, join_arrays

Arrays = NDArray[Any]


def take_greatest(scores: Arrays, count: int) -> tuple[Arrays, Arrays]:
    """Return the greatest scores and their classes, as torch.topk does."""
    indices = np.argsort(-scores, axis=1)[:, :count]
    return np.take_along_axis(scores, indices, axis=1), indices


@pytest.mark.parametrize(("count", "second"), [(1, "y_indices"), (3, "y_indices"), (3, "z")])
def test_the_greatest_scores_are_judged_by_their_classes(count: int, second: str) -> None:
    generator = np.random.default_rng(0)
    scores, labels = generator.standard_normal((200, 7)).astype(np.float32), generator.integers(0, 7, 200)
    scores[np.arange(100), labels[:100]] += 5
    values, indices = take_greatest(scores, count)
    outputs, whole = {"y": values, second: indices}, {"y": scores}
    judged, expected = (evaluate("top1", each, whole, labels) for each in (outputs, whole))
    assert (judged.value, judged.output) == (expected.value, "y")
    assert judged.drop == 0
    assert evaluate(f"top1:{second}", outputs, outputs, labels).value == expected.value
    assert evaluate("f1", outputs, outputs, labels).value == evaluate("f1", whole, whole, labels).value
    assert 0.5 < evaluate("auroc", outputs, outputs, labels).value < 1
    several = {"other": values[:, ::-1], **outputs}
    assert evaluate("top1:y", several, several, labels).value == expected.value


def test_a_class_that_is_not_among_the_greatest_is_wrong() -> None:
    outputs = {"y": np.array([[3.0, 2.0]]), "y_indices": np.array([[4, 1]])}
    assert [evaluate("top5", outputs, outputs, np.array([label])).value for label in (0, 1, 4, 9)] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("values", "indices"),
    [
        ([[1.0, 2.0]], [[0, 1]]),
        ([[2.0, 1.0]], [[1, 1]]),
        ([[2.0, 1.0]], [[-1, 1]]),
        ([[2.0, 1.0]], [[0, 1 << 40]]),
        ([[2.0]], [[3]]),
    ],
)
def test_other_outputs_are_no_greatest_scores(values: Any, indices: Any) -> None:
    outputs, labels = {"y": np.array(values), "z": np.array(indices)}, np.array([0])
    paired, _ = join_arrays("top1", outputs, labels)
    assert paired.keys() == outputs.keys()
    assert join_arrays("mse", outputs, labels)[0] is outputs
