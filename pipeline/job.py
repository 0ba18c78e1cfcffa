"""The main job: a recipe in, a run directory out. It can be interrupted anywhere and done again from there."""

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginesmith.pipeline import kept, samples, workers
from enginesmith.pipeline import run as runs
from enginesmith.pipeline.artifact import Artifact, file_digest, holds
from enginesmith.pipeline.assemble import Header, assemble
from enginesmith.pipeline.errors import MissingCapability, ModelError, SourceError, UsageError
from enginesmith.pipeline.measure import device
from enginesmith.pipeline.outcomes import Outcomes, made
from enginesmith.pipeline.plan import in_time, plan
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.report import files
from enginesmith.pipeline.run import Run, StoredArtifact
from enginesmith.pipeline.runner import Listener, Outcome, Runner
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.steps import LOAD, REFERENCE, Plan, Variant
from enginesmith.pipeline.storage import storage_errors
from enginesmith.pipeline.store import Store, default_root
from enginesmith.pipeline.tasks.measure import SAMPLES


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
        try:
            outcomes = runner.run(in_order, directory.update, given)
            run = directory.update(outcomes)
        finally:
            directory.report()
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
    before, out = runs.read(out, to_go_on=True), out.absolute()
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
        """Folders whose files are known to be there, as they should be."""
        self._vectors: dict[str, StoredArtifact] = {}
        """By the step that answered, the test vectors that are written."""
        self._run: Run | None = None
        self._sampled = ""
        """Digest of the latency measurement whose samples are in the folder."""
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

    def update(self, outcomes: Outcomes) -> Run:
        """Write what is known now."""
        header = replace(self._header, seconds=round(self._header.seconds + time.monotonic() - self._started, 3))
        with storage_errors(f"the run directory {self._folder}, or the store,"):
            artifacts = {
                variant.id: path for variant in self._plan.variants if (path := self._placed(variant, outcomes))
            }
            beside = {name: self._beside(name, outcomes) for name in artifacts}
            run = assemble(header, self._recipe, self._plan, outcomes, artifacts, beside)
            runs.write(run, self._folder)
            self._keep_samples(made(outcomes, self._plan.latency))
        self._run = run
        return run

    def report(self) -> None:
        """Write the reports of what is known, of a run that was interrupted, too."""
        if self._run is not None:
            files.write(self._run, self._folder)

    def _keep_samples(self, latency: Artifact | None) -> None:
        """Copy every latency that was measured, for the reports and for comparing runs."""
        if latency is None or latency.sha256 == self._sampled:
            return
        partial = self._folder / f".{SAMPLES}.partial"
        shutil.copyfile(latency.folder / SAMPLES, partial)
        partial.replace(self._folder / SAMPLES)
        self._sampled = latency.sha256

    def _placed(self, variant: Variant, outcomes: Outcomes) -> Path | None:
        """The engine's main file in the run directory, copied there when it is new."""
        artifact = made(outcomes, variant.artifact)
        if artifact is None or artifact.kind != "engine":
            return None
        return self._copied(Path("variants", variant.id), artifact)

    def _beside(self, name: str, outcomes: Outcomes) -> dict[str, StoredArtifact]:
        """What a package of a built variant takes besides the engine: a graph for other machines, and a test vector."""
        variant = next(one for one in self._plan.variants if one.id == name)
        engine, graph = made(outcomes, variant.artifact), made(outcomes, self._plan.graph_of(variant))
        found = {}
        if variant.engine.loads_graph and engine and graph:
            same = graph.sha256 == engine.sha256
            where = Path("variants", name) if same else Path("graphs", str(self._plan.graph_of(variant)))
            path = where / engine.path.name if same else self._copied(where, graph)
            found["graph"] = StoredArtifact(path=str(path), sha256=graph.sha256, bytes=graph.bytes)
        if vector := self._vector(self._plan.reference_of(variant), outcomes):
            found["test_vector"] = vector
        return found

    def _vector(self, step: str | None, outcomes: Outcomes) -> StoredArtifact | None:
        """The smallest case of a reference, written when that is there: pruned and sparse models have one each."""
        reference = made(outcomes, step)
        if step is None or reference is None:
            return None
        if step not in self._vectors:
            path = self._folder / f"{step.replace(REFERENCE, 'test_vector', 1)}.npz"
            samples.write_vector(reference.folder, path)
            self._vectors[step] = StoredArtifact(path=path.name, sha256=file_digest(path), bytes=path.stat().st_size)
        return self._vectors[step]

    def _copied(self, relative: Path, artifact: Artifact) -> Path:
        """The main file of an artifact that is copied to a folder of the run directory, unless it is there as it is."""
        target, partial = self._folder / relative, self._folder / relative.with_name(f".{relative.name}.partial")
        if str(relative) not in self._whole and not holds(target, artifact.sha256):
            for old in (partial, target):
                shutil.rmtree(old, ignore_errors=True)
            try:
                shutil.copytree(artifact.folder, partial, ignore=shutil.ignore_patterns("artifact.json"))
                manifest = {"id": relative.name, **artifact.model_dump(mode="json", exclude={"path", "breach"})}
                (partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        self._whole.add(str(relative))
        return relative / artifact.path.name


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


def _raise_if_useless(run: Run, outcomes: Outcomes) -> None:
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
