"""Measure the device memory of one session alone in a fresh process, by every instrument there is.

Eager takes its memory from torch's caching allocator by itself. TensorRT is handed an allocator that does, and so is
ONNX Runtime while a ledger counts (``engines/cuda_ledger``): the peaks of all are counted by one instrument, exactly.
"""

import gc
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Engine
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
from enginesmith.pipeline.measure.memory.usage import Sampled, Sampler, used_bytes
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import format_bytes

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.base import Session


_STEADY_CALLS = 3
_BLOCK_BYTES = 512
"""What torch's allocator rounds up to (kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass(frozen=True)
class Moment:
    """Bytes at one time: of torch's allocator in this process, and in use on the device by everyone."""

    allocated: int
    """In blocks that are in use; ``requested`` is what was asked for, without rounding."""
    requested: int
    reserved: int
    """Taken from the driver, with what is kept for later."""
    device: int
    """Total less free, by the driver."""


@dataclass(frozen=True)
class Peaks:
    """The most of each since the figures were reset, by torch's allocator."""

    allocated: int
    requested: int
    reserved: int


@dataclass(frozen=True)
class Known:
    """A figure, or None and why there is none."""

    bytes: int | None
    reason: str = ""


@dataclass(frozen=True)
class CudaPhases:
    """What was seen, in order of time."""

    counted: bool
    """Whether the engine took its memory from torch's allocator."""
    outset: Known
    """In use on the device before this process had a context there, by NVML."""
    primed: Known
    """The same once libraries and context were there."""
    start: Moment
    """Libraries and context are there, and no session yet."""
    loaded: Moment
    bound: Moment
    ended: Moment
    """After the last call; the session is still open."""
    closed: Moment
    load: Peaks
    run: Peaks
    account: Account
    """The ledger's, once the session was closed; empty for an engine that asks torch itself."""
    feeds: int
    """Bytes of the inputs as torch's blocks would hold them."""
    noted_inputs: int
    """Of them, what the ledger saw being bound; 0 where inputs lie elsewhere, or the engine asks torch itself."""
    leaked: int
    """Bytes that the ledger still had as taken after the session was closed."""
    sampled: Sampled
    """Use of the device, from before loading to after the last call."""
    process: Known
    """Of this process by NVML, after the last call."""
    deployed: Known | None
    """The most that another session, which allocates by itself as in production, added to the device's use; None for an
    engine that does not."""
    engine_weights: int | None
    engine_activations: int | None
    """At the largest shape it was built for, as the engine says itself."""
    host_peak: int


def measure_on_cuda(
    engine: Engine, artifact: Artifact, device: Device, feeds: Feeds, primed: Callable[[], None] = lambda: None
) -> CudaPhases:
    """Prime, load, run and close; the process must not have used the device before.

    ``primed`` is called when libraries and context are there, before anything is loaded.
    """
    outset = Known(*used_bytes(device))
    with counting(device.index) as ledger:
        engine.prime(artifact, device)
        primed()
        _settle(device)
        context = Known(*used_bytes(device))
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
    moments, before = {"start": moment(device)}, ledger.account().taken
    _reset(device)
    ledger.reset_peak()
    with Sampler(lambda: device_used(device)) as sampler:
        with ledger.tagged(WEIGHTS):
            session = engine.load(artifact, device)
        with session:
            moments["loaded"], load = moment(device), peaks(device)
            session.signature.check(feeds)
            with ledger.tagged(TRANSFERS):
                bound = session.bind(feeds)
            moments["bound"], noted = moment(device), ledger.account().by_tag.get(TRANSFERS, 0)
            _reset(device)
            with ledger.tagged(ACTIVATIONS):
                _run(session, bound)
            moments["ended"], most = moment(device), peaks(device)
            process = _process(device)
            del bound
    del session
    _settle(device)
    moments["closed"], account = moment(device), ledger.account()
    counted = engine.memory_from_torch or account.taken > before
    return {
        **moments,
        "counted": counted,
        "load": load,
        "run": most,
        "feeds": sum(_blocks(array.nbytes) for array in feeds.values()),
        "account": account if account.taken > before else Account(),
        "noted_inputs": noted,
        "leaked": sum(block.size for block in ledger.leaks(since=before).values()),
        "sampled": sampler.sampled,
        "process": process,
    }


def _measure_deployed(engine: Engine, artifact: Artifact, device: Device, feeds: Feeds) -> Known:
    """Measure what a session adds that allocates as in production; libraries and modules are there by now."""
    _settle(device)
    before = device_used(device)
    try:
        with Sampler(lambda: device_used(device)) as sampler, engine.load(artifact, device) as session:
            bound = session.bind(feeds)
            _run(session, bound)
            del bound
    except EnginesmithError as error:
        return Known(None, f"a session that allocates by itself failed: {error}")
    return Known(max(0, sampler.sampled.peak - before), sampler.sampled.words())


