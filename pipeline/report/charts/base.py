"""What a chart is: a plotly.js figure as plain data, and the same in words and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Figure = dict[str, Any]
"""``data`` and ``layout`` as plotly.js takes them: dicts, lists, strings, numbers, booleans and None, nothing else.

``layout`` has a height and no width; texts and lines take their colours from the template that the page chooses.
"""
Rows = Sequence[tuple[str, ...]]


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
    """One sentence that says what the figure shows; empty where there is none."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The same data as a table."""
    empty: str = ""
    """Why there is no figure."""


def missing(name: str, title: str, columns: tuple[str, ...], why: str) -> Chart:
    """A chart of which there is nothing to draw."""
    return Chart(id=name, title=title, figure=None, summary="", columns=columns, rows=(), empty=why)


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
