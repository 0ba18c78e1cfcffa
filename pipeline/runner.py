"""Walks a plan: hands each step whose inputs are there to an executor, several at once.

A step that fails takes down what stands on it, and nothing else.
"""

import heapq
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import EnginesmithError, StepTimeout
from enginesmith.pipeline.executors.base import Executor, Order
from enginesmith.pipeline.steps import Step

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

    kind: Literal["started", "progress", "note", "finished"]
    step: Step
    text: str = ""
    outcome: Outcome | None = None


Listener = Callable[[Event], None]
Outcomes = Mapping[str, Outcome]
"""By step, how it ended."""


@dataclass
class Runner:
    """Runs plans on an executor."""

    executor: Executor
    log_of: Callable[[Step], Path]
    """Where the log of a step is kept."""
    time_limit_seconds: float | None = None
    listener: Listener = lambda event: None
    _deadline: float | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)

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
        todo = _ToDo([step for step in steps if step.id not in outcomes], outcomes)
        ended: queue.SimpleQueue[tuple[Step, Future[Outcome]]] = queue.SimpleQueue()
        running: dict[str, Step] = {}
        with ThreadPoolExecutor(self.executor.slots) as pool:
            try:
                while todo or running:
                    for step in todo.take(self._room(running)):
                        running[step.id] = step
                        future = pool.submit(self._step, step, _inputs(step, outcomes))
                        future.add_done_callback(lambda done, step=step: ended.put((step, done)))  # type: ignore[misc]
                    if not running:
                        raise ValueError(f"the plan lacks these steps, which others need: {', '.join(todo.lacking)}")
                    step, future = ended.get()
                    del running[step.id]
                    new = {step.id: (outcome := future.result())}
                    if step.vital and not outcome.good:
                        new |= {left: Outcome(left, "skipped", reason=outcome.reason) for left in todo.give_up()}
                    todo.done(step.id)
                    outcomes |= new
                    on_new(new)
            except BaseException:
                self._stopped.set()
                self.executor.stop()
                raise
        return outcomes

    def _room(self, running: Mapping[str, Step]) -> Callable[[Step], bool | None]:
        """Says of a step whether it may begin now; None where no step may."""
        fits, slots = self.executor.fits, self.executor.slots
        return lambda step: fits(step, running.values()) if len(running) < slots else None

    def _step(self, step: Step, inputs: Outcomes) -> Outcome:
        outcome = Outcome(step.id, "lacking", reason=step.lacking) if step.lacking else _blocked(step, inputs)
        if outcome is None:
            try:
                outcome = self._carried_out(step, inputs)
            except EnginesmithError as error:
                outcome = Outcome(step.id, "failed", error=error, reason=str(error))
        if not self._stopped.is_set():  # what ends now was ended by us
            self.listener(Event("finished", step, outcome=outcome))
        return outcome

    def _carried_out(self, step: Step, inputs: Outcomes) -> Outcome:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left <= 0:
            raise StepTimeout("the time limit was over before it started", "allow more: --time-limit; then resume")
        order = Order(
            step,
            {role: found.artifact for role, found in inputs.items() if found.artifact and found.good},
            log=self.log_of(step),
            started=lambda: self.listener(Event("started", step)),
            tell=lambda text: self.listener(Event("progress", step, text)),
            timeout_seconds=left,
            note=lambda text: self.listener(Event("note", step, text)),
        )
        result = self.executor.carry_out(order)
        return Outcome(step.id, "done", result.artifact, result.cached)


class _ToDo:
    """Steps that have not begun: those whose inputs are there, in the order of the plan, and the others."""

    def __init__(self, steps: Sequence[Step], outcomes: Outcomes) -> None:
        self._steps = {step.id: (position, step) for position, step in enumerate(steps)}
        self._missing = {step.id: {name for name in _sources(step) if name not in outcomes} for step in steps}
        self._takers: dict[str, list[str]] = defaultdict(list)
        for step, missing in self._missing.items():
            for name in missing:
                self._takers[name].append(step)
        self._ready = [self._steps[step] for step, missing in self._missing.items() if not missing]
        """A heap by position."""
        heapq.heapify(self._ready)

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def lacking(self) -> list[str]:
        """What is waited for, and is no step itself."""
        wanted = {name for step in self._steps for name in self._missing[step]}
        return sorted(wanted - self._steps.keys())

    def take(self, room: Callable[[Step], bool | None]) -> Iterator[Step]:
        """Steps to begin now; ``room`` is asked anew after each one that was taken."""
        passed_over = []
        while self._ready:
            position, step = heapq.heappop(self._ready)
            if there_is := room(step):
                del self._steps[step.id]
                yield step
                continue
            passed_over.append((position, step))
            if there_is is None:
                break
        for entry in passed_over:
            heapq.heappush(self._ready, entry)

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
        return left


def _sources(step: Step) -> tuple[str, ...]:
    return (*step.needs.values(), *step.wants.values())


def _inputs(step: Step, outcomes: Outcomes) -> dict[str, Outcome]:
    """By role, how the steps ended that it takes from."""
    return {role: outcomes[name] for role, name in (*step.needs.items(), *step.wants.items())}


def _blocked(step: Step, inputs: Outcomes) -> Outcome | None:
    for role in step.needs:
        if not inputs[role].good:
            artifact = inputs[role].artifact
            reason = artifact.breach if artifact else inputs[role].reason
            return Outcome(step.id, "skipped", reason=reason)
    return None
