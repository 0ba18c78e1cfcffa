"""Test what `prosecute` is asked for: options that have no meaning, times, and the precision of a file."""

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from enginesmith import cli
from enginesmith.pipeline.artifact import Artifact, HistoryEntry, folder_digest
from enginesmith.pipeline.engines import baseline
from enginesmith.pipeline.errors import Late, ModelError, SignatureError, UsageError
from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.measure.prosecution.finding import Excuse, Finding, Prosecution
from enginesmith.pipeline.measure.prosecution.stages import Stages
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Step, StepRef
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.prosecution import PROSECUTE, keep_seconds, list_makers, prosecute_variant_steps
from enginesmith.pipeline.planning.single_stages import prosecute_file_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results import run as documents
from enginesmith.pipeline.results.run import StepRecord, StoredArtifact
from enginesmith.pipeline.system import cpu
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import prosecute as tasks
from enginesmith.pipeline.tasks.base import read_models, write_records
from enginesmith.pipeline.tasks.prosecute import Prosecute
from enginesmith.pipeline.tasks.race import Race, Stay
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec
from enginesmith.pipeline.units import AddedOption
from enginesmith.pipeline.workflows import prosecute as workflow
from runs import small, variant


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.main, ["prosecute", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "flags", "omit"),
    [
        (("--input", "x:float32:batch,3"), "--input", "omit it"),
        (("--as", "int8", "--batch", "1,3", "--seed", "0"), "--as, --batch, --seed", "omit them"),
        (("--eval", "digits", "--threads", "2"), "--eval, --threads", "omit them"),
        (("--prepend", "nhwc", "--allow-pickle"), "--prepend, --allow-pickle", "omit them"),
    ],
)
def test_options_that_a_run_has_itself_are_refused(
    tmp_path: Path, words: tuple[str, ...], flags: str, omit: str
) -> None:
    (tmp_path / "run.json").write_text("{}")
    refused = run(tmp_path, "onnxruntime-fp32", *words)
    assert refused.exit_code == 2
    for flag in flags.split(", "):
        assert flag in refused.output.partition("cannot be given with a run")[0]
    assert f"{omit}; or give the model and a file" in refused.output


def test_no_time_is_refused() -> None:
    for time in ("0", "0s"):
        refused = CliRunner().invoke(cli.main, ["prosecute", "digits", "m.onnx", "--time", time])
        assert refused.exit_code == 2
        assert f"--time: must be greater than 0 (given: '{time}')" in refused.output


