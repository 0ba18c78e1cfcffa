"""Export: a PyTorch module becomes an ONNX graph, by either of PyTorch's two exporters."""

import contextlib
import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ExportError, MissingCapability
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, ir
from enginesmith.pipeline.frameworks.onnx.exact import write_exactly
from enginesmith.pipeline.frameworks.onnx.processing import extend
from enginesmith.pipeline.passes.base import Pass, PrecisionRequest, Progress, Records, Stage
from enginesmith.pipeline.passes.export.agreement import (
    differs_at,
    find_fixed_sizes,
    find_other_sizes,
    find_trace_fault,
)
from enginesmith.pipeline.passes.export.attention import decompose_attention, raise_masks, spread_masks
from enginesmith.pipeline.passes.export.failures import (
    FAILURES,
    REMEDY,
    REMEDY_PROGRAM,
    FixedDimension,
    advise_fixed,
    explain_fixed_dimension,
    explained_failures,
    name_root,
    write_inputs,
)
from enginesmith.pipeline.passes.export.int64 import compare_whole_numbers
from enginesmith.pipeline.passes.export.names import name_squeezed_axes, name_values
from enginesmith.pipeline.passes.export.optimizer import optimize_graph
from enginesmith.pipeline.passes.export.sizes import (
    COMPARISONS,
    SizeLimit,
    describe_limits,
    find_program_fault,
    find_size_limits,
    list_neighbors,
)
from enginesmith.pipeline.passes.opset import convert_opset
from enginesmith.pipeline.tensors import ShapeRange, is_sum
from enginesmith.pipeline.units import AddedOption

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

    from enginesmith.pipeline.frameworks.torch.module import LoadedModel
    from enginesmith.pipeline.tensors import Signature


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
    reads: ClassVar[tuple[str, ...]] = ("export", "ranges")

    opset: int = 23
    exporter: Literal["auto", "dynamo", "torchscript"] = "auto"
    attention: Literal["fused", "decomposed"] = "fused"
    external_data_bytes: int = edit.EXTERNAL_DATA_BYTES
    ranges: dict[str, ShapeRange] = Field(default_factory=dict)
    """Sizes that somebody asked for: a graph that is known to be wrong at some of them is refused."""

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make the export of a module."""
        return (cls(**options["export"].model_dump(), ranges=options["ranges"]),)

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
        name_squeezed_axes(model, loaded.dynamic_sizes)
        compare_whole_numbers(model)
        notes += write_exactly(model)
        if options.attention == "decomposed":
            decompose_attention(model)
        else:
            raise_masks(model)
            spread_masks(model)
        if loaded.module.extension:
            extend(model, loaded.module.extension.processing)
        progress("writing")
        summary = f"{edit.node_count(model)} nodes, opset {model.opset_imports['']}, by the {exporter} exporter"
        return edit.save_with_summary(model, out, options.external_data_bytes, summary, tuple(notes))


def _capture(
    loaded: "LoadedModel", out: Path, options: Export, progress: Progress
) -> tuple["ir.Model", str, list[str]]:
    """Return the graph with the signature's names, the exporter that made it, and notes on what had to be given up."""
    exporters = {"dynamo": ("torch.export", _export_program), "torchscript": ("TorchScript", _trace)}
    failures: list[ExportError] = []
    for title, make in exporters.values() if options.exporter == "auto" else [exporters[options.exporter]]:
        if failures and isinstance(failures[0], FixedDimension) and not _runs_elsewhere(loaded, failures[0]):
            break
        try:
            model, notes = make(loaded, out, options, progress)
            name_values(model, loaded.signature)
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
    raise type(first)(f"{first.message}; the TorchScript exporter fails too: {last.message}", remedy) from first


# The two exporters.

_TORCHSCRIPT_NEWEST_OPSET = 20
_MIN_SIZE = 2  # an example of size 1 would let the exporter take the dimension for one that broadcasts


_LAST_OPSETS = dict.fromkeys(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "RoiAlign"),
    21,
)
"""Operators that engines run in an older form only, to which a newer one adds bfloat16 alone: its last opset."""


