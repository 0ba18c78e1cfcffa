"""Draw the peak memory of each variant by part."""

from collections.abc import Sequence

from enginesmith.pipeline.measure.rows import MemoryRow
from enginesmith.pipeline.report.charts.plotly import (
    MEBIBYTE,
    NEUTRAL,
    Cast,
    Chart,
    Figure,
    axis,
    draw_markers,
    hover_text,
    limit,
    list_layout,
    make_empty_chart,
    short_name,
    why_no_memory,
)
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.units import format_bytes

_ID = "memory"
_PARTS = (("weights", ""), ("activations", "/"), ("not divided", "."))
"""What is stacked, and the pattern that tells it from the others."""
_Shown = Sequence[tuple[VariantRecord, MemoryRow]]


def memory(run: Run) -> Chart:
    """Weights and activations stacked, beside the peak that was seen."""
    cast = Cast(run)
    rows = {one.id: one.memory for one in cast.records if one.memory and one.memory.peak_bytes is not None}
    where = " and ".join(dict.fromkeys(row.device for row in rows.values())) or "the device"
    title = f"Peak memory (MiB) on {where}, by part"
    if not rows:
        why = f"No peak memory is known: {why_no_memory(run)}."
        return make_empty_chart(_ID, title, why)
    shown = [(record, rows[record.id]) for record in cast.named(rows)]
    return Chart(
        id=_ID,
        title=title,
        figure=_figure(run, cast, shown),
        summary=_summary(run, cast, rows),
    )


def _parts(row: MemoryRow) -> tuple[int | None, ...]:
    if row.weights_bytes is None or row.activation_bytes is None:
        return (None, None, row.peak_bytes)
    return (row.weights_bytes, row.activation_bytes, None)


def _figure(run: Run, cast: Cast, shown: _Shown) -> Figure:
    colours = [cast.style(record).colour for record, _ in shown]
    hover = [hover_text(marked(record), _words(row)) for record, row in shown]
    traces: list[Figure] = []
    for index, (part, pattern) in enumerate(_PARTS):
        sizes = [_parts(row)[index] for _, row in shown]
        if any(size is not None for size in sizes):
            traces += [_bars(part, pattern, sizes, colours, hover), _key(part, pattern)]
    peaks = [row.peak_bytes / MEBIBYTE for _, row in shown if row.peak_bytes is not None]
    traces.append(_peaks(peaks, hover))
    budget = run.recipe.budgets.max_memory_bytes
    shapes = [] if budget is None else [limit("x", budget / MEBIBYTE, f"budget {format_bytes(budget)}", peaks)]
    x = axis("peak memory (MiB)", log=False)
    names = [cast.style(record).name for record, _ in shown]
    more = {"barmode": "stack", "bargap": 0.62, "shapes": shapes}
    return {"data": traces, "layout": list_layout(x, names, 3, **more)}


def _bars(part: str, pattern: str, sizes: Sequence[int | None], colours: list[str], hover: list[str]) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": part,
        "x": [None if size is None else size / MEBIBYTE for size in sizes],
        "y": list(range(len(sizes))),
        "hovertext": hover,
        "hoverinfo": "text",
        "marker": {"color": colours, **_pattern(pattern)},
        "showlegend": False,
    }


def _pattern(shape: str) -> Figure:
    return {"pattern": {"shape": shape, "fillmode": "replace", "solidity": 0.4}} if shape else {}


def _key(part: str, pattern: str) -> Figure:
    """Draw a part's entry in the legend, in a colour that is no variant's."""
    marker = {"color": NEUTRAL, **_pattern(pattern)}
    return {"type": "bar", "orientation": "h", "name": part, "x": [None], "y": [0], "marker": marker}


def _peaks(peaks: list[float], hover: list[str]) -> Figure:
    marker = {"symbol": "line-ns", "size": 20, "color": NEUTRAL, "line": {"color": NEUTRAL, "width": 2.5}}
    return draw_markers("peak", peaks, range(len(peaks)), hover, marker=marker)


def _words(row: MemoryRow) -> str:
    parts = [f"peak {format_bytes(row.peak_bytes)} at batch {row.batch}"]
    if row.weights_bytes is not None:
        parts.append(f"weights {format_bytes(row.weights_bytes)}")
    if row.activation_bytes is not None:
        parts.append(f"activations {format_bytes(row.activation_bytes)}")
    if row.host_peak_bytes is not None:
        parts.append(f"whole process {format_bytes(row.host_peak_bytes)}")
    return ", ".join(parts)


def _summary(run: Run, cast: Cast, rows: dict[str, MemoryRow]) -> str:
    records = [record for record in cast.records if record.id in rows]
    least = min(records, key=lambda record: record.peak_bytes or 0)
    text = f"{short_name(least)} needs least, {_words(rows[least.id])}"
    base = run.baseline.peak_bytes
    if base and least.id != run.baseline.id:
        text += f"; that is {100 * (least.peak_bytes or 0) / base:.0f} % of {run.baseline.id}'s {format_bytes(base)}"
    budget = run.recipe.budgets.max_memory_bytes
    if budget is not None:
        holding = sum((record.peak_bytes or 0) <= budget for record in records)
        text += f"; {holding} of {len(records)} hold the budget of {format_bytes(budget)}"
    return f"{text}{cast.unnamed(rows, 'in the table only')}."
