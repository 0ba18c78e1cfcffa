"""Make the parts of figures: axes, layouts and traces, and a style for each variant."""

import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.report.tables import mark_name, shorten_reason
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.results.verdicts import why_unknown
from enginesmith.pipeline.units import count_words

# What a chart is: a plotly.js figure as plain data, and the same in words and as a table.

Figure = dict[str, Any]
"""``data`` and ``layout`` as plotly.js takes them: dicts, lists, strings, numbers, booleans and None, nothing else.

``layout`` has a height and no width; texts and lines take their colors from the template that the page chooses.
"""


@dataclass(frozen=True)
class Chart:
    """A chart of a run's numbers. Its texts are plain: whoever puts them into a document escapes them."""

    id: str
    """Unique among the charts of a run; letters, digits and hyphens."""
    title: str
    """The quantities that are drawn, with units."""
    figure: Figure | None = None
    """None where there is nothing to draw, as ``empty`` explains."""
    summary: str = ""
    """One sentence that says what the figure shows; empty where there is none. Its numbers are in a table beside it."""
    empty: str = ""
    """The reason why there is no figure."""


def _theme(text: str, lines: str, ground: str) -> Figure:
    axis = {"gridcolor": lines, "linecolor": lines, "zerolinecolor": lines, "tickcolor": lines, "automargin": True}
    return {
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": text, "size": 13, "family": "system-ui, -apple-system, 'Segoe UI', sans-serif"},
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": ground, "bordercolor": lines, "font": {"color": text}, "namelength": -1},
        }
    }


LIGHT = _theme("#1f2328", "#d0d7de", "#ffffff")
DARK = _theme("#e6edf3", "#3d444d", "#161b22")
"""Templates: the page sets one as ``layout.template``; nothing else in a figure depends on the background."""


# Names in figures: plotly.js reads tags, entities and ``%{…}`` in texts, and has no way to be told not to.

_TEXT_LINE = 80
_LONGEST = 32


def escape(text: str) -> str:
    """Escape text, so that plotly.js shows it as it stands in legends, ticks, annotations and hover templates."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("{", "&#123;"), ("$", "&#36;")):
        text = text.replace(character, entity)
    return " ".join(text.split())


def shorten_name(text: str, most: int = _LONGEST) -> str:
    """Shorten a long name in its middle, as beginnings and ends tell names apart."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def label(name: str) -> str:
    """Format a name for legends and ticks."""
    return escape(shorten_name(name))


def hover_text(*lines: str) -> str:
    """Join plain lines to a hover text; long ones are broken between words where they have some."""
    return "<br>".join(escape(part) for line in lines for part in textwrap.wrap(line, _TEXT_LINE))


# Who is drawn how: the same color, marker and dash for the same variant in every chart of a run.

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Colors of Okabe and Ito ("Color Universal Design", 2008) with a contrast of 3 on white and on black alike."""
NEUTRAL = "#6E7681"
"""Color of the baseline, and of what belongs to no variant."""
REST = "#9AA0A6"
SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon"),
    *("hexagon", "star-triangle-up", "cross", "hourglass", "bowtie", "star-diamond"),
)
DASHES = ("solid", "dash", "dashdot")
MOST_NAMED = 12
_IN_SENTENCES = 60


@dataclass(frozen=True)
class Style:
    """The look of one variant, which is never told from others by color alone."""

    name: str
    """For legends and ticks; the winner's has a star."""
    color: str
    symbol: str
    dash: str
    winner: bool

    @property
    def size(self) -> float:
        """Diameter of markers, in pixels."""
        return 11 if self.winner else 8

    @property
    def marker(self) -> Figure:
        """Markers in the notation of plotly.js."""
        return {"color": self.color, "symbol": self.symbol, "size": self.size}

    @property
    def line(self) -> Figure:
        """Lines in the notation of plotly.js; their width is in pixels."""
        return {"color": self.color, "dash": self.dash, "width": 3.5 if self.winner else 2}


def short_name(record: VariantRecord) -> str:
    """Format a record's name for sentences."""
    return shorten_name(mark_name(record), _IN_SENTENCES)


