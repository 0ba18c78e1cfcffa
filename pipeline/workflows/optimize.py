"""Carry out several runs together: merge their plans, and keep each run directory up to date with its part."""

import contextlib
import datetime
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from enginesmith.pipeline.engines import BASELINES, ENGINES, engine_class, environment
from enginesmith.pipeline.errors import (
    LATE,
    REMEDY_LINE,
    EnginesmithError,
    MissingCapability,
    ModelError,
    StoreError,
    UsageError,
    storage_errors,
)
from enginesmith.pipeline.execution.events import Event, Outcome, Outcomes
from enginesmith.pipeline.execution.executor import Executor
from enginesmith.pipeline.execution.merge import DeduplicatedSteps, assign_machines, deduplicate_steps
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.measure.quality import explain_few_samples
from enginesmith.pipeline.passes.export.failures import FixedDimension
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Plan, Step, StepRef, Variant, libraries_of
from enginesmith.pipeline.planning.planner import plan, plan_loading
from enginesmith.pipeline.planning.prosecution import keep_seconds
from enginesmith.pipeline.planning.race import list_without_graph, race_again, searching_seconds
from enginesmith.pipeline.planning.single_stages import EXPORT
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.report import files
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.assemble import End, explain_end
from enginesmith.pipeline.results.differences import ModelIdentity
from enginesmith.pipeline.results.run import Run, RunResult, VariantRecord
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.tasks.race import Race
from enginesmith.pipeline.units import format_seconds, group_values
from enginesmith.pipeline.workflows.device import begin_on, require_device_of
from enginesmith.pipeline.workflows.earlier_races import EarlierRaces
from enginesmith.pipeline.workflows.earlier_searches import EarlierSearches
from enginesmith.pipeline.workflows.request import (
    RunRequest,
    has_all_results,
    is_finished,
    list_dropped,
    list_kept,
    list_machine_changes,
    read_earlier_search,
    request_again,
    restore_workarounds,
)
from enginesmith.pipeline.workflows.run_directory import (
    RunDirectory,
    claim_run_directory,
    has_handoff,
    load_handoff,
    move_earlier_run,
    save_handoff,
    work_where_begun,
)

_MOST_ROUNDS = 8
"""Times that runs are carried out, each time without what was found wrong before."""


