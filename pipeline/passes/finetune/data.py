"""Choose each step's samples and learning rate: pure functions of the seed and the step."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.passes.finetune.options import Shortened, TrainingPlan
from enginesmith.pipeline.tensors import Array


@dataclass(frozen=True)
class Order:
    """Rows for each step: every epoch goes over all of them in an order of its own; a remainder is left out."""

    rows: tuple[int, ...]
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Return whole batches in the rows; at least one."""
        return max(1, len(self.rows) // self.batch)

    def at(self, step: int) -> Array:
        """Return rows of a step, int64 of shape (batch,); fewer only if there are fewer."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = _shuffled(len(self.rows), self.seed, epoch)[index * self.batch : (index + 1) * self.batch]
        return np.asarray(self.rows, np.int64)[order]


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> Array:
    return np.random.default_rng([seed, epoch]).permutation(count)


def learning_rate(step: float, steps: int, highest: float, warmup: float) -> float:
    """Linear warm-up over a share of the steps, then a cosine to zero (Loshchilov and Hutter, "SGDR", ICLR 2017)."""
    warm = math.ceil(warmup * steps)
    if step < warm:
        return highest * (step + 1) / warm
    return highest * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def rate(plan: TrainingPlan, step: int, highest: float, warmup: float) -> float:
    """Return the learning rate of a step of a plan, which may have been shortened before it."""
    planned = plan.steps if plan.shortened is None else plan.shortened.planned
    return learning_rate(_position(plan, step), planned, highest, warmup)


def shorten(plan: TrainingPlan, step: int, steps: int) -> TrainingPlan:
    """The plan with fewer steps in all: from ``step`` on the schedule goes faster, without a jump in the rate."""
    planned = plan.steps if plan.shortened is None else plan.shortened.planned
    turn = Shortened(step=step, position=_position(plan, step), planned=planned)
    return plan.model_copy(update={"steps": steps, "shortened": turn})


def _position(plan: TrainingPlan, step: int) -> float:
    if (turn := plan.shortened) is None:
        return step
    return turn.position + (step - turn.step) * (turn.planned - turn.position) / (plan.steps - turn.step)


def parts(rows: Array, size: int) -> list[Array]:
    """Return a batch in parts of at most ``size`` rows."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def share(rows: Array, rank: int, processes: int) -> Array:
    """Return the rows of a batch that one of several processes works through."""
    return np.array_split(rows, processes)[rank]


# Samples for training and for the metric, as tensors.

_MOST_HELD_BACK = 2048


@dataclass(frozen=True)
class Batch:
    """Inputs in the order of the signature, and labels where there are some; the first axis is the sample."""

    inputs: dict[str, Tensor]
    labels: Tensor | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


@dataclass(frozen=True)
class SplitData:
    """A data set in two: rows to learn from, and rows that only the metric sees."""

    data: Dataset
    learnt: tuple[int, ...]
    held_back: tuple[int, ...]
    device: torch.device

    def batch(self, rows: Array) -> Batch:
        """Copy those rows to the device, in torch's own memory: its alignment decides the last bits of sums."""
        inputs = {name: self._tensor(array[rows]) for name, array in self.data.arrays.items()}
        labels = None if self.data.labels is None else self._labels(self.data.labels[rows])
        return Batch(inputs, labels)

    def order(self, batch: int, seed: int) -> Order:
        """Return the order in which steps take rows."""
        return Order(self.learnt, min(batch, len(self.learnt)), seed)

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(np.array(values)).clone().to(self.device)

    def _labels(self, values: Array) -> Tensor:
        found = self._tensor(values)
        return found.float() if found.is_floating_point() else found.long()


def split_data(data: Dataset, held_back: float, seed: int, device: torch.device) -> SplitData:
    """Return the set in two, each class in proportion to its share.

    Raises:
        DataError: there are fewer than two samples.
    """
    if len(data) < 2:
        raise DataError(
            f"{data.name} has {len(data)} sample, and recovery needs some to learn from and others for the metric",
            "give more samples: hundreds at least",
        )
    count = min(max(1, round(held_back * len(data))), _MOST_HELD_BACK, len(data) - 1)
    whole = Dataset(data.name, {"row": np.arange(len(data))}, data.labels)  # numbered anew: it may be drawn itself
    chosen = whole.sample(count, seed).rows
    return SplitData(data, tuple(sorted(set(range(len(data))) - set(chosen))), chosen, device)
