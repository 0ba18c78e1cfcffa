"""The gate of a run: what failed is said, and what cannot be judged is neither passed nor failed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import faults
from enginesmith import cli
from enginesmith.pipeline.artifact import HistoryEntry, file_digest, folder_digest
from enginesmith.pipeline.commands.context import budgets_of
from enginesmith.pipeline.errors import ModelError, StoreError, UsageError
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow, RaceRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.report import gate as texts
from enginesmith.pipeline.results import gate, remeasure
from enginesmith.pipeline.results.gate import Demands, parse_tolerance
from enginesmith.pipeline.results.gate_report import Gate
from enginesmith.pipeline.results.run import StoredArtifact
from gates import MACHINE, demands, interval, judged, record, said, write

WILD = Interval(median=1.0, low=0.1, high=9.0)
"""Too wide to say anything: not judged, and so not let through."""


def test_each_budget_is_judged_in_its_direction(tmp_path: Path) -> None:
    run = write(tmp_path / "run", record())
    found = gate.gate(run, demands(max_latency_ms=2, max_memory_bytes=1, max_size_bytes=1000))
    assert judged(found) == {"max_latency_ms": True, "max_memory_bytes": False, "max_size_bytes": True}
    assert found.exit_code == 3
    assert [one.text for one in found.breaches] == ["peak memory is 10 MiB, and has to be at most 1 B"]


def test_a_budget_whose_number_is_unknown_is_not_judged_and_fails_the_gate(tmp_path: Path) -> None:
    run = write(tmp_path / "run", record(reasons={"quality": "no labels"}))
    found = gate.gate(run, demands(max_drop=0.1, min_throughput_per_s=1, max_build_seconds=1))
    assert {check.state for check in found.verdicts} == {"unjudged"}
    assert (found.state, found.passed, found.exit_code) == ("unjudged", False, 3)
    assert found.breaches[0].text == "accuracy drop is unknown (no labels), and has to be at most 0.1000"


def test_an_engine_that_the_run_did_not_measure_fails_the_gate(tmp_path: Path) -> None:
    """Its numbers are those of another one; a run may be taken along without its engines."""
    (folder := tmp_path / "run/variants/a").mkdir(parents=True)
    (folder / "model.onnx").write_text("measured")
    stored = StoredArtifact(
        path="variants/a/model.onnx", sha256=folder_digest({"model.onnx": file_digest(folder / "model.onnx")}), bytes=8
    )
    run = write(tmp_path / "run", record(artifact=stored))
    assert gate.gate(run, demands(max_latency_ms=2)).passed
    (folder / "model.onnx").write_text("replaced")
    found = gate.gate(run, demands(max_latency_ms=2))
    assert (judged(found), found.exit_code) == ({"engine": False, "max_latency_ms": True}, 3)
    assert "is not what the run made" in found.breaches[0].text
    (folder / "model.onnx").unlink()
    assert gate.gate(run, demands(max_latency_ms=2)).passed


def test_eager_meets_any_limit_of_fidelity(tmp_path: Path) -> None:
    found = gate.gate(write(tmp_path / "run", winner="eager"), replace(demands(), min_sqnr_db=20))
    assert (judged(found), found.exit_code) == ({"min_sqnr_db": True}, 0)
    assert found.cautions == (), "it was judged"


@pytest.mark.parametrize(
    ("budgets", "end"),
    [(["--max-size", "1MiB"], ": 1 passed"), (["--max-size=1MiB", "--max-latency=1s"], ": all 2 passed")],
)
def test_what_passed_is_counted(tmp_path: Path, budgets: list[str], end: str) -> None:
    assert said("gate", str(write(tmp_path / "run", record())), *budgets)[1].endswith(f"{end}\n")


@pytest.mark.parametrize(
    ("median", "low", "high", "state", "code"),
    [
        (1.105, 1.02, 1.2, "failed", 3),
        (1.04, 1.02, 1.06, "passed", 0),  # slower for certain, and by less than the tolerance
        (1.007, 0.951, 1.095, "passed", 0),  # twice the tolerance is ruled out
        (0.99, 0.8, 1.23, "unjudged", 0),  # it is not; only --strict fails, as the estimate is within the tolerance
        (1.105, 0.77, 1.39, "unjudged", 3),
        (1.06, 0.99, 1.09, "unjudged", 3),
    ],
)
def test_what_an_interval_leaves_open_is_not_judged(
    median: float, low: float, high: float, state: str, code: int
) -> None:
    ratio = Interval(median=median, low=low, high=high)
    check = gate._judge_ratio(ratio, 1.0, median, 0.05, "measured side by side now")
    found = Gate(run="run", variant="a", tolerance=0.05, verdicts=(check,))
    assert (check.state, found.exit_code) == (state, code)
    assert ("the interval is too wide to decide; measure on a quiet machine" in check.text) == (state == "unjudged")


def test_a_gate_without_checks_is_not_called_passed(tmp_path: Path) -> None:
    words = "gate", str(write(tmp_path / "run", record()))
    assert said(*words)[0] == 0
    assert "## Gate: nothing to judge" in (tmp_path / "run" / "report.md").read_text()
    assert said(*words, "--strict")[0] == 3


SHORT = {"batch": 1, "p50_ms": 1.0, "n": 331, "reasons": {"p99_ms": "p99 takes 662 samples, and there are 331"}}


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({}, "--measure-time 60s --out"),
        (
            {"stop": {"cause": "precise", "precision": 0.02}},
            "--measure-time 60s --precision-target 0.0094",
        ),
        ({"n": None}, ""),
    ],
)
def test_an_unknown_p99_is_not_judged_and_names_the_command(tmp_path: Path, row: dict[str, Any], advice: str) -> None:
    run = write(tmp_path / "run", record(latency=(LatencyRow.model_validate(SHORT | row),)))
    (check,) = gate.gate(run, demands(max_p99_ms=5)).verdicts
    assert check.state == "unjudged"
    assert "p99 latency is unknown (p99 takes 662 samples" in check.text
    assert (
        f"measure for longer: `enginesmith optimize digits … {advice}" in check.text
        if advice
        else "`" not in check.text
    )


@pytest.mark.parametrize(("after", "code"), [(0.95, 0), (1.2, 3)])
def test_too_few_launches_are_not_judged(tmp_path: Path, after: float, code: int) -> None:
    """Only --strict fails where the estimate alone is within the tolerance."""
    row = record().latency[0].model_copy(update={"launches": 1})
    before, run = write(tmp_path / "before", record(latency=(row,))), write(tmp_path / "run", record("a", after))
    found = gate.gate(run, demands(), baseline=before)
    check = found.verdicts[0]
    assert (check.state, check.passed, found.passed, found.exit_code) == ("unjudged", False, False, code)
    command = f"enginesmith optimize digits … --measure-time 60s --out {before} --replace"
    slow = "on a quiet machine (at the speed of this run, it would take 1 m 30 s)"
    assert f"measure the baseline again for longer: `{command}` {slow}" in check.text
    assert gate.gate(run, replace(demands(), strict=True), baseline=before).exit_code == 3
    told = CliRunner().invoke(cli.main, ["gate", str(run), "--baseline", str(before), "--no-measure"])
    assert told.exit_code == code
    change = "5.0% lower" if after < 1 else "20.0% higher"
    assert told.output.startswith(f"not judged: by its estimate alone, latency is {change} than the baseline's; from")
    assert ("1 not judged; --strict fails on what was not judged" in told.output) is (code == 0)
    assert (
        CliRunner()
        .invoke(cli.main, ["gate", str(run), "--baseline", str(before), "--no-measure", "--strict"])
        .exit_code
        == 3
    )


def test_a_run_without_a_winner_is_broken(tmp_path: Path) -> None:
    run = write(tmp_path / "run", record(), winner=None, winner_reason="no variant meets every budget")
    found = gate.gate(run, demands())
    assert (found.exit_code, found.breaches[0].name) == (3, "winner")
    assert found.breaches[0].text.endswith(f"every budget; to judge one variant: `enginesmith gate {run} --variant a`")
    write(run, record(), winner=None, winner_reason="stopped", complete=False)
    assert f"`enginesmith resume {run}`" in gate.gate(run, demands()).breaches[0].text
    write(run, record(), winner=None, winner_reason="built", no_winner="not measured yet", complete=False)
    assert gate.gate(run, demands()).breaches[0].text == "the run has no winner: built", "its reason names the command"
    recipe = make({"model": "digits", "budgets": {"max_p99_ms": 5}})
    write(run, record(latency=(LatencyRow.model_validate(SHORT),)), winner=None, winner_reason="p99", recipe=recipe)
    assert "measure for longer: `enginesmith optimize digits … " in gate.gate(run, demands()).breaches[0].text


def test_a_run_whose_engines_all_failed_is_no_use_whatever_eager_does(tmp_path: Path) -> None:
    failed = record("a", status="failed", reason="export: unknown operator", latency=())
    run = write(tmp_path / "run", failed, winner="eager")
    for chosen in (None, "eager"):
        found = gate.gate(run, demands(max_latency_ms=100), variant=chosen)
        assert (found.exit_code, judged(found)) == (1, {"engines": False})
        assert found.verdicts[0].text == "every requested engine failed: a: export: unknown operator"


@pytest.mark.parametrize(
    ("change", "effect", "reached", "state", "code"),
    [
        ({"status": "failed", "reason": "no kernel"}, "", True, "passed", 0),
        ({"status": "built", "reason": "no GPU"}, "no GPU", True, "unjudged", 0),
        ({"status": "skipped", "reason": "not reached: build-b"}, "not reached", False, "unjudged", 3),
    ],
)
def test_each_requested_engine_ended_well_or_is_named(
    tmp_path: Path, change: dict[str, str], effect: str, reached: bool, state: str, code: int
) -> None:
    steps = (
        [{"id": "build-b", "status": "pending", "cached": False, "seconds": None, "effect": effect, "reached": reached}]
        if effect
        else []
    )
    other = record("b", engine="other", latency=(), **change)
    found = gate.gate(
        write(tmp_path / "run", record(), other, steps=steps, complete=not effect), demands(max_latency_ms=2)
    )
    assert (found.state, found.exit_code) == (state, code)
    texts = [*found.cautions, *(check.text for check in found.verdicts)]
    assert any(text.startswith("other ") and change["reason"] in text for text in texts)


@pytest.mark.parametrize(
    ("dropped", "status", "listed", "code"),
    [("a is faster", "skipped", True, 0), ("", "skipped", True, 3), ("", "skipped", False, 0), ("", "built", False, 3)],
)
def test_an_engine_that_lost_the_race_or_that_nobody_asked_for_is_judged(
    tmp_path: Path, dropped: str, status: str, listed: bool, code: int
) -> None:
    other = record("b", engine="other", latency=(), status=status, race=(RaceRow(variant="b", lap=1, dropped=dropped),))
    run = write(tmp_path / "run", record(), other, recipe=make({"model": "digits"}, listed=listed))
    strict = replace(demands(max_latency_ms=2), strict=True)
    assert gate.gate(run, strict).exit_code == code


def test_why_nothing_was_measured_is_the_failure(tmp_path: Path) -> None:
    broken = record("eager", status="failed", reason="load: its process crashed\n  → see its log")
    run = write(tmp_path / "run", baseline=broken, winner_reason="nothing was measured that has a latency")
    (check,) = gate.gate(run, demands(max_latency_ms=5)).verdicts
    assert check.text.startswith(f"nothing was measured in {run}: load: its process crashed; ")


def test_a_run_with_nothing_measured_is_no_use(tmp_path: Path) -> None:
    unmeasured = {"status": "built", "latency": (), "memory": None}
    run = write(tmp_path / "run", baseline=record("eager", **unmeasured), winner=None, winner_reason="no GPU")
    code, text = said("gate", str(run), "--max-latency", "1ms")
    assert (code, text.splitlines()) == (
        1,
        [
            f"not judged: nothing was measured in {run}: no GPU; to continue: `enginesmith resume {run}`",
            f"{run}: 1 not judged",
        ],
    )
    none = {"winner": None, "winner_reason": "nothing was measured that has …", "no_winner": "nothing measured"}
    failed = record("eager", **unmeasured, reasons={"latency": "no space left on device\n  → free some"})
    for complete, why in ((False, "the run is not complete"), (True, "no space left on device")):
        write(run, baseline=failed, complete=complete, **none)
        assert f"nothing was measured in {run}: {why}; to" in gate.gate(run, demands()).verdicts[0].text
    good = write(tmp_path / "good", record())
    assert said("gate", str(good), "--baseline", str(run))[0] == 2


@pytest.mark.parametrize("change", [{"status": "failed", "reason": "no kernel"}, {"rejected": "not faster"}])
def test_a_variant_that_must_not_be_used_is_broken(tmp_path: Path, change: dict[str, str]) -> None:
    run = write(tmp_path / "run", record(), record("b", **change))
    found = gate.gate(run, demands(), variant="b")
    assert list(judged(found)) == ["status"]
    assert list(change.values())[-1] in found.breaches[0].text


def test_a_variant_that_there_is_not_is_named_with_those_near(tmp_path: Path) -> None:
    run = write(tmp_path / "run", record("onnxruntime-fp32"))
    with pytest.raises(UsageError, match="did you mean onnxruntime-fp32"):
        gate.gate(run, demands(), variant="onnxruntime-fp23")


@pytest.mark.parametrize(
    ("after", "half", "passed"), [(1.001, 0.01, True), (1.04, 0.001, True), (1.1, 0.01, False), (1.1, 0.2, False)]
)
def test_slower_is_broken_beyond_tolerance_for_sure(tmp_path: Path, after: float, half: float, passed: bool) -> None:
    before = write(tmp_path / "before", record())
    run = write(tmp_path / "run", record("a", after, half))
    found = gate.gate(run, demands(), baseline=before)
    assert judged(found)["latency_ms"] is passed
    assert "(--no-measure)" in next(one.text for one in found.verdicts if one.name == "latency_ms")


def test_memory_size_and_quality_are_held_against_the_baseline(tmp_path: Path) -> None:
    ends = {"drop_low": 0.0, "drop_high": 0.0, "spread": 0.3}
    good = Quality(metric="top1", value=0.9, baseline=0.9, drop=0.0, samples=1000, **ends)
    bad = good.model_copy(update={"value": 0.8, "drop": 0.1, "drop_low": 0.08, "drop_high": 0.12})
    before = write(tmp_path / "before", record(quality=good))
    large = MemoryRow(device="cpu", batch=1, peak_bytes=12 << 20)
    stored = StoredArtifact(path="variants/a/model.onnx", sha256="1", bytes=1040)
    run = write(tmp_path / "run", record(memory=large, artifact=stored, quality=bad))
    found = judged(gate.gate(run, demands(), baseline=before))
    assert found == {"latency_ms": True, "peak_bytes": False, "size_bytes": True, "metric": False, "drop": False}
    gained = record(p50_ms=0.9, quality=good.model_copy(update={"drop": -0.00002, "drop_low": -0.00003}))
    texts = {one.name: one.text for one in gate.gate(write(run, gained), demands(), baseline=before).verdicts}
    assert texts["drop"] == "accuracy drop is −0.000020, the baseline's +0.0000"
    assert "latency is −10.0% [" in texts["latency_ms"]
    wide = Demands(budgets=Budgets(), measure=False, tolerance=0.3)
    assert judged(gate.gate(run, wide, baseline=before))["peak_bytes"], "20 % more is within 30 %"


def test_peaks_of_small_models_differ_by_chance_and_the_line_says_so(tmp_path: Path) -> None:
    peaks = (MemoryRow(device="cpu", batch=1, peak_bytes=size << 10) for size in (368, 496))
    before, run = (write(tmp_path / str(index), record(memory=peak)) for index, peak in enumerate(peaks))
    (check,) = [one for one in gate.gate(run, demands(), baseline=before).verdicts if one.name == "peak_bytes"]
    told = "(+34.8%; 5 % more is allowed, and peaks of one engine lie up to 256 KiB apart)"
    assert (check.state, check.text) == ("passed", f"peak memory is 496 KiB, the baseline's 368 KiB {told}")


@pytest.mark.parametrize(
    ("changes", "allowed", "state"),
    [
        ({"value": 0.5}, None, "failed"),
        ({"value": 0.88}, None, "passed"),
        ({"value": 0.85}, 0.01, "failed"),
        ({"value": 0.85}, 0.1, "passed"),
        ({"value": 0.95}, None, "passed"),
        ({"metric": "mse", "value": 1.5}, None, "failed"),
        ({"metric": "mse", "value": 0.5}, None, "passed"),
        ({"value": 0.85, "spread": None}, None, "unjudged"),
        ({"value": 0.85, "samples": 999}, None, None),
        ({"value": 0.85, "data_sha256": "2"}, None, None),
    ],
)
def test_a_model_that_was_trained_to_less_accuracy_is_a_regression(
    tmp_path: Path, changes: dict[str, Any], allowed: float | None, state: str | None
) -> None:
    """Its engine loses nothing against the model itself."""
    good = Quality(metric="top1", value=0.9, spread=0.3, baseline=0.9, drop=0.0, drop_low=0, drop_high=0, samples=1000)
    good = good.model_copy(update={"metric": changes.get("metric", "top1"), "data_sha256": "1"})
    before = write(tmp_path / "before", record(quality=good))
    worse = good.model_copy(update={**changes, "baseline": changes["value"]})
    run = write(tmp_path / "run", record(quality=worse))
    found = gate.gate(run, demands(max_drop=allowed), baseline=before)
    assert [check.state for check in found.verdicts if check.name == "metric"] == ([state] if state else [])
    assert ("| metric (baseline) |" in texts.render(found)) is bool(state)
    assert found.exit_code == (0 if state == "passed" else 3)


@pytest.mark.parametrize(
    ("changes", "code"), [({"drop": 0.005}, 0), ({"drop": 0.02}, 3), ({"drop": 0.005, "metric": "top5"}, 3)]
)
def test_a_drop_without_an_interval_fails_where_its_estimate_is_worse(
    tmp_path: Path, changes: dict[str, Any], code: int
) -> None:
    old = Quality(metric="net.py:mine", value=0.9, baseline=0.9, drop=0.01, samples=1000)
    before = write(tmp_path / "before", record(quality=old))
    run = write(tmp_path / "run", record(quality=old.model_copy(update=changes)))
    found = gate.gate(run, demands(), baseline=before)
    assert found.verdicts[-1].state == "unjudged"
    assert found.verdicts[-1].text.startswith(f"accuracy drop of +{changes['drop']:.4f} cannot be compared with the ")
    assert found.exit_code == code
    assert gate.gate(run, replace(demands(), strict=True), baseline=before).exit_code == 3


def test_what_the_run_does_not_know_any_more_is_broken(tmp_path: Path) -> None:
    before, run = write(tmp_path / "before", record()), write(tmp_path / "run", record(memory=None))
    found = gate.gate(run, demands(), baseline=before)
    assert not judged(found)["peak_bytes"]
    unknown = gate.gate(before, demands(), baseline=run)
    (check,) = [check for check in unknown.verdicts if check.name == "peak_bytes"]
    assert (check.state, check.text) == (
        "unjudged",
        "peak memory was not measured in the baseline, so it is not compared",
    )
    assert unknown.exit_code == 0
    assert gate.gate(before, replace(demands(), strict=True), baseline=run).exit_code == 3


def test_latency_of_another_machine_is_refused_and_the_rest_is_judged(tmp_path: Path) -> None:
    before = write(tmp_path / "before", record(), environment={**MACHINE, "processor": "B"})
    run = write(tmp_path / "run", record())
    found = gate.gate(run, demands(), baseline=before)
    assert judged(found) == {"latency_ms": False, "peak_bytes": True, "size_bytes": True}
    assert "processor: B and A" in found.breaches[0].text
    assert "--any-machine" in found.breaches[0].text
    told = Demands(budgets=Budgets(), measure=False, any_machine=True)
    assert gate.gate(run, told, baseline=before).passed


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), (" 2.5 % ", 0.025), ("0%", 0.0)])
def test_a_tolerance_is_a_percentage(text: str, share: float) -> None:
    assert parse_tolerance(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["5", "-5%", "much", "", "nan%", "100%", "1e3%", "5%%"])
def test_any_other_tolerance_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tolerance(text)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine": {"graph_optimization": "most"}}, "what a was built with cannot be read: graph_optimization"),
        ({"engine": {}, "device": {"threads": "many"}}, "where a ran cannot be read: threads"),
    ],
)
def test_what_the_history_says_unreadably_is_refused(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    made = HistoryEntry(
        step="build", parameters={"fields": fields}, tools={}, seconds=1.0, host_peak_bytes=None, effect=""
    )
    before, run = (write(tmp_path / name, record(history=(made,))) for name in ("before", "run"))
    with pytest.raises(UsageError, match=words):
        gate.gate(run, Demands(budgets=Budgets()), baseline=before)


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("cpu", {}, "byte for byte"),
        ("cpu", {"packages": {"onnxruntime": "1.31.1"}}, "onnxruntime is 1.31.1, and was 1.23.0"),
        ("cuda", {"gpus": [{"driver": "600"}]}, "gpus[0].driver is 600, and was 500"),
        ("cpu", {"gpus": [{"driver": "600"}]}, "byte for byte"),
    ],
)
def test_the_same_file_on_another_runtime_is_judged_by_what_was_stored(
    tmp_path: Path, kind: str, changed: dict[str, object], words: str
) -> None:
    """Measured again, both would run on the runtime that is installed now, and take the same time."""
    versions = {"packages": {"onnxruntime": "1.23.0"}, "gpus": [{"driver": "500"}]}
    made = HistoryEntry(
        step="build",
        parameters={"fields": {"engine": {}, "device": {"kind": kind}}},
        tools={},
        seconds=1.0,
        host_peak_bytes=None,
        effect="",
    )
    runs = []
    for name, p50_ms, more in (("before", 1.0, versions), ("run", 3.0, versions | changed)):
        file = tmp_path / name / "variants" / "a" / "model.onnx"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"graph")
        sha256 = folder_digest({"model.onnx": file_digest(file)})
        stored = StoredArtifact(path="variants/a/model.onnx", sha256=sha256, bytes=5)
        memory = MemoryRow(device=kind, batch=1, peak_bytes=10 << 20)
        winner = record("a", p50_ms, artifact=stored, history=(made,), memory=memory)
        eager = record("eager", 10.0, artifact=None, engine="eager", memory=memory)
        runs.append(write(tmp_path / name, winner, baseline=eager, environment=MACHINE | more))
    found = gate.gate(runs[1], Demands(budgets=Budgets()), baseline=runs[0])
    assert words in found.verdicts[0].text
    assert judged(found)["latency_ms"] is (words == "byte for byte")


def test_engines_that_are_not_there_are_not_measured(tmp_path: Path) -> None:
    before, run = write(tmp_path / "before", record()), write(tmp_path / "run", record("a", 1.2))
    found = gate.gate(run, Demands(budgets=Budgets()), baseline=before)
    assert not judged(found)["latency_ms"]
    assert "has no engine file of a" in found.breaches[0].text


@pytest.mark.parametrize(
    ("engine", "built"), [("aotinductor", {}), ("tensorrt", {"options": {"host_code": True, "tf32": True}})]
)
def test_machine_code_is_measured_again_only_where_its_makers_are_trusted(
    tmp_path: Path, engine: str, built: dict[str, Any]
) -> None:
    step = HistoryEntry(step="build-a", parameters={"fields": {"engine": built}}, tools={}, seconds=1,
                        host_peak_bytes=None, effect="")  # fmt: skip
    fields = {"engine": engine, "history": (step,)}
    before, run = write(tmp_path / "before", record(**fields)), write(tmp_path / "run", record("a", 3.0, **fields))
    told = "a of the baseline has machine code, which could do anything as soon as it is loaded; with --trust"
    assert told in gate.gate(run, Demands(budgets=Budgets()), baseline=before).breaches[0].text
    trusted = gate.gate(run, Demands(budgets=Budgets(), trust=True), baseline=before).breaches[0].text
    assert "engine file of a is missing" in trusted


@pytest.mark.parametrize(
    ("ratio", "passed"), [(interval(1.0), True), (interval(1.1), False), (interval(1.1, 0.2), False), (WILD, False)]
)
def test_a_remeasurement_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: Interval, passed: bool) -> None:
    before, run = write(tmp_path / "before", record()), write(tmp_path / "run", record("a", 3.0))
    again = remeasure.Remeasurement(ratio=ratio, before_ms=1.0, after_ms=1.0, launches=5)
    monkeypatch.setattr(remeasure, "why_not", lambda *sides, **rules: "")
    monkeypatch.setattr(remeasure, "remeasure", lambda *sides, **limits: again)
    found = gate.gate(run, Demands(budgets=Budgets()), baseline=before)
    assert judged(found)["latency_ms"] is passed
    assert "measured side by side now, 5 launches" in found.verdicts[0].text


def test_an_engine_that_cannot_run_leaves_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sides: object, **limits: object) -> None:
        raise ModelError("it was built for another processor")

    before, run = write(tmp_path / "before", record()), write(tmp_path / "run", record("a", 3.0))
    monkeypatch.setattr(remeasure, "why_not", lambda *sides, **rules: "")
    monkeypatch.setattr(remeasure, "remeasure", refuse)
    found = gate.gate(run, Demands(budgets=Budgets()), baseline=before)
    assert "from what both runs stored" in found.breaches[0].text
    assert "another processor" in found.breaches[0].text


def test_a_run_becomes_the_baseline_whole(tmp_path: Path) -> None:
    run, target = write(tmp_path / "run", record()), tmp_path / "kept" / "main"
    (run / "variants" / "a").mkdir(parents=True)
    (run / "variants" / "a" / "model.onnx").write_text("engine")
    (run / "variants" / "b").mkdir()
    (run / "samples.npz").write_bytes(b"samples")
    (run / "report.html").write_text("page")
    source = gate.stored_in(run, None)
    assert source is not None
    for _ in range(2):
        gate.keep(source, target)
        names = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
        assert names == ["run.json", "samples.npz", "variants/a/model.onnx"]
    assert [path.name for path in target.parent.iterdir()] == ["main"], "nothing is left beside it"


def test_a_disk_that_is_full_at_any_file_of_a_baseline_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, target = write(tmp_path / "run", record()), tmp_path / "kept" / "main"
    (run / "variants" / "a" / "parts").mkdir(parents=True)
    for name in ("model.onnx", "parts/weights"):
        (run / "variants" / "a" / name).write_text("engine")
    source = gate.stored_in(run, None)
    assert source is not None
    faults.observe_files()
    messages = []
    while not target.exists():
        monkeypatch.setattr(faults, "current", faults.Trouble("full", len(messages) + 1, str(tmp_path)))
        try:
            gate.keep(source, target)
        except StoreError as error:
            messages.append(str(error))
    assert len(messages) > 5
    command = "`enginesmith cache prune --local --max-size 5GiB`, with --store if you gave one"
    remedy = f"free some space (if the store is on that disk: {command}) or choose another disk"
    assert set(messages) == {f"the baseline {target}: no space left on device\n  → {remedy}"}


def test_a_baseline_may_have_engines_that_another_machine_measures(tmp_path: Path) -> None:
    """The exit code and the baseline agree: what only ``--strict`` fails on does not keep a run from being one."""
    ahead = record("b", engine="tensorrt_rtx", status="built", latency=(), reason="no GPU is here")
    run = write(tmp_path / "run", record(), ahead)
    words = ["gate", str(run), "--max-latency", "2ms", "--baseline", str(tmp_path / "base"), "--update-baseline"]
    assert said(*words, "--strict")[0] == 3
    assert not (tmp_path / "base").exists()
    code, text = said(*words)
    assert (code, text.splitlines()[-1]) == (0, f"a of {run} is the baseline in {tmp_path / 'base'} now")
    code, text = said("gate", str(write(tmp_path / "free", record())), *words[4:])
    assert (code, "no baseline" in text, "neither the recipe nor an option sets a budget" in text) == (0, False, True)
    assert (tmp_path / "base" / "run.json").is_file()


def test_what_is_no_baseline_is_left_alone(tmp_path: Path) -> None:
    run = write(tmp_path / "run", record())
    source = gate.stored_in(run, None)
    assert source is not None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "mine", tmp_path / "file", run, tmp_path):
        with pytest.raises(UsageError):
            gate.keep(source, target)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("path", ["/etc/x/model.onnx", "../../other/model.onnx"])
def test_nothing_outside_of_the_run_is_copied(tmp_path: Path, path: str) -> None:
    stored = StoredArtifact(path=path, sha256="0", bytes=1)
    source = gate.stored_in(write(tmp_path / "run", record(artifact=stored)), None)
    assert source is not None
    with pytest.raises(UsageError, match="outside of its folder"):
        gate.keep(source, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_the_recipes_budgets_are_changed_by_options() -> None:
    recipe = make(
        {"model": "digits", "budgets": {"max_latency_ms": "5ms", "max_size_bytes": "1MiB"}, "min_sqnr_db": 20}
    )
    options = {"max_latency_ms": "2ms", "max_p99_ms": "1s", "max_build_seconds": "2m"}
    given = {**{f"budgets__{name}": value for name, value in options.items()}, "tolerance": "5%"}
    assert budgets_of(recipe, given) == (
        Budgets(max_latency_ms=2, max_size_bytes=1 << 20, max_p99_ms=1000, max_build_seconds=120),
        20,
    )
    for name, value in (("max_latency_ms", "0ms"), ("min_throughput_per_s", float("nan")), ("max_memory_bytes", "low")):
        with pytest.raises(UsageError):
            budgets_of(recipe, {f"budgets__{name}": value})
    with pytest.raises(UsageError, match=r"^--max-p99: must be greater than 0"):
        budgets_of(recipe, {"budgets__max_p99_ms": "0ms"})
