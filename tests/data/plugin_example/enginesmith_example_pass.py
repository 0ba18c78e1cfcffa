"""A pass in one file: a graph without its descriptions."""

from pathlib import Path
from typing import ClassVar

import onnx

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.passes.base import Pass, Progress, Records


class ClearDocs(Pass):
    """Take descriptions out of a graph: its file is smaller, and computes the same."""

    name: ClassVar[str] = "clear-docs"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("onnx",)

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Write the graph without its descriptions, its weights beside it as they were."""
        model = onnx.load(artifact.path)
        described = [each for each in (model, model.graph, *model.graph.node) if each.doc_string]
        for each in described:
            each.doc_string = ""
        onnx.save(model, out / "model.onnx")
        return Effect(
            file="model.onnx", summary=f"{len(described)} descriptions are gone", signature=artifact.signature
        )
