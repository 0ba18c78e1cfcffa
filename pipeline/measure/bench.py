"""Which probes are for which device, and how its time is taken: by the host's clock, or by events on a CUDA stream."""

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.measure import device as devices
from enginesmith.pipeline.measure import probes
from enginesmith.pipeline.measure.limits import CACHE, CALL, COPY, OPERATOR, READ, Bench, Candidate
from enginesmith.pipeline.measure.probes import Call, Timer

_MIB = 1 << 20
_BEYOND_CACHE = 4
"""What is copied has that many times the bytes of all caches, so that nothing of it is left there the next time."""
_LEAST_BYTES, _MOST_BYTES = 128 * _MIB, 1024 * _MIB
_SHARE_OF_MEMORY = 16
_MOST_FREE_BYTES = 1 << 60
_PIECE = {"cpu": 4 * _MIB, "cuda": 128 * _MIB}
_CACHED = {"cpu": (_MIB // 8, _MIB // 4, _MIB), "cuda": (4 * _MIB, 16 * _MIB)}
_QUEUED = 10
_AHEAD_CYCLES = 500_000
"""A third of a millisecond, in which some tens of calls are sent."""
_NO_CACHES = "the system does not show what caches there are"
_OPERATORS = 1000
_CPU_FOLDER = Path("/sys/devices/system/cpu")
_TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
_RUNTIME: tuple[Literal["fp32", "int8"], ...] = ("fp32", "int8")
_SINCE = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""The compute capability from which on a type has products of its own."""
_CUDA = {"fp32": "float32", "tf32": "float32", **_TORCH, "fp8": "float8_e4m3fn"}


@contextlib.contextmanager
def opened(device: Device) -> Iterator[Bench]:
    """What can be measured on a device; torch's threads and device are as before afterwards."""
    import torch

    if device.kind == "cuda":
        with torch.inference_mode(), torch.cuda.device(device.index):
            yield cuda_bench(device)
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # every thread that is started from now on has that
    try:
        yield _cpu_bench(device)
    finally:
        torch.set_num_threads(before)


def _cpu_bench(device: Device) -> Bench:
    cores = os.sched_getaffinity(0)
    cache = cpu_cache_bytes(_CPU_FOLDER, cores)
    machine = devices.environment()
    free = min(machine.available_memory_bytes or machine.memory_bytes, machine.memory_limit_bytes or _MOST_FREE_BYTES)
    threads = device.thread_count
    candidates = (
        *_transfers("cpu", cache, free, threads, by_host),
        *(Candidate(name, partial(probes.products, "cpu", dtype, threads, by_host)) for name, dtype in _TORCH.items()),
        *(Candidate(name, partial(probes.runtime_products, name, threads, by_host)) for name in _RUNTIME),
        Candidate(OPERATOR, partial(probes.runtime_chain, _OPERATORS, by_host)),
        Candidate(CALL, partial(probes.runtime_chain, 1, by_host)),
    )
    reasons = {"tf32": "a type of CUDA devices", "fp8": "torch and ONNX Runtime have no such products on the CPU"}
    reasons |= dict.fromkeys(("cache_bytes", CACHE), _NO_CACHES) if cache is None else {}
    return Bench(f"{device}, {threads} thread{'s'[: threads > 1]}", cache, candidates, tuple(sorted(cores)), reasons)


def cuda_bench(device: Device) -> Bench:
    """What can be measured on the current CUDA device."""
    import torch

    facts = torch.cuda.get_device_properties(device.index)
    cache: int | None = getattr(facts, "L2_cache_size", None) or None
    free, _ = torch.cuda.mem_get_info(device.index)
    too_old = {name: since for name, since in _SINCE.items() if (facts.major, facts.minor) < since}
    candidates = (
        *_transfers(str(device), cache, free, 1, by_events),
        *(
            Candidate(name, partial(probes.products, str(device), dtype, 1, set_for(name)))
            for name, dtype in _CUDA.items()
            if name not in too_old
        ),
        Candidate("fp16", partial(probes.products, str(device), "float16", 1, set_for("fp16 sums"))),
        Candidate(OPERATOR, partial(probes.empty_kernels, by_host)),
        Candidate(CALL, partial(probes.empty_call, by_host)),
    )
    reasons = {
        name: f"needs compute capability {major}.{minor}, and {facts.name} has {facts.major}.{facts.minor}"
        for name, (major, minor) in too_old.items()
    }
    reasons |= dict.fromkeys(("cache_bytes", CACHE), _NO_CACHES) if cache is None else {}
    return Bench(f"{device}, {facts.name}", cache, candidates, reasons=reasons)


def _transfers(place: str, cache: int | None, free: int, threads: int, timer: Timer) -> Iterator[Candidate]:
    """A thread's share is a whole number of pieces; with little memory it may be smaller than the caches."""
    kind = place.partition(":")[0]
    share = min(_MOST_BYTES, max(_LEAST_BYTES, _BEYOND_CACHE * (cache or 0)), free // _SHARE_OF_MEMORY) // threads
    piece = min(_PIECE[kind], max(share, _MIB))
    pieces = max(1, share // piece)
    yield Candidate(COPY, partial(probes.copies, place, piece, pieces, threads, timer))
    yield Candidate(READ, partial(probes.reads, place, piece, pieces, threads, timer))
    for size in _CACHED[kind]:
        if cache and 2 * size * threads <= cache:
            yield Candidate(CACHE, partial(probes.copies, place, size, 1, threads, timer))


def cpu_cache_bytes(folder: Path, cores: set[int]) -> int | None:
    """All caches for data above the first level that these cores have, each once; None where the kernel shows none.

    Levels are added up, as there are processors whose last one keeps nothing that is in another.
    """
    found: dict[tuple[int, str], int] = {}
    for core in cores:
        for index in (folder / f"cpu{core}" / "cache").glob("index*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                level, kind, size, shared = (
                    (index / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
                )
                if int(level) > 1 and kind != "Instruction":
                    found[int(level), shared] = _bytes(size)
    return sum(found.values()) or None


def _bytes(text: str) -> int:
    """Of ``1024K`` or ``32M``."""
    return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)


def by_host(call: Call) -> float:
    """Seconds by the host's clock."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e9


def by_events(call: Call) -> float:
    """Seconds that a call's work takes on the current stream.

    The device spins until several calls are in its queue, and is then timed over all of them: by itself, each would be
    over before the host has sent the next one.
    """
    from torch import cuda

    before, after = (cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    before.record()
    for _ in range(_QUEUED):
        call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / _QUEUED


def set_for(figure: str) -> Timer:
    """Events around products of float32 in TF32 or not, and of float16 with sums in float16 or not, as the figure says.

    Sums in float16 are twice as fast on devices for games, and TensorRT uses them.
    """
    wanted = {"allow_tf32": figure == "tf32", "allow_fp16_accumulation": figure == "fp16 sums"}

    def timed(call: Call) -> float:
        from torch.backends.cuda import matmul

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
            before = {name: getattr(matmul, name) for name in wanted}
            try:
                for name, value in wanted.items():
                    setattr(matmul, name, value)
                return by_events(call)
            finally:
                for name, value in before.items():
                    setattr(matmul, name, value)

    return timed
