"""How much each group of a torch module matters, as a task: the metric when it is pruned alone."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from enginesmith.pipeline import samples
from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.measure import fidelity, quality
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.pruning.options import PruneOptions
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, write_records
from enginesmith.pipeline.tasks.calibrate import Feeder, Feeding
from enginesmith.pipeline.tasks.prune import MODEL, TOOLS, gradients_over
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    from enginesmith.pipeline.pruning.record import GroupSensitivity
    from enginesmith.pipeline.torch_model import LoadedModel

_ROWS = 64
"""Samples at a time."""
METRIC = "top1"
SQNR = "sqnr_db"
"""The metric where the samples have no labels: the signal-to-noise ratio against the model as it is."""


class PruneSensitivity(Task):
    """For each group and a few ratios the task's metric on samples; or how far the answers are off, without labels."""

    title: ClassVar[str] = "prune-sensitivity"
    produces: ClassVar[Kind] = "record"

    options: PruneOptions = PruneOptions()
    feeder: Feeder
    metric: str = METRIC
    """Looked at where the samples have labels."""
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75)
    seed: int = 0

    @property
    def tools(self) -> tuple[str, ...]:
        return TOOLS

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Scan all groups that can be pruned.

        Raises:
            ModelError: there are none, or the metric is not finite.
            DataError: the samples cannot be used.
        """
        from enginesmith.pipeline import saved_module
        from enginesmith.pipeline.pruning import pruner, ranking, sensitivity

        loaded = saved_module.load_artifact(inputs[MODEL])
        feeding, reads = self.feeder.open(inputs[MODEL], inputs.get("reference", inputs[MODEL]))
        model, feeds = loaded.module.model, tuple(value.clone() for value in loaded.example.values())
        found = pruner.find(model, lambda: loaded.module(*feeds), self.options, progress)
        if self.options.importance == "taylor":
            gradients_over(loaded, feeding)()
        importance, none = ranking.rank(found.groups, self.options.importance, self.seed)
        groups = [group for group in found.groups if group.root in importance]
        if not groups:
            raise ModelError(f"no group can be ranked by {self.options.importance}: {next(iter(none.values()), '')}")
        judge = _Judge(loaded, feeding, self.metric)
        records = []
        for one in sensitivity.scan(model, groups, importance, self.ratios, self.options.multiple_of, judge):
            progress(_told(one))
            records.append(one)
        write_records(out, records)
        known = [one for one in records if one.value is not None]
        worst = min(known, key=lambda one: one.value or 0.0, default=None)
        told = f"; most sensitive {_told(worst)}" if worst else ""
        return Effect(
            file=RECORDS,
            summary=f"{len(groups)} groups, {len(records)} trials on {len(feeding.data)} samples{told}",
            notes=feeding.data.notes,
            reads=reads,
        )


def _told(one: "GroupSensitivity") -> str:
    value = f"{one.value:.4f}" if one.value is not None else one.reason
    return f"{one.group}: {one.metric} {value} without {one.ratio:.0%}"


class _Judge:
    """What the model answers to the samples, now and at first."""

    def __init__(self, loaded: "LoadedModel", feeding: Feeding, metric: str) -> None:
        self._loaded, self._feeding, self._metric = loaded, feeding, metric
        self._first = self._answers()

    def __call__(self) -> tuple[str, float | None, str]:
        answers, labels = self._answers(), self._feeding.data.labels
        if labels is not None:
            return self._metric, quality.evaluate(self._metric, answers, self._first, labels).value, ""
        found = fidelity.compare(self._first, answers, fidelity.thresholds_for("fp32"))
        return SQNR, found.sqnr_db, found.reasons.get("sqnr_db", "")

    def _answers(self) -> dict[str, Array]:
        import torch

        data, signature = self._feeding.data, self._loaded.signature
        size = min(_ROWS, len(data)) if samples.batch_symbol(signature) else samples.fixed_batch(signature)
        parts: list[tuple[Array, ...]] = []
        with torch.inference_mode():
            for start in range(0, len(data), size):
                feeds = data.batch(start, size)
                values = [torch.from_numpy(feeds[spec.name]) for spec in signature.inputs]
                parts.append(tuple(value.numpy() for value in self._loaded.module(*values)))
        names = [spec.name for spec in signature.outputs]
        return {name: np.concatenate([part[i] for part in parts])[: len(data)] for i, name in enumerate(names)}