@dataclass
class _ActiveRun:
    """A run that has a plan and a run directory."""

    request: RunRequest
    plan: Plan
    directory: RunDirectory
    races: EarlierRaces | None = None
    """Times of earlier runs; None for a run on another machine, or one that races no variants."""
    searches: EarlierSearches | None = None
    """Earlier searches for a precision; None for a run on another machine."""
    shared: frozenset[str] = frozenset()
    """Steps that another run shares, and that are done for that one."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    over: str = ""
    """The reason why no variant can win any more, if so."""

    def add(self, new: Outcomes) -> None:
        """Add outcomes, and find out whether a variant can still win: the model as it is alone is no result."""
        self.outcomes |= new
        if not self.over and not all(outcome.good for outcome in self.outcomes.values()):
            requested = [variant for variant in self.plan.variants if not variant.reference]
            named = str(self.plan.baseline.name) in self.request.recipe.engines
            variants = [*requested, *([self.plan.baseline] if named or not requested else [])]
            failures = map(self._why_lost, variants)
            first = next(failures)
            if first in LATE and all(failures):
                self.over = first  # another run may go on with it
            elif first and all(failures):
                message, *more = first.splitlines()
                remedies = (line for line in more if line.startswith(REMEDY_LINE))
                self.over = "\n".join([f"no variant can win any more: {message}", *remedies])
        self.directory.update(self.outcomes)

    def _why_lost(self, variant: Variant) -> str:
        """Explain why a variant cannot win any more; empty if it can, also where no time is left to judge it."""
        if self._may_blame_another(variant):
            return ""
        end = self._explain_making(variant)
        unmade = end.unfinished if end.unfinished in LATE else ""
        return end.failure or unmade or explain_end(variant, self.plan, self.outcomes).failure

    def _may_blame_another(self, variant: Variant) -> bool:
        """Tell whether a stage failed before an earlier one is verified, which may be to blame."""
        known = self.outcomes
        rest = itertools.dropwhile(known.__contains__, variant.verified)
        return any(step in known and not known[step].good for step in rest)

    def _explain_making(self, variant: Variant) -> End:
        """Explain why a variant could not be made, or is wrong, whatever is measured of it."""
        verified = tuple(step for step in variant.verified if step != variant.prosecuted)
        unjudged_variant = replace(variant, verified=verified, quality=None, memory=None)
        return explain_end(unjudged_variant, self.plan, self.outcomes)

    def list_pointless(self) -> dict[StepRef, str]:
        """List the steps that nothing can come of any more, with the reason: those for variants that are wrong."""
        if self.over:
            return {step.id: self.over for step in self.plan.steps}
        if all(outcome.good for outcome in self.outcomes.values()):
            return {}
        unblamed = (variant for variant in self.plan.variants if not self._may_blame_another(variant))
        wrong = [(variant, end.failure) for variant in unblamed if (end := self._explain_making(variant)).failure]
        reasons = dict[StepRef, str]()
        for variant, failure in reversed(wrong):  # of a step for several, the first one's
            reasons |= dict.fromkeys(variant.steps, failure)
        built = {step for variant, _ in wrong for step in self._list_building(variant)}
        serving = [step for step in self.plan.list_serving([variant for variant, _ in wrong]) if step not in built]
        return {step: reasons.get(step, wrong[0][1]).splitlines()[0] for step in serving}

    def _list_building(self, variant: Variant) -> list[StepRef]:
        """List the steps to a wrong variant's engine, if only the graph that it is built of is wrong.

        Then little is left to do, and the engine can be loaded and packaged by its name.
        """
        known = self.outcomes
        wrong = next((check for check in variant.verified if check in known and not known[check].good), None)
        graph = self.plan.input_of(wrong, "model") if wrong else None
        building = self.plan.leading_to([variant.artifact])
        graphs = (step for step in self.plan.steps if step.id in building and step.task.produces == "onnx")
        return [] if graph is None or any(graph in step.inputs.values() for step in graphs) else building

    def list_last_resort(self) -> list[StepRef]:
        """List the steps to a variant that takes no ONNX graph, where none that takes one can win any more."""
        return list_without_graph(self.plan, self._why_lost)

    def may_change_winner(self, step: str) -> bool:
        """Tell whether another variant may win once a step has ended: the latencies, or trying inputs on one."""
        return step == self.plan.latency or any(variant.prosecuted == step for variant in self.plan.variants)

    def order_prosecutions(self) -> list[StepRef]:
        """List the steps that try inputs on variants, that of the variant which wins as things stand first."""
        winner = self.directory.write().winner
        variants = sorted(self.plan.variants, key=lambda variant: variant.id != winner)
        return [variant.prosecuted for variant in variants if variant.prosecuted]

    @property
    def ended(self) -> bool:
        """True if no step is left."""
        return len(self.outcomes) == len(self.plan.steps)


class OptimizeJob:
    """Plan several runs, and carry them out together."""

    def __init__(self, requests: Sequence[RunRequest], settings: Settings) -> None:
        self._requests, self._settings = list(requests), settings
        self._errors: dict[str, EnginesmithError] = {}
        self._plans: dict[str, Plan] = {}
        self._active: dict[str, _ActiveRun] = {}
        self._environment = environment()
        for index, request in enumerate(requests):
            with self._record_errors(request):
                request = self._requests[index] = restore_workarounds(request)
                planned = plan(request.resolved(), here=settings.executor == "local", kept=list_kept(request))
                if settings.reuse and (earlier := read_earlier_search(request)):
                    dropped = list_dropped(earlier, self._environment)
                    planned = race_again(planned, dropped, runs.find_late_failures(earlier))
                if request.place is None and settings.executor == "local":
                    begin_on(planned.baseline.device, request.recipe, settings.listener, planned.steps[0])
                self._plans[request.name] = planned
                engines = (engine_class(name).modules for name in request.recipe.engines)
                worker.also_preload((*itertools.chain.from_iterable(engines), *libraries_of(planned.steps)))

    def run(self) -> list[RunResult]:
        """Carry out the steps of all runs, and return each run's result.

        Raises:
            EnginesmithError: nothing could be begun: the store or the cluster is not there.
        """
        if self._plans:
            with contextlib.ExitStack() as stack:
                executor = stack.enter_context(self._settings.open_executor())
                for request in self._requests:
                    if request.name in self._plans:
                        with self._record_errors(request):
                            self._active[request.name] = self._activate(request, executor, stack)
                self._run_plans(executor)
        return [self._result(request) for request in self._requests]

    @contextlib.contextmanager
    def _record_errors(self, request: RunRequest) -> Iterator[None]:
        """Record an error as this run's; the other runs go on."""
        try:
            yield
        except EnginesmithError as error:
            self._errors[request.name] = error

    def _activate(self, request: RunRequest, executor: Executor, stack: contextlib.ExitStack) -> _ActiveRun:
        run_plan, place = self._plans[request.name], request.place
        if request.replace and (moved := move_earlier_run(request.out, request.requested_recipe)):
            self._settings.listener(Event("note", run_plan.steps[0], f"the earlier run is in {moved} now"))
        stack.enter_context(claim_run_directory(request.out, request.requested_recipe))
        if place is None and not executor.is_local:
            cuda = any("cpu" not in engine_class(name).kinds for name in request.recipe.engines)
            place = Place(device="cuda" if cuda else request.recipe.where.kind)
        if place is not None:
            run_plan = assign_machines(run_plan, place, executor.why_unavailable(place))
        for workaround in request.workarounds:
            self._settings.listener(Event("note", run_plan.steps[0], workaround.sentence))
        if failed := next((step.task.failed for step in run_plan.steps if isinstance(step.task, Race)), ()):
            text = f"raced without {', '.join(failed)}, which failed: what was dropped for being slower has its chance"
            self._settings.listener(Event("note", run_plan.steps[0], text))
        directory = RunDirectory(
            request.out, request.recipe, run_plan, self._environment, len(self._plans), request.workarounds
        )
        directory.write()
        races = searches = None
        if place is None and executor.is_local:
            store = self._settings.open_store()
            searches = EarlierSearches(run_plan.steps, store)
            if request.recipe.races:
                races = EarlierRaces.open(run_plan, request.recipe, store, self._environment)
        return _ActiveRun(request, run_plan, directory, races, searches)

    def _run_plans(self, executor: Executor) -> None:
        settings, runs = self._settings, self._active.values()
        together = deduplicate_steps({name: active.plan for name, active in self._active.items()})
        for name, active in self._active.items():
            active.shared = together.done_for_others(name)

        def log_of(step: Step) -> Path:  # those of shared steps lie in the first run's folder
            name, own = together.takers[step.id][0]
            return self._active[name].request.out / "logs" / f"{own}.log"

        limits = _limit_time([active.request for active in runs], settings.time_limit_seconds)
        runner = Runner(executor, log_of, limits.seconds, settings.listener, limits.search_seconds, limits.kept_seconds)
        given = together.combine({name: self._handed_over(run, together, runner) for name, run in self._active.items()})

        def tell(text: str) -> None:
            settings.listener(Event("note", next(iter(together.steps)), text))

        with files.Writer(len(runs), tell) as reports:

            def report(active: _ActiveRun) -> None:
                active.directory.write()
                reports.write(active.request.out)

            def note(active: _ActiveRun, text: str) -> None:
                settings.listener(Event("note", active.plan.steps[0], text))

            def update(new: Outcomes) -> dict[str, str]:
                for name, outcomes in together.by_plan(new).items():
                    active = self._active[name]
                    active.add(outcomes)
                    if limits.search_seconds is not None:
                        last_resort = active.list_last_resort()
                        runner.outlast_search([together.shared_step(name, step).id for step in last_resort])
                    if few := _explain_few_samples(active.request.recipe, outcomes):
                        note(active, few)
                    if active.searches:
                        add_note = functools.partial(note, active)
                        for step, task in active.searches.advise(outcomes, active.outcomes, add_note):
                            runner.change_task(together.shared_step(name, step).id, task)
                    if active.races and active.races.audit in outcomes:
                        order, why = active.races.order(outcomes)
                        runner.prefer([together.shared_step(name, step).id for step in order])
                        if why:
                            note(active, why)
                    if limits.seconds is not None and any(map(active.may_change_winner, outcomes)):
                        tried_next = active.order_prosecutions()
                        runner.prefer([together.shared_step(name, step).id for step in tried_next])
                    if active.ended:
                        report(active)
                pointless = {name: active.list_pointless() for name, active in self._active.items()}
                taken = together.takers.items() if any(pointless.values()) else ()
                return {
                    step: pointless[takers[0][0]][takers[0][1]]
                    for step, takers in taken
                    if all(own in pointless[name] for name, own in takers)
                }

            try:
                update(given)
                runner.run(together.steps, given, update)
            finally:
                for active in runs:
                    if not active.ended:
                        report(active)
        for active in runs:
            with contextlib.suppress(StoreError):
                if active.races:
                    active.races.remember(active.directory.write(), active.outcomes)
                if active.searches:
                    active.searches.remember(active.outcomes)
            lacking = any(outcome.status == "unavailable" for outcome in active.outcomes.values())
            if lacking and not active.directory.losses:
                with storage_errors(f"the run directory {active.request.out}"):
                    save_handoff(active.request.out, active.plan, active.outcomes)

    def _handed_over(self, active: _ActiveRun, together: DeduplicatedSteps, runner: Runner) -> Outcomes:
        """Load the outcomes of an earlier run of the same model, perhaps on another machine."""
        out = active.request.out
        if not has_handoff(out):
            return {}
        load = together.shared_step(active.request.name, LOAD)
        loaded = runner.run([load])[load.id].artifact
        loaded_outcomes = load_handoff(out, active.plan, loaded) if loaded else {}
        if not loaded_outcomes:
            active.directory.caution("the model is not the one that this run was started with: all steps run again")
        return loaded_outcomes

    def _result(self, request: RunRequest) -> RunResult:
        active = self._active.get(request.name)
        if active is None:
            if (request.out / "run.json").exists():
                _say_kept(self._errors[request.name], request.out)
            return RunResult(None, self._errors[request.name])
        run, outcomes = active.directory.write(), active.outcomes
        reused = sum(outcome.cached or step in active.shared for step, outcome in outcomes.items())
        again = self._settings.resume_command(request.fleet or request.out)
        error = _why_unusable(run, outcomes, again, self._settings.time_limit_seconds)
        if error is not None and active.directory.losses:
            _say_kept(error, request.out)
        elif active.directory.losses:
            remedy = (
                f"see its folder logs; {'another --out' if request.fleet else '`optimize --replace`'} begins a new one"
            )
            if any(outcome.reason in LATE for outcome in outcomes.values()):
                remedy = f"what was made is kept, and used again: `{again}` continues, with --time for more"
            losses = "; ".join(active.directory.losses)
            error = ModelError(f"{request.out} keeps the results that it has: this time {losses}", remedy)
        return RunResult(run, error, len(outcomes), reused)