@pytest.mark.parametrize(
    ("asked", "tasks"),
    [
        ({}, [(3.0, False)]),
        ({"prosecute_seconds": "10s"}, [(10.0, True)]),
        ({"prosecute_seconds": "0s"}, []),
        ({"device": "cuda"}, []),
        ({"device": "cuda", "prosecute_seconds": 1, "cuda_graphs": False}, [(1.0, True)]),
    ],
)
def test_variants_are_prosecuted_for_some_seconds_on_the_cpu(
    asked: dict[str, Any], tasks: list[tuple[float, bool]]
) -> None:
    """If it was not asked for, it is no failure that nothing can be tried."""
    made = plan(resolve_recipe(make({"model": "digits", "engines": ["onnxruntime"], **asked})))
    found = [step.task for step in made.steps if isinstance(step.task, Prosecute)]
    assert [(task.seconds, task.required) for task in found] == tasks


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ({"time_seconds": 60}, 9.0),
        ({"time_seconds": 600}, 10.0),
        ({"time_seconds": 600, "prosecute_seconds": 60}, 90.0),
        ({"time_seconds": 60, "prosecute_seconds": 0}, 0.0),
        ({"time_seconds": 60, "device": "cuda"}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_part_of_a_limited_time_is_kept_or_what_two_variants_take(asked: dict[str, Any], seconds: float) -> None:
    assert keep_seconds(make({"model": "digits", **asked})) == seconds


@pytest.mark.parametrize(
    ("left", "given", "cut"),
    [(100.0, [3.0, 30.0], False), (40.0, [3.0, 15.0], True), (3.0, [1.4, 0.2], True), (1.0, [-0.2, -0.6], True)],
)
@pytest.mark.parametrize(("wrong", "mended"), [(True, False), (True, True), (False, False)])
def test_inputs_are_tried_and_a_fault_is_reduced_in_the_time_that_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: float,
    given: list[float],
    cut: bool,
    wrong: bool,
    mended: bool,
) -> None:
    """To begin takes a second, and so does the first input. What was cut short is done again where there is more."""
    clock, seconds = SimpleNamespace(now=0.0), list[float]()
    option = AddedOption(field="graph_optimization", value="basic", words="") if mended else None
    tried = {"attempts": 1, "walked": {"sizes": 1}, "excused": 1}
    tried |= {"excuses": (Excuse(walk="sizes", note="batch 2", reason="rounding moves it"),)}
    finding = Finding(walk="sizes", note="", reason="", witness="model", attempts=1, guilty="engine", option=option)

    def begin(*_: object) -> tuple[list[Any], Any]:
        clock.now += 1
        return [], SimpleNamespace(run=attempt, shrink=lambda shown: shown, **tried)

    def attempt(limit: float, progress: object) -> Any:
        clock.now += 1
        seconds.append(limit)
        return SimpleNamespace(reason="it is off by one") if wrong else None

    def locate(known: Stages, *_: object) -> Finding:
        seconds.append(known.seconds)
        return finding

    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(tasks, "locate_fault", locate)
    monkeypatch.setattr(Prosecute, "_begin", begin)
    task = Prosecute.model_construct(seconds=3.0, left_seconds=left, engine=None, device=Device())  # type: ignore[arg-type]
    effect = task.run({}, tmp_path, lambda text: None)
    assert seconds == pytest.approx(given if wrong else given[:1])
    (made,) = read_models(Artifact(kind="record", path=tmp_path / effect.file, sha256="", bytes=0), Prosecution)
    assert effect.incomplete is made.cut is (cut and not mended if wrong else seconds[0] < 3)
    assert bool(effect.rejected) is wrong
    assert (made.excused, made.excuses) == (1, tried["excuses"])
    assert ("on 1 of 1 inputs, answers differ" in effect.summary) is not wrong


@pytest.mark.parametrize("name", ["onnxruntime-fp32", "openvino-int8", "onnxruntime-fp32-prune-macs50"])
def test_of_a_search_only_what_leads_to_the_variant_is_made(name: str) -> None:
    """The step that keeps it in the race is unchanged, so that its tuning is found in the store."""
    budgets = {"max_drop": 0.01}
    asked = {"data": "digits", "budgets": budgets, "time_seconds": 600, "device": "cpu", "prosecute_seconds": 0}
    resolved = resolve_recipe(make({"model": "digits", **asked}))
    made = plan(resolved)
    chosen = next(variant for variant in made.variants if variant.id == name)
    found = {step.id: step for step in prosecute_variant_steps(resolved, made, chosen, 60)}
    assert [ref for ref in found if ref.kind == "tune"] == [StepRef("tune", chosen.name)]
    built = {ref.subject[0].engine for ref in found if ref.kind == "build"}  # type: ignore[attr-defined]
    rivals = {"onnxruntime"} if name == "openvino-int8" else set()
    assert built == {chosen.engine.name} | rivals
    assert (found[StepRef("race")].sources, found[StepRef("race")].task.tools) == ((), ())
    original = {step.id: step for step in made.steps}
    assert all(
        found[ref] == replace(original[ref], search=False, as_it_was=True)
        for ref in found
        if ref.kind not in ("race", PROSECUTE)
    )


