"""Sparsify: weights of products set to zero, 2:4 for sparse tensor cores or unstructured by magnitude.

One shot, by magnitude alone. What the network loses by that is the metric's to say; a 2:4 graph runs faster on devices
with sparse tensor cores, an unstructured one only compresses better.
"""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from enginesmith.pipeline import graph
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.passes.base import Pass, Progress, Records, by_reason
from enginesmith.pipeline.sparsity.options import SparsifyOptions, Sparsity

if TYPE_CHECKING:
    import onnx_ir as ir

    from enginesmith.pipeline.sparsity.sparsifying import Sparsified


class Sparsify(Sparsity, Pass):
    """Put zeros into the weights of products."""

    name: ClassVar[str] = "sparsify"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir", "onnxruntime")

    external_data_bytes: int = graph.EXTERNAL_DATA_BYTES

    @classmethod
    def parse(
        cls,
        text: str,
        options: SparsifyOptions | None = None,
        external_data_bytes: int = graph.EXTERNAL_DATA_BYTES,
    ) -> "Sparsify":
        """The pass for ``2:4`` or ``unstructured=0.5``; errors as in :meth:`Sparsity.parse`."""
        return super().parse(text, options).model_copy(update={"external_data_bytes": external_data_bytes})

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Put zeros into the weights.

        Raises:
            InvalidGraph: no weight can have the pattern.
            UsageError: a protected name that there is none of.
        """
        from enginesmith.pipeline import onnx_file
        from enginesmith.pipeline.sparsity.sparsifying import sparsify

        model = _inline_functions(artifact.path)
        progress(f"making weights {self}")
        done = sparsify(model, self)
        progress("writing")
        graph.save(model, out, self.external_data_bytes)
        return Effect(
            file=graph.FILE,
            summary=_summary(self, done),
            notes=by_reason("left dense", done.left),
            signature=onnx_file.signature(out / graph.FILE),
        )


def _inline_functions(path: Path) -> "ir.Model":
    """Load a graph with its functions inlined and its weights no longer listed as inputs."""
    import onnx_ir as ir
    from onnx_ir.passes import common

    model = graph.load(path)
    model.ir_version = max(model.ir_version, 4)  # from then on weights need not be listed as inputs
    ir.passes.Sequential(common.InlinePass(), common.RemoveInitializersFromInputsPass())(model)
    return model


def _summary(asked: Sparsity, done: "Sparsified") -> str:
    parts = [f"{asked} in {done.done} of {done.weights} weights, {done.share:.1%} of the weights' elements are zero"]
    if done.sqnr_db is not None:
        parts.append(f"SQNR of the weights {done.sqnr_db:.1f} dB")
    return "; ".join(parts)
