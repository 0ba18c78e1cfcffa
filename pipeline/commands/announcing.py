"""What GitHub Actions is told, where a command runs there."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from enginesmith.pipeline.fleet.record import FleetRecord
    from enginesmith.pipeline.run import Run


def announce(title: str, errors: Sequence[str], warnings: Sequence[str], summary: str) -> None:
    """Annotations on standard output where this is GitHub Actions, and a part of the job's summary if it has one."""
    from enginesmith.pipeline.report import github

    if github.is_here(os.environ):
        for line in github.annotations(title, errors, warnings):
            click.echo(line)
    try:
        github.append_summary(os.environ, summary)
    except OSError as error:  # what the command found out, and its exit code, are worth more than the summary
        click.echo(f"note: the summary of the job was not written: {error}", err=True)


def announce_run(run: "Run") -> None:
    """The same of a run: budgets that nobody holds are errors, what spoils its numbers are warnings."""
    from enginesmith.pipeline import budgets
    from enginesmith.pipeline.report import markdown, tables

    broken = [budgets.format_verdict(one) for one in run.verdicts if not one.passed]
    announce(run.name, broken, tables.cautions(run), markdown.render(run))


def announce_fleet(record: "FleetRecord") -> None:
    """The same of a fleet: what failed or broke a budget is an error, what is lacking or became slower a warning."""
    from enginesmith.pipeline.report import fleet_markdown, fleet_tables

    bad = [one for one in record.entries if one.status in ("failed", "breached")]
    doubtful = [f"{one.name}: {one.reason}" for one in record.having("lacking")]
    doubtful += [
        f"{one.name} became slower: {fleet_tables.since(one.since_last)}" for one in fleet_tables.slower(record)
    ]
    errors = [f"{one.name}: {one.reason}" for one in bad]
    announce(record.name, errors, doubtful, fleet_markdown.render(record))
