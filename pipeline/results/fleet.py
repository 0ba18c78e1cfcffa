"""Define and read ``fleet.json``, make the record of an entry, and compare a fleet with earlier ones.

A number that could not be had is null, and a reason stands beside it.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from enginesmith.calibration.file_formats import is_embedded
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import file_digest, files_below, folder_digest
from enginesmith.pipeline.errors import EnginesmithError, GateBreach, MissingCapability, UsageError, storage_errors
from enginesmith.pipeline.measure.quality import parse_metric
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.fleet import Entry, Fleet, remedy_of
from enginesmith.pipeline.results import comparison, documents
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.comparison import Pair, VariantComparison
from enginesmith.pipeline.results.run import Run, VariantStatus, Verdict, find_record
from enginesmith.pipeline.results.verdicts import why_unknown

SCHEMA: Literal["enginesmith.fleet/1"] = "enginesmith.fleet/1"
FILE = "fleet.json"
RUNS = "runs"
"""The folder with a run directory for each entry."""
_GIVE = "give a folder that `optimize fleet.yaml` wrote"

EntryStatus = Literal["done", "breached", "lacking", "failed", "pending"]
"""There is a usable engine; none holds the budgets; what it takes is not here; nothing usable came out; not ended."""


class Machine(BaseModel, frozen=True):
    """The device that a target asks for."""

    device: str
    accelerator: str = ""
    resources: dict[str, float] = {}


class Winner(BaseModel, frozen=True):
    """The variant that won, with the numbers that decide; latency is that of the deciding batch."""

    id: str
    engine: str
    precision: str
    batch: int
    p50_ms: float | None = None
    p99_ms: float | None = None
    speedup: Interval | None = None
    peak_bytes: int | None = None
    bytes: int | None = None
    metric: str | None = None
    drop: float | None = None
    synthetic_calibration: bool = False
    """True where ranges were taken from made-up data: then the drop says nothing of real data."""
    reasons: dict[str, str] = {}
    """Field that is null → why."""


class Failure(BaseModel, frozen=True):
    """A variant that came to nothing."""

    variant: str
    """Empty where it is the whole entry."""
    reason: str
    remedy: str = ""
    failure: str | None = None
    """Class of the failure, as in run.json."""
    log: str | None = None
    """The file that has the step's own words, from the fleet's folder; null where there is none."""


class EntryChange(BaseModel, frozen=True):
    """An entry beside the same one of the last fleet."""

    winner: str | None = None
    """The variant that won then."""
    p50_ms: float | None = None
    note: str = ""
    """The reason why nothing is compared, if so."""
    pair: Pair | None = None
    """Both runs; only where they were measured on the same kind of machine."""
    winners: VariantComparison | None = None
    """The winner then and the winner now, where those have different names."""

    @property
    def compared(self) -> tuple[VariantComparison, ...]:
        """Variants beside what they were."""
        pairs = self.pair.variants if self.pair else ()
        return pairs + ((self.winners,) if self.winners else ())


class EntryRecord(BaseModel, frozen=True):
    """One model for one target, and what came of it."""

    name: str
    model: str
    target: str
    source: str
    """MODEL, as on the command line."""
    machine: Machine
    status: EntryStatus
    exit_code: int
    reason: str = ""
    remedy: str = ""
    run: str | None = None
    """Its run directory, from the fleet's folder; null where nothing was begun."""
    taken_from: str | None = None
    """The run directory of an earlier fleet that stands for it, as nothing has changed since."""
    done_because: str = ""
    """Changes since the fleet that unchanged entries were to be taken from."""
    seconds: float | None = None
    steps: int = 0
    reused: int = 0
    """Number of the steps whose results were there already, from the store or by another entry."""
    variants: dict[VariantStatus, int] = {}
    """Number of variants by how they ended."""
    winner: Winner | None = None
    verdicts: tuple[Verdict, ...] = ()
    failures: tuple[Failure, ...] = ()
    model_sha256: str | None = None
    files: dict[str, str] = {}
    """Files that the recipe names → their digests."""
    since_last: EntryChange | None = None


class Last(BaseModel, frozen=True):
    """The fleet that this one is held against."""

    path: str
    created: str
    without: tuple[str, ...] = ()
    """Entries that it had and this one has not."""


