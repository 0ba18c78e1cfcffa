"""Compute operators over axes: sums and the like, softmax, normalization."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.pipeline.frameworks.torch.operators.attributes import (
    Compute,
    Make,
    list_sizes,
    read_float,
    read_int,
    read_ints,
    refuse,
)

if TYPE_CHECKING:
    import onnx_ir as ir


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Make:
    def make(node: "ir.Node", opset: int) -> Compute:
        fixed, keep = read_ints(node, "axes", ()), bool(read_int(node, "keepdims", 1))
        nothing = bool(read_int(node, "noop_with_empty_axes", 0))

        def compute(x: Tensor, axes: Tensor | None = None) -> Tensor:
            chosen = fixed if axes is None else list_sizes(axes)
            if not chosen and nothing:  # each number alone: ONNX Runtime squares it, or takes its logarithm
                return function(x[..., None], [-1], False).to(x.dtype)
            return function(x, chosen or list(range(x.ndim)), keep).to(x.dtype)

        return compute

    return make


def _average(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(x.sum(axes, keepdim=keep), count, rounding_mode="trunc")


def _norm(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    made: Tensor = torch.linalg.vector_norm(x if x.is_floating_point() else x.double(), 2, axes, keep)
    return made  # whose gradient at 0 is 0


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Make:
    def make(node: "ir.Node", opset: int) -> Compute:
        axis = read_int(node, "axis", -1 if opset >= 13 else 1)
        if opset >= 13:
            return lambda x: function(x, axis)

        def compute(x: Tensor) -> Tensor:
            rows = math.prod(x.shape[: axis % x.ndim])
            return function(x.reshape(rows, -1), 1).reshape(x.shape)

        return compute

    return make


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)


def _by_channel(value: Tensor, rank: int) -> Tensor:
    return value.reshape(1, -1, *[1] * (rank - 2))


def _batch_norm(node: "ir.Node", opset: int) -> Compute:
    epsilon = read_float(node, "epsilon", 1e-5)
    if read_int(node, "training_mode", 0):
        raise refuse(node, "training_mode")

    def compute(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)

    return compute


def _instance_norm(node: "ir.Node", opset: int) -> Compute:
    epsilon = read_float(node, "epsilon", 1e-5)
    return lambda x, scale, bias: torch.instance_norm(x, scale, bias, None, None, True, 0.0, epsilon, False)


def _layer_norm(node: "ir.Node", opset: int) -> Compute:
    axis, epsilon = read_int(node, "axis", -1), read_float(node, "epsilon", 1e-5)
    if any(value.name for value in node.outputs[1:]):
        raise refuse(node, "it gives means or deviations")

    def compute(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape[axis % x.ndim :]
        made = F.layer_norm(x, shape, None, None, epsilon) * scale
        return made if bias is None else made + bias

    return compute


def _group_norm(node: "ir.Node", opset: int) -> Compute:
    groups, epsilon = read_int(node, "num_groups", 1), read_float(node, "epsilon", 1e-5)

    def compute(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        made = F.group_norm(x, groups, eps=epsilon)
        if scale.numel() != x.shape[1]:  # opset 18 has one for each group
            scale, bias = (each.repeat_interleave(x.shape[1] // groups) for each in (scale, bias))
        return made * _by_channel(scale, x.ndim) + _by_channel(bias, x.ndim)

    return compute


def _rms_norm(node: "ir.Node", opset: int) -> Compute:
    axis, epsilon = read_int(node, "axis", -1), read_float(node, "epsilon", 1e-5)

    def compute(x: Tensor, scale: Tensor) -> Tensor:
        axes = tuple(range(axis % x.ndim, x.ndim))
        return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon) * scale

    return compute


def _lp_norm(node: "ir.Node", opset: int) -> Compute:
    axis, power = read_int(node, "axis", -1), read_int(node, "p", 2)

    def compute(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, power, axis, keepdim=True)
        return x / torch.where(norm == 0, 1.0, norm)

    return compute


def _mean_variance(node: "ir.Node", opset: int) -> Compute:
    axes = tuple(read_ints(node, "axes", (0, 2, 3)))

    def compute(x: Tensor) -> Tensor:
        centred = x - x.mean(axes, keepdim=True)
        return centred / centred.square().mean(axes, keepdim=True).clamp(1e-18).sqrt()

    return compute


def _local_response(node: "ir.Node", opset: int) -> Compute:
    size, alpha, beta, bias = (
        read_int(node, "size", 1),
        read_float(node, "alpha", 1e-4),
        read_float(node, "beta", 0.75),
        read_float(node, "bias", 1.0),
    )
    return lambda x: F.local_response_norm(x, size, alpha, beta, bias)


MADE: dict[str, Make] = {
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceMean": _reduce(_average),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceProd": _reduce(_product),
    "ReduceL1": _reduce(lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    "ReduceL2": _reduce(_norm),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
    "ReduceLogSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep).log()),
    "ReduceLogSumExp": _reduce(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "Hardmax": _softmax(_hardmax),
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "RMSNormalization": _rms_norm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "LRN": _local_response,
}
"""Operators whose function is made from their attributes."""
