"""A gate for each entry of a fleet, against the same entry of a fleet that is the baseline, where one is given."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from enginesmith.pipeline import baseline as baselines
from enginesmith.pipeline import gate as gates
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.fleet import earlier
from enginesmith.pipeline.fleet.earlier import Earlier
from enginesmith.pipeline.fleet.record import RUNS, EntryRecord
from enginesmith.pipeline.gate import Demands
from enginesmith.pipeline.judgement import FleetGate, Gate, GateCheck
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.making import parsed


def gate(folder: Path, demands_of: Callable[[Recipe], Demands], baseline: Path | None = None) -> FleetGate:
    """Judge every entry; one that came to nothing is broken, as nothing is known of it.

    Raises:
        UsageError: one of the folders holds no fleet, or the demands make no sense for a recipe.
    """
    fleet = earlier.opened(folder)
    before = earlier.opened(baseline) if baseline else None
    found = {one.name: _entry(fleet, one, demands_of, before) for one in fleet.record.entries}
    return FleetGate(
        fleet=str(folder),
        baseline=None if baseline is None else str(baseline),
        passed=all(one.passed for one in found.values()),
        entries=found,
    )


def keep(folder: Path, target: Path) -> None:
    """Make a fleet, of which every entry passed, the baseline in the folder ``target``.

    Raises:
        UsageError: there is something else in that folder.
        StoreError: it cannot be written.
    """
    fleet = earlier.opened(folder)
    winners = {one.name: gates.stored_in(fleet.folder / str(one.run), None) for one in fleet.record.entries}
    baselines.keep_fleet(fleet, {name: found for name, found in winners.items() if found}, target)


def _entry(fleet: Earlier, entry: EntryRecord, demands_of: Callable[[Recipe], Demands], before: Earlier | None) -> Gate:
    run, then = fleet.run(entry), before.entry(entry.name) if before else None
    demands = demands_of(run.recipe if run else parsed({"model": entry.source}))
    named = replace(demands, progress=lambda text: demands.progress(f"{entry.name}: {text}"))
    kept = before.folder / then.run if before and then and then.run else None
    where = fleet.folder / RUNS / entry.name

    def broken(text: str) -> Gate:
        verdict = GateCheck(name="status", against="run", passed=False, text=text)
        return Gate(run=str(where), variant=None, tolerance=demands.tolerance, passed=False, verdicts=(verdict,))

    if entry.status not in ("done", "breached"):  # whatever its run directory has so far
        return broken(f"{entry.status}: {entry.reason or 'it was not ended'}")
    try:
        found = gates.gate(where, named, baseline=kept)
    except UsageError as error:  # of this entry; the others have their own
        return broken(error.message)
    alone = ("the baseline has no run of it",) if before and kept is None else ()
    return found.model_copy(update={"cautions": (*found.cautions, *alone)})
