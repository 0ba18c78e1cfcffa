"""The ``Attention`` operator (opset 23) written out, for engines that refuse it.

What comes out is the textbook form, softmax(Q·Kᵀ·scale + mask)·V in five or six nodes; the function body in the
specification takes about forty. Nodes that use more of the operator (a key-value cache, a soft cap) are left to that
body.
"""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from enginesmith.pipeline import graph
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.passes.base import Pass, Progress, Records

if TYPE_CHECKING:
    import onnx_ir as ir


class DecomposeAttention(Pass):
    """Replace every ``Attention`` node by matrix products and a softmax."""

    name: ClassVar[str] = "decompose-attention"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("onnx", "onnx-ir")

    external_data_bytes: int = graph.EXTERNAL_DATA_BYTES

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite the graph, weights untouched."""
        from enginesmith.pipeline import onnx_file

        model = graph.load(artifact.path)
        count = decompose_attention(model)
        progress("writing")
        graph.save(model, out, self.external_data_bytes)
        return Effect(
            file=graph.FILE,
            summary=f"{count} Attention nodes written out, {graph.node_count(model)} nodes",
            signature=onnx_file.signature(out / graph.FILE),
        )


def decompose_attention(model: "ir.Model") -> int:
    """Write out every ``Attention`` node in place, and say how many there were."""
    import onnx_ir as ir
    from onnx_ir.passes import common

    from enginesmith.pipeline.passes.attention import AttentionWriter

    found = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _is_attention(node)]
    if not found:
        return 0
    common.ShapeInferencePass(strict_mode=False)(model)
    writer = AttentionWriter()
    left = [node for node in found if not writer.write_out(node)]
    if left:
        _inline_bodies(model)
    common.RemoveUnusedNodesPass()(model)
    common.NameFixPass()(model)
    return len(found)


def _is_attention(node: "ir.Node") -> bool:
    return node.op_type == "Attention" and node.domain in ("", "ai.onnx")


def _inline_bodies(model: "ir.Model") -> None:
    """Replace what is left by the function body of the specification; weights stay where they are."""
    import onnx.inliner
    import onnx_ir as ir

    weights = dict(model.graph.initializers)
    own_inputs = {value.name for value in model.graph.inputs}
    model.graph.inputs.extend(value for name, value in weights.items() if name not in own_inputs)
    model.graph.initializers.clear()
    proto = onnx.inliner.inline_selected_functions(
        ir.to_proto(model), [("", "Attention")], inline_schema_functions=True
    )
    inlined = ir.from_proto(proto).graph
    for value in list(inlined.inputs):
        if value.name in weights:
            value.const_value = weights[value.name].const_value
            inlined.register_initializer(value)
            if value.name not in own_inputs:
                inlined.inputs.remove(value)
    model.graph = inlined
