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
    Style,
    axis,
    bars,
    count_words,
    draw_others,
    find_rows,
    hover_text,
    interval,
    layout,
    limit,
    make_empty_chart,
    places,
    points,
    short_name,
    why_none,
)
from enginesmith.pipeline.report.tables import best_level, marked, rate
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.units import ms

_Rows = Mapping[str, Sequence[LatencyRow]]
_Intervals = Callable[[LatencyRow], Interval | None]
_Numbers = Callable[[LatencyRow], float | None]
_Words = Callable[[LatencyRow], str]


def latency_by_batch(run: Run) -> Chart:
    """Draw median latency with its interval by batch size."""
    title = "Median latency (p50, ms) by batch size, with 95 % intervals"
    return _draw_sweep(run, "latency", title, lambda row: row.p50_ms, _latency_figure, _latency_summary)


def throughput_by_batch(run: Run) -> Chart:
    """Draw answered samples in a second by batch size."""
    title = "Throughput (samples/s) by batch size, with 95 % intervals where several callers were measured"
    figure, summary = _throughput_figure, _throughput_summary
    return _draw_sweep(run, "throughput", title, lambda row: row.throughput_per_s, figure, summary)


def _draw_sweep(
    run: Run,
    name: str,
    title: str,
    value: _Numbers,
    figure: Callable[[Run, Cast, _Rows], Figure],
    summary: Callable[[Run, Cast, _Rows], str],
) -> Chart:
    cast = Cast(run)
    rows = {record.id: found for record in cast.records if (found := [row for row in record.latency if value(row)])}
    if not rows:
        why = f"No {name} was measured: {why_none(run, 'latency', 'nothing has run yet')}."
        return make_empty_chart(f"{name}-by-batch", title, why)
    single = _single(rows)
    drawn = None if single else figure(run, cast, rows)
    return Chart(f"{name}-by-batch", title, drawn, summary(run, cast, rows), empty=single)


def _batches(rows: _Rows) -> Figure:
    sizes = sorted({row.batch for found in rows.values() for row in found})
    return places("batch size (samples)", {size: str(size) for size in sizes}, type="log")


def _single(rows: _Rows) -> str:
    """Explain that one batch size only leaves nothing to draw; empty where there are several."""
    sizes = {row.batch for found in rows.values() for row in found}
    return "" if len(sizes) > 1 else f"Only batch {sizes.pop()} was measured: --batch 1,8,32 or --sweep measures more."


def _lines(cast: Cast, rows: _Rows, value: _Numbers, between: _Intervals, words: _Words) -> tuple[list[Figure], int]:
    """Draw a number by batch size with its interval for each named record; also count the entries of the legend."""
    traces: list[Figure] = []
    if rest := cast.rest(rows):
        lines = [([row.batch for row in rows[one.id]], list(map(value, rows[one.id]))) for one in rest]
        traces.append(draw_others(lines, "lines+markers"))
    shown = cast.named(rows)
    for record in shown:
        style, mine = cast.style(record), rows[record.id]
        x, hover = [row.batch for row in mine], [hover_text(marked(record), words(row)) for row in mine]
        traces.append(points(style, x, list(map(value, mine)), hover))
        traces += [bar] if (bar := interval(style, x, list(map(between, mine)))) else []
    return traces, len(shown) + bool(rest)


def _latency_figure(run: Run, cast: Cast, rows: _Rows) -> Figure:
    traces, legend = _lines(cast, rows, lambda row: row.p50_ms, lambda row: row.median_ms, _latency_words)
    y = axis("p50 latency (ms)", [row.p50_ms for found in rows.values() for row in found])
    return {"data": traces, "layout": layout(_batches(rows), y, legend)}


def _latency_words(row: LatencyRow) -> str:
    tail = f", p99 {ms(row.p99_ms)} ms" if row.p99_ms is not None else ""
    between = ", in too few rounds for an interval"
    if row.median_ms:
        between = f", {TOO_NOISY}" if row.median_ms.too_noisy else f", median within {row.median_ms.between(ms)} ms"
    return f"batch {row.batch}: p50 {ms(row.p50_ms)} ms{tail}{between}"


