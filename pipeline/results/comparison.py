"""Compare runs: the numbers of their variants with intervals, and what else changed.

The first run is the reference of all others. How latency is compared stands in ``latency_change.py``, what runs differ
in besides numbers in ``differences.py``.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import LEAST_LAUNCHES, NOISE_REMEDY, TOO_NOISY, Interval, divide
from enginesmith.pipeline.results import differences
from enginesmith.pipeline.results.budgets import why_unknown
from enginesmith.pipeline.results.differences import Differences
from enginesmith.pipeline.results.run import Run, VariantRecord

# Whether a variant became slower or faster from one run to another, and how sure that is.
#
# Two runs were measured at different times, so milliseconds of one are not those of the other: clocks, load and
# neighbours differ. What both have is the baseline, measured in turn with every variant. Where it is the same
# model run
# in the same way, the two speed-ups over it are compared, and what slowed everything down alike cancels.

Basis = Literal["speed-up over eager", "milliseconds"]
_SAME = "both runs hold the same measurement: the second took it from the store"
MOSTLY_DISTURBED = 0.5
"""Share of disturbed calls from which even medians are of such, and say little of the quiet machine."""
Rows = Sequence[LatencyRow]


class Change(BaseModel):
    """How long a variant takes in the second run, as a multiple of the first: 1.1 is 10 % slower.

    Without a number, and wherever there is something to know about it, ``note`` says what.
    """

    model_config = ConfigDict(frozen=True)

    median: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval."""
    significant: bool | None = None
    """Whether the interval leaves 1 out; None where there is none that can be judged by."""
    basis: Basis | None = None
    note: str = ""

    @property
    def too_noisy(self) -> bool:
        """Tell whether the interval is too wide for the estimate to say anything."""
        if self.median is None or self.low is None or self.high is None:
            return False
        return Interval(median=self.median, low=self.low, high=self.high).too_noisy


def compare_latency(before: Run, after: Run, variant: str, batch: int, successor: str = "") -> Change:
    """Compare a variant's latency at a batch size in two runs; the baseline is a variant, too.

    ``successor`` is the one of the second run, where that has another name.
    """
    rows: list[LatencyRow] = []
    names = variant, successor or variant
    for which, run, name in zip(("first", "second"), (before, after), names, strict=True):
        record = _find_record(run, name)
        row = record.row(batch) if record else None
        if row is None:
            return Change(note=_why_none(record, batch, f"the {which} run"))
        rows.append(row)
    first, second = rows
    if first == second:
        return Change(median=1.0, low=1.0, high=1.0, significant=False, note=_SAME)
    apart = _no_yardstick(before, after, names, first, second)
    if not apart and _positive(first.speedup) and _positive(second.speedup):
        baselines = [found for run in (before, after) if (found := run.baseline.row(batch))]
        return _judged(divide(first.speedup, second.speedup), "speed-up over eager", rows, baselines, "")
    if _positive(first.median_ms) and _positive(second.median_ms):
        return _judged(divide(second.median_ms, first.median_ms), "milliseconds", rows, (), apart)
    few = next((row.reasons["median_ms"] for row in rows if "median_ms" in row.reasons), "the rows have none")
    bare = second.p50_ms / first.p50_ms if first.p50_ms and second.p50_ms else None
    return Change(median=bare, basis="milliseconds", note=f"{apart}; there is no interval: {few}")


def _find_record(run: Run, variant: str) -> VariantRecord | None:
    """Look up a variant, or the baseline, by its id."""
    return next((record for record in run.records if record.id == variant), None)


def _positive(found: Interval | None) -> TypeGuard[Interval]:
    return found is not None and 0 < found.low <= found.median <= found.high


def _judged(found: Interval, basis: Basis, rows: Rows, yardsticks: Rows, note: str) -> Change:
    """Judge a ratio; ``yardsticks`` are the baselines' rows, where they are part of it."""
    noise = f"not judged: {TOO_NOISY}; {NOISE_REMEDY}" if found.too_noisy else ""
    unjudged = next((why for why in (_few_launches(rows), noise, _disturbed((*rows, *yardsticks))) if why), "")
    return Change(
        median=found.median,
        low=found.low,
        high=found.high,
        significant=None if unjudged else not found.low <= 1.0 <= found.high,
        basis=basis,
        note="; ".join(filter(None, (note, unjudged))),
    )


def _few_launches(rows: Rows) -> str:
    for which, row in zip(("first", "second"), rows, strict=True):
        if (row.launches or 0) < LEAST_LAUNCHES:
            return (
                f"not judged: an interval that holds for another start takes {LEAST_LAUNCHES} launches, and the "
                f"{which} run has {row.launches or 'none on record'}; give it more --measure-time"
            )
    return ""


def _disturbed(rows: Rows) -> str:
    worst = max((row.disturbed_share or 0.0 for row in rows), default=0.0)
    if worst <= MOSTLY_DISTURBED:
        return ""
    return f"not judged: {worst:.0%} of the calls of one side waited for a core that others had"


