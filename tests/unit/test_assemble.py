"""From outcomes to the document, and run.json read back: older and newer versions, and what is damaged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.artifact import Artifact, HistoryEntry
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import (
    LATE,
    NO_TIME,
    NO_TIME_TO_MEASURE,
    OVER_SHARE,
    StepCrashed,
    StepError,
    StepKilled,
    StepTimeout,
    StoreError,
    UsageError,
)
from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.frameworks.records import Coverage
from enginesmith.pipeline.measure.rows import LatencyRow, RaceRow
from enginesmith.pipeline.planning.plan import LATENCY, LOAD, Plan, Step, StepRef, Variant, VariantName, audit_steps
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import sentences
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.assemble import End, Header, assemble, explain_end, find_engine, settle_untried
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Audit
from enginesmith.pipeline.tasks.prune import FACTS
from enginesmith.pipeline.tasks.tune import ENGINE
from enginesmith.pipeline.tensors import Signature, TensorSpec
from enginesmith.pipeline.workflows.optimize import _why_unusable
from runs import PRUNING, small, variant

HEADER = Header("demo", "2026-01-01T00:00:00+00:00", 1.0, {"vector_units": ["avx2"]})
BASELINE = Variant(VariantName("eager"), Eager(), "fp32", LOAD, Device())
FLOAT = Variant(VariantName("onnxruntime", "fp32"), OnnxRuntime(), "fp32", StepRef("build", "fp32"), Device())
INT8 = Variant(
    *(VariantName("onnxruntime", "int8"), OnnxRuntime(), "int8", StepRef("build", "int8"), Device()),
    lowering="int8",
    calibration="calibrate",
    assignment=StepRef("assign"),
    search=("search-1", "search-2", "search-3"),
    audits=("audit-graph", "audit-engine"),
)


class Outcomes:
    """Hold what steps left, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, dict[str, Outcome]()

    def put(self, step: str, content: Any, kind: str = "record") -> "Outcomes":
        folder = self.folder / step
        folder.mkdir(parents=True)
        (folder / "records.json").write_text(json.dumps(content))
        entry = HistoryEntry(step=step, parameters={}, tools={}, seconds=1, host_peak_bytes=None, effect="made")
        values = {"kind": kind, "path": folder / "records.json", "sha256": "0", "bytes": 1, "history": (entry,)}
        self.found[step] = Outcome(step, "done", Artifact.model_validate(values))
        return self

    def change(self, step: str, **facts: Any) -> None:
        artifact = self.found[step].artifact
        assert artifact
        self.found[step] = replace(self.found[step], artifact=artifact.model_copy(update=facts))

    def run(self, *variants: Variant, baseline: Variant = BASELINE) -> Run:
        names = (LOAD, StepRef("build", "fp32"), StepRef("assign"), StepRef("build", "int8"))
        steps = tuple(Step(ref, Audit()) for ref in names)
        plan = Plan(steps, baseline, variants, LATENCY)
        return assemble(HEADER, make({"model": "digits"}), plan, self.found, {})

    def record(self, variant: Variant) -> VariantRecord:
        return self.run(variant).variants[0]


def coverage(**macs: float) -> dict[str, Any]:
    found = Coverage(total_macs=1, macs=macs, operators={name: {} for name in macs}, weights=macs, products={})
    return found.model_dump(mode="json")


def latency(variant: str, ms: float) -> dict[str, Any]:
    speedup = {"median": 10 / ms, "low": 9.9 / ms, "high": 10.1 / ms}
    return {"variant": variant, "row": {"batch": 1, "p50_ms": ms, "speedup": speedup}}


@pytest.fixture
def outcomes(tmp_path: Path) -> Outcomes:
    return Outcomes(tmp_path).put("build-int8", {}, "engine").put("build-fp32", {}, "engine")


def test_audits_are_part_of_the_record(outcomes: Outcomes) -> None:
    outcomes.put("audit-graph", [coverage(int8=1.0)]).put("audit-engine", [coverage(int8=0.7, fp32=0.3)])
    found = outcomes.record(INT8)
    assert found.coverage
    assert found.coverage.macs == {"int8": 1.0}
    assert found.engine_coverage
    assert found.engine_coverage.macs == {"int8": 0.7, "fp32": 0.3}
    assert not {"coverage", "engine_coverage"} & set(found.reasons)