class FleetRecord(BaseModel, frozen=True, populate_by_name=True):
    """Hold the whole document."""

    schema_name: Literal["enginesmith.fleet/1"] = Field(SCHEMA, alias="schema")
    name: str
    file: str
    """The fleet file's name."""
    folder: str
    """The folder where it was begun: paths of models and data are taken from there."""
    created: str
    seconds: float
    fleet: Fleet
    only: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    """Fields of the recipe that were given for all entries."""
    changed_since: str | None = None
    """The earlier fleet that unchanged entries are taken from."""
    packages: dict[str, str] = {}
    """Versions, where it was begun."""
    last: Last | None = None
    entries: tuple[EntryRecord, ...]

    def having(self, status: EntryStatus) -> tuple[EntryRecord, ...]:
        """List the entries of a status."""
        return tuple(entry for entry in self.entries if entry.status == status)

    @property
    def complete(self) -> bool:
        """Tell whether every entry has ended."""
        return not self.having("pending")

    @property
    def exit_code(self) -> int:
        """Choose the exit code: the worst of all; wrong usage only where nothing else came of any."""
        codes = {entry.exit_code for entry in self.entries}
        if codes == {UsageError.exit_code}:
            return UsageError.exit_code
        order = (1, UsageError.exit_code, GateBreach.exit_code, MissingCapability.exit_code)
        worst = next((code for code in order if code in codes), 0)
        return 1 if worst == UsageError.exit_code else worst


def write(record: FleetRecord, folder: Path) -> Path:
    """Write ``fleet.json``, whole or not at all.

    Raises:
        StoreError: the folder cannot be written.
    """
    write_text(folder / FILE, record.model_dump_json(indent=1, by_alias=True) + "\n")
    return folder / FILE


