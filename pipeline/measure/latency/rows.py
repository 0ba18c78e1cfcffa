"""Derive rows of latency from side-by-side measurements, with a reason for each number that is missing.

The clock is in ``timer.py``, the interleaving in ``benchmark.py``, the formulas in ``statistics.py``.
"""

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import NO_TIME, EnginesmithError
from enginesmith.pipeline.frameworks.records import explain_missing
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings, MeasuredSession
from enginesmith.pipeline.measure.latency.groups import Group, GroupedRun
from enginesmith.pipeline.measure.memory.limits import largest_fit, try_batch
from enginesmith.pipeline.measure.rows import LatencyRow, Throughput
from enginesmith.pipeline.measure.statistics import (
    LEAST_LAUNCHES,
    LEAST_ROUNDS,
    UNDISTURBED,
    Interval,
    Timed,
    comparable,
    is_disturbed,
    median_interval,
    paired_ratio,
    percentile,
    rate_interval,
)
from enginesmith.pipeline.system.nvidia import GpuState
from enginesmith.pipeline.system.worker import Progress
from enginesmith.pipeline.tensors import Feeds

_PERCENTILES = {"p50_ms": 50.0, "p90_ms": 90.0, "p95_ms": 95.0, "p99_ms": 99.0, "p99_9_ms": 99.9}
_ON_CPU = "on the CPU nothing is transferred, and the host's clock is the only one"
_KNEE = 0.95
"""Share of the best throughput from which more callers are not worth their latency."""
_SHARE_TO_START, _LEAST_TO_START_SECONDS = 0.5, 10.0
"""Share of a limited time that one session has to start in, as it may hang, and time for which no share is taken."""


@dataclass(frozen=True)
class LatencyResult:
    """List rows by candidate, in the order of the batch sizes, and every sample behind them.

    ``samples`` is made for ``numpy.savez_compressed``: ``<id>/<batch>/seconds`` has shape (n,), in order of time;
    ``<id>/<batch>/waited``, if the kernel tells, too: the waiting around each call as a share of the time; and
    ``<id>/<batch>/calls`` has shape (rounds,), how many of them belong to each round; ``<id>/<batch>/rounds`` has shape
    (launches,), how many rounds each launch had.
    """

    rows: dict[str, tuple[LatencyRow, ...]]
    samples: dict[str, NDArray[Any]]


FeedsAt = Callable[[int], Feeds]
"""Make feeds of any batch size."""


def measure_latency(
    candidates: Sequence[Candidate],
    feeds: Mapping[int, Feeds],
    settings: LatencySettings,
    log_folder: Path,
    progress: Progress,
) -> LatencyResult:
    """Measure candidates at each batch size of ``feeds``; the first is the baseline.

    A candidate that fails gets a row that says why, and the others go on.
    """
    with LatencyBenchmark(candidates, settings, log_folder, progress) as benchmark:
        for batch, arrays in sorted(feeds.items()):
            benchmark.measure(batch, arrays)
        return benchmark.result()


