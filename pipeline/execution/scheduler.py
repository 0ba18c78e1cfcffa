"""Walk a plan: look each step up whose inputs are there, and execute those that the store lacks, several at once.

Many more can be looked up at a time than executed. A step that fails takes down what stands on it, and nothing else.
"""

import heapq
import math
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from enginesmith.pipeline.errors import NO_TIME, OVER_SHARE, EnginesmithError, StepTimeout, storage_errors
from enginesmith.pipeline.execution.events import Event, Listener, Outcome, Outcomes
from enginesmith.pipeline.execution.executor import Executor, Result, StepRequest
from enginesmith.pipeline.planning.plan import (
    Step,
    StepRef,
    ends_search,
    is_optional,
    only_judges,
    search_of,
    tries_inputs,
)
from enginesmith.pipeline.store import retry
from enginesmith.pipeline.tasks.base import Task

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_AGAIN_SECONDS = 5.0
"""A step that had to wait longer for its turn is looked up once more: another one may have done it meanwhile."""
_LEAST_SECONDS = 10.0
"""Time that each step has where so much is left, whatever its share is: a busy machine takes seconds to begin one."""
_GRACE_SECONDS = 30.0
"""Time after its share in which a measurement that a search has no result without may end: sessions start in turn."""
_GRACE_TO_TRY_SECONDS = 10.0
"""Time likewise to write down a fault that trying inputs found; no input is tried in it."""


