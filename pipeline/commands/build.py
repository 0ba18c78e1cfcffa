"""Build a TensorRT engine, or check whether it builds."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.engines import DEFAULT_BUILD


@click.command(cls=parameters.Command)
@parameters.file_argument
@click.option("-o", "--output", type=parameters.PATH, help="Engine file to write.")
@click.option("--refit-engine", metavar="ENGINE", help="Put FILE's weights into this engine instead of building one.")
@click.option("--check", is_flag=True, help="Only report for which targets it builds; nothing is written.")
@click.option(
    "--engine", "engines", multiple=True, default=(DEFAULT_BUILD,), show_default=True, help="Engine to build."
)
@parameters.what_to_load
@parameters.how_to_build
@parameters.where_to_run
@parameters.how_to_work
def build(
    file: Path, output: Path | None, refit_engine: str | None, check: bool, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Build a TensorRT engine from an ONNX FILE, or check that it builds.

    The graph is built as it is, and the engine's layers are audited.

    Example: enginesmith build net.onnx -o net.engine --target sm86 --shape batch=1:8:64
    """
    from enginesmith.pipeline.workflows import build

    if check == (output is not None) or (check and refit_engine):
        raise click.UsageError("give either -o FILE.engine, perhaps with --refit-engine, or --check")
    recipe = context.recipe_of(str(file), None, options)
    with context.open_settings(options, quiet) as settings:
        if output is not None:
            built = build.build(recipe, output, settings, refit_engine)
            context.terminal().print_json(built.model_dump(mode="json")) if as_json else click.echo(built.summary)
            return 0
        trials = build.check(recipe, settings)
    rows = [trial.model_dump(mode="json") for trial in trials]
    if not as_json:  # shorter for people
        rows = [{name: row[name] for name in row if name != "notes"} for row in rows]
        rows = [row | {"builds": "yes" if row["builds"] else "no"} for row in rows]
    context.terminal().show_table(rows, as_json)
    enough = all if recipe.targets else any  # without a target: whether it builds for any at all
    return 0 if enough(trial.builds for trial in trials) else 1
