"""Round numbers to few bits: grids for activations, scales for weights, and biases that make up for the mean error."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from enginesmith.calibration.ranges import Method, Ranges, TensorRange
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.rescale.products import by_channel
from enginesmith.pipeline.tensors import Array

Number = Literal["int8", "fp8"]
Rest = Literal["fp32", "fp16"]
Layout = Literal["symmetric", "signed", "unsigned"]
"""Grids of activations: all around 0; those with both signs around 0 and others from 0 on; all from the least on."""
"""Type that scales are stored in: that of operators which are not quantized."""
LARGEST: Mapping[Number, float] = {"int8": 127.0, "fp8": 448.0}
"""Largest magnitude of a symmetric int8, and of E4M3 (Micikevicius et al.: FP8 Formats for Deep Learning, 2022)."""
_UNSIGNED_STEPS = 255.0


# Grids of activations, from their ranges.


@dataclass(frozen=True)
class Grid:
    """Numbers that a value is rounded to: ``scale`` times whole numbers, or times numbers of E4M3."""

    scale: float
    zero_point: int
    dtype: Literal["int8", "uint8", "fp8"]


class Scales:
    """Grids of the values of one graph, from one method of calibration."""

    def __init__(self, ranges: Ranges, number: Number, method: Method, rest: Rest, layout: Layout) -> None:
        self._ranges = dict(ranges.tensors)
        self._number: Number = number
        self._method: Method = "minmax" if number == "fp8" else method
        self._rest: Rest = rest
        self._layout: Layout = layout

    def share(self, value: "ir.Value", heir: "ir.Value") -> None:
        """Give a value's range to that which took its place, and perhaps its name, with the same numbers."""
        known = self._find_range(value) or self._find_range(heir)
        self._ranges |= {str(each.name): known for each in (value, heir) if known is not None}

    def problem(self, value: "ir.Value") -> str:
        """Explain why a value has no grid, after a word for what it is; empty where it has one."""
        known = self._find_range(value)
        if known is None or known.amax is None:
            return f"{value.name!r} has no range"
        if not known.finite:
            return f"{value.name!r} is not finite on the calibration data"
        if known.minimum == known.maximum or not known.amax[self._method] > 0:
            return f"{value.name!r} never varies on the calibration data"
        if self._rest == "fp16" and known.amax[self._method] > LARGEST[self._number] * float(np.finfo(np.float16).max):
            return f"{value.name!r} is too large for a scale in float16"
        return ""

    def grid(self, values: "Iterable[ir.Value]") -> Grid:
        """Return the grid that these values share, none of which has a problem; 0 is one of its numbers."""
        low = high = 0.0
        symmetric = self._layout == "symmetric"
        for value in values:
            known = self._find_range(value)
            assert known is not None, value
            assert known.amax is not None, value
            amax = known.amax[self._method]
            low = min(low, -amax if symmetric else max(known.minimum, -amax))
            high = max(high, amax if symmetric else min(known.maximum, amax))
        if symmetric or (self._layout == "signed" and low < 0):
            scale = float(round_scale(max(-low, high) / LARGEST[self._number], self._rest))
            return Grid(scale, 0, self._number)
        scale = float(round_scale((high - low) / _UNSIGNED_STEPS, self._rest))
        return Grid(scale, int(np.clip(np.rint(-low / scale), 0, _UNSIGNED_STEPS)), "uint8")

    def _find_range(self, value: "ir.Value | None") -> TensorRange | None:
        """Return a value's range, or that of the value that it is another shape of."""
        while value is not None:
            known = self._ranges.get(str(value.name))
            producer = value.producer()
            if known is not None or producer is None or producer.op_type not in layers.SAME_NUMBERS:
                return known
            value = producer.inputs[0]
        return None


def round_scale(scale: Array | float, rest: Rest) -> Array:
    """Return scales as the graph holds them: in their floating-point type, never subnormal; here as float32.

    A scale that cannot be told from 0 would make infinities of what is divided by it, and TensorRT refuses 0.
    """
    stored = np.float16 if rest == "fp16" else np.float32
    raised: Array = np.maximum(scale, float(np.finfo(stored).tiny))
    return raised.astype(stored).astype(np.float32)


# Constant weights in few bits: int8 and E4M3 with one scale per output channel, int4 with one per block.

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
        numbers: Array = self.levels.astype(np.float32)
        return numbers * edit.spread(self.scale, numbers.shape, self.axis, self.block)


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


