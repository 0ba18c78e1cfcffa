"""Walks a plan: has each step whose inputs are there looked up, and done where nobody knows it, several at once.

Many more can be looked up at a time than done. A step that fails takes down what stands on it, and nothing else.
"""

import heapq
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from enginesmith.pipeline.errors import EnginesmithError, StepTimeout
from enginesmith.pipeline.execution.events import Event, Listener, Outcome, Outcomes
from enginesmith.pipeline.execution.executor import Executor, Result, StepRequest
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.store import retry

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_AGAIN_SECONDS = 5.0
"""A step that had to wait longer for its turn is looked up once more: another one may have done it meanwhile."""


@dataclass(frozen=True)
class _LookUp:
    """When a step was looked up, and what the store told meanwhile."""

    at: float
    notes: tuple[str, ...]


@dataclass
class Runner:
    """Runs plans on an executor."""

    executor: Executor
    log_of: Callable[[Step], Path]
    """Where the log of a step is kept."""
    time_limit_seconds: float | None = None
    listener: Listener = lambda event: None
    _deadline: float | None = None
    _looked_up: dict[str, "_LookUp"] = field(default_factory=dict)
    """Of steps that nobody knew."""

    def run(
        self,
        steps: Sequence[Step],
        given: Outcomes | None = None,
        on_new: Callable[[Outcomes], object] = lambda outcomes: None,
    ) -> dict[str, Outcome]:
        """Run every step that can run, and say how all ended; ``on_new`` is told of those that end as they do.

        Steps that ``given`` has an outcome for are not run. On Ctrl-C what runs is ended and KeyboardInterrupt goes on
        to the caller.

        Raises:
            ValueError: a step needs one that is neither among them nor given.
        """
        if self.time_limit_seconds is not None:
            self._deadline = time.monotonic() + self.time_limit_seconds
        outcomes = dict(given or {})
        left = [step for step in steps if step.id not in outcomes]
        for step in left:
            self.listener(Event("planned", step))
        todo = _ToDo(left, outcomes)
        ended: queue.SimpleQueue[tuple[Step, Future[Outcome | None]]] = queue.SimpleQueue()
        asked: set[str] = set()
        running: dict[str, Step] = {}

        def submit(pool: Pool, work: Callable[[Step, Outcomes], Outcome | None], step: Step) -> None:
            future = pool.submit(work, step, _inputs(step, outcomes))
            future.add_done_callback(lambda done: ended.put((step, done)))

        max_lookups = self.executor.max_lookups
        with (
            ThreadPoolExecutor(max_lookups) if max_lookups > 1 else _ThisThread() as asking,
            ThreadPoolExecutor(self.executor.slots) as doing,
        ):
            try:
                while todo or running:
                    for step in todo.ask(max_lookups - len(asked)):
                        asked.add(step.id)
                        submit(asking, self._known, step)
                    for step in todo.take(self._room(running, asked)):
                        running[step.id] = step
                        submit(doing, self._done, step)
                    if not running and not asked:
                        raise ValueError(f"the plan lacks these steps, which others need: {', '.join(todo.lacking)}")
                    step, future = ended.get()
                    outcome = future.result()
                    if step.id in asked:
                        asked.remove(step.id)
                        if not todo.answered(step, known=outcome is not None):
                            continue
                    else:
                        del running[step.id]
                    assert outcome is not None
                    self.listener(Event("finished", step, outcome=outcome))
                    new: dict[str, Outcome] = {step.id: outcome}
                    if step.required and not outcome.good:
                        new |= {left: Outcome(left, "skipped", reason=outcome.reason) for left in todo.give_up()}
                    todo.done(step.id)
                    outcomes |= new
                    on_new(new)
            except BaseException:
                self.executor.stop()
                raise
        return outcomes

    def _room(self, running: Mapping[str, Step], asked: Collection[str]) -> Callable[[Step], bool | None]:
        """Says of a step whether it may begin now; None where no step may: none overtakes one that waits a moment."""

        def room(step: Step) -> bool | None:
            if len(running) >= self.executor.slots:
                return None
            if not self.executor.can_start(step, running.values()):
                return False
            return True if not asked or self.executor.allows_lookups(step) else None

        return room

    def _known(self, step: Step, inputs: Outcomes) -> Outcome | None:
        """How it ends without being done; None where it has to be."""
        if step.unavailable:
            return Outcome(step.id, "unavailable", reason=step.unavailable)
        return _blocked(step, inputs) or self._tried(self._look_up, step, inputs)

    def _done(self, step: Step, inputs: Outcomes) -> Outcome | None:
        before = self._looked_up.pop(step.id)
        if time.monotonic() - before.at > _LOOK_AGAIN_SECONDS and (found := self._tried(self._look_up, step, inputs)):
            return found
        return self._tried(
            lambda request: self.executor.execute(replace(request, earlier_notes=before.notes)), step, inputs
        )

    def _look_up(self, request: StepRequest) -> Result | None:
        notes: list[str] = []

        def note(text: str) -> None:
            notes.append(text)
            request.on_note(text)

        with retry.notifications_to(note):
            found = self.executor.lookup(request)
        if found is not None:
            return Result(found, cached=True)
        self._looked_up[request.step.id] = _LookUp(time.monotonic(), tuple(notes))
        return None

    def _tried(self, work: Callable[[StepRequest], Result | None], step: Step, inputs: Outcomes) -> Outcome | None:
        try:
            result = work(self._request(step, inputs))
        except EnginesmithError as error:
            return Outcome(step.id, "failed", error=error, reason=str(error))
        return Outcome(step.id, "done", result.artifact, result.cached) if result is not None else None

    def _request(self, step: Step, inputs: Outcomes) -> StepRequest:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left <= 0:
            raise StepTimeout("the time limit was over before it started", "allow more: --time-limit; then resume")
        return StepRequest(
            step,
            {role: found.artifact for role, found in inputs.items() if found.artifact and found.good},
            log=self.log_of(step),
            on_start=lambda: self.listener(Event("started", step)),
            on_progress=lambda text: self.listener(Event("progress", step, text)),
            timeout_seconds=left,
            on_note=lambda text: self.listener(Event("note", step, text)),
        )


