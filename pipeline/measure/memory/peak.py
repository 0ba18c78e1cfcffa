"""Measure the peak memory of one session alone in a fresh process; on CUDA as ``memory/cuda.py`` does.

On the CPU it is resident growth over the loaded-libraries baseline:

1. ``Engine.prime`` brings in the libraries, the source's code and the thread pools.
2. The baseline is what is resident then, and the feeds with it: inputs are the caller's.
3. The session is loaded, makes its first call, then some more, with the high-water mark reset before each phase.

Growth counts what the process wrote and the data files that it maps, so that an engine that maps its weights and one
that reads them compare. It leaves out pages of libraries, which are shared and needed once for any number of sessions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline.errors import EnginesmithError, MissingCapability
from enginesmith.pipeline.frameworks.samples import check_feeds
from enginesmith.pipeline.measure.latency.candidate import Candidate
from enginesmith.pipeline.measure.memory import cuda
from enginesmith.pipeline.measure.memory.cuda import CudaPhases, measure_on_cuda
from enginesmith.pipeline.measure.memory.out_of_memory import explain_out_of_memory, run_limited, set_memory_limit
from enginesmith.pipeline.measure.memory.rss import Phase, Resident, fill_heap_holes, phase, read_trimmed
from enginesmith.pipeline.measure.rows import Lens, MemoryRow, OutOfMemory
from enginesmith.pipeline.tensors import Feeds

Progress = Callable[[str], None]

_STEADY_CALLS = 3
"""The second call may need more than the first: ONNX Runtime plans its arena after the first."""
_RESIDENT = "/proc/self/smaps and the resident high-water mark"


def measure_memory(
    candidate: Candidate,
    batch: int,
    feeds: Feeds,
    log_folder: Path,
    progress: Progress,
    time_limit_seconds: float = 900.0,
    memory_limit_bytes: int | None = None,
) -> MemoryRow:
    """Measure a candidate in a fresh process; one that fails gets a row that says why.

    ``memory_limit_bytes`` is what loading and running may add to the loaded libraries.
    """
    device = str(candidate.device)
    progress(f"memory of {candidate.id} at batch {batch}")
    log = log_folder / f"memory-{candidate.id}.log"
    try:
        found: _Phases | CudaPhases | OutOfMemory = run_limited(
            _measure,
            candidate,
            feeds,
            memory_limit_bytes,
            device=candidate.device,
            log=log,
            limit_bytes=memory_limit_bytes,
            timeout_seconds=time_limit_seconds,
        )
    except MissingCapability as error:
        return _unknown(MemoryRow(device=device, batch=batch), str(error))
    except EnginesmithError as error:
        return _unknown(MemoryRow(device=device, batch=batch, failure=str(error)), str(error))
    if isinstance(found, OutOfMemory):
        return _unknown(MemoryRow(device=device, batch=batch, failure=found.message, oom=found), found.message)
    return _cuda_row(found, device, batch) if isinstance(found, CudaPhases) else found.row(device, batch)


def _cuda_row(found: CudaPhases, device: str, batch: int) -> MemoryRow:
    """Take the allocator's figures where it counts the engine, else the device's."""
    lenses = {name: Lens(**figure._asdict()) for name, figure in cuda.figures(found).items()}
    reasons = cuda.reasons(found)
    common: dict[str, Any] = {"device": device, "batch": batch, "host_peak_bytes": found.host_peak, "lenses": lenses}
    parts = cuda.split(found)
    if parts is None:
        unknown = dict.fromkeys(("weights_bytes", "activation_bytes"), reasons["allocator"])
        return MemoryRow(**common, peak_bytes=lenses["device_peak"].bytes, reasons=reasons | unknown)
    return MemoryRow(
        **common,
        peak_bytes=parts.peak,
        weights_bytes=parts.weights,
        activation_bytes=parts.activations,
        reasons=reasons,
    )


def _unknown(row: MemoryRow, reason: str) -> MemoryRow:
    names = [name for name, value in row if value is None and name not in ("failure", "oom")]
    return row.model_copy(update={"reasons": dict.fromkeys(names, reason)})


def _measure(
    candidate: Candidate, feeds: Feeds, memory_limit_bytes: int | None, progress: Progress
) -> "_Phases | CudaPhases":
    """Prime, load and run in the fresh process."""
    engine, artifact, device = candidate.engine, candidate.artifact, candidate.device
    if device.kind == "cuda":
        with explain_out_of_memory(device):
            return measure_on_cuda(
                engine, artifact, device, feeds, lambda: set_memory_limit(memory_limit_bytes, device)
            )
    engine.prime(artifact, device)
    set_memory_limit(memory_limit_bytes, device)
    with explain_out_of_memory(device):
        return _measure_resident(candidate, feeds)


def _measure_resident(candidate: Candidate, feeds: Feeds) -> "_Phases":
    fill_heap_holes()
    base = read_trimmed()
    with phase() as load:
        session = candidate.engine.load(candidate.artifact, candidate.device)
    with session:
        check_feeds(session.signature, feeds)
        bound = session.bind(feeds)
        held = read_trimmed()
        with phase() as first:
            session.enqueue(bound)
            session.synchronize()
        with phase() as steady:
            for _ in range(_STEADY_CALLS):
                session.enqueue(bound)
                session.synchronize()
    return _Phases(base, load, held, first, steady)


@dataclass(frozen=True)
class _Phases:
    """What was seen, in order of time."""

    base: Resident
    load: Phase
    held: Resident
    first: Phase
    steady: Phase

    def row(self, device: str, batch: int) -> MemoryRow:
        running = self._growth(max(self.first.peak, self.steady.peak))
        mapped = self.steady.end.mapped_data - self.base.mapped_data
        weights = self.held.written - self.base.written + mapped
        return MemoryRow(
            device=device,
            batch=batch,
            peak_bytes=max(self._growth(self.load.peak), running),
            weights_bytes=weights,
            activation_bytes=max(0, running - weights),
            host_peak_bytes=max(part.process_peak for part in (self.load, self.first, self.steady)),
            lenses=self._lenses(mapped),
        )

    def _growth(self, counted: int) -> int:
        return counted - self.base.counted

    def _lenses(self, mapped: int) -> dict[str, Lens]:
        numbers = {
            "load_peak": (self._growth(self.load.peak), "the most while the session was loaded"),
            "first_call_peak": (self._growth(self.first.peak), "the most during the first call"),
            "steady_peak": (self._growth(self.steady.peak), f"the most during {_STEADY_CALLS} more calls"),
            "mapped_files": (
                mapped,
                "weights mapped from a file, which the kernel can drop and read again; in the peak",
            ),
            "libraries": (self.steady.end.libraries, "pages of libraries at the end; not in the peak"),
            "baseline": (self.base.counted, "resident before loading, without libraries; not in the peak"),
        }
        return {name: Lens(bytes=value, source=_RESIDENT, note=note) for name, (value, note) in numbers.items()}