def test_what_the_graph_tells_of_the_order_of_rows_is_known_of_the_model(outcomes: Outcomes) -> None:
    """A module does not tell; a package of it then compares the boxes of int8 one by one, and refuses itself."""
    signature = Signature(inputs=(), outputs=tuple(TensorSpec.parse(f"{name}:float32:n,4") for name in "ab"))
    outcomes.put(LOAD, {}).change(LOAD, signature=signature)
    outcomes.put("export", {}).change("export", signature=signature.model_copy(update={"unordered": {"b": "rows"}}))
    found = outcomes.run().model.signature
    assert found is not None
    assert found.unordered == {"b": "rows"}


def test_a_graph_opens_the_number_of_rows_that_values_choose(outcomes: Outcomes) -> None:
    """The example reached the most rows; of other outputs, an open size tells of the exporter's shape inference."""
    texts = {"rows:float32:10,4": "rows:float32:rows_dim_0,4", "map:float32:batch,7": "map:float32:batch,map_dim_1"}
    module, graph = (
        Signature(inputs=(), outputs=tuple(map(TensorSpec.parse, side)), unordered=unordered)
        for side, unordered in ((texts.keys(), {}), (texts.values(), {"rows": "rows"}))
    )
    outcomes.put(LOAD, {}).change(LOAD, signature=module)
    outcomes.put("export", {}).change("export", signature=graph)
    signature = outcomes.run().model.signature
    assert signature is not None
    assert [*map(str, signature.outputs)] == ["rows:float32:rows_dim_0,4", "map:float32:batch,7"]


def test_a_missed_target_is_the_first_note_on_the_model(outcomes: Outcomes) -> None:
    pruned = replace(FLOAT, prune="macs=-40%", pruned=(StepRef("prune-macs40"),))
    for step, note in ((LOAD, "the batch is fixed"), ("export", "no dynamo"), ("prune-macs40", "63.6% are left")):
        outcomes.put(step, {})
        artifact = outcomes.found[step].artifact
        assert artifact
        outcomes.change(step, history=(artifact.history[-1].model_copy(update={"notes": (note,)}),))
    (outcomes.folder / "prune-macs40" / FACTS).write_text(PRUNING.model_dump_json())
    shown = outcomes.run(pruned, replace(pruned, name=VariantName("onnxruntime", "fp16")))
    wanted = ("pruned to macs=-40%: 63.6% are left", "the batch is fixed", "no dynamo")
    assert shown.model.notes == wanted
    assert sentences.list_notes(shown)[:3] == list(wanted), "in the terminal, which has the first three"
    assert set(wanted) <= set(sentences.list_warnings(shown)), "in report.md"


def test_what_was_not_looked_at_has_a_reason(outcomes: Outcomes) -> None:
    outcomes.found["audit-graph"] = Outcome("audit-graph", "failed", reason="it crashed")
    found = outcomes.record(INT8)
    assert (found.coverage, found.reasons["coverage"]) == (None, "it crashed")
    assert found.reasons["engine_coverage"] == "not reached: audit-engine"
    assert found.status == "built", "an audit that failed says nothing about the variant"
    assert outcomes.run().baseline.reasons["coverage"] == "eager runs the module itself"
    assert outcomes.record(FLOAT).reasons["coverage"] == "not asked for"


def test_a_variant_that_is_not_what_it_is_called_cannot_win(outcomes: Outcomes) -> None:
    outcomes.put("audit-engine", [coverage(fp32=1.0)])
    outcomes.put(LATENCY, [latency("eager", 10), latency("onnxruntime-fp32", 5), latency("onnxruntime-int8", 2)])
    (outcomes.folder / LATENCY / "environment.json").write_text("{}")
    run = outcomes.run(FLOAT, INT8)
    assert run.winner == "onnxruntime-fp32"
    assert (run.variants[1].status, run.variants[1].failure) == ("failed", "wrong result")
    assert run.variants[1].reason.startswith("none of the multiply-adds is computed in int8")
    cast = replace(INT8, lowering=None)
    assert outcomes.run(FLOAT, cast).winner == "onnxruntime-fp32", "also where the engine was to do it by itself"
    file = outcomes.run(FLOAT, cast, baseline=replace(BASELINE, precision="int8"))
    assert file.winner == "onnxruntime-int8", "nobody asked for more than that file"
    assert file.variants[1].shortfall.startswith("its name has the precision that the file is in; none of the")


