"""Measure a session's memory on CUDA by every instrument: torch's allocator, the ledger, the driver and NVML.

All engines take their memory from torch's caching allocator, which counts it exactly: eager by itself, TensorRT and
(while it is measured) ONNX Runtime through an allocator that they are given (``engines/cuda_allocator``). The figures
of the driver and of NVML stand beside it.

torch also takes workspaces for cuBLAS from its allocator, one for each stream that multiplies. Other engines' libraries
allocate theirs past it. To compare like with like, the workspaces are a figure of their own, outside the peak.
"""

import gc
import os
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Engine, Session
from enginesmith.pipeline.engines.cuda_allocator import (
    ACTIVATIONS,
    TRANSFERS,
    UNTAGGED,
    WEIGHTS,
    Account,
    CudaAllocationTracker,
    counting,
    release_workspaces,
)
from enginesmith.pipeline.measure.memory import usage
from enginesmith.pipeline.measure.memory.usage import Sampled, Sampler, used_bytes
from enginesmith.pipeline.measure.rows import Lens
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import format_bytes

STEADY_CALLS = 3
"""The second call may need more than the first: ONNX Runtime plans its arena after the first."""
_BLOCK_BYTES = 512
"""Multiple that torch's allocator rounds up to (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp)."""
_TORCH = "torch's caching allocator"
_LEDGER = "the ledger of what the engine asked torch's allocator for"
_DRIVER = "cudaMemGetInfo"
_WORKSPACES = (
    "workspaces for cuBLAS, one for each stream that multiplies; a deployment of PyTorch takes them, too. Not in the "
    "peak, because other engines do not take theirs from an allocator that counts"
)
_TAGS = {
    WEIGHTS: "what loading took and keeps, with constants and buffers",
    ACTIVATIONS: "what calls worked in, with workspace where the engine does not ask for it apart",
    TRANSFERS: "inputs on the device",
}


@dataclass(frozen=True)
class AllocatorBytes:
    """Count bytes of torch's allocator in this process, now or at their peaks."""

    allocated: int
    """In blocks that are in use."""
    requested: int
    """Without rounding up to blocks."""
    reserved: int
    """Taken from the driver, with what is kept for later."""


@dataclass(frozen=True)
class DeviceBytes(AllocatorBytes):
    """Record the figures of one time."""

    device: int
    """In use on the device by everyone: total less free, by the driver."""


class FigureOrReason(NamedTuple):
    """Give a figure, or None and why there is none."""

    bytes: int | None
    reason: str = ""


class PeakParts(NamedTuple):
    """Split the allocator's figures in bytes, over what was there before loading, without inputs."""

    weights: int
    activations: int
    peak: int


