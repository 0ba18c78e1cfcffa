"""Count the work of a graph's products: multiply-adds of each one, at concrete sizes.

What a kernel multiplies counts, so blocks of channels that ONNX Runtime fills up with zeros do too. Additions alone
(normalisations, softmax, activations) do not. Loops count once, as their length is not in the file.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.frameworks.onnx.shapes import Value, View, attributes, view

if TYPE_CHECKING:
    import onnx


Shape = tuple[int, ...]
_NORMAL = ("", "ai.onnx")


def macs(path: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """Multiply-adds of every product by node name (``op_index`` where it has none); those of unknown shapes left out.

    Raises:
        InvalidGraph: the file cannot be read.
    """
    return {name: count for name, count in count_products(view(path, sizes)).items() if count is not None}


def count_products(seen: View) -> dict[str, int | None]:
    """Return the same of a file that was read already; None where shapes are not known."""
    return {name: _macs(node, seen) for name, node in seen.nodes.items() if is_product(node)}


def is_product(node: "onnx.NodeProto") -> bool:
    """Tell whether what a node does is counted in multiply-adds."""
    return node.op_type in _FORMULAS and len(node.input) > 1


def _macs(node: "onnx.NodeProto", seen: View) -> int | None:
    try:
        return _FORMULAS[node.op_type](node, seen)
    except (LookupError, ValueError):  # a shape that is not known, or not what the operator takes
        return None


def _shape(node: "onnx.NodeProto", index: int, seen: View) -> Shape:
    """Return the shape of an input; ValueError where it is not known."""
    return _known(seen.value(node.input[index]))


def _result(node: "onnx.NodeProto", seen: View) -> Shape:
    return _known(seen.value(node.output[0]))


def _known(value: Value) -> Shape:
    if value.shape is None:
        raise ValueError
    return value.shape


def _convolution(node: "onnx.NodeProto", seen: View) -> int:
    """Count a convolution: each result takes a filter, all of the weight but its first dimension."""
    weight = 3 if node.op_type == "QLinearConv" else 1
    return prod(_result(node, seen)) * prod(_shape(node, weight, seen)[1:])


def _transposed_convolution(node: "onnx.NodeProto", seen: View) -> int:
    """Count a transposed convolution: each input meets all of the weight but its first dimension."""
    return prod(_shape(node, 0, seen)) * prod(_shape(node, 1, seen)[1:])


def _matrix_product(node: "onnx.NodeProto", seen: View) -> int:
    left, given = _shape(node, 0, seen), attributes(node)
    turned = given.get("transA", 0) and len(left) > 1
    return prod(_result(node, seen)) * left[-2 if turned else -1]


def _packed_product(node: "onnx.NodeProto", seen: View) -> int:
    return prod(_result(node, seen)) * int(attributes(node)["K"])


def _einsum(node: "onnx.NodeProto", seen: View) -> int:
    """Count an Einsum: of two operands or more, one loop over every label; of one, nothing."""
    terms = attributes(node)["equation"].decode().replace(" ", "").partition("->")[0].split(",")
    shapes = [_shape(node, index, seen) for index in range(len(node.input))]
    return prod(
        {
            label: size for term, shape in zip(terms, shapes, strict=True) for label, size in _labels(term, shape)
        }.values()
    )


def _labels(term: str, shape: Shape) -> list[tuple[str, int]]:
    before, dots, after = term.partition("...")
    hidden = [f".{index}" for index in range(len(shape) - len(before) - len(after))] if dots else []
    return list(zip([*before, *reversed(hidden), *after], shape, strict=True))


def _attention(node: "onnx.NodeProto", seen: View) -> int:
    """Count queries times keys, and weights times values: each query's head meets each key.

    3-D and 4-D inputs alike: queries and result together hold what is multiplied for one key.
    """
    keys = _shape(node, 1, seen)[-2]
    if len(node.input) > 4 and node.input[4]:
        keys += _shape(node, 4, seen)[-2]
    return keys * (prod(_shape(node, 0, seen)) + prod(_result(node, seen)))


def _fused_attention(node: "onnx.NodeProto", seen: View) -> int:
    """Count com.microsoft's attention: without a key of its own, all are packed in one input."""
    query = _shape(node, 0, seen)
    result = prod(_result(node, seen))
    if len(node.input) > 1 and node.input[1]:
        key = _shape(node, 1, seen)
        return (key[2] if len(key) == 4 else key[1]) * (prod(query) + result)
    return query[1] * (prod(query) // 3 + result)


def _projected_attention(node: "onnx.NodeProto", seen: View) -> int:
    """Count com.microsoft's attention with its projections inside, one matrix for all of them."""
    batch, length, _ = _shape(node, 0, seen)
    return batch * length * prod(_shape(node, 1, seen)) + 2 * length * prod(_result(node, seen))


def _recurrence(node: "onnx.NodeProto", seen: View) -> int:
    """Count a recurrence: each step multiplies by the weights of input and state of every direction."""
    sequence = _shape(node, 0, seen)
    return sequence[0] * sequence[1] * (prod(_shape(node, 1, seen)) + prod(_shape(node, 2, seen)))


def _any_attention(node: "onnx.NodeProto", seen: View) -> int:
    return _attention(node, seen) if node.domain in _NORMAL else _projected_attention(node, seen)


_FORMULAS: "dict[str, Callable[[onnx.NodeProto, View], int]]" = {
    **dict.fromkeys(("Conv", "FusedConv", "NhwcFusedConv", "ConvInteger", "QLinearConv"), _convolution),
    "ConvTranspose": _transposed_convolution,
    **dict.fromkeys(("MatMul", "MatMulInteger", "QLinearMatMul", "FusedMatMul", "TransposeMatMul"), _matrix_product),
    **dict.fromkeys(("MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _matrix_product),
    **dict.fromkeys(("Gemm", "FusedGemm", "QGemm"), _matrix_product),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), _packed_product),
    "Einsum": _einsum,
    **dict.fromkeys(("Attention", "QAttention"), _any_attention),
    "MultiHeadAttention": _fused_attention,
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _recurrence),
}