def test_a_variant_that_training_made_no_better_is_left_out_and_nothing_is_wrong_with_it(outcomes: Outcomes) -> None:
    outcomes.put("assign", {}, "onnx")  # here, the step that trained it
    outcomes.change("assign", rejected="training made it no better")
    plan = Plan((Step(StepRef("assign"), Audit()),), BASELINE, (), LATENCY)
    trained = replace(INT8, artifact=StepRef("assign"), assignment=None, recovered=(StepRef("assign"),))
    assert explain_end(trained, plan, outcomes.found) == End(unfinished="training made it no better")


def test_a_variant_that_was_dropped_has_its_own_reason(outcomes: Outcomes) -> None:
    """A step that it shares with others tells of the first of them."""
    outcomes.put("race", [{"variant": "onnxruntime-fp32", "lap": 1, "dropped": "int8 is faster"}])
    outcomes.found["build-fp32"] = Outcome("build-fp32", "skipped", reason="dropped: another one is out of the race")
    outcomes.put(LATENCY, [latency("eager", 10), latency("onnxruntime-int8", 2)])
    (outcomes.folder / LATENCY / "environment.json").write_text("{}")
    record = outcomes.record(FLOAT)
    assert (record.status, record.reason) == ("skipped", "dropped: int8 is faster")
    assert record.reasons["latency"] == "dropped: int8 is faster"
    outcomes.found["build-fp32"] = Outcome("build-fp32", "failed", reason="it crashed")
    assert outcomes.record(FLOAT).reason == "build-fp32: it crashed"


def test_of_a_variant_that_failed_before_it_was_tuned_the_engine_is_the_built_one(
    outcomes: Outcomes, tmp_path: Path
) -> None:
    built, verify, tune = StepRef("build", "fp32"), StepRef("verify", "fp32"), StepRef("tune", "fp32")
    steps = (Step(built, Audit()), Step(verify, Audit(), {"model": built}))
    steps += (Step(tune, Audit(), {ENGINE: built, "verified": verify}),)
    tuned = replace(FLOAT, artifact=tune, verified=(verify,))
    plan = Plan(steps, BASELINE, (tuned,), None)
    outcomes.put(verify, [])
    outcomes.found[tune] = Outcome(tune, "skipped", reason="dropped: int8 is faster")
    assert find_engine(tuned, plan, outcomes.found) is None, "it is right, and slow"
    for lap, kept in ((1, False), (0, True)):  # in a lap, or before them for its loss on the samples for choosing
        row = {"variant": tuned.id, "lap": lap, "dropped": "another one is better"}
        raced = Outcomes(tmp_path / f"lap {lap}").put("race", [row]).found
        assert (find_engine(tuned, plan, outcomes.found | raced) is not None) == kept
    outcomes.change(verify, rejected="an SQNR of 7.8 dB")
    assert find_engine(tuned, plan, outcomes.found) == outcomes.found[built].artifact
    run = assemble(HEADER, make({"model": "digits"}), plan, outcomes.found, {tuned.id: Path("variants/model.onnx")})
    (record,) = run.variants
    assert (record.status, record.reason) == ("failed", "an SQNR of 7.8 dB")
    assert (record.artifact is not None, record.build is not None) == (True, True)
    outcomes.change(verify, rejected=None)
    del outcomes.found[tune]
    outcomes.put(tune, {}, "engine")
    assert find_engine(tuned, plan, outcomes.found) == outcomes.found[tune].artifact


def test_what_paid_is_remarked(outcomes: Outcomes) -> None:
    outcomes.put("audit-engine", [coverage(int8=1.0)])
    outcomes.put(LATENCY, [latency("eager", 10), latency("onnxruntime-fp32", 5), latency("onnxruntime-int8", 10)])
    (outcomes.folder / LATENCY / "environment.json").write_text('{"vector_units": ["avx512_vnni"]}')
    (said,) = outcomes.run(FLOAT, INT8).variants[1].remarks
    assert said.startswith("int8 does not pay: 0.50×")
    assert "avx512_vnni" in said, "as the machine was when it was measured"


