"""Follow the channels of a value backwards to places where they can be scaled for free.

f(s·x) = s·f(x) for a factor s > 0 of each channel, through operators that pass factors on exactly or only move channels
about, and only where nothing but the way itself reads the values that lie on it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.rescale.places import (
    Place,
    follow_mean,
    follow_reshape,
    follow_slice,
    follow_split,
    follow_squeeze,
    follow_transpose,
    follow_unsqueeze,
    locate,
    same,
    sizes,
)
from enginesmith.pipeline.tensors import Array

_BIAS = 2
_MATRIX_PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Product:
    """One Conv, ConvTranspose, MatMul or Gemm whose second input is an initialiser of float32."""

    node: "ir.Node"
    data: "ir.Value"
    weight: "ir.Value"
    groups: int
    inputs: int
    """Channels of the activation that it reads."""
    outputs: int

    @property
    def is_matrix(self) -> bool:
        return self.node.op_type in _MATRIX_PRODUCTS

    @property
    def axis(self) -> int:
        """Axis of the channels in activations."""
        return -1 if self.is_matrix else 1

    @property
    def private(self) -> bool:
        """True where nothing else reads the weight."""
        return len(self.weight.uses()) == 1

    @property
    def bias(self) -> "ir.Value | None":
        """The bias that the operator itself adds."""
        return self.node.inputs[_BIAS] if len(self.node.inputs) > _BIAS else None

    def weights(self) -> Array:
        """Arrange the weight as outputs × inputs of a group × places in the kernel; a view where that is possible."""
        assert self.weight.const_value is not None
        return by_channel(self.weight.const_value.numpy(), inputs_first=inputs_first(self.node), groups=self.groups)

    def grouped(self) -> Array:
        """Arrange the weight as groups × outputs of a group × inputs of a group × places in the kernel."""
        weights = self.weights()
        return weights.reshape(self.groups, -1, *weights.shape[1:])

    def scale(self, outputs: Array | None = None, inputs: Array | None = None) -> None:
        """Multiply the outputs, channel by channel, and the weights of each input channel."""
        parts = []
        if outputs is not None:
            parts.append(self._lay_out(outputs.reshape(self.groups, -1, 1)))
            if self.bias is not None:
                edit.multiply(self.node, _BIAS, outputs)
        if inputs is not None:
            parts.append(self._lay_out(inputs.reshape(self.groups, 1, -1)))
        edit.rescale(self.weight, parts)

    def _lay_out(self, factors: Array) -> Array:
        """Return factors of groups × outputs of a group × inputs of a group, in the layout of the weight."""
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


def by_channel(weight: Array, *, inputs_first: bool, groups: int = 1) -> Array:
    """Arrange a weight of a product as outputs × inputs of a group × places in the kernel."""
    flat = weight.reshape(*weight.shape[:2], -1)
    if not inputs_first:
        return flat
    if groups == 1:
        return flat.swapaxes(0, 1)
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    return flat.reshape(groups, inputs, outputs, -1).swapaxes(1, 2).reshape(groups * outputs, inputs, -1)


def inputs_first(node: "ir.Node") -> bool:
    """Tell whether the first axis of a product's weight is that of the inputs."""
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
    fits = rank == 2 if node.op_type in _MATRIX_PRODUCTS else rank >= 3
    turned = node.attributes.get_int("transA", 0)
    if turned or not fits or weight.const_value is None or not weight.const_value.size:
        return None
    groups = node.attributes.get_int("group", 1)
    first, second = weight.const_value.shape.numpy()[:2]
    inputs, outputs = (first, second * groups) if inputs_first(node) else (second * groups, first)
    product = Product(node, data, weight, groups, inputs, outputs)
    return product if product.bias is None or edit.is_factor(product.bias) else None


@dataclass(frozen=True)
class Addend:
    """A constant that has to be scaled along with a value: a bias, or the scale of a normalisation."""

    node: "ir.Node"
    index: int
    place: Place

    def scale(self, factors: Array) -> None:
        """Multiply it, channel by channel."""
        edit.multiply(self.node, self.index, self.place.broadcast(factors))


