"""junit.xml: what is broken fails, what was not judged is skipped, and any name makes XML that can be read."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from enginesmith.pipeline.artifact import Artifact, HistoryEntry
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.execution.scheduler import Outcome
from enginesmith.pipeline.frameworks.onnx.shares import Coverage
from enginesmith.pipeline.measure.rows import LatencyRow, StageFidelity
from enginesmith.pipeline.planning.plan import LATENCY, LOAD, Plan, Step, Variant, add_audits
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import junit
from enginesmith.pipeline.results.assemble import Header, assemble
from enginesmith.pipeline.results.run import Run, VariantRecord, Verdict
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.verify import Audit

MakeRun = Callable[..., Run]
HOSTILE = "]]></failure><script>&\x00\x1b\ud800\ufffe\"'\n中"


def check(**changes: object) -> StageFidelity:
    values = {"stage": "engine", "point": "min", "batch": 1, "sqnr_db": 50.0, "passed": True}
    unknown = dict.fromkeys(("cosine", "max_abs_error", "argmax_agreement"))
    return StageFidelity.model_validate({**unknown, **values, **changes})


def record(name: str, **changes: object) -> VariantRecord:
    values = {"id": name, "engine": "onnxruntime", "precision": "fp32", "status": "measured"}
    row = LatencyRow(batch=1, p50_ms=1.0)
    return VariantRecord.model_validate({**values, "latency": (row,), **changes})


@pytest.fixture
def run(made_runs: ModuleType) -> MakeRun:
    """A run around :func:`record`'s baseline."""
    return partial(made_runs.small, record("eager"))


def cases(text: str) -> dict[str, str]:
    """What became of each test case."""
    found = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        outcome = next(iter(case), None)
        key = f"{case.get('classname')}: {case.get('name')}"
        found[key] = "passed" if outcome is None else f"{outcome.tag}: {outcome.get('message')}"
    return found


def test_every_budget_and_every_check_is_a_case(run: MakeRun) -> None:
    fast = Verdict(budget="max_latency_ms", limit=5, actual=1, passed=True)
    large = Verdict(budget="max_memory_bytes", limit=1024, actual=None, passed=False, reason="nobody looked")
    made = record("a", fidelity=(check(), check(point="max", batch=8, passed=False, reason="SQNR of 3 dB")))
    text = junit.render(run(made, verdicts=(fast, large)))
    assert cases(text) == {
        "budgets: p50 latency: at most 5 ms": "passed",
        "budgets: peak memory: at most 1 KiB": (
            "failure: peak memory is unknown (nobody looked), and has to be at most 1 KiB"
        ),
        "variant a: measured": "passed",
        "variant a: engine at min (batch 1)": "passed",
        "variant a: engine at max (batch 8)": "failure: SQNR of 3 dB",
    }
    root = ElementTree.fromstring(text)
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("5", "2", "0")


def test_why_stands_in_the_text_too_which_is_what_gitlab_shows(run: MakeRun) -> None:
    failed = record("a", fidelity=(check(passed=False, reason="SQNR of 3 dB"), check(reason="changed on purpose")))
    root = ElementTree.fromstring(junit.render(run(failed)))
    outcomes = [(one.tag, one.get("message"), one.text) for case in root.iter("testcase") for one in case]
    assert outcomes == [
        ("failure", "SQNR of 3 dB", "SQNR of 3 dB"),
        ("skipped", "not judged: changed on purpose", "not judged: changed on purpose"),
    ]


def test_what_was_not_judged_is_skipped(run: MakeRun) -> None:
    changed = check(reason="changed on purpose")
    built = record("b", status="built", reason="no such device", latency=())
    recipe = make({"model": "digits", "budgets": {"max_size_bytes": 10}})
    waiting = run(record("a", fidelity=(changed,)), built, recipe=recipe, winner=None, winner_reason="not measured")
    assert cases(junit.render(waiting)) == {
        "budgets: size": "skipped: not judged: not measured",
        "variant a: measured": "passed",
        "variant a: engine at min (batch 1)": "skipped: not judged: changed on purpose",
        "variant b: measured": "skipped: no such device",
    }


def test_a_variant_that_failed_is_a_failure(run: MakeRun) -> None:
    failed = record("a", status="failed", reason="build: out of memory")
    assert cases(junit.render(run(failed)))["variant a: measured"] == "failure: build: out of memory"


