"""The folder of a run, kept in step with what its steps leave; one process at a time is at work in it."""

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.artifact import (
    MANIFEST_NAMES,
    Artifact,
    copy_folder,
    explain_removal,
    file_digest,
    has_files,
    sync,
    write_whole,
)
from enginesmith.pipeline.errors import SourceError, UsageError, require_utf8, storage_errors
from enginesmith.pipeline.execution.events import Outcome, Outcomes
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.measure.rows import SAMPLES
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Plan, Step, Variant
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results import differences, documents
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.assemble import Header, artifact_of, assemble, find_engine
from enginesmith.pipeline.results.run import Run, StoredArtifact, Workaround, remove_workarounds
from enginesmith.pipeline.store.manifest import MANIFEST
from enginesmith.pipeline.system.machine import Environment
from enginesmith.pipeline.units import name_some

_WRITING_SHARE = 19.0
"""Pause after a write, as a multiple of the time that it took: writing takes 5 % of the time of all runs together."""
_MOST_NAMED = 3
_LEAST_SECONDS = 0.05
"""Least time that a write is assumed to take."""
_EARLIER = ".earlier"
"""End of the name of a folder with an engine that was replaced, until run.json names the new one."""


class RunDirectory:
    """Keeps the folder in step with the outcomes."""

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        steps: Plan,
        environment: Environment,
        neighbors: int = 1,
        workarounds: tuple[Workaround, ...] = (),
    ) -> None:
        self._folder, self._recipe, self._plan = folder, recipe, steps
        self._started, self._neighbors = time.monotonic(), neighbors
        self._whole: set[str] = set()
        """Folders whose files are known to be there, as they should be."""
        self._vectors: dict[str, StoredArtifact] = {}
        """By the step that answered, the test vectors that are written."""
        self._written_at = self._writing_took = 0.0
        self._outcomes: Outcomes = {}
        self._run: Run | None = None
        self._sampled = ""
        """Digest of the latency measurement whose samples are in the folder."""
        _restore_engines(folder)
        before = runs.read(folder) if (folder / "run.json").exists() else None
        if before and before.requested_recipe != remove_workarounds(recipe, workarounds):
            before = None  # one of another recipe has no results
        self._before = before if before and before.recipe == recipe else None
        """The run as an earlier process left it; None once this one has all of its results."""
        self.losses: list[str] = []
        """Results of that run which are not there again yet."""
        self._swapped: list[Path] = []
        """Earlier engines, which stay until run.json names the new ones."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._header = Header(
            name=folder.resolve().name,
            created=before.created if before else now,
            seconds=before.seconds if before else 0.0,
            environment={
                **environment.model_dump(mode="json"),
                "folder": str(Path.cwd()),
                "out": os.path.relpath(folder),  # the run directory from there
            },
            workarounds=workarounds,
        )

    def caution(self, text: str) -> None:
        """Have the run's readers warned."""
        self._header = replace(self._header, cautions=(*self._header.cautions, text))

    def update(self, outcomes: Outcomes) -> None:
        """Take note of what is known now, and write it unless that would be most of what is done here."""
        self._outcomes, self._run = outcomes, None
        took = max(self._writing_took, _LEAST_SECONDS)
        if time.monotonic() - self._written_at > _WRITING_SHARE * took * self._neighbors:
            self.write()

    def write(self) -> Run:
        """Write what is known, unless that has been done."""
        if self._run is None:
            begun = time.monotonic()
            try:
                self._run = self._write(self._outcomes)
            except BaseException:  # a full disk, or Ctrl-C
                self._whole.clear()
                _restore_engines(self._folder)
                raise
            self._written_at, self._writing_took = time.monotonic(), time.monotonic() - begun
        return self._run

    def _write(self, outcomes: Outcomes) -> Run:
        """Write the run, and its engines before it; an earlier run stays as it is while a result of it is missing."""
        header = replace(self._header, seconds=round(self._header.seconds + time.monotonic() - self._started, 3))
        used = [outcome.artifact for outcome in outcomes.values() if outcome.artifact]
        place = f"the run directory {self._folder} or the store"
        with explain_removal(used, "; then resume"), storage_errors(place):
            artifacts = [(variant, find_engine(variant, self._plan, outcomes)) for variant in self._plan.variants]
            engines = [(variant, engine) for variant, engine in artifacts if engine and engine.kind == "engine"]
            paths = {variant.id: _folder(variant) / engine.path.name for variant, engine in engines}
            run = assemble(header, self._recipe, self._plan, outcomes, paths)
            self.losses = runs.list_losses(self._before, run) if self._before else []
            if self._before and self.losses:
                return self._before
            self._before, beside = None, dict[str, dict[str, StoredArtifact]]()
            documents.write_text(self._folder / "environment.json", json.dumps(header.environment, indent=1) + "\n")
            for variant, engine in engines:
                self._copy(_folder(variant), engine)
                beside[variant.id] = self._copy_beside(variant, engine, outcomes)
            records = tuple(record.model_copy(update=beside.get(record.id, {})) for record in run.variants)
            run = run.model_copy(update={"variants": records})
            with self._renew_samples(artifact_of(outcomes, self._plan.latency)):
                runs.write(run, self._folder)
            while self._swapped:
                shutil.rmtree(self._swapped.pop(), ignore_errors=True)
        return run

    @contextlib.contextmanager
    def _renew_samples(self, latency: Artifact | None) -> Iterator[None]:
        """Copy the time of each call of a new measurement before run.json is written, and name the file after it."""
        if latency is None or latency.sha256 == self._sampled:
            yield
            return
        partial = self._folder / f".{SAMPLES}.partial"
        try:
            shutil.copyfile(latency.folder / SAMPLES, partial)
            yield
            partial.replace(self._folder / SAMPLES)
        finally:
            partial.unlink(missing_ok=True)
        self._sampled = latency.sha256

    def _copy_beside(self, variant: Variant, engine: Artifact, outcomes: Outcomes) -> dict[str, StoredArtifact]:
        """Copy the rest of a built variant's package: a graph for other machines, and a test vector.

        The vector is the smallest case of a reference: pruned and sparse models have one each.
        """
        graph_step = self._plan.input_of(variant.artifact, "model")
        step = self._plan.input_of(variant.verified[-1], REFERENCE) if variant.verified else None
        graph, reference = artifact_of(outcomes, graph_step), artifact_of(outcomes, step)
        beside = {}
        if variant.engine.loads_graph and graph:
            same = graph.sha256 == engine.sha256
            where = _folder(variant) if same else Path("graphs", str(graph_step))
            path = where / engine.path.name if same else self._copy(where, graph)
            beside["graph"] = StoredArtifact(path=str(path), sha256=graph.sha256, bytes=graph.bytes)
        if step is not None and reference is not None:
            if step not in self._vectors:
                path = self._folder / f"{step.with_kind('test_vector')}.npz"
                samples.write_vector(reference.folder, path)
                stored = StoredArtifact(path=path.name, sha256=file_digest(path), bytes=path.stat().st_size)
                self._vectors[step] = stored
            beside["test_vector"] = self._vectors[step]
        return beside

    def _copy(self, relative: Path, artifact: Artifact) -> Path:
        """Copy an artifact to a folder of the run directory, unless it is there as it is; returns its main file."""
        target, partial = self._folder / relative, self._folder / relative.with_name(f".{relative.name}.partial")
        if str(relative) not in self._whole and not has_files(target, artifact.sha256):
            shutil.rmtree(partial, ignore_errors=True)
            try:
                copy_folder(artifact.folder, partial, skip=[MANIFEST])
                sync(partial)  # before run.json names it
                record = _Record(id=relative.name, **dict(artifact))
                text = record.model_dump_json(indent=1, exclude={"path", "rejected"})
                (partial / "manifest.json").write_text(text + "\n", encoding="utf-8")
                if target.exists():
                    self._swapped.append(target.rename(target.with_name(f".{target.name}{_EARLIER}")))
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        self._whole.add(str(relative))
        return relative / artifact.path.name