@pytest.mark.parametrize("synthetic", [True, False])
def test_made_up_calibration_data_is_noted(outcomes: Outcomes, synthetic: bool) -> None:
    outcomes.put("calibrate", {"provenance": {"synthetic": synthetic}})
    assert outcomes.record(INT8).synthetic_calibration is synthetic
    outcomes.put("graph", [], kind="onnx")
    (outcomes.folder / "graph" / "ranges.json").write_text(json.dumps({"provenance": {"synthetic": synthetic}}))
    assert outcomes.record(replace(INT8, calibration=StepRef("graph"))).synthetic_calibration is synthetic
    half = replace(INT8, name=VariantName("onnxruntime", "fp16"), precision="fp16", lowering="fp16")
    assert not outcomes.record(half).synthetic_calibration, "ranges are no part of that graph"


@pytest.mark.parametrize("asked", [True, False])
def test_groups_that_were_named_to_stay_in_float32_are_told_without_a_search(outcomes: Outcomes, asked: bool) -> None:
    groups = [{"group": "a", "operator": "Conv", "precision": "fp16", "why": ""}]
    why = "was asked for" if asked else "may overflow"
    groups.append({"group": "b", "operator": "Conv", "precision": "fp32", "why": why})
    outcomes.put("precision-fp16", [], kind="onnx")
    (outcomes.folder / "precision-fp16" / "assignment.json").write_text(json.dumps(groups))
    built = Step(StepRef("build", "int8"), Audit(), {"model": StepRef("precision", "fp16")})
    half = replace(INT8, lowering="fp16", assignment=None, search=())
    made = Plan((Step(LOAD, Audit()), built), BASELINE, (half,), LATENCY)
    (found,) = assemble(HEADER, make({"model": "digits"}), made, outcomes.found, {}).variants
    assert [(group.group, group.why) for group in found.assignment] == ([("a", ""), ("b", why)] if asked else [])


def test_the_search_is_that_of_its_last_step(outcomes: Outcomes) -> None:
    groups = [{"group": name, "operator": "Conv", "precision": "int8", "method": "mse"} for name in "abc"]
    groups.append({"group": "d", "operator": "MatMul", "precision": "fp32", "why": "a product of two activations"})
    trial = {"phase": "everything", "method": "mse", "kept": [], "why": "all", "passed": False, "error": 1.0}
    second = {**trial, "phase": "sensitive", "kept": ["a"], "passed": True, "speedup": 1.5, "seconds": 2.0}
    outcomes.put("assign", groups).put("search-1", [trial]).put("search-2", [trial, second])
    found = outcomes.record(INT8)
    assert [one.group for one in found.assignment] == ["a", "b", "c", "d"]
    trials = [(one.step, one.quantized, one.kept, one.passed) for one in found.search]
    assert trials == [(1, 3, 0, False), (2, 2, 1, True)]
    assert found.search[1].speedup == 1.5


def test_what_was_built_and_no_time_was_left_to_measure_is_told_apart(outcomes: Outcomes) -> None:
    late = {"batch": 1, "failure": NO_TIME, "late": True}
    outcomes.put(LATENCY, [latency("eager", 10), {"variant": "onnxruntime-fp32", "row": late}])
    (outcomes.folder / LATENCY / "environment.json").write_text("{}")
    found = outcomes.record(FLOAT)
    assert (found.status, found.untried, found.reason) == ("skipped", True, NO_TIME_TO_MEASURE)
    assert found.late == "no time to measure"
    measured = latency("onnxruntime-fp32", 5)
    measured["row"] |= {"batch": 8}
    rows = [latency("eager", 10), {"variant": "onnxruntime-fp32", "row": late}, measured]
    (outcomes.folder / LATENCY / "records.json").write_text(json.dumps(rows))
    assert outcomes.record(FLOAT).reason == f"latency at batch 1: {NO_TIME_TO_MEASURE}"
    (outcomes.folder / LATENCY / "records.json").write_text(json.dumps(rows[:2]))
    outcomes.change(StepRef("build", "fp32"), kind="module")
    assert outcomes.record(FLOAT).reason == NO_TIME, "a module is compiled when it is measured"