def test_a_fleet_has_the_cases_of_all_its_runs(made_fleets: ModuleType, tmp_path: Path) -> None:
    asked = made_fleets.fleet()
    one, two, three, four = asked.entries()
    failed = made_fleets.variant(made_fleets.INT8, 0.5, 4.0, fidelity=(check(passed=False, reason="SQNR of 3 dB"),))
    found = {one.name: made_fleets.breached(one), two.name: made_fleets.run(two, variants=(failed,))}
    entries = [made_fleets.entry(entry, tmp_path, found[entry.name]) for entry in (one, two)]
    entries += [made_fleets.entry(three, tmp_path, made_fleets.ERRORS[2])]
    entries += [made_fleets.entry(four, tmp_path, made_fleets.ERRORS[0])]
    text = junit.render_fleet(made_fleets.record(asked, *entries), found)
    assert cases(text) == {
        "entries: digits@cpu": "passed",
        "entries: digits@edge": "passed",
        "entries: lenet@cpu": "failure: failed: aten::odd cannot be exported",
        "entries: lenet@edge": "skipped: lacking: no node has the accelerator L4",
        "digits@cpu budgets: p50 latency: at most 0.1 ms": (
            "failure: p50 latency is 0.5 ms, and has to be at most 0.1 ms"
        ),
        "digits@cpu variant onnxruntime-fp32: measured": "passed",
        "digits@cpu variant onnxruntime-int8: measured": "passed",
        "digits@edge variant onnxruntime-int8: measured": "passed",
        "digits@edge variant onnxruntime-int8: engine at min (batch 1)": "failure: SQNR of 3 dB",
    }
    root = ElementTree.fromstring(text)
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("9", "3", "1")


@pytest.mark.parametrize("text", [HOSTILE, "<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///'>]>&e;"])
def test_any_text_is_xml(run: MakeRun, text: str) -> None:
    made = record(text, status="failed", reason=text, fidelity=(check(stage=text, passed=False, reason=text),))
    shown = junit.render(run(made, name=text, winner=None))
    shown.encode()
    assert len(cases(shown)) == 2
    assert "<script>" not in shown


HEADER = Header("demo", "2026-01-01T00:00:00+00:00", 1.0, {"vector_units": ["avx2"]})
BASELINE = Variant("eager", Eager(), "fp32", LOAD, Device())
FLOAT = Variant("onnxruntime-fp32", OnnxRuntime(), "fp32", "build-fp32", Device())
INT8 = Variant(
    *("onnxruntime-int8", OnnxRuntime(), "int8", "build-int8", Device()),
    lowering="int8",
    calibration="calibrate",
    assignment="assign",
    search=("search-1", "search-2", "search-3"),
    audits=("audit-graph", "audit-engine"),
)


class Outcomes:
    """What steps left, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, dict[str, Outcome]()

    def put(self, step: str, content: Any, kind: str = "record") -> "Outcomes":
        folder = self.folder / step
        folder.mkdir()
        (folder / "records.json").write_text(json.dumps(content))
        entry = HistoryEntry(step=step, parameters={}, tools={}, seconds=1, host_peak_bytes=None, effect="made")
        values = {"kind": kind, "path": folder / "records.json", "sha256": "0", "bytes": 1, "history": (entry,)}
        self.found[step] = Outcome(step, "done", Artifact.model_validate(values))
        return self

    def run(self, *variants: Variant) -> Run:
        steps = tuple(Step(name, Audit()) for name in (LOAD, "build-fp32", "build-int8"))
        plan = Plan(steps, BASELINE, variants, LATENCY)
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
    given = replace(INT8, lowering=None)
    assert outcomes.run(FLOAT, given).winner == "onnxruntime-int8", "nobody asked for more than that file"


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
    half = Variant("onnxruntime-fp16", OnnxRuntime(), "fp16", "build-int8", Device(), lowering="fp16")
    half = replace(half, calibration="calibrate")
    assert not outcomes.record(half).synthetic_calibration, "ranges are no part of that graph"


def test_the_search_is_that_of_its_last_step(outcomes: Outcomes) -> None:
    groups = [{"group": name, "operator": "Conv", "precision": "int8", "method": "mse"} for name in "abc"]
    trial = {"phase": "everything", "method": "mse", "kept": [], "why": "all", "passed": False, "error": 1.0}
    second = {**trial, "phase": "sensitive", "kept": ["a"], "passed": True, "speedup": 1.5, "seconds": 2.0}
    outcomes.put("assign", groups).put("search-1", [trial]).put("search-2", [trial, second])
    found = outcomes.record(INT8)
    assert [one.group for one in found.assignment] == ["a", "b", "c"]
    assert [(one.step, one.quantised, one.kept, one.passed) for one in found.search] == [
        (1, 3, 0, False),
        (2, 2, 1, True),
    ]
    assert found.search[1].speedup == 1.5


def test_audits_are_planned_for_what_can_be_seen() -> None:
    variant, steps = add_audits(FLOAT, "simplify")
    assert variant.audits == tuple(step.id for step in steps) == ("audit-simplify", "audit-onnxruntime-fp32")
    assert steps[1].inputs["model"] == "build-fp32"
    hidden = Variant("tensorrt_rtx-fp32", TensorRT.model_construct(), "fp32", "build-rtx", Device(kind="cuda"))
    assert [step.id for step in add_audits(hidden, "simplify")[1]] == ["audit-simplify"]
