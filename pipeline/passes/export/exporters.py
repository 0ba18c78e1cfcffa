"""PyTorch's two exporters behind one form: a loaded module in, an ONNX graph or an ExportError out."""

import logging
import re
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from enginesmith.pipeline.errors import ExportError, MissingCapability, ModelError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

    from enginesmith.pipeline.frameworks.torch.module import LoadedModel
    from enginesmith.pipeline.tensors import Signature, TensorSpec


# What went wrong in an export, in one sentence: the operator, the line of the model's code, and what to do.

_OPERATOR = (
    re.compile(r"OpOverload\(op='([\w.]+)'"),
    re.compile(r"unrecognized namespace ([\w:]+)"),
    re.compile(r"Exporting the operator '([\w:]+)'"),
    re.compile(r"(?:Could not find|Missing) .*?'?(\w+::\w+)'?"),
)
_STATIC = re.compile(r"static shape of (\d+) for dimension (.+)\.shape\[(\d+)\]")
_POSITION = re.compile(r"\[(\d+)\]$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TOOLS = ("torch", "onnx", "onnxscript", "onnx_ir", "enginesmith")
_HERE = Path(__file__).resolve().parents[3]
_REMEDY_OPERATOR = "rewrite that line with operators that ONNX has, or register a translation with torch.onnx"
_REMEDY_DATA = "the path through the code depends on values: use torch.where or torch.cond, or fix the value"
_REMEDY = "the whole trace is in the step's log; try the other one with --exporter"

Reason = tuple[str, str]


def explain(error: BaseException) -> Reason:
    """Return message and remedy for an exporter's exception."""
    chain = list(_chain(error))
    text = "\n".join(str(link) for link in chain)
    operator = next((found[1] for pattern in _OPERATOR if (found := pattern.search(text))), "")
    place = next((line for link in reversed(chain) if (line := _place(link))), "")
    where = f" at {place}" if place else ""
    if operator:
        return f"the operator {operator}{where} has no translation to ONNX", _REMEDY_OPERATOR
    first = chain[-1]
    reason = f"{type(first).__name__}: {_first_line(first)}"
    remedy = _REMEDY_DATA if "data-dependent" in text else _REMEDY
    return f"the model cannot be exported{where}: {reason}", remedy


def fixed_dimension(error: BaseException, signature: "Signature") -> Reason | None:
    """Return message and remedy if the reason is that the module fixes a dimension which was to be dynamic."""
    for link in _chain(error):
        if found := _STATIC.search(str(link)):
            position = _POSITION.search(found[2])
            spec = signature.inputs[int(position[1]) if position else 0]
            return fixed(spec, int(found[3]), int(found[1]))
    return None


def fixed(spec: "TensorSpec", axis: int, size: int) -> Reason:
    """Return message and remedy for one dimension that came out fixed."""
    shape = ",".join(str(size if position == axis else dim) for position, dim in enumerate(spec.shape))
    return (
        f"the model works only with {spec.shape[axis]} = {size} (dimension {axis} of input {spec.name!r})",
        f"make it fixed with --input {spec.name}:{spec.dtype}:{shape}, or remove that size from the model's code",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return the exception and what caused it, the root cause last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]


def _place(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame that is the model's own code."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    recorded = _FRAME.findall(_recorded_stack(error.__traceback__))
    for file, line in reversed([*frames, *recorded]):
        if _is_model_code(file):
            return f"{file}:{line}"
    return ""


def _recorded_stack(trace: TracebackType | None) -> str:
    """Return the stack that torch.export noted for the graph node in translation, if a frame has one in its hands."""
    found = ""
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        meta = getattr(node, "meta", None)
        if isinstance(meta, dict):
            found = str(meta.get("stack_trace") or found)
        trace = trace.tb_next
    return found


def _is_model_code(file: str) -> bool:
    import sysconfig

    path = Path(file)
    if file.startswith("<") or path.is_relative_to(_HERE / "pipeline"):
        return False
    if "site-packages" in path.parts:
        package = path.parts[len(path.parts) - path.parts[::-1].index("site-packages")]
        return package not in _TOOLS
    return not path.is_relative_to(sysconfig.get_path("stdlib"))


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
        fixed = fixed_dimension(error, loaded.signature)
        raise FixedDimension(*fixed) if fixed else ExportError(*explain(error)) from error
    if program is None:
        raise ExportError("torch.onnx.export returned nothing")
    _check_inputs(program.model, loaded)
    progress("folding constants")
    _optimize(program.model)
    if program.model.opset_imports[""] != opset:
        raise ExportError(f"the graph cannot be converted to opset {opset}", "use opset 18 or newer")
    return program.model


def _optimize(model: "ir.Model") -> None:
    """Optimise as torch.onnx does, but for its fusion into RotaryEmbedding, which holds at batch 1 only."""
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
                raise FixedDimension(*fixed(spec, axis, found))
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

    inputs, outputs = loaded.signature.inputs, loaded.signature.outputs
    axes = {s.name: {i: d for i, d in enumerate(s.shape) if isinstance(d, str)} for s in (*inputs, *outputs)}
    progress("tracing with the TorchScript exporter")
    with tempfile.TemporaryDirectory(dir=out) as folder:
        path = Path(folder, edit.FILE)
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
            raise ExportError(*explain(error)) from error
        check_trace(path, loaded)
        model = edit.load(path)
        _into_memory(model)
    return model


def _into_memory(model: "ir.Model") -> None:
    import onnx_ir as ir

    ir.external_data.load_to_model(model)


# Whether a traced graph holds at other sizes than those of its example: tracing keeps what was a Python number.

_TOLERANCE = 1e-3  # of the output's range: what tracing kept by mistake is off by far more
_log = logging.getLogger(__name__)


def check_trace(path: Path, loaded: "LoadedModel") -> None:
    """Run file and module on feeds of other sizes and other values than the example's, and compare.

    Raises:
        ExportError: they differ.
    """
    resized = _other_sizes(loaded)
    try:
        if not _agrees(path, loaded, resized):
            raise _holds_only(loaded, "at the sizes")
        if not all(_agrees(path, loaded, feeds) for feeds in _other_values(loaded.example)):
            raise _holds_only(loaded, "for the values")
    except MissingCapability:
        _log.warning("%s is not installed: the trace was not checked", evaluator.LIBRARY)


def _agrees(path: Path, loaded: "LoadedModel", feeds: "dict[str, Tensor]") -> bool:
    expected = _run_module(loaded, feeds)
    if expected is None:  # these feeds are not for this module
        return True
    try:
        found = evaluator.run_graph(path, {name: value.numpy() for name, value in feeds.items()})
    except ModelError:
        return False
    return evaluator.largest_difference(expected, found) <= _TOLERANCE


def _other_values(example: "dict[str, Tensor]") -> "list[dict[str, Tensor]]":
    """Make feeds that send branches on values the other way: negative, large, and all zero."""
    return [
        {name: value * factor if value.is_floating_point() else value for name, value in example.items()}
        for factor in (-1.0, 8.0, 0.0)
    ]


def _holds_only(loaded: "LoadedModel", what: str) -> ExportError:
    dims = ", ".join(f"{name} = {size}" for name, size in loaded.dynamic_sizes.items())
    return ExportError(
        f"the trace holds only {what} of the example ({dims or 'all sizes fixed'})",
        "remove from the model's code what depends on values or turns sizes into Python numbers",
    )


def _other_sizes(loaded: "LoadedModel") -> dict[str, "Tensor"]:
    """Return the example with one more element along each dynamic dimension."""
    import torch

    feeds = {}
    for spec in loaded.signature.inputs:
        value = loaded.example[spec.name]
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                size = value.shape[axis]
                value = value.index_select(axis, torch.arange(size + 1) % size)
        feeds[spec.name] = value
    return feeds


def _run_module(loaded: "LoadedModel", feeds: dict[str, "Tensor"]) -> list[Array] | None:
    """Run the module for its outputs; None where it does not take these sizes."""
    import torch

    try:
        with torch.inference_mode():
            return [value.numpy() for value in loaded.module(*feeds.values())]
    except (RuntimeError, ValueError, LookupError, AssertionError, TypeError):
        return None
