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
from typing import Any, ClassVar, Self

import numpy as np

from enginesmith.calibration import ranges
from enginesmith.calibration.ranges import Ranges
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.base import PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.rescale import channels
from enginesmith.pipeline.passes.rescale.channels import Product, Tie
from enginesmith.pipeline.tensors import Array

_ROUNDS = 100
_CONVERGED = 1e-3  # of a factor, relative
_LARGEST_FACTOR = 2.0**10
_DEAD = 1e-6  # of the largest range: channels below that do nothing
_HEADROOM = 0.8  # share of a Clip's bound that channels are scaled up to, as other data may go beyond what was seen


@dataclass
class Equalized:
    """A tie, and the factors by which its channels are divided."""

    tie: Tie
    smallest: Array
    """Least factor of each channel."""
    largest: Array
    factors: Array
    unbounded: "tuple[ir.Node, ...]" = ()
    """Clips on the way whose bound is out of reach: they become Relu."""

    @property
    def products(self) -> list[Product]:
        """The products on both sides; one that reads and writes it is there twice."""
        return [*self.tie.writers, *(reader.product for reader in self.tie.readers)]


@dataclass(frozen=True)
class EqualizationResult:
    """Numbers of ties, products and Clips, and the largest ratio of channels before and after."""

    ties: int
    products: int
    ratio_before: float
    """Largest range of a channel over the smallest one, in the most uneven weight."""
    ratio_after: float
    clips_replaced: int
    clips_left: int
    """Ties that were left alone for a Clip in them."""


def equalize_cross_layer(model: "ir.Model", ranges: Ranges | None) -> EqualizationResult:
    """Equalise the channels between the products of a graph, in place."""
    ties, clipped = _find_ties(model, ranges)
    magnitudes: dict[ir.Node, Array] = {}  # the largest at each output and input of a group
    for product in (product for tie in ties for product in tie.products):
        weights = product.weights()
        largest = np.maximum(weights.max(axis=2), -weights.min(axis=2))
        magnitudes[product.node] = np.ascontiguousarray(largest, np.float64)
    before = _ratio(ties, magnitudes)
    for _ in range(_ROUNDS):
        if max((_settle(tie, magnitudes) for tie in ties), default=0.0) < _CONVERGED:
            break
    changed = [tie for tie in ties if np.abs(tie.factors - 1).max() > _CONVERGED]
    after = _ratio(ties, magnitudes)
    _apply(changed)
    return EqualizationResult(
        ties=len(changed),
        products=len({product.node for tie in changed for product in tie.products}),
        ratio_before=before,
        ratio_after=after,
        clips_replaced=len({clip for tie in changed for clip in tie.unbounded}),
        clips_left=clipped,
    )


def _find_ties(model: "ir.Model", ranges: Ranges | None) -> tuple[list[Equalized], int]:
    """List all ties, and count those that a Clip prevents."""
    found = channels.find_ties(channels.find(model))
    limited = [(tie, _limits(tie, ranges)) for tie in found]
    free = [Equalized(tie, *limits[:2], np.ones(len(limits[0])), limits[2]) for tie, limits in limited if limits]
    return free, len(found) - len(free)


def _limits(tie: Tie, ranges: Ranges | None) -> "tuple[Array, Array, tuple[ir.Node, ...]] | None":
    """Find least and largest factors, and the Clips that can go; None if it is unknown where a Clip cuts."""
    count = tie.readers[0].count
    smallest, largest = np.full(count, 1 / _LARGEST_FACTOR), np.full(count, _LARGEST_FACTOR)
    for reader in tie.readers:
        known = _by_channel(reader.product.data, reader.product.inputs, ranges)
        seen = None if known is None else reader.select(known)
        if seen is not None and seen.max() > 0:  # no channel grows beyond the largest; one that was never alive stays
            smallest = np.maximum(np.where(seen > 0, seen / seen.max(), 1), smallest)
    gone = []
    for clip in (node for node in tie.nodes if node.op_type == "Clip"):
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
    """Read the upper bound of a Clip that cuts at 0 below; None for others, and where a bound is no constant."""

    def edge(index: int, word: str, missing: float) -> float:
        if word in clip.attributes:  # in old opsets
            return clip.attributes[word].as_float()
        if index >= len(clip.inputs) or clip.inputs[index] is None:
            return missing
        number = edit.read(clip.inputs[index])
        return np.nan if number is None else float(number.reshape(-1)[0])

    low, high = edge(1, "min", -np.inf), edge(2, "max", np.inf)
    return high if low == 0 and high > 0 else None


