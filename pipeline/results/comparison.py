"""Compare runs: the numbers of their variants with intervals, and what else changed.

The first run is the reference of all others.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

from pydantic import BaseModel, Field

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import (
    LEAST_LAUNCHES,
    MOSTLY_DISTURBED,
    NOISE_REMEDY,
    NORMAL,
    TOO_NOISY,
    Interval,
    divide,
)
from enginesmith.pipeline.results.differences import (
    Differences,
    compare_devices,
    is_same_model,
    list_differences,
    why_no_yardstick,
)
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.results.verdicts import why_unknown

# Whether a variant became slower or faster from one run to another, and how sure that is.
#
# Two runs were measured at different times, so milliseconds of one are not those of the other: clocks, load and
# neighbors differ. What both have is the baseline, measured in turn with every variant. Where it is the same model
# run in the same way, the two speed-ups over it are compared, and what slowed everything down alike cancels.

Basis = Literal["speed-up over eager", "milliseconds"]
_SAME = "both runs have the same measurement: one of them took it from the store"
_DRIFT = "times in milliseconds are compared; the load of the machine may have differed"
_SIDES = ("the reference", "the other run")
"""Names of the two runs in notes, as reports of a comparison call them."""
_SAME_BATCHES = "run both with the same --batch"
Rows = Sequence[LatencyRow]


class Change(BaseModel, frozen=True):
    """A variant's time in the second run as a multiple of that in the first: 1.1 is 10 % slower.

    Without a number, and wherever there is something to know about it, ``note`` says what.
    """

    median: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval."""
    significant: bool | None = None
    """True where the interval leaves 1 out; None where there is none that can be judged by."""
    basis: Basis | None = None
    note: str = ""

    @property
    def too_noisy(self) -> bool:
        """Tell whether the interval is too wide for the estimate to say anything."""
        if self.median is None or self.low is None or self.high is None:
            return False
        return Interval(median=self.median, low=self.low, high=self.high).too_noisy


def compare_latency(
    before: Run, after: Run, variant: str, batch: int, successor: str = "", sides: tuple[str, str] = _SIDES
) -> Change:
    """Compare a variant's latency at a batch size in two runs; the baseline is a variant, too.

    ``successor`` is the one of the second run, where that has another name; notes call the runs by ``sides``.
    """
    rows: list[LatencyRow] = []
    names = variant, successor or variant
    for which, run, name in zip(sides, (before, after), names, strict=True):
        record = next((record for record in run.records if record.id == name), None)
        row = record.row(batch) if record else None
        if row is None:
            return Change(note=_why_none(record, batch, which))
        rows.append(row)
    first, second = rows
    if first == second:
        return Change(median=1.0, low=1.0, high=1.0, significant=False, note=_SAME)
    apart = _no_yardstick(before, after, names, dict(zip(sides, rows, strict=True)))
    if not apart and _positive(first.speedup) and _positive(second.speedup):
        baselines = [baseline for run in (before, after) if (baseline := run.baseline.row(batch))]
        return _judge_ratio(divide(first.speedup, second.speedup), "speed-up over eager", rows, baselines, "", sides)
    if _positive(first.median_ms) and _positive(second.median_ms):
        return _judge_ratio(divide(second.median_ms, first.median_ms), "milliseconds", rows, (), apart, sides)
    few = next((row.reasons["median_ms"] for row in rows if "median_ms" in row.reasons), "the rows have none")
    bare = second.p50_ms / first.p50_ms if first.p50_ms and second.p50_ms else None
    return Change(median=bare, basis="milliseconds", note=f"{apart}; there is no interval: {few}")


def _positive(interval: Interval | None) -> TypeGuard[Interval]:
    return interval is not None and 0 < interval.low <= interval.median <= interval.high