def _limit_opset(model: "ir.Model", opset: int) -> tuple[int, list[str]]:
    """Choose the newest opset, up to this one, in which engines have all operators of a graph; with a note."""
    present = {node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph) if not node.domain}
    late = sorted(name for name, last in _LAST_OPSETS.items() if name in present and last < opset)
    if not late:
        return opset, []
    limit = min(_LAST_OPSETS[name] for name in late)
    return limit, [f"opset {limit}, not {opset}: not all engines have a kernel for its {' and '.join(late)}"]


def _export_program(
    loaded: "LoadedModel", out: Path, options: Export, progress: Progress
) -> tuple["ir.Model", list[str]]:
    """Export through ``torch.export``; return notes on the sizes that the graph is not for, too.

    Raises:
        FixedDimension: a dynamic dimension would come out fixed, or the graph is wrong at sizes that were asked for.
        ExportError: any other reason; names operator and line.
    """
    progress("capturing the graph with torch.export")
    opset, ranges = options.opset, options.ranges
    program, limits = _translate_widely(loaded, opset, ranges, progress)
    limit, notes = _limit_opset(program.model, opset)
    if limit < opset:
        opset = limit
        program, limits = _translate_widely(loaded, opset, ranges, progress)
    progress("folding constants")
    try:
        optimize_graph(program.model)
    except FAILURES as error:
        raise ExportError(f"onnxscript cannot optimize the exported graph: {name_root(error)}", REMEDY) from error
    if program.model.opset_imports[""] != opset:
        raise ExportError(f"the graph cannot be converted to opset {opset}", "use opset 18 or newer")
    limits = _try_graph(program.model, loaded, limits, out)
    _refuse_wrong_sizes(limits, loaded, ranges)
    return program.model, [*notes, f"the graph is {write_limits(limits, loaded)}"] if limits else notes


def _try_graph(
    model: "ir.Model", loaded: "LoadedModel", limits: Sequence[SizeLimit], out: Path
) -> tuple[SizeLimit, ...]:
    """Try a graph at the sizes at which its program fails, and leave out those at which the graph is right.

    Where it is not, it fails as the program does, or is wrong.
    """
    if all(limit.fault == "wrong" for limit in limits):
        return tuple(limits)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        name_values(model, loaded.signature)
        edit.save(model, Path(folder), edit.EXTERNAL_DATA_BYTES)
        path = Path(folder, edit.FILE)
        try:
            faults = [limit.fault == "wrong" or differs_at(path, loaded, limit.sizes) for limit in limits]
        except MissingCapability:
            return tuple(limits)
    return tuple(
        dataclasses.replace(limit, fault="wrong") for limit, fault in zip(limits, faults, strict=True) if fault
    )


def _refuse_wrong_sizes(limits: Sequence[SizeLimit], loaded: "LoadedModel", ranges: Mapping[str, ShapeRange]) -> None:
    """Refuse a graph that is wrong at sizes that were asked for.

    Raises:
        FixedDimension: it is; what another exporter traces keeps the same path through the code.
    """
    wrong = [limit for limit in limits if limit.breaks_in(ranges)]
    if wrong:
        spans = " ".join(f"--shape {limit.symbol}={ranges[limit.symbol]}" for limit in wrong)
        fixed = write_inputs(loaded, {limit.symbol: loaded.dynamic_sizes[limit.symbol] for limit in wrong})
        conditions = " and ".join(dict.fromkeys(limit.condition for limit in wrong))
        error = FixedDimension(
            f"the graph is {describe_limits(wrong)}, and {spans} has such sizes",
            f"fix the size: {fixed}; or give a range without such sizes; or, if none of them is ever fed, let the "
            f"module raise an error there: torch._check({conditions})",
        )
        error.runs_elsewhere = False
        raise error


def write_limits(limits: Sequence[SizeLimit], loaded: "LoadedModel") -> str:
    """Say where a graph is right, and how to fix the sizes; empty for no limits."""
    sizes = {limit.symbol: loaded.dynamic_sizes[limit.symbol] for limit in limits}
    return f"{describe_limits(limits)}; or fix the size: {write_inputs(loaded, sizes)}" if limits else ""


