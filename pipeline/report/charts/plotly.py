"""Make the parts of figures: axes, layouts and traces, and a style for each variant."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.results.budgets import why_unknown
from enginesmith.pipeline.results.run import Run, VariantRecord

# What a chart is: a plotly.js figure as plain data, and the same in words and as a table.

Figure = dict[str, Any]
"""``data`` and ``layout`` as plotly.js takes them: dicts, lists, strings, numbers, booleans and None, nothing else.

``layout`` has a height and no width; texts and lines take their colours from the template that the page chooses.
"""


@dataclass(frozen=True)
class Chart:
    """A chart of a run's numbers. Its texts are plain: whoever puts them into a document escapes them."""

    id: str
    """Unique among the charts of a run; letters, digits and hyphens."""
    title: str
    """What is seen, with units."""
    figure: Figure | None
    """None where there is nothing to draw, as ``empty`` explains."""
    summary: str
    """One sentence that says what the figure shows; empty where there is none. Its numbers are in a table beside it."""
    empty: str = ""
    """Why there is no figure."""


def make_empty_chart(name: str, title: str, why: str) -> Chart:
    """Make a chart that has nothing to draw."""
    return Chart(id=name, title=title, figure=None, summary="", empty=why)


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
    """Text that plotly.js shows as it stands, in legends, ticks, annotations and hover templates."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("{", "&#123;"), ("$", "&#36;")):
        text = text.replace(character, entity)
    return " ".join(text.split())


def shorten_name(text: str, most: int = _LONGEST) -> str:
    """Shorten a long name in its middle, as beginnings and ends tell names apart."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def label(name: str, most: int = _LONGEST) -> str:
    """Format a name for legends and ticks."""
    return escape(shorten_name(name, most))


def whole(name: str) -> str:
    """Break a whole name into lines for hover texts."""
    return "<br>".join(escape(name[start : start + _TEXT_LINE]) for start in range(0, len(name), _TEXT_LINE))


def hover_text(*lines: str) -> str:
    """Join plain lines to a hover text."""
    return "<br>".join(whole(line) for line in lines if line)


def count_words(number: int, one: str, many: str = "") -> str:
    """``1 variant``, ``3 variants``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


# Who is drawn how: the same colour, marker and dash for the same variant in every chart of a run.

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Those of Okabe and Ito ("Color Universal Design", 2008) with a contrast of 3 on white and on black alike."""
NEUTRAL = "#6E7681"
"""The baseline's, and of what belongs to no variant."""
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
    """How one variant looks: never told from others by colour alone."""

    name: str
    """For legends and ticks; the winner's has a star."""
    colour: str
    symbol: str
    dash: str
    winner: bool

    @property
    def zorder(self) -> int:
        """The winner lies above the others."""
        return int(self.winner)

    @property
    def width(self) -> float:
        """Of lines, in pixels."""
        return 3.5 if self.winner else 2

    @property
    def size(self) -> float:
        """Of markers, in pixels."""
        return 11 if self.winner else 8

    @property
    def marker(self) -> dict[str, Any]:
        """As plotly.js takes it."""
        return {"color": self.colour, "symbol": self.symbol, "size": self.size}

    @property
    def line(self) -> dict[str, Any]:
        """As plotly.js takes it."""
        return {"color": self.colour, "dash": self.dash, "width": self.width}


def short_name(record: VariantRecord) -> str:
    """Format a record's name for sentences."""
    return shorten_name(marked(record), _IN_SENTENCES)