def _judge_ratio(
    ratio: Interval, basis: Basis, rows: Rows, yardsticks: Rows, note: str, sides: tuple[str, str]
) -> Change:
    """Judge a ratio; ``yardsticks`` are the baselines' rows, where they are part of it."""
    unjudged = ""
    few = next(
        ((which, row) for which, row in zip(sides, rows, strict=True) if (row.launches or 0) < LEAST_LAUNCHES), None
    )
    disturbed = max(row.disturbed_share or 0.0 for row in (*rows, *yardsticks))
    if few:
        which, row = few
        unjudged = f"a reliable interval needs {LEAST_LAUNCHES} launches, and {which} has "
        unjudged += f"{row.launches or 'none on record'}; give it more --measure-time"
    elif ratio.too_noisy or (yardsticks and any(row.speedup_disturbed for row in rows)):
        unjudged = f"{TOO_NOISY}; {NOISE_REMEDY}"
    elif disturbed > MOSTLY_DISTURBED:
        unjudged = f"{disturbed:.0%} of the calls of one side waited for a core that other programs used"
    return Change(
        median=ratio.median,
        low=ratio.low,
        high=ratio.high,
        significant=None if unjudged else not ratio.low <= 1.0 <= ratio.high,
        basis=basis,
        note="; ".join(filter(None, (note, unjudged))),
    )


def _no_yardstick(before: Run, after: Run, names: tuple[str, str], rows: Mapping[str, LatencyRow]) -> str:
    """Explain why milliseconds are compared, and not speed-ups; empty where speed-ups can be."""
    eager = before.baseline.id
    if names[0] == eager or names[1] == after.baseline.id:
        return _DRIFT
    for which, row in rows.items():
        if not _positive(row.speedup):
            why = row.reasons.get("speedup", "not recorded")
            return f"{which} has no speed-up over {eager} ({why}), so {_DRIFT}"
    changed = why_no_yardstick(before, after)
    return f"{eager} is not the same in both ({changed}), so {_DRIFT}" if changed else ""


def _why_none(record: VariantRecord | None, batch: int, run: str) -> str:
    if record is None:
        return f"{run} has no such variant"
    row = next((row for row in record.latency if row.batch == batch), None)
    if row is not None:
        why = row.failure or row.reasons.get("p50_ms", "no reason is known")
        return f"not measured at batch {batch} in {run}: {why}"
    if record.latency:
        measured = ", ".join(str(row.batch) for row in record.latency)
        return f"not measured at batch {batch} in {run}, but at {measured}; {_SAME_BATCHES}"
    return f"not measured in {run}: {record.reason or record.reasons.get('latency', 'no reason is known')}"


# Compare a variant's numbers besides latency in two runs: memory, size, quality, fidelity, time to build.

Quantity = Literal["peak_bytes", "size_bytes", "metric", "drop", "sqnr_db", "build_seconds"]

MEMORY_SPREAD = 0.03
"""Share by which peaks of the same engine may lie apart: ``benchmarks/memory_truth.py`` holds them to it over five
fresh processes."""
MEMORY_GRAIN_BYTES = 256 << 10
"""Least difference of peaks that counts in small models: an allocator takes so much from the system at once."""


class MetricDelta(BaseModel, frozen=True):
    """One number of a variant in two runs, in the unit that its name ends in."""

    name: Quantity
    before: float | None = None
    after: float | None = None
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval of ``after - before``, where it has one."""
    significant: bool | None = None
    """True where it differs by more than the number's own spread; None where that is not known."""
    comparable: bool = True
    """False where both are known and their difference says nothing: at other batch sizes, of other metrics or data."""
    note: str = ""
    """The reason why a number is missing, or how it was judged."""


