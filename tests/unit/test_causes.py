"""Test causes beyond a group's own numbers: samples of unlike size, and readers that make much of small errors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import average_over_samples, measure_losses
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.samples import Case, Samples
from enginesmith.pipeline.passes.quantize.causes import explain_loss
from enginesmith.pipeline.passes.quantize.layers import QuantizableOp
from enginesmith.pipeline.passes.quantize.layerwise_error import OwnError, OwnErrors
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.precisions import WEAK_DB
from enginesmith.pipeline.passes.quantize.search import GroupFact, Trial
from enginesmith.pipeline.passes.rescale.equalize import CrossLayerEqualization
from enginesmith.pipeline.tasks.base import RECORDS, read_models, write_records
from enginesmith.pipeline.tasks.calibrate import Calibrate, Feeder
from enginesmith.pipeline.tasks.graph_forms import (
    MODEL,
    RANGES,
    REFERENCE,
    SENSITIVITY,
    Rescale,
    Sensitivity,
    read_forms,
)
from enginesmith.pipeline.tasks.mixed_precision import Assign, trial_role
from enginesmith.pipeline.tensors import Array, ShapeRange
from graphs import normal, parse_graph, run_model

UNLIKE = """net (float[batch, 16] x) => (float[batch, 10] y) {
    h = MatMul(x, w)
    r = Relu(h)
    y = MatMul(r, v)
}"""
"""Without biases, answers are as large as their samples."""
SHIFTED = UNLIKE.replace("    y = MatMul(r, v)", "    p = MatMul(r, v)\n    y = Add(p, u)")
"""With one, the answers to small samples are of the bias."""
WEIGHTS = {"w": normal(16, 16, seed=1), "v": normal(16, 10, seed=2), "u": 3 * normal(10, seed=3)}
X = normal(8, 16, seed=4)
SIZES = np.geomspace(1e-2, 1e3, 8, dtype=np.float32)[:, np.newaxis]
QUIET = np.float32([[1], [1], [1], [0.02], [1], [1], [0.02], [0.02]])
"""These are no silence."""
FEEDER = Feeder(data=None, seed=0, samples=8)


def record(path: Path) -> Artifact:
    return Artifact(kind="record", path=path, sha256="", bytes=0)


def prepare(folder: Path, net: str, x: Array, weights: Mapping[str, Array]) -> dict[str, Artifact]:
    ir.save(parse_graph(net, named=True, **weights), folder / "model.onnx")
    y = run_model(ir.load(folder / "model.onnx"), {"x": x}, optimized=False)["y"]
    samples.write_arrays(folder, "feeds", 0, {"x": x})
    samples.write_arrays(folder, "outputs", 0, {"y": y})
    case = Case(sizes={"batch": 8}, batch=8)
    samples.write(folder, Samples(data="x", ranges={"batch": ShapeRange.parse("1:8:8")}, cases=(case,)))
    file = folder / "model.onnx"
    inputs = {
        MODEL: Artifact(kind="onnx", path=file, sha256="m", bytes=0, signature=model_file.signature(file)),
        REFERENCE: Artifact(kind="reference", path=folder / samples.RECORD, sha256="", bytes=0),
    }
    Calibrate(feeder=FEEDER).run(inputs, folder, lambda _: None)
    return {**inputs, RANGES: record(folder / "ranges.json")}


def find_facts(folder: Path, net: str, x: Array) -> list[GroupFact]:
    inputs = prepare(folder, net, x, {name: value for name, value in WEIGHTS.items() if f", {name})" in net})
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax").rounding_inputs()
    effect = Sensitivity(step=step, feeder=FEEDER).run(inputs, folder, lambda _: None)
    return read_models(record(folder / effect.file), GroupFact)


def test_groups_that_lose_small_samples_beside_large_ones_lose_much(tmp_path: Path) -> None:
    """All together, the energy of large samples hides that."""
    for fact in find_facts(tmp_path, UNLIKE, X * SIZES):
        assert fact.sqnr_db is not None
        assert fact.sqnr_db < 10
        assert fact.pattern == "unlike samples"
        assert fact.cause.startswith("output 'y', sample by sample: samples differ by ")
        assert fact.cause.endswith("normalize each sample at the model's input")


@pytest.mark.parametrize(
    ("net", "sizes"), [(SHIFTED, QUIET), (UNLIKE, QUIET * (QUIET == 1)), (UNLIKE, QUIET**2), (UNLIKE, np.float32(1))]
)
def test_groups_lose_nothing_with_samples_that_are_silence_or_whose_answers_are_kept(
    net: str, sizes: Any, tmp_path: Path
) -> None:
    assert all(fact.sqnr_db is not None and fact.sqnr_db > WEAK_DB for fact in find_facts(tmp_path, net, X * sizes))


NORMALIZED = """net (float[batch, 3, 6, 6] x) => (float[batch, 4] y) {
    c = Conv<kernel_shape=[3, 3]>(x, k)
    n = BatchNormalization(c, one, zero, zero, var)
    r = Relu(n)
    d = Conv<kernel_shape=[3, 3]>(r, q)
    m = GlobalAveragePool(d)
    f = Flatten(m)
    y = MatMul(f, h)
}"""
"""A normalization makes channels of any size equally large: an engine that rounds what is before it loses the small."""


def prepare_normalized(folder: Path, apart: float) -> dict[str, Artifact]:
    sizes = np.geomspace(1, apart, 8, dtype=np.float32)
    weights = {
        "k": normal(8, 3, 3, 3, seed=1) * sizes[:, None, None, None], "q": normal(4, 8, 3, 3, seed=2),
        "h": normal(4, 4, seed=3), "one": np.ones(8, np.float32), "zero": np.zeros(8, np.float32), "var": 27 * sizes**2,
    }  # fmt: skip
    inputs = prepare(folder, NORMALIZED, normal(8, 3, 6, 6, seed=4), weights)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax").rounding_inputs()
    Sensitivity(step=step, feeder=FEEDER).run(inputs, folder, lambda _: None)
    return {**inputs, SENSITIVITY: record(folder / RECORDS)}


def test_the_rounding_of_uneven_outputs_counts_for_engines_that_round_them_all(tmp_path: Path) -> None:
    inputs = prepare_normalized(tmp_path, 3000)
    values = run_model(
        ir.load(inputs[MODEL].path), {"x": normal(8, 3, 6, 6, seed=4)}, optimized=False, every_value=True
    )
    written, scale = values["c"], float(np.ptp(values["c"])) / 255
    change = (np.round(written / scale) * scale - written) / np.sqrt(27) / np.geomspace(1, 3000, 8)[:, None, None]
    lost = np.maximum(values["n"] + change, 0) - values["r"]
    wanted_db = 10 * np.log10((values["r"] ** 2).sum() / (lost**2).sum())
    outputs, reads = (
        read_forms(inputs, Precision(precision="int8", placement=placement, method="minmax"))["given"][0]
        for placement in ("inputs+outputs", "inputs+read outputs")
    )
    assert outputs.sqnr_db == pytest.approx(wanted_db, abs=0.3)
    assert wanted_db < WEAK_DB
    assert outputs.pattern == "uneven outputs"
    assert outputs.cause.startswith("channels of its output are up to ")
    assert outputs.cause.endswith(f"an SQNR of {outputs.sqnr_db:.1f} dB")
    assert reads.sqnr_db is not None
    assert reads.sqnr_db > WEAK_DB
    assert reads.pattern != "uneven outputs"


def test_operators_without_names_are_told_apart(tmp_path: Path) -> None:
    inputs = prepare_normalized(tmp_path, 3000)
    named = read_models(inputs[SENSITIVITY], GroupFact)[0].output_db
    model = ir.load(inputs[MODEL].path)
    for node in model.graph:
        node.name = node.name if node.op_type in ("Conv", "MatMul") else None
    ir.save(model, inputs[MODEL].path)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax").rounding_inputs()
    Sensitivity(step=step, feeder=FEEDER).run(inputs, tmp_path, lambda _: None)
    assert read_models(record(tmp_path / RECORDS), GroupFact)[0].output_db == named


def test_outputs_of_similar_size_lose_little_by_being_rounded(tmp_path: Path) -> None:
    first = read_models(prepare_normalized(tmp_path, 3)[SENSITIVITY], GroupFact)[0]
    assert first.output_db is not None
    assert first.output_db > WEAK_DB


def test_forms_are_made_for_what_rounded_outputs_lose_and_tried_by_engines_that_round_them(tmp_path: Path) -> None:
    inputs = prepare_normalized(tmp_path, 3000)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax").rounding_inputs()
    task = Rescale(
        steps=(CrossLayerEqualization(),),
        calibration=Calibrate(feeder=FEEDER),
        sensitivity=Sensitivity(step=step, feeder=FEEDER),
    )
    for name in ("rescaled", "multiplied"):
        (tmp_path / name).mkdir()
    effect = task.run(inputs, tmp_path / "rescaled", lambda _: None)
    assert "not needed" not in effect.rejected
    multiplied = task.model_copy(update={"only_weak": True}).run(inputs, tmp_path / "multiplied", lambda _: None)
    assert multiplied.rejected.endswith("25 dB or more until its output is rounded")
    for only_weak in (False, True):
        unneeded = task.model_copy(update={"outputs": False, "only_weak": only_weak})
        rejected = unneeded.run(inputs, tmp_path / "multiplied", lambda _: None).rejected
        assert rejected == "not needed: every group has an SQNR of 25 dB or more"
    (tmp_path / "rescaled" / RECORDS).write_bytes(inputs[SENSITIVITY].path.read_bytes())
    inputs["rescaled"] = record(tmp_path / "rescaled" / RECORDS)
    for placement, forms in (("inputs+outputs", {"rescaled", "given"}), ("inputs+read outputs", {"given"})):
        assert set(read_forms(inputs, Precision(precision="int8", placement=placement, method="minmax"))) == forms


@pytest.mark.parametrize(
    ("signal", "noise", "mean"),
    [
        ([1e6, 1.0, 1e4], [1e4, 1e4, 1e2], (0.01 + 1 + 0.01) / 3),
        ([0.0, 1.0, 1.0], [1e-9, 0.01, 0.01], 0.01),
        ([1e-9, 1.0, 1.0], [1e-9, 0.01, 0.01], 0.01),
        ([0.0, 0.0], [1.0, 1.0], None),
    ],
)
def test_a_sample_counts_as_lost_once_and_silence_not_at_all(signal: Any, noise: Any, mean: float | None) -> None:
    assert average_over_samples(np.array(signal), np.array(noise), 8) == (mean and pytest.approx(mean))
    assert average_over_samples(np.array(signal), np.array(noise), 7) is None, "a few numbers are near 0 by chance"


def test_answers_are_compared_sample_by_sample_where_the_batch_comes_first() -> None:
    wanted = SIZES * normal(8, 8)
    wanted[0, 0] = -np.inf
    given = wanted + np.float32(1)
    used = np.where(np.isfinite(wanted), wanted, 0)
    mean = np.minimum(1, np.isfinite(wanted).sum(1) / np.square(used).sum(1))[1:].mean()  # the first is silence
    losses = measure_losses("y", [(wanted, given)], [], batch=8)
    assert losses["y, sample by sample"] == pytest.approx(mean, rel=1e-3)
    assert losses["y"] < 1e-3
    for batch in (1, 4):
        assert set(measure_losses("y", [(wanted, given)], [], batch)) == {"y"}


@pytest.mark.parametrize("single", [True, False])
def test_own_errors_are_known_by_sample_where_each_feed_is_one(single: bool) -> None:
    group = QuantizableOp(name="g", module="", operator="MatMul", activations=("x",), output="y", parameters=0)
    errors = OwnErrors([group], single=single)
    for signal, noise in ((100.0, 1.0), (1.0, 1.0)):
        numbers = {"signal": signal, "noise": noise, "sum": [0.5] * 8, "count": 8}
        errors.add({f"g/{what}": np.array(value, np.float32) for what, value in numbers.items()})
    found = errors.find()["g"]
    assert found.energy == pytest.approx(2 / 101)
    assert found.size == pytest.approx((2 / 16) ** 0.5)
    assert found.shift == pytest.approx(8 * 1.0 * 8 / 16 / 2)
    assert (found.sample_energy, found.spread) == (pytest.approx((0.505, 10.0)) if single else (None, 1.0))


def explain(text: str, db: float = 50.0, outputs: str = "float[N,4] y") -> tuple[str, str]:
    model = parse_graph(
        f"net (float[N,8] x) => ({outputs}) {{ m = MatMul(x, w)\n {text} }}",
        w=normal(8, 4),
        four=np.float32(4),
        many=normal(4),
    )
    node = next(node for node in model.graph if node.op_type == "MatMul")
    return explain_loss(node, None, OwnError(10 ** (-db / 10), size=0.05))


PERIOD = "where the absolute error counts: a period is 6.28"


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("y = Sin(m)", "its result, off by 0.05 (root mean square), goes into Sin,", PERIOD),
        ("s = Mul(four, m) y = Cos(s) z = Sin(s)", "its result, off by 0.2 (root mean square), goes into Cos", PERIOD),
        ("s = Div(m, four) t = Add(s, many) y = Sin(t)", "its result, off by 0.0125 (root mean square), goes", PERIOD),
        ("s = Mul(m, many) y = Sin(s)", "its result goes into Sin,", PERIOD),
        ("s = Transpose(m) e = Exp(s) y = Div(m, four)", "its result, off by 0.05 (", "0.69 is doubled or halved"),
        ("k = ArgMax<axis=1>(m) y = Identity(m)", "its result, off by 0.05 (", "numbers that are nearly the same"),
        ("y = Div(x, m)", "its result, off by 0.05 (", "as what is divided by: its smallest numbers count most"),
    ],
)  # fmt: skip
def test_a_group_whose_small_errors_count_is_explained_by_its_readers(text: str, start: str, end: str) -> None:
    name, words = explain(text)
    assert name == "sensitive readers"
    assert words.startswith(start)
    assert words.endswith(end)


@pytest.mark.parametrize("text", ["y = Div(m, four)", "y = Tanh(m)", "t = MatMul(m, q) y = Sin(t)"])
def test_other_readers_explain_nothing(text: str) -> None:
    assert explain(text) == ("unknown", "")


def test_unlike_samples_explain_a_group_that_loses_little_of_all_together() -> None:
    (node,) = parse_graph("net (float[N,8] x) => (float[N,4] y) { y = MatMul(x, w) }", w=normal(8, 4)).graph
    lost = OwnError(1e-4, sample_energy=0.3, spread=87213.0)
    name, words = explain_loss(node, None, lost)
    assert (name, words.partition(",")[0]) == ("unlike samples", "samples differ by 87000 times or more in size")
    for other in (lost._replace(spread=2.0), lost._replace(sample_energy=1e-3), lost._replace(energy=0.2)):
        assert explain_loss(node, None, other) == ("unknown", "")


def test_the_cause_of_what_still_loses_or_stays_in_float_is_that_in_the_graph_that_was_chosen(tmp_path: Path) -> None:
    def list_facts(form: str, *sqnrs_db: float) -> list[GroupFact]:
        names = ("lifted", "stays", "bad", "worse", "fine")
        return [
            GroupFact(name=name, module="", kind="MatMul", macs=1, sqnr_db=db, cause=f"{name} in {form}")
            for name, db in zip(names, sqnrs_db, strict=True)
        ]

    for folder in ("given", "rescaled", "trials", "assigned"):
        (tmp_path / folder).mkdir()
    write_records(tmp_path / "given", list_facts("given", 9.0, 9.0, 9.0, 50.0, 50.0))
    write_records(tmp_path / "rescaled", list_facts("rescaled", 50.0, 50.0, 12.0, 12.0, 50.0))
    trial = Trial(
        passed=True, error=0, phase="sensitive", form="rescaled", method="mse", kept=("stays",), why="",
        impacts={"lifted": 0.26, "stays": 0.3},
    )  # fmt: skip
    write_records(tmp_path / "trials", [trial])
    inputs = {SENSITIVITY: "given", "rescaled": "rescaled", trial_role(1): "trials"}
    records = {role: record(tmp_path / folder / RECORDS) for role, folder in inputs.items()}
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    effect = Assign(step=step, keep=()).run(records, tmp_path / "assigned", lambda _: None)
    rows = json.loads((tmp_path / "assigned" / effect.file).read_bytes())
    assert {row["group"]: (row["cause"], row["given_sqnr_db"]) for row in rows} == {
        "lifted": ("lifted in given", 9.0),
        "stays": ("stays in rescaled", 9.0),
        "bad": ("bad in rescaled", 9.0),
        "worse": ("worse in rescaled", 50.0),
        "fine": ("", 50.0),
    }


def test_a_cause_is_shown_of_groups_that_lose_much_or_change_the_answers_much(tmp_path: Path) -> None:
    for folder in ("facts", "trials", "assigned"):
        (tmp_path / folder).mkdir()
    facts = [
        GroupFact(name=name, module="", kind="MatMul", macs=1, sqnr_db=db, cause=f"cause of {name}")
        for name, db in (("weak", 9.0), ("read", 50.0), ("fine", 50.0))
    ]
    impacts = {"weak": 1e-4, "read": 0.26, "fine": 1e-4}
    trial = Trial(passed=True, error=0, phase="sensitive", method="mse", kept=("read",), why="", impacts=impacts)
    write_records(tmp_path / "facts", facts)
    write_records(tmp_path / "trials", [trial])
    inputs = {SENSITIVITY: record(tmp_path / "facts" / RECORDS), trial_role(1): record(tmp_path / "trials" / RECORDS)}
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    effect = Assign(step=step, keep=()).run(inputs, tmp_path / "assigned", lambda _: None)
    rows = json.loads((tmp_path / "assigned" / effect.file).read_bytes())
    assert {row["group"]: row["cause"] for row in rows} == {
        "weak": "cause of weak",
        "read": "cause of read",
        "fine": "",
    }