def _say_kept(error: EnginesmithError, out: Path) -> None:
    """Say below an error that a run directory still has the results of an earlier run, which a script may read."""
    kept = f"{out} keeps the results of its earlier run"
    if kept not in error.remedy:
        error.remedy = f"{error.remedy}; {kept}" if error.remedy else kept


class _Limits(NamedTuple):
    """Times of all runs together; None where one is not limited."""

    seconds: float | None
    search_seconds: float | None
    """The part in which variants are found."""
    kept_seconds: float
    """The part at the end that is kept for prosecutions."""


def _limit_time(requests: Sequence[RunRequest], instead: float | None) -> _Limits:
    """Find the times that recipes give and earlier rounds have left, or that this process is given ``instead``."""
    times = [request.seconds or request.recipe.time_seconds for request in requests]
    searches = None not in times
    if instead is not None:
        times = [instead / len(requests)] * len(requests)
    if None in times:
        return _Limits(None, None, 0.0)
    recipes = [
        request.recipe.model_copy(update={"time_seconds": seconds})
        for request, seconds in zip(requests, times, strict=True)
    ]
    search_seconds = sum(map(searching_seconds, recipes)) if searches else None
    return _Limits(sum(filter(None, times)), search_seconds, sum(map(keep_seconds, recipes)))


