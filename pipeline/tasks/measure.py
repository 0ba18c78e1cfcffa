"""Measure variants: latency of all together; memory and profile of each alone; limits of the machine."""

import contextlib
import datetime
import functools
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines import environment
from enginesmith.pipeline.engines.base import Candidate, Engine
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import evaluator
from enginesmith.pipeline.measure.device_rates import measure_limits
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import FeedsAt, LatencyBenchmark, measure_latency
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.measure.profile import measure_profile
from enginesmith.pipeline.measure.roofline import count_work
from enginesmith.pipeline.measure.rows import SAMPLES, DeviceLimits, LatencyRow, Work
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.system import cpu, nvidia
from enginesmith.pipeline.system import machine as devices
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Inputs, Task, read_models, write_records
from enginesmith.pipeline.tensors import Array, Feeds
from enginesmith.pipeline.units import format_bytes, format_si

_SHARE_OF_FREE = 0.8
HANG_SECONDS = 900.0
"""Time after which a session counts as hanging."""
ENVIRONMENT = "environment.json"
"""The machine as it was when latency was measured, which may have been in an earlier run."""
VERIFIED = "verified"
"""Role of the record that a variant's numbers are right: ``V verified`` for the variant V."""
GRAPH = "graph"
"""Role of the ONNX graph that the engine was built from, whose nodes say which module they came from."""
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
        np.savez_compressed(out / SAMPLES, **result.samples)  # type: ignore[arg-type]
        failed = [f"{name} failed" for name, rows in result.rows.items() if any(row.failure for row in rows)]
        cut = any(row.cut for rows in result.rows.values() for row in rows)
        measured = sorted({row.batch for rows in result.rows.values() for row in rows})
        variants = "variant" if len(candidates) == 1 else "variants"
        summary = f"{len(candidates)} {variants} at batch {', '.join(map(str, measured))}"
        groups = max((row.group or 0 for rows in result.rows.values() for row in rows), default=0)
        grouped = [f"in {groups} groups, as they do not fit on the GPU together"] if groups else []
        return write_records(out, rows, "; ".join([summary, *grouped, *failed]), incomplete=bool(failed) or cut)


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
        if row.peak_bytes is not None:
            summary = f"peak {format_bytes(row.peak_bytes)} at batch {batch}"
        else:
            summary = f"no peak at batch {batch}: {row.reasons['peak_bytes'].splitlines()[0]}"
        return write_records(out, [row], summary, incomplete=row.failure is not None)


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
    signature, symbol = model.model_signature, samples.batch_symbol(model.model_signature)
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
        return nvidia.describe_device(device.index)
    return {"processor": [platform.machine(), cpu.model(), *cpu.vector_units()]}


class DeviceRates(Measurement):
    """Measure what a device can do at best, once on a machine."""

    title: ClassVar[str] = "limits"
    other_tools: ClassVar[tuple[str, ...]] = ("torch", *evaluator.TOOLS)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        limits = measure_limits(self.device, progress)
        notes = (*limits.warnings, *(f"{name}: {why}" for name, why in limits.reasons.items()))
        bandwidth = limits.memory_bandwidth
        parts = [f"memory {format_si(bandwidth.per_second, 'B/s')}"] if bandwidth else []
        parts += [f"{name} {format_si(rate.per_second, 'FLOP/s')}" for name, rate in limits.products.items()]
        return write_records(out, [limits], ", ".join(parts) or "nothing could be measured", notes=notes)


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
        summaries = []
        for work in counted:
            flops = " + ".join(f"{format_si(count, 'FLOP')} in {name}" for name, count in work.flops.items())
            least = format_bytes(work.least_bytes)
            summaries.append(f"batch {work.batch}: {flops or 'no products'}, at least {least}")
        return write_records(out, counted, "; ".join(summaries))


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
        if profile.total_ms is None or profile.unattributed_share is None:
            return write_records(out, [profile], profile.reasons["total_ms"], incomplete=profile.failure is not None)
        known = f"{1 - profile.unattributed_share:.0%} of it on modules"
        return write_records(out, [profile], f"{profile.total_ms:.3g} ms in operators at batch {batch}, {known}")
