"""Walk through the nodes of an ONNX file, and the graphs inside of them."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


def nodes(model: "onnx.ModelProto") -> Iterator["onnx.NodeProto"]:
    """Yield every node: of the graph, of subgraphs and of function bodies."""
    for body in (model.graph, *model.functions):
        yield from walk(body.node)


def walk(sequence: Iterable["onnx.NodeProto"]) -> Iterator["onnx.NodeProto"]:
    """Yield these nodes, and all in graphs inside of them."""
    for node in sequence:
        yield node
        for graph in subgraphs(node):
            yield from walk(graph.node)


def subgraphs(node: "onnx.NodeProto") -> Iterator["onnx.GraphProto"]:
    """List the graphs inside of a node: branches, or the body of a loop."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def list_graphs(model: "onnx.ModelProto") -> Iterator["onnx.GraphProto"]:
    """Yield the main graph, and all graphs inside of nodes, those of function bodies too."""
    yield model.graph
    for node in nodes(model):
        yield from subgraphs(node)


def list_reads(node: "onnx.NodeProto") -> Iterator[str]:
    """Yield the names of the values that a node reads, also by the graphs within it."""
    yield from filter(None, node.input)
    for graph in subgraphs(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        read = (name for inner in graph.node for name in list_reads(inner))
        yield from (name for name in (*read, *(value.name for value in graph.output)) if name not in own)


def tensors(model: "onnx.ModelProto") -> Iterator["onnx.TensorProto"]:
    """Yield every constant: initializers and attributes, of subgraphs and function bodies too."""
    for graph in list_graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
    for node in nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def constants(model: "onnx.ModelProto") -> Iterator[tuple[str, "onnx.TensorProto"]]:
    """Yield the tensors that values have, by the names of these: initializers, and what Constant nodes hold."""
    for graph in list_graphs(model):
        yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in nodes(model):
        if node.op_type == "Constant":
            yield from ((node.output[0], attribute.t) for attribute in node.attribute if attribute.HasField("t"))


def attributes(node: "onnx.NodeProto") -> dict[str, Any]:
    """Return a node's attributes by name, as Python values; not those that a call of a function gives."""
    from onnx import helper

    return {entry.name: helper.get_attribute_value(entry) for entry in node.attribute if not entry.ref_attr_name}
