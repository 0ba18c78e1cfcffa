"""Channels scaled between activations and the weights that they meet, wherever that is free: (x/s)·(s·W) = x·W.

Where what comes before can take 1/s, as a normalisation or a product can, it costs nothing when the graph runs. Which
factors are good is found out in :mod:`enginesmith.pipeline.precision.scaling.factors`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from enginesmith.calibration.ranges import ChannelStatistics, Ranges
from enginesmith.pipeline.precision import constants
from enginesmith.pipeline.precision.scaling import channels, factors, products, trail
from enginesmith.pipeline.precision.scaling.products import Product
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

Mode = Literal["smooth", "awq"]
_FEW = 1024  # times that each channel was seen
_WORTH_WRITING = 0.99
_WORTH_MULTIPLYING = 0.9
"""Share of the error that may be left, where factors are free and where they cost a multiplication."""


@dataclass(frozen=True)
class Settings:
    """How factors are found and where they may go."""

    mode: Mode = "smooth"
    alpha: float | None = None
    """Exponent of the factors; without one, the best of a grid for each value."""
    insert: bool = False


@dataclass
class Smoothed:
    """What was done; counts are of values that products read, but for ``products`` and ``all_products``."""

    all_products: int = 0
    products: int = 0
    values: int = 0
    inserted: int = 0
    shared: int = 0
    """Left alone as something else reads one of the weights."""
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


def smooth(model: "ir.Model", ranges: Ranges, settings: Settings) -> Smoothed:
    """Scale every value of a graph that can be scaled, in place."""
    return _Smoother(model, ranges, settings).all()


class _Smoother:
    """One graph being worked on."""

    def __init__(self, model: "ir.Model", ranges: Ranges, settings: Settings) -> None:
        self._ranges, self._settings = ranges, settings
        every = products.find(model)
        self._made_by = {product.node.outputs[0]: product for product in every}
        self._read_by: dict[tuple[ir.Value, int], list[Product]] = {}
        for product in every:
            if product.is_matrix or settings.mode == "smooth":
                self._read_by.setdefault((product.data, product.axis), []).append(product)
        self._done = Smoothed(all_products=sum(map(len, self._read_by.values())))

    def all(self) -> Smoothed:
        """Scale one value after the other."""
        for (value, axis), readers in self._read_by.items():
            self._scale(value, axis, readers)
        return self._done

    def _scale(self, value: "ir.Value", axis: int, readers: Sequence[Product]) -> None:
        """Scale a value and everything that it is multiplied with, if there is a place for the factors."""
        nodes = {product.node for product in readers}
        weights = list({product.weight: product for product in readers}.values())
        place = channels.place(value, axis, readers[0].inputs)
        statistics = self._statistics(place) if place is not None else None
        if any(use.idx != 1 or use.node not in nodes for one in weights for use in one.weight.uses()):
            self._done.shared += 1
        elif place is None or statistics is None:
            self._done.unknown += 1
        elif (way := self._way(place, nodes)) is None and not self._settings.insert:
            self._done.homeless += 1
        else:
            choice = self._choose(place, weights, statistics)
            if choice.after >= (_WORTH_WRITING if way is not None else _WORTH_MULTIPLYING) * choice.before:
                self._done.even += 1
                return
            self._note(statistics, choice, len(readers))
            for product in weights:
                product.scale(inputs=choice.factors)
            if way is not None:
                way.scale(1 / choice.factors)
            else:
                self._insert(place, readers, 1 / choice.factors)

    def _statistics(self, place: channels.Place) -> ChannelStatistics | None:
        """What is known of the channels of a value."""
        known, rank = self._ranges.channels.get(place.value.name or ""), len(channels.sizes(place.value))
        fits = known is not None and len(known.amax) == place.total and known.axis % rank == place.axes[0]
        return known if fits else None

    def _way(self, place: channels.Place, nodes: "set[ir.Node]") -> trail.Trail | None:
        """How to scale a value for free, where nothing reads it but these nodes."""
        if place.value.is_graph_output() or any(use.node not in nodes for use in place.value.uses()):
            return None
        return trail.trace(place, self._made_by, trail.EXACT)

    def _choose(
        self, place: channels.Place, weights: Sequence[Product], statistics: ChannelStatistics
    ) -> factors.Choice:
        arrays, alpha = [one.grouped() for one in weights], self._settings.alpha
        if self._settings.mode == "awq":
            exponents = factors.AWQ_EXPONENTS if alpha is None else (alpha,)
            return factors.awq(arrays, statistics, exponents)
        whole = self._ranges.tensors.get(place.value.name or "")
        few = whole is not None and whole.count < _FEW * place.total
        return factors.smooth(arrays, statistics, (alpha,) if alpha is not None else factors.smooth_exponents(few=few))

    def _insert(self, place: channels.Place, readers: Sequence[Product], reciprocals: Array) -> None:
        """Multiply a value before these products read it."""
        import onnx_ir as ir

        value, first = place.value, readers[0].node
        graph = first.graph
        assert isinstance(graph, ir.Graph)
        name = constants.free_name(graph, f"{value.name}_smooth")
        constant = constants.new(graph, f"{name}_factors", place.broadcast(reciprocals).astype(np.float32))
        node = ir.node("Mul", [value, constant], name=name)
        node.metadata_props.update(first.metadata_props)
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
        graph.insert_before(first, node)
        for product in readers:
            product.node.replace_input_with(0, node.outputs[0])
        self._done.inserted += 1

    def _note(self, statistics: ChannelStatistics, choice: factors.Choice, readers: int) -> None:
        """Count, and remember the most uneven value and what became of it."""
        done, amax = self._done, np.array(statistics.amax)
        done.values += 1
        done.products += readers
        done.error_before += choice.before
        done.error_after += choice.after
        alive = amax > 0
        if not alive.any():
            return
        before, after = amax[alive], amax[alive] / choice.factors[alive]
        ratio = float(before.max() / np.median(before))
        if ratio > done.ratio_before:
            done.ratio_before, done.ratio_after = ratio, float(after.max() / np.median(after))
