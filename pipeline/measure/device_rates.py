"""Measure what a device can do at best: bytes copied and read, matrix products in each type, operators started.

Each figure is the best of several rounds, as machines are shared and other work can only make a round slower. The
median round stands beside it: far apart, they say that the device was busy, and that even the best may be too low. What
cannot be had is missing, with the reason.
"""

import contextlib
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from enginesmith.pipeline.engines import baseline
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.frameworks.onnx import evaluator
from enginesmith.pipeline.measure.rows import DeviceLimits, Rate
from enginesmith.pipeline.system import cpu
from enginesmith.pipeline.system import machine as devices
from enginesmith.pipeline.system.device import Device

Call = Callable[[], object]
Timer = Callable[[Call], float]
"""Make a call once, or several times; return the seconds of the work of one."""

_MIB = 1 << 20
_FIELDS = ("copy_bandwidth", "read_bandwidth", "cache_bandwidth", "operators", "calls")
"""Figures that are no products; those are called after the type that they are computed in."""
_BUDGET_SECONDS = 3.5
_FEWEST_ROUNDS = 3
_BURST_SECONDS = 0.025
_STEADY_ROUNDS, _STEADY = 5, 1.01
"""Measuring ends when so many rounds in a row have made no figure better by more than 1 %."""
_WIDE = 3.0
"""Ratio of the best to the median above which a figure is doubtful."""
_BEYOND_CACHE = 4
"""Copied bytes for each byte of all caches, so that nothing of them is left there the next time."""
_LEAST_BYTES, _MOST_BYTES = {"cpu": 128 * _MIB, "cuda": 512 * _MIB}, 1024 * _MIB
_SHARE_OF_MEMORY = 16
_CPU_FOLDER = Path("/sys/devices/system/cpu")
_PIECE = {"cpu": 4 * _MIB, "cuda": 128 * _MIB}
_CACHED = {"cpu": _MIB, "cuda": 16 * _MIB}
_SIDE = {"cpu": 384, "cuda": 4096}
"""Side of the matrices that a thread or a GPU multiplies."""
_LONGEST_PRODUCT_SECONDS = 0.05
_SMALLEST_SIDE = 128
_TRIED = 2
_OPERATORS = 1000
_SINCE = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
"""Compute capability from which on a type has products of its own."""
_TORCH = {
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}
_QUEUED = 10
_AHEAD_CYCLES = 500_000
"""A third of a millisecond, in which some tens of calls are sent."""


@dataclass(frozen=True)
class Probe:
    """Keep calls that can be repeated, one for each thread, and the amount of one repetition."""

    figure: str
    calls: tuple[Call, ...]
    amount: float
    how: str
    timer: Timer
    shared: bool = False
    """True where threads share what limits them: one that goes on alone for a moment is faster than all together."""


