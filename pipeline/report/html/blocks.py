"""What the page is made of: sections of blocks, all plain text. Only the templates know HTML, and they escape it."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from markupsafe import Markup

from enginesmith.pipeline.report.charts.plotly import Chart

Tone = Literal["", "good", "bad", "caution"]
LONG = 40
"""Rows from which a table is data that the page draws when it is opened."""
_FIRST = 20
"""Rows of a long table that stand in the page itself."""
_LONG_WORD = 24
_NUMBER = re.compile(r"[~<>+−±-]*\d[\d,]*(\.\d+)?(e[+-]?\d+)?( ?[^\d\s]{1,5}( \d+ s)?)?( \[[^\]]*\])?")
"""A number, its unit, and its interval."""


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str
    tone: Tone = ""
    kind: ClassVar[str] = "words"


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    texts: tuple[str, ...]
    tone: Tone = ""
    kind: ClassVar[str] = "points"


@dataclass(frozen=True)
class Fact:
    """A question, its answer, and the section that has the rest."""

    term: str
    text: str
    target: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Facts:
    """Terms and what is to be said of each."""

    facts: tuple[Fact, ...]
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Code:
    """Text to copy."""

    name: str
    label: str
    text: str
    kind: ClassVar[str] = "code"


@dataclass(frozen=True)
class Table:
    """Rows of text; ``values`` has the same rows as numbers where there are some, which sorting goes by."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    values: tuple[tuple[float | None, ...], ...] = ()
    sortable: bool = False
    searched: bool = False
    """Whether rows can be looked for by their text."""
    grouped: bool = False
    """Whether a first cell that is empty belongs to the row above."""
    foldable: bool = False
    """Whether all rows of a group but the first can be hidden."""
    marked: frozenset[str] = frozenset()
    """First cells of rows that stand out."""
    total: int = 0
    """Rows that there are, where some are left out."""
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Row and column of a cell → the file beside the page that it leads to; all rows of such a table are in there."""
    tones: Mapping[tuple[int, int], Tone] = field(default_factory=dict)
    """Likewise, whether what stands in a cell is good or bad."""
    kind: ClassVar[str] = "table"

    @property
    def long(self) -> bool:
        """Whether it is data, of which only the first rows stand in the page."""
        return len(self.rows) > LONG and not self.grouped and not self.links

    @property
    def first(self) -> tuple[tuple[str, ...], ...]:
        """The rows that stand in the page."""
        return self.rows[:_FIRST] if self.long else self.rows

    @property
    def count(self) -> int:
        """Rows that the run has."""
        return max(self.total, len(self.rows))

    @staticmethod
    def breaks(cell: str) -> bool:
        """Whether a cell has a word so long that it may be broken anywhere."""
        return any(len(word) > _LONG_WORD for word in re.split(r"[\s-]", cell))

    @property
    def groups(self) -> list[list[int]]:
        """Indices of rows that belong together."""
        found: list[list[int]] = []
        for index, row in enumerate(self.first):
            if self.grouped and found and not row[0]:
                found[-1].append(index)
            else:
                found.append([index])
        return found

    @property
    def numeric(self) -> tuple[bool, ...]:
        """By column, whether what stands in it is numbers."""
        return tuple(_numbers(row[index] for row in self.first) for index in range(len(self.columns)))

    def value(self, row: int, column: int) -> float | None:
        """The number behind a cell."""
        return self.values[row][column] if self.values else None


@dataclass(frozen=True)
class Drawn:
    """A chart, with the same data as a table."""

    chart: Chart
    table: Table
    kind: ClassVar[str] = "drawn"


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown when they are asked for."""

    summary: str
    blocks: "tuple[Block, ...]"
    open: bool = False
    kind: ClassVar[str] = "folded"


