"""Chart what each group costs when it alone is quantised."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from enginesmith.pipeline.explain import claimed
from enginesmith.pipeline.report.charts.base import Chart, Figure, missing
from enginesmith.pipeline.report.charts.parts import axis, listed
from enginesmith.pipeline.report.charts.styles import Cast, Style, called
from enginesmith.pipeline.report.charts.text import label, said
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.run import Assignment, Run, VariantRecord

QUANTISED = ("group", "variant", "operator", "SQNR dB", "computed in")
_MOST_GROUPS = 20
_MOST_ROWS = 500


def quantised(run: Run) -> Chart:
    """SQNR of each group's own result in the low precision; an open marker is a group that stayed in float."""
    title = "SQNR (dB) of each group's own result in low precision, its inputs exact; open markers stayed in float"
    cast = Cast(run)
    found = {
        record.id: {one.group: one for one in record.assignment if one.sqnr_db is not None} for record in cast.records
    }
    found = {name: groups for name, groups in found.items() if groups}
    if not found:
        return missing("sensitivity", title, QUANTISED, _why(run))
    worst: dict[str, float] = {}
    for groups in found.values():
        for group, one in groups.items():
            worst[group] = min(worst.get(group, float("inf")), one.sqnr_db if one.sqnr_db is not None else float("inf"))
    ordered = sorted(worst, key=lambda group: (worst[group], group))
    names = {record.id: marked(record) for record in cast.records}
    cells = (
        _cells(group, names[name], found[name][group]) for group in ordered for name in found if group in found[name]
    )
    return Chart(
        id="sensitivity",
        title=title,
        figure=_figure(cast, found, ordered[:_MOST_GROUPS]),
        summary=_summary(cast, found, ordered),
        columns=QUANTISED,
        rows=tuple(itertools.islice(cells, _MOST_ROWS)),
    )


def _why(run: Run) -> str:
    if any(record.assignment for record in run.variants):
        return "The groups were not tried one by one: no accuracy or fidelity goal asked for a search."
    return "Nothing was quantised group by group in this run."


def _cells(group: str, name: str, one: Assignment) -> tuple[str, ...]:
    return (group, name, one.operator, f"{one.sqnr_db:.1f}", one.precision)


def _figure(cast: Cast, found: Mapping[str, Mapping[str, Assignment]], groups: Sequence[str]) -> Figure:
    places = {group: place for place, group in enumerate(groups)}
    shown = cast.named(found)
    traces: list[Figure] = []
    for record in shown:
        mine = [one for group, one in found[record.id].items() if group in places]
        low = [one for one in mine if claimed(one.precision) == claimed(record.precision)]
        kept = [one for one in mine if one not in low]
        style = cast.style(record)
        traces += [
            _markers(style, record, part, places, symbol, showlegend=part is low or not low)
            for part, symbol in ((low, style.symbol), (kept, f"{style.symbol}-open"))
            if part
        ]
    names = [label(group) for group in groups]
    return {"data": traces, "layout": listed(axis("SQNR (dB)", log=False), names, len(shown))}


def _markers(
    style: Style,
    record: VariantRecord,
    found: Sequence[Assignment],
    places: Mapping[str, int],
    symbol: str,
    **more: Any,
) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": style.name,
        "legendgroup": style.name,
        "x": [one.sqnr_db for one in found],
        "y": [places[one.group] for one in found],
        "hovertext": [said(marked(record), _words(one)) for one in found],
        "hoverinfo": "text",
        "marker": {**style.marker, "symbol": symbol, "line": {"width": 1.5, "color": style.colour}},
        **more,
    }


def _words(one: Assignment) -> str:
    why = f": {one.why}" if one.why else ""
    return f"{one.group} ({one.operator}): SQNR {one.sqnr_db:.1f} dB, computed in {one.precision}{why}"


def _summary(cast: Cast, found: Mapping[str, Mapping[str, Assignment]], ordered: Sequence[str]) -> str:
    record, one = min(
        ((record, one) for record in cast.records for one in found.get(record.id, {}).values()),
        key=lambda pair: pair[1].sqnr_db or 0.0,
    )
    text = f"{one.group} ({one.operator}) loses most in low precision, to {one.sqnr_db:.1f} dB in {called(record)}"
    shown = f"; the {_MOST_GROUPS} worst of {len(ordered)} groups are shown" if len(ordered) > _MOST_GROUPS else ""
    return f"{text}{shown}{cast.unnamed(found, 'in the table only')}."
