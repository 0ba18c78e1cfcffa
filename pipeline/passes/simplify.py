"""Simplify: the same function with fewer nodes, in standard operators, so that every engine starts from a clean graph.

The work is done by passes of onnx-ir and onnxscript (constant folding, rewriting, common subexpressions), chosen
because they keep weights lazy, names and dynamic shapes intact, and metadata on the nodes. Whatever comes out is held
against what went in; if it is not provably as good, the graph is passed on as it was.
"""

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import EnginesmithError, ModelError
from enginesmith.pipeline.frameworks.onnx import edit, ir, model_file, validation
from enginesmith.pipeline.frameworks.onnx.evaluator import compare_graphs
from enginesmith.pipeline.passes.base import Pass, PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.export.attention import absorb_heads
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.rescale.fold_factors import fold_factors
from enginesmith.pipeline.tensors import Array
from enginesmith.pipeline.units import AddedOption

# What the libraries raise on graphs they were not made for.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, NotImplementedError)


class Simplify(GraphPass):
    """Rewrite a graph into fewer nodes that compute the same."""

    name: ClassVar[str] = "simplify"
    tools: ClassVar[tuple[str, ...]] = ("onnx", "onnx-ir", "onnxscript")
    stage: ClassVar[Stage] = "graph"
    reads: ClassVar[tuple[str, ...]] = ("simplify",)

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make one, unless the recipe wants the graph as it is."""
        return (cls(),) if options["simplify"] else ()

    def list_other_options(self) -> Iterable[tuple[AddedOption, Pass | None]]:
        """List the one that leaves the graph as it is."""
        return ((AddedOption(field="simplify", value=False, instead_of=True, words="--no-simplify"), None),)

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Simplify, check, and keep the better of both graphs."""
        return simplify_file(artifact.path, out, self.external_data_bytes, progress)