def _latency_summary(run: Run, cast: Cast, rows: _Rows) -> str:
    record = _told(run, cast, rows)
    mine = rows[record.id]
    first, last = mine[0], mine[-1]
    if first is last:
        text = (
            f"{short_name(record)} takes {ms(first.p50_ms)} ms at batch {first.batch}, the only one that was measured"
        )
    else:
        text = (
            f"{short_name(record)} goes from {ms(first.p50_ms)} ms at batch {first.batch} to {ms(last.p50_ms)} ms at "
        )
        text += f"batch {last.batch}"
    theirs = run.baseline.row(last.batch)
    if theirs and record.id != run.baseline.id:
        text += f", where {short_name(run.baseline)} takes {ms(theirs.p50_ms)} ms"
    return f"{text}{cast.unnamed(rows)}."


def _told(run: Run, cast: Cast, rows: _Rows) -> VariantRecord:
    """Choose the record that the summary is about: the winner, else the fastest at its smallest batch size."""
    having = [record for record in cast.records if record.id in rows]
    winner = next((record for record in having if record.id == run.winner), None)
    return winner or min(having, key=lambda record: rows[record.id][0].p50_ms or float("inf"))


def _throughput_figure(run: Run, cast: Cast, rows: _Rows) -> Figure:
    traces, legend = _lines(cast, rows, lambda row: row.throughput_per_s, _throughput_interval, _throughput_words)
    least = run.recipe.budgets.min_throughput_per_s
    rates = [row.throughput_per_s or 0.0 for found in rows.values() for row in found]
    y = axis("throughput (samples/s)", [*rates, least])
    shapes = [] if least is None else [limit("y", least, f"budget {rate(least)} samples/s", rates)]
    return {"data": traces, "layout": layout(_batches(rows), y, legend, shapes=shapes)}


def _throughput_interval(row: LatencyRow) -> Interval | None:
    best = best_level(row)
    return best.samples_per_s if best else None


def _throughput_words(row: LatencyRow) -> str:
    best = best_level(row)
    said = _format_rate(best.samples_per_s) if best else f"{rate(row.throughput_per_s)} samples/s"
    return f"batch {row.batch}: {said} with {count_words(best.callers if best else 1, 'caller')}"


def _format_rate(interval: Interval) -> str:
    return f"throughput {TOO_NOISY}" if interval.too_noisy else f"{interval.format(rate)} samples/s"


def _throughput_summary(run: Run, cast: Cast, rows: _Rows) -> str:
    best, row = max(
        ((record, row) for record in cast.records for row in rows.get(record.id, ())),
        key=lambda pair: pair[1].throughput_per_s or 0.0,
    )
    text = f"{short_name(best)} answers most, {rate(row.throughput_per_s)} samples/s at batch {row.batch}"
    theirs = next((one for one in rows.get(run.baseline.id, ()) if one.batch == row.batch), None)
    if theirs and best.id != run.baseline.id and theirs.throughput_per_s:
        text += f", where {short_name(run.baseline)} answers {rate(theirs.throughput_per_s)}"
    return f"{text}{cast.unnamed(rows)}."


# Latency distributions: which share of the calls took at most how long.

Samples = Mapping[str, NDArray[Any]]
"""As ``LatencyResult.samples`` says."""
_MOST_POINTS = 200
_MOST_CHARTS = 4
_TAIL = (0.995, 0.999, 1.0)


def ecdf(run: Run, samples: Samples | None) -> tuple[Chart, ...]:
    """Draw a chart for each of the first batch sizes, that of the budgets first."""
    sizes = {row.batch for record in run.records for row in record.latency if row.p50_ms is not None}
    ordered = sorted(sizes, key=lambda size: (size != run.deciding_batch, size))
    charts = [_chart(run, samples or {}, size, sizes) for size in ordered[:_MOST_CHARTS]]
    if charts:
        return tuple(charts)
    why = f"No latency was measured: {why_none(run, 'latency', 'nothing has run yet')}."
    return (make_empty_chart("ecdf", "Distribution of latency (ms)", why),)