def test_a_search_that_the_time_ended_is_not_continued() -> None:
    """Steps that the run had no time for are left out if the variant was made without them."""
    asked = {"data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 600, "device": "cpu"}
    resolved = resolve_recipe(make({"model": "digits", **asked}))
    made = plan(resolved)
    chosen = next(variant for variant in made.variants if variant.id == "onnxruntime-int8")
    late = {*chosen.search[3:], StepRef("build", chosen.name)}
    steps = prosecute_variant_steps(resolved, made, chosen, 60, late)
    assert {step.id for step in steps if step.unavailable} == {*chosen.search[3:]}
    assert [step.id for step in steps if not step.as_it_was] == [PROSECUTE]


@pytest.mark.parametrize("there", [True, False])
def test_the_engine_and_the_graphs_of_a_run_are_recalled(there: bool, tmp_path: Path) -> None:
    """The engine out of the run's folder, graphs out of the store; no search is begun for the rest."""
    asked = {"data": "digits", "budgets": {"max_drop": 0.01}, "device": "cpu", "time_seconds": 600}
    resolved = resolve_recipe(make({"model": "digits", **asked}))
    made = plan(resolved)
    chosen = next(variant for variant in made.variants if variant.id == "openvino-int8")
    makers, usual = list_makers(made, chosen), {"parameters": {}, "tools": {}, "seconds": 1.0, "host_peak_bytes": None}
    entries = tuple(HistoryEntry.model_validate({"step": str(ref), "effect": "", **usual}) for ref in makers)
    folder = tmp_path / "variants" / chosen.id
    folder.mkdir(parents=True)
    (folder / "model.xml").write_text("engine" if there else "another")
    digest = folder_digest({"model.xml": hashlib.sha256(b"engine").hexdigest()})
    engine = Artifact(kind="engine", path=folder / "model.xml", sha256=digest, bytes=6, history=entries)
    (folder / "manifest.json").write_text(engine.model_dump_json(exclude={"path", "rejected"}))
    graphs = {entry.step: Artifact(kind="onnx", path=tmp_path, sha256=entry.step, bytes=1) for entry in entries[1:-1]}
    store: Any = SimpleNamespace(find=lambda entry: graphs.get(entry.step))
    stored = StoredArtifact(path=f"variants/{chosen.id}/model.xml", sha256=digest, bytes=6)
    record = variant(chosen.id).model_copy(update={"history": entries, "artifact": stored})
    recalled = workflow._recall(tmp_path, record, makers, store)
    assert list(recalled) == (makers[:0:-1] if there else [])
    if there:
        assert recalled[makers[-1]].artifact == engine
        steps = prosecute_variant_steps(resolved, made, chosen, 60, recalled=recalled)
        assert {step.id for step in steps} == {LOAD, REFERENCE, PROSECUTE}
        assert {graph.role for graph in steps[-1].task.graphs} <= steps[-1].inputs.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("digest", "notes"), [("", 0), ("another", 1)])
def test_an_engine_that_was_made_again_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str, notes: int
) -> None:
    write_records(tmp_path, [Prosecution(seconds=1, attempts=3, walks={})])
    record = Artifact(kind="record", path=tmp_path / "records.json", sha256="", bytes=0)
    step, told = Step(StepRef("build"), Stay(variants=())), list[str]()
    outcomes = {ref: Outcome(ref, "done", record) for ref in (PROSECUTE, step.id)}
    monkeypatch.setattr(workflow, "try_steps", lambda *_: outcomes)
    settings = Settings(listener=lambda event: told.append(event.text))
    workflow._run("a", [step], make({"model": "digits"}), tmp_path / "out", settings, {step.id: digest})
    assert len(told) == notes


def test_a_race_without_variants_lets_everyone_stay(tmp_path: Path) -> None:
    race = Race(engines={}, device=Device(), lossless=(), seconds=1, most=3, max_drop=0.01, largest=False)
    effect = race.run({}, tmp_path, print)
    found = Artifact(kind="record", path=tmp_path / effect.file, sha256="", bytes=0)
    assert not Stay(variants=("a",)).run({"race": found}, tmp_path, print).rejected


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({"audit": ModelError("no audit"), "prosecute": ModelError("no engine")}, "no engine"),
        ({"audit": ModelError("no audit"), "build": ModelError("no kernel"), "prosecute": "no kernel"}, "no kernel"),
        ({"prosecute": "it is wrong"}, "a cannot be prosecuted: it is wrong"),
        ({"audit": ModelError("no audit")}, None),
    ],
)
def test_only_what_keeps_an_engine_from_being_prosecuted_is_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: dict[str, Any], words: str | None
) -> None:
    write_records(tmp_path, [Prosecution(seconds=1, attempts=3, walks={})])
    record = Artifact(kind="record", path=tmp_path / "records.json", sha256="", bytes=0)
    outcomes = {PROSECUTE: Outcome(PROSECUTE, "done", record)} | {
        StepRef(name): Outcome(name, "skipped", reason=end)
        if isinstance(end, str)
        else Outcome(name, "failed", error=end, reason=str(end))
        for name, end in ends.items()
    }
    monkeypatch.setattr(workflow, "try_steps", lambda *_: outcomes)
    if words is None:
        assert workflow._run("a", [], make({"model": "digits"}), tmp_path / "out", Settings()).prosecution.attempts == 3
    else:
        with pytest.raises(ModelError, match=words):
            workflow._run("a", [], make({"model": "digits"}), tmp_path / "out", Settings())


