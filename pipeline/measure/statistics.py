"""What is computed from samples of latency: percentiles, speed-ups and their intervals. Pure functions on arrays.

Intervals are percentile bootstraps over *rounds*, not over single calls: calls of one block share the state of the
machine, so that they are not independent, and blocks far apart in time nearly are.
"""

from collections.abc import Callable, Sequence

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

_RESAMPLES = 2_000
_CONFIDENCE = 0.95
_DRAWN_AT_ONCE = 500_000


class Interval(BaseModel):
    """An estimate with its 95 % bootstrap interval."""

    model_config = ConfigDict(frozen=True)

    median: float
    low: float
    high: float

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


def median_interval(blocks: Sequence[Samples], seed: int) -> Interval:
    """The median over rounds of the blocks' medians, with its interval."""
    return _interval(np.array([np.median(block) for block in blocks]), seed)


def paired_ratio(baseline: Sequence[Samples], candidate: Sequence[Samples], seed: int) -> Interval:
    """The speed-up: the median over rounds of median(baseline's block) / median(candidate's block) in that round."""
    ratios = [np.median(ours) / np.median(theirs) for ours, theirs in zip(baseline, candidate, strict=True)]
    return _interval(np.array(ratios), seed)


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
