"""What products add to their results: reading it, and adding to it."""

from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.precision import constants, groups
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_BIAS = 2


def read(node: "ir.Node") -> Array | None:
    """The constant bias that an operator itself adds; None where there is none."""
    return constants.read(node.inputs[_BIAS]) if len(node.inputs) > _BIAS else None


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
    constants.write(node, _BIAS, (more / share + (0 if bias is None else bias)).astype(np.float32))
    return True


def _add_behind(node: "ir.Node", more: Array) -> bool:
    reader, index = groups.only_reader(node.outputs[0])
    if reader is None or reader.op_type != "Add":
        return False
    index = 1 - index
    bias = constants.read(reader.inputs[index])
    if bias is None or bias.shape != more.shape:
        return False
    constants.write(reader, index, (bias + more).astype(np.float32))
    return True