@pytest.mark.parametrize(
    ("failure", "precision", "told"),
    [
        ("unsupported", "fp32", ["elsewhere"]),
        ("internal", "fp32", ["int8", "elsewhere"]),
        ("unsupported", "fp16", ["int8", "elsewhere"]),
    ],
)
def test_a_search_promises_no_variant_of_an_engine_that_does_not_take_the_model(
    failure: str, precision: str, told: list[str]
) -> None:
    late = {"status": "skipped", "untried": True, "late": "no time", "reason": NO_TIME}
    records = settle_untried(
        [
            variant("float", engine="openvino", precision=precision, status="failed", failure=failure),
            variant("int8", engine="openvino", precision="int8", **late),
            variant("elsewhere", precision="int8", **late),
        ]
    )
    assert [record.id for record in records if record.untried and record.late] == told
    if "int8" not in told:
        assert records[1].reason == "its engine does not take the graph: see float"
    (line,) = (line for line in sentences.list_footnotes(small(variant("eager"), *records)) if "resume" in line)
    assert line.endswith(f"tries {', '.join(told)}")


def test_a_variant_that_was_built_is_not_said_to_be_refused() -> None:
    float_refused = variant("float", engine="openvino", precision="fp32", status="failed", failure="unsupported")
    late = {"status": "built", "untried": True, "late": "no time to measure", "reason": NO_TIME_TO_MEASURE}
    built = variant("int8", engine="openvino", precision="int8", **late)
    assert settle_untried([float_refused, built]) == [float_refused, built]


def test_where_the_step_that_measures_all_has_failed_no_variant_can_be_used(outcomes: Outcomes) -> None:
    """Their engines are there, and the step has ended: the run is complete, and says why it has no winner."""
    full = StoreError("a file of the step: no space left on device", "free some")
    outcomes.found[LATENCY] = Outcome(LATENCY, "failed", error=full, reason=str(full))
    elsewhere = replace(FLOAT, name=VariantName("onnxruntime", "fp32", target="sm86"), unavailable="no GPU")
    run = outcomes.run(FLOAT, elsewhere)
    assert [record.status for record in run.records] == ["failed", "failed", "built"]
    assert {(record.reason, record.failed_step) for record in run.records[:2]} == {(f"latency: {full}", "latency")}
    run = outcomes.run(FLOAT)
    reason = "every requested engine failed: onnxruntime-fp32: latency: a file of the step: no space left on device"
    assert (run.winner_reason, run.no_winner) == (reason, "failed")
    assert outcomes.run().winner_reason == reason.replace("onnxruntime-fp32", "eager"), "nothing else was requested"
    error = _why_unusable(run, outcomes.found, "enginesmith resume run")
    assert isinstance(error, StoreError)
    assert error.message == "latency: a file of the step: no space left on device"
    assert error.remedy == "free some; then resume"
    (record,) = run.requested
    raced = record.model_copy(update={"race": (RaceRow(variant=record.id, lap=1),)})
    assert runs.find_late_failures(run.model_copy(update={"variants": (raced,)})) == {}, "no other race is needed"


def test_steps_tell_what_they_do_to_which_variant_and_how_they_ended(outcomes: Outcomes) -> None:
    built, unreached = StepRef("build", VariantName("openvino"), changes=("sparse24",)), StepRef("verify", LOAD)
    outcomes.found[built] = Outcome(built, "skipped", reason=OVER_SHARE)
    plan = Plan((Step(built, Audit()), Step(unreached, Audit())), BASELINE, (), LATENCY)
    first, second = assemble(HEADER, make({"model": "digits"}), plan, outcomes.found, {}).steps
    assert (first.kind, first.variant, first.reached, first.late) == ("build", "openvino-sparse24", True, "over share")
    assert (second.kind, second.variant, second.reached, second.late) == ("verify", "", False, None)