def _run(session: "Session", bound: Any) -> None:
    for _ in range(1 + _STEADY_CALLS):
        session.enqueue(bound)
        session.synchronize()


def moment(device: Device) -> Moment:
    """Read all instruments once the device has caught up."""
    import torch

    torch.cuda.synchronize(device.index)
    stats = torch.cuda.memory_stats(device.index)
    return Moment(
        allocated=_stat(stats, "allocated", "current"),
        requested=_stat(stats, "requested", "current"),
        reserved=_stat(stats, "reserved", "current"),
        device=device_used(device),
    )


def peaks(device: Device) -> Peaks:
    """Read the peaks since the figures were reset."""
    import torch

    stats = torch.cuda.memory_stats(device.index)
    return Peaks(*(_stat(stats, name, "peak") for name in ("allocated", "requested", "reserved")))


def device_used(device: Device) -> int:
    """Return the bytes in use on the device by everyone, as the driver says."""
    import torch

    free, total = torch.cuda.mem_get_info(device.index)
    return int(total - free)


def _stat(stats: Mapping[str, Any], name: str, which: str) -> int:
    return int(stats.get(f"{name}_bytes.all.{which}", 0))  # empty before torch has taken anything


def _process(device: Device) -> Known:
    """Ask NVML for the bytes of this process."""
    from enginesmith.pipeline.system import nvidia

    try:
        return Known(*nvidia.nvml().process_bytes(device.index, os.getpid()))
    except MissingCapability as error:
        return Known(None, str(error))


