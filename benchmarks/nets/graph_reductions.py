"""Operators that random graphs grow by that summarize along axes: normalizations, pools, means, softmax, choices."""

import math
from typing import Any

import numpy as np
from graph_builder import FLOAT, INT64, RandomGraph
from onnx import helper


def add_normalize(graph: RandomGraph) -> None:
    """Add a normalization that the opset has, or one that is written out."""
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


def add_pool(graph: RandomGraph) -> None:
    """Add a pooling of a picture."""
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


def add_reduce(graph: RandomGraph) -> None:
    """Add a reduction along an axis."""
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


def add_reduce_all(graph: RandomGraph) -> None:
    """Add the mean of everything, which has no batch and is an output."""
    value = graph.pick()
    if value is not None and graph.chance(0.3):
        made = graph.node("ReduceMean", [value.name], keepdims=0)
        graph.extras.append(helper.make_tensor_value_info(made, FLOAT, []))


def add_softmax(graph: RandomGraph) -> None:
    """Add a softmax or its logarithm."""
    value = graph.pick()
    if value is not None:
        axis = graph.choose((-1, len(value.shape), 1))
        graph.add(graph.node(graph.choose(("Softmax", "Softmax", "LogSoftmax")), [value.name], axis=axis), value.shape)


def add_topk(graph: RandomGraph) -> None:
    """Add the greatest numbers along the last axis, and perhaps their places."""
    value = graph.pick()
    if value is None:
        return
    size = min(2, value.shape[-1])
    made = graph.node("TopK", [value.name, graph.integers(size)], 2, axis=-1)
    places = graph.last_outputs()[1]
    graph.add(made, (*value.shape[:-1], size))
    if graph.chance(0.3):
        graph.add(places, (*value.shape[:-1], size), INT64)


def add_argmax(graph: RandomGraph) -> None:
    """Add the places of the greatest or least numbers, as floats."""
    value = graph.pick()
    if value is not None:
        made = graph.node(graph.choose(("ArgMax", "ArgMin")), [value.name], axis=-1, keepdims=1)
        graph.add(graph.node("Cast", [made], to=FLOAT), (*value.shape[:-1], 1))
