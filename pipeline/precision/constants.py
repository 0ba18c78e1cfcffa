"""Constants of a graph: reading them, and putting other numbers in their place."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def read(value: "ir.Value | None") -> Array | None:
    """The numbers of a constant; None for what is computed, fed, or could be fed in its place."""
    import onnx_ir as ir

    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def is_weight(value: "ir.Value | None") -> bool:
    """Whether it is an initialiser of float32 that nothing can be fed in the place of."""
    import onnx_ir as ir

    return (
        value is not None
        and value.is_initializer()
        and not (value.is_graph_input() or value.is_graph_output())
        and value.const_value is not None
        and value.const_value.dtype == ir.DataType.FLOAT
    )


def is_factor(value: "ir.Value | None") -> bool:
    """Whether it is a constant of float32, so that :func:`multiply` can put another in its place."""
    numbers = read(value)
    return numbers is not None and numbers.dtype == np.float32


def rescale(weight: "ir.Value", factors: Sequence[Array]) -> None:
    """Multiply an initialiser by arrays that broadcast to its shape; it is computed anew each time it is read.

    So a graph whose every weight is rescaled is written with one of them in memory at a time.
    """
    import onnx_ir as ir

    given = weight.const_value
    assert given is not None
    name = weight.name

    def compute() -> "ir.TensorProtocol":
        numbers = given.numpy() * factors[0]
        for factor in factors[1:]:
            numbers *= factor
        return ir.tensor(numbers, name=name)

    weight.const_value = ir.LazyTensor(compute, dtype=given.dtype, shape=ir.Shape(given.shape.numpy()), name=name)


def multiply(node: "ir.Node", index: int, factors: Array) -> None:
    """Multiply one small constant that a node reads; its other readers keep theirs."""
    numbers = read(node.inputs[index])
    assert numbers is not None
    write(node, index, np.multiply(numbers, factors).astype(numbers.dtype))


def write(node: "ir.Node", index: int, numbers: Array) -> None:
    """Let a node read these numbers: under the same name where nothing else reads it, else under one of their own."""
    import onnx_ir as ir

    old = node.inputs[index] if index < len(node.inputs) else None
    if old is not None and is_weight(old) and len(old.uses()) == 1:
        old.const_value = ir.tensor(numbers, name=old.name)
        old.shape = ir.Shape(numbers.shape)
        return
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    value = new(graph, f"{node.outputs[0].name}_input_{index}", numbers)
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)
    if old is not None and not old.uses() and old.is_initializer() and not old.is_graph_input():
        del graph.initializers[old.name or ""]


def new(graph: "ir.Graph", name: str, numbers: Array) -> "ir.Value":
    """A new initialiser, under this name or one like it."""
    import onnx_ir as ir

    name = free_name(graph, name)
    tensor = ir.tensor(numbers, name=name)
    value = ir.Value(name=name, shape=ir.Shape(numbers.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def free_name(graph: "ir.Graph", wanted: str) -> str:
    """The name, with a number behind it where a value is called that already, in the graph or in one below it."""
    import onnx_ir as ir

    taken = {
        value.name for below in (graph, *graph.subgraphs()) for value in (*below.inputs, *below.initializers.values())
    }
    taken |= {value.name for node in ir.traversal.RecursiveGraphIterator(graph) for value in node.outputs}
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name
