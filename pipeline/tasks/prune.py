"""Structured pruning of a torch module, as a task: it may look at calibration data."""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializeAsAny

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import BuildRequest, Candidate, Engine
from enginesmith.pipeline.errors import EmptyLayer, ModelError, UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.records import PrunedGroup, PruningFacts
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import measure_latency
from enginesmith.pipeline.passes.base import Pass, Progress
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, read_records, write_records
from enginesmith.pipeline.tasks.calibrate import Feeder, Feeding
from enginesmith.pipeline.tasks.load import SHAPES, read_ranges
from enginesmith.pipeline.tasks.measure import logs_in_own_log, measured_feeds, this_machine

if TYPE_CHECKING:
    from enginesmith.pipeline.frameworks.torch.module import LoadedModel
    from enginesmith.pipeline.passes.prune.prune import Pruned
    from enginesmith.pipeline.passes.prune.selection import Sample


MODEL = "model"
FACTS = "pruning.json"
"""Beside the pruned model: what was done, as :class:`~enginesmith.pipeline.frameworks.records.PruningFacts`."""
TOOLS = ("torch", "torch-pruning", "numpy")


class Prune(Task):
    """A smaller module: whole channels, hidden units and heads are gone, and it runs as before."""

    title: ClassVar[str] = "prune"
    produces: ClassVar[Kind] = "torch"

    target: PruneTarget
    options: PruneOptions = PruneOptions()
    feeder: Feeder | None = None
    """Where samples come from for ``taylor``."""
    seed: int = 0
    """Of random importance."""

    @property
    def tools(self) -> tuple[str, ...]:
        return TOOLS

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Prune, hold what came out against the signature, and write it down.

        Raises:
            UsageError: the target cannot be met, a protected layer is not there, or ``taylor`` has no data.
            ModelError: the module's values cannot be followed, or the pruned module does not run.
        """
        from enginesmith.pipeline.frameworks.torch import saved

        loaded = saved.load_artifact(inputs[MODEL])
        done, notes, reads = pruned(self, inputs, loaded, progress)
        hold_runs(loaded)
        progress("writing")
        saved.save_changed(inputs[MODEL], loaded, out, done.surgery)
        facts = _facts(self, loaded, done)
        (out / FACTS).write_text(facts.model_dump_json(indent=1) + "\n")
        return Effect(
            file=saved.RECORD,
            summary=summary(facts),
            notes=notes,
            signature=loaded.signature,
            reads=reads,
        )


def read_facts(artifact: Artifact) -> PruningFacts:
    """Read what was done to make a pruned model."""
    return PruningFacts.model_validate_json((artifact.folder / FACTS).read_bytes())


def pruned(
    task: Prune, inputs: Inputs, loaded: "LoadedModel", progress: Progress
) -> "tuple[Pruned, tuple[str, ...], tuple[Path, ...]]":
    """Prune a loaded module in place; notes on the data, and the files that it was read from."""
    from enginesmith.pipeline.passes.prune import prune

    feeding: Feeding | None = None
    reads: tuple[Path, ...] = ()
    gradients = None
    if task.options.importance == "taylor":
        feeding, reads = _feeding(task, inputs)
        gradients = gradients_over(loaded, feeding)
    feeds = tuple(value.clone() for value in loaded.example.values())
    done = prune.prune(
        loaded.module.model,
        lambda: loaded.module(*feeds),
        task.target,
        task.options,
        seed=task.seed,
        gradients=gradients,
        progress=progress,
    )
    for parameter in loaded.module.model.parameters():
        parameter.grad = None
    return done, (*done.notes, *(feeding.data.notes if feeding else ())), reads


def _feeding(task: Prune, inputs: Inputs) -> tuple[Feeding, tuple[Path, ...]]:
    if task.feeder is None or task.feeder.data is None:
        raise UsageError(
            "importance by taylor needs samples, and there are none", "give some with --data DATA, or rank by l2"
        )
    return task.feeder.open(inputs[MODEL], inputs[MODEL])  # a reference is looked at only where there is no data


def gradients_over(loaded: "LoadedModel", feeding: Feeding) -> Callable[[], None]:
    from enginesmith.pipeline.passes.prune import selection

    return lambda: selection.collect_gradients(loaded.module.model, loaded.module, _samples(loaded, feeding))


def _samples(loaded: "LoadedModel", feeding: Feeding) -> "Iterator[Sample]":
    import torch

    data, size = feeding.data, feeding.provenance.batch
    for index, feeds in enumerate(feeding):
        values = tuple(torch.from_numpy(feeds[spec.name]) for spec in loaded.signature.inputs)
        rows = [row % len(data) for row in range(index * size, (index + 1) * size)]
        yield values, None if data.labels is None else torch.as_tensor(data.labels[rows])


def hold_runs(loaded: "LoadedModel") -> None:
    """Insist on a module that runs at its example's batch size and at another one.

    Raises:
        ModelError: it does not; the message says in which module.
    """
    import torch

    from enginesmith.pipeline.passes.prune import dependency_graph

    symbol, sizes = samples.batch_symbol(loaded.signature), loaded.dynamic_sizes
    tried = [sizes, *([{**sizes, symbol: sizes[symbol] + 1}] if symbol in sizes else [])]
    example = {name: value.numpy() for name, value in loaded.example.items()}
    for one in tried:
        feeds = [torch.from_numpy(value) for value in samples.resize(example, loaded.signature, one).values()]
        _, why = dependency_graph.run_or_explain(loaded.module.model, partial(loaded.module, *feeds))
        if why:
            at = f" at batch size {one[symbol]}" if symbol in one else ""
            raise ModelError(
                f"the pruned model does not run{at}: {why}",
                "its forward counts on sizes that were pruned; protect the layers before it with --protect",
            )


def _facts(task: Prune, loaded: "LoadedModel", done: "Pruned") -> PruningFacts:
    rows = loaded.dynamic_sizes.get(samples.batch_symbol(loaded.signature) or "", 1)
    return PruningFacts(
        target=str(task.target),
        importance=task.options.importance,
        scope=task.options.scope,
        macs_before=done.before.macs // rows,
        macs_after=done.after.macs // rows,
        parameters_before=done.before.parameters,
        parameters_after=done.after.parameters,
        channels_before=done.channels_before,
        channels_after=done.channels_after,
        groups=_overall(done),
        whole=done.whole,
    )


def _overall(done: "Pruned") -> tuple[PrunedGroup, ...]:
    """Merge the entries of each group over all steps."""
    found: dict[str, PrunedGroup] = {}
    for one in done.surgery.history:
        first = found.get(one.root, one)
        kept = one.kept if first is one else tuple(first.kept[index] for index in one.kept)
        found[one.root] = one.model_copy(update={"before": first.before, "kept": kept, "step": 1})
    return tuple(found.values())


def summary(facts: PruningFacts) -> str:
    """Describe pruning in one sentence."""
    macs = f"{1 - facts.macs_after / max(facts.macs_before, 1):.1%} of MACs"
    numbers = f"{1 - facts.parameters_after / max(facts.parameters_before, 1):.1%} of parameters"
    width = f"channels {facts.channels_before:,} → {facts.channels_after:,} in {len(facts.groups)} groups"
    return f"{width}; {macs} and {numbers} gone"


# Pruning to a share of the latency on an engine: bisection over the share of MACs that is left. One task is one trial,
# and knows those before it.

TRIALS = "latency-trials.json"
"""Beside the pruned model: what was tried, as :class:`LatencyTrial`."""
DENSE, BEFORE, REFERENCE = "dense", "before", "reference"
_LONGEST_SECONDS = 6.0
_UNSURE = "its latency was measured in too few rounds to know how exact it is; a longer --measure-time gives more"


CLOSE = 0.02
"""A trial that misses what is wanted by no more than this share ends the search."""
_LEAST, _FINEST = 0.05, 0.01


class LatencyTrial(BaseModel):
    """One trial: the MACs that were left, and the latency; both as shares of the dense model's."""

    model_config = ConfigDict(frozen=True)

    macs_left: float
    latency_left: float | None
    low: float | None = None
    high: float | None = None
    """95 % interval of the latency; None where there were too few rounds."""
    reason: str = ""
    """Why there is no latency: so few MACs cannot be had."""


