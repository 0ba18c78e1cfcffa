"""One step after another: gradients of a batch in parts, AdamW, and the average of the weights."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.passes.finetune import micro_batching
from enginesmith.pipeline.passes.finetune.data import Batch, SplitData, parts, rate, share
from enginesmith.pipeline.passes.finetune.data_parallel import DataParallel
from enginesmith.pipeline.passes.finetune.losses import Loss
from enginesmith.pipeline.passes.finetune.options import RecoverOptions, TrainingPlan
from enginesmith.pipeline.tensors import Array

# The moving average of the weights, and statistics of batch norms that belong to it.

_WARM = 10
"""The average follows closely at first: the decay at step s is at most (1 + s) / (10 + s)."""


def norms(module: nn.Module) -> list[_BatchNorm]:
    """List batch norms that keep statistics."""
    return [one for one in module.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]


@torch.no_grad()
def update(average: NamedForward, module: NamedForward, decay: float, step: int) -> None:
    """One step of the average; buffers are taken as they are, and statistics are found anew when they are needed."""
    weight = 1 - min(decay, (1 + step) / (_WARM + step))
    for mean, value in zip(average.parameters(), module.parameters(), strict=True):
        mean.lerp_(value.detach().to(mean.dtype), weight)
    for kept, now in zip(average.buffers(), module.buffers(), strict=True):
        if 0 not in kept.stride() or kept.numel() <= 1:
            kept.copy_(now)


@torch.no_grad()
def find_statistics(module: NamedForward, batches: Iterable[Batch]) -> None:
    """Mean and variance of every batch norm, over all of the batches, with the weights as they are now."""
    found = norms(module)
    if not found:
        return
    momenta = [one.momentum for one in found]
    for one in found:
        one.reset_running_stats()
        one.momentum = None  # a plain mean over the batches
        one.train()
    try:
        for batch in batches:
            module(*batch.inputs.values())
    finally:
        for one, momentum in zip(found, momenta, strict=True):
            one.momentum = momentum
            one.eval()


_LONGEST_GRADIENT = 1.0
"""Gradients are cut to this length, so that one odd batch cannot spoil the weights."""


@dataclass(frozen=True)
class Models:
    """The one that learns, the average of its weights, and the one that it learns from."""

    student: LoadedModel
    average: LoadedModel
    teacher: LoadedModel

    def ready(self, device: torch.device) -> None:
        """Put all on the device; the student's weights can change, and no other's.

        Raises:
            ModelError: the weights are not of a type that training works in.
        """
        for loaded in (self.student, self.average, self.teacher):
            loaded.module.to(device)
            loaded.module.eval().requires_grad_(False)
        for name, value in self.student.module.model.named_parameters():
            if value.dtype in (torch.float16, torch.bfloat16):
                raise ModelError(
                    f"the weight {name!r} is {str(value.dtype).removeprefix('torch.')}, whose steps are too coarse to "
                    "train in",
                    "recover the model in float32, and choose its precision afterwards",
                )
            value.requires_grad_(value.is_floating_point())


@dataclass
class Trainer:
    """The state of a training, and how it goes on by a step."""

    models: Models
    material: SplitData
    loss: Loss
    options: RecoverOptions
    plan: TrainingPlan
    seed: int
    team: DataParallel
    within: Callable[[], None]
    """Raises StepOutOfMemory where more memory was taken than is allowed."""
    step: int = 0
    """Steps that were done."""
    optimiser: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.optimiser = _optimiser(self.student, self.options)
        self._order = self.material.order(self.plan.batch, self.seed)
        self._arrange()

    @property
    def student(self) -> NamedForward:
        """Return the module that learns."""
        return self.models.student.module

    def advance(self, *, smaller: bool = True) -> float:
        """Do one step and return its loss: NaN where it or its gradients are not finite; weights stay then.

        A step that memory ran out in is done again in ``smaller`` parts.

        Raises:
            StepOutOfMemory: not even one sample at a time fits; or the parts were not to become smaller.
        """
        rate = self.rate(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        rows = self._order.at(self.step)
        loss = self._gradients(rows)
        while loss is None:
            if not smaller:
                raise micro_batching.does_not_fit(0, None)
            self._shrink()
            loss = self._gradients(rows)
        finite = math.isfinite(loss) and self._cut_gradients()
        if finite:
            self.optimiser.step()
            update(self.models.average.module, self.student, self.options.ema, self.step)
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return loss if finite else math.nan

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return rate(self.plan, step, self.options.learning_rate, self.options.warmup)

    def follow(self, plan: TrainingPlan) -> None:
        """Go on by another plan."""
        self.plan = plan
        self._arrange()

    def _arrange(self) -> None:
        micro_batching.keep_all(self.student.model)
        if self.plan.checkpointed:
            micro_batching.compute_again(self.student.model)
        for one in norms(self.student):
            one.train(not self.plan.frozen_norms)
        for module in self.student.modules():
            if isinstance(module, nn.RNNBase):
                module.train()  # cuDNN keeps what gradients need only then

    def _gradients(self, rows: Array) -> float | None:
        """Gradients of the whole batch, left in the parameters, and its loss; None where memory ran out anywhere."""
        total, short = 0.0, False
        own = share(rows, self.team.rank, self.team.size)
        try:
            for index, part in enumerate(parts(own, self.plan.micro_batch)):
                torch.manual_seed(hash((self.seed, self.step, self.team.rank, index)) & 0x7FFF_FFFF)
                total += self._part(part, len(part) / len(rows))
            self.within()
        except Exception as error:
            if not micro_batching.ran_out(error):
                raise
            short = True
        if short or self.team.size > 1:
            total, failed = self.team.total(total, float(short))
            if failed:
                self.optimiser.zero_grad(set_to_none=True)
                gc.collect()
                return None
        self.team.add_up(_gradient(value) for value in self.student.parameters() if value.requires_grad)
        return total

    def _cut_gradients(self) -> bool:
        """Tell whether they are finite: a loss that is can have others, as a root has at zero."""
        norm = nn.utils.clip_grad_norm_(self.student.parameters(), _LONGEST_GRADIENT)
        return bool(norm.isfinite())

    def _part(self, rows: Array, weight: float) -> float:
        with self._autocast():
            loss: Tensor = self.loss(self.student, self.models.teacher.module, self.material.batch(rows))
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()) * weight

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        kind = self.material.device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=self.plan.autocast):
            yield

    def _shrink(self) -> None:
        """Plan with half the part, or with activations computed again where it is one sample."""
        self.follow(shrunk(self.plan))


def load_libraries() -> None:
    """Take a step with one weight: what torch imports only then is no part of what recovery takes."""
    weight = nn.Linear(1, 1)
    optimiser = _optimiser(weight, RecoverOptions())
    again = checkpoint(weight, torch.ones(1, 1, requires_grad=True), use_reentrant=False)
    again.sum().backward()
    optimiser.step()


def shrunk(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan that takes less memory.

    Raises:
        StepOutOfMemory: there is none.
    """
    part = plan.micro_batch // 2
    if part >= plan.least_part:
        return plan.model_copy(update={"micro_batch": part, "frozen_norms": too_few(part, plan)})
    if plan.checkpointed:
        raise micro_batching.does_not_fit(0, None)
    return plan.model_copy(update={"checkpointed": True})


