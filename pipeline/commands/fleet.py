"""Many models for many targets: the main job, going on with it, and its reports."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.pipeline.commands.context import announce_fleet, changed, resumable, settings_of, shown
from enginesmith.pipeline.commands.options import WORK, option, under

if TYPE_CHECKING:
    from enginesmith.pipeline.results.fleet import FleetRecord


which_entries = under(
    WORK,
    option("--only", multiple=True, metavar="PATTERN", help="Fleets: these entries; digits, *@h100; repeatable."),
    option(
        "--changed-since",
        type=click.Path(path_type=Path),
        metavar="FLEET",
        help="Fleets: take from that earlier one what has not changed.",
    ),
)
_SUFFIXES = (".yaml", ".yml")


def is_file(model: str) -> bool:
    """Whether the MODEL argument is a fleet file."""
    return Path(model).suffix.lower() in _SUFFIXES


def optimize(
    file: Path, out: Path | None, only: tuple[str, ...], changed_since: Path | None, options: dict[str, Any]
) -> int:
    """All entries of a fleet file."""
    from enginesmith.pipeline.workflows import fleet

    choice = fleet.Choice(only, changed({}, options), changed_since)
    folder = out or fleet.default_out(file)
    with settings_of(options, options["quiet"]) as settings, resumable(folder, settings):
        record = fleet.optimize(file, folder, settings, choice)
    return _shown(record, folder, options["as_json"])


def resume(folder: Path, options: dict[str, Any]) -> int:
    """What is missing of a fleet."""
    from enginesmith.pipeline.workflows import fleet

    folder = _folder(folder)
    with settings_of(options, options["quiet"]) as settings, resumable(folder, settings):
        record = fleet.resume(folder, settings)
    return _shown(record, folder, options["as_json"])


def report(folder: Path, output: Path | None, formats: tuple[str, ...]) -> list[Path]:
    """The fleet's files, written anew."""
    from enginesmith.pipeline.report import fleet as files
    from enginesmith.pipeline.results import fleet_history

    fleet = fleet_history.opened(folder)
    found = {one.name: run for one in fleet.record.entries if (run := fleet.run(one))}
    chosen = tuple(name for name in files.NAMES if name in formats) or files.REPORTS
    return files.write(fleet.record, output or fleet.folder, found, chosen)


def compare(paths: tuple[Path, ...], any_device: bool, output: Path | None, as_json: bool) -> None:
    """A fleet beside an earlier one, entry by entry."""
    from enginesmith.pipeline.report import fleet as fleet_markdown
    from enginesmith.pipeline.results import fleet, fleet_history

    if len(paths) != 2:
        raise click.UsageError("fleets are compared two at a time: compare BEFORE AFTER")
    before, after = map(fleet_history.opened, paths)
    found = fleet_history.beside(before, after, any_device=any_device)
    if output is not None:
        fleet.write_text(output, "\n\n".join(fleet_markdown.since(found, linked=False)) + "\n")
    shown().show_fleets(found, as_json)


def _folder(path: Path) -> Path:
    """The fleet's folder, of which the document may have been given."""
    return path if path.is_dir() else path.parent


def _shown(record: "FleetRecord", folder: Path, as_json: bool) -> int:
    code: int = shown().show_fleet(record, folder, as_json)
    if not as_json:
        announce_fleet(record)
    return code
