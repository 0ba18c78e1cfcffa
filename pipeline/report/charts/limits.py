"""How far each variant is from the least time that its work takes on the device."""

from collections.abc import Mapping

from enginesmith.pipeline.measure.rows import LimitRow
from enginesmith.pipeline.report.charts.base import Chart, Figure, missing
from enginesmith.pipeline.report.charts.parts import axis, listed, why_none
from enginesmith.pipeline.report.charts.styles import NEUTRAL, Cast, Style, called
from enginesmith.pipeline.report.charts.text import said
from enginesmith.pipeline.report.measurements import LIMITS
from enginesmith.pipeline.report.measurements import limits as cells
from enginesmith.pipeline.report.tables import marked, ms
from enginesmith.pipeline.run import Run, VariantRecord

_ID = "limits"
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
        return missing(_ID, title, LIMITS, f"Nothing was held against the device's limits: {why}.")
    return Chart(
        id=_ID,
        title=title,
        figure=_figure(cast, rows),
        summary=_summary(run, cast, rows),
        columns=LIMITS,
        rows=tuple(row for row in cells(run) if row[1] == str(at)),
    )


def _figure(cast: Cast, rows: Mapping[str, LimitRow]) -> Figure:
    shown = cast.named(rows)
    traces: list[Figure] = []
    for place, record in enumerate(shown):
        traces += _distance(cast.style(record), record, rows[record.id], place)
    bounds = {rows[record.id].bound_by for record in shown}
    traces += [_key(f"floor, by {bound}", symbol) for bound, symbol in _BOUNDS.items() if bound in bounds]
    times = [time for row in rows.values() for time in (row.measured_ms, row.floor_ms)]
    x = axis("time of an inference (ms)", times)
    names = [cast.style(record).name for record in shown]
    return {"data": traces, "layout": listed(x, names, len(bounds))}


def _distance(style: Style, record: VariantRecord, row: LimitRow, place: int) -> list[Figure]:
    """A line from the floor to what was measured, with a marker at each end."""
    assert row.floor_ms is not None
    hover = said(marked(record), _words(row), row.summary)
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
    """What a marker means, in a colour that is no variant's."""
    marker = {"color": NEUTRAL, "symbol": symbol, "size": 12, "line": {"width": 2.5, "color": NEUTRAL}}
    return {"type": "scatter", "mode": "markers", "name": name, "x": [None], "y": [None], "marker": marker}


def _words(row: LimitRow) -> str:
    text = f"measured {ms(row.measured_ms)} ms, floor {ms(row.floor_ms)} ms"
    ratio = "" if row.measured_over_floor is None else f", {row.measured_over_floor:.3g}× its floor"
    return f"{text}{ratio}, bound by {row.bound_by}"


def _summary(run: Run, cast: Cast, rows: Mapping[str, LimitRow]) -> str:
    told = [record for record in cast.records if record.id in rows and rows[record.id].measured_over_floor is not None]
    unnamed = cast.unnamed(rows, "in the table only")
    if not told:
        return f"Floors of {len(rows)} variants are known, and none was measured{unnamed}."
    nearest = min(told, key=lambda record: rows[record.id].measured_over_floor or 0.0)
    text = f"{called(nearest)} is nearest to what the device can do: {_words(rows[nearest.id])}"
    base = rows.get(run.baseline.id)
    if base and nearest.id != run.baseline.id and base.measured_over_floor is not None:
        text += f"; {called(run.baseline)} takes {base.measured_over_floor:.3g}× its own floor"
    return f"{text}{unnamed}."