def _by_input(product: Product, magnitudes: Array) -> Array:
    """Compute the largest magnitude of each input channel."""
    largest: Array = magnitudes.reshape(product.groups, -1, magnitudes.shape[1]).max(axis=1)
    return largest.reshape(-1)


def _settle(tie: Equalized, magnitudes: "dict[ir.Node, Array]") -> float:
    """Make the ranges on both sides equal, as far as the limits allow; return the largest relative change."""
    outputs, inputs = _sides(tie.tie, magnitudes)
    alive = _alive(outputs) & _alive(inputs)
    wanted = tie.factors * np.sqrt(np.where(alive, outputs, 1) / np.where(alive, inputs, 1))
    settled = np.where(alive, np.clip(wanted, tie.smallest, tie.largest), tie.factors)
    change = settled / tie.factors
    tie.factors = settled
    for writer in tie.tie.writers:
        magnitudes[writer.node] /= change[:, None]
    for reader in tie.tie.readers:
        theirs, groups = magnitudes[reader.product.node], reader.product.groups
        split = theirs.reshape(groups, -1, theirs.shape[1])  # a view: groups × outputs × inputs of a group
        split *= reader.spread(change).reshape(groups, 1, -1)
    return float(np.abs(change - 1).max())


def _sides(tie: Tie, magnitudes: "dict[ir.Node, Array]") -> tuple[Array, Array]:
    """Compute the largest magnitude of each channel in the weights that write it, and in those that read it."""
    written = [magnitudes[writer.node].max(axis=1) for writer in tie.writers]
    read = [reader.select(_by_input(reader.product, magnitudes[reader.product.node])) for reader in tie.readers]
    return np.max(written, axis=0), np.max(read, axis=0)


def _ratio(ties: Sequence[Equalized], magnitudes: "dict[ir.Node, Array]") -> float:
    """Compute the largest ratio of a channel's range to another's."""
    worst = 1.0
    for each in (side for tie in ties for side in _sides(tie.tie, magnitudes)):
        alive = each[_alive(each)]
        if alive.size:
            worst = max(worst, float(alive.max() / alive.min()))
    return worst


def _alive(magnitudes: Array) -> Array:
    return np.asarray(magnitudes > _DEAD * magnitudes.max())


def _apply(ties: Sequence[Equalized]) -> None:
    """Write the factors into the weights, each weight once, and into what lies between."""
    outputs = {writer.node: 1 / each.factors for each in ties for writer in each.tie.writers}
    inputs: dict[ir.Node, Array] = {}
    for each in ties:
        for reader in each.tie.readers:
            node, factors = reader.product.node, reader.spread(each.factors)
            inputs[node] = inputs.get(node, 1) * factors
    every = {product.node: product for each in ties for product in each.products}
    for node, product in every.items():
        product.scale(outputs.get(node), inputs.get(node))
    for each in ties:
        for addend in each.tie.addends:
            addend.scale(1 / each.factors)
        for clip in each.unbounded:
            clip.op_type = "Relu"
            clip.resize_inputs(1)
            clip.attributes.clear()


class CrossLayerEqualization(GraphPass):
    """Scale the channels of neighbouring layers against each other; ``ranges``, where given, show how far."""

    name: ClassVar[str] = "equalise"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir")
    stage: ClassVar[Stage] = "rescale"
    reads: ClassVar[tuple[str, ...]] = ("quantisation",)

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make one for a precision with ranges of activations, where the recipe wants it."""
        return (cls(),) if KINDS[request.precision].calibrated and options["quantisation"].equalise else ()

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite weights and biases; names stay.

        Raises:
            DataError: the ranges are of another graph.
        """
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
            notes.append(f"{done.clips_left} sets of channels were left alone, as a Clip {why}")
        if not done.ties:
            effect = edit.pass_on(artifact.path, out, "no two neighboring layers have channels to equalize")
            return effect.model_copy(update={"notes": (*effect.notes, *notes)})
        progress("writing")
        return self.save(
            model,
            out,
            f"equalized {done.ties} sets of channels between {done.products} products; "
            f"largest channel ratio {done.ratio_before:.3g} → {done.ratio_after:.3g}",
            notes=tuple(notes),
        )
