"""Graphs for Q/DQ pairs: made, quantized on ranges of random feeds, and searched for the pairs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from enginesmith.calibration.ranges import METHODS, Ranges, TensorRange
from enginesmith.pipeline.passes.quantize.layers import Quantized
from enginesmith.pipeline.passes.quantize.qdq import Settings, quantize
from enginesmith.pipeline.system.cpu import int8_weight_bits
from enginesmith.pipeline.tensors import Array
from graphs import NOWHERE, parse_graph, run_model

CPU, GPU = Settings(placement="inputs+outputs"), Settings(placement="inputs")
RUNNABLE = replace(CPU, weight_bits=int8_weight_bits())
"""For kernels that are run: weights that this processor multiplies without overflow."""


def make_random(seed: int = 0) -> Callable[..., Array]:
    """Return a function that draws weights of a shape, scaled by what they add up."""
    generator = np.random.default_rng(seed)

    def random(*shape: int) -> Array:
        return (generator.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)

    return random


_random = make_random()
RESIDUAL = """net (float[n, 3, 16, 16] x) => (float[n, 5] y) {
    c0 = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
    r0 = Relu(c0)
    p0 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r0)
    c1 = Conv <pads = [1, 1, 1, 1]> (p0, w1, b1)
    r1 = Clip(c1, zero, six)
    c2 = Conv <pads = [1, 1, 1, 1], group = 8> (r1, w2)
    s = Conv (p0, w3, b1)
    a = Add(c2, s)
    r2 = Relu(a)
    g = GlobalAveragePool(r2)
    f = Flatten(g)
    y = Gemm <transB = 1> (f, w4, b4)
}"""
RESIDUAL_WEIGHTS = {
    "w0": _random(8, 3, 3, 3),
    "b0": _random(8),
    "w1": _random(8, 8, 3, 3) * 6,
    "b1": _random(8),
    "w2": _random(8, 1, 3, 3),
    "w3": _random(8, 8, 1, 1),
    "w4": _random(5, 8),
    "b4": _random(5),
    "zero": np.float32(0),
    "six": np.float32(6),
}


def residual() -> ir.Model:
    """Make a small network with a residual sum."""
    return parse_graph(RESIDUAL, **RESIDUAL_WEIGHTS)


def exact_values(model: ir.Model, inputs: dict[str, Array]) -> dict[str, Array]:
    """Compute every float value, none of them fused away."""
    return run_model(model, inputs, optimized=False, every_value=True)


def feeds(model: ir.Model) -> dict[str, Array]:
    """Draw inputs; dimensions without a size are 4."""
    rng = np.random.default_rng(1)
    shapes = {
        str(value.name): [dim if isinstance(dim, int) else 4 for dim in value.shape or ()]
        for value in model.graph.inputs
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def ranges(model: ir.Model, **given: tuple[float, float]) -> Ranges:
    """Measure least and greatest numbers on random feeds, but for those that are given."""
    inputs = feeds(model)
    found = {
        name: (float(array.min()), float(array.max()))
        for name, array in {**inputs, **exact_values(model, inputs)}.items()
    }
    tensors = {
        name: TensorRange(minimum=low, maximum=high, count=1, amax=dict.fromkeys(METHODS, max(-low, high)))
        for name, (low, high) in {**found, **given}.items()
    }
    return Ranges(model_sha256="", provenance=NOWHERE, tensors=tensors)


def make_quantized(make: Callable[[], ir.Model], settings: Settings) -> tuple[ir.Model, Quantized]:
    """Quantize a model on its own ranges, and check that it is valid."""
    model = make()
    found = quantize(model, ranges(make()), settings)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model, found


def find_node(model: ir.Model, output: str) -> ir.Node:
    """Find the node that writes a value; behind the pair, if it is one that is an output of the graph."""
    return next(one for one in model.graph if any(value.name == output for value in one.outputs))


def operator_before(model: ir.Model, output: str, index: int = 0) -> str:
    """Name the operator in front of an input of the node that writes a value; empty, if there is none."""
    value = find_node(model, output).inputs[index]
    producer = value.producer()
    return "" if producer is None else producer.op_type


def grid(model: ir.Model, value: str) -> tuple[float, int, np.dtype[Any]]:
    """Find scale, zero point and type that a value is rounded with."""
    (quantizer,) = [n for n in model.graph if n.op_type == "QuantizeLinear" and n.inputs[0].name == value]  # type: ignore[union-attr]
    scale, zero = (one.const_value.numpy() for one in quantizer.inputs[1:])  # type: ignore[union-attr]
    return float(scale), int(zero), zero.dtype
