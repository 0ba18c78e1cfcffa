"""Rewrite ``Attention`` operators (opset 23): written out as softmax(Q·Kᵀ·scale + mask)·V, or without what is around.

Shapes are those of the operator: B batch, H heads, L queries, S keys, E head size.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.base import Progress, Records
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    from onnx_ir.tape import Tape


_SWAP_HEADS = [0, 2, 1, 3]  # B,L,H,E and B,H,L,E, either way
_EXTRAS = ("softcap", "softmax_precision", "qk_matmul_output_mode")
_MASK = 3
"""Position of the mask among the inputs."""


class DecomposeAttention(GraphPass):
    """Replace every ``Attention`` node by matrix products and a softmax, for engines that refuse it."""

    name: ClassVar[str] = "decompose-attention"
    tools: ClassVar[tuple[str, ...]] = ("onnx", "onnx-ir")

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite the graph, weights untouched."""
        model = edit.load(artifact.path)
        count = decompose_attention(model)
        progress("writing")
        return self.save(model, out, f"{count} Attention nodes written out, {edit.node_count(model)} nodes")


def _list_attention_nodes(model: "ir.Model") -> "Iterator[ir.Node]":
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type == "Attention" and not node.domain:
            yield node


def decompose_attention(model: "ir.Model") -> int:
    """Write out every ``Attention`` node in place, and return how many there were.

    What comes out is the textbook form in five or six nodes; the function body in the specification takes about forty.
    Nodes that use more of the operator (a key-value cache, a soft cap) are left to that body.
    """
    from onnx_ir.passes import common

    nodes = list(_list_attention_nodes(model))
    if not nodes:
        return 0
    edit.infer_shapes(model)
    writer = _TextbookWriter()
    written = [writer.write_out(node) for node in nodes]
    if not all(written):
        _inline_bodies(model)
    common.RemoveUnusedNodesPass()(model)
    common.NameFixPass()(model)
    return len(nodes)


def _inline_bodies(model: "ir.Model") -> None:
    """Replace what is left by the function body of the specification; weights stay where they are."""
    import onnx.inliner

    weights = dict(model.graph.initializers)
    own_inputs = {value.name for value in model.graph.inputs}
    model.graph.inputs.extend(value for name, value in weights.items() if name not in own_inputs)
    model.graph.initializers.clear()
    proto = onnx.inliner.inline_selected_functions(
        ir.to_proto(model), [("", "Attention")], inline_schema_functions=True
    )
    inlined = ir.from_proto(proto).graph
    for value in list(inlined.inputs):
        if value.name in weights:
            value.const_value = weights[value.name].const_value
            inlined.register_initializer(value)
            if value.name not in own_inputs:
                inlined.inputs.remove(value)
    model.graph = inlined


class _Sizes(NamedTuple):
    """The static sizes of one node."""

    query_heads: int
    key_heads: int
    head: int
    value_head: int
    rank: int


