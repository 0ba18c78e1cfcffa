"""The memory of searches for a precision: what worked for a pattern is tried first, what failed is put off."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.execution.executor import StepCache
from enginesmith.pipeline.passes.quantize.search import (
    NO_ADVICE,
    Advice,
    Candidate,
    GroupFact,
    Setting,
    Trial,
    best,
    propose,
)
from enginesmith.pipeline.passes.quantize.upsampling import UPSAMPLING
from enginesmith.pipeline.planning.plan import Plan, StepRef
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.base import RECORDS, scratch_artifact, write_records
from enginesmith.pipeline.tasks.graph_forms import SENSITIVITY
from enginesmith.pipeline.tasks.mixed_precision import Search
from enginesmith.pipeline.workflows.earlier_searches import (
    EarlierSearches,
    PastSearch,
    TriedSetting,
    advise,
    describe_pattern,
    find_pattern,
    find_worked,
)

SIGNS, CORRECTIONS, METHODS = (True, False), (False, True), ("mse", "minmax")
GIVEN, RESCALED = Setting(method="mse"), Setting(form="rescaled", method="mse")
MULTIPLIED = Setting(form="multiplied", method="mse")
CORRECTED = Setting(form="rescaled", corrected=True, method="mse")
UNEVEN = {"Conv: uneven activations": 1.0}


def facts(count: int = 4, sqnr: float = 10.0, **changes: Any) -> list[GroupFact]:
    given = {"module": "", "kind": "Conv", "macs": 100, "pattern": "uneven activations", **changes}
    return [GroupFact(name=f"g{index}", sqnr_db=sqnr + index, **given) for index in range(count)]


def search(
    judge: Callable[[Candidate], bool],
    advice: Advice = NO_ADVICE,
    most: int = 40,
    groups: list[GroupFact] | None = None,
    forms: Any = None,
) -> list[Trial]:
    trials: list[Trial] = []
    groups = groups or facts()
    forms = forms or {"rescaled": groups, "given": groups}
    while candidate := propose(trials, forms, METHODS, frozenset(), SIGNS, CORRECTIONS, advice):
        passed = judge(candidate)
        given = {name: getattr(candidate, name) for name in ("phase", "form", "signed", "method", "corrected", "why")}
        kept = tuple(sorted(candidate.kept))
        error = 0.0 if passed else {"rescaled": 1.0, "multiplied": 1.5, "given": 2.0}[candidate.form]
        trials.append(Trial(**given, kept=kept, passed=passed, error=error))
        assert len(trials) <= most
    return trials


def settings(trials: list[Trial]) -> list[Setting]:
    return [Setting.of(trial, SIGNS) for trial in trials if trial.phase == "everything"]


def past(model: str = "m", pattern: dict[str, float] | None = None, **changes: Any) -> PastSearch:
    given = {"search": f"{model}{changes}", "max_drop": 0.01, **changes}
    return PastSearch(model=model, pattern=UNEVEN if pattern is None else pattern, **given)


@pytest.mark.parametrize("kind", ["Conv", "grouped Conv", UPSAMPLING])
def test_every_kind_of_operator_has_patterns(kind: str) -> None:
    assert past("a", {f"{kind}: uneven activations": 0.5}).pattern


def tried(passed: Setting | None, *failed: Setting) -> dict[str, Any]:
    rows = [TriedSetting(setting=setting, passed=False) for setting in failed]
    rows += [TriedSetting(setting=passed, passed=True)] if passed else []
    return {"tried": tuple(rows), "worked": passed}


# The order of trials


def test_what_worked_is_tried_first_and_says_so() -> None:
    def judge(one: Candidate) -> bool:
        return one.corrected

    usual = search(judge)
    assert len(usual) > 1
    advised = search(judge, Advice(first=CORRECTED, why="tried first, as it worked for others"))
    assert settings(advised) == [CORRECTED]
    assert advised[0].why.endswith("biases corrected, ranges by mse; tried first, as it worked for others")


def test_the_usual_trials_follow_where_it_does_not_work() -> None:
    first = Setting(form="given", unsigned=True, method="minmax")

    def never(one: Candidate) -> bool:
        return one.phase != "everything"

    usual, advised = search(never), search(never, Advice(first=first, why="w"))
    assert settings(advised)[0] == first
    assert set(settings(usual)) <= set(settings(advised))
    assert [trial.why.endswith("w") for trial in advised if trial.phase == "everything"].count(True) == 1
    assert len(set(settings(advised))) == len(settings(advised))


def test_advice_that_is_the_usual_order_says_nothing() -> None:
    (only,) = search(lambda one: True, Advice(first=RESCALED, why="w"))
    assert only.why == "everything quantized, channels rescaled, ranges by mse"


@pytest.mark.parametrize(
    "first",
    [
        Setting(form="multiplied", method="mse"),
        Setting(method="entropy"),
        Setting(method="percentile", unsigned=True, corrected=True),
    ],
)
def test_advice_that_this_search_cannot_follow_is_ignored(first: Setting) -> None:
    def judge(one: Candidate) -> bool:
        return one.corrected

    assert search(judge, Advice(first=first, why="w")) == search(judge)


@pytest.mark.parametrize("failed", [(RESCALED,), (GIVEN, CORRECTED), (RESCALED, MULTIPLIED, CORRECTED)])
def test_what_failed_is_tried_later_before_any_group_stays_in_float(failed: tuple[Setting, ...]) -> None:
    """Advice orders the trials, and takes none away."""

    def judge(one: Candidate) -> bool:
        return len(one.kept) >= 1

    forms = dict.fromkeys(("rescaled", "multiplied", "given"), facts())
    usual, advised = search(judge, forms=forms), search(judge, Advice(failed=failed), forms=forms)
    order = settings(advised)
    assert set(order) == set(settings(usual))
    assert [trial.phase for trial in advised][: len(order)] == ["everything"] * len(order)
    of_forms, of_changes = order[:3], order[3:]
    for part in (of_forms, of_changes):
        assert part == sorted(part, key=lambda setting: setting in failed)
    assert order != settings(usual)
    assert best(advised, facts()) is not None
    assert best(advised, facts()) == best(usual, facts())


def test_a_form_in_which_all_groups_of_this_model_lose_little_is_not_put_off() -> None:
    """A model's own groups tell more than what failed with others, for whatever reason."""
    lifted, advice = facts(sqnr=40.0), Advice(failed=(RESCALED, MULTIPLIED))

    def judge(one: Candidate) -> bool:
        return one.form == "multiplied"

    forms = {"rescaled": facts(), "multiplied": lifted, "given": facts()}
    assert settings(search(judge, advice, forms=forms)) == [MULTIPLIED]
    weak = dict.fromkeys(forms, facts())
    assert settings(search(judge, advice, forms=weak)) == [GIVEN, RESCALED, MULTIPLIED]
    unknown = {**weak, "multiplied": [group.model_copy(update={"sqnr_db": None}) for group in lifted]}
    assert settings(search(judge, advice, forms=unknown)) == [GIVEN, RESCALED, MULTIPLIED]


