"""Constant weights in few bits: int8 and E4M3 with one scale per output channel, int4 with one per block."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from enginesmith.calibration.ranges import Method, Ranges, TensorRange
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


# From the range of a value to the grid that it is rounded to.

Number = Literal["int8", "fp8"]
Rest = Literal["fp32", "fp16"]
"""What the scales are stored in: the type of what is not quantised."""
LARGEST: Mapping[Number, float] = {"int8": 127.0, "fp8": 448.0}
"""Largest magnitude of a symmetric int8, and of E4M3 (Micikevicius et al.: FP8 Formats for Deep Learning, 2022)."""
_UNSIGNED_STEPS = 255.0
_SAME_NUMBERS = frozenset(("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
_TINY: Mapping[Rest, float] = {
    "fp32": float(np.finfo(np.float32).tiny),
    "fp16": float(np.finfo(np.float16).tiny),
}


@dataclass(frozen=True)
class Grid:
    """What a value is rounded to: ``scale`` times whole numbers, or times numbers of E4M3."""

    scale: float
    zero_point: int
    dtype: Literal["int8", "uint8", "fp8"]


class Scales:
    """Grids of the values of one graph, from one method of calibration."""

    def __init__(self, ranges: Ranges, number: Number, method: Method, rest: Rest, *, symmetric: bool) -> None:
        self._ranges = ranges.tensors
        self._number: Number = number
        self._method: Method = "minmax" if number == "fp8" else method
        self._rest: Rest = rest
        self._symmetric = symmetric

    def problem(self, value: "ir.Value") -> str:
        """Why a value has no grid, as the end of a sentence that starts with what it is; empty where it has one."""
        found = self._range(value)
        if found is None or found.amax is None:
            return f"{value.name!r} has no range"
        if not found.finite:
            return f"{value.name!r} is not finite on the calibration data"
        if found.minimum == found.maximum or not found.amax[self._method] > 0:
            return f"{value.name!r} never varies on the calibration data"
        return ""

    def grid(self, values: "Iterable[ir.Value]") -> Grid:
        """Return the grid that these values share, none of which has a problem."""
        limits = [self._limits(value) for value in values]
        low, high = min(low for low, _ in limits), max(high for _, high in limits)
        if self._symmetric:
            scale = representable(max(-low, high) / LARGEST[self._number], self._rest)
            return Grid(scale, 0, self._number)
        scale = representable((high - low) / _UNSIGNED_STEPS, self._rest)
        return Grid(scale, int(np.clip(np.rint(-low / scale), 0, _UNSIGNED_STEPS)), "uint8")

    def _limits(self, value: "ir.Value") -> tuple[float, float]:
        """Return the least and the greatest number that is represented exactly enough; 0 lies between them."""
        found = self._range(value)
        assert found is not None, value
        assert found.amax is not None, value
        amax = found.amax[self._method]
        if self._symmetric:
            return -amax, amax
        return min(max(found.minimum, -amax), 0.0), max(min(found.maximum, amax), 0.0)

    def _range(self, value: "ir.Value | None") -> TensorRange | None:
        """Return a value's range, or that of what it is another shape of."""
        while value is not None:
            found = self._ranges.get(str(value.name))
            producer = value.producer()
            if found is not None or producer is None or producer.op_type not in _SAME_NUMBERS:
                return found
            value = producer.inputs[0]
        return None


def representable(scale: float, rest: Rest) -> float:
    """Return the scale as the graph holds it: in its floating-point type, never subnormal.

    A scale that cannot be told from 0 would make infinities of what is divided by it, and TensorRT refuses 0.
    """
    scale = max(scale, _TINY[rest])
    return float(np.float16(scale)) if rest == "fp16" else float(np.float32(scale))


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
        """Return the numbers that it stands for, as float32."""
        return self.levels.astype(np.float32) * self._spread()

    def _spread(self) -> Array:
        if self.block and self.axis is not None:
            return np.repeat(self.scale, self.block, self.axis)
        return _along(self.scale, self.axis, self.levels.ndim)


def channel_axis(node: "ir.Node", shape: tuple[int, ...]) -> int | None:
    """Return the axis of a product's weight that has one entry per output channel; None where no single axis has.

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
    """Return a weight as int8 or E4M3, symmetric around 0, with the scale that represents its largest number.

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
    """Return the smallest scale of a weight with which its bias fits an int32, in which engines add it up.

    Channels that died in training have weights near 0 beside biases that are not.
    """
    least: Array = np.abs(bias).astype(np.float64) / activation_scale / _BIAS_LIMIT
    return least


def integer_bias(bias: Array, scale: Array) -> Array:
    """Return a bias as int32 multiples of ``scale``."""
    return np.rint(bias.astype(np.float64) / scale).clip(-_BIAS_LIMIT, _BIAS_LIMIT).astype(np.int32)


def block_size(length: int) -> int:
    """Return the largest block that divides a length; 0 where none does."""
    return next((size for size in BLOCKS if length % size == 0), 0)


def blocked(weight: Array, block: int, rest: Rest, importance: Array | None = None) -> Narrow:
    """Return a matrix of inputs × outputs as int4, one scale for each block of inputs of an output.

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
    """Return one scale for each block and column of blocks × inputs × columns."""
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
    """Apply :func:`representable` to many scales."""
    smallest = representable(0.0, rest)
    raised = np.maximum(scale, smallest)
    return (raised.astype(np.float16) if rest == "fp16" else raised).astype(np.float32)


def _along(scale: Array, axis: int | None, rank: int) -> Array:
    return scale if axis is None else scale.reshape(-1, *(1,) * (rank - 1 - axis))
