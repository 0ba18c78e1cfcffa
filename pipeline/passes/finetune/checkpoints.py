"""Keep a recovery on disk, to go on after the process was killed and end with the same weights.

    FOLDER/best-STEP.safetensors                        the best weights, as they are to be kept
    FOLDER/state-STEP/{student,average,moments}.safetensors, progress.json

A state appears whole or not at all: it is written beside and renamed. There are no random numbers to keep: those of a
step are drawn from the seed and the step.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from enginesmith.pipeline.errors import storage_errors
from enginesmith.pipeline.passes.finetune.options import Point, TrainingPlan
from enginesmith.pipeline.passes.finetune.trainer import Trainer

_PROGRESS = "progress.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_NAMED_BY_STEP = "{}-{:08d}"


class Progress(BaseModel):
    """What a checkpoint holds besides weights."""

    model_config = ConfigDict(frozen=True)

    fingerprint: str
    """Of the data and of the user's code: a checkpoint is of no use for others."""
    plan: TrainingPlan
    teacher: float
    step: int = 0
    best_step: int = 0
    waited: int = 0
    """Evaluations since the best one."""
    loss_sum: float = 0.0
    """Of the steps since the last evaluation."""
    curve: tuple[Point, ...] = ()
    """The first point is that of the weights that it began with."""
    seconds: float = 0.0
    """What all processes so far have worked on it."""
    evaluation_seconds: float = 0.0
    """What one evaluation took at first."""
    diverged: bool = False


class Checkpoints:
    """A folder of checkpoints, of which the last one counts."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder, self._fingerprint = folder, fingerprint

    def last(self) -> Progress | None:
        """Return the progress of the last checkpoint; None where there is none of the same work."""
        states = sorted(self._folder.glob("state-*"))
        try:
            found = Progress.model_validate_json((states[-1] / _PROGRESS).read_bytes()) if states else None
        except (OSError, ValidationError):
            return None
        return found if found and found.fingerprint == self._fingerprint else None

    def clear(self) -> None:
        """Remove everything."""
        for path in (*self._folder.glob("state-*"), *self._folder.glob(".state-*")):
            shutil.rmtree(path)
        for path in self._folder.glob("best-*"):
            path.unlink()

    def write(self, trainer: Trainer, progress: Progress) -> None:
        """Add a checkpoint, and remove what was needed only by those before.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        target = self._folder / _NAMED_BY_STEP.format("state", progress.step)
        partial = target.with_name(f".{target.name}")
        with storage_errors(f"the checkpoints in {self._folder}"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _save(_tensors(trainer.student), partial / "student.safetensors")
            _save(_tensors(trainer.models.average.module), partial / "average.safetensors")
            _save(_moments(trainer), partial / "moments.safetensors")
            _written(partial / _PROGRESS, progress.model_dump_json(indent=1).encode())
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            best = _NAMED_BY_STEP.format("best", progress.best_step)
            for path in self._folder.glob("state-*"):
                if path != target:
                    shutil.rmtree(path)
            for path in self._folder.glob("best-*"):
                if path.stem != best:
                    path.unlink()

    def read(self, trainer: Trainer, progress: Progress) -> None:
        """Put the state of a checkpoint into a trainer."""
        folder = self._folder / _NAMED_BY_STEP.format("state", progress.step)
        with storage_errors(f"the checkpoints in {self._folder}"):
            _put(load_file(folder / "student.safetensors"), trainer.student)
            _put(load_file(folder / "average.safetensors"), trainer.models.average.module)
            _put_moments(load_file(folder / "moments.safetensors"), trainer)
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
            partial.replace(target)

    def put_best(self, module: nn.Module, step: int) -> None:
        """Put the weights that were the best at a step into a module."""
        _put(load_file(self._best(step)), module)

    def _best(self, step: int) -> Path:
        return self._folder / (_NAMED_BY_STEP.format("best", step) + ".safetensors")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; those that share memory once, or copied."""
    return {
        **{name: value.detach().contiguous() for name, value in module.named_parameters()},
        **{name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in module.named_buffers()},
    }


@torch.no_grad()
def _put(stored: Mapping[str, Tensor], module: nn.Module) -> None:
    for name, place in (*module.named_parameters(), *module.named_buffers()):
        if 0 not in place.stride() or place.numel() <= 1:  # elements that share memory cannot be written
            place.copy_(stored[name])


def _moments(trainer: Trainer) -> dict[str, Tensor]:
    """Return AdamW's state by the parameter's name and its own; none for a parameter that no gradient reached yet."""
    state = trainer.optimiser.state
    return {
        f"{name}:{kind}": state[value][kind].detach().contiguous()
        for name, value in trainer.student.named_parameters()
        if value in state
        for kind in _MOMENTS
    }


def _put_moments(stored: Mapping[str, Tensor], trainer: Trainer) -> None:
    state = trainer.optimiser.state
    state.clear()
    for name, value in trainer.student.named_parameters():
        if f"{name}:step" in stored:  # cloned into memory of torch's own, as its alignment decides the last bits
            moments = {kind: stored[f"{name}:{kind}"].clone() for kind in _MOMENTS}
            state[value] = {kind: one if kind == "step" else one.to(value.device) for kind, one in moments.items()}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # it is written from Rust: what the system said is in the text only
        raise OSError(str(error)) from error
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _written(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
