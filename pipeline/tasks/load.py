"""Load MODEL as the first artifact of a run, and choose the sizes of its dynamic dimensions."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny

from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.engines import read_file
from enginesmith.pipeline.errors import MissingCapability, ModelError, UsageError
from enginesmith.pipeline.frameworks import processing, samples
from enginesmith.pipeline.frameworks.onnx import dimensions, edit, evaluator, model_file, outputs, validation
from enginesmith.pipeline.frameworks.onnx.exact import write_file_exactly
from enginesmith.pipeline.frameworks.onnx.flatten import flatten
from enginesmith.pipeline.frameworks.onnx.processing import OLDEST_OPSET, extend
from enginesmith.pipeline.frameworks.onnx.randomness import check_steady
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.passes.opset import convert_opset
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tasks.calibrate import open_data
from enginesmith.pipeline.tasks.examples import choose_sizes, draw_feeds, make_example, plan_draws
from enginesmith.pipeline.tensors import Feeds, InputChoice, ShapeRange, Signature, TensorSpec

SHAPES = "shapes"
"""Role of the record of :class:`Shapes` in a task that takes it."""
_FILE = "shapes.json"
_EXAMPLE_ROWS = 2
"""Samples of an example that is taken from data, where the batch is dynamic."""


class _FromSource(Task):
    """Begin with what the user named."""

    title: ClassVar[str] = "load"

    source: Source
    inputs: tuple[TensorSpec, ...] = ()
    processing: ProcessingRequest = ProcessingRequest()

    @property
    def identity(self) -> dict[str, Any]:
        source = self.source.model_dump(mode="json", exclude={"target"})
        return {**super().identity, "fields": {**self.model_dump(mode="json"), "source": source}}

    @property
    def place(self) -> str:
        return self.source.target


class Load(_FromSource):
    """Build a torch module as an artifact."""

    produces: ClassVar[Kind] = "torch"

    seed: int = 0
    allow_pickle: bool = False
    widen: bool = False
    """Take a module in bfloat16 in float32, as for engines of ONNX graphs on the CPU."""
    data: str | None = None
    """Data whose first samples are the example, where nobody gives one and it would be made up."""
    data_options: SerializeAsAny[DataOptions] = AS_FOUND
    sizes: dict[str, int] = Field({})
    """Usual sizes of the dynamic dimensions that ``inputs`` leave open: what nobody gives is drawn with them."""

    @property
    def tools(self) -> tuple[str, ...]:
        libraries = {"hf": ("transformers",), "timm": ("timm",)}
        return ("torch", *libraries.get(self.source.form, ()))

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        from enginesmith.pipeline.frameworks.torch import module, saved

        options = module.LoadOptions(
            inputs=self.inputs,
            seed=self.seed,
            allow_pickle=self.allow_pickle,
            processing=self.processing,
            sizes=self.sizes,
            widen=self.widen,
        )
        read: Sequence[Path] = ()

        def read_rows(specs: Sequence[TensorSpec], choose: InputChoice | None = None) -> tuple[Feeds, Sequence[Path]]:
            nonlocal read
            rows, read = self._read_rows(specs, choose)
            return rows, read

        progress(f"building {self.source.text}")
        if self.source.form == "saved":
            loaded = saved.read_saved(Path(self.source.target), options, out)
        else:
            loaded = module.load(self.source, options, read_rows if self.data else None)
            saved.save(loaded, self.source, options, out)
        weights = sum(value.numel() for value in loaded.module.model.parameters())
        return Effect(
            file=saved.RECORD,
            summary=f"{weights:,} parameters; {', '.join(map(str, loaded.signature.inputs))}",
            notes=loaded.notes,
            signature=loaded.signature,
            reads=(*loaded.files, *read),
        )

    def _read_rows(self, specs: Sequence[TensorSpec], choose: InputChoice | None) -> tuple[Feeds, Sequence[Path]]:
        assert self.data is not None
        data, files = open_data(self.data, specs, "calibration", self.data_options, choose)
        signature = Signature(inputs=tuple(specs), outputs=())
        count = _EXAMPLE_ROWS if samples.batch_symbol(signature) else samples.fixed_batch(signature)
        return data.batch(0, count), files


class LoadEngine(_FromSource):
    """Take over a built engine, with its manifest; it is checked against this machine when it is opened."""

    produces: ClassVar[Kind] = "engine"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        path = Path(self.source.target)
        given = read_file(path)
        main = f"model{path.suffix}"
        for file in given.files:
            shutil.copyfile(file, out / (main + file.name.removeprefix(path.name)))
        summary = f"{given.engine.name} {given.version} for {', '.join(given.targets)}"
        return Effect(file=main, summary=summary, signature=given.signature, reads=given.files)


class LoadOnnx(_FromSource):
    """Take over an ONNX file, checked, with its external data and the dimensions that ``inputs`` name or fix.

    Its functions are inlined, its sparse weights are made dense, and its outputs have types and are tensors, for all
    that reads it from here on.
    """

    produces: ClassVar[Kind] = "onnx"
    other_tools: ClassVar[tuple[str, ...]] = ("onnx", "onnx-ir", "onnxscript")

    sizes: dict[str, int] = Field({})
    """Usual sizes of the dynamic dimensions that ``inputs`` leave open: with these, outputs that follow are found."""
    exact: bool = True
    """Rewrite what runtimes compute inexactly; otherwise the file itself is to be judged."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        path, file = Path(self.source.target), out / edit.FILE
        progress(f"checking {path.name}")
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            complete, noted = outputs.complete(path, Path(scratch, "complete"), partial(plan_draws, known=self.sizes))
            validation.check(complete, str(path), outputs_checked=False)
            graph, notes = flatten(complete, Path(scratch))
            notes, specs = (*noted, *notes), self.inputs
            if not (self.processing or specs):
                specs, told = dimensions.find_batch(graph, self.sizes)
                notes += told
            if self.processing:
                check_steady(graph, self.source.text, {})
                correct = Path(scratch, "correct", edit.FILE)
                model_file.copy(graph, correct)
                notes += self._correct_outputs(correct)
                progress("adding what is computed before and after the model")
                notes += self._extend(correct, out)
            elif specs:
                progress("writing the dimensions of the inputs")
                dimensions.write_inputs(graph, specs, file)
                notes += self._correct_outputs(file)
                named = model_file.signature(file)
                usual = {**choose_sizes(named), **self.sizes}
                notes += dimensions.name_outputs(file, usual, lambda sizes: draw_feeds(named, sizes))
            else:
                model_file.copy(graph, file)
                notes += self._correct_outputs(file)
            if not self.processing:
                check_steady(file, self.source.text, self.sizes)
            if graph != complete:
                progress("comparing the graph with the file")
                notes += self._compare(complete, graph if self.processing else file)
            if self.exact:
                notes += write_file_exactly(file)
        facts = model_file.summary(file)
        opsets = [f"opset {version} of {domain}" for domain, version in facts.domains.items()]
        opset = f"opset {facts.opset}" if facts.opset else ", ".join(opsets)
        return Effect(
            file=edit.FILE,
            summary=f"{facts.nodes} nodes, {opset}, {facts.parameters:,} parameters",
            notes=notes,
            signature=model_file.signature(file),
            reads=(path, *(path.parent / name for name in model_file.external_files(path))),
        )

    def _correct_outputs(self, file: Path) -> tuple[str, ...]:
        """Write the shapes that a file answers over declared ones that contradict them; return notes.

        Raises:
            InvalidGraph: nothing tells which they are.
        """
        return dimensions.correct_outputs(file, *plan_draws(model_file.signature(file), self.sizes))

    def _compare(self, path: Path, graph: Path) -> tuple[str, ...]:
        """Run a file, and the graph that was made of it, on drawn feeds; return a note where that is not possible.

        Raises:
            ModelError: the graph answers something else.
        """
        signature = model_file.signature(graph)
        feeds = draw_feeds(signature, {**choose_sizes(signature), **self.sizes})
        try:
            expected = evaluator.run_graph(path, feeds)
        except (ModelError, MissingCapability) as error:
            return (f"the graph was not compared with the file, which could not be run: {error.message}",)
        flat = "once its functions are inlined and its sparse weights dense"
        remedy = "give a file without functions and sparse weights"
        try:
            distance = evaluator.largest_difference(expected, evaluator.run_graph(graph, feeds))
        except ModelError as error:
            raise ModelError(f"{path} cannot be run {flat}: {error.message}", remedy) from error
        if distance > evaluator.TOLERANCE:
            raise ModelError(
                f"{path} answers something else {flat}: the outputs differ by {distance:.1e} of their range",
                f"{remedy}: what runs the file may have a kernel of its own for a function, which differs from it",
            )
        return ()

    def _extend(self, path: Path, out: Path) -> tuple[str, ...]:
        """Write the graph with the computation around it, and compare it with PyTorch's on drawn feeds; return notes.

        Raises:
            UsageError: the computation does not fit the graph.
            ModelError: the answers differ.
        """
        from enginesmith.pipeline.frameworks.torch.processing import check_graph

        fitted = processing.fit(self.processing, model_file.signature(path), self.inputs)
        model = edit.load(path)
        given, notes = model.opset_imports.get("", 0), fitted.notes
        if given < OLDEST_OPSET and convert_opset(model, OLDEST_OPSET):
            notes += (f"the graph was converted from opset {given} to {OLDEST_OPSET}, for --prepend and --append",)
        extend(model, fitted)
        edit.save(model, out)
        check_graph(fitted, path, out / edit.FILE, draw_feeds(fitted.signature, choose_sizes(fitted.signature)))
        return notes


