"""Scale channels between activations and the weights that they meet, wherever that is free: (x/s)·(s·W) = x·W.

Where an operator before them can take 1/s, as a normalization or a product can, it costs nothing when the graph runs.
Factors s of input channels are to make products lose least when they are quantized. ``smooth``: Xiao et al.:
SmoothQuant, 2022, arXiv:2211.10438, equation 4: s = max|x|^α / max|W|^(1−α), for activations with outliers in int8.
``awq``: Lin et al.: AWQ, 2023, arXiv:2306.00978, section 3.2: s = mean|x|^α, for weights in int4 beside exact
activations.

The papers run the network to find α. Here each α is judged by the error that rounding should bring into the products,
from the statistics of channels alone; how channels vary together is left out. That is enough to tell good factors from
bad ones, and none are used that should do harm.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field

from enginesmith.calibration import ranges
from enginesmith.calibration.ranges import ChannelStatistics, Ranges
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.base import PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.quantize.quantizers import block_size, blocked
from enginesmith.pipeline.passes.rescale import labels, products
from enginesmith.pipeline.passes.rescale.axes import Labels, dims, find_axis, strip
from enginesmith.pipeline.passes.rescale.products import (
    LARGEST_FACTOR,
    LARGEST_IDLE_FACTOR,
    Product,
    inputs_first,
    match_columns,
)
from enginesmith.pipeline.tensors import Array

AWQ_EXPONENTS = (0.2, 0.4, 0.6, 0.8)
_LARGEST = 2.0**10
"""Largest factor that is tried at first, where more may do harm: of weights that read a channel of another unit
beside others; the only one in int4, whose scales are often float16."""
_TINY = 1e-30
_MANY = 64
_INT8_LEVELS = 127
_STEP_VARIANCE = 1 / 12  # of the error of rounding, in steps
_CHUNK = 1 << 20  # elements worked on at a time


class Choice(NamedTuple):
    """The best factors, and the energy of the error as a share of the products' without and with them."""

    factors: Array
    before: float
    after: float


def choose_smooth(
    weights: Sequence[Array],
    statistics: ChannelStatistics,
    exponents: Iterable[float],
    error: Callable[[Array], float] | None = None,
) -> Choice:
    """Find the best factors for int8 of weights that meet the same activation; ones if none helps.

    Weights are groups × outputs × inputs × places in the kernel. ``error`` is that of factors, where it is more than
    that of these products. Channels that are 0 throughout get factors of their own, also where no others help.
    """
    amax = np.array(statistics.amax)
    columns = _find_columns(weights)
    largest = np.max(columns, axis=0).reshape(-1)
    alive = (amax > 0) & (largest > 0)
    base, met = np.where(alive, amax, 1.0), np.where(alive, largest, 1.0)
    given = [base**each / met ** (1 - each) for each in exponents]
    far = [_limit(each, LARGEST_FACTOR) for each in given if max(each.max(), 1 / each.min()) > _LARGEST]
    tried = (np.where(alive, each, 1.0) for each in chain((_limit(each, _LARGEST) for each in given), far))
    matched = (_match_idle(columns, factors, amax > 0) for factors in chain([np.ones(len(amax))], tried))
    return _best(len(amax), matched, error or (lambda factors: _int8_error(weights, factors, statistics)))


def smooth_exponents(*, few: bool) -> tuple[float, ...]:
    """List exponents worth trying; fewer where each channel was seen but a ``few`` times.

    Towards 1 all channels become equally large on the data that they were judged by, and other data are cut off. Held
    against other texts, a sentence encoder lost up to 1.5 dB in single products at 0.7, and 4.7 at 0.9.
    """
    return tuple(step / 10 for step in range(6 if few else 8))