def test_as_many_groups_stay_in_float_first_as_were_enough() -> None:
    def judge(one: Candidate) -> bool:
        return len(one.kept) >= 8

    groups = facts(16)
    usual, advised = search(judge, groups=groups), search(judge, Advice(first=RESCALED, float_share=0.5), groups=groups)
    first = next(trial for trial in advised if trial.phase == "sensitive")
    assert (first.passed, len(first.kept)) == (True, 8)
    assert not next(trial for trial in usual if trial.phase == "sensitive").passed
    assert len(best(advised, groups).kept) == len(best(usual, groups).kept)  # type: ignore[union-attr]


# What is remembered


def test_a_pattern_has_the_operators_and_causes_of_what_loses_much() -> None:
    weak = [*facts(3), *facts(1, kind="MatMul", pattern="single peaks"), *facts(50, sqnr=40.0)]
    assert find_pattern(weak) == {"Conv: uneven activations": 0.75, "MatMul: single peaks": 0.25}
    assert find_pattern(facts(2, sqnr=40.0)) == {"Conv: little lost": 1.0}
    assert find_pattern([GroupFact(name="a", module="", kind="LSTM", macs=1, sqnr_db=None, reason="r")]) == {}
    text = describe_pattern({"Conv: uneven activations": 0.6, "MatMul: single peaks": 0.3, "Gemm: unknown": 0.1})
    assert text == "Conv with uneven activations and MatMul with single peaks"


def test_what_worked_is_the_setting_or_the_fewest_groups_in_float() -> None:
    trials = search(lambda one: one.corrected)
    assert find_worked(trials, SIGNS, frozenset(), facts()) == (CORRECTED, 0.0)
    trials = search(lambda one: {"g0", "g1"} <= one.kept)
    setting, share = find_worked(trials, SIGNS, frozenset({"g0"}), facts())
    assert (setting, share) == (RESCALED, round(1 / 3, 6))
    assert find_worked(search(lambda one: False), SIGNS, frozenset(), facts()) == (None, 0.0)


