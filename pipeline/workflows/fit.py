"""Find the memory that engines need at a batch size: by TensorRT's builder, or by running ONNX Runtime."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel

from enginesmith.pipeline.engines import DEFAULT_BUILD, engine_class
from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.engines.options import DEFAULT_ENGINES
from enginesmith.pipeline.engines.workspace import WorkspaceEngine
from enginesmith.pipeline.errors import LimitTooSmall, MissingCapability, ModelError, UsageError
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks.samples import batch_symbol
from enginesmith.pipeline.measure.rows import MemoryRow
from enginesmith.pipeline.planning import single_stages
from enginesmith.pipeline.planning.plan import LOAD, Step
from enginesmith.pipeline.planning.variants import ResolvedRecipe, resolve_recipe
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.build import TrialResult
from enginesmith.pipeline.tensors import Signature, total_bytes
from enginesmith.pipeline.units import format_bytes
from enginesmith.pipeline.workflows.build import MODULES, file_engine
from enginesmith.pipeline.workflows.stages import run_steps

_MEASURED_WITH = (*MODULES, "enginesmith.pipeline.tasks.measure")
_PROBE_SLACK_BYTES = 2 << 30


class Need(NamedTuple):
    """Bytes that one engine needs at a batch."""

    weights_bytes: int
    activation_bytes: int
    io_bytes: int
    lacking: str = ""
    """The part that is missing in these figures."""
    facts: EngineFacts | None = None
    """The builder's report."""


class MemoryEstimate(ABC):
    """Estimate the memory that a set of engines needs for a largest batch, all of them together."""

    source: ClassVar[str]
    """The source of the figures, and what is not counted."""
    shares_activations = False
    """True if all engines work in one buffer, so that only the largest activations count."""

    def __init__(self, recipe: Recipe, models: Sequence[str], settings: Settings, budget_bytes: int) -> None:
        self._engine, self._settings, self._budget = engine_class(recipe.engines[0]), settings, budget_bytes
        self._models = [resolve_recipe(recipe.model_copy(update={"model": text})) for text in models]
        self.tried: dict[int, list[Need]] = {}
        """By batch size, of those that were tried."""

    @abstractmethod
    def _find_need(self, model: ResolvedRecipe, batch: int) -> Need:
        """Build or run one model's engine at a batch."""

    def needs(self, batch: int) -> list[Need]:
        """Find the need of each engine; a batch is tried once."""
        if batch not in self.tried:
            self.tried[batch] = [self._find_need(model, batch) for model in self._models]
        return self.tried[batch]

    def parts(self, batch: int) -> dict[str, int]:
        """Split the need into ``weights_bytes``, ``activation_bytes`` and ``io_bytes``."""
        needs = self.needs(batch)
        activations = [need.activation_bytes for need in needs]
        return {
            "weights_bytes": sum(need.weights_bytes for need in needs),
            "activation_bytes": max(activations) if self.shares_activations else sum(activations),
            "io_bytes": sum(need.io_bytes for need in needs),
        }

    def needed(self, batch: int) -> int:
        """Add up the bytes of all engines."""
        return sum(self.parts(batch).values())

    def workspace(self, batch: int) -> tuple[int | None, str]:
        """Find the smallest limit that all engines build with, and say what it means for speed."""
        return None, f"{self._engine.title} has no limit for its work space"


class BuiltSizes(MemoryEstimate):
    """Estimate memory as the engines' builder reports it; each batch is built once."""

    source = (
        "the builder's figures for weights and activations, and the sizes of inputs and outputs; the CUDA context and "
        "the libraries come on top"
    )

    def __init__(self, recipe: Recipe, models: Sequence[str], settings: Settings, budget_bytes: int = 0) -> None:
        engine = file_engine(recipe)
        worker.preload_only((*engine.modules, *MODULES))
        self.shares_activations = engine.shares_activations(recipe)
        super().__init__(recipe, models, settings, budget_bytes)

    def workspace(self, batch: int) -> tuple[int | None, str]:
        engine = self._engine
        if not issubclass(engine, WorkspaceEngine):
            return super().workspace(batch)
        if not engine.gates_workspace():
            return None, "needs measured engines: optimize with --workspace sweep, then `enginesmith fit RUN`"
        pairs = zip(self._models, self.needs(batch), strict=True)
        limits = [self._smallest(engine, model, batch, need.facts) for model, need in pairs if need.facts]
        return max(limits), f"{engine.name} builds the same engine under any limit: it keeps all of the speed"

    def _smallest(self, engine: type[WorkspaceEngine], model: ResolvedRecipe, batch: int, facts: EngineFacts) -> int:
        def attempt(limit: int) -> None:
            result, _ = self._trial(model.updated(workspace=(str(limit),)), batch)
            if not result.builds:
                kind = LimitTooSmall if result.failure == LimitTooSmall.failure else ModelError
                raise kind(result.reason, result.remedy)

        return engine.smallest_workspace(attempt, facts)

    def _find_need(self, model: ResolvedRecipe, batch: int) -> Need:
        result, signature = self._trial(model, batch)
        facts = result.facts
        if facts is None:
            raise ModelError(f"no engine for batch {batch}: {result.reason}", result.remedy)
        symbol, specs = batch_symbol(signature), (*signature.inputs, *signature.outputs)
        sizes = {dim: batch if dim == symbol else 1 for spec in specs for dim in spec.symbols}  # others are not known
        return Need(facts.weights_bytes or 0, facts.activation_bytes or 0, total_bytes(specs, sizes), facts=facts)

    def _trial(self, model: ResolvedRecipe, batch: int) -> tuple[TrialResult, Signature]:
        steps, trials = single_stages.trial_steps(model, batch)
        if len(trials) != 1:
            raise UsageError(f"{len(trials)} targets are named", "fit answers for one: --target sm86")
        record, signature, _ = _run(model, steps, next(iter(trials.values())), self._settings)
        return TrialResult.model_validate(record), signature


