"""Export: a PyTorch module becomes an ONNX graph, by either of PyTorch's two exporters."""

import contextlib
import logging
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ExportError, MissingCapability
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, ir, model_file
from enginesmith.pipeline.frameworks.onnx.processing import extend
from enginesmith.pipeline.passes.base import Pass, PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.export.agreement import find_trace_fault, runs_at_other_sizes
from enginesmith.pipeline.passes.export.attention import decompose_attention, raise_masks, spread_masks
from enginesmith.pipeline.passes.export.int64 import compare_whole_numbers
from enginesmith.pipeline.passes.export.optimizer import optimize_graph
from enginesmith.pipeline.passes.export.sizes import COMPARISONS, find_size_limit
from enginesmith.pipeline.passes.opset import convert_opset
from enginesmith.pipeline.tensors import is_sum, join_sum
from enginesmith.pipeline.units import AddedOption

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from enginesmith.pipeline.frameworks.torch.module import LoadedModel
    from enginesmith.pipeline.tensors import Signature, TensorSpec


_OLDER_OPSET = 20
"""The newest opset that the TorchScript exporter writes, without operators for attention and normalization."""


class Export(Pass):
    """Turn a PyTorch module into ONNX.

    ``exporter="auto"`` takes the exporter on top of ``torch.export`` and falls back to the TorchScript one, saying so.
    """

    name: ClassVar[str] = "export"
    consumes: ClassVar[Kind] = "torch"
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

    def list_other_options(self) -> Iterator[tuple[AddedOption, Pass]]:
        """List simpler operators for attention, the other exporters, and an older opset."""
        others = {"attention": ("decomposed",), "exporter": ("torchscript", "dynamo"), "opset": (_OLDER_OPSET,)}
        for field, values in others.items():
            given = getattr(self, field)
            for value in (each for each in values if each != given):
                words = f"--{field} {value}"
                option = AddedOption(field=f"export.{field}", value=value, instead_of=given, words=words)
                yield option, self.model_copy(update={field: value})

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Load the module and export it."""
        from enginesmith.pipeline.frameworks.torch.saved import load_artifact

        return export_module(load_artifact(artifact), out, self, progress)


def export_module(loaded: "LoadedModel", out: Path, options: Export, progress: Progress) -> Effect:
    """Write ``model.onnx`` for a loaded module.

    Raises:
        ExportError: neither exporter can do it, or a dynamic dimension would come out fixed.
    """
    from enginesmith.pipeline.frameworks.torch.module import by_operators

    with warnings.catch_warnings(), by_operators():
        warnings.simplefilter("default")  # logged, whatever the caller turns warnings into
        model, exporter, notes = _capture(loaded.without_processing, out, options, progress)
        edit.tidy(model, wrapper="model")
        compare_whole_numbers(model)
        if options.attention == "decomposed":
            decompose_attention(model)
        else:
            raise_masks(model)
            spread_masks(model)
        if loaded.module.extension:
            extend(model, loaded.module.extension.processing)
        progress("writing")
        edit.save(model, out, options.external_data_bytes)
    count, opset = edit.node_count(model), model.opset_imports[""]
    return Effect(
        file=edit.FILE,
        summary=f"{count} nodes, opset {opset}, by the {exporter} exporter",
        notes=tuple(notes),
        signature=model_file.signature(out / edit.FILE),
    )


def _capture(
    loaded: "LoadedModel", out: Path, options: Export, progress: Progress
) -> tuple["ir.Model", str, list[str]]:
    """Return the graph with the signature's names, the exporter that made it, and notes on what had to be given up."""
    exporters = {"dynamo": ("torch.export", _export_program), "torchscript": ("TorchScript", _trace)}
    failures: list[ExportError] = []
    for title, make in exporters.values() if options.exporter == "auto" else [exporters[options.exporter]]:
        if failures and isinstance(failures[0], FixedDimension) and not runs_at_other_sizes(loaded):
            break
        try:
            model, notes = make(loaded, out, options.opset, progress)
            _name_values(model, loaded.signature)
        except ExportError as error:
            failures.append(error)
            continue
        if not failures:
            return model, title, notes
        note = f"fell back to the {title} exporter (opset {model.opset_imports['']}): {failures[0].message}"
        return model, title, [note, *notes, "its trace keeps the path through the code that the example took"]
    first, last = failures[0], failures[-1]
    if first.message == last.message:
        raise first from first.__cause__
    remedy = first.remedy
    if isinstance(last, FixedDimension) and not isinstance(first, FixedDimension):
        remedy = f"{remedy}; or {last.remedy}"
    raise ExportError(f"{first.message}; the TorchScript exporter fails too: {last.message}", remedy) from first