def optimize_all(requests: Sequence[RunRequest], settings: Settings) -> dict[str, RunResult]:
    """Carry out requests, and again where engines were wrong: with the options that mend them, else without them.

    Steps that requests share are done once, and none of them stops another.

    Raises:
        EnginesmithError: nothing could be begun at all: the store or the cluster is not there.
    """
    results, begun, spent = dict[str, RunResult](), time.monotonic(), 0.0
    limit = settings.time_limit_seconds
    for _ in range(_MOST_ROUNDS):
        job = OptimizeJob(requests, replace(settings, time_limit_seconds=None if limit is None else limit - spent))
        results |= {request.name: result for request, result in zip(requests, job.run(), strict=True)}
        spent = time.monotonic() - begun
        settings = replace(settings, reuse=True)  # what has just been made
        again = (request_again(request, results[request.name].run, spent, limit) for request in requests)
        requests = [request for request in again if request]
        if not requests or (limit is not None and limit < 2 * spent):
            break
    return results


def _explain_few_samples(recipe: Recipe, new: Outcomes) -> str:
    """Explain that there are too few samples to judge the budget for accuracy, as soon as they are counted."""
    reference = new[REFERENCE].artifact if REFERENCE in new else None
    parts = samples.read(reference.folder).parts if reference else {}
    return explain_few_samples(parts, recipe.required_metric, recipe.budgets.max_drop)


