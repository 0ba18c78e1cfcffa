"""Pruning to a share of the latency on an engine: one task is one trial, and knows those before it."""

import json
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializeAsAny

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import BuildRequest, Device, Engine
from enginesmith.pipeline.errors import EmptyLayer, ModelError, UsageError
from enginesmith.pipeline.measure.candidate import Candidate
from enginesmith.pipeline.measure.latency import measure_latency
from enginesmith.pipeline.measure.race import LatencySettings
from enginesmith.pipeline.passes.base import Pass, Progress, run_pass
from enginesmith.pipeline.passes.export import Export
from enginesmith.pipeline.passes.simplify import Simplify
from enginesmith.pipeline.pruning.bisection import LatencyTrial, chosen, propose, told
from enginesmith.pipeline.pruning.target import Target
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, read_records, write_records
from enginesmith.pipeline.tasks.measure import logs_in_own_log, measured_feeds, this_machine
from enginesmith.pipeline.tasks.prune import MODEL, Prune
from enginesmith.pipeline.tasks.shapes import SHAPES, read_ranges

TRIALS = "latency-trials.json"
"""Beside the pruned model: what was tried, as :class:`~enginesmith.pipeline.pruning.bisection.LatencyTrial`."""
DENSE, BEFORE, REFERENCE = "dense", "before", "reference"
_LONGEST_SECONDS = 6.0
_UNSURE = "its latency was measured in too few rounds to know how exact it is; a longer --measure-time gives more"


class ToEngine(BaseModel):
    """The way from a module to the engine that its latency is measured on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: SerializeAsAny[Engine]
    device: Device
    export: Export = Export()
    simplify: bool = True

    @property
    def tools(self) -> tuple[str, ...]:
        """Distributions whose versions decide what comes out."""
        return (*self.export.tools, *self.engine.tools)

    def build(self, inputs: Inputs, model: Artifact, out: Path, progress: Progress) -> Effect:
        """The engine of a module in the folder ``out``; graphs on the way are thrown away."""
        passes: list[Pass] = [self.export]
        passes += [Simplify(external_data_bytes=self.export.external_data_bytes)] if self.simplify else []
        ranges = read_ranges(inputs[SHAPES]) if SHAPES in inputs else {}
        with tempfile.TemporaryDirectory(prefix="enginesmith-prune-") as scratch:
            graph = model
            for step in passes:
                place = Path(scratch, step.name)
                place.mkdir()
                effect = run_pass(step, graph, place, progress)
                graph = _artifact("onnx", place / effect.file, model)
            progress(f"building the {self.engine.name} engine")
            return self.engine.build(BuildRequest(graph, out, self.device, ranges, progress))


class DenseEngine(Task):
    """The engine of the module as it is, beside which those of the trials are measured."""

    title: ClassVar[str] = "build"
    produces: ClassVar[Kind] = "engine"

    way: ToEngine

    @property
    def tools(self) -> tuple[str, ...]:
        return self.way.tools

    @property
    def environment_key(self) -> dict[str, Any]:
        return self.way.engine.environment_key(self.way.device)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        return self.way.build(inputs, inputs[MODEL], out, progress)


class TryLatency(Task):
    """One more trial, unless the search is over; the record holds all trials so far."""

    title: ClassVar[str] = "search"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    prune: Prune
    """Options, and the share of the dense engine's latency that is to be removed."""
    way: ToEngine
    seconds: float = _LONGEST_SECONDS
    """The most that is measured for."""

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.prune.tools, *self.way.tools)))

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_machine()

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Try, if there is anything left to try.

        Raises:
            UsageError: the model cannot be pruned like that, however little.
            ModelError: it cannot be built or measured.
        """
        trials = _trials(inputs)
        share = propose(trials, self.prune.target.left)
        if share is None:
            summary = "the search is over"
        else:
            progress(f"{share:.1%} of MACs")
            trials.append(self._try(share, inputs, not trials, progress))
            summary = _told(trials[-1])
        write_records(out, trials)
        return Effect(file=RECORDS, summary=summary)

    def _try(self, share: float, inputs: Inputs, first: bool, progress: Progress) -> LatencyTrial:
        with tempfile.TemporaryDirectory(prefix="enginesmith-prune-") as scratch:
            small, engine = Path(scratch, "small"), Path(scratch, "engine")
            small.mkdir()
            engine.mkdir()
            try:
                effect = _to_macs(self.prune, share).run(inputs, small, progress)
            except UsageError as error:
                if first and not isinstance(error, EmptyLayer):
                    raise
                return LatencyTrial(macs_left=share, latency_left=None, reason=error.message)
            model = _artifact("torch", small / effect.file, inputs[MODEL])
            built = self.way.build(inputs, model, engine, progress)
            made = _artifact("engine", engine / built.file, model)
            return self._measured(share, made, inputs, progress)

    def _measured(self, share: float, made: Artifact, inputs: Inputs, progress: Progress) -> LatencyTrial:
        """Median latency at the first batch size, as a share of the dense engine's measured beside it."""
        batch, feeds = next(iter(measured_feeds(inputs[REFERENCE]).items()))
        candidates = [
            Candidate(name, self.way.engine, artifact, self.way.device)
            for name, artifact in ((DENSE, inputs[DENSE]), ("pruned", made))
        ]
        settings = LatencySettings(precision=0.02, time_limit_seconds=self.seconds, launches=1)
        with logs_in_own_log() as logs:
            rows = measure_latency(candidates, {batch: feeds}, settings, logs, progress).rows
        dense, pruned = rows[DENSE][0], rows["pruned"][0]
        if (faster := pruned.speedup) is not None:
            return LatencyTrial(
                macs_left=share, latency_left=1 / faster.median, low=1 / faster.high, high=1 / faster.low
            )
        if dense.p50_ms and pruned.p50_ms:  # in too few rounds for an interval
            return LatencyTrial(macs_left=share, latency_left=pruned.p50_ms / dense.p50_ms)
        why = dense.failure or pruned.failure or pruned.reasons.get("p50_ms", "")
        raise ModelError(f"the pruned model was not measured in {self.way.engine.name}: {why}", "allow more time")


