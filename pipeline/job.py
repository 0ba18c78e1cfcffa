"""The main job: a recipe in, a run directory out. It can be interrupted anywhere and done again from there."""

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginesmith.pipeline import kept, workers
from enginesmith.pipeline import run as runs
from enginesmith.pipeline.artifact import file_digest, files_below, folder_digest
from enginesmith.pipeline.assemble import Header, assemble
from enginesmith.pipeline.errors import MissingCapability, ModelError, SourceError, UsageError
from enginesmith.pipeline.measure import device
from enginesmith.pipeline.plan import in_time, plan
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.report import markdown
from enginesmith.pipeline.run import Run
from enginesmith.pipeline.runner import Listener, Outcome, Runner
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.steps import LOAD, REFERENCE, Plan, Variant
from enginesmith.pipeline.store import Store, default_root, storage_errors


@dataclass(frozen=True)
class Settings:
    """How a job is carried out; nothing here changes what comes out."""

    store: Path | None = None
    reuse: bool = True
    jobs: int = field(default_factory=lambda: min(2, len(os.sched_getaffinity(0))))
    """Steps at the same time; measurements are always alone."""
    time_limit_seconds: float | None = None
    listener: Listener = lambda event: None

    def open_store(self) -> Store:
        """The store to work with."""
        return Store(self.store or default_root(), reuse=self.reuse)


def optimize(recipe: Recipe, out: Path, settings: Settings | None = None) -> Run:
    """Do all that a recipe asks for, and leave a run directory.

    Raises:
        UsageError: the folder holds another run, or another process is at work in it.
        EnginesmithError: no usable variant came out; the run directory says why for each.
    """
    settings = settings or Settings()
    steps = plan(recipe)
    workers.also_preload(resolve(recipe.model).libraries)
    with _claimed(out, recipe):
        directory = _RunDirectory(out, recipe, steps, time.monotonic())
        directory.update({})
        runner = Runner(
            settings.open_store(), out / "logs", settings.jobs, settings.time_limit_seconds, settings.listener
        )
        given = _given(out, steps, runner)
        if kept.exists(out) and not given:
            directory.caution("the model is not the one that this run was begun with: everything is made anew")
        in_order = in_time(steps.steps, settings.time_limit_seconds, len(recipe.batch))
        outcomes = runner.run(in_order, directory.update, given)
        run = directory.update(outcomes)
        if any(outcome.status == "lacking" for outcome in outcomes.values()):
            with storage_errors(f"the run directory {out}"):
                kept.save(out, steps, outcomes, {one.artifact: f"variants/{one.id}" for one in steps.variants})
    _raise_if_useless(run, outcomes)
    return run


def resume(out: Path, settings: Settings | None = None) -> Run:
    """Do what is missing in a run directory.

    Raises:
        UsageError: there is no run there. Errors as in :func:`optimize` besides.
    """
    before, out = runs.read(out), out.absolute()
    folder = before.environment.get("folder")
    if folder and Path(folder).is_dir():  # where the model's name was resolved; on another machine it may not be there
        _go_where_the_model_is(before.recipe.model, Path(folder))
    return optimize(before.recipe, out, settings)


def _given(out: Path, plan: Plan, runner: Runner) -> dict[str, Outcome]:
    """What the run directory keeps of an earlier run, perhaps of another machine; it holds for the same model only."""
    if not kept.exists(out):
        return {}
    load = next(step for step in plan.steps if step.id == LOAD)
    loaded = runner.run([load], lambda outcomes: None)[LOAD]
    return kept.read(out, plan, loaded.artifact) if loaded.artifact else {}


def _go_where_the_model_is(model: str, folder: Path) -> None:
    """To the folder where the run was begun, unless the model is only here."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        resolve(model)
    except SourceError:
        os.chdir(here)


def default_out(recipe: Recipe) -> Path:
    """``runs/<model>-<time>`` below the current folder."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{resolve(recipe.model).name}-{stamp}"


