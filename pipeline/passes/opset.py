"""Convert a graph to a newer opset, before anything in it is named or measured for a precision that needs it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.base import PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.quantize.precisions import KINDS

_OPSET_OF_COORDINATES = 11
"""The first opset whose Resize says how it takes coordinates; before, it was always asymmetric."""


class ConvertOpset(GraphPass):
    """Convert a graph to at least an opset; one that cannot be converted is passed on as it was."""

    name: ClassVar[str] = "opset"
    tools: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir", "onnxscript")
    stage: ClassVar[Stage] = "opset"

    opset: int

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make the one to the opset that the precision needs."""
        return (cls(opset=KINDS[request.precision].opset),)

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Convert, or say that it is not possible: the precision then refuses the graph, or does without."""
        model = edit.load(artifact.path)
        given = model.opset_imports.get("", 0)
        progress(f"converting opset {given} to {self.opset}")
        if not convert_opset(model, self.opset):
            note = f"the graph cannot be converted from opset {given} to {self.opset}"
            return edit.pass_on(artifact.path, out, note)
        return self.save(model, out, f"opset {given} → {self.opset}")


def convert_opset(model: "ir.Model", opset: int) -> bool:
    """Convert a graph in place to an opset, unless it has that or a newer one; tell whether it has one of them now."""
    from onnxscript import version_converter

    given = model.opset_imports.get("", 0)
    if given >= opset:
        return True
    edit.fix_weights(model)
    try:
        version_converter.convert_version(model, target_version=opset, fallback=True)
    except (ValueError, RuntimeError):
        return False
    if model.opset_imports.get("", 0) < opset:  # the library does not raise everything
        return False
    if given < _OPSET_OF_COORDINATES:
        _keep_coordinates(model)
    return True


def _keep_coordinates(model: "ir.Model") -> None:
    """Have each Resize compute as it did in opset 10, or as the Upsample that it was.

    The library leaves that out, and the default is another one since. ONNX Runtime rounds up to the nearest pixel
    where an old Resize shrinks, and else down.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Resize" and node.domain == "":
            scales = edit.read(node.inputs[2])
            nearest = "ceil" if scales is not None and scales.max() <= 1 else "floor"
            node.attributes["coordinate_transformation_mode"] = ir.AttrString(
                "coordinate_transformation_mode", "asymmetric"
            )
            node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", nearest)
