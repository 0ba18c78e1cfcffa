"""Render what was measured: latency, memory, batch sizes, the machine's limits, and where time goes."""

import itertools
from collections.abc import Iterator

from enginesmith.pipeline.report import measurements, provenance
from enginesmith.pipeline.report.html.blocks import (
    Block,
    Table,
    Words,
    filled,
    folded,
    points,
    table,
    without_empty,
)
from enginesmith.pipeline.report.html.glance import disturbances
from enginesmith.pipeline.report.html.placing import Placed
from enginesmith.pipeline.run import Run

_MOST_ROWS = 20_000
_REASONS = 2


def render_latency(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List the distributions and percentiles of single calls."""
    first, *others = placed.by_batch("ecdf", run.deciding_batch) or (None,)
    whys = "; ".join(measurements.percentiles_missing(run)[:_REASONS])
    missing = [f"Why some have no p99: {whys}."] if whys else []
    device = table(
        "on-device",
        "The host's clock beside the device's",
        measurements.LATENCY_ON_DEVICE,
        measurements.on_device(run),
        sortable=True,
    )
    return (
        *([first] if first else []),
        *folded("The distribution at other batch sizes", *others),
        *filled(_timed(run)),
        *filled(device),
        *points((*missing, *(f"{note}." for note in disturbances(run)))),
    )


def _timed(run: Run) -> Table:
    values = tuple(
        (None, float(row.batch), row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms, row.p99_9_ms, row.mean_ms)
        + (row.speedup.median if row.speedup else None, row.n, row.rounds, row.launches, row.disturbed_share)
        + (row.load_ms, row.first_call_ms, None)
        for record in (run.baseline, *run.variants)
        for row in record.latency
    )
    caption = f"Latency of one call by variant and batch size; speed-up is paired by round against {run.baseline.id}"
    rows = tuple(measurements.latency(run))
    return Table("latencies", caption, measurements.LATENCY, rows, values, sortable=True)


def render_memory(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List peak memory by part, and the figures of the engines."""
    caption = "What engines say of themselves, and how long building them took"
    built = table("engines", caption, measurements.ENGINES, measurements.engines(run), sortable=True)
    unsaid = [f"{said}." for said in measurements.unsaid(run)]
    seen = table("lenses", "Memory by every way that it was looked at", measurements.LENSES, measurements.lenses(run))
    return (
        *placed.under("memory"),
        *filled(without_empty(built)),
        *points(unsaid),
        *folded("Every number of memory, with its source", *filled(seen)),
    )


def render_batch_sweep(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List latency and throughput by batch size and callers."""
    caption = "Throughput with several callers at the same time"
    callers = table("callers", caption, measurements.THROUGHPUT, measurements.throughput(run), sortable=True)
    charts = placed.under("latency-by-batch", "throughput-by-batch", "concurrency")
    return (*charts, *folded(caption, *filled(callers)))


def render_limits(run: Run, placed: Placed) -> tuple[Block, ...]:
    """Compare each variant with the limits of the device."""
    caption = "What the machine can do at best, measured in this run"
    rates = table("rates", caption, provenance.RATES, provenance.rates(run.limits))
    warnings = run.limits.warnings if run.limits else ()
    return (*placed.under("limits"), *filled(rates), *points(f"{warning}." for warning in warnings))


def render_profile(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List time by module and operator."""
    modules = _many(
        "modules", "Modules beside the baseline's", measurements.BY_MODULE, measurements.by_module(run), run
    )
    operators = _many("operators", "Operators by module", measurements.OPERATORS, measurements.operators(run), run)
    profiled = [one for record in (run.baseline, *run.variants) for one in record.profile]
    sizes = ", ".join(str(batch) for batch in sorted({one.batch for one in profiled}))
    said = f"At batch {sizes}. Profilers slow down what they look at: this says how time is divided."
    notes = points(f"{note[:1].upper()}{note[1:]}." for note in measurements.profiled(run))
    return (
        *([Words(said)] if profiled else []),
        *placed.under("profile"),
        *folded("Every module, and why it takes more or less than in the baseline", *filled(modules)),
        *folded("Every operator, by the module whose work it does", *filled(operators)),
        *folded("What the profilers say of themselves", *notes),
    )


def _many(name: str, caption: str, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]], run: Run) -> Table:
    """A table of profiles, which may have more rows than anybody reads; the winner's come first."""
    kept = tuple(itertools.islice(rows, _MOST_ROWS))
    total = measurements.profile_rows(run) if len(kept) == _MOST_ROWS else len(kept)
    return Table(name, caption, columns, kept, searched=True, total=total)
