"""Latency and throughput by batch size."""

from collections.abc import Callable, Mapping, Sequence

from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.report.charts.base import Chart, Figure, missing
from enginesmith.pipeline.report.charts.parts import axis, interval, layout, limit, others, places, points, why_none
from enginesmith.pipeline.report.charts.styles import Cast, called
from enginesmith.pipeline.report.charts.text import counted, said
from enginesmith.pipeline.report.tables import marked, ms, rate
from enginesmith.pipeline.run import Run, VariantRecord

LATENCY = ("variant", "batch", "p50 ms", "95 % interval ms", "p99 ms")
THROUGHPUT = ("variant", "batch", "samples/s", "callers")
_Rows = Mapping[str, Sequence[LatencyRow]]
_Intervals = Callable[[LatencyRow], Interval | None]
_Numbers = Callable[[LatencyRow], float | None]
_Words = Callable[[LatencyRow], str]


def latency_by_batch(run: Run) -> Chart:
    """Median latency with its interval, by batch size."""
    cast = Cast(run)
    title = "Median latency (p50, ms) by batch size, with 95 % intervals"
    rows = {record.id: found for record in cast.records if (found := [row for row in record.latency if row.p50_ms])}
    if not rows:
        why = f"No latency was measured: {why_none(run, 'latency', 'nothing has run yet')}."
        return missing("latency-by-batch", title, LATENCY, why)
    single = _single(rows)
    return Chart(
        id="latency-by-batch",
        title=title,
        figure=None if single else _latency_figure(cast, rows),
        summary=_latency_summary(run, cast, rows),
        columns=LATENCY,
        rows=tuple(_latency_cells(one, row) for one in cast.records for row in rows.get(one.id, ())),
        empty=single,
    )


def throughput_by_batch(run: Run) -> Chart:
    """Answered samples in a second, by batch size."""
    cast = Cast(run)
    title = "Throughput (samples/s) by batch size, with 95 % intervals where several callers were measured"
    rows = {
        record.id: found
        for record in cast.records
        if (found := [row for row in record.latency if row.throughput_per_s])
    }
    if not rows:
        why = f"No throughput was measured: {why_none(run, 'latency', 'nothing has run yet')}."
        return missing("throughput-by-batch", title, THROUGHPUT, why)
    single = _single(rows)
    return Chart(
        id="throughput-by-batch",
        title=title,
        figure=None if single else _throughput_figure(run, cast, rows),
        summary=_throughput_summary(run, cast, rows),
        columns=THROUGHPUT,
        rows=tuple(_throughput_cells(one, row) for one in cast.records for row in rows.get(one.id, ())),
        empty=single,
    )


def _batches(rows: _Rows) -> Figure:
    sizes = sorted({row.batch for found in rows.values() for row in found})
    return places("batch size (samples)", {size: str(size) for size in sizes}, type="log")


def _single(rows: _Rows) -> str:
    """Why there is nothing to draw, where there is one batch size only."""
    sizes = {row.batch for found in rows.values() for row in found}
    return "" if len(sizes) > 1 else f"Only batch {sizes.pop()} was measured: --batch 1,8,32 or --sweep measures more."


def _lines(cast: Cast, rows: _Rows, value: _Numbers, between: _Intervals, words: _Words) -> tuple[list[Figure], int]:
    """A number of each row by batch size, with its interval, for those that are named; and entries of the legend."""
    traces: list[Figure] = []
    if rest := cast.rest(rows):
        lines = [([row.batch for row in rows[one.id]], list(map(value, rows[one.id]))) for one in rest]
        traces.append(others(lines, "lines+markers"))
    shown = cast.named(rows)
    for record in shown:
        style, mine = cast.style(record), rows[record.id]
        x, hover = [row.batch for row in mine], [said(marked(record), words(row)) for row in mine]
        traces.append(points(style, x, list(map(value, mine)), hover))
        traces += [bar] if (bar := interval(style, x, list(map(between, mine)))) else []
    return traces, len(shown) + bool(rest)


def _latency_figure(cast: Cast, rows: _Rows) -> Figure:
    traces, legend = _lines(cast, rows, lambda row: row.p50_ms, lambda row: row.median_ms, _latency_words)
    y = axis("p50 latency (ms)", [row.p50_ms for found in rows.values() for row in found])
    return {"data": traces, "layout": layout(_batches(rows), y, legend)}


