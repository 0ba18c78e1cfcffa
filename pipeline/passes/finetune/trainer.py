"""Train by one step after another, keep the state on disk, and hold it against the clock.

A step takes gradients of a batch in parts, AdamW, and the average of the weights. A training that was killed goes on
from its last checkpoint; on the CPU it ends with the same weights:

    FOLDER/best-STEP.safetensors                        the best weights, as they are to be kept
    FOLDER/state-STEP/{student,average,moments}.safetensors, progress.json

A state appears whole or not at all: it is written beside and renamed. There are no random numbers to keep: those of a
step are drawn from the seed and the step.
"""

import gc
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from enginesmith.pipeline.artifact import grant_usual_rights, sync
from enginesmith.pipeline.errors import ModelError, storage_errors
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.frameworks.torch.surgery import find_frozen
from enginesmith.pipeline.passes.finetune import batches
from enginesmith.pipeline.passes.finetune.augment import augment
from enginesmith.pipeline.passes.finetune.batches import DataParallel, SplitData
from enginesmith.pipeline.passes.finetune.losses import Loss
from enginesmith.pipeline.passes.finetune.options import Point, RecoverOptions, TrainingPlan
from enginesmith.pipeline.tensors import Array

_WARM = 10
"""The average follows closely at first: the decay at step s is at most (1 + s) / (10 + s)."""
_LONGEST_GRADIENT = 1.0
"""Gradients are cut to this length, so that one odd batch cannot spoil the weights."""


def learning_rate(plan: TrainingPlan, step: int, options: RecoverOptions) -> float:
    """Compute the learning rate of a step: a linear warm-up over a share of the steps, then a cosine to zero.

    Loshchilov and Hutter, "SGDR", ICLR 2017. A plan that was shortened goes through the rest of its schedule faster.
    """
    position, steps, highest = plan.position(step), plan.planned, plan.learning_rate
    warm = math.ceil(options.warmup * steps)
    if position < warm:
        return highest * (position + 1) / warm
    return highest * 0.5 * (1 + math.cos(math.pi * (position - warm) / max(1, steps - warm)))


def norms(loaded: LoadedModel) -> list[_BatchNorm]:
    """List batch norms that keep statistics, but for those all of whose parameters the user froze."""
    model = loaded.module.model
    frozen, batch_norms = find_frozen(model, loaded.frozen), list[_BatchNorm]()
    for path, norm in model.named_modules():
        if isinstance(norm, _BatchNorm) and norm.track_running_stats:
            own = {name for name, _ in norm.named_parameters(path, recurse=False)}
            if not own or own - frozen:
                batch_norms.append(norm)
    return batch_norms


@torch.no_grad()
def update_average(average: NamedForward, module: NamedForward, decay: float, step: int) -> None:
    """Move the average of what is trained by one step; buffers are copied, as statistics are computed anew."""
    weight = 1 - min(decay, (1 + step) / (_WARM + step))
    pairs = zip(average.parameters(), module.parameters(), strict=True)
    moving = [(mean, value.to(mean.dtype)) for mean, value in pairs if value.requires_grad]
    if moving:  # a few kernels on CUDA for all of them
        means, values = zip(*moving, strict=True)
        torch._foreach_lerp_(means, values, weight)
    for buffer, now in zip(average.buffers(), module.buffers(), strict=True):
        if 0 not in buffer.stride() or buffer.numel() <= 1:
            buffer.copy_(now)


