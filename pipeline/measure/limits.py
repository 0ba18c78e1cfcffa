"""What a device can do at best: how fast it moves bytes, multiplies matrices and starts operators.

Each figure is the best of short repetitions that are spread over some seconds, as machines are shared and other work
can only make a repetition slower. The median stands beside it: far apart, they say that the device was busy, and that
even the best may be too low. What cannot be had is missing, with the reason.

On the CPU every core repeats a piece of its own, and what counts is the most that all did at one moment. Cores that
work on one piece wait for the last of them, which on a shared machine finds them together too seldom to tell anything.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.measure.rows import DeviceLimits, Rate

COPY, READ, CACHE, OPERATOR, CALL = "copy", "read", "cache", "operator", "call"
"""Names of the figures that are no products; those are called after what they are computed in."""
_BUDGET_SECONDS = 3.5
_FEWEST_ROUNDS = 3
_BURST_SECONDS = 0.025
_MOMENT_SECONDS = 1e-6
_WIDE = 3.0
"""The best over the median above which a figure is doubtful."""


Timed = Callable[[], float]
"""Does something once and gives the seconds that it took."""


@dataclass(frozen=True)
class Probe:
    """Something that can be repeated: ``make`` gets each thread a piece of its own."""

    make: Callable[[], Timed]
    amount: float
    """What one repetition is worth of the figure."""
    how: str
    threads: int = 1
    over_seconds: float = _MOMENT_SECONDS
    """What several threads do counts on the average of that time: where they share a limit, touching is not enough."""


@dataclass(frozen=True)
class Candidate:
    """One way to measure a figure; the best of several counts."""

    figure: str
    prepare: Callable[[], Probe]
    """Raises RuntimeError, or an error of the kind, where this machine cannot do it; so may what the probe makes."""


@dataclass(frozen=True)
class Bench:
    """What there is to be measured on a device."""

    device: str
    cache_bytes: int | None
    candidates: tuple[Candidate, ...]
    cores: tuple[int, ...] = ()
    """What threads are to stay on, if there is more than one; none for a device without."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why something is not among the candidates."""


@dataclass
class _Taken:
    figure: str
    probe: Probe
    pieces: list[Timed]
    rates: list[float] = field(default_factory=list)


def measure_limits(device: Device, progress: Callable[[str], None] = lambda text: None) -> DeviceLimits:
    """Measure a device that nothing else runs on now; takes about 4 s.

    Raises:
        MissingCapability: the device is not there.
    """
    from enginesmith.pipeline.engines.eager import Eager
    from enginesmith.pipeline.measure import bench

    Eager.require(device)
    start = time.monotonic()
    with bench.opened(device) as found:
        return measured(found, start + _BUDGET_SECONDS, progress)


def measured(bench: Bench, deadline: float, progress: Callable[[str], None]) -> DeviceLimits:
    """Repeat all candidates in turns until the deadline of the monotonic clock, each in three bursts at least."""
    start = time.monotonic()
    reasons = dict(bench.reasons)
    taken = list(_prepared(bench, reasons))
    rounds = 0
    threads = max((one.probe.threads for one in taken), default=1)
    with ThreadPoolExecutor(threads, initializer=_stay_on, initargs=(itertools.cycle(bench.cores),)) as pool:
        while taken and (rounds < _FEWEST_ROUNDS or time.monotonic() < deadline):
            rounds += 1
            progress(f"{bench.device}, round {rounds}")
            for one in taken:
                one.rates += _burst(one, pool)
    rates: dict[str, Rate] = {}
    for one in taken:
        rate = _rate(one)
        if one.figure not in rates or rate.per_second > rates[one.figure].per_second:
            rates[one.figure] = rate
    return _limits(bench, rates, {name: why for name, why in reasons.items() if name not in rates}, start)


def _prepared(bench: Bench, reasons: dict[str, str]) -> Iterator[_Taken]:
    for candidate in bench.candidates:
        try:
            probe = candidate.prepare()
            yield _Taken(candidate.figure, probe, [probe.make() for _ in range(probe.threads)])
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            line = next(iter(str(error).strip().splitlines()), "")
            reasons[candidate.figure] = f"{type(error).__name__}: {line}" if line else type(error).__name__


def _stay_on(cores: Iterator[int]) -> None:
    """Keep this thread on a core of its own: on a busy machine two of them may be put on one."""
    core = next(cores, None)
    if core is not None:
        os.sched_setaffinity(0, {core})


def _burst(one: _Taken, pool: ThreadPoolExecutor) -> list[float]:
    """What was done in a second, as it was at the start of each repetition."""
    probe, end = one.probe, time.perf_counter() + _BURST_SECONDS
    collected = gc.isenabled()
    gc.disable()
    try:
        if len(one.pieces) == 1:  # in this thread, for which CUDA's device is chosen
            return [probe.amount / max(seconds, _MOMENT_SECONDS) for _, seconds in _repeated(one.pieces[0], end)]
        return together(
            list(pool.map(lambda piece: _repeated(piece, end), one.pieces)), probe.amount, probe.over_seconds
        )
    finally:
        if collected:
            gc.enable()


def _repeated(piece: Timed, end: float) -> list[tuple[float, float]]:
    """Start and seconds of each repetition, one at least."""
    taken: list[tuple[float, float]] = []
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        taken.append((start, piece()))
    return taken


def together(
    threads: Sequence[Sequence[tuple[float, float]]], amount: float, seconds: float = _MOMENT_SECONDS
) -> list[float]:
    """What all threads did in a second, on the average of the given time from the start of each repetition on.

    ``threads`` holds the start and seconds of each repetition, worth ``amount`` each.
    """
    repetitions = np.array([one for thread in threads for one in thread])
    starts, taken = repetitions[:, 0], np.maximum(repetitions[:, 1], _MOMENT_SECONDS)
    moments = np.concatenate([starts, starts + taken])
    order = np.argsort(moments, kind="stable")
    moments, changes = moments[order], np.concatenate([amount / taken, -amount / taken])[order]
    done = np.concatenate([[0.0], np.cumsum(np.cumsum(changes)[:-1] * np.diff(moments))])
    found = (np.interp(starts + seconds, moments, done) - np.interp(starts, moments, done)) / seconds
    return [float(rate) for rate in found]


def _rate(one: _Taken) -> Rate:
    return Rate(
        per_second=max(one.rates),
        usual_per_second=median(one.rates),
        repetitions=len(one.rates),
        how=one.probe.how,
    )


def _limits(bench: Bench, rates: dict[str, Rate], reasons: dict[str, str], start: float) -> DeviceLimits:
    others = {COPY: "copy_bandwidth", READ: "read_bandwidth", CACHE: "cache_bandwidth"}
    others |= {OPERATOR: "operators", CALL: "calls"}
    figures = {field: rates.get(figure) for figure, field in others.items()}
    missing = {field: "nothing that tells could be run here" for field, rate in figures.items() if rate is None}
    wide = [f"{name} {rate.spread:.1f} ×" for name, rate in rates.items() if rate.spread > _WIDE]
    busy = f"the device was busy and may be faster than this: the best over the median is {', '.join(wide)}"
    return DeviceLimits(
        device=bench.device,
        cache_bytes=bench.cache_bytes,
        products={name: rate for name, rate in rates.items() if name not in others},
        seconds=time.monotonic() - start,
        warnings=(busy,) if wide else (),
        reasons=missing | {others.get(name, name): why for name, why in reasons.items()},
        **figures,
    )
