"""Searches for groups that stay in floating point: which trial comes next, and which of them is best."""

from collections.abc import Callable
from typing import Any

import pytest

from enginesmith.pipeline.passes.quantize.precisions import Cause
from enginesmith.pipeline.passes.quantize.search import Advice, Candidate, GroupFact, Trial, best, propose
from enginesmith.pipeline.tasks.mixed_precision import Search

Judge = Callable[[Candidate], tuple[bool, float, float | None]]
METHODS = ("mse", "minmax")


def groups(*sensitivities: float, macs: tuple[int, ...] = (), kinds: tuple[str, ...] = ()) -> list[GroupFact]:
    return [
        GroupFact(
            name=f"g{index}",
            module="",
            kind=kinds[index] if kinds else "Conv",
            macs=macs[index] if macs else 100,
            sqnr_db=sqnr,
        )
        for index, sqnr in enumerate(sensitivities)
    ]


def run(
    facts: list[GroupFact],
    judge: Judge,
    methods: tuple[str, ...] = METHODS,
    keep: tuple[str, ...] = (),
    signs: tuple[bool, ...] = (False,),
    corrections: tuple[bool, ...] = (False,),
    **changed: list[GroupFact],
) -> list[Trial]:
    """The whole search: each candidate judged by (passed, error, speed-up); ``changed`` has other forms' groups."""
    trials: list[Trial] = []
    forms: dict[Any, list[GroupFact]] = {**changed, "given": facts}
    while candidate := propose(trials, forms, methods, frozenset(keep), signs, corrections):
        passed, error, speedup = judge(candidate)
        trials.append(
            Trial(
                **{**vars(candidate), "kept": tuple(sorted(candidate.kept))},
                passed=passed,
                error=error,
                speedup=speedup,
            )
        )
        assert len(trials) < 50
    return trials


def needs(*names: str) -> Judge:
    return lambda candidate: (set(names) <= candidate.kept, float(len(set(names) - candidate.kept)), None)


def test_one_trial_where_everything_can_be_quantized() -> None:
    trials = run(groups(30, 20, 10), lambda candidate: (True, 0.0, None))
    assert [(trial.phase, trial.kept) for trial in trials] == [("everything", ())]


def test_other_methods_are_tried_before_anything_is_kept() -> None:
    facts = groups(30, 20, 10)
    trials = run(facts, lambda candidate: (candidate.method == "minmax", 1.0, None))
    found = best(trials, facts)
    assert (found.method, found.kept) == ("minmax", ())


def test_the_graph_is_rescaled_before_other_settings_are_tried() -> None:
    """One change at a time, from what lost least so far; what is kept is kept in the best of them."""
    facts, rescaled = groups(10, 2, 30), groups(9, 31, 30)
    losses = {"rescaled": 1.0, "given": 3.0}

    def judge(one: Candidate) -> tuple[bool, float, None]:
        return "g0" in one.kept, losses[one.form] + one.signed - 0.1 * (one.method == "minmax"), None

    trials = run(facts, judge, ("mse", "minmax"), rescaled=rescaled, signs=(True, False))
    assert [(trial.form, trial.signed, trial.method, trial.kept) for trial in trials] == [
        ("rescaled", True, "mse", ()),
        ("given", True, "mse", ()),
        ("rescaled", False, "mse", ()),
        ("rescaled", False, "minmax", ()),
        ("rescaled", False, "minmax", ("g0",)),  # in this form it is the most sensitive
    ]
    words = "everything quantized, channels rescaled, activations in uint8, ranges by mse"
    assert trials[2].why == words


def test_multiplications_are_added_where_rescaling_is_not_enough() -> None:
    facts = groups(10, 2, 30)
    trials = run(
        facts, lambda one: (one.form == "multiplied", 1.0, None), rescaled=groups(10, 31), multiplied=groups(30, 31)
    )
    assert [trial.form for trial in trials] == ["rescaled", "multiplied"]
    assert trials[-1].why == "everything quantized, channels rescaled by multiplications, ranges by mse"


def test_the_graph_as_it_is_may_be_better() -> None:
    trials = run(
        groups(10, 2), lambda one: (one.form == "given", 0.0, None), rescaled=groups(9, 1), signs=(True, False)
    )
    assert [(trial.form, trial.signed) for trial in trials] == [("rescaled", True), ("given", True)]


