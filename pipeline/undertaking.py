"""Runs that are made together: their plans as one, each run directory kept in step with its own part of it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginesmith.pipeline import kept, workers
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability, ModelError, UsageError
from enginesmith.pipeline.executors.base import Executor
from enginesmith.pipeline.measure import device
from enginesmith.pipeline.merging import Merged, merged
from enginesmith.pipeline.placing import placed
from enginesmith.pipeline.plan import in_time, plan
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.report import files
from enginesmith.pipeline.run import Run
from enginesmith.pipeline.run_directory import RunDirectory, claimed
from enginesmith.pipeline.runner import Outcome, Outcomes, Runner
from enginesmith.pipeline.settings import Settings
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.steps import LOAD, REFERENCE, Place, Plan, Step
from enginesmith.pipeline.storage import storage_errors


@dataclass(frozen=True)
class Asked:
    """A run that is asked for: what is done, where it is kept, and on the machines of which target it is done."""

    name: str
    """Unlike that of any other run."""
    recipe: Recipe
    out: Path
    place: Place | None = None
    """None stands for a machine that has the recipe's device."""
    fleet: Path | None = None
    """The folder of the fleet that it is part of, if so: that is what is gone on with."""


@dataclass(frozen=True)
class Finished:
    """What came of it."""

    run: Run | None
    """What its run directory says; None where it was not begun."""
    error: EnginesmithError | None
    """Why nothing usable came out, if so."""
    steps: int = 0
    reused: int = 0
    """Of these steps, those whose results were there already, or were made for another one of the runs."""


@dataclass
class _Begun:
    """One of the runs, which has a plan and then a directory."""

    asked: Asked
    plan: Plan
    directory: RunDirectory
    shared: frozenset[str] = frozenset()
    """Its steps that another run does, too, and that are done for that one."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do."""
        return len(self.outcomes) == len(self.plan.steps)


class Undertaking:
    """Several runs, planned when this is made."""

    def __init__(self, asked: Sequence[Asked], settings: Settings) -> None:
        self._asked, self._settings = asked, settings
        self._errors: dict[str, EnginesmithError] = {}
        self._plans: dict[str, Plan] = {}
        self._begun: dict[str, _Begun] = {}
        self._environment = device.environment()
        for one in asked:
            with self._failing(one):
                self._plans[one.name] = plan(one.recipe, here=settings.executor == "local")
                workers.also_preload(resolve(one.recipe.model).libraries)

    def carry_out(self) -> list[Finished]:
        """Do all steps of all, and say what came of each.

        Raises:
            EnginesmithError: nothing could be begun: the store or the cluster is not there.
        """
        if self._plans:
            with contextlib.ExitStack() as stack:
                executor = stack.enter_context(self._settings.open_executor())
                for one in self._asked:
                    if one.name in self._plans:
                        with self._failing(one):
                            self._begun[one.name] = self._begin(one, executor, stack)
                self._run(executor)
        return [self._finished(one) for one in self._asked]

    @contextlib.contextmanager
    def _failing(self, one: Asked) -> Iterator[None]:
        """Where one of them fails, the others go on."""
        try:
            yield
        except EnginesmithError as error:
            self._errors[one.name] = error

    def _begin(self, one: Asked, executor: Executor, stack: contextlib.ExitStack) -> _Begun:
        stack.enter_context(claimed(one.out, one.recipe))
        made, place = self._plans[one.name], one.place
        if place is None and not executor.here:
            place = Place(device=_device(one.recipe))
        if place is not None:
            made = placed(made, place, executor.lacking(place))
        directory = RunDirectory(one.out, one.recipe, made, self._environment, len(self._plans))
        directory.write()
        return _Begun(one, made, directory)

    def _run(self, executor: Executor) -> None:
        settings, runs = self._settings, self._begun.values()
        together = merged({name: one.plan for name, one in self._begun.items()})
        for name, one in self._begun.items():
            one.shared = together.done_for_others(name)
        runner = Runner(executor, self._log_of(together), settings.time_limit_seconds, settings.listener)
        given = together.together({name: self._kept(one, together, runner) for name, one in self._begun.items()})
        most = max((len(one.asked.recipe.batch) for one in runs), default=1)
        steps = in_time(together.steps, settings.time_limit_seconds, most)

        with files.Writer(len(runs)) as reports:

            def update(new: Outcomes) -> None:
                for name, found in together.of_each(new).items():
                    one = self._begun[name]
                    one.outcomes |= found
                    one.directory.update(one.outcomes)
                    if one.ended:
                        self._report(one, reports)

            try:
                update(given)
                runner.run(steps, given, update)
            finally:
                for one in runs:
                    if not one.ended:
                        self._report(one, reports)
        for one in runs:
            if any(outcome.status == "lacking" for outcome in one.outcomes.values()):
                with storage_errors(f"the run directory {one.asked.out}"):
                    engines = {variant.artifact: f"variants/{variant.id}" for variant in one.plan.variants}
                    kept.save(one.asked.out, one.plan, one.outcomes, engines)

    def _report(self, one: _Begun, reports: files.Writer) -> None:
        one.directory.write()
        reports.write(one.asked.out)

    def _log_of(self, together: Merged) -> Callable[[Step], Path]:
        """The logs of what several share are in the folder of the first of them."""

        def log_of(step: Step) -> Path:
            name, own = together.takers[step.id][0]
            return self._begun[name].asked.out / "logs" / f"{own}.log"

        return log_of

    def _kept(self, one: _Begun, together: Merged, runner: Runner) -> Outcomes:
        """What the run directory keeps of an earlier run, perhaps of another machine; for the same model only."""
        out = one.asked.out
        if not kept.exists(out):
            return {}
        load = together.named(one.asked.name, LOAD)
        loaded = runner.run([load])[load.id].artifact
        found = kept.read(out, one.plan, loaded) if loaded else {}
        if not found:
            one.directory.caution("the model is not the one that this run was begun with: everything is made anew")
        return found

    def _finished(self, one: Asked) -> Finished:
        begun = self._begun.get(one.name)
        if begun is None:
            return Finished(None, self._errors[one.name])
        run, outcomes = begun.directory.write(), begun.outcomes
        reused = sum(outcome.cached or step in begun.shared for step, outcome in outcomes.items())
        again = self._settings.resuming(one.fleet or one.out)
        return Finished(run, _useless(run, outcomes, again), len(outcomes), reused)


def _device(recipe: Recipe) -> str:
    """What the steps of a recipe run on, as far as engines say it."""
    cuda = any("cpu" not in engine_class(name).kinds for name in recipe.engines)
    return "cuda" if cuda or recipe.where.kind == "cuda" else "cpu"


def _useless(run: Run, outcomes: Outcomes, again: str) -> EnginesmithError | None:
    """Why nothing came out that can be used, if so; ``again`` is the command that goes on."""
    for name in (LOAD, REFERENCE):
        if (error := outcomes[name].error) is not None:
            return error
    if not run.variants or any(one.status in ("measured", "built") for one in run.variants):
        return None
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    for kind in (MissingCapability, UsageError):
        if errors and all(isinstance(error, kind) for error in errors):
            return errors[0]
    lacking = [outcome.reason for outcome in outcomes.values() if outcome.status == "lacking"]
    if lacking and not errors:
        return MissingCapability(lacking[0], f"do it where that is: `{again}` goes on there")
    reasons = "\n".join(f"  {record.id}: {record.reason}" for record in run.variants)
    return ModelError(f"no usable variant is left:\n{reasons}", "the logs folder of the run has the whole story")
