"""From the last checkpoint to the end: steps, evaluations, checkpoints; and when to stop."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from enginesmith.pipeline.passes.finetune import micro_batching
from enginesmith.pipeline.passes.finetune.checkpoints import Checkpoints, Progress
from enginesmith.pipeline.passes.finetune.data import shorten
from enginesmith.pipeline.passes.finetune.data_parallel import DataParallel
from enginesmith.pipeline.passes.finetune.evaluate import Evaluator, Verdict, shrink_evaluation
from enginesmith.pipeline.passes.finetune.options import Ending, Point, Recovery, TrainingPlan
from enginesmith.pipeline.passes.finetune.setup import Work, prepare
from enginesmith.pipeline.passes.finetune.trainer import TimeBudget

Tell = Callable[[str], None]
_TOLD_SECONDS = 1.0


def recover(work: Work, team: DataParallel, begun: Path, fingerprint: str, tell: Tell) -> Recovery | None:
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
    def __init__(
        self, work: Work, team: DataParallel, checkpoints: Checkpoints, progress: Progress, tell: Tell
    ) -> None:
        self._work, self._team, self._checkpoints, self._tell = work, team, checkpoints, tell
        self._progress = progress
        self._trainer = work.trainer(progress.plan, team)
        checkpoints.read(self._trainer, progress)
        self._saved = self._told = time.monotonic()
        self._time = TimeBudget(work.options.seconds, progress.seconds, progress.evaluation_seconds)
        self._judge: Evaluator | None = None

    def to_the_end(self) -> None:
        while (ending := self._ending()) is None:
            before, start = self._progress.plan, time.monotonic()
            loss = self._trainer.advance()
            self._time.stepped(time.monotonic() - start)
            self._update(step=self._trainer.step, plan=self._trainer.plan)
            if math.isfinite(loss):
                self._update(loss_sum=self._progress.loss_sum + loss)
                self._evaluate_if_due()
                self._end_in_time()
            else:
                self._update(diverged=True)
            self._say(loss)
            self._save(at_once=self._progress.plan != before)
        self._ended: Ending = ending
        if self._team.leads:
            self._checkpoints.put_best(self._work.models.average.module, self._progress.best_step)

    def _evaluate_if_due(self) -> None:
        step, plan = self._trainer.step, self._progress.plan
        if step % plan.evaluate_every == 0 or step == plan.steps:
            self._evaluate()

    def _update(self, **values: object) -> None:
        self._progress = self._progress.model_copy(update=values)

    def _ending(self) -> Ending | None:
        """Explain why to stop now; every process comes to the same."""
        progress = self._progress
        if progress.diverged:
            return "diverged"
        if progress.step >= progress.plan.steps:
            return "planned" if progress.plan.shortened is None else "time"
        return "patience" if progress.waited >= self._work.options.patience else None

    def _end_in_time(self) -> None:
        """Shorten the plan where the steps left would take too long; the leader's clock decides."""
        plan, step = self._progress.plan, self._trainer.step
        steps = self._time.steps_in_time(plan, step) if self._team.leads else 0
        agreed = int(self._team.total(float(steps))[0])
        if agreed < plan.steps:
            self._follow(shorten(plan, step, agreed))

    def _follow(self, plan: TrainingPlan) -> None:
        self._trainer.follow(plan)
        self._update(plan=plan)

    def _evaluate(self) -> None:
        """Evaluate the average; the leader does, and all know how it went."""
        waited = 0.0
        if self._team.leads:
            verdict = self._verdict()
            best = next(point for point in self._progress.curve if point.step == self._progress.best_step)
            assert best.held_back_loss is not None
            if verdict.better_than(Verdict(best.metric, best.held_back_loss, self._work.metric.sign)):
                self._checkpoints.keep_best(self._work.models.average.module, self._trainer.step)
                self._update(best_step=self._trainer.step)
            else:
                waited = self._progress.waited + 1.0
            self._update(curve=(*self._progress.curve, self._point(verdict)))
        self._update(loss_sum=0.0, waited=int(self._team.total(waited)[0]))

    def _verdict(self) -> Verdict:
        """Evaluate the average; in smaller parts from here on where memory ran out."""
        found: list[Verdict] = []
        while not micro_batching.fits(functools.partial(self._look, found)):
            smaller = shrink_evaluation(self._progress.plan)
            if smaller is None:
                raise micro_batching.does_not_fit(0, self._work.options.memory_bytes)
            self._follow(smaller)
            self._judge = None  # what it knows of the teacher was found in larger parts
        return found[0]

    def _look(self, found: list[Verdict]) -> None:
        if self._judge is None:
            self._judge = self._work.judge(self._progress.plan)
        _, start = self._judge.teacher, time.monotonic()  # the teacher answers once: no part of what each one takes
        verdict = self._judge.judge()
        self._work.meter.check()
        self._time.evaluation_seconds = time.monotonic() - start
        found.append(verdict)

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

    def _save(self, *, at_once: bool) -> None:
        """Write a checkpoint if it is time to, or at once."""
        due = time.monotonic() - self._saved >= self._work.options.checkpoint_seconds
        if self._team.leads and (due or at_once):
            self._checkpoints.write(self._trainer, self._progress.model_copy(update={"seconds": self._time.spent}))
            self._saved = time.monotonic()

    def record(self) -> Recovery:
        """Make the record of the recovery."""
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
        progress, plan = self._progress, self._progress.plan
        planned = plan.steps if plan.shortened is None else plan.shortened.planned
        return {
            "planned": f"all {progress.plan.steps} planned steps are done",
            "patience": f"{progress.waited} evaluations in a row were no better than step {progress.best_step}",
            "diverged": f"the loss or its gradients were NaN or infinite at step {progress.step}; the weights of step "
            f"{progress.best_step}, the best before, are kept: try a lower learning_rate",
            "time": f"{progress.step} of {planned} planned steps fitted the time: they took longer than when they were "
            "planned, and the schedule was shortened",
        }[ending]


@contextmanager
def _repeatable() -> Iterator[None]:
    """Make torch choose its kernels repeatably within the block; threads and random numbers are restored after it."""
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    random = torch.get_rng_state()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[1:]
        torch.set_rng_state(random)
