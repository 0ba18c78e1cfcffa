"""From a value back to where its channels can be scaled for free: through operators that pass factors on exactly.

f(s·x) = s·f(x) for a factor s > 0 of each channel, and nothing but the way itself reads what lies on it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from enginesmith.pipeline.precision import constants
from enginesmith.pipeline.precision.scaling import channels
from enginesmith.pipeline.precision.scaling.channels import Place
from enginesmith.pipeline.precision.scaling.products import Product
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

Products = Mapping["ir.Value", Product]
"""Products by the value that they give."""


@dataclass(frozen=True)
class Addend:
    """A constant that has to be scaled along with a value: a bias, or the scale of a normalisation."""

    node: "ir.Node"
    index: int
    place: Place


@dataclass(frozen=True)
class Trail:
    """All that has to be scaled so that a value is."""

    addends: tuple[Addend, ...] = ()
    product: Product | None = None
    end: Place | None = None
    """What the product gives, where there is one."""
    nodes: "tuple[ir.Node, ...]" = ()
    """The operators on the way, from the value on."""

    def scale(self, factors: Array) -> None:
        """Scale the channels of the value that the trail starts from."""
        self.scale_addends(factors)
        if self.product is not None and self.end is not None:
            self.product.scale(outputs=self.end.spread(factors))

    def scale_addends(self, factors: Array) -> None:
        """Scale all but the product."""
        for addend in self.addends:
            constants.multiply(addend.node, addend.index, addend.place.broadcast(factors))


@dataclass(frozen=True)
class _Move:
    """One step back: to another value, or, without one, to the end."""

    place: Place | None
    addends: tuple[Addend, ...] = ()


_Step = Callable[["ir.Node", Place], Iterable[_Move]]


def trace(place: Place, products: Products, steps: Mapping[str, _Step]) -> Trail | None:
    """Follow the channels of a value; None where they cannot be scaled for free."""
    product = products.get(place.value)
    if product is not None:
        return _ends_at(product, place)
    node = place.value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or node.op_type not in steps:
        return None
    for move in steps[node.op_type](node, place):
        if move.place is None:
            return Trail(move.addends, nodes=(node,))
        if node.op_type != "Slice" and not is_private(move.place.value):
            continue
        rest = trace(move.place, products, steps)
        if rest is not None:
            return Trail((*move.addends, *rest.addends), rest.product, rest.end, (node, *rest.nodes))
    return None


def is_private(value: "ir.Value") -> bool:
    """Whether exactly one input of one node reads a value."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def _ends_at(product: Product, place: Place) -> Trail | None:
    axis = product.axis % len(channels.sizes(place.value))
    fits = place.axes == (axis,) and place.total == product.outputs and product.private
    return Trail(product=product, end=place) if fits else None


def _passed(node: "ir.Node", place: Place | None, *addends: Addend) -> Iterator[_Move]:
    if place is not None and not any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        yield _Move(place, addends)


def _moved(move: "Callable[[ir.Node, Place], Place | None]") -> _Step:
    return lambda node, place: _passed(node, move(node, place))


def _elementwise(node: "ir.Node", place: Place) -> Iterator[_Move]:
    """Each number on its own, or, in pooling, those of one channel."""
    if node.op_type == "PRelu" and constants.read(node.inputs[1]) is None:
        return
    if "Pool" not in node.op_type or place.axes == (1,):
        yield from _passed(node, channels.same(place, node.inputs[0]))


def _select(node: "ir.Node", place: Place) -> Iterator[_Move]:
    """The other parts of a Split are scaled by 1."""
    source = channels.split(node, place)
    if source is not None:
        yield _Move(source)


def _matmul(node: "ir.Node", place: Place) -> Iterator[_Move]:
    """A·V: the columns of V, for every head on its own."""
    rank = len(channels.sizes(place.value))
    if rank - 2 not in place.axes and len(channels.sizes(node.inputs[1])) == rank:
        yield from _passed(node, channels.same(place, node.inputs[1]))


def _attention(node: "ir.Node", place: Place) -> Iterator[_Move]:
    """The operator of opset 23; where heads of the values are shared by several of the queries', sizes differ."""
    query, value = channels.sizes(node.inputs[0]), channels.sizes(node.inputs[2])
    if len(query) != len(value) or place.value is not node.outputs[0] or any(node.inputs[4:]):
        return
    if len(query) == 3 or 2 not in place.axes:
        yield from _passed(node, channels.same(place, node.inputs[2]))


def _add(node: "ir.Node", place: Place) -> Iterator[_Move]:
    """A bias, which is scaled along."""
    for index in (0, 1):
        if constants.is_factor(node.inputs[index]) and len(place.axes) == 1:
            yield from _passed(node, channels.same(place, node.inputs[1 - index]), Addend(node, index, place))


def _multiply(node: "ir.Node", place: Place) -> Iterator[_Move]:
    """A constant factor is as good a place as any; of two activations one has to be scaled."""
    for index in (0, 1):
        if constants.is_factor(node.inputs[index]) and len(place.axes) == 1:
            yield _Move(None, (Addend(node, index, place),))
            return
    for value in node.inputs:
        if len(channels.sizes(value)) == len(channels.sizes(place.value)):
            yield from _passed(node, channels.same(place, value))


def _normalise(node: "ir.Node", place: Place) -> Iterator[_Move]:
    """Scale and bias of a normalisation over the last axis."""
    last = len(channels.sizes(place.value)) - 1
    given = [index for index in range(1, len(node.inputs)) if node.inputs[index] is not None]
    fits = place.axes == (last,) and node.attributes.get_int("axis", -1) in (-1, last)
    if fits and place.value is node.outputs[0] and all(constants.is_factor(node.inputs[index]) for index in given):
        yield _Move(None, tuple(Addend(node, index, place) for index in given))


_SIMPLE = ("Relu", "LeakyRelu", "PRelu", "Identity")
_POOLS = ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")

HOMOGENEOUS: Mapping[str, _Step] = MappingProxyType(
    {
        **dict.fromkeys((*_SIMPLE, *_POOLS, "Clip"), _elementwise),
        "Add": _add,
        "Flatten": _moved(channels.reshaped),
        "Reshape": _moved(channels.reshaped),
        "ReduceMean": _moved(channels.averaged),
        "Squeeze": _moved(channels.squeezed),
    }
)
"""Between two layers of a network. A Clip is only homogeneous below its bound: whoever uses it has to look."""

EXACT: Mapping[str, _Step] = MappingProxyType(
    {
        **{word: step for word, step in HOMOGENEOUS.items() if word != "Clip"},
        "Attention": _attention,
        "LayerNormalization": _normalise,
        "MatMul": _matmul,
        "Mul": _multiply,
        "RMSNormalization": _normalise,
        "Slice": _moved(channels.sliced),
        "Split": _select,
        "Transpose": _moved(channels.transposed),
        "Unsqueeze": _moved(channels.unsqueezed),
    }
)
"""All that factors pass through, or end in, exactly."""