def compare_metrics(
    before: Run, after: Run, earlier: VariantRecord, later: VariantRecord, sides: tuple[str, str] = _SIDES
) -> tuple[MetricDelta, ...]:
    """Compare all of them; a missing number has its reason."""
    records = {sides[0]: earlier, sides[1]: later}
    peaks = [record.peak_bytes for record in records.values()]
    sizes = [record.artifact.bytes if record.artifact else None for record in records.values()]
    seconds = [record.build.seconds if record.build else None for record in records.values()]
    return (
        _note_missing("peak_bytes", peaks, "max_memory_bytes", records) or _compare_memory(earlier, later, sides),
        _note_missing("size_bytes", sizes, "max_size_bytes", records)
        or MetricDelta(name="size_bytes", before=sizes[0], after=sizes[1], significant=sizes[0] != sizes[1]),
        (drop := _compare_drops(before, after, records)).model_copy(update=_compare_values(drop, records)),
        drop,
        _compare_fidelity(before, after, earlier, later),
        # builds are timed once, so that chance cannot be told from a difference
        _note_missing("build_seconds", seconds, "max_build_seconds", records)
        or MetricDelta(name="build_seconds", before=seconds[0], after=seconds[1]),
    )


def _note_missing(
    name: Quantity, values: Sequence[float | None], budget: str, records: Mapping[str, VariantRecord]
) -> MetricDelta | None:
    """Explain why one of two numbers is missing, as its budget explains it; None if both are known."""
    sides = zip(values, records.items(), strict=True)
    missing = [
        f"none in {which}: {why_unknown(record, budget, 0)}" for value, (which, record) in sides if value is None
    ]
    return MetricDelta(name=name, before=values[0], after=values[1], note="; ".join(missing)) if missing else None


def _compare_memory(earlier: VariantRecord, later: VariantRecord, sides: tuple[str, str]) -> MetricDelta:
    rows = (row for row in (earlier.memory, later.memory) if row is not None)
    (first, before), (second, after) = ((row.batch, row.peak_bytes or 0) for row in rows)
    delta = MetricDelta(name="peak_bytes", before=before, after=after)
    if first != second:
        where = f"it was measured at batch {first} in {sides[0]}, at batch {second} in {sides[1]}"
        return delta.model_copy(update={"comparable": False, "note": f"{where}; {_SAME_BATCHES}"})
    return delta.model_copy(update={"significant": abs(after - before) > spread_of_peaks(before)})


def spread_of_peaks(peak: float) -> float:
    """Compute by how much peaks of the same engine may lie apart, in bytes."""
    return max(MEMORY_SPREAD * peak, MEMORY_GRAIN_BYTES)


def _compare_drops(before: Run, after: Run, records: Mapping[str, VariantRecord]) -> MetricDelta:
    """Compare two drops; what the metric's samples have in common was taken out in each run by itself."""
    old, other = (record.quality for record in records.values())
    drops = [quality.drop if quality else None for quality in (old, other)]
    if old is None or other is None:
        missing = _note_missing("drop", drops, "max_drop", records)
        assert missing is not None
        return missing
    delta = MetricDelta(name="drop", before=old.drop, after=other.drop)
    sides = ((old, before.model.data), (other, after.model.data))
    digests = {quality.data_sha256 for quality, _ in sides if quality.data_sha256}
    if len({(quality.metric, quality.samples, data) for quality, data in sides}) > 1:
        names = ((data or "unknown").partition(" (choice:")[0] for _, data in sides)  # they were judged on other rows
        descriptions = (
            f"{quality.metric} on {quality.basis} of {name} data"
            for (quality, _), name in zip(sides, names, strict=True)
        )
        note = f"{' and '.join(descriptions)} cannot be compared"
        return delta.model_copy(update={"comparable": False, "note": note})
    if len(digests) > 1:
        note = f"{before.model.data or 'the data'} has other samples or labels now"
        return delta.model_copy(update={"comparable": False, "note": note})
    if old == other:
        return delta.model_copy(update={"low": 0.0, "high": 0.0, "significant": False})
    ends = [end for end in (old.drop_low, old.drop_high, other.drop_low, other.drop_high) if end is not None]
    if len(ends) < 4:
        return delta.model_copy(update={"note": f"{old.metric} has no interval"})
    least, most, lower, upper = ends
    apart = other.drop - old.drop
    low = apart - math.hypot(other.drop - lower, most - old.drop)
    high = apart + math.hypot(upper - other.drop, old.drop - least)
    return delta.model_copy(update={"low": low, "high": high, "significant": not low <= 0 <= high})


