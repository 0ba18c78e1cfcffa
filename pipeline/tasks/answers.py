"""What a changed model answers to the feeds that the given one was asked with."""

from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import SerializeAsAny

from enginesmith.pipeline import samples
from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import Inputs, Task


class Answers(Task):
    """A reference for what is made of a pruned or sparse model: that was changed on purpose, its engines are not."""

    title: ClassVar[str] = "reference"
    produces: ClassVar[Kind] = "reference"

    engine: SerializeAsAny[Engine]

    @property
    def tools(self) -> tuple[str, ...]:
        return (*self.engine.tools, "numpy")

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        given = inputs["reference"].folder
        known = samples.read(given)
        with self.engine.load(inputs["model"], Device()) as session:
            for index, case in enumerate(known.cases):
                feeds = samples.read_arrays(given, "feeds", index)
                samples.write_arrays(out, "feeds", index, feeds)
                if not case.points:
                    continue
                progress(f"running the changed model at batch {case.batch}")
                outputs = session.run(feeds)
                before = samples.read_arrays(given, "outputs", index)
                for name, value in outputs.items():
                    if not _finite(value) and _finite(before[name]):
                        raise ModelError(
                            f"the changed model answers NaN or Inf in {name!r}, and the given one does not",
                            "prune less, or with other weights left",
                        )
                samples.write_arrays(out, "outputs", index, outputs)
        samples.write(out, known)
        return Effect(file=samples.RECORD, summary=f"{len(known.cases)} sets of feeds answered", notes=())


def _finite(value: np.ndarray) -> bool:
    return not np.issubdtype(value.dtype, np.floating) or bool(np.isfinite(value).all())