def propose_share(trials: Sequence[LatencyTrial], wanted: float) -> float | None:
    """Bisect for the share of MACs to try next; return None where the search is over."""
    low, high, share = _LEAST, 1.0, wanted
    for one in trials:
        left = one.latency_left
        if left is not None and abs(left - wanted) <= CLOSE * wanted:
            return None
        if left is None or left < wanted:
            low = one.macs_left
        else:
            high = one.macs_left
        if high - low <= _FINEST:
            return None
        share = round((low + high) / 2, 4)
    return share


def choose_trial(trials: Sequence[LatencyTrial], wanted: float) -> LatencyTrial | None:
    """Return the trial that keeps the most MACs among those that are fast enough, or None."""
    most = wanted * (1 + CLOSE)
    fast = [one for one in trials if one.latency_left is not None and one.latency_left <= most]
    return max(fast, key=lambda one: one.macs_left, default=None)


def describe_fastest(trials: Sequence[LatencyTrial]) -> str:
    """Describe the fastest of trials none of which is fast enough."""
    known = {one.latency_left: one for one in trials if one.latency_left is not None}
    if not known:
        return trials[-1].reason
    best = known[min(known)]
    return f"the fastest of {len(trials)} trials takes {best.latency_left:.1%} with {best.macs_left:.1%} of the MACs"


