"""Limits of the hardware as tasks: what the device can do at best, and what a model asks of it."""

import tempfile
from pathlib import Path
from typing import Any, ClassVar

from pydantic import SerializeAsAny

from enginesmith.pipeline import samples
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.measure import device as devices
from enginesmith.pipeline.measure.limits import measure_limits
from enginesmith.pipeline.measure.rows import DeviceLimits, Work
from enginesmith.pipeline.measure.work import count_work
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, read_records, write_records
from enginesmith.pipeline.units import format_bytes, format_si


class DeviceRates(Task):
    """What a device can do at best; measured once on a machine, with nothing beside it."""

    title: ClassVar[str] = "limits"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    device: Device
    again: str = ""
    """Something new each time, for a measurement that must not be taken from the store."""

    @property
    def tools(self) -> tuple[str, ...]:
        return ("torch", "onnxruntime", "onnxruntime-gpu")

    @property
    def environment_key(self) -> dict[str, Any]:
        return {"machine": devices.fingerprint(devices.environment())}

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        found = measure_limits(self.device, progress)
        write_records(out, [found])
        notes = (*found.warnings, *(f"{name}: {why}" for name, why in found.reasons.items()))
        return Effect(file=RECORDS, summary=_told(found), notes=notes)


class CountWork(Task):
    """What one inference has to do, at each measured batch size.

    Of an engine that shows the graph that it runs, that one is counted; for another engine, "model" is an ONNX graph
    of the same model that stands in for what it makes of it.
    """

    title: ClassVar[str] = "work"
    produces: ClassVar[Kind] = "record"

    engine: SerializeAsAny[Engine]
    device: Device

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "engine": {"engine": self.engine.name, **self.engine.model_dump()}}

    @property
    def tools(self) -> tuple[str, ...]:
        return ("onnx", *self.engine.tools)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model, shown = inputs["model"], self.engine.shows_graph
        cases = [case for case in samples.read(inputs["reference"].folder).cases if case.measured]
        with tempfile.TemporaryDirectory(prefix="enginesmith-work-") as scratch:
            path = self.engine.executed(model, self.device, Path(scratch)) if shown else model.path
            found = [
                count_work(path, case.sizes, case.batch, executed=shown, arithmetic=self.engine.arithmetic)
                for case in cases
            ]
        write_records(out, found)
        return Effect(file=RECORDS, summary="; ".join(_told_work(work) for work in found))


def read_limits(record: Artifact) -> DeviceLimits:
    """What :class:`DeviceRates` wrote."""
    return DeviceLimits.model_validate(read_records(record)[0])


def read_work(record: Artifact) -> dict[int, Work]:
    """What :class:`CountWork` wrote, by batch size."""
    return {work.batch: work for work in map(Work.model_validate, read_records(record))}


def _told(found: DeviceLimits) -> str:
    bandwidth = found.memory_bandwidth
    parts = [f"memory {format_si(bandwidth.per_second, 'B/s')}"] if bandwidth else []
    parts += [f"{name} {format_si(rate.per_second, 'FLOP/s')}" for name, rate in found.products.items()]
    return ", ".join(parts) or "nothing could be measured"


def _told_work(work: Work) -> str:
    flops = " + ".join(f"{format_si(count, 'FLOP')} in {name}" for name, count in work.flops.items()) or "no products"
    return f"batch {work.batch}: {flops}, at least {format_bytes(work.least_bytes)}"
