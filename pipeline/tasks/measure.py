"""Measure variants: latency of all together; memory, quality and profile of each alone; limits of the machine."""

import contextlib
import datetime
import functools
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny

from enginesmith.calibration.dataset import Dataset, Labels, take_labels
from enginesmith.calibration.options import DataOptions, PartName
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines import baseline, environment, simulation
from enginesmith.pipeline.engines.base import Candidate, Engine, Session
from enginesmith.pipeline.errors import DataError, SampleError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import evaluator
from enginesmith.pipeline.frameworks.samples import Samples, batch_symbol, fixed_batch
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.measure import quality
from enginesmith.pipeline.measure.device_rates import measure_limits
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import FeedsAt, LatencyBenchmark, measure_latency
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.measure.metrics.table import find_own
from enginesmith.pipeline.measure.profile import measure_profile
from enginesmith.pipeline.measure.roofline import count_work
from enginesmith.pipeline.measure.rows import SAMPLES, DeviceLimits, LatencyRow, Work
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.system import cpu, nvidia
from enginesmith.pipeline.system import machine as devices
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, read_models, write_records
from enginesmith.pipeline.tasks.calibrate import open_data
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, rows_first
from enginesmith.pipeline.units import format_bytes, format_metric, format_si

_SHARE_OF_FREE = 0.8
HANG_SECONDS = 900.0
"""Time after which a session counts as hanging."""
ENVIRONMENT = "environment.json"
"""The machine as it was when latency was measured, which may have been in an earlier run."""
VERIFIED = "verified"
"""Role of the record that a variant's numbers are right: ``V verified`` for the variant V."""
GRAPH = "graph"
"""Role of the ONNX graph that the engine was built from, whose nodes say which module they came from."""
BASELINE = "baseline"
_OUTPUTS = "outputs.npz"
_JUDGED: tuple[PartName, ...] = ("choice", "judgement")
_TRIED = 2
"""Samples that a metric is tried on."""
_TOGETHER_BYTES = 32 << 20
_BRIEF_BLOCK_MS = 25.0
_SHARE_TO_MEASURE = 0.9
"""Share of the time that is left until measuring ends."""


class Measurement(Task):
    """Measure with nothing else running, so that what comes out is true of this machine alone."""

    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    device: Device
    again: str = ""
    """Something new each time, for a measurement that must not be taken from the store."""

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_machine()

    @property
    def measuring_seconds(self) -> float:
        """Time to measure in, so that the result can be written before the time that is left is over."""
        return _SHARE_TO_MEASURE * self.left_seconds