def _folder(variant: Variant) -> Path:
    """Name the folder of a variant's engine; a variant that replays CUDA graphs runs that of the one that does not."""
    return Path("variants", variant.as_built.id)


def _restore_engines(folder: Path) -> None:
    """Put engines back that run.json names, where a process ended between replacing them and writing run.json."""
    run = runs.read(folder) if (folder / "run.json").exists() else None
    stored = [artifact for record in run.variants for artifact in (record.artifact, record.graph)] if run else []
    named = {(folder / artifact.path).parent: artifact.sha256 for artifact in stored if artifact}
    for earlier in folder.glob(f"*/.*{_EARLIER}"):
        target = earlier.with_name(earlier.name.removeprefix(".").removesuffix(_EARLIER))
        if target in named and has_files(earlier, named[target]) and not has_files(target, named[target]):
            shutil.rmtree(target, ignore_errors=True)
            earlier.rename(target)
        else:
            shutil.rmtree(earlier, ignore_errors=True)


class _Record(Artifact):
    """``manifest.json`` beside an artifact's files."""

    id: str


@contextlib.contextmanager
def claim_run_directory(out: Path, recipe: Recipe) -> Iterator[None]:
    """Make a run directory, and lock it for this process; the recipe is the one that people gave."""
    with lock_folder(out):
        if (out / "fleet.json").exists():
            raise UsageError(f"{out} holds a fleet", "choose another --out")
        with storage_errors(f"the run directory {out}"):
            (out / "logs").mkdir(exist_ok=True)
            (out / "variants").mkdir(exist_ok=True)
        before = runs.read(out) if (out / "run.json").exists() else None
        if before and before.requested_recipe != recipe and runs.has_results(before):
            changes = differences.compare_recipes(before.requested_recipe, recipe)
            named = [f"{change.name} is {change.after} here and {change.before} there" for change in changes]
            only_time = [change.name for change in changes] == ["time_seconds"]
            time = " (--time there is the time that it goes on)" if only_time else ""
            raise UsageError(
                f"{out} holds a run of another recipe: {name_some(named, _MOST_NAMED, '; ')}",
                "choose another --out, move that run away with --replace, or continue it: "
                f"`enginesmith resume {out}`{time}",
            )
        yield


