"""Quantisable groups: one operator with a product in it, and the weight that it is multiplied by."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginesmith.pipeline.frameworks.onnx.model_file import MODULE_KEY

if TYPE_CHECKING:
    import onnx_ir as ir


CONVOLUTIONS = ("Conv", "ConvTranspose")
MATRIX_PRODUCTS = ("MatMul", "Gemm")
PRODUCTS = (*CONVOLUTIONS, *MATRIX_PRODUCTS)
"""Operators with a quantised form."""
RECURRENT = ("LSTM", "GRU", "RNN")
_WHOLE: Mapping[str, str] = {
    **dict.fromkeys(RECURRENT, "recurrent operators have no form with fixed ranges"),
    "Attention": "attention stays one operator in floating point",
    "Einsum": "Einsum has no quantised form",
}
_STANDARD = ("", "ai.onnx")
_BIAS = 2


@dataclass(frozen=True)
class QuantizableOp:
    """One operator that can be computed in few bits, and is so as a whole or not at all."""

    name: str
    """The node's name, unique in the graph."""
    module: str
    """Dotted path of the PyTorch module that it came from; empty where that is not known."""
    operator: str
    activations: tuple[str, ...]
    """Names of the values that it reads and that are no weights."""
    weight: str | None
    """Name of the initialiser that it is multiplied by; None for a product of two activations."""
    bias: str | None
    """Name of the constant that is added: by the operator itself, or by an Add that nothing but it feeds."""
    output: str
    """Name of the value that the node makes."""
    parameters: int
    """Elements of its weights, biases left out."""
    reason: str = ""
    """Why it has no quantised form with fixed ranges; empty where it has one."""


def find(model: "ir.Model") -> tuple[QuantizableOp, ...]:
    """Find the groups of a float graph, in the order of its nodes.

    Nodes without a name, or with another's, get one of their own first: the same each time for the same graph.
    """
    name_nodes(model)
    return tuple(_group(node) for node in model.graph if _is_product(node))


def name_nodes(model: "ir.Model") -> None:
    """Make every node's name its own: ``Conv_7`` for the seventh node, a number behind a name that is there twice."""
    import onnx_ir as ir

    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    taken = {node.name for node in nodes if node.name}
    seen: set[str] = set()
    for index, node in enumerate(nodes):
        if not node.name or node.name in seen:
            node.name = _free(f"{node.name or node.op_type}_{index}", taken)
            taken.add(node.name)
        seen.add(node.name)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def tensor(value: "ir.Value | None") -> "ir.TensorProtocol | None":
    """Return the content of a constant; None for what is computed or could be fed."""
    import onnx_ir as ir

    return None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)


def only_reader(value: "ir.Value") -> "tuple[ir.Node | None, int]":
    """The node that alone reads a value, and at which input; None if there are others, or the graph hands it out."""
    uses = tuple(value.uses())
    return (uses[0].node, uses[0].idx) if len(uses) == 1 and not value.is_graph_output() else (None, 0)


def _is_product(node: "ir.Node") -> bool:
    return node.domain in _STANDARD and (node.op_type in PRODUCTS or node.op_type in _WHOLE)


def _group(node: "ir.Node") -> QuantizableOp:
    weights = list(_weights(node))
    bias = _bias(node)
    known = {id(value) for value in (*weights, bias)}
    return QuantizableOp(
        name=str(node.name),
        module=node.metadata_props.get(MODULE_KEY, ""),
        operator=node.op_type,
        activations=tuple(
            str(value.name) for value in node.inputs if value is not None and id(value) not in known and value.name
        ),
        weight=str(weights[0].name) if weights else None,
        bias=None if bias is None else str(bias.name),
        output=str(node.outputs[0].name),
        parameters=sum(found.size for value in weights if (found := tensor(value)) is not None),
        reason=_reason(node),
    )


def _weights(node: "ir.Node") -> "Iterator[ir.Value]":
    """Return the constants that it multiplies by: one, or those for inputs and for the state."""
    inputs = node.inputs[1:3] if node.op_type in RECURRENT else node.inputs[:2]
    for value in inputs if node.op_type in (*RECURRENT, *PRODUCTS) else ():
        if value is not None and tensor(value) is not None:
            yield value


def _bias(node: "ir.Node") -> "ir.Value | None":
    if node.op_type == "MatMul":
        return _added(node)
    if node.op_type in PRODUCTS and len(node.inputs) > _BIAS:
        return node.inputs[_BIAS] if tensor(node.inputs[_BIAS]) is not None else None
    return None


def _added(node: "ir.Node") -> "ir.Value | None":
    """Find the constant that the only reader of a product adds to each of its columns."""
    reader, index = only_reader(node.outputs[0])
    weight = tensor(node.inputs[1])
    if reader is None or reader.op_type != "Add" or weight is None:
        return None
    other = reader.inputs[1 - index]
    found = tensor(other)
    return other if found is not None and tuple(found.shape) == tuple(weight.shape)[-1:] else None


def _reason(node: "ir.Node") -> str:
    import onnx_ir as ir

    if node.op_type in _WHOLE:
        return _WHOLE[node.op_type]
    data, weight = (tensor(value) for value in node.inputs[:2])
    if weight is None:
        return "its weight is the left factor" if data is not None else "a product of two activations"
    if data is not None:
        return "both factors are constants"
    if weight.dtype != ir.DataType.FLOAT:
        return f"its weight is {weight.dtype.name.lower()}, and only float32 is quantised"
    return ""
