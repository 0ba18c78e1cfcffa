"""Which inputs and outputs of a node can be float16 or bfloat16: what the operator's schema says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

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
    """Whether it is a tensor of float32."""
    import onnx_ir as ir

    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.FLOAT


def is_standard(node: "ir.Node") -> bool:
    """Whether it is an operator of ONNX itself."""
    return node.domain in ("", "ai.onnx")


def slots(node: "ir.Node", opset: int, dtype: str) -> Slots:
    """What can change its type; ``dtype`` is ONNX's name: float16 or bfloat16. Nothing, if the schema is unknown.

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
    """Type of a parameter; the last of a variadic operator stands for all that follow."""
    return parameters[min(index, len(parameters) - 1)].type_str


def dequantisers(node: "ir.Node") -> "Iterator[ir.Node]":
    """DequantizeLinear nodes that read what a QuantizeLinear makes, seen through nodes that move it."""
    waiting = list(node.outputs)
    for value in waiting:
        for reader, index in value.uses():
            if reader.op_type == DEQUANTISE:
                yield reader
            elif index == 0:
                waiting += [one for one in reader.outputs if one.dtype == value.dtype and one not in waiting]
