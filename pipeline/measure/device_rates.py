"""What is repeated to find a device's limits: copies, matrix products and operators that do next to nothing.

On the CPU each piece of work is for one thread and takes some milliseconds at most, so that a few of them run
undisturbed on a machine that is shared.
"""

import contextlib
import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from enginesmith.pipeline.engines import baseline
from enginesmith.pipeline.frameworks.onnx import evaluator
from enginesmith.pipeline.measure.rows import DeviceLimits, Rate
from enginesmith.pipeline.system import machine as devices
from enginesmith.pipeline.system.device import Device

# What a device can do at best: how fast it moves bytes, multiplies matrices and starts operators.
#
# Each figure is the best of short repetitions that are spread over some seconds, as machines are shared and other work
# can only make a repetition slower. The median stands beside it: far apart, they say that the device was busy,
# and that
# even the best may be too low. What cannot be had is missing, with the reason.
#
# On the CPU every core repeats a piece of its own, and what counts is the most that all did at one moment. Cores that
# work on one piece wait for the last of them, which on a shared machine finds them together too seldom to tell
# anything.

COPY, READ, CACHE, OPERATOR, CALL = "copy", "read", "cache", "operator", "call"
"""Names of the figures that are no products; those are called after what they are computed in."""
_BUDGET_SECONDS = 3.5
_FEWEST_ROUNDS = 3
_BURST_SECONDS = 0.025
_MOMENT_SECONDS = 1e-6
_WIDE = 3.0
"""The best over the median above which a figure is doubtful."""


Timed = Callable[[], float]
"""Does something once and gives the seconds that it took."""


@dataclass(frozen=True)
class Probe:
    """Something that can be repeated: ``make`` gets each thread a piece of its own."""

    make: Callable[[], Timed]
    amount: float
    """What one repetition is worth of the figure."""
    how: str
    threads: int = 1
    over_seconds: float = _MOMENT_SECONDS
    """What several threads do counts on the average of that time: where they share a limit, touching is not enough."""


@dataclass(frozen=True)
class Candidate:
    """One way to measure a figure; the best of several counts."""

    figure: str
    prepare: Callable[[], Probe]
    """Raises RuntimeError, or an error of the kind, where this machine cannot do it; so may what the probe makes."""


@dataclass(frozen=True)
class Bench:
    """What there is to be measured on a device."""

    device: str
    cache_bytes: int | None
    candidates: tuple[Candidate, ...]
    cores: tuple[int, ...] = ()
    """What threads are to stay on, if there is more than one; none for a device without."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why something is not among the candidates."""


@dataclass
class _Taken:
    figure: str
    probe: Probe
    pieces: list[Timed]
    rates: list[float] = field(default_factory=list)


def measure_limits(device: Device, progress: Callable[[str], None] = lambda text: None) -> DeviceLimits:
    """Measure a device that nothing else runs on now; takes about 4 s.

    Raises:
        MissingCapability: the device is not there.
    """
    baseline("torch").require(device)
    start = time.monotonic()
    with opened(device) as found:
        return measured(found, start + _BUDGET_SECONDS, progress)


def measured(bench: Bench, deadline: float, progress: Callable[[str], None]) -> DeviceLimits:
    """Repeat all candidates in turns until the deadline of the monotonic clock, each in three bursts at least."""
    start = time.monotonic()
    reasons = dict(bench.reasons)
    taken = list(_prepared(bench, reasons))
    rounds = 0
    threads = max((one.probe.threads for one in taken), default=1)
    with ThreadPoolExecutor(threads, initializer=_stay_on, initargs=(itertools.cycle(bench.cores),)) as pool:
        while taken and (rounds < _FEWEST_ROUNDS or time.monotonic() < deadline):
            rounds += 1
            progress(f"{bench.device}, round {rounds}")
            for one in taken:
                one.rates += _burst(one, pool)
    rates: dict[str, Rate] = {}
    for one in taken:
        rate = _rate(one)
        if one.figure not in rates or rate.per_second > rates[one.figure].per_second:
            rates[one.figure] = rate
    return _limits(bench, rates, {name: why for name, why in reasons.items() if name not in rates}, start)


