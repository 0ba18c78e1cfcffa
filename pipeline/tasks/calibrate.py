"""Compute ranges and channel statistics of a float graph, in one pass over calibration data."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field, SerializeAsAny

from enginesmith.calibration.collector import Collector
from enginesmith.calibration.dataset import Dataset, find_axes, open_dataset, validate_for_calibration
from enginesmith.calibration.histogram import PERCENTILE
from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.calibration.ranges import FILE, Provenance, Ranges, load
from enginesmith.calibration.synthetic import lazy_synthetic
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.passes.quantize.activation_capture import (
    CalibrationPoints,
    find_calibration_points,
    open_activation_capture,
)
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tensors import Array, InputChoice, Signature, TensorSpec, rows_first, split_inputs

Split = Literal["train", "calibration", "test"]
_MADE_UP = "the samples are random: the ranges are good for measuring speed, and not accuracy"
_ENOUGH_HELD_OUT = 8
"""Samples that fidelity is judged on without a note."""
_REPORTS = 10
"""Progress reports of a pass."""
BEFORE = "before"
"""Input: the graph that this one was made from, if its ranges are known."""
_COMPARED = 8
"""Feeds on which values of both graphs are compared."""
_ALIKE = 1e-4
"""Share of a channel's largest number by which they may differ there, and still have the same ranges."""


