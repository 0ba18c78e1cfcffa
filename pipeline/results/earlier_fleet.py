"""Compare a fleet with earlier ones, and find the entries that need not be done again."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginesmith.calibration.file_formats import is_embedded
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import file_digest, files_below, folder_digest
from enginesmith.pipeline.errors import UsageError, storage_errors
from enginesmith.pipeline.measure.quality import parse_metric
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.fleet import Entry
from enginesmith.pipeline.results import comparison, differences, documents
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.differences import ModelIdentity
from enginesmith.pipeline.results.fleet import (
    FILE,
    RUNS,
    EntryChange,
    EntryRecord,
    FleetRecord,
    Last,
    machine_of,
    read,
    winner,
)
from enginesmith.pipeline.results.run import Run, find_record


@dataclass(frozen=True)
class Earlier:
    """An earlier fleet and its folder."""

    folder: Path
    record: FleetRecord

    def entry(self, name: str) -> EntryRecord | None:
        """Look up an entry by name."""
        return next((entry for entry in self.record.entries if entry.name == name), None)

    def run(self, entry: EntryRecord) -> Run | None:
        """Read the run of an entry, if it is still there."""
        try:
            return runs.read(self.folder / entry.run) if entry.run else None
        except UsageError:
            return None


def open_fleet(folder: Path) -> Earlier:
    """Open the fleet of a folder.

    Raises:
        UsageError: there is none.
    """
    return Earlier(folder if folder.is_dir() else folder.parent, read(folder))


def find_last(out: Path, begun: FleetRecord) -> Earlier | None:
    """Find the newest fleet of the same file's name beside ``out`` that was begun before.

    One that was interrupted is no yardstick, and one that was made with ``--only`` is none for another choice.
    """
    here, others = out.absolute(), []
    for path in here.parent.glob(f"*/{FILE}"):
        if path.parent != here:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # it is no fleet's
                values = documents.load(path)
                created, file, only = str(values["created"]), values["file"], tuple(values["only"])
                ended = bool(values["entries"]) and all(entry["status"] != "pending" for entry in values["entries"])
                if ended and file == begun.file and only in ((), begun.only) and created < begun.created:
                    others.append((created, path))
    for _, path in sorted(others, reverse=True):
        with contextlib.suppress(UsageError):  # of another version, perhaps, which is no reason to do nothing now
            return open_fleet(path.parent)
    return None


def compare_entry(
    earlier: Earlier, name: str, folder: Path, now: Run | None, *, any_device: bool = False
) -> EntryChange:
    """Compare an entry whose run lies in ``folder`` with the same one of an earlier fleet."""
    entry = earlier.entry(name)
    if entry is None:
        return EntryChange(cause="new", note="not in the last fleet")
    then = earlier.run(entry)
    if then is None:
        last = entry.winner and entry.winner.id
        if entry.run:
            return EntryChange(winner=last, cause="run gone", note="its run is no longer there")
        return EntryChange(winner=last, cause="no run then", note=f"there was no run: {entry.reason}")
    known = winner(then)
    change = EntryChange(winner=known and known.id, p50_ms=known and known.p50_ms)
    if now is None:
        return change.model_copy(update={"cause": "no run now", "note": "there is no run now"})
    if folder.resolve() == (earlier.folder / str(entry.run)).resolve():
        return change.model_copy(update={"cause": "reused", "note": "reused: nothing has changed"})
    if not any_device and (apart := differences.compare_devices(then, now)):
        where = "; ".join(f"{figure.name} was {figure.before}, and is {figure.after}" for figure in apart)
        return change.model_copy(update={"cause": "other machine", "note": f"other machine: {where}"})
    sides = [(earlier.folder / str(entry.run), then), (folder, now)]
    (pair,) = comparison.compare(sides, any_device=True).pairs
    winners = None
    if then.winner and now.winner and then.winner != now.winner:
        winners = comparison.compare_variants(then, now, find_record(then, then.winner), find_record(now, now.winner))
    return change.model_copy(update={"pair": pair, "winners": winners})


def name_last(earlier: Earlier, out: Path, only: Sequence[str], entries: Sequence[EntryRecord]) -> Last:
    """Name the earlier fleet in the record of the one in ``out``, made with ``only`` such patterns."""
    here = {entry.name for entry in entries}
    gone = () if only else tuple(entry.name for entry in earlier.record.entries if entry.name not in here)
    return Last(path=path_from(out, earlier.folder), created=earlier.record.created, without=gone)


def path_from(out: Path, folder: Path) -> str:
    """Return a folder's path as the documents of another one name it."""
    return os.path.relpath(folder.resolve(), out.resolve())


