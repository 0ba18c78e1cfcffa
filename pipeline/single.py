"""Steps run outside of a run directory, for commands that do one thing."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginesmith.pipeline import workers
from enginesmith.pipeline.job import Settings
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.runner import Outcome, Runner
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.steps import Step


def finished(steps: Sequence[Step], settings: Settings, recipe: Recipe) -> Mapping[str, Outcome]:
    """Run steps; raises what the first failed one raised."""
    outcomes = attempted(steps, settings, recipe)
    for outcome in outcomes.values():
        if outcome.error:
            raise outcome.error
    return outcomes


def attempted(steps: Sequence[Step], settings: Settings, recipe: Recipe) -> Mapping[str, Outcome]:
    """Run steps as far as they come. Logs are kept only where an error names them."""
    workers.also_preload(resolve(recipe.model).libraries)
    logs = Path(tempfile.mkdtemp(prefix="enginesmith-"))
    outcomes: dict[str, Outcome] = {}
    try:
        runner = Runner(settings.open_store(), logs, settings.jobs, settings.time_limit_seconds, settings.listener)
        outcomes = runner.run(steps, lambda found: None)
        return outcomes
    finally:
        errors = [outcome.error for outcome in outcomes.values() if outcome.error]
        if not any(str(logs) in error.remedy for error in errors):
            shutil.rmtree(logs, ignore_errors=True)