class Shapes(Task):
    """Choose ranges: as given; from the batches and the example's sizes where they are not."""

    title: ClassVar[str] = "shapes"
    produces: ClassVar[Kind] = "record"
    in_process: ClassVar[bool] = True

    ranges: dict[str, ShapeRange]
    batches: tuple[int, ...]
    batches_given: bool = True
    """False for the default ones, of which a range may leave some out."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model, given = inputs["model"], self.ranges
        known = {*given, samples.batch_symbol(model.model_signature)}
        missing = [name for name in model.model_signature.symbols if name not in known]
        if model.kind == "onnx" and missing:
            raise UsageError(
                f"the dynamic dimension {missing[0]!r} has no range, and an ONNX file brings no example of its size",
                f"give one: --shape {missing[0]}=MIN:OPT:MAX",
            )
        batches = samples.fit_batches(model.model_signature, given, self.batches, given=self.batches_given)
        ranges = samples.plan_ranges(
            model.model_signature, given, batches, make_example(model)[1], named_by_file=model.kind == "onnx"
        )
        (out / _FILE).write_text(
            json.dumps({name: str(range_) for name, range_ in ranges.items()}, indent=1) + "\n", encoding="utf-8"
        )
        summary = ", ".join(f"{name} {range_}" for name, range_ in ranges.items()) or "every dimension is fixed"
        return Effect(file=_FILE, summary=summary)


def read_ranges(inputs: Inputs) -> dict[str, ShapeRange]:
    """Read the record of :class:`Shapes`; empty where the task has none."""
    stored = json.loads(inputs[SHAPES].path.read_bytes()) if SHAPES in inputs else {}
    return {name: ShapeRange.parse(text) for name, text in stored.items()}