class MeasuredSizes(MemoryEstimate):
    """Estimate memory by running engines: the peak of each alone in a fresh process; each batch is tried once."""

    source = (
        "measured: the peak of loading and running in a fresh process, and the sizes of inputs; "
        "the libraries come on top"
    )

    def __init__(self, recipe: Recipe, models: Sequence[str], settings: Settings, budget_bytes: int) -> None:
        super().__init__(recipe, models, settings, budget_bytes)
        worker.preload_only((*self._engine.modules, *_MEASURED_WITH))
        self._limit = 2 * budget_bytes + _PROBE_SLACK_BYTES
        """The limit of one probe: so far above the budget that reserved addresses and stacks do not count."""

    def _find_need(self, model: ResolvedRecipe, batch: int) -> Need:
        """Split a peak; where memory ran out, at least the budget was needed and one byte more."""
        row, input_bytes = self._measure(model, batch)
        peak, lacking = row.peak_bytes, ""
        if row.oom:
            lacking = f"that is a lower bound, as memory ran out: {row.oom.message}"
        if peak is None:
            peak = max(self._budget + 1, self._limit if row.oom and row.oom.limit_bytes else 0)
        activations = min(row.activation_bytes or 0, peak)
        return Need(peak - activations, activations, input_bytes, lacking)

    def _measure(self, model: ResolvedRecipe, batch: int) -> tuple[MemoryRow, int]:
        """Measure one model at a batch; returns the bytes of its inputs, too.

        Raises:
            ModelError: it fails at this batch, and not for lack of memory.
            MissingCapability: this machine does not show what a process takes.
        """
        steps = single_stages.memory_steps(model, batch, self._limit)
        record, signature, symbol = _run(model, steps, single_stages.MEMORY, self._settings)
        row = MemoryRow.model_validate(record)
        if row.peak_bytes is None and row.oom is None:
            if row.failure:
                raise ModelError(f"it does not run at batch {batch}: {row.failure}", "try it: enginesmith benchmark")
            raise MissingCapability(row.reasons["peak_bytes"], "measure on Linux, outside of a sandbox")
        sizes = {name: span.max for name, span in model.recipe.ranges.items()} | {symbol: batch}
        sizes = {name: sizes.get(name, 1) for spec in signature.inputs for name in spec.symbols}
        return row, total_bytes(signature.inputs, sizes)


def _run(
    model: ResolvedRecipe, steps: tuple[Step, ...], last: str, settings: Settings
) -> tuple[dict[str, Any], Signature, str]:
    """Run steps; returns the record of the last one, and the model's signature and dynamic batch.

    Raises:
        UsageError: the model has no dynamic batch.
    """
    outcomes = run_steps(steps, settings, model.recipe)
    record, loaded = outcomes[last].artifact, outcomes[LOAD].artifact
    assert record is not None
    assert loaded is not None
    symbol = batch_symbol(loaded.model_signature)
    if symbol is None:
        remedy = "export it with one: --input name:dtype:batch,…"
        raise UsageError(f"{model.source.text} has no dynamic batch", remedy)
    return read_records(record)[0], loaded.model_signature, symbol


# Search: the largest batch that fits a memory budget, and the smallest workspace that builds or keeps the speed.

_LARGEST_BATCH = 1 << 16


class Fits(BaseModel, frozen=True):
    """The answer of ``fit``; ``source`` says where the figures come from, and what is not counted."""

    memory_bytes: int
    largest_batch: int | None = None
    needed_bytes: int | None = None
    """At the largest batch: weights, activations, inputs and outputs."""
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    io_bytes: int | None = None
    smallest_workspace_bytes: int | None = None
    workspace_note: str = "nothing fits"
    source: str
    builds: int
    """Batch sizes that were tried, by building or by running."""
    reason: str = ""


