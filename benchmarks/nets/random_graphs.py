"""Make random ONNX graphs that are valid by construction: the same seed gives the same graph.

A graph grows node by node: an operator is drawn, then a value that it takes, then its attributes and its weights.
Shapes are followed as they are made, so that no operator gets what it does not take. The first axis is the batch
everywhere; values that have lost it become outputs. Weights are scaled by what they add up, to stay near 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH = "batch"
_FLOAT, _INT64, _BOOL, _HALF = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT16
_VOCABULARY = 4
"""Integers that are fed are smaller, and everything that they look up has at least as many rows."""
_OPSETS = tuple(range(13, 24))
_WIDTHS = (1, 2, 3, 5, 7, 8, 12, 16, 32, 32)
_STATIC_SHARE, _FIXED_BATCH = 0.15, 2
Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
"""Sizes of a value behind its batch."""


@dataclass(frozen=True)
class Value:
    """A value of the graph: its name, and its sizes behind the batch."""

    name: str
    shape: Shape
    kind: int = _FLOAT


@dataclass
class RandomGraph:
    """Collect the nodes, weights and values of a graph that is being made."""

    seed: int
    rng: np.random.Generator
    opset: int
    batch: int | str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    extras: list[onnx.ValueInfoProto] = field(default_factory=list)
    """Outputs that have no batch."""
    count: int = 0

    def chance(self, share: float) -> bool:
        """Draw whether something happens."""
        return bool(self.rng.random() < share)

    def choose(self, options: Sequence[Any]) -> Any:
        """Draw one of several."""
        return options[int(self.rng.integers(len(options)))]

    def name(self, word: str) -> str:
        """Make a name of its own."""
        self.count += 1
        return f"{word}_{self.count}"

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """Add a weight of normal numbers; sometimes return one of the same shape that is there already."""
        fan = math.prod(shape[1:]) if len(shape) > 1 else 4
        same = [name for name, one in self.weights.items() if one.shape == shape and one.dtype == np.float32]
        if scale is None and same and self.chance(0.3):
            return str(self.choose(same))
        numbers = self.rng.standard_normal(shape).astype(np.float32) * (scale or 1 / math.sqrt(max(fan, 1)))
        return self.constant(numbers.astype(np.float32))

    def constant(self, numbers: Any, dtype: Any = None) -> str:
        """Add an initializer, or rarely a Constant node."""
        array, name = np.asarray(numbers, dtype), self.name("c")
        if self.chance(0.1):
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        else:
            self.weights[name] = array
        return name

    def integers(self, *numbers: int) -> str:
        """Add a list of integers."""
        return self.constant(list(numbers), np.int64)

    def node(self, operator: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Add a node; return its first output."""
        names = [self.name(operator.lower()) for _ in range(outputs)]
        label = self.name(operator) if self.chance(0.7) else ""
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=label, **attributes))
        return names[0]

    def last_outputs(self) -> list[str]:
        """List the outputs of the node that was added last."""
        return list(self.nodes[-1].output)

    def add(self, name: str, shape: Sequence[int], kind: int = _FLOAT) -> Value:
        """Note a value that later nodes may read."""
        value = Value(name, tuple(shape), kind)
        self.values.append(value)
        return value

    def pick(self, rank: int | None = None, kind: int = _FLOAT) -> Value | None:
        """Draw a value of a rank behind the batch, later ones more often."""
        fitting = [one for one in self.values if one.kind == kind and rank in (None, len(one.shape))]
        if not fitting:
            return None
        return fitting[-1 - min(int(self.rng.geometric(0.5)) - 1, len(fitting) - 1)]

    def describe(self, value: Value, name: str = "") -> onnx.ValueInfoProto:
        """Describe a value as inputs and outputs are."""
        return helper.make_tensor_value_info(name or value.name, value.kind, [self.batch, *value.shape])


Grow = Callable[[RandomGraph], None]


# Products.