def _translate_widely(
    loaded: "LoadedModel", opset: int, ranges: Mapping[str, ShapeRange], progress: Progress
) -> tuple["ONNXProgram", tuple[SizeLimit, ...]]:
    """Translate a module, captured at other sizes than the example's where those decide a path through its code.

    Returns the translation, and what it takes for granted about sizes.

    Raises:
        ExportError, FixedDimension: as :func:`capture_widely` does.
    """
    try:
        program = _translate(loaded, opset)
    except FixedDimension as error:
        if error.runs_elsewhere is False:
            raise
        progress("capturing the graph at other sizes, as those of the example fix some")
        if (moved := _capture_elsewhere(loaded, error, ranges)) is None:
            raise
        _, widened, limits = moved
        return _translate(widened, opset), limits
    assert program.exported_program is not None
    decides = any(node.target in COMPARISONS for node in program.exported_program.graph.nodes)
    neighbors = list_neighbors(loaded)
    beside = neighbors != loaded.dynamic_sizes  # else the verification tries the same
    if not decides and not (beside and find_program_fault(program.exported_program, loaded, neighbors)):
        return program, ()
    progress("looking for sizes that the module decides by")
    try:
        captured = capture_program(loaded)  # once more, as torch.onnx drops the guards
    except ExportError:
        return program, ()
    _, widened, limits = widen_program(captured, loaded, ranges)
    if widened is not loaded:
        progress("capturing the graph at other sizes, where it is right at all")
        program = _translate(widened, opset)
    return program, limits


def _translate(loaded: "LoadedModel", opset: int) -> "ONNXProgram":
    """Capture a module and translate it, operator by operator.

    Raises:
        ExportError: it cannot be done; FixedDimension where a dynamic dimension would come out fixed.
    """
    import torch

    from enginesmith.pipeline.passes.export.registry import keep_registry
    from enginesmith.pipeline.passes.export.translations import list_translations

    keep_registry()
    shapes = _list_dynamic_axes(loaded.signature)
    with explained_failures(loaded), torch.no_grad():
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
    if program is None:
        raise ExportError("torch.onnx.export returned nothing")
    _check_inputs([value.shape or () for value in program.model.graph.inputs], loaded)
    return program


def capture_widely(loaded: "LoadedModel", ranges: Mapping[str, ShapeRange]) -> tuple["ExportedProgram", str]:
    """Capture a module as a program, at other sizes than the example's where those decide a path through its code.

    Returns the program, and what it takes for granted about sizes: empty where nothing is found.

    Raises:
        ExportError: it cannot be captured; FixedDimension where a dynamic dimension would come out fixed, or the
            program is wrong at sizes within the ranges, which were asked for.
    """
    try:
        program = capture_program(loaded)
    except FixedDimension as error:
        if (moved := _capture_elsewhere(loaded, error, ranges)) is None:
            raise
        program, _, limits = moved
    else:
        program, _, limits = widen_program(program, loaded, ranges)
    _refuse_wrong_sizes(limits, loaded, ranges)
    return program, write_limits(limits, loaded)


def _runs_elsewhere(loaded: "LoadedModel", failure: FixedDimension) -> bool:
    """Tell whether a module runs at other sizes, which is tried unless it was for that failure."""
    if failure.runs_elsewhere is None:
        failure.runs_elsewhere = find_other_sizes(loaded) is not None
    return failure.runs_elsewhere


def _capture_elsewhere(
    loaded: "LoadedModel", failure: FixedDimension, ranges: Mapping[str, ShapeRange]
) -> tuple["ExportedProgram", "LoadedModel", tuple[SizeLimit, ...]] | None:
    """Capture a module at other sizes than the example's, at which the program has to be right, too.

    ``if height == width == 224`` is true of an example, and fixes what may be any size elsewhere. Returns what
    :func:`widen_program` does; None where there is no such program.
    """
    if failure.runs_elsewhere is False:
        return None
    sizes = find_other_sizes(loaded)
    failure.runs_elsewhere = sizes is not None
    if sizes is not None:
        moved = _move_example(loaded, sizes)
        with contextlib.suppress(ExportError):
            program, moved, limits = widen_program(capture_program(moved), moved, ranges)
            if not find_program_fault(program, loaded, loaded.dynamic_sizes):
                return program, moved, limits
    return None


def _move_example(loaded: "LoadedModel", sizes: Mapping[str, int]) -> "LoadedModel":
    return dataclasses.replace(loaded, example=loaded.resize(sizes), answers=())