@dataclass
class Runner:
    """Runs plans on an executor."""

    executor: Executor
    log_of: Callable[[Step], Path]
    time_limit_seconds: float | None = None
    listener: Listener = lambda event: None
    search_seconds: float | None = None
    """Time after which no step of a search is begun, and those that run are ended.

    With it, steps that no time was left for are skipped; without it, they fail.
    """
    kept_seconds: float = 0.0
    """Time at the end of the limited one that is kept for prosecutions; what every result needs may take it, too."""
    _waiting: "_WaitingSteps | None" = None
    _deadline: float = math.inf
    _search_deadline: float = math.inf
    _searches_end: dict[StepRef, float] = field(default_factory=dict)
    """By search that has begun here, the time at which the share of its trials ends."""
    _reordered: bool = False
    _outlasting: set[str] = field(default_factory=set)
    """Steps of a search that do not end with its time."""
    _changed: dict[str, Task] = field(default_factory=dict)
    """By step, the task that it has got in the place of the planned one."""
    _looked_up_at: dict[str, float] = field(default_factory=dict)
    """By step that the store lacks, the time at which it was looked up."""
    _notes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By step, lines for the top of its log: what happened to it, and messages of the store."""

    def run(
        self,
        steps: Sequence[Step],
        given: Outcomes | None = None,
        on_new: Callable[[Outcomes], Mapping[str, str]] = lambda outcomes: {},
    ) -> dict[str, Outcome]:
        """Run every step that can run, and return all outcomes.

        ``on_new`` takes each outcome as soon as it is there, and returns the steps that are not worth doing any more,
        with the reason: those that have not begun are skipped. Where no others are left, those that run are ended.

        Steps that ``given`` has an outcome for are not run. On Ctrl-C what runs is ended and KeyboardInterrupt goes on
        to the caller.

        Raises:
            ValueError: a step needs one that is neither among them nor given.
        """
        now = time.monotonic()
        self._deadline = now + (math.inf if self.time_limit_seconds is None else self.time_limit_seconds)
        self._search_deadline = now + (math.inf if self.search_seconds is None else self.search_seconds)
        outcomes = dict(given or {})
        left = [step for step in steps if step.id not in outcomes]
        for step in left:
            self.listener(Event("planned", step))
        waiting = self._waiting = _WaitingSteps(left, outcomes)
        ended: queue.SimpleQueue[tuple[Step, Future[Outcome | None]]] = queue.SimpleQueue()
        lookups: set[str] = set()
        running: dict[str, Step] = {}
        over: Mapping[str, str] = {}

        def submit(pool: Pool, work: Callable[[Step, Outcomes], Outcome | None], step: Step) -> None:
            roles = (*step.inputs.items(), *step.optional_inputs.items())
            future = pool.submit(work, step, {role: outcomes[name] for role, name in roles})
            future.add_done_callback(lambda done: ended.put((step, done)))

        max_lookups = self.executor.max_lookups
        with (
            ThreadPoolExecutor(max_lookups) if max_lookups > 1 else _ThisThread() as asking,
            ThreadPoolExecutor(self.executor.slots) as doing,
        ):
            try:
                while waiting or running:
                    for step in waiting.take_for_lookup(max_lookups - len(lookups)):
                        lookups.add(step.id)
                        submit(asking, self._find, step)
                    for step in waiting.take_for_execution(
                        lambda step: self._may_start(step, running.values(), lookups)
                    ):
                        running[step.id] = step
                        submit(doing, self._execute, step)
                    if not running and not lookups:
                        raise ValueError(f"the plan lacks these steps, which others need: {', '.join(waiting.lacking)}")
                    step, future = ended.get()
                    outcome = future.result()
                    if step.id in lookups:
                        lookups.remove(step.id)
                        if not waiting.end_lookup(step, known=outcome is not None):
                            continue
                    else:
                        del running[step.id]
                    assert outcome is not None
                    if step.id in over and outcome.status == "failed":
                        outcome = Outcome(step.id, "skipped", reason=over[step.id])
                    new = [(step, outcome)]
                    while new:
                        latest = self._announce(new, waiting)
                        outcomes |= latest
                        pointless = on_new(latest)
                        skipped = waiting.remove(pointless)
                        new = [(each, Outcome(each.id, "skipped", reason=reason)) for each, reason in skipped]
                    if running and not waiting and not over and running.keys() <= pointless.keys():
                        over = pointless
                        self.executor.stop()
            except BaseException:
                self.executor.stop()
                raise
        return outcomes

    def prefer(self, order: Sequence[str]) -> None:
        """Begin these steps in another order than that of the plan, as far as they have not begun; for ``on_new``.

        None may then take more time than others of its kind for being the last one in the plan.
        """
        self._reordered = self._reordered or bool(order)
        if self._waiting is not None:
            self._waiting.prefer(order)

    def outlast_search(self, steps: Collection[str]) -> None:
        """Let steps of a search that have not begun take the time after it, too; for ``on_new``."""
        self._outlasting.update(steps)

    def change_task(self, step: str, task: Task) -> None:
        """Have a step that has not begun do another task of the same kind; for ``on_new``."""
        self._changed[step] = task

    def _announce(self, ended: Sequence[tuple[Step, Outcome]], waiting: "_WaitingSteps") -> dict[str, Outcome]:
        """Announce the steps that have ended, make those ready that waited for them, and list the outcomes."""
        for step, outcome in ended:
            self.listener(Event("finished", step, outcome=outcome))
            waiting.release(step.id)
        return {step.id: outcome for step, outcome in ended}

    def _may_start(self, step: Step, running: Collection[Step], lookups: Collection[str]) -> bool | None:
        """Decide whether a step may begin now; None stops the look for others, so that none overtakes it."""
        if len(running) >= self.executor.slots:
            return None
        if self.time_limit_seconds is not None and is_optional(step) and self._waiting and self._waiting.needed:
            return False
        if not self.executor.can_start(step, running):
            return False
        return True if not lookups or self.executor.allows_lookups(step) else None

    def _find(self, step: Step, inputs: Outcomes) -> Outcome | None:
        """Find the outcome of a step without executing it; None where it has to be executed."""
        if step.unavailable:
            return Outcome(step.id, "unavailable", reason=step.unavailable)
        for before in (inputs[role] for role in step.inputs if not inputs[role].good):
            reason = before.artifact.rejected if before.artifact else before.reason
            return Outcome(step.id, "skipped", reason=reason)
        return self._try(self._look_up, step, inputs)

    def _look_up(self, request: StepRequest) -> Result | None:
        artifact = self.executor.lookup(request)
        if artifact is not None:
            return Result(artifact, cached=True)
        self._looked_up_at[request.step.id] = time.monotonic()
        return None

    def _execute(self, step: Step, inputs: Outcomes) -> Outcome | None:
        waited = time.monotonic() - self._looked_up_at.pop(step.id)
        if waited > _LOOK_AGAIN_SECONDS and (outcome := self._try(self._look_up, step, inputs)):
            return outcome
        return self._try(self._execute_with_notes, step, inputs)

    def _execute_with_notes(self, request: StepRequest) -> Result:
        try:
            return self.executor.execute(request)
        finally:
            if notes := self._notes.pop(request.step.id, None):
                with storage_errors(f"the logs in {request.log.parent}"):
                    request.log.parent.mkdir(parents=True, exist_ok=True)
                    log = request.log.read_bytes() if request.log.is_file() else b""
                    request.log.write_bytes("".join(f"--- {note}\n" for note in notes).encode() + log)

    def _try(self, work: Callable[[StepRequest], Result | None], step: Step, inputs: Outcomes) -> Outcome | None:
        """Look up or execute a step; notes, and messages of the store meanwhile, are announced and go to its log."""

        def note(text: str) -> None:
            self._notes[step.id].append(text)
            self.listener(Event("note", step, text))

        searches = step.search and step.id not in self._outlasting
        deadline = min(self._deadline, self._search_deadline if searches else math.inf)
        ends = self.search_seconds is not None and ends_search(step)
        if self.kept_seconds and (searches or ends or is_optional(step)) and not tries_inputs(step):
            deadline = min(deadline, self._deadline - self.kept_seconds)
        left, looks_up = deadline - time.monotonic(), work == self._look_up
        if ends:  # on a busy machine, all was made, and nothing would come of it
            left = max(left, 0.0 if step.id.kind == "tune" else _LEAST_SECONDS)
        task = self._changed.get(step.id, step.task)
        most = type(task).model_fields["time_share"].default if self._reordered else task.time_share
        least = min(left, _LEAST_SECONDS)
        share = own = max(left * most, least)
        if share < math.inf and not looks_up and (search := search_of(step)):  # its trials share one part of the time
            own = self._searches_end.setdefault(search, time.monotonic() + share) - time.monotonic()
            share = max(own, least)
        measures = ends and task.exclusive
        grace = _GRACE_SECONDS if measures else 0.0
        if share < math.inf and tries_inputs(step):
            grace = _GRACE_TO_TRY_SECONDS
        limits = {"left_seconds": own, "time_share": most, "grace_seconds": grace}
        limited = task.model_copy(update=limits) if share < math.inf else task
        request = StepRequest(
            replace(step, task=limited),
            {role: outcome.artifact for role, outcome in inputs.items() if outcome.artifact and outcome.good},
            log=self.log_of(step),
            on_start=lambda: self.listener(Event("started", step)),
            on_progress=lambda text: self.listener(Event("progress", step, text)),
            # a round of slow models takes long, and what ends a search keeps to its share by itself
            timeout_seconds=None if share == math.inf else max(share + grace, left if measures else 0.0),
            on_note=note,
        )
        try:
            if left <= 0 and not ends and not (self.search_seconds is not None and looks_up):
                raise StepTimeout("the time was over before it started", "give more: --time; then resume")
            with retry.notifications_to(note):
                result = work(request)
        except EnginesmithError as error:
            over = time.monotonic() >= deadline
            late = isinstance(error, StepTimeout) and (over or share <= _LEAST_SECONDS or only_judges(step))
            if late and self.search_seconds is not None:
                return Outcome(step.id, "skipped", reason=NO_TIME if over else OVER_SHARE)
            return Outcome(step.id, "failed", error=error, reason=str(error))
        return Outcome(step.id, "done", result.artifact, result.cached) if result is not None else None


class _ThisThread(Pool):
    """Does what is submitted at once."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(function(*args, **kwargs))
        return future


