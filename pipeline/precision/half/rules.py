"""Which nodes of a float32 graph go to float16 or bfloat16, which stay and why, and which may do either.

What stays is what PyTorch's autocast keeps in float32 too: operators that add up many numbers, and functions that are
so steep that the rounding of what goes in, or the range of what comes out, shows in the result.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginesmith.pipeline.precision.half.range import Range
from enginesmith.pipeline.precision.half.types import Slots, is_float, is_standard, slots

if TYPE_CHECKING:
    import onnx_ir as ir

_STAY: Mapping[str, tuple[str, ...]] = {
    "a normalisation": (
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization"),
        *("LRN", "MeanVarianceNormalization", "RMSNormalization"),
    ),
    "a softmax": ("LogSoftmax", "NegativeLogLikelihoodLoss", "Softmax", "SoftmaxCrossEntropyLoss"),
    "adds up many numbers": (
        *("CumProd", "CumSum", "Det", "GlobalAveragePool", "GlobalLpPool", "LpPool", "ReduceL1", "ReduceL2"),
        *("ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
    ),
    "a steep function": (
        *("Acosh", "Asinh", "Atanh", "Cosh", "Exp", "Log", "Pow", "Reciprocal", "Sinh", "Softplus", "Sqrt", "Tan"),
    ),
    "works on angles or coordinates": ("AffineGrid", "Cos", "GridSample", "MaxRoiPool", "RoiAlign", "Sin"),
    "draws random numbers": ("Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"),
    "works on spectra": ("DFT", "STFT"),
}
_REASONS = {operator: reason for reason, operators in _STAY.items() for operator in operators}
_STAY_IN_BFLOAT16 = frozenset({"ConvTranspose", "GRU", "HardSwish", "Mish"})
"""What TensorRT-RTX 1.7 builds in float16 and refuses in bfloat16, of the operators that this module lowers."""
_PRODUCTS = frozenset({"Attention", "Conv", "ConvTranspose", "Einsum", "Gemm", "GRU", "LSTM", "MatMul", "RNN"})
_TABLE_SIZE = 1 << 16  # elements; a table of so many that Gather looks up is a weight of the model


@dataclass
class Judged:
    """What is to become of the nodes that read or make float32, in the order of the graph."""

    slots: "dict[ir.Node, Slots]" = field(default_factory=dict)
    low: "dict[ir.Node, None]" = field(default_factory=dict)
    free: "dict[ir.Node, None]" = field(default_factory=dict)
    kept: "dict[ir.Node, str]" = field(default_factory=dict)


def judge(graph: "ir.Graph", opset: int, dtype: str, keep: Collection[str], largest: Mapping[str, float]) -> Judged:
    """Look at every node; ``keep`` and ``largest`` as in :func:`half.lower`, ``dtype`` is ONNX's name."""
    result = Judged()
    ranges = Range(graph.inputs, largest) if dtype == "float16" else None
    for node in graph:
        found = slots(node, opset, dtype)
        if has_body(node) or any(is_float(value) for value in (*node.inputs, *node.outputs)):
            reason = "was asked for" if node.name in keep else why_it_stays(node, found, opset, dtype)
            reason = reason or (ranges.complaint(node, found) if ranges else "")
            if reason:
                result.kept[node] = reason
            else:
                result.slots[node] = found
                (result.low if is_product(node) else result.free)[node] = None
        if ranges:
            ranges.follow(node, found)
    return result


def why_it_stays(node: "ir.Node", found: Slots, opset: int, dtype: str) -> str:
    """What its operator is; empty if that is no reason."""
    import onnx_ir as ir

    if has_body(node):
        return "has a body of its own"
    if not is_standard(node):
        return f"its types are not known: it is of the domain {node.domain!r}"
    if node.op_type in _REASONS:
        return _REASONS[node.op_type]
    if dtype == "bfloat16" and node.op_type in _STAY_IN_BFLOAT16:
        return "TensorRT has it in float16 and not in bfloat16"
    if any(value is not None and value.type is None for value in (*node.inputs, *node.outputs)):
        return "its types are not known: shape inference does not get there"
    if not all(value is None or isinstance(value.type, ir.TensorType) for value in (*node.inputs, *node.outputs)):
        return "works on sequences"
    return "" if found else f"{node.op_type} of opset {opset} has no {dtype} form"


def has_body(node: "ir.Node") -> bool:
    """Whether it is a branch or a loop."""
    import onnx_ir as ir

    return any(one.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for one in node.attributes.values())


def is_product(node: "ir.Node") -> bool:
    """Whether it multiplies matrices or looks up a large table: what makes a graph fast or large.

    An outer product (a contraction over one number, as in rotary embeddings) is none.
    """
    if not is_standard(node):
        return False
    if node.op_type == "Gather":
        table = node.inputs[0]
        return table is not None and table.const_value is not None and table.const_value.size >= _TABLE_SIZE
    return node.op_type in _PRODUCTS and not (node.op_type == "MatMul" and _is_outer(node))


def _is_outer(node: "ir.Node") -> bool:
    left, right = (None if value is None else value.shape for value in node.inputs[:2])
    along_left = left is not None and len(left) > 0 and left[-1] == 1
    return along_left or (right is not None and len(right) > 1 and right[-2] == 1)
