"""How long steps and evaluations take, and how many there is time for: before the first step, and on the way."""

import math
import time
from dataclasses import dataclass, field

import torch

from enginesmith.pipeline.recovery.record import TrainingPlan
from enginesmith.pipeline.recovery.training import Trainer

_TIMED_STEPS = 8
_TIMED_SECONDS = 2.0
_LONG_SECONDS = 0.5
"""Longer steps have enough to do for all threads."""
_FASTER = 0.9
"""More threads are worth it from here on."""
_LATE = 1.05
"""Of the time: a plan that is expected to end later is cut."""
_REVIEWED = 40
"""Times in all that the plan is held against the clock."""


def pace(trainer: Trainer, most_threads: int) -> tuple[float, int]:
    """How long a step takes, and the number of threads that it takes least with.

    Threads wait for each other in short steps, and much longer where others use the machine too.
    """
    torch.set_num_threads(1)
    trainer.advance()  # does what is done once
    start = time.monotonic()
    trainer.advance()
    if most_threads == 1 or time.monotonic() - start > _LONG_SECONDS:
        torch.set_num_threads(most_threads)
        return _step_seconds(trainer), most_threads
    threads, taken = 1, _step_seconds(trainer)
    while threads < most_threads:
        more = min(2 * threads, most_threads)
        torch.set_num_threads(more)
        found = _step_seconds(trainer)
        if found > _FASTER * taken:
            break
        threads, taken = more, found
    return taken, threads


def _step_seconds(trainer: Trainer) -> float:
    """The mean over some steps, or over those that took some time together."""
    start, done = time.monotonic(), 0
    while done < _TIMED_STEPS and time.monotonic() - start < _TIMED_SECONDS:
        trainer.advance()
        done += 1
    return (time.monotonic() - start) / done


@dataclass
class Timekeeper:
    """What steps and evaluations have taken in this process, and whether the plan ends in time at that rate."""

    seconds: float
    """Time for all of it."""
    before: float
    """Of that, what went by before this process took its first step."""
    evaluation_seconds: float
    """One evaluation's; the last one's from the first in this process on."""
    _started: float = field(default_factory=time.monotonic)
    _reviewed: float = field(default_factory=time.monotonic)
    _stepping: float = 0.0
    _steps: int = 0

    @property
    def spent(self) -> float:
        """Seconds in all processes so far."""
        return self.before + time.monotonic() - self._started

    def stepped(self, seconds: float) -> None:
        """Take note of a step; the first one of a process does what is done once."""
        self._steps += 1
        if self._steps > 1:
            self._stepping += seconds

    def steps_in_time(self, plan: TrainingPlan, step: int) -> int:
        """Steps in all that there is time for after ``step``: those of the plan, or fewer."""
        now, left = time.monotonic(), plan.steps - step
        if self._steps < 2 or left < 2 or now - self._reviewed < self.seconds / _REVIEWED:
            return plan.steps
        self._reviewed = now
        each = self._stepping / (self._steps - 1)
        evaluations = math.ceil(left / plan.evaluate_every)
        if self.spent + left * each + evaluations * self.evaluation_seconds <= _LATE * self.seconds:
            return plan.steps
        free = self.seconds - self.spent - self.evaluation_seconds  # the last step is followed by one
        affordable = int(free / (each + self.evaluation_seconds / plan.evaluate_every))
        return step + min(left, max(1, affordable))
