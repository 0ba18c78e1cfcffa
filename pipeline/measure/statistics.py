"""Compute percentiles, speed-ups and their intervals from samples of latency. Pure functions on arrays.

Samples come in three levels: calls of a block, blocks one for each round, rounds of a launch. Calls of one block share
the state of the machine, and rounds of one launch share their processes: where in memory these lie alone moves a median
by some per cent, for as long as they live. Only launches are independent, so an interval is Student's over launches
(Georges, Buytaert, Eeckhout: "Statistically Rigorous Java Performance Evaluation", OOPSLA 2007, section 3.2); of one
launch it is a percentile bootstrap over rounds, which is true of these processes and says nothing of others.

Medians and ratios are taken of undisturbed calls, where there are some: those around which no thread waited for a core.
What decides is the kernel's account of waiting, never how long the call took; percentiles are of all calls.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

Samples = NDArray[np.float64]

SAMPLE_FLOORS = {90.0: 64, 95.0: 130, 99.0: 662, 99.9: 6_636}
"""Samples needed before a percentile is reported: MLPerf's early stopping at 99 % confidence, tolerance 0, for a run in
which one query is over the latency bound (mlcommons/inference_policies, "Early Stopping Criterion")."""

LEAST_ROUNDS = 6
"""Rounds below which no interval is given: even from the smallest to the largest of n values covers the median with
1 − 2^(1−n) only, which reaches 95 % at six."""

LEAST_LAUNCHES = 3
"""Launches below which their spread says too little; the interval is over rounds then."""

UNDISTURBED = 0.02
"""Waiting for a core, as a share of the time, up to which calls count as undisturbed."""

_LEAST_UNDISTURBED = 0.1
"""Share of undisturbed calls that a block needs to count."""

MOSTLY_DISTURBED = 0.5
"""Share of disturbed calls from which even medians are of such, and say little of the quiet machine."""

TOO_NOISY = "too noisy to tell"
NOISE_REMEDY = "measure on a quiet machine, for longer (--measure-time), or on pinned cores (taskset -c 0,1)"
_NOISY_RATIO = 4.0
"""Ends of an interval this far apart, high over low, leave a factor of two open on either side of the estimate: as much
as engines and precisions differ by, so that it says nothing of which one is faster."""

_RESAMPLES = 2_000
_CONFIDENCE = 0.95
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 %, by degrees of freedom from 1 on."""
NORMAL = 1.959964
"""97.5 % quantile of the normal distribution."""
MOST_LAUNCHES = len(_STUDENT) + 1
_DRAWN_AT_ONCE = 500_000


class Interval(BaseModel, frozen=True):
    """Record an estimate with its 95 % interval."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        """Convert to another unit."""
        return Interval(median=self.median * factor, low=self.low * factor, high=self.high * factor)

    @property
    def relative_half_width(self) -> float:
        """Compute the farther end's distance from the estimate, as a share of it."""
        return max(self.high - self.median, self.median - self.low) / self.median

    @property
    def too_noisy(self) -> bool:
        """Tell whether the interval is too wide for its estimate to say anything."""
        return not self.high <= _NOISY_RATIO * self.low

    def times(self) -> str:
        """Format a speed-up: ``3.10× [3.02, 3.18]``, or that it is too noisy to tell."""
        return TOO_NOISY if self.too_noisy else f"{self.median:.2f}× [{self.low:.2f}, {self.high:.2f}]"

    def format(self, form: Callable[[float], str]) -> str:
        """Format the estimate and its ends: ``310 [302, 318]``, or that it is too noisy to tell."""
        return TOO_NOISY if self.too_noisy else f"{form(self.median)} {self.between(form)}"

    def between(self, form: Callable[[float], str]) -> str:
        """Format the ends: ``[302, 318]``, or that the interval is too noisy to tell."""
        return TOO_NOISY if self.too_noisy else f"[{form(self.low)}, {form(self.high)}]"


def divide(above: Interval, below: Interval) -> Interval:
    """Divide two independent positive estimates.

    The distance from the quotient to each of its ends is the root of the sum of squares of the two distances that lead
    there, on the log scale (Zou & Donner, "Construction of confidence limits about effect measures: a general
    approach", Statistics in Medicine 27, 2008). Noise that both have in common makes the true interval narrower.
    """
    center = math.log(above.median / below.median)
    down = math.hypot(math.log(above.median / above.low), math.log(below.high / below.median))
    up = math.hypot(math.log(above.high / above.median), math.log(below.median / below.low))
    return Interval(median=math.exp(center), low=math.exp(center - down), high=math.exp(center + up))


def percentile(samples: Samples, rank: float) -> tuple[float | None, str]:
    """Compute a percentile (numpy's linear), or None and the reason when there are too few samples."""
    floor = SAMPLE_FLOORS.get(rank, 1)
    if samples.size < floor:
        return None, f"p{rank:g} takes {floor} samples, and there are {samples.size}"
    return float(np.percentile(samples, rank)), ""


@dataclass(frozen=True)
class Timed:
    """Record the calls of one block: seconds, and the waiting around each as a share of the time; shapes (calls,)."""

    seconds: Samples
    waited: Samples | None = None
    """None where the kernel does not tell."""

    @property
    def undisturbed(self) -> Samples:
        """Select the seconds of undisturbed calls; none where they are too few to count."""
        if self.waited is None:
            return self.seconds
        quiet = self.seconds[self.waited <= UNDISTURBED]
        return quiet if quiet.size >= _LEAST_UNDISTURBED * self.seconds.size else quiet[:0]


Launches = Sequence[Sequence[Timed]]
"""Blocks by round, by launch."""


