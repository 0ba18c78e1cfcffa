"""Test what one group alone in few bits changes in the answers."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.calibration.ranges import METHODS, Ranges, TensorRange
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import measure_losses
from enginesmith.pipeline.frameworks.onnx import edit, model_file
from enginesmith.pipeline.frameworks.samples import Case, Samples
from enginesmith.pipeline.passes.quantize.activation_capture import open_activation_capture
from enginesmith.pipeline.passes.quantize.layerwise_error import SWITCHES, add_switches
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.precisions import WEAK_DB
from enginesmith.pipeline.passes.quantize.qdq import Settings, find_writers, quantize
from enginesmith.pipeline.passes.quantize.search import GroupFact
from enginesmith.pipeline.passes.quantize.weights import quantize_to_int4
from enginesmith.pipeline.passes.rescale.smooth_quant import Smooth
from enginesmith.pipeline.tasks import graph_forms
from enginesmith.pipeline.tasks.base import RECORDS, read_models
from enginesmith.pipeline.tasks.calibrate import Calibrate, Feeder
from enginesmith.pipeline.tasks.graph_forms import (
    MODEL,
    RANGES,
    REFERENCE,
    SENSITIVITY,
    Rescale,
    Sensitivity,
    measure_impacts,
)
from enginesmith.pipeline.tensors import ShapeRange
from graphs import NOWHERE, normal, parse_graph, run_model, sqnr_db
from two_products import NET, RNG, WEIGHTS, X, facts, prepare


def measure(
    inputs: dict[str, Artifact],
    *,
    precision: Any = "int8",
    corrected: bool = False,
    fixed: tuple[str, ...] = (),
    seconds: float = 60.0,
) -> tuple[dict[str, float], bool]:
    options = {"method": "minmax", "bias_correction": corrected} if precision == "int8" else {}
    step = Precision(precision=precision, placement="inputs+read outputs", **options)
    names = [name for name in ("first", "second") if name not in fixed]
    impacts, measured = measure_impacts(step, "given", inputs, {}, names, seconds / 0.3, lambda _: None)
    return {name: impact.energy for name, impact in impacts.items()}, measured


def test_the_impact_of_a_group_is_what_it_alone_changes_in_the_answers(tmp_path: Path) -> None:
    found, every = measure(prepare(tmp_path))
    low, high = float(X.min()), float(X.max())
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    x = ((np.rint(X / scale) + zero).clip(0, 255) - zero) * scale
    scales = np.abs(WEIGHTS["w"]).max(axis=0) / 127
    error = x @ (np.rint(WEIGHTS["w"] / scales) * scales) - X @ WEIGHTS["w"]
    energy = (X @ (WEIGHTS["w"] + 1e-3 * WEIGHTS["v"])) ** 2
    assert found["first"] == pytest.approx((error**2).sum() / energy.sum(), rel=1e-3)
    assert 0 < found["second"] < 1e-4 * found["first"]
    assert every


def test_a_constant_in_all_answers_hides_no_impact(tmp_path: Path) -> None:
    net = NET.replace("y = Add(m, s)", "n = Add(m, s)\n    y = Add(n, far)")
    found, _ = measure(prepare(tmp_path, net))
    (plain := tmp_path / "plain").mkdir()
    energies, _ = measure(prepare(plain))
    y = X @ (WEIGHTS["w"] + 1e-3 * WEIGHTS["v"])
    assert found["first"] == pytest.approx(
        energies["first"] * np.square(y).sum() / np.square(y - y.mean()).sum(), rel=0.01
    )
    assert found["second"] < 1e-4 * found["first"]


@pytest.mark.parametrize(
    ("answers", "offset"),
    [
        ([2000, 2002, 1998], 2000),
        ([-2000, -2002, -1998], -2000),
        ([0.1, 0.5, 0.9], 0),
        ([3, -3, 1], 0),
        ([2000, 2000, 2000], 0),
        ([2000, 2000.001, 2000], 0),
        ([2000, 2002, 1998, -np.inf, np.nan], 2000),
        ([20, 22, 18, -1e9, -1e9], 20),
        ([], 0),
        ([np.inf], 0),
    ],
)
def test_an_offset_is_a_constant_that_all_answers_are_near(answers: list[float], offset: float) -> None:
    calls = np.float32(answers)
    assert graph_forms.find_offset([calls]) == pytest.approx(offset)
    assert graph_forms.find_offset([calls[:1], calls[1:]]) == pytest.approx(offset)


BRANCH = "g () => (int64[batch] p) { p = ArgMax<axis=1, keepdims=0>(y) }"
CHOOSING = {
    "branches": (
        "int64[batch] z",
        f"n = Size(x) c = Cast<to=9>(n) z = If(c) <then_branch = {BRANCH}, else_branch = {BRANCH}>",
    ),
    "classes": ("int64[batch] z", "z = ArgMax<axis=1, keepdims=0>(y)"),
    "classes as floats": ("float[batch] z", "k = ArgMax<axis=1, keepdims=0>(y) z = Cast<to=1>(k)"),
    "sorted": ("float[batch, 2] top, int64[batch, 2] z", "two = Constant<value_ints=[2]>() top, z = TopK(y, two)"),
    "whole numbers": ("int64[batch, 6] z", "r = Round(y) z = Cast<to=7>(r)"),
    "sizes beside": ("int64[batch] z", "n = Shape<start=1>(s) k = ArgMax<axis=1, keepdims=0>(y) z = Mul(k, n)"),
}
"""Outputs that are no floats in a fixed order, and how they come from the scores ``y``."""


@pytest.mark.parametrize("case", CHOOSING)
def test_where_answers_are_choices_the_impact_is_that_on_their_scores(case: str, tmp_path: Path) -> None:
    (tmp_path / "scores").mkdir()
    wanted, _ = measure(prepare(tmp_path / "scores"))
    declared, choice = CHOOSING[case]
    net = NET.replace("float[batch, 6] y) {", f"{declared}) {{").replace("\n}", f"\n    {choice}\n}}")
    found, _ = measure(prepare(tmp_path, net))
    assert found == {name: pytest.approx(energy, rel=1e-6) for name, energy in wanted.items()}


CONVOLUTIONS = """net (float[batch, 3, 4, 4] x) => (float[batch, 2, 4, 4] y) {
    a = Conv(x, w)
    b = Relu(a)
    c = Conv(b, v)
    m = Mul(c, tiny)
    d = Add(m, x_)
    y = Conv(d, q)
}"""


@pytest.mark.parametrize("placement", ["inputs", "inputs+outputs", "inputs+read outputs"])
def test_the_impact_is_that_of_the_graph_with_all_others_in_float(placement: Any, tmp_path: Path) -> None:
    """Round what a convolution writes with it, where the engine does that; also where it is an output."""
    weights = {name: normal(2 if name == "q" else 3, 3, 1, 1, seed=seed) for seed, name in enumerate("wvq")}
    weights |= {"tiny": np.float32(0.5), "x_": normal(1, 3, 4, 4)}
    (folder := tmp_path / "float").mkdir()
    path = folder / "model.onnx"
    ir.save(parse_graph(CONVOLUTIONS, named=True, **weights), path)
    x = normal(8, 3, 4, 4, seed=5)
    values = {"x": x, **run_model(ir.load(path), {"x": x}, optimized=False, every_value=True)}
    tensors = {
        name: TensorRange(
            minimum=float(value.min()), maximum=float(value.max()), count=1, amax=dict.fromkeys(METHODS, 3.0)
        )
        for name, value in values.items()
    }
    ranges = Ranges(model_sha256="m", provenance=NOWHERE, tensors=tensors)
    (folder / "ranges.json").write_text(ranges.model_dump_json())
    (folder / "records.json").write_text(json.dumps([f.model_dump() for f in facts(*((n, 9.0, 1) for n in "acy"))]))
    samples.write_arrays(folder, "feeds", 0, {"x": x})
    cases = (Case(sizes={"batch": 8}, batch=8),)
    samples.write(folder, Samples(data="x", ranges={"batch": ShapeRange.parse("8:8:8")}, cases=cases))
    inputs = {
        name: Artifact(kind="record", path=folder / file, sha256="", bytes=0)
        for name, file in ((RANGES, "ranges.json"), (SENSITIVITY, "records.json"), (REFERENCE, samples.RECORD))
    }
    inputs[MODEL] = Artifact(kind="onnx", path=path, sha256="m", bytes=0, signature=model_file.signature(path))
    step = Precision(precision="int8", placement=placement, method="minmax")
    impacts, _ = measure_impacts(step, "given", inputs, {}, "acy", 200.0, lambda _: None)
    for name in "acy":
        (out := tmp_path / name).mkdir()
        kept = [{"group": other, "precision": "fp32"} for other in "acy" if other != name]
        (out / "kept.json").write_text(json.dumps(kept))
        records = {
            RANGES: inputs[RANGES],
            "assignment": Artifact(kind="record", path=out / "kept.json", sha256="", bytes=0),
        }
        step.apply(inputs[MODEL], out, lambda _: None, records)
        answer = run_model(ir.load(out / edit.FILE), {"x": x}, optimized=False)["y"]
        loss = max(measure_losses("output 'y'", [(values["y"], answer)], [], batch=8).values())
        assert impacts[name].energy == pytest.approx(loss, rel=1e-3)


BIASED = """net (float[batch, 8] x) => (float[batch, 6] y) {
    p = MatMul(x, w)
    m = Add(p, u)
    y = Gemm(m, q, t)
}"""
"""Products with a bias beside and within them."""


@pytest.mark.parametrize("net", [NET, BIASED, BIASED.replace(", t)", ")")])
@pytest.mark.parametrize("corrected", [False, True])
def test_with_all_switches_off_nothing_is_rounded(net: str, corrected: bool, tmp_path: Path) -> None:
    inputs = prepare(tmp_path, net)
    step = Precision(
        precision="int8", placement="inputs+read outputs", method="minmax", bias_correction=corrected
    ).rounding_inputs()
    (out := tmp_path / "out").mkdir()
    step.apply(inputs[MODEL], out, lambda _: None, {RANGES: inputs[RANGES]})
    floating, quantized = edit.load(inputs[MODEL].path), edit.load(out / edit.FILE)
    assert add_switches(floating, quantized) == ("first", "second")
    edit.save(quantized, out)
    wanted = run_model(ir.load(inputs[MODEL].path), {"x": X}, optimized=False)["y"]
    with open_activation_capture(out / edit.FILE, ["y"]) as session:
        off, on = (session.run({"x": X, SWITCHES: np.full(2, value)})["y"] for value in (False, True))
    np.testing.assert_allclose(off, wanted, rtol=1e-5, atol=1e-5)
    assert not np.allclose(on, wanted, rtol=1e-3, atol=1e-3)


UNITS = """net (float[batch, 8] x) => (float[batch, 2] y) <float[batch, 6] m, float[batch, 6] h> {
    m = MatMul(x, w)
    h = Mul(m, units)
    y = MatMul(h, heads)
}"""
"""A price of some 10 000, which one large channel makes, beside a risk that the others make."""


def test_a_group_that_loses_a_column_in_another_unit_has_the_largest_impact(tmp_path: Path) -> None:
    """All columns together, the first product changes the answers more."""
    inputs = prepare(tmp_path, UNITS)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    impacts, _ = measure_impacts(step, "given", inputs, {}, ("first", "second"), 200.0, lambda _: None)
    assert impacts["second"] == (1.0, "column 1 of output 'y'")
    assert impacts["first"].energy < 0.1


@pytest.mark.parametrize(("net", "part"), [(UNITS, "column 1 of output 'y'"), (NET, "")])
def test_a_group_is_as_sensitive_as_the_part_of_the_answers_that_it_loses(net: str, part: str, tmp_path: Path) -> None:
    """The own error tells where an answer has one unit."""
    inputs = prepare(tmp_path, net)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax").rounding_inputs()
    (out := tmp_path / "out").mkdir()
    Sensitivity(step=step, feeder=Feeder(data=None, seed=0, samples=8)).run(inputs, out, lambda _: None)
    second = read_models(Artifact(kind="record", path=out / RECORDS, sha256="", bytes=0), GroupFact)[1]
    assert second.sqnr_db is not None
    if not part:
        assert second.sqnr_db > WEAK_DB
        return
    assert second.sqnr_db == 0
    assert second.pattern == "uneven activations"
    assert second.cause.startswith(f"{part}: activations to ")


def test_channels_are_scaled_for_the_part_of_the_answers_that_is_lost(tmp_path: Path) -> None:
    """Judged by all columns, the price's channel would stay as it is: the others hardly add to their sum."""
    inputs, feeder = prepare(tmp_path, UNITS), Feeder(data=None, seed=0, samples=8)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    sensitivity = Sensitivity(step=step.rounding_inputs(), feeder=feeder)
    for name in ("sensitivity", "rescaled"):
        (tmp_path / name).mkdir()
    sensitivity.run(inputs, tmp_path / "sensitivity", lambda _: None)
    inputs[SENSITIVITY] = Artifact(kind="record", path=tmp_path / "sensitivity" / RECORDS, sha256="", bytes=0)
    task = Rescale(steps=(Smooth(),), calibration=Calibrate(feeder=feeder), sensitivity=sensitivity)
    effect = task.run(inputs, tmp_path / "rescaled", lambda _: None)
    assert not effect.rejected
    rescaled = Artifact(kind="record", path=tmp_path / "rescaled" / RECORDS, sha256="", bytes=0)
    lost = {group.name: group.sqnr_db for group in read_models(rescaled, GroupFact)}
    assert lost["second"] is not None
    assert lost["second"] > 10, "it was 0 dB"
    (again := tmp_path / "again").mkdir()
    assert task.model_copy(update={"left_seconds": 0.0}).run(inputs, again, lambda _: None).incomplete


