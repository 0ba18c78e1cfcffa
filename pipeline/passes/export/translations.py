"""Translate operators of PyTorch to ONNX where the exporter's own translations are wrong or slow, or lacking.

They replace those of onnxscript's torch library. Values of a trace have no types.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import core, nn

from enginesmith.pipeline.frameworks.onnx import ir

aten, prims, op = torch.ops.aten, torch.ops.prims, cast("Any", opset18)
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def list_translations() -> dict[Any, Callable[..., Any]]:
    """List the translations by operator."""
    return {
        aten.floor_divide.default: divide_down,
        aten.floor_divide.Scalar: divide_down,
        aten.div.Tensor_mode: divide,
        aten.div.Scalar_mode: divide,
        aten.log_sigmoid.default: log_sigmoid,
        aten.log1p.default: log1p,
        aten.expm1.default: expm1,
        aten.logaddexp.default: logaddexp,
        aten.logaddexp2.default: logaddexp2,
        aten.atan2.default: atan2,
        aten.logcumsumexp.default: logcumsumexp,
        aten.erfc.default: erfc,
        aten.special_erfcx.default: erfcx,
        aten.scatter_reduce.two: scatter_reduce,
        aten.searchsorted.Tensor: searchsorted,
        aten.searchsorted.Scalar: searchsorted,
        aten.bucketize.Tensor: bucketize,
        aten.signbit.default: signbit,
        aten.copysign.Tensor: copysign,
        aten.kthvalue.default: kthvalue,
        aten.median.dim: median,
        aten.median.default: median_of_all,
        aten._adaptive_avg_pool2d.default: adaptive_average_pool,
        aten._adaptive_avg_pool3d.default: adaptive_average_pool,
        aten.adaptive_max_pool2d.default: adaptive_max_pool,
        aten.adaptive_max_pool3d.default: adaptive_max_pool,
        aten.avg_pool2d.default: average_pool,
        aten.avg_pool3d.default: average_pool,
        aten._native_batch_norm_legit_functional.default: batch_norm,
        aten.stft.default: stft,
        prims.prod.default: prod,
        prims.fmax.default: fmax,
        prims.fmin.default: fmin,
        aten.lstm.input: lstm,
    }


def divide_down(self: Any, other: Any) -> Any:
    """Divide and round down.

    The exporter divides whole numbers as float32, whose quotients are wrong from 2^24 on; and it rounds the quotient of
    floats down, which is 10 for 1.0 // 0.1, where PyTorch subtracts the remainder first, and has 9. Numbers written in
    the module reach the graph as float32, so that float64 divided by 0.1 is not exact.
    """
    if self.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return core.aten_floor_divide(self, other)
    divisor = op.CastLike(other, self)
    rest = op.Mod(self, divisor, fmod=1)
    zero = op.CastLike(0.0, self)
    is_above = op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(divisor, zero)))
    quotient = op.Sub(op.Round(op.Div(op.Sub(self, rest), divisor)), op.CastLike(is_above, self))
    return op.Where(op.Equal(divisor, zero), op.Div(self, divisor), quotient)


def divide(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """Divide with a rounding mode; see `divide_down`."""
    large = self.dtype in (ir.DataType.INT32, ir.DataType.INT64)  # smaller ones are exact in float32
    if rounding_mode == "floor" and (large or not self.dtype.is_integer()):
        return divide_down(self, other)
    if rounding_mode == "trunc" and large:
        return op.Div(self, other)
    return core.aten_div_mode(self, other, rounding_mode)


# Functions whose plain formulas cancel or overflow. As in PyTorch, halves are computed in float32.


def _in_float32(translate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(translate)
    def widen(*values: Any) -> Any:
        if values[0].dtype not in _HALVES:
            return translate(*values)
        wide = (op.Cast(value, to=ir.DataType.FLOAT) if isinstance(value, ir.Value) else value for value in values)
        return op.CastLike(translate(*wide), values[0])

    return widen


def _log1p(x: Any) -> Any:
    """Compute log(1 + x), with the rounding of 1 + x divided out.

    Theorem 4 of Goldberg, What Every Computer Scientist Should Know About Floating-Point Arithmetic, 1991. The first
    Where gives 1 + x in any case: it keeps optimizers from taking (1 + x) - 1 for x, and OpenVINO from its SoftPlus for
    log(1 + exp(x)), which is off by up to 8e-6.
    """
    one = op.CastLike(1.0, x)
    above = op.Where(op.Less(x, op.CastLike(1e30, x)), op.Add(x, one), x)
    log, rounded = op.Log(above), op.Sub(above, one)
    exact = op.Where(op.Equal(rounded, x), log, op.Mul(log, op.Div(x, rounded)))  # of -1 and infinity, too
    return op.Where(op.Equal(above, one), x, exact)


@_in_float32
def log1p(self: Any) -> Any:
    """Compute log(1 + x) to all digits; the exporter's is 0 for small x."""
    return _log1p(self)


