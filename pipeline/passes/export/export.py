"""Export: a PyTorch module becomes an ONNX graph."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.base import Pass, PrecisionRequest, Progress, Records, Stage

if TYPE_CHECKING:
    import onnx_ir as ir

    from enginesmith.pipeline.frameworks.torch.module import LoadedModel
    from enginesmith.pipeline.tensors import Signature, TensorSpec


class Export(Pass):
    """Turn a PyTorch module into ONNX.

    ``exporter="auto"`` takes the exporter on top of ``torch.export`` and falls back to the TorchScript one, saying so.
    """

    name: ClassVar[str] = "export"
    consumes: ClassVar[Kind] = "torch"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("torch", "onnx", "onnx-ir", "onnxscript")
    stage: ClassVar[Stage] = "graph"
    reads: ClassVar[tuple[str, ...]] = ("export",)

    opset: int = 23
    exporter: Literal["auto", "dynamo", "torchscript"] = "auto"
    attention: Literal["fused", "decomposed"] = "fused"
    external_data_bytes: int = edit.EXTERNAL_DATA_BYTES

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make the export of a module."""
        return (cls(**options["export"].model_dump()),)

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Load the module and export it."""
        from enginesmith.pipeline.frameworks.torch.saved import load_artifact

        return export_module(load_artifact(artifact), out, self, progress)


def export_module(loaded: "LoadedModel", out: Path, options: Export, progress: Progress) -> Effect:
    """Write ``model.onnx`` for a loaded module.

    Raises:
        ExportError: neither exporter can do it, or a dynamic dimension would come out fixed.
    """
    from enginesmith.pipeline.frameworks.onnx import model_file
    from enginesmith.pipeline.passes.export.attention import decompose_attention, spread_masks

    with _tolerant():
        model, exporter, notes = _capture(loaded, out, options, progress)
        _name(model, loaded.signature)
        edit.tidy(model, wrapper="model")
        if options.attention == "decomposed":
            decompose_attention(model)
        else:
            spread_masks(model)
        progress("writing")
        edit.save(model, out, options.external_data_bytes)
    count, opset = edit.node_count(model), model.opset_imports[""]
    return Effect(
        file=edit.FILE,
        summary=f"{count} nodes, opset {opset}, by the {exporter} exporter",
        notes=tuple(notes),
        signature=model_file.signature(out / edit.FILE),
    )


@contextlib.contextmanager
def _tolerant() -> Iterator[None]:
    """Log the exporters' warnings, whatever the caller turns warnings into."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def _capture(
    loaded: "LoadedModel", out: Path, options: Export, progress: Progress
) -> tuple["ir.Model", str, list[str]]:
    """Return the graph, the exporter that made it, and notes on what had to be given up."""
    from enginesmith.pipeline.passes.export import exporters

    if options.exporter == "torchscript":
        return exporters.torchscript(loaded, out, options.opset, progress), "TorchScript", []
    try:
        return exporters.dynamo(loaded, options.opset, progress), "torch.export", []
    except exporters.FixedDimension:
        raise
    except ExportError as error:
        if options.exporter == "dynamo":
            raise
        first = error
    try:  # outside of the handler, so that the second error does not drag the first one along as its context
        model = exporters.torchscript(loaded, out, options.opset, progress)
    except ExportError as second:
        raise _neither(first, second) from first
    note = f"fell back to the TorchScript exporter (opset {model.opset_imports['']}): {first.message}"
    return model, "TorchScript", [note, "its trace keeps the path through the code that the example took"]


def _neither(first: ExportError, second: ExportError) -> ExportError:
    if first.message == second.message:
        return first
    return ExportError(f"{first.message}; the TorchScript exporter fails too: {second.message}", first.remedy)


def _name(model: "ir.Model", signature: "Signature") -> None:
    """Give inputs, outputs and their dynamic dimensions the signature's names."""
    import onnx_ir as ir
    from onnx_ir.passes import common

    common.OutputFixPass()(model)
    _restore_inputs(model, signature)
    edit.rename(model.graph.inputs, (spec.name for spec in signature.inputs))
    edit.rename(model.graph.outputs, (spec.name for spec in signature.outputs))
    for value, spec in zip(model.graph.outputs, signature.outputs, strict=True):
        value.shape = ir.Shape(_output_dims(value, spec))
    common.NameFixPass()(model)


def _restore_inputs(model: "ir.Model", signature: "Signature") -> None:
    """Restore inputs that nothing reads, which the TorchScript exporter drops; callers feed them all the same."""
    import numpy as np
    import onnx_ir as ir

    if len(model.graph.inputs) == len(signature.inputs):
        return
    present = {value.name: value for value in model.graph.inputs}
    model.graph.inputs.clear()
    for spec in signature.inputs:
        dtype = ir.DataType.from_numpy(np.dtype(spec.dtype))
        new = ir.Value(name=spec.name, type=ir.TensorType(dtype), shape=ir.Shape(spec.shape))
        model.graph.inputs.append(present.get(spec.name, new))


def _output_dims(value: "ir.Value", spec: "TensorSpec") -> list[int | str]:
    """The signature's names; a dimension that the graph leaves open stays so, whatever the example's size was."""
    if value.shape is None:
        return list(spec.shape)
    if len(value.shape) != len(spec.shape):
        raise ExportError(f"output {spec.name!r} came out with shape {value.shape}, expected {spec}")
    dims: list[int | str] = []
    for axis, (found, wanted) in enumerate(zip(value.shape, spec.shape, strict=True)):
        if isinstance(wanted, str) and isinstance(found, int):
            raise ExportError(
                f"dimension {axis} of output {spec.name!r} came out fixed at {found}, though it varies with {wanted!r}",
                "look for sizes that the module turns into Python numbers, as int(x.shape[0]) does",
            )
        open_ended = isinstance(wanted, int) and not isinstance(found, int)
        dims.append(f"{spec.name}_dim_{axis}" if open_ended else wanted)
    return dims
