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
    help="Format; may be repeated; default: html, md and junit.",
)
@parameters.as_json_option
def report(run: Path, output: Path | None, formats: tuple[str, ...], as_json: bool) -> None:
    """Write the reports of a run or a fleet again.

    They are made from run.json and gate.json in the run directory RUN.

    Example: enginesmith report runs/net -f html -o public
    """
    from enginesmith.pipeline.report import files
    from enginesmith.pipeline.report.fleet import write_again

    written = write_again(run, output, tuple(name for name in files.NAMES if name in formats) or files.REPORTS)
    if as_json:
        context.terminal().print_json({"files": [str(path) for path in written]})
        return
    for path in written:
        click.echo(str(path))
