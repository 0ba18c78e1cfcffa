"""Where Q/DQ pairs go, so that an engine computes in few bits and fuses what it can.

                 TensorRT                                   ONNX Runtime, CPU
activations      symmetric int8, zero point 0               uint8 with a zero point: costs nothing, includes a ReLU
Conv             its input                                  its input, and its output behind the Relu or Clip, since
                                                            no kernel writes floats
ConvTranspose    its input                                  left: there is no int8 kernel
MatMul, Gemm     their input                                their input; what they write stays floating, which is the
                                                            faster kernel, and the better one
bias             floating                                   floating for Conv, whose bias becomes int32 at load; int32
                                                            for Gemm, which is not fused otherwise
residual Add     the input that comes from no convolution,  both inputs and the sum, where what goes in is int8 already
                 or from the one nearer to the fork: the
                 other convolution takes the sum in
pooling, Concat  never: Q moves through them by itself      where what they read is int8 already
Reshape and so on, likewise

TensorRT: "Q/DQ layer-placement recommendations" in its guide to quantised types. ONNX Runtime: its selectors in
``core/optimizer/qdq_transformer`` say which patterns become integer kernels. It makes unsigned activations of signed
ones by itself on x64, but not where a value has two readers: half of ResNet-50 then runs in floats.

Of a number that is only simulated (E4M3 on a CPU), ONNX Runtime gets inputs of products and nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.quantize.precisions import Placement

if TYPE_CHECKING:
    import onnx_ir as ir


_SAME_SCALE = frozenset(
    ("MaxPool", "Resize", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Gather")
    + ("Expand", "Tile")
)
"""They hand on numbers as they are: ONNX Runtime runs them on int8 if input and output have one grid."""
_OWN_SCALE = frozenset(("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid"))
"""They have int8 kernels that take a grid for each input and one for the output."""
_MANY_INPUTS = frozenset(("Add", "Mul", "Concat"))
_CLAMPS = frozenset(("Relu", "Clip"))


@dataclass(frozen=True)
class Rules:
    """What one engine fuses."""

    products: frozenset[str]
    """Operators that it has kernels for."""
    symmetric: bool
    outputs: bool
    """Whether a convolution's output has to be quantised too, and what follows it may be."""
    residual: bool
    """Whether one input of a sum is to be quantised so that the sum becomes part of a convolution."""
    integer_bias: frozenset[str] = frozenset()
    """Operators whose bias has to be int32."""


RULES: Mapping[Placement, Rules] = {
    "inputs": Rules(frozenset(layers.PRODUCTS), symmetric=True, outputs=False, residual=True),
    "inputs+outputs": Rules(
        frozenset(("Conv", "MatMul", "Gemm")),
        symmetric=False,
        outputs=True,
        residual=False,
        integer_bias=frozenset(("Gemm",)),
    ),
}
SIMULATED = Rules(frozenset(layers.PRODUCTS), symmetric=True, outputs=False, residual=False)
"""For numbers that the engine has no kernels for."""


@dataclass
class Plan:
    """Which values are rounded, and who reads them so."""

    readers: "dict[ir.Value, list[tuple[ir.Node, int]]]" = field(default_factory=dict)
    """Value → where the rounded one is read; all other readers go on reading the floats."""
    native: "set[ir.Value]" = field(default_factory=set)
    """Values that exist in few bits alone: everything reads the rounded one, outputs of the graph too."""
    same: "list[tuple[ir.Value, ir.Value]]" = field(default_factory=list)
    """Pairs that have to share a grid."""

    def read(self, node: "ir.Node", index: int) -> None:
        """Round an input of a node."""
        value = node.inputs[index]
        assert value is not None, node
        self.readers.setdefault(value, []).append((node, index))


Problem = Callable[["ir.Value"], str]
"""Why a value cannot be rounded; empty where it can."""


def place(model: "ir.Model", chosen: "Iterable[ir.Node]", rules: Rules, problem: Problem) -> Plan:
    """Place the pairs for the products that are to be computed in few bits."""
    plan = Plan()
    products = dict.fromkeys(chosen)
    for node in products:
        plan.read(node, 0)
    if rules.outputs:
        _Runs(model, products, problem, plan).follow()
    if rules.residual:
        for node in model.graph:
            if (index := _residual_input(node, products)) is not None and not problem(_input(node, index)):
                plan.read(node, index)
    return plan


def written(node: "ir.Node") -> "ir.Value":
    """Find the value that a node writes, behind a Relu or Clip that alone reads it: engines fuse these into it."""
    value = node.outputs[0]
    reader, index = layers.only_reader(value)
    if reader is None or reader.op_type not in _CLAMPS or index or any(map(_is_computed, reader.inputs[1:])):
        return value
    return reader.outputs[0]


