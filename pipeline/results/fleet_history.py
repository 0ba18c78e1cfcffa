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
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.fleet import Entry
from enginesmith.pipeline.results import comparison, documents
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.fleet import (
    FILE,
    RUNS,
    EntryChange,
    EntryRecord,
    FleetRecord,
    Last,
    Machine,
    read,
    winner,
)
from enginesmith.pipeline.results.run import Run, find_record


@dataclass(frozen=True)
class Earlier:
    """Hold an earlier fleet and its folder."""

    folder: Path
    record: FleetRecord

    def entry(self, name: str) -> EntryRecord | None:
        """Look up an entry by name."""
        return next((one for one in self.record.entries if one.name == name), None)

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
    here = out.absolute()
    others = (path for path in here.parent.glob(f"*/{FILE}") if path.parent != here)
    for _, path in sorted(filter(None, (_begun(path, begun) for path in others)), reverse=True):
        with contextlib.suppress(UsageError):  # of another version, perhaps, which is no reason to do nothing now
            return open_fleet(path.parent)
    return None


def _begun(path: Path, now: FleetRecord) -> tuple[str, Path] | None:
    """Return when a document's fleet was begun, if it can be compared with the present one."""
    try:
        values = documents.load(path)
        created, file, only = (str(values["created"]), values["file"], tuple(values["only"]))
        ended = bool(values["entries"]) and all(entry["status"] != "pending" for entry in values["entries"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    fits = ended and file == now.file and only in ((), now.only)
    return (created, path) if fits and created < now.created else None


def compare_entry(
    earlier: Earlier, name: str, folder: Path, now: Run | None, *, any_device: bool = False
) -> EntryChange:
    """Compare an entry whose run lies in ``folder`` with the same one of an earlier fleet."""
    entry = earlier.entry(name)
    if entry is None:
        return EntryChange(note="not in the last fleet")
    then = earlier.run(entry)
    if then is None:
        why = "its run is no longer there" if entry.run else f"there was no run: {entry.reason}"
        return EntryChange(winner=entry.winner and entry.winner.id, note=why)
    known = winner(then)
    found = EntryChange(winner=known and known.id, p50_ms=known and known.p50_ms)
    if now is None:
        return found.model_copy(update={"note": "there is no run now"})
    if folder.resolve() == (earlier.folder / str(entry.run)).resolve():
        return found.model_copy(update={"note": "taken over: nothing has changed"})
    if not any_device and (apart := comparison.compare_devices(then, now)):
        where = "; ".join(f"{one.name} was {one.before}, and is {one.after}" for one in apart)
        return found.model_copy(update={"note": f"other machine: {where}"})
    sides = [(earlier.folder / str(entry.run), then), (folder, now)]
    (pair,) = comparison.compare(sides, any_device=True).pairs
    winners = None
    if then.winner and now.winner and then.winner != now.winner:
        winners = comparison.compare_variants(then, now, find_record(then, then.winner), find_record(now, now.winner))
    return found.model_copy(update={"pair": pair, "winners": winners})


def name_last(earlier: Earlier, out: Path, only: Sequence[str], entries: Sequence[EntryRecord]) -> Last:
    """Name the earlier fleet in the record of the one in ``out``, made with ``only`` such patterns."""
    here = {one.name for one in entries}
    gone = () if only else tuple(one.name for one in earlier.record.entries if one.name not in here)
    return Last(path=path_from(out, earlier.folder), created=earlier.record.created, without=gone)


def path_from(out: Path, folder: Path) -> str:
    """Return a folder's path as the documents of another one name it."""
    return os.path.relpath(folder.resolve(), out.resolve())


def compare_fleets(earlier: Earlier, now: Earlier, *, any_device: bool = False) -> FleetRecord:
    """Compare a fleet with another one than when it was made."""
    entries = []
    for entry in now.record.entries:
        folder, run = now.folder / RUNS / entry.name, now.run(entry)
        found = compare_entry(earlier, entry.name, folder, run, any_device=any_device)
        entries.append(entry.model_copy(update={"since_last": found}))
    against = name_last(earlier, now.folder, now.record.only, entries)
    return now.record.model_copy(update={"entries": tuple(entries), "last": against})


@dataclass(frozen=True)
class State:
    """What an entry's recipe does not say of it."""

    model_sha256: str | None
    """None where it cannot be loaded."""
    files: Mapping[str, str]
    """Those that the recipe names, with their digests."""
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
    changed = (*_asked_otherwise(then, run, entry), *_made_otherwise(earlier.record.packages, then, run, state))
    return "; ".join(changed) or run


def _asked_otherwise(then: EntryRecord, run: Run, entry: Entry) -> Iterator[str]:
    if run.recipe != entry.recipe:
        yield f"its recipe changed: {', '.join(_fields(run, entry))}"
    place = entry.place
    now = Machine(device=place.device, accelerator=place.accelerator, resources=dict(place.resources))
    if then.machine != now:
        yield "its target changed"


def _made_otherwise(packages: Mapping[str, str], then: EntryRecord, run: Run, state: State) -> Iterator[str]:
    if state.model_sha256 is None:
        yield "its model cannot be loaded"
    elif run.model.sha256 != state.model_sha256:
        yield "its model changed"
    for name in _apart(then.files, state.files):
        yield f"{name} changed"
    for name in _apart(packages, state.packages):
        yield f"{name} {packages.get(name, 'none')} → {state.packages.get(name, 'none')}"


def _apart(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def _fields(run: Run, entry: Entry) -> list[str]:
    before, after = run.recipe, entry.recipe
    return [name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)]


def take_over(earlier: Earlier, name: str, folder: Path) -> None:
    """Have the run directory of an earlier fleet's entry stand in ``folder``, too.

    Raises:
        StoreError: the link cannot be made.
    """
    entry = earlier.entry(name)
    assert entry is not None
    assert entry.run is not None
    with storage_errors(f"the run directory {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            folder.unlink()
        source = (earlier.folder / entry.run).resolve()
        folder.symlink_to(os.path.relpath(source, folder.parent.resolve()), target_is_directory=True)


# Digests of the files that recipes name: the same name may hold other data the next time.


def digest_files(recipes: Sequence[Recipe]) -> list[dict[str, str]]:
    """Digest the files that each recipe names, by name; data sets, modules and metrics that are no files are left out.

    Modules that a named file imports are not looked at.

    Raises:
        StoreError: one is there and cannot be read.
    """
    known: dict[str, str | None] = {}
    found = []
    for recipe in recipes:
        names = dict.fromkeys(_named(recipe))
        known |= {name: _digest(name) for name in names if name not in known}
        found.append({name: digest for name in names if (digest := known[name])})
    return found


def _named(recipe: Recipe) -> Iterator[str]:
    for data in (recipe.calibration, recipe.eval_data):
        if data and not is_embedded(data):
            yield data
    for code in (recipe.metric, recipe.recovery.method):
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
