"""The folder of a run, kept in step with what its steps leave; one process at a time is at work in it."""

import contextlib
import datetime
import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from enginesmith.pipeline import run as runs
from enginesmith.pipeline import samples
from enginesmith.pipeline.artifact import Artifact, file_digest, files_below, holds
from enginesmith.pipeline.assemble import Header, assemble
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.device import Environment
from enginesmith.pipeline.measure.rows import SAMPLES
from enginesmith.pipeline.outcomes import artifact_of
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.run import Run, StoredArtifact
from enginesmith.pipeline.runner import Outcomes
from enginesmith.pipeline.steps import REFERENCE, Plan, Variant
from enginesmith.pipeline.storage import storage_errors
from enginesmith.pipeline.stored_entry import MANIFEST

_WRITING_SHARE = 19.0
"""So many times longer than writing took, nothing is written anew: 5 % of the time of all runs together."""
_LEAST_SECONDS = 0.05
"""What writing is taken for at the least: while nothing is known it takes no time."""


class RunDirectory:
    """Keeps the folder in step with the outcomes."""

    def __init__(
        self, folder: Path, recipe: Recipe, steps: Plan, environment: Environment, neighbours: int = 1
    ) -> None:
        self._folder, self._recipe, self._plan = folder, recipe, steps
        self._started, self._neighbours = time.monotonic(), neighbours
        self._whole: set[str] = set()
        """Folders whose files are known to be there, as they should be."""
        self._vectors: dict[str, StoredArtifact] = {}
        """By the step that answered, the test vectors that are written."""
        self._written_at = self._writing_took = 0.0
        self._outcomes: Outcomes = {}
        self._run: Run | None = None
        self._sampled = ""
        """Digest of the latency measurement whose samples are in the folder."""
        before = runs.read(folder) if (folder / "run.json").exists() else None
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._header = Header(
            name=folder.resolve().name,
            created=before.created if before else now,
            seconds=before.seconds if before else 0.0,
            environment={**environment.model_dump(mode="json"), "folder": str(Path.cwd())},
        )
        with storage_errors(f"the run directory {folder}"):
            (folder / "environment.json").write_text(json.dumps(self._header.environment, indent=1) + "\n")

    def caution(self, text: str) -> None:
        """Have the run's readers warned."""
        self._header = replace(self._header, cautions=(*self._header.cautions, text))

    def update(self, outcomes: Outcomes) -> None:
        """Take note of what is known now, and write it unless that would be most of what is done here."""
        self._outcomes, self._run = outcomes, None
        took = max(self._writing_took, _LEAST_SECONDS)
        if time.monotonic() - self._written_at > _WRITING_SHARE * took * self._neighbours:
            self.write()

    def write(self) -> Run:
        """Write what is known, unless that has been done."""
        if self._run is None:
            begun = time.monotonic()
            self._run = self._write(self._outcomes)
            self._written_at, self._writing_took = time.monotonic(), time.monotonic() - begun
        return self._run

    def _write(self, outcomes: Outcomes) -> Run:
        header = replace(self._header, seconds=round(self._header.seconds + time.monotonic() - self._started, 3))
        with storage_errors(f"the run directory {self._folder}, or the store,"):
            artifacts = {
                variant.id: path for variant in self._plan.variants if (path := self._placed(variant, outcomes))
            }
            beside = {name: self._beside(name, outcomes) for name in artifacts}
            run = assemble(header, self._recipe, self._plan, outcomes, artifacts, beside)
            runs.write(run, self._folder)
            self._keep_samples(artifact_of(outcomes, self._plan.latency))
        return run

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
        artifact = artifact_of(outcomes, variant.artifact)
        if artifact is None or artifact.kind != "engine":
            return None
        return self._copied(Path("variants", variant.id), artifact)

    def _beside(self, name: str, outcomes: Outcomes) -> dict[str, StoredArtifact]:
        """What a package of a built variant takes besides the engine: a graph for other machines, and a test vector."""
        variant = next(one for one in self._plan.variants if one.id == name)
        engine, graph = artifact_of(outcomes, variant.artifact), artifact_of(outcomes, self._plan.graph_of(variant))
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
        reference = artifact_of(outcomes, step)
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
            for old in (one for one in (partial, target) if one.exists()):
                shutil.rmtree(old, ignore_errors=True)
            try:
                for name in files_below(artifact.folder, skip=[MANIFEST]):
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(artifact.folder / name, partial / name)
                record = _Record(id=relative.name, **dict(artifact)).model_dump_json(
                    indent=1, exclude={"path", "rejected"}
                )
                (partial / "manifest.json").write_text(record + "\n", encoding="utf-8")
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        self._whole.add(str(relative))
        return relative / artifact.path.name


class _Record(Artifact):
    """``manifest.json`` beside an artifact's files."""

    id: str


@contextlib.contextmanager
def claimed(out: Path, recipe: Recipe) -> Iterator[None]:
    """Hold a run directory for this process."""
    with held(out):
        if (out / "fleet.json").exists():
            raise UsageError(f"{out} holds a fleet", "choose another --out")
        with storage_errors(f"the run directory {out}"):
            (out / "logs").mkdir(exist_ok=True)
            (out / "variants").mkdir(exist_ok=True)
        if (out / "run.json").exists() and runs.read(out).recipe != recipe:
            raise UsageError(
                f"{out} holds a run of another recipe",
                f"choose another --out, or continue that one with `enginesmith resume {out}`",
            )
        yield


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Have a folder, made if need be, for this process alone.

    Raises:
        UsageError: another process has it.
    """
    with storage_errors(f"the run directory {out}"):
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another run is at work in {out}", "wait for it, or choose another --out") from error
        yield
