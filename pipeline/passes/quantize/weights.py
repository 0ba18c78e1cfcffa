"""Quantize without calibration: int8 weights for activations quantized as they come, and int4 weights.

int8, for CPUs: a MatMul or Gemm becomes DynamicQuantizeLinear, MatMulInteger, Cast and a product with both scales,
which ONNX Runtime makes one kernel of; values that several products read are quantized once. An LSTM becomes ONNX
Runtime's own DynamicQuantizeLSTM. Convolutions are left alone: ConvInteger is slower than what it replaces.

int4: matrices in blocks of inputs that share a scale, computed with in floating point. They stand in front of MatMul
and Gemm as inputs × outputs with a blocked DequantizeLinear along the inputs: ONNX Runtime makes MatMulNBits of that,
TensorRT a product that reads int4. Tables that are gathered from are left alone.
"""

from collections.abc import Sequence

import numpy as np

from enginesmith.calibration.ranges import Ranges
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.quantize import layers, quantizers
from enginesmith.pipeline.passes.quantize.layers import BIAS, WEIGHT, Correct, QuantizableOp, Quantized
from enginesmith.pipeline.passes.quantize.qdq import Settings
from enginesmith.pipeline.passes.quantize.quantizers import Narrow
from enginesmith.pipeline.passes.quantize.writer import NO_ATTRIBUTES, Attributes, Writer
from enginesmith.pipeline.tensors import Array

_DYNAMIC, _INT4 = "int8-dynamic", "int4-weights"
_RECURRENCE = 2
_LSTM_INPUTS = 8
_FLOAT = 1  # of TensorProto.DataType


def quantize_dynamically(model: "ir.Model", settings: Settings, correct: Correct | None = None) -> Quantized:
    """Quantize the matrix products and LSTMs of a float32 graph in place, for ONNX Runtime on CPUs.

    Raises:
        InvalidGraph: it is quantized already, or has neither with constant weights.
        UsageError: ``keep`` names groups that there are none of.
    """
    groups = layers.prepare(model, _DYNAMIC, settings.keep)
    nodes = {str(node.name): node for node in model.graph}
    formless = {group.name: why for group in groups if (why := _explain_no_dynamic_form(group, nodes[group.name]))}
    usable = [group for group in groups if group.name not in formless]
    layers.require_products(model, groups, _DYNAMIC, usable, (*layers.MATRIX_PRODUCTS, "LSTM"))
    left = {group.name: layers.ON_REQUEST for group in groups if group.name in settings.keep} | formless
    products = _DynamicProducts(Writer(model.graph), settings, correct)
    for group in groups:
        if group.name not in left:
            replace = products.replace_lstm if group.operator == "LSTM" else products.replace_matrix_product
            replace(nodes[group.name])
    products.writer.finish(model)
    return Quantized(0, groups, left)


def _explain_no_dynamic_form(group: QuantizableOp, node: "ir.Node") -> str:
    """Explain why a group has no dynamic form; empty if it has one."""
    if group.operator == "LSTM":
        weights = [edit.read_constant(value) for value in node.inputs[WEIGHT : _RECURRENCE + 1]]
        if len(weights) != 2 or any(weight is None or weight.dtype != ir.DataType.FLOAT for weight in weights):
            return "its weights are not constants of float32"
        return "its layout has batches first" if node.attributes.get_int("layout", 0) else ""
    if group.reason:
        return group.reason
    if group.operator not in layers.MATRIX_PRODUCTS:
        return f"{group.operator} is slower with activations quantized as they come"
    weight = layers.read_weight(node)
    if weight.ndim != 2:
        return "its weight is no matrix"
    if node.attributes.get_int("transA", 0):
        return "its activations are transposed"
    return "" if weight.any() else "its weight is all zero"


