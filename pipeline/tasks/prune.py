"""Prune a torch module by structures, to a share of its work or of its latency on an engine."""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, SerializeAsAny

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import BuildRequest, Engine
from enginesmith.pipeline.errors import EmptyLayer, ModelError, UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.records import PrunedGroup, PruningFacts
from enginesmith.pipeline.passes.base import Pass, Progress
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Inputs, Task, read_models, scratch_artifact, write_records
from enginesmith.pipeline.tasks.calibrate import Feeder, Feeding, read_class_names
from enginesmith.pipeline.tasks.load import read_ranges
from enginesmith.pipeline.tasks.measure import measure_beside, this_machine

if TYPE_CHECKING:
    from enginesmith.pipeline.frameworks.torch.module import LoadedModel
    from enginesmith.pipeline.passes.prune.prune import Pruned
    from enginesmith.pipeline.passes.prune.selection import Sample


MODEL = "model"
FACTS = "pruning.json"
"""File beside the pruned model of :class:`~enginesmith.pipeline.frameworks.records.PruningFacts`."""


class Prune(Task):
    """Make a smaller module: whole channels, hidden units and heads are gone, and it runs as before."""

    title: ClassVar[str] = "prune"
    produces: ClassVar[Kind] = "torch"
    other_tools: ClassVar[tuple[str, ...]] = ("torch", "torch-pruning", "numpy")

    target: PruneTarget
    options: PruneOptions = PruneOptions()
    feeder: Feeder | None = None
    """Source of samples for ``taylor``."""
    seed: int = 0
    """Seed of random importance."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Prune, check that the module runs and keeps its signature, and save it.

        Raises:
            UsageError: the target cannot be met, a protected layer is not there, or ``taylor`` has no data.
            ModelError: the module's values cannot be followed, or the pruned module does not run.
        """
        from enginesmith.pipeline.frameworks.torch import saved

        loaded = saved.load_artifact(inputs[MODEL])
        done, notes, reads = self._prune(inputs, loaded, progress)
        check_runs(loaded)
        progress("writing")
        saved.save_changed(inputs[MODEL], loaded, out, done.surgery)
        facts = self._describe(loaded, done)
        (out / FACTS).write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")
        macs = f"{1 - facts.macs_after / max(facts.macs_before, 1):.1%} of MACs"
        numbers = f"{1 - facts.parameters_after / max(facts.parameters_before, 1):.1%} of parameters"
        width = f"channels {facts.channels_before:,} → {facts.channels_after:,} in {len(facts.groups)} groups"
        return Effect(
            file=saved.RECORD,
            summary=f"{width}; {macs} and {numbers} gone",
            notes=notes,
            signature=loaded.signature,
            reads=reads,
        )

    def _prune(
        self, inputs: Inputs, loaded: "LoadedModel", progress: Progress
    ) -> "tuple[Pruned, tuple[str, ...], tuple[Path, ...]]":
        """Prune a loaded module in place; returns also notes on the data, and the files that it was read from."""
        from enginesmith.pipeline.passes.prune import prune, selection

        model, reads = loaded.module.model, tuple[Path, ...]()
        data_notes: tuple[str, ...] = ()
        gradients: Callable[[], None] | None = None
        if self.options.importance == "taylor":
            if self.feeder is None or self.feeder.data is None:
                raise UsageError(
                    "importance by taylor needs samples, and there are none",
                    "give some with --data DATA, or rank by l2",
                )
            # a reference is looked at only where there is no data
            feeding, reads = self.feeder.open(inputs[MODEL], inputs[MODEL])
            feeding = replace(feeding, data=feeding.data.number_words(read_class_names(inputs)))
            data_notes = feeding.data.notes

            def collect() -> None:
                selection.collect_gradients(model, loaded.module, _read_samples(loaded, feeding))

            gradients = collect
        feeds = tuple(value.clone() for value in loaded.example.values())
        done = prune.prune(
            model,
            lambda: loaded.module(*feeds),
            self.target,
            self.options,
            seed=self.seed,
            gradients=gradients,
            progress=progress,
        )
        for parameter in model.parameters():
            parameter.grad = None
        return done, (*done.notes, *data_notes), reads

    def _describe(self, loaded: "LoadedModel", done: "Pruned") -> PruningFacts:
        rows = loaded.dynamic_sizes.get(samples.batch_symbol(loaded.signature) or "", 1)
        return PruningFacts(
            target=str(self.target),
            importance=self.options.importance,
            scope=self.options.scope,
            macs_before=done.before.macs // rows,
            macs_after=done.after.macs // rows,
            parameters_before=done.before.parameters,
            parameters_after=done.after.parameters,
            channels_before=done.channels_before,
            channels_after=done.channels_after,
            groups=_join_groups(done.surgery.history),
            whole=done.whole,
        )


def read_facts(artifact: Artifact) -> PruningFacts:
    """Read what was done to make a pruned model."""
    return PruningFacts.model_validate_json((artifact.folder / FACTS).read_bytes())