def choose_awq(
    weights: Sequence[Array],
    statistics: ChannelStatistics,
    exponents: Iterable[float],
    error: Callable[[Array], float] | None = None,
) -> Choice:
    """Find the best factors for int4 by blocks of inputs; ones if none helps, or the inputs do not divide into blocks.

    The largest and smallest factor are center around 1, but for those of channels that are 0 throughout.
    """
    absolute = np.array(statistics.mean_absolute)
    alive, ones = absolute > 0, np.ones(len(absolute))
    if not block_size(len(absolute)):
        return Choice(ones, 0.0, 0.0)

    def center(values: Array) -> Array:
        if not alive.any():
            return ones
        centered = values / np.sqrt(values[alive].max() * values[alive].min())
        return np.where(alive, _limit(centered, _LARGEST), 1.0)

    columns = _find_columns(weights)
    tried = (_match_idle(columns, center(np.where(alive, absolute, 1.0) ** each), alive) for each in exponents)
    return _best(len(absolute), tried, error or (lambda factors: _int4_error(weights, factors, statistics)))


def _find_columns(weights: Sequence[Array]) -> list[Array]:
    """Compute the largest magnitude of each column of some weights: groups × inputs."""
    return [np.abs(weight).max(axis=(1, 3)) for weight in weights]


def _match_idle(columns: Sequence[Array], factors: Array, live: Array) -> Array:
    """Put factors in place of those of channels that are 0 throughout, so that their columns match the others."""
    if live.all():
        return factors
    scaled = (each * factors.reshape(each.shape) for each in columns)
    matched = np.min([match_columns(each, live.reshape(each.shape)) for each in scaled], axis=0).reshape(-1)
    return np.where(live | np.isinf(matched), factors, _limit(matched, LARGEST_IDLE_FACTOR))


def _best(count: int, tried: Iterable[Array], error: Callable[[Array], float]) -> Choice:
    best = np.ones(count)
    before = least = error(best)
    for scale in tried:
        if (lost := error(scale)) < least:
            best, least = scale, lost
    return Choice(best, before, least)


def _limit(factors: Array, largest: float) -> Array:
    return np.clip(factors, 1 / largest, largest)


def _int8_error(
    weights: Sequence[Array], scale: Array, statistics: ChannelStatistics, given: Array | float = 0.0
) -> float:
    """Estimate the error with one scale for activations, and one for each output of weights.

    The activations have noise already: ``given``, the mean square of each channel's.
    """
    square = np.array(statistics.mean_square)
    noise = given + np.where(square > 0, _noise(statistics, scale) * scale**2, 0)  # in units of the activation
    total = 0.0
    for weight in weights:
        groups, _, inputs, places = weight.shape
        energy = np.einsum("goik,goik->gi", weight, weight, dtype=np.float64).reshape(-1)
        narrow = scale.astype(np.float32).reshape(groups, 1, inputs, 1)
        steps = np.concatenate([np.abs(part * narrow).max(axis=(2, 3)) for part in _parts(weight)], axis=1)
        power = (square / scale**2).reshape(groups, inputs).sum(axis=1) * places
        lost = _STEP_VARIANCE * power @ ((steps.astype(np.float64) / _INT8_LEVELS) ** 2).sum(axis=1)
        total += _share(float(noise @ energy + lost), float(square @ energy))
    return total / len(weights)


def _with_equal_outputs(weight: Array, square: Array) -> Array:
    """Scale a weight so that all outputs are equally large, for inputs of these mean squares.

    Each output has a scale of its own in few bits, so its relative error stays the same.
    """
    groups, _, inputs, _ = weight.shape
    energy = np.einsum("goik,goik->goi", weight, weight, dtype=np.float64)
    signal = np.einsum("goi,gi->go", energy, square.reshape(groups, inputs))
    size = np.sqrt(np.where(signal > 0, signal, 1.0))
    return (weight / size[:, :, None, None]).astype(np.float32)


def _noise(statistics: ChannelStatistics, scale: Array) -> float:
    """Estimate the mean square of the error of rounding to int8, of activations divided by a scale for each channel."""
    step = float((np.array(statistics.amax) / scale).max()) / _INT8_LEVELS
    return _STEP_VARIANCE * step**2