class _RunDirectory:
    """Keeps the folder in step with the outcomes."""

    def __init__(self, folder: Path, recipe: Recipe, steps: Plan, started: float) -> None:
        self._folder, self._recipe, self._plan, self._started = folder, recipe, steps, started
        self._whole: set[str] = set()
        """Variants whose files are known to be there, as they should be."""
        before = runs.read(folder) if (folder / "run.json").exists() else None
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._header = Header(
            name=folder.resolve().name,
            created=before.created if before else now,
            seconds=before.seconds if before else 0.0,
            environment={**device.environment().model_dump(mode="json"), "folder": str(Path.cwd())},
        )
        with storage_errors(f"the run directory {folder}"):
            (folder / "environment.json").write_text(json.dumps(self._header.environment, indent=1) + "\n")

    def caution(self, text: str) -> None:
        """Have the run's readers warned."""
        self._header = replace(self._header, cautions=(*self._header.cautions, text))

    def update(self, outcomes: Mapping[str, Outcome]) -> Run:
        """Write what is known now."""
        header = replace(self._header, seconds=round(self._header.seconds + time.monotonic() - self._started, 3))
        with storage_errors(f"the run directory {self._folder}, or the store,"):
            artifacts = {
                variant.id: path for variant in self._plan.variants if (path := self._placed(variant, outcomes))
            }
            run = assemble(header, self._recipe, self._plan, outcomes, artifacts)
            runs.write(run, self._folder)
            if all(step.id in outcomes for step in self._plan.steps):
                (self._folder / "report.md").write_text(markdown.render(run))
        return run

    def _placed(self, variant: Variant, outcomes: Mapping[str, Outcome]) -> Path | None:
        """The engine's main file in the run directory, copied there when it is new."""
        found = outcomes.get(variant.artifact)
        if found is None or found.artifact is None or found.artifact.kind != "engine":
            return None
        artifact = found.artifact
        relative = Path("variants", variant.id)
        target, partial = self._folder / relative, self._folder / "variants" / f".{variant.id}.partial"
        if variant.id not in self._whole and not _holds(target, artifact.sha256):
            for old in (partial, target):
                shutil.rmtree(old, ignore_errors=True)
            try:
                shutil.copytree(artifact.folder, partial, ignore=shutil.ignore_patterns("artifact.json"))
                manifest = {"id": variant.id, **artifact.model_dump(mode="json", exclude={"path", "breach"})}
                (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        self._whole.add(variant.id)
        return relative / artifact.path.name


def _holds(folder: Path, sha256: str) -> bool:
    names = files_below(folder, skip=["manifest.json"])
    return bool(names) and folder_digest({name: file_digest(folder / name) for name in names}) == sha256


@contextlib.contextmanager
def _claimed(out: Path, recipe: Recipe) -> Iterator[None]:
    """Hold a run directory for this process."""
    with storage_errors(f"the run directory {out}"):
        (out / "logs").mkdir(parents=True, exist_ok=True)
        (out / "variants").mkdir(exist_ok=True)
        lock = (out / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another run is at work in {out}", "wait for it, or choose another --out") from error
        if (out / "run.json").exists() and runs.read(out).recipe != recipe:
            raise UsageError(
                f"{out} holds a run of another recipe",
                f"choose another --out, or continue that one with `enginesmith resume {out}`",
            )
        yield


def _raise_if_useless(run: Run, outcomes: Mapping[str, Outcome]) -> None:
    """Say why, where nothing came out that can be used."""
    for name in (LOAD, REFERENCE):
        if (error := outcomes[name].error) is not None:
            raise error
    if not run.variants or any(one.status in ("measured", "built") for one in run.variants):
        return
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    for kind in (MissingCapability, UsageError):
        if errors and all(isinstance(error, kind) for error in errors):
            raise errors[0]
    reasons = "\n".join(f"  {record.id}: {record.reason}" for record in run.variants)
    raise ModelError(f"no usable variant is left:\n{reasons}", "the logs folder of the run has the whole story")
