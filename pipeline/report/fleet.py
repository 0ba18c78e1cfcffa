"""The files that a fleet is read in."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import yaml

from enginesmith.pipeline.report import fleet_tables as tables
from enginesmith.pipeline.report import junit
from enginesmith.pipeline.report.html.blocks import (
    Block,
    Code,
    Fact,
    Facts,
    Section,
    Table,
    Tone,
    Words,
    filled,
    folded,
    points,
)
from enginesmith.pipeline.report.html.page import lay_out
from enginesmith.pipeline.report.markdown import fitting, plain, table
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results.fleet import EntryRecord, EntryStatus, FleetRecord
from enginesmith.pipeline.results.run import Run

# ``fleet.html``: a fleet as one file that needs no network, with links to the pages of its runs.

_TONES: dict[str, Tone] = {"failed": "bad", "lacking": "caution", "budgets broken": "bad", "slower": "bad"}

_STATUS_TONES: dict[EntryStatus, Tone] = {
    "done": "good",
    "breached": "bad",
    "failed": "bad",
    "lacking": "caution",
    "pending": "caution",
}


def render(record: FleetRecord) -> str:
    """The page."""
    return lay_out(
        "fleet.html.j2",
        (_winners(record), _since(record), _failed(record), _machines(record), _again(record)),
        record=record,
        verdict=Words(tables.headline(record), _tone(record)),
        unfinished=_unfinished(record),
        facts=tuple(_fact(name, text) for name, text in tables.facts(record).items()),
    )


def _tone(record: FleetRecord) -> Tone:
    if record.having("failed") or record.having("breached"):
        return "bad"
    return "good" if not record.having("lacking") and record.complete else "caution"


def _fact(name: str, text: str) -> Fact:
    if name == "winners":
        return Fact(name, text, "", "good" if text != "0" else "bad")
    return Fact(name, text, "", _TONES.get(name, "") if text != "0" else "")


def _unfinished(record: FleetRecord) -> tuple[Words, ...]:
    if record.complete:
        return ()
    left = len(record.having("pending"))
    text = f"This fleet is not complete: {left} of {len(record.entries)} entries have not ended."
    return (Words(f"{text} Go on with: enginesmith resume {record.name}", "caution"),)


def _winners(record: FleetRecord) -> Section:
    columns, rows, links = tables.matrix(record)
    overview = Table(
        name="matrix",
        caption="Winners by model and target, with their speed-up over the baseline there.",
        columns=columns,
        rows=tuple(rows),
        links=_quoted(links),
        tones=_by_status(record, rows, columns),
    )
    entries = Table(
        name="entries",
        caption="All entries; latency is that of the winner at the batch size that decides.",
        columns=tables.ENTRIES,
        rows=tuple(tables.rows(record)),
        values=tuple(map(_values, record.entries)),
        sortable=True,
        searched=True,
        links=_first(tables.links(record)),
        tones=dict(_entry_tones(record)),
    )
    notes = tuple(Words(f"{note}.") for note in tables.footnotes(record))
    blocks = (overview, entries) if len(columns) > 2 and len(rows) > 1 else (entries,)
    return Section("winners", "Winners", "Which engine for which model, on which target?", (*blocks, *notes))


def _by_status(
    record: FleetRecord, rows: Sequence[tuple[str, ...]], columns: Sequence[str]
) -> dict[tuple[int, int], Tone]:
    models = [row[0] for row in rows]
    places = {one.name: (models.index(one.model), list(columns).index(one.target, 1)) for one in record.entries}
    return {places[one.name]: _STATUS_TONES[one.status] for one in record.entries}


def _entry_tones(record: FleetRecord) -> Iterator[tuple[tuple[int, int], Tone]]:
    status, since = tables.ENTRIES.index("status"), tables.ENTRIES.index("since the last fleet")
    for index, entry in enumerate(record.entries):
        yield (index, status), _STATUS_TONES[entry.status]
        changed = tables.since(entry.since_last).partition(" ")[0]
        if changed in ("slower", "faster"):
            yield (index, since), "bad" if changed == "slower" else "good"


def _values(entry: EntryRecord) -> tuple[float | None, ...]:
    found = entry.winner
    if found is None:
        return (None,) * len(tables.ENTRIES)
    times = found.speedup.median if found.speedup else None
    sizes = (found.peak_bytes, found.bytes, found.drop)
    return (None, None, None, found.batch, times, found.p50_ms, None, *sizes, None)


def _since(record: FleetRecord) -> Section:
    certain, rest = (list(tables.changes(record, certain=which)) for which in (True, False))
    blocks: list[Block] = [*points(f"{text}." for text in tables.last(record))]
    if certain:
        caption = "What differs for certain: its interval, or its spread, leaves out that nothing changed."
        blocks.append(_changes("changes", caption, certain))
    elif record.last is not None:
        blocks.append(Words("No measured difference is certain.", "good"))
    if rest:
        caption = "Winners' other numbers, which are the same, or which may differ by chance."
        blocks += folded("What did not change for certain", _changes("unchanged", caption, rest))
    return Section("since", "Since the last fleet", "What became slower, or faster?", tuple(blocks))


def _changes(name: str, caption: str, found: Sequence[tuple[tuple[str, ...], EntryRecord]]) -> Table:
    rows, links = tuple(row for row, _ in found), _first([tables.page(entry) for _, entry in found])
    return Table(name, caption, tables.CHANGES, rows, sortable=True, searched=True, links=links)


def _failed(record: FleetRecord) -> Section:
    found = list(tables.failures(record))
    links = {
        (index, column): target
        for index, (row, entry) in enumerate(found)
        for column, target in ((0, tables.page(entry)), (len(row) - 1, row[-1] if row[-1] != "–" else ""))
        if target
    }
    rows = tuple(row for row, _ in found)
    table = Table("failures", "What came to nothing, variants included.", tables.FAILURES, rows, links=_quoted(links))
    blocks = filled(table) or (Words("Nothing failed, and no budget is broken.", "good"),)
    return Section("failures", "What failed", "Why is there no winner, or one variant less?", blocks)


def _machines(record: FleetRecord) -> Section:
    found = {one.target: one.machine for one in record.entries}
    facts = []
    for target, machine in found.items():
        parts = [machine.device, machine.accelerator]
        parts += [f"{amount:g} of {name}" for name, amount in machine.resources.items()]
        facts.append(Fact(target, ", ".join(filter(None, parts))))
    return Section("targets", "Targets", "What does each of them ask of a machine?", (Facts(tuple(facts)),))


def _again(record: FleetRecord) -> Section:
    content = record.fleet.model_dump(mode="json", exclude_defaults=True)
    content["targets"] = record.fleet.model_dump(mode="json")["targets"]
    words = ["enginesmith", "optimize", record.file, *(word for one in record.only for word in ("--only", one))]
    blocks: tuple[Block, ...] = (
        Code("command", "From the folder where it was begun", shlex.join(words)),
        Code("file", record.file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True)),
    )
    if record.options:
        given = yaml.safe_dump(record.options, sort_keys=False, allow_unicode=True)
        blocks += (Code("options", "Given for all entries by options", given),)
    return Section("again", "How to run this again", "What was asked for?", blocks)


def _first(links: Sequence[str]) -> dict[tuple[int, int], str]:
    """Links of the first column."""
    return _quoted({(index, 0): target for index, target in enumerate(links) if target})


def _quoted(links: dict[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    return {place: quote(target) for place, target in links.items()}


# ``fleet.md``: what a fleet comes to, short enough for a comment on a pull request; fleet.html has all of it.

_MOST_ROWS, _MOST_LINES = 60, 24
_REST = "in fleet.html"


def fleet_markdown_render(record: FleetRecord) -> str:
    """The fleet as Markdown."""
    facts = ", ".join(f"{name}: {text}" for name, text in tables.facts(record).items())
    parts = [
        f"# {plain(tables.short(record.name))}",
        plain(tables.headline(record)),
        plain(f"{facts}."),
        _limited(tables.ENTRIES, [tuple(map(tables.short, row)) for row in tables.rows(record)], tables.links(record)),
        _list(map(plain, tables.footnotes(record))),
        *since(record),
        *_fleet_markdown_failed(record),
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


def _fleet_markdown_failed(record: FleetRecord) -> Iterator[str]:
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


Format = Literal["html", "md", "junit", "json"]
NAMES: Mapping[Format, str] = {"html": "fleet.html", "md": "fleet.md", "junit": "junit.xml", "json": records.FILE}
REPORTS: tuple[Format, ...] = ("html", "md", "junit")
"""What a fleet's folder has besides fleet.json."""


def write(
    record: FleetRecord, folder: Path, found: Mapping[str, Run], formats: Sequence[Format] = ("json", *REPORTS)
) -> list[Path]:
    """Write a fleet in these formats, each whole or not at all; gives back the files.

    ``found`` are the runs of entries by name, as far as there are some.

    Raises:
        StoreError: the folder cannot be written.
    """
    renderers: Mapping[Format, Callable[[FleetRecord], str]] = {
        "html": _page,
        "md": fleet_markdown_render,
        "junit": lambda record: junit.render_fleet(record, found),
    }
    written = []
    for form in dict.fromkeys(formats):
        path = folder / NAMES[form]
        if form == "json":
            records.write(record, folder)
        else:
            records.write_text(path, renderers[form](record))
        written.append(path)
    return written


def _page(record: FleetRecord) -> str:

    return render(record)
