"""What each group costs alone: quantised, or pruned."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from enginesmith.pipeline.explain import claimed
from enginesmith.pipeline.pruning.record import GroupSensitivity
from enginesmith.pipeline.report.charts.base import Chart, Figure, missing
from enginesmith.pipeline.report.charts.parts import axis, layout, listed, others
from enginesmith.pipeline.report.charts.styles import COLOURS, DASHES, MOST_NAMED, NEUTRAL, SYMBOLS, Cast, Style, called
from enginesmith.pipeline.report.charts.text import counted, label, said
from enginesmith.pipeline.report.smaller import SENSITIVITY
from enginesmith.pipeline.report.smaller import sensitivity as pruned_cells
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


def pruned(run: Run) -> Chart:
    """The metric by the share of a group that is pruned, alone."""
    found: dict[str, list[GroupSensitivity]] = {}
    for one in run.prune_sensitivity:
        if one.value is not None:
            found.setdefault(one.group, []).append(one)
    metric = next((one.metric for one in run.prune_sensitivity), "metric")
    title = f"{metric} by the share of its channels or heads (%) that one group alone loses"
    if not found:
        told = next((one.reason for one in run.prune_sensitivity if one.reason), "--prune-sensitivity asks for it")
        return missing("prune-sensitivity", title, SENSITIVITY, f"No group was pruned alone: {told}.")
    curves = {group: sorted(each, key=lambda one: one.ratio) for group, each in found.items()}
    return Chart(
        id="prune-sensitivity",
        title=title,
        figure=_curves(curves, metric),
        summary=_steepest(curves, metric),
        columns=SENSITIVITY,
        rows=tuple(pruned_cells(run)[:_MOST_ROWS]),
    )


def _fallen(points: Sequence[GroupSensitivity], metric: str) -> float:
    """By how much the metric is worse at the last point than at the first."""
    first, last = points[0].value or 0.0, points[-1].value or 0.0
    return last - first if metric == "mse" else first - last


def _curves(curves: Mapping[str, list[GroupSensitivity]], metric: str) -> Figure:
    steep = sorted(curves, key=lambda group: (-_fallen(curves[group], metric), group))
    shown, rest = [one for one in curves if one in steep[:MOST_NAMED]], steep[MOST_NAMED:]
    traces: list[Figure] = []
    if rest:
        traces.append(
            others([([100 * one.ratio for one in curves[name]], [one.value for one in curves[name]]) for name in rest])
        )
    traces += [_curve(index, name, curves[name]) for index, name in enumerate(shown)]
    x, y = axis("share of the group that is pruned (%)", log=False), axis(metric, log=False, zero=False)
    return {"data": traces, "layout": layout(x, y, len(shown) + bool(rest))}


def _curve(index: int, name: str, points: Sequence[GroupSensitivity]) -> Figure:
    colour = COLOURS[index % len(COLOURS)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(name),
        "x": [100 * one.ratio for one in points],
        "y": [one.value for one in points],
        "hovertext": [said(name, _point(one)) for one in points],
        "hoverinfo": "text",
        "line": {"color": colour, "dash": DASHES[index // len(COLOURS) % len(DASHES)], "width": 2},
        "marker": {"color": colour, "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7, "line": {"color": NEUTRAL}},
    }


def _point(one: GroupSensitivity) -> str:
    return f"{one.metric} {one.value:.4g} with {one.left} of {one.units} {one.unit}s left ({one.ratio:.0%} pruned)"


def _steepest(curves: Mapping[str, list[GroupSensitivity]], metric: str) -> str:
    name = max(curves, key=lambda group: (_fallen(curves[group], metric), group))
    last = curves[name][-1]
    text = f"{name} costs most of {counted(len(curves), 'group')}: {_point(last)}"
    more = len(curves) - MOST_NAMED
    return text + (f"; {more} more are grey." if more > 0 else ".")