class Cast:
    """The records of a run in the order of who is named first: winner, baseline, front, then as they stand."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def records(self) -> tuple[VariantRecord, ...]:
        """The baseline, and the variants."""
        return self._run.records

    @cached_property
    def _ranks(self) -> dict[str, int]:
        run = self._run
        measured = (record.id for record in self.records if record.status == "measured")
        ordered = (run.winner or run.baseline.id, run.baseline.id, *run.pareto, *measured)
        names = dict.fromkeys((*ordered, *(record.id for record in self.records)))
        return {name: rank for rank, name in enumerate(names)}

    @cached_property
    def _styles(self) -> dict[str, Style]:
        others = sorted((record for record in self._run.variants), key=lambda one: self._ranks[one.id])
        found = {record.id: self._style(record, index) for index, record in enumerate(others)}
        plain = Style(self._name(self._run.baseline), NEUTRAL, "x", "dot", self._run.winner == self._run.baseline.id)
        return {**found, self._run.baseline.id: plain}

    def _style(self, record: VariantRecord, index: int) -> Style:
        return Style(
            name=self._name(record),
            colour=COLOURS[index % len(COLOURS)],
            symbol=SYMBOLS[index % len(SYMBOLS)],
            dash=DASHES[index // len(COLOURS) % len(DASHES)],
            winner=record.id == self._run.winner,
        )

    def _name(self, record: VariantRecord) -> str:
        star = "★ " if record.id == self._run.winner else ""
        return star + label(marked(record))

    def style(self, record: VariantRecord) -> Style:
        """Return how a record is drawn."""
        return self._styles[record.id]

    def named(self, having: Container[str]) -> tuple[VariantRecord, ...]:
        """Choose the most important of the records that have something to show, in the run's order."""
        found = sorted((one for one in self.records if one.id in having), key=lambda one: self._ranks[one.id])
        kept = {record.id for record in found[:MOST_NAMED]}
        return tuple(record for record in self.records if record.id in kept)

    def rest(self, having: Container[str]) -> tuple[VariantRecord, ...]:
        """List the records that have something to show and are not named."""
        kept = {record.id for record in self.named(having)}
        return tuple(record for record in self.records if record.id in having and record.id not in kept)

    def unnamed(self, having: Container[str], what: str = "grey") -> str:
        """Describe the records that are not named, as the end of a sentence; empty where there are none."""
        count = len(self.rest(having))
        return f"; {count} more {'is' if count == 1 else 'are'} {what}" if count else ""


MEBIBYTE = 1 << 20
_WIDE = 10.0
"""Largest over smallest value from which an axis is logarithmic."""
_DECADES = 1000.0
"""Largest over smallest value up to which a logarithmic axis has ticks between its powers of ten."""
_PLOT, _LINE, _ROW, _FRAME = 330, 23, 38, 110
"""Pixels: of a plot, a line of the legend, a row of a list, and of axis titles and margins."""


def why_none(run: Run, field: str, otherwise: str) -> str:
    """Explain why no record has a field, in the run's own words where it has some."""
    return _first([record.reasons.get(field) or record.reason for record in run.records], otherwise)


def why_no_memory(run: Run) -> str:
    """Explain why no record has a peak of memory, which its measurement may lack."""
    records, at = run.records, run.deciding_batch
    return _first([why_unknown(record, "max_memory_bytes", at) for record in records], "it was not measured")


def _first(reasons: Sequence[str], otherwise: str) -> str:
    told = list(dict.fromkeys(filter(None, reasons)))
    more = f" (and {count_words(len(told) - 1, 'more reason')})" if len(told) > 1 else ""
    return f"{told[0]}{more}" if told else otherwise


def axis(title: str, values: Iterable[float | None] = (), *, log: bool | None = None, zero: bool = True) -> Figure:
    """Make an axis with its unit, logarithmic where the values ask for it, else from zero on if ``zero``."""
    known = [value for value in values if value is not None]
    found: Figure = {"title": {"text": escape(title), "standoff": 8}, "automargin": True}
    if not (is_wide(known) if log is None else log):
        return {**found, "rangemode": "tozero"} if zero else found
    few = bool(known) and max(known) / min(known) < _DECADES
    return {**found, "type": "log", "dtick": "D2" if few else 1, "tickformat": "~g"}


