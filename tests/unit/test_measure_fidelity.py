"""Comparison of outputs with the reference's."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.errors import DataError, FidelityError, UsageError
from enginesmith.pipeline.frameworks.fidelity import SQNR_CAP_DB, Fidelity, compare, describe_failure, thresholds_for
from enginesmith.pipeline.measure.quality import MetricError, Quality, evaluate, find_metric
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.measure.statistics import count_for_width, drop_interval
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.tensors import Array, find_fill
from enginesmith.pipeline.workflows.stages import _describe_closeness

FP32 = thresholds_for("fp32")
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((64, 10)).astype(np.float32)


def against(reference: Array, actual: Array, precision: str = "fp32") -> Fidelity:
    return compare({"y": reference}, {"y": actual}, thresholds_for(precision))


@pytest.mark.parametrize("decibels", [20, 60, 100])
def test_sqnr_is_the_noise_that_was_added(decibels: int) -> None:
    signal = RNG.standard_normal((1000, 100))
    noise = RNG.standard_normal(signal.shape) * 10 ** (-decibels / 20)
    assert against(signal, signal + noise).sqnr_db == pytest.approx(decibels, abs=0.1)


def test_numbers_are_summed_over_pieces() -> None:
    """Larger than one piece, with the greatest error in the last."""
    reference = np.ones((3, 1 << 19), np.float32)
    actual = reference.copy()
    actual[-1, -1] = 3
    found = against(reference, actual)
    assert (found.max_abs_error, found.sqnr_db) == (2, pytest.approx(10 * np.log10(reference.size / 4)))


@pytest.mark.parametrize(
    ("decibels", "asked", "passed", "words"),
    [
        (126.0, None, True, "equals net"),
        (None, None, True, "equals net"),
        (43.68, None, True, "is close enough to net: lowest SQNR 43.7 dB"),
        (10.1, 0.0, True, "is close enough to net: lowest SQNR 10.1 dB, 0 dB asked for"),
        (-3.0, 0.0, False, "is not close enough to net: lowest SQNR -3.0 dB, 0 dB asked for"),
        (10.1, 3.0, True, "is close enough to net: lowest SQNR 10.1 dB, 3 dB asked for"),
        (10.1, 30.0, False, "is not close enough to net: lowest SQNR 10.1 dB, 30 dB asked for"),
        (10.1, None, False, "differs from net"),
        (10.1, 3.0, False, "differs from net"),
    ],
)
def test_only_what_is_as_close_as_float32_equals_the_model(
    decibels: float | None, asked: float | None, passed: bool, words: str
) -> None:
    entry = {"stage": "net.onnx", "point": "min", "batch": 1, "cosine": None, "max_abs_error": None}
    entry |= {"sqnr_db": decibels, "argmax_agreement": None, "passed": passed}
    recipe = make({"model": "net", "min_sqnr_db": asked})
    assert _describe_closeness([StageFidelity.model_validate(entry)], recipe) == words
    told = _describe_closeness([StageFidelity.model_validate(entry | {"unverified": {"label": 0.63}})], recipe)
    beside = ", but for what is not verified: 'label' (rounding decides 63 % of it)"
    assert told == words + (beside if passed else "")


def test_fp32_needs_sqnr_or_a_small_error() -> None:
    assert against(LOGITS, LOGITS * (1 + 1e-6)).passed
    assert not against(LOGITS, LOGITS * (1 + 1e-3)).passed
    spike = np.zeros(1_000_000)
    spike[0] = 1.0
    near = spike + 9e-5 * np.sign(RNG.standard_normal(spike.size))
    found = against(spike, near)
    assert found.sqnr_db is not None
    assert found.sqnr_db < 90
    assert found.passed


def test_precisions_ask_for_less() -> None:
    rough = LOGITS + 0.02 * RNG.standard_normal(LOGITS.shape)
    assert not against(LOGITS, rough, "fp32").passed
    assert against(LOGITS, rough, "int8").passed
    with pytest.raises(UsageError, match="fp5"):
        thresholds_for("fp5")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_new_nan_or_inf_fails(bad: float) -> None:
    actual = LOGITS.copy()
    actual[3, 3] = bad
    found = against(LOGITS, actual, "int4")
    assert not found.finite
    assert not found.passed
    assert found.sqnr_db == SQNR_CAP_DB


def test_the_references_own_nan_and_inf_are_agreed() -> None:
    reference = LOGITS.copy()
    reference[0, :3] = np.nan, np.inf, -np.inf
    assert against(reference, reference.copy()).passed
    other = reference.copy()
    other[0, 1] = -np.inf
    assert not against(reference, other).passed


def test_nothing_finite_to_compare() -> None:
    reference = np.full((2, 2), np.nan)
    assert against(reference, reference.copy()).passed
    assert not against(reference, np.ones((2, 2))).passed


def test_constant_and_zero_references() -> None:
    ones, zeros = np.ones((4, 1)), np.zeros((4, 1))
    assert against(ones, ones + 5e-5).passed
    assert not against(ones, ones + 5e-2).passed
    found = against(zeros, zeros + 1e-6)
    assert found.passed
    assert found.sqnr_db is None
    assert "zero" in found.reasons["sqnr_db"]
    assert not against(zeros, zeros + 1.0).passed


@pytest.mark.parametrize("fill", [-1e4, -1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_masked_places_do_not_hide_wrong_numbers(fill: float, precision: str) -> None:
    """Also where the mask is added to a logit, and where half of the numbers are masked."""
    masked, other = LOGITS.copy(), RNG.standard_normal(LOGITS.shape).astype(np.float32)
    masked[:, 5:] += fill
    other[:, 5:] += fill
    assert not against(masked, other, precision).passed
    assert against(masked, masked - 1e-6 * LOGITS, precision).passed
    unmasked = masked.copy()
    unmasked[0, 7] = 0
    assert not against(masked, unmasked, precision).passed
    assert against(masked, other).sqnr_db == against(masked[:, :5], other[:, :5]).sqnr_db


def test_large_numbers_that_differ_fill_nothing() -> None:
    """With numbers of many sizes, the part that is rounded away is as small as the precision allows."""
    wide = np.exp(np.linspace(-8, 10, 400))
    assert against(wide, np.round(wide), "int8").passed
    for values, fill in (([2000, 5], 1900), ([2000, 100], np.inf), ([2000, 1e-4], np.inf), ([900, 5], np.inf)):
        assert find_fill([np.float64(values)]) == fill
    assert against(np.float32([2000.0, 2000.0]), np.float32([2000.0, 2001.0]), "int8").passed


def test_an_output_that_is_0_in_the_reference_is_described_by_its_error() -> None:
    """There is no share of equal elements, nor an SQNR."""
    failed = against(np.zeros((2, 3), np.float32), np.full((2, 3), 0.25, np.float32))
    assert not failed.passed
    told = "output 'y' has other numbers than 0, which it is throughout in the reference: max abs error 0.25"
    assert describe_failure(failed).startswith(told)
    assert describe_failure(against(np.int64([0, 1, 2]), np.int64([0, 1, 1]))).endswith(
        "agrees in 66.67 % of its elements"
    )


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_pixels_do_not_hide_wrong_probabilities(axis: int, precision: str) -> None:
    """An int8 head with one scale for both has scores of zero (ultralytics: YOLO11s, mAP 0.743 to 0.324)."""
    boxes, scores = 640 * RNG.random((2, 4, 100)), RNG.random((2, 8, 100)) ** 8

    def head(scores: Array, boxes: Array = boxes) -> Array:
        return np.swapaxes(np.concatenate([boxes, scores], axis=1), 1, axis).astype(np.float32)

    lost = against(head(scores), head(0 * scores), precision)
    assert not lost.passed
    if precision != "fp32":  # which asks more of the whole
        assert describe_failure(lost).startswith("the probabilities of output 'y' have an SQNR of 0.0 dB")
    assert against(head(scores), head(scores * (1 + 1e-6)), precision).passed
    assert not against(head(scores), head(scores, boxes[::-1]), precision).passed
    few = 0.001 * scores  # nothing is detected, and noise is as large as the scores
    assert against(head(few), head(few[::-1]), "int8").passed


@pytest.mark.parametrize("shape", [(64, 2), (4, 2, 8, 8), (2, 50, 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_column_in_a_large_unit_does_not_hide_that_another_is_lost(precision: str, shape: tuple[int, ...]) -> None:
    """A price of some 200 000 and a risk below 1 in one tensor, whose int8 levels are wider than all risks."""
    axis = 1 if len(shape) == 4 else -1
    small = np.arange(2).reshape(-1, *(1,) * (2 if axis == 1 else 0)) == 1
    both = np.where(small, 0.87 + 0.17 * RNG.standard_normal(shape), 2e5 + 4e4 * RNG.standard_normal(shape))
    assert against(both, both * (1 + 1e-6), precision).passed
    for lost in (0.0, 0.87):
        pooled = against(both.reshape(-1), np.where(small, lost, both).reshape(-1), precision)
        assert pooled.passed, "all numbers together do not tell"
        apart = against(both, np.where(small, lost, both), precision)
        assert not apart.passed
        assert describe_failure(apart).startswith("column 1 of output 'y' has an SQNR of ")
    nearly = both + np.where(small, 1e-4, 0) * RNG.standard_normal(shape)
    assert against(both, nearly, "fp32").passed, "columns are asked whether they are lost, not for 90 dB"


def test_columns_of_one_unit_and_of_rounding_are_not_judged_apart() -> None:
    features = 100 * RNG.random((64, 40)) * np.logspace(0, -4, 40)
    quiet = np.where(np.arange(40) == 39, 0, features)
    assert against(features, quiet, "int8").passed, "features of a network, of which some are hardly used"
    scores = np.stack([40 * RNG.random(64), 1e-3 * RNG.random(64)], 1)
    assert against(scores, scores * [1, 0], "int8").passed, "a score that is always nearly 0"
    offset = np.stack([1000 * RNG.random(64), np.float32(1e6) + np.float32(1e-1) * RNG.random(64)], 1)
    assert against(offset, np.where([False, True], 1e6, offset), "int8").passed, "what float32 can hardly tell"


def test_the_bound_that_failed_is_named_whatever_it_is() -> None:
    far = (300 + RNG.standard_normal((64, 4))).astype(np.float32)
    compared = compare({"y": far}, {"y": np.full_like(far, 300)}, thresholds_for("int8"), ranges={"y": 6.0})
    assert not compared.passed
    assert re.search(
        r"SQNR of 49\.. dB, .* the root mean square error is 1[67]\.\d % of the range, above 15.8 %",
        describe_failure(compared),
    )
    masked = np.where(np.arange(4) == 3, np.float32(-1e9), far)
    assert describe_failure(against(masked, far, "int8")).endswith("other numbers in masked places")
    classes = np.zeros(100, np.int64)
    classes[:5] = 7
    lost = describe_failure(compare({"y": classes}, {"y": 0 * classes}, thresholds_for("int8")))
    assert lost == "output 'y' agrees in 95.00 % of its elements, but in hardly any of those that are 7"
    low = describe_failure(against(far - 300, 0 * far, "int8"))
    assert low.endswith("of the range of the answers)"), "SQNR alone"


def test_rounding_may_move_an_engine_as_far_as_the_reference_itself() -> None:
    """Coordinates of some millions in sines: eager and an engine are equally far from the exact answer."""
    other = LOGITS + 1e-3 * RNG.standard_normal(LOGITS.shape).astype(np.float32)
    answers = {"y": LOGITS}, {"y": other}
    assert not compare(*answers, FP32).passed
    assert compare(*answers, FP32, rounding={"y": 0.01}).passed
    assert not compare(*answers, FP32, rounding={"y": 1e-4}).passed
    assert not compare(*answers, FP32.with_sqnr(90), rounding={"y": 0.01}).passed, "what was asked for"
    assert not compare({"y": LOGITS}, {"y": LOGITS[::-1]}, FP32, rounding={"y": 100.0}).passed, "1 % at most"
    assert not compare({"y": LOGITS}, {"y": 5 * LOGITS}, thresholds_for("int8"), rounding={"y": 100.0}).passed


@pytest.mark.parametrize(("share", "passes"), [(0.2, True), (0.9, False)])
def test_steps_of_a_quantized_reference_may_move_some_numbers_and_not_all(share: float, passes: bool) -> None:
    """A step of 4 bits is more than 1 % of the range; most numbers a step off have another zero point."""
    step = np.ptp(LOGITS) / 16
    steps = np.round(LOGITS / step) * step
    moved = steps + step * (RNG.random(steps.shape) < share)
    explained = 10 * np.log10(np.square(steps).sum() / (steps.size * step**2 / 2))
    limits = {"rounding": {"y": 1.01 * step}, "quantized_db": {"y": float(explained)}}
    judged = compare({"y": steps.astype(np.float32)}, {"y": moved.astype(np.float32)}, FP32, **limits)
    assert judged.passed is judged.outputs[0].is_rounding is passes


@pytest.mark.parametrize("dtype", ["bool", "int64"])
def test_a_rare_value_may_not_vanish_though_nearly_all_are_equal(dtype: str) -> None:
    rare = np.zeros(200, dtype)
    rare[:10] = 1
    half, few = rare.copy(), np.zeros(200, dtype)
    half[:4] = 0
    few[0] = 1
    assert not against(rare, 0 * rare, "int8").passed
    assert not against(rare, few, "int8").passed
    assert against(rare, half, "int8").passed
    assert against(few, 0 * few, "int8").passed, "a single one may lie on an edge"
    assert against(np.arange(200), np.where(np.arange(200) == 5, 6, np.arange(200)), "int8").passed


@pytest.mark.parametrize("shape", [(2, 3, 40, 40), (2, 40, 40), (2, 40, 1200)])
def test_dark_places_beside_bright_ones_are_no_probabilities(shape: tuple[int, ...]) -> None:
    """Borders of an image, rows of a depth map without a value, channels that nothing excites."""
    picture = 255 * RNG.random(shape)
    picture[..., :8, :] *= 0.5 / 255
    noise = 0.3 * RNG.standard_normal(shape)
    assert against(picture, picture + noise, "int8").passed


def test_one_class_of_ten_thousand_may_lie_on_an_edge() -> None:
    classes = np.zeros((1, 200, 200), np.int64)
    edge = classes.copy()
    edge[0, 0, :4] = 1
    assert against(classes, edge).passed
    edge[0, 0, 4] = 1
    assert not against(classes, edge).passed


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8])
def test_integers_are_compared_exactly(dtype: type) -> None:
    reference = np.arange(100).reshape(10, 10).astype(dtype)
    actual = reference.copy()
    assert against(reference, actual).passed
    actual[0, 0] = not actual[0, 0]
    found = against(reference, actual)
    assert not found.passed
    assert found.outputs[0].agreement == 0.99
    assert against(reference, actual, "fp16").passed


def test_worst_output_counts() -> None:
    found = compare({"a": LOGITS, "b": LOGITS}, {"a": LOGITS, "b": LOGITS * 1.1}, FP32)
    assert not found.passed
    assert [output.passed for output in found.outputs] == [True, False]
    assert found.sqnr_db == found.outputs[1].sqnr_db == pytest.approx(20, abs=0.01)


def test_argmax_is_over_classes() -> None:
    logits = np.eye(4)
    swapped = logits.copy()
    swapped[0] = logits[1]
    assert against(logits, swapped).argmax_agreement == 0.75
    image = np.zeros((1, 2, 3, 3))
    image[:, 1] = 1
    assert against(image, image[:, ::-1]).argmax_agreement == 0.0
    assert against(np.ones(3), np.ones(3)).argmax_agreement is None


@pytest.mark.parametrize("actual", [LOGITS[:3], LOGITS.astype(np.int64), LOGITS[..., None]])
def test_other_shapes_and_kinds_are_an_error(actual: Array) -> None:
    with pytest.raises(FidelityError, match="'y'"):
        against(LOGITS, actual)


def test_a_dimension_that_squeeze_drops_is_told() -> None:
    with pytest.raises(FidelityError) as error:
        against(LOGITS[0], LOGITS[:1])
    assert "squeeze(1)" in error.value.remedy
    with pytest.raises(FidelityError) as error:
        against(LOGITS[:1], LOGITS[:2])
    assert not error.value.remedy


def test_missing_output_is_an_error() -> None:
    with pytest.raises(FidelityError, match="reference's are"):
        compare({"y": LOGITS}, {"z": LOGITS}, FP32)


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


@pytest.mark.parametrize(
    ("center", "dtype", "spans", "passed"),
    [
        (1e9, np.float64, True, False),  # the answers are lost, at an SQNR of 180 dB
        (1e9, np.float64, False, True),  # the range of all answers is not known
        (1e9, np.float32, True, True),  # float32 has no such differences
        (300.0, np.float32, True, False),
        (0.0, np.float32, True, False),
    ],
)
def test_an_engine_with_the_same_answer_for_all_is_wrong_far_from_zero_too(
    center: float, dtype: Any, spans: bool, passed: bool
) -> None:
    wanted = {"y": (center + np.linspace(-3, 3, 32)).astype(dtype)}
    given = {"y": np.full(32, center, dtype)}
    thresholds = thresholds_for("int8" if center == 300.0 else "fp32")
    found = compare(wanted, given, thresholds, ranges={"y": 6.0} if spans else {})
    assert found.passed == passed
