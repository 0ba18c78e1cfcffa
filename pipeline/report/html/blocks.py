"""Define what a page is made of: sections of blocks, all plain text, which the templates escape."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from markupsafe import Markup

from enginesmith.pipeline.report.charts.plotly import Chart
from enginesmith.pipeline.report.tables import Table, Tone


@dataclass(frozen=True)
class Words:
    """Show a paragraph."""

    text: str
    tone: Tone = ""
    kind: ClassVar[str] = "words"


@dataclass(frozen=True)
class Points:
    """List sentences."""

    texts: tuple[str, ...]
    tone: Tone = ""
    kind: ClassVar[str] = "points"


@dataclass(frozen=True)
class Fact:
    """Answer a question, and name the section that has the rest."""

    term: str
    text: str
    target: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Facts:
    """List terms with what is to be said of each."""

    facts: tuple[Fact, ...]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Code:
    """Show text to copy."""

    name: str
    label: str
    text: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Drawn:
    """Draw a chart."""

    chart: Chart
    kind: ClassVar[str] = "drawn"


@dataclass(frozen=True)
class Folded:
    """Fold blocks away until they are opened."""

    summary: str
    blocks: "tuple[Block, ...]"
    open: bool = False
    kind: ClassVar[str] = "folded"


Block = Words | Points | Facts | Code | Table | Drawn | Folded


@dataclass(frozen=True)
class Section:
    """Show a part of the page under a heading; ``question`` is the reader's."""

    name: str
    title: str
    question: str
    blocks: tuple[Block, ...]


def show_rows(table: Table) -> tuple[Table, ...]:
    """Show a table that has rows."""
    return (table,) if table.rows else ()


def fold(summary: str, *blocks: "Block") -> tuple[Folded, ...]:
    """Fold blocks away, where there are any; tables without rows are left out."""
    shown = tuple(block for block in blocks if not isinstance(block, Table) or block.rows)
    return (Folded(summary, shown),) if shown else ()


def list_points(texts: Iterable[str], tone: Tone = "") -> tuple[Points, ...]:
    """List texts, where there are any."""
    entries = tuple(texts)
    return (Points(entries, tone),) if entries else ()


def tables_in(blocks: Iterable[Block]) -> Iterable[Table]:
    """Iterate over all tables, folded ones too."""
    for block in blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Folded):
            yield from tables_in(block.blocks)


# Long tables as data that the page draws when they are opened: each text once, and no more than fits.

MOST_BYTES = 2_500_000
"""Size of all long tables together: the page stays below 4 MB with the charts' library."""
_CAPS = (20_000, 10_000, 5_000, 2_000, 1_000, 500, 200, 100)
_CELL = 4
"""Bytes of a cell that has its text elsewhere, about."""


def within_limits(sections: Sequence[Section]) -> tuple[Section, ...]:
    """Cut long tables to as many rows as fit together; every table knows how many there are."""
    long = [table for section in sections for table in tables_in(section.blocks) if table.long]
    cap = next((cap for cap in _CAPS if _bytes(long, cap) <= MOST_BYTES), _CAPS[-1])
    return tuple(replace(section, blocks=tuple(_cut(block, cap) for block in section.blocks)) for section in sections)


def _bytes(tables: Iterable[Table], cap: int) -> int:
    cells = [cell for table in tables for row in table.rows[:cap] for cell in row]
    return sum(len(text.encode()) for text in set(cells)) + _CELL * len(cells)


def _cut(block: Block, cap: int) -> Block:
    if isinstance(block, Table) and block.long and len(block.rows) > cap:
        return replace(block, rows=block.rows[:cap], total=block.count)
    if isinstance(block, Folded):
        return replace(block, blocks=tuple(_cut(inner, cap) for inner in block.blocks))
    return block


def long_tables(sections: Iterable[Section]) -> dict[str, Any]:
    """Collect the cells of long tables: ``texts``, and by table's name its ``rows`` of places in it."""
    places: dict[str, int] = {}
    long = (table for section in sections for table in tables_in(section.blocks) if table.long)
    rows = {grid.name: [[places.setdefault(cell, len(places)) for cell in row] for row in grid.rows] for grid in long}
    return {"texts": list(places), "rows": rows}


def script_data(value: Any) -> Markup:
    """Write a value as JSON that cannot end the element that it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))  # nothing is left that HTML gives a meaning to