def join_facts(facts: Sequence[PruningFacts], target: PruneTarget) -> PruningFacts:
    """Describe several prunings of a model, one after the other, as the one that they are together."""
    if len(facts) == 1:
        return facts[0]
    first, groups = facts[0], _join_groups(group for each in facts for group in each.groups)
    pruned = {group.root for group in groups}
    joined = {
        "target": str(target),
        "macs_before": first.macs_before,
        "parameters_before": first.parameters_before,
        "channels_before": first.channels_before,
        "channels_after": first.channels_before - sum(each.channels_before - each.channels_after for each in facts),
        "groups": groups,
        "whole": {root: why for root, why in facts[-1].whole.items() if root not in pruned},
    }
    return facts[-1].model_copy(update=joined)


def _join_groups(cuts: Iterable[PrunedGroup]) -> tuple[PrunedGroup, ...]:
    """Make one entry of those of each group, with the units that stay of what there was at first."""
    groups: dict[str, PrunedGroup] = {}
    for cut in cuts:
        first = groups.get(cut.root, cut)
        same_unit = (first.unit, first.width) == (cut.unit, cut.width)
        if not same_unit or first.after != cut.before:  # heads of another width are other units
            first = cut
        units = cut.kept if first is cut else tuple(first.kept[index] for index in cut.kept)
        groups[cut.root] = cut.model_copy(update={"before": first.before, "kept": units, "step": 1})
    return tuple(groups.values())


def _read_samples(loaded: "LoadedModel", feeding: Feeding) -> "Iterator[Sample]":
    import torch

    data, size = feeding.data, feeding.provenance.batch
    for index, feeds in enumerate(feeding):
        values = tuple(torch.from_numpy(feeds[spec.name]) for spec in loaded.signature.inputs)
        rows = [row % len(data) for row in range(index * size, (index + 1) * size)]
        yield values, None if data.one_label is None else torch.as_tensor(data.one_label[rows])


def check_runs(loaded: "LoadedModel") -> None:
    """Check that a module runs at its example's batch size and at another one.

    Raises:
        ModelError: it does not; the message says in which module.
    """
    import torch

    from enginesmith.pipeline.passes.prune import dependency_graph

    symbol, sizes = samples.batch_symbol(loaded.signature), loaded.dynamic_sizes
    tried = [sizes, *([{**sizes, symbol: sizes[symbol] + 1}] if symbol in sizes else [])]
    example = {name: value.numpy() for name, value in loaded.example.items()}
    for trial in tried:
        feeds = [torch.from_numpy(value) for value in samples.resize(example, loaded.signature, trial).values()]
        _, why = dependency_graph.run_or_explain(loaded.module.model, partial(loaded.module, *feeds))
        if why:
            at = f" at batch size {trial[symbol]}" if symbol in trial else ""
            raise ModelError(
                f"the pruned model does not run{at}: {why}",
                "its forward counts on sizes that were pruned; protect the layers before it with --protect",
            )


# Pruning to a share of the latency on an engine: bisection over the share of MACs that is left. One task is one trial,
# and knows those before it.

TRIALS = "latency-trials.json"
"""File beside the pruned model of all :class:`LatencyTrial`."""
DENSE, BEFORE, REFERENCE = "dense", "before", "reference"
_LONGEST_SECONDS = 6.0
_UNSURE = "its latency was measured in too few rounds to know how exact it is; a longer --measure-time gives more"
CLOSE = 0.02
"""A trial that misses what is wanted by no more than this share ends the search."""
_LEAST, _FINEST = 0.05, 0.01


class LatencyTrial(BaseModel, frozen=True):
    """Record one trial: the MACs that were left, and the latency; both as shares of the dense model's."""

    macs_left: float
    latency_left: float | None
    low: float | None = None
    high: float | None = None
    """95 % interval of the latency; None where there were too few rounds."""
    reason: str = ""
    """Says why there is no latency: so few MACs cannot be had."""


def propose_share(trials: Sequence[LatencyTrial], wanted: float) -> float | None:
    """Bisect for the share of MACs to try next; return None where the search is over."""
    low, high, share = _LEAST, 1.0, wanted
    for trial in trials:
        left = trial.latency_left
        if left is not None and abs(left - wanted) <= CLOSE * wanted:
            return None
        if left is None or left < wanted:
            low = trial.macs_left
        else:
            high = trial.macs_left
        if high - low <= _FINEST:
            return None
        share = round((low + high) / 2, 4)
    return share


def choose_trial(trials: Sequence[LatencyTrial], wanted: float) -> LatencyTrial | None:
    """Choose the trial that keeps the most MACs among those that are fast enough, or None."""
    most = wanted * (1 + CLOSE)
    fast = [trial for trial in trials if trial.latency_left is not None and trial.latency_left <= most]
    return max(fast, key=lambda trial: trial.macs_left, default=None)


