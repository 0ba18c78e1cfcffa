"""Rewrite a graph in float16 or bfloat16 so that a CPU computes what the hardware would.

Hardware adds up products of such numbers in float32, and rounds the result. So every operator computes in float32 here,
and two Cast nodes behind it round: down to the type that the value has in the graph, and up again. The CPU runtime by
itself does not tell: it has no kernels for bfloat16, and where it has none for float16 it computes runs of nodes in
float32, so that neither rounding nor overflow shows between them. Kernels for float8 and int4 it has.

Weights stay as they are on disk, each behind a Cast; inputs and outputs keep their types.
"""

from collections.abc import Sequence

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.onnx.edit import Names, has_body, infer_shapes, insert_behind
from enginesmith.pipeline.passes.float16.convert import change_attributes, hand_over, new_node

_EXACT = frozenset(
    {
        *("Abs", "Clip", "Compress", "Concat", "ConstantOfShape", "DepthToSpace", "Dropout", "Expand", "Flatten"),
        *("Gather", "GatherElements", "GatherND", "Identity", "Max", "MaxPool", "Min", "Neg", "Pad", "ReduceMax"),
        *("ReduceMin", "Relu", "Reshape", "ScatterElements", "ScatterND", "Slice", "SpaceToDepth", "Split", "Squeeze"),
        *("Tile", "TopK", "Transpose", "Unsqueeze", "Where"),
    }
)
"""Operators whose results are numbers that went in, so that there is nothing to round."""
_AS_THEY_ARE = frozenset({"Cast", "CastLike", "Constant"})
_TYPE_ATTRIBUTES = ("dtype", "output_dtype", "softmax_precision")


def emulate(model: "ir.Model") -> bool:
    """Rewrite a graph in place; false, and nothing done, if none of its values is float16 or bfloat16."""
    everything = list(ir.traversal.RecursiveGraphIterator(model.graph))
    if any(value.type is None for node in everything for value in node.outputs):
        infer_shapes(model)
    bodies = [(body, list(body)) for body in model.graphs()]
    rewriter = _Rewriter(model.graph, {node for node in everything if _is_wide(node)})
    for body, nodes in bodies:
        for value in (*body.inputs, *body.initializers.values()):
            rewriter.visit(body, value, None)
        for node in nodes:
            for value in node.outputs:
                rewriter.visit(body, value, node)
    return rewriter.done


def _is_wide(node: "ir.Node") -> bool:
    """Tell whether a node with half-precision values is to compute in float32; bodies and foreign operators are not."""
    tensors = all(value is None or isinstance(value.type, ir.TensorType) for value in (*node.inputs, *node.outputs))
    return not node.domain and node.op_type not in _AS_THEY_ARE and not has_body(node) and tensors


class _Rewriter:
    """Gives each half-precision value a float32 form for the nodes that compute in that."""

    def __init__(self, graph: "ir.Graph", wide: "set[ir.Node]") -> None:
        self._wide = wide
        self._names = Names(graph)
        self.done = False

    def visit(self, body: "ir.Graph", value: "ir.Value", maker: "ir.Node | None") -> None:
        """Rewrite what reads a value, and round what its maker makes if that computes in float32 now."""
        kind = value.dtype
        if kind not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) or not isinstance(value.type, ir.TensorType):
            return
        self.done = True
        uses = value.uses()
        casts: list[ir.Node] = []
        narrow = value
        if maker in self._wide:
            change_attributes(maker, _TYPE_ATTRIBUTES, kind, ir.DataType.FLOAT)
            value.dtype = ir.DataType.FLOAT
            others = [use for use in uses if use[0] not in self._wide]
            if others or value.is_graph_output() or maker.op_type not in _EXACT:
                narrow = self._cast(value, kind, "rounded", others, casts)
                hand_over(body, value, narrow)
        wide = [use for use in uses if use[0] in self._wide]
        if wide and (narrow is not value or value.dtype == kind):
            self._cast(narrow, ir.DataType.FLOAT, "float32", wide, casts)
        insert_behind(body, value, casts)

    def _cast(
        self,
        value: "ir.Value",
        dtype: "ir.DataType",
        word: str,
        uses: "Sequence[tuple[ir.Node, int]]",
        casts: "list[ir.Node]",
    ) -> "ir.Value":
        """Cast a value for some of its uses."""
        cast = new_node("Cast", [value], {"to": dtype.value}, self._names.new(f"{value.name}_{word}"), dtype, value)
        casts.append(cast)
        for node, index in uses:
            node.replace_input_with(index, cast.outputs[0])
        return cast.outputs[0]
