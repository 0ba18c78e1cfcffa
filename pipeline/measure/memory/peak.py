"""Measure the peak memory of one session alone in a fresh process.

On the CPU it is resident growth over the loaded-libraries baseline:

1. ``Engine.prime`` brings in the libraries, the source's code and the thread pools.
2. The baseline is what is resident then, and the feeds with it: inputs are the caller's.
3. The session is loaded, makes its first call, then some more, with the high-water mark reset before each phase.

Growth counts what the process wrote and the data files that it maps, so that an engine that maps its weights and one
that reads them compare. It leaves out pages of libraries, which are shared and needed once for any number of sessions.

On CUDA all engines take their memory from torch's caching allocator, which counts it exactly: eager by itself, TensorRT
and (while it is measured) ONNX Runtime through an allocator that they are given (``engines/cuda_allocator``). The
figures of the driver and of NVML stand beside it.
"""

import gc
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate, Engine
from enginesmith.pipeline.engines.cuda_allocator import (
    ACTIVATIONS,
    TRANSFERS,
    UNTAGGED,
    WEIGHTS,
    Account,
    CudaAllocationTracker,
    counting,
)
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability
from enginesmith.pipeline.frameworks.samples import check_feeds
from enginesmith.pipeline.measure.memory import usage
from enginesmith.pipeline.measure.memory.limits import explain_out_of_memory, run_limited, set_memory_limit
from enginesmith.pipeline.measure.memory.usage import Phase, Resident, Sampled, Sampler, read_trimmed, used_bytes
from enginesmith.pipeline.measure.rows import Lens, MemoryRow, OutOfMemory, explain_missing
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Progress
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import format_bytes

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.base import Session

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
    progress(f"memory of {candidate.id} at batch {batch}")
    seen: ResidentPhases | CudaPhases | OutOfMemory
    row: dict[str, Any] = {"device": str(candidate.device), "batch": batch}
    try:
        seen = run_limited(
            _measure,
            candidate,
            feeds,
            memory_limit_bytes,
            device=candidate.device,
            log=log_folder / f"memory-{candidate.id}.log",
            limit_bytes=memory_limit_bytes,
            timeout_seconds=time_limit_seconds,
        )
        if not isinstance(seen, OutOfMemory):
            return MemoryRow(**row, **seen.summarize())
        row, reason = {**row, "failure": seen.message, "oom": seen}, seen.message
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
            _call(session, bound, 1)
            first = usage.read_phase()
            usage.reset_high_water()
            _call(session, bound, _STEADY_CALLS)
            steady = usage.read_phase()
    return ResidentPhases(base, load, held, first, steady)


def _call(session: "Session", bound: Any, times: int) -> None:
    for _ in range(times):
        session.enqueue(bound)
        session.synchronize()


