"""Options that mend engines which are wrong: found in a run, added to its recipe, and known again there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.engines import environment
from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.measure.prosecution.finding import Finding, Prosecution
from enginesmith.pipeline.measure.rows import RaceRow, Tuning
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.passes.export.failures import FixedDimension
from enginesmith.pipeline.planning.single_stages import EXPORT
from enginesmith.pipeline.recipe import Recipe, make
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.run import Run, StepRecord, VariantRecord, find_workarounds
from enginesmith.pipeline.tasks.race import Race
from enginesmith.pipeline.units import AddedOption
from enginesmith.pipeline.workflows.optimize import OptimizeJob, _limit_time, _why_unusable
from enginesmith.pipeline.workflows.request import (
    RunRequest,
    is_finished,
    list_dropped,
    list_kept,
    read_earlier_search,
    request_again,
    restore_workarounds,
)
from enginesmith.pipeline.workflows.run_directory import claim_run_directory
from runs import small, variant

RECIPE = make({"model": "digits", "onnxruntime": {"disabled_optimizers": ["PadFusion"]}}, listed=True)
LEVEL = AddedOption(field="graph_optimization", value="basic", words="--graph-optimization basic")


def without(name: str) -> AddedOption:
    return AddedOption(field="onnxruntime.disabled_optimizers", value=name, words=f"--ort-disable {name}")


def wrong(name: str, option: AddedOption | None) -> VariantRecord:
    finding = Finding(
        walk="sizes",
        note="batch 7",
        reason="it is off by one",
        witness="model",
        attempts=3,
        guilty="engine",
        option=option,
    )
    prosecution = Prosecution(seconds=1, attempts=3, walks={"sizes": 3}, finding=finding)
    return variant(name, status="failed", prosecution=prosecution)


def run_of(*records: VariantRecord, recipe: Recipe = RECIPE, complete: bool = True) -> Run:
    return small(variant("eager", engine="eager"), *records, recipe=recipe, winner=None, complete=complete)


@pytest.mark.parametrize("option", [without("DivMulFusion"), LEVEL])
def test_an_option_is_added_once_and_taken_away_again(option: AddedOption) -> None:
    added = RECIPE.with_option(option)
    assert added != RECIPE
    assert added.with_option(option) == added
    assert added.without_option(option) == RECIPE
    assert Recipe.model_validate_json(added.model_dump_json()) == added


def test_each_option_that_the_recipe_lacks_is_found_once() -> None:
    options = {"a": without("DivMulFusion"), "b": without("DivMulFusion"), "c": LEVEL, "d": without("PadFusion")}
    run = run_of(*(wrong(name, option) for name, option in options.items()), wrong("e", None))
    first, second = find_workarounds(run)
    assert (first.variant, second.option) == ("a", LEVEL)
    assert first.sentence == (
        "--ort-disable DivMulFusion was added: without it, a is wrong on sizes (batch 7): it is off by one"
    )
    many = run_of(*(wrong(f"v{index}", without(f"Fusion{index}")) for index in range(9)))
    few = find_workarounds(many)
    rest = find_workarounds(many.model_copy(update={"workarounds": tuple(few)}))
    assert (len(few), rest) == (4, [])


def test_a_run_is_requested_again_where_there_is_time(tmp_path: Path) -> None:
    request = RunRequest("demo", RECIPE, tmp_path, replace=True)
    run = run_of(wrong("a", without("DivMulFusion")))
    again = request_again(request, run, spent=1000.0)
    assert again
    assert again.recipe.onnxruntime.disabled_optimizers == ("PadFusion", "DivMulFusion")
    assert (again.requested_recipe, again.replace, again.seconds) == (RECIPE, False, None)
    assert request_again(request, None, spent=1.0) is None
    assert request_again(request, run_of(wrong("a", None)), spent=1.0) is None
    assert request_again(request, run.model_copy(update={"complete": False}), spent=1.0) is None
    limited = run.model_copy(update={"recipe": RECIPE.model_copy(update={"time_seconds": 100.0})})
    left = request_again(request, limited, spent=40.0)
    assert left
    assert left.seconds == 60.0
    assert left.recipe.time_seconds == 100.0
    assert request_again(request, limited, spent=51.0) is None
    longer = request_again(request, limited, spent=120.0, instead=300.0)  # resume --time
    assert longer
    assert longer.seconds == 180.0


@pytest.mark.parametrize(("cause", "kept"), [("", []), ("failed", ["a"]), ("untried", ["a"])])
def test_what_was_measured_stays_in_a_race_that_is_run_again(tmp_path: Path, cause: str, kept: list[str]) -> None:
    """Else a variant that was mended would throw it out, and the run keep the results that it had."""
    recipe = make({"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 600})
    other = variant("b", status="skipped", untried=cause == "untried")
    ended = "failed" if cause == "failed" else "done"
    step = StepRecord(id="build-b", status=ended, cached=False, seconds=None, effect="")
    runs.write(run_of(variant("a"), other, recipe=recipe).model_copy(update={"steps": (step,)}), tmp_path)
    assert list_kept(RunRequest("demo", recipe, tmp_path)) == kept


def test_what_dropped_out_of_a_race_is_left_out_on_the_same_machine_alone(tmp_path: Path) -> None:
    recipe = make({"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 600})
    row = RaceRow(variant="b", lap=1, dropped="a is faster", engine_sha256="ab")
    unmade = RaceRow(variant="c", lap=0, dropped="it was not made")
    here, request = environment(), RunRequest("demo", recipe, tmp_path)
    others = (variant("b", status="skipped", race=(row,)), variant("c", status="skipped", race=(unmade,)))
    run = run_of(variant("a"), *others, recipe=recipe)
    runs.write(run.model_copy(update={"environment": here.model_dump(mode="json")}), tmp_path)
    earlier = read_earlier_search(request)
    assert earlier
    assert list_dropped(earlier, here) == [row]
    assert list_dropped(earlier, here.model_copy(update={"processor": "another"})) == []
    assert read_earlier_search(replace(request, replace=True)) is None
    assert read_earlier_search(replace(request, recipe=RECIPE)) is None
    for reuse, earlier in ((True, (row,)), (False, ())):
        job = OptimizeJob([request], Settings(store=tmp_path / "store", reuse=reuse))
        races = {step.id: step.task.earlier for step in job._plans["demo"].steps if isinstance(step.task, Race)}
        assert races == {"race-first": earlier, "race": earlier}


def test_what_was_dropped_for_a_variant_that_is_wrong_is_tried_after_all(tmp_path: Path) -> None:
    recipe = make({"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 100})
    speed = Interval(median=1, low=1, high=1)
    dropped = RaceRow(variant="b", lap=1, speedup=speed, dropped="a is faster", engine_sha256="ab")
    late = wrong("a", None).model_copy(update={"race": (RaceRow(variant="a", lap=1, speedup=speed),)})
    early = variant("d", status="failed", race=(RaceRow(variant="d", lap=1, failure="it hangs"),))
    others = (variant("b", status="skipped", race=(dropped,)), variant("c"), early)
    here = environment().model_dump(mode="json")
    run = run_of(late, *others, recipe=recipe).model_copy(update={"environment": here})
    runs.write(run, tmp_path)
    request = RunRequest("demo", recipe, tmp_path)
    assert runs.find_late_failures(run) == {"a": "engine"}
    assert (list_kept(request), list_dropped(run, environment()), is_finished(run, tmp_path)) == (["c"], [], False)
    again = request_again(request, run, spent=69.0)
    assert again
    assert (again.recipe, again.seconds) == (recipe, 31.0)
    assert request_again(request, run, spent=71.0) is None
    job = OptimizeJob([again], Settings(store=tmp_path / "store"))
    assert {step.task.failed for step in job._plans["demo"].steps if isinstance(step.task, Race)} == {("a",)}
    error = _why_unusable(run_of(late, *others[:1]), {}, "enginesmith resume run")
    assert error is not None
    assert error.remedy is not None
    assert error.remedy.startswith("`enginesmith resume run` tries what was dropped for being slower")

    kept = (RaceRow(variant="a", lap=0, kept=True),)
    second = run.model_copy(update={"variants": (late.model_copy(update={"race": kept}), *others)})
    assert runs.find_late_failures(second) == {"a": "engine"}
    assert request_again(request, second, spent=1.0) is None
    assert list_dropped(second, environment()) == [dropped]
    nobody = run.model_copy(update={"variants": (late, variant("c"))})
    assert request_again(request, nobody, spent=1.0) is None


def test_a_search_that_no_time_was_left_for_is_not_finished(tmp_path: Path) -> None:
    for untried in (False, True):
        run = run_of(variant("a", artifact=None), variant("b", status="skipped", untried=untried, artifact=None))
        run = run.model_copy(update={"environment": environment().model_dump(mode="json")})
        assert is_finished(run, tmp_path) is not untried


@pytest.mark.parametrize(
    ("changes", "finished"),
    [
        ({}, True),
        ({"latency": [{"batch": 1, "stop": {"cause": "time limit", "seconds": 3}}]}, True),
        ({"latency": [{"batch": 1, "stop": {"cause": "whole run"}}]}, False),
        ({"tuning": Tuning(fields={}, kept=(), trials=(), untried=("x",))}, True),
        ({"tuning": Tuning(fields={}, kept=(), trials=(), untried=("x",), cut=True)}, False),
        ({"prosecution": Prosecution(seconds=3, attempts=9, walks={})}, True),
        ({"prosecution": Prosecution(seconds=3, attempts=9, walks={}, cut=True)}, False),
    ],
)
def test_measurements_that_were_cut_short_are_not_finished(
    tmp_path: Path, changes: dict[str, Any], finished: bool
) -> None:
    run = run_of(variant("a", artifact=None, **changes))
    run = run.model_copy(update={"environment": environment().model_dump(mode="json")})
    assert is_finished(run, tmp_path) is finished


@pytest.mark.parametrize(
    ("ends", "finished"),
    [
        ({"variant": "eager-bf16", "status": "failed"}, True),
        ({"variant": "a", "status": "failed"}, False),
        ({"variant": "", "status": "failed"}, False),
        ({"variant": "a", "status": "skipped"}, True),
        ({"variant": "a", "status": "skipped", "late": "over share"}, False),
    ],
)
def test_a_step_decides_whether_a_run_is_finished_by_its_fields(
    tmp_path: Path, ends: dict[str, Any], finished: bool
) -> None:
    """That of a variant which nobody asked for may fail."""
    run = run_of(variant("a", artifact=None), variant("eager-bf16", artifact=None, reference=True))
    step = StepRecord(id="memory-x", cached=False, seconds=None, effect="", **ends)
    run = run.model_copy(update={"environment": environment().model_dump(mode="json"), "steps": (step,)})
    assert is_finished(run, tmp_path) is finished


@pytest.mark.parametrize(
    ("recipe_seconds", "left", "instead", "limits"),
    [
        ((None,), None, None, (None, None, 0.0)),
        ((None,), None, 60.0, (60.0, None, 9.0)),
        ((60.0,), None, None, (60.0, 28.05, 9.0)),
        ((600.0,), None, 60.0, (60.0, 28.05, 9.0)),
        ((600.0,), 60.0, None, (60.0, 28.05, 9.0)),
        ((600.0, 60.0), None, 120.0, (120.0, 56.1, 18.0)),
        ((600.0, None), None, 120.0, (120.0, None, 18.0)),
    ],
)
def test_time_that_is_given_to_a_process_is_that_of_its_searches_too(
    recipe_seconds: tuple[float | None, ...], left: float | None, instead: float | None, limits: tuple[Any, Any, Any]
) -> None:
    given: dict[str, Any] = {"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, "batch": [1]}
    requests = [
        RunRequest(str(index), make({**given, "time_seconds": seconds}), Path("run"), seconds=left)
        for index, seconds in enumerate(recipe_seconds)
    ]
    assert _limit_time(requests, instead) == pytest.approx(limits)


def test_its_folder_belongs_to_the_recipe_that_people_gave(tmp_path: Path) -> None:
    run = run_of(wrong("a", LEVEL))
    (found,) = find_workarounds(run)
    mended = run.model_copy(update={"recipe": RECIPE.with_option(LEVEL), "workarounds": (found,)})
    (tmp_path / "run.json").write_text(mended.model_dump_json(by_alias=True))
    assert mended.requested_recipe == RECIPE
    with claim_run_directory(tmp_path, RECIPE):
        pass
    for recipe in (RECIPE, mended.recipe):  # the same command again, and `resume`
        restored = restore_workarounds(RunRequest("demo", recipe, tmp_path))
        assert (restored.recipe, restored.workarounds) == (mended.recipe, (found,))
    for other in (
        RunRequest("demo", RECIPE.with_option(without("X")), tmp_path),
        RunRequest("demo", RECIPE, tmp_path, replace=True),
    ):
        assert restore_workarounds(other) == other
    (tmp_path / "run.json").write_text("damaged")
    unreadable = RunRequest("demo", RECIPE, tmp_path, replace=True)
    assert restore_workarounds(unreadable) == unreadable, "it is moved away"


def test_a_search_names_the_time_as_the_reason_only_for_variants_that_it_was_over_for() -> None:
    failed = [variant(name, status="failed", reason="verify-export: no kernel") for name in "ab"]
    late = variant("c", status="skipped", untried=True, reason="no time was left to try it")
    error = _why_unusable(run_of(*failed, late), {}, "enginesmith resume run", 60.0)
    assert error is not None
    assert error.message == (
        "no usable variant is left:\n  a, b: verify-export: no kernel\n  c: no time was left to try it"
    )
    assert error.remedy == "--time 300s gives c more time; what was made is kept, and used again"
    alone = _why_unusable(run_of(late), {}, "enginesmith resume run", 60.0)
    assert alone is not None
    assert alone.message == "the time of 1 m 00 s was over before a variant could be measured"


@pytest.mark.parametrize(("guilty", "told"), [("export", True), ("engine", False)])
def test_a_run_without_a_right_export_names_engines_that_need_none(guilty: str, told: bool) -> None:
    found = wrong("openvino-fp32", None)
    assert found.prosecution is not None
    assert found.prosecution.finding is not None
    finding = found.prosecution.finding.model_copy(update={"guilty": guilty})
    changed = found.model_copy(update={"prosecution": found.prosecution.model_copy(update={"finding": finding})})
    error = _why_unusable(run_of(changed), {}, "enginesmith resume run")
    assert error is not None
    assert error.remedy is not None
    assert ("--engine compiled or --engine aotinductor" in error.remedy) == told


@pytest.mark.parametrize(
    ("kind", "told"),
    [(ExportError, "--engine compiled or --engine aotinductor runs"), (FixedDimension, "--engine compiled runs")],
)
def test_engines_of_a_capture_are_no_advice_where_it_fixes_a_size(kind: type[ExportError], told: str) -> None:
    outcomes = {EXPORT: Outcome(EXPORT, "failed", error=kind("right only where height % 4 == 0", "fix it"))}
    failed = variant("openvino-fp32", engine="openvino", status="failed")
    error = _why_unusable(run_of(failed), outcomes, "enginesmith resume run")
    assert error is not None
    assert error.remedy.startswith(told)
