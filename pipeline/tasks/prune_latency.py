"""Pruning to a share of the latency on an engine: a few models are pruned, built and measured against the dense one."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import BuildRequest, Device, Engine
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.measure.latency import measure_latency
from enginesmith.pipeline.measure.race import Candidate, LatencySettings
from enginesmith.pipeline.passes.base import Progress, run_pass
from enginesmith.pipeline.passes.export import Export
from enginesmith.pipeline.passes.simplify import Simplify
from enginesmith.pipeline.pruning.target import Target
from enginesmith.pipeline.tasks.base import Inputs
from enginesmith.pipeline.tasks.measure import logs_in_own_log, measured_feeds, this_machine
from enginesmith.pipeline.tasks.prune import MODEL, Prune
from enginesmith.pipeline.tasks.shapes import SHAPES, read_ranges

TRIALS = "latency-trials.json"
"""Beside the pruned model: what was tried, as :class:`LatencyTrial`."""
_SETTINGS = LatencySettings(precision=0.02, time_limit_seconds=6.0, launches=1)
_CLOSE = 0.02
"""A trial that is met by no more than this share ends the search."""
_LEAST_MACS, _FINEST = 0.05, 0.01


class LatencyTrial(BaseModel):
    """One trial: the MACs that were left, and the latency as a share of the dense model's."""

    model_config = ConfigDict(frozen=True)

    macs_left: float
    latency_left: float | None
    reason: str = ""
    """Why there is no latency."""


class PruneToLatency(Prune):
    """A module whose engine takes a share of the dense one's latency, found by bisection over the MACs left."""

    produces: ClassVar[Kind] = "torch"
    exclusive: ClassVar[bool] = True

    engine: SerializeAsAny[Engine]
    device: Device
    export: Export = Export()
    simplify: bool = True
    trials: int = Field(6, ge=1, le=16)

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().tools, *self.export.tools, *self.engine.tools)))

    @property
    def surroundings(self) -> dict[str, Any]:
        return this_machine()

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Try, and write down the trial that takes the most of the time that is allowed.

        Raises:
            UsageError: no model that can be had is fast enough; the message names the fastest.
            ModelError: the dense model cannot be built or measured.
        """
        with tempfile.TemporaryDirectory(prefix="enginesmith-prune-") as scratch:
            found, effects = self._search(inputs, Path(scratch), progress)
            chosen = max(
                (one for one in found if one.latency_left is not None and one.latency_left <= self._most),
                key=lambda one: one.macs_left,
                default=None,
            )
            if chosen is None:
                raise UsageError(f"--prune {self.target} is not reached: {_told(found)}", "ask for less")
            index = found.index(chosen)
            shutil.copytree(Path(scratch, f"pruned-{index}"), out, dirs_exist_ok=True)
        (out / TRIALS).write_text(json.dumps([one.model_dump(mode="json") for one in found], indent=1) + "\n")
        summary = f"{effects[index].summary}; {chosen.latency_left:.1%} of the dense latency in {self.engine.name}"
        return effects[index].model_copy(update={"summary": f"{summary}, {len(found)} trials"})

    @property
    def _most(self) -> float:
        return self.target.value * (1 + _CLOSE)

    def _search(
        self, inputs: Inputs, scratch: Path, progress: Progress
    ) -> tuple[list[LatencyTrial], dict[int, Effect]]:
        dense = self._built(inputs, inputs[MODEL], scratch / "dense", progress)
        found: list[LatencyTrial] = []
        effects: dict[int, Effect] = {}
        low, high, macs = _LEAST_MACS, 1.0, self.target.value
        while len(found) < self.trials and high - low > _FINEST:
            progress(f"trial {len(found) + 1}: {macs:.1%} of MACs")
            trial, effect = self._try(macs, dense, inputs, scratch, len(found), progress)
            if effect is not None:
                effects[len(found)] = effect
            found.append(trial)
            left = trial.latency_left
            if left is not None and (1 - _CLOSE) * self.target.value <= left <= self._most:
                break
            fast = left is not None and left < self.target.value
            if effect is None or fast:
                low = macs
            else:
                high = macs
            macs = (low + high) / 2
        return found, effects

    def _try(
        self, macs: float, dense: Artifact, inputs: Inputs, scratch: Path, index: int, progress: Progress
    ) -> tuple[LatencyTrial, Effect | None]:
        folder = scratch / f"pruned-{index}"
        folder.mkdir()
        try:
            target = Target(kind="macs", value=round(macs, 4))
            once = Prune(target=target, options=self.options, feeder=self.feeder, seed=self.seed)
            effect = once.run(inputs, folder, progress)
        except UsageError as error:
            if index == 0 and "empty a layer" not in error.message:
                raise
            return LatencyTrial(macs_left=macs, latency_left=None, reason=error.message), None
        model = _artifact("torch", folder / effect.file, inputs[MODEL])
        made = self._built(inputs, model, scratch / f"engine-{index}", progress)
        return LatencyTrial(macs_left=macs, latency_left=self._share(dense, made, inputs, progress)), effect

    def _built(self, inputs: Inputs, model: Artifact, folder: Path, progress: Progress) -> Artifact:
        if self.engine.consumes == "torch":
            return model
        steps = [
            self.export,
            *([Simplify(external_data_bytes=self.export.external_data_bytes)] if self.simplify else []),
        ]
        for step in steps:
            place = folder / step.name
            place.mkdir(parents=True)
            effect = run_pass(step, model, place, progress)
            model = _artifact("onnx", place / effect.file, inputs[MODEL])
        place = folder / "engine"
        place.mkdir()
        ranges = read_ranges(inputs[SHAPES]) if SHAPES in inputs else {}
        built = self.engine.build(BuildRequest(model, place, self.device, ranges, progress))
        return _artifact("engine", place / built.file, inputs[MODEL])

    def _share(self, dense: Artifact, made: Artifact, inputs: Inputs, progress: Progress) -> float:
        """Median latency at the first batch size, as a share of the dense engine's measured beside it."""
        batch, feeds = next(iter(measured_feeds(inputs["reference"]).items()))
        contenders = [
            Candidate(name, self.engine, artifact, self.device)
            for name, artifact in (("dense", dense), ("pruned", made))
        ]
        with logs_in_own_log() as logs:
            row = measure_latency(contenders, {batch: feeds}, _SETTINGS, logs, progress).rows["pruned"][0]
        if row.speedup is None:
            raise ModelError(
                f"the pruned model could not be measured in {self.engine.name}", "look at the step's log for why"
            )
        return 1 / row.speedup.median


def _told(found: list[LatencyTrial]) -> str:
    known = [one for one in found if one.latency_left is not None]
    if not known:
        return found[-1].reason
    best = min(known, key=lambda one: one.latency_left or 1.0)
    return f"the fastest of {len(found)} trials takes {best.latency_left:.1%} with {best.macs_left:.1%} of the MACs"


def _artifact(kind: Kind, path: Path, like: Artifact) -> Artifact:
    return Artifact(kind=kind, path=path, sha256="", bytes=0, signature=like.signature)