def _prepared(bench: Bench, reasons: dict[str, str]) -> Iterator[_Taken]:
    for candidate in bench.candidates:
        try:
            probe = candidate.prepare()
            yield _Taken(candidate.figure, probe, [probe.make() for _ in range(probe.threads)])
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            line = next(iter(str(error).strip().splitlines()), "")
            reasons[candidate.figure] = f"{type(error).__name__}: {line}" if line else type(error).__name__


def _stay_on(cores: Iterator[int]) -> None:
    """Keep this thread on a core of its own: on a busy machine two of them may be put on one."""
    core = next(cores, None)
    if core is not None:
        os.sched_setaffinity(0, {core})


def _burst(one: _Taken, pool: ThreadPoolExecutor) -> list[float]:
    """What was done in a second, as it was at the start of each repetition."""
    probe, end = one.probe, time.perf_counter() + _BURST_SECONDS
    collected = gc.isenabled()
    gc.disable()
    try:
        if len(one.pieces) == 1:  # in this thread, for which CUDA's device is chosen
            return [probe.amount / max(seconds, _MOMENT_SECONDS) for _, seconds in _repeated(one.pieces[0], end)]
        return together(
            list(pool.map(lambda piece: _repeated(piece, end), one.pieces)), probe.amount, probe.over_seconds
        )
    finally:
        if collected:
            gc.enable()


def _repeated(piece: Timed, end: float) -> list[tuple[float, float]]:
    """Start and seconds of each repetition, one at least."""
    taken: list[tuple[float, float]] = []
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        taken.append((start, piece()))
    return taken


def together(
    threads: Sequence[Sequence[tuple[float, float]]], amount: float, seconds: float = _MOMENT_SECONDS
) -> list[float]:
    """What all threads did in a second, on the average of the given time from the start of each repetition on.

    ``threads`` holds the start and seconds of each repetition, worth ``amount`` each.
    """
    repetitions = np.array([one for thread in threads for one in thread])
    starts, taken = repetitions[:, 0], np.maximum(repetitions[:, 1], _MOMENT_SECONDS)
    moments = np.concatenate([starts, starts + taken])
    order = np.argsort(moments, kind="stable")
    moments, changes = moments[order], np.concatenate([amount / taken, -amount / taken])[order]
    done = np.concatenate([[0.0], np.cumsum(np.cumsum(changes)[:-1] * np.diff(moments))])
    found = (np.interp(starts + seconds, moments, done) - np.interp(starts, moments, done)) / seconds
    return [float(rate) for rate in found]


def _rate(one: _Taken) -> Rate:
    return Rate(
        per_second=max(one.rates),
        usual_per_second=median(one.rates),
        repetitions=len(one.rates),
        how=one.probe.how,
    )


def _limits(bench: Bench, rates: dict[str, Rate], reasons: dict[str, str], start: float) -> DeviceLimits:
    others = {COPY: "copy_bandwidth", READ: "read_bandwidth", CACHE: "cache_bandwidth"}
    others |= {OPERATOR: "operators", CALL: "calls"}
    figures = {field: rates.get(figure) for figure, field in others.items()}
    missing = {field: "nothing that tells could be run here" for field, rate in figures.items() if rate is None}
    wide = [f"{name} {rate.spread:.1f} ×" for name, rate in rates.items() if rate.spread > _WIDE]
    busy = f"the device was busy and may be faster than this: the best over the median is {', '.join(wide)}"
    return DeviceLimits(
        device=bench.device,
        cache_bytes=bench.cache_bytes,
        products={name: rate for name, rate in rates.items() if name not in others},
        seconds=time.monotonic() - start,
        warnings=(busy,) if wide else (),
        reasons=missing | {others.get(name, name): why for name, why in reasons.items()},
        **figures,
    )


Call = Callable[[], object]
Timer = Callable[[Call], float]
"""Does it once and gives the seconds that took."""

_MIB = 1 << 20
_SIDES = {"cpu": (128, 256, 384, 512, 768, 1024), "cuda": (1024, 2048, 4096, 8192)}
_PRODUCT_SECONDS = {"cpu": 0.003, "cuda": 0.003}
_SHARED_SECONDS = 0.003
"""Threads share the memory: what they move counts only while they go on together for longer than the caches can take
in what is written, which they have room for when other work was there in between."""
_TRIED = 5
_NARROW_RANGE = 7
"""Of random int8 values; what they are changes nothing about the time."""
_KERNELS = 1000


