"""Write a fleet's reports: ``fleet.html``, ``fleet.md`` and JUnit XML."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from enginesmith.pipeline.report import files, fleet_tables, junit
from enginesmith.pipeline.report import gate as gates
from enginesmith.pipeline.report.files import REPORTS, Format
from enginesmith.pipeline.report.html.blocks import Code, Fact, Facts, Section, Words, fold, list_points, show_rows
from enginesmith.pipeline.report.html.page import lay_out
from enginesmith.pipeline.report.html.sections import render_gate
from enginesmith.pipeline.report.markdown import limit_length, plain, render_list, render_table
from enginesmith.pipeline.report.tables import Table, Tone
from enginesmith.pipeline.results import earlier_fleet, gate_report
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results import run as run_files
from enginesmith.pipeline.results.fleet import FleetRecord
from enginesmith.pipeline.results.gate_report import FleetGate, Gate
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.units import shorten

# ``fleet.html``: a fleet as one file that needs no network, with links to the pages of its runs.

_TONES: dict[str, Tone] = dict.fromkeys(("failed", "budgets broken", "slower"), "bad")
_TONES |= {"not available": "caution", "winners": "good"}
_TONES_OF_NONE: dict[str, Tone] = {"winners": "bad"}
"""Tones of counts at the top, and of those that are 0."""


def render(record: FleetRecord, gate: Gate | FleetGate | None = None, folder: str = "") -> str:
    """Render the page of a fleet; ``gate`` is what was judged of it, and ``folder`` its own from where it was begun."""
    bad = record.having("failed") or record.having("breached")
    good = not record.having("lacking") and record.complete
    left = len(record.having("pending"))
    text = f"This fleet is not complete: {left} of {len(record.entries)} entries have not ended."
    command = shlex.join(["enginesmith", "resume", folder or record.name])
    goes_on = Words(f"{text} Continue with: {command}", "caution")
    draws = (_render_winners, _render_changes, _render_failures, _render_targets, _render_reproduction)
    return lay_out(
        "fleet.html.j2",
        [*render_gate(gate), *(draw(record) for draw in draws)],
        record=record,
        verdict=Words(fleet_tables.summarize(record), "bad" if bad else "good" if good else "caution"),
        unfinished=() if record.complete else (goes_on,),
        facts=tuple(
            Fact(name, text, "", (_TONES_OF_NONE if text == "0" else _TONES).get(name, ""))
            for name, text in fleet_tables.list_facts(record).items()
        ),
    )


def _render_winners(record: FleetRecord) -> Section:
    matrix, entries = fleet_tables.tabulate_matrix(record), fleet_tables.tabulate_entries(record)
    notes = tuple(Words(f"{note}.") for note in fleet_tables.list_footnotes(record))
    blocks = (matrix, entries) if len(matrix.columns) > 2 and len(matrix.rows) > 1 else (entries,)
    return Section("winners", "Winners", "Which engine for which model, on which target?", (*blocks, *notes))


def _render_changes(record: FleetRecord) -> Section:
    certain, rest = (fleet_tables.tabulate_changes(record, certain=certain) for certain in (True, False))
    none = Words("No measured difference is certain.", "good")
    blocks = (
        *list_points(f"{text}." for text in fleet_tables.describe_last(record)),
        *(show_rows(certain) or ((none,) if record.last is not None else ())),
        *fold("What did not change for certain", rest),
    )
    return Section("since", "Since the last fleet", "What became slower, or faster?", blocks)


def _render_failures(record: FleetRecord) -> Section:
    none = Words("Nothing failed, and no budget is broken.", "good")
    blocks = show_rows(fleet_tables.tabulate_failures(record)) or (none,)
    return Section("failures", "What failed", "Why is there no winner, or why is a variant missing?", blocks)


def _render_targets(record: FleetRecord) -> Section:
    facts = []
    for target, machine in {entry.target: entry.machine for entry in record.entries}.items():
        amounts = (f"{amount:g} of {name}" for name, amount in machine.resources.items())
        facts.append(Fact(target, ", ".join(filter(None, (machine.device, machine.accelerator, *amounts)))))
    return Section("targets", "Targets", "What does each of them ask of a machine?", (Facts(tuple(facts)),))


def _render_reproduction(record: FleetRecord) -> Section:
    content = record.fleet.model_dump(mode="json", exclude_defaults=True)
    content["targets"] = record.fleet.model_dump(mode="json")["targets"]
    words = ["enginesmith", "optimize", record.file, *(word for name in record.only for word in ("--only", name))]
    blocks = [
        Code("command", "From the folder where it was started", shlex.join(words)),
        Code("file", record.file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True)),
    ]
    if record.options:
        given = yaml.safe_dump(record.options, sort_keys=False, allow_unicode=True)
        blocks += [Code("options", "Given for all entries by options", given)]
    return Section("again", "How to run this again", "What was asked for?", tuple(blocks))


# ``fleet.md``: a summary of a fleet for a comment on a pull request; fleet.html has all of it.

_MOST_ROWS, _MOST_LINES, _LONGEST = 60, 24, 160
_PAGE = "fleet.html"


def render_markdown(record: FleetRecord, gate: str = "") -> str:
    """Render a fleet as Markdown, with a section on its gate at the top."""
    facts = ", ".join(f"{name}: {text}" for name, text in fleet_tables.list_facts(record).items())
    failures = fleet_tables.tabulate_failures(record)
    parts = [
        f"# {plain(_shorten(record.name))}",
        *([gate.strip(), "## Result"] if gate else []),
        plain(fleet_tables.summarize(record)),
        plain(f"{facts}."),
        _render_table(fleet_tables.tabulate_entries(record)),
        render_list(map(plain, fleet_tables.list_footnotes(record)), _MOST_LINES, _PAGE),
        *render_changes(record),
        *(["## What failed, and why", _render_table(failures)] if failures.rows else []),
    ]
    return limit_length("\n\n".join(part for part in parts if part), _PAGE)


def render_changes(record: FleetRecord, *, linked: bool = True) -> Iterator[str]:
    """Render the changes since the last fleet as Markdown, with links from the fleet's folder."""
    yield "## Since the last fleet"
    lines = (f"{plain(_shorten(text))}." for text in fleet_tables.describe_last(record))
    yield render_list(lines, _MOST_LINES, _PAGE)
    changes = fleet_tables.tabulate_changes(record, certain=True)
    if changes.rows:
        yield _render_table(changes if linked else replace(changes, links={}))
    elif record.last is not None:
        yield "No measured difference is certain."