@_in_float32
def expm1(self: Any) -> Any:
    """Compute exp(x) - 1, which is tanh(x / 2) (exp(x) + 1), to all digits; the exporter's is 0 for small x."""
    return op.Mul(op.Tanh(op.Mul(self, op.CastLike(0.5, self))), op.Add(op.Exp(self), op.CastLike(1.0, self)))


@_in_float32
def log_sigmoid(self: Any) -> Any:
    """Compute log(sigmoid(x)) as PyTorch does; the exporter's is -inf where the sigmoid is 0."""
    return op.Sub(op.Min(self, op.CastLike(0.0, self)), _log1p(op.Exp(op.Neg(op.Abs(self)))))


@_in_float32
def logaddexp(self: Any, other: Any) -> Any:
    """Compute log(exp(x) + exp(y)); the exporter's overflows above 88."""
    distance = op.Where(op.Equal(self, other), op.CastLike(0.0, self), op.Abs(op.Sub(self, other)))  # equal infinities
    return op.Add(op.Max(self, other), _log1p(op.Exp(op.Neg(distance))))


@_in_float32
def logaddexp2(self: Any, other: Any) -> Any:
    """Compute log2(2^x + 2^y); the exporter's overflows from 128 on."""
    log2 = op.Log(op.CastLike(2.0, self))
    return op.Div(logaddexp(op.Mul(self, log2), op.Mul(other, log2)), log2)


def _is_negative(x: Any) -> Any:
    """Tell the sign, of -0.0, too, whose reciprocal is -inf."""
    zero = op.CastLike(0.0, x)
    return op.Less(op.Where(op.Equal(x, zero), op.Reciprocal(x), x), zero)


def signbit(self: Any) -> Any:
    """Tell the sign, of -0.0, too."""
    return _is_negative(self) if self.dtype.is_floating_point() else op.Less(self, op.CastLike(0, self))


def copysign(self: Any, other: Any) -> Any:
    """Give numbers the signs of others."""
    size = op.Abs(self)
    return op.Where(signbit(other), op.Neg(size), size)


@_in_float32
def atan2(self: Any, other: Any) -> Any:
    """Compute the angle of the point (other, self); the exporter's has a wrong sign on the axes."""
    rise, run = op.Abs(self), op.Abs(other)
    angle = op.Atan(op.Where(op.Equal(rise, run), op.Sign(rise), op.Div(rise, run)))  # both zero, or both infinite
    angle = op.Where(_is_negative(other), op.Sub(op.CastLike(math.pi, angle), angle), angle)
    return op.Mul(angle, op.Where(_is_negative(self), op.CastLike(-1.0, angle), op.CastLike(1.0, angle)))  # -0.0, too


