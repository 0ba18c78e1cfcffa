"""Optimize the graph that torch.onnx writes, as torch.onnx does, and mend what it and onnxscript get wrong."""

import contextlib
from collections.abc import Iterator
from typing import Any

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.simplify import require_exact_constants

_NORMALIZATION_OPSET = 23  # the first one with RMSNormalization
_INT64_INDICES = ("GatherND", "ScatterND")
_FOLDED_INTO = ("Conv", "ConvTranspose", "Gemm")  # what a normalization is folded into


def optimize_graph(model: "ir.Model") -> None:
    """Fold constants and write simpler operators, in place.

    Without torch.onnx's fusion into RotaryEmbedding, which holds at batch 1 only.
    """
    from onnxscript import optimizer
    from onnxscript.rewriter.rules.fusion import _rms_normalization

    from enginesmith.pipeline.passes.export.experts import divide_weights

    require_exact_constants()
    slice_pieces(model)
    with _without_slow_rules():
        optimizer.optimize(model)
        _round_folded_weights(model)
        divide_weights(model)
        if _widen_indices(model):
            optimizer.optimize(model)
    if model.opset_imports[""] >= _NORMALIZATION_OPSET:
        _rms_normalization.fuse_rms_normalization(model)


@contextlib.contextmanager
def _without_slow_rules() -> Iterator[None]:
    """Leave out rules for several results at once: to find them, onnxscript goes through all nodes for each node.

    In onnxscript 0.7 this is one, which makes a Split of two Slices, and tries only the first Slice of a graph as the
    second half. A SwinUNETR of 11 632 nodes took 150 s with it.
    """
    from onnxscript import rewriter

    rules = rewriter._DEFAULT_REWRITE_RULES
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in rules if rule._matcher.pattern.has_single_output_node)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules


def slice_pieces(model: "ir.Model") -> None:
    """Write pieces of one size, of which a sequence is made and some are taken out again, as slices; in place.

    Where the dimension has a known size, onnxscript writes a Split. Where the size of the pieces is not, it fails.
    """
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type != "SplitToSequence" or len(node.inputs) < 2 or (size := node.inputs[1]) is None:
            continue
        constant = ir.convenience.get_const_tensor(size)
        shape, axis = (size if constant is None else constant).shape, node.attributes.get_int("axis", 0)
        source = node.inputs[0]
        is_fixed = source is not None and source.shape is not None and isinstance(source.shape[axis], int)
        if shape is None or len(shape) or (is_fixed and constant is not None):
            continue
        for user, _ in node.outputs[0].uses():
            at = user.inputs[1] if user.op_type == "SequenceAt" else None
            place = ir.convenience.get_const_tensor(at) if at is not None else None
            if place is not None and (index := int(place.numpy())) >= 0:
                length = None if constant is None else int(constant.numpy())
                _replace_by_slice(user, [source, size, axis], index, length)
        if not node.outputs[0].uses():
            assert node.graph is not None
            node.graph.remove(node, safe=True)


def _replace_by_slice(node: "ir.Node", piece: list[Any], index: int, length: int | None) -> None:
    """Put a Slice in the place of the SequenceAt that takes a piece: its source, its size and its axis."""
    from onnx_ir.tape import Tape

    (source, size, axis), tape = piece, Tape()

    def constant(number: int) -> "ir.Value":
        return tape.op("Constant", [], {"value_ints": [number]})

    if length is None:
        unit = tape.op("Reshape", [size, constant(1)])
        ends = [tape.op("Mul", [unit, constant(index + step)]) for step in range(2)]
    else:
        ends = [constant((index + step) * length) for step in range(2)]
    sliced = tape.op("Slice", [source, *ends, constant(axis)])
    edit.substitute(node, tape.nodes, [sliced])


def _round_folded_weights(model: "ir.Model") -> None:
    """Round weights to their node's type where a normalization was folded into them in float32, as it is into bf16."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        kind = node.outputs[0].dtype if node.op_type in _FOLDED_INTO else None
        for weight in node.inputs[1:]:
            if kind and weight is not None and weight.const_value is not None and weight.dtype != kind:
                weight.const_value = ir.tensor(weight.const_value.numpy().astype(kind.numpy()), name=weight.name)
                weight.dtype = kind


def _widen_indices(model: "ir.Model") -> bool:
    """Cast int32 indices to int64 where the specification has int64 only, and tell whether there were any.

    Types have to be known.
    """
    nodes = [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if node.op_type in _INT64_INDICES and node.inputs[1] and node.inputs[1].dtype == ir.DataType.INT32
    ]
    for node in nodes:
        widened = ir.node("Cast", [node.inputs[1]], {"to": ir.DataType.INT64})
        widened.outputs[0].dtype = ir.DataType.INT64
        assert node.graph is not None
        node.graph.insert_before(node, widened)
        node.replace_input_with(1, widened.outputs[0])
    return bool(nodes)