def describe_fastest(trials: Sequence[LatencyTrial]) -> str:
    """Describe the fastest of trials none of which is fast enough."""
    known = {trial.latency_left: trial for trial in trials if trial.latency_left is not None}
    if not known:
        return trials[-1].reason
    best = known[min(known)]
    return f"the fastest of {len(trials)} trials takes {best.latency_left:.1%} with {best.macs_left:.1%} of the MACs"


class ToEngine(BaseModel, frozen=True, extra="forbid"):
    """Build the engine that a module's latency is measured on."""

    engine: SerializeAsAny[Engine]
    device: Device
    passes: tuple[SerializeAsAny[Pass], ...]
    """Passes from the module to the graph that the engine is built from."""

    @property
    def tools(self) -> tuple[str, ...]:
        """Distributions whose versions decide what comes out."""
        return (*(tool for step in self.passes for tool in step.tools), *self.engine.tools)

    def build(self, inputs: Inputs, model: Artifact, out: Path, progress: Progress) -> Effect:
        """Build the engine of a module in the folder ``out``; graphs on the way are thrown away."""
        with tempfile.TemporaryDirectory(prefix="enginesmith-prune-") as scratch:
            graph = model
            for step in self.passes:
                place = Path(scratch, step.name)
                place.mkdir()
                effect = run_pass(step, graph, place, progress)
                graph = scratch_artifact("onnx", place / effect.file, model.signature)
            progress(f"building the {self.engine.name} engine")
            return self.engine.build(BuildRequest(graph, out, self.device, read_ranges(inputs), progress))


class DenseEngine(Task):
    """Build the engine of the module as it is, beside which those of the trials are measured."""

    title: ClassVar[str] = "build"
    produces: ClassVar[Kind] = "engine"

    way: ToEngine

    @property
    def environment_key(self) -> dict[str, Any]:
        return self.way.engine.environment_key(self.way.device)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        return self.way.build(inputs, inputs[MODEL], out, progress)


class TryLatency(Task):
    """Make one more trial, unless the search is over; the record has all trials so far."""

    title: ClassVar[str] = "search"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    prune: Prune
    """Options, and the share of the dense engine's latency that is to be removed."""
    way: ToEngine
    seconds: float = _LONGEST_SECONDS
    """Longest time to measure for."""

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_machine()

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Try, if there is anything left to try.

        Raises:
            UsageError: the model cannot be pruned like that, however little.
            ModelError: it cannot be built or measured.
        """
        trials = read_models(inputs.get(BEFORE), LatencyTrial)
        share = propose_share(trials, self.prune.target.left)
        if share is None:
            summary = "the search is over"
        else:
            progress(f"{share:.1%} of MACs")
            trial = self._try(share, inputs, not trials, progress)
            trials.append(trial)
            result = trial.reason or f"{trial.latency_left:.1%} of the dense latency"
            summary = f"{trial.macs_left:.1%} of MACs: {result}"
        return write_records(out, trials, summary)

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
            model = scratch_artifact("torch", small / effect.file, inputs[MODEL].signature)
            built = self.way.build(inputs, model, engine, progress)
            pruned_engine = scratch_artifact("engine", engine / built.file, model.signature)
            sides = {DENSE: (self.way.engine, inputs[DENSE]), "pruned": (self.way.engine, pruned_engine)}
            dense, pruned = measure_beside(sides, self.way.device, inputs[REFERENCE], self.seconds, progress)
        if (faster := pruned.speedup) is not None:
            return LatencyTrial(
                macs_left=share, latency_left=1 / faster.median, low=1 / faster.high, high=1 / faster.low
            )
        if dense.p50_ms and pruned.p50_ms:  # in too few rounds for an interval
            return LatencyTrial(macs_left=share, latency_left=pruned.p50_ms / dense.p50_ms)
        why = dense.failure or pruned.failure or pruned.reasons.get("p50_ms", "")
        raise ModelError(f"the pruned model was not measured in {self.way.engine.name}: {why}", "allow more time")


class PruneToLatency(Prune):
    """Make the module of the trial that keeps the most among those that are fast enough."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Prune as in that trial, and write the trials down beside it.

        Raises:
            UsageError: no model that can be had is fast enough; the message names the fastest.
        """
        trials = read_models(inputs.get(BEFORE), LatencyTrial)
        best = choose_trial(trials, self.target.left)
        if best is None:
            raise UsageError(f"--prune {self.target} is not reached: {describe_fastest(trials)}", "ask for less")
        effect = _to_macs(self, best.macs_left).run(inputs, out, progress)
        (out / TRIALS).write_text(
            json.dumps([trial.model_dump(mode="json") for trial in trials], indent=1) + "\n", encoding="utf-8"
        )
        summary = f"{effect.summary}; {best.latency_left:.1%} of the dense latency, in {len(trials)} trials"
        notes = (*effect.notes, *([] if best.high is not None else [_UNSURE]))
        return effect.model_copy(update={"summary": summary, "notes": notes})


def _to_macs(task: Prune, share: float) -> Prune:
    target = PruneTarget(kind="macs", value=1 - share)
    return Prune(target=target, options=task.options, feeder=task.feeder, seed=task.seed)