def places(title: str, labels: Mapping[float, str], **more: Any) -> Figure:
    """Make an axis with labels at some places of it alone."""
    found: Figure = {"title": {"text": escape(title), "standoff": 8}, "automargin": True, "tickmode": "array"}
    return {**found, "tickvals": list(labels), "ticktext": list(labels.values()), **more}


def is_wide(values: Sequence[float]) -> bool:
    """Tell whether values need a logarithmic axis, and can have one."""
    return len(values) > 1 and min(values) > 0 and max(values) / min(values) > _WIDE


def layout(x: Figure, y: Figure, legend: int, *, plot: int = _PLOT, **more: Any) -> Figure:
    """Make a layout for so many entries in the legend, which stands below a plot of so many pixels."""
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


def list_layout(x: Figure, names: Sequence[str], legend: int, **more: Any) -> Figure:
    """Make a layout of rows from the top with a name above each, as beside them long ones would fill a phone.

    Rows are at 0, 1, 2 …, as names may be alike when shortened.
    """
    span = [len(names) - 0.45, -0.85]
    y = {"tickmode": "linear", "tick0": 0, "dtick": 1, "range": span, "showticklabels": False, "zeroline": False}
    above = {"xref": "paper", "x": 0, "xanchor": "left", "yanchor": "bottom", "yshift": 10, "showarrow": False}
    texts = [{**above, "text": name, "y": row, "align": "left"} for row, name in enumerate(names)]
    return layout(x, y, legend, plot=len(names) * _ROW + _ROW // 2, annotations=texts, **more)


def points(style: Style, x: Sequence[float], y: Sequence[float | None], hover: Sequence[str], **more: Any) -> Figure:
    """Draw markers joined by a line, for one variant."""
    how = {"mode": "lines+markers", "line": style.line, "marker": style.marker, "zorder": style.zorder}
    return {**draw_markers(style.name, x, y, hover, **how), **more}


def draw_markers(
    name: str, x: Sequence[float | None], y: Sequence[float | None], hover: Sequence[str], **more: Any
) -> Figure:
    """Draw markers with hover texts; ``more`` are other fields of the trace."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(x),
        "y": list(y),
        "hovertext": list(hover),
        "hoverinfo": "text",
        **more,
    }


def interval(
    style: Style, at: Sequence[float], found: Sequence[Interval | None], direction: str = "y", **more: Any
) -> Figure | None:
    """Error bars by themselves: a median of undisturbed calls may lie elsewhere than the one of all calls."""
    known = [(place, one) for place, one in zip(at, found, strict=True) if one is not None and not one.too_noisy]
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
    """Draw intervals around their medians as error bars, none for those that are too noisy to tell."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [0.0 if one.too_noisy else one.high - one.median for one in found],
        "arrayminus": [0.0 if one.too_noisy else one.median - one.low for one in found],
        "color": colour,
        "thickness": 1.5,
        "width": 4,
    }


def draw_others(lines: Sequence[tuple[Sequence[float], Sequence[float | None]]], mode: str = "lines") -> Figure:
    """Draw all records that are not named as one grey trace, with gaps between its lines."""
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
    """Draw a line at a budget across the plot, ``"x"`` being a vertical one; ``values`` are those in the plot.

    Texts stand on the side that has room, those of vertical lines above the plot, in as many lines as there are.
    """
    other = "y" if direction == "x" else "x"
    label: Figure = {"text": escape(text), "textposition": "end", "font": {"size": 11}}
    left = sum(one < value for one in values) > len(values) / 2
    if direction == "y":
        label["yanchor"] = "top" if left else "bottom"
    else:
        above = {"textangle": 0, "xanchor": "right" if left else "left", "yanchor": "bottom"}
        label |= {**above, "text": escape(text) + "<br>&nbsp;" * line, "padding": 2}
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


def find_rows(records: Iterable[VariantRecord], at: int) -> dict[str, LatencyRow]:
    """Look up each record's latency at a batch size, as far as it was measured."""
    return {record.id: row for record in records if (row := record.row(at)) is not None}
