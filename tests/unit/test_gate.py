"""The gate: what failed is said, what cannot be judged is neither passed nor failed; fleets entry by entry."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

import fleets
from enginesmith import cli
from enginesmith.pipeline.artifact import HistoryEntry
from enginesmith.pipeline.commands.context import budgets_of
from enginesmith.pipeline.errors import EnginesmithError, ModelError, UsageError
from enginesmith.pipeline.measure.latency.rows import LatencyResult, launches_of
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.report.markdown import plain
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results import gate, remeasure
from enginesmith.pipeline.results import gate as gates
from enginesmith.pipeline.results import run as documents
from enginesmith.pipeline.results.gate import Demands, parse_tolerance
from enginesmith.pipeline.results.gate_report import Gate
from enginesmith.pipeline.results.run import ModelRecord, Run, StoredArtifact, VariantRecord
from enginesmith.pipeline.workflows import fleet
from runs import small, variant

MACHINE = {"processor": "A", "usable_cores": 2, "architecture": "x86_64"}
MODEL = ModelRecord(source="digits", sha256="0" * 64, signature=None, data="digits")


WILD = Interval(median=1.0, low=0.1, high=9.0)
"""Too wide to say anything: not judged, and so not let through."""


def interval(median: float, half: float = 0.01) -> Interval:
    return Interval(median=median, low=median * (1 - half), high=median * (1 + half))


def record(name: str = "a", p50_ms: float = 1.0, half: float = 0.01, **changes: object) -> VariantRecord:
    row = LatencyRow(
        batch=1, p50_ms=p50_ms, median_ms=interval(p50_ms, half), speedup=interval(10 / p50_ms, half), launches=5
    )
    memory = MemoryRow(device="cpu", batch=1, peak_bytes=10 << 20)
    stored = StoredArtifact(path="variants/a/model.onnx", sha256=f"{p50_ms}", bytes=1000)
    return variant(name, **{"latency": (row,), "memory": memory, "artifact": stored, **changes})


def write(folder: Path, *variants: VariantRecord, **changes: object) -> Path:
    eager = record("eager", 10.0, artifact=None, engine="eager")
    winner = variants[0].id if variants else None
    values = {"name": folder.name, "environment": MACHINE, "model": MODEL, "winner": winner, **changes}
    folder.mkdir(exist_ok=True)
    documents.write(small(eager, *variants, **values), folder)
    return folder


def judged(found: Gate) -> dict[str, bool]:
    return {one.name: one.passed for one in found.verdicts}


def demands(**budgets: float) -> Demands:
    return Demands(budgets=Budgets.model_validate(budgets), measure=False)


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


def test_eager_meets_any_limit_of_fidelity(tmp_path: Path) -> None:
    found = gate.gate(write(tmp_path / "run", winner="eager"), replace(demands(), min_sqnr_db=20))
    assert (judged(found), found.exit_code) == ({"min_sqnr_db": True}, 0)
    assert found.cautions == (), "it was judged"


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
            {"stopped_because": "every median's 95 % interval is within ±2%"},
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
    assert (
        f"measure the baseline again for longer: `enginesmith optimize digits … --measure-time 90s --out {before}"
        in check.text
    )
    assert gate.gate(run, replace(demands(), strict=True), baseline=before).exit_code == 3
    told = CliRunner().invoke(cli.main, ["gate", str(run), "--baseline", str(before), "--no-measure"])
    assert told.exit_code == code
    assert told.output.startswith("not judged: latency is ")
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
    assert "no variant meets every budget" in found.breaches[0].text


def test_a_run_whose_engines_all_failed_is_no_use_whatever_eager_does(tmp_path: Path) -> None:
    failed = record("a", status="failed", reason="export: unknown operator", latency=())
    run = write(tmp_path / "run", failed, winner="eager")
    for chosen in (None, "eager"):
        found = gate.gate(run, demands(max_latency_ms=100), variant=chosen)
        assert (found.exit_code, judged(found)) == (1, {"engines": False})
        assert found.verdicts[0].text == "every requested engine failed: a: export: unknown operator"


@pytest.mark.parametrize(
    ("change", "effect", "state", "code"),
    [
        ({"status": "failed", "reason": "no kernel"}, "", "passed", 0),
        ({"status": "built", "reason": "no GPU"}, "no GPU", "unjudged", 0),
        ({"status": "skipped", "reason": "not reached: build-b"}, "not reached", "unjudged", 3),
    ],
)
def test_each_requested_engine_ended_well_or_is_named(
    tmp_path: Path, change: dict[str, str], effect: str, state: str, code: int
) -> None:
    steps = (
        [{"id": "build-b", "status": "pending", "cached": False, "seconds": None, "effect": effect}] if effect else []
    )
    other = record("b", engine="other", latency=(), **change)
    found = gate.gate(
        write(tmp_path / "run", record(), other, steps=steps, complete=not effect), demands(max_latency_ms=2)
    )
    assert (found.state, found.exit_code) == (state, code)
    texts = [*found.cautions, *(check.text for check in found.verdicts)]
    assert any(text.startswith("other ") and change["reason"] in text for text in texts)


def test_why_nothing_was_measured_is_the_failure(tmp_path: Path) -> None:
    broken = record("eager", status="failed", reason="load: its process crashed\n  → see its log")
    run = write(tmp_path / "run", baseline=broken, winner_reason="nothing was measured that has a latency")
    with pytest.raises(UsageError, match=r"nothing was measured in .*: load: its process crashed\n  → `enginesmith"):
        gate.gate(run, demands(max_latency_ms=5))


def test_a_run_with_nothing_measured_is_no_use(tmp_path: Path) -> None:
    unmeasured = {"status": "built", "latency": (), "memory": None}
    run = write(tmp_path / "run", baseline=record("eager", **unmeasured), winner=None, winner_reason="no GPU")
    with pytest.raises(UsageError, match=r"nothing was measured in .*no GPU"):
        gate.gate(run, demands())


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
    ("after", "half", "passed"), [(1.001, 0.01, True), (1.04, 0.001, True), (1.1, 0.01, False), (1.1, 0.2, True)]
)
def test_slower_is_broken_beyond_tolerance_for_sure(tmp_path: Path, after: float, half: float, passed: bool) -> None:
    before = write(tmp_path / "before", record())
    run = write(tmp_path / "run", record("a", after, half))
    found = gate.gate(run, demands(), baseline=before)
    assert judged(found)["latency_ms"] is passed
    assert "(--no-measure)" in next(one.text for one in found.verdicts if one.name == "latency_ms")


def test_memory_size_and_quality_are_held_against_the_baseline(tmp_path: Path) -> None:
    good = Quality(metric="top1", value=0.9, baseline=0.9, drop=0.0, drop_low=0.0, drop_high=0.0, samples=1000)
    bad = good.model_copy(update={"value": 0.8, "drop": 0.1, "drop_low": 0.08, "drop_high": 0.12})
    before = write(tmp_path / "before", record(quality=good))
    large = MemoryRow(device="cpu", batch=1, peak_bytes=12 << 20)
    stored = StoredArtifact(path="variants/a/model.onnx", sha256="1", bytes=1040)
    run = write(tmp_path / "run", record(memory=large, artifact=stored, quality=bad))
    found = judged(gate.gate(run, demands(), baseline=before))
    assert found == {"latency_ms": True, "peak_bytes": False, "size_bytes": True, "drop": False}
    wide = Demands(budgets=Budgets(), measure=False, tolerance=0.3)
    assert judged(gate.gate(run, wide, baseline=before))["peak_bytes"], "20 % more is within 30 %"


def test_what_the_run_does_not_know_any_more_is_broken(tmp_path: Path) -> None:
    before, run = write(tmp_path / "before", record()), write(tmp_path / "run", record(memory=None))
    found = gate.gate(run, demands(), baseline=before)
    assert not judged(found)["peak_bytes"]
    unknown = gate.gate(before, demands(), baseline=run)
    assert "peak_bytes" not in judged(unknown)
    assert any("peak memory was not measured in the baseline" in text for text in unknown.cautions)


def test_latency_of_another_machine_is_refused_and_the_rest_is_judged(tmp_path: Path) -> None:
    before = write(tmp_path / "before", record(), environment={**MACHINE, "processor": "B"})
    run = write(tmp_path / "run", record())
    found = gate.gate(run, demands(), baseline=before)
    assert judged(found) == {"latency_ms": False, "peak_bytes": True, "size_bytes": True}
    assert "processor B and A" in found.breaches[0].text
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


def test_engines_that_are_not_there_are_not_measured(tmp_path: Path) -> None:
    before, run = write(tmp_path / "before", record()), write(tmp_path / "run", record("a", 1.2))
    found = gate.gate(run, Demands(budgets=Budgets()), baseline=before)
    assert not judged(found)["latency_ms"]
    assert "has no engine file of a" in found.breaches[0].text


@pytest.mark.parametrize(
    ("ratio", "passed"), [(interval(1.0), True), (interval(1.1), False), (interval(1.1, 0.2), True), (WILD, False)]
)
def test_a_remeasurement_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: Interval, passed: bool) -> None:
    before, run = write(tmp_path / "before", record()), write(tmp_path / "run", record("a", 3.0))
    again = remeasure.Remeasurement(ratio=ratio, before_ms=1.0, after_ms=1.0, batch=1, iterations=1, launches=5)
    monkeypatch.setattr(remeasure, "why_not", lambda *sides, any_machine: "")
    monkeypatch.setattr(remeasure, "remeasure", lambda *sides: again)
    found = gate.gate(run, Demands(budgets=Budgets()), baseline=before)
    assert judged(found)["latency_ms"] is passed
    assert "measured side by side now, 5 launches" in found.verdicts[0].text


def test_an_engine_that_cannot_run_leaves_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sides: object) -> None:
        raise ModelError("it was built for another processor")

    before, run = write(tmp_path / "before", record()), write(tmp_path / "run", record("a", 3.0))
    monkeypatch.setattr(remeasure, "why_not", lambda *sides, any_machine: "")
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


def test_a_baseline_may_have_engines_that_another_machine_measures(tmp_path: Path) -> None:
    """The exit code and the baseline agree: what only ``--strict`` fails on does not keep a run from being one."""
    ahead = record("b", engine="tensorrt_rtx", status="built", latency=(), reason="no GPU is here")
    run = write(tmp_path / "run", record(), ahead)
    words = ["gate", str(run), "--max-latency", "2ms", "--baseline", str(tmp_path / "base"), "--update-baseline"]
    assert said(*words, "--strict")[0] == 3
    assert not (tmp_path / "base").exists()
    code, text = said(*words)
    assert (code, text.splitlines()[-1]) == (0, f"a of {run} is the baseline in {tmp_path / 'base'} now")
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


def test_samples_are_put_back_into_blocks_and_launches() -> None:
    samples = {
        "a/1/seconds": np.arange(6.0),
        "a/1/waited": np.zeros(6),
        "a/1/calls": np.array([1, 2, 3]),
        "a/1/rounds": np.array([2, 1]),
    }
    found = launches_of(samples, "a", 1)
    assert [[block.seconds.tolist() for block in launch] for launch in found] == [[[0], [1, 2]], [[3, 4, 5]]]
    assert all(one.waited is not None and len(one.waited) == len(one.seconds) for launch in found for one in launch)
    del samples["a/1/waited"]
    assert launches_of(samples, "a", 1)[0][0].waited is None


@pytest.mark.parametrize(("ratios", "looks"), [((1.0,), 1), ((1.06,) * 4, 4), ((1.2,), 1)])
def test_measured_until_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratios: tuple[float, ...], looks: int
) -> None:
    """The clock is replaced, and nothing else: launches whose blocks differ by as much as is wanted."""
    taken: list[float] = []

    def measured(*_: object) -> LatencyResult:
        ratio = ratios[len(taken)]
        taken.append(ratio)
        noise = np.random.default_rng(len(taken)).normal(1, 0.02 if ratio == 1.06 else 1e-4, 5)
        found: dict[str, np.ndarray] = {}
        for name, factor in (("baseline", np.ones(5)), ("candidate", ratio * noise)):
            found |= {f"{name}/1/seconds": 1e-3 * factor, f"{name}/1/calls": np.ones(5, int)}
            found |= {f"{name}/1/rounds": np.ones(5, int)}
        return LatencyResult({name: (LatencyRow(batch=1),) for name in ("baseline", "candidate")}, found)

    run = documents.read(write(tmp_path / "run", record()))
    stored = remeasure.Stored(tmp_path, run, run.variants[0])
    monkeypatch.setattr(remeasure, "measure_latency", measured)
    monkeypatch.setattr(remeasure, "_feeds", lambda *_: {})
    limits = remeasure.Limits(1.0, lambda ratio: ratio.high < 1.05 or ratio.low > 1.05, lambda text: None)
    found = remeasure.remeasure(stored, stored, 1, limits)
    assert (found.iterations, found.launches) == (looks, 5 * looks)
    assert found.ratio.median == pytest.approx(ratios[0], rel=0.05)


Make = Callable[..., None]
NAMES = ("digits@cpu", "digits@edge", "lenet@cpu", "lenet@edge")


@pytest.fixture
def make_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a fleet of four entries, which take 0.5 ms where nothing else is said of them."""
    monkeypatch.chdir(tmp_path)

    def made(name: str, kinds: dict[str, Run | EnginesmithError | float] | None = None, **changes: Any) -> None:
        asked = fleets.fleet(**changes)
        entries = []
        for one in asked.entries():
            kind = (kinds or {}).get(one.name, 0.5)
            found = fleets.run(one, ms=kind) if isinstance(kind, float) else kind
            entries.append(fleets.entry(one, Path(name), found))
        records.write(fleets.record(asked, *entries), Path(name))

    return made


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, list(words))
    return done.exit_code, done.output