def measure_limits(device: Device, progress: Callable[[str], None] = lambda text: None) -> DeviceLimits:
    """Measure a device that nothing else runs on now; takes about 4 s.

    Raises:
        MissingCapability: the device is not there.
    """
    baseline("torch").require(device)
    start = time.monotonic()
    probes = []
    with contextlib.ExitStack() as restored:
        import torch

        if device.kind == "cuda":
            restored.enter_context(torch.inference_mode())
            restored.enter_context(torch.cuda.device(device.index))
        else:  # each thread that is started from now on has one core
            restored.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        name, cache, free, reasons = _describe(device)
        for figure, make in _list_probes(device, cache, free, reasons).items():
            try:
                probe = make(figure)
                probe.timer(probe.calls[0])
            except (MissingCapability, ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                line = next(iter(str(error).strip().splitlines()), "")
                reasons[figure] = f"{type(error).__name__}: {line}" if line else type(error).__name__
            else:
                probes.append(probe)
        rates = repeat_probes(probes, start + _BUDGET_SECONDS, lambda text: progress(f"{name}, {text}"))
    wide = [f"{figure} {rate.spread:.1f} ×" for figure, rate in rates.items() if rate.spread > _WIDE]
    busy = f"the device was busy and may be faster than this: the best over the median is {', '.join(wide)}"
    figures = {field: rates.pop(field, None) for field in _FIELDS}
    missing = {field: "nothing that tells could be run here" for field, rate in figures.items() if rate is None}
    return DeviceLimits(
        device=name,
        cache_bytes=cache,
        products=rates,
        seconds=time.monotonic() - start,
        warnings=(busy,) if wide else (),
        reasons=missing | reasons,
        **figures,
    )


def repeat_probes(probes: Sequence[Probe], deadline: float, progress: Callable[[str], None]) -> dict[str, Rate]:
    """Repeat all probes in turns until their best stays as it is, or until the deadline of the monotonic clock.

    What threads do in a second is added up; each has work of its own, as threads that share some wait for the last of
    them, which on a busy machine is often one that has no core.
    """
    rates: dict[str, list[float]] = {probe.figure: [] for probe in probes}
    repetitions = dict.fromkeys(rates, 0)
    steady = 0
    threads = max((len(probe.calls) for probe in probes), default=1)
    with ThreadPoolExecutor(threads) as pool:
        for number in itertools.count(1):
            progress(f"round {number}")
            before = {figure: max(values, default=0.0) for figure, values in rates.items()}
            for probe in probes:
                run = map if len(probe.calls) == 1 else pool.map  # CUDA's device is chosen for this thread
                seconds = list(run(partial(_repeat, probe.timer), probe.calls))
                typical = median if probe.shared and len(seconds) > 1 else min
                rates[probe.figure].append(sum(probe.amount / typical(taken) for taken in seconds))
                repetitions[probe.figure] += sum(map(len, seconds))
            better = any(max(values) > _STEADY * before[figure] for figure, values in rates.items())
            steady = 0 if better else steady + 1
            if number >= _FEWEST_ROUNDS and (steady >= _STEADY_ROUNDS or time.monotonic() >= deadline):
                break
    return {
        probe.figure: Rate(
            per_second=max(rates[probe.figure]),
            usual_per_second=median(rates[probe.figure]),
            repetitions=repetitions[probe.figure],
            how=probe.how + (f" in each of {len(probe.calls)} threads" if len(probe.calls) > 1 else ""),
        )
        for probe in probes
    }


def _repeat(timer: Timer, call: Call) -> list[float]:
    """Return the seconds of each repetition in one short burst, of one at least."""
    end = time.perf_counter() + _BURST_SECONDS
    seconds = [timer(call)]
    while time.perf_counter() < end:
        seconds.append(timer(call))
    return seconds


def _describe(device: Device) -> tuple[str, int | None, int, dict[str, str]]:
    """Return the device's name, the bytes of its caches and of free memory, and the reasons of missing figures."""
    if device.kind == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device.index)
        name, cache = properties.name, getattr(properties, "L2_cache_size", None) or None
        free, _ = torch.cuda.mem_get_info(device.index)
        capability = (properties.major, properties.minor)
        reasons = {
            precision: f"needs compute capability {major}.{minor}, and {name} has {capability[0]}.{capability[1]}"
            for precision, (major, minor) in _SINCE.items()
            if capability < (major, minor)
        }
    else:
        name, cache = f"{device.thread_count} thread{'s'[: device.thread_count > 1]}", cpu_cache_bytes(_CPU_FOLDER)
        free = cpu.free_bytes() or devices.environment().memory_bytes
        no_fp8 = f"torch and {evaluator.TITLE} have no such products on the CPU"
        reasons = {"tf32": "a type of CUDA devices", "fp8": no_fp8}
    if cache is None:
        no_caches = "the system does not show what caches there are"
        reasons |= dict.fromkeys(("cache_bytes", "cache_bandwidth"), no_caches)
    return f"{device}, {name}", cache, free, reasons


