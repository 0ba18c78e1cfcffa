"""Draw time by module, and each variant's distance from the device's limits."""

from collections.abc import Mapping, Sequence

from enginesmith.pipeline.measure.profile import JoinedRow, joined, repeated
from enginesmith.pipeline.measure.rows import LimitRow, Profile
from enginesmith.pipeline.report.charts.plotly import (
    NEUTRAL,
    Cast,
    Chart,
    Figure,
    Style,
    axis,
    draw_markers,
    hover_text,
    label,
    list_layout,
    make_empty_chart,
    short_name,
    why_none,
)
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.units import ms

_ID = "profile"
_MOST_MODULES = 20


def profile(run: Run) -> Chart:
    """Time of each module in each variant: the largest ones, and the rest together."""
    cast = Cast(run)
    profiles = ((record.id, one) for record in cast.records for one in reversed(record.profile))
    found = {name: one for name, one in profiles if one.total_ms is not None and one.rows}
    sizes = ", ".join(map(str, sorted({one.batch for one in found.values()})))
    title = f"Time of an inference (ms) by module, at batch {sizes}" if found else "Time of an inference (ms) by module"
    if not found:
        why = f"Nothing was profiled: {why_none(run, 'profile', 'not asked for')}."
        return make_empty_chart(_ID, title, why)
    shown = [found[record.id] for record in cast.named(found)]
    modules = _modules(shown)
    return Chart(
        id=_ID,
        title=title,
        figure=_figure(cast, modules),
        summary=_summary(run, cast, shown, modules, found),
    )


def _modules(profiles: Sequence[Profile]) -> list[JoinedRow]:
    """Choose the modules that cost most somewhere, and sum up all that are left in one more row."""
    rows = joined(profiles)
    if len(rows) > _MOST_MODULES:
        rows = repeated(rows)
    ordered = sorted(rows, key=lambda row: (-row.most_ms, row.module))
    kept, left = ordered[:_MOST_MODULES], ordered[_MOST_MODULES:]
    if not left:
        return kept
    sums: dict[str, float | None] = {one.variant: sum(row.ms[one.variant] or 0.0 for row in left) for one in profiles}
    return [*kept, JoinedRow(module=f"({len(left)} more)", modules=(), ms=sums, ratio=dict.fromkeys(sums))]


def _figure(cast: Cast, modules: Sequence[JoinedRow]) -> Figure:
    shown = [record for record in cast.records if record.id in modules[0].ms]
    traces: list[Figure] = []
    for record in shown:
        style = cast.style(record)
        mine = [(place, row, row.ms[record.id]) for place, row in enumerate(modules) if row.ms[record.id] is not None]
        hover = [
            hover_text(marked(record), f"{row.module}: {ms(value)} ms", row.why.get(record.id, ""))
            for _, row, value in mine
        ]
        marker = {**style.marker, "size": style.size + 1, "opacity": 0.9}
        x, y = [value for _, _, value in mine], [place for place, _, _ in mine]
        traces.append(draw_markers(style.name, x, y, hover, marker=marker))
    names = [label(row.module) for row in modules]
    return {"data": traces, "layout": list_layout(axis("time in one inference (ms)", log=False), names, len(shown))}


def _summary(
    run: Run, cast: Cast, shown: Sequence[Profile], modules: Sequence[JoinedRow], having: dict[str, Profile]
) -> str:
    told = next((one for one in shown if one.variant == run.winner), shown[0])
    name = next(short_name(record) for record in cast.records if record.id == told.variant)
    total = told.total_ms or 0.0
    largest = max((row for row in modules if row.modules), key=lambda row: row.ms[told.variant] or 0.0, default=None)
    text = f"{name}'s operators take {ms(total)} ms in all"
    if largest is not None and total and (most := largest.ms[told.variant]) is not None:
        text += f", the largest part in {largest.module} ({ms(most)} ms, {100 * most / total:.0f} %)"
    return f"{text}{cast.unnamed(having, 'not shown')}."


# How far each variant is from the least time that its work takes on the device.

_LIMITS_ID = "limits"
_BOUNDS = {"arithmetic": "circle-open", "memory": "square-open", "launch": "diamond-open"}


