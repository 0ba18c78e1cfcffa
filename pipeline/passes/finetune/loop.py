"""Plan a recovery and carry it out: steps, evaluations, checkpoints; and when to stop.

The plan says in which parts a batch fits, and how many steps and evaluations there is time for.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.passes.finetune import batches, trainer
from enginesmith.pipeline.passes.finetune.augment import list_images, mirror
from enginesmith.pipeline.passes.finetune.batches import Batch, DataParallel
from enginesmith.pipeline.passes.finetune.evaluate import (
    Evaluator,
    Verdict,
    Work,
    agreement,
    copy_numbers,
    shrink_evaluation,
)
from enginesmith.pipeline.passes.finetune.losses import feature_targets, output_targets
from enginesmith.pipeline.passes.finetune.options import Augmentation, Ending, Point, Recovery, TrainingPlan
from enginesmith.pipeline.passes.finetune.trainer import Checkpoints, Progress, TimeBudget, Trainer, pace, set_part
from enginesmith.pipeline.units import format_metric

_LOOKED_AT = 8
"""Samples that shapes and scales of values are taken from."""
_SHARE_OF_TIME = 0.95
"""Share of the time that is planned for; the rest is for steps that take longer than when they were timed."""
_SHARE_OF_EVALUATION = 0.2
"""Share of the time for all evaluations; a fifth of that is for one."""
_SHARE_OF_ONE_EVALUATION = 0.04
_PASSES = 3
"""Passes in an evaluation: for statistics, for the student's outputs and for the teacher's."""
_LEAST_JUDGED, _STATISTICS = 32, 256
_TOLD_SECONDS = 1.0
_TIMED, _SHARE_OF_TIMING = 3, 0.05
"""The fewest steps that a batch is timed by, and the share of the time that they may take."""
_SHARE_OF_TRIALS, _LEAST_TRIED = 0.15, 8
"""Share of the time for trials of learning rates, and the fewest steps of one."""
_HOPELESS = 4.0
"""Times by which training has to reduce the loss of the metric further than in its first half, to end it there."""
_MIRRORED, _ALIKE = 64, 0.8
"""Samples that are mirrored to see if that changes the answers, and the agreement from which on it does not."""

Tell = Callable[[str], None]


def recover(work: Work, team: DataParallel, begun: Path, fingerprint: str, tell: Tell) -> Recovery | None:
    """Train until the plan is done or it is of no use; the best weights are in ``work.models.average`` then.

    Goes on from the last checkpoint in ``begun``, on the CPU with the same result as if it had never been ended (some
    kernels of CUDA add up in no fixed order). Processes but the first help, and have nothing to tell.

    Raises:
        DataError: the data does not fit the method.
        ModelError: the models cannot be trained or compared.
        StepOutOfMemory: not even one sample at a time fits.
        StoreError: checkpoints cannot be written.
    """
    with _repeatable(work.material.device):
        checkpoints = Checkpoints(begun, fingerprint)
        last = checkpoints.last()
        if team.leads and last is None:
            tell("planning")
            prepare(work, checkpoints, fingerprint)
        team.total(0.0)  # wait until all are here
        progress = checkpoints.last()
        assert progress is not None
        torch.set_num_threads(progress.plan.threads)
        run = _Run(work, team, checkpoints, progress, tell, last.seconds if last else 0.0)
        ending = run.to_the_end()
        return run.record(ending) if team.leads else None


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Make torch choose its kernels repeatably within the block; threads and random numbers are restored after it."""
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[1:]