def test_every_entry_is_held_against_its_own_budgets_and_those_given(make_fleet: Make) -> None:
    make_fleet("fleet", overrides={"lenet@cpu": {"budgets": {"max_latency_ms": 0.1}}})
    code, text = said("gate", "fleet", "--max-size", "1MiB")
    assert code == 3
    assert [line for line in text.splitlines() if line.startswith("FAILED")] == [
        "FAILED: lenet@cpu: p50 latency is 0.5 ms, and has to be at most 0.1 ms"
    ]
    assert sum(line.startswith("passed: ") for line in text.splitlines()) == 4
    assert "fleet: 4 passed, 1 failed; the gate fails for 1 of 4 entries: lenet@cpu" in text
    code, text = said("gate", "fleet", "--max-latency", "1ms")
    assert (code, text.splitlines()) == (
        0,
        [
            *(f"passed: {name}: p50 latency is 0.5 ms, and has to be at most 1 ms" for name in NAMES),
            "fleet: all 4 passed, of 4 entries",
        ],
    )
    make_fleet("other")
    assert said("gate", "other")[1].splitlines()[-1] == "other: nothing was judged"


def test_what_came_to_nothing_is_broken(make_fleet: Make) -> None:
    make_fleet("fleet", {"lenet@cpu": fleets.ERRORS[2], "lenet@edge": fleets.ERRORS[0]})
    code, text = said("gate", "fleet", "--max-latency", "1ms", "--json")
    found = json.loads(text)
    assert (code, found["schema"], found["passed"]) == (3, "enginesmith.fleet-gate/1", False)
    assert {
        name: [one["text"] for one in gate["verdicts"] if not one["passed"]] for name, gate in found["entries"].items()
    } == {
        "digits@cpu": [],
        "digits@edge": [],
        "lenet@cpu": ["failed: aten::odd cannot be exported"],
        "lenet@edge": ["lacking: no node has the accelerator L4"],
    }


