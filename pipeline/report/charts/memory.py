"""Draw the peak memory of each variant by part, and latency against it with the Pareto front and the budgets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow
from enginesmith.pipeline.report.charts.plotly import (
    MEBIBYTE,
    NEUTRAL,
    REST,
    Cast,
    Chart,
    Figure,
    axis,
    draw_markers,
    hover_text,
    intervals,
    layout,
    limit,
    list_layout,
    short_name,
    why_none,
)
from enginesmith.pipeline.report.tables import describe_drop, mark_name, speedup
from enginesmith.pipeline.results.run import VariantRecord
from enginesmith.pipeline.units import format_bytes, ms, name_some

_PARTS = {"weights": "", "activations": "/", "not divided": "."}
"""Parts that are stacked → the pattern that tells each from the others."""


def memory(cast: Cast) -> Chart:
    """Draw weights and activations stacked, beside the peak that was seen."""
    rows = {entry.id: entry.memory for entry in cast.usable if entry.memory and entry.memory.peak_bytes is not None}
    where = " and ".join(dict.fromkeys(row.device for row in rows.values())) or "the device"
    title = f"Peak memory (MiB) on {where}, by part"
    if not rows:
        why = why_none(cast.run, "memory", "it was not measured")
        return Chart("memory", title, empty=f"No peak memory is known: {why}.")
    return Chart("memory", title, _draw_parts(cast, rows), _summarize_memory(cast, rows))


def _draw_parts(cast: Cast, rows: Mapping[str, MemoryRow]) -> Figure:
    named = cast.named(rows)
    shown = [rows[record.id] for record in named]
    colors = [cast.style(record).color for record in named]
    hover = [hover_text(mark_name(record), _describe_memory(rows[record.id])) for record in named]
    traces: list[Figure] = []
    for index, (part, shape) in enumerate(_PARTS.items()):
        sizes = [_divide(row)[index] for row in shown]
        if any(size is not None for size in sizes):
            pattern = {"pattern": {"shape": shape, "fillmode": "replace", "solidity": 0.4}} if shape else {}
            bar = {"type": "bar", "orientation": "h", "name": part}
            x = [None if size is None else size / MEBIBYTE for size in sizes]
            bars = {**bar, "x": x, "y": list(range(len(sizes))), "hovertext": hover, "hoverinfo": "text"}
            traces.append({**bars, "marker": {"color": colors, **pattern}, "showlegend": False})
            # the legend's entry is in a color that is no variant's
            traces.append({**bar, "x": [None], "y": [0], "marker": {"color": NEUTRAL, **pattern}})
    peaks = [row.peak_bytes / MEBIBYTE for row in shown if row.peak_bytes is not None]
    marker = {"symbol": "line-ns", "size": 20, "color": NEUTRAL, "line": {"color": NEUTRAL, "width": 2.5}}
    traces.append(draw_markers("peak", peaks, range(len(peaks)), hover, marker=marker))
    budget = cast.run.recipe.budgets.max_memory_bytes
    shapes = [] if budget is None else [limit("x", budget / MEBIBYTE, f"budget {format_bytes(budget)}", peaks)]
    names = [cast.style(record).name for record in named]
    x_axis = axis("peak memory (MiB)", log=False)
    return {"data": traces, "layout": list_layout(x_axis, names, 3, barmode="stack", bargap=0.62, shapes=shapes)}


def _divide(row: MemoryRow) -> tuple[int | None, ...]:
    """Divide a peak into the bytes of each part, as far as they are known."""
    if row.weights_bytes is None or row.activation_bytes is None:
        return (None, None, row.peak_bytes)
    return (row.weights_bytes, row.activation_bytes, None)


def _describe_memory(row: MemoryRow) -> str:
    parts = {"weights": row.weights_bytes, "activations": row.activation_bytes, "whole process": row.host_peak_bytes}
    known = [f"{name} {format_bytes(size)}" for name, size in parts.items() if size is not None]
    return ", ".join([f"peak {format_bytes(row.peak_bytes)} at batch {row.batch}", *known])


def _summarize_memory(cast: Cast, rows: Mapping[str, MemoryRow]) -> str:
    records, baseline = cast.select(rows), cast.run.baseline
    least = min(records, key=lambda record: record.peak_bytes or 0)
    text = f"{short_name(least)} needs least, {_describe_memory(rows[least.id])}"
    base = baseline.peak_bytes
    if base and least.id != baseline.id:
        text += f"; that is {100 * (least.peak_bytes or 0) / base:.0f} % of {baseline.id}'s {format_bytes(base)}"
    budget = cast.run.recipe.budgets.max_memory_bytes
    if budget is not None:
        holding = sum((record.peak_bytes or 0) <= budget for record in records)
        text += f"; {holding} of {len(records)} meet the budget of {format_bytes(budget)}"
    return f"{text}{cast.unnamed(rows, 'in the table only')}."


# Latency against peak memory.

_SMALLEST, _LARGEST = 9.0, 28.0
"""Diameters in pixels of no drop, and of the largest one."""
_MOST_ON_FRONT = 3
_LEAST_SCALE = 0.01
"""Share of the baseline's metric that the largest diameter stands for at least, so that a tiny drop looks tiny."""


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