class _ThisThread(Pool):
    """Does what is submitted at once."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(function(*args, **kwargs))
        return future


class _ToDo:
    """Steps that have not begun: those whose inputs are there, in the order of the plan, and the others."""

    def __init__(self, steps: Sequence[Step], outcomes: Outcomes) -> None:
        self._steps: dict[str, tuple[int, Step]] = {step.id: (position, step) for position, step in enumerate(steps)}
        self._missing: dict[str, set[str]] = {
            step.id: {name for name in step.sources if name not in outcomes} for step in steps
        }
        self._takers: dict[str, list[str]] = defaultdict(list)
        for step, missing in self._missing.items():
            for name in missing:
                self._takers[name].append(step)
        self._ready = [self._steps[step] for step, missing in self._missing.items() if not missing]
        """Steps to be looked up: a heap by position."""
        self._unknown: list[tuple[int, Step]] = []
        """Steps to be done, likewise."""
        heapq.heapify(self._ready)

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def lacking(self) -> list[str]:
        """What is waited for, and is no step itself."""
        wanted = {name for step in self._steps for name in self._missing[step]}
        return sorted(wanted - self._steps.keys())

    def ask(self, count: int) -> Iterator[Step]:
        """Steps to look up now, that many at most."""
        while self._ready and count > 0:
            count -= 1
            yield heapq.heappop(self._ready)[1]

    def answered(self, step: Step, *, known: bool) -> bool:
        """A step was looked up: one that is not ``known`` has to be done. Gives back whether it has ended."""
        if step.id not in self._steps:  # all was given up meanwhile
            return False
        if known:
            del self._steps[step.id]
        else:
            heapq.heappush(self._unknown, self._steps[step.id])
        return known

    def take(self, room: Callable[[Step], bool | None]) -> Iterator[Step]:
        """Steps to do now; ``room`` is asked anew after each one that was taken."""
        passed_over = []
        while self._unknown:
            position, step = heapq.heappop(self._unknown)
            if there_is := room(step):
                del self._steps[step.id]
                yield step
                continue
            passed_over.append((position, step))
            if there_is is None:
                break
        for entry in passed_over:
            heapq.heappush(self._unknown, entry)

    def done(self, name: str) -> None:
        """A step has ended: others may have all their inputs now."""
        for taker in self._takers.pop(name, ()):
            self._missing[taker].discard(name)
            if not self._missing[taker] and taker in self._steps:
                heapq.heappush(self._ready, self._steps[taker])

    def give_up(self) -> list[str]:
        """Begin no step any more; gives back those that had not begun."""
        left = list(self._steps)
        self._steps.clear()
        self._ready.clear()
        self._unknown.clear()
        return left


def _inputs(step: Step, outcomes: Outcomes) -> dict[str, Outcome]:
    """By role, how the steps ended that it takes from."""
    return {role: outcomes[name] for role, name in (*step.inputs.items(), *step.optional_inputs.items())}


def _blocked(step: Step, inputs: Outcomes) -> Outcome | None:
    for role in step.inputs:
        if not inputs[role].good:
            artifact = inputs[role].artifact
            reason = artifact.rejected if artifact else inputs[role].reason
            return Outcome(step.id, "skipped", reason=reason)
    return None
