"""Metrics on labelled samples: drops, their intervals, and metrics of the user's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.measure.quality import MetricError, Quality, evaluate, find_metric
from enginesmith.pipeline.measure.statistics import count_for_width, drop_interval

RNG = np.random.default_rng(0)
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
    assert (found.worse, found.better) == (10, 0)
    assert 0.01 < found.drop_low < 0.05 < found.drop_high < 0.09


def test_no_wrong_answer_among_few_is_no_proof_that_none_becomes_wrong() -> None:
    baseline = mixed(10)
    assert evaluate("top1", baseline, baseline, LABELS).drop_high == 0, "it is the same model"
    found = evaluate("top1", mixed(10), baseline, LABELS)
    assert found.drop == found.seen_high == 0
    assert found.drop_high == -(found.drop_low or 0.0) == pytest.approx(1.96 * 2**0.5 / 202, rel=1e-3)


@pytest.mark.parametrize(("count", "worse", "better"), [(100, 0.01, 0), (300, 0.003, 0), (300, 0.03, 0.02)])
def test_the_interval_holds_the_true_drop_in_19_of_20_sets(count: int, worse: float, better: float) -> None:
    drawn = np.random.default_rng(0).multinomial(count, [worse, better, 1 - worse - better], size=1000)
    ends = [drop_interval(np.repeat([1.0, -1.0, 0.0], counts), 1.0) for counts in drawn]
    assert np.mean([low <= worse - better <= high for low, high in ends]) >= 0.94


@pytest.mark.parametrize(("share", "down", "up"), [(0.03, 0.0, 0.5), (0.03, -0.5, 0.7), (1.0, -0.01, 0.015)])
def test_the_interval_of_graded_scores_holds_what_few_samples_lose(share: float, down: float, up: float) -> None:
    """Draw 300 samples of which some lose up to so much, or win; a bootstrap's holds the true drop in 0.90 to 0.93."""
    rng, held = np.random.default_rng(0), list[bool]()
    for _ in range(1000):
        drops = np.where(rng.random(300) < share, rng.uniform(down, up, 300), rng.normal(0.0, 0.002, 300))
        low, high = drop_interval(drops, float(np.abs(drops).max()))
        held.append(low <= share * (down + up) / 2 <= high)
    assert np.mean(held) >= 0.94


def test_the_interval_of_a_drop_is_the_normal_one_for_many_samples() -> None:
    drops = np.random.default_rng(4).normal(5.0, 2.0, 4_000)
    half = 1.96 * drops.std() / np.sqrt(drops.size)
    ends = drop_interval(drops, float(np.abs(drops).max()))
    assert ends == pytest.approx((drops.mean() - half, drops.mean() + half), abs=0.1 * half)


def test_graded_scores_are_chosen_by_what_the_samples_show() -> None:
    """With the two samples that are added, a variant that lost little would often be refused."""
    lost = np.where(np.arange(100) == 3, 0.4, 0.002)
    labels = np.ones((100, 1), np.float32)
    found = evaluate("mse", {"y": labels + np.sqrt(lost)[:, None]}, {"y": labels}, labels)
    assert not found.counted
    assert found.deviation == pytest.approx(lost.std(), rel=1e-3)
    assert found.seen_high is not None
    assert found.drop_high is not None
    assert found.seen_high == pytest.approx(found.drop + 1.96 * lost.std() / 10, rel=1e-3)
    assert found.seen_high < 0.015 < found.drop_high
    assert "0.01" in found.explain_excess(0.01)
    assert not found.explain_excess(0.015)