@contextlib.contextmanager
def work_where_begun(run: Run) -> Iterator[None]:
    """Work in the folder where a run was begun, if its model is there; else in the current one."""
    folder = Path(run.environment.get("folder") or "/nowhere")
    try:
        with contextlib.chdir(folder):
            resolve(run.recipe.model)
    except (OSError, SourceError):
        folder = Path.cwd()
    with contextlib.chdir(folder):
        yield


def move_earlier_run(out: Path, recipe: Recipe) -> Path | None:
    """Move an earlier run in ``out`` to ``out.1`` or the next free number, and return that folder.

    An unfinished run of the same recipe stays, to be continued; then, and where there is no run, return None.

    Raises:
        UsageError: another process is at work in the folder, or this one is.
    """
    if not (out / "run.json").exists():
        return None
    with lock_folder(out), storage_errors(f"the folder {out.parent}"):
        with contextlib.suppress(UsageError):  # a run that cannot be read is moved, too
            run = runs.read(out)
            if run.requested_recipe == recipe and not run.complete:
                return None
        if Path.cwd().is_relative_to(out.resolve()):
            raise UsageError(
                f"--out {out} is the current folder or one above it, which cannot be moved away",
                "start from another folder, or choose another --out",
            )
        names = (out.with_name(f"{out.name}.{number}") for number in itertools.count(1))
        return out.rename(next(name for name in names if not name.exists()))


