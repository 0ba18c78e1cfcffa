"""What the instruments of ``cuda_memory`` say, side by side: each figure with its source, and what lies between."""

from typing import NamedTuple

from enginesmith.pipeline.engines.cuda_ledger import ACTIVATIONS, TRANSFERS, UNTAGGED, WEIGHTS
from enginesmith.pipeline.measure.cuda_memory import CudaPhases
from enginesmith.pipeline.units import format_bytes

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
    """Every figure that there is, by the name of its lens."""
    return {**_by_allocator(seen), **_by_device(seen), **_by_engine(seen)}


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


def _by_allocator(seen: CudaPhases) -> dict[str, Figure]:
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
        "allocator_closed": Figure(seen.closed.allocated - seen.start.allocated, _TORCH, _returned(seen)),
        **_by_tag(seen),
    }


def _returned(seen: CudaPhases) -> str:
    account = seen.account
    wrong = {"given back twice": account.double_frees, "given back and never taken": account.unknown_frees}
    said = [f"{count} {what}" for what, count in wrong.items() if count]
    said += [f"{format_bytes(seen.leaked)} that the engine took and did not give back"] if seen.leaked else []
    return "left after the session was closed" + (f": {', '.join(said)}" if said else "")


def _by_tag(seen: CudaPhases) -> dict[str, Figure]:
    """What the peak was made of: by the ledger where the engine asked it, else by the phase that took it."""
    if seen.account.taken:
        tags, source = dict(seen.account.peak_by_tag), _LEDGER
        everything = max(seen.load.requested, seen.run.requested) - seen.start.requested
        if (rest := everything - seen.account.peak) > 0:
            tags[UNTAGGED] = tags.get(UNTAGGED, 0) + rest
    else:
        tags, source = _by_phase(seen), f"{_TORCH}, by the phase that took it"
    return {
        f"allocator_{tag}": Figure(size, source, f"at the time of the peak: {_TAGS.get(tag, tag)}")
        for tag, size in tags.items()
    }


def _by_phase(seen: CudaPhases) -> dict[str, int]:
    base, held = seen.start.allocated, seen.loaded.allocated
    if seen.load.allocated > seen.run.allocated:
        return {WEIGHTS: seen.load.allocated - base}
    bound = inputs(seen)
    return {WEIGHTS: held - base, TRANSFERS: bound, ACTIVATIONS: max(0, seen.run.allocated - held - bound)}


def _by_device(seen: CudaPhases) -> dict[str, Figure]:
    grown = seen.ended.device - seen.start.device
    found = {
        "device": Figure(grown, _DRIVER, f"used at the end, over that before loading: {_explained(seen)}"),
        "device_peak": Figure(
            seen.sampled.peak - seen.start.device, _DRIVER, f"the most over that before loading; {seen.sampled.words()}"
        ),
        "device_closed": Figure(
            seen.closed.device - seen.start.device,
            _DRIVER,
            "used once the session was closed, over before loading",
        ),
        "modules": Figure(
            _outside(seen),
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


def _outside(seen: CudaPhases) -> int:
    """What the device's use grew by, less what the allocator took of it."""
    return seen.ended.device - seen.start.device - (seen.ended.reserved - seen.start.reserved)


def _explained(seen: CudaPhases) -> str:
    """Where the device's figure comes from, in numbers."""
    reserved, allocated = (getattr(seen.ended, name) - getattr(seen.start, name) for name in ("reserved", "allocated"))
    outside = _outside(seen)
    other = (
        f"{format_bytes(outside)} of kernels, handles and what does not go through it"
        if outside >= 0
        else f"less {format_bytes(-outside)} that others gave back meanwhile"
    )
    return (
        f"{format_bytes(reserved)} that torch's allocator took ({format_bytes(allocated)} in blocks in use, "
        f"{format_bytes(reserved - allocated)} kept back or between blocks) and {other}"
    )


def _by_engine(seen: CudaPhases) -> dict[str, Figure]:
    weights, activations = seen.engine_weights, seen.engine_activations
    if weights is None or activations is None:
        return {}
    note = (
        f"weights ({format_bytes(weights)}), and activations ({format_bytes(activations)}) at the largest shape it was "
        "built for"
    )
    return {"engine": Figure(weights + activations, "the builder's figures", note)}
