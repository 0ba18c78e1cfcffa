"""Define and read ``fleet.json``, and make the record of an entry.

A number that could not be had is null, and a reason stands beside it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from enginesmith.pipeline.errors import EnginesmithError, GateBreach, MissingCapability, UsageError, storage_errors
from enginesmith.pipeline.measure.statistics import TOO_NOISY, Interval
from enginesmith.pipeline.recipe.fleet import Entry, Fleet, remedy_of
from enginesmith.pipeline.results import documents
from enginesmith.pipeline.results.comparison import Pair, VariantComparison
from enginesmith.pipeline.results.run import Run, RunResult, VariantStatus, Verdict, find_record
from enginesmith.pipeline.results.verdicts import lacks_result, why_unknown

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
    cause: Literal["new", "run gone", "no run then", "no run now", "reused", "other machine"] | None = None
    """Why nothing is compared; None where something is."""
    note: str = ""
    """The sentence about that."""
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

    @property
    def why_without_result(self) -> str:
        """Explain why it came to nothing, beside a word such as "failed"; empty where its run has a result."""
        if self.status in ("done", "breached"):
            return ""
        if self.status == "lacking":
            return f"not available: {self.reason}"
        return self.reason or "it was not ended"


class Last(BaseModel, frozen=True):
    """The fleet that this one is held against."""

    path: str
    created: str
    without: tuple[str, ...] = ()
    """Entries that it had and this one has not."""


class FleetRecord(BaseModel, frozen=True, populate_by_name=True):
    """Describe the whole document."""

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

    def explain(error: OSError) -> UsageError:
        single = (folder / "run.json").is_file()
        message = f"there is no fleet in {folder}: {error.strerror}"
        return UsageError(f"{folder} is a single run, and a fleet is needed here" if single else message, _GIVE)

    record, unknown = documents.read(FleetRecord, path, SCHEMA, "optimize", explain)
    if to_go_on:
        unknown_settings = [name for name in unknown if name.startswith("fleet.")]
        documents.require_known(path, unknown_settings, "enginesmith optimize FLEET.yaml --out another folder")
    return record


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``fleet.json``."""
    return FleetRecord.model_json_schema(by_alias=True, mode="serialization")


# From a run, or why there is none, to the record of an entry.


def entry_record(entry: Entry, result: RunResult, folder: Path, siblings: Sequence[str] = ()) -> EntryRecord:
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
        machine=machine_of(entry),
        status=status,
        exit_code=exit_code,
        reason=reason,
        remedy=remedy_of(error) if error else "",
        run=f"{RUNS}/{entry.name}" if run else None,
        seconds=run.seconds if run else None,
        steps=result.steps or (len(run.steps) if run else 0),
        reused=result.reused if result.steps else sum(step.cached for step in run.steps) if run else 0,
        variants=dict(Counter(variant.status for variant in run.requested)) if run else {},
        winner=winner(run) if run else None,
        verdicts=run.verdicts if run else (),
        failures=tuple(_failures(result, folder, (entry.name, *siblings))),
        model_sha256=run.model.sha256 if run else None,
    )


def machine_of(entry: Entry) -> Machine:
    place = entry.place
    return Machine(device=place.device, accelerator=place.accelerator, resources=dict(place.resources))


def _status(result: RunResult) -> EntryStatus:
    run, error = result.run, result.error
    if error is not None:
        return "lacking" if isinstance(error, MissingCapability) else "failed"
    if run is None or not (result.ended or run.complete):
        return "pending"
    if run.winner is not None:
        return "done"
    if any(not verdict.passed for verdict in run.verdicts):
        return "breached"
    if not run.complete:
        return "lacking"
    return "failed" if lacks_result(run) else "done"


def winner(run: Run) -> Winner | None:
    """Summarize the winner of a run."""
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
        speedup=row.speedup if row and record.id != run.baseline.id and not row.speedup_disturbed else None,
        peak_bytes=record.peak_bytes,
        bytes=record.artifact.bytes if record.artifact else None,
        metric=record.quality.metric if record.quality else None,
        drop=record.quality.drop if record.quality else None,
        synthetic_calibration=record.synthetic_calibration,
    )
    missing = {field: budget for field, budget in _EXPLAINED_BY.items() if getattr(summary, field) is None}
    reasons = {field: why_unknown(record, budget, batch) for field, budget in missing.items()}
    if summary.speedup is None:
        why = TOO_NOISY if row and row.speedup_disturbed else "it was measured in too few rounds"
        few = row.reasons.get("speedup", why) if row else None
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


def _failures(result: RunResult, folder: Path, homes: Sequence[str]) -> Iterator[Failure]:
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
    for record in (run.baseline, *run.requested) if run else ():
        if record.status == "failed":
            log = logs.get(record.failed_step or "")
            yield Failure(variant=record.id, reason=record.reason, failure=record.failure, log=log)
