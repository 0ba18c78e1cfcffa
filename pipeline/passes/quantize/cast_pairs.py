"""Round what single products of a float32 graph read and write to a narrow float, by pairs of casts.

In a graph that is lowered as a whole, types change where runs of nodes end. Here everything stays in float32, and each
product has its own pairs, so that the loss of one can be told from that of the others.
"""

from collections.abc import Collection, Mapping

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.frameworks.onnx.edit import Names
from enginesmith.pipeline.passes.float16.convert import Half, find_type, hand_over, narrow, new_node
from enginesmith.pipeline.passes.float16.rules import is_float
from enginesmith.pipeline.passes.quantize.layers import PRODUCTS, find_weight, get_input

_ROUNDED_KEY = "enginesmith.rounded"
"""Metadata of the second cast of a pair: the product that wrote the value, or nothing."""


def round_products(model: "ir.Model", dtype: Half, names: Collection[str]) -> int:
    """Round inputs and results of these products of a graph, in place; return the number of pairs.

    Constants that they read are written rounded. The bias of a MatMul is a part of it: the sum is its result.
    """
    if any(value.type is None for node in model.graph.all_nodes() for value in node.outputs):
        edit.infer_shapes(model)
    rounder = _Rounder(model.graph, find_type(dtype))
    products = [node for node in model.graph if node.op_type in PRODUCTS and node.name in names]
    for node in products:
        rounder.round_result(node)
    for node in products:
        rounder.round_inputs(node)
    return rounder.pairs


def find_written(model: "ir.Model") -> "Mapping[ir.Value, str]":
    """Find the values that are rounded because a product writes them, and the names of these."""
    pairs = ((find_rounded(value), node) for node in model.graph for value in node.outputs)
    return {source: writer for source, node in pairs if source and (writer := node.metadata_props.get(_ROUNDED_KEY))}


def find_rounded(value: "ir.Value | None") -> "ir.Value | None":
    """Find the value that a pair rounds, from what comes out of it; None for other values."""
    node = value.producer() if value is not None else None
    if node is None or _ROUNDED_KEY not in node.metadata_props:
        return None
    maker = get_input(node, 0).producer()
    return get_input(maker, 0) if maker is not None else None


def find_adder(node: "ir.Node") -> "ir.Node | None":
    """Return the node that adds the bias of a MatMul."""
    reader, _ = edit.find_only_reader(node.outputs[0]) if node.op_type == "MatMul" else (None, 0)
    return reader if reader is not None and reader.op_type == "Add" else None


class _Rounder:
    """Adds pairs to one graph, and counts them."""

    def __init__(self, graph: "ir.Graph", dtype: "ir.DataType") -> None:
        self._graph, self._dtype = graph, dtype
        self._names = Names(graph)
        self._rounded: dict[ir.Value, ir.Value] = {}
        self.pairs = 0

    def round_result(self, node: "ir.Node") -> None:
        """Round what a product makes, for all that read it."""
        adder, _ = edit.find_added(node)
        if adder is not None:
            self._round_constants(adder)
        value = (adder or node).outputs[0]
        if not is_float(value):
            return
        uses = value.uses()
        rounded = self._add_pair(value, str(node.name))
        for reader, index in uses:
            reader.replace_input_with(index, rounded)
        hand_over(self._graph, value, rounded)

    def round_inputs(self, node: "ir.Node") -> None:
        """Round what a product reads, for itself."""
        self._round_constants(node)
        for index, value in enumerate(node.inputs):
            if value is not None and is_float(value) and find_weight(value) is None and find_rounded(value) is None:
                if value not in self._rounded:
                    self._rounded[value] = self._add_pair(value, "")
                node.replace_input_with(index, self._rounded[value])

    def _round_constants(self, node: "ir.Node") -> None:
        for index, value in enumerate(node.inputs):
            content = find_weight(value)
            if content is None or content.dtype != ir.DataType.FLOAT:
                continue
            name = self._names.new(f"{node.name}/rounded_{index}")

            def make(content: "ir.TensorProtocol" = content, name: str = name) -> "ir.TensorProtocol":
                return ir.tensor(narrow(content.numpy(), self._dtype).astype(np.float32), name=name)

            shape = ir.Shape(content.shape.numpy())
            constant = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
            constant.const_value = ir.LazyTensor(make, ir.DataType.FLOAT, shape, name=name)
            self._graph.register_initializer(constant)
            node.replace_input_with(index, constant)

    def _add_pair(self, value: "ir.Value", writer: str) -> "ir.Value":
        """Insert two casts right after a value's maker; return what the second one makes."""
        nodes: list[ir.Node] = []
        for dtype in (self._dtype, ir.DataType.FLOAT):
            name = self._names.new(f"{value.name}_{dtype.name.lower()}")
            nodes.append(new_node("Cast", [nodes[0].outputs[0] if nodes else value], {"to": dtype}, name, dtype, value))
        nodes[1].metadata_props[_ROUNDED_KEY] = writer
        edit.insert_behind(self._graph, value, nodes)
        self.pairs += 1
        return nodes[1].outputs[0]
