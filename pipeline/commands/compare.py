"""Compare runs, or two fleets."""

from pathlib import Path

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.errors import storage_errors


@click.command()
@click.argument("runs", nargs=-1, required=True, type=parameters.PATH)
@click.option("--any-device", is_flag=True, help="Compare also runs that were measured on different devices.")
@click.option("-o", "--output", type=parameters.PATH, help="Also write it as Markdown into this file.")
@parameters.as_json_option
def compare(runs: tuple[Path, ...], any_device: bool, output: Path | None, as_json: bool) -> None:
    """Compare runs, variant by variant, or two fleets.

    Significant differences are marked, and changes of model, recipe and machine listed. The first run is the reference
    of all others. Runs of different devices are refused.

    Example: enginesmith compare runs/before runs/after -o compare.md
    """
    from enginesmith.pipeline.artifact import write_whole
    from enginesmith.pipeline.report.comparison import render
    from enginesmith.pipeline.results import comparison, run
    from enginesmith.pipeline.results import fleet as records

    if any(map(records.is_fleet, runs)):
        _compare_fleets(runs, any_device, output, as_json)
        return
    compared = comparison.compare([(path, run.read(path)) for path in runs], any_device=any_device)
    if output is not None:
        with storage_errors(str(output)):
            write_whole(output, render(compared).encode())
    context.terminal().show_comparison(compared, as_json)


def _compare_fleets(paths: tuple[Path, ...], any_device: bool, output: Path | None, as_json: bool) -> None:
    """Compare a fleet with an earlier one, entry by entry."""
    from enginesmith.pipeline.report.fleet import render_changes
    from enginesmith.pipeline.results import earlier_fleet, fleet

    if len(paths) != 2:
        raise click.UsageError("fleets are compared two at a time: compare BEFORE AFTER")
    before, after = map(earlier_fleet.open_fleet, paths)
    changes = earlier_fleet.compare_fleets(before, after, any_device=any_device)
    if output is not None:
        fleet.write_text(output, "\n\n".join(render_changes(changes, linked=False)) + "\n")
    context.terminal().show_fleets(changes, as_json)
