"""Profiling as a task: where one variant's time goes, at one batch size."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny

from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.candidate import Candidate
from enginesmith.pipeline.measure.profile import measure_profile
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, write_records
from enginesmith.pipeline.tasks.measure import logs_in_own_log, measured_feeds, this_machine

GRAPH = "graph"
"""Role of the ONNX graph that the engine was built from, whose nodes say which module they came from."""


class ProfileVariant(Task):
    """Time by module of one variant; takes its ``model``, the ``reference``, and the ``graph`` where there is one."""

    title: ClassVar[str] = "profile"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    variant: str
    engine: SerializeAsAny[Engine]
    device: Device
    batch: int | None = None
    """One of the measured batch sizes; None for the smallest."""
    calls: int = Field(20, ge=1)
    """Inferences that are profiled."""
    again: str = ""
    """Something new each time, for a measurement that must not be taken from the store."""

    @property
    def tools(self) -> tuple[str, ...]:
        return ("onnx", *self.engine.tools)

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_machine()

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        feeds = measured_feeds(inputs["reference"])
        batch = min(feeds) if self.batch is None else self.batch
        if batch not in feeds:
            raise UsageError(f"batch {batch} is not measured", f"take one of {', '.join(map(str, feeds))}")
        model = inputs["model"]
        graph = inputs.get(GRAPH) or (model if model.kind == "onnx" else None)
        candidate = Candidate(self.variant, self.engine, model, self.device)
        with logs_in_own_log() as logs:
            found = measure_profile(
                candidate, batch, feeds[batch], graph.path if graph else None, self.calls, logs, progress
            )
        write_records(out, [found])
        if found.total_ms is None or found.unattributed_share is None:
            return Effect(file=RECORDS, summary=found.reasons["total_ms"], incomplete=found.failure is not None)
        known = f"{1 - found.unattributed_share:.0%} of it on modules"
        return Effect(file=RECORDS, summary=f"{found.total_ms:.3g} ms in operators at batch {batch}, {known}")
