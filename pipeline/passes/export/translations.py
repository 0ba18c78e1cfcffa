"""Translate operators of PyTorch to ONNX where the exporter's own translations are wrong or slow, or lacking.

They replace those of onnxscript's torch library. Values of a trace have no types.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import core

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.passes.export.pools import adaptive_average_pool, adaptive_max_pool, average_pool
from enginesmith.pipeline.passes.export.sequences import attention, lstm, stft

aten, prims, op = torch.ops.aten, torch.ops.prims, cast("Any", opset18)
_ATTENTION_OPSET = 23
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def list_translations(opset: int) -> dict[Any, Callable[..., Any]]:
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
        aten.amax.default: amax,
        aten.amin.default: amin,
        aten.sort.stable: sort,
        aten._cdist_forward.default: cdist,
        **({aten.scaled_dot_product_attention.default: attention} if opset >= _ATTENTION_OPSET else {}),
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


def amax(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """Find the largest numbers along axes, or of all; the exporter needs axes."""
    return op.ReduceMax(self, [*(dim or range(len(self.shape)))], keepdims=int(keepdim))


def amin(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """Find the smallest numbers; see `amax`."""
    return op.ReduceMin(self, [*(dim or range(len(self.shape)))], keepdims=int(keepdim))


def sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Sort along an axis; of equal numbers the first stays first, which TopK promises, too."""
    if not len(self.shape):
        return op.Identity(self), op.Constant(value_int=0)
    axis = dim % len(self.shape)
    return cast(
        "tuple[Any, Any]", op.TopK(self, op.Shape(self, start=axis, end=axis + 1), axis=axis, largest=int(descending))
    )


_PRODUCT_ROWS, _NEVER_PRODUCTS = 25, 2  # of torch.cdist: rows from which products pay, and the mode that forbids them


def cdist(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    """Measure the distances of rows [..., P, M] to rows [..., R, M], as [..., P, R]; see `torch.cdist`.

    Euclidean ones are made of products, as in PyTorch, but for few rows, where those would be less exact.
    """
    rows = (x1.shape[-2], x2.shape[-2])
    are_few = all(isinstance(count, int) and count <= _PRODUCT_ROWS for count in rows)
    if p == 2 and not are_few and compute_mode != _NEVER_PRODUCTS:
        sizes = [op.ReduceSum(op.Mul(each, each), [-1], keepdims=1) for each in (x1, x2)]
        axes = [*range(len(x2.shape))]
        flipped, across = (op.Transpose(each, perm=[*axes[:-2], axes[-1], axes[-2]]) for each in (x2, sizes[1]))
        doubled = op.MatMul(op.Mul(x1, op.CastLike(-2.0, x1)), flipped)
        squares = op.Add(op.Add(doubled, sizes[0]), across)
        return op.Sqrt(op.Max(squares, op.CastLike(0.0, x1)))
    apart = op.Abs(op.Sub(op.Unsqueeze(x1, [-2]), op.Unsqueeze(x2, [-3])))
    if p == 0:
        return op.ReduceSum(op.CastLike(op.Not(op.Equal(apart, op.CastLike(0.0, x1))), x1), [-1], keepdims=0)
    if p in (1, 2):
        reduce = op.ReduceL1 if p == 1 else op.ReduceL2
        return reduce(apart, [-1], keepdims=0)
    if p == math.inf:
        return op.ReduceMax(apart, [-1], keepdims=0)
    total = op.ReduceSum(op.Pow(apart, op.CastLike(p, x1)), [-1], keepdims=0)
    return op.Pow(total, op.CastLike(1 / p, x1))


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
    translate = cast("Any", core.aten__native_batch_norm_legit_functional)
    return cast("tuple[Any, ...]", translate(self, weight, bias, running_mean, running_var, False, momentum, eps))