def find_form_kept_in(
    losses_db: dict[tuple[str, str], float], drops: dict[str, float] | None = None
) -> tuple[str, str]:
    """Find the form and the method with which the first group stays in floating point."""
    forms: dict[Any, list[GroupFact]] = {
        "rescaled": groups(40, 1, macs=(98, 2)), "given": groups(2, 1, macs=(98, 2))
    }  # fmt: skip
    trials = list[Trial]()
    while (candidate := propose(trials, forms, METHODS, frozenset())) and candidate.phase == "everything":
        loss = losses_db[candidate.form, candidate.method]
        drop = drops[candidate.form] if drops else None
        error = drop if drop is not None else 1e9 - loss
        figures = {**vars(candidate), "kept": (), "sqnr_db": loss, "drop": drop}
        trials.append(Trial(passed=False, error=error, **figures))
    assert candidate is not None
    return candidate.form, candidate.method


@pytest.mark.parametrize("best_db", [-0.3, 2.9, 12.5])
def test_where_noise_decides_groups_are_kept_in_the_form_with_the_least_work_in_groups_that_lose_much(
    best_db: float,
) -> None:
    """One group with 2 % of the work drowns the answers of both forms."""
    rescaled_db = best_db - 0.5 if best_db > 3 else -0.8
    losses_db = {("given", "mse"): best_db, ("rescaled", "mse"): rescaled_db, ("rescaled", "minmax"): rescaled_db + 0.1}
    assert find_form_kept_in(losses_db) == ("rescaled", "minmax")


def test_groups_are_kept_in_the_form_that_loses_clearly_less() -> None:
    losses_db = {("given", "mse"): 9.0, ("given", "minmax"): 8.0, ("rescaled", "mse"): 7.0}
    assert find_form_kept_in(losses_db) == ("given", "mse")
    losses_db |= {("rescaled", "mse"): 8.9, ("rescaled", "minmax"): 9.0}
    assert find_form_kept_in(losses_db, {"given": 0.02, "rescaled": 0.03}) == ("given", "mse"), "metrics tell more"


def test_the_best_method_is_gone_on_with() -> None:
    facts = groups(30, 20, 10)
    trials = run(facts, lambda one: (bool(one.kept), 1.0 if one.method == "minmax" else 2.0, None))
    assert trials[-1].method == "minmax"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 30])
def test_no_more_groups_are_kept_than_needed(count: int) -> None:
    facts = groups(*range(30))
    worst = {f"g{index}" for index in range(count)}
    trials = run(facts, needs(*worst))
    found = best(trials, facts)
    assert set(found.kept) == worst
    assert len(trials) <= 16


def test_work_is_given_back() -> None:
    facts = groups(1, 2, 3, 30, 40, macs=(10, 1000, 10, 10, 10))
    trials = run(facts, needs("g0", "g2"))
    found = best(trials, facts)
    assert (found.phase, found.kept) == ("give back", ("g0", "g2"))


def test_speed_is_looked_at_after_nothing_could_be_given_back() -> None:
    facts = groups(1, 2, 30, 31, macs=(10, 1000, 10, 100), kinds=("Conv", "Conv", "Gemm", "Conv"))
    trials = run(facts, lambda one: ({"g0", "g1"} <= one.kept, 1.0, 2.0 if "g2" in one.kept else 1.0))
    assert trials[-1].phase == "speed"


def test_a_kind_that_loses_stays_in_floating_point() -> None:
    facts = groups(20, 20, 20, macs=(1000, 10, 500), kinds=("Conv", "depthwise Conv", "Gemm"))
    speeds = {frozenset(): 1.5, frozenset({"g1"}): 1.8, frozenset({"g1", "g2"}): 1.7}
    trials = run(facts, lambda candidate: (True, 0.0, speeds[candidate.kept]))
    found = best(trials, facts)
    assert found.kept == ("g1",)


def test_what_is_faster_and_too_large_is_not_taken() -> None:
    facts = groups(20, 20, macs=(1000, 500), kinds=("Conv", "Gemm"))
    trials = run(facts, lambda candidate: (True, 0.0, 1.8 if candidate.kept else 1.5))
    assert best(trials, facts).kept == ("g1",)
    large = [trial.model_copy(update={"fits": not trial.kept}) for trial in trials]
    assert best(large, facts).kept == ()
    assert best([trial.model_copy(update={"fits": False}) for trial in trials], facts).kept == ("g1",)


