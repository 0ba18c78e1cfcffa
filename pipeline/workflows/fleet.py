"""Carry out and judge fleets: a fleet file in, a folder with a run directory for each entry and their report out.

It can be interrupted anywhere and done again from there.
"""

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginesmith.pipeline.engines import environment
from enginesmith.pipeline.errors import UsageError, storage_errors
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.fleet import Entry, read
from enginesmith.pipeline.recipe.parsing import parsed
from enginesmith.pipeline.report import fleet as files
from enginesmith.pipeline.results import earlier_fleet
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results import gate as gates
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.earlier_fleet import Earlier
from enginesmith.pipeline.results.fleet import RUNS, EntryRecord, FleetRecord, entry_record
from enginesmith.pipeline.results.gate import Demands
from enginesmith.pipeline.results.gate_report import FleetGate, Gate, GateCheck
from enginesmith.pipeline.results.run import Run, RunResult
from enginesmith.pipeline.units import name_some
from enginesmith.pipeline.workflows import optimize as job
from enginesmith.pipeline.workflows.request import RunRequest, has_all_results
from enginesmith.pipeline.workflows.run_directory import lock_folder


def optimize(
    file: Path,
    out: Path,
    settings: Settings | None = None,
    *,
    only: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
    changed_since: Path | None = None,
) -> FleetRecord:
    """Do all that a fleet file asks for; what fails is told in the record, and stops nothing else.

    Patterns of model@target, models or targets select entries; ``options`` are fields of the recipe that all get.
    Entries of the fleet ``changed_since`` stand for those that have not changed.

    Raises:
        UsageError: the file makes no sense, or the folder holds another fleet.
        EnginesmithError: nothing could be begun at all.
    """
    fleet, out = read(file), out.absolute()
    entries = fleet.entries(only, options)
    since = earlier_fleet.open_fleet(changed_since) if changed_since else None
    with lock_folder(out):
        begun = FleetRecord(
            name=out.name,
            file=file.name,
            folder=str(Path.cwd()),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            seconds=0.0,
            fleet=fleet,
            only=only,
            options=dict(options or {}),
            changed_since=earlier_fleet.path_from(out, since.folder) if since else None,
            packages=environment().packages,
            entries=(),
        )
        if (out / "run.json").exists():
            raise UsageError(f"{out} holds the run of a single model", "choose another --out")
        if records.is_fleet(out):
            begun = _read_same(out, begun)
        return _run_entries(begun, entries, out, settings or Settings())


def resume(
    out: Path, settings: Settings | None = None, notify: Callable[[str], object] = lambda _: None
) -> FleetRecord:
    """Do what is missing of a fleet: run the entries that failed, were interrupted, or lacked something.

    Finished ones are left as they are, whichever machine made them, unless their model, data or recipe has changed;
    ``notify`` is told which ones. Of a finished fleet, what is missing is at most reports.

    Raises:
        UsageError: there is no fleet there. Errors as in :func:`optimize` besides.
    """
    out, settings = (out if out.is_dir() else out.parent).absolute(), settings or Settings()
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_folder(out))
        begun = records.read(out)
        finished = _find_finished(begun, out) if settings.reuse else {}
        if begun.entries and len(finished) == len(begun.entries):
            files.write_outdated(out)
            notify(job.NOTHING_LEFT.format(out))
            return begun
        begun = records.read(out, to_go_on=True).model_copy(update={"packages": environment().packages})
        if Path(begun.folder).is_dir():
            stack.enter_context(contextlib.chdir(begun.folder))
        entries = begun.fleet.entries(begun.only, begun.options)
        return _run_entries(begun, entries, out, settings, finished, notify)


def _find_finished(record: FleetRecord, out: Path) -> dict[str, Run]:
    """Find the entries whose own run has all results; a link to a run of an earlier fleet may lead elsewhere later."""
    finished = {}
    for entry in record.entries:
        folder = out / RUNS / entry.name
        if entry.run and entry.status in ("done", "breached") and not folder.is_symlink():
            with contextlib.suppress(UsageError):  # its record is gone or damaged: the entry is run again
                run = runs.read(folder)
                if has_all_results(run, folder):
                    finished[entry.name] = run
    return finished


_MOST_NAMED = 12
_PARTS = {
    "file": "file",
    "fleet": "content of the file",
    "only": "--only",
    "options": "choice of options",
    "changed_since": "--changed-since",
}
"""Fields by which a fleet is known again, in people's words."""