@dataclass(frozen=True)
class Models:
    """The one that learns, the average of its weights, and the one that it learns from."""

    student: LoadedModel
    average: LoadedModel
    teacher: LoadedModel
    _hooks: list[RemovableHandle] = field(default_factory=list, init=False)

    def ready(self, device: torch.device) -> None:
        """Put all on the device; the student's weights can change that are not frozen. Outputs have the sample first.

        Raises:
            ModelError: the weights are not of a type that training works in.
        """
        for loaded in (self.student, self.average, self.teacher):
            loaded.module.to(device)
            loaded.module.eval().requires_grad_(False)
            if any(axes := [spec.batch_axis for spec in loaded.signature.outputs]):
                self._hooks.append(loaded.module.register_forward_hook(partial(_put_samples_first, axes)))
        frozen = find_frozen(self.student.module.model, self.student.frozen)
        for name, value in self.student.module.model.named_parameters():
            if value.dtype in (torch.float16, torch.bfloat16):
                raise ModelError(
                    f"the weight {name!r} is {str(value.dtype).removeprefix('torch.')}, whose steps are too coarse to "
                    "train in",
                    "recover the model in float32, and choose its precision afterwards",
                )
            value.requires_grad_(value.is_floating_point() and name not in frozen)

    def restore(self) -> None:
        """Let the modules answer with the batch where it was."""
        while self._hooks:
            self._hooks.pop().remove()


def _put_samples_first(
    axes: Sequence[int], module: nn.Module, given: object, outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Move the batch of each output to the front, as losses and metrics take it; a forward hook."""
    return tuple(value.movedim(axis, 0) for value, axis in zip(outputs, axes, strict=True))


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
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = _optimizer(self.student, self.options)
        self._order = self.material.order(self.plan.batch, self.seed)
        self.follow(self.plan)

    @property
    def student(self) -> NamedForward:
        return self.models.student.module

    def advance(self, *, smaller: bool = True) -> float:
        """Do one step and return its loss: NaN where it or its gradients are not finite; weights stay then.

        A step that memory ran out in is done again in ``smaller`` parts.

        Raises:
            StepOutOfMemory: not even one sample at a time fits; or the parts were not to become smaller.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.plan, self.step, self.options)
        rows = self._order.at(self.step)
        while (loss := self._gradients(rows)) is None:
            if not smaller:
                raise batches.does_not_fit(0, None)
            self.follow(shrink_step(self.plan))
        finite = math.isfinite(loss)
        if finite:  # gradients of a finite loss need not be: a root has none at zero
            finite = bool(nn.utils.clip_grad_norm_(self.student.parameters(), _LONGEST_GRADIENT).isfinite())
        if finite:
            self.optimizer.step()
            update_average(self.models.average.module, self.student, self.options.ema, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss if finite else math.nan

    def follow(self, plan: TrainingPlan) -> None:
        """Go on by another plan."""
        self.plan = plan
        batches.keep_activations(self.student.model)
        if plan.checkpointed:
            batches.compute_again(self.student.model)
        for norm in norms(self.models.student):
            norm.train(not plan.frozen_norms)
        for module in self.student.modules():
            if isinstance(module, nn.RNNBase):
                module.train()  # cuDNN keeps what gradients need only then
                module.dropout = 0.0  # as nothing else is dropped out

    def _gradients(self, rows: Array) -> float | None:
        """Leave gradients of the whole batch in the parameters, and return its loss; None where memory ran out."""
        total, short = 0.0, False
        own = np.array_split(rows, self.team.size)[self.team.rank]
        try:
            for index, part in enumerate(batches.parts(own, self.plan.micro_batch)):
                torch.manual_seed(hash((self.seed, self.step, self.team.rank, index)) & 0x7FFF_FFFF)
                weight = len(part) / len(rows)
                batch = self.material.batch(part)
                if self.plan.augmentation is not None:
                    batch = augment(batch, self.plan.augmentation)
                with torch.autocast(self.material.device.type, dtype=torch.bfloat16, enabled=self.plan.autocast):
                    loss = self.loss(self.student, self.models.teacher.module, batch)
                (loss * weight).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach()) * weight
            self.within()
        except Exception as error:
            if not batches.ran_out(error):
                raise
            short = True
        if short or self.team.size > 1:
            total, failed = self.team.total(total, float(short))
            if failed:
                self.optimizer.zero_grad(set_to_none=True)
                gc.collect()
                return None
            trained = [value for value in self.student.parameters() if value.requires_grad]
            for value in trained:  # samples of other processes may have reached weights that these have not
                value.grad = torch.zeros_like(value) if value.grad is None else value.grad
            self.team.add_up(value.grad for value in trained if value.grad is not None)
        return total


