"""The task's metric as a task: one variant on labelled data, against the baseline on the same samples."""

from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import SerializeAsAny

from enginesmith.calibration.dataset import Dataset
from enginesmith.calibration.options import DataOptions
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import Device, Engine, Session
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.measure import quality
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.samples import batch_symbol, fixed_batch
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, write_records
from enginesmith.pipeline.tasks.compare import open_data
from enginesmith.pipeline.tensors import Array
from enginesmith.pipeline.watch import track_files

BASELINE = "baseline"
_OUTPUTS = "outputs.npz"
_DEFAULT_METRIC = "top1"
_TOGETHER_BYTES = 32 << 20


class Quality(Task):
    """The task's metric of one variant on labelled data, against the baseline on the same samples."""

    title: ClassVar[str] = "quality"
    produces: ClassVar[Kind] = "record"

    engine: SerializeAsAny[Engine]
    device: Device
    data: str
    data_options: DataOptions
    samples: int | None
    metric: str | None
    """None where nobody asked for one: then data without labels is no error."""
    batch: int
    """The largest batch that is measured: sessions take it."""
    largest_batch: int
    """What sessions may be given: at that most, and within 32 MiB of inputs, samples are judged together."""
    seed: int

    @property
    def tools(self) -> tuple[str, ...]:
        return (*self.engine.tools, "numpy")

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        with self.engine.load(inputs["model"], self.device) as session:
            found, outputs, reads = self.judge(session, inputs.get(BASELINE), progress)
        if found is None:
            write_records(out, [])
            return Effect(file=RECORDS, summary="the data has no labels, so there is no quality", reads=reads)
        np.savez(out / _OUTPUTS, **outputs)  # type: ignore[arg-type]
        write_records(out, [found])
        summary = f"{found.metric} {found.value:.4f} on {found.samples} samples"
        return Effect(file=RECORDS, summary=summary, reads=reads)

    def judge(
        self, session: Session, baseline: Artifact | None, progress: Progress
    ) -> tuple[quality.Quality | None, dict[str, Array], tuple[Path, ...]]:
        """The metric of a session against an artifact of this task, or against itself; its answers; the files read.

        Raises:
            DataError: a metric was asked for, and the data has no labels.
        """
        data, reads = open_data(self.data, session.signature.inputs, self.samples, self.seed, self.data_options)
        if data.labels is None and self.metric:
            raise DataError(
                f"{data.name} has no labels, and the metric {self.metric} needs them",
                "name the array that holds them with --labels KEY",
            )
        if data.labels is None:
            return None, {}, reads
        outputs = self._answers(session, data, progress)
        theirs = outputs
        if baseline is not None:
            with np.load(baseline.folder / _OUTPUTS, allow_pickle=False) as stored:
                theirs = dict(stored.items())
        metric = self.metric or _DEFAULT_METRIC
        with track_files(allow_pickle=False) as tracker:
            found = quality.evaluate(metric, outputs, theirs, data.labels, self.seed)
        return found, outputs, reads if metric in quality.METRICS else (*reads, *sorted(tracker.files))

    def _answers(self, session: Session, data: Dataset, progress: Progress) -> dict[str, Array]:
        """Outputs for every sample, in batches of one size; the last one wraps round and is cut."""
        parts: list[dict[str, Array]] = []
        size = self._batch_size(data) if batch_symbol(session.signature) else fixed_batch(session.signature)
        for start in range(0, len(data), size):
            progress(f"{start} of {len(data)} samples")
            parts.append(session.run(data.batch(start, size)))
        return {name: np.concatenate([part[name] for part in parts])[: len(data)] for name in parts[0]}

    def _batch_size(self, data: Dataset) -> int:
        """Choose how many samples are judged together, for sessions that take any batch up to the largest."""
        row_bytes = sum(array.nbytes for array in data.batch(0, 1).values())
        fitting = min(self.largest_batch, _TOGETHER_BYTES // max(row_bytes, 1), len(data))
        return max(self.batch, fitting)
