"""Peak device memory of one session alone in a fresh process, by torch's caching allocator and by the device.

Eager takes its memory there by itself, and TensorRT is handed an allocator that does; so the peaks of both are counted
by the same instrument, exactly. ONNX Runtime allocates by itself: of it only the device's own figure is known.
"""

import gc
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.tensors import Feeds

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.base import Session

_STEADY_CALLS = 3


@dataclass(frozen=True)
class CudaPhases:
    """Bytes on the device, over what was there before the session was loaded."""

    allocated: bool
    """Whether the engine takes its memory from torch's allocator, so that the next three are known."""
    weights: int
    """Held once the session is loaded."""
    load_peak: int
    run_peak: int
    """While it ran, without the inputs, which are the caller's."""
    device_used: int
    """By the driver, at the end: with what allocators keep back, and contexts that were made late."""
    reported: int | None
    """Weights and activations at the largest shape, as the engine says itself."""
    host_peak: int


def measure_on_cuda(engine: Engine, artifact: Artifact, device: Device, feeds: Feeds) -> CudaPhases:
    """Prime, load and run; the process must not have used the device before."""
    import torch

    engine.prime(artifact, device)
    _settle(device)
    free_before = torch.cuda.mem_get_info(device.index)[0]
    base = torch.cuda.memory_allocated(device.index)
    torch.cuda.reset_peak_memory_stats(device.index)
    with engine.load(artifact, device) as session:
        torch.cuda.synchronize(device.index)
        weights = torch.cuda.memory_allocated(device.index) - base
        load_peak = torch.cuda.max_memory_allocated(device.index) - base
        session.signature.check(feeds)
        run_peak = _run(session, feeds, device) - base
        used = free_before - torch.cuda.mem_get_info(device.index)[0]
    facts = engine.facts(artifact) if artifact.kind == "engine" else None
    known = facts is not None and facts.weights_bytes is not None and facts.activation_bytes is not None
    return CudaPhases(
        allocated=engine.memory_from_torch,
        weights=weights,
        load_peak=load_peak,
        run_peak=run_peak,
        device_used=used,
        reported=(facts.weights_bytes or 0) + (facts.activation_bytes or 0) if facts and known else None,
        host_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _run(session: "Session", feeds: Feeds, device: Device) -> int:
    """Most bytes allocated while it ran, without the inputs."""
    import torch

    bound = session.bind(feeds)
    torch.cuda.synchronize(device.index)
    torch.cuda.reset_peak_memory_stats(device.index)
    for _ in range(1 + _STEADY_CALLS):
        session.enqueue(bound)
        session.synchronize()
    return torch.cuda.max_memory_allocated(device.index) - sum(array.nbytes for array in feeds.values())


def _settle(device: Device) -> None:
    import torch

    gc.collect()
    torch.cuda.synchronize(device.index)
    torch.cuda.empty_cache()