class ToEngine(BaseModel):
    """The way from a module to the engine that its latency is measured on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: SerializeAsAny[Engine]
    device: Device
    passes: tuple[SerializeAsAny[Pass], ...]
    """From the module to the graph that the engine is built from."""

    @property
    def tools(self) -> tuple[str, ...]:
        """Return distributions whose versions decide what comes out."""
        return (*(tool for step in self.passes for tool in step.tools), *self.engine.tools)

    def build(self, inputs: Inputs, model: Artifact, out: Path, progress: Progress) -> Effect:
        """Return the engine of a module in the folder ``out``; graphs on the way are thrown away."""
        ranges = read_ranges(inputs[SHAPES]) if SHAPES in inputs else {}
        with tempfile.TemporaryDirectory(prefix="enginesmith-prune-") as scratch:
            graph = model
            for step in self.passes:
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
        share = propose_share(trials, self.prune.target.left)
        if share is None:
            summary = "the search is over"
        else:
            progress(f"{share:.1%} of MACs")
            trials.append(self._try(share, inputs, not trials, progress))
            summary = describe_trial(trials[-1])
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
        """Measure the median latency at the first batch size, as a share of the dense engine's measured beside it."""
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
        best = choose_trial(trials, self.target.left)
        if best is None:
            raise UsageError(f"--prune {self.target} is not reached: {describe_fastest(trials)}", "ask for less")
        effect = _to_macs(self, best.macs_left).run(inputs, out, progress)
        (out / TRIALS).write_text(json.dumps([one.model_dump(mode="json") for one in trials], indent=1) + "\n")
        summary = f"{effect.summary}; {best.latency_left:.1%} of the dense latency, in {len(trials)} trials"
        notes = (*effect.notes, *([] if best.high is not None else [_UNSURE]))
        return effect.model_copy(update={"summary": summary, "notes": notes})


def _to_macs(task: Prune, share: float) -> Prune:
    target = PruneTarget(kind="macs", value=1 - share)
    return Prune(target=target, options=task.options, feeder=task.feeder, seed=task.seed)


def _trials(inputs: Inputs) -> list[LatencyTrial]:
    return [LatencyTrial.model_validate(entry) for entry in read_records(inputs[BEFORE])] if BEFORE in inputs else []


def describe_trial(trial: LatencyTrial) -> str:
    macs = f"{trial.macs_left:.1%} of MACs"
    return f"{macs}: {trial.reason or f'{trial.latency_left:.1%} of the dense latency'}"


def _artifact(kind: Kind, path: Path, like: Artifact) -> Artifact:
    return Artifact(kind=kind, path=path, sha256="", bytes=0, signature=like.signature)