@dataclass(frozen=True)
class ScalePropagation:
    """All that has to be scaled to scale a value."""

    addends: tuple[Addend, ...] = ()
    product: Product | None = None
    end: Place | None = None
    """Channels of the product's output, where there is a product."""

    def scale(self, factors: Array) -> None:
        """Scale the channels of the value that the way starts from."""
        for addend in self.addends:
            addend.scale(factors)
        if self.product is not None and self.end is not None:
            self.product.scale(outputs=self.end.spread(factors))


_Moves = Iterator[tuple[Place | None, tuple[Addend, ...]]]
"""Ways one step back, with the constants on them: to another value, or, without one, to the end."""
_Step = Callable[["ir.Node", Place], _Moves]


def trace(place: Place, products: Mapping["ir.Value", Product], steps: Mapping[str, _Step]) -> ScalePropagation | None:
    """Follow the channels of a value; None where they cannot be scaled for free."""
    product = products.get(place.value)
    if product is not None:
        axis = product.axis % len(sizes(place.value))
        fits = place.axes == (axis,) and place.total == product.outputs and product.private
        return ScalePropagation(product=product, end=place) if fits else None
    node = place.value.producer()
    if node is None or node.domain or node.op_type not in steps:
        return None
    for before, addends in steps[node.op_type](node, place):
        if before is None:
            return ScalePropagation(addends)
        if node.op_type != "Slice" and edit.find_only_reader(before.value)[0] is None:
            continue
        rest = trace(before, products, steps)
        if rest is not None:
            return ScalePropagation((*addends, *rest.addends), rest.product, rest.end)
    return None


def _pass_to(node: "ir.Node", place: Place | None, *addends: Addend) -> _Moves:
    """Go on at another value, if nothing reads other outputs; those of a Split are scaled by 1."""
    others = () if node.op_type == "Split" else node.outputs[1:]
    if place is not None and not any(value.uses() or value.is_graph_output() for value in others):
        yield (place, addends)


def _make_step(move: "Callable[[ir.Node, Place], Place | None]") -> _Step:
    return lambda node, place: _pass_to(node, move(node, place))


def _elementwise(node: "ir.Node", place: Place) -> _Moves:
    """Scale through an operator on each number alone, or, in pooling, on those of one channel."""
    if node.op_type == "PRelu" and edit.read(node.inputs[1]) is None:
        return
    if "Pool" not in node.op_type or place.axes == (1,):
        yield from _pass_to(node, same(place, node.inputs[0]))


def _matmul(node: "ir.Node", place: Place) -> _Moves:
    """Scale through A·V: the columns of V, for every head on its own."""
    rank = len(sizes(place.value))
    if rank - 2 not in place.axes and len(sizes(node.inputs[1])) == rank:
        yield from _pass_to(node, same(place, node.inputs[1]))


def _attention(node: "ir.Node", place: Place) -> _Moves:
    """Scale through the operator of opset 23; heads shared by several queries have other sizes."""
    query, value = sizes(node.inputs[0]), sizes(node.inputs[2])
    if len(query) != len(value) or place.value is not node.outputs[0] or any(node.inputs[4:]):
        return
    if len(query) == 3 or 2 not in place.axes:
        yield from _pass_to(node, same(place, node.inputs[2]))


def _add(node: "ir.Node", place: Place) -> _Moves:
    for index in (0, 1):
        if edit.is_factor(node.inputs[index]) and len(place.axes) == 1:
            yield from _pass_to(node, same(place, node.inputs[1 - index]), Addend(node, index, place))


def _multiply(node: "ir.Node", place: Place) -> _Moves:
    for index in (0, 1):
        if edit.is_factor(node.inputs[index]) and len(place.axes) == 1:
            yield (None, (Addend(node, index, place),))
            return
    for value in node.inputs:
        if len(sizes(value)) == len(sizes(place.value)):
            yield from _pass_to(node, same(place, value))


def _normalise(node: "ir.Node", place: Place) -> _Moves:
    last = len(sizes(place.value)) - 1
    given = [index for index in range(1, len(node.inputs)) if node.inputs[index] is not None]
    fits = place.axes == (last,) and node.attributes.get_int("axis", -1) in (-1, last)
    if fits and place.value is node.outputs[0] and all(edit.is_factor(node.inputs[index]) for index in given):
        yield (None, tuple(Addend(node, index, place) for index in given))


