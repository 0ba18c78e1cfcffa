"""Latency of several candidates side by side: what is measured, what is derived from it, and what could not be had.

The clock is in ``clock.py``, the interleaving in ``race.py``, the formulas in ``statistics.py``.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.measure.race import Candidate, Contender, LatencySettings, Progress, race
from enginesmith.pipeline.measure.statistics import LEAST_ROUNDS, Interval, median_interval, paired_ratio, percentile
from enginesmith.pipeline.tensors import Feeds

__all__ = ["Candidate", "LatencyResult", "LatencyRow", "LatencySettings", "measure_latency"]

_PERCENTILES = {"p50_ms": 50.0, "p90_ms": 90.0, "p95_ms": 95.0, "p99_ms": 99.0}
_ON_CPU = "on the CPU nothing is transferred, and the host's clock is the only one"


class LatencyRow(BaseModel):
    """One candidate at one batch size. What is None has its reason under its name in ``reasons``."""

    model_config = ConfigDict(frozen=True)

    batch: int
    n: int | None = None
    rounds: int | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    mean_ms: float | None = None
    throughput_per_s: float | None = None
    """Samples a second through one stream: batch / mean latency, not measured on its own."""
    median_ms: Interval | None = None
    """The median over rounds of the blocks' medians, which the stopping rule looks at."""
    speedup: Interval | None = None
    """Against the first candidate, paired by round."""
    device_p50_ms: float | None = None
    """By CUDA events on the session's stream."""
    h2d_ms: float | None = None
    d2h_ms: float | None = None
    load_ms: float | None = None
    first_call_ms: float | None = None
    first_call_note: str = ""
    """What the first call did besides: compiling kernels, or taking over those of an earlier run."""
    warmup_calls: int | None = None
    warmup_ended: str | None = None
    settle_ms: float | None = None
    """Median time that the session's threads took to fall asleep after a block."""
    idle_cpu_share: float | None = None
    """Cores that its process kept busy while others were measured; near 0 if it left them undisturbed."""
    preemptions_per_s: float | None = None
    """How often the kernel took a core from it while it was timed: near 0 on a machine that is not shared."""
    stopped_because: str | None = None
    failure: str | None = None
    reasons: dict[str, str] = {}


@dataclass(frozen=True)
class LatencyResult:
    """Rows by candidate, in the order of the batch sizes, and every sample behind them.

    ``samples`` is made for ``numpy.savez_compressed``: ``<id>/<batch>/seconds`` has shape (n,), in order of time, and
    ``<id>/<batch>/calls`` has shape (rounds,), how many of them belong to each round.
    """

    rows: dict[str, tuple[LatencyRow, ...]]
    samples: dict[str, NDArray[Any]]


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
    rows: dict[str, tuple[LatencyRow, ...]] = {candidate.id: () for candidate in candidates}
    samples: dict[str, NDArray[Any]] = {}
    contenders = [Contender(candidate, log_folder / f"latency-{candidate.id}.log") for candidate in candidates]
    with contextlib.ExitStack() as stack:
        for contender in contenders:
            stack.callback(contender.close)
        for batch, arrays in sorted(feeds.items()):
            for contender in contenders:
                progress(f"batch {batch}: warming up {contender.candidate.id}")
                contender.start(arrays, settings)
            stopped = race(contenders, settings, progress)
            for contender in contenders:
                rows[contender.candidate.id] += (_row(contender, contenders[0], batch, stopped, settings.seed),)
                samples |= _samples(contender, batch)
    return LatencyResult(rows, samples)


def _row(contender: Contender, baseline: Contender, batch: int, stopped: str, seed: int) -> LatencyRow:
    if contender.failure:
        loaded = _milliseconds(contender.load_seconds)
        return _explained(LatencyRow(batch=batch, load_ms=loaded, failure=contender.failure), contender.failure, {})
    seconds = np.concatenate(contender.host_blocks)
    found = {name: percentile(seconds, rank) for name, rank in _PERCENTILES.items()}
    reasons = {name: reason for name, (_, reason) in found.items() if reason}
    enough = len(contender.blocks) >= LEAST_ROUNDS
    if not enough:
        few = f"an interval takes {LEAST_ROUNDS} rounds, and there are {len(contender.blocks)}; give it more time"
        reasons |= {"median_ms": few, "speedup": few}
    row = LatencyRow(
        batch=batch,
        n=seconds.size,
        rounds=len(contender.blocks),
        mean_ms=float(seconds.mean()) * 1e3,
        throughput_per_s=batch / float(seconds.mean()),
        median_ms=median_interval([block * 1e3 for block in contender.host_blocks], seed) if enough else None,
        stopped_because=stopped,
        **{name: _milliseconds(value) for name, (value, _) in found.items()},
        **_preparation(contender),
        **_conduct(contender),
        **(_against(baseline, contender, seed) if enough else {}),
    )
    if baseline.failure:
        reasons["speedup"] = f"the baseline {baseline.candidate.id} failed"
    return _explained(row, _ON_CPU, reasons)


def _preparation(contender: Contender) -> dict[str, Any]:
    """Load, first call, warm-up and transfers."""
    ready = contender.ready
    assert ready is not None
    return {
        "load_ms": _milliseconds(contender.load_seconds),
        "first_call_ms": _milliseconds(ready.first_call_seconds),
        "first_call_note": ready.first_call_note,
        "warmup_calls": ready.warmup_calls,
        "warmup_ended": ready.warmup_ended,
        "h2d_ms": _milliseconds(ready.h2d_seconds),
        "d2h_ms": _milliseconds(ready.d2h_seconds),
    }


def _conduct(contender: Contender) -> dict[str, Any]:
    """How quiet the process was between its blocks, and what the device's clock says."""
    blocks = contender.blocks
    idle = sum(block.idle_seconds for block in blocks)
    timed = sum(float(block.host_seconds.sum()) for block in blocks)
    events = [block.device_seconds for block in blocks if block.device_seconds is not None]
    return {
        "settle_ms": float(np.median([block.settle_seconds for block in blocks])) * 1e3,
        "idle_cpu_share": sum(block.idle_cpu_seconds for block in blocks) / idle,
        "preemptions_per_s": sum(block.preemptions for block in blocks) / timed,
        "device_p50_ms": float(np.median(np.concatenate(events))) * 1e3 if events else None,
    }


def _against(baseline: Contender, contender: Contender, seed: int) -> dict[str, Any]:
    if baseline.failure:
        return {}
    return {"speedup": paired_ratio(baseline.host_blocks, contender.host_blocks, seed)}


def _explained(row: LatencyRow, otherwise: str, reasons: dict[str, str]) -> LatencyRow:
    """The row with a reason beside everything that is None."""
    empty = [name for name, value in row if value is None and name != "failure"]
    return row.model_copy(update={"reasons": {name: reasons.get(name, otherwise) for name in empty}})


def _samples(contender: Contender, batch: int) -> dict[str, NDArray[Any]]:
    if not contender.blocks:
        return {}
    name = f"{contender.candidate.id}/{batch}"
    blocks = contender.host_blocks
    return {f"{name}/seconds": np.concatenate(blocks), f"{name}/calls": np.array([block.size for block in blocks])}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