def test_nothing_worked_where_the_variant_is_in_floating_point() -> None:
    """The goal is reached only with nothing in few bits, or what reaches it is no faster."""
    trials = search(lambda one: len(one.kept) == 4)
    assert any(trial.passed for trial in trials)
    assert find_worked(trials, SIGNS, frozenset(), facts()) == (None, 0.0)
    assert find_worked(trials, SIGNS, frozenset({"g3"}), facts()) == (None, 0.0)
    slow = search(lambda one: len(one.kept) >= 2)
    slow = [trial.model_copy(update={"speedup": 1.0 if len(trial.kept) == 4 else 0.5}) for trial in slow]
    assert find_worked(slow, SIGNS, frozenset(), facts())[0] is not None
    in_float = slow[-1].model_copy(update={"kept": ("g0", "g1", "g2", "g3"), "passed": True, "speedup": 1.0})
    assert find_worked([*slow, in_float], SIGNS, frozenset(), facts()) == (None, 0.0)


def test_advice_is_what_worked_for_the_most_similar() -> None:
    half = {"Conv: uneven activations": 0.6, "MatMul: single peaks": 0.4}
    known = [past("a", half, **tried(GIVEN, RESCALED)), past("b", **tried(CORRECTED, RESCALED, GIVEN))]
    advice = advise(UNEVEN, 0.01, known)
    assert advice.first == CORRECTED
    assert advice.why == "tried first, as it worked for Conv with uneven activations in an earlier run"
    assert advise({"LSTM: unknown": 1.0}, 0.01, known) == NO_ADVICE
    assert advise(UNEVEN, 0.01, []) == NO_ADVICE


def test_what_failed_more_often_than_it_worked_is_not_first() -> None:
    known = [past("a", **tried(GIVEN, RESCALED)), past("b", **tried(None, GIVEN)), past("c", **tried(None, GIVEN))]
    assert advise(UNEVEN, 0.01, known).first is None


def test_a_setting_has_failed_again_with_a_second_model_and_a_goal_that_is_no_stricter() -> None:
    def failed(*others: PastSearch) -> tuple[Setting, ...]:
        return advise(UNEVEN, 0.01, [past("a", **tried(None, GIVEN)), *others]).failed

    assert failed() == failed(past("a", max_drop=0.02, **tried(None, GIVEN))) == ()
    assert failed(past("b", **tried(None, GIVEN))) == (GIVEN,)
    assert failed(past("b", max_drop=0.02, **tried(None, GIVEN))) == (GIVEN,)
    assert failed(past("b", max_drop=0.001, **tried(None, GIVEN))) == ()
    assert failed(past("b", max_drop=None, **tried(None, GIVEN))) == ()
    assert failed(past("b", **tried(None, GIVEN)), past("c", **tried(GIVEN))) == ()


def test_groups_in_float_are_advised_where_no_setting_worked_alone() -> None:
    known = [past(name, **{**tried(None, RESCALED, GIVEN), "worked": RESCALED, "float_share": 0.1}) for name in "ab"]
    advice = advise(UNEVEN, 0.01, known)
    assert (advice.first, advice.float_share, advice.failed) == (RESCALED, 0.1, (GIVEN,))
    assert "with 10% of the groups in floating point for Conv" in advice.why
    assert advise(UNEVEN, 0.01, [past("c", **tried(CORRECTED)), *known]).first == CORRECTED


# A run that uses it


@pytest.fixture
def planned() -> Plan:
    values: dict[str, Any] = {"model": "digits", "engines": ["onnxruntime"], "precisions": ["int8"], "data": "digits"}
    return plan(resolve_recipe(make({**values, "budgets": {"max_drop": 0.01}, "threads": 1, "batch": [1]})))


def ended(step: StepRef, folder: Path, rows: Any, sha256: str = "") -> dict[str, Outcome]:
    folder.mkdir(parents=True)
    write_records(folder, rows)
    artifact = scratch_artifact("record", folder / RECORDS, None).model_copy(update={"sha256": sha256 or str(step)})
    return {step: Outcome(step, "done", artifact=artifact)}


def trials_of(planned: Plan) -> list[Any]:
    return [step for step in planned.steps if isinstance(step.task, Search)]


def measured(planned: Plan, folder: Path, model: str) -> dict[str, Outcome]:
    """The outcomes with which the first trial of a model begins."""
    first = trials_of(planned)[0]
    float_graph = ended(first.inputs["model"], folder / "model", [], model)
    return float_graph | ended(first.inputs[SENSITIVITY], folder / "sensitivity", facts(), f"sensitivity of {model}")


def run(planned: Plan, store: Store, folder: Path, model: str, judge: Callable[[Candidate], bool]) -> Any:
    """One search of a run: its advice, and what came of it."""
    outcomes = measured(planned, folder, model)
    earlier = EarlierSearches(planned.steps, store)
    notes: list[str] = []
    tasks = dict(earlier.advise(outcomes, outcomes, notes.append))
    steps = trials_of(planned)
    assert tasks.keys() <= {step.id for step in steps}
    advice = tasks[steps[0].id].advice if tasks else NO_ADVICE
    assert all(task.advice == advice for task in tasks.values())
    signs, trials = steps[0].task.signs, search(judge, advice)
    trials = [trial.model_copy(update={"signed": signs[0]}) for trial in trials]
    earlier.remember(outcomes | ended(steps[len(trials) - 1].id, folder / "trials", trials))
    return SimpleNamespace(advice=advice, trials=trials, tasks=tasks, notes=notes)


