"""Draw time by module, and each variant's distance from the device's limits."""

from collections.abc import Mapping, Sequence

from enginesmith.pipeline.measure.profile import JoinedRow, join_profiles, merge_layers
from enginesmith.pipeline.measure.rows import LimitRow, Profile
from enginesmith.pipeline.report.charts.plotly import (
    NEUTRAL,
    Cast,
    Chart,
    Figure,
    axis,
    draw_markers,
    hover_text,
    label,
    list_layout,
    short_name,
    why_none,
)
from enginesmith.pipeline.report.tables import mark_name
from enginesmith.pipeline.results.run import VariantRecord
from enginesmith.pipeline.units import ms

_MOST_MODULES = 20


def profile(cast: Cast) -> Chart:
    """Draw the time of each module in each variant: the largest ones, and the rest together."""
    profiles = ((record.id, profile) for record in cast.records for profile in reversed(record.profile))
    by_id = {name: profile for name, profile in profiles if profile.total_ms is not None and profile.rows}
    title = "Time of an inference (ms) by module"
    if not by_id:
        why = f"Nothing was profiled: {why_none(cast.run, 'profile', 'not asked for')}."
        return Chart("profile", title, empty=why)
    title += f", at batch {', '.join(map(str, sorted({profile.batch for profile in by_id.values()})))}"
    shown = [by_id[record.id] for record in cast.named(by_id)]
    modules = _choose_modules(shown)
    return Chart("profile", title, _draw_modules(cast, modules), _summarize_modules(cast, shown, modules, by_id))


def _choose_modules(profiles: Sequence[Profile]) -> list[JoinedRow]:
    """Choose the modules that cost most somewhere, and sum up all that are left in one more row."""
    rows = join_profiles(profiles)
    if len(rows) > _MOST_MODULES:
        rows = merge_layers(rows)
    ordered = sorted(rows, key=lambda row: (-row.most_ms, row.module))
    kept, left = ordered[:_MOST_MODULES], ordered[_MOST_MODULES:]
    if not left:
        return kept
    sums: dict[str, float | None] = {
        profile.variant: sum(row.ms[profile.variant] or 0.0 for row in left) for profile in profiles
    }
    return [*kept, JoinedRow(module=f"({len(left)} more)", modules=(), ms=sums)]


def _draw_modules(cast: Cast, modules: Sequence[JoinedRow]) -> Figure:
    traces: list[Figure] = []
    for record in cast.select(modules[0].ms):
        style = cast.style(record)
        mine = [(place, row, row.ms[record.id]) for place, row in enumerate(modules) if row.ms[record.id] is not None]
        hover = [
            hover_text(mark_name(record), f"{row.module}: {ms(value)} ms", row.why.get(record.id, ""))
            for _, row, value in mine
        ]
        marker = {**style.marker, "size": style.size + 1, "opacity": 0.9}
        x, y = [value for _, _, value in mine], [place for place, _, _ in mine]
        traces.append(draw_markers(style.name, x, y, hover, marker=marker))
    names, x_axis = [label(row.module) for row in modules], axis("time in one inference (ms)", log=False)
    return {"data": traces, "layout": list_layout(x_axis, names, len(traces))}


def _summarize_modules(
    cast: Cast, shown: Sequence[Profile], modules: Sequence[JoinedRow], by_id: Mapping[str, Profile]
) -> str:
    mine = next((profile for profile in shown if profile.variant == cast.run.winner), shown[0])
    total = mine.total_ms or 0.0
    largest = max((row for row in modules if row.modules), key=lambda row: row.ms[mine.variant] or 0.0, default=None)
    text = f"{short_name(cast.select((mine.variant,))[0])}'s operators take {ms(total)} ms in all"
    if largest is not None and total and (most := largest.ms[mine.variant]) is not None:
        text += f", the largest part in {largest.module} ({ms(most)} ms, {100 * most / total:.0f} %)"
    return f"{text}{cast.unnamed(by_id, 'not shown')}."


