"""One ``Attention`` node as matrix products and a softmax: softmax(Q·Kᵀ·scale + mask)·V.

Shapes are those of the operator: B batch, H heads, L queries, S keys, E head size.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir
    from onnx_ir.tape import Tape

_SWAP_HEADS = [0, 2, 1, 3]  # B,L,H,E and B,H,L,E, either way
_EXTRAS = ("softcap", "softmax_precision", "qk_matmul_output_mode")


class _Sizes(NamedTuple):
    """The static sizes of one node."""

    query_heads: int
    key_heads: int
    head: int
    value_head: int
    rank: int


class AttentionWriter:
    """Writes nodes out one after another; constants and masks are shared between those of one graph."""

    def __init__(self) -> None:
        self._shared: dict[tuple[object, ...], ir.Value] = {}

    def write_out(self, node: "ir.Node") -> bool:
        """Put the textbook form in a node's place; false, and nothing done, if the node asks for more than that."""
        import onnx_ir as ir
        from onnx_ir.tape import Tape

        sizes = _sizes(node)
        if sizes is None or not _is_plain(node) or not isinstance(node.graph, ir.Graph):
            return False
        tape = Tape()
        result = self._result(tape, node, sizes)
        for new in tape.nodes:
            new.metadata_props.update(node.metadata_props)
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, [node.outputs[0]], [result])
        return True

    def _result(self, tape: "Tape", node: "ir.Node", sizes: _Sizes) -> "ir.Value":
        query, key, value = (_present(tensor) for tensor in node.inputs[:3])
        if sizes.rank == 3:
            query = self._split_heads(tape, node, query, sizes.query_heads)
            key, value = (self._split_heads(tape, node, tensor, sizes.key_heads) for tensor in (key, value))
        if sizes.key_heads != sizes.query_heads:
            key = self._repeat_heads(tape, node, key, sizes, sizes.head)
            value = self._repeat_heads(tape, node, value, sizes, sizes.value_head)
        scale = node.attributes.get_float("scale", 0.0) or 1.0 / math.sqrt(sizes.head)
        scaled = tape.op("Mul", [query, self._constant(node, "scale", np.array(scale, _numpy_dtype(query, node)))])
        scores = tape.op("MatMul", [scaled, tape.op("Transpose", [key], {"perm": [0, 1, 3, 2]})])
        mask = self._mask(tape, node, query, key)
        weights = tape.op("Softmax", [scores if mask is None else tape.op("Add", [scores, mask])], {"axis": -1})
        result = tape.op("MatMul", [weights, value])
        if sizes.rank == 4:
            return result
        merged = self._constant(node, "merged", np.array([0, 0, -1]))
        return tape.op("Reshape", [tape.op("Transpose", [result], {"perm": _SWAP_HEADS}), merged])

    def _split_heads(self, tape: "Tape", node: "ir.Node", tensor: "ir.Value", heads: int) -> "ir.Value":
        shape = self._constant(node, "split", np.array([0, 0, heads, -1]))
        return tape.op("Transpose", [tape.op("Reshape", [tensor, shape])], {"perm": _SWAP_HEADS})

    def _repeat_heads(self, tape: "Tape", node: "ir.Node", tensor: "ir.Value", sizes: _Sizes, width: int) -> "ir.Value":
        """Grouped-query attention: each key head serves several query heads."""
        repeats = sizes.query_heads // sizes.key_heads
        axis = self._constant(node, "axis", np.array([2]))
        wide = self._constant(node, "repeats", np.array([1, 1, repeats, 1, 1]))
        flat = self._constant(node, "flat", np.array([0, sizes.query_heads, -1, width]))
        return tape.op("Reshape", [tape.op("Expand", [tape.op("Unsqueeze", [tensor, axis]), wide]), flat])

    def _mask(self, tape: "Tape", node: "ir.Node", query: "ir.Value", key: "ir.Value") -> "ir.Value | None":
        """What is added to the scores; None if nothing is."""
        import onnx_ir as ir

        given = node.inputs[3] if len(node.inputs) > 3 else None
        causal = node.attributes.get_int("is_causal", 0)
        if given is not None and given.dtype != ir.DataType.BOOL:
            return given
        if given is None and not causal:
            return None
        place = (id(node.graph), id(given)) if given is not None else (id(node.graph), *_lengths(query, key))
        if place not in self._shared:
            allowed = given if given is not None else self._lower_triangle(tape, node, query, key)
            self._shared[place] = self._additive(tape, node, allowed)
        return self._shared[place]

    def _additive(self, tape: "Tape", node: "ir.Node", allowed: "ir.Value") -> "ir.Value":
        """0 where attention is allowed; elsewhere half of the lowest number, so that no sum of it becomes NaN."""
        dtype = _numpy_dtype(_present(node.inputs[0]), node)
        zero = self._constant(node, "zero", np.array(0, dtype))
        lowest = self._constant(node, "lowest", np.array(float(_lowest(dtype)) / 2, dtype))
        return tape.op("Where", [allowed, zero, lowest])

    def _lower_triangle(self, tape: "Tape", node: "ir.Node", query: "ir.Value", key: "ir.Value") -> "ir.Value":
        zero, one = (self._constant(node, name, np.array(number)) for name, number in (("first", 0), ("step", 1)))
        axis = self._constant(node, "column", np.array([1]))
        rows, columns = (
            tape.op("Range", [zero, tape.op("Squeeze", [tape.op("Shape", [tensor], {"start": 2, "end": 3})]), one])
            for tensor in (query, key)
        )
        return tape.op("LessOrEqual", [columns, tape.op("Unsqueeze", [rows, axis])])

    def _constant(self, node: "ir.Node", name: str, content: Array) -> "ir.Value":
        import onnx_ir as ir

        assert isinstance(node.graph, ir.Graph)
        place = (id(node.graph), name, content.tobytes(), content.dtype)
        if place not in self._shared:
            unique = f"attention_{name}_{len(self._shared)}"
            tensor = ir.tensor(content, name=unique)
            value = ir.Value(name=unique, shape=ir.Shape(content.shape), type=ir.TensorType(tensor.dtype))
            value.const_value = tensor
            node.graph.register_initializer(value)
            self._shared[place] = value
        return self._shared[place]


