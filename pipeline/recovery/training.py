"""One step after another: gradients of a batch in parts, AdamW, and the average of the weights."""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.recovery import memory
from enginesmith.pipeline.recovery.averaging import norms, update
from enginesmith.pipeline.recovery.losses import Loss
from enginesmith.pipeline.recovery.material import Material
from enginesmith.pipeline.recovery.options import RecoverOptions
from enginesmith.pipeline.recovery.record import TrainingPlan
from enginesmith.pipeline.recovery.schedule import parts, rate, share
from enginesmith.pipeline.recovery.team import Team
from enginesmith.pipeline.tensors import Array
from enginesmith.pipeline.torch_model import LoadedModel, NamedForward

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
    material: Material
    loss: Loss
    options: RecoverOptions
    plan: TrainingPlan
    seed: int
    team: Team
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
        """The module that learns."""
        return self.models.student.module

    def advance(self, *, smaller: bool = True) -> float:
        """Do one step and give back its loss: NaN where it or its gradients are not finite; weights stay then.

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
                raise memory.does_not_fit(0, None)
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
        """The learning rate of a step."""
        return rate(self.plan, step, self.options.learning_rate, self.options.warmup)

    def follow(self, plan: TrainingPlan) -> None:
        """Go on by another plan."""
        self.plan = plan
        self._arrange()

    def _arrange(self) -> None:
        memory.keep_all(self.student.model)
        if self.plan.checkpointed:
            memory.compute_again(self.student.model)
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
            if not memory.ran_out(error):
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
        """Whether they are finite: a loss that is can have others, as a root has at zero."""
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
    """The plan that takes less memory.

    Raises:
        StepOutOfMemory: there is none.
    """
    part = plan.micro_batch // 2
    if part >= plan.least_part:
        return plan.model_copy(update={"micro_batch": part, "frozen_norms": too_few(part, plan)})
    if plan.checkpointed:
        raise memory.does_not_fit(0, None)
    return plan.model_copy(update={"checkpointed": True})


def too_few(part: int, plan: TrainingPlan) -> bool:
    """Whether batch norms cannot learn from parts of this size."""
    return part < min(memory.LEAST_FOR_NORMS, plan.batch)


def _gradient(value: Tensor) -> Tensor:
    """Zeros where this process's samples have not reached a weight: others' may have."""
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