Block = Words | Points | Facts | Code | Table | Drawn | Folded


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; ``question`` is what people come to it with."""

    name: str
    title: str
    question: str
    blocks: tuple[Block, ...]


def table(
    name: str,
    caption: str,
    columns: tuple[str, ...],
    rows: Iterable[tuple[str, ...]],
    *,
    sortable: bool = False,
    searched: bool = False,
) -> Table:
    """A table of text."""
    return Table(name, caption, columns, tuple(rows), sortable=sortable, searched=searched)


def without_empty(found: Table) -> Table:
    """The table without columns that have nothing but dashes."""
    kept = [
        index for index in range(len(found.columns)) if not index or any(row[index].strip("– ") for row in found.rows)
    ]
    columns = tuple(found.columns[index] for index in kept)
    return replace(found, columns=columns, rows=tuple(tuple(row[index] for index in kept) for row in found.rows))


def drawn(chart: Chart) -> Drawn:
    """A chart as a block."""
    return Drawn(chart, Table(f"data-of-{chart.id}", f"Data of: {chart.title}", chart.columns, chart.rows))


def filled(found: Table) -> tuple[Table, ...]:
    """The table, where it has rows."""
    return (found,) if found.rows else ()


def folded(summary: str, *blocks: "Block") -> tuple[Folded, ...]:
    """Blocks to be opened, where there are any."""
    return (Folded(summary, blocks),) if blocks else ()


def points(texts: Iterable[str], tone: Tone = "") -> tuple[Points, ...]:
    """A list, where there is anything to list."""
    found = tuple(texts)
    return (Points(found, tone),) if found else ()


def tables_in(blocks: Iterable[Block]) -> Iterable[Table]:
    """Every table, those that are folded away too."""
    for block in blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Drawn):
            yield block.table
        elif isinstance(block, Folded):
            yield from tables_in(block.blocks)


def _numbers(cells: Iterable[str]) -> bool:
    known = [cell for cell in cells if cell.strip("– ")]
    return bool(known) and all(map(_NUMBER.fullmatch, known))


# Long tables as data that the page draws when they are opened: each text once, and no more than fits.

MOST_BYTES = 2_500_000
"""Of all long tables together: the page stays below 4 MB with the charts' library."""
_CAPS = (20_000, 10_000, 5_000, 2_000, 1_000, 500, 200, 100)
_CELL = 4
"""Bytes of a cell that has its text elsewhere, about."""


def within_limits(sections: Sequence[Section]) -> tuple[Section, ...]:
    """The sections with as many rows of each long table as fit; every table knows how many there are."""
    long = [table for section in sections for table in tables_in(section.blocks) if table.long]
    cap = next((cap for cap in _CAPS if _bytes(long, cap) <= MOST_BYTES), _CAPS[-1])
    return tuple(replace(section, blocks=tuple(_cut(block, cap) for block in section.blocks)) for section in sections)


def _bytes(tables: Iterable[Table], cap: int) -> int:
    texts: set[str] = set()
    cells = 0
    for table in tables:
        for row in table.rows[:cap]:
            texts.update(row)
            cells += len(row)
    return sum(len(text.encode()) for text in texts) + _CELL * cells


def _cut(block: Block, cap: int) -> Block:
    if isinstance(block, Table) and block.long and len(block.rows) > cap:
        return replace(block, rows=block.rows[:cap], total=block.count)
    if isinstance(block, Drawn):
        cut = _cut(block.table, cap)
        assert isinstance(cut, Table)
        return replace(block, table=cut)
    if isinstance(block, Folded):
        return replace(block, blocks=tuple(_cut(one, cap) for one in block.blocks))
    return block


def long_tables(sections: Iterable[Section]) -> dict[str, Any]:
    """``texts``, and by table's name its ``rows`` of places in it."""
    places: dict[str, int] = {}
    rows: dict[str, list[list[int]]] = {}
    for section in sections:
        for table in tables_in(section.blocks):
            if table.long:
                rows[table.name] = [[places.setdefault(cell, len(places)) for cell in row] for row in table.rows]
    return {"texts": list(places), "rows": rows}


def script_data(value: Any) -> Markup:
    """A value as JSON that cannot end the element that it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))  # nothing is left that HTML gives a meaning to
