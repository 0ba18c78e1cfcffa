"""Decide which nodes of a float32 graph go to float16 or bfloat16, which stay and why, and which may do either.

What stays is what PyTorch's autocast keeps in float32 too: operators that add up many numbers, and functions that are
so steep that the rounding of what goes in, or the range of what comes out, shows in the result.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


# Which inputs and outputs of a node can be float16 or bfloat16: what the operator's schema says.

QUANTISE, DEQUANTISE = "QuantizeLinear", "DequantizeLinear"
_FIXED = {"Resize": (1,)}
"""Inputs that could be lower and are positions, which need every bit."""
_MAKERS = ("Cast", "ConstantOfShape", DEQUANTISE)
"""Operators whose output has a type of its own, which an attribute or a scale decides."""


@dataclass(frozen=True)
class Slots:
    """Positions of the float32 inputs and outputs of a node that change their type with it."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)


def is_float(value: "ir.Value | None") -> bool:
    """Tell whether it is a tensor of float32."""
    import onnx_ir as ir

    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.FLOAT


def is_standard(node: "ir.Node") -> bool:
    """Tell whether it is an operator of ONNX itself."""
    return node.domain in ("", "ai.onnx")


def slots(node: "ir.Node", opset: int, dtype: str) -> Slots:
    """List what can change its type to ``dtype``, ONNX's name; nothing, if the schema is unknown.

    An output whose type follows from no input is left alone, unless it is known how to choose it.
    """
    import onnx

    if not is_standard(node) or not onnx.defs.has(node.op_type, opset, ""):
        return Slots()
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    able = {one.type_param_str for one in schema.type_constraints if f"tensor({dtype})" in one.allowed_type_strs}
    taken = {index: _formal(schema.inputs, index) for index, value in enumerate(node.inputs) if is_float(value)}
    given = {index: _formal(schema.outputs, index) for index, value in enumerate(node.outputs) if is_float(value)}
    inputs = {index for index, kind in taken.items() if kind in able and index not in _FIXED.get(node.op_type, ())}
    follow = {_formal(schema.inputs, index) for index in inputs}
    outputs = {index for index, kind in given.items() if kind in able and (kind in follow or node.op_type in _MAKERS)}
    if given and not outputs:
        return Slots()
    return Slots(frozenset(inputs), frozenset(outputs))


def _formal(parameters: "Sequence[onnx.defs.OpSchema.FormalParameter]", index: int) -> str:
    """Return type of a parameter; the last of a variadic operator stands for all that follow."""
    return parameters[min(index, len(parameters) - 1)].type_str


def dequantisers(node: "ir.Node") -> "Iterator[ir.Node]":
    """Find DequantizeLinear nodes that read what a QuantizeLinear makes, seen through nodes that move it."""
    waiting = list(node.outputs)
    for value in waiting:
        for reader, index in value.uses():
            if reader.op_type == DEQUANTISE:
                yield reader
            elif index == 0:
                waiting += [one for one in reader.outputs if one.dtype == value.dtype and one not in waiting]


# What float16 can hold: numbers up to 65504, and none that is smaller than 6.1e-5 with all its bits.

