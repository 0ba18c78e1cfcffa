"""Why groups lose much: outliers of activations and weights, single peaks, or nothing that stands out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.calibration.ranges import ChannelStatistics, Provenance, Ranges, TensorRange
from enginesmith.pipeline.passes.finetune.options import Recovery
from enginesmith.pipeline.passes.quantize.causes import explain_loss
from enginesmith.pipeline.passes.quantize.layerwise_error import OwnError
from enginesmith.pipeline.report import run_tables, terminal
from enginesmith.pipeline.results.explain import choose_explained, list_losses
from enginesmith.pipeline.results.run import Assignment, SearchStep, VariantRecord
from graphs import normal, parse_graph
from runs import RECOVERY, small, variant

GRAPH = "net (float[N,8] x) => (float[N,4] y) <float[8,4] w> { y = MatMul(x, w) }"


def cause(
    amax: Any,
    weight: Any = None,
    rms: float = 0.3,
    largest: float = 1.0,
    shift: float = 0.0,
    middle: tuple[float, ...] = (0.0,) * 8,
    seen: int = 8 * 16,
    energy: float = 0.1,
) -> tuple[str, str]:
    sizes = tuple(float(size) for size in amax)
    statistics = ChannelStatistics(
        axis=1, amax=sizes, middle=middle, mean=(0.0,) * 8, mean_absolute=(rms,) * 8, mean_square=(rms**2,) * 8
    )
    tensor = TensorRange(minimum=-largest, maximum=largest, count=seen, amax={"mse": largest})
    origin = Provenance(data="d", digest="", rows=(), seed=0, batch=1)
    known = Ranges(model_sha256="", provenance=origin, tensors={"x": tensor}, channels={"x": statistics})
    model = parse_graph(GRAPH, w=normal(8, 4) if weight is None else weight)
    (node,) = model.graph
    return explain_loss(node, known, OwnError(energy=energy, shift=shift))


def test_few_large_channels_are_counted() -> None:
    assert cause([812, 700, 13, 12, 11, 14, 0, 13.2]) == (
        "uneven activations",
        "activations to 812 in 2 of 8 channels, and to 13.2 in the middle one",
    )


def test_channels_that_are_much_smaller_are_counted_beside_large_ones() -> None:
    words = "activations to 812 in 1 of 8 channels, to 12.1 in the middle one, and to no more than 0.5 in 2"
    assert cause([812, 12.2, 13, 12, 11, 14, 0.5, 0.25])[1] == words + ": up to 3200 times apart"


def test_large_weights_of_single_inputs_are_named() -> None:
    weight = np.ones((8, 4), np.float32)
    weight[3] = 64
    name, sentence = cause([1.0] * 8, weight)
    assert name == "uneven weights"
    assert sentence.startswith("weights of 1 input channels are up to 64 times as large")


def test_constant_offsets_are_named_before_what_they_do() -> None:
    middle = (-148.0, 120.0, 3.0, 0.0, 99.0, -2.0, 60.0, -4.0)
    amax = [abs(each) + 5 for each in middle]
    words = "constant offsets of up to 148 in 4 of 8 channels of its input, which vary by ±5"
    assert cause(amax, middle=middle, shift=0.9) == ("constant offsets", words)
    wider = [abs(each) + 60 for each in middle]  # what varies has levels enough
    assert cause(wider, middle=middle, shift=0.9)[0] == "shifted means"
    assert cause(amax, middle=middle, shift=0.9, seen=100)[0] == "shifted means"  # too few numbers to tell what varies
    assert cause([abs(each) for each in middle], middle=middle, shift=0.9)[0] == "shifted means"


def test_single_peaks_are_named() -> None:
    words = "single activations to 30, 60 times their root mean square"
    assert cause([30.0] * 8, rms=0.5, largest=30.0) == ("single peaks", words)


def test_an_error_that_is_the_same_for_all_samples_is_named_unless_channels_explain_it() -> None:
    words = "80% of its error is the same for all samples: rounding shifts the means of channels"
    assert cause([30.0] * 8, rms=0.5, largest=30.0, shift=0.8) == ("shifted means", words)
    assert cause([1.0] * 8, shift=0.4)[0] == "no outliers"
    assert cause([812, 700, 13, 12, 11, 14, 0, 13.2], shift=0.8)[0] == "uneven activations"


def test_where_nothing_stands_out_it_says_so() -> None:
    name, sentence = cause([1.0, 1.2, 0.8, 1.1, 1.3, 0.9, 1.0, 1.0])
    assert name == "no outliers"
    assert sentence.startswith("no channel stands out: 8 bits are few")
    assert cause([1.0] * 8, energy=1e-5)[1].startswith("no channel stands out, and its own result loses little")


WEAK = Assignment(
    group="c1", module="net.one", operator="Conv", precision="int8", sqnr_db=36.8, macs=60, form="rescaled",
    given_sqnr_db=4.0, cause="activations to 812",
)  # fmt: skip
KEPT = Assignment(
    group="c2", operator="Conv", precision="fp32", why="the goal needs it", sqnr_db=9.0, macs=40, given_sqnr_db=9.0
)
FINE = Assignment(group="c3", operator="Conv", precision="int8", sqnr_db=40.0, macs=100, given_sqnr_db=40.0)


def quantized(*groups: Assignment, **more: Any) -> VariantRecord:
    return variant("openvino-int8", precision="int8", assignment=groups, **more)


def test_what_loses_most_comes_first_with_its_remedy_and_cost() -> None:
    unknown = KEPT.model_copy(update={"group": "c4", "given_sqnr_db": None, "sqnr_db": None})
    losses = list_losses(quantized(FINE, unknown, KEPT, WEAK))
    assert [loss.group.group for loss in losses] == ["c1", "c2", "c4"]
    assert [loss.remedy for loss in losses[:2]] == ["channels rescaled", "stays in fp32: the goal needs it"]
    assert losses[0].cost == "nothing"
    assert list_losses(quantized(FINE, KEPT, WEAK))[1].cost == "20 % of the multiply-adds"
    measured = KEPT.model_copy(update={"answer_change": 0.12})
    assert list_losses(quantized(measured))[0].remedy == (
        "stays in fp32: the goal needs it; quantized alone, it changes the answers by 12 %"
    )
    assert [loss.group.group for loss in list_losses(quantized(WEAK, unknown, measured))] == ["c2", "c1", "c4"]
    (first, _) = run_tables.tabulate_group_losses(quantized(FINE, KEPT, WEAK)).rows
    assert first == ("net.one", "Conv", "4.0 → 36.8", "activations to 812", "channels rescaled", "nothing")


@pytest.mark.parametrize(
    ("form", "trained", "remedy"),
    [
        ("given", False, "none found: the goal is reached all the same"),
        ("given", True, "trained"),
        ("multiplied", True, "channels rescaled by multiplications, then trained"),
    ],
)
def test_remedies_are_named(form: str, trained: bool, remedy: str) -> None:
    recovery: tuple[Recovery, ...] = (RECOVERY.model_copy(update={"subject": "int8"}),) if trained else ()
    (loss,) = list_losses(quantized(WEAK.model_copy(update={"form": form}), recovery=recovery))
    assert loss.remedy == remedy


@pytest.mark.parametrize(
    ("form", "sqnr_db", "passed", "remedy", "cost"),
    [
        ("rescaled", -0.03, True, "none found: the goal is reached all the same, with 0.0 dB", "nothing"),
        ("multiplied", 5.0, True, "none found: the goal is reached all the same, with 5.0 dB", "nothing"),
        ("given", 4.0, True, "none found: the goal is reached all the same, with 4.0 dB", "nothing"),
        ("rescaled", 4.0, False, "none found, with 4.0 dB", "nothing"),
        (
            "multiplied", 20.0, True,
            "channels rescaled by multiplications: still 20.0 dB, the goal is reached all the same",
            "a multiplication where no operator takes the factors",
        ),
        ("rescaled", 20.0, False, "channels rescaled: still 20.0 dB", "nothing"),
        ("rescaled", 25.0, True, "channels rescaled", "nothing"),
    ],
)  # fmt: skip
def test_a_form_that_did_not_lift_a_group_is_not_its_remedy(
    form: str, sqnr_db: float, passed: bool, remedy: str, cost: str
) -> None:
    trial = SearchStep(step=1, quantized=1, kept=0, passed=passed, why="w")
    group = WEAK.model_copy(update={"form": form, "sqnr_db": sqnr_db})
    (loss,) = list_losses(quantized(group, search=(trial,)))
    assert (loss.remedy, loss.cost) == (remedy, cost)


def test_no_remedy_is_found_where_none_is_tried() -> None:
    """Activations are quantized in each call: no form of the graph makes their channels even."""
    record = quantized(WEAK.model_copy(update={"form": "given"}))
    (loss,) = list_losses(record.model_copy(update={"precision": "int8-dynamic"}))
    assert loss.remedy == "none is tried in int8-dynamic: the goal is reached all the same"


def test_a_group_that_loses_much_only_after_rescaling_is_listed() -> None:
    worse = FINE.model_copy(update={"form": "rescaled", "sqnr_db": 12.0})
    assert [loss.remedy for loss in list_losses(quantized(worse))] == [
        "none found: the goal is reached all the same, with 12.0 dB"
    ]


def test_the_winner_is_explained_if_it_is_quantized_else_the_first_that_is() -> None:
    plain, first = variant("onnxruntime-fp32"), quantized(WEAK)
    second = first.model_copy(update={"id": "onnxruntime-int8"})
    eager = variant("eager", engine="eager")
    assert choose_explained(small(eager, plain, first, second, winner="onnxruntime-int8"), None) == second
    assert choose_explained(small(eager, plain, first, second, winner="onnxruntime-fp32"), None) == first
    dropped = first.model_copy(update={"status": "skipped"})
    assert choose_explained(small(eager, plain, dropped, second, winner="onnxruntime-fp32"), None) == second
    assert choose_explained(small(eager, plain, first, winner=None), "onnxruntime-fp32") == plain


def test_it_is_told_on_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = quantized(WEAK, FINE)
    made = small(variant("eager", engine="eager"), record, winner=record.id)
    terminal.show_explanation(made, record, as_json=False)
    shown = capsys.readouterr().out
    assert "2 of 2 groups in int8" in shown
    assert "activations to 812" in shown
    terminal.show_explanation(made, quantized(FINE), as_json=False)
    assert "no group loses much" in capsys.readouterr().out
    half = FINE.model_copy(update={"precision": "bf16", "given_sqnr_db": None, "sqnr_db": None})
    kept = KEPT.model_copy(update={"answer_change": 0.08, "given_sqnr_db": None})
    for groups, words in (
        ((half,), "no group has to stay in float32"),
        ((half, kept), "stays in fp32: the goal needs it"),
    ):
        terminal.show_explanation(made, variant("openvino-bf16", precision="bf16", assignment=groups), as_json=False)
        assert words in capsys.readouterr().out
    (loss,) = list_losses(variant("openvino-bf16", precision="bf16", assignment=(half, kept)))
    assert loss.remedy.endswith("in bf16 alone, it changes the answers by 8 %")
    terminal.show_explanation(made, record, as_json=True)
    assert '"cause": "activations to 812"' in capsys.readouterr().out
