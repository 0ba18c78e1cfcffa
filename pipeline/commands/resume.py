"""Finish a run or a fleet that was interrupted."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands.context import announce_run, resumable, settings_of, show_fleet, shown
from enginesmith.pipeline.commands.options import Command, how_to_work, run_argument


@click.command(cls=Command)
@run_argument
@how_to_work
def resume(run: Path, as_json: bool, quiet: bool, **options: Any) -> int:
    """Finish an interrupted run or fleet, from its folder RUN.

    Example: enginesmith resume runs/net
    """
    from enginesmith.pipeline.results import fleet as records
    from enginesmith.pipeline.workflows import fleet, optimize

    if records.is_fleet(run):
        folder = run if run.is_dir() else run.parent
        with settings_of(options, quiet) as settings, resumable(folder, settings):
            record = fleet.resume(folder, settings)
        return show_fleet(record, folder, as_json)
    with settings_of(options, quiet) as settings, resumable(run, settings):
        result = optimize.resume(run, settings)
    code: int = shown().show_run(result, run, as_json)
    if not as_json:
        announce_run(result)
    return code
