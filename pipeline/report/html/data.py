"""Long tables as data that the page draws when they are opened: each text once, and no more than fits."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from enginesmith.pipeline.report.html.blocks import Block, Drawn, Folded, Section, Table, tables_in

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
