"""Measurements as tasks: latency of all variants together, memory of each alone."""

import contextlib
import datetime
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny

from enginesmith.pipeline import samples
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.measure import device as devices
from enginesmith.pipeline.measure.batches import BatchSweep, FeedsAt
from enginesmith.pipeline.measure.candidate import Candidate
from enginesmith.pipeline.measure.latency import LatencyBenchmark
from enginesmith.pipeline.measure.memory import measure_memory
from enginesmith.pipeline.measure.race import LatencySettings
from enginesmith.pipeline.measure.rows import SAMPLES
from enginesmith.pipeline.measure.used_memory import available_bytes
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, write_records
from enginesmith.pipeline.tensors import Array, Feeds
from enginesmith.pipeline.units import format_bytes

_SHARE_OF_FREE = 0.8
ENVIRONMENT = "environment.json"
"""The machine as it was when latency was measured, which may have been in an earlier run."""
VERIFIED = "verified"
"""Role of the record that a variant's numbers are right: ``V verified`` for the variant V."""


class Latency(Task):
    """Latency of all variants, interleaved; the first one is the baseline."""

    title: ClassVar[str] = "latency"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    engines: dict[str, SerializeAsAny[Engine]]
    """By variant, whose artifact comes in under the same name; one without an artifact is left out."""
    device: Device
    settings: LatencySettings
    dense: dict[str, str]
    """By pruned or sparse variant, the one that differs from it in nothing else."""
    batches: int = Field(1, exclude=True)
    """Batch sizes that are measured, which the reference brings; no part of what is measured."""
    most: int | None = None
    """The largest batch size of a sweep; None is no sweep."""
    again: str = ""
    """Something new each time, for a measurement that must not be taken from the store."""

    @property
    def identity(self) -> dict[str, Any]:
        engines = {name: {"engine": engine.name, **engine.model_dump()} for name, engine in self.engines.items()}
        return {**super().identity, "engines": engines}

    @property
    def expected_seconds(self) -> float | None:
        return self.batches * self.settings.time_limit_seconds if self.most is None else None

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tool for engine in self.engines.values() for tool in engine.tools))

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_machine()

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        candidates = [
            Candidate(name, engine, inputs[name], self.device)
            for index, (name, engine) in enumerate(self.engines.items())
            if name in inputs and (index == 0 or f"{name} {VERIFIED}" in inputs)
        ]
        feeds, settings = measured_feeds(inputs["reference"]), self._settings()
        machine = devices.environment()  # before the measurement itself makes the machine busy
        with logs_in_own_log() as logs, LatencyBenchmark(candidates, settings, logs, progress, self.dense) as benchmark:
            for batch, arrays in sorted(feeds.items()):
                benchmark.measure(batch, arrays)
            larger = _larger(inputs["reference"], inputs[candidates[0].id])
            if larger is not None:
                BatchSweep(benchmark, candidates, larger, settings, logs, progress).run(max(feeds), self.most)
            result = benchmark.result()
            machine = _with_warnings(machine, devices.interference(machine, devices.environment()))
        (out / ENVIRONMENT).write_text(machine.model_dump_json(indent=1))
        measured_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        rows = [
            {"variant": name, "measured_at": measured_at, "row": row.model_dump(mode="json")}
            for name, rows in result.rows.items()
            for row in rows
        ]
        write_records(out, rows)
        np.savez_compressed(out / SAMPLES, **result.samples)  # type: ignore[arg-type]
        failed = [f"{name} failed" for name, rows in result.rows.items() if any(row.failure for row in rows)]
        measured = sorted({row.batch for rows in result.rows.values() for row in rows})
        summary = f"{len(candidates)} variants at batch {', '.join(map(str, measured))}"
        return Effect(file=RECORDS, summary="; ".join([summary, *failed]), incomplete=bool(failed))

    def _settings(self) -> LatencySettings:
        """A sweep on the CPU has a limit in any case: without one the kernel would end other processes, too."""
        limit = self.settings.memory_limit_bytes
        if self.most is None or limit is not None:
            return self.settings
        return self.settings.model_copy(update={"memory_limit_bytes": _within_free(limit, self.device)})


def _within_free(limit_bytes: int | None, device: Device) -> int | None:
    """Lower a limit on the CPU to a share of the memory that is free, so that the kernel ends no other process."""
    free = available_bytes() if device.kind == "cpu" else None
    if free is None:
        return limit_bytes
    share = int(_SHARE_OF_FREE * free)
    return share if limit_bytes is None else min(limit_bytes, share)


class Memory(Task):
    """Peak memory of one variant at one batch size."""

    title: ClassVar[str] = "memory"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    engine: SerializeAsAny[Engine]
    device: Device
    batch: int | None = None
    """None is the largest one that is measured."""
    limit_bytes: int | None = None
    """What the session may take besides libraries."""
    time_limit_seconds: float = Field(900.0, exclude=True)
    """No part of what is measured."""
    again: str = ""
    """As in :class:`Latency`."""

    @property
    def tools(self) -> tuple[str, ...]:
        return self.engine.tools

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_machine()

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        feeds: Feeds
        batch, feeds = max(measured_feeds(inputs["reference"]).items(), key=lambda item: item[0])
        limit = self.limit_bytes
        if self.batch is not None and (feeds_at := _larger(inputs["reference"], inputs["model"])):
            batch, feeds = self.batch, feeds_at(self.batch)
            limit = _within_free(limit, self.device)
        candidate = Candidate(self.engine.name, self.engine, inputs["model"], self.device)
        with logs_in_own_log() as logs:
            limits = self.time_limit_seconds, limit
            row = measure_memory(candidate, batch, feeds, logs, progress, *limits)
        write_records(out, [row])
        peak = format_bytes(row.peak_bytes) if row.peak_bytes is not None else row.reasons["peak_bytes"]
        return Effect(file=RECORDS, summary=f"peak {peak} at batch {batch}", incomplete=row.failure is not None)


@functools.cache
def this_machine() -> dict[str, Any]:
    """What decides how fast things run here."""
    return {"machine": devices.fingerprint(devices.environment())}


def measured_feeds(reference: Artifact) -> dict[int, dict[str, Array]]:
    """Feeds by batch size."""
    cases = enumerate(samples.read(reference.folder).cases)
    return {case.batch: samples.read_arrays(reference.folder, "feeds", index) for index, case in cases if case.measured}


def _with_warnings(machine: devices.Environment, more: tuple[str, ...]) -> devices.Environment:
    return machine.model_copy(update={"warnings": tuple(dict.fromkeys((*machine.warnings, *more)))})


def _larger(reference: Artifact, model: Artifact) -> FeedsAt | None:
    """Feeds of any batch size, made of those of the largest measured one; None where the batch is fixed."""
    assert model.signature is not None
    signature, symbol = model.signature, samples.batch_symbol(model.signature)
    if symbol is None:
        return None
    cases = enumerate(samples.read(reference.folder).cases)
    index, case = max(((index, case) for index, case in cases if case.measured), key=lambda found: found[1].batch)
    known = samples.read_arrays(reference.folder, "feeds", index)
    return lambda batch: samples.resized(known, signature, {**case.sizes, symbol: batch})


@contextlib.contextmanager
def logs_in_own_log() -> Iterator[Path]:
    """A folder for the logs of processes below this one; what they wrote ends up in this one's log."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        finally:
            for log in sorted(Path(folder).iterdir()):
                sys.stderr.write(f"--- {log.stem}\n{log.read_text(errors='replace')}")