def _no_yardstick(before: Run, after: Run, names: tuple[str, str], first: LatencyRow, second: LatencyRow) -> str:
    """Explain why milliseconds are compared, and not speed-ups; empty where speed-ups can be."""
    drift = "what else happened on the machine at either time is in them"
    if names[0] == before.baseline.id or names[1] == after.baseline.id:
        return f"milliseconds of the baseline itself: {drift}"
    for which, row in (("first", first), ("second", second)):
        if not _positive(row.speedup):
            why = row.reasons.get("speedup", "not recorded")
            return f"the {which} run has no speed-up ({why}), so milliseconds: {drift}"
    changed = differences.why_no_yardstick(before, after)
    return f"the baselines are not the same ({changed}), so milliseconds: {drift}" if changed else ""


def _why_none(record: VariantRecord | None, batch: int, run: str) -> str:
    if record is None:
        return f"{run} has no such variant"
    row = next((row for row in record.latency if row.batch == batch), None)
    if row is not None:
        why = row.failure or row.reasons.get("p50_ms", "no reason is known")
        return f"not measured at batch {batch} in {run}: {why}"
    if record.latency:
        measured = ", ".join(str(row.batch) for row in record.latency)
        return f"not measured at batch {batch} in {run}: it was at {measured}"
    return f"not measured in {run}: {record.reason or record.reasons.get('latency', 'no reason is known')}"


# Compare a variant's numbers besides latency in two runs: memory, size, quality, fidelity, time to build.

Quantity = Literal["peak_bytes", "size_bytes", "drop", "sqnr_db", "build_seconds"]

MEMORY_SPREAD = 0.03
"""How far peaks of the same engine may lie apart, as a share: what ``benchmarks/memory_truth.py`` holds them to over
five fresh processes."""
MEMORY_GRAIN_BYTES = 256 << 10
"""The same in bytes, for small models: what an allocator takes from the system at once."""


class MetricDelta(BaseModel):
    """Compare one number of a variant in two runs, in the unit that its name ends in."""

    model_config = ConfigDict(frozen=True)

    name: Quantity
    before: float | None = None
    after: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval of ``after - before``, where it has one."""
    significant: bool | None = None
    """Whether it differs by more than the number's own spread; None where that is not known."""
    note: str = ""
    """Why a number is missing, or how it was judged."""


def compare_metrics(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord) -> tuple[MetricDelta, ...]:
    """Compare all of them; a missing number has its reason."""
    return (
        _memory(earlier, later),
        _size(earlier, later),
        _drop(before, after, earlier, later),
        _fidelity(before, after, earlier, later),
        _build(earlier, later),
    )


def _memory(earlier: VariantRecord, later: VariantRecord) -> MetricDelta:
    found = MetricDelta(name="peak_bytes", before=earlier.peak_bytes, after=later.peak_bytes)
    if found.before is None or found.after is None:
        return _missing(found, "max_memory_bytes", earlier, later)
    assert earlier.memory is not None
    assert later.memory is not None
    if earlier.memory.batch != later.memory.batch:
        at = f"at batch {earlier.memory.batch} and at batch {later.memory.batch}: they do not compare"
        return found.model_copy(update={"note": at})
    spread = max(MEMORY_SPREAD * found.before, MEMORY_GRAIN_BYTES)
    return found.model_copy(update={"significant": abs(found.after - found.before) > spread})


def _size(earlier: VariantRecord, later: VariantRecord) -> MetricDelta:
    sizes = [record.artifact.bytes if record.artifact else None for record in (earlier, later)]
    found = MetricDelta(name="size_bytes", before=sizes[0], after=sizes[1])
    if None in sizes:
        return _missing(found, "max_size_bytes", earlier, later)
    return found.model_copy(update={"significant": sizes[0] != sizes[1]})


def _drop(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord) -> MetricDelta:
    """Compare two drops; what the metric's samples have in common was taken out in each run by itself."""
    one, other = earlier.quality, later.quality
    found = MetricDelta(name="drop", before=one and one.drop, after=other and other.drop)
    if one is None or other is None:
        return _missing(found, "max_drop", earlier, later)
    if (one.metric, one.samples, before.model.data) != (other.metric, other.samples, after.model.data):
        sides = ((one, before.model.data), (other, after.model.data))
        said = (f"{quality.metric} on {quality.samples} samples of {data or 'unknown'} data" for quality, data in sides)
        return found.model_copy(update={"note": f"{' and '.join(said)} do not compare"})
    if one == other:
        return found.model_copy(update={"low": 0.0, "high": 0.0, "significant": False})
    ends = one.drop_low, one.drop_high, other.drop_low, other.drop_high
    if any(end is None for end in ends):
        return found.model_copy(update={"note": f"{one.metric} has no interval"})
    least, most, lower, upper = (end for end in ends if end is not None)
    apart = other.drop - one.drop
    low = apart - math.hypot(other.drop - lower, most - one.drop)
    high = apart + math.hypot(upper - other.drop, one.drop - least)
    return found.model_copy(update={"low": low, "high": high, "significant": not low <= 0 <= high})


