"""Find the operators of a float graph that can be computed in few bits, and prepare the graph for that."""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple, Protocol

from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.frameworks.onnx.coverage import PRECISIONS
from enginesmith.pipeline.frameworks.onnx.model_file import MODULE_KEY
from enginesmith.pipeline.passes.float16.convert import is_lowerable
from enginesmith.pipeline.passes.float16.rules import find_remedy
from enginesmith.pipeline.passes.quantize.precisions import KINDS, Name
from enginesmith.pipeline.tensors import Array
from enginesmith.pipeline.units import name_some

if TYPE_CHECKING:
    from enginesmith.calibration.ranges import ChannelStatistics, Ranges


CONVOLUTIONS = ("Conv", "ConvTranspose")
MATRIX_PRODUCTS = ("MatMul", "Gemm")
PRODUCTS = (*CONVOLUTIONS, *MATRIX_PRODUCTS)
"""Operators with a quantized form."""
SAME_NUMBERS = frozenset(("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
"""Operators whose output has the numbers of their input, in another shape."""
_HANDING_ON = SAME_NUMBERS | {"Cast"}
WEIGHT, BIAS = 1, 2
"""Positions of the inputs of products."""
ON_REQUEST = "the assignment keeps it in floating point"
TWO_ACTIVATIONS = "a product of two activations"
_RECURRENT = ("LSTM", "GRU", "RNN")
_WHOLE: Mapping[str, str] = {
    **dict.fromkeys(_RECURRENT, "recurrent operators have no form with fixed ranges"),
    "Attention": "attention stays one operator in floating point",
    "Einsum": "Einsum has no quantized form",
}
_MARKS = ("Quantize", "QLinear", "Integer", "NBits", "MatMulBnb4", "QGemm", "QAttention")
_SHOWN = 3


@dataclass(frozen=True)
class QuantizableOp:
    """One operator that can be computed in few bits, and is so as a whole or not at all: a group."""

    name: str
    """The node's name, unique in the graph."""
    module: str
    """Dotted path of the PyTorch module that it came from; empty where that is not known."""
    operator: str
    activations: tuple[str, ...]
    """Names of the values that it reads and that are no weights."""
    output: str
    """Name of the first value that the node makes and that has one; empty where none has."""
    parameters: int
    """Elements of its weights, biases left out."""
    reason: str = ""
    """Reason for having no quantized form with fixed ranges; empty where it has one."""
    given: str = "fp32"
    """Precision that the graph has it in."""


Correct = Callable[["ir.Node", Array, Array], object]
"""Makes the bias of a product up for its rounded weight, before the product is changed; it is given the float weight
and the rounded one (float32), both as the node reads them.
"""


@dataclass(frozen=True)
class Quantized:
    """Outcome of the quantization of a graph."""

    pairs: int
    """QuantizeLinear nodes, each with its DequantizeLinear."""
    groups: tuple[QuantizableOp, ...]
    """All of them, in the order of the graph."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Name of a group that stays in floating point → why."""

    @property
    def done(self) -> tuple[QuantizableOp, ...]:
        """Return the groups in few bits."""
        return tuple(group for group in self.groups if group.name not in self.left)


def find_groups(model: "ir.Model") -> tuple[QuantizableOp, ...]:
    """Find the groups of a float graph, in the order of its nodes.

    Nodes without a name, or with another's, get one of their own first, the same each time for the same graph:
    ``Conv_7`` for the seventh node, a number behind a name that is there twice.
    """
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    taken = {node.name for node in nodes if node.name}
    used_names: set[str] = set()
    for index, node in enumerate(nodes):
        if not node.name or node.name in used_names:
            name = f"{node.name or node.op_type}_{index}"
            while name in taken:
                name += "_"
            node.name = name
            taken.add(name)
        used_names.add(node.name)
    products = (node for node in model.graph if not node.domain)
    return tuple(_describe_group(node) for node in products if node.op_type in PRODUCTS or node.op_type in _WHOLE)


class Named(Protocol):
    """Require the names by which ``--keep`` may name a node."""

    @property
    def name(self) -> str:
        """Return the node's name."""

    @property
    def module(self) -> str:
        """Return the dotted path of the PyTorch module that it came from; empty where that is not known."""


class FloatNode(NamedTuple):
    """Name a node that may read or make float32, with or without a quantized form."""

    name: str
    module: str


def list_float_nodes(model: "ir.Model") -> tuple[FloatNode, ...]:
    """List the nodes of a graph that may compute in float32, in its order; not those of branches and loops."""
    floats = (None, ir.DataType.FLOAT)
    return tuple(
        FloatNode(str(node.name), node.metadata_props.get(MODULE_KEY, ""))
        for node in model.graph
        if any(value is not None and value.dtype in floats for value in (*node.inputs, *node.outputs))
    )


def find_kept(
    patterns: Sequence[str], named: Sequence[Named], what: str = "no group that can be quantized is called"
) -> frozenset[str]:
    """Find the names of all whose name or module fits one of the patterns.

    Raises:
        UsageError: a pattern fits none; it begins with ``what``.
    """
    kept: set[str] = set()
    for pattern in patterns:
        names = ((each, name) for each in named for name in (each.name, each.module) if name)
        matching = {each.name for each, name in names if fnmatchcase(name, pattern)}
        if not matching:
            known = [name for each in named for name in (each.module, each.name) if name]
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise UsageError(
                f"{what} {pattern!r}",
                f"did you mean {', '.join(near)}?" if near else "`enginesmith inspect` lists them",
            )
        kept |= matching
    return frozenset(kept)


def get_input(node: "ir.Node", index: int) -> "ir.Value":
    """Return an input that the node has."""
    value = node.inputs[index]
    assert value is not None, node
    return value


def list_epilogue(node: "ir.Node") -> "list[ir.Node]":
    """List the nodes that alone go on with what a node makes and read nothing else but constants, up to a product."""
    nodes = [node]
    while nodes[-1].outputs:
        reader, _ = edit.find_only_reader(nodes[-1].outputs[0])
        if reader is None or reader.op_type in PRODUCTS:
            break
        computed = [value for value in reader.inputs if value is not None and edit.read_constant(value) is None]
        if len(computed) > 1:
            break
        nodes.append(reader)
    return nodes[1:]


def find_channel_statistics(node: "ir.Node", ranges: "Ranges | None") -> "ChannelStatistics | None":
    """Look up the statistics of what a product sums over; None where they are not known.

    A convolution and a matrix product may read the same value along different axes; statistics are of one axis.
    """
    data = get_input(node, 0)
    known = ranges.channels.get(str(data.name)) if ranges is not None else None
    if known is None or bool(node.attributes.get_int("transA", 0)):
        return None
    rank = None if data.shape is None else len(data.shape)
    axis = known.axis if rank is None else known.axis % rank
    if node.op_type in CONVOLUTIONS:
        return known if axis == 1 else None
    if rank is None:  # what a convolution reads has more than two axes
        convolved = any(use.node.op_type in CONVOLUTIONS and use.idx == 0 for use in data.uses())
        return None if convolved and axis == 1 else known
    return known if axis == rank - 1 else None


def find_weight(value: "ir.Value | None") -> "ir.TensorProtocol | None":
    """Return the content of a constant that a product reads, perhaps through a Transpose; None for what is computed.

    A weight that something else reads too, such as an embedding, stays one in a float graph, with a Transpose behind.
    """
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Transpose" or node.domain:
        return edit.read_constant(value)
    content = edit.read_constant(node.inputs[0])
    if content is None:
        return None
    shape = tuple(content.shape.numpy())
    order = [edit.find_transposed_axis(node, axis) % len(shape) for axis in range(len(shape))]
    return ir.LazyTensor(
        lambda: ir.tensor(content.numpy().transpose(order)),
        dtype=content.dtype,
        shape=ir.Shape([shape[axis] for axis in order]),
    )


def read_weight(node: "ir.Node", index: int = WEIGHT) -> Array:
    """Return the numbers of a product's constant weight."""
    content = find_weight(node.inputs[index])
    assert content is not None, node
    return content.numpy()


def read_weight_shape(node: "ir.Node") -> tuple[int, ...]:
    """Return the shape of a product's constant weight."""
    content = find_weight(node.inputs[WEIGHT])
    assert content is not None, node
    return tuple(content.shape.numpy())


def _describe_group(node: "ir.Node") -> QuantizableOp:
    positions = {**dict.fromkeys(_RECURRENT, slice(1, 3)), **dict.fromkeys(PRODUCTS, slice(2))}
    read = node.inputs[positions[node.op_type]] if node.op_type in positions else ()
    weights = {value: array for value in read if value is not None and (array := find_weight(value)) is not None}
    bias = _find_bias(node)
    others = [value for value in node.inputs if value is not None and value not in weights and value is not bias]
    return QuantizableOp(
        name=str(node.name),
        module=node.metadata_props.get(MODULE_KEY, ""),
        operator=node.op_type,
        activations=tuple(str(value.name) for value in others if value.name),
        output=next((value.name for value in node.outputs if value.name), ""),
        parameters=sum(content.size for content in weights.values()),
        reason=_explain_group(node),
        given=_name_precision(node),
    )


def _name_precision(node: "ir.Node") -> str:
    """Name the precision that a graph has an operator in: that of its first floating operand of known type."""
    dtypes = (value.dtype for value in node.inputs if value is not None)
    known = (PRECISIONS.get(dtype.numpy().name, "") for dtype in dtypes if dtype is not None)
    return next((name for name in known if name.startswith(("fp", "bf"))), "fp32")


def _find_bias(node: "ir.Node") -> "ir.Value | None":
    """Find the constant that a product adds, or the one that the only reader of a MatMul adds to each column."""
    if node.op_type == "MatMul":
        adder, index = edit.find_added(node)
        weight, added = find_weight(node.inputs[WEIGHT]), adder.inputs[index] if adder is not None else None
        content = edit.read_constant(added)
        fits = content is not None and weight is not None and tuple(content.shape) == tuple(weight.shape)[-1:]
        return added if fits else None
    bias = edit.find_input(node, BIAS) if node.op_type in PRODUCTS else None
    return bias if edit.read_constant(bias) is not None else None


def _explain_group(node: "ir.Node") -> str:
    if node.op_type in _WHOLE:
        return _WHOLE[node.op_type]
    data, weight = edit.read_constant(node.inputs[0]), find_weight(node.inputs[WEIGHT])
    if weight is None:
        return "its weight is the left factor" if data is not None else TWO_ACTIVATIONS
    if data is not None:
        return "both factors are constants"
    if weight.dtype != ir.DataType.FLOAT:
        return f"its weight is {weight.dtype.name.lower()}, and only float32 is quantized"
    return ""


# Demands on a graph before anything in it is quantized.


def prepare(model: "ir.Model", precision: str, keep: Collection[str] = ()) -> tuple[QuantizableOp, ...]:
    """Make weights of a float32 graph constants that cannot be fed and are each there once; return its groups.

    Raises:
        InvalidGraph: it is quantized already, or not in float32.
        UsageError: ``keep`` names groups that there are none of.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if any(mark in node.op_type for mark in _MARKS) or _unpacks_weight(node):
            raise InvalidGraph(
                f"the graph is quantized already: it has a {node.op_type} ({node.name or node.outputs[0].name!r}), and "
                f"{precision} is made of a float32 graph",
                "give the graph as it was before",
            )
    low = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        if value.const_value is not None and value.const_value.dtype in low and value.const_value.size > 1:
            raise InvalidGraph(
                f"the weight {value.name!r} is {value.const_value.dtype.name.lower()}, and {precision} is made of a "
                "float32 graph",
                "export the model in float32: precisions that mix types lower the rest themselves",
            )
    edit.fix_weights(model)
    edit.merge_equal_constants(model)
    groups = find_groups(model)
    if unknown := sorted(set(keep) - {group.name for group in groups}):
        names = name_some([repr(name) for name in unknown], _SHOWN)
        raise UsageError(
            f"{names} are to stay in floating point, and the graph has no such products",
            "take the names from the table of groups of this graph",
        )
    return groups


def _unpacks_weight(node: "ir.Node") -> bool:
    """Tell whether a node unpacks a constant that a product reads, perhaps through operators that keep its numbers."""
    if node.op_type != "DequantizeLinear" or edit.read_constant(node.inputs[0]) is None:
        return False
    waiting = list(node.outputs)
    for value in waiting:
        for reader, index in value.uses():
            if reader.op_type in PRODUCTS and index == WEIGHT:
                return True
            if reader.op_type in _HANDING_ON:
                waiting += reader.outputs
    return False


def require_opset(model: "ir.Model", precision: Name) -> None:
    """Refuse a graph of an older opset than a precision needs.

    Raises:
        InvalidGraph: so it is.
    """
    given, least = model.opset_imports.get("", 0), KINDS[precision].opset
    if given < least:
        raise InvalidGraph(
            f"the graph has opset {given}, {precision} needs opset {least}, and it cannot be converted",
            f"export it with --opset {least} or later",
        )


class NothingToQuantize(InvalidGraph):
    """A graph without anything that can be in a precision."""


def require_products(
    model: "ir.Model",
    groups: Collection[QuantizableOp],
    precision: str,
    usable: Collection[QuantizableOp],
    operators: Collection[str] = PRODUCTS,
) -> None:
    """Refuse a graph that has nothing to quantize.

    Raises:
        NothingToQuantize: says which operators would be, or why those that are there cannot be.
    """
    if usable:
        return
    reasons = {f"{group.operator}: {group.reason}" for group in groups if group.reason}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain:
            reasons.add(f"{node.op_type}: it is of the domain {node.domain!r}")
        elif node.graph is not model.graph and node.op_type in operators:
            reasons.add(f"{node.op_type}: bodies of branches and loops are left as they are")
    what = f"has no product that can be in {precision}"
    what += f" ({'; '.join(sorted(reasons)[:_SHOWN])})" if reasons else ""
    remedy = "use fp16 or fp32" if is_lowerable(model) else find_remedy(model.graph) or "use fp32"
    raise NothingToQuantize(f"the graph {what}; {', '.join(operators)} with a constant float32 weight can", remedy)
