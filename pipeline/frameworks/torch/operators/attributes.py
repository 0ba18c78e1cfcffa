"""Read attributes of nodes and shapes from inputs, and refuse what has no form in torch."""

from collections.abc import Callable, Sequence

from torch import Tensor

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import ir

Compute = Callable[..., Tensor | tuple[Tensor, ...]]
"""Takes a node's inputs in their order, None for one that is left out."""
Make = Callable[["ir.Node", int], Compute]
"""Makes that function from a node and the graph's opset."""


def refuse(node: "ir.Node", why: str = "") -> ModelError:
    """Make the error for a node that has no form in torch, or not as it is used."""
    return ModelError(
        f"{node.op_type} {node.name!r} has no form in torch here{f': {why}' if why else ''}",
        "omit --recover, or export the model without this operator",
    )


def read_ints(node: "ir.Node", name: str, default: Sequence[int]) -> list[int]:
    """Read a list of whole numbers."""
    return list(node.attributes[name].as_ints()) if name in node.attributes else list(default)


def read_text(node: "ir.Node", name: str, default: str) -> str:
    """Read a text."""
    return node.attributes.get_string(name, default) or default


def read_int(node: "ir.Node", name: str, default: int) -> int:
    """Read a whole number."""
    return int(node.attributes.get_int(name, default) or 0)


def read_float(node: "ir.Node", name: str, default: float) -> float:
    """Read a number."""
    return float(node.attributes.get_float(name, default) or 0.0)


def list_sizes(value: Tensor | None) -> list[int]:
    """List the whole numbers of an input that says sizes, axes or the like; none where it is left out."""
    return [] if value is None else [int(each) for each in value.reshape(-1).tolist()]