def _fidelity(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord) -> MetricDelta:
    """Compare the lowest SQNR of the last stage over all shapes, which has no spread on the same samples."""
    values = [_lowest(record) for record in (earlier, later)]
    found = MetricDelta(name="sqnr_db", before=values[0], after=values[1])
    if None in values:
        return found.model_copy(update={"note": "its outputs were not held against the baseline's in both runs"})
    if (before.model.data, before.model.shapes) != (after.model.data, after.model.shapes):
        return found.model_copy(update={"note": "on other samples"})
    return found


def _lowest(record: VariantRecord) -> float | None:
    last = record.fidelity[-1].stage if record.fidelity else None
    known = (entry.sqnr_db for entry in record.fidelity if entry.stage == last and entry.sqnr_db is not None)
    return min(known, default=None)


def _build(earlier: VariantRecord, later: VariantRecord) -> MetricDelta:
    """Compare the seconds of builds, each timed once, so that chance cannot be told from a difference."""
    seconds = [record.build.seconds if record.build else None for record in (earlier, later)]
    found = MetricDelta(name="build_seconds", before=seconds[0], after=seconds[1])
    if None in seconds:
        return _missing(found, "max_build_seconds", earlier, later)
    return found


def _missing(found: MetricDelta, budget: str, earlier: VariantRecord, later: VariantRecord) -> MetricDelta:
    sides = (("first", found.before, earlier), ("second", found.after, later))
    lacking = [(which, why_unknown(record, budget, 0)) for which, value, record in sides if value is None]
    return found.model_copy(update={"note": "; ".join(f"none in the {which} run: {why}" for which, why in lacking)})


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
    """Hold the whole document."""

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
            _check_device(reference, before, path, after)
    return Comparison(pairs=tuple(_pair(reference, before, path, after) for path, after in others))


def _check_device(reference: Path, before: Run, path: Path, after: Run) -> None:
    apart = differences.compare_devices(before, after)
    if apart and _measured(before) and _measured(after):
        where = "; ".join(f"{one.name} {one.before} and {one.after}" for one in apart)
        raise UsageError(
            f"{reference} and {path} were measured on different devices ({where}): their times do not compare",
            "compare runs of one machine, or give --any-device to see them side by side all the same",
        )


def _pair(reference: Path, before: Run, path: Path, after: Run) -> Pair:
    earlier = {record.id: record for record in before.records}
    later = {record.id: record for record in after.records}
    both = [name for name in earlier if name in later]
    variants = tuple(compare_variants(before, after, earlier[name], later[name]) for name in both)
    sides = _side(reference, before), _side(path, after)
    return Pair(
        before=sides[0],
        after=sides[1],
        cautions=tuple(_cautions(*sides, before, after, variants)),
        changed=differences.list_differences(before, after),
        variants=variants,
        only_before=tuple(name for name in earlier if name not in later),
        only_after=tuple(name for name in later if name not in earlier),
    )


def _side(path: Path, run: Run) -> Side:
    return Side(path=str(path), created=run.created, winner=run.winner, measured=_measured(run))


def _measured(run: Run) -> bool:
    records = run.records
    return any(record.peak_bytes is not None or any(row.p50_ms for row in record.latency) for record in records)


def compare_variants(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord) -> VariantComparison:
    """Compare a variant of the first run with one of the second, which may have another name."""
    batches = dict.fromkeys(row.batch for record in (earlier, later) for row in record.latency)
    return VariantComparison(
        id=earlier.id,
        before_status=earlier.status,
        after_status=later.status,
        latency=tuple(_batch(before, after, earlier, later, batch) for batch in sorted(batches)),
        numbers=compare_metrics(before, after, earlier, later),
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
        change=compare_latency(before, after, earlier.id, batch, later.id),
    )


def _cautions(before: Side, after: Side, one: Run, other: Run, variants: Sequence[VariantComparison]) -> Iterator[str]:
    """List what has to be known before any number is believed, the gravest first."""
    if differences.is_same_model(one, other) is False:
        yield "the runs are of different models: what differs may be due to that alone"
    for apart in differences.compare_devices(one, other):
        yield f"measured on different devices: {apart.name} is {apart.before} and {apart.after}"
    for side, run in ((before, one), (after, other)):
        if not side.measured:
            yield f"nothing was measured in {side.path}"
        elif not any(row.p50_ms for row in run.baseline.latency):
            yield f"the baseline was not measured in {side.path}, so it has no speed-ups"
        if not run.complete:
            yield f"{side.path} is not complete; `enginesmith resume {side.path}` does the rest"
        batches = {row.batch for record in run.records for row in record.latency}
        shared = {row.batch for found in variants for row in found.latency if row.change.basis or row.change.median}
        if side.measured and (alone := sorted(batches - shared)):
            yield f"batch {', '.join(map(str, alone))} was measured in {side.path} alone"
    judged = [row.change for found in variants for row in found.latency if row.change.basis and row.change.low]
    if len(judged) >= _MANY:
        yield f"of {len(judged)} intervals of 95 %, {len(judged) / 20:.0f} are expected to leave 1 out by chance"
    for side, run in ((before, one), (after, other)):
        for warning in run.environment.get("warnings", ()):
            yield f"{side.path}: {warning}"
