"""Compute graphs by onnx's own evaluator, with operators of its own where onnx's are wrong.

onnx implements the newest form of most operators, and reads the attributes that a node leaves out as the newest form's
defaults. What is wrong on nodes of older opsets, or of any, was found by comparing it with ONNX Runtime, and is either
computed here, or listed here: a graph with such a node is not judged by it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.pipeline.frameworks.onnx import traversal
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx
    from onnx.reference import ReferenceEvaluator

_FLATTENING = 13
"""Opset below which Softmax, LogSoftmax and Hardmax take all axes from theirs on as one, which is 1 by default."""


def open_reference(model: "onnx.ModelProto") -> "ReferenceEvaluator":
    """Open a graph in onnx's evaluator."""
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(model, new_ops=list(_make_operators()))


@functools.cache
def _make_operators() -> tuple[type[Any], ...]:
    """Make the operators that stand in for onnx's; the evaluator tells them by the names of their classes."""
    from onnx.reference.ops import op_batch_normalization, op_hardmax, op_log_softmax, op_softmax

    class BatchNormalization(op_batch_normalization.BatchNormalization_14):
        """Normalize by the given mean and variance unless a node says ``training_mode``, which none below 14 has."""

    flattened = (op_softmax.Softmax, op_log_softmax.LogSoftmax, op_hardmax.Hardmax)
    return BatchNormalization, *(type(each.__name__, (each,), {"_run": _flatten_around(each)}) for each in flattened)


def _flatten_around(operator: type[Any]) -> Callable[..., tuple[Array, ...]]:
    """Make the computation of an operator along an axis that takes the axes behind it, too, in an older opset."""

    def _run(self: Any, data: Array, axis: int | None = None) -> tuple[Array, ...]:
        if self.run_params["opsets"][""] >= _FLATTENING:
            results: tuple[Array, ...] = operator._run(self, data)
            return results
        given = next((entry.i for entry in self.onnx_node.attribute if entry.name == "axis"), 1)
        rows = int(np.prod(data.shape[: given if given >= 0 else given + data.ndim]))
        self.axis = -1
        (result,) = operator._run(self, data.reshape(rows, -1) if data.size else data)
        return (result.reshape(data.shape),)

    return _run


# What onnx's evaluator gets wrong


def find_distrusted(model: "onnx.ModelProto") -> str:
    """Name the first node that onnx's evaluator may compute wrong, with why; empty where there is none."""
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 0)
    whole = _list_whole_scales(model)
    for node in traversal.nodes(model):
        doubt = _DOUBTS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if doubt and (why := doubt(node, opset, whole)):
            return f"{node.op_type} {why}"
    return ""


def _list_whole_scales(model: "onnx.ModelProto") -> set[str]:
    """List the small constants whose numbers are all whole; those that lie in another file are left out."""
    from onnx import TensorProto, numpy_helper

    tensors = traversal.constants(model)
    within = [(name, each) for name, each in tensors if each.data_location != TensorProto.EXTERNAL]
    small = [(name, numpy_helper.to_array(each)) for name, each in within if len(each.dims) == 1 and each.dims[0] <= 8]
    return {name for name, value in small if value.dtype.kind == "f" and bool((value == np.round(value)).all())}


def _reads(node: "onnx.NodeProto", place: int) -> bool:
    return len(node.input) > place and bool(node.input[place])


def _doubt_recurrence(node: "onnx.NodeProto", opset: int, whole: set[str]) -> str:
    given = traversal.attributes(node)
    ignored = [name for name in ("clip", "input_forget") if given.get(name)]
    usual = {"GRU": (b"Sigmoid", b"Tanh"), "LSTM": (b"Sigmoid", b"Tanh", b"Tanh")}.get(node.op_type)
    chosen = tuple(given.get("activations", ()))
    if usual and chosen and chosen not in (usual, usual * 2):
        ignored.append("activations")
    if _reads(node, 4):
        ignored.append("sequence_lens")
    return f"with {' and '.join(ignored)}" if ignored else ""


def _doubt_pool(node: "onnx.NodeProto", opset: int, whole: set[str]) -> str:
    given = traversal.attributes(node)
    if given.get("auto_pad") == b"SAME_LOWER":
        return "with auto_pad SAME_LOWER"
    return "with storage_order 1" if given.get("storage_order") and len(node.output) > 1 else ""


def _doubt_resize(node: "onnx.NodeProto", opset: int, whole: set[str]) -> str:
    """Doubt sizes that are not whole: onnx lays corners at them, and which pixel is nearest depends on rounding."""
    given = traversal.attributes(node)
    aligned = given.get("coordinate_transformation_mode") == b"align_corners"
    scales = node.input[2] if _reads(node, 2) else ""
    nearest = given.get("mode", b"nearest") == b"nearest"
    if (nearest and (aligned or scales not in whole)) or (aligned and scales and scales not in whole):
        return "to places between pixels"
    return ""


def _doubt_old(below: int) -> Callable[["onnx.NodeProto", int, set[str]], str]:
    return lambda node, opset, whole: f"of opset {opset}" if opset < below else ""


_DOUBTS: Mapping[str, Callable[["onnx.NodeProto", int, set[str]], str]] = {
    "Dropout": lambda node, opset, whole: "with a mask" if opset < 12 and len(node.output) > 1 else "",
    "GRU": _doubt_recurrence,
    "LSTM": _doubt_recurrence,
    "RNN": _doubt_recurrence,
    "LRN": lambda node, opset, whole: "of several channels",
    "MaxPool": _doubt_pool,
    "Resize": _doubt_resize,
    "RoiAlign": _doubt_old(16),
}
"""What onnx's evaluator may get wrong of a node, of an opset, with the constants that are whole numbers."""
