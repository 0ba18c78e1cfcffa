"""Measure the peak memory of one session alone in a fresh process.

On the CPU it is resident growth over the loaded-libraries baseline:

1. ``Engine.prime`` brings in the libraries, the source's code and the thread pools.
2. The baseline is what is resident then, and the feeds with it: inputs are the caller's.
3. The session is loaded, makes its first call, then some more, with the high-water mark reset before each phase.

Growth counts what the process wrote and the data files that it maps, so that an engine that maps its weights and one
that reads them compare; also the parts of these files that the calls have not read, such as rows of embeddings. It
leaves out pages of libraries, which are shared and needed once for any number of sessions.

On CUDA it is what the allocator counts (``cuda.py``), and what a deployment takes of the device (``deployment.py``).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability
from enginesmith.pipeline.frameworks.records import explain_missing
from enginesmith.pipeline.frameworks.samples import check_feeds
from enginesmith.pipeline.measure.memory import usage
from enginesmith.pipeline.measure.memory.cuda import STEADY_CALLS, CudaPhases, call, measure_on_cuda
from enginesmith.pipeline.measure.memory.deployment import ON_CPU, measure_deployment
from enginesmith.pipeline.measure.memory.limits import explain_out_of_memory, run_limited, set_memory_limit
from enginesmith.pipeline.measure.memory.usage import Phase, Resident, read_trimmed
from enginesmith.pipeline.measure.rows import Lens, MemoryRow, OutOfMemory
from enginesmith.pipeline.system.worker import Progress
from enginesmith.pipeline.tensors import Feeds

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

    On CUDA a second process runs it as in production, to show what a deployment takes of the device.
    ``memory_limit_bytes`` is what loading and running may add to the loaded libraries.
    """
    progress(f"memory of {candidate.id} at batch {batch}")
    phases: ResidentPhases | CudaPhases | OutOfMemory
    row: dict[str, Any] = {"device": str(candidate.device), "batch": batch}
    try:
        phases = run_limited(
            _measure,
            candidate,
            feeds,
            memory_limit_bytes,
            device=candidate.device,
            log=log_folder / f"memory-{candidate.id}.log",
            limit_bytes=memory_limit_bytes,
            timeout_seconds=time_limit_seconds,
        )
        if isinstance(phases, ResidentPhases):
            unknown = dict.fromkeys(("deployment_bytes", "device_bytes", "deployments_per_device"), ON_CPU)
            return MemoryRow(**row, **phases.summarize(), reasons=unknown)
        if isinstance(phases, CudaPhases):
            figures = phases.summarize()
            taken = measure_deployment(candidate, feeds, log_folder, time_limit_seconds, memory_limit_bytes)
            both = {name: taken.pop(name, {}) | figures.pop(name) for name in ("lenses", "reasons")}
            return MemoryRow(**row, **figures, **taken, **both)
        row, reason = {**row, "failure": phases.message, "oom": phases}, phases.message
    except EnginesmithError as error:
        reason = str(error)
        row |= {} if isinstance(error, MissingCapability) else {"failure": reason}
    return explain_missing(MemoryRow(**row), reason)


def _measure(
    candidate: Candidate, feeds: Feeds, memory_limit_bytes: int | None, progress: Progress
) -> "ResidentPhases | CudaPhases":
    engine, artifact, device = candidate.engine, candidate.artifact, candidate.device
    if device.kind == "cuda":
        with explain_out_of_memory(device):
            return measure_on_cuda(
                engine, artifact, device, feeds, lambda: set_memory_limit(memory_limit_bytes, device)
            )
    engine.prime(artifact, device)
    set_memory_limit(memory_limit_bytes, device)
    with explain_out_of_memory(device):
        usage.fill_heap_holes()
        base = read_trimmed()
        usage.reset_high_water()
        session = engine.load(artifact, device)
        load = usage.read_phase()
        with session:
            check_feeds(session.signature, feeds)
            bound = session.bind(feeds)
            held = read_trimmed()
            usage.reset_high_water()
            call(session, bound, 1)
            first = usage.read_phase()
            usage.reset_high_water()
            call(session, bound, STEADY_CALLS)
            steady = usage.read_phase()
    return ResidentPhases(base, load, held, first, steady)


@dataclass(frozen=True)
class ResidentPhases:
    """Record what was resident on the CPU, in order of time."""

    base: Resident
    load: Phase
    held: Resident
    """Once the session was loaded and its inputs bound."""
    first: Phase
    steady: Phase

    def summarize(self) -> dict[str, Any]:
        """Compute the figures of a :class:`MemoryRow`."""
        base, libraries = self.base.counted, self.steady.end.libraries
        load, first, steady = (phase.peak - base for phase in (self.load, self.first, self.steady))
        unread = max(0, self.steady.end.unread - self.base.unread)
        mapped = self.steady.end.mapped_data - self.base.mapped_data + unread
        weights = self.held.written - self.base.written + mapped
        running = max(first, steady) + unread
        dropped = "weights mapped from a file, which the kernel can drop and read again; in the peak"
        lenses = {
            "load_peak": (load, "the most while the session was loaded"),
            "first_call_peak": (first, "the most during the first call"),
            "steady_peak": (steady, f"the most during {STEADY_CALLS} more calls"),
            "mapped_files": (mapped, dropped),
            "unread_files": (unread, "the part of these that no call has read yet: others may; in the peak"),
            "libraries": (libraries, "pages of libraries at the end; not in the peak"),
            "baseline": (base, "resident before loading, without libraries; not in the peak"),
        }
        return {
            "peak_bytes": max(load, running),
            "weights_bytes": weights,
            "activation_bytes": max(0, running - weights),
            "host_peak_bytes": max(phase.process_peak for phase in (self.load, self.first, self.steady)),
            "lenses": {name: Lens(bytes=size, source=_RESIDENT, note=note) for name, (size, note) in lenses.items()},
        }
