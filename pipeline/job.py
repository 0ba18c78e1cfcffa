"""The main job: a recipe in, a run directory out; and several of them at once.

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
from enginesmith.pipeline.merging import merged
from enginesmith.pipeline.plan import loading
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.run import Run
from enginesmith.pipeline.runner import Runner
from enginesmith.pipeline.settings import Settings
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.steps import LOAD
from enginesmith.pipeline.undertaking import Asked, Finished, Undertaking


def optimize(recipe: Recipe, out: Path, settings: Settings | None = None) -> Run:
    """Do all that a recipe asks for, and leave a run directory.

    Raises:
        UsageError: the folder holds another run, or another process is at work in it.
        EnginesmithError: no usable variant came out; the run directory says why for each.
    """
    (finished,) = Undertaking([Asked(out.name, recipe, out)], settings or Settings()).carry_out()
    if finished.error is not None:
        raise finished.error
    assert finished.run is not None
    return finished.run


def optimize_all(asked: Sequence[Asked], settings: Settings | None = None) -> dict[str, Finished]:
    """Do several; what they share is done once, and none of them stops another.

    Raises:
        EnginesmithError: nothing could be begun at all: the store or the cluster is not there.
    """
    finished = Undertaking(asked, settings or Settings()).carry_out()
    return {one.name: found for one, found in zip(asked, finished, strict=True)}


def resume(out: Path, settings: Settings | None = None) -> Run:
    """Do what is missing in a run directory.

    Raises:
        UsageError: there is no run there. Errors as in :func:`optimize` besides.
    """
    before, out = runs.read(out, to_go_on=True), out.absolute()
    with contextlib.chdir(_where_the_model_is(before.recipe.model, before.environment.get("folder") or "")):
        return optimize(before.recipe, out, settings)


def load_digests(asked: Sequence[Asked], settings: Settings | None = None) -> dict[str, str]:
    """Digests of the models as they are now, by name; a model that cannot be loaded has none."""
    settings = settings or Settings()
    plans = {}
    for one in asked:
        with contextlib.suppress(EnginesmithError):
            plans[one.name] = loading(one.recipe)
            workers.also_preload(resolve(one.recipe.model).libraries)
    together = merged(plans)
    with settings.open_executor() as executor, tempfile.TemporaryDirectory(prefix="enginesmith-") as logs:
        outcomes = Runner(executor, lambda step: Path(logs, f"{step.id}.log")).run(together.steps)
    artifacts = {name: found[LOAD].artifact for name, found in together.of_each(outcomes).items()}
    return {name: artifact.sha256 for name, artifact in artifacts.items() if artifact}


def _where_the_model_is(model: str, folder: str) -> Path:
    """The folder where the run was begun, unless that is not here, as on another machine, or the model is not there."""
    if Path(folder or "/nowhere").is_dir():
        with contextlib.chdir(folder), contextlib.suppress(SourceError):
            resolve(model)
            return Path(folder)
    return Path.cwd()


def default_out(recipe: Recipe) -> Path:
    """``runs/<model>-<time>`` below the current folder."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{resolve(recipe.model).name}-{stamp}"