def _present(value: "ir.Value | None") -> "ir.Value":
    assert value is not None, "Attention has three required inputs"
    return value


def _sizes(node: "ir.Node") -> _Sizes | None:
    """None where the shapes do not tell."""
    shapes = [list(value.shape) if value is not None and value.shape is not None else [] for value in node.inputs[:3]]
    query, key, value = shapes
    heads = [node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads")]
    if len(query) == len(key) == len(value) == 4:
        numbers = [query[1], key[1], query[3], value[3]]
    elif len(query) == len(key) == len(value) == 3 and all(heads):
        numbers = [*heads, _divided(query[2], heads[0]), _divided(value[2], heads[1])]
    else:
        return None
    known = [number for number in numbers if isinstance(number, int) and number > 0]
    return _Sizes(known[0], known[1], known[2], known[3], len(query)) if len(known) == len(numbers) else None


def _divided(width: object, heads: int) -> int:
    return width // heads if isinstance(width, int) else 0


def _is_plain(node: "ir.Node") -> bool:
    """Whether it has no cache, no second output and no extra."""
    unused = not any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    causal = node.attributes.get_int("is_causal", 0) != 0
    both_masks = causal and len(node.inputs) > 3 and node.inputs[3] is not None
    extras = any(key in node.attributes and node.attributes[key].value for key in _EXTRAS)
    return unused and not any(node.inputs[4:]) and not both_masks and not extras


def _lengths(query: "ir.Value", key: "ir.Value") -> tuple[object, ...]:
    """What names the shape of a causal mask: two known or named lengths, else these very tensors."""
    lengths = [value.shape[2] if value.shape is not None else None for value in (query, key)]
    names = tuple(length if isinstance(length, int) else getattr(length, "value", None) for length in lengths)
    return names if None not in names else (id(query), id(key))


def _numpy_dtype(value: "ir.Value", node: "ir.Node") -> np.dtype[np.generic]:
    dtype = value.dtype or _present(node.inputs[0]).dtype
    assert dtype is not None
    return np.dtype(dtype.numpy())


def _lowest(dtype: np.dtype[np.generic]) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]
