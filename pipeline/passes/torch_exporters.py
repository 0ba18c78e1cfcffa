"""PyTorch's two exporters behind one form: a loaded module in, an ONNX graph or an ExportError out."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline import graph
from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.passes import export_errors
from enginesmith.pipeline.passes.base import Progress

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from enginesmith.pipeline.torch_model import LoadedModel

# What user code and exporters raise; running out of memory and interrupts are none of it.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError)
_TORCHSCRIPT_NEWEST_OPSET = 20
_NORMALIZATION_OPSET = 23  # the first one with RMSNormalization
_MIN_SIZE = 2  # an example of size 1 would let the exporter take the dimension for one that broadcasts


class FixedDimension(ExportError):
    """The module works at one size only of a dimension that was to be dynamic."""


def dynamo(loaded: "LoadedModel", opset: int, progress: Progress) -> "ir.Model":
    """Export through ``torch.export``.

    Raises:
        FixedDimension: the module fixes a dynamic dimension.
        ExportError: any other reason; names operator and line.
    """
    import torch

    inputs = loaded.signature.inputs
    progress("capturing the graph with torch.export")
    shapes = tuple({axis: dim for axis, dim in enumerate(s.shape) if isinstance(dim, str)} for s in inputs)
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                loaded.module,
                _example(loaded),
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=(shapes,) if any(shapes) else None,
                optimize=False,
            )
    except (torch.onnx.errors.OnnxExporterError, *_FAILURES) as error:
        fixed = export_errors.fixed_dimension(error, loaded.signature)
        raise FixedDimension(*fixed) if fixed else ExportError(*export_errors.explain(error)) from error
    if program is None:
        raise ExportError("torch.onnx.export returned nothing")
    _check_inputs(program.model, loaded)
    progress("folding constants")
    _optimize(program.model)
    if program.model.opset_imports[""] != opset:
        raise ExportError(f"the graph cannot be converted to opset {opset}", "use opset 18 or newer")
    return program.model


def _optimize(model: "ir.Model") -> None:
    """What torch.onnx does by itself, but for its fusion into RotaryEmbedding, which holds at batch 1 only."""
    from onnxscript import optimizer
    from onnxscript.rewriter.rules.fusion import _rms_normalization

    optimizer.optimize(model)
    if model.opset_imports[""] >= _NORMALIZATION_OPSET:
        _rms_normalization.fuse_rms_normalization(model)


def _example(loaded: "LoadedModel") -> tuple["Tensor", ...]:
    return tuple(_grown(loaded.example[spec.name], spec.shape) for spec in loaded.signature.inputs)


def _grown(tensor: "Tensor", shape: tuple[int | str, ...]) -> "Tensor":
    """Repeat the example along dynamic dimensions of size 1."""
    repeats = [
        _MIN_SIZE if isinstance(dim, str) and size == 1 else 1 for dim, size in zip(shape, tensor.shape, strict=True)
    ]
    return tensor.repeat(repeats) if any(count > 1 for count in repeats) else tensor


def _check_inputs(model: "ir.Model", loaded: "LoadedModel") -> None:
    for value, spec in zip(model.graph.inputs, loaded.signature.inputs, strict=True):
        for axis, (found, wanted) in enumerate(zip(value.shape or (), spec.shape, strict=True)):
            if isinstance(wanted, str) and isinstance(found, int):
                raise FixedDimension(*export_errors.fixed(spec, axis, found))
            if isinstance(wanted, str) and str(found) != wanted:
                raise FixedDimension(
                    f"the model needs {wanted!r} (dimension {axis} of {spec.name!r}) to equal {str(found)!r}",
                    "give both the same name with --input",
                )


def torchscript(loaded: "LoadedModel", out: Path, opset: int, progress: Progress) -> "ir.Model":
    """Export by tracing; the file passes through a folder below ``out``.

    Raises:
        ExportError: it cannot be traced, or its operators have no translation, or the trace holds at the example's
            sizes only.
    """
    import torch

    from enginesmith.pipeline.passes.trace_check import check_trace

    inputs, outputs = loaded.signature.inputs, loaded.signature.outputs
    axes = {s.name: {i: d for i, d in enumerate(s.shape) if isinstance(d, str)} for s in (*inputs, *outputs)}
    progress("tracing with the TorchScript exporter")
    with tempfile.TemporaryDirectory(dir=out) as folder:
        path = Path(folder, graph.FILE)
        try:
            with torch.no_grad():
                torch.onnx.export(
                    loaded.module,
                    _example(loaded),
                    str(path),
                    dynamo=False,
                    opset_version=min(opset, _TORCHSCRIPT_NEWEST_OPSET),
                    input_names=[spec.name for spec in inputs],
                    output_names=[spec.name for spec in outputs],
                    dynamic_axes=axes,
                )
        except (torch.onnx.errors.OnnxExporterError, *_FAILURES) as error:
            raise ExportError(*export_errors.explain(error)) from error
        check_trace(path, loaded)
        model = graph.load(path)
        _into_memory(model)
    return model


def _into_memory(model: "ir.Model") -> None:
    import onnx_ir as ir

    ir.external_data.load_to_model(model)