class _WaitingSteps:
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
        """Steps to look up: a heap by position."""
        self._unknown: list[tuple[int, Step]] = []
        """Steps to execute, likewise."""
        heapq.heapify(self._ready)

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def needed(self) -> bool:
        """True while there are other steps than those that come last where time is limited."""
        return any(not is_optional(step) for _, step in self._steps.values())

    @property
    def lacking(self) -> list[str]:
        """The steps that are waited for, and are not in the plan."""
        wanted = {name for step in self._steps for name in self._missing[step]}
        return sorted(wanted - self._steps.keys())

    def take_for_lookup(self, count: int) -> Iterator[Step]:
        """Take steps to look up now, that many at most."""
        while self._ready and count > 0:
            count -= 1
            yield heapq.heappop(self._ready)[1]

    def end_lookup(self, step: Step, *, known: bool) -> bool:
        """Have a step executed unless it is ``known``; returns whether it has ended."""
        if step.id not in self._steps:  # it was removed meanwhile
            return False
        if known:
            del self._steps[step.id]
        else:
            heapq.heappush(self._unknown, self._steps[step.id])
        return known

    def take_for_execution(self, may_start: Callable[[Step], bool | None]) -> Iterator[Step]:
        """Take steps to execute now; ``may_start`` is asked anew after each one that was taken, and ends it by None."""
        passed_over = []
        while self._unknown:
            position, step = heapq.heappop(self._unknown)
            if verdict := may_start(step):
                del self._steps[step.id]
                yield step
                continue
            passed_over.append((position, step))
            if verdict is None:
                break
        for entry in passed_over:
            heapq.heappush(self._unknown, entry)

    def release(self, name: str) -> None:
        """Make steps ready that had to wait for this one alone."""
        for taker in self._takers.pop(name, ()):
            self._missing[taker].discard(name)
            if not self._missing[taker] and taker in self._steps:
                heapq.heappush(self._ready, self._steps[taker])

    def prefer(self, order: Sequence[str]) -> None:
        """Exchange the positions of these steps among themselves, so that they are in this order."""
        steps = [self._steps[name][1] for name in order if name in self._steps]
        positions = sorted(self._steps[step.id][0] for step in steps)
        self._steps |= {step.id: (position, step) for position, step in zip(positions, steps, strict=True)}
        for heap in (self._ready, self._unknown):
            heap[:] = [self._steps[step.id] for _, step in heap]
            heapq.heapify(heap)

    def remove(self, reasons: Mapping[str, str]) -> list[tuple[Step, str]]:
        """Begin these steps no more; returns those that had not begun, with the reasons given for them."""
        removed = [(self._steps.pop(name)[1], reason) for name, reason in reasons.items() if name in self._steps]
        for heap in (self._ready, self._unknown) if removed else ():
            heap[:] = [entry for entry in heap if entry[1].id in self._steps]
            heapq.heapify(heap)
        return removed