def comparable(*sides: Launches) -> tuple[list[list[Samples]], ...]:
    """Select calls to judge by, by launch and round: undisturbed ones of rounds in which every side has some.

    Launches without such rounds are left out. Where what is left is less than an interval takes, all calls of all
    rounds.
    """
    whole = [list(zip(*launch, strict=True)) for launch in zip(*sides, strict=True)]
    every = [[tuple(block.seconds for block in blocks) for blocks in launch] for launch in whole]
    judged = _select_quiet(*sides) or every
    return tuple([[blocks[side] for blocks in launch] for launch in judged] for side in range(len(sides)))


def _select_quiet(*sides: Launches) -> list[list[tuple[Samples, ...]]]:
    """Select undisturbed calls of rounds in which every side has some; none where an interval takes more."""
    whole = [list(zip(*launch, strict=True)) for launch in zip(*sides, strict=True)]
    calm = [[tuple(block.undisturbed for block in blocks) for blocks in launch] for launch in whole]
    undisturbed = [[blocks for blocks in launch if all(block.size for block in blocks)] for launch in calm]
    quiet = [launch for launch in undisturbed if launch]
    enough = len(quiet) >= min(len(whole), LEAST_LAUNCHES) and sum(map(len, quiet)) >= LEAST_ROUNDS
    return quiet if enough else []


def is_disturbed(*sides: Launches) -> bool:
    """Tell whether sides can only be compared by disturbed calls, of which one side has little else."""
    waited = [[block.waited for launch in side for block in launch if block.waited is not None] for side in sides]
    shares = [float(np.mean(np.concatenate(each) > UNDISTURBED)) for each in waited if each]
    return max(shares, default=0.0) > MOSTLY_DISTURBED and not _select_quiet(*sides)


def median_interval(blocks: Launches, seed: int) -> Interval:
    """Compute the median over rounds of the blocks' medians, in seconds, with its interval."""
    (judged,) = comparable(blocks)
    return _interval([np.array([np.median(block) for block in launch]) for launch in judged], seed)


def paired_ratio(baseline: Launches, candidate: Launches, seed: int) -> Interval:
    """Compute the speed-up: the median over rounds of median(baseline's block) / median(candidate's block)."""
    launches = zip(*comparable(baseline, candidate), strict=True)
    ratios = [
        np.array([np.median(ours) / np.median(theirs) for ours, theirs in zip(*sides, strict=True)])
        for sides in launches
    ]
    return _interval(ratios, seed)


def paired_medians(*sides: Launches) -> list[float]:
    """Compute each side's median over rounds of the blocks' medians, in seconds, of the calls that a ratio is of."""
    judged = comparable(*sides)
    return [float(np.median([np.median(block) for launch in side for block in launch])) for side in judged]


def rate_interval(rates: Sequence[Sequence[float]], seed: int) -> Interval:
    """Compute the median over rounds of a rate, given by launch, with its interval."""
    return _interval([np.array(launch) for launch in rates], seed)


def drop_interval(drops: Samples, largest: float) -> tuple[float, float]:
    """Estimate the 95 % interval of the mean of what single samples lost, from samples that were judged on two sides.

    Two more samples are added, which lost and won the ``largest`` difference: few samples do not show the rare ones
    that change much. Where samples are right or wrong, the largest is 1, and it is the adjusted Wald interval of Bonett
    and Price (J. Educ. Behav. Stat. 37, 2012) for matched pairs.
    """
    more = np.append(drops, [largest, -largest])
    half = NORMAL * float(more.std()) / math.sqrt(more.size)
    return float(more.mean()) - half, float(more.mean()) + half


def count_for_width(half: float, changed: float) -> int:
    """Count the samples of which :func:`drop_interval` is at most so wide to each side, where they are right or wrong.

    ``changed`` is the share that one side alone answers right.
    """
    square, share = NORMAL**2, 2 * half**2
    return math.ceil((square * changed + math.sqrt((square * changed) ** 2 + 4 * share * square)) / share) - 2


def _interval(launches: Sequence[Samples], seed: int) -> Interval:
    """Estimate the median of positive values by launch, with its interval."""
    values = np.concatenate(launches)
    median = float(np.median(values))
    if len(launches) < LEAST_LAUNCHES:
        low, high = _bootstrap_median(values, seed)
        return Interval(median=median, low=low, high=high)
    centers = np.log([np.median(launch) for launch in launches])
    half = student(len(launches) - 1) * centers.std(ddof=1) / len(launches) ** 0.5
    low, high = np.exp(centers.mean() - half), np.exp(centers.mean() + half)
    return Interval(median=median, low=min(float(low), median), high=max(float(high), median))


def student(degrees: int) -> float:
    """Compute Student's t at 97.5 %; beyond the table by its expansion, to 0.001 (Abramowitz, Stegun 26.7.5)."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    first, second = (NORMAL**3 + NORMAL) / 4, (5 * NORMAL**5 + 16 * NORMAL**3 + 3 * NORMAL) / 96
    return NORMAL + first / degrees + second / degrees**2


def _bootstrap_median(values: Samples, seed: int) -> tuple[float, float]:
    """Estimate the interval of the median from ``_RESAMPLES`` sets drawn with replacement.

    Some are drawn at a time, to save memory.
    """
    rng = np.random.default_rng(seed)
    at_once = max(1, min(_RESAMPLES, _DRAWN_AT_ONCE // values.size))
    parts = []
    for start in range(0, _RESAMPLES, at_once):
        count = min(at_once, _RESAMPLES - start)
        parts.append(np.median(values[rng.integers(0, values.size, size=(count, values.size))], axis=1))
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(np.concatenate(parts), (tail, 100 - tail))
    return float(low), float(high)
