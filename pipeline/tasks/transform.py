"""From artifact to artifact: passes and engine builds."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import SerializeAsAny

from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.engines.base import BuildRequest, Device, Engine
from enginesmith.pipeline.passes.base import Pass, Progress, run_pass
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tasks.shapes import SHAPES, read_ranges


class Transform(Task):
    """One pass."""

    title: ClassVar[str] = "pass"
    produces: ClassVar[Kind] = "onnx"

    step: SerializeAsAny[Pass]

    @property
    def tools(self) -> tuple[str, ...]:
        return self.step.tools

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        records = {role: artifact for role, artifact in inputs.items() if role != "model"}
        return run_pass(self.step, inputs["model"], out, progress, records)


class Build(Task):
    """An engine from a graph."""

    title: ClassVar[str] = "build"
    produces: ClassVar[Kind] = "engine"

    engine: SerializeAsAny[Engine]
    device: Device

    @property
    def identity(self) -> dict[str, Any]:
        found = super().identity
        for name in self.engine.only_running:
            found["fields"]["engine"].pop(name)
        return found

    @property
    def tools(self) -> tuple[str, ...]:
        return self.engine.tools

    @property
    def gpus(self) -> Literal["", "one", "all"]:
        return "" if self.engine.built_ahead else super().gpus

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
        """What the engine is handed."""
        ranges = read_ranges(inputs[SHAPES]) if SHAPES in inputs else {}
        return BuildRequest(inputs["model"], out, self.device, ranges, progress)


class Refit(Task):
    """New weights into a built TensorRT engine."""

    title: ClassVar[str] = "refit"
    produces: ClassVar[Kind] = "engine"

    device: Device

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        from enginesmith.pipeline.engines.trt.refit import refit

        progress("refitting the engine")
        return refit(inputs["engine"], inputs["model"], out / inputs["engine"].path.name, self.device)
