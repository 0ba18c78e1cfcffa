"""Which rewrites make up the simplification, and in which order."""

from typing import TYPE_CHECKING

from enginesmith.pipeline import graph
from enginesmith.pipeline.passes.attention_heads import absorb_heads
from enginesmith.pipeline.passes.shape_arithmetic import simplify_shapes

if TYPE_CHECKING:
    import onnx_ir as ir

_ROUNDS = 4
_SMALL = 8192  # elements; anything this small may be folded
_LARGEST_NEW = 512 * 512  # elements of a constant that folding may create where nothing disappears for it
_NO_LIMIT = 1 << 40
_INITIALISERS_ARE_NO_INPUTS = 4  # IR version from which weights need not be listed as inputs
# Operators that are applied to weights: exporters write them where they repack what PyTorch stores differently.
_ON_WEIGHTS = frozenset(
    {
        *("Add", "Cast", "Concat", "Div", "Flatten", "Gather", "Identity", "Mul", "Neg", "Pow", "Reciprocal"),
        *("Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    }
)
_NEVER = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConstantOfShape", "Expand", "Tile"})


def rewrite(model: "ir.Model") -> None:
    """Simplify a graph in place."""
    import onnx_ir as ir
    from onnx_ir.passes import common

    model.ir_version = max(model.ir_version, _INITIALISERS_ARE_NO_INPUTS)
    declared = [(value.name, value.shape) for value in model.graph.outputs]
    ir.passes.Sequential(
        common.InlinePass(),
        common.RemoveInitializersFromInputsPass(),
        common.ShapeInferencePass(strict_mode=False),
    )(model)
    _fold_and_rewrite(model)
    ir.passes.Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
    )(model)
    for value, (name, shape) in zip(model.graph.outputs, declared, strict=True):
        value.name, value.shape = name, shape  # inference may know more, callers rely on what was declared
    common.NameFixPass()(model)


def _fold_and_rewrite(model: "ir.Model") -> None:
    """Both in turns, as each opens ways for the other, until nothing disappears any more."""
    from onnx_ir.passes import common
    from onnxscript import optimizer, rewriter

    left = graph.node_count(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model, input_size_limit=_SMALL, output_size_limit=_NO_LIMIT, should_fold=_should_fold)
        rewriter.rewrite(model)
        absorb_heads(model)
        simplify_shapes(model)
        common.RemoveUnusedNodesPass()(model)
        before, left = left, graph.node_count(model)
        if left == before:
            return


def _should_fold(node: "ir.Node") -> bool | None:
    """Whether a node whose inputs are all constant is to be computed now; None leaves it to the library."""
    if node.op_type in _NEVER or len(node.outputs) != 1:
        return False if node.op_type in _NEVER and _output_size(node) > _SMALL else None
    if _output_size(node) <= _SMALL and all(_size(value) <= _SMALL for value in node.inputs):
        return None
    inputs = [value for value in node.inputs if _size(value) > _SMALL]
    return (
        node.op_type in _ON_WEIGHTS
        and _output_size(node) <= sum(map(_size, node.inputs))  # parts of a weight may be small, and their sum is not
        and all(map(_vanishes, inputs))
    )


def _vanishes(value: "ir.Value | None") -> bool:
    """Whether a weight is read only by operators that will be folded too, so that nothing is kept twice."""
    return value is not None and all(
        node.op_type in _ON_WEIGHTS and all(v is None or v.const_value is not None for v in node.inputs)
        for node in value.consumers()
    )


def _size(value: "ir.Value | None") -> int:
    return 0 if value is None or value.const_value is None else value.const_value.size


def _output_size(node: "ir.Node") -> int:
    dims = node.outputs[0].shape or (None,)
    size = 1
    for dim in dims:
        size *= dim if isinstance(dim, int) else _NO_LIMIT
    return size