_SIMPLE = ("Relu", "LeakyRelu", "PRelu", "Identity")
_POOLS = ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")

HOMOGENEOUS: Mapping[str, _Step] = {
    **dict.fromkeys((*_SIMPLE, *_POOLS, "Clip"), _elementwise),
    "Add": _add,
    "Flatten": _make_step(follow_reshape),
    "Reshape": _make_step(follow_reshape),
    "ReduceMean": _make_step(follow_mean),
    "Squeeze": _make_step(follow_squeeze),
}
"""Between two layers of a network. A Clip is only homogeneous below its bound: whoever uses it has to look."""

EXACT: Mapping[str, _Step] = {
    **{word: step for word, step in HOMOGENEOUS.items() if word != "Clip"},
    "Attention": _attention,
    "LayerNormalization": _normalise,
    "MatMul": _matmul,
    "Mul": _multiply,
    "RMSNormalization": _normalise,
    "Slice": _make_step(follow_slice),
    "Split": _make_step(follow_split),
    "Transpose": _make_step(follow_transpose),
    "Unsqueeze": _make_step(follow_unsqueeze),
}
"""All that factors pass through, or end in, exactly."""


@dataclass(frozen=True)
class Reader:
    """A product, and those of its input channels that one tie has: not all of them behind a Concat."""

    product: Product
    first: int
    count: int

    def spread(self, factors: Array) -> Array:
        """Extend factors to all input channels: the others are left alone."""
        everything = np.ones(self.product.inputs)
        everything[self.first : self.first + self.count] = factors
        return everything

    def select(self, channels: Array) -> Array:
        """Take the tie's channels of what there is for each input channel, along the first axis."""
        return channels[self.first : self.first + self.count]


@dataclass
class Tie:
    """Values whose channels can only be scaled together, and what writes and reads them.

    Between two layers that is one value; along the shortcuts of a residual network it is all that is added up.
    """

    writers: list[Product] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    addends: list[Addend] = field(default_factory=list)
    nodes: "list[ir.Node]" = field(default_factory=list)
    """The operators between them."""
    sources: list[Place] = field(default_factory=list)
    """Values that none of the writers makes, and that only a multiplication can scale: behind a curve, an input."""
    fixed: bool = False
    """True where something else reads or writes one of the values."""

    def take(self, other: "Tie") -> None:
        """Take over what belongs to another tie, as the two have turned out to be one."""
        self.writers += other.writers
        self.readers += other.readers
        self.addends += other.addends
        self.nodes += other.nodes
        self.sources += other.sources
        self.fixed = self.fixed or other.fixed


def find_ties(products: Sequence[Product]) -> tuple[Tie, ...]:
    """Find the values between products whose channels can be scaled for free, in the order of their first readers."""
    return tuple(tie for tie in _find_ties(products) if tie.writers and not tie.sources)


def find_all_ties(products: Sequence[Product]) -> tuple[Tie, ...]:
    """Find also the ties that multiplications can scale; none with a Clip, whose bound would have to be looked at."""
    return tuple(tie for tie in _find_ties(products) if all(node.op_type != "Clip" for node in tie.nodes))


def _find_ties(products: Sequence[Product]) -> tuple[Tie, ...]:
    search = _TieSearch({product.node.outputs[0]: product for product in products})
    for product in products:
        start = locate(product.data, product.axis, product.inputs)
        if start is not None:
            search.add_reader(product, start)
    for value, ties in [*((value, [tie]) for value, tie in search.ties.items()), *search.joined()]:
        known = all((node, value) in search.uses for node, _ in value.uses())
        for tie in ties:
            tie.fixed = tie.fixed or not known or value.is_graph_output()
    return tuple({id(tie): tie for tie in search.ties.values() if not tie.fixed}.values())