@dataclass(frozen=True)
class Feeding:
    """Iterate over calibration data as feeds, in the order of the rows: one sample each, or as many as a batch takes.

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


def open_data(
    reference: str,
    inputs: Sequence[TensorSpec],
    split: Split,
    options: DataOptions,
    choose: InputChoice | None = None,
) -> tuple[Dataset, tuple[Path, ...]]:
    """Open data, with the files and folders that it was read from."""
    with track_files(allow_pickle=False) as tracker:
        data = open_dataset(reference, inputs, split=split, options=options, choose=choose)
    files = (path for path in tracker.files if path.suffix != ".py" or is_reference(reference))
    return data, (*sorted(files), *data.folders)


def check_yields_again(reference: str, digest: str, before: str, consequence: str) -> None:
    """Compare the digest of what a function of the user's yielded with that of an earlier call, empty if unknown.

    Raises:
        DataError: they differ.
    """
    if before and digest != before:
        raise DataError(
            f"{reference} yields other samples each time that it is called, {consequence}",
            "give its random numbers a fixed seed, let no DataLoader shuffle, and sort files that it lists",
        )


def read_class_names(inputs: Inputs) -> tuple[str, ...]:
    """Read the names of the model's classes by number, from the reference or else the module; empty where it has none.

    Labels that are words are numbered by them where labels are compared with answers; drawing and splitting samples
    does without, so that all steps draw and split alike.
    """
    if "reference" in inputs:
        return samples.read(inputs["reference"].folder).class_names
    if inputs["model"].kind != "torch":
        return ()
    from enginesmith.pipeline.frameworks.torch.saved import read_record

    return read_record(inputs["model"].folder).class_names


class Feeder(BaseModel, frozen=True, extra="forbid"):
    """Choose the feeds of calibration."""

    data: str | None
    """None means the samples of the reference; where those are made up, as many of their kind as are asked for."""
    samples: int = Field(gt=0)
    seed: int
    options: SerializeAsAny[DataOptions] = AS_FOUND

    def open(self, model: Artifact, reference: Artifact) -> tuple[Feeding, tuple[Path, ...]]:
        """Return the feeds for a model, and the files and folders that they were read from.

        Raises:
            DataError: the data cannot be used.
        """
        files: tuple[Path, ...] = ()
        if self.data is None:
            data, batch = self._sample(
                self._like_reference(model.model_signature, reference), model.model_signature, reference
            )
        else:
            given, files = open_data(self.data, model.model_signature.inputs, "calibration", self.options)
            if reference.kind == "reference" and (before := samples.read(reference.folder).yielded.get(self.data)):
                check_yields_again(self.data, given.whole.digest, before, "so none can be held out for fidelity")
            data, batch = self._sample(given, model.model_signature, reference)
            data = validate_for_calibration(data)
        return Feeding(data, data.provenance(self.seed, batch)), files

    def held_out(self, signature: Signature) -> tuple[Dataset, tuple[Path, ...]]:
        """Read the rows of the data that calibration does not take, for fidelity; all rows, where it takes them all.

        Raises:
            DataError: the data cannot be used.
        """
        assert self.data is not None
        given, files = open_data(self.data, signature.inputs, "calibration", self.options)
        rest = np.setdiff1d(np.arange(len(given)), self._sample(given, signature)[0].rows)
        if not len(rest):
            note = f"calibration takes all {len(given)} samples of {given.name}, so that fidelity is judged on the same"
            return replace(given, notes=(*given.notes, f"{note}: give more samples, or other data with --eval")), files
        held_out = given.take(rest, f"{given.name} (without what calibration takes)")
        if len(rest) >= _ENOUGH_HELD_OUT:
            return held_out, files
        note = f"fidelity is judged on the {len(rest)} of {len(given)} samples that calibration leaves: give more"
        return replace(held_out, notes=(*held_out.notes, note)), files

    def _sample(self, given: Dataset, signature: Signature, reference: Artifact | None = None) -> tuple[Dataset, int]:
        """Sample rows, without the last ones that fill no whole batch, whose size is returned, too.

        A batch of more than there are repeats rows. Samples that change each other's answers, as the reference tells,
        or that the model took only as rows of the example, are fed in its largest batch that there are enough for.
        """
        batch = 1 if samples.batch_symbol(signature) else samples.fixed_batch(signature)
        known = samples.read(reference.folder) if reference and reference.kind == "reference" else None
        drawn = given.sample(self.samples, self.seed)
        if known and (known.interacting or (given.synthetic and known.drawing != "like")):
            batch = max((case.batch for case in known.cases if case.batch <= len(drawn)), default=batch)
        whole = len(drawn) - len(drawn) % batch
        if 0 < whole < len(drawn):
            drawn = drawn.take(np.arange(whole), f"{given.name} ({whole} of {len(given)}, seed {self.seed})")
        return drawn, batch

    def _like_reference(self, signature: Signature, reference: Artifact) -> Dataset:
        """Take the rows of the largest batch at the usual sizes; or make rows as made-up ones were made."""
        known = samples.read(reference.folder)
        symbol = samples.batch_symbol(signature)
        usual = {name: range_.opt for name, range_ in known.ranges.items() if name != symbol}
        fitting = {index: case for index, case in enumerate(known.cases) if usual.items() <= case.sizes.items()}
        index = max(fitting, key=lambda position: fitting[position].batch)
        if known.data == samples.SYNTHETIC and symbol is not None:
            example, sizes = samples.read_example(reference.folder), fitting[index].sizes
            drawing, tables = known.drawing, known.tables
            return lazy_synthetic(signature.inputs, example, sizes, self.samples, self.seed, drawing, tables)
        stored = samples.read_arrays(reference.folder, "feeds", index)
        feeds = rows_first({spec.name: stored[spec.name] for spec in signature.inputs}, signature.inputs)
        made_up, shared = known.data == samples.SYNTHETIC, {spec.name for spec in split_inputs(signature.inputs)[1]}
        return Dataset(
            samples.SYNTHETIC if made_up else f"{known.data}, as the reference was run on",
            {name: value for name, value in feeds.items() if name not in shared},
            synthetic=made_up,
            axes=find_axes(signature.inputs),
            shared={name: feeds[name] for name in shared},
        )


class Calibrate(Task):
    """Run the float graph over the data and write down what its values are like.

    Where a pass made the graph from one with known ranges, values that it left as they were keep theirs.
    """

    title: ClassVar[str] = "calibrate"
    produces: ClassVar[Kind] = "record"
    other_tools: ClassVar[tuple[str, ...]] = (*evaluator.TOOLS, "numpy")

    feeder: Feeder
    percentile: float = Field(PERCENTILE, gt=50, le=100)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        feeding, read = self.feeder.open(model, inputs["reference"])
        chosen = find_calibration_points(edit.load(model.path))
        known = _find_kept(model, inputs, chosen, feeding)
        taps = [name for name in chosen.taps if name not in known.tensors]
        channels = {name: axis for name, axis in chosen.channels.items() if name not in known.tensors}
        collector = Collector(chosen.histograms - known.tensors.keys(), channels)
        _collect(model, feeding, taps, chosen.products, collector, progress)
        progress("choosing ranges")
        ranges_by_source = {**known.tensors, **collector.tensors(self.percentile)}
        sources = ((name, chosen.same.get(name, name)) for name in chosen.values)  # in the order of computation
        ranges = Ranges(
            model_sha256=model.sha256,
            provenance=feeding.provenance,
            tensors={name: ranges_by_source[source] for name, source in sources if source in ranges_by_source},
            channels={**known.channels, **collector.channels()},
        )
        (out / FILE).write_text(ranges.model_dump_json() + "\n", encoding="utf-8")
        histograms = sum(tensor.amax is not None for tensor in ranges.tensors.values())
        return Effect(
            file=FILE,
            summary=f"{len(feeding.data)} samples of {feeding.provenance.data}, {len(ranges.tensors)} values, "
            f"{histograms} histograms",
            notes=(*feeding.data.notes, *((_MADE_UP,) if feeding.provenance.synthetic else ())),
            reads=read,
        )


def _find_kept(model: Artifact, inputs: Inputs, chosen: CalibrationPoints, feeding: Feeding) -> Ranges:
    """Find the ranges that hold for a graph of those of the one that it was made from; none, where there is no such.

    A value keeps them if the numbers of each channel are alike in a few feeds, as passes scale and shift channels. One
    that is 0 there tells nothing, unless it always was 0.
    """
    kept = Ranges(model_sha256=model.sha256, provenance=feeding.provenance, tensors={}, channels={})
    if BEFORE not in inputs:
        return kept
    before = inputs[BEFORE]
    known = load(inputs["ranges"].folder / FILE, model_sha256=before.sha256)
    if known.provenance != feeding.provenance:
        return kept
    names = [name for name in chosen.taps if name in known.tensors and _has_statistics(name, chosen, known)]
    after, earlier = (_summarize(graph.path, names, known, feeding) for graph in (model, before))
    for name in names:
        new, old = np.array(after[name]), np.array(earlier[name])
        if new.shape != old.shape:
            continue
        size, difference = (np.abs(numbers).max(axis=(0, 1)) for numbers in (old, new - old))
        tensor, channels = known.tensors[name], known.channels.get(name)
        always = channels.amax if channels else max(-tensor.minimum, tensor.maximum)
        seen = (size > 0) | (np.asarray(always) == 0)
        if bool((seen & (difference <= _ALIKE * size)).all()):
            kept.tensors[name] = tensor
            if channels:
                kept.channels[name] = channels
    return kept


def _summarize(path: Path, names: Sequence[str], known: Ranges, feeding: Feeding) -> dict[str, list[Array]]:
    """Compute the smallest number, the largest, and the mean magnitude of values in a few feeds: each [3, channels].

    Values without an axis of channels are one channel.
    """
    numbers: dict[str, list[Array]] = {name: [] for name in names}
    with open_activation_capture(path, names) as session:
        for feeds in islice(feeding, _COMPARED):
            values = session.run(feeds)
            for name in names:
                value, axis = values.pop(name), known.channels[name].axis if name in known.channels else None
                others = None if axis is None else tuple(each for each in range(value.ndim) if each != axis)
                count = value.size if axis is None else value.size // max(1, value.shape[axis])
                mean = np.abs(value).sum(axis=others, dtype=np.float64) / max(1, count)
                ends = value.min(axis=others, initial=0.0), value.max(axis=others, initial=0.0)
                numbers[name].append(np.stack([*ends, mean]))
    return numbers


def _has_statistics(name: str, chosen: CalibrationPoints, known: Ranges) -> bool:
    """Check that all is known of a value that calibration of this graph asks for."""
    tensor, channels = known.tensors[name], known.channels.get(name)
    if name in chosen.histograms and tensor.finite and tensor.amax is None:
        return False
    asked = chosen.channels.get(name)
    return tensor.finite and (asked is None or (channels is not None and asked in (channels.axis, -1)))


def _collect(
    model: Artifact,
    feeding: Feeding,
    taps: Sequence[str],
    products: Collection[str],
    collector: Collector,
    progress: Progress,
) -> None:
    """Run the float graph over all feeds.

    Raises:
        ModelError: a product reads or writes what is not finite; masks may be infinite, and padding NaN.
        DataError: the same, for a sample that has NaN.
    """
    every = -(-len(feeding) // _REPORTS)
    with open_activation_capture(model.path, taps) as session:
        for index, feeds in enumerate(feeding):
            if index % every == 0:
                progress(f"running the float graph, {index} of {len(feeding)} feeds done")
            values = session.run(feeds)
            for name in taps:
                collector.add(name, values.pop(name))
            if all(map(collector.finite, products)):
                continue
            first = next(name for name in taps if not collector.finite(name))
            maker = next((node for node in model_file.skeleton(model.path).graph.node if first in node.output), None)
            origin = f", made by the {maker.op_type} node {maker.name!r}," if maker else ""
            row = feeding.provenance.rows[index * feeding.provenance.batch]
            if missing := [name for name, value in feeds.items() if value.dtype.kind == "f" and np.isnan(value).any()]:
                where = f"row {row}" + (", or soon after it" if feeding.provenance.batch > 1 else "")
                raise DataError(
                    f"{feeding.provenance.data}: {missing[0]!r} holds NaN in {where}, and {first!r} then has no range",
                    "remove such rows, or fill them in as for training",
                )
            raise ModelError(
                f"the value {first!r}{origin} is NaN or infinite on row {row} of {feeding.provenance.data}"
                f"{'' if index else ' (the first that was tried)'}, and what follows with it",
                "look at the weights before it, and at that row: no range holds what is infinite",
            )
