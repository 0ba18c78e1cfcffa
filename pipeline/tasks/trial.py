"""Builds that are made to see whether they can be made, and what they would take; the engine is thrown away."""

import tempfile
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.artifact import Artifact, Effect, Kind, file_digest
from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.errors import BuildError, WrongEngine
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, write_records
from enginesmith.pipeline.tasks.transform import Build


class TrialResult(BaseModel):
    """What came of a trial: figures where the engine was built, else the class of the failure and what was said."""

    model_config = ConfigDict(frozen=True)

    builds: bool
    failure: str = ""
    reason: str = ""
    remedy: str = ""
    facts: EngineFacts | None = None
    notes: tuple[str, ...] = ()


class Trial(Build):
    """A real build whose result is a record: that the builder refuses the graph is a result too."""

    title: ClassVar[str] = "trial"
    produces: ClassVar[Kind] = "record"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            found = self._try(inputs, Path(folder), progress)
        write_records(out, [found])
        return Effect(file=RECORDS, summary="it builds" if found.builds else f"{found.failure}: {found.reason}")

    def _try(self, inputs: Inputs, folder: Path, progress: Progress) -> TrialResult:
        try:
            effect = self.engine.build(self.request(inputs, folder, progress))
        except BuildError as error:
            return TrialResult(builds=False, failure=error.failure, reason=error.message, remedy=error.remedy)
        path = folder / effect.file
        made = Artifact(kind="engine", path=path, sha256=file_digest(path), bytes=path.stat().st_size)
        if effect.rejected:
            remedy = "export the model again, or use another precision or target"
            return TrialResult(builds=False, failure=WrongEngine.failure, reason=effect.rejected, remedy=remedy)
        return TrialResult(builds=True, facts=self.engine.facts(made), notes=effect.notes)
