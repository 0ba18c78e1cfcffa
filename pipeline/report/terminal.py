"""What the command line prints: a run, a fleet, a stage's result, facts, tables; as text or as one JSON document."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.report import comparison, fleet_tables, sections, tables
from enginesmith.pipeline.results.comparison import Comparison
from enginesmith.pipeline.results.fleet import FleetRecord
from enginesmith.pipeline.results.run import Run

_WIDE = 200
"""Columns of a table that goes to a file or a pipe."""
_MOST_ROWS = 15
"""Rows of an assignment; report.html has all of them."""
_PRECISION = tables.ASSIGNMENT.index("precision")


def print_json(value: Any) -> None:
    """One JSON document."""
    click.echo(json.dumps(value, indent=1))


def show_run(run: Run, folder: Path | None, as_json: bool) -> int:
    """A run as a table, a verdict and cautions; gives back the exit code that it stands for."""
    if as_json:
        click.echo(run.model_dump_json(by_alias=True, indent=1))
    else:
        _table(tables.COLUMNS, tables.rows(run))
        for note in tables.made_up(run):
            click.echo(note)
        click.echo(tables.verdict(run))
        for name, text in tables.remarks(run):
            click.echo(f"{name}: {text}")
        _assignments(run)
        _measurements(run)
        for caution in (*tables.cautions(run), *sections.notes(run)):
            click.echo(f"note: {caution}")
        if folder is not None:
            click.echo(f"report: {folder / 'report.html'}")
    broken = [one for one in run.verdicts if not one.passed]
    return 3 if run.winner is None and broken else 0


def show_fleet(record: FleetRecord, folder: Path, as_json: bool) -> int:
    """A fleet as tables and sentences; gives back the exit code that it stands for."""
    if as_json:
        click.echo(record.model_dump_json(by_alias=True, indent=1))
        return record.exit_code
    _table(fleet_tables.ENTRIES, fleet_tables.rows(record))
    for line in (fleet_tables.headline(record), *fleet_tables.footnotes(record)):
        click.echo(line)
    for name, text in fleet_tables.facts(record).items():
        click.echo(f"{name}: {text}")
    _since_last(record)
    for entries, variants, kind, reason, remedy, log in fleet_tables.told_once(record):
        click.echo(f"{entries}: {'' if variants == 'all' else f'{variants}: '}{kind}: {reason}")
        if remedy != "–":
            click.echo(f"  → {remedy}")
        if log != "–":
            click.echo(f"  log: {shlex.quote(str(folder / log))}")
    click.echo(f"report: {folder / 'fleet.html'}")
    return record.exit_code


def show_fleets(record: FleetRecord, as_json: bool) -> None:
    """A fleet beside another one."""
    if as_json:
        click.echo(record.model_dump_json(by_alias=True, indent=1))
        return
    _table(fleet_tables.ENTRIES, fleet_tables.rows(record))
    _since_last(record)


def _since_last(record: FleetRecord) -> None:
    for line in fleet_tables.last(record):
        click.echo(f"since the last fleet: {line}")
    changes = [row for row, _ in fleet_tables.changes(record, certain=True)]
    if changes:
        _table(fleet_tables.CHANGES, changes[:_MOST_ROWS])
        if len(changes) > _MOST_ROWS:
            click.echo(f"and {len(changes) - _MOST_ROWS} more, in fleet.html")


def show_comparison(found: Comparison, as_json: bool) -> None:
    """Runs side by side."""
    if as_json:
        click.echo(found.model_dump_json(by_alias=True, indent=1))
        return
    for part in comparison.parts(found):
        for line in (part.title, *part.lines):
            if line:
                click.echo(line)
        if part.rows:
            _table(part.columns, part.rows)


def _assignments(run: Run) -> None:
    """Which groups are in which precision, where some of them are not in the one that was asked for."""
    for record in run.variants:
        rows = tables.assignment(record)
        if sentence := tables.kept(record):
            click.echo(sentence)
        if len({row[_PRECISION] for row in rows}) > 1:
            _table(tables.ASSIGNMENT, rows[:_MOST_ROWS])
            if len(rows) > _MOST_ROWS:
                click.echo(f"and {len(rows) - _MOST_ROWS} more, in report.html")


def _measurements(run: Run) -> None:
    columns, rows = sections.profile(run)
    for heads, lines in (
        (sections.MODELS, sections.models(run)),
        (sections.THROUGHPUT, sections.throughput(run)),
        (sections.LIMITS, sections.limits(run)),
        (columns, rows),
    ):
        if lines:
            _table(heads, lines)


def show_stage(result: Any, as_json: bool) -> None:
    """What a stage wrote, and how close it is to the reference."""
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    click.echo(result.summary)
    rows = [
        (one.stage, f"{one.point} (batch {one.batch})", sections.decimal(one.sqnr_db, 1))
        + (sections.decimal(one.max_abs_error, 3, "g"), sections.passed(one))
        for one in result.fidelity
    ]
    if rows:
        _table(("stage", "at", "SQNR dB", "max abs error", "passed"), rows)


def show_pruned(result: Any, as_json: bool) -> None:
    """What pruning wrote: each group before and after, what stays, and what the model costs."""
    show_stage(result, as_json)
    if as_json:
        return
    facts = result.pruning
    _table(sections.GROUPS, sections.groups(facts))
    for name, why in facts.whole.items():
        click.echo(f"whole: {name}: {why}")
    _table(
        ("", "before", "after", "left"),
        [
            (name, f"{before:,}", f"{after:,}", f"{after / max(before, 1):.1%}")
            for name, before, after in (
                ("channels", facts.channels_before, facts.channels_after),
                ("MACs", facts.macs_before, facts.macs_after),
                ("parameters", facts.parameters_before, facts.parameters_after),
            )
        ],
    )


def show_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Names and values; lists and mappings one level deep."""
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, list):
            click.echo(f"{name}:" + ("" if value else " none"))
            for item in value:
                click.echo(f"  {item}")
        elif isinstance(value, dict):
            click.echo(f"{name}:")
            for key, item in value.items():
                click.echo(f"  {key}: {item}")
        else:
            click.echo(f"{name}: {'unknown' if value is None else value}")


def show_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows that share their columns."""
    if as_json:
        print_json(rows)
    elif rows:
        _table(tuple(rows[0]), [tuple(str(value) for value in row.values()) for row in rows])
    else:
        click.echo("nothing")


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    console.print(table)