def _chart(run: Run, samples: Samples, size: int, sizes: set[int]) -> Chart:
    cast, name = Cast(run), f"ecdf-{size}"
    title = f"Distribution of latency (ms) at batch {size}: share of calls (%) that took at most so long"
    seconds = {one.id: samples[key] for one in cast.records if (key := f"{one.id}/{size}/seconds") in samples}
    found = {record: np.sort(values) * 1e3 for record, values in seconds.items() if values.size}
    if not found:
        return make_empty_chart(name, title, "The run has no latency samples: samples.npz is not in its folder.")
    return Chart(
        id=name,
        title=title,
        figure=_figure(run, cast, found, size),
        summary=_summary(run, cast, found, sizes),
    )


def _figure(run: Run, cast: Cast, found: Mapping[str, NDArray[Any]], size: int) -> Figure:
    shown = cast.named(found)
    lines = [(record, *_quantiles(found[record.id])) for record in shown]
    traces = [_line(cast.style(record), record, x, share) for record, x, share in lines]
    drawn = [value for _, values, _ in lines for value in values]
    x = axis(f"latency of a call at batch {size} (ms)", drawn, zero=False)
    y = axis("share of calls (%)", log=False, zero=False) | {"range": [0, 101]}
    return {"data": traces, "layout": layout(x, y, len(shown), shapes=_budgets(run, size, drawn))}


def _budgets(run: Run, size: int, drawn: Sequence[float]) -> list[Figure]:
    """At the batch size that they are about, with the share of calls that has to be left of them."""
    budgets = {"50 %": run.recipe.budgets.max_latency_ms, "99 %": run.recipe.budgets.max_p99_ms}
    known = [(share, value) for share, value in budgets.items() if value is not None and size == run.deciding_batch]
    return [
        limit("x", value, f"budget: {share} within {ms(value)} ms", drawn, line)
        for line, (share, value) in enumerate(known)
    ]


def _quantiles(values: NDArray[Any]) -> tuple[list[float], list[float]]:
    """Latencies that were seen, and the share of calls that took no longer, in per cent; the tail is not left out."""
    count = values.size
    if count <= _MOST_POINTS:
        places = np.arange(1, count + 1)
    else:
        even = np.linspace(0, 0.99, _MOST_POINTS - len(_TAIL))
        places = np.unique(np.clip(np.ceil(np.array([*even, *_TAIL]) * count).astype(int), 1, count))
    return values[places - 1].tolist(), (100 * places / count).tolist()


def _line(style: Style, record: VariantRecord, x: list[float], share: list[float]) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": style.name,
        "x": x,
        "y": share,
        "line": {**style.line, "shape": "hv"},
        "zorder": style.zorder,
        "hovertext": [f"{part:.4g} % within {ms(value)} ms" for value, part in zip(x, share, strict=True)],
        "hovertemplate": f"{hover_text(marked(record))}<br>%{{hovertext}}<extra></extra>",
    }


def _summary(run: Run, cast: Cast, found: Mapping[str, NDArray[Any]], sizes: set[int]) -> str:
    records = [record for record in cast.records if record.id in found]
    best = min(records, key=lambda record: float(np.median(found[record.id])))
    values = found[best.id]
    text = (
        f"Half of {short_name(best)}'s {values.size} calls took at most {ms(float(np.median(values)))} ms, the slowest "
    )
    text += f"{ms(float(values[-1]))} ms"
    if run.baseline.id in found and best.id != run.baseline.id:
        base = found[run.baseline.id]
        faster = float(np.mean(values < base[0]))
        text += f"; {100 * faster:.3g} % of them were faster than the fastest of {run.baseline.id} ({ms(base[0])} ms)"
    more = len(sizes) - _MOST_CHARTS
    text += f"; {more} more batch sizes are in the table of latencies" if more > 0 else ""
    return f"{text}{cast.unnamed(found, 'in the table only')}."


# What several callers at the same time gain in throughput, and pay in latency.

_ID = "concurrency"
_MOST_NUMBERED = 4
"""Lines that numbers of callers stand at; of more, only the winner's."""
_NOT_ASKED = "Throughput of several callers was not measured: --concurrency 1,2,4 asks for it."


