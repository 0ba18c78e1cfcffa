"""Channels that have to keep the same order in all of a graph: those of a value, of what makes it and of what reads it.

Orders are followed from the input of a product through everything that treats channels alike, additions of other
values included, until each way ends in products whose output channels can be put in that order. If one way leads
anywhere else, to an output of the graph or an operator that is not known here, the order has to stay as it is.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from enginesmith.pipeline.precision import constants, groups
from enginesmith.pipeline.precision.scaling import channels
from enginesmith.pipeline.precision.scaling.channels import Place
from enginesmith.pipeline.sparsity import candidates

if TYPE_CHECKING:
    import onnx_ir as ir

_WEIGHT, _BIAS = 1, 2
_UNARY = frozenset(
    {
        *("Abs", "Cast", "Celu", "Clip", "Dropout", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish"),
        *("Identity", "LeakyRelu", "Mish", "Neg", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign"),
        *("Sqrt", "Swish", "Tanh", "ThresholdedRelu"),
    }
)
_BINARY = frozenset({"Add", "Div", "Max", "Min", "Mul", "PRelu", "Pow", "Sub", "Sum"})
_POOLS = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "MaxPool"})
_NORMALISATIONS = frozenset({"LayerNormalization", "RMSNormalization"})
_MOVES: "Mapping[str, Callable[[ir.Node, Place], Place | None]]" = MappingProxyType(
    {
        "Flatten": channels.reshaped,
        "ReduceMean": channels.averaged,
        "Reshape": channels.reshaped,
        "Squeeze": channels.squeezed,
        "Transpose": channels.transposed,
        "Unsqueeze": channels.unsqueezed,
    }
)


class Stuck(Exception):
    """An order cannot be followed further; the message says where."""


@dataclass
class Coupled:
    """All that has one order of channels."""

    length: int
    slots: "dict[tuple[ir.Value, int], None]" = field(default_factory=dict)
    """Constants, each with the axis that is put in order."""
    readers: "dict[tuple[ir.Value, int], None]" = field(default_factory=dict)
    """Of those, the weights of products that sum over the channels."""


def coupled(node: "ir.Node") -> Coupled | str:
    """What has to be put in order with the input channels of a product; else why they cannot be."""
    value = node.inputs[0]
    rank = len(channels.sizes(value))
    place = None
    if value is not None and rank >= 2:
        axis = 1 if node.op_type in groups.CONVOLUTIONS else rank - 1
        length = channels.sizes(value)[axis]
        place = channels.place(value, axis, length) if length is not None else None
    if place is None:
        return "the channels of its input are not known"
    walk = _Walk(Coupled(place.total))
    try:
        walk.from_place(place)
    except Stuck as stuck:
        return str(stuck)
    return walk.found


class _Walk:
    """Follows an order from place to place."""

    def __init__(self, found: Coupled) -> None:
        self.found = found
        self._seen: set[tuple[ir.Value, int]] = set()

    def from_place(self, first: Place) -> None:
        todo = [first]
        while todo:
            place = todo.pop()
            key = (place.value, place.axes[0])
            if key in self._seen:
                continue
            self._seen.add(key)
            todo += self._made(place)
            todo += self._read(place)

    def _made(self, place: Place) -> list[Place]:
        """Backwards, through what makes a value."""
        value = place.value
        node = value.producer()
        if node is None or node.graph is None:
            raise Stuck(f"the order of {value.name!r} is given from outside")
        if value is not node.outputs[0]:
            raise Stuck(f"it comes from {node.op_type}, whose outputs share an order")
        return list(self._through(node, place))

    def _read(self, place: Place) -> list[Place]:
        """Forwards, through everything that reads a value."""
        value = place.value
        if value.is_graph_output():
            raise Stuck(f"{value.name!r} is an output of the graph")
        found: list[Place] = []
        producer = value.producer()
        for use in value.uses():
            if producer is None or use.node.graph is not producer.graph:
                raise Stuck(f"{value.name!r} is read inside of a loop or branch")
            found += self._reader(use.node, use.idx, place)
        return found

    def _reader(self, node: "ir.Node", index: int, place: Place) -> list[Place]:
        if _is_product(node) and index == 0 and self._sums(node, place):
            return []
        for axis, length in enumerate(channels.sizes(node.outputs[0])):
            if length != place.total:
                continue
            ahead = Place(node.outputs[0], (axis,), place.total)
            try:
                sources = list(_Walk(Coupled(place.total))._through(node, ahead))
            except Stuck:
                continue
            if any(source.value is place.value and source.axes == place.axes for source in sources):
                return [ahead]
        raise Stuck(f"{node.op_type} reads {place.value.name!r}, and the order cannot be followed through it")

    def _sums(self, node: "ir.Node", place: Place) -> bool:
        """Whether a product sums over the channels; its weight is put in order then."""
        rank = len(channels.sizes(place.value))
        convolution = node.op_type in groups.CONVOLUTIONS
        if place.axes != ((1,) if convolution else (rank - 1,)) or node.attributes.get_int("transA", 0) == 1:
            return False
        if convolution and node.attributes.get_int("group", 1) != 1:
            return False
        weight = self._own(node, _WEIGHT)
        axis = candidates.summed_axis(node, len(weight.shape or ()))
        self._slot(weight, axis, place)
        self.found.readers[weight, axis] = None
        return True

    def _through(self, node: "ir.Node", place: Place) -> Iterator[Place]:
        """The places that a node's output takes its order from; constants that belong to it are put in order.

        ``place`` is of the first output.
        """
        name = node.op_type
        if node.domain not in ("", "ai.onnx"):
            raise Stuck(f"{node.domain}.{name} is on the way")
        if _is_product(node):
            yield from self._product(node, place)
        elif name in _UNARY or (name in _POOLS and place.axes == (1,)):
            yield self._moved(node, channels.same(place, node.inputs[0]))
        elif name in _BINARY:
            for index in range(len(node.inputs)):
                yield from self._operand(node, index, place)
        elif name == "BatchNormalization" and place.axes == (1,):
            for index in range(1, len(node.inputs)):
                self._slot(self._own(node, index), 0, place)
            yield self._moved(node, channels.same(place, node.inputs[0]))
        elif name in _NORMALISATIONS:
            yield self._normalised(node, place)
        elif name in _MOVES:
            yield self._moved(node, _MOVES[name](node, place))
        else:
            raise Stuck(f"{name} is on the way")

    def _product(self, node: "ir.Node", place: Place) -> Iterator[Place]:
        """A product whose outputs they are, or that filters each channel on its own."""
        rank = len(channels.sizes(place.value))
        convolution = node.op_type in groups.CONVOLUTIONS
        if place.axes != ((1,) if convolution else (rank - 1,)):
            raise Stuck(f"{node.op_type} mixes them with others")
        weight = self._own(node, _WEIGHT)
        dims = len(weight.shape or ())
        together = node.attributes.get_int("group", 1)
        if together == 1:
            summed = candidates.summed_axis(node, dims)
            axis = {"Conv": 0, "ConvTranspose": 1, "Gemm": 1 - summed}.get(node.op_type, dims - 1)
        elif node.op_type == "Conv" and together == place.total:
            axis = 0
            source = channels.same(place, node.inputs[0], (1,))
            yield self._moved(node, source)
        else:
            raise Stuck(f"a {node.op_type} in {together} groups is on the way")
        self._slot(weight, axis, place)
        if len(node.inputs) > _BIAS and node.inputs[_BIAS] is not None:
            yield from self._operand(node, _BIAS, place, vector=convolution)

    def _operand(self, node: "ir.Node", index: int, place: Place, *, vector: bool = False) -> Iterator[Place]:
        """One of several values that are broadcast against each other, aligned at their last axes.

        A ``vector`` has one element for each channel instead.
        """
        value = node.inputs[index]
        if value is None:
            return
        dims, rank = channels.sizes(value), len(channels.sizes(place.value))
        axis = 0 if vector else place.axes[0] - (rank - len(dims))
        if axis < 0 or (value.shape is not None and axis < len(dims) and dims[axis] == 1):
            return  # the same for all channels
        if value.shape is None or dims[axis] != place.total:
            raise Stuck(f"the shape of {value.name!r} is not known")
        if value.is_initializer():
            self._slot(self._own(node, index), axis, place)
            return
        yield Place(value, (axis,), place.total)

    def _normalised(self, node: "ir.Node", place: Place) -> Place:
        last = len(channels.sizes(place.value)) - 1
        if place.axes != (last,) or node.attributes.get_int("axis", -1) not in (-1, last):
            raise Stuck(f"{node.op_type} over other axes is on the way")
        for index in range(1, len(node.inputs)):
            if node.inputs[index] is not None:
                self._slot(self._own(node, index), 0, place)
        return self._moved(node, channels.same(place, node.inputs[0]))

    def _moved(self, node: "ir.Node", place: Place | None) -> Place:
        if place is None or len(place.axes) != 1 or place.first:
            raise Stuck(f"the order cannot be followed through {node.op_type}")
        return place

    def _own(self, node: "ir.Node", index: int) -> "ir.Value":
        """A constant that nothing else reads."""
        value = node.inputs[index]
        if value is None or not value.is_initializer() or not constants.is_weight(value):
            raise Stuck(f"a {node.op_type} computes with what is no constant of float32")
        if len(value.uses()) != 1:
            raise Stuck(f"{value.name!r} is read more than once")
        return value

    def _slot(self, value: "ir.Value", axis: int, place: Place) -> None:
        sizes = channels.sizes(value)
        if axis >= len(sizes) or sizes[axis] != place.total:
            raise Stuck(f"{value.name!r} has another number of channels")
        self.found.slots[value, axis] = None


def _is_product(node: "ir.Node") -> bool:
    return node.domain in ("", "ai.onnx") and node.op_type in groups.PRODUCTS
