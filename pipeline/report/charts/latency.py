"""Draw latency and throughput by batch size, distributions of latency, and throughput by callers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginesmith.pipeline.measure.rows import LatencyRow, Throughput
from enginesmith.pipeline.measure.statistics import TOO_NOISY, Interval
from enginesmith.pipeline.report.charts.plotly import (
    Cast,
    Chart,
    Figure,
    axis,
    bars,
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
from enginesmith.pipeline.report.tables import best_level, mark_name, rate
from enginesmith.pipeline.results.run import VariantRecord
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
        said = _format_rate(best.samples_per_s) if best else f"{rate(row.throughput_per_s)} samples/s"
        return f"batch {row.batch}: {said} with {count_words(best.callers if best else 1, 'caller')}"

    least = cast.run.recipe.budgets.min_throughput_per_s
    rates = [row.throughput_per_s or 0.0 for mine in rows.values() for row in mine]
    shapes = [] if least is None else [limit("y", least, f"budget {rate(least)} samples/s", rates)]
    y = axis("throughput (samples/s)", [*rates, least])
    figure = _draw_lines(cast, rows, y, {"shapes": shapes}, lambda row: row.throughput_per_s, interval, words)
    return Chart(name, title, None if empty else figure, _summarize_throughput(cast, rows), empty)


def _collect_rows(cast: Cast, name: str, value: _Numbers) -> tuple[_Rows, str]:
    """Collect each record's rows that have a number, and explain why there is nothing to draw if so."""
    rows = {record.id: mine for record in cast.records if (mine := [row for row in record.latency if value(row)])}
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
        between = f", {TOO_NOISY}" if row.median_ms.too_noisy else f", median within {row.median_ms.between(ms)} ms"
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
    pairs = [(record, row) for record in cast.records for row in rows.get(record.id, ())]
    best, row = max(pairs, key=lambda pair: pair[1].throughput_per_s or 0.0)
    text = f"{short_name(best)} answers most, {rate(row.throughput_per_s)} samples/s at batch {row.batch}"
    baseline = cast.run.baseline
    theirs = next((row_ for row_ in rows.get(baseline.id, ()) if row_.batch == row.batch), None)
    if theirs and best.id != baseline.id and theirs.throughput_per_s:
        text += f", where {short_name(baseline)} answers {rate(theirs.throughput_per_s)}"
    return f"{text}{cast.unnamed(rows)}."


# Latency distributions: which share of the calls took at most how long.

Samples = Mapping[str, NDArray[Any]]
"""Latencies in seconds, as in ``LatencyResult.samples``."""
_MOST_POINTS = 200
_MOST_CHARTS = 4
_TAIL = (0.995, 0.999, 1.0)


def ecdf(cast: Cast, samples: Samples | None) -> list[Chart]:
    """Draw a chart for each of the first batch sizes, that of the budgets first."""
    sizes = {row.batch for record in cast.records for row in record.latency if row.p50_ms is not None}
    if not sizes:
        why = f"No latency was measured: {why_none(cast.run, 'latency', 'nothing has run yet')}."
        return [Chart("ecdf", "Distribution of latency (ms)", empty=why)]
    ordered = sorted(sizes, key=lambda size: (size != cast.run.deciding_batch, size))
    return [_draw_distribution(cast, samples or {}, size, len(sizes)) for size in ordered[:_MOST_CHARTS]]


def _draw_distribution(cast: Cast, samples: Samples, size: int, sizes: int) -> Chart:
    name = f"ecdf-{size}"
    title = f"Distribution of latency (ms) at batch {size}: share of calls (%) that took at most so long"
    seconds = {record.id: samples[key] for record in cast.records if (key := f"{record.id}/{size}/seconds") in samples}
    by_id = {record: np.sort(values) * 1e3 for record, values in seconds.items() if values.size}
    if not by_id:
        return Chart(name, title, empty="The run has no latency samples: samples.npz is not in its folder.")
    shown, traces, drawn = cast.named(by_id), list[Figure](), list[float]()
    for record in shown:
        (x, shares), style = _quantiles(by_id[record.id]), cast.style(record)
        drawn += x
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": style.name,
                "x": x,
                "y": shares,
                "line": {**style.line, "shape": "hv"},
                "zorder": int(style.winner),
                "hovertext": [f"{share:.4g} % within {ms(value)} ms" for value, share in zip(x, shares, strict=True)],
                "hovertemplate": f"{hover_text(mark_name(record))}<br>%{{hovertext}}<extra></extra>",
            }
        )
    budgets = cast.run.recipe.budgets
    asked = {"50 %": budgets.max_latency_ms, "99 %": budgets.max_p99_ms} if size == cast.run.deciding_batch else {}
    known = [(value, f"budget: {share} within {ms(value)} ms") for share, value in asked.items() if value is not None]
    shapes = [limit("x", value, text, drawn, line) for line, (value, text) in enumerate(known)]
    x_axis = axis(f"latency of a call at batch {size} (ms)", drawn, zero=False)
    y_axis = axis("share of calls (%)", log=False, zero=False) | {"range": [0, 101]}
    figure = {"data": traces, "layout": layout(x_axis, y_axis, len(shown), shapes=shapes)}
    return Chart(name, title, figure, _summarize_distribution(cast, by_id, sizes))