class PruneToLatency(Prune):
    """The module of the trial that keeps the most among those that are fast enough."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Prune as in that trial, and write the trials down beside it.

        Raises:
            UsageError: no model that can be had is fast enough; the message names the fastest.
        """
        trials = _trials(inputs)
        best = chosen(trials, self.target.left)
        if best is None:
            raise UsageError(f"--prune {self.target} is not reached: {told(trials)}", "ask for less")
        effect = _to_macs(self, best.macs_left).run(inputs, out, progress)
        (out / TRIALS).write_text(json.dumps([one.model_dump(mode="json") for one in trials], indent=1) + "\n")
        summary = f"{effect.summary}; {best.latency_left:.1%} of the dense latency, in {len(trials)} trials"
        notes = (*effect.notes, *([] if best.high is not None else [_UNSURE]))
        return effect.model_copy(update={"summary": summary, "notes": notes})


def _to_macs(task: Prune, share: float) -> Prune:
    target = Target(kind="macs", value=1 - share)
    return Prune(target=target, options=task.options, feeder=task.feeder, seed=task.seed)


def _trials(inputs: Inputs) -> list[LatencyTrial]:
    return [LatencyTrial.model_validate(entry) for entry in read_records(inputs[BEFORE])] if BEFORE in inputs else []


def _told(trial: LatencyTrial) -> str:
    macs = f"{trial.macs_left:.1%} of MACs"
    return f"{macs}: {trial.reason or f'{trial.latency_left:.1%} of the dense latency'}"


def _artifact(kind: Kind, path: Path, like: Artifact) -> Artifact:
    return Artifact(kind=kind, path=path, sha256="", bytes=0, signature=like.signature)