def _why_unusable(run: Run, outcomes: Outcomes, again: str, limit: float | None = None) -> EnginesmithError | None:
    """Explain why no usable variant came out, if so; ``again`` is the command that resumes.

    ``limit`` is the time that this process was given instead of the recipe's.
    """
    for name in (LOAD, REFERENCE):
        if name in outcomes and (error := outcomes[name].error) is not None:
            return error
    if any(record.status in ("measured", "built") for record in run.asked_for or (run.baseline,)):
        return None
    if untried := [record.id for record in run.asked_for if record.untried]:
        limit = limit or run.recipe.time_seconds or 0.0
        more, kept = f"--time {5 * limit:.0f}s", "what was made is kept, and used again"
        if all(record.status != "failed" for record in run.asked_for):
            message = f"the time of {format_seconds(limit)} was over before a variant could be measured"
            return ModelError(message, f"give more: {more}; {kept}")
        message = f"no usable variant is left:\n{_list_reasons(run.asked_for)}"
        return ModelError(message, f"{more} gives {', '.join(untried)} more time; {kept}")
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    for kind in (MissingCapability, UsageError):
        if errors and all(isinstance(error, kind) for error in errors):
            return errors[0]
    if errors and all(isinstance(error, StoreError) for error in errors):  # nothing is wrong with the model
        step = next(name for name, outcome in outcomes.items() if outcome.error)
        return StoreError(f"{step}: {errors[0].message}", f"{errors[0].remedy}; then resume")
    lacking = [outcome.reason for outcome in outcomes.values() if outcome.status == "unavailable"]
    if lacking and not errors:
        return MissingCapability(lacking[0], f"do it where that is: `{again}` continues there")
    reasons, others = _list_reasons(run.asked_for or (run.baseline,)), _list_other_engines(run, outcomes)
    words = " or ".join(f"--engine {name}" for name in others)
    remedy = f"{words} runs the module without an ONNX graph; " if others else ""
    if runs.needs_another_race(run):
        remedy = f"`{again}` tries what was dropped for being slower than what is wrong; "
    return ModelError(f"no usable variant is left:\n{reasons}", f"{remedy}the logs folder of the run has the details")


def _list_other_engines(run: Run, outcomes: Outcomes) -> list[str]:
    """List engines that take the module itself, where it was the export that failed or is wrong."""
    stages = {entry.stage for record in run.asked_for for entry in record.fidelity if not entry.passed}
    prosecutions = [record.prosecution for record in run.asked_for if record.prosecution]
    stages |= {prosecution.finding.guilty for prosecution in prosecutions if prosecution.finding}
    if EXPORT not in stages and not (EXPORT in outcomes and outcomes[EXPORT].error):
        return []
    used = {BASELINES["torch"], *(record.engine for record in run.records)}
    others = {name: engine_class(name) for name in ENGINES if name not in used}
    fixed = EXPORT in outcomes and isinstance(outcomes[EXPORT].error, FixedDimension)  # so it is in other captures
    return [name for name, other in others.items() if other.runs_module() or (other.consumes == "torch" and not fixed)]


