"""Equalize across layers: scale channels of neighboring layers against each other until their ranges agree.

Networks with depthwise convolutions need it before they are quantized: their channels differ by orders of magnitude,
and one scale has to do for all channels of a value.

Nagel, van Baalen, Blankevoort, Welling: Data-Free Quantization Through Weight Equalization and Bias Correction,
2019, arXiv:1906.04721, section 4.1. For a factor s > 0 of each channel, W₂·f(W₁·x + b) = (W₂·s)·f((W₁·x + b)/s)
wherever f(s·x) = s·f(x). With r₁ and r₂ the ranges of a channel in both weights, s = √(r₁/r₂) makes them equal.

Beyond the paper: where ranges of real data are known, no channel is made larger than the largest one is already, as
the scale that all of them share would grow with it. Of a channel that is 0 throughout these data, as some are behind a
ReLU, the weights that read it become as large as the median of the others: larger ones would set the scale of a row
for nothing, and much smaller ones would make the channel large once other data wake it. A Clip (ReLU6) is only passed
by channels that stay below its bound, on those data and by some margin after they were scaled. Channels that only
normalizations or constant factors read become as large as the largest one
(:mod:`~enginesmith.pipeline.passes.rescale.ends`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from enginesmith.calibration import ranges
from enginesmith.calibration.ranges import Ranges
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.base import PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.rescale import ends, labels, products
from enginesmith.pipeline.passes.rescale.axes import Labels
from enginesmith.pipeline.passes.rescale.ends import Spread
from enginesmith.pipeline.passes.rescale.labels import ChannelLabels
from enginesmith.pipeline.passes.rescale.products import LARGEST_FACTOR, LARGEST_IDLE_FACTOR, Product
from enginesmith.pipeline.tensors import Array

_ROUNDS = 100
_CONVERGED = 1e-3  # of a factor, relative
_DEAD = 1e-6  # of the largest range: channels below that do nothing
_HEADROOM = 0.8  # share of a Clip's bound that channels are scaled up to, as other data may go beyond what was seen


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
    leveled: Spread
    """Values whose channels were made alike as only what takes factors back reads them."""


def equalize_cross_layer(model: "ir.Model", ranges: Ranges | None) -> EqualizationResult:
    """Equalize the channels between the products of a graph, in place."""
    every = products.find(model)
    equalizer = _Equalizer(labels.label(model, every), every, ranges)
    before = equalizer.measure_ratio()
    for _ in range(_ROUNDS):
        if max((equalizer.settle(each) for each in equalizer.sets), default=0.0) < _CONVERGED:
            break
    after = equalizer.measure_ratio()
    return equalizer.finish(before, after)


@dataclass(frozen=True)
class _Limits:
    """Least and largest factor of each label, and the Clips that can go, as their bound is out of reach."""

    smallest: Array
    largest: Array
    unbounded: "tuple[tuple[ir.Node, Labels], ...]"
    clipped: Array
    """Labels that stay, as it is not known where a Clip cuts."""
    idle: Array
    """Labels whose channels are 0 wherever something is known of them."""
    levels: Array
    """Divisors of labels that no product reads; 1 for all others."""
    live: "dict[ir.Node, Array]"
    """For products of which that is known: which of their inputs are ever anything but 0."""

    @classmethod
    def find(cls, channel_labels: ChannelLabels, ranges: Ranges | None) -> Self:
        smallest, largest = (np.full(channel_labels.count, end) for end in (1 / LARGEST_FACTOR, LARGEST_FACTOR))
        seen, awake, live = *np.zeros((2, channel_labels.count), bool), dict[ir.Node, Array]()
        for product, read in channel_labels.readers:
            magnitudes = _find_inputs(product, ranges)
            if magnitudes is not None and magnitudes.max() > 0:
                np.maximum.at(smallest, read, magnitudes / magnitudes.max())  # no channel grows beyond the largest
                live[product.node] = magnitudes > 0
                seen[read], awake[read[magnitudes > 0]] = True, True
        clipped, gone = np.zeros(channel_labels.count, bool), []
        for clip, passed in channel_labels.clips:
            channels, bound = passed.reshape(-1), _bound(clip)
            if bound == np.inf:
                continue
            reached = _by_channel(clip.outputs[0], len(channels), ranges)
            whole = ranges.tensors.get(clip.outputs[0].name or "") if ranges is not None else None
            if reached is None and whole is not None:  # only the largest number of all channels is known
                reached = np.full(len(channels), whole.maximum)
            if bound is None or reached is None or (reached >= bound).all():
                clipped[channels] = True
            elif reached.max() < bound:
                gone.append((clip, channels))
            else:
                cut = reached >= bound
                stays = cut | (reached == 0)  # of what is idle, nothing shows how far it is from the bound
                np.maximum.at(smallest, channels, np.where(stays, 1, reached / (_HEADROOM * bound)))
                np.minimum.at(largest, channels, np.where(cut, 1, np.inf))
        idle = seen & ~awake
        smallest[idle] = np.maximum(smallest[idle], 1 / LARGEST_IDLE_FACTOR)
        largest[idle] = np.minimum(largest[idle], LARGEST_IDLE_FACTOR)
        ended = ends.find_limits(channel_labels, ranges, LARGEST_IDLE_FACTOR)
        smallest = np.maximum(smallest, ended.smallest)
        return cls(np.minimum(smallest, 1), largest, tuple(gone), clipped, idle, ended.levels, live)


class _Equalizer:
    """Equalizes sets of channels: all those that one product reads and that can be scaled."""

    def __init__(self, channel_labels: ChannelLabels, every: Sequence[Product], ranges: Ranges | None) -> None:
        self._labels, self._limits = channel_labels, _Limits.find(channel_labels, ranges)
        self._ranges = ranges
        self._factors = np.ones(channel_labels.count)
        self._magnitudes: dict[ir.Node, Array] = {}  # the largest at each output and input of a group
        for product in every:
            weights = product.weights()
            largest = np.maximum(weights.max(axis=2), -weights.min(axis=2))
            self._magnitudes[product.node] = np.ascontiguousarray(largest, np.float64)
        written = np.zeros(channel_labels.count, bool)
        for _, channels in channel_labels.writers:
            written[channels] = True
        for _, channels in channel_labels.sources:
            written[channels] = False
        free = written & ~channel_labels.fixed
        wanted = [
            each for each in {tuple(np.unique(read[free[read]])): None for _, read in channel_labels.readers} if each
        ]
        left = [np.array(each)[~self._limits.clipped[list(each)]] for each in wanted]
        self.sets = [_ChannelSet.find(channel_labels, each) for each in left if each.size]
        self.clipped = sum(len(each) < len(whole) for each, whole in zip(left, wanted, strict=True))

    def settle(self, each: "_ChannelSet") -> float:
        """Make the ranges on both sides equal, as far as the limits allow; return the largest relative change."""
        outputs, inputs = each.measure_sides(self._magnitudes)
        factors, limits = self._factors[each.labels], self._limits
        idle = limits.idle[each.labels]
        alive = _alive(outputs) & _alive(inputs) & ~idle
        ratios = np.sqrt(np.where(alive, outputs, 1) / np.where(alive, inputs, 1))
        if idle.any():
            ratios[idle] = self._match_idle(each)[idle]
        settled = np.clip(factors * ratios, limits.smallest[each.labels], limits.largest[each.labels])
        change = np.where(alive | idle, settled, factors) / factors
        self._factors[each.labels] *= change
        each.divide(self._magnitudes, change)
        return float(np.abs(change - 1).max())

    def _match_idle(self, each: "_ChannelSet") -> Array:
        """Compute by what the columns of channels have to be multiplied to match live ones, in all that read them."""
        least = np.full(len(each.labels), np.inf)
        for part in each.readers:
            live = self._limits.live.get(part.product.node)
            if live is not None:
                columns = _by_input(part.product, self._magnitudes[part.product.node])
                matched = products.match_columns(columns, live.reshape(columns.shape))
                np.minimum.at(least, part.places, matched.reshape(-1)[part.channels])
        return np.where(np.isfinite(least), least, 1)

    def measure_ratio(self) -> float:
        """Compute the largest ratio of a channel's range to another's in the same set."""
        worst = 1.0
        for side in (side for each in self.sets for side in each.measure_sides(self._magnitudes)):
            alive = side[_alive(side)]
            if alive.size:
                worst = max(worst, float(alive.max() / alive.min()))
        return worst

    def finish(self, before: float, after: float) -> EqualizationResult:
        """Write the factors into the graph."""
        changed = [each for each in self.sets if np.abs(self._factors[each.labels] - 1).max() > _CONVERGED]
        factors = self._limits.levels
        leveled = ends.measure_spread(self._labels, self._ranges, factors)
        for each in changed:
            factors[each.labels] = self._factors[each.labels]
        self._labels.divide(factors)
        gone = {clip for clip, channels in self._limits.unbounded if (factors[channels] != 1).any()}
        for clip in gone:
            clip.op_type = "Relu"
            clip.resize_inputs(1)
            clip.attributes.clear()
        return EqualizationResult(
            ties=len(changed),
            products=len({part.product.node for each in changed for part in (*each.writers, *each.readers)}),
            ratio_before=before,
            ratio_after=after,
            clips_replaced=len(gone),
            clips_left=self.clipped,
            leveled=leveled,
        )


@dataclass(frozen=True)
class _Part:
    """Channels of a product that are in a set: their numbers, and where their labels are in it."""

    product: Product
    channels: Array
    places: Array
    passed: Array | float = 1.0
    """By what constants multiply these channels behind the product, as layer scale does."""


@dataclass(frozen=True)
class _ChannelSet:
    """Labels whose factors are chosen together, and the products on both sides of their channels."""

    labels: Array
    """In ascending order."""
    writers: list[_Part]
    readers: list[_Part]

    @classmethod
    def find(cls, channel_labels: ChannelLabels, labels: Array) -> Self:
        """Find the products of these labels."""
        writers, readers = list[_Part](), list[_Part]()
        for parts, products_ in ((writers, channel_labels.writers), (readers, channel_labels.readers)):
            for product, theirs in products_:
                channels = np.flatnonzero(np.isin(theirs, labels))
                passed = channel_labels.passed[product.node][channels] if parts is writers else 1.0
                if channels.size:
                    parts.append(_Part(product, channels, np.searchsorted(labels, theirs[channels]), passed))
        return cls(labels, writers, readers)

    def measure_sides(self, magnitudes: "Mapping[ir.Node, Array]") -> tuple[Array, Array]:
        """Compute the largest magnitude of each channel in the weights that write it, and in those that read it.

        What constants multiply on the way counts as written: two writers of a stream may have other constants.
        """
        written, read = np.zeros((2, len(self.labels)))
        for part in self.writers:
            largest = magnitudes[part.product.node].max(axis=1)[part.channels]
            np.maximum.at(written, part.places, largest * part.passed)
        for part in self.readers:
            largest = _by_input(part.product, magnitudes[part.product.node])
            np.maximum.at(read, part.places, largest.reshape(-1)[part.channels])
        return written, read

    def divide(self, magnitudes: "dict[ir.Node, Array]", factors: Array) -> None:
        """Divide the channels, one factor for each label."""
        for part in self.writers:
            magnitudes[part.product.node][part.channels] /= factors[part.places, None]
        for part in self.readers:
            theirs, groups = magnitudes[part.product.node], part.product.groups
            every = np.ones(part.product.inputs)
            every[part.channels] = factors[part.places]
            split = theirs.reshape(groups, -1, theirs.shape[1])  # a view: groups × outputs × inputs of a group
            split *= every.reshape(groups, 1, -1)


def _by_channel(value: "ir.Value", count: int, ranges: Ranges | None) -> Array | None:
    known = ranges.channels.get(value.name or "") if ranges is not None else None
    return np.array(known.amax) if known is not None and len(known.amax) == count else None


def _find_inputs(product: Product, ranges: Ranges | None) -> Array | None:
    """Find the largest magnitude of each channel that a product reads; None where it is not known.

    Statistics are of the last axis for all matrices of a stack together: no matrix reads more than that.
    """
    if not product.reads_stack:
        return _by_channel(product.data, product.inputs, ranges)
    known = layers.find_channel_statistics(product.node, ranges)
    if known is None or len(known.amax) != product.inputs // product.groups:
        return None
    return np.tile(np.array(known.amax), product.groups)


def _bound(clip: "ir.Node") -> float | None:
    """Read the upper bound of a Clip that cuts at 0 below; None for others, and where a bound is no constant."""

    def edge(index: int, word: str, missing: float) -> float:
        if word in clip.attributes:  # in old opsets
            return clip.attributes[word].as_float()
        if (given := edit.find_input(clip, index)) is None:
            return missing
        number = edit.read(given)
        return np.nan if number is None else float(number.reshape(-1)[0])

    low, high = edge(1, "min", -np.inf), edge(2, "max", np.inf)
    return high if low == 0 and high > 0 else None


def _by_input(product: Product, magnitudes: Array) -> Array:
    """Compute the largest magnitude of each input channel: groups × inputs of a group."""
    largest: Array = magnitudes.reshape(product.groups, -1, magnitudes.shape[1]).max(axis=1)
    return largest


def _alive(magnitudes: Array) -> Array:
    return np.asarray(magnitudes > _DEAD * magnitudes.max())


class CrossLayerEqualization(GraphPass):
    """Scale the channels of neighboring layers against each other; ``ranges``, where given, show how far."""

    name: ClassVar[str] = "equalize"
    stage: ClassVar[Stage] = "rescale"
    reads: ClassVar[tuple[str, ...]] = ("quantization",)

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make one for a precision with ranges of activations, where the recipe wants it."""
        return (cls(),) if KINDS[request.precision].calibrated and options["quantization"].equalize else ()

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
        if leveled := done.leveled.values:
            ratios = f"largest channel ratio {done.leveled.before:.3g} → {done.leveled.after:.3g}"
            notes.append(
                f"channels of {leveled} values that only normalizations or factors read are more alike now; {ratios}"
            )
        if not (done.ties or leveled):
            return edit.pass_on(artifact.path, out, "no two neighboring layers have channels to equalize", *notes)
        progress("writing")
        return self.save(
            model,
            out,
            f"equalized {done.ties} sets of channels between {done.products} products; "
            f"largest channel ratio {done.ratio_before:.3g} → {done.ratio_after:.3g}",
            notes=tuple(notes),
        )
