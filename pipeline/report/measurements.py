"""Tables of what was measured beside latency: throughput, memory by part, limits of the machine, time by module."""

from collections.abc import Iterator

from enginesmith.pipeline.measure import profile_table
from enginesmith.pipeline.measure.latency import LatencyRow, Throughput
from enginesmith.pipeline.report.tables import marked, ms
from enginesmith.pipeline.run import Run, VariantRecord
from enginesmith.pipeline.units import format_bytes

THROUGHPUT = ("variant", "batch", "callers", "samples/s [95 %]", "p50 ms", "p99 ms", "")
MEMORY = ("variant", "batch", "peak", "weights", "activations", "host", "what")
LIMITS = ("variant", "batch", "measured ms", "floor ms", "measured/floor", "bound by", "in words")
_DISTURBED = 0.5


def _records(run: Run) -> tuple[VariantRecord, ...]:
    return (run.baseline, *run.variants)


def throughput(run: Run) -> list[tuple[str, ...]]:
    """A row for each number of callers; columns as in :data:`THROUGHPUT`."""
    return [
        (marked(record), str(row.batch), str(level.callers), f"{rate.median:.4g} [{rate.low:.4g}, {rate.high:.4g}]")
        + (ms(level.p50_ms), ms(level.p99_ms), "; ".join(_said(level, row)))
        for record in _records(run)
        for row in record.latency
        for level in row.concurrency
        for rate in (level.samples_per_s,)
    ]


def _said(level: Throughput, row: LatencyRow) -> Iterator[str]:
    if level.callers == row.knee:
        yield "the knee"
    if level.callers > 1 and row.sibling_note:
        yield row.sibling_note


def memory(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant, by part; columns as in :data:`MEMORY`."""
    return [
        (marked(record), str(row.batch), format_bytes(row.peak_bytes), format_bytes(row.weights_bytes))
        + (format_bytes(row.activation_bytes), format_bytes(row.host_peak_bytes), row.failure or "measured")
        for record in _records(run)
        if (row := record.memory)
    ]


def limits(run: Run) -> list[tuple[str, ...]]:
    """How far each variant is from what the device can do; columns as in :data:`LIMITS`."""
    return [
        (marked(record), str(row.batch), ms(row.measured_ms), ms(row.floor_ms))
        + ("–" if row.measured_over_floor is None else f"{row.measured_over_floor:.3g}×", row.bound_by, row.summary)
        for record in _records(run)
        for row in record.limits
    ]


def profile(run: Run) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the time by module, the baseline's beside those of all variants."""
    found = [one for record in _records(run) for one in record.profile]
    return profile_table.columns(found) if found else (), profile_table.cells(found)


def profiled(run: Run) -> Iterator[str]:
    """For each profile whose figures they are, what profiling cost and what it does not tell; or why there is none."""
    for record in _records(run):
        for found in record.profile:
            row = record.row(found.batch)
            if found.total_ms is None:
                parts: tuple[str, ...] = (found.reasons["total_ms"],)
            else:
                parts = (f"by {found.source}", found.overhead(row.p50_ms if row else None), *found.notes)
            yield f"profile of {marked(record)} at batch {found.batch}: {'; '.join(filter(None, parts))}"


def out_of_memory(run: Run) -> Iterator[str]:
    """For each variant that ran out of memory, what it asked for, and the largest batch that fits."""
    for record in _records(run):
        full = next((row for row in record.latency if row.oom), None)
        if full is None or full.oom is None:
            continue
        fits = max((row.batch for row in record.latency if not row.failure), default=None)
        asked = f"asked for {format_bytes(full.oom.asked_bytes)}" if full.oom.asked_bytes else "out of memory"
        free = f", {format_bytes(full.oom.free_bytes)} free" if full.oom.free_bytes is not None else ""
        back = {True: "; its memory is back", False: "; its memory was not seen to be back", None: ""}
        largest = f"the largest batch that fits is {fits}" if fits else "no batch fits"
        yield f"{marked(record)}: {largest}; batch {full.batch} {asked}{free}{back[full.oom.given_back]}"


def disturbed(run: Run) -> Iterator[str]:
    """Measurements that others disturbed so much that even medians are of disturbed calls."""
    for record in _records(run):
        for row in record.latency:
            if row.disturbed_share is not None and row.disturbed_share > _DISTURBED:
                yield (
                    f"{marked(record)} at batch {row.batch}: in {row.disturbed_share:.0%} of the calls its threads "
                    "waited for a core that others had; measure again on a quieter machine"
                )


def notes(run: Run) -> tuple[str, ...]:
    """All that is to be said of these tables."""
    return (*profiled(run), *out_of_memory(run), *disturbed(run))
