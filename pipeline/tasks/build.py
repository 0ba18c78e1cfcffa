"""Make artifacts of artifacts: run passes and build engines, and audit what they made."""

import tempfile
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, SerializeAsAny

from enginesmith.pipeline.artifact import Artifact, Effect, Kind, file_digest
from enginesmith.pipeline.engines.base import BuildRequest, Engine, EngineFacts
from enginesmith.pipeline.engines.workspace import WorkspaceEngine
from enginesmith.pipeline.errors import BuildError, UsageError, WrongEngine
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import coverage, model_file
from enginesmith.pipeline.frameworks.records import describe_fallback, format_shares
from enginesmith.pipeline.passes.base import Pass, Progress
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Inputs, Task, write_records
from enginesmith.pipeline.tasks.load import read_ranges
from enginesmith.pipeline.tensors import ShapeRange
from enginesmith.pipeline.units import format_bytes

UNLIMITED = "unlimited"
"""Role of the engine that was built without a limit."""
SMALLEST = "smallest"
"""Role of the engine with the smallest limit, in a task that builds a point above it."""


class Refuse(Task):
    """Fail, for a variant that cannot be had as it was asked for."""

    title: ClassVar[str] = "refuse"
    produces: ClassVar[Kind] = "record"
    in_process: ClassVar[bool] = True
    tools: ClassVar[tuple[str, ...]] = ()

    reason: str

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        raise UsageError(self.reason, "omit --keep, or use an engine that runs a graph")


class Transform(Task):
    """Run one pass."""

    title: ClassVar[str] = "pass"
    produces: ClassVar[Kind] = "onnx"

    step: SerializeAsAny[Pass]

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        records = {role: artifact for role, artifact in inputs.items() if role != "model"}
        return run_pass(self.step, inputs["model"], out, progress, records)


class Build(Task):
    """Build an engine from a graph."""

    title: ClassVar[str] = "build"
    produces: ClassVar[Kind] = "engine"

    engine: SerializeAsAny[Engine]
    device: Device
    ranges: dict[str, ShapeRange] = Field(default_factory=dict)
    """Sizes that somebody asked for, for engines that are made from modules."""

    @property
    def identity(self) -> dict[str, Any]:
        identity = super().identity
        for name in self.engine.only_running:
            identity["fields"]["engine"].pop(name)
        return identity

    @property
    def gpus(self) -> Literal["", "one", "all"]:
        return "" if self.engine.built_ahead else super().gpus

    @property
    def times_kernels(self) -> bool:
        return self.engine.times_kernels

    @property
    def machine_specific(self) -> bool:
        return not self.engine.built_ahead

    @property
    def environment_key(self) -> dict[str, Any]:
        return self.engine.environment_key(self.device)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        progress(f"building the {self.engine.name} engine")
        return self.engine.build(self.request(inputs, out, progress))

    def request(self, inputs: Inputs, out: Path, progress: Progress) -> BuildRequest:
        """Make the engine's build request."""
        return BuildRequest(inputs["model"], out, self.device, {**self.ranges, **read_ranges(inputs)}, progress)


class Refit(Task):
    """Put new weights into a built engine."""

    title: ClassVar[str] = "refit"
    produces: ClassVar[Kind] = "engine"

    engine: SerializeAsAny[Engine]
    device: Device

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        progress("refitting the engine")
        return self.engine.refit(inputs["engine"], inputs["model"], out / inputs["engine"].path.name, self.device)


class TrialResult(BaseModel, frozen=True):
    """Report a trial: figures where the engine was built, else the class of the failure and what was said."""

    builds: bool
    failure: str = ""
    reason: str = ""
    remedy: str = ""
    remedy_of_trial: str = ""
    """Remedy for those who try several builds: without the advice to do that."""
    facts: EngineFacts | None = None
    notes: tuple[str, ...] = ()


class BuildProbe(Build):
    """Build an engine to see if it can be built, and what it takes; that the builder refuses is a result, too."""

    title: ClassVar[str] = "trial"
    produces: ClassVar[Kind] = "record"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            result = self._try(inputs, Path(folder), progress)
        return write_records(out, [result], "it builds" if result.builds else f"{result.failure}: {result.reason}")

    def _try(self, inputs: Inputs, folder: Path, progress: Progress) -> TrialResult:
        try:
            effect = self.engine.build(self.request(inputs, folder, progress))
        except BuildError as error:
            remedies = {"remedy": error.remedy, "remedy_of_trial": error.remedy_of_trial}
            return TrialResult(builds=False, failure=error.failure, reason=error.message, **remedies)
        if effect.rejected:
            remedy = "export the model again, or use another precision or target"
            remedies = {"remedy": remedy, "remedy_of_trial": remedy}
            return TrialResult(builds=False, failure=WrongEngine.failure, reason=effect.rejected, **remedies)
        path = folder / effect.file
        built = Artifact(kind="engine", path=path, sha256=file_digest(path), bytes=path.stat().st_size)
        return TrialResult(builds=True, facts=self.engine.facts(built), notes=effect.notes)


class BuildWithin(Build):
    """Build at one point of a sweep: the smallest limit that builds (point 0), or one above it on a log scale."""

    title: ClassVar[str] = "build"

    engine: SerializeAsAny[WorkspaceEngine]
    point: int
    points: int

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        effects: list[Effect] = []

        def build(limit: int) -> None:
            progress(f"building with a workspace of {format_bytes(limit)}")
            engine = self.engine.within(limit)
            effects.append(engine.build(self.request(inputs, out, progress)))

        unlimited = self.engine.facts(inputs[UNLIMITED])
        if self.point == 0:
            self.engine.smallest_workspace(build, unlimited)
        else:
            smallest = self.engine.facts(inputs[SMALLEST]).workspace_limit_bytes or 1
            build(self.engine.workspace_points(unlimited, smallest, self.points)[self.point])
        return effects[-1]


class Audit(Task):
    """Compute the shares of work and weights by precision, of a graph or of what an engine really runs.

    They are of one sample, with the other dynamic dimensions at their usual size.
    """

    title: ClassVar[str] = "audit"
    produces: ClassVar[Kind] = "record"
    other_tools: ClassVar[tuple[str, ...]] = ("onnx",)

    engine: SerializeAsAny[Engine] | None = None
    """None for a graph that is still to be built."""
    device: Device = Device()

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        sizes = {name: range_.opt for name, range_ in samples.read(inputs["reference"].folder).ranges.items()}
        if batch := samples.batch_symbol(model.signature or model_file.signature(model.path)):
            sizes[batch] = 1
        with tempfile.TemporaryDirectory(prefix="enginesmith-audit-") as scratch:
            path = self.engine.executed(model, self.device, Path(scratch)) if self.engine else model.path
            covered = coverage.compute_coverage(path, sizes, executed=self.engine is not None)
        if self.engine:
            covered = covered.model_copy(update={"assigned": self.engine.assign_nodes(model, self.device)})
        parts = [f"multiply-adds {format_shares(covered.macs)}", f"weights {format_shares(covered.weights)}"]
        counts = {
            "Q/DQ pairs": covered.qdq_pairs,
            "separate low-precision parts": covered.islands if covered.islands > 1 else 0,
            "products of unknown size": covered.unknown_products,
        }
        parts += [f"{count} {what}" for what, count in counts.items() if count]
        return write_records(
            out,
            [covered],
            "; ".join(filter(None, (*parts, describe_fallback(covered.assigned, covered.copies)))),
        )
