"""Operators in torch: each answers as ONNX Runtime does, and passes gradients on."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.torch import operators
from graphs import normal

RNG = np.random.default_rng(0)
IMAGE, ROWS, POSITIVE = normal(2, 4, 9, 8), normal(3, 6), np.abs(normal(3, 6)) + 0.1
SMALL = np.clip(normal(3, 6), -0.9, 0.9)
FLAGS = normal(3, 6) > 0


def ints(*values: int) -> Any:
    return np.asarray(values, np.int64)


def number(value: float) -> Any:
    return np.asarray(value, np.float32)


Case = tuple[str, list[Any], dict[str, Any], int]


def case(operator: str, *inputs: Any, opset: int = 18, outputs: int = 1, **attributes: Any) -> Any:
    told = ",".join(f"{name}={value}" for name, value in attributes.items() if not isinstance(value, onnx.TensorProto))
    name = f"{operator}-{opset}{'-' if told else ''}{told}"[:70]
    return pytest.param(operator, inputs, attributes, opset, outputs, id=name)


UNARY = (
    *(
        "Neg",
        "Abs",
        "Exp",
        "Erf",
        "Floor",
        "Ceil",
        "Round",
        "Sign",
        "Sin",
        "Cos",
        "Tan",
        "Sinh",
        "Cosh",
        "Tanh",
        "Atan",
    ),
    *("Asinh", "Sigmoid", "Relu", "HardSwish", "Softplus", "Softsign", "Mish", "LeakyRelu", "Elu", "Celu", "Selu"),
    *("HardSigmoid", "ThresholdedRelu", "Identity", "IsNaN", "IsInf"),
)
BINARY = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Sum", "Mean", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
REDUCTIONS = ("Max", "Min", "Mean", "Sum", "Prod", "L1", "L2", "SumSquare", "LogSumExp")
LSTM = [normal(5, 2, 3), normal(2, 16, 3), normal(2, 16, 4), normal(2, 32), None, normal(2, 2, 4), normal(2, 2, 4)]
GRU = [normal(5, 2, 3), normal(1, 12, 3), normal(1, 12, 4), normal(1, 24), None, normal(1, 2, 4)]
WEIGHT = normal(6, 2, 3, 3) / 4

CASES = [
    *(case(name, ROWS) for name in UNARY),
    *(case(name, POSITIVE) for name in ("Sqrt", "Log", "Reciprocal")),
    *(case(name, SMALL) for name in ("Asin", "Acos", "Atanh")),
    case("Acosh", POSITIVE + 1),
    *(case(name, ROWS, normal(6, seed=1)) for name in BINARY),
    case("Div", ints(7, -7, 9), ints(2, 2, -4)),
    case("Mod", ints(7, -7, 9), ints(3, 3, -4)),
    case("Mod", ROWS, POSITIVE, fmod=1),
    case("Pow", POSITIVE, number(2.5)),
    case("Pow", ROWS, ints(2)),
    case("PRelu", ROWS, POSITIVE[:1]),
    *(case(name, FLAGS, ~FLAGS) for name in ("And", "Or", "Xor")),
    case("Not", FLAGS),
    case("Equal", ints(1, 2, 3), ints(1, 0, 3)),
    case("Where", FLAGS, ROWS, number(0)),
    case("Clip", ROWS, number(-0.5), number(0.5)),
    case("Clip", ROWS, None, number(0.5)),
    case("Clip", ROWS),
    case("LeakyRelu", ROWS, alpha=0.3),
    case("Elu", ROWS, alpha=0.5),
    case("Celu", ROWS, alpha=0.5),
    case("HardSigmoid", ROWS, alpha=1 / 6, beta=0.5),
    case("ThresholdedRelu", ROWS, alpha=0.3),
    case("Gelu", ROWS, opset=20),
    case("Gelu", ROWS, opset=20, approximate="tanh"),
    case("Cast", ROWS, to=onnx.TensorProto.INT64),
    case("Cast", FLAGS, to=onnx.TensorProto.FLOAT),
    case("CastLike", ints(1, 2), ROWS),
    case("Dropout", ROWS),
    case("Constant", value=numpy_helper.from_array(ROWS)),
    case("Constant", value_floats=[1.0, 2.5]),
    case("Constant", value_ints=[1, 2]),
    case("Constant", value_float=1.5),
    case("ConstantOfShape", ints(2, 3), value=numpy_helper.from_array(np.asarray([7], np.int64))),
    case("ConstantOfShape", ints(2, 3)),
    case("Shape", IMAGE),
    case("Shape", IMAGE, start=1, end=-1),
    case("Size", IMAGE),
    case("Reshape", IMAGE, ints(0, -1, 8)),
    case("Reshape", np.zeros((0, 3), np.float32), ints(0, 3), allowzero=1),
    case("Flatten", IMAGE),
    case("Flatten", IMAGE, axis=-1),
    case("Flatten", IMAGE, axis=0),
    case("Transpose", IMAGE, perm=[0, 2, 3, 1]),
    case("Transpose", ROWS),
    case("Squeeze", ROWS[:, None], ints(1)),
    case("Squeeze", ROWS[None, :, None]),
    case("Squeeze", ROWS[:, None], opset=11, axes=[1]),
    case("Unsqueeze", ROWS, ints(0, -1)),
    case("Unsqueeze", ROWS, opset=11, axes=[1]),
    case("Concat", ROWS, ROWS + 1, axis=1),
    case("Split", ROWS, ints(2, 4), outputs=2, axis=1),
    case("Split", ROWS, outputs=3, axis=1, num_outputs=3),
    case("Split", ROWS, opset=13, outputs=2, axis=1),
    case("Split", ROWS, opset=11, outputs=2, axis=1, split=[2, 4]),
    case("Slice", IMAGE, ints(1, -5), ints(9, 99), ints(2, 3)),
    case("Slice", IMAGE, ints(-1), ints(-99), ints(3), ints(-2)),
    case("Slice", ROWS, ints(1), ints(2)),
    case("Gather", ROWS, np.asarray([[1, -1], [0, 2]], np.int64)),
    case("Gather", IMAGE, np.asarray(1, np.int64), axis=-1),
    case("GatherElements", ROWS, np.asarray([[1, -1, 0]], np.int64), axis=1),
    case("GatherND", IMAGE, np.asarray([[0, 1], [-1, 3]], np.int64)),
    case("ScatterElements", ROWS, np.asarray([[1, -1]], np.int64), normal(1, 2), axis=1),
    case("ScatterElements", ROWS, np.asarray([[1, 1]], np.int64), normal(1, 2), axis=1, reduction="add"),
    case("ScatterND", ROWS, np.asarray([[0], [2]], np.int64), normal(2, 6)),
    case("Expand", ROWS[:, None], ints(2, 1, 2, 1)),
    case("Expand", ROWS, ints(1)),
    case("Tile", ROWS, ints(2, 3)),
    case("Pad", IMAGE, ints(0, 0, 1, 2, 0, 0, 3, 0), number(1.5)),
    case("Pad", IMAGE, ints(1, 2), number(0), ints(3)),
    case("Pad", IMAGE, ints(0, 0, 1, 2, 0, 0, 3, 0), mode="reflect"),
    case("Pad", IMAGE, ints(0, 0, 1, 2, 0, 0, 3, 0), mode="edge"),
    case("Pad", IMAGE, ints(0, 0, 1, 2, 0, 0, 3, 0), mode="wrap", opset=19),
    case("Range", ints(1)[0], ints(9)[0], ints(3)[0]),
    case("NonZero", np.asarray(ROWS > 0, np.float32)),
    case("OneHot", ints(0, 2, -1), ints(4), np.asarray([0, 5], np.float32)),
    case("OneHot", ints(0, 2, 1), ints(4), np.asarray([0, 5], np.float32), axis=0),
    case("TopK", ROWS, ints(2), outputs=2),
    case("TopK", ROWS, ints(2), outputs=2, axis=0, largest=0),
    case("ArgMax", ROWS, axis=1, keepdims=0),
    case("ArgMin", ROWS),
    case("CumSum", ROWS, np.asarray(1, np.int64)),
    case("CumSum", ROWS, np.asarray(1, np.int64), exclusive=1, reverse=1),
    case("Trilu", ROWS),
    case("Trilu", ROWS, np.asarray(1, np.int64), upper=0),
    case("EyeLike", ROWS, k=1),
    *(case(f"Reduce{name}", IMAGE, ints(2, 3)) for name in REDUCTIONS),
    *(case(f"Reduce{name}", IMAGE, keepdims=0) for name in ("Mean", "Max")),
    case("ReduceMean", IMAGE, opset=13, axes=[1, -1], keepdims=0),
    case("ReduceSum", IMAGE, ints(1), opset=13),
    case("ReduceSum", ROWS, noop_with_empty_axes=1),
    case("ReduceLogSum", POSITIVE, ints(1)),
    *(case(name, IMAGE, axis=1) for name in ("Softmax", "LogSoftmax", "Hardmax")),
    case("Softmax", IMAGE, opset=11),
    case("MatMul", normal(2, 3, 4), normal(4, 5)),
    case("Gemm", ROWS, normal(6, 4), normal(4), alpha=0.5, beta=2.0),
    case("Gemm", normal(6, 3), normal(4, 6), transA=1, transB=1),
    case("Einsum", normal(2, 3, 4), normal(2, 5, 4), equation="bij,bkj->bik"),
    case("Conv", IMAGE, WEIGHT, normal(6), group=2),
    case("Conv", IMAGE, WEIGHT, group=2, strides=[2, 1], dilations=[1, 2], pads=[0, 1, 2, 1]),
    case("Conv", IMAGE, WEIGHT, group=2, strides=[2, 2], auto_pad="SAME_UPPER"),
    case("Conv", IMAGE, WEIGHT, group=2, strides=[2, 2], auto_pad="SAME_LOWER"),
    case("Conv", IMAGE, WEIGHT, group=2, auto_pad="VALID"),
    case("Conv", IMAGE[..., 0], WEIGHT[..., 0], group=2, pads=[1, 1]),
    case("ConvTranspose", IMAGE, normal(4, 3, 2, 2), normal(3), strides=[2, 2]),
    case("ConvTranspose", IMAGE, normal(4, 3, 3, 3), strides=[2, 2], pads=[1, 0, 0, 1], output_padding=[1, 0]),
    case("ConvTranspose", IMAGE, normal(4, 3, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], group=2),
    case("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
    case("MaxPool", IMAGE[..., 0], kernel_shape=[3], strides=[2]),
    case("AveragePool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1]),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    case("GlobalAveragePool", IMAGE),
    case("GlobalMaxPool", IMAGE),
    case("BatchNormalization", IMAGE, normal(4), normal(4), normal(4), POSITIVE[0, :4]),
    case("InstanceNormalization", IMAGE, normal(4), normal(4)),
    case("LayerNormalization", IMAGE, normal(8), normal(8)),
    case("LayerNormalization", IMAGE, normal(4, 9, 8), axis=1, epsilon=1e-3),
    case("GroupNormalization", IMAGE, normal(2), normal(2), num_groups=2),
    case("GroupNormalization", IMAGE, normal(4), normal(4), num_groups=2, opset=21),
    case("RMSNormalization", IMAGE, normal(8), opset=23),
    case("LpNormalization", ROWS, axis=1),
    case("MeanVarianceNormalization", IMAGE),
    case("LRN", IMAGE, size=3, alpha=0.1),
    case("DepthToSpace", IMAGE, blocksize=2),
    case("DepthToSpace", IMAGE, blocksize=2, mode="CRD"),
    case("SpaceToDepth", normal(2, 3, 4, 6), blocksize=2),
    case("Resize", IMAGE, None, np.asarray([1, 1, 2, 2], np.float32), coordinate_transformation_mode="asymmetric"),
    case("Resize", IMAGE, None, np.asarray([1, 1, 1.5, 0.6], np.float32)),
    case("Resize", IMAGE, None, None, ints(2, 4, 13, 5), mode="linear"),
    case("Resize", IMAGE, None, None, ints(2, 4, 13, 5), mode="linear", coordinate_transformation_mode="align_corners"),
    case("Resize", IMAGE, None, np.asarray([1, 1, 2, 2], np.float32), mode="cubic"),
    case("Upsample", IMAGE, np.asarray([1, 1, 2, 2], np.float32), opset=9),
    case("GridSample", IMAGE, np.clip(normal(2, 3, 5, 2), -0.9, 0.9)),
    case("LSTM", *LSTM, outputs=3, hidden_size=4, direction="bidirectional"),
    case("LSTM", LSTM[0], *(each[:1] for each in LSTM[1:3]), outputs=3, hidden_size=4, direction="reverse"),
    case("GRU", *GRU, outputs=2, hidden_size=4),
    case("GRU", *GRU, outputs=2, hidden_size=4, linear_before_reset=1),
    case("RNN", normal(5, 2, 3), normal(1, 4, 3), normal(1, 4, 4), normal(1, 8), outputs=2, hidden_size=4),
]

HALVES = np.asarray([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.4, -0.6], np.float32)
ODD = np.asarray([0, np.nan, np.inf, -np.inf, 1], np.float32)
LEVELS, NARROW = ints(-7, -3, 0, 5, 9), ints(-7, -3, 0, 5, 9).astype(np.int32)
TWICE = np.asarray([[1], [1]], np.int64)
PLACES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
REDUCED = ("Max", "Min", "Mean", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")


def factors(*values: float) -> Any:
    return np.asarray(values, np.float32)


def recurrent(operator: str, direction: str, *, states: bool, **attributes: Any) -> Any:
    ways, gates = 2 if direction == "bidirectional" else 1, {"LSTM": 16, "GRU": 12, "RNN": 4}[operator]
    weights = [normal(ways, gates, 3, seed=1), normal(ways, gates, 4, seed=2)]
    kept = [normal(ways, 2, 4, seed=3 + place) for place in range(2 if operator == "LSTM" else 1)]
    given = [normal(ways, 2 * gates, seed=5), None, *kept] if states else []
    outputs = 3 if operator == "LSTM" else 2
    inputs = (normal(5, 2, 3), *weights, *given)
    return case(operator, *inputs, outputs=outputs, direction=direction, hidden_size=4, **attributes)


def merge(heads: Any) -> Any:
    """Put the heads of [batch, heads, length, width] side by side: [batch, length, heads * width]."""
    return np.ascontiguousarray(heads.transpose(0, 2, 1, 3).reshape(heads.shape[0], heads.shape[2], -1))


QKV = [normal(2, 4, 5, 8), normal(2, 4, 7, 8, seed=1), normal(2, 4, 7, 6, seed=2)]
GROUPED = [QKV[0], *(each[:, :2] for each in QKV[1:])]
SCORES = normal(2, 4, 5, 7, seed=3)
SEEN = SCORES > -0.7
HIDDEN = np.arange(5)[:, None] > 0
"""Of the first row nothing is looked at."""
OLD_SCALES = [factors(1, 1, 2, 1.5), factors(1, 1, 0.7, 0.6), factors(1, 1, 0.7, 2.3)]
ANGLES, PLACED = [normal(9, 4), normal(9, 4, seed=1)], np.asarray([[0, 1, 2, 3, 4], [8, 7, 3, 3, 0]], np.int64)

MORE = [
    case("Round", HALVES),
    case("Softplus", factors(-30, 0, 30, 80)),
    *(case("IsInf", ODD, **{name: 0}) for name in ("detect_negative", "detect_positive")),
    case("IsNaN", ODD),
    *(case(name, IMAGE, IMAGE[:1], IMAGE[:, :, :1]) for name in ("Min", "Max", "Sum", "Mean")),
    *(case(name, LEVELS, ints(2, -2, 3, -3, 4)) for name in ("Add", "Mul", "Div", "Mod", "Min", "Max")),
    case("Mod", LEVELS, ints(2, -2, 3, -3, 4), fmod=1),
    case("Pow", LEVELS, ints(2)),
    case("Pow", LEVELS, number(2.0)),
    case("Clip", LEVELS, ints(-2)[0], ints(5)[0]),
    case("Clip", ROWS, number(-0.5), number(0.5), opset=11),
    case("Selu", ROWS, alpha=1.1, gamma=1.4),
    case("PRelu", IMAGE, normal(4, 1, 1)),
    case("Gelu", ROWS, domain="com.microsoft"),
    case("FastGelu", ROWS, domain="com.microsoft"),
    case("FastGelu", ROWS, normal(6, seed=1), domain="com.microsoft"),
    case("BiasGelu", ROWS, normal(6, seed=1), domain="com.microsoft"),
    case("QuickGelu", ROWS, domain="com.microsoft", alpha=1.1),
    case("Cast", HALVES, to=onnx.TensorProto.BOOL),
    case("Dropout", ROWS, number(0.4), outputs=2),
    case("Dropout", ROWS, opset=11, ratio=0.4),
    case("Constant", value=numpy_helper.from_array(np.asarray(7, np.int64))),
    case("Constant", value_int=-4),
    case("Range", number(0.5), number(2.2), number(0.25)),
    case("Range", *ints(5, -4, -2)),
    case("EyeLike", ROWS, k=-1, dtype=onnx.TensorProto.INT64),
    case("Flatten", np.zeros((0, 3, 4), np.float32)),
    case("Unsqueeze", ROWS, ints(3, 1)),
    case("Split", normal(7, 2), outputs=3, num_outputs=3),
    case("Slice", IMAGE, ints(0, 3), ints(5, 0), ints(2, 3), ints(2, -1)),
    case("Slice", IMAGE, ints(4), ints(2), ints(2)),
    case("Slice", IMAGE, ints(-1), ints(np.iinfo(np.int64).min), ints(2), ints(-2)),
    case("Gather", LEVELS, ints(2)[0]),
    case("Gather", ROWS, NARROW[2:3], axis=-1),
    case("GatherND", normal(2, 3, 5), np.asarray([[0], [2]], np.int64), batch_dims=1),
    case("GatherND", normal(2, 3, 5), np.asarray([[[0, 4], [1, -2]]] * 2, np.int64), batch_dims=1),
    case("GatherND", normal(2, 3, 5), np.asarray([[[0], [4], [-1]]] * 2, np.int64), batch_dims=2),
    *(case("ScatterElements", ROWS, TWICE.T, normal(1, 2), axis=1, reduction=how) for how in ("mul", "max", "min")),
    case("Scatter", ROWS, np.asarray([[1, 3]], np.int64), normal(1, 2), opset=10, axis=1),
    *(case("ScatterND", ROWS, TWICE, normal(2, 6), reduction=how) for how in ("add", "mul", "max", "min")),
    *(case("ScatterND", ROWS, ints(1, -1, 2, 0).reshape(2, 2), normal(2), reduction=how) for how in ("none", "mul")),
    case("OneHot", ints(1, 7, -9), ints(4), np.asarray([0, 5], np.float32)),
    case("ArgMax", factors(1, 3, 3, 2, 3)),
    case("CumSum", NARROW, ints(0)[0]),
    *(case(f"Reduce{name}", POSITIVE, opset=13, axes=[-1], keepdims=0) for name in REDUCED),
    *(case(f"Reduce{name}", POSITIVE, opset=17) for name in REDUCED),
    *(case(name, NARROW[3:], ints(0)) for name in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMean")),
    case("ReduceSum", ROWS, opset=11, axes=[0], keepdims=0),
    case("ReduceSum", ROWS, ints()),
    case("ReduceLogSumExp", 200 * ROWS, ints(1)),
    *(case(name, IMAGE, opset=12, axis=2) for name in ("Softmax", "LogSoftmax", "Hardmax")),
    case("MatMul", normal(4), normal(2, 4, 5)),
    case("Einsum", normal(4, 4), equation="ii->i"),
    case("Einsum", normal(2, 3, 4), normal(2, 5, 4), equation="...ij,...kj->...ik"),
    case("Conv", normal(1, 2, 4, 5, 6), normal(3, 2, 2, 3, 3), pads=[0, 1, 2, 1, 1, 0]),
    case("Conv", IMAGE, normal(3, 4, 2, 4), auto_pad="SAME_LOWER", strides=[2, 1]),
    case("ConvTranspose", normal(2, 4, 9), normal(4, 3, 4), strides=[2], pads=[1, 1]),
    case("ConvTranspose", normal(1, 2, 3, 4, 3), normal(2, 3, 2, 2, 3), strides=[2, 1, 1]),
    case("ConvTranspose", IMAGE, normal(4, 2, 3, 3), normal(4), group=2, dilations=[2, 1]),
    *(case(f"{kind}Pool", IMAGE, kernel_shape=[3, 3], pads=[0, 1, 2, 0]) for kind in ("Max", "Average")),
    *(
        case(f"{kind}Pool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], auto_pad=pad)
        for kind in ("Max", "Average")
        for pad in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    case("MaxPool", normal(1, 2, 5, 5), kernel_shape=[2, 2], strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1),
    case("MaxPool", IMAGE, kernel_shape=[2, 3], dilations=[2, 2]),
    *(
        case("AveragePool", IMAGE, kernel_shape=[2, 3], strides=[2, 2], ceil_mode=1, count_include_pad=n)
        for n in (0, 1)
    ),
    case("AveragePool", IMAGE[..., 0], kernel_shape=[3], strides=[2], pads=[1, 0]),
    case("BatchNormalization", normal(3, 4), normal(4), normal(4), normal(4), POSITIVE[0, :4], opset=11),
    case("RMSNormalization", IMAGE, normal(9, 8), opset=23, axis=2, epsilon=0.1),
    case("LpNormalization", ROWS, axis=0, p=1),
    case("LpNormalization", np.zeros((2, 3), np.float32)),
    case("MeanVarianceNormalization", IMAGE, axes=[2, 3]),
    *(
        case("Resize", IMAGE, None, scales, coordinate_transformation_mode=place, nearest_mode=rounding)
        for scales in (factors(1, 1, 2, 3), factors(1, 1, 0.5, 0.6))
        for place in PLACES[:2]
        for rounding in ROUNDINGS
    ),
    *(
        case("Resize", IMAGE, None, scales, mode="linear", coordinate_transformation_mode=place)
        for scales in (factors(1, 1, 2, 3), factors(1, 1, 1.3, 0.7), factors(1, 1, 1.1, 2))
        for place in PLACES
    ),
    case("Resize", normal(1, 2, 10, 4), None, factors(1, 1, 0.7, 1), mode="linear"),
    *(case("Resize", IMAGE, None, factors(1, 1, 1.1, 1), mode=mode) for mode in ("linear", "cubic")),
    case("Resize", normal(1, 3, 5), None, factors(1, 1, 2), mode="linear"),
    case("Resize", IMAGE, factors(), factors(), ints(2, 4, 18, 16), opset=11),
    *(case("Resize", IMAGE, None, factors(1, 1, *each), mode="cubic") for each in ((0.5, 0.5), (1.3, 0.7))),
    *(
        case("Resize", IMAGE, None, None, ints(2, 4, 13, 5), mode="cubic", coordinate_transformation_mode=place)
        for place in ("align_corners", "pytorch_half_pixel")
    ),
    case("Upsample", IMAGE, factors(1, 1, 2, 2), opset=9, mode="linear"),
    *(
        case("GridSample", IMAGE, normal(2, 3, 5, 2) / 2, mode=mode, align_corners=align)
        for mode in ("bilinear", "nearest", "bicubic")
        for align in (0, 1)
    ),
    *(case("GridSample", IMAGE, normal(2, 3, 5, 2), padding_mode=pad) for pad in ("border", "reflection")),
    *(case("GridSample", IMAGE, normal(2, 3, 5, 2) / 2, opset=20, mode=mode) for mode in ("linear", "cubic")),
    *(
        recurrent(operator, direction, states=states)
        for operator in ("LSTM", "GRU", "RNN")
        for direction in ("forward", "reverse", "bidirectional")
        for states in (False, True)
    ),
    *(
        recurrent("GRU", direction, states=states, linear_before_reset=1)
        for direction in ("reverse", "bidirectional")
        for states in (False, True)
    ),
    recurrent("LSTM", "forward", states=True, activations=["Sigmoid", "Tanh", "Tanh"]),
    *(case("Attention", *QKV, *masks, opset=23) for masks in ([], [SCORES], [SEEN], [SEEN[0, 0]], [SEEN & HIDDEN])),
    *(case("Attention", *QKV, mask, opset=23, is_causal=1, scale=0.3) for mask in (None, SCORES)),
    *(case("Attention", *QKV, mask, opset=23, softcap=0.5) for mask in (None, SCORES, SEEN)),
    *(case("Attention", *GROUPED, mask, opset=23, softcap=cap) for mask in (None, SCORES) for cap in (0.0, 0.5)),
    case("Attention", *map(merge, QKV), opset=24, q_num_heads=4, kv_num_heads=4),
    case("Attention", *map(merge, GROUPED), SEEN, opset=23, q_num_heads=4, kv_num_heads=2),
    *(case("RotaryEmbedding", QKV[0], *ANGLES, PLACED, opset=23, interleaved=n) for n in (0, 1)),
    *(case("RotaryEmbedding", merge(QKV[0]), *ANGLES, PLACED, opset=23, num_heads=4, interleaved=n) for n in (0, 1)),
    case("RotaryEmbedding", QKV[0], *(each[None, :5].repeat(2, 0) for each in ANGLES), opset=23),
    case("RotaryEmbedding", QKV[0], *(each[:, :2] for each in ANGLES), PLACED, opset=23, rotary_embedding_dim=4),
    *(case("Resize", IMAGE, scales, opset=10, mode=mode) for scales in OLD_SCALES for mode in ("nearest", "linear")),
    *(case("Upsample", IMAGE, opset=7, mode=mode, scales=[1.0, 1.0, 2.0, 1.5]) for mode in ("nearest", "linear")),
    *(case(f"Reduce{name}", ROWS, noop_with_empty_axes=1) for name in ("SumSquare", "L1", "L2", "Max", "LogSumExp")),
    case("ReduceLogSum", POSITIVE, noop_with_empty_axes=1),
    case("ReduceSumSquare", ROWS, ints(), noop_with_empty_axes=1, keepdims=0),
    case("ReduceL2", NARROW, ints(0)),
    *(
        case("Pad", ROWS, ints(*pads), mode="wrap", opset=19)
        for pads in ((-1, 1, 0, -1), (0, -2, 2, 3), (1, 1, -1, -1))
    ),
    *(case("Swish", ROWS, opset=24, **more) for more in ({}, {"alpha": 1.5})),
]
"""Other attributes, types and opsets, and the edges of what is above."""


def build(operator: str, inputs: Any, attributes: dict[str, Any], opset: int, outputs: int) -> onnx.ModelProto:
    names = ["" if value is None else f"input_{index}" for index, value in enumerate(inputs)]
    made = helper.make_node(operator, names, [f"output_{index}" for index in range(outputs)], "n", **attributes)
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in zip(names, inputs, strict=True)
        if value is not None
    ]
    results = [helper.make_empty_tensor_value_info(f"output_{index}") for index in range(outputs)]
    graph = helper.make_graph([made], "one", given, results)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=imports)


def find(model: onnx.ModelProto) -> Any:
    import onnx_ir as ir

    (node,) = ir.from_proto(model).graph
    return operators.find(node, model.opset_import[0].version)


@pytest.mark.parametrize(("operator", "inputs", "attributes", "opset", "outputs"), [*CASES, *MORE])
def test_it_answers_as_onnx_runtime(
    operator: str, inputs: Any, attributes: dict[str, Any], opset: int, outputs: int
) -> None:
    model = build(operator, inputs, attributes, opset, outputs)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    feeds = {f"input_{index}": np.asarray(value) for index, value in enumerate(inputs) if value is not None}
    expected = session.run(None, feeds)
    found = find(model)([None if value is None else torch.from_numpy(np.array(value)) for value in inputs])
    assert len(found) >= len(expected)
    for theirs, ours in zip(expected, found, strict=False):
        assert theirs.shape == tuple(ours.shape)
        assert theirs.dtype == ours.numpy().dtype
        np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "outputs"),
    [
        ("Conv", [IMAGE, WEIGHT, normal(6)], {"group": 2}, 1),
        ("Gemm", [ROWS, normal(6, 4), normal(4)], {}, 1),
        ("LayerNormalization", [IMAGE, normal(8), normal(8)], {}, 1),
        ("LSTM", LSTM, {"hidden_size": 4, "direction": "bidirectional"}, 3),
        ("GRU", GRU, {"hidden_size": 4}, 2),
        ("Resize", [IMAGE, None, np.asarray([1, 1, 2, 2], np.float32)], {"mode": "linear"}, 1),
        ("GRU", GRU, {"hidden_size": 4, "linear_before_reset": 1}, 2),
        ("Resize", [IMAGE, None, factors(1, 1, 1.3, 0.7)], {"mode": "cubic"}, 1),
    ],
)
def test_gradients_reach_every_input(operator: str, inputs: Any, attributes: Any, outputs: int) -> None:
    values = [None if value is None else torch.from_numpy(np.array(value)) for value in inputs]
    trained = [value.requires_grad_() for value in values[:2] + values[3:] if value is not None]
    find(build(operator, inputs, attributes, 18, outputs))(values)[0].square().sum().backward()
    assert all(value.grad is not None and float(value.grad.abs().sum()) > 0 for value in trained[:4])


@pytest.mark.parametrize(
    ("operator", "opset"), [("ReduceL2", 17), ("LpNormalization", 17), ("MeanVarianceNormalization", 17)]
)
def test_gradients_at_zeros_are_numbers(operator: str, opset: int) -> None:
    x = torch.zeros(2, 3, 2, 2, requires_grad=True)
    find(build(operator, [x.detach().numpy()], {}, opset, 1))([x])[0].sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


def test_dropout_that_is_told_not_to_train_gives_its_input() -> None:
    import onnx_ir as ir

    model = build("Dropout", [ROWS, number(0.5), np.asarray(False)], {}, 18, 1)
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(False), "input_2"))
    (node,) = ir.from_proto(model).graph
    x = torch.from_numpy(ROWS)
    assert torch.equal(operators.find(node, 18)([x, torch.tensor(0.5), torch.tensor(False)])[0], x)


def test_one_pixel_is_its_own_mean() -> None:
    """The rounding error of the difference is multiplied by 1/√epsilon = 316 here, and in ONNX Runtime otherwise."""
    x, bias = normal(1, 4, 1, 1), normal(4, seed=1)
    (found,) = find(build("InstanceNormalization", [x, normal(4), bias], {}, 18, 1))(
        [torch.from_numpy(each) for each in (x, normal(4), bias)]
    )
    np.testing.assert_allclose(found.flatten().numpy(), bias, atol=2e-4)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        *((name, [ROWS], {}) for name in ("If", "Loop", "Scan", "NonMaxSuppression", "LpPool")),
        ("BatchNormalization", [IMAGE, *[normal(4)] * 4], {"training_mode": 1}),
        ("Dropout", [ROWS, number(0.5), np.asarray(True)], {}),
        ("MaxPool", [normal(1, 2, 4, 4, 4)], {"kernel_shape": [2, 2, 2]}),
        ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1]}),
        ("Resize", [IMAGE, None, factors(1, 1, 2, 2)], {"mode": "cubic", "exclude_outside": 1}),
        ("Resize", [IMAGE, None, None, ints(2, 4, 9, 9)], {"keep_aspect_ratio_policy": "not_larger"}),
        ("Resize", [IMAGE, None, factors(1, 1, 2, 2)], {"coordinate_transformation_mode": "tf_crop_and_resize"}),
        ("LSTM", [*LSTM[:4], ints(5, 3).astype(np.int32)], {"hidden_size": 4, "direction": "bidirectional"}),
        ("LSTM", [*LSTM, normal(2, 12)], {"hidden_size": 4, "direction": "bidirectional"}),
        ("GRU", GRU, {"hidden_size": 4, "activations": ["Relu", "Tanh"]}),
        ("RNN", GRU[:3], {"hidden_size": 4, "layout": 1}),
        ("GroupNormalization", [IMAGE], {"domain": "com.microsoft"}),
        ("Unique", [ROWS], {}),
        ("Resize", [IMAGE, None, np.asarray([1, 1, 2, 2], np.float32)], {"antialias": 1, "mode": "linear"}),
        ("LSTM", LSTM[:4], {"hidden_size": 4, "direction": "bidirectional", "clip": 1.0}),
        ("ConvTranspose", [IMAGE, normal(4, 3, 3, 3)], {"output_shape": [20, 20]}),
        ("ArgMax", [ROWS], {"select_last_index": 1}),
        ("Attention", [*QKV, None, QKV[1], QKV[2]], {}),
    ],
)
def test_what_has_no_form_is_refused_by_name(operator: str, inputs: Any, attributes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=rf"{operator} 'n' has no form in torch"):
        find(build(operator, inputs, attributes, 18, 1))


def test_operators_of_other_domains_are_refused() -> None:
    model = build("Relu", [ROWS], {}, 18, 1)
    model.graph.node[0].domain = "my.own"
    with pytest.raises(ModelError, match="Relu 'n' has no form"):
        find(model)
