"""Percentiles, intervals and speed-ups."""

from math import comb, gamma, pi, sqrt

import numpy as np
import pytest

from enginesmith.pipeline.measure.statistics import (
    _STUDENT,
    LEAST_ROUNDS,
    SAMPLE_FLOORS,
    Timed,
    comparable,
    mean_interval,
    median_interval,
    paired_ratio,
    percentile,
)


def early_stopping_queries(share: float, over_latency: int) -> int:
    """MLPerf: the fewest queries of which so many may be over the bound, at 99 % confidence that `share` are under."""
    queries = over_latency + 1
    while True:
        chances = (comb(queries, k) * (1 - share) ** k * share ** (queries - k) for k in range(over_latency + 1))
        if sum(chances) <= 0.01:
            return queries
        queries += 1


@pytest.mark.parametrize("rank", [90.0, 99.0, 99.9])
def test_sample_floors_are_mlperfs(rank: float) -> None:
    assert SAMPLE_FLOORS[rank] == early_stopping_queries(rank / 100, over_latency=1)


@pytest.mark.parametrize("rank", [50.0, 90.0, 95.0, 99.0])
def test_percentiles_are_numpys(rank: float) -> None:
    samples = np.random.default_rng(0).exponential(size=1_001)
    assert percentile(samples, rank) == (np.percentile(samples, rank), "")


@pytest.mark.parametrize(("rank", "floor"), SAMPLE_FLOORS.items())
def test_percentile_below_its_floor_is_none_with_a_reason(rank: float, floor: int) -> None:
    value, reason = percentile(np.ones(floor - 1), rank)
    assert value is None
    assert str(floor) in reason
    assert percentile(np.ones(floor), rank) == (1.0, "")


def test_speedup_is_not_moved_by_drift() -> None:
    """A machine that gets three times slower while it measures: the paired ratio stays what it is."""
    rng = np.random.default_rng(1)
    drift = np.linspace(1, 3, 40)
    slow = [Timed(speed * rng.normal(2.0, 0.01, 20)) for speed in drift]
    fast = [Timed(speed * rng.normal(1.0, 0.01, 20)) for speed in drift]
    found = paired_ratio([slow], [fast], seed=0)
    assert found.low < 2.0 < found.high
    assert found.relative_half_width < 0.01
    assert median_interval([slow], seed=0).relative_half_width > 0.1


def test_interval_covers_the_true_median_about_19_times_in_20() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        found = median_interval([[Timed(block) for block in rng.normal(1.0, 0.1, (30, 1))]], seed=0)
        hits += found.low <= 1.0 <= found.high
    assert 180 <= hits <= 199


def test_same_seed_same_interval() -> None:
    values = np.random.default_rng(3).normal(1.0, 0.1, (12, 5))
    blocks = [Timed(block) for block in values]
    assert median_interval([blocks], seed=7) == median_interval([blocks], seed=7)
    assert mean_interval(values[0], seed=7) == mean_interval(values[0], seed=7)
    assert mean_interval(values[0], seed=7) != mean_interval(values[0], seed=8)


def disturbed(rng: np.random.Generator, seconds: float, slowed: float, share: float) -> Timed:
    """A block of 20 calls, of which some waited for a core and took longer."""
    waited = np.where(rng.random(20) < share, 0.4, 0.001)
    return Timed(np.where(waited > 0.1, slowed, 1.0) * rng.normal(seconds, 0.01 * seconds, 20), waited)


def test_speedup_is_that_of_calls_that_nobody_disturbed() -> None:
    """One side suffers more from a busy neighbour than the other: eager's threads wait for each other."""
    rng = np.random.default_rng(5)
    slow = [disturbed(rng, 2.0, slowed=6.0, share=0.6) for _ in range(40)]
    fast = [disturbed(rng, 1.0, slowed=1.5, share=0.6) for _ in range(40)]
    found = paired_ratio([slow], [fast], seed=0)
    assert found.low < 2.0 < found.high
    assert found.relative_half_width < 0.02
    assert median_interval([slow], seed=0).median == pytest.approx(2.0, rel=0.01)


def test_rounds_count_where_both_sides_have_undisturbed_calls() -> None:
    quiet, busy = Timed(np.ones(4), np.zeros(4)), Timed(np.full(4, 9.0), np.ones(4))
    ours = [quiet] * LEAST_ROUNDS + [busy, quiet]
    theirs = [quiet] * LEAST_ROUNDS + [quiet, busy]
    judged = [launch for (launch,) in comparable([ours], [theirs])]
    assert [len(side) for side in judged] == [LEAST_ROUNDS] * 2
    assert max(block.max() for side in judged for block in side) == 1.0


def test_launches_without_undisturbed_calls_are_left_out() -> None:
    quiet, busy = Timed(np.ones(4), np.zeros(4)), Timed(np.full(4, 9.0), np.ones(4))
    (judged,) = comparable([[quiet] * 4 + [busy], [busy] * 2, [quiet] * 2, [quiet]])
    assert [len(launch) for launch in judged] == [4, 2, 1]
    (judged,) = comparable([[quiet] * 9, [busy] * 2, [quiet]])
    assert [len(launch) for launch in judged] == [9, 2, 1]  # two launches are too few


def launched(rng: np.random.Generator, launches: int, rounds: int = 20) -> list[list[Timed]]:
    """Processes that differ by 5 % among each other, and by 1 % within."""
    speeds = rng.normal(1.0, 0.05, launches)
    return [[Timed(rng.normal(speed, 0.01, 5)) for _ in range(rounds)] for speed in speeds]


@pytest.mark.parametrize("launches", [3, 5, 10])
def test_interval_of_several_launches_covers_what_others_would_be(launches: int) -> None:
    rng = np.random.default_rng(6)
    found = [median_interval(launched(rng, launches), seed=0) for _ in range(200)]
    assert 182 <= sum(one.low <= 1.0 <= one.high for one in found) <= 199
    assert all(one.low <= one.median <= one.high for one in found)


def test_interval_of_one_launch_is_of_that_launch() -> None:
    rng = np.random.default_rng(6)
    found = [median_interval(launched(rng, 1), seed=0) for _ in range(50)]
    assert sum(one.low <= 1.0 <= one.high for one in found) < 25


def test_students_t_has_its_quantiles() -> None:
    """By the definition: 97.5 % of Student's density lie below."""
    for freedom, quantile in enumerate(_STUDENT, start=1):
        at = np.linspace(0, quantile, 20_001)
        height = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
        density = height * (1 + at**2 / freedom) ** (-(freedom + 1) / 2)
        assert np.trapezoid(density, at) == pytest.approx(0.475, abs=5e-5)


def test_mean_interval_is_the_normal_one_for_many_values() -> None:
    values = np.random.default_rng(4).normal(5.0, 2.0, 4_000)
    low, high = mean_interval(values, seed=0)
    half = 1.96 * values.std() / np.sqrt(values.size)
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
