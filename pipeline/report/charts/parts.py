"""What figures are made of: axes, layouts, traces; and which numbers of a run they are about."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from enginesmith.pipeline.budgets import why_unknown
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.report.charts.base import Figure
from enginesmith.pipeline.report.charts.styles import NEUTRAL, REST, Style
from enginesmith.pipeline.report.charts.text import counted, escaped
from enginesmith.pipeline.run import Run, VariantRecord

MEBIBYTE = 1 << 20
_WIDE = 10.0
"""Largest over smallest value from which an axis is logarithmic."""
_DECADES = 1000.0
"""Largest over smallest value up to which a logarithmic axis has ticks between its powers of ten."""
_PLOT, _LINE, _ROW, _FRAME = 330, 23, 38, 110
"""Pixels: of a plot, a line of the legend, a row of a list, and of axis titles and margins."""


def why_none(run: Run, field: str, otherwise: str) -> str:
    """Why no record has a field, in the run's own words where it has some."""
    return _first([record.reasons.get(field) or record.reason for record in (run.baseline, *run.variants)], otherwise)


def why_no_memory(run: Run) -> str:
    """The same for peak memory, which may be missing in a measurement that there is."""
    records, at = (run.baseline, *run.variants), run.deciding_batch
    return _first([why_unknown(record, "max_memory_bytes", at) for record in records], "it was not measured")


def _first(reasons: Sequence[str], otherwise: str) -> str:
    told = list(dict.fromkeys(filter(None, reasons)))
    more = f" (and {counted(len(told) - 1, 'more reason')})" if len(told) > 1 else ""
    return f"{told[0]}{more}" if told else otherwise


def axis(title: str, values: Iterable[float | None] = (), *, log: bool | None = None, zero: bool = True) -> Figure:
    """An axis with its unit; logarithmic where the values ask for it, else from zero on unless told otherwise."""
    known = [value for value in values if value is not None]
    found: Figure = {"title": {"text": escaped(title), "standoff": 8}, "automargin": True}
    if not (is_wide(known) if log is None else log):
        return {**found, "rangemode": "tozero"} if zero else found
    few = bool(known) and max(known) / min(known) < _DECADES
    return {**found, "type": "log", "dtick": "D2" if few else 1, "tickformat": "~g"}


def places(title: str, labels: Mapping[float, str], **more: Any) -> Figure:
    """An axis with labels at some places of it alone."""
    found: Figure = {"title": {"text": escaped(title), "standoff": 8}, "automargin": True, "tickmode": "array"}
    return {**found, "tickvals": list(labels), "ticktext": list(labels.values()), **more}


def is_wide(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis, and can have one."""
    return len(values) > 1 and min(values) > 0 and max(values) / min(values) > _WIDE


def layout(x: Figure, y: Figure, legend: int, *, plot: int = _PLOT, **more: Any) -> Figure:
    """A layout for so many entries in the legend, which stands below a plot of so many pixels."""
    above = sum(one.get("xref", "x") == "x" and one.get("yref") == "paper" for one in more.get("shapes", ()))
    height = plot + _FRAME + legend * _LINE + 14 * above
    return {
        "height": height,
        "margin": {"l": 12, "r": 16, "t": 16 + 14 * above, "b": 12},
        "showlegend": legend > 0,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xref": "container",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "traceorder": "normal",
            "itemwidth": 40,
        },
        "hovermode": "closest",
        "xaxis": x,
        "yaxis": y,
        **more,
    }


def listed(x: Figure, names: Sequence[str], legend: int, **more: Any) -> Figure:
    """A layout of rows from the top, a name above each: beside them, long ones would take a phone's width.

    Rows are at 0, 1, 2 …, as names may be alike when shortened.
    """
    span = [len(names) - 0.45, -0.85]
    y = {"tickmode": "linear", "tick0": 0, "dtick": 1, "range": span, "showticklabels": False, "zeroline": False}
    above = {"xref": "paper", "x": 0, "xanchor": "left", "yanchor": "bottom", "yshift": 10, "showarrow": False}
    texts = [{**above, "text": name, "y": row, "align": "left"} for row, name in enumerate(names)]
    return layout(x, y, legend, plot=len(names) * _ROW + _ROW // 2, annotations=texts, **more)


def points(style: Style, x: Sequence[float], y: Sequence[float | None], hover: Sequence[str], **more: Any) -> Figure:
    """Markers joined by a line, for one variant."""
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": style.name,
        "x": list(x),
        "y": list(y),
        "hovertext": list(hover),
        "hoverinfo": "text",
        "line": style.line,
        "marker": style.marker,
        "zorder": style.zorder,
        **more,
    }


def interval(
    style: Style, at: Sequence[float], found: Sequence[Interval | None], direction: str = "y", **more: Any
) -> Figure | None:
    """Error bars by themselves: a median of undisturbed calls may lie elsewhere than the one of all calls."""
    known = [(place, one) for place, one in zip(at, found, strict=True) if one is not None]
    if not known:
        return None
    return {
        "type": "scatter",
        "mode": "markers",
        "x" if direction == "y" else "y": [place for place, _ in known],
        direction: [one.median for _, one in known],
        f"error_{direction}": bars([one for _, one in known], style.colour),
        "marker": {"color": style.colour, "size": 1},
        "hoverinfo": "skip",
        "showlegend": False,
        **more,
    }


def bars(found: Sequence[Interval], colour: str) -> Figure:
    """Intervals around their medians as error bars."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [one.high - one.median for one in found],
        "arrayminus": [one.median - one.low for one in found],
        "color": colour,
        "thickness": 1.5,
        "width": 4,
    }


def others(lines: Sequence[tuple[Sequence[float], Sequence[float | None]]], mode: str = "lines") -> Figure:
    """All that is not named as one grey trace, with gaps between its lines."""
    x: list[float | None] = []
    y: list[float | None] = []
    for xs, ys in lines:
        x += [*xs, None]
        y += [*ys, None]
    marker = {"marker": {"color": REST, "size": 5}} if "markers" in mode else {}
    return {
        "type": "scatter",
        "mode": mode,
        "name": f"{len(lines)} more",
        "x": x,
        "y": y,
        "hoverinfo": "skip",
        "line": {"color": REST, "width": 1},
        **marker,
        "opacity": 0.3,
        "connectgaps": False,
    }


def limit(direction: str, value: float, text: str, values: Sequence[float], line: int = 0) -> Figure:
    """A line at a budget or threshold across the plot, ``"x"`` being a vertical one; ``values`` are what is drawn.

    Texts stand on the side that has room, those of vertical lines above the plot, in as many lines as there are.
    """
    other = "y" if direction == "x" else "x"
    label: Figure = {"text": escaped(text), "textposition": "end", "font": {"size": 11}}
    left = sum(one < value for one in values) > len(values) / 2
    if direction == "y":
        label["yanchor"] = "top" if left else "bottom"
    else:
        above = {"textangle": 0, "xanchor": "right" if left else "left", "yanchor": "bottom"}
        label |= {**above, "text": escaped(text) + "<br>&nbsp;" * line, "padding": 2}
    return {
        "type": "line",
        f"{direction}0": value,
        f"{direction}1": value,
        f"{other}0": 0,
        f"{other}1": 1,
        f"{other}ref": "paper",
        "line": {"color": NEUTRAL, "width": 1.5, "dash": "longdash"},
        "label": label,
    }


def measured(records: Iterable[VariantRecord], at: int) -> dict[str, LatencyRow]:
    """By record, its latency at a batch size, as far as it was measured."""
    return {record.id: row for record in records if (row := record.row(at)) is not None}