def set_part(plan: TrainingPlan, size: int) -> TrainingPlan:
    """Return the plan with parts of ``size`` samples; batch norms cannot learn from parts that are too small."""
    frozen = size < max(2, min(batches.LEAST_FOR_NORMS, plan.batch))
    return plan.model_copy(update={"micro_batch": size, "frozen_norms": frozen})


def shrink_step(plan: TrainingPlan) -> TrainingPlan:
    """Return the plan that takes less memory: half the part, or activations that are computed again.

    Raises:
        StepOutOfMemory: there is none.
    """
    if plan.micro_batch // 2 >= plan.least_part:
        return set_part(plan, plan.micro_batch // 2)
    if plan.checkpointed:
        raise batches.does_not_fit(0, None)
    return plan.model_copy(update={"checkpointed": True})


def load_libraries() -> None:
    """Take a step with one weight: what torch imports only then is no part of what recovery takes."""
    weight = nn.Linear(1, 1)
    optimizer = _optimizer(weight, RecoverOptions())
    checkpoint(weight, torch.ones(1, 1, requires_grad=True), use_reentrant=False).sum().backward()
    optimizer.step()


def _optimizer(module: nn.Module, options: RecoverOptions) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019); vectors do not decay."""
    trained = [value for value in module.parameters() if value.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [value for value in trained if value.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [value for value in trained if value.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]])  # each step sets its rate


class Progress(BaseModel, frozen=True):
    """All that a checkpoint holds besides weights."""

    fingerprint: str
    """Digest of the data and of the user's code: a checkpoint is of no use for others."""
    plan: TrainingPlan
    teacher: float
    step: int = 0
    best_step: int = 0
    waited: int = 0
    """Evaluations since the best one."""
    loss_sum: float = 0.0
    """Sum over the steps since the last evaluation."""
    curve: tuple[Point, ...] = ()
    """The first point is that of the weights that it began with."""
    seconds: float = 0.0
    """Time that all processes so far have worked on it."""
    evaluation_seconds: float = 0.0
    diverged: bool = False
    hopeless: bool = False
    """It loses far more than is allowed, after half of the steps."""

    @property
    def best(self) -> Point:
        return next(point for point in self.curve if point.step == self.best_step)


