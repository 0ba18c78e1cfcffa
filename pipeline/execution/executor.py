"""The contract of an executor, and what all of them do with a step: look it up in the store, else do it and publish."""

import contextlib
import functools
import hashlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from enginesmith.pipeline.artifact import Artifact, HistoryEntry, file_digest, files_below, json_digest
from enginesmith.pipeline.errors import storage_errors
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store import retry
from enginesmith.pipeline.store.inputs import ReadRecord, to_portable_path
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import plugins
from enginesmith.pipeline.tasks.base import Done, ResumableTask

_ROOMS = ("tasks", "measure", "engines", "passes", "frameworks", "system")
_MAKERS = ("calibration", "models", *(f"pipeline/{room}" for room in _ROOMS))
"""Folders whose code makes artifacts. The store is not among them: it keeps bytes as they are."""


@dataclass(frozen=True)
class StepRequest:
    """One step to carry out."""

    step: Step
    inputs: Mapping[str, Artifact]
    """By role, in the store of the one who orders."""
    log: Path
    """The file that is to hold what the step's process wrote."""
    on_start: Callable[[], None]
    """Called when it turns out that it has to be done, and is not in the store."""
    on_progress: Callable[[str], None]
    """Takes what the step is at, a line that stands for the one before."""
    timeout_seconds: float | None = None
    on_note: Callable[[str], None] = lambda text: None
    """Takes what happened to it and people should know, as a node that was lost."""
    earlier_notes: tuple[str, ...] = ()
    """What did so far, and is to stand in its log."""

    @contextlib.contextmanager
    def with_notes(self) -> Iterator[Self]:
        """The same, for the thread that carries it out: its notes, and what the store tells it, also go to its log.

        They stand at the top of it when this block ends.

        Raises:
            StoreError: the log cannot be written.
        """
        notes = list(self.earlier_notes)

        def note(text: str) -> None:
            notes.append(text)
            self.on_note(text)

        try:
            with retry.notifications_to(note):
                yield replace(self, on_note=note)
        finally:
            if notes:
                with storage_errors(f"the logs in {self.log.parent}"):
                    self.log.parent.mkdir(parents=True, exist_ok=True)
                    log = self.log.read_bytes() if self.log.is_file() else b""
                    self.log.write_bytes("".join(f"--- {note}\n" for note in notes).encode() + log)


@dataclass(frozen=True)
class Result:
    """What came of a request."""

    artifact: Artifact
    cached: bool


class Executor(ABC):
    """Carries out steps; used as a context, which ends whatever still runs when it is left."""

    slots: int
    """Orders that may be given at the same time, each from a thread of its own."""
    max_lookups: int = 16
    """Steps that may be looked up at the same time, beside those: most of that is waiting for a store far away.

    Where it is one, the runner's own thread does it.
    """
    is_local: bool
    """Whether this machine is the only one that steps run on."""

    @abstractmethod
    def why_unavailable(self, place: Place) -> str:
        """Why nothing can run in such a place, as far as can be known before; empty where it can."""

    @abstractmethod
    def can_start(self, step: Step, running: Collection[Step]) -> bool:
        """Whether a step may be ordered now, beside those."""

    def run(self, request: StepRequest) -> Result:
        """Take a step from the store, or do it.

        Raises:
            EnginesmithError: it failed.
        """
        found = self.lookup(request)
        return self.execute(request) if found is None else Result(found, cached=True)

    @abstractmethod
    def lookup(self, request: StepRequest) -> Artifact | None:
        """What the store has of a step.

        Raises:
            StoreError: it refuses to tell, or was away for too long.
        """

    def allows_lookups(self, step: Step) -> bool:
        """Whether a step may begin while others are looked up."""
        return True

    @abstractmethod
    def execute(self, request: StepRequest) -> Result:
        """Do a step that is not known; returns when it is done.

        Raises:
            EnginesmithError: it failed; what the executor could mend itself, as a node that was lost, is no failure.
        """

    @abstractmethod
    def stop(self) -> None:
        """End what is running now; threads in :meth:`lookup` and :meth:`execute` come back with an error."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.stop()
        self.close()


@dataclass(frozen=True)
class StepCache:
    """A step with its inputs, held against a store: on the machine that it would be done on."""

    step: Step
    inputs: Mapping[str, Artifact]
    store: Store

    @functools.cached_property
    def tools(self) -> dict[str, str]:
        """Versions that are part of the key."""
        return _versions(self.step.task.tools)

    @functools.cached_property
    def _identity(self) -> str:
        """Digest of all that is known before it has run."""
        return json_digest(
            {
                "task": self.step.task.identity,
                "tools": self.tools,
                "code": own_code(),
                "plugins": plugins.identify_plugins(self.step.task),
                "environment_key": self.step.task.environment_key,
                "inputs": {role: artifact.sha256 for role, artifact in sorted(self.inputs.items())},
            }
        )

    @functools.cached_property
    def _name(self) -> str:
        """What it is known by before it has run, on any machine."""
        return json_digest([self._identity, to_portable_path(self.step.task.place)])

    def lookup(self) -> Artifact | None:
        """What the store has of it, with the history of these inputs: others may have come to the same another way."""
        for known in self.store.dependencies(self._name).candidates():
            found = self.store.get(self._key(known))
            if found is not None and not found.incomplete:
                return found.model_copy(update={"history": (*self._before, found.history[-1])})
        return None

    def make(self, work: Callable[[Path, Path | None], Done]) -> Artifact:
        """Do it and publish what comes out; ``work`` takes the empty folder, and for a long task the one it goes on in.

        Raises:
            EnginesmithError: as the work raises; the store cannot be written.
        """
        step = self.step
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self.store.workspace())
            begun = None
            if isinstance(step.task, ResumableTask):
                begun = stack.enter_context(self.store.partial_work(self._name))
            done = work(out, begun)
            read = self.store.dependencies(self._name).record(done.effect.reads, done.effect.packages)
            return self.store.publish(
                self._key(read),
                out,
                kind=step.task.produces,
                file=done.effect.file,
                signature=done.effect.signature,
                history=self._history(done),
                rejected=done.effect.rejected,
                incomplete=done.effect.incomplete,
                read=read,
            )

    def _key(self, read: ReadRecord) -> str:
        return json_digest([self._identity, read.identity])

    def _history(self, done: Done) -> tuple[HistoryEntry, ...]:
        entry = HistoryEntry(
            step=self.step.name,
            parameters=self.step.task.identity,
            tools=self.tools,
            seconds=round(done.seconds, 3),
            host_peak_bytes=done.host_peak_bytes,
            effect=done.effect.summary,
            notes=done.effect.notes,
        )
        return (*self._before, entry)

    @property
    def _before(self) -> tuple[HistoryEntry, ...]:
        """What was done to the artifact that the step goes on with."""
        return self.inputs["model"].history if "model" in self.inputs else ()


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    return {name: found for name in distributions if (found := _version(name))}


@functools.cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def own_code() -> str:
    """Digest the parts of enginesmith's own source that decide what an artifact is.

    Planning, reports and the command line are left out: a changed word in a report leaves what is stored valid.
    """
    root = Path(__file__).parents[2]
    sources = [root / "pipeline" / f"{name}.py" for name in ("artifact", "tensors", "units")]
    sources += [folder / name for part in _MAKERS for folder in [root / part] for name in files_below(folder)]
    digest = hashlib.sha256()
    for file in sources:
        if file.suffix == ".py":
            digest.update(f"{file.relative_to(root)}\0{file_digest(file)}\n".encode())
    return digest.hexdigest()
