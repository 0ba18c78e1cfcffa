"""Compute operators that have one answer for each element: arithmetic, comparisons, activations."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.frameworks.torch.operators.attributes import Compute, Make, read_float, refuse


def _divide(first: Tensor, second: Tensor) -> Tensor:
    return first / second if first.is_floating_point() else torch.div(first, second, rounding_mode="trunc")


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Compute:
    return lambda *values: functools.reduce(function, values)


def _clip(node: "ir.Node", opset: int) -> Compute:
    least = read_float(node, "min", -math.inf) if opset < 11 else None
    most = read_float(node, "max", math.inf) if opset < 11 else None

    def compute(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        lower, upper = least if low is None else low.item(), most if high is None else high.item()
        return x if lower is None and upper is None else torch.clamp(x, lower, upper)

    return compute


def _swish(x: Tensor, alpha: float) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0.0)))


def _with_alpha(function: Callable[[Tensor, float], Tensor], default: float) -> Compute:
    return lambda x, *, alpha=default: function(x, alpha)


def _is_infinite(x: Tensor, *, detect_positive: int = 1, detect_negative: int = 1) -> Tensor:
    return (torch.isposinf(x) & bool(detect_positive)) | (torch.isneginf(x) & bool(detect_negative))


def _dropout(node: "ir.Node", opset: int) -> Compute:
    training = edit.find_input(node, 2)
    if training is not None and (training.const_value is None or training.const_value.numpy().any()):
        raise refuse(node, "training_mode is on, or computed")
    if len(node.outputs) > 1:
        return lambda x, *_: (x, torch.ones_like(x, dtype=torch.bool))
    return lambda x, *_: x


_SAME_NAMES = (
    *("Neg", "Abs", "Sqrt", "Exp", "Log", "Erf", "Floor", "Ceil", "Round", "Reciprocal", "Sign", "Sin", "Cos", "Tan"),
    *("Sinh", "Cosh", "Tanh", "Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh", "Sigmoid"),
)
"""Operators that torch has under the same names."""
PLAIN: dict[str, Compute] = {
    **{name: getattr(torch, name.lower()) for name in _SAME_NAMES},
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": _divide,
    "Pow": lambda base, exponent: torch.pow(base, exponent).to(base.dtype),
    "Relu": torch.relu,
    "PRelu": lambda x, slope: torch.where(x >= 0, x, x * slope),
    "HardSwish": F.hardswish,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Mish": F.mish,
    "BiasGelu": lambda x, bias: F.gelu(x + bias),
    "FastGelu": lambda x, bias=None: F.gelu(x if bias is None else x + bias, approximate="tanh"),
    "Min": _fold(torch.minimum),
    "Max": _fold(torch.maximum),
    "Sum": _fold(torch.add),
    "Mean": lambda *values: functools.reduce(torch.add, values) / len(values),
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "Not": torch.logical_not,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "Less": torch.lt,
    "GreaterOrEqual": torch.ge,
    "LessOrEqual": torch.le,
    "Where": torch.where,
    "IsNaN": torch.isnan,
    "Gelu": lambda x, *, approximate="none": F.gelu(x, approximate=approximate),
    "QuickGelu": _with_alpha(_swish, 1.702),
    "Swish": _with_alpha(_swish, 1.0),
    "LeakyRelu": _with_alpha(F.leaky_relu, 0.01),
    "Elu": _with_alpha(F.elu, 1.0),
    "Celu": _with_alpha(F.celu, 1.0),
    "Selu": _selu,
    "HardSigmoid": lambda x, *, alpha=0.2, beta=0.5: torch.clamp(alpha * x + beta, 0.0, 1.0),
    "ThresholdedRelu": lambda x, *, alpha=1.0: torch.where(x > alpha, x, torch.zeros_like(x)),
    "Mod": lambda first, second, *, fmod=0: (torch.fmod if fmod else torch.remainder)(first, second),
    "IsInf": _is_infinite,
}
MADE: dict[str, Make] = {"Clip": _clip, "Dropout": _dropout}