def test_what_was_not_ended_is_broken_whatever_its_folder_has(make_fleet: Make) -> None:
    make_fleet("fleet")
    record = records.read(Path("fleet"))
    pending = [one.model_copy(update={"status": "pending", "run": None, "reason": ""}) for one in record.entries]
    records.write(record.model_copy(update={"entries": tuple(pending)}), Path("fleet"))
    assert Path("fleet/runs/digits@cpu/run.json").is_file()
    code, text = said("gate", "fleet", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")
    assert code == 3
    assert "FAILED: digits@cpu: pending: it was not ended" in text
    assert not Path("base").exists()


def test_runs_that_another_fleet_took_over_are_not_replaced(make_fleet: Make) -> None:
    make_fleet("before")
    make_fleet("after")
    shutil.rmtree("after/runs/lenet@cpu")
    Path("after/runs/lenet@cpu").symlink_to(Path("before/runs/lenet@cpu").resolve())
    code, text = said("gate", "after", "--baseline", "before", "--update-baseline", "--max-latency", "1ms")
    assert code == 2
    assert "before holds after/runs/lenet@cpu itself" in text
    assert "give another folder" in text


def test_a_baseline_is_a_fleet(make_fleet: Make) -> None:
    make_fleet("before")
    assert said("gate", "before", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")[0] == 0
    assert sorted(path.name for path in Path("base/runs").iterdir()) == list(NAMES)
    make_fleet("after", {"digits@cpu": 0.6}, models={"digits": {}, "lenet": {}, "mobilenet_v2": {}})
    code, text = said("gate", "after", "--baseline", "base", "--no-measure")
    broken = [line for line in text.splitlines() if line.startswith("FAILED")]
    assert (code, len(broken)) == (3, 1)
    assert broken[0].startswith("FAILED: digits@cpu: latency is +20.0%")
    assert "note: mobilenet_v2@cpu: the baseline has no run of it" in text
    assert said("gate", "after", "--baseline", "base", "--update-baseline", "--max-latency", "0.55ms")[0] == 3
    assert len(records.read(Path("base")).entries) == 4, "a broken fleet replaces nothing"
    code, text = said("gate", "after", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")
    assert (code, "after is the baseline in base now" in text) == (0, True)
    assert len(records.read(Path("base")).entries) == 6


def test_whose_measurement_it_is_is_told(make_fleet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fleet("fleet")
    heard: list[str] = []
    demands = gates.Demands(records.read(Path("fleet")).fleet.entries()[0].recipe.budgets, progress=heard.append)
    real = gates.gate

    def speaking(folder: Path, demands: gates.Demands, **rest: Any) -> Any:
        demands.progress("look 1")
        return real(folder, demands, **rest)

    monkeypatch.setattr(gates, "gate", speaking)
    fleet.gate(Path("fleet"), lambda recipe: demands)
    assert heard == [f"{name}: look 1" for name in NAMES]


def test_two_fleets_are_compared(make_fleet: Make) -> None:
    make_fleet("before")
    make_fleet("after", {"digits@cpu": 0.6})
    code, text = said("compare", "before", "after", "-o", "compare.md")
    assert code == 0
    assert "since the last fleet: compared with ../before" in text
    assert "slower +20 %" in text
    assert "| digits@cpu | onnxruntime-int8 | p50 at batch 1, ms | 0.5 | 0.6 |" in Path("compare.md").read_text()
    document = json.loads(said("compare", "before", "after", "--json")[1])
    assert (document["schema"], document["last"]["path"]) == (records.SCHEMA, "../before")
    assert records.read(Path("after")).last is None, "what is in the folder stays as it is"


def test_a_fleet_is_inspected(make_fleet: Make) -> None:
    make_fleet("fleet", {"lenet@cpu": fleets.ERRORS[2]})
    code, text = said("inspect", "fleet")
    assert code == 0
    assert "kind: fleet\n" in text
    assert "  digits@cpu: done: onnxruntime-int8\n" in text
    assert "  lenet@cpu: failed: aten::odd cannot be exported\n" in text
    assert "runs: fleet/runs\n" in text
    assert json.loads(said("inspect", "fleet/fleet.json", "--json")[1])["kind"] == "fleet"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("gate fleet --variant eager", "--variant is of one run: give one of those in fleet/runs"),
        ("gate fleet --update-baseline", "needs --baseline DIR"),
        ("gate fleet --max-latency -1ms", "cannot read the duration"),
        ("gate fleet --baseline fleet --update-baseline", "fleet holds fleet itself"),
        ("gate fleet --baseline full --update-baseline", "full is there already, and is no baseline"),
        ("gate fleet --baseline full/notes --update-baseline", "full/notes is a file"),
        ("gate fleet --baseline fleet/runs/digits@cpu", "is a single run, and a fleet is needed here"),
        ("gate fleet/runs/digits@cpu --baseline fleet", "give one of its own: fleet/runs/digits@cpu, fleet/runs/"),
        ("package fleet -f bundle -o bundle", "fleet is a fleet, and this takes single runs"),
        ("compare fleet fleet/runs/digits@cpu", "is a single run, and a fleet is needed here"),
        ("compare fleet fleet fleet", "two at a time"),
    ],
)
def test_what_makes_no_sense_is_refused(make_fleet: Make, words: str, told: str) -> None:
    make_fleet("fleet")
    Path("full").mkdir()
    Path("full/notes").touch()
    code, text = said(*words.split())
    assert (code, told in text) == (2, True), text


# What a gate leaves in the folder that it judged.

EVIL = "<img src=x> | [a](javascript:b) @team ![i](http://h) ]]></failure> # `x`\n# head"


def cases(folder: Path) -> dict[str, str]:
    """Outcome of each test case of a gate."""
    root = ElementTree.parse(folder / "junit.xml").getroot()
    found = [case for case in root.iter("testcase") if str(case.get("classname")).endswith("gate")]
    outcomes = [(case, next(iter(case), None)) for case in found]
    return {f"{case.get('classname')}: {case.get('name')}": "" if one is None else one.tag for case, one in outcomes}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_reports_show_the_gate_until_the_run_changes(tmp_path: Path) -> None:
    row = record().latency[0].model_copy(update={"launches": 1})
    base, run = write(tmp_path / "base", record(latency=(row,))), write(tmp_path / "run", record(p50_ms=0.99))
    (run / "notes.txt").write_text("mine")
    before = everything(tmp_path)
    words = ["gate", str(run), "--baseline", str(base), "--no-measure", "--max-size", "1B", "--max-memory", "1GiB"]
    code, text = said(*words)
    assert code == 3
    after = everything(tmp_path)
    assert after.keys() - before.keys() == {"run/gate.json", "run/report.md", "run/junit.xml"}
    assert {name: after[name] for name in before} == before
    report = (run / "report.md").read_text()
    assert report.startswith("# run\n\n## Gate: failed\n\na of ")
    assert report.index("| size (budget) | **failed** | size is 1000 B") < report.index("| **not judged** | latency is")
    assert "| peak memory (budget) | passed |" in report
    assert report.index("## Gate") < report.index("## Result")
    assert cases(run) == {
        "gate: peak memory (budget)": "",
        "gate: size (budget)": "failure",
        "gate: p50 latency (baseline)": "skipped",
        "gate: peak memory (baseline)": "",
        "gate: size (baseline)": "",
    }
    for line in text.splitlines()[:-1]:  # the numbers come from one place
        assert plain(line.partition(": ")[2]) in report
    stored = json.loads((run / "gate.json").read_text())
    assert [check["state"] for check in stored["verdicts"]].count("failed") == 1
    (run / "report.md").unlink()
    assert said("report", str(run), "-f", "md")[0] == 0
    assert (run / "report.md").read_text() == report, "a later report keeps the section"
    assert said("report", str(run), "-f", "md", "-o", str(tmp_path / "public"))[0] == 0
    assert "## Gate: failed" in (tmp_path / "public" / "report.md").read_text()
    write(run, record(p50_ms=0.5))
    said("report", str(run), "-f", "md", "-f", "junit")
    assert "## Gate" not in (run / "report.md").read_text(), "it was of another result"
    assert cases(run) == {}


def test_a_fleets_reports_show_the_gate_until_an_entry_changes(make_fleet: Make) -> None:
    make_fleet("fleet", overrides={"lenet@cpu": {"budgets": {"max_latency_ms": 0.1}}})
    said("gate", "fleet/fleet.json", "--max-size", "1MiB", "--json")
    report = Path("fleet/fleet.md").read_text()
    assert "## Gate: failed\n\nfleet" in report
    table = report.partition("| --- | --- | --- |\n")[2]
    assert table.startswith("| lenet@cpu p50 latency (budget) | **failed** |"), "what failed stands first"
    found = cases(Path("fleet"))
    assert len(found) == 5
    assert found["lenet@cpu gate: p50 latency (budget)"] == "failure"
    said("report", "fleet")
    assert Path("fleet/fleet.md").read_text() == report
    changed = documents.read(Path("fleet/runs/lenet@cpu")).model_copy(update={"seconds": 5.0})
    documents.write(changed, Path("fleet/runs/lenet@cpu"))
    said("report", "fleet")
    assert "## Gate" not in Path("fleet/fleet.md").read_text()
    assert cases(Path("fleet")) == {}


def test_no_text_of_a_gate_does_more_than_be_read(tmp_path: Path) -> None:
    run = write(tmp_path / "<b>run|", record(EVIL, status="failed", reason=EVIL), name=EVIL)
    assert said("gate", str(run), "--max-latency", "1ms")[0] != 0
    head, _, _ = (run / "report.md").read_text().partition("## Result")
    assert not re.search(r"<|\]\(|@\w|^# head|(?<!\\)`", head, re.M), head
    assert len([line for line in head.splitlines() if line.startswith("|")]) == 2 + len(cases(run))


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "enginesmith.gate/9", "judged_sha256": null}'])
def test_a_damaged_gate_file_is_as_none(tmp_path: Path, content: str) -> None:
    run = write(tmp_path / "run", record())
    (run / "gate.json").write_text(content)
    assert said("report", str(run), "-f", "md")[0] == 0
    assert "## Gate" not in (run / "report.md").read_text()


def test_reports_that_cannot_be_written_change_no_verdict(tmp_path: Path) -> None:
    run = write(tmp_path / "run", record())
    (run / "gate.json").mkdir()
    code, text = said("gate", str(run), "--max-latency", "2ms")
    assert code == 0
    assert "note: the reports were not written" in text