LARGEST = float(np.finfo(np.float16).max)
MARGIN = 2.0
"""What was seen may be exceeded by other data: float16 has to hold this many times as much."""
MASKS = {"Attention": (3,)}
"""Inputs that are added to scores: numbers beyond the range mean "not this one", and so do the lowest within it."""
_SMALLEST = float(np.finfo(np.float16).tiny)
_BOUNDS = {"Clip": (1, 2), "Pad": (2,)}
"""Inputs that say the same when they are brought to the end of the range."""
_SCALES = {"QuantizeLinear": (1,), "DequantizeLinear": (1,)}
_SUMS = ("Add", "Sub", "Sum")
_BIASES = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "GRU": 3, "LSTM": 3, "RNN": 3}
_MOVE = frozenset(
    {
        *("Concat", "DequantizeLinear", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad"),
        *("QuantizeLinear", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where"),
    }
)


class Range:
    """Goes through a graph in its order, and knows which values are too large: seen to be, or made by constants."""

    def __init__(self, inputs: "Iterable[ir.Value]", largest: Mapping[str, float]) -> None:
        self._largest = largest
        self._beyond: dict[ir.Value, float] = {}
        self._reaches: dict[ir.TensorProtocol, float] = {}
        for value in inputs:
            self._note(value)

    def complaint(self, node: "ir.Node", found: Slots) -> str:
        """Explain why the node cannot be in float16; empty if it can."""
        spared = (*MASKS.get(node.op_type, ()), *_BOUNDS.get(node.op_type, ()))
        for index, value in enumerate(node.inputs):
            if value in self._beyond and index not in spared:
                return _too_large(value.name, self._beyond[value])
        for index, name, tensor in _constants(node, found):
            reach = self._reach(tensor)
            if reach > LARGEST and index not in spared:
                return _too_large(name, reach)
            if 0 < reach < _SMALLEST and not _may_vanish(node, index, tensor):
                return f"the constant {name!r} is at most {reach:.3g}, and all but vanishes in float16"
        for value in node.outputs:
            reach = self._largest.get(value.name or "", 0.0)
            if reach > LARGEST / MARGIN and is_float(value):
                return _too_large(value.name, reach)
        return ""

    def follow(self, node: "ir.Node", found: Slots) -> None:
        """Note which outputs are too large: by what was seen, else because a constant or what is moved is."""
        moved = [self._beyond[value] for value in node.inputs if value in self._beyond and node.op_type in _MOVE]
        reaches = (
            [] if node.op_type in (*_BOUNDS, "Div") else [self._reach(one) for _, _, one in _constants(node, found)]
        )
        guess = max((*moved, *(reach for reach in reaches if reach > LARGEST)), default=0.0)
        for value in node.outputs:
            self._note(value, guess)

    def _note(self, value: "ir.Value", guess: float = 0.0) -> None:
        reach = self._largest.get(value.name or "", guess) if is_float(value) else guess
        if reach > LARGEST / MARGIN:
            self._beyond[value] = reach

    def _reach(self, tensor: "ir.TensorProtocol") -> float:
        if tensor not in self._reaches:
            self._reaches[tensor] = _finite_reach(tensor)
        return self._reaches[tensor]


def _too_large(name: str | None, reach: float) -> str:
    return f"{name!r} reaches {reach:.3g}, and float16 ends at {LARGEST:.0f}"


def _constants(node: "ir.Node", found: Slots) -> "Iterator[tuple[int, str, ir.TensorProtocol]]":
    """List constants that would change their type: position, name, content."""
    import onnx_ir as ir

    for index in sorted(found.inputs):
        value = node.inputs[index]
        if value is not None and value.const_value is not None:
            yield index, value.name or "", value.const_value
    fill = node.attributes.get("value")
    if node.op_type == "ConstantOfShape" and fill is not None and fill.as_tensor().dtype == ir.DataType.FLOAT:
        yield -1, f"{node.name}'s fill", fill.as_tensor()


def _may_vanish(node: "ir.Node", index: int, tensor: "ir.TensorProtocol") -> bool:
    """Whether nothing is lost with it: scales are raised, and small biases are noise; a lone ε guards a division."""
    if index in _SCALES.get(node.op_type, ()):
        return True
    added = node.op_type in _SUMS or index >= _BIASES.get(node.op_type, len(node.inputs))
    return added and tensor.size > 1


def _finite_reach(tensor: "ir.TensorProtocol") -> float:
    """Compute the largest finite magnitude of a constant; 0 if it is empty."""
    array = tensor.numpy()
    if not array.size:
        return 0.0
    least, most = float(array.min()), float(array.max())
    if not np.isfinite((least, most)).all():
        return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
    return max(-least, most)


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
    """Explain why its operator stays in float32; empty if that is no reason."""
    import onnx_ir as ir

    if has_body(node):
        return "has a body of its own"
    if not is_standard(node):
        return f"its types are not known: it is of the domain {node.domain!r}"
    if node.op_type in _REASONS:
        return _REASONS[node.op_type]
    if dtype == "bfloat16" and node.op_type in _STAY_IN_BFLOAT16:
        return "engines have it in float16 and not in bfloat16"
    if any(value is not None and value.type is None for value in (*node.inputs, *node.outputs)):
        return "its types are not known: shape inference does not get there"
    if not all(value is None or isinstance(value.type, ir.TensorType) for value in (*node.inputs, *node.outputs)):
        return "works on sequences"
    return "" if found else f"{node.op_type} of opset {opset} has no {dtype} form"


def has_body(node: "ir.Node") -> bool:
    """Tell whether it is a branch or a loop."""
    import onnx_ir as ir

    return any(one.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for one in node.attributes.values())


def is_product(node: "ir.Node") -> bool:
    """Tell whether it multiplies matrices or looks up a large table: what makes a graph fast or large.

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