@dataclass(frozen=True)
class ResidentPhases:
    """Hold what was resident on the CPU, in order of time."""

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
        mapped = self.steady.end.mapped_data - self.base.mapped_data
        weights = self.held.written - self.base.written + mapped
        running = max(first, steady)
        dropped = "weights mapped from a file, which the kernel can drop and read again; in the peak"
        lenses = {
            "load_peak": (load, "the most while the session was loaded"),
            "first_call_peak": (first, "the most during the first call"),
            "steady_peak": (steady, f"the most during {_STEADY_CALLS} more calls"),
            "mapped_files": (mapped, dropped),
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


# CUDA

_BLOCK_BYTES = 512
"""Multiple that torch's allocator rounds up to (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp)."""
_TORCH = "torch's caching allocator"
_LEDGER = "the ledger of what the engine asked torch's allocator for"
_DRIVER = "cudaMemGetInfo"
_TAGS = {
    WEIGHTS: "what loading took and keeps, with constants and buffers",
    ACTIVATIONS: "what calls worked in, with workspace where the engine does not ask for it apart",
    TRANSFERS: "inputs on the device",
}


@dataclass(frozen=True)
class AllocatorBytes:
    """Hold bytes of torch's allocator in this process."""

    allocated: int
    """In blocks that are in use."""
    requested: int
    """Without rounding up to blocks."""
    reserved: int
    """Taken from the driver, with what is kept for later."""


@dataclass(frozen=True)
class DeviceBytes(AllocatorBytes):
    """Hold the figures of one time."""

    device: int
    """In use on the device by everyone: total less free, by the driver."""


class FigureOrReason(NamedTuple):
    """Hold a figure, or None and why there is none."""

    bytes: int | None
    reason: str = ""


class PeakParts(NamedTuple):
    """Hold the allocator's figures in bytes, over what was there before loading, without inputs."""

    weights: int
    activations: int
    peak: int


@dataclass(frozen=True)
class CudaPhases:
    """Hold what every instrument showed on CUDA, in order of time."""

    counted: bool
    """True where the engine took its memory from torch's allocator."""
    outset: FigureOrReason
    """In use on the device before this process had a context there, by NVML."""
    primed: FigureOrReason
    """In use once libraries and context were there, by NVML."""
    start: DeviceBytes
    """Libraries and context are there, and no session yet."""
    loaded: DeviceBytes
    bound: DeviceBytes
    ended: DeviceBytes
    """After the last call; the session is still open."""
    closed: DeviceBytes
    load: AllocatorBytes
    """Peaks of loading."""
    run: AllocatorBytes
    """Peaks of running."""
    account: Account
    """The ledger's, once the session was closed; empty for an engine that asks torch itself."""
    feeds: int
    """Bytes of the inputs as torch's blocks would hold them."""
    noted_inputs: int
    """Bytes of inputs that the ledger saw being bound; 0 where they lie elsewhere, or the engine asks torch itself."""
    leaked: int
    """Bytes that the ledger still had as taken after the session was closed."""
    sampled: Sampled
    """Use of the device, from before loading to after the last call."""
    process: FigureOrReason
    """Use by this process after the last call, by NVML."""
    deployed: FigureOrReason | None
    """The most that another session, which allocates by itself as in production, added to the device's use; None for an
    engine that does not."""
    engine_weights: int | None
    engine_activations: int | None
    """At the largest shape it was built for, as the engine says itself."""
    host_peak: int

    def summarize(self) -> dict[str, Any]:
        """Compute the figures of a :class:`MemoryRow`: by the allocator where it counts the engine, else the device."""
        lenses, reasons = list_lenses(self), _explain_missing(self)
        parts = split_peak(self)
        figures = {"host_peak_bytes": self.host_peak, "lenses": lenses, "reasons": reasons}
        if parts is None:
            reasons |= dict.fromkeys(("weights_bytes", "activation_bytes"), reasons["allocator"])
            return {**figures, "peak_bytes": lenses["device_peak"].bytes}
        return {
            **figures,
            "peak_bytes": parts.peak,
            "weights_bytes": parts.weights,
            "activation_bytes": parts.activations,
        }


def measure_on_cuda(
    engine: Engine, artifact: Artifact, device: Device, feeds: Feeds, primed: Callable[[], None] = lambda: None
) -> CudaPhases:
    """Prime, load, run and close; the process must not have used the device before.

    ``primed`` is called when libraries and context are there, before anything is loaded.
    """
    outset = FigureOrReason(*used_bytes(device))
    with counting(device.index) as ledger:
        engine.prime(artifact, device)
        primed()
        _settle(device)
        context = FigureOrReason(*used_bytes(device))
        seen = _measure_session(engine, artifact, device, feeds, ledger)
    facts = engine.facts(artifact) if artifact.kind == "engine" else None
    own_memory = not engine.memory_from_torch and seen["counted"]
    return CudaPhases(
        **seen,
        outset=outset,
        primed=context,
        deployed=_measure_deployed(engine, artifact, device, feeds) if own_memory else None,
        engine_weights=facts.weights_bytes if facts else None,
        engine_activations=facts.activation_bytes if facts else None,
        host_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _measure_session(
    engine: Engine, artifact: Artifact, device: Device, feeds: Feeds, ledger: CudaAllocationTracker
) -> dict[str, Any]:
    """Measure a session from loading to closing; returns fields of :class:`CudaPhases`."""
    from torch import cuda

    moments, before = {"start": read_moment(device)}, ledger.account().taken
    cuda.reset_peak_memory_stats(device.index)
    ledger.reset_peak()
    with Sampler(lambda: read_device_used(device)) as sampler:
        with ledger.tagged(WEIGHTS):
            session = engine.load(artifact, device)
        with session:
            moments["loaded"], load = read_moment(device), read_peaks(device)
            session.signature.check(feeds)
            with ledger.tagged(TRANSFERS):
                bound = session.bind(feeds)
            moments["bound"], noted = read_moment(device), ledger.account().by_tag.get(TRANSFERS, 0)
            cuda.reset_peak_memory_stats(device.index)
            with ledger.tagged(ACTIVATIONS):
                _call(session, bound, 1 + _STEADY_CALLS)
            moments["ended"], most = read_moment(device), read_peaks(device)
            process = FigureOrReason(*usage.read_own_bytes(device, os.getpid()))
            del bound
    del session
    _settle(device)
    moments["closed"], account = read_moment(device), ledger.account()
    return {
        **moments,
        "counted": engine.memory_from_torch or account.taken > before,
        "load": load,
        "run": most,
        "feeds": sum(-(-array.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES for array in feeds.values()),
        "account": account if account.taken > before else Account(),
        "noted_inputs": noted,
        "leaked": sum(block.size for block in ledger.leaks(since=before).values()),
        "sampled": sampler.sampled,
        "process": process,
    }


def _measure_deployed(engine: Engine, artifact: Artifact, device: Device, feeds: Feeds) -> FigureOrReason:
    """Measure what a session adds that allocates as in production; libraries and modules are there by now."""
    _settle(device)
    before = read_device_used(device)
    try:
        with Sampler(lambda: read_device_used(device)) as sampler, engine.load(artifact, device) as session:
            bound = session.bind(feeds)
            _call(session, bound, 1 + _STEADY_CALLS)
            del bound
    except EnginesmithError as error:
        return FigureOrReason(None, f"a session that allocates by itself failed: {error}")
    return FigureOrReason(max(0, sampler.sampled.peak - before), sampler.sampled.words())


def read_moment(device: Device) -> DeviceBytes:
    """Read all instruments once the device has caught up."""
    import torch

    torch.cuda.synchronize(device.index)
    return DeviceBytes(**_read_allocator(device, "current"), device=read_device_used(device))


def read_peaks(device: Device) -> AllocatorBytes:
    """Read the peaks of torch's allocator since they were reset."""
    return AllocatorBytes(**_read_allocator(device, "peak"))


def _read_allocator(device: Device, which: str) -> dict[str, int]:
    import torch

    stats = torch.cuda.memory_stats(device.index)  # empty before torch has taken anything
    return {name: int(stats.get(f"{name}_bytes.all.{which}", 0)) for name in ("allocated", "requested", "reserved")}


def read_device_used(device: Device) -> int:
    """Read the bytes in use on the device by everyone, as the driver says."""
    import torch

    free, total = torch.cuda.mem_get_info(device.index)
    return int(total - free)


def _settle(device: Device) -> None:
    import torch

    gc.collect()
    torch.cuda.synchronize(device.index)
    torch.cuda.empty_cache()


def count_inputs(seen: CudaPhases) -> int:
    """Count the bytes that inputs take of torch's allocator; an engine may keep them elsewhere."""
    bound = seen.bound.allocated - seen.loaded.allocated
    if not seen.account.taken:
        return bound
    return min(bound, seen.feeds) if seen.noted_inputs else 0


def split_peak(seen: CudaPhases) -> PeakParts | None:
    """Compute weights, activations and peak by the allocator; None where it does not count the engine."""
    if not seen.counted:
        return None
    base = seen.start.allocated
    weights = seen.loaded.allocated - base
    running = seen.run.allocated - base - count_inputs(seen)
    return PeakParts(weights, max(0, running - weights), max(seen.load.allocated - base, running))


def _explain_missing(seen: CudaPhases) -> dict[str, str]:
    """Say of each lens that shows nothing why."""
    reasons = {"process": seen.process.reason} if seen.process.bytes is None else {}
    if seen.outset.bytes is None or seen.primed.bytes is None:
        reasons["context"] = seen.outset.reason or seen.primed.reason
    if seen.deployed and seen.deployed.bytes is None:
        reasons["deployed"] = seen.deployed.reason
    if not seen.counted:
        reasons["allocator"] = "the engine allocates by itself, and only the device's own figure is known"
    return reasons


Figure = tuple[int, str, str]
"""Bytes, where they come from, what they mean."""


def list_lenses(seen: CudaPhases) -> dict[str, Lens]:
    """List every figure that there is, with its source and what it means."""
    figures = _list_allocator_figures(seen) | _list_device_figures(seen)
    weights, activations = seen.engine_weights, seen.engine_activations
    if weights is not None and activations is not None:
        both = f"weights ({format_bytes(weights)}), and activations ({format_bytes(activations)})"
        note = f"{both} at the largest shape it was built for"
        figures["engine"] = (weights + activations, "the builder's figures", note)
    return {name: Lens(bytes=size, source=source, note=note) for name, (size, source, note) in figures.items()}


def _list_allocator_figures(seen: CudaPhases) -> dict[str, Figure]:
    parts = split_peak(seen)
    if parts is None:
        return {}
    requested = max(seen.load.requested, seen.run.requested) - seen.start.requested
    reserved = max(seen.load.reserved, seen.run.reserved) - seen.start.reserved
    rounded = "the peak of what was asked for, with inputs; blocks are rounded up from that"
    kept = "the most that it took from the driver, with what it keeps back or is between blocks"
    figures = {
        "allocator": (parts.peak, _TORCH, "the peak; inputs are not in it"),
        "allocator_requested": (requested, _TORCH, rounded),
        "allocator_reserved": (reserved, _TORCH, kept),
        "allocator_current": (seen.ended.allocated - seen.start.allocated, _TORCH, "after the last call"),
        "allocator_closed": (seen.closed.allocated - seen.start.allocated, _TORCH, _describe_return(seen)),
    }
    # the peak is split by the ledger where the engine asked it, else by the phase that took it
    source, held = _LEDGER, seen.loaded.allocated
    if seen.account.taken:
        tags = dict(seen.account.peak_by_tag)
        if (rest := requested - seen.account.peak) > 0:
            tags[UNTAGGED] = tags.get(UNTAGGED, 0) + rest
    else:
        source, bound = f"{_TORCH}, by the phase that took it", count_inputs(seen)
        if seen.load.allocated > seen.run.allocated:
            tags = {WEIGHTS: seen.load.allocated - seen.start.allocated}
        else:
            running = max(0, seen.run.allocated - held - bound)
            tags = {WEIGHTS: held - seen.start.allocated, TRANSFERS: bound, ACTIVATIONS: running}
    return figures | {
        f"allocator_{tag}": (size, source, f"at the time of the peak: {_TAGS.get(tag, tag)}")
        for tag, size in tags.items()
    }


def _describe_return(seen: CudaPhases) -> str:
    account = seen.account
    wrong = {"given back twice": account.double_frees, "given back and never taken": account.unknown_frees}
    said = [f"{count} {what}" for what, count in wrong.items() if count]
    said += [f"{format_bytes(seen.leaked)} that the engine took and did not give back"] if seen.leaked else []
    return "left after the session was closed" + (f": {', '.join(said)}" if said else "")


def _list_device_figures(seen: CudaPhases) -> dict[str, Figure]:
    start, ended = seen.start, seen.ended
    reserved, allocated = ended.reserved - start.reserved, ended.allocated - start.allocated
    outside = ended.device - start.device - reserved
    other = (
        f"{format_bytes(outside)} of kernels, handles and what does not go through it"
        if outside >= 0
        else f"less {format_bytes(-outside)} that others gave back meanwhile"
    )
    used = (
        f"used at the end, over that before loading: {format_bytes(reserved)} that torch's allocator took "
        f"({format_bytes(allocated)} in blocks in use, {format_bytes(reserved - allocated)} kept back or between "
        f"blocks) and {other}"
    )
    most = f"the most over that before loading; {seen.sampled.words()}"
    brought = "kernels and handles that loading and running brought, and memory taken past it"
    figures = {
        "device": (ended.device - start.device, _DRIVER, used),
        "device_peak": (seen.sampled.peak - start.device, _DRIVER, most),
        "device_closed": (
            seen.closed.device - start.device,
            _DRIVER,
            "used once the session was closed, over before loading",
        ),
        "modules": (outside, f"{_DRIVER} less {_TORCH}", brought),
    }
    if seen.process.bytes is not None:
        note = "after the last call: context, libraries and all that was taken"
        figures["process"] = (seen.process.bytes, "NVML, this process", note)
    if seen.outset.bytes is not None and seen.primed.bytes is not None:
        note = "the CUDA context and libraries, before anything was loaded; not in the peak"
        size = seen.primed.bytes - seen.outset.bytes - start.reserved
        figures["context"] = (size, "NVML, before and after the libraries were started", note)
    if seen.deployed and seen.deployed.bytes is not None:
        note = (
            "the most that a session added which allocates by itself as in a latency run, where an arena rounds up and "
            f"keeps what it has; {seen.deployed.reason}"
        )
        figures["deployed"] = (seen.deployed.bytes, _DRIVER, note)
    return figures