# What leads to what in a graph, seen through quantisation and changes of layout.

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
        """Return the node that makes a value; None for inputs and initialisers."""
        return self.seen.nodes[self.makers[value]] if value in self.makers else None

    def readers_of(self, node: "onnx.NodeProto") -> "Iterator[onnx.NodeProto]":
        """Return the nodes that read what a node makes."""
        return (self.seen.nodes[name] for output in node.output for name in self.readers.get(output, ()))

    def source(self, value: str, through: tuple[str, ...] = ()) -> str:
        """Return the value that one is made from by nothing but changes of layout, and operators of these types."""
        node = self.maker(value)
        while node is not None and node.op_type in (*_LAYOUT, *through):
            value = node.input[0]
            node = self.maker(value)
        return value

    def stored(self, value: str, through: tuple[str, ...] = ()) -> str:
        """Return the dtype that a value had before it was dequantised; its own, if it was not."""
        found = self.source(value, through)
        node = self.maker(found)
        return self.seen.value(
            node.input[0] if node is not None and node.op_type == "DequantizeLinear" else value
        ).dtype

    @property
    def pairs(self) -> int:
        """Find QuantizeLinear nodes with a DequantizeLinear behind them."""
        quantisers = (node for node in self.seen.nodes.values() if node.op_type == "QuantizeLinear")
        return sum(any(one.op_type == "DequantizeLinear" for one in self.readers_of(node)) for node in quantisers)

    @property
    def scales(self) -> frozenset[str]:
        """Return names of the scales and zero points that may have more than one dimension."""
        return frozenset(
            value
            for node in self.seen.nodes.values()
            for index, value in enumerate(node.input)
            if index in _SCALES.get(node.op_type, ())
        )