class Latency(Measurement):
    """Measure the latency of all variants, interleaved; the first one is the baseline."""

    title: ClassVar[str] = "latency"

    engines: dict[str, SerializeAsAny[Engine]]
    """By variant, whose artifact comes in under the same name; one without an artifact is left out."""
    settings: LatencySettings
    dense: dict[str, str]
    """By pruned or sparse variant, the one that differs from it in nothing else."""
    batches: int = Field(1, exclude=True)
    """Batch sizes that are measured, which the reference brings; no part of what is measured."""
    most: int | None = None
    """The largest batch size of a sweep; None is no sweep."""

    @property
    def identity(self) -> dict[str, Any]:
        engines = {name: {"engine": engine.name, **engine.model_dump()} for name, engine in self.engines.items()}
        return {**super().identity, "engines": engines}

    @property
    def expected_seconds(self) -> float | None:
        return self.batches * self.settings.time_limit_seconds if self.most is None else None

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        candidates = [
            Candidate(name, engine, inputs[name], self.device)
            for index, (name, engine) in enumerate(self.engines.items())
            if name in inputs and (index == 0 or f"{name} {VERIFIED}" in inputs)
        ]
        feeds, settings = measured_feeds(inputs["reference"]), self.settings
        if self.most is not None and settings.memory_limit_bytes is None:
            # without a limit the kernel would end other processes than a sweep's, too
            settings = settings.model_copy(update={"memory_limit_bytes": _within_free(None, self.device)})
        ends_at = time.monotonic() + self.measuring_seconds
        machine = environment()  # before the measurement itself makes the machine busy
        with logs_in_own_log() as logs, LatencyBenchmark(candidates, settings, logs, progress, self.dense) as benchmark:
            for left, (batch, arrays) in zip(range(len(feeds), 0, -1), sorted(feeds.items()), strict=True):
                remaining = ends_at - time.monotonic()  # once it is over, the time of grace is that of all sizes
                benchmark.end_in(remaining / left if remaining > 0 else remaining, self.grace_seconds)
                benchmark.measure(batch, arrays)
            feeds_at = _make_larger_feeds(inputs["reference"], inputs[candidates[0].id])
            if feeds_at is not None:
                benchmark.sweep(feeds_at, max(feeds), self.most)
            result = benchmark.result()
            machine = devices.add_interference(machine, environment(), benchmark.gpu_looks)
        (out / ENVIRONMENT).write_text(machine.model_dump_json(indent=1), encoding="utf-8")
        measured_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        rows = [
            {"variant": name, "measured_at": measured_at, "row": row.model_dump(mode="json")}
            for name, rows in result.rows.items()
            for row in rows
        ]
        write_records(out, rows)
        np.savez_compressed(out / SAMPLES, **result.samples)  # type: ignore[arg-type]
        failed = [f"{name} failed" for name, rows in result.rows.items() if any(row.failure for row in rows)]
        cut = any(row.cut for rows in result.rows.values() for row in rows)
        measured = sorted({row.batch for rows in result.rows.values() for row in rows})
        variants = "variant" if len(candidates) == 1 else "variants"
        summary = f"{len(candidates)} {variants} at batch {', '.join(map(str, measured))}"
        groups = max((row.group or 0 for rows in result.rows.values() for row in rows), default=0)
        grouped = [f"in {groups} groups, as they do not fit on the GPU together"] if groups else []
        return Effect(file=RECORDS, summary="; ".join([summary, *grouped, *failed]), incomplete=bool(failed) or cut)


def _within_free(limit_bytes: int | None, device: Device) -> int | None:
    """Lower a limit on the CPU to a share of the memory that is free, so that the kernel ends no other process."""
    free = cpu.free_bytes() if device.kind == "cpu" else None
    if free is None:
        return limit_bytes
    share = int(_SHARE_OF_FREE * free)
    return share if limit_bytes is None else min(limit_bytes, share)


class Memory(Measurement):
    """Measure the peak memory of one variant at one batch size."""

    title: ClassVar[str] = "memory"

    time_share: float = Field(0.5, exclude=True)

    engine: SerializeAsAny[Engine]
    batch: int | None = None
    """None is the largest one that is measured."""
    limit_bytes: int | None = None
    """Limit of what the session takes besides libraries."""

    @property
    def pairs(self) -> bool:
        """Tell whether it reads its own process's memory alone, which others do not change."""
        return self.device.kind == "cpu" and self.batch is None

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        feeds: Feeds
        batch, feeds = max(measured_feeds(inputs["reference"]).items(), key=lambda item: item[0])
        limit = self.limit_bytes
        if self.batch is not None and (feeds_at := _make_larger_feeds(inputs["reference"], inputs["model"])):
            batch, feeds = self.batch, feeds_at(self.batch)
            limit = _within_free(limit, self.device)
        candidate = Candidate(self.engine.name, self.engine, inputs["model"], self.device)
        seconds = min(HANG_SECONDS, self.measuring_seconds)
        with logs_in_own_log() as logs:
            row = measure_memory(candidate, batch, feeds, logs, progress, seconds, limit)
        write_records(out, [row])
        if row.peak_bytes is not None:
            summary = f"peak {format_bytes(row.peak_bytes)} at batch {batch}"
        else:
            summary = f"no peak at batch {batch}: {row.reasons['peak_bytes'].splitlines()[0]}"
        return Effect(file=RECORDS, summary=summary, incomplete=row.failure is not None)


@functools.cache
def this_machine() -> dict[str, Any]:
    """Digest what decides how fast things run here."""
    return {"machine": devices.fingerprint(environment())}


def measured_feeds(reference: Artifact) -> dict[int, dict[str, Array]]:
    """Read the measured feeds by batch size."""
    cases = enumerate(samples.read(reference.folder).cases)
    return {case.batch: samples.read_arrays(reference.folder, "feeds", index) for index, case in cases if case.measured}


