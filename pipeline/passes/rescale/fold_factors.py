"""Fold constant factors of channels into the weights that write these channels.

ConvNeXt, CaiT, BEiT and DINOv2 multiply what a block adds to the stream by a constant for each channel (layer scale).
W·x + b, times a factor of each channel, is a product with other constants. So the graph has an operator fewer, and its
weights show how large the channels are that they write.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.rescale import products
from enginesmith.pipeline.passes.rescale.axes import dims, find_axis, reshape_back, strip, transpose_back
from enginesmith.pipeline.passes.rescale.products import Product
from enginesmith.pipeline.tensors import Array

_SMALLEST, _LARGEST = 2.0**-14, 65504.0
"""Magnitudes that the largest weight of a channel keeps to: float16 has fewer bits for smaller ones, or none."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class _Target(NamedTuple):
    """A product that takes factors, and the constants that are added behind it."""

    product: Product
    outputs: Array
    """Factors by channel of its output, float64[outputs]."""
    added: "list[tuple[ir.Node, int, Array]]"
    """Nodes, their input that is a constant, and its factors."""
    values: "list[ir.Value]"
    """Values that get the factors, the last first."""


def fold_factors(model: "ir.Model") -> int:
    """Fold multiplications and divisions by constants, in place; return how many nodes went.

    The product may be separated from the factor by the addition of its bias, and by nodes that rearrange axes. Weights
    that something else reads, too, stay, and so do those that would leave the range of float16.
    """
    every = {product.node: product for product in products.find(model)}
    count, names = 0, edit.Names(model.graph)
    for node in list(model.graph):
        index, factors = _read_factors(node)
        value = node.inputs[index] if factors is not None else None
        target = _find_target(value, factors, every) if value is not None and factors is not None else None
        if value is None or target is None or not _fits(target):
            continue
        target.product.scale(outputs=target.outputs)
        target.product.scale_bias(target.outputs)
        for adder, place, theirs in target.added:
            edit.multiply(adder, place, theirs)
        result = node.outputs[0]
        name = result.name
        result.replace_all_uses_with(value, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        value.name = name  # a name says which numbers these are, also to who compares graphs
        for each in target.values[1:]:
            each.name = names.new(f"{each.name}_scaled")
        count += 1
    return count


def _read_factors(node: "ir.Node") -> tuple[int, Array | None]:
    """Read by what a node multiplies one of its inputs: its index, and factors with its rank that broadcast to it.

    None if it multiplies by no constant, by none that is finite, or by one with several axes.
    """
    places = {"Mul": (1, 0), "Div": (1,)}.get(node.op_type, ()) if not node.domain else ()
    index = next((place for place in places if edit.is_factor(node.inputs[place])), None)
    numbers = edit.read(node.inputs[index]) if index is not None else None
    rank = len(dims(node.outputs[0]))
    if index is None or numbers is None or numbers.ndim > rank or (node.op_type == "Div" and not numbers.all()):
        return 0, None
    factors = numbers.reshape((1,) * (rank - numbers.ndim) + numbers.shape).astype(np.float64)
    known = factors.size == 1 or find_axis(factors) is not None
    if not known or not np.isfinite(factors).all():
        return 0, None
    return 1 - index, 1 / factors if node.op_type == "Div" else factors


def _find_target(value: "ir.Value", factors: Array, every: "Mapping[ir.Node, Product]") -> _Target | None:
    """Follow a value back to the product that alone writes it; None where something else is on the way."""
    added: list[tuple[ir.Node, int, Array]] = []
    values: list[ir.Value] = []
    while True:
        node, sizes = value.producer(), dims(value)
        alone = edit.find_only_reader(value)[0] is not None and len(sizes) == factors.ndim
        if node is None or not alone or not _is_as_wide(sizes, factors):
            return None
        values.append(value)
        if node in every:
            product = every[node]
            outputs = product.flatten_outputs(factors)
            if not product.private or outputs is None:
                return None
            return _Target(product, outputs, added, values)
        index, moved = _move_back(node, factors)
        if moved is None:
            return None
        if node.op_type == "Add":
            added.append((node, 1 - index, strip(factors)))
        before = node.inputs[index]
        assert before is not None
        value, factors = before, moved


def _is_as_wide(sizes: tuple[int | str | None, ...], factors: Array) -> bool:
    """Tell whether factors do not broadcast a value of these sizes to more channels."""
    return all(count in (1, size) for count, size in zip(factors.shape, sizes, strict=True))


def _move_back(node: "ir.Node", factors: Array) -> tuple[int, Array | None]:
    """Find the input of a node that can be multiplied in place of its output, and by what; None where none can."""
    if node.domain:
        return 0, None
    match node.op_type:
        case "Add":
            constant = next((index for index in (0, 1) if edit.is_factor(node.inputs[index])), None)
            return (0, None) if constant is None else (1 - constant, factors)
        case "Identity":
            return 0, factors
        case "Transpose":
            return 0, transpose_back(factors, node)
        case "Flatten" | "Reshape" | "Squeeze" | "Unsqueeze":
            return 0, reshape_back(factors, node)
    return 0, None


def _fits(target: _Target) -> bool:
    """Tell whether the weights stay in the range of float16, channel by channel, and the biases in that of float32."""
    weights, factors = target.product.weights(), np.abs(target.outputs)
    largest = np.maximum(weights.max(axis=(1, 2)), -weights.min(axis=(1, 2))).astype(np.float64)
    scaled = largest * factors
    inside = (scaled >= np.minimum(_SMALLEST, largest)) & (scaled <= np.maximum(_LARGEST, largest))
    biases = [(edit.read(node.inputs[index]), theirs) for node, index, theirs in target.added]
    if target.product.bias is not None:
        biases.append((edit.read(target.product.bias), target.outputs))
    sums = (np.abs(numbers * theirs).max(initial=0) for numbers, theirs in biases if numbers is not None)
    return bool((inside | (factors == 0)).all() and all(size <= _FLOAT32_MAX for size in sums))