def _list_reasons(records: Sequence[VariantRecord]) -> str:
    """List why variants are not usable, those with the same reason together."""
    alike = group_values((record.reason, record.id) for record in records)
    return "\n".join(f"  {', '.join(names)}: {reason}" for reason, names in alike.items())


def optimize(
    recipe: Recipe,
    out: str | os.PathLike[str],
    settings: Settings | None = None,
    source: Source | None = None,
    *,
    replace: bool = False,
) -> Run:
    """Carry out a recipe, and leave a run directory; ``source`` is its model, where that is resolved already.

    It can be interrupted anywhere and done again from there. A finished run in ``out`` stays until all of its results
    are there again; with ``replace`` it is moved to ``out.1`` or the next free number.

    Raises:
        UsageError: the folder holds another run, or another process is at work in it.
        EnginesmithError: no usable variant came out; the run directory says why for each.
    """
    if not isinstance(recipe, Recipe):
        raise UsageError(f"recipe: a Recipe is needed (given: {recipe!r})", "make it: make_recipe({'model': …})")
    folder = Path(out)
    request = RunRequest(folder.name, recipe, folder, source=source, replace=replace)
    (finished,) = optimize_all([request], settings or Settings()).values()
    if finished.error is not None:
        raise finished.error
    assert finished.run is not None
    return finished.run


NOTHING_LEFT = (
    "nothing is left to do: {} is finished; whether its model or data have changed since then was not looked at: "
    "--no-cache does every step again"
)
"""Said by ``resume`` of a finished folder."""
DONE_AGAIN = "{} is finished, but not for this machine: what depends on it is done again (then and now: {})"
"""Said by ``resume`` of a folder that was finished on a machine of another kind, or with other versions."""


def resume(
    out: str | os.PathLike[str],
    settings: Settings | None = None,
    on_note: Callable[[str], object] = lambda _: None,
) -> Run:
    """Resume a run directory: carry out the steps that are missing; of a finished run, write reports that are missing.

    ``on_note`` is told where nothing is left to do, and where a finished run is done again on another machine.

    Raises:
        UsageError: there is no run there. Errors as in :func:`optimize` besides.
        MissingCapability: it was measured on a GPU, and none can be used here.
    """
    before, begun = runs.read(out), Path(out).absolute()
    if (settings is None or settings.reuse) and is_finished(before, begun):
        files.write_outdated(begun)
        on_note(NOTHING_LEFT.format(begun))
        if error := _why_unusable(before, {}, ""):
            raise error
        return before
    if has_all_results(before, begun) and (changes := list_machine_changes(before, environment())):
        on_note(DONE_AGAIN.format(begun, "; ".join(map(str, changes))))
    before = runs.read(out, to_go_on=True)
    require_device_of(before, begun)
    with work_where_begun(before):
        return optimize(before.recipe, begun, settings)


def identify_models(requests: Sequence[RunRequest], settings: Settings) -> dict[str, ModelIdentity]:
    """Load models as they are now, and identify them by the requests' names; one that cannot be loaded is left out."""
    plans = {}
    for request in requests:
        with contextlib.suppress(EnginesmithError):
            plans[request.name] = plan_loading(request.resolved())
            worker.also_preload(libraries_of(plans[request.name].steps))
    together = deduplicate_steps(plans)
    with settings.open_executor() as executor, tempfile.TemporaryDirectory(prefix="enginesmith-") as logs:
        outcomes = Runner(executor, lambda step: Path(logs, f"{step.id}.log")).run(together.steps)
    artifacts = {name: plan_outcomes[LOAD].artifact for name, plan_outcomes in together.by_plan(outcomes).items()}
    return {name: ModelIdentity.of(artifact) for name, artifact in artifacts.items() if artifact}


def default_out(name: str) -> Path:
    """Name a new run directory, or the folder of a fleet: ``runs/<name>-<time>`` below the current folder."""
    return Path("runs", f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
