"""Many models for many targets: the main job, going on with it, and its reports."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.pipeline.commands.announcing import announce_fleet
from enginesmith.pipeline.commands.options import WORK, option, under
from enginesmith.pipeline.commands.request import changed, resumable, settings_of, shown

if TYPE_CHECKING:
    from enginesmith.pipeline.fleet.record import FleetRecord

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
    from enginesmith.pipeline import fleet_job

    choice = fleet_job.Choice(only, changed({}, options), changed_since)
    folder = out or fleet_job.default_out(file)
    with settings_of(options, options["quiet"]) as settings, resumable(folder, settings):
        record = fleet_job.optimize(file, folder, settings, choice)
    return _shown(record, folder, options["as_json"])


def resume(folder: Path, options: dict[str, Any]) -> int:
    """What is missing of a fleet."""
    from enginesmith.pipeline import fleet_job

    folder = _folder(folder)
    with settings_of(options, options["quiet"]) as settings, resumable(folder, settings):
        record = fleet_job.resume(folder, settings)
    return _shown(record, folder, options["as_json"])


def report(folder: Path, output: Path | None, formats: tuple[str, ...]) -> list[Path]:
    """The fleet's files, written anew."""
    from enginesmith.pipeline.fleet import earlier
    from enginesmith.pipeline.report import fleet as files

    fleet = earlier.opened(folder)
    found = {one.name: run for one in fleet.record.entries if (run := fleet.run(one))}
    chosen = tuple(name for name in files.NAMES if name in formats) or files.REPORTS
    return files.write(fleet.record, output or fleet.folder, found, chosen)


def compare(paths: tuple[Path, ...], any_device: bool, output: Path | None, as_json: bool) -> None:
    """A fleet beside an earlier one, entry by entry."""
    from enginesmith.pipeline.fleet import earlier, record
    from enginesmith.pipeline.report import fleet_markdown

    if len(paths) != 2:
        raise click.UsageError("fleets are compared two at a time: compare BEFORE AFTER")
    before, after = map(earlier.opened, paths)
    found = earlier.beside(before, after, any_device=any_device)
    if output is not None:
        record.write_text(output, "\n\n".join(fleet_markdown.since(found, linked=False)) + "\n")
    shown().show_fleets(found, as_json)


def _folder(path: Path) -> Path:
    """The fleet's folder, of which the document may have been given."""
    return path if path.is_dir() else path.parent


def _shown(record: "FleetRecord", folder: Path, as_json: bool) -> int:
    code: int = shown().show_fleet(record, folder, as_json)
    if not as_json:
        announce_fleet(record)
    return code
