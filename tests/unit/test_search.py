"""The search for what stays in floating point, on made-up networks whose errors are known."""

from collections.abc import Callable

import pytest

from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.precisions import Placement
from enginesmith.pipeline.passes.quantize.search import Candidate, GroupFact, Trial, best, propose
from enginesmith.pipeline.tasks.mixed_precision import assignment

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
    facts: list[GroupFact], judge: Judge, methods: tuple[str, ...] = METHODS, keep: tuple[str, ...] = ()
) -> list[Trial]:
    """The whole search: each candidate judged by (passed, error, speed-up)."""
    trials: list[Trial] = []
    while candidate := propose(trials, facts, methods, frozenset(keep)):
        passed, error, speedup = judge(candidate)
        trials.append(
            Trial(
                phase=candidate.phase,
                method=candidate.method,
                kept=tuple(sorted(candidate.kept)),
                why=candidate.why,
                passed=passed,
                error=error,
                speedup=speedup,
            )
        )
        assert len(trials) < 50
    return trials


def needs(*names: str) -> Judge:
    return lambda candidate: (set(names) <= candidate.kept, float(len(set(names) - candidate.kept)), None)


def test_one_trial_where_everything_can_be_quantised() -> None:
    trials = run(groups(30, 20, 10), lambda candidate: (True, 0.0, None))
    assert [(trial.phase, trial.kept) for trial in trials] == [("everything", ())]


def test_other_methods_are_tried_before_anything_is_kept() -> None:
    facts = groups(30, 20, 10)
    trials = run(facts, lambda candidate: (candidate.method == "minmax", 1.0, None))
    found = best(trials, facts)
    assert found is not None
    assert (found.method, found.kept) == ("minmax", ())


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
    assert found is not None
    assert set(found.kept) == worst
    assert len(trials) <= 16


def test_work_is_given_back() -> None:
    facts = groups(1, 2, 3, 30, 40, macs=(10, 1000, 10, 10, 10))
    trials = run(facts, needs("g0", "g2"))
    found = best(trials, facts)
    assert found is not None
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
    assert found is not None
    assert found.kept == ("g1",)


def test_a_gain_within_the_noise_keeps_nothing() -> None:
    facts = groups(20, 20, macs=(1000, 10), kinds=("Conv", "depthwise Conv"))
    trials = run(facts, lambda candidate: (True, 0.0, 1.5 if not candidate.kept else 1.51))
    found = best(trials, facts)
    assert found is not None
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


@pytest.mark.parametrize(("placement", "rest"), [("inputs", "fp16"), ("inputs+outputs", "fp32")])
def test_what_has_no_form_goes_with_the_rest(placement: Placement, rest: str) -> None:
    facts = [GroupFact(name="attention", module="", kind="Attention", macs=1, sqnr_db=None, reason="stays whole")]
    step = Precision(precision="int4-weights", placement=placement)
    (entry,) = assignment(facts, (), "mse", step, {})
    assert (entry["precision"], entry["why"]) == (rest, "stays whole")
