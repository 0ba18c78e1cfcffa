"""Define the contract of executors, and look up and publish the results of steps in the store."""

import contextlib
import functools
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from enginesmith.pipeline.artifact import Artifact, HistoryEntry, explain_removal, file_digest, files_below, json_digest
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store.inputs import ReadRecord, to_portable_path
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import plugins, software
from enginesmith.pipeline.tasks.base import Done, ResumableTask

_KEYED_ROOMS = ("tasks", "measure", "engines", "passes", "frameworks", "system")
_KEYED_FOLDERS = ("calibration", "models", *(f"pipeline/{room}" for room in _KEYED_ROOMS))
"""Folders whose code makes artifacts. The store is not among them: it keeps bytes as they are."""


@dataclass(frozen=True)
class StepRequest:
    """A step to execute."""

    step: Step
    inputs: Mapping[str, Artifact]
    """By role, in the store of the caller."""
    log: Path
    on_start: Callable[[], None]
    on_progress: Callable[[str], None]
    """Takes the state of the step, a line that replaces the one before."""
    timeout_seconds: float | None = None
    on_note: Callable[[str], None] = lambda text: None
    """Takes events that people should know, as a node that was lost; they go to the top of the log, too."""

    def after(self, seconds: float) -> "StepRequest | None":
        """Copy it with the time that is left when some was spent; None where none is."""
        if self.timeout_seconds is None:
            return self
        left = self.timeout_seconds - seconds
        own = max(0.0, min(self.step.task.left_seconds - seconds, left))
        task = self.step.task.model_copy(update={"left_seconds": own})
        return replace(self, step=replace(self.step, task=task), timeout_seconds=left) if left > 0 else None


@dataclass(frozen=True)
class Result:
    """Result of a request."""

    artifact: Artifact
    cached: bool


class Executor(ABC):
    """Executes steps; a context, which ends running steps on an error."""

    slots: int
    """Requests that may be executed at the same time, each from a thread of its own."""
    max_lookups: int = 16
    """Steps that may be looked up at the same time, beside those: most of that is waiting for a distant store.

    If it is one, the runner's own thread does it.
    """
    is_local: bool
    """True if all steps run on this machine."""

    @abstractmethod
    def why_unavailable(self, place: Place) -> str:
        """Explain why nothing can run in a place, as far as is known before; empty if it can."""

    @abstractmethod
    def can_start(self, step: Step, running: Collection[Step]) -> bool:
        """Return whether a step may start now, beside the running ones."""

    def run(self, request: StepRequest) -> Result:
        """Take a step's result from the store, or execute the step.

        Raises:
            EnginesmithError: it failed.
        """
        artifact = self.lookup(request)
        return self.execute(request) if artifact is None else Result(artifact, cached=True)

    @abstractmethod
    def lookup(self, request: StepRequest) -> Artifact | None:
        """Look up a step in the store.

        Raises:
            StoreError: it refuses access, or cannot be reached.
        """

    def allows_lookups(self, step: Step) -> bool:
        """Return whether a step may start while others are looked up."""
        return True

    @abstractmethod
    def execute(self, request: StepRequest) -> Result:
        """Execute a step that is not in the store; returns when it is done.

        Raises:
            EnginesmithError: it failed. The executor itself deals with faults such as a node that was lost.
        """

    @abstractmethod
    def stop(self) -> None:
        """End running steps; threads in :meth:`lookup` and :meth:`execute` raise an error."""

    @abstractmethod
    def close(self) -> None:
        """Release resources."""

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
    """The entry of a step with its inputs in a store, with the key of this machine."""

    step: Step
    inputs: Mapping[str, Artifact]
    store: Store

    @functools.cached_property
    def tools(self) -> dict[str, str]:
        """Versions that are part of the key."""
        return software.versions(self.step.task.tools)

    @functools.cached_property
    def _identity(self) -> str:
        """Digest of everything that is known before it has run."""
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
        """Name for :class:`InputDependencies`, known before it has run, and the same on any machine."""
        return json_digest([self._identity, to_portable_path(self.step.task.place)])

    def lookup(self) -> Artifact | None:
        """Look up the artifact; its history becomes that of these inputs, which may be others of equal content."""
        for read in self.store.dependencies(self._name).candidates():
            artifact = self.store.get(self._key(read))
            if artifact is not None and (self.step.as_it_was or not artifact.incomplete):
                return artifact.model_copy(update={"history": (*self._before, artifact.history[-1])})
        return None

    def make(self, work: Callable[[Path, Path | None], Done]) -> Artifact:
        """Execute the step and publish its files; if what it read is not known, no lookup finds them.

        ``work`` takes an empty folder, and for a resumable task that of its partial work.

        Raises:
            EnginesmithError: as the work raises; the store cannot be written.
        """
        step, begun_ns = self.step, time.time_ns()
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self.store.workspace())
            partial = None
            if isinstance(step.task, ResumableTask):
                partial = stack.enter_context(self.store.partial_work(self._name))
            with explain_removal(self.inputs.values()):
                done = work(out, partial)
            effect = done.effect
            read = self.store.dependencies(self._name).record(effect, begun_ns)
            key, unknown = self._key(read), list(effect.unknown)
            if read.changed:
                others = f" and {len(read.changed) - 1} others" if len(read.changed) > 1 else ""
                unknown.append(f"{read.changed[0]}{others} changed while it ran")
            if unknown:
                key = json_digest([key, begun_ns])
            notes = (*effect.notes, *(f"{reason}: it is done again the next time" for reason in unknown))
            entry = HistoryEntry(
                step=step.name,
                parameters=step.task.identity,
                tools=self.tools,
                seconds=round(done.seconds, 3),
                host_peak_bytes=done.host_peak_bytes,
                effect=effect.summary,
                notes=notes,
            )
            return self.store.publish(
                key,
                out,
                kind=step.task.produces,
                file=effect.file,
                signature=effect.signature,
                history=(*self._before, entry),
                rejected=effect.rejected,
                incomplete=effect.incomplete,
                read=read,
            )

    def _key(self, read: ReadRecord) -> str:
        return json_digest([self._identity, read.identity])

    @property
    def _before(self) -> tuple[HistoryEntry, ...]:
        return self.inputs["model"].history if "model" in self.inputs else ()


@functools.cache
def own_code() -> str:
    """Digest the parts of enginesmith's own source that decide what an artifact is.

    Planning, reports and the command line are left out: a changed word in a report leaves what is stored valid.
    """
    root = Path(__file__).parents[2]
    sources = [root / "pipeline" / f"{name}.py" for name in ("artifact", "tensors", "units")]
    sources += [folder / name for part in _KEYED_FOLDERS for folder in [root / part] for name in files_below(folder)]
    digest = hashlib.sha256()
    for file in sources:
        if file.suffix == ".py":
            digest.update(f"{file.relative_to(root)}\0{file_digest(file)}\n".encode())
    return digest.hexdigest()