class WorkspaceKept(BaseModel, frozen=True):
    """The smallest measured workspace that keeps a share of the speed."""

    variant: str
    workspace_bytes: int
    speed_share: float
    """Share of the throughput of the fastest one."""


def fit(recipe: Recipe, models: Sequence[str], memory_bytes: int, settings: Settings) -> Fits:
    """Find the largest batch whose engines fit, all ``models`` together, and the smallest workspace they build with.

    TensorRT's builder reports what an engine takes; ONNX Runtime's engines are run, each in a fresh process.
    With several models and ``share_activation_memory`` TensorRT's activations are counted once, the largest.

    Raises:
        UsageError: no dynamic batch to vary, several engines, or one that is not made from an ONNX file.
    """
    if len(recipe.engines) != 1 or engine_class(recipe.engines[0]).consumes != "onnx":
        raise UsageError(
            f"fit takes one engine that is made from an ONNX file, and was given {', '.join(recipe.engines)}",
            f"name one: --engine {DEFAULT_BUILD} or {DEFAULT_ENGINES[0]}; "
            "measure others: enginesmith benchmark --batch sweep",
        )
    kind = BuiltSizes if engine_class(recipe.engines[0]).builder_tells_memory else MeasuredSizes
    sizes = kind(recipe, models, settings, memory_bytes)
    batch_range = recipe.ranges.get("batch")
    most = batch_range.max if batch_range else _LARGEST_BATCH
    batch = largest(sizes.needed, memory_bytes, most)
    sizes_found: dict[str, Any] = {}
    if batch is None:
        least = sizes.needed(1)
        reason = f"even batch 1 needs {format_bytes(least)} ({least} bytes)"
    else:
        parts = sizes.parts(batch)
        workspace, note = sizes.workspace(batch)
        sizes_found = {"largest_batch": batch, "needed_bytes": sum(parts.values()), **parts}
        sizes_found |= {"smallest_workspace_bytes": workspace, "workspace_note": note}
        reason = "" if batch < most else f"larger batches than {most} were not tried"
    lacking = (need.lacking for need in sizes.needs(batch or 1))
    return Fits(
        memory_bytes=memory_bytes,
        **sizes_found,
        source=sizes.source,
        builds=len(sizes.tried),
        reason="; ".join(filter(None, [reason, next(filter(None, lacking), "")])),
    )


def keeping(run: Run, share: float) -> tuple[WorkspaceKept, ...]:
    """Choose for each target the smallest measured workspace whose throughput is at least ``share`` of the best one's.

    Raises:
        UsageError: the run has no measured variants with workspace limits.
    """
    groups: dict[tuple[str, str, str | None], list[tuple[int, float, str]]] = {}
    for record in run.variants:
        rates = [row.throughput_per_s for row in record.latency if row.throughput_per_s is not None]
        if record.workspace_limit_bytes is not None and rates and record.status == "measured":
            group = groups.setdefault((record.engine, record.precision, record.target), [])
            group.append((record.workspace_limit_bytes, max(rates), record.id))
    if not groups:
        raise UsageError(
            f"the run {run.name} has no measured variants with workspace limits",
            "optimize with --workspace sweep on the machine with the GPU, or resume it there",
        )
    choices = []
    for group in groups.values():
        best = max(rate for _, rate, _ in group)
        limit, rate, name = min(level for level in group if level[1] >= share * best)
        choices.append(WorkspaceKept(variant=name, workspace_bytes=limit, speed_share=rate / best))
    return tuple(choices)


def largest(needed: Callable[[int], int], limit: int, most: int = _LARGEST_BATCH) -> int | None:
    """Find the largest batch up to ``most`` whose need is within ``limit``, for a need that grows with the batch.

    Guesses from straight lines, every other time from halving, so that few are tried whatever the need looks like.
    """
    if needed(1) > limit:
        return None
    fits = 1
    while True:  # where the line from batch 1 crosses the limit, plus one; at most 64 times this
        slope = (needed(fits) - needed(1)) / (fits - 1) if fits > 1 else 0.0
        crossing = 1 + math.floor((limit - needed(1)) / slope) + 1 if slope > 0 else 2 * fits
        guess = max(fits + 1, min(crossing, 64 * fits))
        if guess > most and fits < most:
            guess = most  # which is tried once; one more ends the search
        if guess > most or needed(guess) > limit:
            break
        fits = guess
    over, halve = min(guess, most + 1), False
    while over - fits > 1:
        guess = (fits + over) // 2
        if not halve and over <= most:  # on the line between the largest that fits and the smallest that does not
            slope = (needed(over) - needed(fits)) / (over - fits)
            guess = min(max(fits + math.floor((limit - needed(fits)) / slope), fits + 1), over - 1)
        if needed(guess) <= limit:
            fits = guess
        else:
            over = guess
        halve = not halve
    return fits
