"""Compute ONNX operators with torch, so that gradients go through a graph.

The rows of ``PLAIN`` are functions of a node's inputs in their order; keyword-only parameters are its attributes, with
ONNX's names and defaults, and ``opset`` is the graph's. The rows of ``MADE`` make such a function from the node and the
opset, and may refuse the node. Semantics: https://onnx.ai/onnx/operators/.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.torch.operators import (
    attention,
    elementwise,
    pixels,
    products,
    recurrent,
    reductions,
    shapes,
)
from enginesmith.pipeline.frameworks.torch.operators.attributes import Compute, Make, refuse

_PLAIN: Mapping[str, Compute] = {
    **elementwise.PLAIN,
    **shapes.PLAIN,
    **reductions.PLAIN,
    **products.PLAIN,
    **pixels.PLAIN,
    **attention.PLAIN,
}
_MADE: Mapping[str, Make] = {
    **elementwise.MADE,
    **shapes.MADE,
    **reductions.MADE,
    **products.MADE,
    **pixels.MADE,
    **recurrent.MADE,
    **attention.MADE,
}
_MICROSOFT = ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")
"""Operators of com.microsoft; others of its own have the names of standard ones, and other inputs."""


def find(node: "ir.Node", opset: int) -> Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]:
    """Return the function that computes a node from its inputs.

    Raises:
        ModelError: the operator has no form in torch, or not as it is used here.
    """
    compute: Compute | None = None
    if not node.domain or (node.domain == "com.microsoft" and node.op_type in _MICROSOFT):
        if node.op_type in _PLAIN:
            compute = _bind_attributes(_PLAIN[node.op_type], node, opset)
        elif node.op_type in _MADE:
            compute = _MADE[node.op_type](node, opset)
    if compute is None:
        raise refuse(node)
    function = compute

    def run(values: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        result = function(*values)
        return result if isinstance(result, tuple) else (result,)

    return run


def _bind_attributes(function: Compute, node: "ir.Node", opset: int) -> Compute:
    names = getattr(function, "__kwdefaults__", None) or {}  # torch's own functions in C have none
    given = {name: node.attributes[name].value for name in names if name in node.attributes}
    return functools.partial(function, **given, **({"opset": opset} if "opset" in names else {}))