class _TextbookWriter:
    """Writes nodes out one after another; constants and masks are shared between those of one graph."""

    def __init__(self) -> None:
        self._shared: dict[tuple[object, ...], ir.Value] = {}

    def write_out(self, node: "ir.Node") -> bool:
        """Put the textbook form in a node's place; false, and nothing done, if the node asks for more than that."""
        from onnx_ir.tape import Tape

        sizes = _find_sizes(node)
        if sizes is None or not _is_plain(node) or not isinstance(node.graph, ir.Graph):
            return False
        tape = Tape()
        result = self._write_result(tape, node, sizes)
        edit.substitute(node, tape.nodes, [result])
        return True

    def _write_result(self, tape: "Tape", node: "ir.Node", sizes: _Sizes) -> "ir.Value":
        query, key, value = (_require(tensor) for tensor in node.inputs[:3])
        if sizes.rank == 3:
            query = self._split_heads(tape, node, query, sizes.query_heads)
            key, value = (self._split_heads(tape, node, tensor, sizes.key_heads) for tensor in (key, value))
        if sizes.key_heads != sizes.query_heads:
            key = self._repeat_heads(tape, node, key, sizes, sizes.head)
            value = self._repeat_heads(tape, node, value, sizes, sizes.value_head)
        scale = node.attributes.get_float("scale", 0.0) or 1.0 / math.sqrt(sizes.head)
        scaled = tape.op("Mul", [query, self._share_constant(node, "scale", np.array(scale, _find_dtype(query, node)))])
        scores = tape.op("MatMul", [scaled, tape.op("Transpose", [key], {"perm": [0, 1, 3, 2]})])
        mask = self._write_mask(tape, node, query, key)
        weights = tape.op("Softmax", [scores if mask is None else tape.op("Add", [scores, mask])], {"axis": -1})
        result = tape.op("MatMul", [weights, value])
        if sizes.rank == 4:
            return result
        merged = self._share_constant(node, "merged", np.array([0, 0, -1]))
        return tape.op("Reshape", [tape.op("Transpose", [result], {"perm": _SWAP_HEADS}), merged])

    def _split_heads(self, tape: "Tape", node: "ir.Node", tensor: "ir.Value", heads: int) -> "ir.Value":
        shape = self._share_constant(node, "split", np.array([0, 0, heads, -1]))
        return tape.op("Transpose", [tape.op("Reshape", [tensor, shape])], {"perm": _SWAP_HEADS})

    def _repeat_heads(self, tape: "Tape", node: "ir.Node", tensor: "ir.Value", sizes: _Sizes, width: int) -> "ir.Value":
        """Repeat key heads for grouped-query attention: each serves several query heads."""
        repeats = sizes.query_heads // sizes.key_heads
        axis = self._share_constant(node, "axis", np.array([2]))
        wide = self._share_constant(node, "repeats", np.array([1, 1, repeats, 1, 1]))
        flat = self._share_constant(node, "flat", np.array([0, sizes.query_heads, -1, width]))
        return tape.op("Reshape", [tape.op("Expand", [tape.op("Unsqueeze", [tensor, axis]), wide]), flat])

    def _write_mask(self, tape: "Tape", node: "ir.Node", query: "ir.Value", key: "ir.Value") -> "ir.Value | None":
        """Return what is added to the scores, None for nothing.

        That is 0 where attention is allowed; elsewhere half of the lowest number, so that no sum of it becomes NaN.
        """
        import ml_dtypes

        allowed = edit.find_input(node, _MASK)
        if allowed is not None and allowed.dtype != ir.DataType.BOOL:
            return allowed
        if allowed is None and not node.attributes.get_int("is_causal", 0):
            return None
        place = (id(node.graph), *([id(allowed)] if allowed is not None else _find_lengths(query, key)))
        if place not in self._shared:
            allowed = allowed if allowed is not None else self._write_triangle(tape, node, query, key)
            dtype = _find_dtype(_require(node.inputs[0]), node)
            zero = self._share_constant(node, "zero", np.array(0, dtype))
            lowest = float(ml_dtypes.finfo(dtype).min) / 2  # type: ignore[no-untyped-call]
            low = self._share_constant(node, "lowest", np.array(lowest, dtype))
            self._shared[place] = tape.op("Where", [allowed, zero, low])
        return self._shared[place]

    def _write_triangle(self, tape: "Tape", node: "ir.Node", query: "ir.Value", key: "ir.Value") -> "ir.Value":
        zero, step = (self._share_constant(node, name, np.array(value)) for name, value in (("first", 0), ("step", 1)))
        axis = self._share_constant(node, "column", np.array([1]))
        rows, columns = (
            tape.op("Range", [zero, tape.op("Squeeze", [tape.op("Shape", [tensor], {"start": 2, "end": 3})]), step])
            for tensor in (query, key)
        )
        return tape.op("LessOrEqual", [columns, tape.op("Unsqueeze", [rows, axis])])

    def _share_constant(self, node: "ir.Node", name: str, content: Array) -> "ir.Value":
        assert isinstance(node.graph, ir.Graph)
        place = (id(node.graph), name, content.tobytes(), content.dtype)
        if place not in self._shared:
            self._shared[place] = edit.add_constant(node.graph, f"attention_{name}_{len(self._shared)}", content)
        return self._shared[place]


