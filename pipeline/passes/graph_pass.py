"""Define the base of passes that write ONNX graphs."""

from pathlib import Path
from typing import ClassVar

from enginesmith.pipeline.artifact import Effect
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.base import Pass


class GraphPass(Pass):
    """A pass that writes a graph, and its weights where the recipe's export would; the table fills the field."""

    tools: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir")
    external_data_bytes: int = edit.EXTERNAL_DATA_BYTES

    def save(self, model: "ir.Model", out: Path, summary: str, notes: tuple[str, ...] = ()) -> Effect:
        """Write the graph, and describe the file."""
        return edit.save_with_summary(model, out, self.external_data_bytes, summary, notes)
