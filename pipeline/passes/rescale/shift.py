"""Shift channels that are far from zero and vary little: one scale for all of them leaves few levels for what varies.

Wei, Zhang et al.: Outlier Suppression+, 2023, arXiv:2304.09145, section 4.1: with d the middle of each channel's range,
W·x + b = W·(x − d) + (b + W·d). Here d goes into constants that are in the graph already: the bias of what writes the
channels, also at the beginning of a residual stream, and the biases of all products that read them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from enginesmith.calibration import ranges
from enginesmith.calibration.ranges import Ranges
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.base import PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.rescale import products
from enginesmith.pipeline.passes.rescale.axes import dims
from enginesmith.pipeline.passes.rescale.products import Product
from enginesmith.pipeline.tensors import Array

_WORTH = 2.0
"""Times the largest range about the middle of a channel from which on the range of all is made smaller."""
_BIAS = 2


@dataclass
class ShiftResult:
    """Numbers of values and products whose channels were shifted, and the largest magnitude before and after."""

    values: int = 0
    products: int = 0
    before: float = 0.0
    after: float = 0.0


class _Place(NamedTuple):
    """A constant that is added: an input of a node, and what it is multiplied by before."""

    node: "ir.Node"
    position: int
    factor: float = 1.0

    def add(self, numbers: Array) -> None:
        """Add numbers that broadcast to the constant's place, or to whose shape the constant broadcasts."""
        node, position = self.node, self.position
        given = edit.read(edit.find_input(node, position))
        summed = (0 if given is None else given.astype(np.float64)) + numbers / self.factor
        edit.write([(node, position)], summed.astype(np.float32))


class _Stream(NamedTuple):
    """Values whose channels are shifted together, and the products that read them."""

    values: "tuple[ir.Value, ...]"
    readers: tuple[Product, ...]
    axis: int
    channels: int


def shift_channels(model: "ir.Model", known: Ranges) -> ShiftResult:
    """Shift the channels of all values for which it pays, in place."""
    every = {product.node: product for product in products.find(model)}
    moved: dict[ir.Value, Array] = {}
    changed, done = set[Product](), ShiftResult()
    for node in model.graph:
        place = _find_constant(node)
        stream = _follow(node.outputs[0], every) if place is not None else None
        ends = _find_ends(stream, known, moved) if stream is not None else None
        if place is None or stream is None or ends is None or not _takes(place, stream):
            continue
        middle = ((ends[0] + ends[1]) / 2).astype(np.float32).astype(np.float64)
        before, after = (float(np.abs(ends - shift).max()) for shift in (0, middle))
        if not 0 < _WORTH * after < before:
            continue
        place.add(-_lay_out(middle, place, stream))
        for product in stream.readers:
            biased = _find_bias(product)
            assert biased is not None
            biased.add(product.lay_out_outputs(_multiply(product, middle)))
        moved |= {value: moved.get(value, 0) + middle for value in stream.values}
        changed.update(stream.readers)
        if before > done.before:
            done.before, done.after = before, after
    done.values, done.products = len(moved), len(changed)
    return done


def _find_constant(node: "ir.Node") -> _Place | None:
    """Find the constant that a node adds to its channels, or could add."""
    if node.domain:
        return None
    match node.op_type:
        case "Add":
            index = next((index for index in (0, 1) if edit.is_factor(node.inputs[index])), None)
            return None if index is None else _Place(node, index)
        case "Gemm" | "Conv" | "LayerNormalization":
            given = edit.find_input(node, _BIAS)
            beta = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
            along = node.attributes.get_int("axis", -1) in (-1, len(dims(node.outputs[0])) - 1)
            constant = beta and (given is None or edit.is_factor(given)) and node.outputs[0].dtype == ir.DataType.FLOAT
            return _Place(node, _BIAS, beta) if constant and (node.op_type != "LayerNormalization" or along) else None
    return None


def _find_bias(product: Product) -> _Place | None:
    """Find the bias of a product, what it multiplies included; None where it has none, or pads with zeros."""
    node = product.node
    if node.op_type == "MatMul":
        adder, index = edit.find_added(node)
        return _Place(adder, index) if adder is not None and edit.is_factor(adder.inputs[index]) else None
    unpadded = node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    unpadded = unpadded and not any(node.attributes.get_ints("pads", ()))
    place = _find_constant(node) if node.op_type == "Gemm" or (node.op_type == "Conv" and unpadded) else None
    alpha = node.attributes.get_float("alpha", 1.0) if node.op_type == "Gemm" else 1.0
    return place._replace(factor=place.factor / alpha) if place is not None and alpha else None