class LatencyBenchmark:
    """Measure candidates batch by batch, keeping their sessions open between batch sizes."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        settings: LatencySettings,
        log_folder: Path,
        progress: Progress,
        dense: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``dense``: by candidate, the other one that differs from it only in being dense."""
        self._settings, self._progress, self._dense, self._logs = settings, progress, dense, log_folder
        self._rows: dict[str, dict[int, LatencyRow]] = {candidate.id: {} for candidate in candidates}
        self._samples: dict[str, NDArray[Any]] = {}
        self._sizes: dict[str, int] = {}
        self._sessions = [MeasuredSession(case, log_folder / f"latency-{case.id}.log") for case in candidates]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for session in self._sessions:
            session.close()

    @property
    def gpu_looks(self) -> list[tuple[GpuState, ...]]:
        """States of the GPUs while they worked, of all sessions."""
        return [look for session in self._sessions for look in session.gpu_looks]

    def rows(self, name: str) -> tuple[LatencyRow, ...]:
        """Return a candidate's rows in the order of the batch sizes."""
        return tuple(row for _, row in sorted(self._rows[name].items()))

    def end_in(self, seconds: float, grace_seconds: float = 0.0) -> None:
        """End the next measurement after so long; a session, which may hang, has a part of it to start.

        After that, sessions may start and be measured for a moment in the ``grace_seconds``.
        """
        share = max(_SHARE_TO_START * seconds, min(seconds + grace_seconds, _LEAST_TO_START_SECONDS))
        start = min(self._settings.start_limit_seconds, share)
        ends = {"ends_at": time.monotonic() + seconds, "grace_seconds": grace_seconds}
        update = {**ends, "start_limit_seconds": start}
        self._settings = self._settings.model_copy(update=update)

    @property
    def late(self) -> bool:
        """True once the time is over: nothing more can be measured."""
        return time.monotonic() > self._settings.ends_at

    def measure(self, batch: int, feeds: Feeds, only: Collection[str] = (), *, fresh: bool = False) -> None:
        """Measure all candidates at a batch size, or ``only`` some, with the baseline where that has memory for it.

        ``fresh`` closes their sessions first, so that nothing is left of other batch sizes.
        """
        baseline = self._sessions[0]
        running = [session for session in self._sessions if not only or session.candidate.id in only]
        known = self.rows(baseline.candidate.id)
        if baseline not in running and not any(row.oom and row.batch <= batch for row in known):
            running.insert(0, baseline)
        for session in self._sessions:
            if (fresh and session in running) or (session not in running and baseline.candidate.device.kind == "cuda"):
                session.close()
        others = [session for session in running if session is not baseline]
        together = GroupedRun(
            baseline if baseline in running else None, batch, self._settings, self._progress, self._sizes, self._dense
        )
        measured: dict[str, tuple[LatencyRow, int]] = {}
        for group in together.run(others, feeds):
            names = {session.candidate.id: session for session in group.sessions}
            for name, session in names.items():
                if name not in measured:
                    sibling = self._dense.get(name, "")
                    has_dense = any(other.candidate.id == sibling and not other.failure for other in running)
                    pair = names.get(baseline.candidate.id), names.get(sibling)
                    row = _row(session, *pair, batch, group, self._settings.seed, has_dense=has_dense)
                    measured[name] = row, group.number
                    self._samples |= _collect_samples(session, batch)
        several = len({number for row, number in measured.values() if not row.failure}) > 1
        for name, (row, number) in measured.items():
            self._rows[name][batch] = row.model_copy(update={"group": number}) if several else row

    def sweep(self, feeds_at: FeedsAt, start: int, most: int | None) -> None:
        """Double the batch size from ``start`` up to ``most`` (None: not at all), then look for the largest that fit.

        A candidate that failed for another reason than memory is left alone.
        """
        names = [session.candidate.id for session in self._sessions]
        batch = start
        while most is not None and batch < most:
            able = [name for name in names if batch in self._list_measured(name)]
            if not able:
                break
            batch = min(2 * batch, most)
            self.measure(batch, feeds_at(batch), able)
        for session in self._sessions:
            self._find_largest(session.candidate, feeds_at)

    def _list_measured(self, name: str) -> list[int]:
        return [row.batch for row in self.rows(name) if not row.failure]

    def _find_largest(self, candidate: Candidate, feeds_at: FeedsAt) -> None:
        """Search between the largest batch size that was measured and the smallest that ran out of memory.

        Sizes are tried in fresh processes that only load and call once; the largest that fits is then measured like any
        other. One that fits by itself may yet fail while it is measured; the search goes on below it then.
        """

        def fits(batch: int) -> bool:
            self._progress(f"batch {batch}: does it fit {candidate.id}?")
            try:
                return try_batch(candidate, feeds_at(batch), self._logs, self._settings.memory_limit_bytes) is None
            except EnginesmithError:  # whatever else is wrong at this size, it cannot be used
                return False

        if candidate.device.kind == "cuda":  # whose memory is not this candidate's alone while others are open
            for session in self._sessions:
                session.close()
        while over := min((row.batch for row in self.rows(candidate.id) if row.oom), default=0):
            measured = max((batch for batch in self._list_measured(candidate.id) if batch < over), default=0)
            largest = largest_fit(fits, measured, over)
            if largest == measured:
                return
            self.measure(largest, feeds_at(largest), [candidate.id], fresh=True)
            if largest in self._list_measured(candidate.id):
                return

    def result(self) -> LatencyResult:
        return LatencyResult({name: self.rows(name) for name in self._rows}, self._samples)