def cpu_cache_bytes(folder: Path, cores: set[int] | None = None) -> int | None:
    """Add up the caches for data above the first level that these cores have, each once; None where none are shown.

    Levels are added up, as there are processors whose last one keeps nothing that is in another. The cores are by
    default those that this process may use.
    """
    caches: dict[tuple[int, str], int] = {}
    for core in os.sched_getaffinity(0) if cores is None else cores:
        for index in (folder / f"cpu{core}" / "cache").glob("index*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                level, kind, size, shared = (
                    (index / name).read_text(encoding="utf-8").strip()
                    for name in ("level", "type", "size", "shared_cpu_list")
                )
                if int(level) > 1 and kind != "Instruction":
                    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1], 1)
                    caches[int(level), shared] = int(size.rstrip("KMG")) * unit
    return sum(caches.values()) or None


# Probes: what is repeated


def _list_probes(
    device: Device, cache: int | None, free: int, reasons: Mapping[str, str]
) -> Mapping[str, Callable[[str], Probe]]:
    threads = _count_threads(device)
    least = max(_LEAST_BYTES[device.kind], _BEYOND_CACHE * (cache or 0))
    size = min(_MOST_BYTES, least, free // _SHARE_OF_MEMORY) // threads
    sizes = {"copy_bandwidth": size, "read_bandwidth": size}
    if cache:  # source and target of all threads together take half of the caches at most
        sizes["cache_bandwidth"] = min(_CACHED[device.kind], cache // 4 // threads)
    return (
        {figure: partial(memory_probe, device, size) for figure, size in sizes.items()}
        | {precision: partial(product_probe, device) for precision in _TORCH if precision not in reasons}
        | {"operators": partial(operators_probe, device, _OPERATORS), "calls": partial(operators_probe, device, 1)}
    )


def _count_threads(device: Device) -> int:
    return 1 if device.kind == "cuda" else device.thread_count


def memory_probe(device: Device, size: int, figure: str) -> Probe:
    """Make a probe that copies ``size`` bytes in each thread, or only reads them, as engines read weights, by pieces.

    Bytes read and bytes written both count.
    """
    import torch

    piece, reads = min(size, _PIECE[device.kind]), figure == "read_bandwidth"
    count = math.ceil(size / piece)

    def make() -> Call:
        source, target = (torch.ones(count, piece // 4, device=str(device)) for _ in range(2))
        pieces = itertools.cycle(list(zip(source, target, strict=True)))
        return (lambda: next(pieces)[0].sum()) if reads else (lambda: torch.Tensor.copy_(*next(pieces)))

    piece_text, whole_text = (f"{size / _MIB:g} MiB" for size in (piece, count * piece))
    pieces = f"the next {piece_text} of {whole_text}" if count > 1 else f"the same {piece_text}"
    calls = tuple(make() for _ in range(_count_threads(device)))
    timer = time_by_events if device.kind == "cuda" else time_by_host
    how = f"torch {'sums up' if reads else 'copies'} {pieces}"
    return Probe(figure, calls, float(piece if reads else 2 * piece), how, timer, shared=True)


def product_probe(device: Device, precision: str) -> Probe:
    """Multiply square matrices, smaller ones where that takes long; a multiply-add is two operations.

    ONNX Runtime multiplies 8-bit integers on the CPU, as torch has no fast kernel for them there; all else torch does.
    """
    timer = partial(_time_product, precision) if device.kind == "cuda" else time_by_host
    by_torch, dtype = device.kind == "cuda" or precision != "int8", _TORCH[precision]
    make = partial(_multiply, str(device), dtype)
    side = _SIDE[device.kind]
    while side > _SMALLEST_SIDE:
        call = make(side)
        if min(timer(call) for _ in range(_TRIED)) <= _LONGEST_PRODUCT_SECONDS:
            break
        side //= 2
    what = f"torch multiplies {dtype}" if by_torch else f"{evaluator.TITLE} multiplies uint8 by int8"
    calls = tuple(make(side) for _ in range(_count_threads(device)))
    return Probe(precision, calls, 2.0 * side**3, f"{what} matrices of {side} × {side}", timer)


def _multiply(place: str, dtype: str, side: int) -> Call:
    """Prepare a product; cuBLAS takes the second matrix of 8-bit types by columns."""
    import torch

    if dtype == "int8" and place == "cpu":
        left, right = np.random.default_rng(0).integers(0, 7, (2, side, side))
        nodes = [("MatMulInteger", ["x", "w"], ["y"])]
        return _open_session(nodes, left.astype("uint8"), right.astype("int8"), "int32")
    kind = getattr(torch, dtype)
    if dtype == "int8":
        left, right = torch.randint(-7, 7, (2, side, side), device=place).to(kind)
        return partial(torch._int_mm, left, right.t())
    left, right, out = (torch.randn(side, side, device=place).to(kind) for _ in range(3))
    if dtype != "float8_e4m3fn":
        return partial(torch.mm, left, right, out=out)
    scale = torch.ones((), device=place)
    # cuBLASLt sums in fewer bits if it may
    how: dict[str, Any] = {"scale_a": scale, "scale_b": scale, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(torch._scaled_mm, left, right.t(), **how)


def operators_probe(device: Device, count: int, figure: str) -> Probe:
    """Start ``count`` operators that have next to nothing to do, one after the other, and wait for them.

    On the CPU they are ONNX Runtime's sines of one number, as it starts no other operator faster.
    """

    import torch

    def start_kernels() -> None:
        for _ in range(count):
            torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

    call: Call = start_kernels
    how = f"{count} empty kernels put on one stream"
    if device.kind != "cuda":
        names = ["x", *(f"x{index}" for index in range(1, count)), "y"]
        nodes = [("Sin", [source], [result]) for source, result in itertools.pairwise(names)]
        call = _open_session(nodes, np.ones(1, np.float32), None, "float32")
        how = f"{evaluator.TITLE} takes the sine of one number, {count} operators a call"
    return Probe(figure, (call,), float(count), how, time_by_host)


def _open_session(nodes: Sequence[tuple[str, list[str], list[str]]], x: Any, w: Any, result: str) -> Call:
    """Return a call, on one thread, of nodes that make ``y`` from ``x`` and ``w``, in the shape of ``x``."""
    from onnx import helper, numpy_helper

    kinds = [helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for dtype in (x.dtype, result)]
    ends = [helper.make_tensor_value_info(name, kind, x.shape) for name, kind in zip("xy", kinds, strict=True)]
    body = [helper.make_node(operator, inputs, outputs) for operator, inputs, outputs in nodes]
    stored = [] if w is None else [numpy_helper.from_array(w, "w")]
    graph = helper.make_graph(body, "probe", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    library, _ = evaluator.import_library()
    options = evaluator.session_options(library, 1)
    session = library.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    value, binding = library.OrtValue.ortvalue_from_numpy(x), session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_output("y")

    def call(bound: Any = value) -> None:  # ONNX Runtime itself does not keep what is bound alive
        session.run_with_iobinding(binding)

    return call


# Clocks


def time_by_host(call: Call) -> float:
    """Return the seconds of a call by the host's clock."""
    start = time.perf_counter_ns()
    call()
    return max(time.perf_counter_ns() - start, 1) / 1e9


def time_by_events(call: Call) -> float:
    """Return the seconds that a call's work takes on the current stream.

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


def _time_product(precision: str, call: Call) -> float:
    """Time a product of float32 values in TF32 or not, as the precision says, with sums of float16 in float16.

    Such sums are twice as fast on devices for games, and TensorRT uses them.
    """
    from torch.backends.cuda import matmul

    wanted = {"allow_tf32": precision == "tf32", "allow_fp16_accumulation": precision == "fp16"}
    with warnings.catch_warnings(), contextlib.ExitStack() as restored:
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        for name, value in wanted.items():
            restored.callback(setattr, matmul, name, getattr(matmul, name))
            setattr(matmul, name, value)
        return time_by_events(call)