def test_what_the_run_had_no_time_for_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: dict[str, Any] = {"status": "skipped", "cached": False, "seconds": None, "effect": ""}
    causes: tuple[Late | None, ...] = ("no time", "over share", None)
    steps = tuple(StepRecord(id=f"search-{index}", late=late, **ends) for index, late in enumerate(causes))
    documents.write(small(variant("eager"), variant("onnxruntime-fp32"), steps=steps), tmp_path)
    late: list[str] = []

    def stop(*given: Any) -> None:
        late.extend(given[-1])
        raise UsageError("the steps have been planned")

    monkeypatch.setattr(workflow, "prosecute_variant_steps", stop)
    assert run(tmp_path, "onnxruntime-fp32").exit_code == 2
    assert late == ["search-0"]


@pytest.mark.parametrize(
    ("named", "words"), [((), "the winner eager is the model"), (("eager",), "eager is the model")]
)
def test_the_model_itself_is_no_engine(tmp_path: Path, named: tuple[str, ...], words: str) -> None:
    winner = variant("eager", engine="eager")
    documents.write(small(winner, variant("onnxruntime-fp32"), winner="eager"), tmp_path)
    refused = run(tmp_path, *named)
    assert refused.exit_code == 2
    assert words in refused.output
    assert "name one of onnxruntime-fp32" in refused.output