def _read_same(out: Path, record: FleetRecord) -> FleetRecord:
    """Read the record of a fleet that was begun in the folder, if it is the one that is asked for."""
    before = records.read(out, to_go_on=True)
    for name, words in _PARTS.items():
        if getattr(before, name) != getattr(record, name):
            raise UsageError(
                f"{out} holds another fleet: it was made with another {words}",
                f"choose another --out, or continue that one with `enginesmith resume {out}`",
            )
    return before.model_copy(update={"packages": record.packages})


def _run_entries(
    begun: FleetRecord,
    entries: Sequence[Entry],
    out: Path,
    settings: Settings,
    finished: Mapping[str, Run] | None = None,
    notify: Callable[[str], object] = lambda _: None,
) -> FleetRecord:
    work = _ActiveFleet(begun, entries, out)
    records.write(work.record(), out)
    try:
        work.take_over(settings)
        for sentence in work.leave_finished(finished or {}, settings):
            notify(sentence)
        work.found |= job.optimize_all(work.requests(), settings)
    finally:
        record = work.record()
        files.write(record, out, {name: outcome.run for name, outcome in work.found.items() if outcome.run})
    return record


class _ActiveFleet:
    """A fleet on its way."""

    def __init__(self, begun: FleetRecord, entries: Sequence[Entry], out: Path) -> None:
        self._begun, self._entries, self._out = begun, entries, out
        self._started = time.monotonic()
        self._files = earlier_fleet.digest_files([entry.recipe for entry in entries])
        known = begun.changed_since or (begun.last.path if begun.last else None)
        named = known is not None and records.is_fleet(out / known)
        self._last = earlier_fleet.open_fleet(out / str(known)) if named else earlier_fleet.find_last(out, begun)
        """The fleet to compare with: the named one, or the one that it was compared with before, or the newest."""
        self.found: dict[str, RunResult] = {}
        """By name, the results of entries that have ended."""
        self._because: dict[str, str] = {}
        """By entry, what has changed since that fleet."""

    def take_over(self, settings: Settings) -> None:
        """Let entries stand that have not changed since the earlier fleet, if one was named."""
        if self._begun.changed_since is None:
            return
        since = earlier_fleet.open_fleet(self._out / self._begun.changed_since)
        models = job.identify_models([self._request(entry) for entry in self._entries], settings)
        for entry, named in zip(self._entries, self._files, strict=True):
            state = earlier_fleet.State(models.get(entry.name), named, self._begun.packages)
            earlier = earlier_fleet.find_unchanged(since, entry, state)
            folder = self._out / RUNS / entry.name
            if isinstance(earlier, str):
                self._because[entry.name] = earlier
            elif folder.is_symlink() or not folder.exists():  # not what was done here before it was interrupted
                earlier_fleet.take_over(since, entry.name, folder)
                self.found[entry.name] = RunResult(earlier, steps=len(earlier.steps), reused=len(earlier.steps))

    def leave_finished(self, finished: Mapping[str, Run], settings: Settings) -> Iterator[str]:
        """Leave entries as they are whose runs are finished and of what they are now; yields sentences about them."""
        entries = [entry for entry in self._entries if entry.name in finished and entry.name not in self.found]
        if not entries:
            return
        before = {entry.name: entry for entry in self._begun.entries}
        files = dict(zip((entry.name for entry in self._entries), self._files, strict=True))
        models = job.identify_models([self._request(entry) for entry in entries], settings)
        for entry in entries:
            run = finished[entry.name]
            state = earlier_fleet.State(models.get(entry.name), files[entry.name], self._begun.packages)
            if changes := "; ".join(earlier_fleet.list_changes(before[entry.name], run, entry, state)):
                yield f"{entry.name} is run again: {changes}"
            else:
                self.found[entry.name] = RunResult(run, steps=len(run.steps), reused=len(run.steps))
        if left := [entry.name for entry in entries if entry.name in self.found]:
            names = name_some(left, _MOST_NAMED)
            yield f"left as they are, since they are finished: {names}; --no-cache runs all again"

    def requests(self) -> list[RunRequest]:
        """List the runs that are to be made; none of them in the folder of an earlier fleet."""
        left = [entry for entry in self._entries if entry.name not in self.found]
        for entry in left:
            folder = self._out / RUNS / entry.name
            with storage_errors(f"the run directory {folder}"):
                folder.unlink() if folder.is_symlink() else None
        return [self._request(entry) for entry in left]

    def _request(self, entry: Entry) -> RunRequest:
        return RunRequest(entry.name, entry.recipe, self._out / RUNS / entry.name, entry.place, self._out)

    def record(self) -> FleetRecord:
        """Make the record of the fleet as it is now."""
        entries = tuple(map(self._entry, self._entries, self._files))
        return self._begun.model_copy(
            update={
                "seconds": round(self._begun.seconds + time.monotonic() - self._started, 3),
                "entries": entries,
                "last": self._last and earlier_fleet.name_last(self._last, self._out, self._begun.only, entries),
            }
        )

    def _entry(self, entry: Entry, named: Mapping[str, str]) -> EntryRecord:
        folder, change = self._out / RUNS / entry.name, None
        interrupted = runs.read(folder) if (folder / "run.json").is_file() else None
        state = self.found.get(entry.name) or RunResult(interrupted, ended=False)
        siblings = [
            sibling.name
            for sibling in self._entries
            if sibling.recipe.model == entry.recipe.model and sibling is not entry
        ]
        record = entry_record(entry, state, self._out, siblings)
        if self._last is not None and record.status != "pending":
            change = earlier_fleet.compare_entry(self._last, entry.name, folder, state.run)
        return record.model_copy(
            update={
                "files": dict(named),
                "taken_from": earlier_fleet.path_from(self._out, folder) if folder.is_symlink() else None,
                "done_because": self._because.get(entry.name, ""),
                "since_last": change,
            }
        )