def write_text(path: Path, text: str) -> None:
    """Write a file that people read, whole or not at all.

    Raises:
        StoreError: the folder cannot be written.
    """
    with storage_errors(f"the folder {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        documents.write_text(path, text)


def is_fleet(folder: Path) -> bool:
    """Tell whether a path is a fleet's folder, or the document in it."""
    return (folder / FILE).is_file() or (folder.name == FILE and folder.is_file())


def read(folder: Path, *, to_go_on: bool = False) -> FleetRecord:
    """Read ``fleet.json`` of a fleet's folder; ``to_go_on`` is for doing what it asks for, which has to be known then.

    Raises:
        UsageError: there is none, or it is damaged, or of another schema.
    """
    path = folder / FILE if folder.is_dir() else folder
    try:
        values = documents.load(path)
        documents.check_schema(path, values, SCHEMA, "optimize")
        record, unknown = documents.parse_known_fields(FleetRecord, values)
    except OSError as error:
        if (folder / "run.json").is_file():
            raise UsageError(f"{folder} is a single run, and a fleet is needed here", _GIVE) from error
        raise UsageError(f"there is no fleet in {folder}: {error.strerror}", _GIVE) from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}", "run optimize again") from error
    asked = [name for name in unknown if name.startswith("fleet.")]
    if to_go_on and asked:
        raise UsageError(
            f"{path} asks for what this version does not know: {', '.join(asked)}",
            "use the version of enginesmith that wrote it, or run optimize again",
        )
    return record


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``fleet.json``."""
    return FleetRecord.model_json_schema(by_alias=True, mode="serialization")


# From a run, or why there is none, to the record of an entry.


@dataclass(frozen=True)
class Found:
    """The outcome of an entry."""

    run: Run | None = None
    error: EnginesmithError | None = None
    """The reason why nothing usable came out, if so."""
    ended: bool = True
    """True where all was done that can be done here; not so where the fleet was interrupted."""
    steps: int = 0
    reused: int = 0


def entry_record(entry: Entry, result: Found, folder: Path, siblings: Sequence[str] = ()) -> EntryRecord:
    """Make the record of an entry, whose run directory lies in the fleet's folder.

    ``siblings`` are the names of entries of the same model: the logs of steps that they share are with one of them.
    """
    run, error, status = result.run, result.error, _status(result)
    exit_code = {"breached": GateBreach.exit_code, "lacking": MissingCapability.exit_code}.get(status, 0)
    if status == "failed":
        exit_code = UsageError.exit_code if isinstance(error, UsageError) else EnginesmithError.exit_code
    reason = error.message if error else "not begun"
    if run and not error:
        reason = "" if run.winner is not None else run.winner_reason
    return EntryRecord(
        name=entry.name,
        model=entry.model_name,
        target=entry.target_name,
        source=entry.recipe.model,
        machine=_machine(entry),
        status=status,
        exit_code=exit_code,
        reason=reason,
        remedy=remedy_of(error) if error else "",
        run=f"{RUNS}/{entry.name}" if run else None,
        seconds=run.seconds if run else None,
        steps=result.steps or (len(run.steps) if run else 0),
        reused=result.reused if result.steps else sum(step.cached for step in run.steps) if run else 0,
        variants=dict(Counter(variant.status for variant in run.variants)) if run else {},
        winner=winner(run) if run else None,
        verdicts=run.verdicts if run else (),
        failures=tuple(_failures(result, folder, (entry.name, *siblings))),
        model_sha256=run.model.sha256 if run else None,
    )


def _machine(entry: Entry) -> Machine:
    place = entry.place
    return Machine(device=place.device, accelerator=place.accelerator, resources=dict(place.resources))


def _status(result: Found) -> EntryStatus:
    run, error = result.run, result.error
    if error is not None:
        return "lacking" if isinstance(error, MissingCapability) else "failed"
    if run is None or not (result.ended or run.complete):
        return "pending"
    if run.winner is not None:
        return "done"
    if any(not verdict.passed for verdict in run.verdicts):
        return "breached"
    return "done" if run.complete else "lacking"


def winner(run: Run) -> Winner | None:
    """Summarise the winner of a run."""
    if run.winner is None:
        return None
    record, batch = find_record(run, run.winner), run.deciding_batch
    row = record.row(batch)
    summary = Winner(
        id=record.id,
        engine=record.engine,
        precision=record.precision,
        batch=batch,
        p50_ms=row.p50_ms if row else None,
        p99_ms=row.p99_ms if row else None,
        speedup=row.speedup if row and record.id != run.baseline.id else None,
        peak_bytes=record.peak_bytes,
        bytes=record.artifact.bytes if record.artifact else None,
        metric=record.quality.metric if record.quality else None,
        drop=record.quality.drop if record.quality else None,
        synthetic_calibration=record.synthetic_calibration,
    )
    missing = {field: budget for field, budget in _EXPLAINED_BY.items() if getattr(summary, field) is None}
    reasons = {field: why_unknown(record, budget, batch) for field, budget in missing.items()}
    if summary.speedup is None:
        few = row.reasons.get("speedup", "it was measured in too few rounds") if row else None
        itself = record.id == run.baseline.id
        reasons["speedup"] = "it is the baseline" if itself else few or why_unknown(record, "max_latency_ms", batch)
    return summary.model_copy(update={"reasons": reasons})


_EXPLAINED_BY = {
    "p50_ms": "max_latency_ms",
    "p99_ms": "max_p99_ms",
    "peak_bytes": "max_memory_bytes",
    "bytes": "max_size_bytes",
    "drop": "max_drop",
    "metric": "max_drop",
}
"""Number of a winner → the budget that explains why it is missing."""


def _failures(result: Found, folder: Path, homes: Sequence[str]) -> Iterator[Failure]:
    """List the entry's own failure, then those of its variants, each with the log of the step that failed.

    A log is in the first of the run directories that has it; its path is from the fleet's folder.
    """
    run, logs = result.run, dict[str, str]()
    for step in [step.id for step in run.steps if step.status == "failed"] if run else []:
        names = (f"{RUNS}/{home}/logs/{step}.log" for home in homes)
        if name := next((name for name in names if (folder / name).is_file()), None):
            logs[step] = name
    if result.error is not None:
        kind, log = result.error.failure or None, next(iter(logs.values()), None)
        yield Failure(variant="", reason=result.error.message, remedy=remedy_of(result.error), failure=kind, log=log)
    for record in run.records if run else ():
        if record.status == "failed":
            log = next((log for step, log in logs.items() if record.reason.startswith(f"{step}: ")), None)
            yield Failure(variant=record.id, reason=record.reason, failure=record.failure, log=log)


# Compare a fleet with earlier ones, and find the entries that need not be done again.


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
        return EntryChange(note="not in the last fleet")
    then = earlier.run(entry)
    if then is None:
        why = "its run is no longer there" if entry.run else f"there was no run: {entry.reason}"
        return EntryChange(winner=entry.winner and entry.winner.id, note=why)
    known = winner(then)
    change = EntryChange(winner=known and known.id, p50_ms=known and known.p50_ms)
    if now is None:
        return change.model_copy(update={"note": "there is no run now"})
    if folder.resolve() == (earlier.folder / str(entry.run)).resolve():
        return change.model_copy(update={"note": "reused: nothing has changed"})
    if not any_device and (apart := comparison.compare_devices(then, now)):
        where = "; ".join(f"{figure.name} was {figure.before}, and is {figure.after}" for figure in apart)
        return change.model_copy(update={"note": f"other machine: {where}"})
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


def compare_fleets(earlier: Earlier, now: Earlier, *, any_device: bool = False) -> FleetRecord:
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

    model_sha256: str | None
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
    return "; ".join(_list_changes(earlier.record.packages, then, run, entry, state)) or run


def _list_changes(packages: Mapping[str, str], then: EntryRecord, run: Run, entry: Entry, now: State) -> Iterator[str]:
    before, after = run.recipe, entry.recipe
    if before != after:
        fields = [name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)]
        yield f"its recipe changed: {', '.join(fields)}"
    if then.machine != _machine(entry):
        yield "its target changed"
    if now.model_sha256 is None:
        yield "its model cannot be loaded"
    elif run.model.sha256 != now.model_sha256:
        yield "its model changed"
    for name in sorted({*then.files, *now.files}):
        if then.files.get(name) != now.files.get(name):
            yield f"{name} changed"
    for name in sorted({*packages, *now.packages}):
        if packages.get(name) != now.packages.get(name):
            yield f"{name} {packages.get(name, 'none')} → {now.packages.get(name, 'none')}"


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
    for data in (recipe.calibration, recipe.eval_data):
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