def prepare(work: Work, checkpoints: Checkpoints, fingerprint: str) -> None:
    """Plan, and leave a checkpoint of the beginning, so that every recovery goes on from one.

    Raises:
        DataError: the data does not fit the method.
        ModelError: the models cannot be compared.
        StepOutOfMemory: not even one sample at a time fits.
    """
    start = time.monotonic()
    checkpoints.clear()
    checkpoints.keep_best(work.models.average.module, 0)
    plan, step_seconds, timed = _fit_pace(work, _fit_memory(work, _draft(work), checkpoints), checkpoints)
    plan = _choose_samples(work, plan)
    _reset(work, checkpoints)
    evaluator, before, seconds = _evaluate_start(work, plan)
    del timed  # its optimizer's state was there so far, as a training's is while it is evaluated
    plan = evaluator.plan
    if not math.isfinite(before.loss):
        raise ModelError(
            f"the loss is {before.loss} before the first step: nothing can be learnt by it",
            "look at what the loss divides by or takes the logarithm of, and at what the pruned model answers",
        )
    evaluation_seconds = seconds + evaluator.pass_seconds * plan.statistics / plan.judged
    rate = _choose_rate(work, plan, checkpoints, evaluator, step_seconds, evaluation_seconds)
    plan = plan.model_copy(update={"learning_rate": rate})
    spent = time.monotonic() - start
    plan = _fit_time(work, plan, step_seconds, evaluation_seconds, spent)
    if plan.frozen_norms:  # those that it begins with are of the network before it was pruned
        evaluator.find_statistics(work.models.student)
    progress = Progress(
        fingerprint=fingerprint,
        plan=plan,
        teacher=evaluator.teacher,
        curve=(Point(step=0, loss=None, metric=before.metric, held_back_loss=before.loss, learning_rate=0.0),),
        seconds=spent,
        evaluation_seconds=evaluation_seconds,
    )
    checkpoints.write(work.trainer(plan, DataParallel(work.material.device)), progress)


def _fit_pace(work: Work, plan: TrainingPlan, checkpoints: Checkpoints) -> tuple[TrainingPlan, float, Trainer]:
    """Measure the seconds of a step, with a smaller batch where there is time for few; return the training, too."""
    plan = _limit_timed_batch(work, plan, checkpoints)
    timed = _train_alone(work, plan)
    seconds, threads = pace(timed, work.threads)
    smaller = _affordable_batch(work, _keep_parts(plan, timed), seconds)
    if smaller.batch < plan.batch:
        _reset(work, checkpoints)
        plan, timed = smaller, _train_alone(work, smaller)
        seconds, threads = pace(timed, work.threads)
    torch.set_num_threads(threads)
    return _keep_parts(plan, timed).model_copy(update={"threads": threads}), seconds, timed


