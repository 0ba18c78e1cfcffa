"""The search for a share of MACs that takes a wanted share of the latency."""

from collections.abc import Callable

import pytest

from enginesmith.pipeline.passes.prune.budget import LatencyTrial, chosen, propose, told

MOST = 12
"""More than any search takes."""


def searched(latency: Callable[[float], float | None], wanted: float) -> list[LatencyTrial]:
    trials: list[LatencyTrial] = []
    while (share := propose(trials, wanted)) is not None:
        left = latency(share)
        trials.append(LatencyTrial(macs_left=share, latency_left=left, reason="" if left else "too few"))
        assert len(trials) <= MOST
    return trials


@pytest.mark.parametrize("fixed", [0.0, 0.2, 0.5])
def test_it_comes_near_where_part_of_the_time_stays(fixed: float) -> None:
    trials = searched(lambda share: fixed + (1 - fixed) * share, 0.6)
    best = chosen(trials, 0.6)
    assert best is trials[-1]
    assert best.latency_left == pytest.approx(0.6, rel=0.02)


def test_the_first_trial_may_do() -> None:
    assert len(searched(lambda share: share, 0.6)) == 1
    assert propose([], 0.6) == 0.6


def test_of_those_that_are_fast_enough_the_largest_is_chosen() -> None:
    steps = [(0.6, 0.8), (0.3, 0.4), (0.45, 0.5), (0.5, 0.7)]
    trials = [LatencyTrial(macs_left=macs, latency_left=left) for macs, left in steps]
    assert chosen(trials, 0.6) is trials[2]
    assert propose(trials[:3], 0.6) == pytest.approx(0.525)


def test_what_cannot_be_pruned_that_far_is_tried_with_more() -> None:
    trials = searched(lambda share: share if share > 0.5 else None, 0.3)
    assert trials[0].latency_left is None
    assert trials[1].macs_left > trials[0].macs_left
    assert chosen(trials, 0.3) is None
    fastest = min(one.latency_left for one in trials if one.latency_left)
    assert told(trials).startswith(f"the fastest of {len(trials)} trials takes {fastest:.1%}")


def test_where_none_can_be_had_the_reason_is_told() -> None:
    trials = searched(lambda share: None, 0.3)
    assert (chosen(trials, 0.3), told(trials)) == (None, "too few")
