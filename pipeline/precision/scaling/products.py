"""Products of an activation with a constant weight: where their channels lie, and how to scale them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.precision import constants
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_BIAS = 2
_MATRIX_PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Product:
    """One Conv, ConvTranspose, MatMul or Gemm whose second input is an initialiser of float32."""

    node: "ir.Node"
    data: "ir.Value"
    weight: "ir.Value"
    groups: int
    inputs: int
    """Channels of the activation that it reads."""
    outputs: int

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies matrices."""
        return self.node.op_type in _MATRIX_PRODUCTS

    @property
    def axis(self) -> int:
        """The axis of the channels."""
        return -1 if self.is_matrix else 1

    @property
    def private(self) -> bool:
        """Whether nothing else reads the weight."""
        return len(self.weight.uses()) == 1

    @property
    def bias(self) -> "ir.Value | None":
        """The bias that the operator itself adds."""
        return self.node.inputs[_BIAS] if len(self.node.inputs) > _BIAS else None

    def weights(self) -> Array:
        """The weight as outputs × inputs of a group × places in the kernel; a view where the layout allows it."""
        assert self.weight.const_value is not None
        weight = self.weight.const_value.numpy()
        return by_channel(weight, inputs_first=inputs_first(self.node), groups=self.groups)

    def grouped(self) -> Array:
        """The weight as groups × outputs of a group × inputs of a group × places in the kernel."""
        weights = self.weights()
        return weights.reshape(self.groups, -1, *weights.shape[1:])

    def scale(self, outputs: Array | None = None, inputs: Array | None = None) -> None:
        """Multiply what comes out, channel by channel, and what each input channel is weighted with."""
        parts = []
        if outputs is not None:
            parts.append(self._laid_out(outputs.reshape(self.groups, -1, 1)))
            if self.bias is not None:
                constants.multiply(self.node, _BIAS, outputs)
        if inputs is not None:
            parts.append(self._laid_out(inputs.reshape(self.groups, 1, -1)))
        constants.rescale(self.weight, parts)

    def _laid_out(self, factors: Array) -> Array:
        """Factors of groups × outputs of a group × inputs of a group, in the layout of the weight."""
        if self.groups > 1:
            shape = (self.groups, self.outputs // self.groups, self.inputs // self.groups)
            factors = np.broadcast_to(factors, shape)
        if inputs_first(self.node):
            factors = factors.swapaxes(1, 2)
        rank = len(self.weight.shape or ())
        return factors.reshape(-1, factors.shape[2], *(1,) * (rank - 2)).astype(np.float32)


def find(model: "ir.Model") -> tuple[Product, ...]:
    """The products of the main graph, in the order of its nodes."""
    return tuple(product for node in model.graph if (product := _product(node)) is not None)


def by_channel(weight: Array, *, inputs_first: bool, groups: int = 1) -> Array:
    """A weight of a product as outputs × inputs of a group × places in the kernel."""
    flat = weight.reshape(*weight.shape[:2], -1)
    if not inputs_first:
        return flat
    if groups == 1:
        return flat.swapaxes(0, 1)
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    return flat.reshape(groups, inputs, outputs, -1).swapaxes(1, 2).reshape(groups * outputs, inputs, -1)


def inputs_first(node: "ir.Node") -> bool:
    """Whether the first axis of a product's weight is that of the inputs."""
    return node.op_type in ("ConvTranspose", "MatMul") or (
        node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)
    )


def _product(node: "ir.Node") -> Product | None:
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Conv", "ConvTranspose", *_MATRIX_PRODUCTS):
        return None
    data, weight = node.inputs[:2]
    if data is None or weight is None or not constants.is_weight(weight) or weight.shape is None:
        return None
    rank = len(weight.shape)
    fits = rank == 2 if node.op_type in _MATRIX_PRODUCTS else rank >= 3
    turned = node.attributes.get_int("transA", 0)
    if turned or not fits or weight.const_value is None or not weight.const_value.size:
        return None
    bias = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    if bias is not None and not constants.is_factor(bias):
        return None
    return Product(node, data, weight, *_channels(node, tuple(weight.const_value.shape.numpy())))


def _channels(node: "ir.Node", shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Groups, input channels and output channels of a weight of this shape."""
    groups = node.attributes.get_int("group", 1)
    if node.op_type == "Conv":
        return groups, shape[1] * groups, shape[0]
    if node.op_type == "ConvTranspose":
        return groups, shape[0], shape[1] * groups
    if node.attributes.get_int("transB", 0):
        return 1, shape[1], shape[0]
    return 1, shape[0], shape[1]