def test_the_next_model_with_the_pattern_begins_with_what_worked(planned: Plan, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")

    def judge(one: Candidate) -> bool:
        return one.corrected

    first = run(planned, store, tmp_path / "one", "one", judge)
    second = run(planned, store, tmp_path / "two", "two", judge)
    assert first.advice == NO_ADVICE
    assert second.advice.first == CORRECTED
    assert len(second.trials) == 1 < len(first.trials)
    (file,) = (tmp_path / "store").glob("searches/*")
    assert file.name == "int8.json"
    assert [entry.key for entry in store.prune(max_age_seconds=0)] == ["searches/int8.json"]


def test_the_next_model_learns_nothing_from_a_variant_in_floating_point(planned: Plan, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")

    def judge(one: Candidate) -> bool:
        return len(one.kept) == 4

    run(planned, store, tmp_path / "one", "one", judge)
    assert run(planned, store, tmp_path / "two", "two", judge).advice == NO_ADVICE
    third = run(planned, store, tmp_path / "three", "three", judge)
    assert third.advice.first is None
    assert third.advice.failed, "what failed with two models is what these teach"


def test_a_search_that_is_done_again_begins_as_it_did_so_that_its_trials_are_found(
    planned: Plan, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")

    def judge(one: Candidate) -> bool:
        return one.corrected

    first = run(planned, store, tmp_path / "1", "one", judge)
    again = run(planned, store, tmp_path / "2", "one", judge)
    assert again.advice == first.advice == NO_ADVICE
    run(planned, store, tmp_path / "3", "two", judge)
    run(planned, store, tmp_path / "4", "three", lambda one: one.form == "given")
    assert run(planned, store, tmp_path / "5", "two", judge).advice.first == CORRECTED
    anew = Store(tmp_path / "store", reuse=False)
    assert run(planned, anew, tmp_path / "6", "one", judge).advice.first == CORRECTED
    assert run(planned, store, tmp_path / "7", "one", judge).advice.first == CORRECTED


def test_an_interrupted_search_begins_as_it_did_whatever_others_found_meanwhile(planned: Plan, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    outcomes = measured(planned, tmp_path / "1", "one")
    assert [*EarlierSearches(planned.steps, store).advise(outcomes, outcomes, print)] == []  # and the process ends
    run(planned, store, tmp_path / "2", "two", lambda one: one.corrected)
    assert [*EarlierSearches(planned.steps, store).advise(outcomes, outcomes, print)] == []


def test_advice_is_part_of_a_trials_key(planned: Plan, tmp_path: Path) -> None:
    step = trials_of(planned)[0]
    store = Store(tmp_path)
    tasks = [step.task.model_copy(update={"advice": advice}) for advice in (NO_ADVICE, Advice(first=CORRECTED))]
    names = {StepCache(SimpleNamespace(task=task), {}, store)._name for task in (step.task, *tasks)}  # type: ignore[arg-type]
    assert len(names) == 2


def test_only_numbers_and_patterns_are_kept(planned: Plan, tmp_path: Path) -> None:
    run(planned, Store(tmp_path / "store"), tmp_path / "one", "one", lambda one: one.corrected)
    text = (tmp_path / "store/searches/int8.json").read_text()
    (record,) = json.loads(text)["searches"]
    assert record["pattern"] == UNEVEN
    assert "g0" not in text
    assert "digits" not in text


@pytest.mark.parametrize(
    "damage",
    [
        {"pattern": {"/home/user/model": 1.0}},
        {"pattern": {"Conv: uneven activations": 7.0}},
        {"more": 1},
        {"worked": {"form": "other", "method": "mse"}},
        {"float_share": 1.0},
    ],
)
def test_damaged_and_foreign_records_are_ignored_with_a_note(
    planned: Plan, tmp_path: Path, damage: dict[str, Any]
) -> None:
    store = Store(tmp_path / "store")
    run(planned, store, tmp_path / "1", "one", lambda one: one.corrected)
    file = tmp_path / "store/searches/int8.json"
    (record,) = json.loads(file.read_text())["searches"]
    file.write_text(json.dumps({"searches": [record | damage]}))
    found = run(planned, store, tmp_path / "2", "two", lambda one: one.corrected)
    assert found.advice == NO_ADVICE
    assert found.notes == ["searches/int8.json in the store: 1 of 1 records cannot be read, and are ignored"]
    assert run(planned, store, tmp_path / "3", "three", lambda one: one.corrected).advice.first == CORRECTED