def copies(place: str, piece: int, pieces: int, threads: int, timer: Timer) -> Probe:
    """Copy ``piece`` bytes, the next of ``pieces`` each time; bytes read and written count."""
    import torch

    def make() -> Timed:
        source, target = (torch.ones(pieces, piece // 4, device=place) for _ in range(2))
        turns = itertools.cycle([partial(to.copy_, of) for to, of in zip(target, source, strict=True)])
        return partial(timer, lambda: next(turns)())

    how = f"torch copies {_of(piece, pieces, threads)}"
    shared = {"over_seconds": _SHARED_SECONDS} if pieces > 1 else {}
    return Probe(make, 2.0 * piece, how, threads, **shared)


def reads(place: str, piece: int, pieces: int, threads: int, timer: Timer) -> Probe:
    """Reduce to one number: by a sum on CUDA, on the CPU by a product with itself, which is the faster one there."""
    import torch

    def make() -> Timed:
        source = torch.ones(pieces, piece // 4, device=place)
        turns = itertools.cycle(
            [partial(torch.sum, row) if row.is_cuda else partial(torch.dot, row, row) for row in source]
        )
        return partial(timer, lambda: next(turns)())

    how = f"torch reduces {_of(piece, pieces, threads)} to one number"
    return Probe(make, float(piece), how, threads, _SHARED_SECONDS)


def _of(piece: int, pieces: int, threads: int) -> str:
    size = f"{piece / _MIB:g} MiB"
    return (f"the next {size} of {pieces} times that" if pieces > 1 else f"the same {size}") + _each(threads)


def _each(threads: int) -> str:
    return f" in each of {threads} threads" if threads > 1 else ""


def products(place: str, dtype: str, threads: int, timer: Timer) -> Probe:
    """Multiply square matrices with torch: the largest ones that are within some milliseconds."""
    at = partial(_SPECIAL.get(dtype, _plain_product), place, dtype)
    side = _side(at, place, timer)
    how = f"torch multiplies {dtype} matrices of {side} × {side}{_each(threads)}"
    return Probe(lambda: partial(timer, at(side)), 2.0 * side**3, how, threads)


def _plain_product(place: str, dtype: str, side: int) -> Call:
    import torch

    left, right, out = (torch.randn(side, side, device=place).to(getattr(torch, dtype)) for _ in range(3))
    return partial(torch.mm, left, right, out=out)


def _integer_product(place: str, dtype: str, side: int) -> Call:
    """cuBLAS takes the second matrix by columns."""
    import torch

    left, right = (torch.randint(-_NARROW_RANGE, _NARROW_RANGE, (side, side), device=place) for _ in range(2))
    return partial(torch._int_mm, left.to(torch.int8), right.to(torch.int8).t())


def _scaled_product(place: str, dtype: str, side: int) -> Call:
    """cuBLASLt takes the second matrix by columns, and sums in fewer bits if it may."""
    import torch

    left, right = (torch.randn(side, side, device=place).to(getattr(torch, dtype)) for _ in range(2))
    one = torch.ones((), device=place)
    how: dict[str, Any] = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(torch._scaled_mm, left, right.t(), **how)


_SPECIAL = {"int8": _integer_product, "float8_e4m3fn": _scaled_product}


def _side(at: Callable[[int], Call], place: str, timer: Timer) -> int:
    """The largest side whose product is expected to stay within the limit."""
    kind = place.partition(":")[0]
    least, *larger = _SIDES[kind]
    call = at(least)
    seconds = min(timer(call) for _ in range(_TRIED))
    return max((side for side in larger if seconds * (side / least) ** 3 <= _PRODUCT_SECONDS[kind]), default=least)


def runtime_products(precision: Literal["fp32", "int8"], threads: int, timer: Timer) -> Probe:
    """As :func:`products` in ONNX Runtime, whose kernels are others; int8 as it is fastest there, with uint8."""
    at = partial(_runtime_product, precision == "int8")
    side = _side(at, "cpu", timer)
    told = "uint8 by int8" if precision == "int8" else "float32"
    how = f"{evaluator.TITLE} multiplies {told} matrices of {side} × {side}{_each(threads)}"
    return Probe(lambda: partial(timer, at(side)), 2.0 * side**3, how, threads)


def _runtime_product(integers: bool, side: int) -> Call:
    import numpy as np

    operator, kinds = ("MatMulInteger", ("uint8", "int8", "int32")) if integers else ("MatMul", ("float32",) * 3)
    left, right = np.random.default_rng(0).integers(0, _NARROW_RANGE, (2, side, side))
    return _session([(operator, ["x", "w"], ["y"])], left.astype(kinds[0]), {"w": right.astype(kinds[1])}, kinds[2])


def runtime_chain(count: int, timer: Timer) -> Probe:
    """Calls of so many sines of one number in ONNX Runtime, which starts no other operator faster; operators count."""
    import numpy as np

    names = ["x", *(f"x{index}" for index in range(1, count)), "y"]
    nodes = [("Sin", [given], [made]) for given, made in itertools.pairwise(names)]

    def make() -> Timed:
        return partial(timer, _session(nodes, np.ones(1, np.float32), {}, "float32"))

    return Probe(make, float(count), f"{evaluator.TITLE} takes the sine of one number, {count} operators a call")


def _session(
    nodes: Sequence[tuple[str, list[str], list[str]]], feed: Any, weights: dict[str, Any], result: str
) -> Call:
    """A call on one thread of nodes that make ``y`` from ``x`` in the same shape, as they stand, feeds bound."""
    import numpy as np
    from onnx import helper, numpy_helper

    kinds = [helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for dtype in (feed.dtype, result)]
    given, made = (helper.make_tensor_value_info(name, kinds[index], feed.shape) for index, name in enumerate("xy"))
    body = [helper.make_node(operator, inputs, outputs) for operator, inputs, outputs in nodes]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(body, "probe", [given], [made], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    ort, _ = evaluator.import_library()
    chosen = evaluator.session_options(ort, 1)
    session = ort.InferenceSession(model.SerializeToString(), chosen, providers=["CPUExecutionProvider"])
    value, binding = ort.OrtValue.ortvalue_from_numpy(feed), session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_output("y")

    def call(kept: Any = value) -> None:  # ONNX Runtime itself does not keep what is bound alive
        session.run_with_iobinding(binding)

    return call


def empty_kernels(timer: Timer) -> Probe:
    """Kernels that end at once, one after the other on a stream, until all have; kernels count."""
    import torch

    def launched() -> None:
        for _ in range(_KERNELS):
            torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

    return Probe(lambda: partial(timer, launched), float(_KERNELS), f"{_KERNELS} empty kernels put on one stream")


def empty_call(timer: Timer) -> Probe:
    """One such kernel, and waiting for it."""
    import torch

    def called() -> None:
        torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

    return Probe(lambda: partial(timer, called), 1.0, "one empty kernel, and waiting for it")


# Which probes are for which device, and how its time is taken: by the host's clock, or by events on a CUDA stream.

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
        *(Candidate(name, partial(products, "cpu", dtype, threads, by_host)) for name, dtype in _TORCH.items()),
        *(Candidate(name, partial(runtime_products, name, threads, by_host)) for name in _RUNTIME),
        Candidate(OPERATOR, partial(runtime_chain, _OPERATORS, by_host)),
        Candidate(CALL, partial(runtime_chain, 1, by_host)),
    )
    reasons = {"tf32": "a type of CUDA devices", "fp8": f"torch and {evaluator.TITLE} have no such products on the CPU"}
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
            Candidate(name, partial(products, str(device), dtype, 1, set_for(name)))
            for name, dtype in _CUDA.items()
            if name not in too_old
        ),
        Candidate("fp16", partial(products, str(device), "float16", 1, set_for("fp16 sums"))),
        Candidate(OPERATOR, partial(empty_kernels, by_host)),
        Candidate(CALL, partial(empty_call, by_host)),
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
    yield Candidate(COPY, partial(copies, place, piece, pieces, threads, timer))
    yield Candidate(READ, partial(reads, place, piece, pieces, threads, timer))
    for size in _CACHED[kind]:
        if cache and 2 * size * threads <= cache:
            yield Candidate(CACHE, partial(copies, place, size, 1, threads, timer))


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
