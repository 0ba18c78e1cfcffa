"""What fits: the largest batch in a memory budget, the smallest workspace, and what keeps the speed."""

import math
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline import stage_plans, workers
from enginesmith.pipeline.build_stages import MODULES, tensorrt_engine
from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.engines.trt import sweep
from enginesmith.pipeline.errors import LimitTooSmall, ModelError, UsageError
from enginesmith.pipeline.job import Settings
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.run import Run
from enginesmith.pipeline.samples import batch_symbol
from enginesmith.pipeline.single import finished
from enginesmith.pipeline.steps import LOAD
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.trial import TrialResult
from enginesmith.pipeline.tensors import Signature, total_bytes
from enginesmith.pipeline.units import format_bytes

_LARGEST_BATCH = 1 << 16


class Fits(BaseModel):
    """The answer of ``fit``; bytes are the builder's figures, and what is not counted is said."""

    model_config = ConfigDict(frozen=True)

    memory_bytes: int
    largest_batch: int | None
    needed_bytes: int | None
    """At the largest batch: weights, activations, inputs and outputs."""
    weights_bytes: int | None
    activation_bytes: int | None
    io_bytes: int | None
    smallest_workspace_bytes: int | None
    workspace_note: str
    source: str
    builds: int
    """Batch sizes that were tried."""
    reason: str = ""


class WorkspaceKept(BaseModel):
    """The smallest measured workspace that keeps a share of the speed."""

    model_config = ConfigDict(frozen=True)

    variant: str
    workspace_bytes: int
    speed_share: float
    """Of the throughput of the fastest one."""


def fit(recipe: Recipe, models: Sequence[str], memory_bytes: int, settings: Settings) -> Fits:
    """The largest batch whose engines fit, all ``models`` together, and the smallest workspace that they build with.

    With several models and ``share_activation_memory`` their activations are counted once, the largest.

    Raises:
        UsageError: no dynamic batch to vary.
    """
    workers.preload_only(MODULES)
    sizes = _Sizes(recipe, models, settings)
    asked = recipe.ranges.get("batch")
    most = asked.max if asked else _LARGEST_BATCH
    batch = largest(sizes.needed, memory_bytes, most)
    if batch is None:
        least = sizes.needed(1)
        return Fits(
            **_nothing(memory_bytes),
            builds=len(sizes.tried),
            reason=f"even batch 1 needs {format_bytes(least)} ({least} bytes)",
        )
    parts = sizes.parts(batch)
    workspace, note = sizes.workspace(batch)
    return Fits(
        memory_bytes=memory_bytes,
        largest_batch=batch,
        needed_bytes=sum(parts.values()),
        **parts,
        smallest_workspace_bytes=workspace,
        workspace_note=note,
        source=_SOURCE,
        builds=len(sizes.tried),
        reason="" if batch < most else f"larger batches than {most} were not tried",
    )


