"""Whether a variant became slower or faster from one run to another, and how sure that is.

Two runs were measured at different times, so milliseconds of one are not those of the other: clocks, load and
neighbours differ. What both have is the baseline, measured in turn with every variant. Where it is the same model run
in the same way, the two speed-ups over it are compared, and what slowed everything down alike cancels.

The interval of a ratio of two estimates is made of theirs, on the log scale: the distance from the estimate to each end
is the root of the sum of squares of the two distances that lead there (Zou & Donner, "Construction of confidence
limits about effect measures: a general approach", Statistics in Medicine 27, 2008).
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeGuard

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline import differences
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import LEAST_LAUNCHES, NOISE_REMEDY, TOO_NOISY, Interval
from enginesmith.pipeline.run import Run, VariantRecord

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


def latency_change(before: Run, after: Run, variant: str, batch: int, successor: str = "") -> Change:
    """Compare a variant's latency at a batch size in two runs; the baseline is a variant, too.

    ``successor`` is the one of the second run, where that has another name.
    """
    rows: list[LatencyRow] = []
    names = variant, successor or variant
    for which, run, name in zip(("first", "second"), (before, after), names, strict=True):
        record = record_of(run, name)
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
        return _judged(ratio(second.speedup, first.speedup), "speed-up over eager", rows, baselines, "")
    if _positive(first.median_ms) and _positive(second.median_ms):
        return _judged(ratio(first.median_ms, second.median_ms), "milliseconds", rows, (), apart)
    few = next((row.reasons["median_ms"] for row in rows if "median_ms" in row.reasons), "the rows have none")
    bare = second.p50_ms / first.p50_ms if first.p50_ms and second.p50_ms else None
    return Change(median=bare, basis="milliseconds", note=f"{apart}; there is no interval: {few}")


def record_of(run: Run, variant: str) -> VariantRecord | None:
    """A variant, or the baseline, by its id."""
    return next((record for record in (run.baseline, *run.variants) if record.id == variant), None)


def ratio(below: Interval, above: Interval) -> Interval:
    """``above / below`` of two independent positive estimates."""
    centre = math.log(above.median / below.median)
    down = math.hypot(math.log(above.median / above.low), math.log(below.high / below.median))
    up = math.hypot(math.log(above.high / above.median), math.log(below.median / below.low))
    return Interval(median=math.exp(centre), low=math.exp(centre - down), high=math.exp(centre + up))


def _positive(found: Interval | None) -> TypeGuard[Interval]:
    return found is not None and 0 < found.low <= found.median <= found.high


def _judged(found: Interval, basis: Basis, rows: Rows, yardsticks: Rows, note: str) -> Change:
    """``yardsticks`` are the baselines' rows, where they are part of it."""
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
    """Why milliseconds are compared, and not speed-ups; empty where speed-ups can be."""
    drift = "what else happened on the machine at either time is in them"
    if names[0] == before.baseline.id or names[1] == after.baseline.id:
        return f"milliseconds of the baseline itself: {drift}"
    for which, row in (("first", first), ("second", second)):
        if not _positive(row.speedup):
            why = row.reasons.get("speedup", "not recorded")
            return f"the {which} run has no speed-up ({why}), so milliseconds: {drift}"
    changed = differences.of_baseline(before, after)
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
