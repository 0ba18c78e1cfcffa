"""Label the channels of values by what can be scaled for free: channels with the same label get the same factor.

f(s·x) = s·f(x) for a factor s > 0 of each channel, through operators that pass factors on exactly or only move channels
about. So channels get labels where a product reads them, and labels go backwards from there, through all that passes
factors on, to what can take them: another product, a normalization, a constant. Where two ways meet, in an addition or
as a value has several readers, labels become equal. The label 0 is that of channels that cannot be scaled.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.rescale.axes import MOST, dims, find_axis, reshape_back, strip, transpose_back
from enginesmith.pipeline.passes.rescale.products import Product, inputs_first
from enginesmith.pipeline.tensors import Array

_FIXED, _UNREAD = 0, -1

Labels = Array
"""Whole numbers with the rank of a value, that broadcast to its shape."""


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
        for product, (outputs, inputs) in sides.values():
            product.scale(outputs, inputs)
        for node, index, labels in self.constants:
            if (factors[labels] != 1).any():
                edit.multiply(node, index, strip(1 / factors[labels]))


def label(model: "ir.Model", products: Sequence[Product]) -> ChannelLabels:
    """Label the channels of all that products read."""
    return _Labeling(model.graph, products).label()


class _Labeling:
    def __init__(self, graph: "ir.Graph", products: Sequence[Product]) -> None:
        self._graph = graph
        self._products = {product.node: product for product in products}
        self.found = ChannelLabels()
        self._labels: dict[ir.Value, Labels] = {}
        self._equal: list[tuple[Labels, Labels]] = []
        self._passed = np.ones(0)
        """Magnitudes of the constants on the way to a label, of those labels that one was passed on the way to."""
        self.scalable = _find_scalable(graph, self._products)

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
        return self._labels[value] if value in self._labels else np.full((1,) * len(dims(value)), _UNREAD)

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
        first = self.found.count
        own = np.arange(first, first + given.size).reshape(given.shape)
        behind = self._find_passed(given) * factors
        self._passed = np.append(self._find_passed(np.arange(first)), behind)
        self.found.count += given.size
        self.equate(own, given)
        return np.where(given == _UNREAD, given, own)

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
        if every is None or not product.private:
            self._fix(written)
        read = np.arange(self.found.count, self.found.count + product.inputs)
        self.found.count += product.inputs
        self.found.readers.append((product, read))
        self._read(product.data, product.lay_out_inputs(read))
        uses = {self._describe_use(use.node, use.idx) for use in product.weight.uses()}
        if len(uses) > 1:
            self._fix(read)

    def _describe_use(self, node: "ir.Node", index: int) -> tuple[object, ...]:
        """Describe what meets a weight, so that two uses are the same if one factor does for both."""
        product = self._products.get(node)
        return (product.data, product.axis, inputs_first(node)) if product and index == 1 else (node, index)

    def _visit(self, node: "ir.Node") -> None:
        rule = _find_rule(node)
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
        given = np.full((1,) * len(sizes), _FIXED)
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
        self._labels[value] = np.where(known == _UNREAD, given, known)

    def _end(self, value: "ir.Value") -> None:
        """Note a value that no product or constant makes."""
        labels = self._labels.get(value)
        if labels is not None:
            self.found.sources.append((value, labels))

    def _fix(self, labels: Labels) -> None:
        self.equate(np.full((1,) * labels.ndim, _FIXED), labels)

    def _settle(self) -> ChannelLabels:
        """Give equal labels the smallest of them."""
        channel_labels = self.found
        pairs = [np.stack(np.broadcast_arrays(*pair)).reshape(2, -1) for pair in self._equal]
        every = np.concatenate([*pairs, np.zeros((2, 0), int)], axis=1)
        first, second = every[:, (every != _UNREAD).all(axis=0)]
        smallest = np.arange(channel_labels.count)
        while (smallest[first] != smallest[second]).any():
            least = np.minimum(smallest[first], smallest[second])
            for side in (first, second):
                np.minimum.at(smallest, smallest[side], least)
            smallest = smallest[smallest]
        while (smallest[smallest] != smallest).any():
            smallest = smallest[smallest]
        settled = np.append(smallest, _FIXED)  # the last is where -1 points to
        return ChannelLabels(
            count=channel_labels.count,
            fixed=smallest == _FIXED,
            readers=[(product, settled[labels]) for product, labels in channel_labels.readers],
            writers=[(product, settled[labels]) for product, labels in channel_labels.writers],
            passed=channel_labels.passed,
            constants=[(node, index, settled[labels]) for node, index, labels in channel_labels.constants],
            clips=[(node, settled[labels]) for node, labels in channel_labels.clips],
            sources=[(value, settled[labels]) for value, labels in channel_labels.sources],
            values={
                value: settled[self._labels[value]]
                for value in (*self._graph.inputs, *(value for node in self._graph for value in node.outputs))
                if value in self._labels and find_axis(self._labels[value]) is not None
            },
        )


_Moved = Mapping[int, Labels] | None
"""Labels of inputs, by their index; None where an operator does not pass factors on."""


@dataclass(frozen=True)
class _Rule:
    move: Callable[[_Labeling, "ir.Node", Labels], _Moved]
    """Tells labels of inputs by those of the first output."""
    carriers: tuple[int, ...] | None = (0,)
    """Inputs that have the channels of the output; None for all that are no constants."""


def _find_rule(node: "ir.Node") -> _Rule | None:
    others = () if node.op_type == "Split" else node.outputs[1:]
    read = any(value.uses() or value.is_graph_output() for value in others)
    return None if node.domain or read else _RULES.get(node.op_type)


def _find_scalable(graph: "ir.Graph", products: "Mapping[ir.Node, Product]") -> "set[ir.Value]":
    """Find values that come from a product or a constant through nothing but what passes factors on."""
    values: set[ir.Value] = set()
    for node in graph:
        rule = _find_rule(node)
        if node in products:
            scalable = products[node].private
        elif node.op_type in ("Mul", *_NORMALIZATIONS):
            scalable = not node.domain and (
                _find_factor(node) is not None
                or (node.op_type == "Mul" and any(_is_only_for(value, values) for value in node.inputs))
            )
        elif rule is None:
            scalable = False
        elif node.op_type == "Div":
            scalable = _is_only_for(node.inputs[0], values)
        elif node.op_type == "Sub":
            scalable = all(edit.is_factor(value) or _is_only_for(value, values) for value in node.inputs)
        else:
            carriers = range(len(node.inputs)) if rule.carriers is None else rule.carriers
            inputs = [node.inputs[index] for index in carriers if index < len(node.inputs)]
            scalable = all(value in values or edit.is_factor(value) for value in inputs)
        if scalable:
            values.update(node.outputs)
    return values


def _is_only_for(value: "ir.Value | None", scalable: "Iterable[ir.Value]") -> bool:
    return value is not None and value in scalable and edit.find_only_reader(value)[0] is not None


def _find_factor(node: "ir.Node") -> int | None:
    """Find the input of a multiplication or normalization that is a constant factor."""
    places = (0, 1) if node.op_type == "Mul" else (1,)
    return next((index for index in places if edit.is_factor(node.inputs[index])), None)


def _keep(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    return {0: labels}


def _move_through_prelu(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    return {0: labels} if edit.read(node.inputs[1]) is not None else None


def _move_through_clip(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    labeling.found.clips.append((node, labels))
    return {0: labels}


def _move_through_pool(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    return {0: labeling.tie(labels, range(2, labels.ndim))}


def _move_through_resize(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """Scale through sums of places with fixed factors; all that is added up along an axis gets one label."""
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    if mode not in _RESIZED_IN_PLACE or policy != "stretch":
        return None
    axes = _attribute(node, "axes", range(labels.ndim))
    scales = edit.read(node.inputs[min(2, len(node.inputs) - 1)])
    if scales is not None and scales.size == len(axes):
        moved = [axis % labels.ndim for axis, scale in zip(axes, scales.reshape(-1), strict=True) if scale != 1]
    else:
        known = zip(dims(node.inputs[0]), dims(node.outputs[0]), strict=True)
        moved = [axis for axis, (before, behind) in enumerate(known) if before is None or before != behind]
    return {0: labeling.tie(labels, moved)}


def _move_through_pad(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """Scale through padding with zeros or with what is there; all along an axis that is padded get one label."""
    given = [edit.read(value) for value in node.inputs[1:]]
    if not given:  # in old opsets
        amounts, filled = _attribute(node, "pads", ()), "value" in node.attributes
    elif given[0] is None:
        return None
    else:
        amounts = [int(amount) for amount in given[0].reshape(-1)]
        filled = edit.find_input(node, 2) is not None and (given[1] is None or bool(given[1].any()))
    if edit.find_input(node, 3) is not None:
        if given[2] is None:
            return None
        axes = [int(axis) % labels.ndim for axis in given[2].reshape(-1)]
    else:
        axes = list(range(labels.ndim))
    if filled or len(amounts) != 2 * len(axes):
        return None
    pairs = zip(axes, amounts[: len(axes)], amounts[len(axes) :], strict=True)
    return {0: labeling.tie(labels, [axis for axis, before, behind in pairs if before or behind])}


def _attribute(node: "ir.Node", name: str, missing: Sequence[int]) -> Sequence[int]:
    return node.attributes[name].as_ints() if name in node.attributes else missing


def _move_through_add(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    for index, value in enumerate(node.inputs):
        if edit.is_factor(value):
            if len(dims(node.inputs[1 - index])) != labels.ndim:
                return None
            labeling.found.constants.append((node, index, labels))
            return {1 - index: labels}
    return {index: labeling.tie_broadcast(labels, value) for index, value in enumerate(node.inputs)}


def _move_through_mul(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """Scale one of the operands: a constant, or the larger one, or the one that can be scaled for free."""
    factor = _find_factor(node)
    if factor is not None:
        other = node.inputs[1 - factor]
        if _is_only_for(other, labeling.scalable) and len(dims(other)) == labels.ndim:
            constant = edit.read(node.inputs[factor])
            return {1 - factor: labels if constant is None else labeling.pass_factor(labels, constant)}
        labeling.found.constants.append((node, factor, labels))
        return {}
    first, other = node.inputs
    sizes = dims(node.outputs[0])
    wide = [index for index, value in enumerate(node.inputs) if dims(value) == sizes]
    if first is other or not wide:
        return None
    if len(wide) == 2:
        wide = [index for index in wide if _is_only_for(node.inputs[index], labeling.scalable)]
    return {wide[0]: labels} if wide else None


def _move_through_div(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """Scale the numerator where it is as large as the output, and where nothing else reads it.

    A normalization reads its numerator for the divisor, too: such channels are scaled behind it.
    """
    numerator, divisor = node.inputs
    if not _is_only_for(numerator, labeling.scalable) or dims(numerator) != dims(node.outputs[0]):
        return None
    constant = edit.read(divisor)
    inverse = None if constant is None or not constant.all() else 1 / constant.astype(np.float64)
    return {0: labels if inverse is None else labeling.pass_factor(labels, inverse)}


def _move_through_matmul(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """Scale the columns of V in A·V, for every head on its own."""
    value = node.inputs[1]
    if value is None or not 2 <= len(dims(value)) <= labels.ndim:
        return None
    return {1: labeling.tie_broadcast(labeling.tie(labels, (labels.ndim - 2,)), value)}


def _move_through_attention(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """Scale the values of the operator of opset 23; heads that several queries share have other sizes."""
    if len(dims(node.inputs[0])) != len(dims(node.inputs[2])) or any(node.inputs[4:]):
        return None
    return {2: labeling.tie(labels, (labels.ndim - 2,))}


def _move_through_normalization(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """End at the scale, and the shift, of a normalization over the last axis."""
    last = labels.ndim - 1
    given = [index for index in range(1, len(node.inputs)) if node.inputs[index] is not None]
    along = node.attributes.get_int("axis", -1) in (-1, last)
    if not along or not all(edit.is_factor(node.inputs[index]) for index in given):
        return None
    labels = labeling.tie(labels, range(last))
    for index in given:
        labeling.found.constants.append((node, index, labels))
    return {}


def _move_through_reduction(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """Keep channels through a mean, a sum, an extreme or a norm over other axes than theirs."""
    rank = len(dims(node.inputs[0]))
    reduced = sorted({axis % rank for axis in edit.find_axes(node) or ()}) if rank else []
    if not reduced:
        return None
    return {0: labels if node.attributes.get_int("keepdims", 1) else np.expand_dims(labels, tuple(reduced))}


def _move_through_reshape(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    moved = reshape_back(labels, node)
    return None if moved is None else {0: moved}


def _move_through_transpose(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    return {0: transpose_back(labels, node)}


def _move_through_concat(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    axis = node.attributes.get_int("axis", 0) % labels.ndim
    if labels.shape[axis] == 1:
        return dict.fromkeys(range(len(node.inputs)), labels)
    sizes = [dims(value)[axis : axis + 1] for value in node.inputs]
    widths = [size for each in sizes for size in each if isinstance(size, int)]
    if len(widths) < len(sizes) or sum(widths) != labels.shape[axis]:
        return None
    return dict(enumerate(np.split(labels, np.cumsum(widths)[:-1], axis)))


def _move_through_split(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    axis = node.attributes.get_int("axis", 0) % len(dims(node.outputs[0]))
    parts = []
    for value in node.outputs:
        labels, size = labeling.get(value), dims(value)[axis]
        if not isinstance(size, int):
            return None
        parts.append(np.broadcast_to(labels, (*labels.shape[:axis], size, *labels.shape[axis + 1 :])))
    others = np.broadcast_shapes(*((*part.shape[:axis], 1, *part.shape[axis + 1 :]) for part in parts))
    whole = [np.broadcast_to(part, (*others[:axis], part.shape[axis], *others[axis + 1 :])) for part in parts]
    return {0: np.concatenate(whole, axis)}


def _move_through_slice(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    """Put labels where a Slice takes channels from; all others have labels of their own."""
    sizes = dims(node.inputs[0])
    given = [edit.read(value) for value in node.inputs[1:]]
    if len(given) < 2 or not sizes or any(numbers is None for numbers in given):
        return None
    starts, ends, *rest = ([int(number) for number in numbers.reshape(-1)] for numbers in given if numbers is not None)
    axes = [axis % len(sizes) for axis in (rest[0] if rest else range(len(starts)))]
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    taken = {}
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = sizes[axis]
        if not isinstance(size, int) or step < 1:
            return None
        taken[axis] = np.arange(size)[start:end:step]
    return _pick(labeling, node, labels, taken)


def _move_through_gather(labeling: _Labeling, node: "ir.Node", labels: Labels) -> _Moved:
    indices, sizes = edit.read(node.inputs[1]), dims(node.inputs[0])
    axis = node.attributes.get_int("axis", 0) % max(len(sizes), 1)
    if indices is None or indices.ndim > 1 or not sizes or not isinstance(sizes[axis], int):
        return None
    return _pick(labeling, node, labels if indices.ndim else np.expand_dims(labels, axis), {axis: indices})


def _pick(labeling: _Labeling, node: "ir.Node", labels: Labels, taken: Mapping[int, Array]) -> _Moved:
    """Put the labels of an output where it takes channels from along some axes, with indices for each."""
    for axis, indices in taken.items():
        size = dims(node.inputs[0])[axis]
        shape = list(labels.shape)
        shape[axis] = size if isinstance(size, int) else 1
        if math.prod(shape) > MOST:
            return None
        whole = np.full(shape, _UNREAD)
        np.maximum.at(whole.swapaxes(0, axis), indices.reshape(-1), labels.swapaxes(0, axis))
        labeling.equate(whole.take(indices.reshape(-1), axis), labels)  # what is taken twice has both
        labels = whole
    return {0: labels}


_RESIZED_IN_PLACE = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
"""Ways of Resize by which an axis of scale 1 stays as it is."""
_NORMALIZATIONS = ("LayerNormalization", "RMSNormalization")
_POOLS = ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2")
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("Relu", "LeakyRelu", "Identity"), _Rule(_keep)),
    **dict.fromkeys(_POOLS, _Rule(_move_through_pool)),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _Rule(_move_through_reshape)),
    **dict.fromkeys(_NORMALIZATIONS, _Rule(_move_through_normalization)),
    **dict.fromkeys(_REDUCTIONS, _Rule(_move_through_reduction)),
    **dict.fromkeys(("Add", "Sub"), _Rule(_move_through_add, None)),
    "Attention": _Rule(_move_through_attention, (2,)),
    "Clip": _Rule(_move_through_clip),
    "Concat": _Rule(_move_through_concat, None),
    "Div": _Rule(_move_through_div),
    "Gather": _Rule(_move_through_gather),
    "MatMul": _Rule(_move_through_matmul, (1,)),
    "Mul": _Rule(_move_through_mul),
    "PRelu": _Rule(_move_through_prelu),
    "Pad": _Rule(_move_through_pad),
    "Resize": _Rule(_move_through_resize),
    "Slice": _Rule(_move_through_slice),
    "Split": _Rule(_move_through_split),
    "Transpose": _Rule(_move_through_transpose),
}