def measure_beside(
    sides: Mapping[str, tuple[Engine, Artifact]],
    device: Device,
    reference: Artifact,
    seconds: float,
    progress: Progress,
) -> list[LatencyRow]:
    """Measure engines of artifacts beside each other for so long, at the first batch size; a row for each."""
    batch, feeds = next(iter(measured_feeds(reference).items()))
    candidates = [Candidate(name, engine, artifact, device) for name, (engine, artifact) in sides.items()]
    settings = LatencySettings(precision=0.02, time_limit_seconds=seconds, block_ms=_BRIEF_BLOCK_MS, launches=1)
    with logs_in_own_log() as logs:
        rows = measure_latency(candidates, {batch: feeds}, settings, logs, progress).rows
    return [rows[name][0] for name in sides]


def _make_larger_feeds(reference: Artifact, model: Artifact) -> FeedsAt | None:
    """Make feeds of any batch size of those of the largest measured one; None where the batch is fixed."""
    assert model.signature is not None
    signature, symbol = model.signature, samples.batch_symbol(model.signature)
    if symbol is None:
        return None
    cases = enumerate(samples.read(reference.folder).cases)
    index, case = max(((index, case) for index, case in cases if case.measured), key=lambda item: item[1].batch)
    known = samples.read_arrays(reference.folder, "feeds", index)
    return lambda batch: samples.resize(known, signature, {**case.sizes, symbol: batch})