def test_sensitivity_to_parts_is_measured_again_where_time_was_too_short(tmp_path: Path) -> None:
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax").rounding_inputs()
    (out := tmp_path / "out").mkdir()
    task = Sensitivity(step=step, feeder=Feeder(data=None, seed=0, samples=8), left_seconds=0.0)
    assert task.run(prepare(tmp_path, UNITS), out, lambda _: None).incomplete
    for left in (0.0, math.inf):
        task = task.model_copy(update={"left_seconds": left})
        assert not task.run(prepare(tmp_path, NET if not left else UNITS), out, lambda _: None).incomplete


def test_a_bias_that_makes_up_for_a_weight_counts_with_it(tmp_path: Path) -> None:
    """The mean error of the rounded weight is gone from the answers, also where a MatMul's bias is added behind it."""
    inputs = prepare(tmp_path, BIASED)
    plain, corrected = measure(inputs)[0], measure(inputs, corrected=True)[0]
    assert 0 < corrected["first"] < plain["first"]
    assert 0 < corrected["second"] < plain["second"]


@pytest.mark.parametrize(
    ("checks", "known"), [(1, ()), (2, ("first", "second")), (3, ("first", "second")), (4, ("first", "second"))]
)
def test_where_time_is_short_fewer_samples_have_to_do(
    checks: int, known: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some groups alone would be ranked before the others, whatever they change."""
    inputs = prepare(tmp_path)
    cases = (Case(sizes={"batch": 1}, batch=1, calls=2),)
    samples.write_arrays(inputs[REFERENCE].folder, "feeds", 0, {"x": X[1:2]}, 1)
    samples.write(inputs[REFERENCE].folder, Samples(data="x", ranges={"batch": ShapeRange.parse("1:1:8")}, cases=cases))
    clock = iter((0.0, *[59.0] * checks, *[61.0] * 9))
    monkeypatch.setattr(graph_forms, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found, measured = measure(inputs)
    assert (tuple(found), measured) == (known, bool(known))
    monkeypatch.undo()
    assert (measure(inputs)[0] == pytest.approx(found)) == (checks == 4)


def test_groups_that_stay_in_float_anyway_are_not_measured(tmp_path: Path) -> None:
    assert set(measure(prepare(tmp_path), fixed=("second",))[0]) == {"first"}


@pytest.mark.parametrize("outputs", [32, 16])
def test_weights_that_are_stored_the_other_way_round_are_turned(outputs: int, tmp_path: Path) -> None:
    """int4 weights are in blocks along the inputs."""
    text = f"net (float[n, 32] x) => (float[n, {outputs}] y) {{ y = Gemm <transB = 1> (x, w, b) }}"
    weights = {"w": RNG.standard_normal((outputs, 32), np.float32), "b": RNG.standard_normal(outputs, np.float32)}
    floating, quantized = (parse_graph(text, named=True, **weights) for _ in range(2))
    quantize_to_int4(quantized, Settings())
    assert add_switches(floating, quantized) == ("y",)
    edit.save(quantized, tmp_path)
    x = RNG.standard_normal((4, 32), np.float32)
    with open_activation_capture(tmp_path / edit.FILE, ["y"]) as session:
        found = session.run({"x": x, SWITCHES: np.zeros(1, bool)})["y"]
    np.testing.assert_allclose(found, x @ weights["w"].T + weights["b"], rtol=1e-4, atol=1e-4)


def test_what_enlarges_pictures_is_measured_as_the_convolution_that_it_becomes(tmp_path: Path) -> None:
    text = """net (float[n, 32, 4, 4] x) => (float[n, 4, 8, 8] y) {
        u = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w, b)
        y = Relu(u)
    }"""
    weights = {"w": RNG.standard_normal((32, 4, 4, 4), np.float32), "b": RNG.standard_normal(4, np.float32)}
    model, quantized = (parse_graph(text, named=True, **weights) for _ in range(2))
    x = RNG.standard_normal((2, 32, 4, 4), np.float32)
    spans = {"x": (-4.0, 4.0), "y": (0.0, 80.0)}
    tensors = {
        name: TensorRange(minimum=low, maximum=high, count=1, amax=dict.fromkeys(METHODS, high))
        for name, (low, high) in spans.items()
    }
    settings = Settings(placement="inputs+outputs")
    quantize(quantized, Ranges(model_sha256="", provenance=NOWHERE, tensors=tensors), settings)
    wanted = run_model(model, {"x": x}, optimized=False)["y"]
    assert add_switches(model, quantized, find_writers(quantized, settings.rules)) == ("u",)
    edit.save(quantized, tmp_path)
    with open_activation_capture(tmp_path / edit.FILE, ["y"]) as session:
        off, on = (session.run({"x": x, SWITCHES: np.array([value])})["y"] for value in (False, True))
    np.testing.assert_allclose(off, wanted, rtol=1e-4, atol=1e-4)
    assert 20 < sqnr_db(wanted, on) < 60


def test_without_pairs_nothing_is_measured(tmp_path: Path) -> None:
    assert measure(prepare(tmp_path), precision="int8-dynamic") == ({}, True)


def test_weights_that_could_be_fed_are_weights(tmp_path: Path) -> None:
    """Some graphs list their initializers among the inputs, too."""
    inputs = prepare(tmp_path)
    proto = onnx.load(inputs[MODEL].path)
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in proto.graph.initializer
    )
    wanted = measure(inputs)
    onnx.save(proto, inputs[MODEL].path)
    found = measure(inputs)
    assert found[0] == pytest.approx(wanted[0])


@pytest.mark.parametrize(
    ("exact", "answer", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.0], [3.0, 3.0], 1 / 25),
        ([1.0, 0.0], [-9.0, 0.0], 1.0),
        ([1.0, 2.0], [1.0], 1.0),
        ([1.0, -np.inf], [1.0, -np.inf], 0.0),
        ([1.0, 2.0], [1.0, np.nan], 1.0),
    ],
)
def test_errors_of_answers_are_of_their_energy(exact: list[float], answer: list[float], error: float) -> None:
    numbers, other = np.array(exact, np.float32), np.array(answer, np.float32)
    assert measure_losses("y", [(numbers, other)], []) == {"y": pytest.approx(error)}
