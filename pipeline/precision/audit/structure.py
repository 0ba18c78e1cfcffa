"""What leads to what in a graph, seen through quantisation and changes of layout."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from enginesmith.pipeline.precision.audit.values import View

if TYPE_CHECKING:
    import onnx

QUANTISERS = ("QuantizeLinear", "DynamicQuantizeLinear")
CONVERTERS = (*QUANTISERS, "DequantizeLinear")
_LAYOUT = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Expand", "Slice", "Gather", "Split")
_SCALES = {
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), (1, 2)),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), (2, 3, 4)),
}
"""Inputs that are scales and zero points, and have several dimensions where there is one for each block."""


class Structure:
    """Makers and readers of every value."""

    def __init__(self, seen: View) -> None:
        self.seen = seen
        self.makers = {output: name for name, node in seen.nodes.items() for output in node.output if output}
        self.readers: dict[str, list[str]] = {}
        for name, node in seen.nodes.items():
            for value in node.input:
                self.readers.setdefault(value, []).append(name)

    def maker(self, value: str) -> "onnx.NodeProto | None":
        """The node that makes a value; None for inputs and initialisers."""
        return self.seen.nodes[self.makers[value]] if value in self.makers else None

    def readers_of(self, node: "onnx.NodeProto") -> "Iterator[onnx.NodeProto]":
        """The nodes that read what a node makes."""
        return (self.seen.nodes[name] for output in node.output for name in self.readers.get(output, ()))

    def source(self, value: str, through: tuple[str, ...] = ()) -> str:
        """The value that one is made from by nothing but changes of layout, and operators of these types."""
        node = self.maker(value)
        while node is not None and node.op_type in (*_LAYOUT, *through):
            value = node.input[0]
            node = self.maker(value)
        return value

    def stored(self, value: str, through: tuple[str, ...] = ()) -> str:
        """The dtype that a value had before it was dequantised; its own, if it was not."""
        found = self.source(value, through)
        node = self.maker(found)
        return self.seen.value(
            node.input[0] if node is not None and node.op_type == "DequantizeLinear" else value
        ).dtype

    @property
    def pairs(self) -> int:
        """QuantizeLinear nodes with a DequantizeLinear behind them."""
        quantisers = (node for node in self.seen.nodes.values() if node.op_type == "QuantizeLinear")
        return sum(any(one.op_type == "DequantizeLinear" for one in self.readers_of(node)) for node in quantisers)

    @property
    def scales(self) -> frozenset[str]:
        """Names of the scales and zero points that may have more than one dimension."""
        return frozenset(
            value
            for node in self.seen.nodes.values()
            for index, value in enumerate(node.input)
            if index in _SCALES.get(node.op_type, ())
        )
