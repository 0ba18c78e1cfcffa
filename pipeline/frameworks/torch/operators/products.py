"""Compute products, convolutions and pooling."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.torch.operators.attributes import (
    Compute,
    Make,
    read_float,
    read_int,
    read_ints,
    read_text,
    refuse,
)


def _gemm(node: "ir.Node", opset: int) -> Compute:
    alpha, beta = read_float(node, "alpha", 1.0), read_float(node, "beta", 1.0)
    turn_first, turn_second = read_int(node, "transA", 0), read_int(node, "transB", 0)

    def compute(first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
        product = (first.t() if turn_first else first) @ (second.t() if turn_second else second)
        product = product if alpha == 1 else alpha * product
        return product if bias is None else product + (bias if beta == 1 else beta * bias)

    return compute


@functools.cache
def _same_pads(
    sizes: tuple[int, ...], kernel: tuple[int, ...], strides: tuple[int, ...], steps: tuple[int, ...], *, upper: bool
) -> list[int]:
    """Compute paddings that keep ceil(size / stride) entries, as ``F.pad`` takes them: the last axis first."""
    flat: list[int] = []
    for size, width, stride, step in reversed(list(zip(sizes, kernel, strides, steps, strict=True))):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * step + 1 - size, 0)
        less, more = total // 2, total - total // 2
        flat += [less, more] if upper else [more, less]
    return flat


def _window(node: "ir.Node") -> Callable[[int], tuple[list[int], list[int], list[int], str]]:
    """Read strides, dilations, paddings (begin of all axes, then their ends) and the automatic kind, by the rank."""
    strides, steps, pads = (read_ints(node, name, ()) for name in ("strides", "dilations", "pads"))
    auto = read_text(node, "auto_pad", "NOTSET")
    return lambda rank: (strides or [1] * rank, steps or [1] * rank, pads or [0] * 2 * rank, auto)


def _conv(node: "ir.Node", opset: int) -> Compute:
    groups, window = read_int(node, "group", 1), _window(node)

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rank = x.ndim - 2
        strides, steps, pads, auto = window(rank)
        function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        if auto.startswith("SAME"):
            kernel = tuple(weight.shape[2:])
            flat = _same_pads(tuple(x.shape[2:]), kernel, tuple(strides), tuple(steps), upper=auto == "SAME_UPPER")
            x, pads = F.pad(x, flat), [0] * 2 * rank
        elif pads[:rank] != pads[rank:]:
            x = F.pad(x, [pads[place + side * rank] for place in range(rank)[::-1] for side in (0, 1)])
            pads = [0] * 2 * rank
        if rank == 2 and x.device.type == "cpu":  # the gradients of depthwise ones are twice as fast so
            x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
        return function(x, weight, bias, strides, pads[:rank], steps, groups)

    return compute


def _conv_transpose(node: "ir.Node", opset: int) -> Compute:
    groups, window, added = read_int(node, "group", 1), _window(node), read_ints(node, "output_padding", ())
    if "output_shape" in node.attributes or read_text(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise refuse(node, "its shape is given by output_shape or auto_pad")

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rank = x.ndim - 2
        strides, steps, pads, _ = window(rank)
        more = added or [0] * rank
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        if pads[:rank] == pads[rank:]:
            return function(x, weight, bias, strides, pads[:rank], more, groups, steps)
        whole = function(x, weight, bias, strides, [0] * rank, more, groups, steps)
        for axis in range(rank):
            length = whole.shape[2 + axis] - pads[axis] - pads[rank + axis]
            whole = whole.narrow(2 + axis, pads[axis], length)
        return whole

    return compute


def _pool(node: "ir.Node", opset: int) -> Compute:
    kernel, ceil = read_ints(node, "kernel_shape", ()), bool(read_int(node, "ceil_mode", 0))
    rank = len(kernel)
    strides, steps, pads, auto = _window(node)(rank)
    largest, padding_counts = node.op_type == "MaxPool", bool(read_int(node, "count_include_pad", 0))
    if len([value for value in node.outputs if value.name]) > 1 or not 1 <= rank <= 2:
        raise refuse(node, "it gives indices, or has three axes")
    if not largest and (any(step != 1 for step in steps) or (ceil and any(pads))):
        raise refuse(node, "it has dilations, or paddings with ceil_mode")

    def padded(x: Tensor, value: float) -> Tensor:
        if auto.startswith("SAME"):
            sizes = tuple(x.shape[2:])
            flat = _same_pads(sizes, tuple(kernel), tuple(strides), tuple(steps), upper=auto == "SAME_UPPER")
        else:
            flat = [pads[place + side * rank] for place in range(rank)[::-1] for side in (0, 1)]
        return F.pad(x, flat, value=value) if any(flat) else x

    def compute_largest(x: Tensor) -> Tensor:
        function: Any = (F.max_pool1d, F.max_pool2d)[rank - 1]
        result: Tensor = function(padded(x, -math.inf), kernel, strides, 0, steps, ceil)
        for axis in range(rank if ceil else 0):  # no window begins in the padding at the end
            most = -(-(x.shape[2 + axis] + pads[axis]) // strides[axis])
            result = result.narrow(2 + axis, 0, min(result.shape[2 + axis], most))
        return result

    def compute_mean(x: Tensor) -> Tensor:
        function: Any = (F.avg_pool1d, F.avg_pool2d)[rank - 1]
        whole = padded(x, 0.0)
        result: Tensor = function(whole, kernel, strides, 0, ceil)
        if whole is x or padding_counts:
            return result
        counted: Tensor = function(padded(torch.ones_like(x[:1, :1]), 0.0), kernel, strides, 0, ceil)
        return result / counted

    return compute_largest if largest else compute_mean


def _global_pool(function: Callable[..., Tensor]) -> Compute:
    return lambda x: function(x, tuple(range(2, x.ndim)), keepdim=True)


PLAIN: dict[str, Compute] = {
    "MatMul": torch.matmul,
    "GlobalAveragePool": _global_pool(torch.mean),
    "GlobalMaxPool": _global_pool(torch.amax),
    "Einsum": lambda *values, equation="": torch.einsum(equation, *values),
}
MADE: dict[str, Make] = {
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AveragePool": _pool,
}