def _render_table(table: Table) -> str:
    short = replace(table, rows=tuple(tuple(map(_shorten, row)) for row in table.rows))
    return render_table(short, _MOST_ROWS, _PAGE)


def _shorten(text: str) -> str:
    return shorten(text.strip().partition("\n")[0], _LONGEST)


NAMES: Mapping[Format, str] = {"html": "fleet.html", "md": "fleet.md", "junit": "junit.xml", "json": records.FILE}


def write(
    record: FleetRecord,
    folder: Path,
    runs: Mapping[str, Run],
    formats: Sequence[Format] = ("json", *REPORTS),
    gate: Gate | FleetGate | None = None,
) -> list[Path]:
    """Write a fleet in these formats, each whole or not at all; gives back the files.

    ``runs`` are the runs of entries by name, as far as there are some, and ``gate`` is what was judged of them; when
    left out, that in the folder, if there is one.

    Raises:
        StoreError: the folder cannot be written.
    """
    if "json" in formats:
        records.write(record, folder)
    gate = gate or gate_report.load(folder)
    place = os.path.relpath(folder, record.folder) if Path(record.folder).is_dir() else ""
    renderers: Mapping[Format, Callable[[], str]] = {
        "html": lambda: render(record, gate, place),
        "md": lambda: render_markdown(record, gates.render(gate) if gate else ""),
        "junit": lambda: junit.render_fleet(record, runs, gate),
    }
    paths = {form: folder / NAMES[form] for form in dict.fromkeys(formats)}
    for form, path in paths.items():
        if form != "json":
            records.write_text(path, renderers[form]())
    return list(paths.values())


def write_outdated(folder: Path) -> None:
    """Write the reports of a fleet and of its entries that are missing or older than their documents.

    Raises:
        UsageError: there is no fleet.
        StoreError: a folder cannot be written.
    """
    for entry in records.read(folder).entries:
        if entry.run:
            files.write_outdated(folder / entry.run)
    if outdated := files.list_outdated(folder, records.FILE, NAMES):
        write_again(folder, formats=outdated)


def write_again(folder: Path, output: Path | None = None, formats: Sequence[Format] = REPORTS) -> list[Path]:
    """Write the reports of a run or a fleet from the documents in its folder; gives back the files.

    Raises:
        UsageError: there is no run and no fleet.
        StoreError: the folder cannot be written.
    """
    home = folder if folder.is_dir() else folder.parent
    gate = gate_report.load(home)
    if not records.is_fleet(folder):
        return files.write(run_files.read(folder), output or home, formats, gate)
    fleet = earlier_fleet.open_fleet(folder)
    runs = {entry.name: run for entry in fleet.record.entries if (run := fleet.run(entry))}
    return write(fleet.record, output or home, runs, formats, gate)