class _TieSearch:
    """Follows channels back from the products that read them, and joins what is added up."""

    def __init__(self, products: "Mapping[ir.Value, Product]") -> None:
        self.ties: dict[ir.Value, Tie] = {}
        self._products = products
        self._places: dict[ir.Value, Place] = {}
        self.uses: set[tuple[ir.Node, ir.Value]] = set()
        """Readings of values that scaling takes account of."""
        self._joins: dict[ir.Value, tuple[ir.Value, ...]] = {}

    def joined(self) -> "Iterator[tuple[ir.Value, list[Tie]]]":
        """Iterate over what Concats write, with the ties of what they join."""
        for value, parts in self._joins.items():
            ties = [self.ties[part] for part in parts]
            whole = self.ties.get(value)
            if whole is not None:  # something else follows it as one value
                whole.fixed = True
                for tie in ties:
                    tie.fixed = True
            yield value, ties

    def add_reader(self, product: Product, start: Place) -> None:
        """Find the ties of what a product reads, with all that is tied to them."""
        self.uses.add((product.node, product.data))
        first = 0
        for part in self._list_parts(start):
            self._add_part(Reader(product, first, part.total), part)
            first += part.total

    def _list_parts(self, whole: Place) -> list[Place]:
        """List what a Concat of channels joins, in order; the value itself where none makes it."""
        node, (axis, *others) = whole.value.producer(), whole.axes
        if node is None or node.op_type != "Concat" or node.domain or others:
            return [whole]
        dims = [sizes(value) for value in node.inputs]
        along = node.attributes.get_int("axis", 0) % len(sizes(whole.value)) == axis
        counts = [dim[axis] if axis < len(dim) else None for dim in dims]
        places = [
            Place(value, (axis,), count)
            for value, count in zip(node.inputs, counts, strict=True)
            if value is not None and count is not None
        ]
        if not along or len(places) < len(node.inputs) or len(set(node.inputs)) < len(places):
            return [whole]
        self._joins[whole.value] = tuple(part.value for part in places)
        self.uses.update((node, part.value) for part in places)
        return places

    def _add_part(self, reader: Reader, start: Place) -> None:
        tie = Tie([], [reader], fixed=not reader.product.private)
        waiting = [start]
        while waiting:
            here = waiting.pop()
            known = self.ties.get(here.value)
            if known is None:
                self._places[here.value], self.ties[here.value] = here, tie
                waiting += self._step_back(here, tie)
                continue
            known.fixed = known.fixed or self._places[here.value] != here
            if known is not tie:
                known.take(tie)
                self.ties.update({value: known for value, its in self.ties.items() if its is tie})
                tie = known

    def _step_back(self, here: Place, tie: Tie) -> list[Place]:
        """Find the places that these channels come from; none where a product makes them."""
        product, node = self._products.get(here.value), here.value.producer()
        if product is not None:
            axis = product.axis % len(sizes(here.value))
            tie.fixed = tie.fixed or not (here.axes == (axis,) and here.total == product.outputs and product.private)
            tie.writers.append(product)
            return []
        if node is not None and (wide := _find_wide_operand(node, here)) is not None:
            tie.nodes.append(node)
            self.uses.add((node, wide.value))
            return [wide]
        if node is not None and not node.domain and node.op_type in HOMOGENEOUS:
            ways = list(HOMOGENEOUS[node.op_type](node, here))
            if node.op_type == "Add" and not ways:
                ways = [(same(here, value), ()) for value in node.inputs]
            places = [before for before, _ in ways if before is not None]
            if places and len(places) == len(ways):
                tie.nodes.append(node)
                tie.addends += (addend for _, addends in ways for addend in addends)
                self.uses.update((node, before.value) for before in places)
                return places
        if len(here.axes) == 1 and here.value.const_value is None:
            tie.sources.append(here)
        else:
            tie.fixed = True
        return []


def _find_wide_operand(node: "ir.Node", here: Place) -> Place | None:
    """Find what a Mul multiplies by one number for each channel, as squeeze-and-excitation does."""
    if node.op_type != "Mul" or node.domain or len(here.axes) != 1:
        return None
    for wide, narrow in (node.inputs, node.inputs[::-1]):
        factors = sizes(narrow)
        others = [dim for axis, dim in enumerate(factors) if axis not in (0, *here.axes)]
        fits = len(factors) == len(sizes(here.value)) and others and all(dim == 1 for dim in others)
        if fits and wide is not narrow:
            return same(here, wide)
    return None
