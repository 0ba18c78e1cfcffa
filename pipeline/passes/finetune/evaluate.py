"""Evaluate the averaged weights on samples that nothing is learnt from."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from enginesmith.calibration.dataset import Labels, assign_labels, take_labels
from enginesmith.pipeline.frameworks.torch.module import LoadedModel
from enginesmith.pipeline.passes.finetune.batches import LEAST_FOR_NORMS, Batch, DataParallel, Meter, SplitData, parts
from enginesmith.pipeline.passes.finetune.losses import (
    Distil,
    Loss,
    Supervised,
    are_binary,
    compare_with_labels,
    find_form,
    user_loss,
)
from enginesmith.pipeline.passes.finetune.options import BatchLimits, RecoverOptions, TrainingPlan
from enginesmith.pipeline.passes.finetune.trainer import Models, Trainer, norms
from enginesmith.pipeline.tensors import Array, Feeds


@dataclass(frozen=True)
class Metric:
    """A number for ``(outputs, the teacher's outputs, labels)``; ``sign`` is −1 where less is better."""

    name: str
    value: Callable[[Feeds, Feeds, Labels | None], float]
    sign: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """A metric, and the loss, which decides between equal ones: a metric of few samples has few values."""

    metric: float
    loss: float
    sign: float

    def better_than(self, other: "Verdict") -> bool:
        """Tell whether it is; a number that is not finite is never better."""
        if not np.isfinite([self.metric, self.loss]).all():
            return False
        return (self.sign * self.metric, -self.loss) > (self.sign * other.metric, -other.loss)


@dataclass(frozen=True)
class Work:
    """A model to be recovered, the data and the means."""

    models: Models
    material: SplitData
    options: RecoverOptions
    metric: Metric
    seed: int
    threads: int
    processes: int
    meter: Meter
    fixed: int | None = None
    """The batch that the model takes, where it takes only one."""
    rates: tuple[float, ...] = (2e-3,)
    """Learning rates to choose from by short trials, where none is given."""
    batch_limits: BatchLimits = field(default_factory=BatchLimits)
    max_drop: float | None = None
    """Drop of the metric that is allowed; training that cannot come near it ends early. None: it never does."""
    total_seconds: float = math.inf
    """Time of all processes that go on with a recovery; ``options`` has that of this one, which may be less."""

    def loss(self, plan: TrainingPlan) -> Loss:
        """Make the loss that the student is trained by.

        Raises:
            DataError: the user's loss is not there.
        """
        names = [spec.name for spec in self.models.teacher.signature.outputs]
        if self.options.method == "supervised":
            labels = assign_labels(self.material.data.number_labels, names, self.material.labeled)
            return Supervised(names, frozenset(name for name, values in labels.items() if are_binary(values)))
        if self.options.method == "distil":
            return Distil(plan.outputs, plan.features, names, self.options.temperature)
        return user_loss(self.options.method)

    def trainer(self, plan: TrainingPlan, team: DataParallel) -> Trainer:
        """Make a training at its first step."""
        return Trainer(
            self.models, self.material, self.loss(plan), self.options, plan, self.seed, team, self.meter.check
        )


@dataclass
class Evaluator:
    """Runs the held-back samples through models."""

    work: Work
    plan: TrainingPlan
    pass_seconds: float = field(default=0.0, init=False)
    """Seconds that the samples of the last evaluation took in the model, without the metric."""

    def rate(self, *, statistics: bool = True) -> Verdict:
        """Rate the average as it is now; batch norms' ``statistics`` are computed anew first."""
        average, metric = self.work.models.average, self.work.metric
        if statistics:
            self.find_statistics(average)
        start = time.monotonic()
        outputs, loss = self._outputs(average)
        self.pass_seconds = time.monotonic() - start
        return Verdict(metric.value(outputs, self._theirs, self._labels), loss, metric.sign)

    def evaluate(self, *, statistics: bool = True) -> tuple[Verdict, float]:
        """Rate the average, and measure the seconds that it takes.

        Raises:
            StepOutOfMemory: more memory was taken than is allowed.
        """
        _, start = self.teacher, time.monotonic()  # the teacher answers once: no part of each evaluation's time
        verdict = self.rate(statistics=statistics)
        self.work.meter.check()
        return verdict, time.monotonic() - start

    def find_statistics(self, loaded: LoadedModel) -> None:
        """Recompute a model's batch norm statistics from samples to learn from."""
        count = max(self.plan.statistics, self.work.fixed or 1)
        rows = self.work.material.order(count, self.work.seed).at(0)
        size = self.work.fixed or max(self._at_once, LEAST_FOR_NORMS)
        full = (part for part in parts(rows, size) if len(part) == size or len(rows) < size)
        find_statistics(loaded, map(self.work.material.batch, full))

    @cached_property
    def teacher(self) -> float:
        return self.work.metric.value(self._theirs, self._theirs, self._labels)

    @cached_property
    def _loss(self) -> Loss:
        return self.work.loss(self.plan)

    @property
    def _at_once(self) -> int:
        return self.plan.judged_at_once or self.plan.micro_batch

    @cached_property
    def _rows(self) -> Array:
        rows = np.asarray(self.work.material.held_back, np.int64)
        return rows[np.linspace(0, len(rows) - 1, self.plan.judged).round().astype(np.int64)]

    @cached_property
    def _labels(self) -> Labels | None:
        labels = self.work.material.data.labels
        return None if labels is None else take_labels(labels, self._rows)

    @cached_property
    def _theirs(self) -> dict[str, Array]:
        return self._outputs(self.work.models.teacher, with_loss=False)[0]

    @torch.no_grad()
    def _outputs(self, loaded: LoadedModel, *, with_loss: bool = True) -> tuple[dict[str, Array], float]:
        """Compute outputs by name, but for single numbers, for the samples of the evaluation, and the mean loss."""
        size, total = self.work.fixed or self._at_once, 0.0
        outputs: dict[str, list[Tensor]] = {}
        for part in parts(self._rows, size):
            filled = np.resize(part, size) if self.work.fixed else part  # repeats rows
            batch = self.work.material.batch(filled)
            values, loss = self._run(loaded, batch) if with_loss else (loaded.module(*batch.inputs.values()), 0.0)
            for spec, value in zip(loaded.signature.outputs, values, strict=True):
                if value.ndim:
                    outputs.setdefault(spec.name, []).append(copy_numbers(value[: len(part)]))
            total += loss * len(part)
        return {name: torch.cat(rows).numpy() for name, rows in outputs.items()}, total / len(self._rows)

    def _run(self, loaded: LoadedModel, batch: Batch) -> tuple[tuple[Tensor, ...], float]:
        """Run one pass for both, unless the loss runs the module in a way of its own."""
        outputs: list[tuple[Tensor, ...]] = []
        with loaded.module.register_forward_hook(lambda module, given, values: outputs.append(values)):
            loss = self._loss(loaded.module, self.work.models.teacher.module, batch)
        return outputs[0] if outputs else loaded.module(*batch.inputs.values()), float(loss)


@torch.no_grad()
def find_statistics(loaded: LoadedModel, samples: Iterable[Batch]) -> None:
    """Compute mean and variance of every batch norm, over all of the samples, with the weights as they are now.

    One that is given single values per channel, which have no variance, keeps its own.
    """
    batch_norms, momenta = norms(loaded), dict[_BatchNorm, float | None]()

    def begin(norm: _BatchNorm, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        value = (*given, *named.values())[0]
        several = value.numel() > value.shape[1]
        if several and norm not in momenta:
            momenta[norm] = norm.momentum
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over the batches
        norm.train(several)

    hooks = [norm.register_forward_pre_hook(begin, with_kwargs=True) for norm in batch_norms]
    try:
        for batch in samples if batch_norms else ():
            loaded.module(*batch.inputs.values())
    finally:
        for hook, norm in zip(hooks, batch_norms, strict=True):
            hook.remove()
            norm.momentum = momenta.get(norm, norm.momentum)
            norm.eval()


def shrink_evaluation(plan: TrainingPlan) -> TrainingPlan | None:
    """Return the plan whose evaluations take half of the samples at once; None where that cannot be."""
    at_once = (plan.judged_at_once or plan.micro_batch) // 2
    return plan.model_copy(update={"judged_at_once": at_once}) if at_once >= plan.least_part else None


def copy_numbers(value: Tensor) -> Tensor:
    """Copy an output to the CPU: whole numbers as they are, others in float32."""
    whole = not (value.is_floating_point() or value.is_complex())
    return (value if whole else value.float()).cpu()


def agreement(outputs: Feeds, theirs: Feeds, labels: Labels | None) -> float:
    """Compute the agreement with the teacher: the share of equal numbers, where the first output has whole ones, or of
    equal classes, where it is more than one class, else one minus the mean squared error over the teacher's variance.
    Without outputs for each sample it is always 1, so that the loss alone decides.
    """
    del labels
    if not theirs:
        return 1.0
    name = next(iter(theirs))
    if theirs[name].dtype.kind in "iub":
        return float((outputs[name] == theirs[name]).mean())
    ours, others = outputs[name].astype(np.float64), theirs[name].astype(np.float64)
    if ours.ndim == 2 and ours.shape[1] > 1:
        return float((ours.argmax(1) == others.argmax(1)).mean())
    counted = (ours != others) | np.isfinite(others)  # the same infinity is a mask
    if not counted.any():
        return 1.0
    ours, others = ours[counted], others[counted]
    return float(1 - ((ours - others) ** 2).mean() / max(others.var(), np.finfo(np.float64).tiny))


AGREEMENT = Metric("agreement", agreement)
"""For data without labels."""


def compute_label_loss(
    names: Sequence[str], labeled: str | None, outputs: Feeds, theirs: Feeds, labels: Labels | None
) -> float:
    """Compute the loss of supervised recovery, over all samples at once, of the outputs that have labels.

    ``names`` are the model's outputs; ``labeled`` is the one that labels of one array are of, None for the first.
    """
    total = 0.0
    for name, given in assign_labels(labels, names, labeled).items():
        if given.dtype.kind not in "biuf":
            continue
        numbers = torch.from_numpy(given.astype(np.float32 if given.dtype.kind == "f" else np.int64))
        form = find_form(theirs[name]) if are_binary(given) else None
        loss = compare_with_labels(torch.from_numpy(outputs[name]), numbers, form)
        assert loss is not None  # the same labels are learnt from
        total += float(loss)
    return total


def loss_on_labels(names: Sequence[str], labeled: str | None = None) -> Metric:
    """Make the metric for labels that are numbers, or classes of more than samples."""
    return Metric("loss", partial(compute_label_loss, names, labeled), -1.0)
