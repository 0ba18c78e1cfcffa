"""Draw latency and throughput by batch size."""

from collections.abc import Callable, Mapping, Sequence

from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import TOO_NOISY, Interval
from enginesmith.pipeline.report.charts.plotly import (
    Cast,
    Chart,
    Figure,
    axis,
    draw_line,
    draw_others,
    hover_text,
    intervals,
    layout,
    limit,
    places,
    short_name,
    why_none,
)
from enginesmith.pipeline.report.tables import best_level, format_median_interval, mark_name, rate
from enginesmith.pipeline.units import count_words, ms

_Rows = Mapping[str, Sequence[LatencyRow]]
_Numbers = Callable[[LatencyRow], float | None]


def latency_by_batch(cast: Cast) -> Chart:
    """Draw median latency with its interval by batch size."""
    name, title = "latency-by-batch", "Median latency (p50, ms) by batch size, with 95 % intervals"
    rows, empty = _collect_rows(cast, "latency", lambda row: row.p50_ms)
    if not rows:
        return Chart(name, title, empty=empty)
    y = axis("p50 latency (ms)", [row.p50_ms for mine in rows.values() for row in mine])
    figure = _draw_lines(cast, rows, y, {}, lambda row: row.p50_ms, lambda row: row.median_ms, _describe_latency)
    return Chart(name, title, None if empty else figure, _summarize_latency(cast, rows), empty)


def throughput_by_batch(cast: Cast) -> Chart:
    """Draw answered samples in a second by batch size."""
    name = "throughput-by-batch"
    title = "Throughput (samples/s) by batch size, with 95 % intervals where several callers were measured"
    rows, empty = _collect_rows(cast, "throughput", lambda row: row.throughput_per_s)
    if not rows:
        return Chart(name, title, empty=empty)

    def interval(row: LatencyRow) -> Interval | None:
        return best.samples_per_s if (best := best_level(row)) else None

    def words(row: LatencyRow) -> str:
        best = best_level(row)
        rate_text = _format_rate(best.samples_per_s) if best else f"{rate(row.throughput_per_s)} samples/s"
        return f"batch {row.batch}: {rate_text} with {count_words(best.callers if best else 1, 'caller')}"

    least = cast.run.recipe.budgets.min_throughput_per_s
    rates = [row.throughput_per_s or 0.0 for mine in rows.values() for row in mine]
    shapes = [] if least is None else [limit("y", least, f"budget {rate(least)} samples/s", rates)]
    y = axis("throughput (samples/s)", [*rates, least])
    figure = _draw_lines(cast, rows, y, {"shapes": shapes}, lambda row: row.throughput_per_s, interval, words)
    return Chart(name, title, None if empty else figure, _summarize_throughput(cast, rows), empty)


def _collect_rows(cast: Cast, name: str, value: _Numbers) -> tuple[_Rows, str]:
    """Collect each record's rows that have a number, and explain why there is nothing to draw if so."""
    rows = {record.id: mine for record in cast.usable if (mine := [row for row in record.latency if value(row)])}
    if not rows:
        return rows, f"No {name} was measured: {why_none(cast.run, 'latency', 'nothing has run yet')}."
    sizes = {row.batch for mine in rows.values() for row in mine}
    single = f"Only batch {min(sizes)} was measured: --batch 1,8,32 or --batch sweep measures more."
    return rows, "" if len(sizes) > 1 else single


def _draw_lines(
    cast: Cast,
    rows: _Rows,
    y_axis: Figure,
    more: Figure,
    value: _Numbers,
    interval: Callable[[LatencyRow], Interval | None],
    words: Callable[[LatencyRow], str],
) -> Figure:
    """Draw a number by batch size with its interval for each named record; ``more`` is for the layout."""
    shown, rest = cast.named(rows), cast.rest(rows)
    lines = [([row.batch for row in rows[variant.id]], list(map(value, rows[variant.id]))) for variant in rest]
    traces = draw_others(lines, "lines+markers")
    for record in shown:
        style, mine = cast.style(record), rows[record.id]
        x, hover = [row.batch for row in mine], [hover_text(mark_name(record), words(row)) for row in mine]
        traces.append(draw_line(style, x, list(map(value, mine)), hover))
        traces += intervals(style, x, list(map(interval, mine)))
    sizes = sorted({row.batch for mine in rows.values() for row in mine})
    x_axis = places("batch size (samples)", {size: str(size) for size in sizes}, type="log")
    return {"data": traces, "layout": layout(x_axis, y_axis, len(shown) + bool(rest), **more)}


def _describe_latency(row: LatencyRow) -> str:
    tail = f", p99 {ms(row.p99_ms)} ms" if row.p99_ms is not None else ""
    between = ", in too few rounds for an interval"
    if row.median_ms:
        interval = format_median_interval(row)
        between = f", {interval}" if row.median_ms.too_noisy else f", 95 % interval (ms) {interval}"
    return f"batch {row.batch}: p50 {ms(row.p50_ms)} ms{tail}{between}"


def _summarize_latency(cast: Cast, rows: _Rows) -> str:
    """Describe the winner, else the record that is fastest at its smallest batch size."""
    baseline, having = cast.run.baseline, cast.select(rows)
    winner = next((record for record in having if record.id == cast.run.winner), None)
    record = winner or min(having, key=lambda record: rows[record.id][0].p50_ms or float("inf"))
    first, last = rows[record.id][0], rows[record.id][-1]
    times = f"{ms(first.p50_ms)} ms at batch {first.batch}"
    if first is last:
        text = f"{short_name(record)} takes {times}, the only one that was measured"
    else:
        text = f"{short_name(record)} goes from {times} to {ms(last.p50_ms)} ms at batch {last.batch}"
    theirs = baseline.row(last.batch)
    if theirs and record.id != baseline.id:
        text += f", where {short_name(baseline)} takes {ms(theirs.p50_ms)} ms"
    return f"{text}{cast.unnamed(rows)}."


def _format_rate(interval: Interval) -> str:
    return f"throughput {TOO_NOISY}" if interval.too_noisy else f"{interval.format(rate)} samples/s"


def _summarize_throughput(cast: Cast, rows: _Rows) -> str:
    pairs = [(record, row) for record in cast.usable for row in rows.get(record.id, ())]
    best, row = max(pairs, key=lambda pair: pair[1].throughput_per_s or 0.0)
    text = f"{short_name(best)} answers most, {rate(row.throughput_per_s)} samples/s at batch {row.batch}"
    baseline = cast.run.baseline
    theirs = next((row_ for row_ in rows.get(baseline.id, ()) if row_.batch == row.batch), None)
    if theirs and best.id != baseline.id and theirs.throughput_per_s:
        text += f", where {short_name(baseline)} answers {rate(theirs.throughput_per_s)}"
    return f"{text}{cast.unnamed(rows)}."
