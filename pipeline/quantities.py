"""Compare a variant's numbers besides latency in two runs: memory, size, quality, fidelity, time to build."""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.budgets import why_unknown
from enginesmith.pipeline.run import Run, VariantRecord

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


def quantities(before: Run, after: Run, earlier: VariantRecord, later: VariantRecord) -> tuple[MetricDelta, ...]:
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
    """The difference of two drops; what the metric's samples have in common was taken out in each run by itself."""
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
    """The lowest SQNR of the last stage, over the points of the shape range; it has no spread on the same samples."""
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
    """Builds are timed once each, so whether a difference is more than chance is not known."""
    seconds = [record.build.seconds if record.build else None for record in (earlier, later)]
    found = MetricDelta(name="build_seconds", before=seconds[0], after=seconds[1])
    if None in seconds:
        return _missing(found, "max_build_seconds", earlier, later)
    return found


def _missing(found: MetricDelta, budget: str, earlier: VariantRecord, later: VariantRecord) -> MetricDelta:
    sides = (("first", found.before, earlier), ("second", found.after, later))
    lacking = [(which, why_unknown(record, budget, 0)) for which, value, record in sides if value is None]
    return found.model_copy(update={"note": "; ".join(f"none in the {which} run: {why}" for which, why in lacking)})