@_in_float32
def logcumsumexp(self: Any, dim: int) -> Any:
    """Compute the log of running sums of exp, each with its own maximum subtracted.

    The exporter subtracts the maximum of the whole, so that sums before it are 0, and their log -inf. Memory grows with
    the square of the length.
    """
    rank = len(self.shape)
    if not rank:
        return op.Identity(self)
    axis = dim % rank
    steps = op.Range(0, op.Squeeze(op.Shape(self, start=axis, end=axis + 1)), 1)
    trailing = list(range(1, rank - axis))
    is_before = op.LessOrEqual(
        op.Unsqueeze(steps, [*trailing]), op.Unsqueeze(steps, [1, *(1 + each for each in trailing)])
    )
    rows = op.Where(is_before, op.Unsqueeze(self, [axis]), op.CastLike(-math.inf, self))
    largest = op.ReduceMax(rows, [axis + 1], keepdims=1)
    largest = op.Where(op.IsInf(largest), op.CastLike(0.0, self), largest)
    total = op.ReduceSum(op.Exp(op.Sub(rows, largest)), [axis + 1], keepdims=1)
    return op.Squeeze(op.Add(op.Log(total), largest), [axis + 1])


# 1 - erf(z) is t exp(P(t) - z^2) with t = 1 / (1 + z / 2) for z >= 0, to 1.2e-7: Numerical Recipes in C, section 6.2.
_ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)


def _erfc(z: Any, exponent: Any) -> Any:
    inverse = op.Reciprocal(op.Add(op.Mul(z, op.CastLike(0.5, z)), op.CastLike(1.0, z)))
    factors = (op.CastLike(factor, z) for factor in reversed(_ERFC))
    polynomial = functools.reduce(lambda total, factor: op.Add(op.Mul(total, inverse), factor), factors)
    return op.Mul(inverse, op.Exp(op.Add(polynomial, exponent)))


@_in_float32
def erfc(self: Any) -> Any:
    """Compute 1 - erf(x); the exporter's is 0 from 4 on."""
    z = op.Abs(self)
    near = op.Sub(op.CastLike(1.0, self), op.Erf(self))
    return op.Where(op.Less(self, op.CastLike(0.5, self)), near, _erfc(z, op.Neg(op.Mul(z, z))))


@_in_float32
def erfcx(self: Any) -> Any:
    """Compute exp(x^2) (1 - erf(x)), which log_ndtr is made of; the exporter's is 0 from 4 on, and NaN from 10 on."""
    zero = op.CastLike(0.0, self)
    right = _erfc(op.Abs(self), zero)
    left = op.Sub(op.Mul(op.Exp(op.Mul(self, self)), op.CastLike(2.0, self)), right)
    return op.Where(op.Less(self, zero), left, right)


def scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """Reduce what falls to the same place.

    ONNX has no mean, for which the exporter takes the last value. Where the places' own values do not count, the
    exporter starts a maximum from the lowest finite number, and a minimum from the highest.
    """
    if reduce == "mean":
        ones = [op.ConstantOfShape(op.Shape(value), value=ir.tensor([1], dtype=self.dtype)) for value in (self, src)]
        for tensor, value in zip(ones, (self, src), strict=True):
            tensor.dtype, tensor.shape = value.dtype, value.shape
        total = core.aten_scatter_reduce(self, dim, index, src, "sum", include_self)
        count = core.aten_scatter_reduce(ones[0], dim, index, ones[1], "sum", include_self)
        total.dtype = self.dtype
        return divide(total, count, "floor") if self.dtype.is_integer() else op.Div(total, count)
    if reduce in ("amax", "amin") and not include_self and len(self.shape):
        start = op.ScatterElements(self, index, src, axis=dim)  # one of the values, which may count twice
        start.dtype, start.shape = self.dtype, self.shape
        return core.aten_scatter_reduce(start, dim, index, src, reduce)
    return core.aten_scatter_reduce(self, dim, index, src, reduce, include_self)