def _name_values(model: "ir.Model", signature: "Signature") -> None:
    """Give inputs, outputs and their dynamic dimensions the signature's names.

    Inputs that nothing reads, which the TorchScript exporter drops, are restored: callers feed them all the same.
    """
    import numpy as np
    from onnx_ir.passes import common

    common.OutputFixPass()(model)
    if len(model.graph.inputs) != len(signature.inputs):
        present = {value.name: value for value in model.graph.inputs}
        model.graph.inputs.clear()
        for spec in signature.inputs:
            kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.dtype)))
            new = ir.Value(name=spec.name, type=kind, shape=ir.Shape(spec.shape))
            model.graph.inputs.append(present.get(spec.name, new))
    edit.rename(model.graph.inputs, (spec.name for spec in signature.inputs))
    edit.rename(model.graph.outputs, (spec.name for spec in signature.outputs))
    for value, spec in zip(model.graph.outputs, signature.outputs, strict=True):
        value.shape = ir.Shape(_name_output_dims(value, spec))
    common.NameFixPass()(model)


def _name_output_dims(value: "ir.Value", spec: "TensorSpec") -> list[int | str]:
    """Return the signature's names; dimensions that the graph leaves open stay so, whatever the example's size was."""
    if value.shape is None:
        return list(spec.shape)
    if len(value.shape) != len(spec.shape):
        raise ExportError(f"output {spec.name!r} came out with shape {value.shape}, expected {spec}")
    dims: list[int | str] = []
    for axis, (given, wanted) in enumerate(zip(value.shape, spec.shape, strict=True)):
        if isinstance(wanted, str) and isinstance(given, int):
            raise FixedDimension(
                f"dimension {axis} of output {spec.name!r} came out fixed at {given}, though it varies with {wanted!r}",
                "look for sizes that the module turns into Python numbers, as int(x.shape[0]) does",
            )
        open_ended = isinstance(wanted, int) and not isinstance(given, int)
        dims.append(f"{spec.name}_dim_{axis}" if open_ended else wanted)
    return dims


# The two exporters.

# What user code and exporters raise; running out of memory and interrupts are none of it.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError)
_TORCHSCRIPT_NEWEST_OPSET = 20
_MIN_SIZE = 2  # an example of size 1 would let the exporter take the dimension for one that broadcasts


class FixedDimension(ExportError):
    """The graph holds at one size only of a dimension that was to be dynamic."""


def _export_program(loaded: "LoadedModel", _: Path, opset: int, progress: Progress) -> tuple["ir.Model", list[str]]:
    """Export through ``torch.export``; return notes on the sizes that the graph is not for, too.

    Raises:
        FixedDimension: a dynamic dimension would come out fixed.
        ExportError: any other reason; names operator and line.
    """
    import torch

    from enginesmith.pipeline.passes.export.registry import keep_registry
    from enginesmith.pipeline.passes.export.translations import list_translations

    keep_registry()
    progress("capturing the graph with torch.export")
    shapes = _list_dynamic_axes(loaded.signature)
    try:
        with torch.no_grad():
            program = torch.onnx.export(
                loaded.module,
                _make_example(loaded),
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=(shapes,) if any(shapes) else None,
                optimize=False,
                custom_translation_table=list_translations(opset),
                verbose=False,
            )
    except (torch.onnx.errors.OnnxExporterError, *_FAILURES) as error:
        raise _explain(error, loaded.signature) from error
    if program is None:
        raise ExportError("torch.onnx.export returned nothing")
    _check_inputs([value.shape or () for value in program.model.graph.inputs], loaded.signature)
    progress("folding constants")
    try:
        optimize_graph(program.model)
    except _FAILURES as error:
        root = list(_walk_chain(error))[-1]
        reason = f"{type(root).__name__}: {root}"
        raise ExportError(f"onnxscript cannot optimize the exported graph: {reason}", _REMEDY) from error
    if program.model.opset_imports[""] != opset:
        raise ExportError(f"the graph cannot be converted to opset {opset}", "use opset 18 or newer")
    assert program.exported_program is not None
    others = ""
    if any(node.target in COMPARISONS for node in program.exported_program.graph.nodes):
        progress("looking for sizes that the module decides by")
        captured = None
        with contextlib.suppress(ExportError):  # torch.onnx drops the guards, so that it is captured again
            captured = capture_program(loaded)
        others = describe_other_sizes(captured, loaded) if captured else ""
    return program.model, [f"the graph is {others}"] if others else []


