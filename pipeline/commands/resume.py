"""Finish a run or a fleet that was interrupted."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters


@click.command(cls=parameters.Command)
@parameters.run_argument
@parameters.how_to_work
def resume(run: Path, as_json: bool, quiet: bool, **options: Any) -> int:
    """Finish an interrupted run or fleet, from its folder RUN.

    Example: enginesmith resume runs/net
    """
    from enginesmith.pipeline.results import fleet as records
    from enginesmith.pipeline.workflows import fleet, optimize

    if records.is_fleet(run):
        folder = run if run.is_dir() else run.parent
        with context.open_settings(options, quiet, folder) as settings:
            record = fleet.resume(folder, settings, lambda text: click.echo(text, err=True))
        return context.show_fleet(record, folder, as_json)
    with context.open_settings(options, quiet, run) as settings:
        result = optimize.resume(run, settings, lambda text: click.echo(text, err=True))
    return context.show_run(result, run, as_json)
