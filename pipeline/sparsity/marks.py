"""The mark of a sparse graph: which pattern its weights have, in the metadata of the model.

It travels with the graph through passes and files. Whoever relies on it looks at the weights too, as any tool may have
written others into a marked file.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

KEY = "enginesmith.sparsity"
TWO_OF_FOUR = "2:4"


def put(model: "ir.Model", pattern: str) -> None:
    """Mark a graph; 2:4 stays 2:4, whatever else becomes zero in it."""
    marks: MutableMapping[str, str] = model.metadata_props
    if marks.get(KEY) != TWO_OF_FOUR:
        marks[KEY] = pattern


def of(model: "onnx.ModelProto") -> str:
    """The pattern that a graph is marked with; empty for a dense one."""
    return next((str(entry.value) for entry in model.metadata_props if entry.key == KEY), "")
