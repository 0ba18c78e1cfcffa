"""Find outputs of a graph whose rows are chosen by values, so that rounding may change their number and order."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import onnx

_SELECTING = {"NonMaxSuppression": 0, "NonZero": 0, "TopK": 1, "Unique": 0}
"""Operators that choose by value, and their first output that depends on the order (a TopK's values are sorted)."""
_SHAPES = ("Shape", "Size")
_COPYING = ("Identity", "Cast")
_REDUCING = ("ArgMax", "ArgMin", "GlobalAveragePool", "GlobalMaxPool")


def find_unordered(graph: "onnx.GraphProto") -> dict[str, Literal["rows", "positions"]]:
    """Find the outputs that depend on rows that NonMaxSuppression, TopK, NonZero or Unique chose by values.

    Not those behind a reduction, which do not depend on the order, and not what is computed from shapes alone. The
    values of a TopK count where what was chosen by its indices is an output, too.
    """
    varying = {value.name for value in graph.input} - {weight.name for weight in graph.initializer}
    chosen, sorted_values, positions = set[str](), set[str](), set[str]()
    for node in graph.node:
        read = {*node.input, *_captured(node)}
        if read.isdisjoint(varying) or node.op_type in _SHAPES:
            continue
        varying.update(node.output)
        first = _SELECTING.get(node.op_type)
        if node.op_type == "TopK":
            sorted_values.add(node.output[0])
        if node.op_type == "NonMaxSuppression" or (node.op_type in _COPYING and not read.isdisjoint(positions)):
            positions.update(node.output)
        if first is not None:
            chosen.update(node.output[first:])
        elif not read.isdisjoint(chosen) or any(inner.op_type in _SELECTING for inner in _inner_nodes(node)):
            if node.op_type.startswith("Reduce") or node.op_type in _REDUCING:
                continue
            chosen.update(node.output)
        elif not read.isdisjoint(sorted_values):
            sorted_values.update(node.output)
    outputs = [value.name for value in graph.output]
    if any(name in chosen for name in outputs):
        chosen |= sorted_values
    return {name: "positions" if name in positions else "rows" for name in outputs if name in chosen}


def _captured(node: "onnx.NodeProto") -> Iterator[str]:
    """Yield the names that the subgraphs of a node read, also those of their own."""
    for inner in _inner_nodes(node):
        yield from inner.input


def _inner_nodes(node: "onnx.NodeProto") -> "Iterator[onnx.NodeProto]":
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield inner
                yield from _inner_nodes(inner)
