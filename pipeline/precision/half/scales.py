"""Scales of Q/DQ pairs made fit for a narrow float type, before they change to it.

A pair quantises and dequantises with the same number, also where only one of the two changes its type. No scale is
smaller than the smallest number with all its bits (6.1e-5 in float16): TensorRT refuses 0. Integers behind a scale that
had to be raised are divided by as much.
"""

from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.precision.half.types import DEQUANTISE, QUANTISE, dequantisers
from enginesmith.pipeline.precision.half.weights import narrowed, smallest
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_SCALE, _ZERO_POINT = 1, 2


def fit(graph: "ir.Graph", low: "dict[ir.Node, None]", dtype: "ir.DataType") -> None:
    """Round the scales of all pairs with a node in ``low`` to numbers of ``dtype``; they stay float32 here."""
    scales: dict[ir.Value, None] = {}
    for node in graph:
        pair = [node, *dequantisers(node)] if node.op_type == QUANTISE else [node]
        if node.op_type in (QUANTISE, DEQUANTISE) and any(one in low for one in pair):
            scales |= {value: None for one in pair if (value := _constant(one, _SCALE)) is not None}
    for scale in scales:
        assert scale.const_value is not None
        before = scale.const_value.numpy()
        after = np.maximum(narrowed(before, dtype).astype(np.float32), np.float32(smallest(dtype)))
        if not np.array_equal(before, after):
            _set(scale, after)
            _requantise(graph, scale, before, after)


def _requantise(graph: "ir.Graph", scale: "ir.Value", before: Array, after: Array) -> None:
    """Bring integers that lie in the file to a scale that was raised; mere rounding of the scale is let be."""
    raised = after > before * (1 + 2.0**-8)
    if not raised.any():
        return
    for node, index in scale.uses():
        levels = _constant(node, 0)
        if node.op_type != DEQUANTISE or index != _SCALE or levels is None:
            continue
        assert levels.const_value is not None
        array = levels.const_value.numpy()
        factor = _spread(np.where(raised, before / after, 1).astype(np.float32), node, array)
        zero = _constant(node, _ZERO_POINT)
        offset = 0.0 if zero is None or zero.const_value is None else _spread(zero.const_value.numpy(), node, array)
        moved = (array.astype(np.float32) - offset) * factor
        whole = np.issubdtype(array.dtype, np.integer) or "int" in array.dtype.name
        new = ((np.rint(moved) if whole else moved) + offset).astype(array.dtype)
        _set(levels if len(levels.uses()) == 1 else _copy(graph, node, levels), new)


def _spread(array: Array, node: "ir.Node", levels: Array) -> Array:
    """One number for each element: of the whole tensor, of its slice along the axis, or of its block there."""
    array = array.astype(np.float32)
    if array.ndim == 0 or array.size == 1:
        return array.reshape(())
    axis = node.attributes.get_int("axis", 1)
    block = node.attributes.get_int("block_size", 0)
    if block:
        return np.repeat(array, block, axis).take(range(levels.shape[axis]), axis)
    return np.expand_dims(array, [one for one in range(levels.ndim) if one != axis % levels.ndim])


def _constant(node: "ir.Node", index: int) -> "ir.Value | None":
    value = node.inputs[index] if len(node.inputs) > index else None
    return value if value is not None and value.is_initializer() and value.const_value is not None else None


def _set(value: "ir.Value", array: Array) -> None:
    import onnx_ir as ir

    value.const_value = ir.tensor(np.asarray(array), dtype=value.dtype, name=value.name)


def _copy(graph: "ir.Graph", node: "ir.Node", value: "ir.Value") -> "ir.Value":
    """Integers of its own for a node, where others read the same ones with another scale."""
    import onnx_ir as ir

    own = ir.Value(name=f"{value.name}_{node.name}", shape=value.shape, type=value.type, const_value=value.const_value)
    graph.register_initializer(own)
    node.replace_input_with(0, own)
    return own