def _row(
    session: MeasuredSession,
    baseline: MeasuredSession | None,
    dense: MeasuredSession | None,
    batch: int,
    group: Group,
    seed: int,
    *,
    has_dense: bool,
) -> LatencyRow:
    """Make a session's row; ``has_dense``: a dense variant of it has been measured, perhaps in another group."""
    if session.failure:
        loaded = _milliseconds(session.load_seconds)
        late = session.failure == NO_TIME
        failed = LatencyRow(batch=batch, load_ms=loaded, failure=session.failure, late=late, oom=session.oom)
        return explain_missing(failed, session.failure)
    ready = session.ready
    assert ready is not None
    seconds = np.concatenate([block.host_seconds for block in session.blocks])
    percentiles = {name: percentile(seconds, rank) for name, rank in _PERCENTILES.items()}
    reasons = {name: reason for name, (_, reason) in percentiles.items() if reason}
    enough = len(session.blocks) >= LEAST_ROUNDS or len(session.launches) >= LEAST_LAUNCHES
    if not enough:
        few = f"an interval takes {LEAST_ROUNDS} rounds, and there are {len(session.blocks)}; give it more time"
        reasons |= dict.fromkeys(("median_ms", "speedup", "speedup_rounds", "speedup_over_dense"), few)
    speedup = _compute_speedup(baseline, session, seed) if enough else None
    row = LatencyRow(
        batch=batch,
        n=seconds.size,
        rounds=len(session.blocks),
        launches=len(session.launches),
        mean_ms=float(seconds.mean()) * 1e3,
        median_ms=median_interval(session.timed, seed).scaled(1e3) if enough else None,
        stopped_because=group.stop.sentence,
        stop=group.stop,
        **{name: _milliseconds(value) for name, (value, _) in percentiles.items()},
        load_ms=_milliseconds(session.load_seconds),
        first_call_ms=_milliseconds(ready.first_call_seconds),
        first_call_note=ready.first_call_note,
        sibling_note=ready.sibling_note,
        warmup_calls=ready.warmup_calls,
        warmup_ended=ready.warmup_ended,
        h2d_ms=_milliseconds(ready.h2d_seconds),
        d2h_ms=_milliseconds(ready.d2h_seconds),
        **_isolation(session),
        **_throughput(session, batch, seed),
        speedup=speedup,
        speedup_disturbed=baseline is not None
        and baseline is not session
        and speedup is not None
        and is_disturbed(baseline.timed, session.timed),
        speedup_rounds=sum(map(len, comparable(baseline.timed, session.timed)[0])) if baseline and speedup else None,
        speedup_over_dense=_compute_speedup(dense, session, seed) if enough else None,
    )
    if baseline is None or baseline.failure:
        why = f"the baseline {baseline.candidate.id} failed" if baseline else "the baseline had no memory for it"
        why = "it does not fit on the GPU together with the baseline" if group.alone else why
        reasons |= dict.fromkeys(("speedup", "speedup_rounds"), why)
    if dense is None or dense.failure:
        apart = "it does not fit on the GPU together with its dense variant"
        none = "there is no dense variant that was measured beside it"
        reasons["speedup_over_dense"] = apart if dense is None and has_dense else none
    reasons["group"] = "all variants were measured together"
    reasons["knee"] = "not asked for: --concurrency 1,2,4"
    reasons["disturbed_share"] = "the kernel keeps no account of waiting (/proc/self/schedstat)"
    return explain_missing(row, _ON_CPU, reasons)


