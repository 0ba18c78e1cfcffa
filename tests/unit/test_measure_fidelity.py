"""Comparison of outputs with the reference's."""

import re
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.errors import FidelityError, UsageError
from enginesmith.pipeline.frameworks.fidelity import SQNR_CAP_DB, Fidelity, compare, describe_failure, thresholds_for
from enginesmith.pipeline.measure.rows import StageFidelity
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
        against(LOGITS, LOGITS[:, None])
    assert error.value.remedy.startswith("they differ in axes of 1: where a model calls squeeze()"), "of no batch of 1"
    with pytest.raises(FidelityError) as error:
        against(LOGITS[:1], LOGITS[:2])
    assert not error.value.remedy


def test_missing_output_is_an_error() -> None:
    with pytest.raises(FidelityError, match="reference's are"):
        compare({"y": LOGITS}, {"z": LOGITS}, FP32)


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
