"""Builds under workspace limits that only a build without one can tell."""

from pathlib import Path
from typing import ClassVar

from pydantic import SerializeAsAny

from enginesmith.pipeline.artifact import Effect
from enginesmith.pipeline.engines.base import WorkspaceEngine
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import Inputs
from enginesmith.pipeline.tasks.transform import Build
from enginesmith.pipeline.units import format_bytes

UNLIMITED = "unlimited"
"""Role of the engine that was built without a limit."""
SMALLEST = "smallest"
"""Role of the engine with the smallest limit, in a task that builds a point above it."""


class BuildWithin(Build):
    """One point of a sweep: the smallest limit that builds (point 0), or one above it on a log scale."""

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
