"""Turn the options of a command into a recipe and settings, and announce results in GitHub Actions."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from enginesmith.pipeline.execution.settings import Settings
    from enginesmith.pipeline.recipe import Recipe
    from enginesmith.pipeline.recipe.options import Budgets
    from enginesmith.pipeline.results.fleet import FleetRecord
    from enginesmith.pipeline.results.run import Run


def terminal() -> ModuleType:
    """Import the module that prints results, once there are some."""
    from enginesmith.pipeline.report import terminal

    return terminal


@contextlib.contextmanager
def open_settings(options: dict[str, Any], quiet: bool, folder: Path | None = None) -> "Iterator[Settings]":
    """Make settings, and show progress; on Ctrl-C name the command that resumes a run that has begun in ``folder``."""
    from enginesmith.pipeline.execution.settings import Settings
    from enginesmith.pipeline.report import progress

    if options["ray_address"] and options["executor"] != "ray":
        raise click.UsageError("--ray-address names a Ray cluster, and steps run here: add --executor ray")
    with progress.show_progress(quiet) as listener:
        settings = Settings(
            store=options["store"],
            reuse=not options["no_cache"],
            jobs=options["jobs"] or Settings().jobs,
            time_limit_seconds=options.get("time_limit"),
            listener=listener,
            executor=options["executor"],
            ray_address=options["ray_address"],
        )
        try:
            yield settings
        except KeyboardInterrupt:
            begun = folder and any((folder / name).exists() for name in ("run.json", "fleet.json"))
            hint = f"; `{settings.resume_command(folder)}` continues from here" if folder and begun else ""
            raise KeyboardInterrupt(hint) from None


def recipe_of(model: str, file: Path | None, options: dict[str, Any], *, listed: bool = True) -> "Recipe":
    """Make a recipe from a file, if any, and the given options; unless ``listed``, variants are found."""
    from enginesmith.pipeline import recipe

    values = set_fields(recipe.read(file) if file else {}, options)
    values["model"] = model
    new_recipe = recipe.make(values, set_fields({}, options), listed=listed)
    return new_recipe if options.get("executor") in (None, "local") else new_recipe.for_other_machines()


def set_fields(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Set the fields that the given options fill in the values of a recipe."""
    from enginesmith.pipeline.commands.parameters import RECIPE_OPTIONS, parameter_name

    for row in RECIPE_OPTIONS:
        value = options.get(parameter_name(row["field"]))
        if value is None or value == ():
            continue
        *parts, last = row["field"].split(".")
        place = values
        for part in parts:
            inner = place.get(part)
            place[part] = dict(inner) if isinstance(inner, dict) else {}
            place = place[part]
        if row["kind"] == "mapping":
            place[last] = {**(place.get(last) or {}), **dict(map(_pair, value))}
        else:
            place[last] = list(value) if isinstance(value, tuple) else value
    return values


def budgets_of(recipe: "Recipe", options: dict[str, Any]) -> "tuple[Budgets, float | None]":
    """Read a recipe's budgets and fidelity threshold, with the given options."""
    from enginesmith.pipeline.recipe import parsed

    given = {name: value for name, value in options.items() if name.startswith(("budgets__", "min_sqnr_db"))}
    changed = parsed(set_fields(recipe.model_dump(mode="json"), given), set_fields({}, given))
    return changed.budgets, changed.min_sqnr_db


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not of the form batch=1:8:64", param_hint="--shape")
    return name, value


# Annotations and the job's summary in GitHub Actions.


def announce(title: str, errors: Sequence[str], warnings: Sequence[str], summary: str) -> None:
    """Write annotations and a part of the job's summary where this runs in GitHub Actions."""
    from enginesmith.pipeline.report import gate

    if gate.is_here(os.environ):
        for line in gate.annotate(title, errors, warnings):
            click.echo(line)
    try:
        gate.append_summary(os.environ, summary)
    except OSError as error:  # what the command found out, and its exit code, are worth more than the summary
        click.echo(f"note: the summary of the job was not written: {error}", err=True)


def show_run(run: "Run", folder: Path, as_json: bool) -> int:
    """Print and announce a run, missed budgets as errors and cautions as warnings; return the exit code.

    Raises:
        StoreError: the run's reports are missing, and still cannot be written.
    """
    from enginesmith.pipeline.report import files, markdown, sentences
    from enginesmith.pipeline.results import verdicts

    if as_json:  # standard output has one document: the run or the error
        files.write_outdated(folder)
    code: int = terminal().show_run(run, folder, as_json)
    if not code and verdicts.lacks_result(run):
        code = 3 if verdicts.list_unjudged(run) else 1
    if not as_json:
        broken = [verdicts.format_verdict(verdict) for verdict in run.verdicts if not verdict.passed]
        announce(run.name, broken, [*sentences.list_warnings(run), *sentences.list_reasons(run)], markdown.render(run))
    files.write_outdated(folder)
    return code


def show_fleet(record: "FleetRecord", folder: Path, as_json: bool) -> int:
    """Print and announce a fleet: failures and missed budgets are errors, unavailable or slower entries warnings.

    Raises:
        StoreError: reports are missing, and still cannot be written.
    """
    from enginesmith.pipeline.report import fleet, fleet_tables

    if as_json:
        fleet.write_outdated(folder)
    code: int = terminal().show_fleet(record, folder, as_json)
    if not as_json:
        errors = [f"{entry.name}: {entry.reason}" for entry in record.entries if entry.status in ("failed", "breached")]
        slower = fleet_tables.list_changed(record, slower=True)
        doubtful = [f"{entry.name}: {entry.reason}" for entry in record.having("lacking")]
        doubtful += [f"{item.name} became slower: {fleet_tables.describe_change(item.since_last)}" for item in slower]
        announce(record.name, errors, doubtful, fleet.render_markdown(record))
    fleet.write_outdated(folder)
    return code
