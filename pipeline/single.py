"""Run steps outside of a run directory, for commands that do one thing."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginesmith.pipeline import workers
from enginesmith.pipeline.placing import assign_step_machines
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.runner import Outcome, Runner
from enginesmith.pipeline.settings import Settings
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.steps import Place, Step


def run_steps(steps: Sequence[Step], settings: Settings, recipe: Recipe) -> Mapping[str, Outcome]:
    """Run steps; raise the error of the first that failed."""
    outcomes = try_steps(steps, settings, recipe)
    for outcome in outcomes.values():
        if outcome.error:
            raise outcome.error
    return outcomes


def try_steps(steps: Sequence[Step], settings: Settings, recipe: Recipe) -> Mapping[str, Outcome]:
    """Run steps as far as they come. Logs are kept only where an error names them."""
    workers.also_preload(resolve(recipe.model).libraries)
    logs = Path(tempfile.mkdtemp(prefix="enginesmith-"))
    outcomes: dict[str, Outcome] = {}
    try:
        with settings.open_executor() as executor:
            if not executor.is_local:
                place = Place(device=recipe.where.kind)
                steps = assign_step_machines(steps, place, executor.why_unavailable(place))
            log_of = lambda step: logs / f"{step.id}.log"  # noqa: E731
            outcomes = Runner(executor, log_of, settings.time_limit_seconds, settings.listener).run(steps)
        return outcomes
    finally:
        errors = [outcome.error for outcome in outcomes.values() if outcome.error]
        if not any(str(logs) in error.remedy for error in errors):
            shutil.rmtree(logs, ignore_errors=True)