def _compare_values(drop: MetricDelta, records: Mapping[str, VariantRecord]) -> dict[str, Any]:
    """Compare the metric itself, where drops can be compared: each of them is against its own run's model alone.

    Which samples changed is not known, so the interval is that of two sets of samples, which is wider.
    """
    fields: dict[str, Any] = {"name": "metric", "before": None, "after": None, "note": ""}
    qualities = [record.quality for record in records.values() if record.quality]
    if len(qualities) < len(records) or not drop.comparable:
        return fields
    old, new = qualities
    fields |= {"before": old.value, "after": new.value, "low": None, "high": None, "significant": None}
    if old.spread is None or new.spread is None:
        return fields | {"note": f"{old.metric} has no interval"}
    half = NORMAL * math.hypot(old.spread, new.spread) / math.sqrt(old.samples) if old != new else 0.0
    apart = new.value - old.value
    return fields | {"low": apart - half, "high": apart + half, "significant": abs(apart) > half}


def _compare_fidelity(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord) -> MetricDelta:
    """Compare the lowest SQNR of the last stage over all shapes, which has no spread on the same samples."""
    values = []
    for record in (earlier, later):
        last = [entry.sqnr_db for entry in record.fidelity if entry.stage == record.fidelity[-1].stage]
        values.append(min((sqnr for sqnr in last if sqnr is not None), default=None))
    note = ""
    if None in values:
        note = "its outputs were not compared with eager's in both runs"
    elif (before.model.data, before.model.shapes) != (after.model.data, after.model.shapes):
        note = "on other samples"
    return MetricDelta(name="sqnr_db", before=values[0], after=values[1], note=note)


SCHEMA: Literal["enginesmith.comparison/1"] = "enginesmith.comparison/1"

_MANY = 20
"""Intervals of 95 % from which one is expected to leave out what is true by chance."""


class BatchComparison(BaseModel, frozen=True):
    """Latency at one batch size; ``change`` says what of it holds."""

    batch: int
    before_p50_ms: float | None = None
    after_p50_ms: float | None = None
    before_p99_ms: float | None = None
    after_p99_ms: float | None = None
    before_speedup: Interval | None = None
    after_speedup: Interval | None = None
    before_speedup_too_noisy: bool = False
    after_speedup_too_noisy: bool = False
    change: Change


class VariantComparison(BaseModel, frozen=True):
    """One variant of both runs."""

    id: str
    before_status: str
    after_status: str
    latency: tuple[BatchComparison, ...] = ()
    numbers: tuple[MetricDelta, ...] = ()


class Side(BaseModel, frozen=True):
    """One run of a comparison."""

    path: str
    created: str
    winner: str | None
    measured: bool
    """True where there is any latency or memory in it."""


class Pair(BaseModel, frozen=True):
    """A run beside the reference."""

    before: Side
    after: Side
    cautions: tuple[str, ...] = ()
    changed: Differences
    variants: tuple[VariantComparison, ...] = ()
    """The baseline first."""
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()


class Comparison(BaseModel, frozen=True, populate_by_name=True):
    """Describe the whole document."""

    schema_name: Literal["enginesmith.comparison/1"] = Field(SCHEMA, alias="schema")
    pairs: tuple[Pair, ...]


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
        apart = () if any_device else compare_devices(before, after)
        if apart and _is_measured(before) and _is_measured(after):
            where = "; ".join(map(str, apart))
            raise UsageError(
                f"{reference} and {path} were measured on different devices ({where}): their times cannot be compared",
                "compare runs of one machine, or give --any-device to compare them anyway",
            )
    return Comparison(pairs=tuple(_pair(reference, before, path, after) for path, after in others))


