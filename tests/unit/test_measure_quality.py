"""Metrics on labelled data."""

from pathlib import Path

import numpy as np
import pytest

from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.measure.quality import evaluate, find_metric

LABELS = np.arange(200) % 10
RIGHT = {"logits": np.eye(10)[LABELS]}
WRONG = {"logits": np.roll(np.eye(10), 1, axis=1)[LABELS]}


def mixed(wrong: int) -> dict[str, np.ndarray]:
    return {"logits": np.concatenate([WRONG["logits"][:wrong], RIGHT["logits"][wrong:]])}


def test_drop_is_against_the_baseline_on_the_same_samples() -> None:
    found = evaluate("top1", mixed(20), mixed(10), LABELS)
    assert (found.value, found.baseline, found.samples) == (0.9, 0.95, 200)
    assert found.drop == pytest.approx(0.05)
    assert found.drop_low is not None
    assert found.drop_high is not None
    assert 0.01 < found.drop_low < 0.05 < found.drop_high < 0.09


def test_no_difference_has_no_interval_to_speak_of() -> None:
    found = evaluate("top1", mixed(10), mixed(10), LABELS)
    assert (found.drop, found.drop_low, found.drop_high) == (0.0, 0.0, 0.0)


def test_top5_counts_the_five_greatest() -> None:
    logits = {"y": np.tile(np.arange(10.0), (2, 1))}
    assert evaluate("top5", logits, logits, np.array([5, 4])).value == 0.5


def test_less_is_better_for_mse() -> None:
    labels = np.zeros((8, 3))
    found = evaluate("mse", {"y": labels + 2}, {"y": labels + 1}, labels)
    assert (found.value, found.baseline, found.drop) == (4.0, 1.0, 3.0)


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "my_metrics.py"
    path.write_text(
        "def share(outputs, labels):\n    return (outputs['logits'].argmax(-1) == labels).mean()\n"
        "def each(outputs, labels):\n    return outputs['logits'].argmax(-1) == labels\n"
        "def broken(outputs, labels):\n    return outputs['scores']\n"
        "def nan(outputs, labels):\n    return float('nan')\n"
        "def wrong_length(outputs, labels):\n    return [1.0, 2.0]\n"
    )
    return path


@pytest.mark.parametrize("place", ["my_metrics", "my_metrics.py"])
def test_metric_of_the_user(metrics: Path, place: str) -> None:
    found = evaluate(f"{place}:share", mixed(20), mixed(0), LABELS)
    assert found.drop == pytest.approx(0.1)
    assert found.drop_low is None
    assert "one number" in found.reasons["drop_low"]
    assert evaluate(f"{place}:each", mixed(20), mixed(0), LABELS).drop_low is not None


@pytest.mark.parametrize(("name", "message"), [("broken", "scores"), ("nan", "finite|used"), ("wrong_length", "200")])
def test_metric_that_does_not_work(metrics: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        evaluate(f"my_metrics:{name}", RIGHT, RIGHT, LABELS)


@pytest.mark.parametrize("name", ["top7", "nowhere_at_all:f", "my_metrics:absent", "absent.py:f"])
def test_metric_that_is_not_there(metrics: Path, name: str) -> None:
    with pytest.raises(DataError):
        find_metric(name)


def test_no_samples() -> None:
    with pytest.raises(DataError, match="no labelled samples"):
        evaluate("top1", {"y": np.ones((0, 3))}, {"y": np.ones((0, 3))}, np.ones(0))


def test_outputs_that_are_no_logits() -> None:
    with pytest.raises(DataError, match="top1"):
        evaluate("top1", {"y": np.ones((4, 3, 2))}, {"y": np.ones((4, 3, 2))}, np.ones(4))