def _require(value: "ir.Value | None") -> "ir.Value":
    assert value is not None, "Attention has three required inputs"
    return value


def _find_sizes(node: "ir.Node") -> _Sizes | None:
    """Return None where the shapes do not tell."""
    shapes = [list(value.shape) if value is not None and value.shape is not None else [] for value in node.inputs[:3]]
    query, key, value = shapes
    heads = [node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads")]
    if len(query) == len(key) == len(value) == 4:
        numbers = [query[1], key[1], query[3], value[3]]
    elif len(query) == len(key) == len(value) == 3 and all(heads):
        widths = zip((query[2], value[2]), heads, strict=True)
        numbers = [*heads, *(width // count if isinstance(width, int) else 0 for width, count in widths)]
    else:
        return None
    known = [number for number in numbers if isinstance(number, int) and number > 0]
    return _Sizes(known[0], known[1], known[2], known[3], len(query)) if len(known) == len(numbers) else None


def _is_plain(node: "ir.Node") -> bool:
    """Tell whether it has no cache, no second output and no extra."""
    unused = not any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    causal = node.attributes.get_int("is_causal", 0) != 0
    both_masks = causal and edit.find_input(node, _MASK) is not None
    extras = any(key in node.attributes and node.attributes[key].value for key in _EXTRAS)
    return unused and not any(node.inputs[4:]) and not both_masks and not extras


def _find_lengths(query: "ir.Value", key: "ir.Value") -> tuple[object, ...]:
    """Find the lengths of a causal mask: two known or named ones, else these very tensors."""
    lengths = [value.shape[2] if value.shape is not None else None for value in (query, key)]
    names = tuple(length if isinstance(length, int) else getattr(length, "value", None) for length in lengths)
    return names if None not in names else (id(query), id(key))


def _find_dtype(value: "ir.Value", node: "ir.Node") -> np.dtype[np.generic]:
    dtype = value.dtype or _require(node.inputs[0]).dtype
    assert dtype is not None
    return np.dtype(dtype.numpy())


# ``Attention`` on tensors as the projections give them: the operator splits and merges the heads by itself.
#
# PyTorch's graph reshapes and transposes query, key and value into B,H,S,E and the result back: eight nodes a layer
# that the operator's three-dimensional form makes unnecessary.


class _Split(NamedTuple):
    """Query, key or value before its heads were split off."""

    source: "ir.Value"
    heads: int
    width: int


def absorb_heads(model: "ir.Model") -> None:
    """Give every ``Attention`` node whose surroundings allow it the three-dimensional form, in place."""
    for node in _list_attention_nodes(model):
        query, key, value = (_find_split(value) for value in node.inputs[:3])
        merge = _find_merge(node)
        if query is None or key is None or value is None or merge is None or key.heads != value.heads:
            continue
        if any(node.inputs[4:]) or any(output.uses() for output in node.outputs[1:]) or node.graph is None:
            continue
        old = merge.outputs[0]
        if old.shape is None or old.shape[-1] != query.heads * value.width:
            continue
        heads = {"q_num_heads": query.heads, "kv_num_heads": key.heads}
        attributes = [*node.attributes.values(), *ir.convenience.convert_attributes(heads)]
        inputs = [query.source, key.source, value.source, *node.inputs[_MASK : _MASK + 1]]
        new = ir.Node("", "Attention", inputs, attributes=attributes, metadata_props=dict(node.metadata_props))
        ir.convenience.replace_nodes_and_values(node.graph, merge, [merge], [new], [old], [new.outputs[0]])


def _find_split(value: "ir.Value | None") -> _Split | None:
    """Find what a Reshape to B,S,H,E and a Transpose to B,H,S,E start from."""
    transpose = value.producer() if value is not None else None
    if transpose is None or not _swaps(transpose) or transpose.inputs[0] is None:
        return None
    split, reshape = transpose.inputs[0], transpose.inputs[0].producer()
    source = reshape.inputs[0] if reshape is not None and reshape.op_type == "Reshape" else None
    if source is None or source.shape is None or split.shape is None or len(source.shape) != 3 or len(split.shape) != 4:
        return None
    heads, width = split.shape[2], split.shape[3]
    if not isinstance(heads, int) or not isinstance(width, int) or source.shape[2] != heads * width:
        return None
    return _Split(source, heads, width) if _same_length(source, split) else None


def _find_merge(node: "ir.Node") -> "ir.Node | None":
    """Return the Reshape at the end of Attention, Transpose, Reshape, if nothing else reads what is between."""
    transpose, _ = edit.find_only_reader(node.outputs[0])
    if transpose is None or not _swaps(transpose):
        return None
    reshape, _ = edit.find_only_reader(transpose.outputs[0])
    if reshape is None or reshape.op_type != "Reshape" or reshape.inputs[0] is not transpose.outputs[0]:
        return None
    merged, split = reshape.outputs[0], transpose.outputs[0]
    fits = merged.shape is not None and len(merged.shape) == 3 and _same_length(merged, split)
    return reshape if fits and reshape.graph is node.graph else None


def _swaps(node: "ir.Node") -> bool:
    order = node.attributes["perm"].as_ints() if node.op_type == "Transpose" and "perm" in node.attributes else ()
    return list(order) == _SWAP_HEADS


def _same_length(left: "ir.Value", right: "ir.Value") -> bool:
    """Tell whether batch and sequence are the same two dimensions."""
    assert left.shape is not None
    assert right.shape is not None
    pairs = list(zip(left.shape[:2], right.shape[:2], strict=True))
    return all(a == b and str(a) not in ("", "?", "None") for a, b in pairs)


# Masks of ``Attention`` with the lowest number. Where a row has nothing else, all scores are equal, and the answer is
# the mean of the values; but ONNX Runtime's kernel on the CPU (1.31) takes a row for empty whose scores are the lowest
# number or less, and answers 0. That is so in float32 and float16, for all shapes, with a cache, with shared keys, with
# a soft cap, and without optimization. Rows of minus infinity or of False are empty, and 0, to PyTorch as well.

_SPREADING = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_RAISED = 1 - 2.0**-7
"""Share of the lowest number that takes its place; no score changes it in float32, and none above -496 in float16."""
_LARGE = 0.5
"""Share of the lowest number from which on a constant may make it."""


def raise_masks(model: "ir.Model") -> None:
    """Put a number slightly above the lowest in its place, in place, in all masks that may have it.

    That is done before a mask is spread to queries and heads, if nothing but attention reads what is spread.
    """
    from onnx_ir.tape import Tape

    raised = set[ir.Value]()
    for node in _list_attention_nodes(model):
        mask = edit.find_input(node, _MASK)
        if mask is None or mask.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            continue
        source = _find_unspread(mask)
        producer, dtype = source.producer(), mask.dtype.numpy()
        lowest = float(np.finfo(dtype).min)
        body = producer.graph if producer else source.graph
        if source in raised or body is None or not _may_have(source, _LARGE * -lowest):
            continue
        readers = [use for use in source.uses() if _is_spread_by(*use)]
        tape, content = Tape(), [ir.tensor(np.array(number, dtype)) for number in (lowest, _RAISED * lowest)]
        limit, higher = (tape.op("Constant", [], {"value": number}) for number in content)
        result = tape.op("Where", [tape.op("Equal", [source, limit]), higher, source])
        result.type, result.shape = source.type, source.shape
        for new in tape.nodes:
            new.metadata_props.update(node.metadata_props)
        edit.insert_behind(body, source, tape.nodes)
        for reader, index in readers:
            reader.replace_input_with(index, result)
        raised.add(result)


def _find_unspread(mask: "ir.Value") -> "ir.Value":
    """Find what a mask was before it was spread, as far up as all that is spread of it is read as a mask."""
    producer = mask.producer()
    while producer is not None and producer.op_type in _SPREADING and _is_spread_by(producer, 0):
        source = producer.inputs[0]
        assert source is not None
        mask, producer = source, source.producer()
    return mask


def _is_spread_by(node: "ir.Node", index: int) -> bool:
    """Tell whether a node reads this input as a mask, or spreads it, and nothing but attention reads the result."""
    if node.op_type == "Attention":
        return index == _MASK
    result = node.outputs[0]
    spreads = node.op_type in _SPREADING and index == 0 and not result.is_graph_output()
    return spreads and all(_is_spread_by(*use) for use in result.uses())


def _may_have(value: "ir.Value", size: float) -> bool:
    """Tell whether a value may have numbers of this size: it is computed of one, or of floats that are fed."""
    seen, waiting = set[ir.Value](), [value]
    while waiting:
        if (each := waiting.pop()) in seen:
            continue
        seen.add(each)
        node, numbers = each.producer(), edit.read(each)
        attributes = list(node.attributes.values()) if node is not None else []
        tensors = (attribute for attribute in attributes if attribute.type == ir.AttributeType.TENSOR)
        filled = [attribute.as_tensor().numpy() for attribute in tensors]
        for content in [numbers] if numbers is not None else filled:
            if content.dtype.kind not in "biu" and bool((np.abs(content.astype(np.float64)) >= size).any()):
                return True
        if numbers is not None:
            continue
        if edit.has_body(node) if node is not None else each.dtype is None or each.dtype.is_floating_point():
            return True
        waiting += [given for given in (node.inputs if node is not None else ()) if given is not None]
    return False


# Masks of ``Attention`` with one row for all queries: the specification lets them broadcast, ONNX Runtime does not.
#
# Padding masks are such: B,1,1,S, for B samples of S keys. They are given a row for each of the L queries.


def spread_masks(model: "ir.Model") -> None:
    """Give every mask a row for each query, in place; masks that several nodes share are spread once."""
    from onnx_ir.tape import Tape

    spread: dict[tuple[object, ...], ir.Value] = {}
    for node in _list_attention_nodes(model):
        query, mask, body = node.inputs[0], edit.find_input(node, _MASK), node.graph
        if mask is None or mask.shape is None or len(mask.shape) < 2 or query is None or query.shape is None:
            continue
        length = query.shape[_find_query_axis(query)]
        if mask.shape[-2] != 1 or length == 1 or body is None:
            continue
        key = (id(body), id(mask), getattr(length, "value", length) or id(query))
        if key not in spread:
            split = _find_split(query)
            counted = split.source if split else query  # what heads are split off from may be all that is left of it
            axis = _find_query_axis(counted)
            tape = Tape()
            count = tape.op("Shape", [counted], {"start": axis, "end": axis + 1})
            second = tape.op("Constant", [], {"value_ints": [1]})
            spread[key] = tape.op("Expand", [mask, tape.op("Concat", [count, second], {"axis": 0})])
            for new in tape.nodes:
                new.metadata_props.update(node.metadata_props)
            body.insert_before(node, tape.nodes)
        node.replace_input_with(_MASK, spread[key])


def _find_query_axis(query: "ir.Value") -> int:
    """Return the axis of the queries: B,H,L,E or B,L,H·E."""
    assert query.shape is not None
    return 2 if len(query.shape) == 4 else 1