@contextlib.contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Lock a folder, made if need be, for this process alone.

    Raises:
        UsageError: another process has it, or its path is not UTF-8.
    """
    require_utf8(str(out.absolute()), "the run directory")
    with storage_errors(f"the run directory {out}"):
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another run is working in {out}", "wait for it, or choose another --out") from error
        yield


# Save and load the files that let another machine resume a run: engines, the reference, and records.
#
# The other machine may have other versions of everything, so keys of the store say nothing there. What is kept holds as
# long as the model is the same, byte for byte, and the step would do the same.

_FOLDER, _INDEX = "kept", "index.json"
_KINDS = ("engine", "reference", "record")
"""Graphs are not among them: nothing that is left to do needs them once the engines are built."""


class _StepHandoff(BaseModel, frozen=True):
    """One step and its artifact."""

    identity: dict[str, Any]
    folder: str
    artifact: Artifact


class _Index(BaseModel, frozen=True):
    load_sha256: str
    """Digest of the model that everything was made from."""
    steps: dict[str, _StepHandoff]


def save_handoff(run: Path, plan: Plan, outcomes: Mapping[str, Outcome]) -> None:
    """Save the artifacts of done steps; those of variants lie in the run directory already."""
    load = outcomes[LOAD].artifact
    if load is None:
        return
    engines = {variant.artifact: f"variants/{variant.id}" for variant in plan.variants}
    steps = {}
    for step in plan.steps:
        artifact = outcomes[step.id].artifact if step.id in outcomes else None
        if artifact is None or artifact.kind not in _KINDS or artifact.incomplete or step.task.environment_key:
            continue
        folder = engines.get(step.id) or f"{_FOLDER}/{step.id}"
        if not (run / folder).is_dir():
            copy_folder(artifact.folder, run / folder, skip=MANIFEST_NAMES)
        relative = artifact.model_copy(update={"path": Path(artifact.path.name)})
        steps[step.id] = _StepHandoff(identity=step.task.identity, folder=folder, artifact=relative)
    index = _Index(load_sha256=load.sha256, steps=steps)
    write_whole(run / _FOLDER / _INDEX, (index.model_dump_json(indent=1) + "\n").encode())


def has_handoff(run: Path) -> bool:
    """Return whether the run directory has files to resume from."""
    return (run / _FOLDER / _INDEX).is_file()


def load_handoff(run: Path, plan: Plan, load: Artifact) -> dict[str, Outcome]:
    """Load the outcomes that are valid here, and those of steps that nothing needs any more."""
    try:
        index = _Index.model_validate_json((run / _FOLDER / _INDEX).read_bytes())
    except (OSError, ValidationError):
        return {}
    if index.load_sha256 != load.sha256:
        return {}
    known: dict[str, Outcome] = {LOAD: Outcome(LOAD, "done", load, cached=True)}
    for step in plan.steps:
        entry = index.steps.get(step.id)
        if not entry or entry.identity != step.task.identity:
            continue
        folder, artifact = run / entry.folder, entry.artifact
        if has_files(folder, artifact.sha256):
            there = artifact.model_copy(update={"path": folder / artifact.path})
            known[step.id] = Outcome(step.id, "done", there, cached=True)
    records = [step for step in plan.steps if step.task.produces == "record"]
    needed = _find_required(plan.steps, known)
    # records of inputs that are made anew here tell of another graph or engine
    while stale := [step.id for step in records if step.id in known and not needed.isdisjoint(step.sources)]:
        known = {name: outcome for name, outcome in known.items() if name not in stale}
        needed = _find_required(plan.steps, known)
    return known | {
        step.id: Outcome(step.id, "done", cached=True, reason="what was made of it is kept")
        for step in plan.steps
        if step.id not in known and step.id not in needed
    }


def _find_required(steps: Sequence[Step], known: Mapping[str, Outcome]) -> set[str]:
    """Find missing steps that a step which makes more than a graph depends on."""
    by_id = {step.id: step for step in steps}
    needed: set[str] = set()
    waiting = [step.id for step in steps if step.id not in known and step.task.produces in _KINDS]
    while waiting:
        name = waiting.pop()
        if name in needed or name in known:
            continue
        needed.add(name)
        waiting += by_id[name].sources
    return needed