def _latency_words(row: LatencyRow) -> str:
    tail = f", p99 {ms(row.p99_ms)} ms" if row.p99_ms is not None else ""
    between = (
        f", median within {_between(row.median_ms)} ms" if row.median_ms else ", in too few rounds for an interval"
    )
    return f"batch {row.batch}: p50 {ms(row.p50_ms)} ms{tail}{between}"


def _between(found: Interval | None) -> str:
    return f"[{ms(found.low)}, {ms(found.high)}]" if found else "–"


def _latency_cells(record: VariantRecord, row: LatencyRow) -> tuple[str, ...]:
    return (marked(record), str(row.batch), ms(row.p50_ms), _between(row.median_ms), ms(row.p99_ms))


def _latency_summary(run: Run, cast: Cast, rows: _Rows) -> str:
    record = _told(run, cast, rows)
    mine = rows[record.id]
    first, last = mine[0], mine[-1]
    if first is last:
        text = f"{called(record)} takes {ms(first.p50_ms)} ms at batch {first.batch}, the only one that was measured"
    else:
        text = f"{called(record)} goes from {ms(first.p50_ms)} ms at batch {first.batch} to {ms(last.p50_ms)} ms at "
        text += f"batch {last.batch}"
    theirs = run.baseline.row(last.batch)
    if theirs and record.id != run.baseline.id:
        text += f", where {called(run.baseline)} takes {ms(theirs.p50_ms)} ms"
    return f"{text}{cast.unnamed(rows)}."


def _told(run: Run, cast: Cast, rows: _Rows) -> VariantRecord:
    """Whom the summary is about: the winner, else the fastest at its smallest batch size."""
    having = [record for record in cast.records if record.id in rows]
    winner = next((record for record in having if record.id == run.winner), None)
    return winner or min(having, key=lambda record: rows[record.id][0].p50_ms or float("inf"))


def _throughput_figure(run: Run, cast: Cast, rows: _Rows) -> Figure:
    traces, legend = _lines(cast, rows, lambda row: row.throughput_per_s, _best, _throughput_words)
    least = run.recipe.budgets.min_throughput_per_s
    rates = [row.throughput_per_s or 0.0 for found in rows.values() for row in found]
    y = axis("throughput (samples/s)", [*rates, least])
    shapes = [] if least is None else [limit("y", least, f"budget {rate(least)} samples/s", rates)]
    return {"data": traces, "layout": layout(_batches(rows), y, legend, shapes=shapes)}


def _best(row: LatencyRow) -> Interval | None:
    """The interval of the number of callers that the throughput is of."""
    return max((one.samples_per_s for one in row.concurrency), key=lambda one: one.median, default=None)


def _callers(row: LatencyRow) -> int:
    return max(row.concurrency, key=lambda one: one.samples_per_s.median).callers if row.concurrency else 1


def _throughput_words(row: LatencyRow) -> str:
    best = _best(row)
    between = f" [{rate(best.low)}, {rate(best.high)}]" if best else ""
    callers = counted(_callers(row), "caller")
    return f"batch {row.batch}: {rate(row.throughput_per_s)}{between} samples/s with {callers}"


def _throughput_cells(record: VariantRecord, row: LatencyRow) -> tuple[str, ...]:
    return (marked(record), str(row.batch), rate(row.throughput_per_s), str(_callers(row)))


def _throughput_summary(run: Run, cast: Cast, rows: _Rows) -> str:
    best, row = max(
        ((record, row) for record in cast.records for row in rows.get(record.id, ())),
        key=lambda pair: pair[1].throughput_per_s or 0.0,
    )
    text = f"{called(best)} answers most, {rate(row.throughput_per_s)} samples/s at batch {row.batch}"
    theirs = next((one for one in rows.get(run.baseline.id, ()) if one.batch == row.batch), None)
    if theirs and best.id != run.baseline.id and theirs.throughput_per_s:
        text += f", where {called(run.baseline)} answers {rate(theirs.throughput_per_s)}"
    return f"{text}{cast.unnamed(rows)}."
