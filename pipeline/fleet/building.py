"""From a run, or why there is none, to the record of an entry."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginesmith.pipeline.budgets import why_unknown
from enginesmith.pipeline.errors import EnginesmithError, GateBreach, MissingCapability, UsageError
from enginesmith.pipeline.fleet.file import Entry
from enginesmith.pipeline.fleet.record import RUNS, EntryRecord, EntryStatus, Failure, Machine, Winner
from enginesmith.pipeline.fleet.wording import remedy_of
from enginesmith.pipeline.run import Run, VariantRecord, named


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
    """The record of an entry, whose run directory lies in the fleet's folder.

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
    """The winner of a run, in short."""
    if run.winner is None:
        return None
    record, batch = named(run, run.winner), run.deciding_batch
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
    """The entry's own, then those of its variants."""
    run = found.run
    broken = [one.id for one in run.steps if one.status == "failed"] if run else []
    if found.error is not None:
        log = next((log for step in broken if (log := _log(folder, homes, step))), None)
        kind = found.error.failure or None
        yield Failure(variant="", reason=found.error.message, remedy=remedy_of(found.error), failure=kind, log=log)
    for record in (run.baseline, *run.variants) if run else ():
        if record.status == "failed":
            step = next((one for one in broken if record.reason.startswith(f"{one}: ")), None)
            log = _log(folder, homes, step) if step else None
            yield Failure(variant=record.id, reason=record.reason, failure=record.failure, log=log)


def _log(folder: Path, homes: Sequence[str], step: str) -> str | None:
    """The step's log from the fleet's folder, in the first of the run directories that has it."""
    names = (f"{RUNS}/{home}/logs/{step}.log" for home in homes)
    return next((name for name in names if (folder / name).is_file()), None)