def _blocks(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _reset(device: Device) -> None:
    import torch

    torch.cuda.reset_peak_memory_stats(device.index)


def _settle(device: Device) -> None:
    import torch

    gc.collect()
    torch.cuda.synchronize(device.index)
    torch.cuda.empty_cache()


# Breakdown: the figures of all instruments side by side, each with its source, and what lies between.

_TORCH = "torch's caching allocator"
_LEDGER = "the ledger of what the engine asked torch's allocator for"
_DRIVER = "cudaMemGetInfo"
_TAGS = {
    WEIGHTS: "what loading took and keeps, with constants and buffers",
    ACTIVATIONS: "what calls worked in, with workspace where the engine does not ask for it apart",
    TRANSFERS: "inputs on the device",
}


class Figure(NamedTuple):
    """Bytes, where they come from, what they mean."""

    bytes: int
    source: str
    note: str


class Split(NamedTuple):
    """The allocator's figures in bytes, over what was there before loading, without inputs."""

    weights: int
    activations: int
    peak: int


def inputs(seen: CudaPhases) -> int:
    """Bytes that inputs take of torch's allocator; an engine may keep them elsewhere."""
    bound = seen.bound.allocated - seen.loaded.allocated
    if not seen.account.taken:
        return bound
    return min(bound, seen.feeds) if seen.noted_inputs else 0


def split(seen: CudaPhases) -> Split | None:
    """Weights, activations and peak by the allocator; None where it does not count the engine."""
    if not seen.counted:
        return None
    base = seen.start.allocated
    weights = seen.loaded.allocated - base
    running = seen.run.allocated - base - inputs(seen)
    return Split(weights, max(0, running - weights), max(seen.load.allocated - base, running))


def figures(seen: CudaPhases) -> dict[str, Figure]:
    """Collect every figure that there is, by the name of its lens."""
    return {**_list_allocator_figures(seen), **_list_device_figures(seen), **_list_engine_figures(seen)}


def reasons(seen: CudaPhases) -> dict[str, str]:
    """Lens → why it shows nothing."""
    found = {"process": seen.process.reason} if seen.process.bytes is None else {}
    if seen.outset.bytes is None or seen.primed.bytes is None:
        found["context"] = seen.outset.reason or seen.primed.reason
    if seen.deployed and seen.deployed.bytes is None:
        found["deployed"] = seen.deployed.reason
    if not seen.counted:
        found["allocator"] = "the engine allocates by itself, and only the device's own figure is known"
    return found


def _list_allocator_figures(seen: CudaPhases) -> dict[str, Figure]:
    parts = split(seen)
    if parts is None:
        return {}
    requested = max(seen.load.requested, seen.run.requested) - seen.start.requested
    reserved = max(seen.load.reserved, seen.run.reserved) - seen.start.reserved
    return {
        "allocator": Figure(parts.peak, _TORCH, "the peak; inputs are not in it"),
        "allocator_requested": Figure(
            requested,
            _TORCH,
            "the peak of what was asked for, with inputs; blocks are rounded up from that",
        ),
        "allocator_reserved": Figure(
            reserved,
            _TORCH,
            "the most that it took from the driver, with what it keeps back or is between blocks",
        ),
        "allocator_current": Figure(seen.ended.allocated - seen.start.allocated, _TORCH, "after the last call"),
        "allocator_closed": Figure(seen.closed.allocated - seen.start.allocated, _TORCH, _describe_return(seen)),
        **_split_by_tag(seen),
    }


def _describe_return(seen: CudaPhases) -> str:
    account = seen.account
    wrong = {"given back twice": account.double_frees, "given back and never taken": account.unknown_frees}
    said = [f"{count} {what}" for what, count in wrong.items() if count]
    said += [f"{format_bytes(seen.leaked)} that the engine took and did not give back"] if seen.leaked else []
    return "left after the session was closed" + (f": {', '.join(said)}" if said else "")


def _split_by_tag(seen: CudaPhases) -> dict[str, Figure]:
    """Split the peak: by the ledger where the engine asked it, else by the phase that took it."""
    if seen.account.taken:
        tags, source = dict(seen.account.peak_by_tag), _LEDGER
        everything = max(seen.load.requested, seen.run.requested) - seen.start.requested
        if (rest := everything - seen.account.peak) > 0:
            tags[UNTAGGED] = tags.get(UNTAGGED, 0) + rest
    else:
        tags, source = _split_by_phase(seen), f"{_TORCH}, by the phase that took it"
    return {
        f"allocator_{tag}": Figure(size, source, f"at the time of the peak: {_TAGS.get(tag, tag)}")
        for tag, size in tags.items()
    }


def _split_by_phase(seen: CudaPhases) -> dict[str, int]:
    base, held = seen.start.allocated, seen.loaded.allocated
    if seen.load.allocated > seen.run.allocated:
        return {WEIGHTS: seen.load.allocated - base}
    bound = inputs(seen)
    return {WEIGHTS: held - base, TRANSFERS: bound, ACTIVATIONS: max(0, seen.run.allocated - held - bound)}


def _list_device_figures(seen: CudaPhases) -> dict[str, Figure]:
    grown = seen.ended.device - seen.start.device
    found = {
        "device": Figure(grown, _DRIVER, f"used at the end, over that before loading: {_explain_device(seen)}"),
        "device_peak": Figure(
            seen.sampled.peak - seen.start.device, _DRIVER, f"the most over that before loading; {seen.sampled.words()}"
        ),
        "device_closed": Figure(
            seen.closed.device - seen.start.device,
            _DRIVER,
            "used once the session was closed, over before loading",
        ),
        "modules": Figure(
            _count_outside(seen),
            f"{_DRIVER} less {_TORCH}",
            "kernels and handles that loading and running brought, and memory taken past it",
        ),
    }
    if seen.process.bytes is not None:
        found["process"] = Figure(
            seen.process.bytes, "NVML, this process", "after the last call: context, libraries and all that was taken"
        )
    if seen.outset.bytes is not None and seen.primed.bytes is not None:
        found["context"] = Figure(
            seen.primed.bytes - seen.outset.bytes - seen.start.reserved,
            "NVML, before and after the libraries were started",
            "the CUDA context and libraries, before anything was loaded; not in the peak",
        )
    if seen.deployed and seen.deployed.bytes is not None:
        found["deployed"] = Figure(
            seen.deployed.bytes,
            _DRIVER,
            "the most that a session added which allocates by itself as in a latency run, where an arena rounds up and "
            f"keeps what it has; {seen.deployed.reason}",
        )
    return found


def _count_outside(seen: CudaPhases) -> int:
    """Compute what the device's use grew by, less what the allocator took of it."""
    return seen.ended.device - seen.start.device - (seen.ended.reserved - seen.start.reserved)


def _explain_device(seen: CudaPhases) -> str:
    """Explain in numbers where the device's figure comes from."""
    reserved, allocated = (getattr(seen.ended, name) - getattr(seen.start, name) for name in ("reserved", "allocated"))
    outside = _count_outside(seen)
    other = (
        f"{format_bytes(outside)} of kernels, handles and what does not go through it"
        if outside >= 0
        else f"less {format_bytes(-outside)} that others gave back meanwhile"
    )
    return (
        f"{format_bytes(reserved)} that torch's allocator took ({format_bytes(allocated)} in blocks in use, "
        f"{format_bytes(reserved - allocated)} kept back or between blocks) and {other}"
    )


def _list_engine_figures(seen: CudaPhases) -> dict[str, Figure]:
    weights, activations = seen.engine_weights, seen.engine_activations
    if weights is None or activations is None:
        return {}
    note = (
        f"weights ({format_bytes(weights)}), and activations ({format_bytes(activations)}) at the largest shape it was "
        "built for"
    )
    return {"engine": Figure(weights + activations, "the builder's figures", note)}