def _throughput(session: MeasuredSession, batch: int, seed: int) -> dict[str, Any]:
    """Compute answered samples a second by the clock: of each number of callers, and the best."""
    levels = []
    for callers in sorted({callers for launch in session.launches for callers in launch.concurrent_calls}):
        launches = [launch.concurrent_calls.get(callers, []) for launch in session.launches]
        seconds = np.concatenate([calls.host_seconds for rounds in launches for calls in rounds])
        rates = [[calls.calls_per_second for calls in rounds] for rounds in launches]
        level = Throughput(
            callers=callers,
            samples_per_s=rate_interval(rates, seed).scaled(batch),
            p50_ms=float(np.median(seconds)) * 1e3,
            p99_ms=_milliseconds(percentile(seconds, 99.0)[0]),
            n=seconds.size,
        )
        levels.append(level)
    if not levels:
        calls = sum(block.host_seconds.size for block in session.blocks)
        return {"throughput_per_s": batch * calls / sum(block.wall_seconds for block in session.blocks)}
    best = max(level.samples_per_s.median for level in levels)
    knee = next(level.callers for level in levels if level.samples_per_s.median >= _KNEE * best)
    return {"throughput_per_s": best, "concurrency": tuple(levels), "knee": knee}


def _isolation(session: MeasuredSession) -> dict[str, Any]:
    """Compute how quiet the process was during and between its blocks, and the device's own time."""
    blocks = session.blocks
    waited = [block.waited for block in blocks if block.waited is not None]
    disturbed = float(np.mean(np.concatenate(waited) > UNDISTURBED)) if len(waited) == len(blocks) else None
    idle = sum(block.idle_seconds for block in blocks)
    timed = sum(float(block.host_seconds.sum()) for block in blocks)
    events = [block.device_seconds for block in blocks if block.device_seconds is not None]
    return {
        "settle_ms": float(np.median([block.settle_seconds for block in blocks])) * 1e3,
        "idle_cpu_share": sum(block.idle_cpu_seconds for block in blocks) / idle,
        "preemptions_per_s": sum(block.preemptions for block in blocks) / timed,
        "disturbed_share": disturbed,
        "device_p50_ms": float(np.median(np.concatenate(events))) * 1e3 if events else None,
    }


def _compute_speedup(other: MeasuredSession | None, session: MeasuredSession, seed: int) -> Interval | None:
    return None if other is None or other.failure else paired_ratio(other.timed, session.timed, seed)


def _collect_samples(session: MeasuredSession, batch: int) -> dict[str, NDArray[Any]]:
    if not session.blocks:
        return {}
    name, blocks = f"{session.candidate.id}/{batch}", session.blocks
    waited = [block.waited for block in blocks if block.waited is not None]
    return {
        f"{name}/seconds": np.concatenate([block.host_seconds for block in blocks]),
        f"{name}/calls": np.array([block.host_seconds.size for block in blocks]),
        f"{name}/rounds": np.array([len(launch.blocks) for launch in session.launches]),
    } | ({f"{name}/waited": np.concatenate(waited)} if len(waited) == len(blocks) else {})


def launches_of(samples: Mapping[str, NDArray[Any]], name: str, batch: int) -> list[list[Timed]]:
    """Rebuild a candidate's blocks by launch and round from the samples of a :class:`LatencyResult`."""
    key = f"{name}/{batch}"
    ends = np.cumsum(samples[f"{key}/calls"])[:-1]
    seconds = np.split(samples[f"{key}/seconds"], ends)
    waited = np.split(samples[f"{key}/waited"], ends) if f"{key}/waited" in samples else [None] * len(seconds)
    blocks = [Timed(*block) for block in zip(seconds, waited, strict=True)]
    starts = np.cumsum([0, *samples[f"{key}/rounds"]])
    return [blocks[start:end] for start, end in itertools.pairwise(starts)]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