@pytest.mark.parametrize("reached", [False, True])
@pytest.mark.parametrize(
    ("second", "failed", "why"),
    [
        (Outcome("search-2", "failed", reason="it was killed"), True, "search-2: it was killed"),
        (Outcome("search-2", "skipped", reason=NO_TIME), False, NO_TIME),
        (Outcome("search-2", "skipped", reason=OVER_SHARE), False, OVER_SHARE),
        (None, False, NO_TIME),
    ],
)
def test_a_search_that_was_cut_short_is_no_wrong_result(
    outcomes: Outcomes, second: Outcome | None, failed: bool, why: str, reached: bool
) -> None:
    """A trial died, was not begun for want of time, or found that no time was left for it."""
    trial = {"phase": "everything", "method": "mse", "kept": [], "why": "all", "passed": reached, "error": 1.0}
    outcomes.put("search-1", [trial]).put("search-2", [trial]).put("assign", [])
    if second:
        outcomes.found["search-2"] = second
    else:
        outcomes.change("search-2", incomplete=True)
    outcomes.change("assign", rejected="" if reached else "none of 1 trials reaches the goal")
    if not reached:
        del outcomes.found[StepRef("build", "int8")]
    found = outcomes.record(replace(INT8, verified=(StepRef("assign"),)))
    assert found.reasons["search"] == why
    assert found.late_fields.get("search") == LATE.get(why)
    assert found.failed_step == ("search-2" if failed and not reached else None)
    if reached:
        assert found.status == "built"
    else:
        so_far = "the time was over before its search was; so far, none of 1 trials reaches the goal"
        told = so_far if why == NO_TIME else why
        assert (found.status, found.reason) == ("failed" if failed else "skipped", told)
        assert found.untried is not failed
    outcomes.put("search-3", [trial])
    outcomes.found |= {"search-2": Outcome("search-2", "done")}
    found = outcomes.record(replace(INT8, verified=(StepRef("assign"),)))
    assert "search" not in found.reasons
    assert reached or (found.status, found.failure) == ("failed", "wrong result")


@pytest.mark.parametrize(
    ("error", "asked", "failed"),
    [
        (StepTimeout("it ran past its time limit"), {}, False),
        (StepKilled("it was killed"), {}, False),
        (StepError("AxisError: axis -1 is out of bounds"), {}, False),
        (StepCrashed("it crashed"), {}, True),
        (StepTimeout("it ran past its time limit"), {"prosecute_seconds": 3}, True),
    ],
)
def test_a_prosecution_that_nobody_asked_for_fails_nothing_where_it_ends_early(
    error: StepError, asked: dict[str, Any], failed: bool
) -> None:
    made = plan(resolve_recipe(make({"model": "digits", "device": "cpu", "engines": ["onnxruntime"], **asked})))
    tried = made.variants[0]
    assert tried.prosecuted
    outcomes = {step.id: Outcome(step.id, "done") for step in made.steps}
    outcomes[tried.prosecuted] = Outcome(tried.prosecuted, "failed", error=error, reason=str(error))
    assert bool(explain_end(tried, made, outcomes)[0]) is failed


def test_audits_are_planned_for_what_can_be_seen() -> None:
    steps = audit_steps(FLOAT, "simplify")
    assert [step.id for step in steps] == ["audit-simplify", "audit-onnxruntime-fp32"]
    assert steps[1].inputs["model"] == "build-fp32"
    hidden = replace(FLOAT, name=VariantName("tensorrt_rtx", "fp32"), engine=TensorRT.model_construct())
    assert [step.id for step in audit_steps(hidden, "simplify")] == ["audit-simplify"]


Values = dict[str, Any]


def values() -> Values:
    """A run as run.json has it."""
    baseline = variant("eager", engine="eager", latency=(LatencyRow(batch=1, p50_ms=2.0),))
    other = baseline.model_copy(update={"id": "other"})
    run = small(baseline, other, environment={"warnings": ["the machine is busy"]}, winner=None)
    found: Values = json.loads(run.model_dump_json(by_alias=True))
    return found


def read(folder: Path, change: Callable[[Values], object] = lambda found: None, **how: bool) -> Run:
    """Return what is read of a run in which something was changed."""
    found = values()
    change(found)
    (folder / "run.json").write_text(json.dumps(found))
    return runs.read(folder, **how)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert json.loads(read(tmp_path).model_dump_json(by_alias=True)) == values()
    assert runs.read(tmp_path / "run.json").name == "demo"


