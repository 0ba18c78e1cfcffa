"""Ranges and channel statistics of a float graph, from one pass over calibration data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginesmith.calibration.collector import Collector
from enginesmith.calibration.dataset import Dataset, open_dataset, validate_for_calibration
from enginesmith.calibration.histogram import PERCENTILE
from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.calibration.ranges import FILE, Provenance, Ranges, TensorRange
from enginesmith.calibration.synthetic import made_up
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.passes.quantize.statistics import (
    CalibrationPoints,
    find_calibration_points,
    open_activation_capture,
)
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tensors import Array, Signature

_SYNTHETIC = "synthetic"
"""What the reference calls samples that were made up."""
_MADE_UP = "the samples are made up: ranges are good for measuring speed, and not for accuracy"
_ENOUGH_HELD_OUT = 8
"""Samples that fidelity is judged on without a note."""
_REPORTS = 10
"""How often progress is told."""


@dataclass(frozen=True)
class Feeding:
    """Calibration data as feeds, in the order of the rows: one sample each, or as many as a fixed batch takes.

    Samples run one at a time because runtimes choose their kernels by the size of the batch, and two kernels differ in
    the last bits; so there is no batch size that a result could depend on, and memory holds the values of one sample.
    """

    data: Dataset
    provenance: Provenance

    def __len__(self) -> int:
        return -(-len(self.data) // self.provenance.batch)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for index in range(len(self)):
            yield self.data.batch(index * self.provenance.batch, self.provenance.batch)


class Feeder(BaseModel):
    """Where the feeds of calibration come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str | None
    """None means the samples of the reference; where those are made up, as many of their kind as are asked for."""
    samples: int = Field(gt=0)
    seed: int
    options: DataOptions = AS_FOUND

    def open(self, model: Artifact, reference: Artifact) -> tuple[Feeding, tuple[Path, ...]]:
        """Return the feeds for a model, and the files and folders that they were read from.

        Raises:
            DataError: the data cannot be used.
        """
        assert model.signature is not None
        batch = 1 if samples.batch_symbol(model.signature) else samples.fixed_batch(model.signature)
        files: tuple[Path, ...] = ()
        if self.data is None:
            data = self._sampled(self._like_reference(model.signature, reference), batch)
        else:
            given, files = self._read(self.data, model.signature)
            data = validate_for_calibration(self._sampled(given, batch))
        return Feeding(data, data.provenance(self.seed, batch)), files

    def held_out(self, signature: Signature) -> tuple[Dataset, tuple[Path, ...]]:
        """Read the rows of the data that calibration does not take, for fidelity; all rows, where it takes them all.

        Raises:
            DataError: the data cannot be used.
        """
        assert self.data is not None
        batch = 1 if samples.batch_symbol(signature) else samples.fixed_batch(signature)
        given, files = self._read(self.data, signature)
        rest = np.setdiff1d(np.arange(len(given)), self._sampled(given, batch).rows)
        if not len(rest):
            note = f"calibration takes all {len(given)} samples of {given.name}, so that fidelity is judged on the same"
            return replace(given, notes=(*given.notes, f"{note}: give more, or other data with --eval")), files
        found = given.take(rest, f"{given.name} (without what calibration takes)")
        if len(rest) >= _ENOUGH_HELD_OUT:
            return found, files
        note = f"fidelity is judged on the {len(rest)} of {len(given)} samples that calibration leaves: give more"
        return replace(found, notes=(*found.notes, note)), files

    def _read(self, data: str, signature: Signature) -> tuple[Dataset, tuple[Path, ...]]:
        with track_files(allow_pickle=False) as tracker:
            found = open_dataset(data, signature.inputs, split="calibration", options=self.options)
        files = (path for path in tracker.files if path.suffix != ".py" or is_reference(data))
        return found, (*sorted(files), *found.folders)

    def _sampled(self, given: Dataset, batch: int) -> Dataset:
        """Sample rows, somewhat fewer so that they fill whole batches; a batch of more than there are repeats."""
        rows = min(self.samples, len(given))
        return given.sample(max(rows - rows % batch, 1) if rows % batch else self.samples, self.seed)

    def _like_reference(self, signature: Signature, reference: Artifact) -> Dataset:
        """The rows of the largest batch at the usual sizes; or rows like them, where they are made up themselves."""
        found = samples.read(reference.folder)
        symbol = samples.batch_symbol(signature)
        usual = {name: range_.opt for name, range_ in found.ranges.items() if name != symbol}
        fitting = {index: case for index, case in enumerate(found.cases) if usual.items() <= case.sizes.items()}
        index = max(fitting, key=lambda one: fitting[one].batch)
        stored = samples.read_arrays(reference.folder, "feeds", index)
        feeds = {spec.name: stored[spec.name] for spec in signature.inputs}
        if found.data != _SYNTHETIC:
            return Dataset(f"{found.data}, as the reference was run on", feeds)
        if symbol is None:
            return Dataset(_SYNTHETIC, feeds, synthetic=True)
        return made_up(signature.inputs, feeds, fitting[index].sizes, self.samples, self.seed)