@contextlib.contextmanager
def logs_in_own_log() -> Iterator[Path]:
    """Yield a folder for the logs of processes below this one; what they wrote ends up in this one's log."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        finally:
            for log in sorted(Path(folder).iterdir()):
                sys.stderr.write(f"--- {log.stem}\n{log.read_text('utf-8', errors='replace')}")


@functools.cache
def this_hardware(device: Device) -> dict[str, Any]:
    """Describe what decides which kernels there are for a device, and so the numbers that they compute."""
    if device.kind == "cuda":
        here = nvidia.cuda_device(device.index)
        return {"device": here.model_dump() if here else None, "driver": nvidia.driver().version}
    return {"processor": [platform.machine(), cpu.model(), *cpu.vector_units()]}


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
            write_records(out, [])
            return Effect(file=RECORDS, summary=judged, reads=reads)
        np.savez(out / _OUTPUTS, **outputs)  # type: ignore[arg-type]
        write_records(out, [judged])
        summary = f"{judged.title} {format_metric(judged.value)} on {judged.basis}"
        return Effect(file=RECORDS, summary=summary, reads=reads)

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
        if self.samples is not None:
            data = data.sample(self.samples, self.seed)
        if data.labels is None and self.metric is None:
            return "the data has no labels, so there is no quality", {}, reads
        reference_samples = samples.read(reference.folder) if reference else None
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
        content = known.data_sha256 if known else data.digest
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
            parts.append(_answer_rows(session, data.batch(start, size), size, rows_vary=varies))
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


def _answer_rows(session: Session, feeds: Feeds, size: int, *, rows_vary: bool) -> dict[str, Array]:
    """Run a batch of this size; return the outputs that have a row for each sample, with the samples first.

    All that a model of fixed batch 1 answers is one sample's, wherever its batch is: [time, 1, classes], say. So are
    all rows that values choose, if the metric judges different numbers of them.

    Raises:
        DataError: none has.
    """
    signature = session.signature
    answers = rows_first(session.run(feeds), signature.outputs)
    if rows_vary and size == 1 and batch_symbol(signature) is None:
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
    return rows


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


def take_judged_labels(data: Dataset) -> tuple[Labels | None, list[int]]:
    """Take the labels of all samples that are going to be judged, and their rows: of all such parts of a set."""
    parts = [data.parts[part] for part in _JUDGED if part in data.parts]
    rows = [*map(int, np.concatenate(parts))] if parts else list(data.rows)
    return None if data.whole.labels is None else take_labels(data.whole.labels, np.asarray(rows, np.int64)), rows


def answer_few(metric: str, session: Session, data: Dataset) -> dict[str, Array]:
    """Answer the samples that a metric is tried on."""
    size = _TRIED if batch_symbol(session.signature) else fixed_batch(session.signature)
    answers = _answer_rows(session, data.batch(0, size), size, rows_vary=_rows_vary(metric))
    return {name: value[: min(_TRIED, len(data))] for name, value in answers.items()}


def try_metric(metric: str, session: Session, data: Dataset, keys: Sequence[str] = ()) -> tuple[str, list[Path]]:
    """Try a metric on two samples, before long work; returns a sentence about it, and the files that it read.

    ``keys`` are those of the labels, where they were named. A metric that may work on more samples passes.

    Raises:
        DataError: the data has no labels, or the metric does not fit them and the outputs, or cannot work.
    """
    outputs = answer_few(metric, session, data)
    rows = slice(len(next(iter(outputs.values()))))
    metric = _complete_metric(metric, keys, outputs, data)
    judged_labels, judged_rows = take_judged_labels(data)
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


class DeviceRates(Measurement):
    """Measure what a device can do at best, once on a machine."""

    title: ClassVar[str] = "limits"
    other_tools: ClassVar[tuple[str, ...]] = ("torch", *evaluator.TOOLS)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        limits = measure_limits(self.device, progress)
        write_records(out, [limits])
        notes = (*limits.warnings, *(f"{name}: {why}" for name, why in limits.reasons.items()))
        bandwidth = limits.memory_bandwidth
        parts = [f"memory {format_si(bandwidth.per_second, 'B/s')}"] if bandwidth else []
        parts += [f"{name} {format_si(rate.per_second, 'FLOP/s')}" for name, rate in limits.products.items()]
        return Effect(file=RECORDS, summary=", ".join(parts) or "nothing could be measured", notes=notes)


class CountWork(Task):
    """Count what one inference has to do, at each measured batch size.

    Of an engine that shows the graph that it runs, that one is counted; for another engine, "model" is an ONNX graph
    of the same model that stands in for what it makes of it.
    """

    title: ClassVar[str] = "work"
    produces: ClassVar[Kind] = "record"
    other_tools: ClassVar[tuple[str, ...]] = ("onnx",)

    engine: SerializeAsAny[Engine]
    device: Device

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model, shown = inputs["model"], self.engine.shows_graph
        cases = [case for case in samples.read(inputs["reference"].folder).cases if case.measured]
        with tempfile.TemporaryDirectory(prefix="enginesmith-work-") as scratch:
            path = self.engine.executed(model, self.device, Path(scratch)) if shown else model.path
            counted = [
                count_work(path, case.sizes, case.batch, executed=shown, arithmetic=self.engine.arithmetic)
                for case in cases
            ]
        write_records(out, counted)
        summaries = []
        for work in counted:
            flops = " + ".join(f"{format_si(count, 'FLOP')} in {name}" for name, count in work.flops.items())
            least = format_bytes(work.least_bytes)
            summaries.append(f"batch {work.batch}: {flops or 'no products'}, at least {least}")
        return Effect(file=RECORDS, summary="; ".join(summaries))


def read_limits(record: Artifact) -> DeviceLimits:
    """Read what :class:`DeviceRates` wrote."""
    return read_models(record, DeviceLimits)[0]


def read_work(record: Artifact) -> dict[int, Work]:
    """Read what :class:`CountWork` wrote, by batch size."""
    return {work.batch: work for work in read_models(record, Work)}


class ProfileVariant(Measurement):
    """Profile one variant by module, at its smallest batch; the ``graph`` is taken where there is one."""

    title: ClassVar[str] = "profile"
    other_tools: ClassVar[tuple[str, ...]] = ("onnx",)

    variant: str
    engine: SerializeAsAny[Engine]
    calls: int = Field(20, ge=1)
    """Inferences that are profiled."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        feeds = measured_feeds(inputs["reference"])
        batch, model = min(feeds), inputs["model"]
        graph = inputs.get(GRAPH) or (model if model.kind == "onnx" else None)
        candidate = Candidate(self.variant, self.engine, model, self.device)
        path = graph.path if graph else None
        with logs_in_own_log() as logs:
            profile = measure_profile(candidate, batch, feeds[batch], path, self.calls, logs, progress)
        write_records(out, [profile])
        if profile.total_ms is None or profile.unattributed_share is None:
            return Effect(file=RECORDS, summary=profile.reasons["total_ms"], incomplete=profile.failure is not None)
        known = f"{1 - profile.unattributed_share:.0%} of it on modules"
        return Effect(file=RECORDS, summary=f"{profile.total_ms:.3g} ms in operators at batch {batch}, {known}")
