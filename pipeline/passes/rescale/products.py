"""Products of a graph whose weight can be scaled, channel by channel."""

from dataclasses import dataclass

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.tensors import Array

_BIAS = 2
_MATRIX_PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Product:
    """One Conv, ConvTranspose, MatMul or Gemm whose second input is an initializer of float32."""

    node: "ir.Node"
    data: "ir.Value"
    weight: "ir.Value"
    groups: int
    inputs: int
    """Channels of the activation that it reads."""
    outputs: int

    @property
    def is_matrix(self) -> bool:
        return self.node.op_type in _MATRIX_PRODUCTS

    @property
    def axis(self) -> int:
        """Axis of the channels in activations."""
        return -1 if self.is_matrix else 1

    @property
    def private(self) -> bool:
        """True where nothing else reads the weight."""
        return len(self.weight.uses()) == 1

    @property
    def bias(self) -> "ir.Value | None":
        """The bias that the operator itself adds."""
        return self.node.inputs[_BIAS] if len(self.node.inputs) > _BIAS else None

    def weights(self) -> Array:
        """Arrange the weight as outputs × inputs of a group × places in the kernel; a view where that is possible."""
        assert self.weight.const_value is not None
        return by_channel(self.weight.const_value.numpy(), inputs_first=inputs_first(self.node), groups=self.groups)

    def grouped(self) -> Array:
        """Arrange the weight as groups × outputs of a group × inputs of a group × places in the kernel."""
        weights = self.weights()
        return weights.reshape(self.groups, -1, *weights.shape[1:])

    def scale(self, outputs: Array | None = None, inputs: Array | None = None) -> None:
        """Multiply the outputs, channel by channel, and the weights of each input channel."""
        parts = []
        if outputs is not None:
            parts.append(self._lay_out(outputs.reshape(self.groups, -1, 1)))
            if self.bias is not None:
                edit.multiply(self.node, _BIAS, outputs)
        if inputs is not None:
            parts.append(self._lay_out(inputs.reshape(self.groups, 1, -1)))
        edit.rescale(self.weight, parts)

    def _lay_out(self, factors: Array) -> Array:
        """Return factors of groups × outputs of a group × inputs of a group, in the layout of the weight."""
        if self.groups > 1:
            shape = (self.groups, self.outputs // self.groups, self.inputs // self.groups)
            factors = np.broadcast_to(factors, shape)
        if inputs_first(self.node):
            factors = factors.swapaxes(1, 2)
        rank = len(self.weight.shape or ())
        return factors.reshape(-1, factors.shape[2], *(1,) * (rank - 2)).astype(np.float32)


def find(model: "ir.Model") -> tuple[Product, ...]:
    """Find the products of the main graph, in the order of its nodes."""
    return tuple(product for node in model.graph if (product := _product(node)) is not None)


def by_channel(weight: Array, *, inputs_first: bool, groups: int = 1) -> Array:
    """Arrange a weight of a product as outputs × inputs of a group × places in the kernel."""
    flat = weight.reshape(*weight.shape[:2], -1)
    if not inputs_first:
        return flat
    if groups == 1:
        return flat.swapaxes(0, 1)
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    return flat.reshape(groups, inputs, outputs, -1).swapaxes(1, 2).reshape(groups * outputs, inputs, -1)


def inputs_first(node: "ir.Node") -> bool:
    """Tell whether the first axis of a product's weight is that of the inputs."""
    return node.op_type in ("ConvTranspose", "MatMul") or (
        node.op_type == "Gemm" and not node.attributes.get_int("transB", 0)
    )


def _product(node: "ir.Node") -> Product | None:
    if node.domain or node.op_type not in ("Conv", "ConvTranspose", *_MATRIX_PRODUCTS):
        return None
    data, weight = node.inputs[:2]
    if data is None or weight is None or not edit.is_weight(weight) or weight.shape is None:
        return None
    rank = len(weight.shape)
    fits = rank == 2 if node.op_type in _MATRIX_PRODUCTS else rank >= 3
    turned = node.attributes.get_int("transA", 0)
    if turned or not fits or weight.const_value is None or not weight.const_value.size:
        return None
    groups = node.attributes.get_int("group", 1)
    first, second = weight.const_value.shape.numpy()[:2]
    inputs, outputs = (first, second * groups) if inputs_first(node) else (second * groups, first)
    product = Product(node, data, weight, groups, inputs, outputs)
    return product if product.bias is None or edit.is_factor(product.bias) else None