def keeping(run: Run, share: float) -> tuple[WorkspaceKept, ...]:
    """For each target, the smallest measured workspace whose throughput is at least ``share`` of the best one's.

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
    return tuple(_kept(group, share) for group in groups.values())


def _kept(group: list[tuple[int, float, str]], share: float) -> WorkspaceKept:
    best = max(rate for _, rate, _ in group)
    limit, rate, name = min(one for one in group if one[1] >= share * best)
    return WorkspaceKept(variant=name, workspace_bytes=limit, speed_share=rate / best)


_SOURCE = (
    "the builder's figures for weights and activations, and the sizes of inputs and outputs; the CUDA context and the "
    "libraries come on top"
)


def _nothing(memory_bytes: int) -> dict[str, object]:
    parts = dict.fromkeys(("weights_bytes", "activation_bytes", "io_bytes", "needed_bytes", "largest_batch"))
    return {
        **parts,
        "memory_bytes": memory_bytes,
        "smallest_workspace_bytes": None,
        "workspace_note": "nothing fits",
        "source": _SOURCE,
    }


class _Sizes:
    """What engines for a largest batch need; each batch is tried once."""

    def __init__(self, recipe: Recipe, models: Sequence[str], settings: Settings) -> None:
        self._settings, self._engine = settings, tensorrt_engine(recipe)
        self._share = recipe.tensorrt_run.share_activation_memory
        self._recipes = [recipe.model_copy(update={"model": model}) for model in models]
        self.tried: dict[int, list[tuple[EngineFacts, Signature]]] = {}

    def needed(self, batch: int) -> int:
        """Bytes of all engines together."""
        return sum(self.parts(batch).values())

    def parts(self, batch: int) -> dict[str, int]:
        """The same by what it is for."""
        found = self._facts(batch)
        activations = [facts.activation_bytes or 0 for facts, _ in found]
        return {
            "weights_bytes": sum(facts.weights_bytes or 0 for facts, _ in found),
            "activation_bytes": max(activations) if self._share else sum(activations),
            "io_bytes": sum(_io_bytes(signature, batch) for _, signature in found),
        }

    def workspace(self, batch: int) -> tuple[int | None, str]:
        """The smallest limit that all engines build with, and what that means for speed."""
        if not self._engine.known().workspace_is_a_gate:
            return None, "needs measured engines: optimize with --workspace sweep, then `enginesmith fit RUN`"
        found = zip(self._recipes, self._facts(batch), strict=True)
        limits = [self._smallest(recipe, batch, facts) for recipe, (facts, _) in found]
        return max(limits), f"{self._engine.name} builds the same engine under any limit: it keeps all of the speed"

    def _smallest(self, recipe: Recipe, batch: int, facts: EngineFacts) -> int:
        def attempt(limit: int) -> None:
            limited = recipe.model_copy(update={"workspace": (str(limit),)})
            found = self._trial(limited, batch)[0]
            if not found.builds:
                kind = LimitTooSmall if found.failure == LimitTooSmall.failure else ModelError
                raise kind(found.reason, found.remedy)

        return sweep.smallest(attempt, facts, self._engine.known())

    def _facts(self, batch: int) -> list[tuple[EngineFacts, Signature]]:
        if batch not in self.tried:
            found = []
            for recipe in self._recipes:
                result, signature = self._trial(recipe, batch)
                if result.facts is None:
                    raise ModelError(f"no engine for batch {batch}: {result.reason}", result.remedy)
                found.append((result.facts, signature))
            self.tried[batch] = found
        return self.tried[batch]

    def _trial(self, recipe: Recipe, batch: int) -> tuple[TrialResult, Signature]:
        steps, trials = stage_plans.trial_steps(recipe, batch)
        if len(trials) != 1:
            raise UsageError(f"{len(trials)} targets are named", "fit answers for one: --target sm86")
        outcomes = finished(steps, self._settings, recipe)
        artifact, model = outcomes[next(iter(trials.values()))].artifact, outcomes[LOAD].artifact
        assert artifact is not None
        assert model is not None
        assert model.signature is not None
        if batch_symbol(model.signature) is None:
            raise UsageError(f"{recipe.model} has no dynamic batch", "export it with one: --input name:dtype:batch,…")
        return TrialResult.model_validate(read_records(artifact)[0]), model.signature


def _io_bytes(signature: Signature, batch: int) -> int:
    """Inputs and outputs at a batch; dimensions of unknown size count as 1."""
    symbol = batch_symbol(signature)
    specs = (*signature.inputs, *signature.outputs)
    sizes = {dim: batch if dim == symbol else 1 for spec in specs for dim in spec.symbols}
    return total_bytes(specs, sizes)


def largest(needed: Callable[[int], int], limit: int, most: int = _LARGEST_BATCH) -> int | None:
    """The largest batch up to ``most`` whose need is within ``limit``, for a need that grows with the batch.

    Guesses from straight lines, every other time from halving, so that few are tried whatever the need looks like.
    """
    if needed(1) > limit:
        return None
    fits = 1
    while (guess := _further(needed, fits, limit, most)) <= most and needed(guess) <= limit:
        fits = guess
    over, halve = min(guess, most + 1), False
    while over - fits > 1:
        guess = (fits + over) // 2 if halve or over > most else _between(needed, fits, over, limit)
        if needed(guess) <= limit:
            fits = guess
        else:
            over = guess
        halve = not halve
    return fits


def _further(needed: Callable[[int], int], fits: int, limit: int, most: int) -> int:
    """A larger batch to try: where the line from batch 1 crosses the limit, and one beyond; at most 64 times this.

    Past ``most`` it is ``most`` itself, which is tried once, and then one more, which ends the search.
    """
    slope = (needed(fits) - needed(1)) / (fits - 1) if fits > 1 else 0.0
    crossing = 1 + math.floor((limit - needed(1)) / slope) + 1 if slope > 0 else 2 * fits
    guess = max(fits + 1, min(crossing, 64 * fits))
    return guess if guess <= most or fits == most else most


def _between(needed: Callable[[int], int], fits: int, over: int, limit: int) -> int:
    """Where the line through the largest batch that fits and the smallest that does not crosses the limit."""
    slope = (needed(over) - needed(fits)) / (over - fits)
    crossing = fits + math.floor((limit - needed(fits)) / slope)
    return min(max(crossing, fits + 1), over - 1)
