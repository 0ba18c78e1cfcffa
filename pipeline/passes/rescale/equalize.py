"""Equalise across layers: scale channels of neighbouring layers against each other until their ranges agree.

Networks with depthwise convolutions need it before they are quantised: their channels differ by orders of magnitude,
and one scale has to do for all channels of a value.

Nagel, van Baalen, Blankevoort, Welling: Data-Free Quantization Through Weight Equalization and Bias Correction,
2019, arXiv:1906.04721, section 4.1. For a factor s > 0 of each channel, W₂·f(W₁·x + b) = (W₂·s)·f((W₁·x + b)/s)
wherever f(s·x) = s·f(x). With r₁ and r₂ the ranges of a channel in both weights, s = √(r₁/r₂) makes them equal.

Beyond the paper: where ranges of real data are known, no channel is made larger than the largest one is already, as
the scale that all of them share would grow with it. A Clip (ReLU6) is only passed by channels that stay below its
bound, on those data and by some margin after they were scaled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from enginesmith.calibration.ranges import Ranges
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.base import Pass, PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.rescale import channels
from enginesmith.pipeline.passes.rescale.channels import Product, ScalePropagation
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


_ROUNDS = 100
_CONVERGED = 1e-3  # of a factor, relative
_LARGEST_FACTOR = 2.0**10
_DEAD = 1e-6  # of the largest range: channels below that do nothing
_HEADROOM = 0.8  # share of a Clip's bound that channels are scaled up to, as other data may go beyond what was seen


@dataclass
class Pair:
    """Two products with a value between them, and the factors by which its channels are divided."""

    first: Product
    second: Product
    way: ScalePropagation
    smallest: Array
    """Least factor of each channel."""
    largest: Array
    factors: Array
    unbounded: "tuple[ir.Node, ...]" = ()
    """Clips on the way whose bound is out of reach: they become Relu."""


@dataclass(frozen=True)
class EqualizationResult:
    """Numbers of pairs, products and Clips, and the largest ratio of channels before and after."""

    pairs: int
    products: int
    ratio_before: float
    """Largest range of a channel over the smallest one, in the most uneven weight."""
    ratio_after: float
    clips_replaced: int
    clips_left: int
    """Pairs that were left alone for the Clip between them."""


def equalize_cross_layer(model: "ir.Model", ranges: Ranges | None = None) -> EqualizationResult:
    """Equalise every pair of products of a graph, in place."""
    pairs, clipped = _pairs(model, ranges)
    magnitudes: dict[ir.Node, Array] = {}  # the largest at each output and input of a group
    for product in (product for pair in pairs for product in (pair.first, pair.second)):
        weights = product.weights()
        largest = np.maximum(weights.max(axis=2), -weights.min(axis=2))
        magnitudes[product.node] = np.ascontiguousarray(largest, np.float64)
    before = _ratio(pairs, magnitudes)
    for _ in range(_ROUNDS):
        if max((_settle(pair, magnitudes) for pair in pairs), default=0.0) < _CONVERGED:
            break
    changed = [pair for pair in pairs if np.abs(pair.factors - 1).max() > _CONVERGED]
    after = _ratio(pairs, magnitudes)
    _apply(changed)
    return EqualizationResult(
        pairs=len(changed),
        products=len({product.node for pair in changed for product in (pair.first, pair.second)}),
        ratio_before=before,
        ratio_after=after,
        clips_replaced=len({clip for pair in changed for clip in pair.unbounded}),
        clips_left=clipped,
    )


def _pairs(model: "ir.Model", ranges: Ranges | None) -> tuple[list[Pair], int]:
    """List all pairs, and count those that a Clip prevents."""
    every = channels.find(model)
    known = {product.node.outputs[0]: product for product in every}
    pairs: list[Pair] = []
    clipped = 0
    for second in every:
        place = channels.place(second.data, second.axis, second.inputs)
        if place is None or not second.private or not channels.is_private(second.data):
            continue
        way = channels.trace(place, known, channels.HOMOGENEOUS)
        if way is None or way.product is None:
            continue
        if (limits := _limits(second, way, ranges)) is None:
            clipped += 1
            continue
        pairs.append(Pair(way.product, second, way, *limits[:2], np.ones(second.inputs), limits[2]))
    return pairs, clipped


def _limits(
    second: Product, way: ScalePropagation, ranges: Ranges | None
) -> "tuple[Array, Array, tuple[ir.Node, ...]] | None":
    """Find least and largest factors, and the Clips that can go; None if it is unknown where a Clip cuts."""
    count = second.inputs
    smallest, largest = np.full(count, 1 / _LARGEST_FACTOR), np.full(count, _LARGEST_FACTOR)
    seen = _by_channel(second.data, count, ranges)
    if seen is not None and seen.max() > 0:  # no channel grows beyond the largest; one that was never alive stays
        smallest = np.maximum(np.where(seen > 0, seen / seen.max(), 1), smallest)
    gone = []
    for clip in (node for node in way.nodes if node.op_type == "Clip"):
        bound = _bound(clip)
        if bound == np.inf:
            continue
        reached = _by_channel(clip.outputs[0], count, ranges)
        whole = ranges.tensors.get(clip.outputs[0].name or "") if ranges is not None else None
        if reached is None and whole is not None:  # only the largest number of all channels is known
            reached = np.full(count, whole.maximum)
        if bound is None or reached is None or (reached >= bound).all():
            return None
        if reached.max() < bound:
            gone.append(clip)
            continue
        cut = reached >= bound
        smallest = np.maximum(smallest, np.where(cut, 1, reached / (_HEADROOM * bound)))
        largest = np.where(cut, 1, largest)
    return np.minimum(smallest, 1), largest, tuple(gone)


def _by_channel(value: "ir.Value", count: int, ranges: Ranges | None) -> Array | None:
    known = ranges.channels.get(value.name or "") if ranges is not None else None
    return np.array(known.amax) if known is not None and len(known.amax) == count else None


def _bound(clip: "ir.Node") -> float | None:
    """Read the upper bound of a Clip that cuts at 0 below; None for others."""

    def edge(index: int, word: str) -> float | None:
        if word in clip.attributes:  # in old opsets
            return clip.attributes[word].as_float()
        number = edit.read(clip.inputs[index]) if index < len(clip.inputs) else None
        return None if number is None else float(number.reshape(-1)[0])

    low, high = edge(1, "min"), edge(2, "max")
    high = np.inf if high is None else high
    return high if low == 0 and high > 0 else None


def _by_input(product: Product, magnitudes: Array) -> Array:
    """Compute the largest magnitude of each input channel."""
    largest: Array = magnitudes.reshape(product.groups, -1, magnitudes.shape[1]).max(axis=1)
    return largest.reshape(-1)


def _settle(pair: Pair, magnitudes: "dict[ir.Node, Array]") -> float:
    """Make the ranges of one pair equal, as far as its limits allow; return the largest relative change."""
    ours, theirs = magnitudes[pair.first.node], magnitudes[pair.second.node]
    outputs, inputs = ours.max(axis=1), _by_input(pair.second, theirs)
    alive = _alive(outputs) & _alive(inputs)
    wanted = pair.factors * np.sqrt(np.where(alive, outputs, 1) / np.where(alive, inputs, 1))
    settled = np.where(alive, np.clip(wanted, pair.smallest, pair.largest), pair.factors)
    change = settled / pair.factors
    pair.factors = settled
    ours /= change[:, None]
    split = theirs.reshape(pair.second.groups, -1, theirs.shape[1])  # a view: groups × outputs × inputs of a group
    split *= change.reshape(pair.second.groups, 1, -1)
    return float(np.abs(change - 1).max())


def _ratio(pairs: Sequence[Pair], magnitudes: "dict[ir.Node, Array]") -> float:
    """Compute the largest ratio of a channel's range to another's."""
    worst = 1.0
    for pair in pairs:
        for each in (magnitudes[pair.first.node].max(axis=1), _by_input(pair.second, magnitudes[pair.second.node])):
            alive = each[_alive(each)]
            if alive.size:
                worst = max(worst, float(alive.max() / alive.min()))
    return worst


def _alive(magnitudes: Array) -> Array:
    return np.asarray(magnitudes > _DEAD * magnitudes.max())


def _apply(pairs: Sequence[Pair]) -> None:
    """Write the factors into the weights, each weight once, and into what lies between."""
    outputs = {pair.first.node: 1 / pair.factors for pair in pairs}
    inputs = {pair.second.node: pair.factors for pair in pairs}
    every = {product.node: product for pair in pairs for product in (pair.first, pair.second)}
    for node, product in every.items():
        product.scale(outputs.get(node), inputs.get(node))
    for pair in pairs:
        pair.way.scale_addends(1 / pair.factors)
        for clip in pair.unbounded:
            clip.op_type = "Relu"
            clip.resize_inputs(1)
            clip.attributes.clear()


class CrossLayerEqualization(Pass):
    """Scale the channels of neighbouring layers against each other; ``ranges``, where given, show how far."""

    name: ClassVar[str] = "equalise"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir")
    stage: ClassVar[Stage] = "rescale"
    reads: ClassVar[tuple[str, ...]] = ("quantisation", "export")

    external_data_bytes: int = edit.EXTERNAL_DATA_BYTES

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make one for a precision with ranges of activations, where the recipe wants it."""
        if not (KINDS[request.precision].calibrated and options["quantisation"].equalise):
            return ()
        return (cls(external_data_bytes=options["export"].external_data_bytes),)

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite weights and biases; names stay.

        Raises:
            DataError: the ranges are of another graph.
        """
        from enginesmith.calibration import ranges

        given = records.get("ranges")
        known = ranges.load(given.path, model_sha256=artifact.sha256) if given is not None else None
        model = edit.load(artifact.path)
        done = equalize_cross_layer(model, known)
        notes = []
        if done.clips_replaced:
            why = "no activation of the calibration data reaches their bound"
            notes.append(f"{done.clips_replaced} Clip nodes became Relu: {why}")
        if done.clips_left:
            why = "cuts every channel" if known is not None else "may cut, and there are no ranges that show where"
            notes.append(f"{done.clips_left} pairs were left alone, as the Clip between them {why}")
        if not done.pairs:
            effect = edit.pass_on(artifact.path, out, "no two neighboring layers have channels to equalize")
            return effect.model_copy(update={"notes": (*effect.notes, *notes)})
        progress("writing")
        return edit.save_with_summary(
            model,
            out,
            self.external_data_bytes,
            f"equalized {done.pairs} pairs of {done.products} products; "
            f"largest channel ratio {done.ratio_before:.3g} → {done.ratio_after:.3g}",
            notes=tuple(notes),
        )