class _DynamicProducts:
    """Replaces products, one at a time, by their dynamic forms; what they write keeps its name."""

    def __init__(self, writer: Writer, settings: Settings, correct: Correct | None) -> None:
        self.writer = writer
        self._settings, self._correct = settings, correct
        self._activations: dict[ir.Value, list[ir.Value]] = {}
        self._rounded: dict[tuple[ir.Value, bool], Narrow] = {}

    def replace_matrix_product(self, node: "ir.Node") -> None:
        """Put the quantized form of a MatMul or Gemm in its place."""
        levels, scale = self._store_matrix(node)
        numbers, step, zero = self._quantize_activation(node)
        product = self._insert(node, "MatMulInteger", [numbers, levels, zero], "integer", name=str(node.name))
        cast = self._insert(node, "Cast", [product], "cast", attributes={"to": _FLOAT})
        last = self._insert(node, "Mul", [cast, self._insert(node, "Mul", [step, scale], "scales")], "product")
        if (bias := edit.find_input(node, BIAS)) is not None:
            if (factor := node.attributes.get_float("beta", 1.0)) != 1.0:
                beta = self.writer.share_constant("beta", np.array(factor, np.float32))
                bias = self._insert(node, "Mul", [bias, beta], "bias")
            last = self._insert(node, "Add", [last, bias], "sum")
        self.writer.replace(node, [last])

    def replace_lstm(self, node: "ir.Node") -> None:
        """Put ONNX Runtime's form of an LSTM in its place."""
        given = [*node.inputs, *[None] * (_LSTM_INPUTS - len(node.inputs))]
        given[WEIGHT], scale = self._store_gates(node, WEIGHT)
        given[_RECURRENCE], state_scale = self._store_gates(node, _RECURRENCE)
        zeros = self.writer.share_constant("gate_zero_points", np.zeros(layers.read_weight(node).shape[0], np.int8))
        new = self.writer.node(
            "DynamicQuantizeLSTM",
            [*given, scale, zeros, state_scale, zeros],
            [f"{value.name}_dynamic" for value in node.outputs],
            domain="com.microsoft",
            before=node,
            name=str(node.name),
        )
        new.attributes.update({name: attribute for name, attribute in node.attributes.items() if name != "layout"})
        self.writer.replace(node, new.outputs)

    def _store_matrix(self, node: "ir.Node") -> "tuple[ir.Value, ir.Value]":
        """Return a weight as inputs × outputs in int8, and its scale, times what Gemm multiplies by."""
        value, transposed = layers.get_input(node, WEIGHT), bool(node.attributes.get_int("transB", 0))
        factor, weight = node.attributes.get_float("alpha", 1.0), layers.read_weight(node)
        if (value, transposed) not in self._rounded:
            matrix = weight.T if transposed else weight
            narrow = quantizers.quantize_symmetrically(matrix, 1, "int8", "fp32", self._settings.weight_bits)
            self._rounded[value, transposed] = narrow
        narrow = self._rounded[value, transposed]
        if self._correct is not None:
            wide = narrow.wide()
            self._correct(node, weight, wide.T if transposed else wide)
        levels = self.writer.share_constant(f"{value.name}_quantized", narrow.levels)
        return levels, self.writer.share_constant(f"{value.name}_scale", narrow.scale * np.float32(factor))

    def _store_gates(self, node: "ir.Node", index: int) -> "tuple[ir.Value, ir.Value]":
        """Return a weight as directions × inputs × gates in int8, with one scale for each direction.

        Scales for each output of each gate are allowed too, and take ONNX Runtime 8 % longer.
        """
        name, weight = layers.get_input(node, index).name, layers.read_weight(node, index)
        narrow = quantizers.quantize_symmetrically(weight, 0, "int8", "fp32", self._settings.weight_bits)
        levels = self.writer.share_constant(f"{name}_quantized", np.ascontiguousarray(narrow.levels.swapaxes(1, 2)))
        return levels, self.writer.share_constant(f"{name}_scale", narrow.scale)

    def _quantize_activation(self, reader: "ir.Node") -> "list[ir.Value]":
        """Return numbers, scale and zero point of what a product reads."""
        data = layers.get_input(reader, 0)
        if data not in self._activations:
            names = [f"{data.name}_{part}" for part in ("quantized", "scale", "zero_point")]
            node = self.writer.node("DynamicQuantizeLinear", [data], names, before=reader)
            self._activations[data] = list(node.outputs)
        return self._activations[data]

    def _insert(
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
        return self.writer.node(operator, inputs, [output], attributes=attributes, before=node, name=name).outputs[0]


def quantize_to_int4(
    model: "ir.Model", settings: Settings, ranges: Ranges | None = None, correct: Correct | None = None
) -> Quantized:
    """Quantize the weights of a float32 graph in place; with ranges, errors count by the inputs' mean square.

    Raises:
        InvalidGraph: it is quantized already, or has no matrix product with a constant weight.
        UsageError: ``keep`` names groups that there are none of.
    """
    groups = layers.prepare(model, _INT4, settings.keep)
    nodes = {str(node.name): node for node in model.graph}
    usable = [group for group in groups if not group.reason and group.operator in layers.MATRIX_PRODUCTS]
    layers.require_products(model, groups, _INT4, usable, layers.MATRIX_PRODUCTS)
    left = {group.name: why for group in groups if (why := _explain_no_int4_form(group, nodes[group.name], settings))}
    writer = Writer(model.graph)
    readers: dict[tuple[ir.Value, bool], list[ir.Node]] = {}
    for node in (nodes[group.name] for group in groups if group.name not in left):
        transposed = bool(node.attributes.get_int("transB", 0))
        readers.setdefault((layers.get_input(node, WEIGHT), transposed), []).append(node)
    for (value, transposed), products in readers.items():
        weight = layers.read_weight(products[0])
        matrix = weight.T if transposed else weight
        importance = _find_importance(products, ranges, len(matrix))
        narrow = quantizers.blocked(matrix, quantizers.block_size(len(matrix)), settings.rest, importance)
        stored = writer.store(str(value.name), narrow)
        for node in products:
            if correct is not None:
                wide = narrow.wide()
                correct(node, weight, wide.T if transposed else wide)
            if transposed:
                node.attributes["transB"] = ir.AttrInt64("transB", 0)
            node.replace_input_with(WEIGHT, writer.insert_dequantize(stored, node))
    writer.finish(model)
    return Quantized(0, groups, left)


def _find_importance(products: "Sequence[ir.Node]", ranges: Ranges | None, length: int) -> Array | None:
    """Add up the mean squares of each input of all products that share a weight; None where none are known."""
    statistics = [layers.find_channel_statistics(node, ranges) for node in products]
    squares = [np.array(each.mean_square) for each in statistics if each is not None]
    total = sum((each for each in squares if len(each) == length), np.zeros(length))
    return total if total.any() else None


def _explain_no_int4_form(group: QuantizableOp, node: "ir.Node", settings: Settings) -> str:
    """Explain why a group stays in floating point; empty if it does not."""
    if group.reason:
        return group.reason
    if group.operator not in layers.MATRIX_PRODUCTS:
        return "only matrix products have int4 weights"
    if group.name in settings.keep:
        return layers.ON_REQUEST
    shape = layers.read_weight(node).shape
    if len(shape) != 2:
        return f"its weight has {len(shape)} dimensions, and blocks are of matrices"
    length = shape[1] if node.attributes.get_int("transB", 0) else shape[0]
    if not quantizers.block_size(length):
        return f"its {length} inputs do not divide into blocks of {', '.join(map(str, quantizers.BLOCKS))}"
    return ""
