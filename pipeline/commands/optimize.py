"""Make the fastest engine of a model, or of all models of a fleet file."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.commands.parameters import INPUTS, PATH, WORK, option, under

_FLEET_SUFFIXES = (".yaml", ".yml")


@click.command(cls=parameters.Command)
@parameters.model_argument
@under(INPUTS, option("--recipe", "recipe_file", type=PATH, help="Recipe file; options override its fields."))
@parameters.recipe_options()
@under(WORK, option("-o", "--out", type=PATH, help="Run directory; default runs/MODEL-TIME."))
@under(WORK, option("--replace", is_flag=True, help="Move an earlier run in --out to OUT.1, OUT.2 …"), advanced=True)
@parameters.without_limit
@under(
    WORK,
    option("--only", multiple=True, metavar="PATTERN", help="Fleets: entries to run, such as *@h100; repeatable."),
    option(
        "--changed-since", type=PATH, metavar="FLEET", help="Fleets: reuse unchanged entries of this earlier fleet."
    ),
)
def optimize(
    model: str,
    recipe_file: Path | None,
    out: Path | None,
    only: tuple[str, ...],
    changed_since: Path | None,
    replace: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Build, verify and measure variants of MODEL, and choose the best one.

    MODEL may be a fleet file such as fleet.yaml: many models for many targets.

    Example: enginesmith optimize net.py:build --precision fp32 --precision int8 --calibration data.npz --max-drop 0.01
    """
    from enginesmith.pipeline.frameworks.source import resolve
    from enginesmith.pipeline.workflows import optimize

    if Path(model).suffix.lower() in _FLEET_SUFFIXES:
        if recipe_file is not None:
            raise click.UsageError(f"{model} is a fleet file, which has its own recipe: omit --recipe")
        if replace:
            raise click.UsageError("--replace is for single models: give the fleet another --out")
        return _optimize_fleet(Path(model), out, only, changed_since, {**options, "as_json": as_json, "quiet": quiet})
    if only or changed_since is not None:
        name = "--only" if only else "--changed-since"
        raise click.UsageError(f"{name} is for fleet files, and {model} is none: those end with .yaml")
    recipe = context.recipe_of(model, recipe_file, options, listed=False)
    source = resolve(recipe.model)
    folder = out or optimize.default_out(source.name)
    with context.open_settings(options, quiet, folder) as settings:
        run = optimize.optimize(recipe, folder, settings, source, replace=replace)
    return context.show_run(run, folder, as_json)


def _optimize_fleet(
    file: Path, out: Path | None, only: tuple[str, ...], changed_since: Path | None, options: dict[str, Any]
) -> int:
    """Optimize all entries of a fleet file, or the chosen ones; return the exit code."""
    from enginesmith.pipeline.workflows import fleet
    from enginesmith.pipeline.workflows import optimize as jobs

    changed = context.set_fields({}, options)
    folder = out or jobs.default_out(f"fleet-{file.stem}")
    with context.open_settings(options, options["quiet"], folder) as settings:
        record = fleet.optimize(file, folder, settings, only=only, options=changed, changed_since=changed_since)
    return context.show_fleet(record, folder, options["as_json"])