def gate(folder: Path, demands_of: Callable[[Recipe], Demands], baseline: Path | None = None) -> FleetGate:
    """Judge every entry, against that of a baseline fleet if given; one that came to nothing fails.

    Raises:
        UsageError: one of the folders holds no fleet, or the demands make no sense for a recipe.
    """
    fleet = earlier_fleet.open_fleet(folder)
    before = earlier_fleet.open_fleet(baseline) if baseline else None
    entries = {entry.name: _judge(fleet, entry, demands_of, before) for entry in fleet.record.entries}
    if before and not fleet.record.only:
        gone = (entry for entry in before.record.entries if entry.name not in entries)
        entries |= {entry.name: _tell_missing(fleet, entry, demands_of) for entry in gone}
    return FleetGate(fleet=str(folder), baseline=None if baseline is None else str(baseline), entries=entries)


def keep(folder: Path, target: Path) -> None:
    """Make a fleet, of which every entry passed, the baseline in the folder ``target``.

    Raises:
        UsageError: there is something else in that folder.
        StoreError: it cannot be written.
    """
    fleet = earlier_fleet.open_fleet(folder)
    winners = {entry.name: gates.stored_in(fleet.folder / str(entry.run), None) for entry in fleet.record.entries}
    gates.keep_fleet(fleet, {name: winner for name, winner in winners.items() if winner}, target)


def _tell_missing(fleet: Earlier, entry: EntryRecord, demands_of: Callable[[Recipe], Demands]) -> Gate:
    """Report an entry that only the baseline has: what was judged with it is no longer."""
    demands = demands_of(parsed({"model": entry.source}))
    text = "the baseline has this entry, and the fleet does not"
    check = GateCheck(name="status", against="baseline", state="unjudged", required=demands.strict, text=text)
    where = str(fleet.folder / RUNS / entry.name)
    return Gate(run=where, variant=None, tolerance=demands.tolerance, verdicts=(check,))


def _judge(fleet: Earlier, entry: EntryRecord, demands_of: Callable[[Recipe], Demands], before: Earlier | None) -> Gate:
    run, then = fleet.run(entry), before.entry(entry.name) if before else None
    demands = demands_of(run.recipe if run else parsed({"model": entry.source}))
    named = replace(demands, progress=lambda text: demands.progress(f"{entry.name}: {text}"))
    baseline = before.folder / then.run if before and then and then.run else None
    where = fleet.folder / RUNS / entry.name

    def fail(text: str) -> Gate:
        check = GateCheck(name="status", against="run", state="failed", text=text)
        return Gate(run=str(where), variant=None, tolerance=demands.tolerance, verdicts=(check,))

    if entry.why_without_result:  # whatever its run directory has so far
        return fail(entry.why_without_result)
    try:
        result = gates.gate(where, named, baseline=baseline)
    except UsageError as error:  # of this entry; the others have their own
        return fail(error.message)
    alone = ("the baseline has no run of it",) if before and baseline is None else ()
    return result.model_copy(update={"cautions": (*result.cautions, *alone)})