def _int4_error(weights: Sequence[Array], scale: Array, statistics: ChannelStatistics) -> float:
    """Estimate the error of weights (1 × outputs × inputs × 1) in their blocks; activations are exact."""
    block = block_size(len(scale))
    if not block:
        return 0.0
    square = np.array(statistics.mean_square)
    narrow, importance = scale.astype(np.float32)[:, None], square / scale**2
    total = 0.0
    for weight in weights:
        lost, energy = np.zeros(len(square)), np.zeros(len(square))
        for part in _parts(weight):
            matrix = part[0, :, :, 0].T * narrow
            energy += _energies(matrix)
            lost += _energies(matrix - blocked(matrix, block, "fp32", importance).wide())
        total += _share(float(importance @ lost), float(importance @ energy))
    return total / len(weights)


def _energies(matrix: Array) -> Array:
    sums: Array = np.einsum("io,io->i", matrix, matrix, dtype=np.float64)
    return sums


def _parts(weight: Array) -> Iterator[Array]:
    """Iterate over some outputs at a time, so that intermediate results stay small."""
    rows = max(1, _CHUNK * weight.shape[1] // weight.size)
    return (weight[:, start : start + rows] for start in range(0, weight.shape[1], rows))


def _count_places(value: "ir.Value", axis: int) -> float:
    """Count the places of each channel in a sample; many along a dynamic axis."""
    sizes = dims(value)
    others = (size for index, size in enumerate(sizes) if index not in (0, axis % len(sizes)))
    return math.prod(size if isinstance(size, int) else _MANY for size in others)


def _share(error: float, signal: float) -> float:
    return error / signal if signal > 0 else 0.0


Mode = Literal["smooth", "awq"]
_FEW = 1024  # times that each channel was seen
_WORTH_WRITING = 0.99
_WORTH_MULTIPLYING = 0.9
"""Share of the error that may be left, where factors are free and where they cost a multiplication."""


@dataclass
class Smoothed:
    """Counts of values that products read, but for ``products`` and ``all_products``; with the error and ratios."""

    all_products: int = 0
    products: int = 0
    values: int = 0
    inserted: int = 0
    shared: int = 0
    """Left alone as something else reads one of the weights, or two products read it along other axes."""
    unknown: int = 0
    """Left alone as the ranges say nothing of them."""
    homeless: int = 0
    """Left alone as the factors would have cost a multiplication."""
    even: int = 0
    """Left alone as factors would have changed little or nothing for the better."""
    ratio_before: float = 1.0
    """Largest over median magnitude of the channels of the most uneven value that was scaled."""
    ratio_after: float = 1.0
    error_before: float = 0.0
    """Sum over the scaled values: energy of what rounding should add to the products, as a share of theirs."""
    error_after: float = 0.0


def smooth(model: "ir.Model", ranges: Ranges, settings: "Smooth", products: Collection[str] | None = None) -> Smoothed:
    """Scale every value of a graph that can be scaled, in place, by the method, exponent and leave of ``settings``.

    With ``products``, only what nodes of these names read.
    """
    smoother = _Smoother(model, ranges, settings)
    for value, axis, readers in smoother.find_values(products):
        smoother.scale(value, axis, readers)
    return smoother.done


class _Reading(NamedTuple):
    """Hold what products read of a value: their weights, what is known of its channels, and the labels of these."""

    weights: list[Array]
    statistics: ChannelStatistics
    labels: Labels
    before: list[tuple[ChannelStatistics, Labels, Array]]
    """Values that the channels come from: they are rounded, too. With their labels, and the gain of noise from there to
    each of our channels, as a ratio of mean squares."""


class _Smoother:
    def __init__(self, model: "ir.Model", ranges: Ranges, settings: "Smooth") -> None:
        self._ranges, self._settings = ranges, settings
        every = products.find(model)
        self._first = model.graph[0]
        self._labels = labels.label(model, every)
        self._read = {product.node: read for product, read in self._labels.readers}
        self._movable = ~self._labels.fixed
        for _, passed in self._labels.clips:
            self._movable[passed] = False
        self._costing = np.zeros(self._labels.count, bool)
        """Labels whose factors cost a multiplication."""
        for _, there in self._labels.sources:
            self._costing[there] = True
        self._read_by: dict[tuple[ir.Value, int], list[Product]] = {}
        self._scaled = np.zeros(self._labels.count, bool)
        """Labels that were scaled already: what is known of their channels no longer holds."""
        for product in every:
            # of a stack with inputs of its own for each matrix, statistics of the channels are not known
            if (product.is_matrix or settings.mode == "smooth") and not product.reads_stack:
                self._read_by.setdefault((product.data, product.axis), []).append(product)
        self.done = Smoothed(all_products=sum(map(len, self._read_by.values())))

    def scale(self, value: "ir.Value", axis: int, readers: Sequence[Product]) -> None:
        """Scale a value and everything that it is multiplied with, if there is a place for the factors."""
        weights = list({product.weight: product for product in readers}.values())
        uses = {use for product in weights for use in product.weight.uses()}
        alone = {use.node for use in uses} <= {product.node for product in readers}
        statistics = self._statistics(value, axis, readers[0].inputs)
        both_ways = len({(product.weight, inputs_first(product.node)) for product in readers}) > len(weights)
        channels = self._read[readers[0].node]
        movable = self._movable[channels].all() and len(np.unique(channels)) == len(channels)
        free = movable and not self._costing[channels].any()
        free &= self._find_readers(channels) <= {use.node for use in uses}
        if free and not alone and self._scaled[channels].any():
            self._count(readers)  # along with others that have its weight
        elif both_ways or any(use.idx != 1 for use in uses) or not (alone or free):
            self.done.shared += 1
        elif statistics is None:
            self.done.unknown += 1
        elif not free and not self._settings.insert:
            self.done.homeless += 1
        else:
            together = movable and not self._scaled[channels].any()
            error = None
            if together:  # all products that read these channels are scaled along
                error = partial(self._sum_errors, self._find_readings(self._find_readers(channels)), channels)
            choice = self._choose(value, weights, statistics, error)
            if choice.after >= (_WORTH_WRITING if free else _WORTH_MULTIPLYING) * choice.before:
                self.done.even += 1
                return
            self._count(readers)
            self._note(statistics, choice)
            if together:
                self._divide(channels, choice.factors)
                return
            shape = [1] * len(dims(value))
            shape[axis] = len(channels)
            self._insert(
                value, (1 / choice.factors).reshape(shape), readers[0].node, [(reader.node, 0) for reader in readers]
            )
            for product in weights:
                product.scale(inputs=choice.factors)

    def find_values(self, names: Collection[str] | None) -> Iterator[tuple["ir.Value", int, list[Product]]]:
        """Iterate over what nodes of these names read, or all do; large values first, as means say less of channels."""
        every = [(value, axis, readers) for (value, axis), readers in self._read_by.items()]
        if self._settings.insert:
            every.sort(key=lambda each: -math.prod(size for size in dims(each[0]) if isinstance(size, int)))
        for value, axis, readers in every:
            channels = self._read[readers[0].node]
            scaled_with = {node.name for node in self._find_readers(channels)} if self._settings.insert else set()
            scaled_with.update(reader.node.name for reader in readers)
            done = self._settings.insert and self._scaled[channels].any()
            if (names is None or not scaled_with.isdisjoint(names)) and not done:
                yield value, axis, readers

    def _find_readers(self, channels: Labels) -> "set[ir.Node]":
        """Find all products that read channels with one of these labels, but for those that cannot be scaled."""
        wanted = channels[self._movable[channels]]
        return {node for node, read in self._read.items() if np.isin(read, wanted).any()}

    def _find_readings(self, nodes: "set[ir.Node]") -> list[_Reading]:
        """Find what these products read, where something is known of it."""
        readings = []
        for (value, axis), readers in self._read_by.items():
            weights = {product.weight: product.grouped() for product in readers if product.node in nodes}
            statistics = self._statistics(value, axis, readers[0].inputs) if weights else None
            if statistics is not None:
                read = self._read[readers[0].node]
                judged = [self._to_judge(weight, statistics) for weight in weights.values()]
                readings.append(_Reading(judged, statistics, read, self._find_before(value, axis, read)))
        return readings

    def _to_judge(self, weight: Array, statistics: ChannelStatistics) -> Array:
        """Return the weight that errors are estimated of."""
        return _with_equal_outputs(weight, np.array(statistics.mean_square)) if self._settings.outputs_apart else weight

    def _find_before(
        self, value: "ir.Value", place: int, read: Labels
    ) -> "list[tuple[ChannelStatistics, Labels, Array]]":
        """Find values that channels come from, with their labels, and the gain of noise on the way from there."""
        sources: list[tuple[ChannelStatistics, Labels, Array]] = []
        square = np.array(self._ranges.channels[str(value.name)].mean_square)
        for before, there in self._labels.values.items():
            if before is value:
                return sources
            axis, theirs = find_axis(there), there.reshape(-1)
            if axis is None or (statistics := self._statistics(before, axis, theirs.size)) is None:
                continue
            if np.isin(read, theirs[~self._labels.fixed[theirs]]).any():
                of_label = np.full(self._labels.count, np.inf)  # mean square of what has this label there
                of_label[theirs] = np.maximum(statistics.mean_square, _TINY)
                averaged = _count_places(before, axis) / _count_places(value, place)  # as a mean evens noise out
                sources.append((statistics, theirs, square / of_label[read] / max(1.0, averaged)))
        return sources

    def _sum_errors(self, readings: "Sequence[_Reading]", channels: Labels, factors: Array) -> float:
        """Estimate the error in all products of these readings where channels are divided by factors."""
        every = np.ones(self._labels.count)
        every[channels] = factors
        if self._settings.mode == "awq":
            return sum(_int4_error(each.weights, every[each.labels], each.statistics) for each in readings)
        total = 0.0
        for each in readings:
            scale = every[each.labels]
            noises = (gain * _noise(known, every[there]) for known, there, gain in each.before)
            total += _int8_error(each.weights, scale, each.statistics, sum(noises, np.zeros(len(scale))) * scale**2)
        return total

    def _statistics(self, value: "ir.Value", axis: int, count: int) -> ChannelStatistics | None:
        known, sizes = self._ranges.channels.get(value.name or ""), dims(value)
        if known is None or not sizes or sizes[axis] != count or len(known.amax) != count:
            return None
        return known if (known.axis - axis) % len(sizes) == 0 else None

    def _choose(
        self,
        value: "ir.Value",
        weights: Sequence[Product],
        statistics: ChannelStatistics,
        error: Callable[[Array], float] | None,
    ) -> Choice:
        alpha = self._settings.alpha
        arrays = [self._to_judge(product.grouped(), statistics) for product in weights]
        if self._settings.mode == "awq":
            return choose_awq(arrays, statistics, AWQ_EXPONENTS if alpha is None else (alpha,), error)
        whole = self._ranges.tensors.get(value.name or "")
        few = whole is not None and whole.count < _FEW * len(statistics.amax)
        exponents = (alpha,) if alpha is not None else smooth_exponents(few=few)
        return choose_smooth(arrays, statistics, exponents, error)

    def _divide(self, channels: Labels, factors: Array) -> None:
        """Divide channels, and all with the same labels; by multiplications where nothing else takes the factors."""
        every = np.ones(self._labels.count)
        every[channels] = factors
        for value, there in self._labels.sources:
            if (every[there] != 1).any():
                node, uses = value.producer(), [(use.node, use.idx) for use in value.uses()]
                self._insert(value, 1 / every[there], node or self._first, uses, after=node is not None)
        self._labels.divide(every)
        self._scaled[channels] = True

    def _insert(
        self,
        value: "ir.Value",
        factors: Array,
        beside: "ir.Node",
        uses: "Sequence[tuple[ir.Node, int]]",
        *,
        after: bool = False,
    ) -> None:
        """Add a multiplication before or after a node, for these uses of a value."""
        graph = beside.graph
        assert isinstance(graph, ir.Graph)
        name = edit.Names(graph).new(f"{value.name}_smooth")
        constant = edit.new(graph, f"{name}_factors", strip(factors).astype(np.float32))
        node = ir.node("Mul", [value, constant], name=name)
        node.metadata_props.update(beside.metadata_props)
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
        (graph.insert_after if after else graph.insert_before)(beside, node)
        for reader, index in uses:
            reader.replace_input_with(index, node.outputs[0])
        self.done.inserted += 1

    def _count(self, readers: Sequence[Product]) -> None:
        """Count a value that is scaled, and the products that read it."""
        self.done.values += 1
        self.done.products += len(readers)

    def _note(self, statistics: ChannelStatistics, choice: Choice) -> None:
        """Sum up the errors, and remember the most uneven value, before and after."""
        done, amax = self.done, np.array(statistics.amax)
        done.error_before += choice.before
        done.error_after += choice.after
        alive = amax > 0
        if not alive.any():
            return
        before, after = amax[alive], amax[alive] / choice.factors[alive]
        ratio = float(before.max() / np.median(before))
        if ratio > done.ratio_before:
            done.ratio_before, done.ratio_after = ratio, float(after.max() / np.median(after))


class Smooth(GraphPass):
    """Scale what matrix products read; needs ``ranges`` of the same graph."""

    name: ClassVar[str] = "smooth"
    stage: ClassVar[Stage] = "rescale"
    reads: ClassVar[tuple[str, ...]] = ("quantization",)
    requires: ClassVar[tuple[str, ...]] = ("ranges",)
    """With ``products``, a JSON list of nodes, only what these read is scaled."""

    mode: Mode = "smooth"
    """``smooth`` for activations in few bits, ``awq`` for weights in int4 beside exact activations."""
    alpha: float | None = Field(None, ge=0, le=1)
    """Share of the difficulty that moves into the weights; without a number, the best for each value."""
    insert: bool = False
    """Add a multiplication where the factors do not fit into the operators that are there."""
    outputs_apart: bool = False
    """Judge the error of each output of a product by that output alone, and not all by the largest ones."""

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make one for activations in few bits, or for weights in int4, where the recipe wants it."""
        quantization = options["quantization"]
        if KINDS[request.precision].calibrated and quantization.smooth is not None:
            yield cls(
                alpha=None if quantization.smooth == "auto" else quantization.smooth, insert=quantization.smooth_insert
            )
        if request.precision == "int4-weights" and quantization.awq:
            yield cls(mode="awq", insert=quantization.smooth_insert)

    def judging_outputs_apart(self) -> Self:
        return self.model_copy(update={"outputs_apart": True})

    @property
    def step_name(self) -> str:
        return self.mode

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite weights, and what comes before them.

        Raises:
            DataError: the ranges are of another graph.
        """
        known = ranges.load(records["ranges"].path, model_sha256=artifact.sha256)
        model = edit.load(artifact.path)
        progress("finding factors")
        products = json.loads(records["products"].path.read_text(encoding="utf-8")) if "products" in records else None
        done = smooth(model, known, self, products)
        if not done.values:
            return edit.pass_on(artifact.path, out, "no value could be scaled", *_notes(done))
        progress("writing")
        ratio = (
            f"; largest channel ratio {done.ratio_before:.3g} → {done.ratio_after:.3g}" if self.mode == "smooth" else ""
        )
        return self.save(
            model,
            out,
            f"scaled {done.products} of {done.all_products} products{ratio}; error of their rounding, "
            f"estimated, {done.error_after / done.error_before - 1:+.0%}",
            notes=_notes(done),
        )


def _notes(done: Smoothed) -> tuple[str, ...]:
    reasons = {
        "no place for the factors that would cost nothing": done.homeless,
        "a weight that something else reads too": done.shared,
        "no statistics of their channels": done.unknown,
        "little or nothing to gain": done.even,
    }
    left = [f"{count} values were left alone: {reason}" for reason, count in reasons.items() if count]
    return (*left, *([f"{done.inserted} multiplications were added"] if done.inserted else []))