def pareto(cast: Cast) -> Chart:
    """Draw median latency at the budget's batch size against peak memory; the area of a marker is the drop."""
    run, at = cast.run, cast.run.deciding_batch
    title = f"Median latency (p50, ms) at batch {at} against peak memory (MiB)"
    rows = [(record, row) for record in cast.usable if (row := record.row(at))]
    points = [
        _Point(record, row, row.p50_ms, record.peak_bytes / MEBIBYTE, record.id in run.pareto)
        for record, row in rows
        if row.p50_ms is not None and record.peak_bytes is not None
    ]
    if not points and rows:
        why = f"No variant's peak memory is known: {why_none(run, 'memory', 'it was not measured')}."
        return Chart("pareto", title, empty=why)
    if not points:
        why = f"No latency was measured at batch {at}: {why_none(run, 'latency', 'nothing has run yet')}."
        return Chart("pareto", title, empty=why)
    if any(point.drop is not None for point in points):
        title += "; the larger a marker, the larger the drop"
    return Chart("pareto", title, _draw_pareto(cast, points), _summarize_pareto(cast, points))


def _draw_pareto(cast: Cast, points: Sequence[_Point]) -> Figure:
    named = {record.id for record in cast.named({point.record.id for point in points})}
    shown = [point for point in points if point.record.id in named]
    rest = [point for point in points if point.record.id not in named]
    traces = [_draw_front(points)]
    if rest:
        hover = [hover_text(mark_name(point.record), _describe_numbers(point)) for point in rest]
        x, y = [point.p50_ms for point in rest], [point.peak_mib for point in rest]
        marker = {"color": REST, "size": 6, "opacity": 0.6}
        traces.append(draw_markers(f"{len(rest)} more", x, y, hover, marker=marker))
    metrics = (abs(point.record.quality.baseline) for point in points if point.record.quality)
    scale = max(*(point.drop or 0.0 for point in points), _LEAST_SCALE * max(metrics, default=0.0))
    for point in shown:
        traces += intervals(cast.style(point.record), [point.peak_mib], [point.row.median_ms], "x")
        traces.append(_draw_point(cast, point, scale))
    budgets = cast.run.recipe.budgets
    memory = None if budgets.max_memory_bytes is None else budgets.max_memory_bytes / MEBIBYTE
    latencies, peaks = [point.p50_ms for point in points], [point.peak_mib for point in points]
    shapes = []
    if budgets.max_latency_ms is not None:
        shapes.append(limit("x", budgets.max_latency_ms, f"budget {ms(budgets.max_latency_ms)} ms", latencies))
    if memory is not None:
        shapes.append(limit("y", memory, f"budget {format_bytes(budgets.max_memory_bytes)}", peaks))
    x_axis = axis(f"p50 latency at batch {cast.run.deciding_batch} (ms)", [*latencies, budgets.max_latency_ms])
    y_axis = axis("peak memory (MiB)", [*peaks, memory])
    return {"data": traces, "layout": layout(x_axis, y_axis, len(shown) + 1 + bool(rest), shapes=shapes)}


