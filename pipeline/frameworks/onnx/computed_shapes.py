"""Replace what a graph computes of shapes that are known by constants, so that shapes behind it can be inferred.

onnx's inference follows such computations in part: not through a Slice along an axis that is named, for example.
"""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx

_OPERATORS = (
    *("Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "Identity", "Max", "Min", "Mul"),
    *("Range", "ReduceProd", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"),
)
"""What graphs compute of shapes with, for other shapes."""
_INTEGERS = (6, 7, 9)  # TensorProto.INT32, INT64, BOOL
_MOST = 64
"""Elements up to which a constant may be a shape, or a part of one."""


def fold(model: "onnx.ModelProto", shapes: Mapping[str, tuple[int, ...] | None]) -> bool:
    """Replace, in the main graph, nodes that compute of ``shapes`` alone; tell whether there was any."""
    import onnx.helper
    import onnx.numpy_helper

    graph = model.graph
    inputs = {value.name for value in graph.input}
    held = [tensor for tensor in graph.initializer if tensor.name not in inputs]
    known = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in held if _may_be_shape(tensor)}
    changed = False
    for node in graph.node:
        if node.op_type == "Constant":
            for item in node.attribute:
                if item.name == "value" and _may_be_shape(item.t):
                    known[node.output[0]] = onnx.numpy_helper.to_array(item.t)
        elif (made := _compute(node, known, shapes, model)) is not None:
            known[node.output[0]] = made
            value = onnx.numpy_helper.from_array(made)
            node.CopyFrom(onnx.helper.make_node("Constant", [], [node.output[0]], value=value))
            changed = True
    return changed


def _may_be_shape(tensor: "onnx.TensorProto") -> bool:
    return prod(tensor.dims) <= _MOST and tensor.data_type in _INTEGERS


def _compute(
    node: "onnx.NodeProto", known: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None], model: Any
) -> Any:
    """Compute a node's result; None where it is not known, or no part of a shape."""
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "Shape" and (shape := shapes.get(node.input[0])) is not None:
        ends = {item.name: item.i for item in node.attribute}
        return np.array(shape[ends.get("start", 0) : ends.get("end", len(shape))], np.int64)
    given = {name: known[name] for name in node.input if name in known}
    if node.op_type not in _OPERATORS or len(node.output) != 1 or any(n and n not in given for n in node.input):
        return None
    try:
        results: Any = ReferenceEvaluator(_alone(node, given, model)).run(None, given)
    except Exception:  # noqa: BLE001 - whatever is wrong with this node, its shape stays unknown
        return None
    (made,) = results
    return made if made.size <= _MOST else None


def _alone(node: "onnx.NodeProto", given: Mapping[str, Any], model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Make a model of one node."""
    import onnx.helper

    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
    ]
    result = onnx.helper.make_empty_tensor_value_info(node.output[0])
    graph = onnx.helper.make_graph([node], "shapes", ends, [result])
    return onnx.helper.make_model(graph, opset_imports=model.opset_import)