def concurrency(run: Run) -> Chart:
    """Throughput against the tail of latency, a point for each number of callers."""
    cast, at = Cast(run), run.deciding_batch
    rows = {name: row for name, row in find_rows(cast.records, at).items() if row.concurrency}
    if not rows:
        return make_empty_chart(_ID, f"Throughput (samples/s) against latency (ms) at batch {at}", _NOT_ASKED)
    rank = "p99" if any(level.p99_ms is not None for row in rows.values() for level in row.concurrency) else "p50"
    return Chart(
        id=_ID,
        title=f"Throughput (samples/s) against {rank} latency (ms) at batch {at}; numbers are callers at the same time",
        figure=_concurrency_figure(cast, rows, rank),
        summary=_concurrency_summary(cast, rows, rank),
    )


def _latency(level: Throughput, rank: str) -> float | None:
    return level.p99_ms if rank == "p99" else level.p50_ms


def _known(row: LatencyRow, rank: str) -> list[tuple[float, Throughput]]:
    return [(value, level) for level in row.concurrency if (value := _latency(level, rank)) is not None]


def _concurrency_figure(cast: Cast, rows: Mapping[str, LatencyRow], rank: str) -> Figure:
    found = {name: known for name, row in rows.items() if (known := _known(row, rank))}
    shown, rest = cast.named(found), cast.rest(found)
    traces: list[Figure] = []
    if rest:
        traces.append(draw_others([_concurrency_line(found[record.id]) for record in rest], "lines+markers"))
    for record in shown:
        numbered = len(shown) <= _MOST_NUMBERED or cast.style(record).winner
        traces.append(_trace(cast.style(record), record, found[record.id], rows[record.id].knee, numbered=numbered))
    x = axis(f"{rank} latency of a call (ms)", [value for known in found.values() for value, _ in known])
    rates = [level.samples_per_s.median for known in found.values() for _, level in known]
    return {"data": traces, "layout": layout(x, axis("throughput (samples/s)", rates), len(shown) + bool(rest))}


def _concurrency_line(known: Sequence[tuple[float, Throughput]]) -> tuple[list[float], list[float | None]]:
    return [value for value, _ in known], [level.samples_per_s.median for _, level in known]


def _trace(
    style: Style, record: VariantRecord, known: Sequence[tuple[float, Throughput]], knee: int | None, *, numbered: bool
) -> Figure:
    x, y = _concurrency_line(known)
    hover = [hover_text(marked(record), _words(level, knee)) for _, level in known]
    trace = points(style, x, y, hover, error_y=bars([level.samples_per_s for _, level in known], style.colour))
    if numbered:
        trace |= {"mode": "lines+markers+text", "textposition": "top center"}
        trace["text"] = [str(level.callers) for _, level in known]
    return trace


def _words(level: Throughput, knee: int | None) -> str:
    text = f"{count_words(level.callers, 'caller')}: {_format_rate(level.samples_per_s)}, "
    text += f"p50 {ms(level.p50_ms)} ms, p99 {ms(level.p99_ms)} ms"
    return text + (", the knee: more callers gain less than 5 %" if level.callers == knee else "")


def _concurrency_summary(cast: Cast, rows: Mapping[str, LatencyRow], rank: str) -> str:
    pairs = [(one, level) for one in cast.records if one.id in rows for level in rows[one.id].concurrency]
    best, level = max(pairs, key=lambda pair: pair[1].samples_per_s.median)
    most = f"{rate(level.samples_per_s.median)} samples/s with {count_words(level.callers, 'caller')}"
    text = f"{short_name(best)} answers most, {most}"
    value = _latency(level, rank)
    text += f", at {rank} {ms(value)} ms" if value is not None else ""
    knee = rows[best.id].knee
    text += f"; from {knee} on, more callers gain less than 5 %" if knee is not None and knee != level.callers else ""
    unknown = sum(_latency(level, rank) is None for _, level in pairs)
    few = f"; {unknown} of {len(pairs)} points are left out, as they have too few calls for a {rank}" if unknown else ""
    return f"{text}{few}{cast.unnamed(rows)}."