def test_a_kind_with_next_to_no_work_is_not_tried_for_speed() -> None:
    facts = groups(20, 20, macs=(100_000, 10), kinds=("Conv", "Gemm"))
    assert [trial.phase for trial in run(facts, lambda candidate: (True, 0.0, 1.5))] == ["everything"]


def test_a_gain_within_the_noise_keeps_nothing() -> None:
    facts = groups(20, 20, macs=(1000, 10), kinds=("Conv", "depthwise Conv"))
    trials = run(facts, lambda candidate: (True, 0.0, 1.5 if not candidate.kept else 1.51))
    found = best(trials, facts)
    assert found.kept == ()


def test_what_the_user_keeps_is_kept_throughout() -> None:
    trials = run(groups(30, 20, 10), needs("g2", "g0"), keep=("g0",))
    assert all("g0" in trial.kept for trial in trials)
    assert trials[-1].passed


def test_nothing_passes() -> None:
    facts = groups(30, 20, 10)
    trials = run(facts, lambda candidate: (False, 1.0, None))
    assert best(trials, facts) is None
    assert set(trials[-1].kept) == {"g0", "g1", "g2"}


def test_biases_are_corrected_before_groups_stay_in_floating_point() -> None:
    """The correction alone is not enough here; what is nearest keeps it with other ranges and with groups in float."""
    facts = [GroupFact(name=f"g{i}", module="", kind="Conv", macs=10, sqnr_db=20.0 + i) for i in range(3)]

    def judge(candidate: Candidate) -> tuple[bool, float, float | None]:
        error = 0.02 - 0.005 * candidate.corrected + (0.001 if candidate.method != METHODS[0] else 0.0)
        return bool(candidate.kept), error, None

    trials = run(facts, judge, corrections=(False, True))
    assert [trial.corrected for trial in trials] == [False, True, *[True] * (len(trials) - 2)]
    assert "biases corrected" in trials[1].why
    assert [trial.phase for trial in trials[-1:]] == ["sensitive"]


@pytest.mark.parametrize(
    ("cause", "second"),
    [
        ("no outliers", (False, False, "mse")),
        ("shifted means", (True, True, "mse")),
        ("single peaks", (True, False, "minmax")),
    ],
)
def test_what_fits_the_cause_of_most_that_lose_much_is_tried_first(cause: Cause, second: tuple[Any, ...]) -> None:
    """Activations in uint8, biases corrected, or other ranges; what loses little does not count."""
    facts = [fact.model_copy(update={"pattern": cause}) for fact in groups(10, 20)]
    facts += [fact.model_copy(update={"pattern": "uneven weights"}) for fact in groups(25, 30, 30)]
    trials = run(facts, lambda one: (bool(one.kept), 1.0, None), signs=(True, False), corrections=(False, True))
    assert [(trial.signed, trial.corrected, trial.method) for trial in trials][1] == second


@pytest.mark.parametrize(
    ("intervals", "chosen"),
    [
        ({"": (2.10, 2.0, 2.3), "g0": (2.15, 2.1, 2.2)}, ""),
        ({"": (2.10, 2.0, 2.2), "g0": (2.40, 2.3, 2.5)}, "g0"),
        ({"": (2.10, 2.1, 2.1), "g0": (2.12, 2.12, 2.12)}, ""),
        ({"": (2.0, 1.9, 2.1), "g0": (2.2, 2.0, 2.4), "g0 g1": (2.5, 2.3, 2.7)}, "g0"),
        ({"": (1.0, 0.99, 1.01), "g0": (1.5, 1.49, 1.51), "g0 g1": (1.55, 0.6, 2.5)}, "g0"),
        ({"": None, "g0": (0.6, 0.55, 0.65)}, ""),
        ({"": None, "g0": None}, ""),
    ],
    ids=["noise", "apart", "little", "between", "the fastest is noisy", "disturbed", "not measured"],
)
def test_fewer_groups_are_quantized_only_where_that_is_faster_beyond_noise(intervals: Any, chosen: str) -> None:
    given: dict[str, Any] = {"phase": "everything", "method": "mse", "why": "", "passed": True, "error": 0}
    trials = [
        Trial(**given, kept=tuple(kept.split()), speedup=one and one[0], speedup_range=one and one[1:])
        for kept, one in intervals.items()
    ]
    found = best(trials, groups(30, 20, 10))
    assert found is not None
    assert " ".join(found.kept) == chosen


