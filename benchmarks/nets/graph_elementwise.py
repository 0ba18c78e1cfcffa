"""Operators that random graphs grow by, number by number: activations, sums, masks, and islands of other dtypes."""

import math
from collections.abc import Mapping

import numpy as np
from graph_builder import BOOL, FLOAT, HALF, INT64, RandomGraph

_UNARY: Mapping[str, int] = {
    **dict.fromkeys(("Relu", "Sigmoid", "Tanh", "Erf", "Neg", "Abs", "Softplus", "Softsign", "Identity", "Sin"), 13),
    **dict.fromkeys(("LeakyRelu", "Elu", "Selu", "HardSigmoid", "Celu", "ThresholdedRelu", "Floor"), 13),
    "HardSwish": 14,
    "Mish": 18,
    "Gelu": 20,
}


def add_unary(graph: RandomGraph) -> None:
    """Add an activation or another operator of one value that the opset has."""
    value = graph.pick()
    operator = graph.choose([name for name, least in _UNARY.items() if least <= graph.opset])
    if value is not None and not (operator == "Floor" and graph.chance(0.8)):
        graph.add(graph.node(operator, [value.name]), value.shape)


def add_written_out(graph: RandomGraph) -> None:
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


def add_binary(graph: RandomGraph) -> None:
    """Add an operator of a value and another one of its shape, or a weight that is broadcast."""
    value = graph.pick()
    if value is None:
        return
    operator = graph.choose(("Add", "Add", "Mul", "Sub", "Max", "Min", "Div"))
    same = [one.name for one in graph.values if one.shape == value.shape and one.kind == FLOAT]
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


def add_channel_broadcast(graph: RandomGraph) -> None:
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


def add_where(graph: RandomGraph) -> None:
    """Add a choice between a value and a constant, by the value's sign."""
    value = graph.pick()
    if value is None:
        return
    mask = graph.node(graph.choose(("Greater", "Less", "GreaterOrEqual")), [value.name, graph.constant(0, np.float32)])
    if graph.chance(0.3):
        mask = graph.node("Not", [mask])
    other = graph.constant(graph.choose((0.0, -1.0, 0.5)), np.float32)
    graph.add(graph.node("Where", [mask, value.name, other]), value.shape)


def add_masked(graph: RandomGraph) -> None:
    """Add a mask of bool that is fed, as a number."""
    mask, value = graph.pick(1, BOOL), graph.pick(1)
    if mask is not None and value is not None:
        number = graph.node("Cast", [graph.node("Slice", [mask.name, *map(graph.integers, (0, 1, 1))])], to=FLOAT)
        graph.add(graph.node("Mul", [value.name, number]), value.shape)


def add_half_island(graph: RandomGraph) -> None:
    """Add a product in float16 between casts."""
    value = graph.pick()
    if value is not None:
        narrow = graph.node("Cast", [value.name], to=HALF)
        made = graph.node("Mul", [narrow, graph.constant(0.5, np.float16)])
        graph.add(graph.node("Cast", [made], to=FLOAT), value.shape)


def add_integer_island(graph: RandomGraph) -> None:
    """Add a product in int64 between casts."""
    value = graph.pick()
    if value is not None:
        whole = graph.node("Cast", [graph.node("Mul", [value.name, graph.constant(8, np.float32)])], to=INT64)
        made = graph.node("Mul", [whole, graph.constant(2, np.int64)])
        number = graph.node("Cast", [made], to=FLOAT)
        graph.add(graph.node("Mul", [number, graph.constant(1 / 16, np.float32)]), value.shape)