def searchsorted(
    sorted_sequence: Any,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Count the elements before each value, NaN being the last; memory grows with both lengths."""
    rank = len(sorted_sequence.shape)
    value = op.CastLike(self, sorted_sequence)
    if sorter is not None:
        sorted_sequence = op.GatherElements(sorted_sequence, sorter, axis=-1)
    if rank > 1:
        sorted_sequence = op.Unsqueeze(sorted_sequence, [-2])
    is_behind = op.Greater if right or side == "right" else op.GreaterOrEqual
    is_before = op.Not(is_behind(sorted_sequence, op.Unsqueeze(value, [-1])))
    counted = op.Cast(is_before, to=ir.DataType.INT32 if out_int32 else ir.DataType.INT64)
    return op.ReduceSum(counted, [-1], keepdims=0)


def bucketize(self: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    """Find the bucket of each value; see `searchsorted`."""
    return searchsorted(boundaries, self, out_int32, right)


def prod(inp: Any, dims: Sequence[int] | None = None) -> Any:
    """Multiply along axes, as `cumprod` does with what is masked."""
    return op.ReduceProd(inp, dims, keepdims=0)


def fmax(self: Any, other: Any) -> Any:
    """Return the larger numbers; NaN only where both are."""
    return op.Where(op.IsNaN(self), other, op.Where(op.IsNaN(other), self, op.Max(self, other)))


def fmin(self: Any, other: Any) -> Any:
    """Return the smaller numbers; NaN only where both are."""
    return op.Where(op.IsNaN(self), other, op.Where(op.IsNaN(other), self, op.Min(self, other)))


def kthvalue(self: Any, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """Find the ``k``-th smallest number, from 1, and its place; of equal numbers PyTorch may name another place."""
    count = op.Reshape(k, [-1])
    smallest = op.TopK(self, count, axis=dim, largest=0)
    values, places = (op.Gather(each, op.Sub(count, 1), axis=dim) for each in smallest)
    return (values, places) if keepdim else (op.Squeeze(values, [dim]), op.Squeeze(places, [dim]))


def median(self: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """Find the number in the middle, the lower one of two, and its place; or the first NaN."""
    axis = dim % len(self.shape)
    size = op.Shape(self, start=axis, end=axis + 1)
    if self.dtype.is_integer():
        return kthvalue(self, op.Div(op.Add(size, 1), 2), dim, keepdim)
    is_nan = op.Cast(op.IsNaN(self), to=ir.DataType.INT32)
    has_nan = op.Cast(op.ReduceMax(is_nan, [dim], keepdims=int(keepdim)), to=ir.DataType.BOOL)
    numbers = op.Where(op.IsNaN(self), op.CastLike(math.inf, self), self)
    value, place = kthvalue(numbers, op.Div(op.Add(size, 1), 2), dim, keepdim)
    first = op.ArgMax(is_nan, axis=dim, keepdims=int(keepdim))
    return op.Where(has_nan, op.CastLike(math.nan, self), value), op.Where(has_nan, first, place)


def median_of_all(self: Any) -> Any:
    """Find the number in the middle of all; see `median`."""
    flat = op.Reshape(self, [-1])
    flat.dtype, flat.shape = self.dtype, ir.Shape([None])
    return median(flat, 0)[0]


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


def batch_norm(
    self: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Normalize channels; in training by the batch's mean and variance, where the exporter takes those kept."""
    if training:
        running_mean = running_var = None
    return core.aten__native_batch_norm_legit_functional(
        self, weight, bias, running_mean, running_var, False, momentum, eps
    )


_LARGEST_CONVOLVED, _LARGEST_POWER_OF_TWO = 2048, 512
"""The most samples of a spectrum that is convolved: the kernels are as many numbers as their square."""


def stft(
    self: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
) -> Any:
    """Compute spectra as a convolution with cosines and sines, [batch, bins, frames, 2].

    A second of sound with ``n_fft=400`` takes a convolution 0.8 ms in ONNX Runtime, and STFT 8.1 ms, with errors 80
    times as large (1.31, one thread). OpenVINO takes STFT with fixed shapes alone. With a large power of two, ONNX
    Runtime's STFT is the faster one, and stays.
    """
    if n_fft > (_LARGEST_POWER_OF_TWO if n_fft.bit_count() == 1 else _LARGEST_CONVOLVED):
        return core.aten_stft(self, n_fft, hop_length, win_length, window, normalized, onesided, return_complex)
    bins = n_fft if onesided is False else n_fft // 2 + 1
    angles = 2 * math.pi / n_fft * (np.outer(range(bins), range(n_fft)) % n_fft)
    waves = np.concatenate([np.cos(angles), -np.sin(angles)])[:, None] / (math.sqrt(n_fft) if normalized else 1)
    length = (win_length or n_fft) if window is None else window.shape[0]
    left = (n_fft - length) // 2
    pads = [left, n_fft - length - left]
    if window is None:
        waves *= np.pad(np.ones(length), pads)
    kernels = op.Constant(value=ir.tensor(waves.astype(self.dtype.numpy())))
    if window is not None:
        kernels = op.Mul(kernels, op.CastLike(op.Pad(window, pads) if length < n_fft else window, self))
    is_single = len(self.shape) == 1
    spectra = op.Conv(op.Unsqueeze(self, [0, 1] if is_single else [1]), kernels, strides=[hop_length or n_fft // 4])
    parts = op.Transpose(op.Reshape(spectra, [0, 2, bins, -1]), perm=[0, 2, 3, 1])
    return op.Squeeze(parts, [0]) if is_single else parts


def lstm(
    given: Any,
    hx: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Run an LSTM; one with a projection (``proj_size``), which ONNX does not have, by one without.

    The projection is multiplied into the weights of the state, and applied to what comes out. The first state, which is
    given projected, becomes a further input that is zero in all steps but the first.
    """
    if hx[0].shape[2] == hx[1].shape[2]:
        return core.aten_lstm(given, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    ways, per_way = 1 + bidirectional, 5 if has_biases else 3
    x = op.Transpose(given, perm=[1, 0, 2]) if batch_first else given
    ends = []
    for layer in range(num_layers):
        weights = [params[start : start + per_way] for start in range(layer * ways * per_way, len(params), per_way)]
        state, cell = (op.Slice(value, [layer * ways], [(layer + 1) * ways], [0]) for value in hx)
        cell.shape = ir.Shape([ways, None, hx[1].shape[2]])
        x, *end = _run_projected(x, state, cell, weights[:ways])
        ends.append(end)
    states, cells = (op.Concat(*values, axis=0) for values in zip(*ends, strict=True))
    return op.Transpose(x, perm=[1, 0, 2]) if batch_first else x, states, cells


def _run_projected(x: Any, state: Any, cell: Any, weights: Sequence[Sequence[Any]]) -> tuple[Any, Any, Any]:
    """Run one layer in one way or both: (length, batch, size), (ways, batch, projected), (ways, batch, hidden)."""
    ways = len(weights)
    later = op.Sub(op.Shape(x, start=0, end=1), op.Constant(value_ints=[1]))
    none, params, inputs = op.Constant(value_ints=[0]), [], [x]
    for way, (into, recurrent, *biases, projection) in enumerate(weights):
        pads = [none] * 6
        pads[0 if way else 3] = later  # the way back begins with the last step
        inputs.append(op.Pad(op.Slice(state, [way], [way + 1], [0]), op.Concat(*pads, axis=0)))
        nothing = op.Mul(recurrent, op.CastLike(0.0, recurrent))
        columns = [recurrent if way == other else nothing for other in range(ways)]
        params += [op.Concat(into, *columns, axis=1), op.MatMul(recurrent, projection), *biases]
    zeros = op.Mul(cell, op.CastLike(0.0, cell))
    zeros.shape = cell.shape
    given = op.Concat(*inputs, axis=2)
    y, hidden, cells = core.aten_lstm(given, [zeros, cell], params, len(biases) > 0, 1, 0.0, False, ways == 2, False)
    down = op.Concat(*(op.Unsqueeze(op.Transpose(each[-1], perm=[1, 0]), [0]) for each in weights), axis=0)
    by_way = op.Transpose(op.Reshape(y, op.Constant(value_ints=[0, 0, ways, -1])), perm=[0, 2, 1, 3])
    merged = op.Transpose(op.MatMul(by_way, down), perm=[0, 2, 1, 3])
    return op.Reshape(merged, op.Constant(value_ints=[0, 0, -1])), op.MatMul(hidden, down), cells