@pytest.mark.parametrize(("left", "late"), [(41.0, False), (39.0, True)])
def test_no_trial_begins_that_its_share_of_the_time_is_too_short_for(left: float, late: bool) -> None:
    """One more takes 20 s, and so does building; what one took that was delayed is no matter."""
    given: dict[str, Any] = {"phase": "everything", "method": "mse", "kept": (), "why": "", "passed": False, "error": 1}
    trials = [Trial(**given, seconds=seconds) for seconds in (20.0, 20.0, 200.0, 20.0, 20.0)]
    search = Search.model_construct()
    assert search.model_copy(update={"left_seconds": left})._is_late(trials) == late
    assert not search._is_late([])
    assert not search._is_late(trials)


def facts(*groups: tuple[str, float, int]) -> list[GroupFact]:
    return [GroupFact(name=name, module="", kind="MatMul", macs=macs, sqnr_db=db) for name, db, macs in groups]


FAILED = Trial(passed=False, error=1.0, phase="everything", method="mse", kept=(), why="everything quantized")


def choose(trials: list[Trial], groups: list[GroupFact], impacts: dict[str, float]) -> Candidate:
    candidate = propose(trials, {"given": groups}, ("mse",), frozenset(), impacts=impacts)
    assert candidate is not None
    return candidate


def test_groups_that_change_the_answers_most_stay_in_floating_point_first() -> None:
    groups = facts(("first", 30.0, 100), ("second", 10.0, 100))
    assert choose([FAILED], groups, {}).kept == {"second"}
    assert choose([FAILED], groups, {"first": 0.1, "second": 0.001}).kept == {"first"}


def test_their_work_counts_too() -> None:
    groups = facts(("small", 30.0, 1), ("large", 30.0, 99))
    assert choose([FAILED], groups, {"small": 0.01, "large": 0.1}).kept == {"small"}
    assert choose([FAILED], groups, {"small": 0.0001, "large": 0.1}).kept == {"large"}


def test_what_others_needed_counts_only_where_nothing_is_measured() -> None:
    groups = facts(*((f"g{index}", 30.0 + index, 100) for index in range(8)))
    advice = Advice(float_share=0.5)
    without = propose([FAILED], {"given": groups}, ("mse",), frozenset(), advice=advice)
    assert without is not None
    assert len(without.kept) == 4
    measured = propose([FAILED], {"given": groups}, ("mse",), frozenset(), advice=advice, impacts={"g7": 0.1})
    assert measured is not None
    assert measured.kept == {"g7"}


def test_the_first_are_as_many_as_make_most_of_the_error_and_then_twice_as_many() -> None:
    groups = facts(*((f"g{index}", 30.0, 100) for index in range(8)))
    impacts = {f"g{index}": 0.1 if index < 3 else 0.01 for index in range(8)}
    first = choose([FAILED], groups, impacts)
    assert first.kept == {"g0", "g1", "g2"}
    trial = FAILED.model_copy(update={"phase": "sensitive", "kept": tuple(sorted(first.kept)), "impacts": impacts})
    assert choose([FAILED, trial], groups, {}).kept == {f"g{index}" for index in range(6)}


def test_where_impacts_are_known_nothing_is_given_back_for_its_work() -> None:
    groups = facts(*((f"g{index}", 30.0, 1000 if index == 0 else 10) for index in range(8)))
    kept = {"phase": "sensitive", "kept": ("g0", "g1"), "passed": True}
    trials = [
        FAILED,
        FAILED.model_copy(update=kept | {"passed": False, "kept": ("g0",)}),
        FAILED.model_copy(update=kept),
    ]
    assert choose(trials, groups, {}).phase == "give back"
    assert propose(trials, {"given": groups}, ("mse",), frozenset(), impacts={"g0": 0.1, "g1": 0.1}) is None


def test_groups_without_an_impact_follow_by_their_own_errors() -> None:
    groups = facts(("a", 30.0, 100), ("b", 10.0, 100), ("c", 20.0, 100), ("d", 40.0, 100))
    trial = FAILED.model_copy(update={"phase": "sensitive", "kept": ("d",), "impacts": {"d": 0.1}})
    assert choose([FAILED, trial], groups, {}).kept == {"d", "b"}