_PROGRESS = "progress.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Checkpoints:
    """A folder of checkpoints, of which the last one counts."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder, self._fingerprint = folder, fingerprint

    def last(self) -> Progress | None:
        """Read the progress of the last checkpoint; None where there is none of the same work."""
        states = sorted(self._folder.glob("state-*"))
        try:
            progress = Progress.model_validate_json((states[-1] / _PROGRESS).read_bytes()) if states else None
        except (OSError, ValidationError):
            return None
        return progress if progress and progress.fingerprint == self._fingerprint else None

    def clear(self, *kept: Path) -> None:
        """Remove all states and weights but those ``kept``."""
        for path in {*self._folder.glob("state-*"), *self._folder.glob(".state-*")} - {*kept}:
            shutil.rmtree(path)
        for path in {*self._folder.glob("best-*")} - {*kept}:
            path.unlink()

    def write(self, trainer: Trainer, progress: Progress) -> None:
        """Add a checkpoint, and remove all that was needed only by those before.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        target = self._state(progress.step)
        partial = target.with_name(f".{target.name}")
        state = trainer.optimizer.state
        moments = {  # by the parameter's name and their own; none where no gradient reached the parameter yet
            f"{name}:{kind}": state[value][kind].detach().contiguous()
            for name, value in trainer.student.named_parameters()
            if value in state
            for kind in _MOMENTS
        }
        with storage_errors(f"the checkpoints in {self._folder}"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _save(_tensors(trainer.student), partial / "student.safetensors")
            _save(_tensors(trainer.models.average.module), partial / "average.safetensors")
            _save(moments, partial / "moments.safetensors")
            grant_usual_rights(partial)
            (partial / _PROGRESS).write_bytes(progress.model_dump_json(indent=1).encode())
            sync(partial)
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            self.clear(target, self._best(progress.best_step))

    def read(self, trainer: Trainer, progress: Progress) -> None:
        """Put the state of a checkpoint into a trainer."""
        folder, state = self._state(progress.step), trainer.optimizer.state
        with storage_errors(f"the checkpoints in {self._folder}"):
            _put(load_file(folder / "student.safetensors"), trainer.student)
            _put(load_file(folder / "average.safetensors"), trainer.models.average.module)
            stored = load_file(folder / "moments.safetensors")
        state.clear()
        for name, value in trainer.student.named_parameters():
            if f"{name}:step" in stored:  # cloned into memory of torch's own, as its alignment decides the last bits
                moments = {kind: stored[f"{name}:{kind}"].clone() for kind in _MOMENTS}
                state[value] = {key: mean if key == "step" else mean.to(value.device) for key, mean in moments.items()}
        trainer.step = progress.step

    def keep_best(self, module: nn.Module, step: int) -> None:
        """Write weights that are the best so far.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        target = self._best(step)
        partial = target.with_name(f".{target.name}")
        with storage_errors(f"the checkpoints in {self._folder}"):
            _save(_tensors(module), partial)
            sync(partial)
            partial.replace(target)

    def put_best(self, module: nn.Module, step: int) -> None:
        """Put the weights that were the best at a step into a module."""
        _put(load_file(self._best(step)), module)

    def _state(self, step: int) -> Path:
        return self._folder / f"state-{step:08d}"

    def _best(self, step: int) -> Path:
        return self._folder / f"best-{step:08d}.safetensors"


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **{name: value.detach().contiguous() for name, value in module.named_parameters()},
        **{name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in module.named_buffers()},
    }


@torch.no_grad()
def _put(stored: Mapping[str, Tensor], module: nn.Module) -> None:
    for name, place in (*module.named_parameters(), *module.named_buffers()):
        if 0 not in place.stride() or place.numel() <= 1:  # elements that share memory cannot be written
            place.copy_(stored[name])


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # it is written from Rust: the system's message is in the text only
        raise OSError(str(error)) from error


_TIMED_STEPS = 8
_TIMED_SECONDS = 2.0
_LONG_SECONDS = 0.5
"""Longer steps have enough to do for all threads."""
_FASTER = 0.9
"""More threads are worth it from here on."""
_LATE = 1.05
"""Share of the time: a plan that is expected to end later is cut."""
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
        return _step_seconds(trainer, most_threads), most_threads
    threads, taken = 1, _step_seconds(trainer, 1)
    while threads < most_threads:
        more = min(2 * threads, most_threads)
        seconds = _step_seconds(trainer, more)
        if seconds > _FASTER * taken:
            break
        threads, taken = more, seconds
    return taken, threads


def _step_seconds(trainer: Trainer, threads: int) -> float:
    """Measure the mean over some steps, or over those that took some time together."""
    torch.set_num_threads(threads)
    start, done = time.monotonic(), 0
    while done < _TIMED_STEPS and time.monotonic() - start < _TIMED_SECONDS:
        trainer.advance()
        done += 1
    return (time.monotonic() - start) / done


@dataclass
class TimeBudget:
    """Time that steps and evaluations took in this process, and the steps that there is time for at that rate."""

    seconds: float
    """Time of this process."""
    before: float
    """The part of it that went by before the first step."""
    evaluation_seconds: float
    """One evaluation's; the last one's from the first in this process on."""
    _started: float = field(default_factory=lambda: time.monotonic())
    _reviewed: float = field(default_factory=lambda: time.monotonic())
    _stepping: float = 0.0
    _steps: int = 0

    @property
    def spent(self) -> float:
        """Seconds of this process so far."""
        return self.before + time.monotonic() - self._started

    def add_step(self, seconds: float) -> None:
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