def test_fields_of_a_later_version_are_left_out_and_named(tmp_path: Path) -> None:
    def add(found: Values) -> None:
        found["mood"] = "good"
        found["recipe"]["color"] = "red"
        found["recipe"]["budgets"]["max_price"] = 3
        for record in (found["baseline"], *found["variants"]):
            record["latency"][0]["p42_ms"] = 1.0

    run = read(tmp_path, add)
    assert run.recipe == make({"model": "digits"}, listed=True)
    caution, before = run.environment["warnings"]
    assert before == "the machine is busy"
    assert set(caution.partition(": ")[2].split(", ")) == {
        *("mood", "recipe.color", "recipe.budgets.max_price"),
        *("baseline.latency[].p42_ms", "variants[].latency[].p42_ms"),
    }


def test_a_recipe_that_is_not_known_as_a_whole_is_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not have: recipe\.color\n.*optimize digits … .*--replace"):
        read(tmp_path, lambda found: found["recipe"].update(color="red"), to_go_on=True)
    assert read(tmp_path, lambda found: found.update(mood="good"), to_go_on=True).name == "demo"


def test_fields_that_were_not_there_yet_have_their_defaults(tmp_path: Path) -> None:
    def remove(found: Values) -> None:
        del found["model"]["sha256"], found["baseline"]["coverage"], found["recipe"]["sparsifying"]

    assert read(tmp_path, remove).model.sha256 is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.update(schema="enginesmith.run/0"), "older schema enginesmith.run/0"),
        (lambda found: found.update(schema="enginesmith.run/2"), "newer schema enginesmith.run/2"),
        (lambda found: found.update(schema="enginesmith.comparison/1"), "its schema is"),
        (lambda found: found.update(schema=["enginesmith.run/1"]), "its schema is"),
        (lambda found: found.pop("schema"), "names no schema"),
        (lambda found: found.pop("recipe"), "recipe is missing"),
        (lambda found: found["baseline"].pop("engine"), r"baseline\.engine is missing"),
        (lambda found: found["variants"][0]["latency"][0].update(p50_ms="low"), r"variants\[0\]\.latency\[0\]\.p50_ms"),
        (lambda found: found["variants"][0]["latency"][0].update(p50_ms=-1), "greater than or equal to 0"),
        (lambda found: found.update(variants={}), "variants: Input should be a valid tuple"),
        (lambda found: found["environment"].update(warnings="busy"), 'environment: warnings: .*it is "busy"'),
        (lambda found: found["environment"].update(gpus=[3]), r"environment: gpus\[0\]"),
        (lambda found: found.update(seconds=float("nan")), "NaN is no number"),
    ],
)
def test_what_is_wrong_is_said_by_field(tmp_path: Path, change: Callable[[Values], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, change)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends in the middle"),
        (json.dumps({"schema": "enginesmith.run/1"}).encode()[:-5], "ends in the middle"),
        (b'{"schema": "enginesmith.run/1", "name": }', "Expecting value at line 1"),
        (b'{"name": "\xff\xfe"}', "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[]", "names no schema"),
        (b"null", "names no schema"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        runs.read(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ({1: True, 8: False, 5: True}, {1: True, 8: True}, []),  # 5 was the largest that fit, where 8 did not
        ({1: True, 8: False, 5: True}, {1: True, 8: False, 4: True}, ["a has no latency at batch 5"]),
        ({1: True, 8: True}, {8: True, 16: True}, ["a has no latency at batch 1"]),
    ],
)
def test_a_batch_that_was_found_is_no_loss_where_a_larger_one_fits(
    before: dict[int, bool], after: dict[int, bool], lost: list[str]
) -> None:
    first, later = (
        small(
            variant("eager"),
            variant("a", latency=[{"batch": n, "p50_ms": 1.0 if fits else None} for n, fits in row.items()]),
        )
        for row in (before, after)
    )
    assert runs.list_losses(first, later) == lost


def test_what_is_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    text = json.dumps(values())
    for length in range(1, len(text), 97):
        (tmp_path / "run.json").write_text(text[:length])
        with pytest.raises(UsageError, match="damaged"):
            runs.read(tmp_path)


def test_a_folder_without_a_run_and_what_is_no_file(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="there is no run in"):
            runs.read(place)
    with pytest.raises(UsageError, match="it is no file"):
        runs.read(Path("/dev/null"))


def test_what_is_too_large_for_a_document_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "run.json").open("wb") as sparse:
        sparse.truncate(2 << 30)
    with pytest.raises(UsageError, match="2 GiB"):
        runs.read(tmp_path)