def too_few(part: int, plan: TrainingPlan) -> bool:
    """Tell whether batch norms cannot learn from parts of this size."""
    return part < min(micro_batching.LEAST_FOR_NORMS, plan.batch)


def _gradient(value: Tensor) -> Tensor:
    """Fill gradients with zeros where this process's samples have not reached a weight: others' may have."""
    if value.grad is None:
        value.grad = torch.zeros_like(value)
    return value.grad


def _optimiser(module: nn.Module, options: RecoverOptions) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019); vectors do not decay."""
    trained = [value for value in module.parameters() if value.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [value for value in trained if value.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [value for value in trained if value.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=options.learning_rate)


# How long steps and evaluations take, and how many there is time for: before the first step, and on the way.

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
    """Measure the time of a step, with the number of threads that makes it shortest.

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
    """Return the mean over some steps, or over those that took some time together."""
    start, done = time.monotonic(), 0
    while done < _TIMED_STEPS and time.monotonic() - start < _TIMED_SECONDS:
        trainer.advance()
        done += 1
    return (time.monotonic() - start) / done


@dataclass
class TimeBudget:
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
        """Return seconds in all processes so far."""
        return self.before + time.monotonic() - self._started

    def stepped(self, seconds: float) -> None:
        """Take note of a step; the first one of a process does what is done once."""
        self._steps += 1
        if self._steps > 1:
            self._stepping += seconds

    def steps_in_time(self, plan: TrainingPlan, step: int) -> int:
        """Return steps in all that there is time for after ``step``: those of the plan, or fewer."""
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