def simplify_file(path: Path, out: Path, external_data_bytes: int, progress: Progress) -> Effect:
    """Write a simplified ``model.onnx``, or the same graph with a note that says why."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        try:
            progress("rewriting the graph")
            model = edit.load(path)
            given = edit.node_count(model)
            rewritten = rewrite(model)
            left = edit.node_count(model)
            if left == given and not any(rewritten):
                return edit.pass_on(path, out, "there was nothing to simplify")
            if left > given + rewritten.pooled:
                raise ModelError(f"rewriting gave {left} nodes instead of {given}")
            edit.tidy(model)
            edit.save(model, Path(scratch), external_data_bytes)
            progress("checking the result")
            simplified = Path(scratch, edit.FILE)
            validation.check(simplified, "the simplified graph")
            if model_file.signature(path) != model_file.signature(simplified):
                raise ModelError("the signature changed")
            compare_graphs(path, simplified)
        except (EnginesmithError, *_FAILURES) as error:
            reason = error.message if isinstance(error, EnginesmithError) else error
            return edit.pass_on(path, out, f"passed on unchanged: {reason}")
        for file in list(Path(scratch).iterdir()):
            file.rename(out / file.name)
    counts = {"means written as pooling": rewritten.pooled, "factors folded into weights": rewritten.folded}
    summary = "; ".join([f"{given} → {left} nodes", *(f"{what}: {count}" for what, count in counts.items() if count)])
    return Effect(file=edit.FILE, summary=summary, signature=model_file.signature(out / edit.FILE))


def _keep_constants(model: "ir.Model") -> None:
    """Put constants back that nodes read, and that others took the place of.

    Two of onnxscript 0.7.2's rules give a new shape the name of what is reshaped and of the result: of a Flatten behind
    two Reshapes, the second constant removes the first.
    """
    names = edit.Names(model.graph)
    read = (value for graph in model.graphs() for node in graph for value in node.inputs if value is not None)
    for value in read:
        constant = value.const_value is not None and value.producer() is None
        if constant and not (value.is_initializer() or value.is_graph_input()):
            value.name = names.new(value.name or "constant")
            model.graph.register_initializer(value)


# Shape arithmetic that the dynamic dimensions do not need.
#
# Exporters compute target shapes with Shape, Slice, Mul and Concat nodes even where every number is known, or is simply
# that of the input. Here such values are followed symbolically: an element is a number, or the name of a dimension.

Dim = int | str | None
_MOST_ELEMENTS = 64
_RECURRENT = ("LSTM", "GRU", "RNN")
_KEEPS_ZEROS = ("Expand", "Slice", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Identity", "Cast")
_FOLLOWED = frozenset(("Shape", "Slice", "Gather", "Concat", "Squeeze", "Unsqueeze", "Reshape", "Identity", "Mul"))


def simplify_shapes(model: "ir.Model") -> None:
    """Replace computed shapes by constants, in place; what is unused afterwards is left to the next pass."""
    known: dict[ir.Value, list[Dim]] = {}
    for node in model.graph:
        if node.domain:
            continue
        if node.op_type in _FOLLOWED and (dims := _evaluate(node, known)) is not None:
            known[node.outputs[0]] = dims
        elif node.op_type == "Reshape":
            _settle_reshape(node, known)
        elif node.op_type in _RECURRENT:  # they take initial states of zeros by themselves
            for position in (5, 6):
                if _is_zero(edit.find_input(node, position)):
                    node.replace_input_with(position, None)


def _evaluate(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    """Return the elements that an operator gives; None where they are not known."""
    parts = [_read_elements(value, known) for value in node.inputs]
    match node.op_type, parts:
        case "Shape", _:
            value = node.inputs[0]
            if value is None or value.shape is None:
                return None
            dims = [_name_dimension(dim) for dim in value.shape]
            return dims[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(dims))]
        case "Slice", [data, [int(start)], [int(end)], *rest]:
            return data[start:end] if data is not None and rest in ([], [[0]], [[0], [1]]) else None
        case "Gather", [list(data), list(places)] if node.attributes.get_int("axis", 0) == 0:
            chosen = [place for place in places if isinstance(place, int) and -len(data) <= place < len(data)]
            return [data[place] for place in chosen] if len(chosen) == len(places) else None
        case "Concat", _:
            return None if None in parts else [dim for part in parts if part is not None for dim in part]
        case ("Squeeze" | "Unsqueeze" | "Reshape", [[_], *_]) | ("Identity", _):
            return parts[0]
        case "Mul", [list(left), list(right)] if len(left) == len(right):
            pairs = zip(left, right, strict=True)
            return [a * b if isinstance(a, int) and isinstance(b, int) else None for a, b in pairs]
    return None


def _read_elements(value: "ir.Value | None", known: "dict[ir.Value, list[Dim]]") -> list[Dim] | None:
    if value in known:
        return known[value]
    array = _read_small(value)
    if array is None or array.ndim > 1 or array.dtype != np.int64:
        return None
    return [int(number) for number in array.reshape(-1)]


def _read_small(value: "ir.Value | None") -> Array | None:
    content = edit.read_constant(value)
    return None if content is None or content.size > _MOST_ELEMENTS else content.numpy()


def _name_dimension(dim: object) -> Dim:
    """Return a dimension's number or name; None if it has neither."""
    if isinstance(dim, int):
        return dim
    value = getattr(dim, "value", None)
    return value if isinstance(value, str) else None


def _settle_reshape(node: "ir.Node", known: "dict[ir.Value, list[Dim]]") -> None:
    """Write the target as a constant: 0 copies the input's dimension, -1 stands for one that follows from the rest."""
    data, target = node.inputs[:2]
    if data is None or target is None or target.const_value is not None or target not in known:
        return
    if data.shape is None or node.attributes.get_int("allowzero", 0) != 0:
        return
    given = [_name_dimension(dim) for dim in data.shape]
    numbers: list[int] = []
    for axis, dim in enumerate(known[target]):
        if isinstance(dim, int) and dim != 0:
            numbers.append(dim)
        else:
            numbers.append(0 if axis < len(given) and dim is not None and given[axis] == dim else -1)
    if numbers.count(-1) <= 1:
        assert isinstance(node.graph, ir.Graph)
        name = f"{node.outputs[0].name}_shape"
        node.replace_input_with(1, edit.add_constant(node.graph, name, np.array(numbers, np.int64)))