@pytest.mark.parametrize("output", ["y", "z"])
def test_what_nobody_asked_for_fails_nothing(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two causes: memory is short, or an engine has other names than its model."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float x) => (float y) { y = Identity(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    signature = Signature(inputs=(TensorSpec.parse("x:float32:"),), outputs=(TensorSpec.parse("y:float32:"),))
    given = Artifact(kind="onnx", path=tmp_path / "m.onnx", sha256="0" * 64, bytes=1000, signature=signature)
    other = signature.model_copy(update={"outputs": (TensorSpec.parse(f"{output}:float32:"),)})
    inputs = {"given": given, "model": given.model_copy(update={"signature": other})}
    task = planned(tmp_path / "m.onnx").model_copy(update={"required": False})
    monkeypatch.setattr(cpu, "available_bytes", lambda: 5999 if output == "y" else 6000)
    done = task.run(inputs, tmp_path, print)
    assert (done.rejected, done.incomplete) == ("", True)
    (record,) = read_models(given.model_copy(update={"path": tmp_path / done.file}), Prosecution)
    assert (record.reason, record.attempts, record.finding) == (done.summary, 0, None)
    memory = "the model, its graphs and its engine take about 5.86 KiB at once, and 5.86 KiB are free"
    names = "the outputs of the engine are z, and those of the model y"
    assert record.reason == f"no input was tried: {memory if output == 'y' else names}"
    if output == "z":
        with pytest.raises(SignatureError):
            task.model_copy(update={"required": True}).run(inputs, tmp_path, print)


def test_a_wrong_engine_is_not_passed_over_where_its_fault_cannot_be_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs were tried then, and one shows it."""

    def fail(*given: object) -> None:
        raise ModelError("cannot be reduced")

    for name, operator in (("given", "Identity"), ("model", "Neg")):
        text = f'<ir_version: 8, opset_import: ["": 17]> g (float[N,2] x) => (float[N,2] y) {{ y = {operator}(x) }}'
        onnx.save(onnx.parser.parse_model(text), tmp_path / f"{name}.onnx")
    spec = TensorSpec.parse("x:float32:N,2")
    signature = Signature(inputs=(spec,), outputs=(spec.model_copy(update={"name": "y"}),))
    inputs = {
        name: Artifact(kind="onnx", path=tmp_path / f"{name}.onnx", sha256="0" * 64, bytes=100, signature=signature)
        for name in ("given", "model")
    }
    feeds = {"x": np.array([[1, -2]], np.float32)}
    ranges = {"N": ShapeRange(min=1, opt=1, max=3)}
    samples.write_arrays(tmp_path, "feeds", 0, feeds)
    samples.write_arrays(tmp_path, "outputs", 0, {"y": feeds["x"]})
    case = samples.Case(sizes={"N": 1}, batch=1)
    samples.write(tmp_path, samples.Samples(data="synthetic", ranges=ranges, cases=(case,)))
    inputs["reference"] = inputs["given"].model_copy(update={"path": tmp_path / samples.RECORD})
    engine = baseline("onnx").exact()
    task = Prosecute(engine=engine, given_engine=engine, device=Device(), precision="fp32", seconds=1.0, required=False)
    monkeypatch.setattr("enginesmith.pipeline.tasks.prosecute.locate_fault", fail)
    with pytest.raises(ModelError, match="cannot be reduced"):
        task.run(inputs, tmp_path, lambda text: None)
    lossy = task.model_copy(update={"precision": "int8", "seconds": 0.1})
    assert not lossy.run(inputs, tmp_path, lambda text: None).rejected, "fidelity and the metric judge that"
    with pytest.raises(ModelError, match="cannot be reduced"):
        lossy.model_copy(update={"required": True}).run(inputs, tmp_path, lambda text: None)
    monkeypatch.setattr("enginesmith.pipeline.measure.prosecution.search.InputSearch.examine", fail)
    passed = task.run(inputs, tmp_path, lambda text: None)
    assert (passed.summary, passed.rejected) == ("ended at input 1: cannot be reduced", "")


@pytest.mark.parametrize("word", ["int4", "tf32", "float16"])
def test_a_precision_of_no_variant_is_refused_with_the_list(word: str) -> None:
    refused = run("no-such-model", "no-such-file.onnx", "--as", word)
    assert refused.exit_code == 2
    assert f"{word!r} is not one of {', '.join(map(repr, KINDS))}" in " ".join(refused.output.split())


def planned(file: Path, precision: str | None = None) -> Prosecute:
    steps = prosecute_file_steps(resolve_recipe(make({"model": "digits"})), str(file), precision, 1.0)
    task = next(step.task for step in steps if step.id == PROSECUTE)
    assert isinstance(task, Prosecute)
    return task


@pytest.mark.parametrize(
    ("precision", "threshold", "apart"),
    [("int4-weights", "int4", True), ("int8+fp16", "int8", True), ("int8-dynamic", "int8", False)],
)
def test_a_file_is_judged_by_the_precision_that_is_named(
    tmp_path: Path, precision: str, threshold: str, apart: bool
) -> None:
    (tmp_path / "m.onnx").touch()
    task = planned(tmp_path / "m.onnx", precision)
    assert (task.precision, task.graphs[0].precision, task.rows_apart) == (threshold, threshold, apart)


@pytest.mark.parametrize(
    ("dtype", "operators", "threshold", "apart"),
    [
        ("float16", (), "fp16", True),
        ("int4", ("DequantizeLinear",), "int4", True),
        ("int16", ("DequantizeLinear",), "int8", True),
        ("float8e4m3fn", ("DequantizeLinear",), "fp8", True),
        ("int8", ("DynamicQuantizeLinear",), "int8", False),
    ],
)
def test_a_file_is_judged_by_its_own_precision(
    tmp_path: Path, dtype: str, operators: tuple[str, ...], threshold: str, apart: bool
) -> None:
    weight = TensorProto(name="w", dims=[64], data_type=getattr(TensorProto, dtype.upper()), raw_data=bytes(64))
    rest = numpy_helper.from_array(np.ones(8, np.float16), "b")
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    nodes = [helper.make_node(name, ["x", "s"], ["y"]) for name in operators]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [value], [value], [weight, rest])), tmp_path / "m.onnx")
    task = planned(tmp_path / "m.onnx")
    assert (task.precision, task.rows_apart) == (threshold, apart)
