"""Label the channels of values by what can be scaled for free: channels with the same label get the same factor.

f(s·x) = s·f(x) for a factor s > 0 of each channel, through operators that pass factors on exactly or only move channels
about. So channels get labels where a product reads them, and labels go backwards from there, through all that passes
factors on, to what can take them: another product, a normalization, a constant. Channels get labels, too, where
something reads them that takes their factors back: a normalization of each channel, or a constant factor. Where two
ways meet, in an addition or as a value has several readers, labels become equal. The label 0 is that of channels that
cannot be scaled.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.rescale import rules
from enginesmith.pipeline.passes.rescale.axes import FIXED, MOST, UNREAD, Labels, dims, find_axis, strip
from enginesmith.pipeline.passes.rescale.products import Product
from enginesmith.pipeline.tensors import Array


class End(NamedTuple):
    """A value whose reader takes back what its channels are divided by."""

    value: "ir.Value"
    labels: Labels


@dataclass
class ChannelLabels:
    """Hold what reads and writes the channels of each label; those of a product are one-dimensional."""

    count: int = 1
    """Labels are smaller."""
    fixed: Array = field(default_factory=lambda: np.ones(1, bool))
    """For each label, whether its channels cannot be scaled."""
    readers: list[tuple[Product, Labels]] = field(default_factory=list)
    writers: list[tuple[Product, Labels]] = field(default_factory=list)
    passed: "dict[ir.Node, Array]" = field(default_factory=dict)
    """For each writer, by what constants multiply its channels before these meet others of their label."""
    constants: "list[tuple[ir.Node, int, Labels]]" = field(default_factory=list)
    """Inputs of nodes that have to be scaled along: biases, scales of normalizations."""
    returned: "list[tuple[ir.Node, int, Labels]]" = field(default_factory=list)
    """Inputs of nodes that take factors back: they have to be multiplied by what the channels are divided by."""
    ends: list[End] = field(default_factory=list)
    clips: "list[tuple[ir.Node, Labels]]" = field(default_factory=list)
    """Clips on the way. They pass factors on only below their bound: whoever scales has to look."""
    sources: "list[tuple[ir.Value, Labels]]" = field(default_factory=list)
    """Values that only a multiplication can scale: behind a curve, an input."""
    values: "dict[ir.Value, Labels]" = field(default_factory=dict)
    """All values with channels along one axis, in the order of computation."""

    def divide(self, factors: Array) -> None:
        """Divide the channels of each label by its factor, and make up for it in the weights that read them.

        The sources are not multiplied.
        """
        sides: dict[ir.Value, tuple[Product, list[Array | None]]] = {}
        for side, (products, given) in enumerate(((self.writers, 1 / factors), (self.readers, factors))):
            for product, labels in products:
                if (given[labels] != 1).any():
                    sides.setdefault(product.weight, (product, [None, None]))[1][side] = given[labels]
        for product, labels in self.writers:
            if (factors[labels] != 1).any():
                product.scale_bias(1 / factors[labels])
        for product, (outputs, inputs) in sides.values():
            product.scale(outputs, inputs)
        for constants, given in ((self.constants, 1 / factors), (self.returned, factors)):
            for node, index, labels in constants:
                if (given[labels] != 1).any():
                    edit.multiply(node, index, strip(given[labels]))


def label(model: "ir.Model", products: Sequence[Product]) -> ChannelLabels:
    """Label the channels of all that products read."""
    return Labeling(model.graph, products).label()


class Labeling:
    def __init__(self, graph: "ir.Graph", products: Sequence[Product]) -> None:
        self._graph = graph
        self._products = {product.node: product for product in products}
        self.found = ChannelLabels()
        self._labels: dict[ir.Value, Labels] = {}
        self._equal: list[tuple[Labels, Labels]] = []
        self._of_weight: dict[ir.Value, tuple[Labels, Labels]] = {}
        """What the first product writes and reads of those with this weight; the others have the same labels."""
        self._passed = np.ones(0)
        """Magnitudes of the constants on the way to a label, of those labels that one was passed on the way to."""
        self.scalable = rules.find_scalable(graph, self._products)

    def label(self) -> ChannelLabels:
        """Visit all nodes, the last first, and make those labels equal that turned out to be."""
        inner = (node for node in self._graph.all_nodes() if node.graph is not self._graph)
        for read in (*self._graph.outputs, *(value for node in inner for value in node.inputs)):
            self._read(read, None)
        for node in reversed(self._graph):
            if node in self._products:
                self._visit_product(self._products[node])
            else:
                self._visit(node)
        for value in self._graph.inputs:
            self._end(value)
        return self._settle()

    def get(self, value: "ir.Value") -> Labels:
        """Return the labels of a value."""
        return self._labels[value] if value in self._labels else np.full((1,) * len(dims(value)), UNREAD)

    def tie(self, labels: Labels, axes: Iterable[int]) -> Labels:
        """Make the labels along these axes equal, and leave one of them."""
        for axis in axes:
            common_labels = labels.max(axis, keepdims=True)
            self.equate(common_labels, labels)
            labels = common_labels
        return labels

    def tie_broadcast(self, labels: Labels, value: "ir.Value | None") -> Labels:
        """Return the labels for one operand of an operator, where the others may have more axes, or larger ones."""
        sizes = dims(value)
        extra = labels.ndim - len(sizes)
        labels = self.tie(labels, range(extra)).reshape(labels.shape[extra:])
        return self.tie(labels, (axis for axis, size in enumerate(sizes) if size == 1))

    def begin(self, count: int) -> Labels:
        """Return new labels for some channels."""
        self.found.count += count
        return np.arange(self.found.count - count, self.found.count)

    def end(self, value: "ir.Value | None", axis: int, count: int) -> Labels:
        """Return labels for what a node reads whose channels can be scaled without what is behind it."""
        assert value is not None
        labels = self.begin(count).reshape([count if each == axis else 1 for each in range(len(dims(value)))])
        self.found.ends.append(End(value, labels))
        return labels

    def equate(self, first: Labels, second: Labels) -> None:
        """Make labels equal; both broadcast to one shape."""
        self._equal.append((first, second))

    def pass_factor(self, labels: Labels, constant: Array) -> Labels:
        """Return the labels before a multiplication by a constant, which stays; they are of their own until the end."""
        numbers = np.abs(constant, dtype=np.float64)
        factors = numbers.reshape((1,) * (labels.ndim - numbers.ndim) + numbers.shape)
        if factors.size > 1 and find_axis(factors) is None:
            return labels
        given, factors = np.broadcast_arrays(labels, factors)
        every = np.arange(self.found.count)
        behind = self._find_passed(given) * factors
        self._passed = np.append(self._find_passed(every), behind)
        own = self.begin(given.size).reshape(given.shape)
        self.equate(own, given)
        return np.where(given == UNREAD, given, own)

    def _find_passed(self, labels: Labels) -> Array:
        """Find the product of the magnitudes of all constants on the way to each of these labels; 1 without any."""
        every = np.ones(self.found.count + 1)  # the last is where -1 points to
        every[: len(self._passed)] = self._passed
        return every[labels]

    def _visit_product(self, product: Product) -> None:
        output = product.node.outputs[0]
        written = self.get(output)
        channels = {axis % max(written.ndim, 1) for axis in product.axes}
        written = self.tie(written, (other for other in range(written.ndim) if other not in channels))
        every = product.flatten_outputs(written)
        if every is not None:
            self.found.writers.append((product, every))
            self.found.passed[product.node] = self._find_passed(every)
        if every is None:
            self._fix(written)
            every = np.full(product.outputs, FIXED)
        read = self.begin(product.inputs)
        self.found.readers.append((product, read))
        self._read(product.data, product.lay_out_inputs(read))
        if product.shares_weight(self._products):
            first = self._of_weight.setdefault(product.weight, (every, read))
            for ours, theirs in zip(first, (every, read), strict=True):
                self.equate(ours, theirs)
        else:
            self._fix(every)
            self._fix(read)

    def _visit(self, node: "ir.Node") -> None:
        rule = rules.find_rule(node)
        known = all(dims(value) for value in (node.outputs if node.op_type == "Split" else node.outputs[:1]))
        moved = rule.move(self, node, self.get(node.outputs[0])) if rule is not None and known else None
        if moved is None:
            for value in node.outputs:
                self._end(value)
        for index, read in enumerate(node.inputs):
            self._read(read, (moved or {}).get(index))

    def _read(self, value: "ir.Value | None", labels: Labels | None) -> None:
        """Note that something reads a value: with these labels, or, without, so that it cannot be scaled."""
        if value is None:
            return
        sizes = dims(value)
        given = np.full((1,) * len(sizes), FIXED)
        if labels is not None:
            same_rank = labels.ndim == len(sizes) and value.const_value is None
            if same_rank and all(ours in (1, size) for ours, size in zip(labels.shape, sizes, strict=True)):
                given = labels
            else:
                self._fix(labels)
        known = self._labels.get(value)
        if known is None:
            self._labels[value] = given
            return
        shape = np.broadcast_shapes(known.shape, given.shape)
        if math.prod(shape) > MOST:
            self._fix(known)
            self._fix(given)
            return
        self.equate(known, given)
        self._labels[value] = np.where(known == UNREAD, given, known)

    def _end(self, value: "ir.Value") -> None:
        """Note a value that no product or constant makes."""
        labels = self._labels.get(value)
        if labels is not None:
            self.found.sources.append((value, labels))

    def _fix(self, labels: Labels) -> None:
        self.equate(np.full((1,) * labels.ndim, FIXED), labels)

    def _settle(self) -> ChannelLabels:
        """Give equal labels the smallest of them."""
        channel_labels = self.found
        pairs = [np.stack(np.broadcast_arrays(*pair)).reshape(2, -1) for pair in self._equal]
        every = np.concatenate([*pairs, np.zeros((2, 0), int)], axis=1)
        first, second = every[:, (every != UNREAD).all(axis=0)]
        smallest = np.arange(channel_labels.count)
        while (smallest[first] != smallest[second]).any():
            least = np.minimum(smallest[first], smallest[second])
            for side in (first, second):
                np.minimum.at(smallest, smallest[side], least)
            smallest = smallest[smallest]
        while (smallest[smallest] != smallest).any():
            smallest = smallest[smallest]
        settled = np.append(smallest, FIXED)  # the last is where -1 points to
        return ChannelLabels(
            count=channel_labels.count,
            fixed=smallest == FIXED,
            readers=[(product, settled[labels]) for product, labels in channel_labels.readers],
            writers=[(product, settled[labels]) for product, labels in channel_labels.writers],
            passed=channel_labels.passed,
            constants=[(node, index, settled[labels]) for node, index, labels in channel_labels.constants],
            returned=[(node, index, settled[labels]) for node, index, labels in channel_labels.returned],
            ends=[End(value, settled[labels]) for value, labels in channel_labels.ends],
            clips=[(node, settled[labels]) for node, labels in channel_labels.clips],
            sources=[(value, settled[labels]) for value, labels in channel_labels.sources],
            values={
                value: settled[self._labels[value]]
                for value in (*self._graph.inputs, *(value for node in self._graph for value in node.outputs))
                if value in self._labels and find_axis(self._labels[value]) is not None
            },
        )
