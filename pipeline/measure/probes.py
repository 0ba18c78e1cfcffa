"""What is repeated to find a device's limits: copies, matrix products and operators that do next to nothing.

On the CPU each piece of work is for one thread and takes some milliseconds at most, so that a few of them run
undisturbed on a machine that is shared.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.measure.limits import Probe, Timed

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
    how = f"ONNX Runtime multiplies {told} matrices of {side} × {side}{_each(threads)}"
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

    return Probe(make, float(count), f"ONNX Runtime takes the sine of one number, {count} operators a call")


def _session(
    nodes: Sequence[tuple[str, list[str], list[str]]], feed: Any, weights: dict[str, Any], result: str
) -> Call:
    """A call on one thread of nodes that make ``y`` from ``x`` in the same shape, as they stand, feeds bound."""
    import numpy as np
    import onnxruntime as ort
    from onnx import helper, numpy_helper

    from enginesmith.pipeline.engines import onnxruntime_session as sessions

    kinds = [helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for dtype in (feed.dtype, result)]
    given, made = (helper.make_tensor_value_info(name, kinds[index], feed.shape) for index, name in enumerate("xy"))
    body = [helper.make_node(operator, inputs, outputs) for operator, inputs, outputs in nodes]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(body, "probe", [given], [made], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    chosen = sessions.options(Device(threads=1), "disabled", memory_arena=True)
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
