"""Runs side by side: the same variants, what became of their numbers and how sure that is, and what else changed.

The first run is the reference of all others. How latency is compared stands in ``latency_change.py``, what runs differ
in besides numbers in ``differences.py``.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from enginesmith.pipeline import differences
from enginesmith.pipeline.differences import Differences
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.latency_change import Change, latency_change
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.quantities import MetricDelta, quantities
from enginesmith.pipeline.run import Run, VariantRecord

__all__ = ["Change", "Comparison", "MetricDelta", "Pair", "beside", "compare", "latency_change"]

SCHEMA: Literal["enginesmith.comparison/1"] = "enginesmith.comparison/1"

_MANY = 20
"""Intervals of 95 % from which one is expected to leave out what is true by chance."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class BatchComparison(_Part):
    """Latency at one batch size; ``change`` says what of it holds."""

    batch: int
    before_p50_ms: float | None = None
    after_p50_ms: float | None = None
    before_p99_ms: float | None = None
    after_p99_ms: float | None = None
    before_speedup: Interval | None = None
    after_speedup: Interval | None = None
    change: Change


class VariantComparison(_Part):
    """One variant of both runs."""

    id: str
    before_status: str
    after_status: str
    latency: tuple[BatchComparison, ...] = ()
    numbers: tuple[MetricDelta, ...] = ()


class Side(_Part):
    """One run of a comparison."""

    path: str
    created: str
    winner: str | None
    measured: bool
    """Whether there is any latency or memory in it."""


class Pair(_Part):
    """A run beside the reference."""

    before: Side
    after: Side
    cautions: tuple[str, ...] = ()
    changed: Differences
    variants: tuple[VariantComparison, ...] = ()
    """The baseline first."""
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()


class Comparison(_Part):
    """The whole document."""

    schema_name: Literal["enginesmith.comparison/1"] = Field(SCHEMA, alias="schema")
    pairs: tuple[Pair, ...]

    model_config = ConfigDict(frozen=True, populate_by_name=True)


def compare(runs: Sequence[tuple[Path, Run]], *, any_device: bool = False) -> Comparison:
    """Compare runs, each with the folder that it was read from, with the first one.

    Raises:
        UsageError: fewer than two, one given twice, or of another kind of device without ``any_device``.
    """
    if len(runs) < 2:
        raise UsageError("one run has nothing to be compared with", "give two or more run directories")
    places = [path.resolve() for path, _ in runs]
    if twice := next((path for path, place in zip(places, places, strict=True) if places.count(place) > 1), None):
        raise UsageError(f"{twice} is given twice", "give each run once")
    (reference, before), *others = runs
    for path, after in others:
        if not any_device:
            _hold_device(reference, before, path, after)
    return Comparison(pairs=tuple(_pair(reference, before, path, after) for path, after in others))


def _hold_device(reference: Path, before: Run, path: Path, after: Run) -> None:
    apart = differences.other_device(before, after)
    if apart and _measured(before) and _measured(after):
        where = "; ".join(f"{one.name} {one.before} and {one.after}" for one in apart)
        raise UsageError(
            f"{reference} and {path} were measured on different devices ({where}): their times do not compare",
            "compare runs of one machine, or give --any-device to see them side by side all the same",
        )


def _pair(reference: Path, before: Run, path: Path, after: Run) -> Pair:
    earlier = {record.id: record for record in (before.baseline, *before.variants)}
    later = {record.id: record for record in (after.baseline, *after.variants)}
    both = [name for name in earlier if name in later]
    variants = tuple(beside(before, after, earlier[name], later[name]) for name in both)
    sides = _side(reference, before), _side(path, after)
    return Pair(
        before=sides[0],
        after=sides[1],
        cautions=tuple(_cautions(*sides, before, after, variants)),
        changed=differences.between(before, after),
        variants=variants,
        only_before=tuple(name for name in earlier if name not in later),
        only_after=tuple(name for name in later if name not in earlier),
    )


def _side(path: Path, run: Run) -> Side:
    return Side(path=str(path), created=run.created, winner=run.winner, measured=_measured(run))


def _measured(run: Run) -> bool:
    records = (run.baseline, *run.variants)
    return any(record.peak_bytes is not None or any(row.p50_ms for row in record.latency) for record in records)


def beside(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord) -> VariantComparison:
    """A variant of the first run and one of the second, which may have another name."""
    batches = dict.fromkeys(row.batch for record in (earlier, later) for row in record.latency)
    return VariantComparison(
        id=earlier.id,
        before_status=earlier.status,
        after_status=later.status,
        latency=tuple(_batch(before, after, earlier, later, batch) for batch in sorted(batches)),
        numbers=quantities(before, after, earlier, later),
    )


def _batch(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord, batch: int) -> BatchComparison:
    first, second = earlier.row(batch), later.row(batch)
    return BatchComparison(
        batch=batch,
        before_p50_ms=first and first.p50_ms,
        after_p50_ms=second and second.p50_ms,
        before_p99_ms=first and first.p99_ms,
        after_p99_ms=second and second.p99_ms,
        before_speedup=first and first.speedup,
        after_speedup=second and second.speedup,
        change=latency_change(before, after, earlier.id, batch, later.id),
    )


def _cautions(before: Side, after: Side, one: Run, other: Run, variants: Sequence[VariantComparison]) -> Iterator[str]:
    """What has to be known before any number is believed, the gravest first."""
    if differences.same_model(one, other) is False:
        yield "the runs are of different models: what differs may be due to that alone"
    for apart in differences.other_device(one, other):
        yield f"measured on different devices: {apart.name} is {apart.before} and {apart.after}"
    for side, run in ((before, one), (after, other)):
        if not side.measured:
            yield f"nothing was measured in {side.path}"
        elif not any(row.p50_ms for row in run.baseline.latency):
            yield f"the baseline was not measured in {side.path}, so it has no speed-ups"
        if not run.complete:
            yield f"{side.path} is not complete; `enginesmith resume {side.path}` does the rest"
        batches = {row.batch for record in (run.baseline, *run.variants) for row in record.latency}
        shared = {row.batch for found in variants for row in found.latency if row.change.basis or row.change.median}
        if side.measured and (alone := sorted(batches - shared)):
            yield f"batch {', '.join(map(str, alone))} was measured in {side.path} alone"
    judged = [row.change for found in variants for row in found.latency if row.change.basis and row.change.low]
    if len(judged) >= _MANY:
        yield f"of {len(judged)} intervals of 95 %, {len(judged) / 20:.0f} are expected to leave 1 out by chance"
    for side, run in ((before, one), (after, other)):
        for warning in run.environment.get("warnings", ()):
            yield f"{side.path}: {warning}"
