"""Translate pools of PyTorch to ONNX where the exporter's own translations are wrong, or lacking."""

import math
from collections.abc import Sequence
from typing import Any, cast

from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import nn

op = cast("Any", opset18)

# Adaptive pooling: of n inputs, output i of m reads those from floor(i n / m) to ceil((i + 1) n / m), so that windows
# overlap, and differ in size. The exporter has none for maxima, and for means one that is right at some sizes alone.


def _kernel_of(self: Any, output_size: Sequence[Any]) -> list[int] | None:
    """Return the size of all windows, if it is one size, known at export; the windows then lie side by side."""
    sizes = self.shape[-len(output_size) :]
    pairs = [*zip(sizes, output_size, strict=True)]
    if any(not isinstance(number, int) for pair in pairs for number in pair) or any(
        size % count for size, count in pairs
    ):
        return None
    return [size // count for size, count in pairs]


def _windows(self: Any, axis: int, count: Any) -> tuple[Any, Any]:
    """List the places that each window reads, [count, largest window], the last one repeated; and where it is not.

    ``count`` is a number, or a value of the graph where it is the size of another input.
    """
    size, one = op.Shape(self, start=axis, end=axis + 1), op.Constant(value_ints=[1])
    parts = op.Constant(value_ints=[count]) if isinstance(count, int) else op.Reshape(count, one)
    numbers = op.Range(0, op.Squeeze(parts), 1)
    starts = op.Div(op.Mul(numbers, size), parts)
    ends = op.Div(op.Add(op.Mul(op.Add(numbers, 1), size), op.Sub(parts, 1)), parts)
    largest = op.ReduceMax(op.Sub(ends, starts), [0], keepdims=0)
    places = op.Add(op.Unsqueeze(starts, [1]), op.Range(0, largest, 1))
    last = op.Unsqueeze(op.Sub(ends, 1), [1])
    is_inside = op.LessOrEqual(places, last)
    return op.Where(is_inside, places, last), is_inside


def adaptive_average_pool(self: Any, output_size: Sequence[Any]) -> Any:
    """Average windows, axis by axis: each one's size is a product of sizes along the axes."""
    rank, spatial = len(self.shape), len(output_size)
    if kernel := _kernel_of(self, output_size):
        rows = op.Unsqueeze(self, [0]) if rank == spatial + 1 else self
        means = op.AveragePool(rows, kernel_shape=kernel, strides=kernel)
        return op.Squeeze(means, [0]) if rank == spatial + 1 else means
    means = self
    for axis, count in zip(range(rank - spatial, rank), output_size, strict=True):
        places, is_inside = _windows(self, axis, count)
        share = op.CastLike(is_inside, self)
        share = op.Div(share, op.ReduceSum(share, [1], keepdims=1))
        trailing = list(range(2, 1 + rank - axis))
        weights = op.Unsqueeze(share, trailing) if trailing else share
        means = op.ReduceSum(op.Mul(op.Gather(means, places, axis=axis), weights), [axis + 1], keepdims=0)
    return means


def adaptive_max_pool(self: Any, output_size: Sequence[Any]) -> tuple[Any, Any]:
    """Find the largest number of each window, and its place among those of its channel."""
    rank, spatial = len(self.shape), len(output_size)
    if kernel := _kernel_of(self, output_size):
        translate: Any = nn.aten_max_pool2d_with_indices if spatial == 2 else nn.aten_max_pool3d_with_indices
        values, places = translate(self, kernel, kernel, [0] * spatial, [1] * spatial)
        return values, places
    largest, plane = self, op.Shape(self, start=rank - spatial)
    numbers = op.Range(0, op.ReduceProd(plane, keepdims=0), 1)
    numbered = op.Expand(op.Reshape(numbers, plane), op.Shape(self))
    for axis in reversed(range(rank - spatial, rank)):  # so that the first of equal numbers is the first in its channel
        places, _ = _windows(self, axis, output_size[axis - rank])
        windows = op.Gather(largest, places, axis=axis)
        best = op.ArgMax(windows, axis=axis + 1)
        largest = op.ReduceMax(windows, [axis + 1], keepdims=0)
        of_best = op.GatherElements(op.Gather(numbered, places, axis=axis), best, axis=axis + 1)
        numbered = op.Squeeze(of_best, [axis + 1])
    return largest, numbered


def average_pool(
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Average windows, or divide their sums by one number, which the exporter leaves out.

    The sums are means of windows that lie within the padded input; with ``ceil_mode``, of those that begin within the
    input or the padding before it.
    """
    spatial = len(kernel_size)
    if divisor_override is None:
        translate = nn.aten_avg_pool2d if spatial == 2 else nn.aten_avg_pool3d
        return translate(self, kernel_size, stride, padding, ceil_mode, count_include_pad)
    rank, strides = len(self.shape), [*(stride or kernel_size)]
    pads = [*padding] * (spatial // len(padding))
    ends = [pad + step - 1 for pad, step in zip(pads, strides, strict=True)] if ceil_mode else pads
    around = [0] * (rank - spatial)
    rows = op.Pad(self, op.Constant(value_ints=[*around, *pads, *around, *ends]))
    rows = op.Unsqueeze(rows, [0]) if rank == spatial + 1 else rows
    means = op.AveragePool(rows, kernel_shape=kernel_size, strides=strides)
    if ceil_mode:
        last = op.Add(op.Shape(self, start=rank - spatial), op.Constant(value_ints=[pad - 1 for pad in pads]))
        counts = op.Add(op.Div(last, op.Constant(value_ints=strides)), op.Constant(value_ints=[1]))
        means = op.Slice(means, [0] * spatial, counts, [*range(2, 2 + spatial)])
    sums = op.Mul(means, op.CastLike(math.prod(kernel_size) / divisor_override, self))
    return op.Squeeze(sums, [0]) if rank == spatial + 1 else sums
