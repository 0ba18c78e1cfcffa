"""Judge variants by a metric on labeled data, and try the metric on a few samples before long work."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny

from enginesmith.calibration.dataset import Dataset, Labels, take_labels
from enginesmith.calibration.options import DataOptions, PartName
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines import baseline, simulation
from enginesmith.pipeline.engines.base import Engine, Session
from enginesmith.pipeline.errors import DataError, SampleError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.samples import Samples, batch_symbol, fixed_batch
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.measure import quality
from enginesmith.pipeline.measure.metrics.table import find_own
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Inputs, Task, read_models, write_records
from enginesmith.pipeline.tasks.calibrate import check_yields_again, open_data
from enginesmith.pipeline.tasks.measure import this_hardware
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, rows_first
from enginesmith.pipeline.units import format_metric

BASELINE = "baseline"
_OUTPUTS = "outputs.npz"
_JUDGED: tuple[PartName, ...] = ("choice", "judgement")
_TRIED = 2
"""Samples that a metric is tried on."""
_TOGETHER_BYTES = 32 << 20
_ON_THE_SAME = "and variants can be judged on equal ones only"


class EngineCheck(Task):
    """Judge what an engine answers, which holds for one kind of hardware: another one has other kernels.

    What computes a model or graph as it is given, on the CPU, is close enough to itself everywhere.
    """

    produces: ClassVar[Kind] = "record"
    time_share: float = Field(0.5, exclude=True)

    engine: SerializeAsAny[Engine]
    device: Device

    @property
    def times_kernels(self) -> bool:
        return self.engine.runs_module() and self.engine.times_kernels

    @property
    def machine_specific(self) -> bool:
        plain = self.engine.exact() in (baseline("torch"), baseline("onnx"), simulation())
        return self.device.kind != "cpu" or not plain

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_hardware(self.device) if self.machine_specific else {}


class Quality(EngineCheck):
    """Compute the metric of one variant on labeled data, and its drop against the baseline on the same samples."""

    title: ClassVar[str] = "quality"
    other_tools: ClassVar[tuple[str, ...]] = ("numpy",)

    data: str
    data_options: SerializeAsAny[DataOptions]
    samples: int | None
    metric: str | None
    """None where nobody asked for one: then data without labels, or with labels for another metric, is no error."""
    batch: int
    """The largest batch that is measured: sessions take it."""
    largest_batch: int
    """The most that sessions may be given: up to it, and within 32 MiB of inputs, samples are judged together."""
    ranges: dict[str, ShapeRange] = Field({})
    """Ranges that were given: that of the batch says what sessions may be given, in the place of those."""
    rows_apart: bool = True
    """False where the precision depends on the whole batch: the largest one that is measured is judged then."""
    seed: int

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, **quality.identify_metric(self.metric)}

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        with self.engine.load(inputs["model"], self.device) as session:
            judged, outputs, reads = self.judge(session, inputs.get(BASELINE), progress, inputs.get("reference"))
        if isinstance(judged, str):
            return write_records(out, [], judged, reads=reads)
        np.savez(out / _OUTPUTS, **outputs)  # type: ignore[arg-type]
        summary = f"{judged.title} {format_metric(judged.value)} on {judged.basis}"
        return write_records(out, [judged], summary, reads=reads)

    def judge(
        self, session: Session, baseline: Artifact | None, progress: Progress, reference: Artifact | None = None
    ) -> tuple[quality.Quality | str, dict[str, Array], tuple[Path, ...]]:
        """Compute a session's metric against an artifact of this task, or against itself; its answers; the files read.

        Where samples change each other's answers, as the ``reference`` or the baseline's artifact tells, they are
        computed in batches of the first size that is measured. Labels that are words get the numbers of the classes
        that the ``reference`` names. Where nobody asked for a metric and there is none, the reason is returned instead.

        Raises:
            DataError: a metric was asked for, and the data has no labels; or it fails.
        """
        if baseline is not None and not (baseline.folder / _OUTPUTS).exists():
            return baseline.history[-1].effect, {}, ()
        data, reads = open_data(self.data, session.signature.inputs, "test", self.data_options)
        whole = data.whole
        if self.samples is not None:
            data = data.sample(self.samples, self.seed)
        if data.labels is None and self.metric is None:
            return "the data has no labels, so there is no quality", {}, reads
        reference_samples = samples.read(reference.folder) if reference else None
        if reference_samples and (before := reference_samples.yielded.get(self.data)):
            check_yields_again(self.data, whole.digest, before, _ON_THE_SAME)
        together = self._find_batch(baseline, reference_samples)
        with track_files(allow_pickle=False) as tracker:
            try:
                data = data.number_words(reference_samples.class_names if reference_samples else ())
                theirs = outputs = self._answers(session, data, progress, together)
                if baseline is not None:
                    with np.load(baseline.folder / _OUTPUTS, allow_pickle=False) as stored:
                        theirs = dict(stored.items())
                metric = self.metric or quality.DEFAULT_METRIC
                metric = _complete_metric(metric, self.data_options.label_keys, theirs, data)
                with _name_rows(data, data.rows):
                    judged = quality.evaluate(metric, outputs, theirs, data.labels, self.seed)
            except DataError as error:
                if self.metric:
                    raise
                return f"no metric was named, and {error.message}", {}, reads
        known = next(iter(read_models(baseline, quality.Quality)), None)
        content = known.data_sha256 if known and not is_reference(self.data) else data.digest
        if known:
            check_yields_again(self.data, content, known.data_sha256, _ON_THE_SAME)
        judged = judged.model_copy(update={"batch": together, "data_sha256": content})
        return judged, outputs, (*reads, *_code_read(self.metric, tracker.files))

    def _find_batch(self, baseline: Artifact | None, known: Samples | None) -> int | None:
        """Find how many samples have to be computed together; None where each has its own answer."""
        if known and known.interacting:
            return known.cases[0].batch
        earlier = next(iter(read_models(baseline, quality.Quality)), None)
        return (earlier.batch if earlier else None) or (None if self.rows_apart else self.batch)

    def _answers(
        self, session: Session, data: Dataset, progress: Progress, together: int | None = None
    ) -> dict[str, Array]:
        """Compute outputs for every sample, in batches of one size; the last one wraps round and is cut.

        Outputs without a row for each sample are left out, and those whose rows have other sizes in other batches:
        unless the metric judges different numbers of rows.
        """
        parts, varies = list[dict[str, Array]](), _rows_vary(self.metric)
        size = fixed_batch(session.signature)
        if symbol := batch_symbol(session.signature):  # it takes any batch up to the largest
            row_bytes = sum(array.nbytes for array in data.batch(0, 1).values())
            largest = self.ranges[symbol].max if symbol in self.ranges else self.largest_batch
            most = max(min(self.batch, largest), min(largest, _TOGETHER_BYTES // max(row_bytes, 1), len(data)))
            size = min(together, largest) if together else most
        for start in range(0, len(data), size):
            progress(f"{start} of {len(data)} samples")
            parts.append(_answer_rows(session, data.batch(start, size), size, self.metric))
        if varies:
            parts = _fill_up(parts)
        shapes = {name: {part[name].shape if name in part else None for part in parts} for name in parts[0]}
        alike = [name for name, sizes in shapes.items() if len(sizes) == 1]
        if not alike:
            raise DataError(
                f"{', '.join(map(repr, shapes))} has rows of other sizes in other batches",
                "return the answers by sample, of one size: filled up, say",
            )
        return {name: np.concatenate([part[name] for part in parts])[: len(data)] for name in alike}


def _rows_vary(metric: str | None) -> bool:
    """Tell whether a metric judges samples with different numbers of rows."""
    own = find_own(quality.parse_metric(metric)[0]) if metric else None
    return own is not None and own.rows_vary


def _fill_up(parts: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Append rows of zeros, [samples, rows, ...], where batches differ in the number of rows."""
    most = {name: max(part[name].shape[1:2] for part in parts if name in part) for name in parts[0]}

    def fill(name: str, value: Array) -> Array:
        lacking = [] if value.ndim == 1 else [most[name][0] - value.shape[1]]
        return np.pad(value, [(0, more) for more in (0, *lacking, *(0,) * (value.ndim - 2))])

    return [{name: fill(name, value) for name, value in part.items() if name in most} for part in parts]


