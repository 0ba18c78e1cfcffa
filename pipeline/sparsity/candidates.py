"""Which weights of a float graph can be made sparse, along which axis, and why others cannot.

Sparse tensor cores skip zeros along the dimension that a product sums over: input channels of a Conv, for each place in
its kernel, and K of Gemm and MatMul. TensorRT's test (developer guide, "Structured Sparsity") and NVIDIA's ASP (apex,
``contrib/sparsity``) take the same. A weight is followed through casts and transpositions to the initialiser.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginesmith.pipeline.onnx_file import MODULE_KEY
from enginesmith.pipeline.precision import groups
from enginesmith.pipeline.sparsity import masks

if TYPE_CHECKING:
    import onnx_ir as ir

_STANDARD = ("", "ai.onnx")
_LAYOUT = ("Cast", "Identity", "Transpose")
_QUANTISED = ("DequantizeLinear", "QuantizeLinear")
_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")


@dataclass
class Candidate:
    """An initialiser that products multiply by."""

    value: "ir.Value"
    axis: int
    """The one that is summed over."""
    nodes: "list[ir.Node]" = field(default_factory=list)
    reason: str = ""
    """Why no pattern is put into it; empty where one can be."""
    structured: str = ""
    """Why 2:4 is not put into it, where another pattern could be."""

    @property
    def name(self) -> str:
        """That of the initialiser."""
        return str(self.value.name)

    @property
    def names(self) -> frozenset[str]:
        """What people may call it by: the initialiser, its nodes, their modules."""
        modules = (node.metadata_props.get(MODULE_KEY, "") for node in self.nodes)
        return frozenset(name for name in (self.name, *(str(node.name) for node in self.nodes), *modules) if name)

    @property
    def size(self) -> int:
        """Elements."""
        return 0 if self.value.const_value is None else int(self.value.const_value.size)


def find(model: "ir.Model") -> tuple[Candidate, ...]:
    """The weights of all products of a graph and its subgraphs, in the order in which they are first read."""
    import onnx_ir as ir

    found: dict[ir.Value, Candidate] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain not in _STANDARD or node.op_type not in groups.PRODUCTS or len(node.inputs) < 2:
            continue
        weight = node.inputs[1]
        if weight is None or (weight.shape is None and not weight.is_initializer()):
            continue
        traced = _traced(weight, summed_axis(node, len(weight.shape or ())))
        if traced is None:
            continue
        value, axis = traced
        known = found.setdefault(value, Candidate(value, axis))
        if known.axis != axis:
            known.reason = "two products sum over different axes of it"
        known.nodes.append(node)
    for candidate in found.values():
        candidate.reason = candidate.reason or _reason(candidate)
        candidate.structured = candidate.reason or _structure(candidate)
    return tuple(found.values())


def summed_axis(node: "ir.Node", rank: int) -> int:
    """The axis of a product's weight that is summed over: those of a group of input channels, or K."""
    if node.op_type == "Conv":
        return 1
    if node.op_type == "ConvTranspose":
        return 0
    if node.op_type == "Gemm":
        return 1 if node.attributes.get_int("transB", 0) else 0
    return max(rank - 2, 0)


def order(node: "ir.Node", rank: int) -> list[int]:
    """The axes of what a Transpose reads, as it writes them."""
    return list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(rank))[::-1]


def _traced(value: "ir.Value", axis: int) -> "tuple[ir.Value, int] | None":
    """The initialiser behind a value and what its axis is there; None for what is computed."""
    while not value.is_initializer():
        node = value.producer()
        if node is None or node.domain not in _STANDARD or node.op_type not in (*_LAYOUT, *_QUANTISED):
            return None
        source = node.inputs[0]
        if source is None:
            return None
        if node.op_type == "Transpose":
            axis = order(node, len(value.shape or ()))[axis]
        value = source
    return value, axis


def _reason(candidate: Candidate) -> str:
    value, tensor = candidate.value, candidate.value.const_value
    if tensor is None or value.is_graph_input():
        return "it can be fed from outside"
    if tensor.dtype.name not in _FLOATS:
        what = "quantised already" if tensor.dtype.is_integer() else f"of the type {tensor.dtype.name.lower()}"
        return f"it is {what}: sparse weights are made of a float graph"
    if len(tensor.shape) < 2:
        return "it is a vector"
    others = sorted(set(_others(value, set(candidate.nodes))))
    return f"it is also read by {', '.join(others)}" if others else ""


def _others(value: "ir.Value", nodes: "set[ir.Node]") -> Iterator[str]:
    """What reads a weight besides the products that multiply by it."""
    if value.is_graph_output():
        yield "whoever takes the outputs"
    for use in value.uses():
        if use.node in nodes and use.idx == 1:
            continue
        if use.node.op_type in (*_LAYOUT, *_QUANTISED) and use.idx == 0:
            yield from _others(use.node.outputs[0], nodes)
        else:
            yield use.node.op_type


def _structure(candidate: Candidate) -> str:
    tensor = candidate.value.const_value
    assert tensor is not None
    if any(node.op_type == "ConvTranspose" for node in candidate.nodes):
        return "there are no sparse kernels for ConvTranspose"
    length = int(tensor.shape.numpy()[candidate.axis])
    what = "inputs" if candidate.nodes[0].op_type in groups.MATRIX_PRODUCTS else "input channels of a group"
    if length % masks.GROUP:
        return f"its {length} {what} are no multiple of {masks.GROUP}"
    return ""