def _is_computed(value: "ir.Value | None") -> bool:
    return value is not None and layers.tensor(value) is None


def _input(node: "ir.Node", index: int) -> "ir.Value":
    value = node.inputs[index]
    assert value is not None, node
    return value


class _Runs:
    """Follows what convolutions write in int8 through the operators that can go on with it."""

    def __init__(self, model: "ir.Model", products: "Mapping[ir.Node, None]", problem: Problem, plan: Plan) -> None:
        self._model, self._products, self._problem, self._plan = model, products, problem, plan
        self._wanted: set[ir.Value] = set()

    def follow(self) -> None:
        """Fill the plan, in the order of the nodes."""
        self._find_wanted()
        for node in self._model.graph:
            if node in self._products:
                if node.op_type in layers.CONVOLUTIONS:
                    self._plan.native.add(written(node))
            elif node.domain in ("", "ai.onnx"):
                self._go_on(node)

    def _find_wanted(self) -> None:
        """Find values that are rounded anyway, since a product reads them, perhaps through others."""
        for node in reversed(self._model.graph):
            if node in self._products:
                self._wanted.add(_input(node, 0))
            elif node.op_type in _SAME_SCALE | _OWN_SCALE and not self._wanted.isdisjoint(_made(node)):
                self._wanted.update(_read(node))

    def _go_on(self, node: "ir.Node") -> None:
        """Compute a node in int8 if that saves reading and writing floats."""
        if not _has_kernel(node):
            return
        outputs = _made(node)
        read = _read(node)
        native = [value in self._plan.native for value in read]
        if not any(native) or not (all(native) or not self._wanted.isdisjoint(outputs)):
            return
        if any(map(self._problem, (*read, *outputs))):
            return
        for index, value in enumerate(node.inputs):
            if value in read:
                self._plan.read(node, index)
        if node.op_type == "Concat":
            floats = (value for value in read if value not in self._plan.native and len(value.uses()) == 1)
            self._plan.same += [(value, outputs[0]) for value in floats]
        if node.op_type in _SAME_SCALE:
            self._plan.same += [(read[0], output) for output in outputs]
        self._plan.native.update(outputs)


def _made(node: "ir.Node") -> "list[ir.Value]":
    """Return the values that are rounded behind a node, if it is computed in int8."""
    return [written(node)] if node.op_type in _OWN_SCALE else list(node.outputs)


def _read(node: "ir.Node") -> "list[ir.Value]":
    """Return the values that a node computes with; indices, shapes and bounds are not among them."""
    inputs = node.inputs if node.op_type in _MANY_INPUTS else node.inputs[:1]
    return list(dict.fromkeys(value for value in inputs if value is not None))


def _has_kernel(node: "ir.Node") -> bool:
    """Tell whether ONNX Runtime has an integer kernel for it, and for how it is used here."""
    import onnx_ir as ir

    if node.op_type not in _SAME_SCALE | _OWN_SCALE or not all(node.inputs[: 1 + (node.op_type in _MANY_INPUTS)]):
        return False
    if any(value.dtype not in (None, ir.DataType.FLOAT) or not _is_computed(value) for value in _read(node)):
        return False
    if not all(value.uses() or value.is_graph_output() for value in node.outputs):
        return False
    if node.op_type == "MaxPool":
        return len(node.outputs) == 1
    return node.op_type != "Resize" or node.attributes.get_string("mode", "nearest") == "nearest"


def _residual_input(node: "ir.Node", products: "Mapping[ir.Node, None]") -> int | None:
    """Return the input of an Add that is to be rounded so that the other one's convolution takes in the sum."""
    if node.op_type != "Add" or not all(map(_is_computed, node.inputs)):
        return None
    behind = [_convolution(value, products) for value in node.inputs]
    match behind:
        case [None, None]:
            return None
        case [None, _]:
            return 0
        case [_, None]:
            return 1
    first, second = (_depth(one) for one in behind if one is not None)
    return 0 if first < second else 1


def _convolution(value: "ir.Value | None", products: "Mapping[ir.Node, None]") -> "ir.Node | None":
    """Return the quantised convolution whose output a value is, and that nothing else reads."""
    node = value.producer() if value is not None else None
    if value is None or node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if node.op_type == "BatchNormalization":
        return _convolution(node.inputs[0], products)
    return node if node in products and node.op_type in layers.CONVOLUTIONS else None


def _depth(node: "ir.Node") -> int:
    """Count the convolutions one behind the other in front of a node, on the way of first inputs."""
    return sum(1 for one in _ancestors(node) if one.op_type in layers.CONVOLUTIONS)


def _ancestors(node: "ir.Node") -> "Iterator[ir.Node]":
    producer = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    while producer is not None:
        yield producer
        source = producer.inputs[0] if producer.inputs else None
        producer = source.producer() if source is not None else None