@dataclass(frozen=True)
class CudaPhases:
    """Record what every instrument showed on CUDA, in order of time."""

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
    first: AllocatorBytes
    """Peaks of the first call, in which libraries may try kernels."""
    steady: AllocatorBytes
    """Peaks of the calls after it."""
    libraries: int
    """Bytes of workspaces that torch took for cuBLAS while the session ran, and keeps for the next call."""
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
    engine_weights: int | None
    engine_activations: int | None
    """At the largest shape it was built for, as the engine says itself."""
    host_peak: int

    @property
    def run(self) -> AllocatorBytes:
        """Peaks of running."""
        both = zip(asdict(self.first).items(), asdict(self.steady).values(), strict=True)
        return AllocatorBytes(**{name: max(first, steady) for (name, first), steady in both})

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
        phases = _measure_session(engine, artifact, device, feeds, ledger)
    facts = engine.facts(artifact) if artifact.kind == "engine" else None
    return CudaPhases(
        **phases,
        outset=outset,
        primed=context,
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
            with ledger.tagged(ACTIVATIONS):
                first, steady = (_read_peaks_of_calls(session, bound, device, calls) for calls in (1, STEADY_CALLS))
            moments["ended"] = read_moment(device)
            process = FigureOrReason(*usage.read_own_bytes(device, os.getpid()))
            libraries = release_workspaces(device.index)  # nothing is called any more
            del bound
    del session
    _settle(device)
    moments["closed"], account = read_moment(device), ledger.account()
    return {
        **moments,
        "counted": engine.memory_from_torch or account.taken > before,
        "load": load,
        "first": first,
        "steady": steady,
        "libraries": libraries,
        "feeds": sum(-(-array.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES for array in feeds.values()),
        "account": account if account.taken > before else Account(),
        "noted_inputs": noted,
        "leaked": sum(block.size for block in ledger.leaks(since=before).values()),
        "sampled": sampler.sampled,
        "process": process,
    }


def _read_peaks_of_calls(session: Session, bound: Any, device: Device, calls: int) -> AllocatorBytes:
    import torch

    torch.cuda.reset_peak_memory_stats(device.index)
    call(session, bound, calls)
    torch.cuda.synchronize(device.index)
    return read_peaks(device)


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
    figures = {name: stats.get(f"{name}_bytes.all.{which}", 0) for name in ("allocated", "requested", "reserved")}
    figures["requested"] = figures["requested"] or figures["allocated"]  # 0 where torch's backend is cudaMallocAsync
    return {name: int(size) for name, size in figures.items()}


def read_device_used(device: Device) -> int:
    """Read the bytes in use on the device by everyone, as the driver says."""
    import torch

    free, total = torch.cuda.mem_get_info(device.index)
    return int(total - free)


def _settle(device: Device) -> None:
    import torch

    gc.collect()
    release_workspaces(device.index)
    torch.cuda.empty_cache()


def count_inputs(phases: CudaPhases) -> int:
    """Count the bytes that inputs take of torch's allocator; an engine may keep them elsewhere."""
    bound = phases.bound.allocated - phases.loaded.allocated
    if not phases.account.taken:
        return bound
    return min(bound, phases.feeds) if phases.noted_inputs else 0


def split_peak(phases: CudaPhases) -> PeakParts | None:
    """Compute weights, activations and peak by the allocator; None where it does not count the engine."""
    if not phases.counted:
        return None
    base = phases.start.allocated
    weights = phases.loaded.allocated - base
    running = _over_start(phases, phases.run)
    return PeakParts(weights, max(0, running - weights), max(phases.load.allocated - base, running))


def _over_start(phases: CudaPhases, calls: AllocatorBytes) -> int:
    """Compute the most that calls had allocated over what was there before loading, without inputs and workspaces."""
    return calls.allocated - phases.start.allocated - count_inputs(phases) - phases.libraries


def _explain_missing(phases: CudaPhases) -> dict[str, str]:
    """Explain, for each lens without a figure, why there is none."""
    reasons = {"process": phases.process.reason} if phases.process.bytes is None else {}
    if phases.outset.bytes is None or phases.primed.bytes is None:
        reasons["context"] = phases.outset.reason or phases.primed.reason
    if not phases.counted:
        reasons["allocator"] = "the engine allocates by itself, and only the device's own figure is known"
    return reasons


def call(session: Session, bound: Any, times: int) -> None:
    """Call a session, and wait for each answer."""
    for _ in range(times):
        session.enqueue(bound)
        session.synchronize()


Figure = tuple[int, str, str]
"""Bytes, where they come from, what they mean."""


def list_lenses(phases: CudaPhases) -> dict[str, Lens]:
    """List every figure that there is, with its source and what it means."""
    figures = _list_allocator_figures(phases) | _list_device_figures(phases)
    weights, activations = phases.engine_weights, phases.engine_activations
    if weights is not None and activations is not None:
        both = f"weights ({format_bytes(weights)}), and activations ({format_bytes(activations)})"
        note = f"{both} at the largest shape it was built for"
        figures["engine"] = (weights + activations, "the builder's figures", note)
    return {name: Lens(bytes=size, source=source, note=note) for name, (size, source, note) in figures.items()}


def _list_allocator_figures(phases: CudaPhases) -> dict[str, Figure]:
    parts = split_peak(phases)
    if parts is None:
        return {}
    requested_peak = max(phases.load.requested, phases.run.requested - phases.libraries) - phases.start.requested
    inputs = phases.noted_inputs if phases.account.taken else phases.bound.requested - phases.loaded.requested
    running = phases.run.requested - phases.libraries - inputs
    requested = max(phases.load.requested, running) - phases.start.requested
    reserved = max(phases.load.reserved, phases.run.reserved) - phases.start.reserved
    rounded = "the peak of what was asked for, as in allocator; blocks are rounded up from that"
    reserve_note = "the most that it took from the driver, with what it keeps back or is between blocks"
    ended = phases.ended.allocated - phases.start.allocated - phases.libraries
    figures = {
        "allocator": (parts.peak, _TORCH, "the peak; inputs and workspaces of libraries are not in it"),
        "load_peak": (phases.load.allocated - phases.start.allocated, _TORCH, "the most while the session was loaded"),
        "first_call_peak": (_over_start(phases, phases.first), _TORCH, "the most during the first call"),
        "steady_peak": (_over_start(phases, phases.steady), _TORCH, f"the most during {STEADY_CALLS} more calls"),
        "allocator_requested": (requested, _TORCH, rounded),
        "allocator_reserved": (reserved, _TORCH, reserve_note),
        "allocator_current": (ended, _TORCH, "after the last call"),
        "allocator_closed": (phases.closed.allocated - phases.start.allocated, _TORCH, _describe_return(phases)),
    }
    if phases.libraries:
        figures["allocator_libraries"] = (phases.libraries, _TORCH, _WORKSPACES)
    # the peak is split by the ledger where the engine asked it, else by the phase that took it
    source = _LEDGER
    if phases.account.taken:
        tags = dict(phases.account.peak_by_tag)
        if (rest := requested_peak - phases.account.peak) > 0:
            tags[UNTAGGED] = tags.get(UNTAGGED, 0) + rest
    else:
        source = f"{_TORCH}, by the phase that took it"
        if phases.load.allocated > phases.run.allocated - phases.libraries:
            tags = {WEIGHTS: phases.load.allocated - phases.start.allocated}
        else:
            tags = {WEIGHTS: parts.weights, TRANSFERS: count_inputs(phases), ACTIVATIONS: parts.activations}
    return figures | {
        f"allocator_{tag}": (size, source, f"at the time of the peak: {_TAGS.get(tag, tag)}")
        for tag, size in tags.items()
    }


def _describe_return(phases: CudaPhases) -> str:
    account = phases.account
    wrong = {"given back twice": account.double_frees, "given back and never taken": account.unknown_frees}
    problems = [f"{count} {what}" for what, count in wrong.items() if count]
    problems += [f"{format_bytes(phases.leaked)} that the engine took and did not give back"] if phases.leaked else []
    return "left after the session was closed" + (f": {', '.join(problems)}" if problems else "")


def _list_device_figures(phases: CudaPhases) -> dict[str, Figure]:
    start, ended = phases.start, phases.ended
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
    most = f"the most over that before loading; {phases.sampled.words()}"
    brought = (
        "kernels, handles and CUDA graphs that loading and running brought, and memory taken past it; an engine whose "
        "allocations are counted one by one captures no CUDA graph meanwhile, so that only deployed has its graph"
    )
    figures = {
        "device": (ended.device - start.device, _DRIVER, used),
        "device_peak": (phases.sampled.peak - start.device, _DRIVER, most),
        "device_closed": (
            phases.closed.device - start.device,
            _DRIVER,
            "used once the session was closed, over before loading",
        ),
        "modules": (outside, f"{_DRIVER} less {_TORCH}", brought),
    }
    if phases.process.bytes is not None:
        note = "after the last call: context, libraries and all that was taken"
        figures["process"] = (phases.process.bytes, "NVML, this process", note)
    if phases.outset.bytes is not None and phases.primed.bytes is not None:
        note = "the CUDA context and libraries, before anything was loaded; not in the peak"
        size = phases.primed.bytes - phases.outset.bytes - start.reserved
        figures["context"] = (size, "NVML, before and after the libraries were started", note)
    return figures
