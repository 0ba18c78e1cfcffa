"""Compute operators over axes: sums and the like, softmax, normalization."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.torch.operators.attributes import (
    Compute,
    Make,
    list_sizes,
    read_float,
    read_int,
    refuse,
)


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Compute:
    def compute(
        x: Tensor,
        given: Tensor | None = None,
        *,
        axes: tuple[int, ...] = (),
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        chosen = list(axes) if given is None else list_sizes(given)
        if not chosen and noop_with_empty_axes:  # each number alone: ONNX Runtime squares it, or takes its logarithm
            return function(x[..., None], [-1], False).to(x.dtype)
        return function(x, chosen or list(range(x.ndim)), bool(keepdims)).to(x.dtype)

    return compute


def _average(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(x.sum(axes, keepdim=keep), count, rounding_mode="trunc")


def _norm(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x if x.is_floating_point() else x.double(), 2, axes, keep)
    return norms  # whose gradient at 0 is 0


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Compute:
    def compute(x: Tensor, *, axis: int | None = None, opset: int = 13) -> Tensor:
        if opset >= 13:
            return function(x, -1 if axis is None else axis)
        rows = math.prod(x.shape[: (1 if axis is None else axis) % x.ndim])
        return function(x.reshape(rows, -1), 1).reshape(x.shape)

    return compute


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


def _layer_norm(node: "ir.Node", opset: int) -> Compute:
    axis, epsilon = read_int(node, "axis", -1), read_float(node, "epsilon", 1e-5)
    if any(value.name for value in node.outputs[1:]):
        raise refuse(node, "it gives means or deviations")

    def compute(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape[axis % x.ndim :]
        result = F.layer_norm(x, shape, None, None, epsilon) * scale
        return result if bias is None else result + bias

    return compute


def _group_norm(x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int = 1, epsilon: float = 1e-5) -> Tensor:
    result = F.group_norm(x, num_groups, eps=epsilon)
    if scale.numel() != x.shape[1]:  # opset 18 has one for each group
        scale, bias = (each.repeat_interleave(x.shape[1] // num_groups) for each in (scale, bias))
    return result * _by_channel(scale, x.ndim) + _by_channel(bias, x.ndim)


def _rms_norm(x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon) * scale


def _lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return x / torch.where(norm == 0, 1.0, norm)


def _mean_variance(x: Tensor, *, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    centered = x - x.mean(axes, keepdim=True)
    return centered / centered.square().mean(axes, keepdim=True).clamp(1e-18).sqrt()


PLAIN: dict[str, Compute] = {
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
    "InstanceNormalization": lambda x, scale, bias, *, epsilon=1e-5: torch.instance_norm(
        x, scale, bias, None, None, True, 0.0, epsilon, False
    ),
    "GroupNormalization": _group_norm,
    "RMSNormalization": _rms_norm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "LRN": lambda x, *, size=1, alpha=1e-4, beta=0.75, bias=1.0: F.local_response_norm(x, size, alpha, beta, bias),
}
MADE: dict[str, Make] = {"BatchNormalization": _batch_norm, "LayerNormalization": _layer_norm}
