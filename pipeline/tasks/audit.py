"""What a graph asks for, or an engine really runs, by precision."""

import tempfile
from pathlib import Path
from typing import ClassVar

from pydantic import SerializeAsAny

from enginesmith.pipeline import onnx_file, samples
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.precision.audit import coverage, shares
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, write_records


class Audit(Task):
    """Shares of work and weights by precision, of one sample with the other dynamic dimensions at their usual size."""

    title: ClassVar[str] = "audit"
    produces: ClassVar[Kind] = "record"

    engine: SerializeAsAny[Engine] | None = None
    """None for a graph that is still to be built."""
    device: Device = Device()

    @property
    def tools(self) -> tuple[str, ...]:
        return ("onnx", *(self.engine.tools if self.engine else ()))

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        sizes = _sizes(model, inputs["reference"])
        with tempfile.TemporaryDirectory(prefix="enginesmith-audit-") as scratch:
            path = self.engine.executed(model, self.device, Path(scratch)) if self.engine else model.path
            found = coverage.of(path, sizes, executed=self.engine is not None)
        write_records(out, [found])
        return Effect(file=RECORDS, summary=_told(found))


def _sizes(model: Artifact, reference: Artifact) -> dict[str, int]:
    sizes = {name: range_.opt for name, range_ in samples.read(reference.folder).ranges.items()}
    batch = samples.batch_symbol(model.signature or onnx_file.signature(model.path))
    return sizes | ({batch: 1} if batch else {})


def _told(found: shares.Coverage) -> str:
    parts = [f"multiply-adds {shares.words(found.macs)}", f"weights {shares.words(found.weights)}"]
    parts += [f"{found.qdq_pairs} Q/DQ pairs"] if found.qdq_pairs else []
    parts += [f"{found.islands} islands of low precision"] if found.islands else []
    parts += [f"{found.unknown_products} products of unknown size"] if found.unknown_products else []
    return "; ".join(parts)