def _multiply(product: Product, shift: Array) -> Array:
    """Compute what a product makes of the same numbers at all places of each channel: float64[outputs]."""
    weights = product.grouped().sum(axis=3, dtype=np.float64)
    sums: Array = np.einsum("goi,gi->go", weights, shift.reshape(product.groups, -1))
    return sums.reshape(-1)


def _follow(value: "ir.Value", every: "Mapping[ir.Node, Product]") -> _Stream | None:
    """Follow a value through additions; None where something else than products with a bias reads it, or nothing."""
    values, readers, adders = {value: None}, list[Product](), set[ir.Node]()
    left = [value]
    while left:
        each = left.pop()
        if each.is_graph_output():
            return None
        for use in each.uses():
            node = use.node
            if node in every and use.idx == 0 and _find_bias(every[node]) is not None:
                readers.append(every[node])
            elif node.op_type == "Add" and not node.domain and node.graph is value.graph:
                adders.add(node)
                if node.outputs[0] not in values:
                    values[node.outputs[0]] = None
                    left.append(node.outputs[0])
            else:
                return None
    once = all(sum(read in values for read in node.inputs) == 1 for node in adders)
    kinds = {(product.axis % len(dims(product.data)), product.inputs) for product in readers if dims(product.data)}
    if len(kinds) != 1 or not once:
        return None
    ((axis, channels),) = kinds
    shapes = [dims(each) for each in values]
    alike = all(len(sizes) == len(shapes[0]) > axis and sizes[axis] == channels for sizes in shapes)
    return _Stream(tuple(values), tuple(readers), axis, channels) if alike else None


def _takes(place: _Place, stream: _Stream) -> bool:
    """Tell whether the channels of a stream are those that a constant is added to."""
    if place.node.op_type == "Add":
        return True
    rank = len(dims(stream.values[0]))
    return stream.axis == (1 if place.node.op_type == "Conv" else rank - 1)


def _lay_out(shift: Array, place: _Place, stream: _Stream) -> Array:
    """Give numbers of channels the axes that they have where they are added."""
    if place.node.op_type != "Add":
        return shift
    return shift.reshape(-1, *(1,) * (len(dims(stream.values[0])) - 1 - stream.axis))


def _find_ends(stream: _Stream, known: Ranges, moved: "Mapping[ir.Value, Array]") -> Array | None:
    """Find the smallest and the largest number of each channel in all values that products read: float64[2, channels].

    None where one of them is not known.
    """
    ends = []
    for value in dict.fromkeys(product.data for product in stream.readers):
        each, rank = known.channels.get(str(value.name)), len(dims(value))
        if each is None or each.axis % rank != stream.axis or len(each.amax) != stream.channels:
            return None
        middle = np.array(each.middle)
        reach = np.array(each.amax) - np.abs(middle)
        ends.append(np.stack([middle - reach, middle + reach]) - moved.get(value, 0))
    lowest, highest = np.min([each[0] for each in ends], axis=0), np.max([each[1] for each in ends], axis=0)
    return np.stack([lowest, highest])


class ChannelShift(GraphPass):
    """Shift the channels of activations to the middle of their ranges; needs ``ranges`` of the same graph."""

    name: ClassVar[str] = "shift"
    stage: ClassVar[Stage] = "rescale"
    reads: ClassVar[tuple[str, ...]] = ("quantization",)
    requires: ClassVar[tuple[str, ...]] = ("ranges",)

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make one for a precision with ranges of activations, where the recipe wants it."""
        return (cls(),) if KINDS[request.precision].calibrated and options["quantization"].shift else ()

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite biases; names stay.

        Raises:
            DataError: the ranges are of another graph.
        """
        known = ranges.load(records["ranges"].path, model_sha256=artifact.sha256)
        model = edit.load(artifact.path)
        done = shift_channels(model, known)
        if not done.values:
            return edit.pass_on(artifact.path, out, "no channels have constant offsets that biases can take")
        progress("writing")
        return self.save(
            model,
            out,
            f"shifted the channels of {done.values} values that {done.products} products read; "
            f"largest magnitude {done.before:.3g} → {done.after:.3g}",
        )