def _conv(graph: RandomGraph) -> None:
    value = graph.pick(3)
    if value is None:
        return
    channels, height, width = value.shape
    kernel, stride, dilation = graph.choose((1, 3)), graph.choose((1, 1, 2)), graph.choose((1, 1, 1, 2))
    groups = graph.choose([number for number in (1, 1, 2, channels) if channels % number == 0])
    outputs = groups * graph.choose((1, 2, 3, 4, 4, 8))
    pads = dilation * (kernel - 1) // 2
    bias = [graph.weight(outputs, scale=0.3)] if graph.chance(0.6) else []
    sizes = [(size + 2 * pads - dilation * (kernel - 1) - 1) // stride + 1 for size in (height, width)]
    attributes: dict[str, Any] = {"group": groups, "strides": [stride] * 2, "dilations": [dilation] * 2}
    if stride == dilation == 1 and graph.chance(0.2):  # ONNX Runtime takes no other dilation here
        attributes["auto_pad"] = "SAME_UPPER"
        sizes = [height, width]
    else:
        attributes["pads"] = [pads] * 4
    weight = graph.weight(outputs, channels // groups, kernel, kernel)
    graph.add(graph.node("Conv", [value.name, weight, *bias], **attributes), (outputs, *sizes))


def _conv_transpose(graph: RandomGraph) -> None:
    value = graph.pick(3)
    if value is None or max(value.shape[1:]) > 16:
        return
    channels, height, width = value.shape
    groups = graph.choose([number for number in (1, 1, 2) if channels % number == 0])
    each, stride = int(graph.rng.integers(1, 4)), graph.choose((1, 2))
    bias = [graph.weight(groups * each, scale=0.3)] if graph.chance(0.5) else []
    weight = graph.weight(channels, each, 2, 2, scale=1 / math.sqrt(channels))
    made = graph.node("ConvTranspose", [value.name, weight, *bias], group=groups, strides=[stride] * 2)
    graph.add(made, (groups * each, (height - 1) * stride + 2, (width - 1) * stride + 2))


def _conv_1d(graph: RandomGraph) -> None:
    value = graph.pick(2)
    if value is None:
        return
    outputs = int(graph.rng.integers(1, 9))
    weight = graph.weight(outputs, value.shape[0], 3)
    graph.add(graph.node("Conv", [value.name, weight], pads=[1, 1], kernel_shape=[3]), (outputs, value.shape[1]))


def _gemm(graph: RandomGraph) -> None:
    value = graph.pick(1)
    if value is None:
        return
    (width,), outputs = value.shape, graph.choose(_WIDTHS)
    transposed = graph.chance(0.6)
    weight = graph.weight(outputs, width) if transposed else graph.weight(width, outputs, scale=1 / math.sqrt(width))
    attributes: dict[str, Any] = {"transB": int(transposed)} if transposed else {}
    if graph.chance(0.2):
        attributes["alpha"] = 0.5
    if graph.chance(0.2):
        attributes["beta"] = 2.0
    shape = graph.choose(((outputs,), (1, outputs), (1,), ()))
    bias = graph.choose(([], [graph.weight(*shape, scale=0.3)], [graph.weight(outputs, scale=0.3)]))
    graph.add(graph.node("Gemm", [value.name, weight, *bias], **attributes), (outputs,))


def _matmul(graph: RandomGraph) -> None:
    value = graph.pick(graph.choose((1, 2, 2)))
    if value is None:
        return
    width, outputs = value.shape[-1], graph.choose(_WIDTHS)
    weight = graph.weight(width, outputs, scale=1 / math.sqrt(width))
    made = graph.node("MatMul", [value.name, weight])
    if graph.chance(0.5):
        summands = [made, graph.weight(outputs, scale=0.3)]
        made = graph.node("Add", summands if graph.chance(0.5) else summands[::-1])
    graph.add(made, (*value.shape[:-1], outputs))


def _attention(graph: RandomGraph) -> None:
    value = graph.pick(2)
    if value is None:
        return
    turned = graph.node("Transpose", [value.name], perm=[0, 2, 1])
    scores = graph.node("MatMul", [value.name, turned])
    scaled = graph.node("Mul", [scores, graph.constant(1 / math.sqrt(value.shape[1]), np.float32)])
    shares = graph.node("Softmax", [scaled], axis=-1)
    graph.add(graph.node("MatMul", [shares, value.name]), value.shape)


def _einsum(graph: RandomGraph) -> None:
    value = graph.pick(2)
    if value is None:
        return
    weight = graph.weight(value.shape[1], 3, scale=1 / math.sqrt(value.shape[1]))
    graph.add(graph.node("Einsum", [value.name, weight], equation="nij,jk->nik"), (value.shape[0], 3))


def _recurrent(graph: RandomGraph) -> None:
    value = graph.pick(2)
    if value is None:
        return
    (steps, width), hidden = value.shape, int(graph.rng.integers(2, 5))
    operator, gates = graph.choose((("LSTM", 4), ("GRU", 3)))
    turned = graph.node("Transpose", [value.name], perm=[1, 0, 2])
    ways = graph.choose((1, 1, 2))
    direction = "bidirectional" if ways == 2 else graph.choose(("forward", "reverse"))
    inputs = [turned, graph.weight(ways, gates * hidden, width, scale=0.4)]
    inputs.append(graph.weight(ways, gates * hidden, hidden, scale=0.4))
    if graph.chance(0.5):
        inputs.append(graph.weight(ways, 2 * gates * hidden, scale=0.2))
    elif graph.chance(0.3):
        inputs += ["", ""]
    attributes = {"linear_before_reset": int(graph.chance(0.5))} if operator == "GRU" else {}
    states = int(graph.rng.integers(1, 3))
    made = graph.node(operator, inputs, states, hidden_size=hidden, direction=direction, **attributes)
    back = graph.node("Transpose", [made], perm=[2, 0, 1, 3])
    shape = graph.integers(0, steps, ways * hidden)
    graph.add(graph.node("Reshape", [back, shape]), (steps, ways * hidden))


# Elementwise operators, normalizations and what moves numbers.

_UNARY: Mapping[str, int] = {
    **dict.fromkeys(("Relu", "Sigmoid", "Tanh", "Erf", "Neg", "Abs", "Softplus", "Softsign", "Identity", "Sin"), 13),
    **dict.fromkeys(("LeakyRelu", "Elu", "Selu", "HardSigmoid", "Celu", "ThresholdedRelu", "Floor"), 13),
    "HardSwish": 14,
    "Mish": 18,
    "Gelu": 20,
}


def _unary(graph: RandomGraph) -> None:
    value = graph.pick()
    operator = graph.choose([name for name, least in _UNARY.items() if least <= graph.opset])
    if value is not None and not (operator == "Floor" and graph.chance(0.8)):
        graph.add(graph.node(operator, [value.name]), value.shape)


def _written_out(graph: RandomGraph) -> None:
    """Add an activation in several nodes, as exporters write it."""
    value = graph.pick()
    if value is None:
        return
    number = lambda content: graph.constant(content, np.float32)  # noqa: E731
    match graph.choose(("silu", "gelu", "hardswish", "clip", "sqrt", "prelu")):
        case "silu":
            made = graph.node("Mul", [value.name, graph.node("Sigmoid", [value.name])])
        case "gelu":
            error = graph.node("Erf", [graph.node("Div", [value.name, number(math.sqrt(2))])])
            half = graph.node("Mul", [value.name, graph.node("Add", [error, number(1)])])
            made = graph.node("Mul", [half, number(0.5)])
        case "hardswish":
            moved = graph.node("Add", [value.name, number(3)])
            cut = graph.node("Clip", [moved, number(0), number(6)])
            made = graph.node("Mul", [value.name, graph.node("Div", [cut, number(6)])])
        case "clip":
            bounds = graph.choose(([number(0), number(6)], [number(-1)], ["", number(1)], [number(0), ""]))
            made = graph.node("Clip", [value.name, *bounds])
        case "sqrt":
            squares = graph.node("Mul", [value.name, value.name])
            made = graph.node("Sqrt", [graph.node("Add", [squares, number(0.1)])])
        case _:
            slopes = graph.weight(*value.shape[:1], *[1] * (len(value.shape) - 1), scale=0.3)
            made = graph.node("PRelu", [value.name, slopes])
    graph.add(made, value.shape)


def _binary(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None:
        return
    operator = graph.choose(("Add", "Add", "Mul", "Sub", "Max", "Min", "Div"))
    same = [one.name for one in graph.values if one.shape == value.shape and one.kind == _FLOAT]
    if operator == "Div":
        other = graph.node("Add", [graph.node("Abs", [graph.choose(same)]), graph.constant(1, np.float32)])
    elif graph.chance(0.5):
        other = graph.choose(same)
    else:
        kept = [size if graph.chance(0.6) else 1 for size in value.shape]
        shape = graph.choose((kept, [1, *kept], kept[-1:], []))
        other = graph.weight(*shape, scale=0.7)
    inputs = [value.name, other] if graph.chance(0.7) else [other, value.name]
    if operator == "Div":
        inputs = [value.name, other]
    graph.add(graph.node(operator, inputs), value.shape)


def _channel_broadcast(graph: RandomGraph) -> None:
    """Add squeeze-and-excitation: a picture times numbers of its channels."""
    value = graph.pick(3)
    if value is None:
        return
    axes = graph.integers(2, 3)
    if graph.opset >= 18 and graph.chance(0.5):
        mean = graph.node("ReduceMean", [value.name, axes], keepdims=1)
    else:
        mean = graph.node("GlobalAveragePool", [value.name])
    squeezed = graph.node("Conv", [mean, graph.weight(value.shape[0], value.shape[0], 1, 1)])
    graph.add(graph.node("Mul", [value.name, graph.node("Sigmoid", [squeezed])]), value.shape)


def _normalize(graph: RandomGraph) -> None:
    value = graph.pick(graph.choose((2, 3, 3)))
    if value is None:
        return
    channels = value.shape[0]
    scale, bias = graph.weight(channels, scale=0.5), graph.weight(channels, scale=0.5)
    kind = graph.choose(("batch", "batch", "instance", "layer", "group", "written"))
    if kind == "batch":
        spread = graph.constant(np.abs(graph.rng.standard_normal(channels)) + 0.5, np.float32)
        inputs = [value.name, scale, bias, graph.weight(channels, scale=0.5), spread]
        made = graph.node("BatchNormalization", inputs)
    elif kind == "instance" and math.prod(value.shape[1:]) > 3:
        made = graph.node("InstanceNormalization", [value.name, scale, bias], epsilon=1e-2)
    elif kind == "layer" and graph.opset >= 17 and value.shape[-1] > 2:
        gains = [graph.weight(value.shape[-1], scale=0.5), graph.weight(value.shape[-1], scale=0.5)]
        given = gains[: int(graph.rng.integers(1, 3))]
        made = graph.node("LayerNormalization", [value.name, *given], axis=-1, epsilon=1e-2)
    elif kind == "group" and graph.opset >= 21 and channels % 2 == 0 and math.prod(value.shape[1:]) > 3:
        made = graph.node("GroupNormalization", [value.name, scale, bias], num_groups=2, epsilon=1e-2)
    elif graph.opset >= 18:
        axis = graph.integers(-1)
        apart = graph.node("Sub", [value.name, graph.node("ReduceMean", [value.name, axis])])
        square = graph.node("Pow", [apart, graph.constant(2, np.float32)])
        spread = graph.node("Add", [graph.node("ReduceMean", [square, axis]), graph.constant(1e-2, np.float32)])
        made = graph.node("Div", [apart, graph.node("Sqrt", [spread])])
    else:
        return
    graph.add(made, value.shape)


def _pool(graph: RandomGraph) -> None:
    value = graph.pick(3)
    if value is None or min(value.shape[1:]) < 2:
        return
    channels, height, width = value.shape
    operator, stride = graph.choose(("MaxPool", "AveragePool")), graph.choose((1, 2))
    attributes: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [stride] * 2}
    outputs = 2 if operator == "MaxPool" and graph.chance(0.15) else 1
    sizes = [(size - 2) // stride + 1 for size in (height, width)]
    if operator == "AveragePool" and graph.chance(0.4):
        attributes |= {"pads": [1] * 4, "count_include_pad": graph.choose((0, 1))}
        sizes = [size // stride + 1 for size in (height, width)]
    graph.add(graph.node(operator, [value.name], outputs, **attributes), (channels, *sizes))


def _resize(graph: RandomGraph) -> None:
    value = graph.pick(3)
    if value is None or max(value.shape[1:]) > 12:
        return
    mode = graph.choose(("nearest", "linear"))
    where = "asymmetric" if mode == "nearest" else graph.choose(("half_pixel", "align_corners", "asymmetric"))
    attributes = {"mode": mode, "coordinate_transformation_mode": where}
    attributes |= {"nearest_mode": "floor"} if mode == "nearest" else {}
    scales = graph.constant([1, 1, 2, 2], np.float32)
    made = graph.node("Resize", [value.name, "", scales], **attributes)
    graph.add(made, (value.shape[0], 2 * value.shape[1], 2 * value.shape[2]))


def _concat(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None:
        return
    axis = int(graph.rng.integers(len(value.shape)))
    rest = value.shape[:axis] + value.shape[axis + 1 :]
    fitting = [one for one in graph.values if one.kind == _FLOAT and len(one.shape) == len(value.shape)]
    fitting = [one for one in fitting if one.shape[:axis] + one.shape[axis + 1 :] == rest]
    others = [graph.choose(fitting) for _ in range(int(graph.rng.integers(1, 3)))]
    total = value.shape[axis] + sum(one.shape[axis] for one in others)
    if total <= 48:
        names = [value.name, *(one.name for one in others)]
        place = axis + 1 if graph.chance(0.7) else axis - len(value.shape)
        made = graph.node("Concat", names, axis=place)
        graph.add(made, (*value.shape[:axis], total, *value.shape[axis + 1 :]))


def _split(graph: RandomGraph) -> None:
    value = graph.pick()
    axes = [axis for axis, size in enumerate(value.shape) if size >= 2] if value is not None else []
    if value is None or not axes:
        return
    axis = graph.choose(axes)
    first = int(graph.rng.integers(1, value.shape[axis]))
    parts = [first, value.shape[axis] - first]
    graph.node("Split", [value.name, graph.integers(*parts)], 2, axis=axis + 1)
    names = graph.last_outputs()
    for name, size in list(zip(names, parts, strict=True))[: 1 if graph.chance(0.3) else 2]:
        graph.add(name, (*value.shape[:axis], size, *value.shape[axis + 1 :]))


def _slice(graph: RandomGraph) -> None:
    value = graph.pick()
    axes = [axis for axis, size in enumerate(value.shape) if size >= 2] if value is not None else []
    if value is None or not axes:
        return
    axis = graph.choose(axes)
    size = value.shape[axis]
    start, end, step = graph.choose(((1, 1 << 40, 1), (0, -1, 1), (0, size, 2), (-1, -(1 << 40), -1)))
    count = len(range(size)[start : None if abs(end) > size else end : step])
    made = graph.node("Slice", [value.name, *(graph.integers(n) for n in (start, end, axis + 1, step))])
    graph.add(made, (*value.shape[:axis], count, *value.shape[axis + 1 :]))


def _gather(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None:
        return
    axis = int(graph.rng.integers(len(value.shape)))
    places = [int(place) for place in graph.rng.integers(-value.shape[axis], value.shape[axis], 2)]
    if graph.chance(0.5) or len(value.shape) == 1:
        made = graph.node("Gather", [value.name, graph.integers(*places)], axis=axis + 1)
        graph.add(made, (*value.shape[:axis], 2, *value.shape[axis + 1 :]))
    else:
        made = graph.node("Gather", [value.name, graph.constant(places[0], np.int64)], axis=axis + 1)
        graph.add(made, value.shape[:axis] + value.shape[axis + 1 :])


def _embed(graph: RandomGraph) -> None:
    value = graph.pick(1, _INT64)
    if value is not None and value.name == "tokens":  # others may be larger than a table
        width = int(graph.rng.integers(2, 9))
        table = graph.weight(_VOCABULARY + 2, width, scale=0.7)
        graph.add(graph.node("Gather", [table, value.name]), (*value.shape, width))


def _pad(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None or min(value.shape) < 3 or max(value.shape) > 16:
        return
    axis, mode = int(graph.rng.integers(len(value.shape))), graph.choose(("constant", "reflect", "edge"))
    rank = len(value.shape) + 1
    pads = [0] * (2 * rank)
    pads[axis + 1], pads[rank + axis + 1] = 1, graph.choose((0, 2))
    filled = [graph.constant(0.5, np.float32)] if mode == "constant" and graph.chance(0.5) else []
    made = graph.node("Pad", [value.name, graph.integers(*pads), *filled], mode=mode)
    grown = value.shape[axis] + pads[axis + 1] + pads[rank + axis + 1]
    graph.add(made, (*value.shape[:axis], grown, *value.shape[axis + 1 :]))


def _reshape(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None:
        return
    total = math.prod(value.shape)
    kind = graph.choose(("flat", "flatten", "split", "computed", "squeeze"))
    if kind == "flat":
        graph.add(graph.node("Reshape", [value.name, graph.integers(0, -1)]), (total,))
    elif kind == "flatten":
        graph.add(graph.node("Flatten", [value.name], axis=1), (total,))
    elif kind == "squeeze":
        axis = graph.integers(int(graph.rng.integers(1, len(value.shape) + 2)))
        wide = graph.node("Unsqueeze", [value.name, axis])
        made = graph.node("Relu", [wide]) if graph.chance(0.5) else wide
        graph.add(graph.node("Squeeze", [made, axis]), value.shape)
    elif kind == "split" and total % 2 == 0:
        target = graph.choose(((0, 2, total // 2), (-1, 2, total // 2)))
        graph.add(graph.node("Reshape", [value.name, graph.integers(*target)]), (2, total // 2))
    elif kind == "computed":
        shape = graph.node("Shape", [value.name])
        batch = graph.node("Gather", [shape, graph.integers(0)])
        target = graph.node("Concat", [batch, graph.integers(total)], axis=0)
        graph.add(graph.node("Reshape", [value.name, target]), (total,))


def _transpose(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is not None:
        order = [int(axis) for axis in graph.rng.permutation(len(value.shape))]
        made = graph.node("Transpose", [value.name], perm=[0, *(axis + 1 for axis in order)])
        graph.add(made, [value.shape[axis] for axis in order])


def _expand(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None or 1 not in value.shape:
        return
    axis = value.shape.index(1)
    target = [1, *value.shape]
    target[axis + 1] = 3
    made = graph.node("Expand", [value.name, graph.integers(*target)])
    graph.add(made, target[1:])


# Reductions, choices, other dtypes.


def _reduce(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None or len(value.shape) < 2:
        return
    operators = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare")
    axis, keep = int(graph.rng.integers(len(value.shape))), graph.chance(0.5)
    operator = graph.choose(operators)
    place = axis + 1 if graph.chance(0.7) else axis - len(value.shape)
    if operator == "ReduceSum" or graph.opset >= 18:
        made = graph.node(operator, [value.name, graph.integers(place)], keepdims=int(keep))
    else:
        made = graph.node(operator, [value.name], axes=[place], keepdims=int(keep))
    made = graph.node("Mul", [made, graph.constant(0.25, np.float32)])
    graph.add(made, (*value.shape[:axis], *([1] if keep else []), *value.shape[axis + 1 :]))


def _reduce_all(graph: RandomGraph) -> None:
    """Add the mean of everything, which has no batch and is an output."""
    value = graph.pick()
    if value is not None and graph.chance(0.3):
        made = graph.node("ReduceMean", [value.name], keepdims=0)
        graph.extras.append(helper.make_tensor_value_info(made, _FLOAT, []))


def _softmax(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is not None:
        axis = graph.choose((-1, len(value.shape), 1))
        graph.add(graph.node(graph.choose(("Softmax", "Softmax", "LogSoftmax")), [value.name], axis=axis), value.shape)


def _topk(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None:
        return
    size = min(2, value.shape[-1])
    made = graph.node("TopK", [value.name, graph.integers(size)], 2, axis=-1)
    places = graph.last_outputs()[1]
    graph.add(made, (*value.shape[:-1], size))
    if graph.chance(0.3):
        graph.add(places, (*value.shape[:-1], size), _INT64)


def _argmax(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is not None:
        made = graph.node(graph.choose(("ArgMax", "ArgMin")), [value.name], axis=-1, keepdims=1)
        graph.add(graph.node("Cast", [made], to=_FLOAT), (*value.shape[:-1], 1))


def _where(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is None:
        return
    mask = graph.node(graph.choose(("Greater", "Less", "GreaterOrEqual")), [value.name, graph.constant(0, np.float32)])
    if graph.chance(0.3):
        mask = graph.node("Not", [mask])
    other = graph.constant(graph.choose((0.0, -1.0, 0.5)), np.float32)
    graph.add(graph.node("Where", [mask, value.name, other]), value.shape)


def _masked(graph: RandomGraph) -> None:
    """Add a mask of bool that is fed, as a number."""
    mask, value = graph.pick(1, _BOOL), graph.pick(1)
    if mask is not None and value is not None:
        number = graph.node("Cast", [graph.node("Slice", [mask.name, *map(graph.integers, (0, 1, 1))])], to=_FLOAT)
        graph.add(graph.node("Mul", [value.name, number]), value.shape)


def _half_island(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is not None:
        narrow = graph.node("Cast", [value.name], to=_HALF)
        made = graph.node("Mul", [narrow, graph.constant(0.5, np.float16)])
        graph.add(graph.node("Cast", [made], to=_FLOAT), value.shape)


def _integer_island(graph: RandomGraph) -> None:
    value = graph.pick()
    if value is not None:
        whole = graph.node("Cast", [graph.node("Mul", [value.name, graph.constant(8, np.float32)])], to=_INT64)
        made = graph.node("Mul", [whole, graph.constant(2, np.int64)])
        number = graph.node("Cast", [made], to=_FLOAT)
        graph.add(graph.node("Mul", [number, graph.constant(1 / 16, np.float32)]), value.shape)


def _quantized_island(graph: RandomGraph) -> None:
    """Add a product that is quantized already, or a Q/DQ pair alone."""
    value = graph.pick(graph.choose((1, 2, 3)))
    if value is None:
        return
    dtype = graph.choose((np.int8, np.uint8))
    pair = [graph.constant(0.05, np.float32), graph.constant(0 if dtype is np.int8 else 128, dtype)]
    levels = graph.node("QuantizeLinear", [value.name, *pair])
    rounded = graph.node("DequantizeLinear", [levels, *pair])
    if graph.chance(0.4):
        graph.add(rounded, value.shape)
        return
    width = value.shape[-1]
    weight = graph.constant(graph.rng.integers(-100, 100, (width, 4)), np.int8)
    scale = graph.constant(np.full(4, 0.01 / math.sqrt(width)), np.float32)
    zero = graph.constant(np.zeros(4), np.int8)
    matrix = graph.node("DequantizeLinear", [weight, scale, zero], axis=1)
    graph.add(graph.node("MatMul", [rounded, matrix]), (*value.shape[:-1], 4))


# Subgraphs.


def _branch(graph: RandomGraph, value: Value, operator: str, weight: str, name: str) -> onnx.GraphProto:
    made = helper.make_node(operator, [value.name, weight], [graph.name("branch")])
    output = helper.make_tensor_value_info(made.output[0], _FLOAT, None)
    own = graph.constant(0.5, np.float32) if graph.chance(0.5) else None
    if own is None:
        return helper.make_graph([made], name, [], [output])
    last = helper.make_node("Mul", [made.output[0], own], [graph.name("branch")])
    return helper.make_graph([made, last], name, [], [helper.make_tensor_value_info(last.output[0], _FLOAT, None)])


def _if(graph: RandomGraph) -> None:
    value = graph.pick(graph.choose((1, 2)))
    if value is None:
        return
    width = value.shape[-1]
    mean = graph.node("ReduceMean", [value.name], keepdims=0)
    condition = graph.node("Greater", [mean, graph.constant(0, np.float32)])
    product, shift = graph.weight(width, width, scale=1 / math.sqrt(width)), graph.weight(width, scale=0.5)
    branches = {
        "then_branch": _branch(graph, value, "MatMul", product, "then"),
        "else_branch": _branch(graph, value, "Add", shift, "else"),
    }
    graph.add(graph.node("If", [condition], **branches), value.shape)


def _loop(graph: RandomGraph) -> None:
    value = graph.pick(graph.choose((1, 2)))
    if value is None:
        return
    width = value.shape[-1]
    weight = graph.weight(width, width, scale=0.7 / math.sqrt(width))
    index, going, state, product, result, on = (graph.name(word) for word in ("i", "go", "s", "p", "r", "on"))
    body = helper.make_graph(
        [
            helper.make_node("Identity", [going], [on]),
            helper.make_node("MatMul", [state, weight], [product]),
            helper.make_node("Add", [product, value.name], [result]),
        ],
        "body",
        [
            helper.make_tensor_value_info(index, _INT64, []),
            helper.make_tensor_value_info(going, _BOOL, []),
            helper.make_tensor_value_info(state, _FLOAT, None),
        ],
        [helper.make_tensor_value_info(on, _BOOL, []), helper.make_tensor_value_info(result, _FLOAT, None)],
    )
    graph.add(graph.node("Loop", [graph.constant(2, np.int64), "", value.name], body=body), value.shape)


def _scan(graph: RandomGraph) -> None:
    value = graph.pick(2)
    if value is None:
        return
    steps, width = value.shape
    first = graph.node("ReduceMean", [value.name], keepdims=0)
    weight = graph.weight(width, width, scale=0.7 / math.sqrt(width))
    state, row, total, result = (graph.name(word) for word in ("state", "row", "total", "result"))
    body = helper.make_graph(
        [
            helper.make_node("MatMul", [row, weight], [result]),
            helper.make_node("Add", [state, first], [total]),
        ],
        "scan",
        [helper.make_tensor_value_info(name, _FLOAT, None) for name in (state, row)],
        [
            helper.make_tensor_value_info(total, _FLOAT, []),
            helper.make_tensor_value_info(result, _FLOAT, [graph.batch, width]),
        ],
    )
    attributes = {"num_scan_inputs": 1, "scan_input_axes": [1], "scan_output_axes": [1]}
    graph.node("Scan", [graph.constant(0, np.float32), value.name], 2, body=body, **attributes)
    graph.add(graph.last_outputs()[1], (steps, width))


_FUNCTIONS = "random.functions"


def _function(graph: RandomGraph) -> None:
    """Add a call of a function of the model."""
    value = graph.pick()
    if value is not None:
        graph.add(graph.node("Doubled", [value.name], domain=_FUNCTIONS), value.shape)


def _make_doubled(opset: int) -> onnx.FunctionProto:
    nodes = [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Add", ["t", "t"], ["y"])]
    return helper.make_function(_FUNCTIONS, "Doubled", ["x"], ["y"], nodes, [helper.make_opsetid("", opset)])


_GROWTHS: Sequence[Grow] = (
    *(_conv, _conv, _conv, _conv_transpose, _gemm, _gemm, _gemm, _matmul, _matmul, _matmul),
    *(_conv, _conv, _conv, _conv_transpose, _conv_1d, _gemm, _gemm, _matmul, _matmul, _attention, _einsum, _recurrent),
    *(_unary, _unary, _unary, _written_out, _written_out, _binary, _binary, _channel_broadcast, _normalize, _normalize),
    *(_pool, _resize, _concat, _concat, _split, _slice, _gather, _embed, _embed, _pad, _reshape, _transpose, _expand),
    *(_reduce, _reduce_all, _softmax, _topk, _argmax, _where, _masked, _half_island, _integer_island),
    *(_quantized_island, _if, _loop, _scan, _function),
)


# Whole graphs.


def make_graph(seed: int) -> onnx.ModelProto:
    """Make the graph of a seed."""
    rng = np.random.default_rng(seed)
    static = rng.random() < _STATIC_SHARE
    graph = RandomGraph(seed, rng, _OPSETS[int(rng.integers(len(_OPSETS)))], _FIXED_BATCH if static else BATCH)
    _add_inputs(graph)
    wanted = int(rng.integers(3, 24))
    for _ in range(6 * wanted):
        if len(graph.nodes) >= wanted:
            break
        graph.choose(_GROWTHS)(graph)
    outputs = _choose_outputs(graph)
    inputs = [*graph.inputs]
    floats = [name for name, array in graph.weights.items() if array.dtype == np.float32 and array.ndim > 0]
    if floats and graph.chance(0.1):  # a weight that may be fed
        name = graph.choose(floats)
        inputs.append(helper.make_tensor_value_info(name, _FLOAT, graph.weights[name].shape))
    initializers = [numpy_helper.from_array(array, name) for name, array in graph.weights.items()]
    body = helper.make_graph(graph.nodes, f"random_{seed}", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", graph.opset)]
    functions = []
    if any(node.domain == _FUNCTIONS for node in graph.nodes):
        imports.append(helper.make_opsetid(_FUNCTIONS, 1))
        functions.append(_make_doubled(graph.opset))
    return helper.make_model(body, opset_imports=imports, functions=functions, ir_version=10)


def _add_inputs(graph: RandomGraph) -> None:
    shapes: list[tuple[str, Shape, int]] = []
    main = graph.choose(("picture", "picture", "sequence", "vector"))
    size = int(graph.rng.integers(4, 10))
    channels = graph.choose((1, 3, 4, 8, 16))
    sizes = {"picture": (channels, size, size), "sequence": (size, 2 * channels), "vector": (4 * channels,)}
    shapes.append((main, sizes[main], _FLOAT))
    if graph.chance(0.3):
        kind = graph.choose(tuple(sizes))
        shapes.append(("other", sizes[kind], _FLOAT))
    if graph.chance(0.2):
        shapes.append(("tokens", (size,), _INT64))
    if graph.chance(0.15):
        shapes.append(("mask", (size,), _BOOL))
    for name, shape, kind in shapes:
        graph.inputs.append(graph.describe(graph.add(name, shape, kind)))


def _choose_outputs(graph: RandomGraph) -> list[onnx.ValueInfoProto]:
    """Make outputs of what nothing reads, mostly, and of some other values; rarely of an input or a weight."""
    read = {name for node in graph.nodes for name in node.input}
    fed = {value.name for value in graph.inputs}
    made = [value for value in graph.values if value.name not in fed]
    ends = [value for value in made if value.name not in read and not graph.chance(0.1)]
    inner = [value for value in made if value.name in read and graph.chance(0.08)]
    chosen = {value.name: graph.describe(value) for value in (*ends, *inner)}
    if graph.chance(0.04):
        value = graph.values[0]
        chosen[value.name] = graph.describe(value)
    outputs = [*chosen.values(), *graph.extras]
    weights = [name for name, array in graph.weights.items() if array.dtype == np.float32]
    if weights and graph.chance(0.04):
        name = graph.choose(weights)
        outputs.append(helper.make_tensor_value_info(name, _FLOAT, graph.weights[name].shape))
    if not outputs:
        outputs.append(graph.describe(graph.values[-1]))
    return outputs


def make_feeds(model: onnx.ModelProto, batch: int, seed: int = 0) -> dict[str, Array]:
    """Draw feeds of a batch size for a random graph; one with a fixed batch has that one."""
    rng = np.random.default_rng((seed, batch))
    weights = {tensor.name for tensor in model.graph.initializer}
    feeds: dict[str, Array] = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        kind = value.type.tensor_type
        shape = [batch if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type == _FLOAT:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
        elif kind.elem_type == _BOOL:
            feeds[value.name] = rng.random(shape) < 0.5
        else:
            feeds[value.name] = rng.integers(0, _VOCABULARY, shape)
    return feeds
