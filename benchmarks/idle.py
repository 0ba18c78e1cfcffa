"""A task that does nothing, for what is done around tasks to be measured."""

from pathlib import Path
from typing import ClassVar

from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import Inputs, Task


class Nothing(Task):
    """Writes its number."""

    title: ClassVar[str] = "nothing"
    produces: ClassVar[Kind] = "record"
    in_process: ClassVar[bool] = True

    number: int

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        (out / "number").write_text(str(self.number))
        return Effect(file="number", summary="nothing was done")


class NothingAlone(Nothing):
    """Writes its number in a process of its own."""

    in_process: ClassVar[bool] = False