def limits(run: Run) -> Chart:
    """Measured time beside its floor."""
    cast, at = Cast(run), run.deciding_batch
    title = f"Measured time of an inference (ms) at batch {at}, and the least that the device could take"
    rows = {
        record.id: row
        for record in cast.records
        for row in record.limits
        if row.batch == at and row.floor_ms is not None and row.floor_ms > 0
    }
    if not rows:
        why = why_none(run, "limits", "no floor is known at this batch size")
        return make_empty_chart(_LIMITS_ID, title, f"Nothing was held against the device's limits: {why}.")
    return Chart(
        id=_LIMITS_ID,
        title=title,
        figure=_limits_figure(cast, rows),
        summary=_limits_summary(run, cast, rows),
    )


def _limits_figure(cast: Cast, rows: Mapping[str, LimitRow]) -> Figure:
    shown = cast.named(rows)
    traces: list[Figure] = []
    for place, record in enumerate(shown):
        traces += _distance(cast.style(record), record, rows[record.id], place)
    bounds = {rows[record.id].bound_by for record in shown}
    traces += [_key(f"floor, by {bound}", symbol) for bound, symbol in _BOUNDS.items() if bound in bounds]
    times = [time for row in rows.values() for time in (row.measured_ms, row.floor_ms)]
    x = axis("time of an inference (ms)", times)
    names = [cast.style(record).name for record in shown]
    return {"data": traces, "layout": list_layout(x, names, len(bounds))}


def _distance(style: Style, record: VariantRecord, row: LimitRow, place: int) -> list[Figure]:
    """Draw a line from the floor to what was measured, with a marker at each end."""
    assert row.floor_ms is not None
    hover = hover_text(marked(record), _words(row), row.summary)
    common = {"type": "scatter", "hovertext": hover, "hoverinfo": "text", "showlegend": False}
    found: list[Figure] = []
    if row.measured_ms is not None:
        ends = [row.floor_ms, row.measured_ms]
        found.append(
            {**common, "mode": "lines", "x": ends, "y": [place, place], "line": style.line | {"dash": "solid"}}
        )
        found.append({**common, "mode": "markers", "x": [row.measured_ms], "y": [place], "marker": style.marker})
    symbol = _BOUNDS.get(row.bound_by, "circle-open")
    marker = {"color": style.colour, "symbol": symbol, "size": 12, "line": {"width": 2.5, "color": style.colour}}
    return [*found, {**common, "mode": "markers", "x": [row.floor_ms], "y": [place], "marker": marker}]


def _key(name: str, symbol: str) -> Figure:
    """Draw a marker's entry in the legend, in a colour that is no variant's."""
    marker = {"color": NEUTRAL, "symbol": symbol, "size": 12, "line": {"width": 2.5, "color": NEUTRAL}}
    return {"type": "scatter", "mode": "markers", "name": name, "x": [None], "y": [None], "marker": marker}


def _words(row: LimitRow) -> str:
    text = f"measured {ms(row.measured_ms)} ms, floor {ms(row.floor_ms)} ms"
    ratio = "" if row.measured_over_floor is None else f", {row.measured_over_floor:.3g}× its floor"
    return f"{text}{ratio}, bound by {row.bound_by}"


def _limits_summary(run: Run, cast: Cast, rows: Mapping[str, LimitRow]) -> str:
    told = [record for record in cast.records if record.id in rows and rows[record.id].measured_over_floor is not None]
    unnamed = cast.unnamed(rows, "in the table only")
    if not told:
        return f"Floors of {len(rows)} variants are known, and none was measured{unnamed}."
    nearest = min(told, key=lambda record: rows[record.id].measured_over_floor or 0.0)
    text = f"{short_name(nearest)} is nearest to what the device can do: {_words(rows[nearest.id])}"
    base = rows.get(run.baseline.id)
    if base and nearest.id != run.baseline.id and base.measured_over_floor is not None:
        text += f"; {short_name(run.baseline)} takes {base.measured_over_floor:.3g}× its own floor"
    return f"{text}{unnamed}."