def _draw_front(points: Sequence[_Point]) -> Figure:
    """Draw steps along the records of the front that none beats in these two numbers; others are on it for a drop."""
    line: list[_Point] = []
    for point in sorted((point for point in points if point.front), key=lambda point: (point.p50_ms, point.peak_mib)):
        if not line or point.peak_mib < line[-1].peak_mib:
            line.append(point)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "front",
        "x": [point.p50_ms for point in line],
        "y": [point.peak_mib for point in line],
        "line": {"color": NEUTRAL, "width": 1.5, "shape": "hv"},
        "hoverinfo": "skip",
        "showlegend": len(line) > 1,
    }


def _draw_point(cast: Cast, point: _Point, scale: float) -> Figure:
    """Draw a record's marker, its area growing from no drop to the largest one, ``scale``."""
    run, record, style = cast.run, point.record, cast.style(point.record)
    share = max(0.0, point.drop or 0.0) / scale if scale > 0 else 0.0
    size = sqrt(_SMALLEST**2 + share * (_LARGEST**2 - _SMALLEST**2))
    marker = {**style.marker, "size": size + (4 if style.winner else 0), "opacity": 0.9}
    against = speedup(record, point.row.batch)
    place = [f"{against} against {run.baseline.id}"] if against != "–" and record.id != run.baseline.id else []
    place += ["on the front"] if point.front else []
    place += ["wins"] if record.id == run.winner else []
    place += [f"rejected: {record.rejected}"] if record.rejected else []
    hover = hover_text(mark_name(record), _describe_numbers(point), ", ".join(place))
    how = {"marker": marker, "zorder": int(style.winner)}
    trace = draw_markers(style.name, [point.p50_ms], [point.peak_mib], [hover], **how)
    if style.winner:
        trace |= {"mode": "markers+text", "text": ["★"], "textposition": "top center", "textfont": {"size": 15}}
    return trace


def _describe_numbers(point: _Point) -> str:
    parts = [f"p50 {ms(point.p50_ms)} ms", f"peak {format_bytes(point.record.peak_bytes)}"]
    if point.drop is not None and point.record.quality:
        parts.append(describe_drop(point.record.quality))
    return ", ".join(parts)


def _summarize_pareto(cast: Cast, points: Sequence[_Point]) -> str:
    best, baseline = min(points, key=lambda point: point.p50_ms), cast.run.baseline
    base = next((point for point in points if point.record.id == baseline.id), None)
    text = f"{short_name(best.record)} has the lowest latency ({ms(best.p50_ms)} ms)"
    if base is not None and best is not base and base.peak_mib:
        text += f" at {100 * best.peak_mib / base.peak_mib:.0f} % of {short_name(baseline)}'s peak memory"
    else:
        text += f" at {format_bytes(best.record.peak_bytes)} of peak memory"
    line = _draw_front(points)
    drawn = set(zip(line["x"], line["y"], strict=True))
    front = [short_name(point.record) for point in points if (point.p50_ms, point.peak_mib) in drawn]
    others = [short_name(point.record) for point in points if point.front and short_name(point.record) not in front]
    text += f"; on the front: {name_some(front, _MOST_ON_FRONT) or 'none'}"
    text += f"; for a smaller drop: {name_some(others, _MOST_ON_FRONT)}" if others else ""
    if without := len(cast.usable) - len(points):
        text += f"; {without} without both numbers {'is' if without == 1 else 'are'} left out"
    return f"{text}{cast.unnamed({point.record.id for point in points})}."
