"""Device memory of one session alone in a fresh process, by every instrument there is; ``cuda_lenses`` reads them.

Eager takes its memory from torch's caching allocator by itself. TensorRT is handed an allocator that does, and so is
ONNX Runtime while a ledger counts (``engines/cuda_ledger``): the peaks of all are counted by one instrument, exactly.
"""

import gc
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.engines.cuda_ledger import (
    ACTIVATIONS,
    TRANSFERS,
    WEIGHTS,
    Account,
    CudaAllocationTracker,
    counting,
)
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability
from enginesmith.pipeline.measure.sampling import Sampled, Sampler
from enginesmith.pipeline.measure.used_memory import used_bytes
from enginesmith.pipeline.tensors import Feeds

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
        seen = _session(engine, artifact, device, feeds, ledger)
    facts = engine.facts(artifact) if artifact.kind == "engine" else None
    own_memory = not engine.memory_from_torch and seen["counted"]
    return CudaPhases(
        **seen,
        outset=outset,
        primed=context,
        deployed=_deployed(engine, artifact, device, feeds) if own_memory else None,
        engine_weights=facts.weights_bytes if facts else None,
        engine_activations=facts.activation_bytes if facts else None,
        host_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _session(
    engine: Engine, artifact: Artifact, device: Device, feeds: Feeds, ledger: CudaAllocationTracker
) -> dict[str, Any]:
    """One session from loading to closing: fields of :class:`CudaPhases`."""
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


def _deployed(engine: Engine, artifact: Artifact, device: Device, feeds: Feeds) -> Known:
    """What a session adds that allocates as in production; libraries and modules are there by now."""
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
    """How things are once the device has caught up."""
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
    """The most since the figures were reset."""
    import torch

    stats = torch.cuda.memory_stats(device.index)
    return Peaks(*(_stat(stats, name, "peak") for name in ("allocated", "requested", "reserved")))


def device_used(device: Device) -> int:
    """In use on the device by everyone, as the driver says."""
    import torch

    free, total = torch.cuda.mem_get_info(device.index)
    return int(total - free)


def _stat(stats: Mapping[str, Any], name: str, which: str) -> int:
    return int(stats.get(f"{name}_bytes.all.{which}", 0))  # empty before torch has taken anything


def _process(device: Device) -> Known:
    """What NVML says of this process."""
    from enginesmith.pipeline.measure import nvml

    try:
        return Known(*nvml.library().process_bytes(device.index, os.getpid()))
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