def _limit_timed_batch(work: Work, plan: TrainingPlan, checkpoints: Checkpoints) -> TrainingPlan:
    """Halve a batch whose steps would take too long to be timed, going by those of the smallest one."""
    unit = (work.fixed or 1) * work.processes
    least = max(unit, work.batch_limits.least // unit * unit)
    if least >= plan.batch or work.options.epochs is not None:
        return plan
    part = min(plan.micro_batch, least // plan.processes)
    timed = _train_alone(work, set_part(plan.model_copy(update={"batch": least}), part))
    timed.advance()  # does what is done once
    start = time.monotonic()
    timed.advance()
    whole = (time.monotonic() - start) * plan.batch / least
    _reset(work, checkpoints)
    return plan if _TIMED * whole <= _SHARE_OF_TIMING * work.options.seconds else _affordable_batch(work, plan, whole)


def _keep_parts(plan: TrainingPlan, timed: Trainer) -> TrainingPlan:
    """Return the plan with the parts that fitted; the batch of the one that was timed is a single process's."""
    fitted = ("micro_batch", "checkpointed", "frozen_norms")
    return plan.model_copy(update={name: getattr(timed.plan, name) for name in fitted})


def _affordable_batch(work: Work, plan: TrainingPlan, step_seconds: float) -> TrainingPlan:
    """Halve the batch until there is time for enough steps; a step is taken to need time in proportion to it."""
    unit = (work.fixed or 1) * work.processes
    batch, steps = plan.batch, _SHARE_OF_TIME * work.options.seconds / step_seconds
    while steps < work.batch_limits.steps and work.options.epochs is None:
        half = batch // 2 - batch // 2 % unit
        if half < max(unit, work.batch_limits.least):
            break
        steps, batch = steps * batch / half, half
    part = min(plan.micro_batch, batch // plan.processes)
    return set_part(plan.model_copy(update={"batch": batch}), part) if batch < plan.batch else plan


def _choose_rate(
    work: Work,
    plan: TrainingPlan,
    checkpoints: Checkpoints,
    evaluator: Evaluator,
    step_seconds: float,
    evaluation_seconds: float,
) -> float:
    """Choose the learning rate by the loss on held-back samples after few steps each; without time the middle one."""
    given = work.options.learning_rate
    rates = work.rates if given is None else (given,)
    seconds = _SHARE_OF_TRIALS * work.options.seconds / len(rates) - evaluation_seconds
    steps = _limit_steps(work, plan, int(seconds / step_seconds))
    if len(rates) == 1 or steps < _LEAST_TRIED:
        return rates[len(rates) // 2]
    losses: dict[float, float] = {}
    for rate in rates:
        _reset(work, checkpoints)
        losses[rate] = _try_plan(work, plan.model_copy(update={"steps": steps, "learning_rate": rate}), evaluator)
    _reset(work, checkpoints)
    return min(rates, key=lambda rate: (losses[rate], rate))


def _try_plan(work: Work, plan: TrainingPlan, evaluator: Evaluator) -> float:
    """Train by a short plan and return the loss on held-back samples; infinity where it is not finite or cannot be."""
    if plan.frozen_norms:
        evaluator.find_statistics(work.models.student)
    tried = _train_alone(work, plan)
    if not all(math.isfinite(tried.advance()) for _ in range(plan.steps)):
        return math.inf
    results = batches.within_memory(evaluator.evaluate)
    return results[0][0].loss if results and math.isfinite(results[0][0].loss) else math.inf


def _choose_augmentation(work: Work, samples: Batch) -> Augmentation | None:
    """Choose how images are changed; they are mirrored if the teacher then answers nearly the same."""
    axes = work.material.data.axes
    images = list_images({name: samples.inputs[name] for name in work.material.data.arrays if not axes.get(name)})
    if not images or not work.options.augment or work.options.method != "distil":
        return None
    alike = _agree_mirrored(work, images, len(samples.inputs[images[0]])) >= _ALIKE
    return Augmentation(inputs=images, mirror=alike, mix=len(samples.inputs) == 1)


@torch.no_grad()
def _agree_mirrored(work: Work, images: tuple[str, ...], at_once: int) -> float:
    """Compute how far the teacher agrees with itself when images are mirrored, on as many samples as there is time for.

    They are from all over the data, in whatever order it is.
    """
    learnt, loaded = np.asarray(work.material.learnt), work.models.teacher
    count = max(min(_MIRRORED, len(learnt)) // at_once, 1) * at_once
    rows = learnt[np.linspace(0, len(learnt) - 1, count).round().astype(np.int64)]
    name = loaded.signature.outputs[0].name
    plain, mirrored = list[torch.Tensor](), list[torch.Tensor]()
    end = time.monotonic() + _SHARE_OF_ONE_EVALUATION * work.options.seconds
    for part in batches.parts(np.random.default_rng(0).permutation(rows), at_once):
        batch = work.material.batch(part)
        for answers, each in ((plain, batch), (mirrored, mirror(batch, images))):
            outputs = loaded.module(*each.inputs.values())
            answers.append(copy_numbers(next(value for value in outputs if value.ndim)))
        if time.monotonic() > end:
            break
    return agreement({name: torch.cat(mirrored).numpy()}, {name: torch.cat(plain).numpy()}, None)


def _draft(work: Work) -> TrainingPlan:
    learnt, unit = len(work.material.learnt), (work.fixed or 1) * work.processes
    batch = min(work.options.batch, learnt)
    batch = max(batch - batch % unit, unit)
    if batch > learnt:
        raise DataError(
            f"{learnt} samples are left to learn from, and the model takes batches of {unit}", "give more samples"
        )
    samples = work.material.batch(np.asarray(work.material.learnt[: work.fixed or min(_LOOKED_AT, batch)]))
    models, distilled = work.models, work.options.method == "distil"
    features = distilled and work.options.features
    autocast = work.options.autocast == "bf16"
    if work.options.autocast == "auto" and work.material.device.type == "cuda":
        autocast = torch.cuda.is_bf16_supported(including_emulation=False)
    return TrainingPlan(
        steps=1,
        seconds=work.options.seconds,
        batch=batch,
        micro_batch=batch // work.processes,
        evaluate_every=1,
        judged=min(_LEAST_JUDGED, len(work.material.held_back)),
        statistics=_LEAST_JUDGED,
        processes=work.processes,
        threads=work.threads,
        least_part=work.fixed or 1,
        autocast=autocast,
        learning_rate=work.options.learning_rate or work.rates[len(work.rates) // 2],
        outputs=output_targets(models.teacher, samples) if distilled else (),
        augmentation=_choose_augmentation(work, samples),
        features=feature_targets(models.student, models.teacher, samples) if features else (),
    )


def _fit_memory(work: Work, draft: TrainingPlan, checkpoints: Checkpoints) -> TrainingPlan:
    def planned(size: int, again: bool) -> TrainingPlan:
        return set_part(draft.model_copy(update={"checkpointed": again}), size)

    def attempt(size: int, again: bool) -> None:
        _reset(work, checkpoints)
        # two parts take as much as all of a batch: gradients are there from the first one on
        few = {"batch": min(2 * size, draft.micro_batch) * draft.processes, "judged": min(2 * size, draft.judged)}
        own = planned(size, again).model_copy(update={**few, "statistics": batches.LEAST_FOR_NORMS})
        _train_alone(work, own).advance(smaller=False)
        Evaluator(work, own).rate()

    sizes = batches.part_sizes(draft.micro_batch, work.fixed)
    if work.material.device.type == "cpu" and work.options.memory_bytes is None:
        return planned(sizes[-1], False)
    plan = planned(*batches.largest_part(sizes, attempt, work.meter, work.options.memory_bytes))
    _reset(work, checkpoints)
    return plan


def _train_alone(work: Work, plan: TrainingPlan) -> Trainer:
    """Make a training that does as much as each of the processes will, while the others wait."""
    own = plan.model_copy(update={"batch": plan.batch // plan.processes})
    return work.trainer(own, DataParallel(work.material.device))


def _reset(work: Work, checkpoints: Checkpoints) -> None:
    for loaded in (work.models.student, work.models.average):
        checkpoints.put_best(loaded.module, 0)


def _choose_samples(work: Work, plan: TrainingPlan) -> TrainingPlan:
    rows = np.asarray(work.material.learnt[: plan.micro_batch])
    batch, seconds = work.material.batch(rows), 0.0
    with torch.no_grad():
        for _ in range(2):  # the first call does what is done once
            _wait(work.material.device)
            start = time.monotonic()
            work.models.teacher.module(*batch.inputs.values())
            _wait(work.material.device)
            seconds = (time.monotonic() - start) / len(rows)
    affordable = int(_SHARE_OF_ONE_EVALUATION * work.options.seconds / seconds) // _PASSES
    judged = min(len(work.material.held_back), max(_LEAST_JUDGED, affordable))
    return plan.model_copy(update={"judged": judged, "statistics": min(_STATISTICS, max(_LEAST_JUDGED, affordable))})


def _wait(device: torch.device) -> None:
    """Wait for what was started on a GPU: calls return before it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _evaluate_start(work: Work, plan: TrainingPlan) -> tuple[Evaluator, Verdict, float]:
    """Evaluate the weights that it begins with, and time that; with smaller parts until it fits."""
    smaller: TrainingPlan | None = plan.model_copy(update={"judged_at_once": plan.micro_batch})
    while smaller is not None:
        evaluator = Evaluator(work, smaller)
        if results := batches.within_memory(functools.partial(evaluator.evaluate, statistics=False)):
            return evaluator, *results[0]
        fewer = smaller.model_copy(update={"judged": smaller.judged // 2}) if smaller.judged > 1 else None
        smaller = shrink_evaluation(smaller) or fewer
    raise batches.does_not_fit(0, work.options.memory_bytes)


def _fit_time(
    work: Work, plan: TrainingPlan, step_seconds: float, evaluation_seconds: float, spent: float
) -> TrainingPlan:
    options = work.options
    left = max(0.0, _SHARE_OF_TIME * options.seconds - spent)
    evaluations = int(_SHARE_OF_EVALUATION * left / evaluation_seconds)
    evaluations = min(max(1, evaluations), options.evaluations)
    steps = max(1, _limit_steps(work, plan, int((left - evaluations * evaluation_seconds) / step_seconds)))
    return plan.model_copy(update={"steps": steps, "evaluate_every": -(-steps // evaluations)})


def _limit_steps(work: Work, plan: TrainingPlan, steps: int) -> int:
    """Return the steps, or fewer if the passes over the data that are allowed have fewer."""
    if work.options.epochs is None:
        return steps
    return min(steps, work.options.epochs * work.material.order(plan.batch, work.seed).steps_per_epoch)


def plan_time(work: Work, progress: Progress, earlier: float) -> TimeBudget:
    """Plan the time of one process: its own, or what processes before it left of the time of all.

    They took ``earlier`` seconds; what ``progress`` has beyond that went by in this one.
    """
    seconds = min(work.options.seconds, max(0.0, work.total_seconds - earlier))
    return TimeBudget(seconds, progress.seconds - earlier, progress.evaluation_seconds)


class _Run:
    """One process's part of a recovery, from a checkpoint on."""

    def __init__(
        self, work: Work, team: DataParallel, checkpoints: Checkpoints, progress: Progress, tell: Tell, earlier: float
    ) -> None:
        """``earlier``: seconds that processes before this one took."""
        self._work, self._team, self._checkpoints, self._tell = work, team, checkpoints, tell
        self._progress = progress
        self._trainer = work.trainer(progress.plan, team)
        checkpoints.read(self._trainer, progress)
        self._saved = self._told = time.monotonic()
        self._earlier, self._time = earlier, plan_time(work, progress, earlier)
        self._evaluator = Evaluator(work, progress.plan)

    def to_the_end(self) -> Ending:
        """Do all steps, evaluations and checkpoints that are left."""
        while (ending := self._ending()) is None:
            before, start = self._progress.plan, time.monotonic()
            loss = self._trainer.advance()
            self._time.add_step(time.monotonic() - start)
            step, plan = self._trainer.step, self._trainer.plan
            self._update(step=step, plan=plan)
            if math.isfinite(loss):
                self._update(loss_sum=self._progress.loss_sum + loss)
                if step % plan.evaluate_every == 0 or step == plan.steps:
                    self._evaluate()
                self._end_in_time()
            else:
                self._update(diverged=True)
            if self._team.leads:
                self._say(loss)
                self._save(at_once=self._progress.plan != before)
        if self._team.leads:
            self._checkpoints.put_best(self._work.models.average.module, self._progress.best_step)
        return ending

    def _update(self, **values: object) -> None:
        self._progress = self._progress.model_copy(update=values)

    def _ending(self) -> Ending | None:
        """Explain why to stop now; every process comes to the same."""
        progress = self._progress
        if progress.diverged:
            return "diverged"
        if progress.step >= progress.plan.steps:
            return "planned" if progress.plan.shortened is None else "time"
        if progress.hopeless:
            return "hopeless"
        return "patience" if progress.waited >= self._work.options.patience else None

    def _end_in_time(self) -> None:
        """Shorten the plan where the steps left would take too long; the leader's clock decides."""
        plan, step = self._progress.plan, self._trainer.step
        steps = self._time.steps_in_time(plan, step) if self._team.leads else 0
        agreed = int(self._team.total(float(steps))[0])
        if agreed < plan.steps:
            self._follow(plan.shorten(step, agreed))

    def _follow(self, plan: TrainingPlan) -> None:
        self._trainer.follow(plan)
        self._update(plan=plan)

    def _evaluate(self) -> None:
        """Evaluate the average; the leader does, and all know how it went."""
        waited, hopeless, step = 0.0, 0.0, self._trainer.step
        if self._team.leads:
            verdict, best, curve = self._verdict(), self._progress.best, self._progress.curve
            assert best.held_back_loss is not None
            if verdict.better_than(Verdict(best.metric, best.held_back_loss, self._work.metric.sign)):
                self._checkpoints.keep_best(self._work.models.average.module, step)
                self._update(best_step=step)
            else:
                waited = self._progress.waited + 1.0
            point = Point(
                step=step,
                loss=self._progress.loss_sum / (step - curve[-1].step),
                metric=verdict.metric,
                held_back_loss=verdict.loss if math.isfinite(verdict.loss) else None,
                learning_rate=trainer.learning_rate(self._trainer.plan, step - 1, self._work.options),
            )
            self._update(curve=(*curve, point))
            hopeless = float(self._is_hopeless())
        agreed = {"waited": int(self._team.total(waited)[0]), "hopeless": bool(self._team.total(hopeless)[0])}
        self._update(loss_sum=0.0, **agreed)

    def _is_hopeless(self) -> bool:
        """Tell whether far more is lost than is allowed after half of the steps, and hardly less than at first."""
        progress, allowed = self._progress, self._work.max_drop
        if not allowed or 2 * progress.step < progress.plan.steps:
            return False
        first, left = (self._find_lost(point) for point in (progress.curve[0], progress.best))
        return left * left > _HOPELESS * allowed * max(first, left)

    def _find_lost(self, point: Point) -> float:
        """Find how much of the teacher's metric is lost."""
        return max(0.0, self._work.metric.sign * (self._progress.teacher - point.metric))

    def _verdict(self) -> Verdict:
        """Evaluate the average; in smaller parts from here on where memory ran out."""
        while not (results := batches.within_memory(self._evaluator.evaluate)):
            smaller = shrink_evaluation(self._progress.plan)
            if smaller is None:
                raise batches.does_not_fit(0, self._work.options.memory_bytes)
            self._follow(smaller)
            self._evaluator = Evaluator(self._work, smaller)  # the old one's answers of the teacher are of larger parts
        verdict, self._time.evaluation_seconds = results[0]
        return verdict

    def _say(self, loss: float) -> None:
        if time.monotonic() - self._told < _TOLD_SECONDS:
            return
        self._told = time.monotonic()
        last, plan = self._progress.curve[-1], self._progress.plan
        self._tell(
            f"step {self._trainer.step} of {plan.steps}, loss {loss:.4g}, {self._work.metric.name} {last.metric:.4g} "
            f"of {self._progress.teacher:.4g}"
        )

    def _save(self, *, at_once: bool) -> None:
        """Write a checkpoint if it is time to, or at once."""
        if at_once or time.monotonic() - self._saved >= self._work.options.checkpoint_seconds:
            seconds = self._earlier + self._time.spent
            self._checkpoints.write(self._trainer, self._progress.model_copy(update={"seconds": seconds}))
            self._saved = time.monotonic()

    def record(self, ending: Ending) -> Recovery:
        """Make the record of the recovery."""
        progress, plan, data = self._progress, self._progress.plan, self._work.material.data
        few = plan.steps < _LEAST_TRIED and self._work.options.epochs is None
        short = ", as there was time for no more: give it more (--recover-time), or a quiet machine" if few else ""
        lost = format_metric(self._find_lost(progress.best))
        reason = {
            "hopeless": f"after {progress.step} of {plan.steps} steps it still loses {lost}, where "
            f"{self._work.max_drop or 0:g} is allowed",
            "planned": f"all {plan.steps} planned steps are done{short}",
            "patience": f"{progress.waited} evaluations in a row were no better than step {progress.best_step}",
            "diverged": f"the loss or its gradients were NaN or infinite at step {progress.step}; the weights of step "
            f"{progress.best_step}, the best before, are kept: try a lower learning_rate",
            "time": f"{progress.step} of {plan.planned} planned steps fitted the time: they took longer than when they "
            "were planned, and the schedule was shortened",
        }[ending]
        return Recovery(
            method=self._work.options.method,
            metric=self._work.metric.name,
            teacher=progress.teacher,
            before=progress.curve[0].metric,
            after=progress.best.metric,
            best_step=progress.best_step,
            steps=progress.step,
            ending=ending,
            reason=reason,
            samples=len(data),
            held_back=plan.judged,
            data=data.name,
            plan=plan,
            curve=progress.curve,
        )