class Calibrate(Task):
    """Run the float graph over the data and write down what its values are like."""

    title: ClassVar[str] = "calibrate"
    produces: ClassVar[Kind] = "record"

    feeder: Feeder
    percentile: float = Field(PERCENTILE, gt=50, le=100)
    channels: bool = True
    """Whether to keep statistics by channel, which scaling and bias correction need."""

    @property
    def tools(self) -> tuple[str, ...]:
        return (*evaluator.TOOLS, "numpy")

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        feeding, read = self.feeder.open(model, inputs["reference"])
        chosen = find_calibration_points(edit.load(model.path))
        collector = Collector(chosen.histograms, chosen.channels if self.channels else {})
        _collect(model, feeding, chosen, collector, progress)
        progress("choosing ranges")
        ranges = Ranges(
            model_sha256=model.sha256,
            provenance=feeding.provenance,
            tensors=_tensors(chosen, collector.tensors(self.percentile)),
            channels=collector.channels(),
        )
        (out / FILE).write_text(ranges.model_dump_json() + "\n")
        histograms = sum(one.amax is not None for one in ranges.tensors.values())
        return Effect(
            file=FILE,
            summary=f"{len(feeding.data)} samples of {feeding.provenance.data}, {len(ranges.tensors)} values, "
            f"{histograms} histograms",
            notes=(*feeding.data.notes, *((_MADE_UP,) if feeding.provenance.synthetic else ())),
            reads=read,
        )


def _collect(
    model: Artifact, feeding: Feeding, chosen: CalibrationPoints, collector: Collector, progress: Progress
) -> None:
    told = -(-len(feeding) // _REPORTS)
    with open_activation_capture(model.path, chosen.taps) as session:
        for index, feeds in enumerate(feeding):
            if index % told == 0:
                progress(f"running the float graph, {index} of {len(feeding)} feeds done")
            values = session.run(feeds)
            for name in chosen.taps:
                collector.add(name, values.pop(name))
            _hold_finite(model, chosen, collector, index * feeding.provenance.batch, feeding)


def _hold_finite(
    model: Artifact, chosen: CalibrationPoints, collector: Collector, position: int, feeding: Feeding
) -> None:
    """Insist on finite numbers wherever a product reads or writes them: masks may be infinite, and padding NaN."""
    if all(map(collector.finite, chosen.products)):
        return
    first = next(name for name in chosen.taps if not collector.finite(name))
    maker = next((node for node in model_file.skeleton(model.path).graph.node if first in node.output), None)
    made = f", made by the {maker.op_type} node {maker.name!r}," if maker else ""
    raise ModelError(
        f"the value {first!r}{made} is NaN or infinite on row {feeding.provenance.rows[position]} of "
        f"{feeding.provenance.data}, and what follows with it",
        "look at the weights before it, and at that row: no range holds what is infinite",
    )


def _tensors(chosen: CalibrationPoints, found: Mapping[str, TensorRange]) -> dict[str, TensorRange]:
    """List every calibrated value, in the order in which they are computed."""
    sources = ((name, chosen.same.get(name, name)) for name in chosen.values)
    return {name: found[source] for name, source in sources if source in found}
