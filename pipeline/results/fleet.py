"""The document of a fleet: ``fleet.json``. A number that could not be had is null, and a reason stands beside it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from enginesmith.pipeline.errors import EnginesmithError, GateBreach, MissingCapability, UsageError, storage_errors
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe.fleet import Entry, Fleet, remedy_of
from enginesmith.pipeline.results import documents
from enginesmith.pipeline.results.comparison import Pair, VariantComparison
from enginesmith.pipeline.results.run import Run, VariantRecord, VariantStatus, Verdict, find_record
from enginesmith.pipeline.results.verdicts import why_unknown

SCHEMA: Literal["enginesmith.fleet/1"] = "enginesmith.fleet/1"
FILE = "fleet.json"
RUNS = "runs"
"""The folder with a run directory for each entry."""
_GIVE = "give a folder that `optimize fleet.yaml` wrote"

EntryStatus = Literal["done", "breached", "lacking", "failed", "pending"]
"""There is a usable engine; none holds the budgets; what it takes is not here; nothing usable came out; not ended."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Machine(_Part):
    """What a target asks for."""

    device: str
    accelerator: str = ""
    resources: dict[str, float] = {}


class Winner(_Part):
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
    """Whether ranges were taken from made-up data: then the drop says nothing of real data."""
    reasons: dict[str, str] = {}
    """Field that is null → why."""


class Failure(_Part):
    """A variant that came to nothing."""

    variant: str
    """Empty where it is the whole entry."""
    reason: str
    remedy: str = ""
    failure: str | None = None
    """Class of the failure, as in run.json."""
    log: str | None = None
    """The file that has the step's own words, from the fleet's folder; null where there is none."""


class EntryChange(_Part):
    """An entry beside the same one of the last fleet."""

    winner: str | None = None
    """The variant that won then."""
    p50_ms: float | None = None
    note: str = ""
    """Why nothing is compared, where that is so."""
    pair: Pair | None = None
    """Both runs; only where they were measured on the same kind of machine."""
    winners: VariantComparison | None = None
    """The winner then and the winner now, where those have different names."""

    @property
    def compared(self) -> tuple[VariantComparison, ...]:
        """Everything that stands beside what it was."""
        pairs = self.pair.variants if self.pair else ()
        return pairs + ((self.winners,) if self.winners else ())


class EntryRecord(_Part):
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
    """What had changed since the fleet that unchanged entries were to be taken from."""
    seconds: float | None = None
    steps: int = 0
    reused: int = 0
    """Of the steps, those whose results were there already, from the store or by another entry."""
    variants: dict[VariantStatus, int] = {}
    """How many ended in which way."""
    winner: Winner | None = None
    verdicts: tuple[Verdict, ...] = ()
    failures: tuple[Failure, ...] = ()
    model_sha256: str | None = None
    files: dict[str, str] = {}
    """Files that the recipe names → their digests."""
    since_last: EntryChange | None = None


class Last(_Part):
    """The fleet that this one is held against."""

    path: str
    created: str
    without: tuple[str, ...] = ()
    """Entries that it had and this one has not."""


