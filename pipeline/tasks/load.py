"""From MODEL to the first artifact of a run."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines import read_file
from enginesmith.pipeline.errors import SignatureError, UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tensors import Array, ShapeRange, Signature, TensorSpec


class _FromSource(Task):
    """A task that begins with what the user named."""

    title: ClassVar[str] = "load"

    source: Source
    inputs: tuple[TensorSpec, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        source = self.source.model_dump(mode="json", exclude={"target"})
        return {**super().identity, "fields": {**self.model_dump(mode="json"), "source": source}}

    @property
    def place(self) -> str:
        return self.source.target


class Load(_FromSource):
    """MODEL → a torch artifact."""

    produces: ClassVar[Kind] = "torch"

    seed: int = 0
    allow_pickle: bool = False

    @property
    def tools(self) -> tuple[str, ...]:
        libraries = {"hf": ("transformers",), "timm": ("timm",)}
        return ("torch", *libraries.get(self.source.form, ()))

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        from enginesmith.pipeline.frameworks.torch import module, saved

        options = module.LoadOptions(inputs=self.inputs, seed=self.seed, allow_pickle=self.allow_pickle)
        progress(f"building {self.source.text}")
        if self.source.form == "saved":
            loaded = saved.read_saved(Path(self.source.target), options, out)
        else:
            loaded = module.load(self.source, options)
            saved.save(loaded, self.source, options, out)
        weights = sum(value.numel() for value in loaded.module.model.parameters())
        return Effect(
            file=saved.RECORD,
            summary=f"{weights:,} parameters; {', '.join(map(str, loaded.signature.inputs))}",
            notes=loaded.notes,
            signature=loaded.signature,
            reads=loaded.files,
            packages=loaded.packages,
        )


class LoadEngine(_FromSource):
    """A built engine of the user's, with its manifest; whether it fits this machine is checked when it is opened."""

    produces: ClassVar[Kind] = "engine"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        path = Path(self.source.target)
        found = read_file(path)
        main = f"model{path.suffix}"
        for file in found.files:
            shutil.copyfile(file, out / (main + file.name.removeprefix(path.name)))
        summary = f"{found.engine.name} {found.version} for {', '.join(found.targets)}"
        return Effect(file=main, summary=summary, signature=found.signature, reads=found.files)


class LoadOnnx(_FromSource):
    """An ONNX file, checked, with its external data."""

    produces: ClassVar[Kind] = "onnx"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        from enginesmith.pipeline.frameworks.onnx import model_file

        path = Path(self.source.target)
        progress(f"checking {path.name}")
        model_file.check(path)
        signature = model_file.signature(path)
        if self.inputs and self.inputs != signature.inputs:
            raise SignatureError(
                f"--input says {', '.join(map(str, self.inputs))}, and the file has "
                f"{', '.join(map(str, signature.inputs))}",
                "leave --input away: an ONNX file names its own inputs",
            )
        external = model_file.external_files(path)
        shutil.copyfile(path, out / "model.onnx")
        for name in external:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path.parent / name, out / name)
        facts = model_file.summary(path)
        return Effect(
            file="model.onnx",
            summary=f"{facts.nodes} nodes, opset {facts.opset}, {facts.parameters:,} parameters",
            signature=signature,
            reads=(path, *(path.parent / name for name in external)),
        )


# The sizes that a model's dynamic dimensions may take, as a record of their own: engines are built for them.

SHAPES = "shapes"
"""Role of the record in a task that takes it."""
_FILE = "shapes.json"
_EXAMPLE_SIZE = 8
"""Along a dynamic dimension of an ONNX file, which brings no example."""


class Shapes(Task):
    """Ranges as given; from the batches and the example's sizes where they are not."""

    title: ClassVar[str] = "shapes"
    produces: ClassVar[Kind] = "record"
    in_process: ClassVar[bool] = True

    ranges: dict[str, ShapeRange]
    batches: tuple[int, ...]

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        assert model.signature is not None
        if model.kind == "onnx":
            _hold_given(model.signature, self.ranges)
        found = samples.plan_ranges(model.signature, self.ranges, self.batches, example(model)[1])
        (out / _FILE).write_text(json.dumps({name: str(one) for name, one in found.items()}, indent=1) + "\n")
        summary = ", ".join(f"{name} {one}" for name, one in found.items()) or "every dimension is fixed"
        return Effect(file=_FILE, summary=summary)


def _hold_given(signature: Signature, given: Mapping[str, ShapeRange]) -> None:
    """Check that ranges are given: an ONNX file brings no example that one could be taken from."""
    missing = [name for name in signature.symbols if name not in given and name != samples.batch_symbol(signature)]
    if missing:
        raise UsageError(
            f"the dynamic dimension {missing[0]!r} has no range, and an ONNX file brings no example of its size",
            f"give one: --shape {missing[0]}=MIN:OPT:MAX",
        )


def read_ranges(record: Artifact) -> dict[str, ShapeRange]:
    """Read the record of :class:`Shapes`."""
    return {name: ShapeRange.parse(text) for name, text in json.loads(record.path.read_bytes()).items()}


def example(model: Artifact) -> tuple[dict[str, Array], dict[str, int]]:
    """Return a feed for each input, and the size it has along each dynamic dimension."""
    assert model.signature is not None
    specs = model.signature.inputs
    if model.kind == "torch":
        from enginesmith.pipeline.frameworks.torch.saved import read_example

        found = read_example(model)
        sizes = {
            dim: size
            for spec in specs
            for dim, size in zip(spec.shape, found[spec.name].shape, strict=True)
            if isinstance(dim, str)
        }
        return found, sizes
    sizes = dict.fromkeys(model.signature.symbols, _EXAMPLE_SIZE)
    rng = np.random.default_rng(0)
    return {spec.name: _made_up(spec, sizes, rng) for spec in specs}, sizes


def _made_up(spec: TensorSpec, sizes: Mapping[str, int], rng: np.random.Generator) -> Array:
    """Draw normal floats; zeros and ones for integers, which every vocabulary has."""
    shape = spec.resolve(sizes)
    if spec.dtype.startswith("float"):
        return rng.standard_normal(shape).astype(spec.dtype)
    return rng.integers(0, 2, shape).astype(spec.dtype)
