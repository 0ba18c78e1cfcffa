"""Bias correction: what rounding a weight adds to the mean of a product, taken out of the bias.

Nagel, van Baalen, Blankevoort, Welling: Data-Free Quantization Through Weight Equalization and Bias Correction,
2019, arXiv:1906.04721, section 4.2: E[W·x] − E[Ŵ·x] = (W − Ŵ)·E[x].
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.rescale.channels import by_channel, inputs_first
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


# What products add to their results: reading it, and adding to it.

_BIAS = 2


def read(node: "ir.Node") -> Array | None:
    """Return the constant bias that an operator itself adds; None where there is none."""
    return edit.read(node.inputs[_BIAS]) if len(node.inputs) > _BIAS else None


def add(node: "ir.Node", more: Array | None) -> bool:
    """Add a number per output channel to a product's bias, which may be an Add behind it; whether that could be done.

    Conv, ConvTranspose and Gemm get a bias where they have none. Other readers of the same bias keep theirs.
    """
    if more is None:
        return True
    if node.op_type == "MatMul":
        return _add_behind(node, more)
    given = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    bias = read(node)
    if given is not None and bias is None:
        return False
    share = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
    if not share:
        return False
    edit.write(node, _BIAS, (more / share + (0 if bias is None else bias)).astype(np.float32))
    return True


def _add_behind(node: "ir.Node", more: Array) -> bool:
    reader, index = layers.only_reader(node.outputs[0])
    if reader is None or reader.op_type != "Add":
        return False
    index = 1 - index
    bias = edit.read(reader.inputs[index])
    if bias is None or bias.shape != more.shape:
        return False
    edit.write(reader, index, (bias + more).astype(np.float32))
    return True


def correction(
    weight: Array, dequantised: Array, mean: Array, *, inputs_first: bool, groups: int = 1, strides: int = 1
) -> Array:
    """What has to be added to each output channel, float64 of shape [outputs].

    ``mean`` is that of each input channel; ``inputs_first`` says that the first axis of the weights is that of the
    inputs, as in MatMul, ConvTranspose and a Gemm without transB. Every place of a kernel is taken to see the same
    mean, so padding, which is zeros, is ignored. ``strides`` is the product of those of a ConvTranspose: an output
    of it sees one in as many places of the kernel.
    """
    exact, rounded = (
        by_channel(each, inputs_first=inputs_first, groups=groups).sum(axis=2, dtype=np.float64)
        for each in (weight, dequantised)
    )
    lost: Array = exact - rounded
    means = np.asarray(mean, np.float64).reshape(groups, -1)
    found: Array = lost.reshape(groups, -1, lost.shape[1]) @ means[:, :, None]
    return found.reshape(-1) / strides


def of_node(node: "ir.Node", weight: Array, dequantised: Array, mean: Array) -> Array:
    """Return the correction of a Conv, ConvTranspose, MatMul or Gemm, for weights as the node reads them."""
    strides = 1
    if node.op_type == "ConvTranspose" and "strides" in node.attributes:
        strides = math.prod(node.attributes["strides"].as_ints())
    groups = node.attributes.get_int("group", 1)
    first = inputs_first(node)
    found = correction(weight, dequantised, mean, inputs_first=first, groups=groups, strides=strides)
    return found * node.attributes.get_float("alpha", 1.0)


def correct(node: "ir.Node", weight: Array, dequantised: Array, mean: Array) -> bool:
    """Add the correction to the bias of a product, in place; false, and nothing done, where there is no place for it.

    A Conv, ConvTranspose or Gemm without a bias gets one; that of a MatMul is the constant of the Add behind it. What
    else reads the same constant keeps it as it was.
    """
    return add(node, of_node(node, weight, dequantised, mean))
