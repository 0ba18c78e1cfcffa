"""Shape arithmetic that the dynamic dimensions do not need.

Exporters compute target shapes with Shape, Slice, Mul and Concat nodes even where every number is known, or is simply
that of the input. Here such values are followed symbolically: an element is a number, or the name of a dimension.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

Dim = int | str | None
_MOST_ELEMENTS = 64
_RECURRENT = ("LSTM", "GRU", "RNN")
_KEEPS_ZEROS = ("Expand", "Slice", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Identity", "Cast")


def simplify_shapes(model: "ir.Model") -> None:
    """Replace computed shapes by constants, in place; what is unused afterwards is left to the next pass."""
    import onnx_ir as ir

    known: dict[ir.Value, list[Dim]] = {}
    for node in model.graph:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in _EVALUATE and (dims := _EVALUATE[node.op_type](node, known)) is not None:
            known[node.outputs[0]] = dims
        elif node.op_type == "Reshape":
            _settle_reshape(node, known)
        elif node.op_type in _RECURRENT:
            _drop_zero_states(node)


def _settle_reshape(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> None:
    """Write the target as a constant: 0 copies the input's dimension, -1 stands for one that follows from the rest."""
    data, target = node.inputs[:2]
    if data is None or target is None or target.const_value is not None or target not in known:
        return
    if data.shape is None or node.attributes.get_int("allowzero", 0) != 0:
        return
    given = [_name(dim) for dim in data.shape]
    numbers: list[int] = []
    for axis, dim in enumerate(known[target]):
        if isinstance(dim, int) and dim != 0:
            numbers.append(dim)
        elif axis < len(given) and dim is not None and given[axis] == dim:
            numbers.append(0)
        else:
            numbers.append(-1)
    if numbers.count(-1) <= 1:
        node.replace_input_with(1, _constant(node, numbers))


def _drop_zero_states(node: "ir.Node") -> None:
    """Initial states of zeros are what a recurrent operator takes by itself."""
    for position in (5, 6):
        if position < len(node.inputs) and _is_zero(node.inputs[position]):
            node.replace_input_with(position, None)


def _is_zero(value: "ir.Value | None") -> bool:
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.op_type not in _KEEPS_ZEROS:
            return False
        value = node.inputs[0]
    return value is not None and _small(value) is not None and not np.any(_small(value))


def _constant(node: "ir.Node", numbers: Sequence[int]) -> "ir.Value":
    import onnx_ir as ir

    name = f"{node.outputs[0].name}_shape"
    value = ir.Value(name=name, shape=ir.Shape([len(numbers)]), type=ir.TensorType(ir.DataType.INT64))
    value.const_value = ir.tensor(np.array(numbers, np.int64), name=name)
    assert node.graph is not None
    node.graph.register_initializer(value)
    return value


def _name(dim: object) -> Dim:
    """A dimension's number or name; None if it has neither."""
    if isinstance(dim, int):
        return dim
    value = getattr(dim, "value", None)
    return value if isinstance(value, str) else None


def _small(value: "ir.Value | None") -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None":
    if value is None or value.const_value is None or value.const_value.size > _MOST_ELEMENTS:
        return None
    return value.const_value.numpy()


def _elements(value: "ir.Value | None", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    if value in known:
        return known[value]
    array = _small(value)
    if array is None or array.ndim > 1 or array.dtype != np.int64:
        return None
    return [int(number) for number in array.reshape(-1)]


def _shape(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    del known
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    dims = [_name(dim) for dim in value.shape]
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims))
    return dims[start:end]


def _slice(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    parts = [_elements(value, known) for value in node.inputs]
    if len(parts) < 3 or any(part is None or len(part) != 1 for part in parts[1:]):
        return None
    data = parts[0]
    start, end, *rest = (part[0] for part in parts[1:] if part is not None)
    if data is None or not isinstance(start, int) or not isinstance(end, int) or rest not in ([], [0], [0, 1]):
        return None
    return data[start:end]


def _gather(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    data, places = (_elements(value, known) for value in node.inputs)
    if data is None or places is None or node.attributes.get_int("axis", 0) != 0:
        return None
    chosen = [place for place in places if isinstance(place, int) and -len(data) <= place < len(data)]
    return [data[place] for place in chosen] if len(chosen) == len(places) else None


def _concat(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    parts = [_elements(value, known) for value in node.inputs]
    return None if None in parts else [dim for part in parts if part is not None for dim in part]


def _same(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    dims = _elements(node.inputs[0], known)
    return dims if (dims is not None and len(dims) == 1) or node.op_type == "Identity" else None


def _multiply(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    left, right = (_elements(value, known) for value in node.inputs)
    if left is None or right is None or len(left) != len(right):
        return None
    return [a * b if isinstance(a, int) and isinstance(b, int) else None for a, b in zip(left, right, strict=True)]


_EVALUATE: "dict[str, Callable[[ir.Node, dict[ir.Value, list[Dim]]], list[Dim] | None]]" = {
    "Shape": _shape,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": _concat,
    "Squeeze": _same,
    "Unsqueeze": _same,
    "Reshape": _same,
    "Identity": _same,
    "Mul": _multiply,
}