def quantize_symmetrically(
    weight: Array,
    axis: int | None,
    number: Number,
    rest: Rest,
    bits: int = 8,
    least: Array | float = 0.0,
    *,
    stacked: bool = False,
) -> Narrow:
    """Return a weight as int8 or E4M3, symmetric around 0, with the scale that represents its largest number.

    ``least`` is the smallest scale that may be chosen, for all channels or each. Where matrices are ``stacked``,
    [..., inputs, outputs], each column of each has a scale: it is a block of its own.
    """
    import ml_dtypes

    top = LARGEST[number] if number == "fp8" else _INTEGER_TOP[bits]
    inputs = weight.ndim - 2
    axes = (inputs,) if stacked else tuple(index for index in range(weight.ndim) if index != axis)
    largest = np.maximum(weight.max(axis=axes, keepdims=stacked), -weight.min(axis=axes, keepdims=stacked))
    scale = round_scale(np.maximum(largest / top, least), rest)
    levels = weight / (scale if stacked else edit.spread(scale, weight.shape, axis))
    np.clip(levels, -top, top, out=levels)
    levels = levels.astype(ml_dtypes.float8_e4m3fn) if number == "fp8" else np.rint(levels, out=levels).astype(np.int8)
    return Narrow(levels, scale, inputs, weight.shape[inputs]) if stacked else Narrow(levels, scale, axis)


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
        levels[part] = _round_levels(blocks, chosen).reshape(-1, columns).astype(ml_dtypes.int4)
    return Narrow(levels, scale, 0, block)


def _best_scale(blocks: Array, weights: Array, rest: Rest) -> Array:
    """Return one scale for each block and column of blocks × inputs × columns."""
    largest = np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / _INT4_HIGH
    best, least = round_scale(largest, rest), np.full_like(largest, np.inf)
    for shrink in _SHRINKS:
        tried = round_scale(largest * shrink, rest)
        error = _round_levels(blocks, tried)
        error *= tried[:, None]
        error -= blocks
        error *= error
        total = np.einsum("bkn,bk->bn", error, weights)
        best, least = np.where(total < least, tried, best), np.minimum(total, least)
    return best


def _round_levels(blocks: Array, scale: Array) -> Array:
    levels: Array = blocks / scale[:, None]
    return np.clip(np.rint(levels, out=levels), _INT4_LOW, _INT4_HIGH, out=levels)


# Bias correction: what rounding a weight adds to the mean of a product, taken out of the bias.
#
# Nagel, van Baalen, Blankevoort, Welling: Data-Free Quantization Through Weight Equalization and Bias Correction,
# 2019, arXiv:1906.04721, section 4.2: E[W·x] − E[Ŵ·x] = (W − Ŵ)·E[x].

_BIAS = 2


def read_bias(node: "ir.Node") -> Array | None:
    """Return the constant bias that an operator itself adds; None where there is none."""
    return edit.read(edit.find_input(node, _BIAS))


def add_to_bias(node: "ir.Node", more: Array) -> bool:
    """Add a number per output channel to a product's bias, in place; return False where there is no place for it.

    Conv, ConvTranspose and Gemm get a bias where they have none; that of a MatMul is the constant of the Add behind
    it. Other readers of the same bias keep theirs.
    """
    if node.op_type == "MatMul":
        adder, index = edit.find_added(node)
        bias = edit.read(adder.inputs[index]) if adder is not None else None
        if adder is None or bias is None or bias.shape != more.shape:
            return False
        edit.write([(adder, index)], (bias + more).astype(np.float32))
        return True
    bias = read_bias(node)
    share = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
    if not share or (bias is None and edit.find_input(node, _BIAS) is not None):
        return False
    edit.write([(node, _BIAS)], (more / share + (0 if bias is None else bias)).astype(np.float32))
    return True


def correct_bias(node: "ir.Node", weight: Array, dequantized: Array, mean: Array) -> bool:
    """Make the bias of a product up for its rounded weight, in place; return False where there is no place for it.

    Weights are as the node reads them, and those of matrix products have to be matrices; ``mean`` is that of each input
    channel. Every place of a kernel is taken to see the same mean, so padding, which is zeros, is ignored. An output of
    a ConvTranspose with strides sees one input in as many places of the kernel.
    """
    if node.op_type in layers.MATRIX_PRODUCTS and weight.ndim != 2:
        return False
    groups = node.attributes.get_int("group", 1)
    exact, rounded = (by_channel(node, each).sum(axis=2, dtype=np.float64) for each in (weight, dequantized))
    lost: Array = exact - rounded
    means = np.asarray(mean, np.float64).reshape(groups, -1)
    shift: Array = (lost.reshape(groups, -1, lost.shape[1]) @ means[:, :, None]).reshape(-1)
    if node.op_type == "ConvTranspose" and "strides" in node.attributes:
        shift = shift / math.prod(node.attributes["strides"].as_ints())
    return add_to_bias(node, shift * node.attributes.get_float("alpha", 1.0))
