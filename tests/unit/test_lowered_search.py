"""Test the search for groups that stay in float32 where a whole graph is lowered to fp16 or bf16."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import coverage, model_file
from enginesmith.pipeline.frameworks.samples import Case, Samples
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.search import GroupFact, Judgement, Trial, propose
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import read_models
from enginesmith.pipeline.tasks.calibrate import Feeder
from enginesmith.pipeline.tasks.graph_forms import MODEL, REFERENCE, SENSITIVITY, Sensitivity, measure_impacts
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, BEFORE, Assign, Goal, LowerForm, Search, trial_role
from enginesmith.pipeline.tensors import Array, ShapeRange
from graphs import parse_graph, run_model

NET = """net (float[batch, 8] x) => (float[batch, 6] y) {
    m = MatMul(x, w)
    far = Add(m, offset)
    r = Relu(far)
    back = Sub(r, offset)
    y = MatMul(back, v)
}"""
"""Its first product has a bias of thousands, of which a narrow float leaves few digits; the second one is harmless."""
RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.standard_normal((8, 6)).astype(np.float32),
    "v": RNG.standard_normal((6, 6)).astype(np.float32),
    "offset": np.full(6, 3000, np.float32),
}
X = RNG.standard_normal((8, 8)).astype(np.float32)
TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def make() -> ir.Model:
    model = parse_graph(NET, 22, **WEIGHTS)
    for node in model.graph:
        node.name = {"m": "first", "y": "second"}.get(str(node.outputs[0].name), str(node.outputs[0].name))
    return model


def artifact(path: Path, kind: Any = "record") -> Artifact:
    return Artifact(kind=kind, path=path, sha256="", bytes=0)


def prepare(folder: Path, make: Callable[[], ir.Model] = make) -> dict[str, Artifact]:
    ir.save(make(), folder / "model.onnx")
    answers = run_model(make(), {"x": X}, optimized=False)["y"]
    samples.write_arrays(folder, "feeds", 0, {"x": X})
    samples.write_arrays(folder, "outputs", 0, {"y": answers})
    case = Case(points=("min",), sizes={"batch": 8}, batch=8)
    samples.write(folder, Samples(data="x", ranges={"batch": ShapeRange.parse("8:8:8")}, cases=(case,)))
    path = folder / "model.onnx"
    given = artifact(path, "onnx").model_copy(update={"signature": model_file.signature(path)})
    return {MODEL: given, REFERENCE: artifact(folder / samples.RECORD, "reference")}


def run(task: Any, inputs: dict[str, Artifact], out: Path) -> tuple[Artifact, Any]:
    out.mkdir()
    effect = task.run(inputs, out, lambda _: None)
    return artifact(out / effect.file, task.produces), effect


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_impact_of_a_group_is_what_rounding_it_alone_changes(tmp_path: Path, precision: Any) -> None:
    """The casts round all that a product reads, its bias, and the sum; the runtime removes none of them."""

    def cast(value: Array) -> Array:
        return value.astype(TYPES[precision]).astype(np.float32)

    def answer(first: Array) -> Array:
        back = np.maximum(first, 0) - WEIGHTS["offset"]
        return np.asarray(back @ WEIGHTS["v"])

    inputs = prepare(tmp_path)
    found, measured = measure_impacts(
        Precision(precision=precision), "given", inputs, {}, ["first", "second"], 60.0, lambda _: None
    )
    exact = answer(X @ WEIGHTS["w"] + WEIGHTS["offset"])
    first = answer(cast(cast(X) @ cast(WEIGHTS["w"]) + cast(WEIGHTS["offset"])))
    back = np.maximum(X @ WEIGHTS["w"] + WEIGHTS["offset"], 0) - WEIGHTS["offset"]
    second = cast(cast(back) @ cast(WEIGHTS["v"]))
    for name, rounded in {"first": first, "second": second}.items():
        energy = ((rounded - exact) ** 2).sum() / (exact**2).sum()
        assert found[name].energy == pytest.approx(min(1, energy), rel=0.02), name
    assert found["first"].energy > 100 * found["second"].energy > 0
    assert measured


def search(
    inputs: dict[str, Artifact], folder: Path, least: float, *, casts: bool = False, precision: Any = "bf16"
) -> tuple[list[Trial], dict[str, Artifact]]:
    """Search as a plan does, until nothing more is tried."""
    step, engine = Precision(precision=precision), simulation()
    ranking = Sensitivity(step=step, feeder=Feeder(data=None, samples=1, seed=0))
    inputs = {**inputs}
    inputs[SENSITIVITY], _ = run(ranking, inputs, folder / "sensitivity")
    goal = Goal(threshold=precision, min_sqnr_db=least, max_drop=None, quality=None, simulation=engine)
    task = Search(
        step=step, engine=engine, device=Device(), goal=goal, methods=("",), keep=(), runs_here=True, casts=casts
    )
    for index in range(1, 5):
        inputs[BEFORE], effect = run(task, inputs, folder / f"trial{index}")
        inputs[trial_role(index)] = inputs[BEFORE]
        if effect.summary.startswith("the search is over"):
            break
    trials = read_models(inputs[BEFORE], Trial)
    del inputs[BEFORE]
    inputs[ASSIGNMENT], effect = run(Assign(step=step, keep=(), casts=casts), inputs, folder / "assigned")
    assert bool(effect.rejected) is not trials[-1].passed
    return trials, inputs


def test_the_group_that_loses_most_stays_in_float32(tmp_path: Path) -> None:
    trials, inputs = search(prepare(tmp_path), tmp_path, 30)
    assert [(trial.kept, trial.passed, trial.speedup) for trial in trials] == [
        ((), False, None),
        (("first",), True, None),
    ]
    assert [trial.why for trial in trials] == ["everything lowered", "the most sensitive group in float32"]
    assert set(trials[1].impacts) == {"first", "second"}
    rows = {row["group"]: row for row in json.loads(inputs[ASSIGNMENT].path.read_bytes())}
    assert {name: row["precision"] for name, row in rows.items()} == {"first": "fp32", "second": "bf16"}
    assert rows["first"]["why"] == "among the most sensitive groups; the goal needs it"

    graph, _ = run(LowerForm(step=Precision(precision="bf16")), inputs, tmp_path / "lowered")
    kept = {node.name: reason for node, reason in coverage.list_float32(model_file.read(graph.path))}
    assert set(kept.items()) == {(name, model_file.ASKED) for name in ("first", "far", "r", "back")}  # with its bias


def test_a_group_that_cannot_be_rounded_alone_may_be_the_one_that_hurts(tmp_path: Path) -> None:
    text = NET.replace("MatMul(x, w)", 'Einsum <equation = "bi,ij->bj"> (x, w)')
    text = text.replace("y = MatMul(back, v)", "k = MatMul(back, v) y = MatMul(k, v)")

    def make_einsum() -> ir.Model:
        model = parse_graph(text, 22, **{**WEIGHTS, "offset": np.full(6, 8000, np.float32)})
        for node in model.graph:
            node.name = str(node.outputs[0].name)
        return model

    trials, _ = search(prepare(tmp_path, make_einsum), tmp_path, 45, precision="fp16")
    assert (trials[-1].kept, trials[-1].passed) == (("m",), True)


def test_an_engine_without_kernels_for_the_precision_is_not_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of a casting engine is in float32: a simulation of it always passes."""

    def refuse(*_: Any) -> None:
        raise ModelError("no kernel for bfloat16")

    monkeypatch.setattr(type(simulation()), "build", refuse)
    with pytest.raises(ModelError, match="no kernel for bfloat16"):
        search(prepare(tmp_path), tmp_path, 30, casts=True)


