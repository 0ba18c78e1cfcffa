"""Dynamic quantisation for CPUs: weights in int8 beforehand, activations in uint8 as they come, no calibration.

A MatMul or Gemm becomes DynamicQuantizeLinear, MatMulInteger, Cast and a product with both scales, which ONNX Runtime
makes one kernel of; values that several products read are quantised once. An LSTM becomes ONNX Runtime's own
DynamicQuantizeLSTM. Convolutions are left alone: ConvInteger is slower than what it replaces.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.passes.quantize import bias_correction, layers, quantizers
from enginesmith.pipeline.passes.quantize.layers import QuantizableOp
from enginesmith.pipeline.passes.quantize.qdq import (
    ON_REQUEST,
    Correct,
    Quantised,
    prepare,
    require_opset,
    require_products,
)
from enginesmith.pipeline.passes.quantize.quantizers import Narrow
from enginesmith.pipeline.passes.quantize.writer import NO_ATTRIBUTES, Attributes, Writer
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


_NAME = "int8-dynamic"
_OPSET = 11
"""The first that has DynamicQuantizeLinear."""
_WEIGHT, _BIAS, _RECURRENCE = 1, 2, 2
_OPERATORS = (*layers.MATRIX_PRODUCTS, "LSTM")
_LSTM_INPUTS = 8
_FLOAT = 1
"""Of ``TensorProto.DataType``."""


@dataclass(frozen=True)
class Settings:
    """How weights are quantised."""

    weight_bits: int = 8
    """7 keeps weights within ±63: processors without VNNI add two products in 16 bits, and saturate."""
    per_channel: bool = True
    keep: frozenset[str] = frozenset()
    """Names of groups that stay in floating point."""


def quantise(model: "ir.Model", settings: Settings, correct: Correct | None = None) -> Quantised:
    """Quantise the matrix products and LSTMs of a float32 graph in place, for ONNX Runtime on CPUs.

    Raises:
        InvalidGraph: it is quantised already, or has neither with constant weights.
        UsageError: ``keep`` names groups that there are none of.
    """
    require_opset(model, _OPSET, _NAME)
    found = prepare(model, _NAME, settings.keep)
    nodes = {str(node.name): node for node in model.graph}
    formless = {group.name: why for group in found if (why := _formless(group, nodes[group.name]))}
    require_products(found, _NAME, [group for group in found if group.name not in formless], _OPERATORS)
    left = {group.name: ON_REQUEST for group in found if group.name in settings.keep}
    left |= formless
    products = _Products(Writer(model.graph), settings, correct)
    for group in found:
        if group.name not in left:
            products.quantise(group, nodes[group.name])
    products.writer.finish(model)
    return Quantised(0, found, left)


def _formless(group: QuantizableOp, node: "ir.Node") -> str:
    """Explain why a group has no dynamic form; empty if it has one."""
    if group.operator == "LSTM":
        return _lstm_problem(node)
    if group.reason:
        return group.reason
    if group.operator not in layers.MATRIX_PRODUCTS:
        return f"{group.operator} is slower with activations quantised as they come"
    weight = layers.tensor(node.inputs[_WEIGHT])
    assert weight is not None, group
    if len(weight.shape) != 2:
        return "its weight is no matrix"
    if node.attributes.get_int("transA", 0):
        return "its activations are transposed"
    return "" if weight.numpy().any() else "its weight is all zero"


def _lstm_problem(node: "ir.Node") -> str:
    import onnx_ir as ir

    found = [layers.tensor(value) for value in node.inputs[_WEIGHT : _RECURRENCE + 1]]
    if len(found) != 2 or any(one is None or one.dtype != ir.DataType.FLOAT for one in found):
        return "its weights are not constants of float32"
    return "its layout has batches first" if node.attributes.get_int("layout", 0) else ""


class _Products:
    """Replaces products, one at a time."""

    def __init__(self, writer: Writer, settings: Settings, correct: Correct | None) -> None:
        self.writer = writer
        self._settings, self._correct = settings, correct
        self._activations: dict[ir.Value, list[ir.Value]] = {}
        self._stored: dict[tuple[object, ...], tuple[ir.Value, ir.Value]] = {}

    def quantise(self, group: QuantizableOp, node: "ir.Node") -> None:
        """Put the quantised form of a product in its place; what it writes keeps its name."""
        if group.operator == "LSTM":
            self._replace_lstm(node)
        else:
            self._replace_product(group, node)

    def _replace_product(self, group: QuantizableOp, node: "ir.Node") -> None:
        data, weight = (_present(value) for value in node.inputs[:2])
        levels, scale = self._matrix(group, node, weight)
        numbers, step, zero = self._quantised(data, node)
        product = self._new(node, "MatMulInteger", [numbers, levels, zero], "integer", name=group.name)
        cast = self._new(node, "Cast", [product], "cast", attributes={"to": _FLOAT})
        last = self._new(node, "Mul", [cast, self._new(node, "Mul", [step, scale], "scales")], "product")
        if len(node.inputs) > _BIAS and (bias := node.inputs[_BIAS]) is not None:
            last = self._new(node, "Add", [last, self._bias(node, bias)], "sum")
        self.writer.replace(node, [last])

    def _matrix(self, group: QuantizableOp, node: "ir.Node", value: "ir.Value") -> "tuple[ir.Value, ir.Value]":
        """Return a weight as inputs × outputs in int8, and its scale, times what Gemm multiplies by."""
        transposed = bool(node.attributes.get_int("transB", 0))
        factor = node.attributes.get_float("alpha", 1.0)
        key = (value, transposed, factor)
        if key not in self._stored or self._correct is not None:
            weight = layers.tensor(value)
            assert weight is not None, group
            matrix = weight.numpy().T if transposed else weight.numpy()
            narrow = self._narrow(matrix, 1 if self._settings.per_channel else None)
            if self._correct is not None:
                wide = narrow.wide()
                bias_correction.add(node, self._correct(node, weight.numpy(), wide.T if transposed else wide))
            if key not in self._stored:
                levels = self.writer.initialiser(f"{value.name}_quantized", narrow.levels)
                scale = self.writer.initialiser(f"{value.name}_scale", narrow.scale * np.float32(factor))
                self._stored[key] = levels, scale
        return self._stored[key]

    def _narrow(self, weight: Array, axis: int | None) -> Narrow:
        return quantizers.symmetric(weight, axis, "int8", "fp32", self._settings.weight_bits)

    def _quantised(self, data: "ir.Value", reader: "ir.Node") -> "list[ir.Value]":
        """Return numbers, scale and zero point of an activation."""
        if data not in self._activations:
            names = [f"{data.name}_{part}" for part in ("quantized", "scale", "zero_point")]
            node = self.writer.node("DynamicQuantizeLinear", [data], names, like=reader)
            self.writer.graph.insert_before(reader, node)
            self._activations[data] = list(node.outputs)
        return self._activations[data]

    def _bias(self, node: "ir.Node", bias: "ir.Value") -> "ir.Value":
        factor = node.attributes.get_float("beta", 1.0)
        if factor == 1.0:
            return bias
        return self._new(node, "Mul", [bias, self.writer.shared("beta", np.array(factor, np.float32))], "bias")

    def _new(
        self,
        node: "ir.Node",
        operator: str,
        inputs: "list[ir.Value]",
        part: str,
        *,
        attributes: Attributes = NO_ATTRIBUTES,
        name: str = "",
    ) -> "ir.Value":
        """Insert one of the operators that a node is made of, in front of it."""
        output = f"{node.outputs[0].name}_{part}"
        new = self.writer.node(operator, inputs, [output], attributes=attributes, like=node, name=name)
        self.writer.graph.insert_before(node, new)
        return new.outputs[0]

    def _replace_lstm(self, node: "ir.Node") -> None:
        given = [*node.inputs, *[None] * (_LSTM_INPUTS - len(node.inputs))]
        inputs, scale = self._gates(_present(given[_WEIGHT]))
        state, state_scale = self._gates(_present(given[_RECURRENCE]))
        zeros = self.writer.shared("gate_zero_points", np.zeros(_shape(scale), np.int8))
        given[_WEIGHT : _RECURRENCE + 1] = [inputs, state]
        outputs = [f"{value.name}_dynamic" for value in node.outputs]
        new = self.writer.node(
            "DynamicQuantizeLSTM",
            [*given, scale, zeros, state_scale, zeros],
            outputs,
            domain="com.microsoft",
            like=node,
            name=str(node.name),
        )
        new.attributes.update({name: one for name, one in node.attributes.items() if name != "layout"})
        self.writer.graph.insert_before(node, new)
        self.writer.replace(node, new.outputs)

    def _gates(self, value: "ir.Value") -> "tuple[ir.Value, ir.Value]":
        """Return a weight as directions × inputs × gates in int8, with one scale for each direction.

        Scales for each output of each gate are allowed too, and take ONNX Runtime 8 % longer.
        """
        weight = layers.tensor(value)
        assert weight is not None, value
        numbers = weight.numpy()
        narrow = self._narrow(numbers, 0)
        levels = np.ascontiguousarray(narrow.levels.swapaxes(1, 2))
        return (
            self.writer.initialiser(f"{value.name}_quantized", levels),
            self.writer.initialiser(f"{value.name}_scale", narrow.scale),
        )


def _present(value: "ir.Value | None") -> "ir.Value":
    assert value is not None
    return value


def _shape(value: "ir.Value") -> tuple[int, ...]:
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())
