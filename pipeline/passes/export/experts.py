"""Translate mixtures of experts of transformers to ONNX: products of groups of rows, each with a matrix of its own.

Each expert is one product of the rows that chose it with weights that are a constant, so that a graph computes and
holds as much as the module does, and its weights can be quantized. (Its other way that can be exported, ``batched_mm``,
copies both weights of an expert for each token that chose it.)
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from onnxscript import opset18

from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.frameworks.onnx import ir

op = cast("Any", opset18)
_INT64 = ir.DataType.INT64


def list_expert_translations() -> dict[Any, Callable[..., Any]]:
    """List the translations by operator; none where transformers is not loaded, which makes the operator."""
    library = torch.ops.transformers
    return {library.grouped_mm_fallback.default: multiply_groups} if hasattr(library, "grouped_mm_fallback") else {}


def multiply_groups(input: Any, weight: Any, offs: Any) -> Any:  # noqa: A002 (named as the operator names it)
    """Multiply groups of rows, [rows, n], by their matrices, [groups, n, m]; ``offs``, [groups], are the groups' ends.

    The last group ends with the rows: the others, of which transformers has some where experts are on several devices,
    have no matrix.

    Raises:
        ExportError: the number of groups is not known.
    """
    count = weight.shape[0]
    if not isinstance(count, int):
        raise ExportError(
            "the number of experts is not known", "keep the weights of all experts in one parameter of the module"
        )
    if count == 1:
        return op.MatMul(input, op.Squeeze(weight, [0]))
    matrices = op.Split(weight, axis=0, num_outputs=count)
    start, products = op.Constant(value_ints=[0]), []
    for end, matrix in zip(op.Split(op.Cast(offs, to=_INT64), axis=0, num_outputs=count), matrices, strict=True):
        products.append(op.MatMul(op.Slice(input, start, end, [0]), op.Squeeze(matrix, [0])))
        start = end
    return op.Concat(*products, axis=0)


def divide_weights(model: "ir.Model") -> None:
    """Write weights that are split into matrices as weights of their own, in place."""
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Split" and not node.domain else None
        users = [user for output in node.outputs for user, _ in output.uses()]
        if source is None or source.const_value is None or {user.op_type for user in users} != {"Squeeze"}:
            continue
        matrices = source.const_value.numpy()
        for index, (output, matrix) in enumerate(zip(node.outputs, matrices, strict=True)):
            name = f"{source.name}.{index}"
            weight = ir.Value(
                name=name, shape=ir.Shape(matrix.shape), type=source.type, const_value=ir.tensor(matrix, name=name)
            )
            model.graph.register_initializer(weight)
            for user, _ in output.uses():
                user.outputs[0].replace_all_uses_with(weight)
                model.graph.remove(user, safe=True)
        model.graph.remove(node, safe=True)