def _is_zero(value: "ir.Value | None") -> bool:
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.op_type not in _KEEPS_ZEROS:
            return False
        value = node.inputs[0]
    numbers = _read_small(value)
    return numbers is not None and not np.any(numbers)


# Means over all pixels.

_PICTURE_RANKS = (4, 5)


def pool_means(model: "ir.Model") -> int:
    """Write the mean of each channel's pixels as GlobalAveragePool, in place; return how often that was.

    Exporters write ReduceMean. ONNX Runtime has int8 kernels for pooling and none for ReduceMean: a network with
    squeeze-and-excitation leaves int8 at each block, and is 1.10 (batch 8) to 1.30 times as fast in int8 with pooling
    (1.31, AVX2). Means that are part of a normalization stay, since engines look for these.
    """
    means = [node for node in model.graph if _is_pooling(node)]
    for node in means:
        if node.attributes.get_int("keepdims", 1):
            node.op_type = "GlobalAveragePool"
        else:
            value = node.inputs[0]
            assert value is not None
            assert value.shape is not None
            shape = ir.Shape([*value.shape[:2], *[1] * (len(value.shape) - 2)])
            pooled = ir.Value(name=f"{node.outputs[0].name}_pooled", type=value.type, shape=shape)
            pool = ir.node("GlobalAveragePool", [value], outputs=[pooled], metadata_props=dict(node.metadata_props))
            model.graph.insert_before(node, pool)
            node.op_type = "Flatten"
            node.replace_input_with(0, pooled)
        node.resize_inputs(1)
        node.attributes.clear()
    return len(means)


def _is_pooling(node: "ir.Node") -> bool:
    """Tell whether a node is a mean over all axes behind the channels, and not of a normalization."""
    value = node.inputs[0] if node.op_type == "ReduceMean" and not node.domain else None
    if value is None or value.dtype != ir.DataType.FLOAT or value.shape is None:
        return False
    rank = len(value.shape)
    axes = edit.find_axes(node)
    if rank not in _PICTURE_RANKS or axes is None or sorted(axis % rank for axis in axes) != [*range(2, rank)]:
        return False
    maker = value.producer()
    squares = maker is not None and (maker.op_type == "Pow" or (maker.op_type == "Mul" and len(set(maker.inputs)) == 1))
    return not squares and all(reader.op_type != "Sub" for reader in node.outputs[0].consumers())


# The rewrites that make up the simplification, and their order.

