"""Print runs, fleets, results of stages and facts on the terminal, as text or as one JSON document."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.frameworks.records import HALF
from enginesmith.pipeline.passes.quantize.precisions import WEAK_DB
from enginesmith.pipeline.report import comparison, fleet_tables, run_tables, sentences, tables, training_tables
from enginesmith.pipeline.report.tables import Table, make_table, number_cell
from enginesmith.pipeline.results.comparison import Comparison
from enginesmith.pipeline.results.explain import list_losses
from enginesmith.pipeline.results.fleet import FleetRecord
from enginesmith.pipeline.results.run import Run, VariantRecord

_WIDE = 200
"""Columns of a table that goes to a file or a pipe."""
_WHOLE, _LONGEST_NAME = ("variant", "status", "p50 ms", "p99 ms"), 40
"""Columns whose words are not broken, and the longest ones for which that holds."""
_PADDING = 3
"""Columns of the terminal between two of a table."""
_MOST_ROWS = 15
"""Rows of an assignment; report.html has all of them."""
_MOST_NOTES = 3
"""Notes after a run; report.html has all of them."""


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def print_json(value: Any) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(value, indent=1))


def show_run(run: Run, folder: Path | None, as_json: bool) -> int:
    """Print a run's tables, verdict and cautions; gives back the exit code that it stands for."""
    if as_json:
        click.echo(run.model_dump_json(by_alias=True, indent=1))
    else:
        _print_table(run_tables.tabulate_variants(run), spare=("size", "peak memory", "p99 ms"))
        _print_lines((*sentences.list_footnotes(run, in_folder=folder is not None), sentences.summarize(run)))
        _print_lines(f"{name}: {text}" for name, text in sentences.list_remarks(run))
        _print_lines((*sentences.list_reasons(run), *sentences.describe_out_of_memory(run)))
        for record in run.variants:  # the groups of those in which precisions differ
            if run.recipe.races and record.status != "measured":
                continue
            _print_lines(filter(None, (run_tables.summarize_assignment(record),)))
            if len({group.precision for group in record.assignment}) > 1:
                _print_table(run_tables.tabulate_assignment(record), _MOST_ROWS, "report.html")
        _print_table(training_tables.tabulate_pruning(run))
        _print_table(training_tables.tabulate_training(run))
        _print_table(run_tables.tabulate_throughput(run))
        _print_table(run_tables.tabulate_limits(run))
        _print_table(run_tables.tabulate_profile(run))
        _print_lines(sentences.describe_profiles(run))
        _print_lines(f"note: {note}" for note in sentences.list_notes(run)[:_MOST_NOTES])
        if folder is not None and (folder / "report.html").exists():
            click.echo(f"report: {folder / 'report.html'}")
    broken = [verdict for verdict in run.verdicts if not verdict.passed]
    return 3 if run.winner is None and broken else 0


def show_explanation(run: Run, record: VariantRecord, as_json: bool) -> None:
    """Print what a variant loses in low precision, why, and what was done about it."""
    losses = list_losses(record)
    if as_json:
        trained = [recovery.model_dump(mode="json", exclude={"plan", "curve"}) for recovery in record.recovery]
        groups = [{**asdict(loss), "group": loss.group.model_dump(mode="json")} for loss in losses]
        search = [trial.model_dump(mode="json") for trial in record.search]
        print_json({"variant": record.id, "groups": groups, "search": search, "recovery": trained})
        return
    own = [text for name, text in sentences.list_remarks(run) if name == record.id]
    state = record.rejected or record.reason
    _print_lines(filter(None, (state and f"{record.id}: {state}", run_tables.summarize_assignment(record), *own)))
    if losses:
        _print_table(run_tables.tabulate_group_losses(record))
    elif record.assignment and record.precision in HALF:
        click.echo(f"no group has to stay in float32: all are in {record.precision}")
    elif record.assignment:
        click.echo(f"no group loses much: each has an SQNR of {WEAK_DB:g} dB or more, its inputs being exact")
    else:
        click.echo("nothing was quantized group by group, so there are no losses of single groups to tell")
    _print_table(run_tables.tabulate_search(record, "", "Trials"))
    _print_table(training_tables.tabulate_training(run.model_copy(update={"variants": (record,)})))


def show_fleet(record: FleetRecord, folder: Path, as_json: bool) -> int:
    """Print a fleet as tables and sentences; gives back the exit code that it stands for."""
    if as_json:
        click.echo(record.model_dump_json(by_alias=True, indent=1))
        return record.exit_code
    _print_table(fleet_tables.tabulate_entries(record))
    _print_lines((fleet_tables.summarize(record), *fleet_tables.list_footnotes(record)))
    _print_lines(f"{name}: {text}" for name, text in fleet_tables.list_facts(record).items())
    _print_changes(record)
    for entries, variants, kind, reason, remedy, log in fleet_tables.group_failures(record):
        click.echo(f"{entries}: {'' if variants == 'all' else f'{variants}: '}{kind}: {reason}")
        if remedy != "–":
            click.echo(f"  → {remedy}")
        if log != "–":
            click.echo(f"  log: {shlex.quote(str(folder / log))}")
    click.echo(f"report: {folder / 'fleet.html'}")
    return record.exit_code