@pytest.mark.parametrize(("half", "changed"), [(0.01, 0.0), (0.01, 0.05), (0.002, 0.01)])
def test_so_many_samples_are_enough_for_a_narrow_interval(half: float, changed: float) -> None:
    count = count_for_width(half, changed)
    drops = (np.where(np.arange(each) < round(changed * each), 1.0, 0.0) for each in (count, count // 2))
    widths = [np.ptp(drop_interval(each, 1.0)) / 2 for each in drops]
    assert widths[0] <= 1.02 * half < widths[1]


def test_variants_are_chosen_by_what_the_samples_show() -> None:
    found = evaluate("top1", mixed(20), mixed(10), LABELS)
    assert found.seen_high == pytest.approx(0.05 + 1.96 * (0.05 * 0.95 / 200) ** 0.5, rel=1e-3)
    earlier = found.model_copy(update={"deviation": None})
    assert earlier.seen_high == found.drop_high


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
        "def nothing(outputs, labels): ...\n"
        "def array(outputs, labels):\n    return outputs.argmax(1)\n"
        "def three(outputs, labels, classes): ...\n"
        "def once(outputs, labels):\n    raise ValueError('only one class')\n"
        "def both(outputs, labels):\n    return sum((outputs[name] == labels[name]).mean() for name in labels)\n"
        "def text(outputs, labels):\n    return '0.9'\n"
        "def nan_each(outputs, labels):\n    return [1.0] + [float('nan')] * (len(labels) - 1)\n"
        "def first(outputs, labels):\n    return float(list(outputs) == ['b'])\n"
        "seen = []\n"
        "def all_so_far(outputs, labels):\n    seen.extend(each(outputs, labels))\n    return sum(seen) / len(seen)\n"
        "def drawn(outputs, labels):\n    return float(__import__('numpy').random.random())\n"
    )
    return path


@pytest.mark.parametrize("place", ["my_metrics", "my_metrics.py"])
def test_metric_of_the_user(metrics: Path, place: str) -> None:
    found = evaluate(f"{place}:share", mixed(20), mixed(0), LABELS)
    assert found.drop == pytest.approx(0.1)
    assert found.drop_low is None
    assert "one number" in found.reasons["drop_low"]
    assert evaluate(f"{place}:each", mixed(20), mixed(0), LABELS).drop_low is not None


@pytest.mark.parametrize(
    ("name", "message", "always"),
    [
        ("broken", r"KeyError: 'scores' in line 6 of my_metrics.py; .*'logits' float64\[200, 10\].*int64\[200\]", True),
        ("nan", "NaN or infinity.*\n.*one finite number", False),
        ("nan_each", "NaN or infinity, first for sample 1;", True),
        ("text", r"returned str '0.9'", True),
        ("wrong_length", r"the shape \[2\].*\n.*200 of them", True),
        ("nothing", "returned NoneType None", True),
        ("array", "'dict' object has no attribute 'argmax' in line", True),
        ("three", r"takes \(outputs, labels, classes\), and is called with \(outputs, labels\)", True),
        ("once", "ValueError: only one class", False),
        ("all_so_far", r"gives 1 and then 0\.\d+ for the same answers and labels\n.*forget earlier calls", True),
        ("drawn", "for the same answers and labels\n.*draw no random numbers", True),
    ],
)
def test_metric_that_does_not_work(metrics: Path, name: str, message: str, always: bool) -> None:
    """Two samples may have none of a class, so more are tried; a misspelt name is wrong for any samples."""
    with pytest.raises(DataError, match=message) as raised:
        evaluate(f"my_metrics:{name}", RIGHT, RIGHT, LABELS)
    assert isinstance(raised.value, MetricError) is not always


TWO = {"a": np.zeros(4), "b": np.eye(4, 5), "c": np.eye(4, 5)}
KINDS = np.arange(4)


@pytest.mark.parametrize(
    ("metric", "outputs", "labels", "chosen"),
    [
        ("top1", "ab", KINDS, "b"),
        ("top1", "bc", KINDS, "b"),
        ("top1:c", "bc", KINDS, "c"),
        ("mse", "ba", np.ones((4, 1)), "a"),
        ("top1", "bc", {"c": KINDS, "x": KINDS}, "c"),
        ("my_metrics.py:first:b", "abc", KINDS, "b"),
        ("my_metrics:both", "bc", {"b": TWO["b"], "c": TWO["c"]}, None),
    ],
)
def test_the_output_that_a_metric_judges_is_named(
    metrics: Path, metric: str, outputs: str, labels: Any, chosen: str | None
) -> None:
    given = {name: TWO[name] for name in outputs}
    found = evaluate(metric, given, given, labels)
    assert (found.output, found.other_outputs) == (chosen, tuple(outputs.replace(chosen, "")) if chosen else ())
    assert found.value == (2.0 if chosen is None else pytest.approx(1.0))
    if chosen:
        assert found.title == f"{metric.removesuffix(f':{chosen}')} of {chosen!r}"


@pytest.mark.parametrize(
    ("metric", "outputs", "labels", "message"),
    [
        ("top1", "abc", KINDS, "needs an output of shape.*'a' is not that.*\n.*top1:b or --metric top1:c"),
        ("top1:bb", "abc", KINDS, "names the output 'bb'.*'a' float64\\[4\\].*\n.*top1:b$"),
        ("my_metrics:first:bb", "abc", KINDS, "names the output 'bb'.*\n.*my_metrics:first:b$"),
        ("top1", "b", KINDS + 2, "counted from 0.*int64\\[4\\] from 2 to 5"),
        ("top1", "b", np.array(list("abcd")), "counted from 0.*labels texts\\[4\\]\n.*the number of its class"),
        ("top1", "a", np.ones(4) / 2, "\\n.*use --metric mse or spearman, which these fit; or give such labels"),
        ("mse:b", "ab", np.ones(4), "needs.*'b' is not that.*\n.*--metric mse:a"),
        ("top1", "b", {"x": KINDS, "y": KINDS}, "labels 'x' int64"),
        (
            "top1",
            "b",
            np.array([0, 1, np.nan, 1]),
            "^the labels have NaN or infinity, first for sample 2\n.*leaves them",
        ),
        ("mse", "a", {"a": np.full(4, np.nan)}, "^the labels have NaN or infinity, first for sample 0"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(
    metrics: Path, metric: str, outputs: str, labels: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        evaluate(metric, {name: TWO[name] for name in outputs}, TWO, labels)


@pytest.mark.parametrize("name", ["top7", "nowhere_at_all:f", "my_metrics:absent", "absent.py:f"])
def test_metric_that_is_not_there(metrics: Path, name: str) -> None:
    with pytest.raises(DataError):
        find_metric(name)


@pytest.mark.parametrize(("shape", "words"), [((0, 3), "no labeled samples"), ((4, 3, 2), "top1")])
def test_no_samples_and_no_logits(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        evaluate("top1", {"y": np.ones(shape)}, {"y": np.ones(shape)}, np.ones(shape[0]))


@pytest.mark.parametrize(
    ("counted", "drop", "high", "samples", "excess"),
    [
        (True, 1 / 96, 0.03, 96, ""),
        (True, 2 / 96, 0.05, 96, "the drop of 0.0208 is more than 0.01"),
        (True, 0.011, 0.02, 1000, "the drop of 0.0110 is more than 0.01"),
        (True, 0.01, 0.1, 10, ""),
        (True, -0.5, 0.1, 10, ""),
        (False, 1 / 96, None, 96, "the drop of 0.0104 is more than 0.01"),
        (
            False,
            0.0067,
            0.0127,
            96,
            "the drop of 0.0067 may be up to 0.0127, which is more than 0.01; if it stays, about 222 more samples for "
            "choosing are enough",
        ),
        (False, 0.01, 0.0127, 96, "the drop of 0.0100 may be up to 0.0127, which is more than 0.01"),
        (False, 0.0067, 0.0099, 96, ""),
        (False, 0.0067, None, 96, ""),
    ],
)
def test_a_loss_is_too_large_as_far_as_the_samples_tell(
    counted: bool, drop: float, high: float | None, samples: int, excess: str
) -> None:
    """A single wrong sample is no sign of it."""
    judged = Quality(
        metric="m", value=0.9, baseline=0.9 + drop, drop=drop, drop_high=high, samples=samples, counted=counted
    )
    assert judged.explain_excess(0.01) == excess


def test_as_many_samples_as_are_told_are_enough_for_a_drop_that_stays() -> None:
    drops = np.tile([0.004, 0.004 + 0.1, 0.004 - 0.1], 32)
    judged = Quality(
        metric="m", value=0.9, baseline=0.904, drop=0.004, deviation=float(drops.std()), samples=drops.size
    )
    more = int(judged.explain_excess(0.01).split("about ")[1].split()[0])
    enough = judged.model_copy(update={"samples": drops.size + more})
    assert not enough.explain_excess(0.01)
    assert (judged.count_missing(0.01), enough.count_missing(0.01), judged.count_missing(0.004)) == (more, 0, 0)
    assert judged.model_copy(update={"whole": True}).count_missing(0.01) == 0
    assert enough.model_copy(update={"samples": enough.samples - 1}).explain_excess(0.01)
