"""From the last checkpoint to the end: steps, evaluations, checkpoints; and when to stop."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from enginesmith.pipeline.recovery.checkpoints import Checkpoints, Progress
from enginesmith.pipeline.recovery.judging import Judge, Verdict
from enginesmith.pipeline.recovery.preparation import Work, prepare
from enginesmith.pipeline.recovery.record import Ending, Point, Recovery
from enginesmith.pipeline.recovery.team import Team
from enginesmith.pipeline.units import format_seconds

Tell = Callable[[str], None]
_OVERTIME = 2.0
"""Steps that take this much longer than planned are not waited for: the machine has other things to do."""
_TOLD_SECONDS = 1.0


def recover(work: Work, team: Team, begun: Path, fingerprint: str, tell: Tell) -> Recovery | None:
    """Train until the plan is done or it is of no use; the best weights are in ``work.models.average`` then.

    Goes on from the last checkpoint in ``begun``, with the same result as if it had never been ended. Processes but
    the first help, and have nothing to tell.

    Raises:
        DataError: the data does not fit the method.
        ModelError: the models cannot be trained or compared.
        StepOutOfMemory: not even one sample at a time fits.
        StoreError: checkpoints cannot be written.
    """
    with _repeatable():
        checkpoints = Checkpoints(begun, fingerprint)
        if team.leads and checkpoints.last() is None:
            tell("planning")
            prepare(work, checkpoints, fingerprint)
        team.meet()
        progress = checkpoints.last()
        assert progress is not None
        torch.set_num_threads(progress.plan.threads)
        run = _Run(work, team, checkpoints, progress, tell)
        run.to_the_end()
        return run.record() if team.leads else None


class _Run:
    def __init__(self, work: Work, team: Team, checkpoints: Checkpoints, progress: Progress, tell: Tell) -> None:
        self._work, self._team, self._checkpoints, self._tell = work, team, checkpoints, tell
        self._progress = progress
        self._trainer = work.trainer(progress.plan, team)
        checkpoints.read(self._trainer, progress)
        self._started = self._saved = self._told = time.monotonic()
        self._before = progress.seconds
        self._judge: Judge | None = None

    def to_the_end(self) -> None:
        while (ending := self._ending()) is None:
            loss = self._trainer.advance()
            self._update(step=self._trainer.step, plan=self._trainer.plan, loss_sum=self._progress.loss_sum + loss)
            if not math.isfinite(loss):
                self._update(diverged=True)
            elif self._trainer.step % self._progress.plan.evaluate_every == 0 or self._is_last():
                self._evaluate()
            self._say(loss)
            self._save()
        self._ended: Ending = ending
        if self._team.leads:
            self._checkpoints.put_best(self._work.models.average.module, self._progress.best_step)

    def _is_last(self) -> bool:
        return self._trainer.step == self._progress.plan.steps

    def _update(self, **values: object) -> None:
        self._progress = self._progress.model_copy(update=values)

    def _ending(self) -> Ending | None:
        """Why to stop now; every process comes to the same."""
        progress = self._progress
        if progress.diverged:
            return "diverged"
        if progress.step >= progress.plan.steps:
            return "planned"
        if progress.waited >= self._work.options.patience:
            return "patience"
        late = self._seconds > _OVERTIME * self._work.options.seconds
        return "time" if any(self._team.total(float(late))) else None

    @property
    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def _evaluate(self) -> None:
        """Judge the average; the leader does, and all know how it went."""
        waited = 0.0
        if self._team.leads:
            verdict = self._judged.judge()
            best = next(point for point in self._progress.curve if point.step == self._progress.best_step)
            assert best.held_back_loss is not None
            if verdict.better_than(Verdict(best.metric, best.held_back_loss, self._work.metric.sign)):
                self._checkpoints.keep_best(self._work.models.average.module, self._trainer.step)
                self._update(best_step=self._trainer.step)
            else:
                waited = self._progress.waited + 1.0
            self._update(curve=(*self._progress.curve, self._point(verdict)))
        self._update(loss_sum=0.0, waited=int(self._team.total(waited)[0]))

    @property
    def _judged(self) -> Judge:
        if self._judge is None:
            self._judge = self._work.judge(self._progress.plan)
        return self._judge

    def _point(self, verdict: Verdict) -> Point:
        step = self._trainer.step
        since = step - self._progress.curve[-1].step
        return Point(
            step=step,
            loss=self._progress.loss_sum / since,
            metric=verdict.metric,
            held_back_loss=verdict.loss if math.isfinite(verdict.loss) else None,
            learning_rate=self._trainer.rate(step - 1),
        )

    def _say(self, loss: float) -> None:
        if not self._team.leads or time.monotonic() - self._told < _TOLD_SECONDS:
            return
        self._told = time.monotonic()
        last, plan = self._progress.curve[-1], self._progress.plan
        self._tell(
            f"step {self._trainer.step} of {plan.steps}, loss {loss:.4g}, {self._work.metric.name} {last.metric:.4g} "
            f"(dense {self._progress.teacher:.4g})"
        )

    def _save(self) -> None:
        if self._team.leads and time.monotonic() - self._saved >= self._work.options.checkpoint_seconds:
            self._checkpoints.write(self._trainer, self._progress.model_copy(update={"seconds": self._seconds}))
            self._saved = time.monotonic()

    def record(self) -> Recovery:
        """What is written down."""
        progress, material = self._progress, self._work.material
        best = next(point for point in progress.curve if point.step == progress.best_step)
        return Recovery(
            method=self._work.options.method,
            metric=self._work.metric.name,
            teacher=progress.teacher,
            before=progress.curve[0].metric,
            after=best.metric,
            best_step=progress.best_step,
            steps=progress.step,
            ending=self._ended,
            reason=self._reason(self._ended),
            samples=len(material.data),
            held_back=progress.plan.judged,
            data=material.data.name,
            plan=progress.plan,
            curve=progress.curve,
        )

    def _reason(self, ending: Ending) -> str:
        progress, options = self._progress, self._work.options
        return {
            "planned": f"all {progress.plan.steps} planned steps are done",
            "patience": f"{progress.waited} evaluations in a row were no better than step {progress.best_step}",
            "diverged": f"the loss was NaN or infinite at step {progress.step}; the weights of step "
            f"{progress.best_step}, the best before, are kept: try a lower learning_rate",
            "time": f"{progress.step} of {progress.plan.steps} steps took more than "
            f"{format_seconds(_OVERTIME * options.seconds)}: the machine was slower than when they were planned",
        }[ending]


@contextmanager
def _repeatable() -> Iterator[None]:
    """Within the block torch chooses no kernels by chance; threads and random numbers are as before after it."""
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    random = torch.get_rng_state()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[1:]
        torch.set_rng_state(random)
