"""What GitHub Actions is told, where a command runs there."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from enginesmith.pipeline.run import Run


def announce(title: str, errors: Sequence[str], warnings: Sequence[str], summary: str) -> None:
    """Annotations on standard output where this is GitHub Actions, and a part of the job's summary if it has one."""
    from enginesmith.pipeline.report import github
    from enginesmith.pipeline.storage import storage_errors

    if github.is_here(os.environ):
        for line in github.annotations(title, errors, warnings):
            click.echo(line)
    with storage_errors("the summary of the job"):
        github.append_summary(os.environ, summary)


def announce_run(run: "Run") -> None:
    """The same of a run: budgets that nobody holds are errors, what spoils its numbers are warnings."""
    from enginesmith.pipeline.report import budgets, markdown, tables

    broken = [budgets.sentence(one) for one in run.verdicts if not one.passed]
    announce(run.name, broken, tables.cautions(run), markdown.render(run))