def _answer_rows(session: Session, feeds: Feeds, size: int, metric: str | None) -> dict[str, Array]:
    """Run a batch of this size; return the outputs that have a row for each sample, with the samples first.

    All that a model of fixed batch 1 answers is one sample's, wherever its batch is: [time, 1, classes], say. So are
    all rows that values choose, if the metric judges different numbers of them. Padding is no token that it may choose.

    Raises:
        DataError: none has.
    """
    signature = session.signature
    answers = rows_first(session.run(feeds), signature.outputs)
    if _rows_vary(metric) and size == 1 and batch_symbol(signature) is None:
        chosen = {
            spec.name for spec in signature.outputs if {*spec.shape[:1]} & ({*spec.symbols} - {*signature.symbols})
        }
        answers = {name: value[np.newaxis] if name in chosen else value for name, value in answers.items()}
    rows = {name: value for name, value in answers.items() if value.shape[:1] == (size,)}
    if not rows and size == 1 and batch_symbol(signature) is None:
        rows = {
            name: np.moveaxis(value, value.shape.index(1), 0) for name, value in answers.items() if 1 in value.shape
        }
    if not rows:
        shapes = ", ".join(f"{name!r} is {list(value.shape)}" for name, value in answers.items())
        raise DataError(
            f"for {size} sample{'s' * (size > 1)}, no output of the model has a row for each, which a metric needs: "
            f"{shapes}",
            "return the answers by sample, with the batch as a dimension (boxes of each image as [batch, boxes, 6]); "
            "or omit --metric and --max-drop: variants are then compared with eager alone",
        )
    return quality.leave_out_padding(metric, rows, feeds)


