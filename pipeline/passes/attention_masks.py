"""Masks of ``Attention`` with one row for all queries: the specification lets them broadcast, ONNX Runtime does not.

Padding masks are such: B,1,1,S, for B samples of S keys. They are given a row for each of the L queries.
"""

from typing import TYPE_CHECKING

from enginesmith.pipeline.passes.attention_heads import split_of

if TYPE_CHECKING:
    import onnx_ir as ir

_MASK = 3


def spread_masks(model: "ir.Model") -> None:
    """Give every mask a row for each query, in place; masks that several nodes share are spread once."""
    import onnx_ir as ir

    spread: dict[tuple[object, ...], ir.Value] = {}
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type == "Attention" and node.domain in ("", "ai.onnx") and _has_one_row(node):
            _spread(node, spread)


def _has_one_row(node: "ir.Node") -> bool:
    """Whether the mask has a single row, and there may be several queries."""
    mask = node.inputs[_MASK] if len(node.inputs) > _MASK else None
    query = node.inputs[0]
    if mask is None or mask.shape is None or len(mask.shape) < 2 or query is None or query.shape is None:
        return False
    return mask.shape[-2] == 1 and query.shape[_queries(query)] != 1


def _queries(query: "ir.Value") -> int:
    """The axis of the queries: B,H,L,E or B,L,H·E."""
    assert query.shape is not None
    return 2 if len(query.shape) == 4 else 1


def _spread(node: "ir.Node", spread: "dict[tuple[object, ...], ir.Value]") -> None:
    from onnx_ir.tape import Tape

    query, mask, body = node.inputs[0], node.inputs[_MASK], node.graph
    assert query is not None
    assert query.shape is not None
    assert body is not None
    split = split_of(query)
    counted = split.source if split else query  # what heads are split off from may be all that is left of the query
    axis, length_known = _queries(counted), query.shape[_queries(query)]
    key = (id(body), id(mask), getattr(length_known, "value", length_known) or id(query))
    if key not in spread:
        tape = Tape()
        length = tape.op("Shape", [counted], {"start": axis, "end": axis + 1})
        one = tape.op("Constant", [], {"value_ints": [1]})
        spread[key] = tape.op("Expand", [mask, tape.op("Concat", [length, one], {"axis": 0})])
        for new in tape.nodes:
            new.metadata_props.update(node.metadata_props)
        body.insert_before(node, tape.nodes)
    node.replace_input_with(_MASK, spread[key])