class FleetRecord(_Part):
    """Hold the whole document."""

    schema_name: Literal["enginesmith.fleet/1"] = Field(SCHEMA, alias="schema")
    name: str
    file: str
    """The fleet file's name."""
    folder: str
    """Where it was begun: paths of models and data are taken from there."""
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

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    def having(self, status: EntryStatus) -> tuple[EntryRecord, ...]:
        """List the entries of a status."""
        return tuple(one for one in self.entries if one.status == status)

    @property
    def complete(self) -> bool:
        """Whether every entry has ended."""
        return not self.having("pending")

    @property
    def exit_code(self) -> int:
        """What the command line returns: the worst of all; wrong usage only where nothing else came of any."""
        codes = {one.exit_code for one in self.entries}
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
    path = folder / FILE
    write_text(path, record.model_dump_json(indent=1, by_alias=True) + "\n")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file that people read, whole or not at all.

    Raises:
        StoreError: the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    with storage_errors(f"the folder {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)


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
        found, unknown = documents.parse_known_fields(FleetRecord, values)
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
            "go on with the enginesmith that wrote it, or run optimize again",
        )
    return found


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``fleet.json``."""
    return FleetRecord.model_json_schema(by_alias=True, mode="serialization")


# From a run, or why there is none, to the record of an entry.


@dataclass(frozen=True)
class Found:
    """What came of an entry."""

    run: Run | None = None
    error: EnginesmithError | None = None
    """Why nothing usable came out, if so."""
    ended: bool = True
    """Whether all was done that can be done here; not so where the fleet was interrupted."""
    steps: int = 0
    reused: int = 0


def entry_record(entry: Entry, found: Found, folder: Path, siblings: Sequence[str] = ()) -> EntryRecord:
    """Make the record of an entry, whose run directory lies in the fleet's folder.

    ``siblings`` are the names of entries of the same model: the logs of steps that they share are with one of them.
    """
    run, status = found.run, _status(found)
    return EntryRecord(
        name=entry.name,
        model=entry.model_name,
        target=entry.target_name,
        source=entry.recipe.model,
        machine=Machine(
            device=entry.place.device, accelerator=entry.place.accelerator, resources=dict(entry.place.resources)
        ),
        status=status,
        exit_code=_exit_code(status, found.error),
        reason=_reason(found),
        remedy=remedy_of(found.error) if found.error else "",
        run=f"{RUNS}/{entry.name}" if run else None,
        seconds=run.seconds if run else None,
        steps=found.steps or (len(run.steps) if run else 0),
        reused=found.reused if found.steps else sum(one.cached for one in run.steps) if run else 0,
        variants=dict(Counter(one.status for one in run.variants)) if run else {},
        winner=winner(run) if run else None,
        verdicts=run.verdicts if run else (),
        failures=tuple(_failures(found, folder, (entry.name, *siblings))),
        model_sha256=run.model.sha256 if run else None,
    )


def _status(found: Found) -> EntryStatus:
    run, error = found.run, found.error
    if error is not None:
        return "lacking" if isinstance(error, MissingCapability) else "failed"
    if run is None or not (found.ended or run.complete):
        return "pending"
    if run.winner is not None:
        return "done"
    if any(not one.passed for one in run.verdicts):
        return "breached"
    return "done" if run.complete else "lacking"


def _exit_code(status: EntryStatus, error: EnginesmithError | None) -> int:
    if status == "failed":
        return UsageError.exit_code if isinstance(error, UsageError) else EnginesmithError.exit_code
    return {"breached": GateBreach.exit_code, "lacking": MissingCapability.exit_code}.get(status, 0)


def _reason(found: Found) -> str:
    if found.error is not None:
        return found.error.message
    if found.run is None:
        return "not begun"
    return "" if found.run.winner is not None else found.run.winner_reason


def winner(run: Run) -> Winner | None:
    """Summarise the winner of a run."""
    if run.winner is None:
        return None
    record, batch = find_record(run, run.winner), run.deciding_batch
    row = record.row(batch)
    found = Winner(
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
    return found.model_copy(update={"reasons": dict(_why(run, record, found))})


def _why(run: Run, record: VariantRecord, found: Winner) -> Iterator[tuple[str, str]]:
    budgets = {"p50_ms": "max_latency_ms", "p99_ms": "max_p99_ms", "peak_bytes": "max_memory_bytes"}
    budgets |= {"bytes": "max_size_bytes", "drop": "max_drop"}
    for field, budget in budgets.items():
        if getattr(found, field) is None:
            yield field, why_unknown(record, budget, found.batch)
    if found.metric is None:
        yield "metric", why_unknown(record, "max_drop", found.batch)
    if found.speedup is None:
        row = record.row(found.batch)
        told = row.reasons.get("speedup", "it was measured in too few rounds") if row else found.reasons.get("p50_ms")
        itself = record.id == run.baseline.id
        yield "speedup", "it is the baseline" if itself else told or why_unknown(record, "max_latency_ms", found.batch)


def _failures(found: Found, folder: Path, homes: Sequence[str]) -> Iterator[Failure]:
    """List the entry's own failure, then those of its variants."""
    run = found.run
    broken = [one.id for one in run.steps if one.status == "failed"] if run else []
    if found.error is not None:
        log = next((log for step in broken if (log := _log(folder, homes, step))), None)
        kind = found.error.failure or None
        yield Failure(variant="", reason=found.error.message, remedy=remedy_of(found.error), failure=kind, log=log)
    for record in run.records if run else ():
        if record.status == "failed":
            step = next((one for one in broken if record.reason.startswith(f"{one}: ")), None)
            log = _log(folder, homes, step) if step else None
            yield Failure(variant=record.id, reason=record.reason, failure=record.failure, log=log)


def _log(folder: Path, homes: Sequence[str], step: str) -> str | None:
    """Find a step's log in the first of the run directories that has it; the path is from the fleet's folder."""
    names = (f"{RUNS}/{home}/logs/{step}.log" for home in homes)
    return next((name for name in names if (folder / name).is_file()), None)
