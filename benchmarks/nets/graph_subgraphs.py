"""Operators that random graphs grow by that hold graphs of their own: branches, loops, and a function of the model."""

import math

import numpy as np
import onnx
from graph_builder import BOOL, FLOAT, INT64, RandomGraph, Value
from onnx import helper


def add_if(graph: RandomGraph) -> None:
    """Add an If, both of whose branches read values of the graph around them."""
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


def _branch(graph: RandomGraph, value: Value, operator: str, weight: str, name: str) -> onnx.GraphProto:
    made = helper.make_node(operator, [value.name, weight], [graph.name("branch")])
    output = helper.make_tensor_value_info(made.output[0], FLOAT, None)
    own = graph.constant(0.5, np.float32) if graph.chance(0.5) else None
    if own is None:
        return helper.make_graph([made], name, [], [output])
    last = helper.make_node("Mul", [made.output[0], own], [graph.name("branch")])
    return helper.make_graph([made, last], name, [], [helper.make_tensor_value_info(last.output[0], FLOAT, None)])


def add_loop(graph: RandomGraph) -> None:
    """Add a Loop that multiplies its state by a weight twice."""
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
            helper.make_tensor_value_info(index, INT64, []),
            helper.make_tensor_value_info(going, BOOL, []),
            helper.make_tensor_value_info(state, FLOAT, None),
        ],
        [helper.make_tensor_value_info(on, BOOL, []), helper.make_tensor_value_info(result, FLOAT, None)],
    )
    graph.add(graph.node("Loop", [graph.constant(2, np.int64), "", value.name], body=body), value.shape)


def add_scan(graph: RandomGraph) -> None:
    """Add a Scan along a sequence that multiplies each row by a weight."""
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
        [helper.make_tensor_value_info(name, FLOAT, None) for name in (state, row)],
        [
            helper.make_tensor_value_info(total, FLOAT, []),
            helper.make_tensor_value_info(result, FLOAT, [graph.batch, width]),
        ],
    )
    attributes = {"num_scan_inputs": 1, "scan_input_axes": [1], "scan_output_axes": [1]}
    graph.node("Scan", [graph.constant(0, np.float32), value.name], 2, body=body, **attributes)
    graph.add(graph.last_outputs()[1], (steps, width))


FUNCTIONS = "random.functions"


def add_function(graph: RandomGraph) -> None:
    """Add a call of a function of the model."""
    value = graph.pick()
    if value is not None:
        graph.add(graph.node("Doubled", [value.name], domain=FUNCTIONS), value.shape)


def make_doubled(opset: int) -> onnx.FunctionProto:
    """Make the function that :func:`add_function` calls."""
    nodes = [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Add", ["t", "t"], ["y"])]
    return helper.make_function(FUNCTIONS, "Doubled", ["x"], ["y"], nodes, [helper.make_opsetid("", opset)])