def _quantiles(values: NDArray[Any]) -> tuple[list[float], list[float]]:
    """Choose latencies, the tail among them; gives them with the share of calls that took no longer, in per cent."""
    count = values.size
    if count <= _MOST_POINTS:
        places = np.arange(1, count + 1)
    else:
        even = np.linspace(0, 0.99, _MOST_POINTS - len(_TAIL))
        places = np.unique(np.clip(np.ceil(np.array([*even, *_TAIL]) * count).astype(int), 1, count))
    return values[places - 1].tolist(), (100 * places / count).tolist()


def _summarize_distribution(cast: Cast, by_id: Mapping[str, NDArray[Any]], sizes: int) -> str:
    best = min(cast.select(by_id), key=lambda record: float(np.median(by_id[record.id])))
    values, baseline = by_id[best.id], cast.run.baseline.id
    half = ms(float(np.median(values)))
    text = f"Half of {short_name(best)}'s {values.size} calls took at most {half} ms, "
    text += f"the slowest {ms(float(values[-1]))} ms"
    if baseline in by_id and best.id != baseline:
        base = by_id[baseline]
        faster = float(np.mean(values < base[0]))
        text += f"; {100 * faster:.3g} % of them were faster than the fastest of {baseline} ({ms(base[0])} ms)"
    more = sizes - _MOST_CHARTS
    text += f"; {more} more batch sizes are in the table of latencies" if more > 0 else ""
    return f"{text}{cast.unnamed(by_id, 'in the table only')}."


# What several callers at the same time gain in throughput, and pay in latency.

_MOST_NUMBERED = 4
"""Lines that numbers of callers stand at; of more, only the winner's."""


def concurrency(cast: Cast) -> Chart:
    """Draw throughput against the tail of latency, a point for each number of callers."""
    at = cast.run.deciding_batch
    rows = {record.id: row for record in cast.records if (row := record.row(at)) and row.concurrency}
    if not rows:
        why = "Throughput of several callers was not measured: --concurrency 1,2,4 asks for it."
        return Chart("concurrency", f"Throughput (samples/s) against latency (ms) at batch {at}", empty=why)
    rank = "p99" if any(level.p99_ms is not None for row in rows.values() for level in row.concurrency) else "p50"
    by_id = {
        name: [(value, level) for level in row.concurrency if (value := _latency(level, rank)) is not None]
        for name, row in rows.items()
    }
    by_id = {name: known for name, known in by_id.items() if known}
    shown, rest = cast.named(by_id), cast.rest(by_id)
    traces = draw_others([_make_line(by_id[record.id]) for record in rest], "lines+markers")
    for record in shown:
        numbered = len(shown) <= _MOST_NUMBERED or cast.style(record).winner
        traces.append(_draw_callers(cast, record, by_id[record.id], rows[record.id].knee, numbered=numbered))
    x_axis = axis(f"{rank} latency of a call (ms)", [value for known in by_id.values() for value, _ in known])
    rates = [level.samples_per_s.median for known in by_id.values() for _, level in known]
    figure = {"data": traces, "layout": layout(x_axis, axis("throughput (samples/s)", rates), len(shown) + bool(rest))}
    title = f"Throughput (samples/s) against {rank} latency (ms) at batch {at}; numbers are callers at the same time"
    return Chart("concurrency", title, figure, _summarize_callers(cast, rows, rank))


def _latency(level: Throughput, rank: str) -> float | None:
    return level.p99_ms if rank == "p99" else level.p50_ms


def _make_line(known: Sequence[tuple[float, Throughput]]) -> tuple[list[float], list[float | None]]:
    return [value for value, _ in known], [level.samples_per_s.median for _, level in known]


def _draw_callers(
    cast: Cast, record: VariantRecord, known: Sequence[tuple[float, Throughput]], knee: int | None, *, numbered: bool
) -> Figure:
    hover = []
    for _, level in known:
        text = f"{count_words(level.callers, 'caller')}: {_format_rate(level.samples_per_s)}, "
        text += f"p50 {ms(level.p50_ms)} ms, p99 {ms(level.p99_ms)} ms"
        more = ", the knee: more callers gain less than 5 %" if level.callers == knee else ""
        hover.append(hover_text(mark_name(record), text + more))
    style = cast.style(record)
    error = bars([level.samples_per_s for _, level in known], style.colour)
    trace = draw_line(style, *_make_line(known), hover, error_y=error)
    if numbered:
        trace |= {"mode": "lines+markers+text", "textposition": "top center"}
        trace["text"] = [str(level.callers) for _, level in known]
    return trace


def _summarize_callers(cast: Cast, rows: Mapping[str, LatencyRow], rank: str) -> str:
    pairs = [(record, level) for record in cast.select(rows) for level in rows[record.id].concurrency]
    best, level = max(pairs, key=lambda pair: pair[1].samples_per_s.median)
    most = f"{rate(level.samples_per_s.median)} samples/s with {count_words(level.callers, 'caller')}"
    text = f"{short_name(best)} answers most, {most}"
    value = _latency(level, rank)
    text += f", at {rank} {ms(value)} ms" if value is not None else ""
    knee = rows[best.id].knee
    text += f"; from {knee} on, more callers gain less than 5 %" if knee is not None and knee != level.callers else ""
    if unknown := sum(_latency(level, rank) is None for _, level in pairs):
        text += f"; {unknown} of {len(pairs)} points are left out, as they have too few calls for a {rank}"
    return f"{text}{cast.unnamed(rows)}."
