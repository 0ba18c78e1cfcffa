"""Write the reports of a run or a fleet."""

from pathlib import Path

import click

from enginesmith.pipeline.commands import context, parameters


@click.command()
@parameters.run_argument
@click.option("-o", "--output", type=parameters.PATH, help="Folder to write to; otherwise RUN itself.")
@click.option(
    "-f",
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["html", "md", "junit", "json"]),
    help="May be repeated; html, md and junit without it.",
)
@parameters.as_json_option
def report(run: Path, output: Path | None, formats: tuple[str, ...], as_json: bool) -> None:
    """Write the reports of a run or a fleet again.

    They are made of run.json and samples.npz in the run directory RUN.

    Example: enginesmith report runs/net -f html -o public
    """
    from enginesmith.pipeline.report import files
    from enginesmith.pipeline.results import fleet as records
    from enginesmith.pipeline.results import run as runs

    if records.is_fleet(run):
        written = _report_fleet(run, output, formats)
    else:
        record = runs.read(run)
        folder = run if run.is_dir() else run.parent
        chosen = tuple(name for name in files.NAMES if name in formats) or files.REPORTS
        written = files.write(record, output or folder, chosen, files.read_samples(folder))
    if as_json:
        context.terminal().print_json({"files": [str(path) for path in written]})
        return
    for path in written:
        click.echo(str(path))


def _report_fleet(folder: Path, output: Path | None, formats: tuple[str, ...]) -> list[Path]:
    """Write the reports of a fleet, and return their paths."""
    from enginesmith.pipeline.report import files
    from enginesmith.pipeline.report import fleet as fleet_files
    from enginesmith.pipeline.results import fleet as records

    fleet = records.open_fleet(folder)
    runs = {entry.name: run for entry in fleet.record.entries if (run := fleet.run(entry))}
    chosen = tuple(name for name in fleet_files.NAMES if name in formats) or files.REPORTS
    return fleet_files.write(fleet.record, output or fleet.folder, runs, chosen)
