"""The plan of a recovery: what is compared, in which parts a batch fits, and how many steps there is time for."""

import functools
import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.passes.finetune import micro_batching
from enginesmith.pipeline.passes.finetune.checkpoints import Checkpoints, Progress
from enginesmith.pipeline.passes.finetune.data import SplitData
from enginesmith.pipeline.passes.finetune.data_parallel import DataParallel
from enginesmith.pipeline.passes.finetune.evaluate import Evaluator, Metric, Verdict, shrink_evaluation
from enginesmith.pipeline.passes.finetune.losses import (
    Distil,
    Loss,
    feature_targets,
    output_targets,
    supervised,
    user_loss,
)
from enginesmith.pipeline.passes.finetune.options import Point, RecoverOptions, TrainingPlan
from enginesmith.pipeline.passes.finetune.trainer import Models, Trainer, pace, too_few

_LOOKED_AT = 8
"""Samples that shapes and scales of values are taken from."""
_SHARE_OF_TIME = 0.95
"""Of the time is planned for; the rest is for what takes longer than it did when it was timed."""
_SHARE_OF_EVALUATION = 0.2
"""Of the time is for all evaluations, and a fifth of that for one."""
_SHARE_OF_ONE_EVALUATION = 0.04
_PASSES = 3
"""In an evaluation: for statistics, for the student's outputs and for the teacher's."""
_LEAST_JUDGED, _STATISTICS = 32, 256
_FITTED = ("micro_batch", "checkpointed", "frozen_norms")
"""What a plan does otherwise where memory runs out."""


@dataclass(frozen=True)
class Work:
    """What is to be recovered, from what, and by which means."""

    models: Models
    material: SplitData
    options: RecoverOptions
    metric: Metric
    seed: int
    threads: int
    processes: int
    meter: micro_batching.Meter
    fixed: int | None = None
    """The batch that the model takes, where it takes only one."""

    def loss(self, plan: TrainingPlan) -> Loss:
        """Make the loss that the student is trained by.

        Raises:
            DataError: the user's loss is not there.
        """
        if self.options.method == "supervised":
            return supervised
        if self.options.method == "distil":
            names = [spec.name for spec in self.models.teacher.signature.outputs]
            return Distil(plan.outputs, plan.features, names, self.options.temperature)
        return user_loss(self.options.method)

    def trainer(self, plan: TrainingPlan, team: DataParallel) -> Trainer:
        """Return a training at its first step."""
        return Trainer(
            self.models, self.material, self.loss(plan), self.options, plan, self.seed, team, self.meter.check
        )

    def judge(self, plan: TrainingPlan) -> Evaluator:
        """Make the evaluator."""
        return Evaluator(self.models, self.material, self.loss(plan), self.metric, self.seed, plan, self.fixed)


def prepare(work: Work, checkpoints: Checkpoints, fingerprint: str) -> Progress:
    """Plan, and leave a checkpoint of the beginning, so that every recovery goes on from one.

    Raises:
        DataError: the data does not fit the method.
        ModelError: the models cannot be compared.
        StepOutOfMemory: not even one sample at a time fits.
    """
    start = time.monotonic()
    checkpoints.clear()
    checkpoints.keep_best(work.models.average.module, 0)
    draft = _draft(work)
    plan = _in_parts(work, draft, checkpoints)
    timed = _alone(work, plan)  # it stays, as its optimiser's state does while a training is evaluated
    step_seconds, threads = pace(timed, work.threads)
    torch.set_num_threads(threads)
    plan = _with_rows(work, _in_parts_of(timed.plan, plan).model_copy(update={"threads": threads}))
    _begin_again(work, checkpoints)
    judge, before, judged_seconds = _first_look(work, plan)
    plan, teacher = judge.plan, judge.teacher
    if not math.isfinite(before.loss):
        raise ModelError(
            f"the loss is {before.loss} before the first step: nothing can be learnt by it",
            "look at what the loss divides by or takes the logarithm of, and at what the pruned model answers",
        )
    evaluation_seconds = judged_seconds * (1 + plan.statistics / plan.judged)
    spent = time.monotonic() - start
    plan = _timed(work, plan, step_seconds, evaluation_seconds, spent)
    if plan.frozen_norms:  # those that it begins with are of the network before it was pruned
        judge.find_statistics(work.models.student)
    trainer = work.trainer(plan, DataParallel(work.material.device))
    progress = Progress(
        fingerprint=fingerprint,
        plan=plan,
        teacher=teacher,
        curve=(_first_point(before),),
        seconds=spent,
        evaluation_seconds=evaluation_seconds,
    )
    checkpoints.write(trainer, progress)
    return progress


