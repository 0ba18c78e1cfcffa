"""Walks a plan: what the store has is taken from there, the rest runs in workers, several at once.

A step that fails takes down what stands on it, and nothing else.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginesmith.pipeline import workers
from enginesmith.pipeline.artifact import Artifact, HistoryEntry, file_digest, files_below, json_digest
from enginesmith.pipeline.errors import BuilderFailed, EnginesmithError, StepError, StepTimeout
from enginesmith.pipeline.reads import ReadRecord
from enginesmith.pipeline.steps import Step
from enginesmith.pipeline.storage import storage_errors
from enginesmith.pipeline.store import Store
from enginesmith.pipeline.tasks.base import Done, ResumableTask, execute, execute_on

Status = Literal["done", "failed", "skipped", "lacking"]


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    step: str
    status: Status
    artifact: Artifact | None = None
    cached: bool = False
    error: EnginesmithError | None = None
    reason: str = ""

    @property
    def good(self) -> bool:
        """Whether there is an artifact to go on with."""
        return self.artifact is not None and not self.artifact.breach


@dataclass(frozen=True)
class Event:
    """Something for people to see."""

    kind: Literal["started", "progress", "finished"]
    step: Step
    text: str = ""
    outcome: Outcome | None = None


Listener = Callable[[Event], None]


@dataclass
class Runner:
    """Runs plans against a store."""

    store: Store
    logs: Path
    jobs: int = 1
    time_limit_seconds: float | None = None
    listener: Listener = lambda event: None
    _active: set[workers.Worker] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _deadline: float | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)
    _shares: "queue.SimpleQueue[frozenset[int]]" = field(default_factory=queue.SimpleQueue)
    """Cores for each of several steps: thread pools that share cores would spin against each other."""

    def __post_init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        for job in range(self.jobs):
            self._shares.put(frozenset(cores[job % len(cores) :: self.jobs] or cores))

    def run(
        self,
        steps: Sequence[Step],
        on_outcome: Callable[[Mapping[str, Outcome]], object],
        given: Mapping[str, Outcome] | None = None,
    ) -> dict[str, Outcome]:
        """Run every step that can run; ``on_outcome`` sees all outcomes so far, each time there is a new one.

        Steps that ``given`` has an outcome for are not run. On Ctrl-C the running workers are ended and
        KeyboardInterrupt goes on to the caller.
        """
        if self.time_limit_seconds is not None:
            self._deadline = time.monotonic() + self.time_limit_seconds
        outcomes = dict(given or {})
        running: dict[Future[Outcome], Step] = {}
        waiting = [step for step in steps if step.id not in outcomes]
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while waiting or running:
                    starting = self._startable(waiting, outcomes, running.values())
                    alone = len(starting) + len(running) == 1
                    for step in starting:
                        waiting.remove(step)
                        running[pool.submit(self._step, step, dict(outcomes), alone)] = step
                    if not running:
                        raise ValueError(f"the plan has no step that {waiting[0].id} needs: {waiting[0].needs}")
                    finished, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        step = running.pop(future)
                        outcomes[step.id] = outcome = future.result()
                        if step.vital and not outcome.good:
                            outcomes |= {
                                left.id: Outcome(left.id, "skipped", reason=outcome.reason) for left in waiting
                            }
                            waiting.clear()
                    on_outcome(outcomes)
            except BaseException:
                self._stop()
                raise
        return outcomes

    def _startable(self, waiting: list[Step], outcomes: Mapping[str, Outcome], running: Iterable[Step]) -> list[Step]:
        """Steps to start now: inputs there, a job free, and measurements alone on the machine."""
        now = list(running)
        chosen: list[Step] = []
        for step in waiting:
            inputs = (*step.needs.values(), *step.wants.values())
            if not all(name in outcomes for name in inputs):
                continue
            busy = [*now, *chosen]
            if len(busy) >= self.jobs or any(other.task.exclusive for other in busy):
                break
            if step.task.exclusive and busy:
                continue
            chosen.append(step)
        return chosen

    def _step(self, step: Step, before: Mapping[str, Outcome], alone: bool) -> Outcome:
        outcome = Outcome(step.id, "lacking", reason=step.lacking) if step.lacking else self._blocked(step, before)
        if outcome is None:
            wanted = {role: before[name] for role, name in (*step.needs.items(), *step.wants.items())}
            inputs = {role: found.artifact for role, found in wanted.items() if found.artifact and found.good}
            try:
                outcome = self._result(step, inputs, alone)
            except EnginesmithError as error:
                outcome = Outcome(step.id, "failed", error=error, reason=str(error))
        if not self._stopped.is_set():  # what ends now was ended by us
            self.listener(Event("finished", step, outcome=outcome))
        return outcome

    def _blocked(self, step: Step, before: Mapping[str, Outcome]) -> Outcome | None:
        for name in step.needs.values():
            if not before[name].good:
                artifact = before[name].artifact
                reason = artifact.breach if artifact else before[name].reason
                return Outcome(step.id, "skipped", reason=reason)
        return None

    def _result(self, step: Step, inputs: Mapping[str, Artifact], alone: bool) -> Outcome:
        tools = _versions(step.task.tools)
        identity = {
            "task": step.task.identity,
            "tools": tools,
            "code": _own_code(),
            "surroundings": step.task.surroundings,
            "inputs": {role: artifact.sha256 for role, artifact in sorted(inputs.items())},
        }
        index = self.store.reads(json_digest([identity, step.task.place, str(Path.cwd())]))
        known = index.known()
        if known is not None and (found := self.store.get(_key(identity, known))) and not found.provisional:
            history = (*_before(inputs), found.history[-1])  # others may have come to the same by another way
            return Outcome(step.id, "done", found.model_copy(update={"history": history}), cached=True)
        self.listener(Event("started", step))
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self.store.workspace())
            begun = None
            if isinstance(step.task, ResumableTask):
                begun = stack.enter_context(self.store.begun(json_digest([identity, step.task.place])))
            done = self._work(step, inputs, out, begun, alone)
            read = index.remember(done.effect.reads, done.effect.packages)
            artifact = self.store.publish(
                _key(identity, read),
                out,
                kind=step.task.produces,
                file=done.effect.file,
                signature=done.effect.signature,
                history=_history(step, inputs, done, tools),
                breach=done.effect.breach,
                provisional=done.effect.provisional,
            )
        return Outcome(step.id, "done", artifact)

    def _work(self, step: Step, inputs: Mapping[str, Artifact], out: Path, begun: Path | None, alone: bool) -> Done:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left <= 0:
            raise StepTimeout("the time limit was over before it started", "allow more: --time-limit; then resume")
        with storage_errors(f"the logs in {self.logs}"):
            log = self.logs / f"{step.id}.log"
            log.unlink(missing_ok=True)
        worker: list[workers.Worker] = []

        def started(this: workers.Worker) -> None:
            with self._lock:
                worker.append(this)
                self._active.add(this)
            if self._stopped.is_set():
                this.kill()

        share = None if alone else self._shares.get()
        try:
            done: Done = workers.run(
                execute if begun is None else execute_on,
                step.task,
                inputs,
                out,
                *([] if begun is None else [begun]),
                log=log,
                on_progress=lambda text: self.listener(Event("progress", step, text)),
                on_start=started,
                timeout_seconds=left,
                cores=share,
            )
        except (StepError, BuilderFailed) as error:
            error.remedy += f"; its log: {log}"
            raise
        finally:
            if share is not None:
                self._shares.put(share)
            with self._lock:
                self._active.difference_update(worker)
        return done

    def _stop(self) -> None:
        self._stopped.set()
        with self._lock:
            for worker in self._active:
                worker.kill()


def _key(identity: Mapping[str, object], read: ReadRecord) -> str:
    return json_digest({**identity, "read": read.identity})


def _history(step: Step, inputs: Mapping[str, Artifact], done: Done, tools: dict[str, str]) -> tuple[HistoryEntry, ...]:
    entry = HistoryEntry(
        step=step.id,
        parameters=step.task.identity,
        tools=tools,
        seconds=round(done.seconds, 3),
        host_peak_bytes=done.host_peak_bytes,
        effect=done.effect.summary,
        notes=done.effect.notes,
    )
    return (*_before(inputs), entry)


def _before(inputs: Mapping[str, Artifact]) -> tuple[HistoryEntry, ...]:
    """What was done to the artifact that a step goes on with."""
    return inputs["model"].history if "model" in inputs else ()


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _own_code() -> str:
    """Digest of enginesmith's own source: other code may make other artifacts."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("pipeline", "models", "calibration"):
        for name in files_below(root / folder):
            if name.endswith(".py"):
                digest.update(f"{folder}/{name}\0{file_digest(root / folder / name)}\n".encode())
    return digest.hexdigest()