def show_fleets(record: FleetRecord, as_json: bool) -> None:
    """Print a fleet beside another one."""
    if as_json:
        click.echo(record.model_dump_json(by_alias=True, indent=1))
        return
    _print_table(fleet_tables.tabulate_entries(record))
    _print_changes(record)


def _print_changes(record: FleetRecord) -> None:
    _print_lines(f"since the last fleet: {line}" for line in fleet_tables.describe_last(record))
    _print_table(fleet_tables.tabulate_changes(record, certain=True), _MOST_ROWS, "fleet.html")


def show_comparison(compared: Comparison, as_json: bool) -> None:
    """Print runs side by side."""
    if as_json:
        click.echo(compared.model_dump_json(by_alias=True, indent=1))
        return
    for part in comparison.list_parts(compared):
        _print_lines(filter(None, (part.title, *part.lines)))
        if part.table:
            _print_table(part.table)


def show_stage(result: Any, as_json: bool) -> None:
    """Print what a stage wrote, and how close it is to the reference."""
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    click.echo(result.summary)
    rows = (
        {
            "stage": entry.stage,
            "at": f"{entry.point} (batch {entry.batch})",
            "SQNR dB": number_cell(entry.sqnr_db, ".1f"),
            "max abs error": number_cell(entry.max_abs_error, ".3g"),
            "passed": tables.describe_pass(entry),
        }
        for entry in result.fidelity
    )
    _print_table(make_table("fidelity", "", rows))


def show_prosecution(result: Any, as_json: bool) -> None:
    """Print what was tried on an engine, and what was found."""
    if as_json:
        print_json(result.model_dump(mode="json"))
        return
    tried = result.prosecution
    walks = ", ".join(f"{name} {count}" for name, count in tried.walks.items())
    click.echo(f"{result.subject}: {tried.attempts} inputs tried ({walks})")
    if tried.finding is None:
        _print_lines(("none was found on which it is wrong", *filter(None, (tried.caution,))))
        return
    click.echo(tried.finding.sentence)
    if tried.finding.unreduced:
        click.echo(f"the graph was not reduced: {tried.finding.unreduced}")
    folder = Path(result.evidence)
    command = shlex.join(("python", str(folder / "repro.py")))
    script = f"`{command}` shows it, and " if (folder / "repro.py").is_file() else ""
    click.echo(f"evidence: {folder}: {script}issue.md is a report for an issue tracker")


def show_pruned(result: Any, as_json: bool) -> None:
    """Print what pruning wrote: each group before and after, what stays, and what the model costs."""
    show_stage(result, as_json)
    if as_json:
        return
    facts = result.pruning
    _print_table(training_tables.tabulate_groups(facts))
    _print_lines(f"not pruned: {name}: {why}" for name, why in facts.whole.items())
    costs = {
        "channels": (facts.channels_before, facts.channels_after),
        "MACs": (facts.macs_before, facts.macs_after),
        "parameters": (facts.parameters_before, facts.parameters_after),
    }
    rows = (
        {"": name, "before": f"{before:,}", "after": f"{after:,}", "left": f"{after / max(before, 1):.1%}"}
        for name, (before, after) in costs.items()
    )
    _print_table(make_table("left", "", rows))


def show_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Print names and values, lists and mappings one level deep."""
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, list):
            _print_lines((f"{name}:" + ("" if value else " none"), *(f"  {item}" for item in value)))
        elif isinstance(value, dict):
            known = ((key, "unknown" if item is None else item) for key, item in value.items())
            _print_lines((f"{name}:" + ("" if value else " none"), *(f"  {key}: {item}" for key, item in known)))
        else:
            unknown = "none" if name == "winner" else "unknown"
            click.echo(f"{name}: {unknown if value is None else value}")


def show_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows that share their columns."""
    if as_json:
        print_json(rows)
    elif rows:
        _print_table(make_table("rows", "", ({name: str(value) for name, value in row.items()} for row in rows)))
    else:
        click.echo("nothing")


def _print_table(table: Table, most: int | None = None, rest: str = "", spare: Sequence[str] = ()) -> None:
    """Print a table that has rows, of which the ``rest`` is named where there are more than ``most``.

    The ``spare`` columns are left out, one after the other, as long as the terminal is too narrow.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    if not table.rows:
        return
    console = Console() if sys.stdout.isatty() else Console(width=_WIDE)
    sizes = [max(map(len, cells)) for cells in zip(table.columns, *table.rows[:most], strict=True)]
    shown_columns, left_out = [*range(len(sizes))], []
    for head in filter(table.columns.__contains__, spare):
        if sum(sizes[index] + _PADDING for index in shown_columns) > console.width:
            shown_columns.remove(table.columns.index(head))
            left_out.append(head)
    grid = Grid(box=SIMPLE_HEAD)
    for index in shown_columns:
        head = table.columns[index]
        grid.add_column(head, overflow="fold", no_wrap=head in _WHOLE and sizes[index] <= _LONGEST_NAME)
    for row in table.rows[:most]:
        grid.add_row(*(Text(row[index]) for index in shown_columns))
    console.print(grid)
    if most is not None and len(table.rows) > most:
        click.echo(f"and {len(table.rows) - most} more, in {rest}")
    if left_out:
        click.echo(f"left out, as the terminal is narrow: {', '.join(left_out)}")