def _first_look(work: Work, plan: TrainingPlan) -> tuple[Evaluator, Verdict, float]:
    """Evaluate the weights that it begins with, and time that; with smaller parts until it fits."""
    plan = plan.model_copy(update={"judged_at_once": plan.micro_batch})
    while True:
        judge = work.judge(plan)
        found: list[tuple[Verdict, float]] = []
        if micro_batching.fits(functools.partial(_look, judge, work.meter, found)):
            return judge, *found[0]
        fewer = plan.model_copy(update={"judged": plan.judged // 2}) if plan.judged > 1 else None
        smaller = shrink_evaluation(plan) or fewer
        if smaller is None:
            raise micro_batching.does_not_fit(0, work.options.memory_bytes)
        plan = smaller


def _look(judge: Evaluator, meter: micro_batching.Meter, found: list[tuple[Verdict, float]]) -> None:
    _, start = judge.teacher, time.monotonic()
    verdict = judge.judge(statistics=False)
    meter.check()
    found.append((verdict, time.monotonic() - start))


def _in_parts_of(tried: TrainingPlan, plan: TrainingPlan) -> TrainingPlan:
    """Return the plan in the parts of one that was tried, which memory may have made smaller."""
    return plan.model_copy(update={name: getattr(tried, name) for name in _FITTED})


def _first_point(before: Verdict) -> Point:
    return Point(step=0, loss=None, metric=before.metric, held_back_loss=before.loss, learning_rate=0.0)


def _draft(work: Work) -> TrainingPlan:
    """Draft the plan: everything but sizes and numbers."""
    learnt, unit = len(work.material.learnt), (work.fixed or 1) * work.processes
    batch = min(work.options.batch, learnt)
    batch = max(batch - batch % unit, unit)
    if batch > learnt:
        raise DataError(
            f"{learnt} samples are left to learn from, and the model takes batches of {unit}", "give more samples"
        )
    rows = np.asarray(work.material.learnt[: work.fixed or min(_LOOKED_AT, batch)])
    batch_looked_at = work.material.batch(rows)
    models, distilled = work.models, work.options.method == "distil"
    features = distilled and work.options.features
    return TrainingPlan(
        steps=1,
        batch=batch,
        micro_batch=batch // work.processes,
        evaluate_every=1,
        judged=min(_LEAST_JUDGED, len(work.material.held_back)),
        statistics=_LEAST_JUDGED,
        processes=work.processes,
        threads=work.threads,
        least_part=work.fixed or 1,
        autocast=_autocast(work),
        outputs=output_targets(models.teacher, batch_looked_at) if distilled else (),
        features=feature_targets(models.student, models.teacher, batch_looked_at) if features else (),
    )


def _autocast(work: Work) -> bool:
    if work.options.autocast == "auto":
        return work.material.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return work.options.autocast == "bf16"


def _in_parts(work: Work, draft: TrainingPlan, checkpoints: Checkpoints) -> TrainingPlan:
    """Return the plan with the largest part that fits."""

    def planned(size: int, again: bool) -> TrainingPlan:
        plan = draft.model_copy(update={"micro_batch": size, "checkpointed": again})
        return plan.model_copy(update={"frozen_norms": too_few(size, plan)})

    def attempt(size: int, again: bool) -> None:
        _begin_again(work, checkpoints)
        # two parts take as much as all of a batch: gradients are there from the first one on
        few = {"batch": min(2 * size, draft.micro_batch) * draft.processes, "judged": min(2 * size, draft.judged)}
        own = planned(size, again).model_copy(update={**few, "statistics": micro_batching.LEAST_FOR_NORMS})
        _alone(work, own).advance(smaller=False)
        work.judge(own).judge()

    on_cpu = work.material.device.type == "cpu"
    if on_cpu and work.options.memory_bytes is None:
        return planned(draft.micro_batch, False)
    sizes = micro_batching.sizes(draft.micro_batch, work.fixed)
    found = planned(*micro_batching.largest_part(sizes, attempt, work.meter, work.options.memory_bytes))
    _begin_again(work, checkpoints)
    return found


def _alone(work: Work, plan: TrainingPlan) -> Trainer:
    """Return a training that does what each of the processes will do, while the others wait."""
    own = plan.model_copy(update={"batch": plan.batch // plan.processes})
    return work.trainer(own, DataParallel(work.material.device))


def _begin_again(work: Work, checkpoints: Checkpoints) -> None:
    """Put the weights that it begins with back everywhere."""
    for loaded in (work.models.student, work.models.average):
        checkpoints.put_best(loaded.module, 0)


def _with_rows(work: Work, plan: TrainingPlan) -> TrainingPlan:
    """Return the plan with as many samples in an evaluation as there is time for."""
    size = plan.micro_batch
    batch = work.material.batch(np.asarray(work.material.learnt[:size]))
    seconds = []
    with torch.no_grad():
        for _ in range(2):  # the first call does what is done once
            start = time.monotonic()
            work.models.teacher.module(*batch.inputs.values())
            seconds.append((time.monotonic() - start) / len(batch))
    affordable = int(_SHARE_OF_ONE_EVALUATION * work.options.seconds / seconds[-1]) // _PASSES
    judged = min(len(work.material.held_back), max(_LEAST_JUDGED, affordable))
    return plan.model_copy(update={"judged": judged, "statistics": min(_STATISTICS, max(_LEAST_JUDGED, affordable))})


def _timed(
    work: Work, plan: TrainingPlan, step_seconds: float, evaluation_seconds: float, spent: float
) -> TrainingPlan:
    """Return the plan with the number of steps that there is time for."""
    options = work.options
    left = max(0.0, _SHARE_OF_TIME * options.seconds - spent)
    evaluations = int(_SHARE_OF_EVALUATION * left / evaluation_seconds)
    evaluations = min(max(1, evaluations), options.evaluations)
    steps = int((left - evaluations * evaluation_seconds) / step_seconds)
    if options.epochs is not None:
        steps = min(steps, options.epochs * work.material.order(plan.batch, work.seed).steps_per_epoch)
    steps = max(1, steps)
    return plan.model_copy(update={"steps": steps, "evaluate_every": -(-steps // evaluations)})
