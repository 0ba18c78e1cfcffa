"""Constant weights in few bits: int8 and E4M3 with one scale per output channel, int4 with one per block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.precision.quantise.scales import LARGEST, Number, Rest, representable
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

BLOCKS = (128, 64, 32)
"""Block sizes of int4 weights, the wanted one first: what ONNX Runtime and TensorRT both have kernels for."""
_INT4_LOW, _INT4_HIGH = -8, 7
_SHRINKS = (1.0, 0.9333, 0.875, 0.82, 0.76, 0.7)
"""Scales tried for a block, as parts of the one that represents its largest number; 7/8 lets it become −8."""
_CHUNK_ELEMENTS = 1 << 21
_BIAS_LIMIT = float(1 << 30)
"""Largest int32 that a bias may become, so that sums of products still fit beside it."""
_INTEGER_TOP: Mapping[int, float] = {8: 127.0, 7: 63.0}


@dataclass(frozen=True)
class Narrow:
    """A weight in few bits: ``levels`` times ``scale``, which is a number, one per channel, or one per block."""

    levels: Array
    scale: Array
    axis: int | None
    """Axis that the scales lie along; None where there is but one."""
    block: int = 0

    def wide(self) -> Array:
        """The numbers that it stands for, as float32."""
        return self.levels.astype(np.float32) * self._spread()

    def _spread(self) -> Array:
        if self.block and self.axis is not None:
            return np.repeat(self.scale, self.block, self.axis)
        return _along(self.scale, self.axis, self.levels.ndim)


def channel_axis(node: "ir.Node", shape: tuple[int, ...]) -> int | None:
    """The axis of a product's weight that has one entry per output channel; None where no single axis has.

    With groups, ConvTranspose shares axis 1 between them; a scale for each of its entries is still a scale for
    whole output channels. Where it is of length 1, one scale for the tensor is the same.
    """
    match node.op_type:
        case "Conv":
            return 0
        case "ConvTranspose":
            return 1 if shape[1] > 1 else None
        case "Gemm":
            return 0 if node.attributes.get_int("transB", 0) else 1
        case _:
            return 1 if len(shape) == 2 else None


def symmetric(
    weight: Array, axis: int | None, number: Number, rest: Rest, bits: int = 8, least: Array | float = 0.0
) -> Narrow:
    """A weight as int8 or E4M3, symmetric around 0, with the scale that represents its largest number.

    ``least`` is the smallest scale that may be chosen, for all channels or each.
    """
    import ml_dtypes

    top = LARGEST[number] if number == "fp8" else _INTEGER_TOP[bits]
    axes = tuple(index for index in range(weight.ndim) if index != axis)
    largest = np.maximum(weight.max(axis=axes), -weight.min(axis=axes))
    wanted = np.maximum(largest / top, least)
    scale = _representable(wanted, rest)
    levels = weight / _along(scale, axis, weight.ndim)
    np.clip(levels, -top, top, out=levels)
    if number == "fp8":
        return Narrow(levels.astype(ml_dtypes.float8_e4m3fn), scale, axis)
    return Narrow(np.rint(levels, out=levels).astype(np.int8), scale, axis)


def least_scale(bias: Array, activation_scale: float) -> Array:
    """The smallest scale of a weight with which its bias fits an int32, in which engines add it up.

    Channels that died in training have weights near 0 beside biases that are not.
    """
    least: Array = np.abs(bias).astype(np.float64) / activation_scale / _BIAS_LIMIT
    return least


def integer_bias(bias: Array, scale: Array) -> Array:
    """A bias as int32 multiples of ``scale``."""
    return np.rint(bias.astype(np.float64) / scale).clip(-_BIAS_LIMIT, _BIAS_LIMIT).astype(np.int32)


def block_size(length: int) -> int:
    """The largest block that divides a length; 0 where none does."""
    return next((size for size in BLOCKS if length % size == 0), 0)


def blocked(weight: Array, block: int, rest: Rest, importance: Array | None = None) -> Narrow:
    """A matrix of inputs × outputs as int4, one scale for each block of inputs of an output.

    Of a few scales the one with the least squared error is taken; ``importance`` weighs the inputs: their mean
    square, the diagonal of the layer's Hessian (Frantar et al.: GPTQ, 2022, arXiv:2210.17323, section 3).
    """
    import ml_dtypes

    rows, columns = weight.shape
    levels = np.empty(weight.shape, ml_dtypes.int4)
    scale = np.empty((rows // block, columns), np.float32)
    step = max(1, _CHUNK_ELEMENTS // (block * columns))
    weights = np.ones(rows) if importance is None else importance
    for start in range(0, rows // block, step):
        part = slice(start * block, (start + step) * block)
        blocks = np.asarray(weight[part], np.float32).reshape(-1, block, columns)
        chosen = _best_scale(blocks, weights[part].reshape(-1, block).astype(np.float32), rest)
        scale[start : start + step] = chosen
        levels[part] = _rounded(blocks, chosen).reshape(-1, columns).astype(ml_dtypes.int4)
    return Narrow(levels, scale, 0, block)


def _best_scale(blocks: Array, weights: Array, rest: Rest) -> Array:
    """One scale for each block and column of blocks × inputs × columns."""
    largest = np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / _INT4_HIGH
    best = least = None
    for shrink in _SHRINKS:
        tried = _representable(largest * shrink, rest)
        error = _rounded(blocks, tried)
        error *= tried[:, None]
        error -= blocks
        error *= error
        total = np.einsum("bkn,bk->bn", error, weights)
        if best is None or least is None:
            best, least = tried, total
        else:
            better = total < least
            best, least = np.where(better, tried, best), np.where(better, total, least)
    assert best is not None
    return best


def _rounded(blocks: Array, scale: Array) -> Array:
    levels: Array = blocks / scale[:, None]
    return np.clip(np.rint(levels, out=levels), _INT4_LOW, _INT4_HIGH, out=levels)


def _representable(scale: Array, rest: Rest) -> Array:
    """The same as :func:`representable` for many."""
    smallest = representable(0.0, rest)
    raised = np.maximum(scale, smallest)
    return (raised.astype(np.float16) if rest == "fp16" else raised).astype(np.float32)


def _along(scale: Array, axis: int | None, rank: int) -> Array:
    return scale if axis is None else scale.reshape(-1, *(1,) * (rank - 1 - axis))