def _code_read(metric: str | None, files: Iterable[Path]) -> list[Path]:
    """List the files that a metric of the user's read."""
    return sorted(files) if metric and not find_own(quality.parse_metric(metric)[0]) else []


@contextlib.contextmanager
def _name_rows(data: Dataset, rows: Sequence[int]) -> Iterator[None]:
    """Name the row of the user's data in errors about one of some samples, which are these rows."""
    try:
        yield
    except SampleError as error:
        raise error.on_row(rows[error.sample], data.whole.name) from error


def _complete_metric(metric: str, keys: Sequence[str], outputs: Feeds, data: Dataset) -> str:
    """Write out what a metric leaves open: its output by the labels' keys, and what the labels of all samples tell."""
    metric = quality.name_output(metric, keys, outputs)
    if data.whole.labels is None:
        return metric
    with _name_rows(data.whole, data.whole.rows):
        return quality.settle_metric(metric, outputs, data.whole.labels)


def _take_judged_labels(data: Dataset) -> tuple[Labels | None, list[int]]:
    """Take the labels of all samples that are going to be judged, and their rows: of all such parts of a set."""
    parts = [data.parts[part] for part in _JUDGED if part in data.parts]
    rows = [*map(int, np.concatenate(parts))] if parts else list(data.rows)
    return None if data.whole.labels is None else take_labels(data.whole.labels, np.asarray(rows, np.int64)), rows


def _answer_few(metric: str, session: Session, data: Dataset) -> dict[str, Array]:
    """Answer the samples that a metric is tried on."""
    size = _TRIED if batch_symbol(session.signature) else fixed_batch(session.signature)
    answers = _answer_rows(session, data.batch(0, size), size, metric)
    return {name: value[: min(_TRIED, len(data))] for name, value in answers.items()}


def try_metric(metric: str, session: Session, data: Dataset, keys: Sequence[str] = ()) -> tuple[str, list[Path]]:
    """Try a metric on two samples, before long work; returns a sentence about it, and the files that it read.

    ``keys`` are those of the labels, where they were named. A metric that may work on more samples passes.

    Raises:
        DataError: the data has no labels, or the metric does not fit them and the outputs, or cannot work.
    """
    outputs = _answer_few(metric, session, data)
    rows = slice(len(next(iter(outputs.values()))))
    metric = _complete_metric(metric, keys, outputs, data)
    judged_labels, judged_rows = _take_judged_labels(data)
    with _name_rows(data, judged_rows):
        chosen = (
            None
            if judged_labels is None
            else quality.choose_output(metric, *quality.join_arrays(metric, outputs, judged_labels))
        )
    with _name_rows(data, data.rows), track_files(allow_pickle=False) as tracker:
        named = f"{quality.parse_metric(metric)[0]}:{chosen}" if chosen else metric
        try:
            judged = quality.evaluate(
                named, outputs, outputs, None if data.labels is None else take_labels(data.labels, rows)
            )
            others = " and ".join(map(repr, judged.other_outputs))
            parts = [f"{judged.title} is judged, {others} not (--metric NAME:OUTPUT)"] if others else []
            sentence = "; ".join([*parts, *quality.explain_choice(metric, chosen)])
        except quality.MetricError as error:
            known = (
                find_own(quality.parse_metric(metric)[0]) is not None
            )  # such as an area, which two samples often have none of
            sentence = "" if known else f"on {rows.stop} samples, {error.message}; all samples decide"
    return sentence, _code_read(metric, tracker.files)


def describe_numbering(metric: str, session: Session, data: Dataset) -> list[str]:
    """Describe how words are numbered, if there are fewer than classes, and the metric judges both."""
    labels = _take_judged_labels(data)[0]
    with contextlib.suppress(DataError):  # of the default metric, which need not fit
        if data.class_names and labels is not None:
            return quality.explain_numbering(metric, _answer_few(metric, session, data), labels, data.class_names)
    return []
