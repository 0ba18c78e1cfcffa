"""junit.xml: what is broken fails, what was not judged is skipped, and any name makes XML that can be read."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from enginesmith.pipeline.measure.rows import LatencyRow, StageFidelity
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import junit
from enginesmith.pipeline.results.run import Run, VariantRecord, Verdict

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
