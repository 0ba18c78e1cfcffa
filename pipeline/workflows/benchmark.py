"""Models measured side by side, outside of a run directory: ``benchmark``."""

import datetime
import time
from collections.abc import Sequence
from pathlib import Path

from enginesmith.pipeline.engines import environment, read_file
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.passes.quantize.precisions import AS_GIVEN
from enginesmith.pipeline.planning import stages as plans
from enginesmith.pipeline.planning.plan import Plan, Step
from enginesmith.pipeline.planning.planner import in_time
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results.assemble import Header, assemble
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.tasks.measure import Latency, Memory, ProfileVariant
from enginesmith.pipeline.workflows.stages import try_steps


def benchmark(recipe: Recipe, models: Sequence[str], settings: Settings) -> Run:
    """Measure models side by side; measurements are always made anew. The baseline is the first PyTorch model.

    One that fails has the reason beside it, and the others are measured.

    Raises:
        MissingCapability: none of them can run on the device.
        EnginesmithError: the baseline cannot be loaded, or the measurement as a whole failed.
    """
    started = time.monotonic()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    resolved, others = plans.choose_baseline(recipe, models)
    recipe, damaged = resolved.recipe, _damaged_engines(others)
    plan = plans.benchmark_plan(resolved, [source for source in others if source.text not in damaged], now)
    _require_device(plan)
    outcomes = try_steps(_latency_first(plan, recipe, settings), settings, recipe)
    needed = [step.id for step in plan.steps if step.required or step.id == plan.latency]
    if error := next((outcomes[name].error for name in needed if name in outcomes and outcomes[name].error), None):
        raise error
    header = Header(
        name="benchmark",
        created=now,
        seconds=round(time.monotonic() - started, 3),
        environment=environment().model_dump(mode="json"),
    )
    run = assemble(header, recipe, plan, outcomes, {})
    return run.model_copy(update={"variants": (*run.variants, *damaged.values())})


def _damaged_engines(sources: Sequence[Source]) -> dict[str, VariantRecord]:
    """By argument, the record of each engine file that cannot be used at all: it says why."""
    found = {}
    for source in sources:
        if source.form != "engine":
            continue
        try:
            read_file(Path(source.target))
        except ModelError as error:
            reasons = dict.fromkeys(("latency", "memory", "quality", "limits", "profile"), str(error))
            found[source.text] = VariantRecord(
                id=source.text,
                engine="unknown",
                precision=AS_GIVEN,
                status="failed",
                reason=str(error),
                reasons=reasons,
            )
    return found


def _latency_first(plan: Plan, recipe: Recipe, settings: Settings) -> list[Step]:
    """The plan's steps, with memory and profiles at the end: where time ends, latency is known."""
    steps = in_time(plan.steps, settings.time_limit_seconds, len(recipe.batch))
    return sorted(steps, key=lambda step: isinstance(step.task, (Memory, ProfileVariant)))


def _require_device(plan: Plan) -> None:
    """Insist on a device that at least one of the models can be measured on.

    Raises:
        MissingCapability: there is none.
    """
    measured = next(step.task for step in plan.steps if step.id == plan.latency)
    assert isinstance(measured, Latency)
    engines = [plan.baseline.engine, *(variant.engine for variant in plan.variants)]
    if not any(engine.available(measured.device).ok for engine in engines):
        plan.baseline.engine.require(measured.device)
