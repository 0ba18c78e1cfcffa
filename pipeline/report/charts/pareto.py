"""Draw latency against peak memory, with the Pareto front and the budgets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.report.charts.plotly import (
    MEBIBYTE,
    NEUTRAL,
    REST,
    Cast,
    Chart,
    Figure,
    axis,
    count_words,
    draw_markers,
    find_rows,
    hover_text,
    interval,
    layout,
    limit,
    make_empty_chart,
    short_name,
    why_no_memory,
    why_none,
)
from enginesmith.pipeline.report.tables import marked, points, speedup
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.units import format_bytes, ms

_ID = "pareto"
_SMALLEST, _LARGEST = 9.0, 28.0
"""Diameters in pixels of no drop, and of the largest one."""


@dataclass(frozen=True)
class _Point:
    record: VariantRecord
    row: LatencyRow
    p50_ms: float
    peak_mib: float
    front: bool

    @property
    def drop(self) -> float | None:
        return self.record.quality.drop if self.record.quality else None


def pareto(run: Run) -> Chart:
    """Median latency at the budget's batch size against peak memory; the area of a marker is the drop."""
    at = run.deciding_batch
    title = f"Median latency (p50, ms) at batch {at} against peak memory (MiB)"
    cast = Cast(run)
    rows = find_rows(cast.records, at)
    found = [
        _Point(record, row, row.p50_ms, record.peak_bytes / MEBIBYTE, record.id in run.pareto)
        for record in cast.records
        if (row := rows.get(record.id)) and row.p50_ms is not None and record.peak_bytes is not None
    ]
    if not found:
        return make_empty_chart(_ID, title, _why(run, bool(rows), at))
    if any(point.drop is not None for point in found):
        title += "; the larger a marker, the larger the drop"
    return Chart(
        id=_ID,
        title=title,
        figure=_figure(run, cast, found),
        summary=_summary(run, cast, found),
    )


def _why(run: Run, latency: bool, at: int) -> str:
    if latency:
        return f"No variant's peak memory is known: {why_no_memory(run)}."
    return f"No latency was measured at batch {at}: {why_none(run, 'latency', 'nothing has run yet')}."


def _figure(run: Run, cast: Cast, found: Sequence[_Point]) -> Figure:
    having = {point.record.id for point in found}
    named = {record.id for record in cast.named(having)}
    shown = [point for point in found if point.record.id in named]
    rest = [point for point in found if point.record.id not in named]
    scale = max((point.drop or 0.0 for point in found), default=0.0)
    traces = [_front(found), *([_rest(rest)] if rest else []), *_markers(run, cast, shown, scale)]
    budgets = run.recipe.budgets
    memory = None if budgets.max_memory_bytes is None else budgets.max_memory_bytes / MEBIBYTE
    latencies, peaks = [one.p50_ms for one in found], [one.peak_mib for one in found]
    shapes = []
    if budgets.max_latency_ms is not None:
        shapes.append(limit("x", budgets.max_latency_ms, f"budget {ms(budgets.max_latency_ms)} ms", latencies))
    if memory is not None:
        shapes.append(limit("y", memory, f"budget {format_bytes(budgets.max_memory_bytes)}", peaks))
    x = axis(f"p50 latency at batch {run.deciding_batch} (ms)", [*latencies, budgets.max_latency_ms])
    y = axis("peak memory (MiB)", [*peaks, memory])
    return {"data": traces, "layout": layout(x, y, len(shown) + 1 + bool(rest), shapes=shapes)}


def _front(found: Sequence[_Point]) -> Figure:
    """Steps along those of the front that none beats in these two numbers; the others are on it for their drop."""
    line: list[_Point] = []
    for point in sorted((one for one in found if one.front), key=lambda one: (one.p50_ms, one.peak_mib)):
        if not line or point.peak_mib < line[-1].peak_mib:
            line.append(point)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "front",
        "x": [one.p50_ms for one in line],
        "y": [one.peak_mib for one in line],
        "line": {"color": NEUTRAL, "width": 1.5, "shape": "hv"},
        "hoverinfo": "skip",
        "showlegend": len(line) > 1,
    }


def _rest(found: Sequence[_Point]) -> Figure:
    hover = [hover_text(marked(one.record), _numbers(one)) for one in found]
    x, y = [one.p50_ms for one in found], [one.peak_mib for one in found]
    return draw_markers(f"{len(found)} more", x, y, hover, marker={"color": REST, "size": 6, "opacity": 0.6})


def _markers(run: Run, cast: Cast, shown: Sequence[_Point], scale: float) -> Iterator[Figure]:
    for point in shown:
        if bar := interval(cast.style(point.record), [point.peak_mib], [point.row.median_ms], "x"):
            yield bar
        yield _marker(run, cast, point, scale)


def _marker(run: Run, cast: Cast, point: _Point, scale: float) -> Figure:
    style = cast.style(point.record)
    share = max(0.0, point.drop or 0.0) / scale if scale > 0 else 0.0
    size = sqrt(_SMALLEST**2 + share * (_LARGEST**2 - _SMALLEST**2))
    marker = {**style.marker, "size": size + (4 if style.winner else 0), "opacity": 0.9}
    hover = hover_text(marked(point.record), _numbers(point), _place(run, point))
    how = {"marker": marker, "zorder": style.zorder}
    trace = draw_markers(style.name, [point.p50_ms], [point.peak_mib], [hover], **how)
    if style.winner:
        trace |= {"mode": "markers+text", "text": ["★"], "textposition": "top center", "textfont": {"size": 15}}
    return trace


def _numbers(point: _Point) -> str:
    parts = [f"p50 {ms(point.p50_ms)} ms", f"peak {format_bytes(point.record.peak_bytes)}"]
    if point.drop is not None and point.record.quality:
        parts.append(f"{points(point.record.quality)} on {point.record.quality.samples} samples")
    return ", ".join(parts)


def _place(run: Run, point: _Point) -> str:
    against = speedup(point.record, point.row.batch)
    parts = [f"{against} against {run.baseline.id}"] if against != "–" and point.record.id != run.baseline.id else []
    parts += ["on the front"] if point.front else []
    parts += ["wins"] if point.record.id == run.winner else []
    parts += [f"rejected: {point.record.rejected}"] if point.record.rejected else []
    return ", ".join(parts)


def _summary(run: Run, cast: Cast, found: Sequence[_Point]) -> str:
    best = min(found, key=lambda one: one.p50_ms)
    base = next((one for one in found if one.record.id == run.baseline.id), None)
    first = f"{short_name(best.record)} has the lowest latency ({ms(best.p50_ms)} ms)"
    if base is not None and best is not base and base.peak_mib:
        first += f" at {100 * best.peak_mib / base.peak_mib:.0f} % of {short_name(run.baseline)}'s peak memory"
    else:
        first += f" at {format_bytes(best.record.peak_bytes)} of peak memory"
    front = sum(one.front for one in found)
    on = f"{front} of {count_words(len(found), 'variant')} {'is' if front == 1 else 'are'} on the front"
    without = len(cast.records) - len(found)
    left = f"; {without} without both numbers {'is' if without == 1 else 'are'} left out" if without else ""
    return f"{first}; {on}{left}{cast.unnamed({one.record.id for one in found})}."
