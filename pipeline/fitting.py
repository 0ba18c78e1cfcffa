"""Find the largest batch that fits a memory budget, and the smallest workspace that builds or keeps the speed."""

import math
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline import footprints
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.run import Run
from enginesmith.pipeline.settings import Settings
from enginesmith.pipeline.units import format_bytes

_LARGEST_BATCH = 1 << 16


class Fits(BaseModel):
    """The answer of ``fit``; ``source`` says where the figures come from, and what is not counted."""

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
    """Batch sizes that were tried, by building or by running."""
    reason: str = ""


class WorkspaceKept(BaseModel):
    """The smallest measured workspace that keeps a share of the speed."""

    model_config = ConfigDict(frozen=True)

    variant: str
    workspace_bytes: int
    speed_share: float
    """Of the throughput of the fastest one."""


def fit(recipe: Recipe, models: Sequence[str], memory_bytes: int, settings: Settings) -> Fits:
    """Find the largest batch whose engines fit, all ``models`` together, and the smallest workspace they build with.

    TensorRT's builder reports what an engine takes; ONNX Runtime's engines are run, each in a fresh process.
    With several models and ``share_activation_memory`` TensorRT's activations are counted once, the largest.

    Raises:
        UsageError: no dynamic batch to vary, or an engine that is not made from an ONNX file.
    """
    sizes = footprints.estimate_memory(recipe, models, memory_bytes, settings)
    asked = recipe.ranges.get("batch")
    most = asked.max if asked else _LARGEST_BATCH
    batch = largest(sizes.needed, memory_bytes, most)
    if batch is None:
        least = sizes.needed(1)
        return Fits(
            **_nothing(memory_bytes),
            source=sizes.source,
            builds=sizes.tried,
            reason=_sentences(f"even batch 1 needs {format_bytes(least)} ({least} bytes)", sizes.lacking(1)),
        )
    parts = sizes.parts(batch)
    workspace, note = sizes.workspace(batch)
    end = "" if batch < most else f"larger batches than {most} were not tried"
    return Fits(
        memory_bytes=memory_bytes,
        largest_batch=batch,
        needed_bytes=sum(parts.values()),
        **parts,
        smallest_workspace_bytes=workspace,
        workspace_note=note,
        source=sizes.source,
        builds=sizes.tried,
        reason=_sentences(end, sizes.lacking(batch)),
    )


def _sentences(*parts: str) -> str:
    return "; ".join(filter(None, parts))


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
    return tuple(_kept(group, share) for group in groups.values())


def _kept(group: list[tuple[int, float, str]], share: float) -> WorkspaceKept:
    best = max(rate for _, rate, _ in group)
    limit, rate, name = min(one for one in group if one[1] >= share * best)
    return WorkspaceKept(variant=name, workspace_bytes=limit, speed_share=rate / best)


def _nothing(memory_bytes: int) -> dict[str, object]:
    parts = dict.fromkeys(("weights_bytes", "activation_bytes", "io_bytes", "needed_bytes", "largest_batch"))
    return {
        **parts,
        "memory_bytes": memory_bytes,
        "smallest_workspace_bytes": None,
        "workspace_note": "nothing fits",
    }


def largest(needed: Callable[[int], int], limit: int, most: int = _LARGEST_BATCH) -> int | None:
    """Find the largest batch up to ``most`` whose need is within ``limit``, for a need that grows with the batch.

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
    """Choose a larger batch to try: where the line from batch 1 crosses the limit, plus one; at most 64 times this.

    Past ``most`` it is ``most`` itself, which is tried once, and then one more, which ends the search.
    """
    slope = (needed(fits) - needed(1)) / (fits - 1) if fits > 1 else 0.0
    crossing = 1 + math.floor((limit - needed(1)) / slope) + 1 if slope > 0 else 2 * fits
    guess = max(fits + 1, min(crossing, 64 * fits))
    return guess if guess <= most or fits == most else most


def _between(needed: Callable[[int], int], fits: int, over: int, limit: int) -> int:
    """Interpolate between the largest batch that fits and the smallest that does not."""
    slope = (needed(over) - needed(fits)) / (over - fits)
    crossing = fits + math.floor((limit - needed(fits)) / slope)
    return min(max(crossing, fits + 1), over - 1)