def describe_other_sizes(program: "ExportedProgram", loaded: "LoadedModel") -> str:
    """Name what the program takes for granted about sizes, with one at which it is wrong; empty where none is found.

    Raises:
        FixedDimension: of a dynamic dimension, it takes about the example's size alone.
    """
    limit = find_size_limit(program, loaded)
    if limit and limit.fixed:
        sizes = {limit.fixed: loaded.dynamic_sizes[limit.fixed]}
        raise FixedDimension(f"the graph is {limit.words}", _advise_fixed(loaded.signature, sizes))
    return limit.words if limit else ""


def capture_program(loaded: "LoadedModel") -> "ExportedProgram":
    """Capture a module as a program of PyTorch's operators; dimensions that the signature names may take any size.

    Raises:
        ExportError: it cannot be captured; FixedDimension where a dynamic dimension would come out fixed.
    """
    import torch
    from torch.fx.experimental import _config

    extension = loaded.module.extension
    if extension and any(step.word == "nms" for step in extension.processing.appended):
        raise ExportError(
            "torch.export cannot capture --append nms: how many boxes are compared depends on their scores",
            "use an engine that is made from ONNX",
        )

    from enginesmith.pipeline.frameworks.torch.module import by_operators

    shapes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in _list_dynamic_axes(loaded.signature))
    any_size = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]  # else sizes are 2 or more
    try:
        with torch.no_grad(), by_operators(), any_size:
            program = torch.export.export(loaded.module, _make_example(loaded), dynamic_shapes=(shapes,), strict=False)
    except _FAILURES as error:
        raise _explain(error, loaded.signature, _REMEDY_PROGRAM) from error
    shapes_of = {node.name: node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"}
    symbols: dict[str, str] = {}
    input_shapes = [
        [
            size if isinstance(size, int) else symbols.setdefault(str(size), str(wanted))
            for size, wanted in zip(shapes_of[name], spec.shape, strict=True)
        ]
        for name, spec in zip(program.graph_signature.user_inputs, loaded.signature.inputs, strict=True)
    ]
    _check_inputs(input_shapes, loaded.signature)
    return program


def _list_dynamic_axes(signature: "Signature") -> tuple[dict[int, str], ...]:
    """List the dynamic axes of each input, with the names of their dimensions."""
    return tuple(
        {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in signature.inputs
    )


def _make_example(loaded: "LoadedModel") -> tuple["Tensor", ...]:
    """Return the example, repeated along dynamic dimensions of size 1."""
    from enginesmith.pipeline.frameworks.torch.dims import resize_example

    sizes = {word: _MIN_SIZE if size == 1 else size for word, size in loaded.dynamic_sizes.items()}
    return tuple(resize_example(loaded.signature.inputs, loaded.example, sizes).values())


def _check_inputs(shapes: Iterable[Iterable[Any]], signature: "Signature") -> None:
    """Insist that dynamic dimensions are free, but for sums: ``past+length`` and ``length+past`` are equal."""
    for shape, spec in zip(shapes, signature.inputs, strict=True):
        for axis, (given, wanted) in enumerate(zip(shape, spec.shape, strict=True)):
            if isinstance(wanted, str) and isinstance(given, int):
                raise _explain_fixed_dimension(signature, spec, axis, given)
            if isinstance(wanted, str) and str(given) != wanted and not is_sum(wanted):
                raise FixedDimension(
                    f"the model needs {wanted!r} (dimension {axis} of {spec.name!r}) to equal {str(given)!r}",
                    "give both the same name with --input",
                )


def _trace(loaded: "LoadedModel", out: Path, opset: int, progress: Progress) -> tuple["ir.Model", list[str]]:
    """Export by tracing; the file passes through a folder below ``out``.

    Raises:
        ExportError: it cannot be traced, or its operators have no translation, or the trace holds at the example's
            sizes only.
    """
    import torch
    from onnx_ir.passes import common

    inputs, outputs = loaded.signature.inputs, loaded.signature.outputs
    axes = {s.name: {i: d for i, d in enumerate(s.shape) if isinstance(d, str)} for s in (*inputs, *outputs)}
    progress("tracing with the TorchScript exporter")
    with tempfile.TemporaryDirectory(dir=out) as folder:
        path = Path(folder, edit.FILE)
        try:
            with torch.no_grad():
                torch.onnx.export(
                    loaded.module,
                    _make_example(loaded),
                    str(path),
                    dynamo=False,
                    opset_version=min(opset, _TORCHSCRIPT_NEWEST_OPSET),
                    input_names=[spec.name for spec in inputs],
                    output_names=[spec.name for spec in outputs],
                    dynamic_axes=axes,
                )
        except (torch.onnx.errors.OnnxExporterError, *_FAILURES) as error:
            raise _explain(error, loaded.signature) from error
        _check_trace(path, loaded)
        model = edit.load(path)
        ir.external_data.load_to_model(model)
    common.ShapeInferencePass(strict_mode=False)(model)  # the trace has no types
    convert_opset(model, opset)
    return model, []


_log = logging.getLogger(__name__)


def _check_trace(path: Path, loaded: "LoadedModel") -> None:
    """Compare file and module, at other sizes and values than the example's, too.

    Raises:
        FixedDimension: they differ at other sizes alone.
        ExportError: they differ otherwise.
    """
    try:
        fault = find_trace_fault(path, loaded)
    except MissingCapability:
        _log.warning("%s is not installed: the trace was not checked", evaluator.LIBRARY)
        return
    dynamic = loaded.dynamic_sizes
    sizes = ", ".join(f"{name} = {size}" for name, size in dynamic.items()) or "all sizes fixed"
    change = "remove from the model's code what depends on values or turns sizes into Python numbers"
    if fault == "example":
        raise ExportError("the trace does not answer as the model does, even to its example", change)
    if fault == "sizes":
        fix = f"make all sizes fixed with {_write_inputs(loaded.signature, dynamic)}"
        raise FixedDimension(f"the trace holds only at the sizes of the example ({sizes})", f"{change}; or {fix}")
    if fault == "values":
        raise ExportError(f"the trace holds only for the values of the example ({sizes})", change)


# What went wrong in an export, in one sentence: the operator, the line of the model's code, and what to do.

_OPERATOR = (
    re.compile(r"OpOverload\(op='([\w.]+)'"),
    re.compile(r"unrecognized namespace ([\w:]+)"),
    re.compile(r"Exporting the operator '([\w:]+)'"),
    re.compile(r"DataDependentOutputException: (aten\.equal)\b"),
    re.compile(r"(?:Could not find|Missing) .*?'?(\w+::\w+)'?"),
)
_STATIC = re.compile(r"static shape of (\d+) for dimension (.+)\.shape\[(\d+)\]")
_SPECIALIZED = re.compile(r"\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but .* constant \((\d+)\)")
_COMPLEX = re.compile(r"for the complex-valued input|aten\._conj\b|aten\._neg_view\b|aten::view_as_complex\b")
_POSITION = re.compile(r"\[(\d+)\]$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TOOLS = ("torch", "onnx", "onnxscript", "onnx_ir", "enginesmith")
_HERE = Path(__file__).resolve().parents[3]
_REMEDY_OPERATOR = "rewrite that line with operators that ONNX has, or register a translation with torch.onnx"
_INSTEAD = {
    "linalg_pinv": "for a matrix a of independent columns, write torch.linalg.solve(a.mT @ a, a.mT)",
    "linalg_lstsq": "for a matrix a of independent columns, write torch.linalg.solve(a.mT @ a, a.mT @ b)",
    "linalg_qr": "for a matrix a of independent columns, write r = torch.linalg.cholesky(a.mT @ a, upper=True) and "
    "torch.linalg.solve(r, a, left=False), which are R and Q but for signs",
    "linalg_lu": "write torch.linalg.solve, det or slogdet of the matrix, for what the factors are used for",
    "lu_": "write torch.linalg.solve of the matrix itself",
    "_linalg_solve_ex": "write torch.linalg.solve",
    "cholesky_solve": "write torch.linalg.solve_triangular twice, or torch.linalg.solve of the matrix itself",
    "cholesky_inverse": "write torch.linalg.inv of the matrix itself",
    "triangular_solve": "write torch.linalg.solve_triangular",
    "nanmedian": "write torch.median of what torch.where puts in the place of NaN",
    "histc": "write torch.zeros(bins).scatter_add(0, torch.bucketize(x, edges), torch.ones_like(x))",
    "bincount": "write torch.zeros(bins).scatter_add(0, x, torch.ones(x.shape)), for a number of bins that is known",
    "segment_reduce": "write torch.scatter_reduce with the number of each row's segment",
    "put": "write x.flatten().scatter(0, places, numbers)",
    "equal": "write (a == b).all() for torch.equal; for torch.cov and corrcoef, which use it, products of rows without "
    "their means, x @ x.mT / (n - 1)",
}
"""Code to write instead of operators that have no translation, by how their names begin."""
_REMEDY_COMPLEX = (
    "keep real and imaginary parts in float32 tensors and weights: torch.view_as_real behind an FFT, "
    "torch.view_as_complex only before the inverse one"
)
_REMEDY_DATA = "the path through the code depends on values: use torch.where or torch.cond, or fix the value"
_REMEDY_PROGRAM = "the whole trace is in the step's log; engines that are made from ONNX have another exporter, too"
_REMEDY = "the whole trace is in the step's log; take the other one with --exporter, or rewrite what it names"


def _explain(error: BaseException, signature: "Signature", remedy: str = _REMEDY) -> ExportError:
    """Return the reason of an exporter's exception, and a remedy, by default that for an export to ONNX."""
    chain = list(_walk_chain(error))
    for link in chain:
        if static := _STATIC.search(str(link)):
            position = _POSITION.search(static[2])
            spec = signature.inputs[int(position[1]) if position else 0]
            return _explain_fixed_dimension(signature, spec, int(static[3]), int(static[1]))
        if fixed := _SPECIALIZED.search(str(link)):
            index, axis, size = map(int, fixed.groups())
            return _explain_fixed_dimension(signature, signature.inputs[index], axis, size)
    text = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
    operator = next((match[1] for pattern in _OPERATOR if (match := pattern.search(text))), "")
    place = next((line for link in reversed(chain) if (line := _find_place(link))), "")
    where = f" at {place}" if place else ""
    if refusal := next((link for link in chain if isinstance(link, ExportError)), None):  # of a translation
        return ExportError(f"{refusal.message}{where}", refusal.remedy)
    if operator and remedy == _REMEDY:
        lacking = f"the operator {operator}{where} has no translation to ONNX"
        if _COMPLEX.search(text):
            return ExportError(f"{lacking} for complex numbers", _REMEDY_COMPLEX)
        name = re.split(r"\.|::", operator)[1]
        remedies = (words for start, words in _INSTEAD.items() if name.startswith(start))
        return ExportError(lacking, next(remedies, _REMEDY_OPERATOR))
    first = next((line.strip() for line in str(chain[-1]).splitlines() if line.strip()), "no message")[:300]
    reason = f"{type(chain[-1]).__name__}: {first.partition(' Please feel free')[0]}"
    remedy = _REMEDY_DATA if "data-dependent" in text else remedy
    return ExportError(f"the model cannot be exported{where}: {reason}", remedy)


def _explain_fixed_dimension(signature: "Signature", spec: "TensorSpec", axis: int, size: int) -> FixedDimension:
    """Return the reason for one dimension that came out fixed, and a remedy, with the ``--input`` of all inputs."""
    word = str(spec.shape[axis])
    message = f"the graph holds only for {word} = {size} (dimension {axis} of input {spec.name!r})"
    if is_sum(word):
        return FixedDimension(message, "remove that size from the model's code, or fix all of the sum with --input")
    return FixedDimension(
        message,
        f"{_advise_fixed(signature, {word: size})}, such as a loop over that many steps; where that has none, "
        "torch.export fixes it, as within torch.vmap: write a batched product in its place",
    )


def _advise_fixed(signature: "Signature", sizes: Mapping[str, int]) -> str:
    inputs = _write_inputs(signature, sizes)
    return f"make it fixed with {inputs}, or remove that size from the model's code"


def _write_inputs(signature: "Signature", sizes: Mapping[str, int]) -> str:
    """Write the ``--input`` of all inputs, with fixed sizes in the place of words."""
    split = ([str(dim).split("+") for dim in spec.shape] for spec in signature.inputs)
    fixed = ([join_sum(str(sizes.get(part, part)) for part in parts) for parts in dims] for dims in split)
    pairs = zip(signature.inputs, fixed, strict=True)
    return " ".join(f"--input {spec.model_copy(update={'shape': tuple(shape)})}" for spec, shape in pairs)


def _walk_chain(error: BaseException) -> Iterator[BaseException]:
    """Return the exception and what caused it, the root cause last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _find_place(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame that is the model's own code.

    The stack that torch.export noted for the graph node in translation counts, if a frame has one in its hands.
    """
    frames: list[tuple[str, object]] = []
    recorded = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        frames.append((frame.f_code.co_filename, line))
        meta = getattr(frame.f_locals.get("node"), "meta", None)
        if isinstance(meta, dict):
            recorded = str(meta.get("stack_trace") or recorded)
    inward = reversed([*frames, *_FRAME.findall(recorded)])
    return next((f"{file}:{line}" for file, line in inward if _is_model_code(file)), "")


def _is_model_code(file: str) -> bool:
    import sysconfig

    path = Path(file)
    if file.startswith("<") or path.resolve().is_relative_to(_HERE / "pipeline"):
        return False
    if "site-packages" in path.parts:
        package = path.parts[len(path.parts) - path.parts[::-1].index("site-packages")]
        return package not in _TOOLS
    return not path.is_relative_to(sysconfig.get_path("stdlib"))
