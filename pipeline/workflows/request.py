"""Request a run, and find out what an earlier one in its folder leaves to be done."""

from dataclasses import dataclass, replace
from pathlib import Path

from enginesmith.pipeline.artifact import has_content, has_files
from enginesmith.pipeline.engines import environment
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.measure.rows import SAMPLES, RaceRow
from enginesmith.pipeline.planning.variants import ResolvedRecipe, resolve_recipe
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.recipe.recipe import LEAST_SECONDS
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.differences import Changed, compare_devices, compare_packages
from enginesmith.pipeline.results.run import Run, Workaround, remove_workarounds
from enginesmith.pipeline.system.machine import Environment


@dataclass(frozen=True)
class RunRequest:
    """Request a run: its recipe, its run directory, and the machines of which target do it."""

    name: str
    """Unlike that of any other run."""
    recipe: Recipe
    out: Path
    place: Place | None = None
    """None stands for a machine that has the recipe's device."""
    fleet: Path | None = None
    """Folder of the fleet that the run is part of, if any: remedies then name it to resume, and not the run."""
    source: Source | None = None
    """The recipe's model, where it is resolved already."""
    replace: bool = False
    """True where an earlier run in ``out`` is moved out of the way."""
    workarounds: tuple[Workaround, ...] = ()
    """Workarounds whose options are in the recipe."""
    seconds: float | None = None
    """Time that is left, where the recipe limits it; None for all of it."""

    @property
    def requested_recipe(self) -> Recipe:
        """Return the recipe as people gave it."""
        return remove_workarounds(self.recipe, self.workarounds)

    def resolved(self) -> ResolvedRecipe:
        """Resolve the recipe's model, unless that has been done.

        Raises:
            SourceError: as in :func:`resolve_recipe`.
        """
        return ResolvedRecipe(self.recipe, self.source) if self.source else resolve_recipe(self.recipe)


def restore_workarounds(request: RunRequest) -> RunRequest:
    """Begin with the workarounds that an earlier run of the same recipe found, if its folder has one."""
    if request.workarounds or not (request.out / "run.json").exists():
        return request
    try:
        before = runs.read(request.out)
    except UsageError:  # with ``replace``, it is moved away; else its folder cannot be claimed
        return request
    same = request.recipe in (before.recipe, before.requested_recipe)
    if not before.workarounds or not same or (request.replace and before.complete):
        return request
    return replace(request, recipe=before.recipe, workarounds=before.workarounds)


def request_again(
    request: RunRequest, run: Run | None, spent: float, instead: float | None = None
) -> RunRequest | None:
    """Request a run again with the options that mend wrong engines, or with a race in which they drop nobody.

    It is None without a reason, or without the time for it. ``instead`` is the time that this process was given, where
    that is not the recipe's.
    """
    new_workarounds = runs.find_workarounds(run) if run and run.complete else []
    if run is None or not (new_workarounds or runs.needs_another_race(run)):
        return None
    recipe, left = run.recipe, None
    if recipe.time_seconds is not None:
        left = (recipe.time_seconds if instead is None else instead) - spent
        least = spent if new_workarounds else 0.0  # with other options, it takes about as long again
        if left < max(least, LEAST_SECONDS):
            return None
    for workaround in new_workarounds:
        recipe = recipe.with_option(workaround.option)
    workarounds = (*run.workarounds, *new_workarounds)
    return replace(request, recipe=recipe, workarounds=workarounds, seconds=left, replace=False)


def list_kept(request: RunRequest) -> list[str]:
    """List the variants of an earlier state of a run that a race must not drop: those with results in full.

    Where nothing is left to be tried again, they are those of the race that was run last, which is then found in the
    store.
    """
    if (run := read_earlier_search(request)) is None:
        return []
    again = runs.needs_another_race(run) or any(record.untried for record in run.requested)
    again = again or any(step.status == "failed" for step in run.steps)
    measured = (record for record in run.requested if record.status == "measured")
    return [record.id for record in measured if again or any(row.kept for row in record.race)]


def list_dropped(run: Run, machine: Environment) -> list[RaceRow]:
    """List the rows with which engines dropped out of a race on such a machine.

    There are none where that may have been for a variant that has failed since.
    """
    if list_machine_changes(run, machine) or runs.needs_another_race(run):
        return []
    return [row for record in run.requested for row in record.race if row.dropped and row.engine_sha256]


def read_earlier_search(request: RunRequest) -> Run | None:
    """Read an earlier state of a run that races variants, if there is one that is continued."""
    if not request.recipe.races or request.replace or not (request.out / "run.json").exists():
        return None
    run = runs.read(request.out)
    return run if run.recipe == request.recipe else None


def list_machine_changes(run: Run, machine: Environment) -> tuple[Changed, ...]:
    """List how a machine and its packages differ from those that a run was made with, as far as results depend on it.

    It is empty where that machine would find the same.
    """
    here = run.model_copy(update={"environment": machine.model_dump(mode="json")})
    return (*compare_devices(run, here), *compare_packages(run, here))


def is_finished(run: Run, folder: Path) -> bool:
    """Tell whether nothing is left to do on this machine, with its versions."""
    return not list_machine_changes(run, environment()) and has_all_results(run, folder)


def has_all_results(run: Run, folder: Path) -> bool:
    """Tell whether a run has every result that it can have, and its files are whole, whichever machine made them.

    Not to fit below a limit is a result. So is the failure of a variant that nobody asked for.
    """
    rows = [row for record in (run.baseline, *run.requested) for row in record.latency]
    beside = {record.id for record in run.variants if record.reference}
    failed = any(step.status == "failed" and step.variant not in beside for step in run.steps) or any(
        row.failure and not (row.oom and row.oom.limit_bytes) for row in rows
    )
    built = [record for record in run.variants if record.artifact]
    files = [artifact for record in built for artifact in (record.artifact, record.graph) if artifact]
    whole = all(has_files((folder / artifact.path).parent, artifact.sha256) for artifact in files)
    vectors = {record.test_vector for record in built if record.test_vector}
    whole = whole and all(has_content(folder / vector.path, vector.sha256) for vector in vectors)
    whole = whole and ((folder / SAMPLES).is_file() or all(row.p50_ms is None for row in rows))
    late = any(step.late for step in run.steps) or any(record.untried for record in run.requested)
    cut = any(row.cut for row in rows) or any(record.tuning and record.tuning.cut for record in run.requested)
    cut = cut or any(record.prosecution and record.prosecution.cut for record in run.requested)
    again = runs.needs_another_race(run) or bool(runs.find_workarounds(run))
    return run.complete and not (failed or late or cut or again) and whole
