"""Callables timed in turns, in one process and on one thread, so that a machine that drifts slows them all alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_WARMUP = 5
_FEWEST_ROUNDS = 20


@dataclass(frozen=True)
class Ratio:
    """Median over rounds of one callable's time over another's, with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Race:
    """``seconds`` [rounds, callables]."""

    names: tuple[str, ...]
    seconds: NDArray[np.float64]

    def p50_ms(self, name: str) -> float:
        """Median of one callable."""
        return float(np.median(self.seconds[:, self.names.index(name)]) * 1e3)

    def speedup(self, name: str, over: str) -> Ratio:
        """Compute how many times faster ``name`` is than ``over``, paired by round."""
        ours, theirs = (self.seconds[:, self.names.index(each)] for each in (name, over))
        ratios = theirs / ours
        generator = np.random.default_rng(0)
        medians = np.median(generator.choice(ratios, (_RESAMPLES, len(ratios))), axis=1)
        low, high = np.percentile(medians, [2.5, 97.5])
        return Ratio(float(np.median(ratios)), float(low), float(high))


def race(runners: Mapping[str, Callable[[], object]], seconds: float) -> Race:
    """Run all in random order, again and again."""
    names, generator = tuple(runners), np.random.default_rng(0)
    for name in names * _WARMUP:
        runners[name]()
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < _FEWEST_ROUNDS:
        times = [0.0] * len(names)
        for position in generator.permutation(len(names)):
            start = time.perf_counter()
            runners[names[position]]()
            times[position] = time.perf_counter() - start
        rounds.append(times)
    return Race(names, np.array(rounds))
