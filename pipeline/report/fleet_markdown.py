"""``fleet.md``: what a fleet comes to, short enough for a comment on a pull request; fleet.html has all of it."""

from collections.abc import Iterator, Sequence

from enginesmith.pipeline.fleet.record import FleetRecord
from enginesmith.pipeline.report import fleet_tables as tables
from enginesmith.pipeline.report.markdown import fitting
from enginesmith.pipeline.report.markup import plain, table

_MOST_ROWS, _MOST_LINES = 60, 24
_REST = "in fleet.html"


def render(record: FleetRecord) -> str:
    """The fleet as Markdown."""
    facts = ", ".join(f"{name}: {text}" for name, text in tables.facts(record).items())
    parts = [
        f"# {plain(tables.short(record.name))}",
        plain(tables.headline(record)),
        plain(f"{facts}."),
        _limited(tables.ENTRIES, [tuple(map(tables.short, row)) for row in tables.rows(record)], tables.links(record)),
        _list(map(plain, tables.footnotes(record))),
        *since(record),
        *_failed(record),
    ]
    return fitting("\n\n".join(part for part in parts if part), "fleet.html")


def since(record: FleetRecord, *, linked: bool = True) -> Iterator[str]:
    """What changed since the last fleet, with links from the fleet's folder."""
    yield "## Since the last fleet"
    yield _list(f"{plain(tables.short(text))}." for text in tables.last(record))
    found = list(tables.changes(record, certain=True))
    if found:
        yield _limited(
            tables.CHANGES, [row for row, _ in found], [tables.page(entry) if linked else "" for _, entry in found]
        )
    elif record.last is not None:
        yield "No measured difference is certain."


def _failed(record: FleetRecord) -> Iterator[str]:
    found = list(tables.failures(record))
    if found:
        yield "## What failed, and why"
        rows = [tuple(map(tables.short, row)) for row, _ in found]
        yield _limited(tables.FAILURES, rows, [tables.page(entry) for _, entry in found])


def _limited(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], links: Sequence[str]) -> str:
    left = len(rows) - _MOST_ROWS
    text = table(columns, rows[:_MOST_ROWS], links[:_MOST_ROWS])
    return f"{text}\n\nand {left} more rows, {_REST}" if left > 0 else text


def _list(lines: Iterator[str]) -> str:
    found = list(lines)
    left = len(found) - _MOST_LINES
    more = [f"and {left} more, {_REST}"] if left > 0 else []
    return "\n".join(f"- {line}" for line in [*found[:_MOST_LINES], *more])