_ROUNDS = 4
_SMALL = 8192  # elements; anything this small may be folded
_NO_LIMIT = 1 << 40
# Operators that are applied to weights: exporters write them where they repack what PyTorch stores differently.
_ON_WEIGHTS = frozenset(
    {
        *("Add", "Cast", "Concat", "Div", "Flatten", "Gather", "Identity", "Mul", "Neg", "Pow", "Reciprocal"),
        *("Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
    }
)
_NEVER = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConstantOfShape", "Expand", "Tile"})


def require_exact_constants() -> None:
    """Let onnxscript drop ``+ 0`` and ``* 1`` only where the number is exactly that.

    Its rules take all numbers up to 1e-8 for 0, and those within 1e-5 of 1 for 1: ``x / (total + 1e-9)`` would lose
    what keeps it from 0 / 0 (onnxscript 0.7, ``Constant`` in ``rewriter/_pattern_ir.py``).
    """
    from onnxscript.rewriter import pattern
    from onnxscript.rewriter.rules.common import _no_op

    for rule in _no_op.rules:
        for node in rule._target_pattern:
            for value in node.inputs:
                if isinstance(value, pattern.Constant):
                    value._rel_tol = value._abs_tol = 0.0


class Rewritten(NamedTuple):
    """Numbers of rewrites that the number of nodes does not tell."""

    pooled: int
    """Means written as pooling, in as many nodes or one more."""
    folded: int
    """Multiplications folded into weights."""


def rewrite(model: "ir.Model") -> Rewritten:
    """Simplify a graph in place."""
    from onnx_ir.passes import common
    from onnxscript import optimizer, rewriter

    declared = [(value.name, value.shape) for value in model.graph.outputs]
    given = [value if value.producer() is None else None for value in model.graph.outputs]
    require_exact_constants()
    edit.fix_weights(model)
    edit.infer_shapes(model)
    left = edit.node_count(model)
    for _ in range(_ROUNDS):  # each of these opens ways for the others, until nothing disappears any more
        optimizer.fold_constants(model, input_size_limit=_SMALL, output_size_limit=_NO_LIMIT, should_fold=_should_fold)
        rewriter.rewrite(model)
        _keep_constants(model)
        absorb_heads(model)
        simplify_shapes(model)
        common.RemoveUnusedNodesPass()(model)
        before, left = left, edit.node_count(model)
        if left == before:
            break
    pooled = pool_means(model)
    ir.passes.Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
    )(model)
    edit.merge_equal_constants(model)
    folded = fold_factors(model)
    common.CommonSubexpressionEliminationPass()(model)
    _remove_identities(model)
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
    )(model)
    _restore_given_outputs(model, given)
    for value, (name, shape) in zip(model.graph.outputs, declared, strict=True):
        value.name, value.shape = name, shape  # inference may know more, callers rely on what was declared
    common.NameFixPass()(model)
    return Rewritten(pooled, folded)


def _remove_identities(model: "ir.Model") -> None:
    """Remove the Identity nodes, but for those through which a branch answers with a value of the graph around it.

    What a branch answers with has to be made in it: without the node, onnx-ir's pass leaves a graph whose output is no
    node's.
    """
    from onnx_ir.passes import common

    elimination = common.IdentityEliminationPass()
    for node in [node for graph in model.graphs() for node in graph if node.op_type == "Identity"]:
        maker = node.inputs[0].producer() if node.inputs[0] is not None else None
        if not (node.outputs[0].is_graph_output() and maker is not None and maker.graph is not node.graph):
            elimination._try_eliminate_identity_node(node)


def _restore_given_outputs(model: "ir.Model", given: "Sequence[ir.Value | None]") -> None:
    """Make outputs again of inputs and weights that are outputs as they are; the library puts Identity nodes there.

    An output needs another name than its input then, which would change the signature.
    """
    for place, (value, output) in enumerate(zip(given, list(model.graph.outputs), strict=True)):
        node = output.producer()
        if value is not None and node is not None and node.op_type == "Identity" and node.inputs[0] is value:
            model.graph.outputs[place] = value
            model.graph.remove(node, safe=True)


def _should_fold(node: "ir.Node") -> bool | None:
    """Tell whether a node whose inputs are all constant is to be computed now; None leaves it to the library."""
    if node.op_type in _NEVER or len(node.outputs) != 1:
        return False if node.op_type in _NEVER and _count_outputs(node) > _SMALL else None
    if _count_outputs(node) <= _SMALL and all(_count_elements(value) <= _SMALL for value in node.inputs):
        return None
    large = [value for value in node.inputs if _count_elements(value) > _SMALL]
    given = sum(map(_count_elements, node.inputs))  # parts of a weight may be small, and their sum is not
    return node.op_type in _ON_WEIGHTS and _count_outputs(node) <= given and all(map(_vanishes, large))


def _vanishes(value: "ir.Value | None") -> bool:
    """Tell whether a weight is read only by operators that will be folded too, so that nothing is kept twice."""
    return value is not None and all(
        node.op_type in _ON_WEIGHTS and all(v is None or v.const_value is not None for v in node.inputs)
        for node in value.consumers()
    )


def _count_elements(value: "ir.Value | None") -> int:
    return 0 if value is None or value.const_value is None else value.const_value.size


def _count_outputs(node: "ir.Node") -> int:
    return math.prod(dim if isinstance(dim, int) else _NO_LIMIT for dim in node.outputs[0].shape or (None,))
