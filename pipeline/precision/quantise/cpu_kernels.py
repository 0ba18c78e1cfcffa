"""What ONNX Runtime's CPU provider fuses to its own loss, or stumbles over, written such that it does not."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.precision import groups
from enginesmith.pipeline.precision.quantise.writing import Writer

if TYPE_CHECKING:
    import onnx_ir as ir

_STANDARD = ("", "ai.onnx")


def keep_sums_apart(model: "ir.Model", readers: Collection[str]) -> int:
    """Write Add as Sum where one of these operators reads it; how often that was.

    ONNX Runtime makes SkipLayerNormalization and BiasGelu of such an Add and what follows, and takes longer for them
    than for the two: BERT-base in int8 on one thread (1.31, sequence 128, AVX-512 with VNNI) spends 11.7 ms on the one
    instead of 2.4, and 4.5 ms on the other instead of 3.7. It does not look for Sum, which computes the same.
    """
    count = 0
    for node in model.graph:
        value = node.inputs[0] if node.op_type in readers and node.domain in _STANDARD else None
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type == "Add" and producer.domain in _STANDARD:
            producer.op_type = "Sum"
            count += 1
    return count


def keep_clamps_apart(model: "ir.Model") -> int:
    """Write a Relu or Clip behind a quantised MatMul or Gemm as Max and Min; how often that was.

    ONNX Runtime 1.31 takes a clamp for part of the product, and where it cannot be, as no QuantizeLinear that includes
    it follows, leaves the product in floats behind a weight that is dequantised at every call.
    """
    writer = Writer(model.graph)
    count = 0
    for node in list(model.graph):
        if node.op_type not in groups.MATRIX_PRODUCTS or not _dequantised(node.inputs[1]):
            continue
        clamp, index = groups.only_reader(node.outputs[0])
        if clamp is None or index or clamp.op_type not in ("Relu", "Clip"):
            continue
        reader, _ = groups.only_reader(clamp.outputs[0])
        if reader is None or reader.op_type != "QuantizeLinear":
            _write_out(clamp, writer)
            count += 1
    return count


def _dequantised(value: "ir.Value | None") -> bool:
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "DequantizeLinear"


def _write_out(clamp: "ir.Node", writer: Writer) -> None:
    value = clamp.inputs[0]
    bounds = [*clamp.inputs[1:], None, None][:2]
    if clamp.op_type == "Relu":
        bounds = [writer.shared("zero", np.zeros((), np.float32)), None]
    for operator, bound in zip(("Max", "Min"), bounds, strict=True):
        if bound is not None:
            node = writer.node(operator, [value, bound], [f"{clamp.outputs[0].name}_{operator}"], like=clamp)
            writer.graph.insert_before(clamp, node)
            value = node.outputs[0]
    if value is not None and value is not clamp.inputs[0]:
        writer.replace(clamp, [value])
