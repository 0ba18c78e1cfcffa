"""Maxima, minima and signs of int64: ONNX Runtime compares them in halves, and takes the lower one for a signed number.

So 2^31 is less than 0 to Max, Min, Clip, Sign, ReduceMax and ReduceMin (microsoft/onnxruntime#25280). Less, Greater and
TopK are right, and say the same. This is for exports, which are compared with PyTorch: a file that was given is
compared with what ONNX Runtime makes of it.
"""

from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir, model_file

if TYPE_CHECKING:
    from onnx_ir.tape import Tape

_MOVING = ("Slice", "Gather", "GatherElements", "GatherND", "Reshape", "Expand", "Tile", "Squeeze", "Unsqueeze")
"""Operators whose numbers are of their first input."""
_LONG = np.iinfo(np.int32)


def compare_whole_numbers(model: "ir.Model") -> int:
    """Write what compares int64 in operators that are exact, in place; return how many nodes there were.

    What is computed from sizes, places, masks and small constants alone fits in 32 bits, and stays as engines fold it.
    Types have to be known.
    """
    small, count = set[ir.Value](), 0
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        read = node.inputs[:1] if node.op_type in _MOVING else node.inputs
        is_small = not edit.has_body(node) and all(_is_small(value, small) for value in read)
        if is_small or node.op_type in model_file.COUNTING:
            small.update(node.outputs)
        elif node.outputs[0].dtype == ir.DataType.INT64 and not node.domain:
            count += _replace(node)
    return count


def _is_small(value: "ir.Value | None", small: "set[ir.Value]") -> bool:
    if value is None or value in small or value.dtype == ir.DataType.BOOL:
        return True
    numbers = edit.read(value) if value.dtype == ir.DataType.INT64 else None
    return numbers is not None and bool(np.all((numbers >= _LONG.min) & (numbers <= _LONG.max)))


def _replace(node: "ir.Node") -> bool:
    """Replace a node that compares int64; False for all others, and for a reduction whose axes are not known."""
    from onnx_ir.tape import Tape

    tape, inputs = Tape(), list(node.inputs)
    result = inputs[0]
    match node.op_type:
        case "Max" | "Min":
            for other in inputs[1:]:
                result = _choose(tape, "Less" if node.op_type == "Max" else "Greater", result, other)
        case "Clip":
            for name, bound in zip(("Less", "Greater"), inputs[1:], strict=False):
                result = _choose(tape, name, result, bound) if bound is not None else result
        case "Sign":
            zero = tape.op("Constant", [], {"value_int": 0})
            above, below = (tape.op("Cast", [tape.op(name, [result, zero])], {"to": 7}) for name in ("Greater", "Less"))
            result = tape.op("Sub", [above, below])
        case "ReduceMax" | "ReduceMin":
            result = _reduce(tape, node)
    if result is inputs[0] or result is None:
        return False
    edit.substitute(node, tape.nodes, [result])
    return True


def _choose(tape: "Tape", name: str, value: "ir.Value | None", other: "ir.Value | None") -> "ir.Value":
    """Take the other value where this comparison with it holds."""
    return tape.op("Where", [tape.op(name, [value, other]), other, value])


def _reduce(tape: "Tape", node: "ir.Node") -> "ir.Value | None":
    """Take the first of the sorted numbers along each axis."""
    value = node.inputs[0]
    axes = edit.find_axes(node)
    if value is None or value.shape is None or axes is None:
        return None
    if not len(axes):
        axes = () if node.attributes.get_int("noop_with_empty_axes", 0) else range(len(value.shape))
    one, largest = tape.op("Constant", [], {"value_ints": [1]}), int(node.op_type == "ReduceMax")
    for axis in map(int, axes):
        value, _ = tape.op_multi_out("TopK", [value, one], {"axis": axis, "largest": largest}, num_outputs=2)
    if len(axes) and not node.attributes.get_int("keepdims", 1):
        value = tape.op("Squeeze", [value, tape.op("Constant", [], {"value_ints": [*map(int, axes)]})])
    return value
