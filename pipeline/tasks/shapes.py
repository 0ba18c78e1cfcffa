"""The sizes that a model's dynamic dimensions may take, as a record of their own: engines are built for them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from enginesmith.pipeline import samples
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tensors import Array, ShapeRange, Signature, TensorSpec

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
    """An ONNX file brings no example that a range could be taken from, and none is made up."""
    missing = [name for name in signature.symbols if name not in given and name != samples.batch_symbol(signature)]
    if missing:
        raise UsageError(
            f"the dynamic dimension {missing[0]!r} has no range, and an ONNX file brings no example of its size",
            f"give one: --shape {missing[0]}=MIN:OPT:MAX",
        )


def read_ranges(record: Artifact) -> dict[str, ShapeRange]:
    """What :class:`Shapes` wrote."""
    return {name: ShapeRange.parse(text) for name, text in json.loads(record.path.read_bytes()).items()}


def example(model: Artifact) -> tuple[dict[str, Array], dict[str, int]]:
    """A feed for each input, and the size it has along each dynamic dimension."""
    assert model.signature is not None
    specs = model.signature.inputs
    if model.kind == "torch":
        from enginesmith.pipeline.saved_module import read_example

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
    """Normal floats; zeros and ones for integers, which every vocabulary has."""
    shape = spec.resolve(sizes)
    if spec.dtype.startswith("float"):
        return rng.standard_normal(shape).astype(spec.dtype)
    return rng.integers(0, 2, shape).astype(spec.dtype)
