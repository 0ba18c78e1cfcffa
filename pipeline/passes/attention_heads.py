"""``Attention`` on tensors as the projections give them: the operator splits and merges the heads by itself.

PyTorch's graph reshapes and transposes query, key and value into B,H,S,E and the result back: eight nodes a layer that
the operator's three-dimensional form makes unnecessary.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import onnx_ir as ir

_SWAP = [0, 2, 1, 3]


class _Split(NamedTuple):
    """One of query, key and value before its heads were split off."""

    source: "ir.Value"
    heads: int
    width: int


def absorb_heads(model: "ir.Model") -> None:
    """Give every ``Attention`` node whose surroundings allow it the three-dimensional form, in place."""
    import onnx_ir as ir

    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type == "Attention" and node.domain in ("", "ai.onnx"):
            _absorb(node)


def _absorb(node: "ir.Node") -> None:
    import onnx_ir as ir

    splits = [split_of(value) for value in node.inputs[:3]]
    query, key, value = splits
    merge = _merge(node)
    if query is None or key is None or value is None or merge is None or key.heads != value.heads:
        return
    if any(node.inputs[4:]) or any(output.uses() for output in node.outputs[1:]) or node.graph is None:
        return
    if _last(merge.outputs[0]) != query.heads * value.width:
        return
    heads = {"q_num_heads": query.heads, "kv_num_heads": key.heads}
    attributes = [*node.attributes.values(), *ir.convenience.convert_attributes(heads)]
    inputs = [query.source, key.source, value.source, *node.inputs[3:4]]
    new = ir.Node("", "Attention", inputs, attributes=attributes, metadata_props=dict(node.metadata_props))
    old, result = merge.outputs[0], new.outputs[0]
    ir.convenience.replace_nodes_and_values(node.graph, merge, [merge], [new], [old], [result])


def split_of(value: "ir.Value | None") -> _Split | None:
    """What a Reshape to B,S,H,E and a Transpose to B,H,S,E start from."""
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


def _merge(node: "ir.Node") -> "ir.Node | None":
    """The Reshape at the end of Attention, Transpose, Reshape, if nothing else reads what is between."""
    transpose = _only_reader(node.outputs[0])
    if transpose is None or not _swaps(transpose):
        return None
    reshape = _only_reader(transpose.outputs[0])
    if reshape is None or reshape.op_type != "Reshape" or reshape.inputs[0] is not transpose.outputs[0]:
        return None
    merged, split = reshape.outputs[0], transpose.outputs[0]
    fits = merged.shape is not None and len(merged.shape) == 3 and _same_length(merged, split)
    return reshape if fits and reshape.graph is node.graph else None


def _only_reader(value: "ir.Value") -> "ir.Node | None":
    uses = value.uses()
    return next(iter(uses)).node if len(uses) == 1 and not value.is_graph_output() else None


def _swaps(node: "ir.Node") -> bool:
    return (
        node.op_type == "Transpose" and "perm" in node.attributes and list(node.attributes["perm"].as_ints()) == _SWAP
    )


def _same_length(left: "ir.Value", right: "ir.Value") -> bool:
    """Whether batch and sequence are the same two dimensions."""
    assert left.shape is not None
    assert right.shape is not None
    pairs = list(zip(left.shape[:2], right.shape[:2], strict=True))
    return all(a == b and str(a) not in ("", "?", "None") for a, b in pairs)


def _last(value: "ir.Value") -> object:
    return value.shape[-1] if value.shape is not None else None