def _pair(reference: Path, before: Run, path: Path, after: Run) -> Pair:
    earlier = {record.id: record for record in before.records}
    later = {record.id: record for record in after.records}
    both = [name for name in earlier if name in later]
    variants = tuple(compare_variants(before, after, earlier[name], later[name]) for name in both)
    first, second = (
        Side(path=str(path), created=run.created, winner=run.winner, measured=_is_measured(run))
        for path, run in ((reference, before), (path, after))
    )
    return Pair(
        before=first,
        after=second,
        cautions=tuple(_cautions(first, second, before, after, variants)),
        changed=list_differences(before, after),
        variants=variants,
        only_before=tuple(name for name in earlier if name not in later),
        only_after=tuple(name for name in later if name not in earlier),
    )


def _is_measured(run: Run) -> bool:
    return any(record.peak_bytes is not None or any(row.p50_ms for row in record.latency) for record in run.records)


def compare_variants(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord) -> VariantComparison:
    """Compare a variant of the first run with one of the second, which may have another name."""
    batches = dict.fromkeys(row.batch for record in (earlier, later) for row in record.latency)
    rows = [(batch, earlier.row(batch), later.row(batch)) for batch in sorted(batches)]
    latency = (
        BatchComparison(
            batch=batch,
            before_p50_ms=first and first.p50_ms,
            after_p50_ms=second and second.p50_ms,
            before_p99_ms=first and first.p99_ms,
            after_p99_ms=second and second.p99_ms,
            before_speedup=first and first.speedup,
            after_speedup=second and second.speedup,
            before_speedup_too_noisy=bool(first and first.speedup_too_noisy),
            after_speedup_too_noisy=bool(second and second.speedup_too_noisy),
            change=compare_latency(before, after, earlier.id, batch, later.id),
        )
        for batch, first, second in rows
    )
    return VariantComparison(
        id=earlier.id,
        before_status=earlier.status,
        after_status=later.status,
        latency=tuple(latency),
        numbers=compare_metrics(before, after, earlier, later),
    )


def warn_of_chance(variants: Iterable[VariantComparison]) -> Iterator[str]:
    """Tell how many of many intervals leave out what is true by chance."""
    count = sum(
        row.change.basis is not None and row.change.low is not None for each in variants for row in each.latency
    )
    if count >= _MANY:
        yield f"of {count} intervals of 95 %, {count / _MANY:.0f} are expected to leave 1 out by chance"


def _cautions(before: Side, after: Side, old: Run, other: Run, variants: Sequence[VariantComparison]) -> Iterator[str]:
    """List what has to be known before any number is believed, the gravest first."""
    if is_same_model(old, other) is False:
        yield "the runs are of different models: what differs may be due to that alone"
    yield from (f"measured on different devices: {apart}" for apart in compare_devices(old, other))
    for side, run in ((before, old), (after, other)):
        if not side.measured:
            yield f"nothing was measured in {side.path}"
        elif not any(row.p50_ms for row in run.baseline.latency):
            yield f"{run.baseline.id} was not measured in {side.path}, so it has no speed-ups"
        if not run.complete:
            yield f"{side.path} is not complete; `enginesmith resume {side.path}` does the rest"
        batches = {row.batch for record in run.records for row in record.latency if row.p50_ms}
        shared = {row.batch for variant in variants for row in variant.latency if row.change.basis or row.change.median}
        if side.measured and (alone := sorted(batches - shared)):
            yield f"batch {', '.join(map(str, alone))} was measured in {side.path} alone"
    yield from warn_of_chance(variants)
    for side, run in ((before, old), (after, other)):
        for warning in run.environment.get("warnings", ()):
            yield f"{side.path}: {warning}"
