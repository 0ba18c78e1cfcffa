"""What is computed from samples of latency: percentiles, speed-ups and their intervals. Pure functions on arrays.

Intervals are percentile bootstraps over *rounds*, not over single calls: calls of one block share the state of the
machine, so that they are not independent, and blocks far apart in time nearly are.

Medians and ratios are taken of undisturbed calls, where there are some: those around which no thread waited for a core.
What decides is the kernel's account of waiting, never how long the call took; percentiles are of all calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Samples = NDArray[np.float64]

SAMPLE_FLOORS = {90.0: 64, 99.0: 662, 99.9: 6_636}
"""Samples needed before a percentile is reported: MLPerf's early stopping at 99 % confidence, tolerance 0, for a run in
which one query is over the latency bound (mlcommons/inference_policies, "Early Stopping Criterion")."""

LEAST_ROUNDS = 6
"""Rounds below which no interval is given: even from the smallest to the largest of n values covers the median with
1 − 2^(1−n) only, which reaches 95 % at six."""

UNDISTURBED = 0.02
"""Waiting for a core, as a share of the time, up to which calls count as undisturbed."""

_LEAST_UNDISTURBED = 0.1
"""Of a block's calls, for the block to count."""

_RESAMPLES = 2_000
_CONFIDENCE = 0.95
_DRAWN_AT_ONCE = 500_000


class Interval(BaseModel):
    """An estimate with its 95 % bootstrap interval."""

    model_config = ConfigDict(frozen=True)

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        """In another unit."""
        return Interval(median=self.median * factor, low=self.low * factor, high=self.high * factor)

    @property
    def relative_half_width(self) -> float:
        """The farther end's distance from the estimate, as a share of it."""
        return max(self.high - self.median, self.median - self.low) / self.median


def percentile(samples: Samples, rank: float) -> tuple[float | None, str]:
    """The percentile as numpy defines it (linear), or None and the reason when too few samples are behind it."""
    floor = SAMPLE_FLOORS.get(rank, 1)
    if samples.size < floor:
        return None, f"p{rank:g} takes {floor} samples, and there are {samples.size}"
    return float(np.percentile(samples, rank)), ""


@dataclass(frozen=True)
class Timed:
    """The calls of one block: seconds, and the waiting around each as a share of the time; shapes (calls,)."""

    seconds: Samples
    waited: Samples | None = None
    """None where the kernel does not tell."""

    @property
    def undisturbed(self) -> Samples:
        """Seconds of the calls that were not disturbed; none where they are too few to count."""
        if self.waited is None:
            return self.seconds
        quiet = self.seconds[self.waited <= UNDISTURBED]
        return quiet if quiet.size >= _LEAST_UNDISTURBED * self.seconds.size else quiet[:0]


def comparable(*sides: Sequence[Timed]) -> tuple[list[Samples], ...]:
    """The calls to judge by, by round: undisturbed ones of the rounds in which every side has some.

    Where such rounds are fewer than an interval takes, all calls of all rounds.
    """
    rounds = [[block.undisturbed for block in blocks] for blocks in zip(*sides, strict=True)]
    quiet = [blocks for blocks in rounds if all(block.size for block in blocks)]
    if len(quiet) < LEAST_ROUNDS:
        quiet = [[block.seconds for block in blocks] for blocks in zip(*sides, strict=True)]
    return tuple([blocks[side] for blocks in quiet] for side in range(len(sides)))


def median_interval(blocks: Sequence[Timed], seed: int) -> Interval:
    """The median over rounds of the blocks' medians, in seconds, with its interval."""
    (judged,) = comparable(blocks)
    return _interval(np.array([np.median(block) for block in judged]), seed)


def paired_ratio(baseline: Sequence[Timed], candidate: Sequence[Timed], seed: int) -> Interval:
    """The speed-up: the median over rounds of median(baseline's block) / median(candidate's block) in that round."""
    rounds = zip(*comparable(baseline, candidate), strict=True)
    ratios = [np.median(ours) / np.median(theirs) for ours, theirs in rounds]
    return _interval(np.array(ratios), seed)


def rate_interval(rates: Sequence[float], seed: int) -> Interval:
    """The median over rounds of a rate, with its interval."""
    return _interval(np.array(rates), seed)


def mean_interval(values: Samples, seed: int) -> tuple[float, float]:
    """95 % interval of the mean of independent values."""
    return _ends(_estimates(values, np.mean, seed))


def _interval(values: Samples, seed: int) -> Interval:
    low, high = _ends(_estimates(values, np.median, seed))
    return Interval(median=float(np.median(values)), low=low, high=high)


def _estimates(values: Samples, statistic: Callable[..., Samples], seed: int) -> Samples:
    """The statistic of ``_RESAMPLES`` samples drawn with replacement; some at a time, to stay within few megabytes."""
    rng = np.random.default_rng(seed)
    at_once = max(1, min(_RESAMPLES, _DRAWN_AT_ONCE // values.size))
    parts = []
    for start in range(0, _RESAMPLES, at_once):
        count = min(at_once, _RESAMPLES - start)
        parts.append(statistic(values[rng.integers(0, values.size, size=(count, values.size))], axis=1))
    return np.concatenate(parts)


def _ends(estimates: Samples) -> tuple[float, float]:
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(estimates, (tail, 100 - tail))
    return float(low), float(high)