class Cast:
    """Chooses a style for each record of a run, and who is named first: winner, baseline, front, then as they stand."""

    def __init__(self, run: Run) -> None:
        self.run, self.records = run, run.records
        self.usable = [record for record in run.records if record.status != "failed"]
        """Records whose speed and memory are worth something: what is wrong may be fast."""
        measured = (record.id for record in run.records if record.status == "measured")
        ordered = (run.winner or run.baseline.id, run.baseline.id, *run.pareto, *measured)
        names = dict.fromkeys((*ordered, *(record.id for record in run.records)))
        self._ranks = {name: rank for rank, name in enumerate(names)}
        others = sorted(run.variants, key=lambda record: self._ranks[record.id])
        self._styles = {record.id: self._choose_style(record, index) for index, record in enumerate(others)}
        self._styles[run.baseline.id] = self._choose_style(run.baseline)

    def _choose_style(self, record: VariantRecord, index: int | None = None) -> Style:
        winner = record.id == self.run.winner
        name = ("★ " if winner else "") + label(mark_name(record))
        if index is None:
            return Style(name, NEUTRAL, "x", "dot", winner)
        colors = len(COLORS)
        dash = DASHES[index // colors % len(DASHES)]
        return Style(name, COLORS[index % colors], SYMBOLS[index % len(SYMBOLS)], dash, winner)

    def style(self, record: VariantRecord) -> Style:
        """Look up how a record is drawn."""
        return self._styles[record.id]

    def select(self, names: Container[str]) -> list[VariantRecord]:
        """List the records of these names, in the run's order."""
        return [record for record in self.records if record.id in names]

    def named(self, names: Container[str]) -> list[VariantRecord]:
        """Choose the most important of the records that have something to show, in the run's order."""
        ranked = sorted(self.select(names), key=lambda record: self._ranks[record.id])
        return self.select({record.id for record in ranked[:MOST_NAMED]})

    def rest(self, names: Container[str]) -> list[VariantRecord]:
        """List the records that have something to show and are not named."""
        named = {record.id for record in self.named(names)}
        return [record for record in self.select(names) if record.id not in named]

    def unnamed(self, names: Container[str], what: str = "gray") -> str:
        """Describe the records that are not named, as the end of a sentence; empty where there are none."""
        count = len(self.rest(names))
        return f"; {count} more {'is' if count == 1 else 'are'} {what}" if count else ""


MEBIBYTE = 1 << 20
_WIDE = 10.0
"""Largest over smallest value from which an axis is logarithmic."""
_DECADES = 1000.0
"""Largest over smallest value up to which a logarithmic axis has ticks between its powers of ten."""
_PLOT, _LINE, _ROW, _FRAME = 330, 23, 38, 110
"""Pixels: of a plot, a line of the legend, a row of a list, and of axis titles and margins."""


def why_none(run: Run, field: str, otherwise: str) -> str:
    """Explain why no record has a field, in the run's own words where it has some.

    For ``memory`` it is the peak that is missing, which a measurement may lack.
    """
    if field == "memory":
        reasons = [why_unknown(record, "max_memory_bytes", run.deciding_batch) for record in run.records]
    else:
        reasons = [record.reasons.get(field) or record.reason for record in run.records]
    first, *others = dict.fromkeys(filter(None, reasons)) or (otherwise,)
    return shorten_reason(first) + (f" (and {count_words(len(others), 'more reason')})" if others else "")


def axis(title: str, values: Iterable[float | None] = (), *, log: bool | None = None, zero: bool = True) -> Figure:
    """Make an axis with its unit, logarithmic where the values ask for it, else from zero on if ``zero``."""
    known = [value for value in values if value is not None]
    plain: Figure = {"title": {"text": escape(title), "standoff": 8}, "automargin": True}
    wide = len(known) > 1 and min(known) > 0 and max(known) / min(known) > _WIDE
    if not (wide if log is None else log):
        return {**plain, "rangemode": "tozero"} if zero else plain
    few = bool(known) and max(known) / min(known) < _DECADES
    return {**plain, "type": "log", "dtick": "D2" if few else 1, "tickformat": "~g"}


def places(title: str, labels: Mapping[float, str], **more: Any) -> Figure:
    """Make an axis with labels at some places of it alone."""
    ticks = {"tickmode": "array", "tickvals": list(labels), "ticktext": list(labels.values())}
    return {**axis(title, log=False, zero=False), **ticks, **more}


def layout(x: Figure, y: Figure, legend: int, *, plot: int = _PLOT, **more: Any) -> Figure:
    """Make a layout for so many entries in the legend, which stands below a plot of so many pixels."""
    above = sum(shape.get("xref", "x") == "x" and shape.get("yref") == "paper" for shape in more.get("shapes", ()))
    height = plot + _FRAME + legend * _LINE + 14 * above
    below = {"x": 0, "xref": "container", "y": 0, "yref": "container", "yanchor": "bottom"}
    return {
        "height": height,
        "margin": {"l": 12, "r": 16, "t": 16 + 14 * above, "b": 12},
        "showlegend": legend > 0,
        "legend": {"orientation": "h", **below, "traceorder": "normal", "itemwidth": 40},
        "hovermode": "closest",
        "xaxis": x,
        "yaxis": y,
        **more,
    }


def list_layout(x: Figure, names: Sequence[str], legend: int, **more: Any) -> Figure:
    """Make a layout of rows from the top with a name above each, as beside them long ones would fill a phone.

    Rows are at 0, 1, 2 …, as names may be alike when shortened.
    """
    span = [len(names) - 0.45, -0.85]
    y = {"tickmode": "linear", "tick0": 0, "dtick": 1, "range": span, "showticklabels": False, "zeroline": False}
    above = {"xref": "paper", "x": 0, "xanchor": "left", "yanchor": "bottom", "yshift": 10, "showarrow": False}
    texts = [{**above, "text": name, "y": row, "align": "left"} for row, name in enumerate(names)]
    return layout(x, y, legend, plot=len(names) * _ROW + _ROW // 2, annotations=texts, **more)


def draw_line(style: Style, x: Sequence[float], y: Sequence[float | None], hover: Sequence[str], **more: Any) -> Figure:
    """Draw markers joined by a line, for one variant."""
    how = {"mode": "lines+markers", "line": style.line, "marker": style.marker, "zorder": int(style.winner)}
    return {**draw_markers(style.name, x, y, hover, **how), **more}


def draw_markers(
    name: str, x: Sequence[float | None], y: Sequence[float | None], hover: Sequence[str], **more: Any
) -> Figure:
    """Draw markers with hover texts; ``more`` are other fields of the trace."""
    common = {"type": "scatter", "mode": "markers", "name": name}
    return {**common, "x": list(x), "y": list(y), "hovertext": list(hover), "hoverinfo": "text", **more}


def intervals(style: Style, at: Sequence[float], values: Sequence[Interval | None], way: str = "y") -> list[Figure]:
    """Draw error bars by themselves, as a median of undisturbed calls may lie elsewhere than the one of all calls."""
    known = [(place, gain) for place, gain in zip(at, values, strict=True) if gain is not None and not gain.too_noisy]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x" if way == "y" else "y": [place for place, _ in known],
        way: [ratio.median for _, ratio in known],
        f"error_{way}": {
            "type": "data",
            "symmetric": False,
            "array": [ratio.high - ratio.median for _, ratio in known],
            "arrayminus": [ratio.median - ratio.low for _, ratio in known],
            "color": style.color,
            "thickness": 1.5,
            "width": 4,
        },
        "marker": {"color": style.color, "size": 1},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return [trace] if known else []


def draw_others(lines: Sequence[tuple[Sequence[float], Sequence[float | None]]], mode: str = "lines") -> list[Figure]:
    """Draw all records that are not named, if there are some, as one grey trace with gaps between its lines."""
    trace = {
        "type": "scatter",
        "mode": mode,
        "name": f"{len(lines)} more",
        "x": [value for xs, _ in lines for value in (*xs, None)],
        "y": [value for _, ys in lines for value in (*ys, None)],
        "hoverinfo": "skip",
        "line": {"color": REST, "width": 1},
        **({"marker": {"color": REST, "size": 5}} if "markers" in mode else {}),
        "opacity": 0.3,
        "connectgaps": False,
    }
    return [trace] if lines else []


def limit(direction: str, value: float, text: str, values: Sequence[float]) -> Figure:
    """Draw a line at a budget across the plot, ``"x"`` being a vertical one; ``values`` are those in the plot.

    Texts stand on the side that has room, those of vertical lines above the plot.
    """
    other = "y" if direction == "x" else "x"
    label: Figure = {"text": escape(text), "textposition": "end", "font": {"size": 11}}
    left = sum(number < value for number in values) > len(values) / 2
    if direction == "y":
        label["yanchor"] = "top" if left else "bottom"
    else:
        label |= {"textangle": 0, "xanchor": "right" if left else "left", "yanchor": "bottom", "padding": 2}
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
