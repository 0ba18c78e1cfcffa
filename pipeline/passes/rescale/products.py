"""Products of a graph whose weight can be scaled, channel by channel.

The weight of a MatMul may be a stack of matrices, as the experts of a mixture have it: [experts, inputs, outputs]. Each
output of each matrix is a channel, and so is each input, where the activation has that axis too; where all matrices
meet the same activation, they are one product with as many outputs more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.rescale.axes import dims
from enginesmith.pipeline.tensors import Array

LARGEST_FACTOR = 2.0**40
"""Largest factor of a channel: features in raw units are 10⁻⁶ to 10⁶. It leaves weights and activations a room of
2**±86 in float32."""
LARGEST_IDLE_FACTOR = 2.0**10
"""Largest factor where nothing is known of a channel, as it is 0 on all data that were seen: other data may wake it."""
_BIAS = 2
_MATRIX_PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Product:
    """One Conv, ConvTranspose, MatMul or Gemm whose second input is an initializer of float32."""

    node: "ir.Node"
    data: "ir.Value"
    weight: "ir.Value"
    groups: int
    """Parts that each have inputs and outputs of their own: groups of a convolution, or the matrices of a stack."""
    inputs: int
    """Channels of the activation that it reads."""
    outputs: int
    stack: tuple[int, ...] = ()
    """Axes of the weight before those of its matrices."""

    @property
    def is_matrix(self) -> bool:
        return self.node.op_type in _MATRIX_PRODUCTS

    @property
    def axis(self) -> int:
        """Axis of the channels in activations, within one matrix of a stack."""
        return -1 if self.is_matrix else 1

    @property
    def axes(self) -> dict[int, int]:
        """Axes of the channels of the output, with their sizes."""
        rank = len(self.stack) + 2
        stacked = {axis - rank: size for axis, size in enumerate(self.stack) if size > 1}
        return {**stacked, self.axis: self.outputs // math.prod(self.stack)}

    @property
    def reads_stack(self) -> bool:
        """True where the matrices of a stack have inputs of their own."""
        return self.is_matrix and self.groups > 1

    @property
    def private(self) -> bool:
        """True where nothing else reads the weight."""
        return len(self.weight.uses()) == 1

    def shares_weight(self, products: "Mapping[ir.Node, Product]") -> bool:
        """Tell whether these products alone read the weight, in one layout: factors of its channels do for all."""
        readers = [products.get(use.node) if use.idx == 1 else None for use in self.weight.uses()]
        return all(reader is not None and reader._layout == self._layout for reader in readers)

    @property
    def _layout(self) -> tuple[object, ...]:
        return self.is_matrix, inputs_first(self.node), self.groups, self.inputs, self.outputs, self.stack

    @property
    def bias(self) -> "ir.Value | None":
        """The bias that the operator itself adds."""
        return edit.find_input(self.node, _BIAS)

    def weights(self) -> Array:
        """Arrange the weight as outputs × inputs of a group × places in the kernel; a view where that is possible."""
        assert self.weight.const_value is not None
        return by_channel(self.node, self.weight.const_value.numpy())

    def grouped(self) -> Array:
        """Arrange the weight as groups × outputs of a group × inputs of a group × places in the kernel."""
        weights = self.weights()
        return weights.reshape(self.groups, -1, *weights.shape[1:])

    def scale(self, outputs: Array | None = None, inputs: Array | None = None) -> None:
        """Multiply the weights of each output channel, and of each input channel."""
        parts = []
        if outputs is not None:
            parts.append(self._lay_out(outputs.reshape(self.groups, -1, 1)))
        if inputs is not None:
            parts.append(self._lay_out(inputs.reshape(self.groups, 1, -1)))
        edit.rescale(self.weight, parts)

    def scale_bias(self, outputs: Array) -> None:
        """Multiply the bias of each output channel, if there is one."""
        if self.bias is not None:
            edit.multiply(self.node, _BIAS, outputs)

    def flatten_outputs(self, numbers: Array) -> Array | None:
        """Spread what broadcasts to the output over its channels; None where it differs along other axes, too."""
        if numbers.size == 1:
            return np.broadcast_to(numbers.reshape(()), self.outputs)
        axes = {axis % numbers.ndim: size for axis, size in self.axes.items()}
        if any(size not in (1, axes.get(axis, 1)) for axis, size in enumerate(numbers.shape)):
            return None
        along = numbers.reshape([numbers.shape[axis] for axis in axes])
        return np.broadcast_to(along, [*axes.values()]).reshape(-1)

    def lay_out_outputs(self, numbers: Array) -> Array:
        """Give numbers by channel of the output the axes that they have there, from the first one of a stack on."""
        return numbers.reshape(*self.stack, 1, -1) if math.prod(self.stack) > 1 else numbers

    def lay_out_inputs(self, numbers: Array) -> Array:
        """Give numbers by channel of the activation the axes that they have there."""
        shape = [1] * len(dims(self.data))
        if shape and self.reads_stack:
            for axis, size in self.axes.items():
                shape[axis] = size
        if shape:
            shape[self.axis] = -1
        return numbers.reshape(shape or -1)

    def _lay_out(self, factors: Array) -> Array:
        """Return factors of groups × outputs of a group × inputs of a group, in the layout of the weight."""
        if self.stack:
            per_matrix = self.groups > 1 or factors.shape[1] > 1
            matrices = factors.reshape(*(self.stack if per_matrix else ()), -1, factors.shape[2])
            return matrices.swapaxes(-1, -2).astype(np.float32)
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


def by_channel(node: "ir.Node", weight: Array) -> Array:
    """Arrange the weight of a product as outputs × inputs of a group × places in the kernel."""
    if node.op_type in _MATRIX_PRODUCTS:
        matrices = weight.swapaxes(-1, -2) if inputs_first(node) else weight
        return matrices.reshape(-1, matrices.shape[-1], 1)
    flat = weight.reshape(*weight.shape[:2], -1)
    if not inputs_first(node):
        return flat
    groups = node.attributes.get_int("group", 1)
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    return flat.reshape(groups, inputs, outputs, -1).swapaxes(1, 2).reshape(groups * outputs, inputs, -1)


def match_columns(columns: Array, live: Array) -> Array:
    """Compute by what each column of weights becomes as large as the median live one of its group.

    A row of weights shares one scale, so columns of channels that are 0 throughout should not be those that set it.

    Args:
        columns: the largest magnitude of each, groups × inputs of a group
        live: for each, whether its channel is ever anything but 0

    Returns:
        float64[groups, inputs of a group]; infinite for columns of zeros, and where no column of the group is live
    """
    ordered = np.sort(np.where(live & (columns > 0), columns, np.inf), axis=1)
    counts = np.isfinite(ordered).sum(axis=1, keepdims=True)
    middle = np.take_along_axis(ordered, np.maximum(counts - 1, 0) // 2, axis=1)
    factors: Array = np.divide(middle, columns, out=np.full(columns.shape, np.inf), where=columns > 0)
    return factors


def inputs_first(node: "ir.Node") -> bool:
    """Tell whether a product's weight has the inputs before the outputs."""
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
    fits = rank >= (2 if node.op_type in _MATRIX_PRODUCTS else 3)
    turned = node.attributes.get_int("transA", 0)
    if turned or not fits or weight.const_value is None or not weight.const_value.size:
        return None
    if rank > 2 and node.op_type in _MATRIX_PRODUCTS:
        return _stacked_product(node, data, weight)
    groups = node.attributes.get_int("group", 1)
    first, second = weight.const_value.shape.numpy()[:2]
    inputs, outputs = (first, second * groups) if inputs_first(node) else (second * groups, first)
    product = Product(node, data, weight, groups, inputs, outputs)
    return product if product.bias is None or edit.is_factor(product.bias) else None


def _stacked_product(node: "ir.Node", data: "ir.Value", weight: "ir.Value") -> Product | None:
    """Describe a product with a stack of matrices; None where it is not known which of them meet which activation."""
    assert weight.const_value is not None
    *stack, inputs, outputs = map(int, weight.const_value.shape.numpy())
    sizes = dims(data)
    met = (*(1,) * (len(stack) + 2 - len(sizes)), *sizes)[-len(stack) - 2 : -2]
    own = [ours == theirs for ours, theirs in zip(stack, met, strict=True) if ours > 1]
    shared = all(theirs == 1 for ours, theirs in zip(stack, met, strict=True) if ours > 1)
    if len(sizes) < 2 or not dims(node.outputs[0]) or not (shared or all(own)):
        return None
    count = math.prod(stack)
    groups = 1 if shared else count
    return Product(node, data, weight, groups, groups * inputs, count * outputs, tuple(stack))
