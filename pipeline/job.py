"""Optimize a model by a recipe into a run directory, or several at once.

It can be interrupted anywhere and done again from there.
"""

import contextlib
import datetime
import tempfile
from collections.abc import Sequence
from pathlib import Path

from enginesmith.pipeline import run as runs
from enginesmith.pipeline import workers
from enginesmith.pipeline.errors import EnginesmithError, SourceError
from enginesmith.pipeline.merging import deduplicate_steps
from enginesmith.pipeline.plan import loading
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.run import Run
from enginesmith.pipeline.runner import Runner
from enginesmith.pipeline.settings import Settings
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.steps import LOAD
from enginesmith.pipeline.undertaking import OptimizeJob, RunRequest, RunResult


def optimize(recipe: Recipe, out: Path, settings: Settings | None = None) -> Run:
    """Carry out a recipe, and leave a run directory.

    Raises:
        UsageError: the folder holds another run, or another process is at work in it.
        EnginesmithError: no usable variant came out; the run directory says why for each.
    """
    (finished,) = OptimizeJob([RunRequest(out.name, recipe, out)], settings or Settings()).run()
    if finished.error is not None:
        raise finished.error
    assert finished.run is not None
    return finished.run


def optimize_all(requests: Sequence[RunRequest], settings: Settings | None = None) -> dict[str, RunResult]:
    """Carry out several requests; steps they share are done once, and none of them stops another.

    Raises:
        EnginesmithError: nothing could be begun at all: the store or the cluster is not there.
    """
    finished = OptimizeJob(requests, settings or Settings()).run()
    return {one.name: found for one, found in zip(requests, finished, strict=True)}


def resume(out: Path, settings: Settings | None = None) -> Run:
    """Resume a run directory: carry out the steps that are missing.

    Raises:
        UsageError: there is no run there. Errors as in :func:`optimize` besides.
    """
    before, out = runs.read(out, to_go_on=True), out.absolute()
    with contextlib.chdir(_find_folder_of_model(before.recipe.model, before.environment.get("folder") or "")):
        return optimize(before.recipe, out, settings)


def load_digests(requests: Sequence[RunRequest], settings: Settings | None = None) -> dict[str, str]:
    """Load models as they are now, and return their digests by name; a model that cannot be loaded has none."""
    settings = settings or Settings()
    plans = {}
    for one in requests:
        with contextlib.suppress(EnginesmithError):
            plans[one.name] = loading(one.recipe)
            workers.also_preload(resolve(one.recipe.model).libraries)
    together = deduplicate_steps(plans)
    with settings.open_executor() as executor, tempfile.TemporaryDirectory(prefix="enginesmith-") as logs:
        outcomes = Runner(executor, lambda step: Path(logs, f"{step.id}.log")).run(together.steps)
    artifacts = {name: found[LOAD].artifact for name, found in together.by_plan(outcomes).items()}
    return {name: artifact.sha256 for name, artifact in artifacts.items() if artifact}


def _find_folder_of_model(model: str, folder: str) -> Path:
    """Find the folder where the run was begun; the current one if it is not here or does not have the model."""
    if Path(folder or "/nowhere").is_dir():
        with contextlib.chdir(folder), contextlib.suppress(SourceError):
            resolve(model)
            return Path(folder)
    return Path.cwd()


def default_out(recipe: Recipe) -> Path:
    """Name a new run directory: ``runs/<model>-<time>`` below the current folder."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{resolve(recipe.model).name}-{stamp}"
