"""Translate functions of single numbers to ONNX where the exporter's own translations are wrong, or lacking."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from onnx_ir.tensor_adapters import from_torch_dtype, to_torch_dtype
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import core

from enginesmith.pipeline.frameworks.onnx import ir

op = cast("Any", opset18)
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


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


def promote(translate: Callable[..., Any]) -> Callable[..., Any]:
    """Give two operands the type that PyTorch gives them; the exporter leaves it out for aliases, as of `torch.mul`."""

    def make_example(operand: Any) -> Any:
        if not isinstance(operand, ir.Value):
            return operand
        assert operand.shape is not None
        assert operand.dtype is not None
        return torch.empty([1] * len(operand.shape), dtype=to_torch_dtype(operand.dtype), device="meta")

    @functools.wraps(translate)
    def cast_both(self: Any, other: Any) -> Any:
        kind = from_torch_dtype(torch.result_type(make_example(self), make_example(other)))
        operands = [op.Cast(each, to=kind) for each in (self, other)]
        for value, each in zip(operands, (self, other), strict=True):
            value.dtype, value.shape = kind, each.shape if isinstance(each, ir.Value) else ir.Shape([])
        return translate(*operands)

    return cast_both


def divide_exactly(self: Any, other: Any) -> Any:
    """Divide; whole numbers as float32."""
    if self.dtype.is_floating_point():
        return op.Div(self, other)
    return op.Div(*(op.Cast(each, to=ir.DataType.FLOAT) for each in (self, other)))


# Functions whose plain formulas cancel or overflow. As in PyTorch, halves are computed in float32.


def in_float32(translate: Callable[..., Any]) -> Callable[..., Any]:
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


log1p = in_float32(_log1p)
"""Compute log(1 + x) to all digits; the exporter's is 0 for small x."""


@in_float32
def expm1(self: Any) -> Any:
    """Compute exp(x) - 1, which is tanh(x / 2) (exp(x) + 1), to all digits; the exporter's is 0 for small x."""
    return op.Mul(op.Tanh(op.Mul(self, op.CastLike(0.5, self))), op.Add(op.Exp(self), op.CastLike(1.0, self)))


@in_float32
def log_sigmoid(self: Any) -> Any:
    """Compute log(sigmoid(x)) as PyTorch does; the exporter's is -inf where the sigmoid is 0."""
    return op.Sub(op.Min(self, op.CastLike(0.0, self)), _log1p(op.Exp(op.Neg(op.Abs(self)))))


@in_float32
def logaddexp(self: Any, other: Any) -> Any:
    """Compute log(exp(x) + exp(y)); the exporter's overflows above 88."""
    distance = op.Where(op.Equal(self, other), op.CastLike(0.0, self), op.Abs(op.Sub(self, other)))  # equal infinities
    return op.Add(op.Max(self, other), _log1p(op.Exp(op.Neg(distance))))


@in_float32
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


@in_float32
def atan2(self: Any, other: Any) -> Any:
    """Compute the angle of the point (other, self); the exporter's has a wrong sign on the axes."""
    rise, run = op.Abs(self), op.Abs(other)
    angle = op.Atan(op.Where(op.Equal(rise, run), op.Sign(rise), op.Div(rise, run)))  # both zero, or both infinite
    angle = op.Where(_is_negative(other), op.Sub(op.CastLike(math.pi, angle), angle), angle)
    return op.Mul(angle, op.Where(_is_negative(self), op.CastLike(-1.0, angle), op.CastLike(1.0, angle)))  # -0.0, too


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


@in_float32
def erfc(self: Any) -> Any:
    """Compute 1 - erf(x); the exporter's is 0 from 4 on."""
    z = op.Abs(self)
    near = op.Sub(op.CastLike(1.0, self), op.Erf(self))
    return op.Where(op.Less(self, op.CastLike(0.5, self)), near, _erfc(z, op.Neg(op.Mul(z, z))))


@in_float32
def erfcx(self: Any) -> Any:
    """Compute exp(x^2) (1 - erf(x)), which log_ndtr is made of; the exporter's is 0 from 4 on, and NaN from 10 on."""
    zero = op.CastLike(0.0, self)
    right = _erfc(op.Abs(self), zero)
    left = op.Sub(op.Mul(op.Exp(op.Mul(self, self)), op.CastLike(2.0, self)), right)
    return op.Where(op.Less(self, zero), left, right)


def fmax(self: Any, other: Any) -> Any:
    """Return the larger numbers; NaN only where both are."""
    return op.Where(op.IsNaN(self), other, op.Where(op.IsNaN(other), self, op.Max(self, other)))


def fmin(self: Any, other: Any) -> Any:
    """Return the smaller numbers; NaN only where both are."""
    return op.Where(op.IsNaN(self), other, op.Where(op.IsNaN(other), self, op.Min(self, other)))


# Giles, Approximating the erfinv function, GPU Computing Gems, 2011: polynomials in w - 2.5, and in sqrt(w) - 3.
_ERFINV_NEAR = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_ERFINV_FAR = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


@in_float32
def erfinv(self: Any) -> Any:
    """Compute the inverse of erf, to 4e-7 of its value."""

    def evaluate(factors: Sequence[float], w: Any) -> Any:
        return functools.reduce(
            lambda total, factor: op.Add(op.Mul(total, w), factor), [op.CastLike(each, w) for each in factors]
        )

    one = op.CastLike(1.0, self)
    w = op.Neg(op.Log(op.Mul(op.Sub(one, self), op.Add(one, self))))
    near = evaluate(_ERFINV_NEAR, op.Sub(w, op.CastLike(2.5, w)))
    far = evaluate(_ERFINV_FAR, op.Sub(op.Sqrt(op.Abs(w)), op.CastLike(3.0, w)))
    value = op.Mul(op.Where(op.Less(w, op.CastLike(5.0, w)), near, far), self)
    return op.Where(op.Equal(op.Abs(self), one), op.Mul(self, op.CastLike(math.inf, self)), value)


@in_float32
def hypot(self: Any, other: Any) -> Any:
    """Compute sqrt(x^2 + y^2) without squares that overflow; infinite where one of both is, even beside NaN."""
    sides = op.Abs(self), op.Abs(other)
    long, short = op.Max(*sides), op.Min(*sides)
    ratio = op.Div(short, op.Where(op.Equal(long, op.CastLike(0.0, self)), op.CastLike(1.0, self), long))
    length = op.Mul(long, op.Sqrt(op.Add(op.Mul(ratio, ratio), op.CastLike(1.0, self))))
    return op.Where(op.Or(*map(op.IsInf, sides)), op.CastLike(math.inf, self), length)