def test_where_no_choice_reaches_the_goal_something_is_left_in_the_precision(tmp_path: Path) -> None:
    trials, _ = search(prepare(tmp_path), tmp_path, 300)
    assert [trial.kept for trial in trials] == [(), ("first",)]


def test_one_trial_that_passes_ends_the_search(tmp_path: Path) -> None:
    trials, inputs = search(prepare(tmp_path), tmp_path, -50)
    assert [(trial.phase, trial.passed) for trial in trials] == [("everything", True)]
    groups = [GroupFact(name=name, module="", kind=name, macs=1, sqnr_db=None) for name in "abc"]
    assert propose(trials, {"given": groups}, ("",), frozenset()) is None
    assert {row["precision"] for row in json.loads(inputs[ASSIGNMENT].path.read_bytes())} == {"bf16"}


@pytest.mark.parametrize("enough", [True, False])
def test_an_engine_that_casts_by_itself_has_the_float_graph_unless_a_group_is_kept(
    tmp_path: Path, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials are of the same graphs as the engine."""
    tried = list[bool]()

    def judge(_: Goal, engine: Any, graph: Artifact, *more: Any) -> tuple[Judgement, tuple[Path, ...]]:
        tried.append(has_bfloat16(graph.path))
        return Judgement(passed=enough or tried[-1], error=0.0), ()

    monkeypatch.setattr(Goal, "judge", judge)
    inputs = prepare(tmp_path)
    trials, inputs = search(inputs, tmp_path, 30, casts=True)
    graph, _ = run(LowerForm(step=Precision(precision="bf16"), casts=True), inputs, tmp_path / "lowered")
    assert tried == [bool(trial.kept) for trial in trials] == ([False] if enough else [False, True])
    assert has_bfloat16(graph.path) is not enough
    assert enough or {row["precision"] for row in json.loads(inputs[ASSIGNMENT].path.read_bytes())} == {"bf16", "fp32"}


def test_a_graph_that_cannot_be_lowered_is_cast_by_the_engine_all_the_same(tmp_path: Path) -> None:
    net = "net (float[batch, 8] x) => (float[batch, 8] y) { y = Softmax(x) }"
    inputs = prepare(tmp_path, lambda: parse_graph(net, 22))
    trials, inputs = search(inputs, tmp_path, 30, casts=True)
    _, effect = run(LowerForm(step=Precision(precision="bf16"), casts=True), inputs, tmp_path / "lowered")
    assert [(trial.kept, trial.passed) for trial in trials] == [((), True)]
    assert effect.summary == "1 nodes, unchanged"
    assert not effect.rejected


def has_bfloat16(path: Path) -> bool:
    model = onnx.load(path)
    return any(tensor.data_type == onnx.TensorProto.BFLOAT16 for tensor in model.graph.initializer)


def test_what_cannot_be_lowered_is_kept_without_having_been_asked_for(tmp_path: Path) -> None:
    """Engines may compute that in less; only what was chosen has to be in float32."""
    inputs = prepare(tmp_path)
    entry = {"precision": "fp32", "why": "", "method": "", "form": "given"}
    rows = [{**entry, "group": "first", "anyway": False}, {**entry, "group": "second", "anyway": True}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    inputs[ASSIGNMENT] = artifact(tmp_path / "rows.json")
    graph, _ = run(LowerForm(step=Precision(precision="bf16")), inputs, tmp_path / "lowered")
    kept = {node.name: reason for node, reason in coverage.list_float32(model_file.read(graph.path))}
    assert kept["first"] == model_file.ASKED
    assert kept.get("second") != model_file.ASKED


def test_groups_of_a_lowered_graph_say_why_they_are_in_float32_anyway(tmp_path: Path) -> None:
    inputs = prepare(tmp_path)
    step = Precision(precision="bf16", keep=("second",))
    record, effect = run(Sensitivity(step=step, feeder=Feeder(data=None, samples=1, seed=0)), inputs, tmp_path / "out")
    facts = {fact.name: fact for fact in read_models(record, GroupFact)}
    assert {name: fact.reason for name, fact in facts.items()} == {"first": "", "second": model_file.ASKED}
    assert all(fact.macs and fact.sqnr_db is None for fact in facts.values())
    assert effect.summary == "2 groups, 1 of them in float32 anyway"