def widen_program(
    program: "ExportedProgram", loaded: "LoadedModel", ranges: Mapping[str, ShapeRange]
) -> tuple["ExportedProgram", "LoadedModel", tuple[SizeLimit, ...]]:
    """Capture a module again where its program is wrong at some size, if the path taken there is right at all sizes.

    A path that fills up a length to a multiple also holds for the multiples, which take a path without.

    Returns the program; the model with the example that it was captured with; and what the program takes for granted
    about sizes, with some at which it is wrong, within the ranges if it can be: empty where none is found.

    Raises:
        FixedDimension: of a dynamic dimension, it takes about the example's size alone.
    """
    limits = tuple(find_size_limits(program, loaded, ranges))
    if not limits:
        return program, loaded, ()
    changed = {limit.symbol: limit.sizes[limit.symbol] for limit in limits}
    other = _move_example(loaded, {**loaded.dynamic_sizes, **changed})
    with contextlib.suppress(ExportError):
        again = capture_program(other)
        others = next(find_size_limits(again, other, ranges), None)
        if others is None and not find_program_fault(again, loaded, loaded.dynamic_sizes):
            return again, other, ()
    if fixed := [limit for limit in limits if limit.fixed]:
        sizes = {limit.symbol: loaded.dynamic_sizes[limit.symbol] for limit in fixed}
        raise FixedDimension(f"the graph is {describe_limits(fixed)}", advise_fixed(loaded, sizes))
    return program, loaded, limits


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
    with explained_failures(loaded, REMEDY_PROGRAM), torch.no_grad(), by_operators(), any_size:
        program = torch.export.export(loaded.module, _make_example(loaded), dynamic_shapes=(shapes,), strict=False)
    shapes_of = {node.name: node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"}
    symbols: dict[str, str] = {}
    input_shapes = [
        [
            size if isinstance(size, int) else symbols.setdefault(str(size), str(wanted))
            for size, wanted in zip(shapes_of[name], spec.shape, strict=True)
        ]
        for name, spec in zip(program.graph_signature.user_inputs, loaded.signature.inputs, strict=True)
    ]
    _check_inputs(input_shapes, loaded)
    return program


def _list_dynamic_axes(signature: "Signature") -> tuple[dict[int, str], ...]:
    """List the dynamic axes of each input, with the names of their dimensions."""
    return tuple(
        {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in signature.inputs
    )


def _make_example(loaded: "LoadedModel") -> tuple["Tensor", ...]:
    """Return the example, repeated along dynamic dimensions of size 1."""
    sizes = {word: _MIN_SIZE if size == 1 else size for word, size in loaded.dynamic_sizes.items()}
    return tuple(loaded.resize(sizes).values())


def _check_inputs(shapes: Iterable[Iterable[Any]], loaded: "LoadedModel") -> None:
    """Insist that dynamic dimensions are free, but for sums: ``past+length`` and ``length+past`` are equal."""
    for shape, spec in zip(shapes, loaded.signature.inputs, strict=True):
        for axis, (given, wanted) in enumerate(zip(shape, spec.shape, strict=True)):
            if isinstance(wanted, str) and isinstance(given, int):
                raise explain_fixed_dimension(loaded, spec, axis, given)
            if isinstance(wanted, str) and str(given) != wanted and not is_sum(wanted):
                raise FixedDimension(
                    f"the model needs {wanted!r} (dimension {axis} of {spec.name!r}) to equal {str(given)!r}",
                    "give both the same name with --input",
                )


def _trace(loaded: "LoadedModel", out: Path, options: Export, progress: Progress) -> tuple["ir.Model", list[str]]:
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
        with explained_failures(loaded), torch.no_grad():
            torch.onnx.export(
                loaded.module,
                _make_example(loaded),
                str(path),
                dynamo=False,
                opset_version=min(options.opset, _TORCHSCRIPT_NEWEST_OPSET),
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                dynamic_axes=axes,
            )
        _check_trace(path, loaded)
        model = edit.load(path)
        ir.external_data.load_to_model(model)
    edit.infer_shapes(model)  # the trace has no types
    limit, notes = _limit_opset(model, options.opset)
    convert_opset(model, limit)
    return model, notes


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
        fix = f"make sizes fixed with {write_inputs(loaded, find_fixed_sizes(path, loaded) or dynamic)}"
        raise FixedDimension(f"the trace holds only at the sizes of the example ({sizes})", f"{change}; or {fix}")
    if fault == "values":
        raise ExportError(f"the trace holds only for the values of the example ({sizes})", change)
