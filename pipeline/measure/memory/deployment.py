"""Measure what a deployment takes of a GPU: a process that loads an engine as in production, and answers.

That is everything: the CUDA context, kernels, an arena or a cache of blocks, workspaces of libraries. NVML tells it for
single processes. Where it does not (in most containers, on WSL2 and on Jetson), another process with a context of its
own reads what is in use on the device, before and after the first one has ended.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.measure.memory.cuda import STEADY_CALLS, call, read_device_used
from enginesmith.pipeline.measure.memory.limits import explain_out_of_memory, set_memory_limit
from enginesmith.pipeline.measure.memory.usage import Sampler, read_own_bytes
from enginesmith.pipeline.measure.rows import Lens
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Worker, serve
from enginesmith.pipeline.tensors import Feeds

ON_CPU = "only on CUDA; on the CPU, host_peak_bytes is the whole process"
_INTERVAL_SECONDS = 0.01
_START_SECONDS, _RETURN_SECONDS, _LOOK_SECONDS = 120.0, 5.0, 0.1
_WHAT = "a process that loads it as in production and answers: CUDA context, kernels, arena and workspaces included"


@dataclass(frozen=True)
class _Serving:
    """Describe a process that has loaded an engine and answered, and still has its memory."""

    own_bytes: int | None
    """The most that it had, by NVML."""
    how: str
    """How the most was sampled, or why NVML tells nothing."""
    device_bytes: int
    shares_system_memory: bool


def measure_deployment(
    candidate: Candidate, feeds: Feeds, log_folder: Path, time_limit_seconds: float, memory_limit_bytes: int | None
) -> dict[str, Any]:
    """Load a candidate in a fresh process, call it, and measure what the process takes of its device.

    Returns fields of a :class:`MemoryRow`: reasons are in ``reasons``, the source is a lens.
    """
    log = log_folder / f"deployment-{candidate.id}.log"
    try:
        with Worker(_serve_candidate, candidate, memory_limit_bytes, log=log) as worker:
            serving: _Serving = worker.request(feeds, timeout_seconds=time_limit_seconds)
            if serving.own_bytes is not None:
                source, size, note = "NVML, this process", serving.own_bytes, f"{_WHAT}; the most of {serving.how}"
            else:
                source, note = "cudaMemGetInfo of another process", f"{_WHAT}; {serving.how}"
                size = _measure_what_ends_with(worker, candidate.device, log_folder / "observer.log")
    except EnginesmithError as error:
        return _explain_unknown(f"a process that loads it as in production failed: {error}", None)
    if serving.shares_system_memory:
        note += "; the GPU shares the memory of the system, so this includes what the process has there"
    if size <= 0:
        return _explain_unknown(f"{serving.how}, and the use of the device did not change", serving.device_bytes)
    return {
        "deployment_bytes": size,
        "device_bytes": serving.device_bytes,
        "deployments_per_device": serving.device_bytes // size,
        "lenses": {"deployed": Lens(bytes=size, source=source, note=note)},
    }


def _explain_unknown(reason: str, device_bytes: int | None) -> dict[str, Any]:
    fields = {"deployment_bytes": None, "device_bytes": device_bytes, "deployments_per_device": None}
    return {**fields, "reasons": {name: reason for name, size in fields.items() if size is None}}


def _serve_candidate(connection: Connection, candidate: Candidate, memory_limit_bytes: int | None) -> None:
    open_until_the_end: list[Any] = []

    def answer(feeds: Feeds, _: Callable[[str], None]) -> _Serving:
        import torch

        engine, artifact, device = candidate.engine, candidate.artifact, candidate.device
        if memory_limit_bytes is not None:
            engine.prime(artifact, device)
            set_memory_limit(memory_limit_bytes, device)
        with explain_out_of_memory(device), Sampler(lambda: _read_own(device)[0] or 0, _INTERVAL_SECONDS) as sampler:
            session = engine.load(artifact, device)
            bound = session.bind(feeds)
            open_until_the_end.extend((session, bound))
            call(session, bound, 1 + STEADY_CALLS)
        own, why = _read_own(device)
        shares = bool(getattr(torch.cuda.get_device_properties(device.index), "is_integrated", False))
        total = int(torch.cuda.mem_get_info(device.index)[1])
        most = None if own is None else max(own, sampler.sampled.peak)
        return _Serving(most, why or sampler.sampled.words(), total, shares)

    serve(connection, answer)


def _read_own(device: Device) -> tuple[int | None, str]:
    return read_own_bytes(device, os.getpid())


def _measure_what_ends_with(worker: Worker, device: Device, log: Path) -> int:
    """End a process and return by how many bytes the use of the device falls, once it does not fall any more."""
    with Worker(_serve_device_used, device, log=log) as observer:

        def read() -> int:
            return int(observer.request(timeout_seconds=_START_SECONDS))

        before = read()
        worker.close()
        after, deadline = read(), time.monotonic() + _RETURN_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            now, settled = read(), after
            after = min(after, now)
            if now >= settled and after < before:
                break
    return before - after


def _serve_device_used(connection: Connection, device: Device) -> None:
    with contextlib.suppress(EOFError):
        serve(connection, lambda _: read_device_used(device))