def compare_fleets(earlier: Earlier, now: Earlier, *, any_device: bool) -> FleetRecord:
    """Compare a fleet with another one than when it was made."""
    entries = []
    for entry in now.record.entries:
        folder, run = now.folder / RUNS / entry.name, now.run(entry)
        change = compare_entry(earlier, entry.name, folder, run, any_device=any_device)
        entries.append(entry.model_copy(update={"since_last": change}))
    against = name_last(earlier, now.folder, now.record.only, entries)
    return now.record.model_copy(update={"entries": tuple(entries), "last": against})


@dataclass(frozen=True)
class State:
    """The state of an entry that its recipe does not hold."""

    model: ModelIdentity | None
    """None where it cannot be loaded."""
    files: Mapping[str, str]
    """Files that the recipe names → their digests."""
    packages: Mapping[str, str]


def find_unchanged(earlier: Earlier, entry: Entry, state: State) -> Run | str:
    """Find the run that still stands for an entry, or explain what has changed since."""
    then = earlier.entry(entry.name)
    if then is None:
        return "it was not there"
    run = earlier.run(then)
    if run is None or run.winner is None:
        return "it had no winner"
    if not run.complete:
        return "it was not complete"
    changes = [*list_changes(then, run, entry, state), *_list_loading(run, state)]
    return "; ".join([*changes, *_list_packages(earlier.record.packages, state.packages)]) or run


def list_changes(then: EntryRecord, run: Run, entry: Entry, now: State) -> Iterator[str]:
    """List what of an entry changed since its run; a model that cannot be loaded now is taken to be the same."""
    before, after = run.requested_recipe, entry.recipe
    if changed := differences.compare_recipes(before, after):
        yield f"its recipe changed: {', '.join(field.name for field in changed)}"
    if then.machine != machine_of(entry):
        yield "its target changed"
    if now.model and not now.model.matches(run.model):
        yield "its model changed"
    for name in sorted({*then.files, *now.files}):
        if then.files.get(name) != now.files.get(name):
            yield f"{name} changed"


def _list_loading(run: Run, now: State) -> Iterator[str]:
    """Tell that a model cannot be loaded, or comes out otherwise although its code and weights are the same."""
    if now.model is None:
        yield "its model cannot be loaded"
    elif now.model.matches(run.model) and now.model.sha256 != run.model.sha256:
        yield "its model is loaded otherwise, as by another version of enginesmith"


def _list_packages(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """List packages of other versions."""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            yield f"{name} {before.get(name, 'none')} → {now.get(name, 'none')}"


def take_over(earlier: Earlier, name: str, folder: Path) -> None:
    """Have the run directory of an earlier fleet's entry stand in ``folder``, too.

    Raises:
        StoreError: the link cannot be made.
    """
    entry = earlier.entry(name)
    assert entry is not None
    with storage_errors(f"the run directory {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            folder.unlink()
        source = (earlier.folder / str(entry.run)).resolve()
        folder.symlink_to(os.path.relpath(source, folder.parent.resolve()), target_is_directory=True)


# Digests of the files that recipes name: the same name may hold other data the next time.


def digest_files(recipes: Sequence[Recipe]) -> list[dict[str, str]]:
    """Digest the files that each recipe names, by name; data sets, modules and metrics that are no files are left out.

    Modules that a named file imports are not looked at.

    Raises:
        StoreError: one is there and cannot be read.
    """
    known: dict[str, str | None] = {}
    digests = []
    for recipe in recipes:
        names = dict.fromkeys(_list_files(recipe))
        known |= {name: _digest(name) for name in names if name not in known}
        digests.append({name: digest for name in names if (digest := known[name])})
    return digests


def _list_files(recipe: Recipe) -> Iterator[str]:
    for data in (recipe.data, recipe.calibration, recipe.eval_data):
        if data and not is_embedded(data):
            yield data
    for code in (parse_metric(recipe.metric or "")[0], recipe.recovery.method):
        if code and is_reference(code):
            yield code
    if recipe.data_options.tokenizer:
        yield recipe.data_options.tokenizer
    for paths in recipe.engine_files.values():
        yield from paths


def _digest(name: str) -> str | None:
    path = Path(name.rpartition(":")[0] if is_reference(name) else name).expanduser()
    with storage_errors(f"the file {path}"):
        if path.is_file():
            return file_digest(path)
        if path.is_dir():
            return folder_digest({inner: file_digest(path / inner) for inner in files_below(path)})
    return None
