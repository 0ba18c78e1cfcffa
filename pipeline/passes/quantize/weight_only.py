"""int4 weights: matrices in blocks of inputs that share a scale, computed with in floating point.

They stand in front of MatMul and Gemm as inputs × outputs with a blocked DequantizeLinear along the inputs: ONNX
Runtime makes MatMulNBits of that, TensorRT a product that reads int4. Tables that are gathered from are left alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.calibration.ranges import Ranges
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
from enginesmith.pipeline.passes.quantize.quantizers import Rest
from enginesmith.pipeline.passes.quantize.writer import Stored, Writer
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


_NAME = "int4-weights"
_OPSET = 21
"""The first whose DequantizeLinear has blocks and int4."""
_WEIGHT = 1


@dataclass(frozen=True)
class Settings:
    """How weights are quantised."""

    rest: Rest = "fp32"
    """What the scales will be stored in."""
    keep: frozenset[str] = frozenset()
    """Names of groups that stay in floating point."""


def quantise(
    model: "ir.Model", settings: Settings, ranges: Ranges | None = None, correct: Correct | None = None
) -> Quantised:
    """Quantise the weights of a float32 graph in place; with ranges, errors count by the inputs' mean square.

    Raises:
        InvalidGraph: it is quantised already, or has no matrix product with a constant weight.
        UsageError: ``keep`` names groups that there are none of.
    """
    require_opset(model, _OPSET, _NAME)
    found = prepare(model, _NAME, settings.keep)
    require_products(found, _NAME, [group for group in found if not _formless(group)], layers.MATRIX_PRODUCTS)
    nodes = {str(node.name): node for node in model.graph}
    left = {group.name: why for group in found if (why := _reason(group, nodes[group.name], settings))}
    writer = Writer(model.graph)
    done: dict[tuple[object, ...], Stored] = {}
    for group in found:
        if group.name not in left:
            _quantise(group, nodes[group.name], writer, done, _Numbers(settings, ranges, correct))
    writer.finish(model)
    return Quantised(0, found, left)


@dataclass(frozen=True)
class _Numbers:
    settings: Settings
    ranges: Ranges | None
    correct: Correct | None

    def importance(self, group: QuantizableOp, length: int) -> Array | None:
        """Compute the importance of each input; None where that is not known."""
        known = self.ranges.channels.get(group.activations[0]) if self.ranges and group.activations else None
        if known is None or len(known.mean_square) != length or not any(known.mean_square):
            return None
        return np.array(known.mean_square)


def _formless(group: QuantizableOp) -> str:
    if group.reason:
        return group.reason
    return "" if group.operator in layers.MATRIX_PRODUCTS else "only matrix products have int4 weights"


def _reason(group: QuantizableOp, node: "ir.Node", settings: Settings) -> str:
    """Explain why a group stays in floating point; empty if it does not."""
    if why := _formless(group):
        return why
    if group.name in settings.keep:
        return ON_REQUEST
    weight = layers.tensor(node.inputs[_WEIGHT])
    assert weight is not None, group
    shape = tuple(weight.shape.numpy())
    if len(shape) != 2:
        return f"its weight has {len(shape)} dimensions, and blocks are of matrices"
    length = shape[1] if _transposed(node) else shape[0]
    if not quantizers.block_size(length):
        return f"its {length} inputs do not divide into blocks of {', '.join(map(str, quantizers.BLOCKS))}"
    return ""


def _transposed(node: "ir.Node") -> bool:
    return node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))


def _quantise(
    group: QuantizableOp, node: "ir.Node", writer: Writer, done: dict[tuple[object, ...], Stored], numbers: _Numbers
) -> None:
    import onnx_ir as ir

    value = node.inputs[_WEIGHT]
    weight = layers.tensor(value)
    assert value is not None, group
    assert weight is not None, group
    matrix = weight.numpy().T if _transposed(node) else weight.numpy()
    importance = numbers.importance(group, matrix.shape[0])
    key = (value, _transposed(node), None if importance is None else importance.tobytes())
    if key not in done or numbers.correct is not None:
        narrow = quantizers.blocked(matrix, quantizers.block_size(matrix.shape[0]), numbers.settings.rest, importance)
        if numbers.correct is not None:
            wide = narrow.wide()
            bias_correction.add(node, numbers.correct(node, weight.numpy(), wide.T if _transposed(node) else wide))
        if key not in done:
            done[key] = writer.store(str(value.name), narrow)
    if _transposed(node):
        node.attributes["transB"] = ir.AttrInt64("transB", 0)
    node.replace_input_with(_WEIGHT, writer.dequantised(done[key], node))