# How far each variant is from the least time that its work takes on the device.

_BOUNDS = {"arithmetic": "circle-open", "memory": "square-open", "launch": "diamond-open"}


def limits(cast: Cast) -> Chart:
    """Draw measured time beside its floor."""
    at = cast.run.deciding_batch
    title = f"Measured time of an inference (ms) at batch {at}, and the least time that the device needs"
    rows = {
        record.id: row
        for record in cast.records
        for row in record.limits
        if row.batch == at and row.floor_ms is not None and row.floor_ms > 0
    }
    if not rows:
        why = why_none(cast.run, "limits", "no floor is known at this batch size")
        return Chart("limits", title, empty=f"Nothing was compared with the device's limits: {why}.")
    shown = cast.named(rows)
    traces = [
        trace for place, profile in enumerate(shown) for trace in _draw_distance(cast, profile, rows[profile.id], place)
    ]
    bounds = {rows[record.id].bound_by for record in shown}
    for bound, symbol in _BOUNDS.items():  # the legend's entries are in a colour that is no variant's
        if bound in bounds:
            marker = _mark_floor(symbol, NEUTRAL)
            key = {"type": "scatter", "mode": "markers", "name": f"floor, by {bound}", "x": [None], "y": [None]}
            traces.append({**key, "marker": marker})
    x_axis = axis("time of an inference (ms)", [t for row in rows.values() for t in (row.measured_ms, row.floor_ms)])
    names = [cast.style(record).name for record in shown]
    figure = {"data": traces, "layout": list_layout(x_axis, names, len(bounds))}
    return Chart("limits", title, figure, _summarize_limits(cast, rows))


def _draw_distance(cast: Cast, record: VariantRecord, row: LimitRow, place: int) -> list[Figure]:
    """Draw a line from the floor to what was measured, with a marker at each end."""
    style, hover = cast.style(record), hover_text(mark_name(record), _describe_limit(row), row.summary)
    common = {"type": "scatter", "hovertext": hover, "hoverinfo": "text", "showlegend": False}
    traces: list[Figure] = []
    if row.measured_ms is not None:
        line = {"x": [row.floor_ms, row.measured_ms], "y": [place, place], "line": style.line | {"dash": "solid"}}
        traces.append({**common, "mode": "lines", **line})
        traces.append({**common, "mode": "markers", "x": [row.measured_ms], "y": [place], "marker": style.marker})
    marker = _mark_floor(_BOUNDS.get(row.bound_by, "circle-open"), style.colour)
    return [*traces, {**common, "mode": "markers", "x": [row.floor_ms], "y": [place], "marker": marker}]


def _mark_floor(symbol: str, colour: str) -> Figure:
    return {"color": colour, "symbol": symbol, "size": 12, "line": {"width": 2.5, "color": colour}}


def _describe_limit(row: LimitRow) -> str:
    ratio = "" if row.measured_over_floor is None else f", {row.measured_over_floor:.3g}× its floor"
    return f"measured {ms(row.measured_ms)} ms, floor {ms(row.floor_ms)} ms{ratio}, bound by {row.bound_by}"


def _summarize_limits(cast: Cast, rows: Mapping[str, LimitRow]) -> str:
    unnamed = cast.unnamed(rows, "in the table only")
    known = [record for record in cast.select(rows) if rows[record.id].measured_over_floor is not None]
    if not known:
        return f"Floors of {len(rows)} variant{'s' if len(rows) > 1 else ''} are known, and none was measured{unnamed}."
    nearest = min(known, key=lambda record: rows[record.id].measured_over_floor or 0.0)
    text = f"{short_name(nearest)} is nearest to the device's limit: {_describe_limit(rows[nearest.id])}"
    baseline = cast.run.baseline
    base = rows.get(baseline.id)
    if base and nearest.id != baseline.id and base.measured_over_floor is not None:
        text += f"; {short_name(baseline)} takes {base.measured_over_floor:.3g}× its own floor"
    return f"{text}{unnamed}."
