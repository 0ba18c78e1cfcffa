"""Samples for training and for the metric, as tensors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.recovery.schedule import Order
from enginesmith.pipeline.tensors import Array

_MOST_HELD_BACK = 2048


@dataclass(frozen=True)
class Batch:
    """Inputs in the order of the signature, and labels where there are some; the first axis is the sample."""

    inputs: dict[str, Tensor]
    labels: Tensor | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


@dataclass(frozen=True)
class Material:
    """A data set in two: rows to learn from, and rows that only the metric sees."""

    data: Dataset
    learnt: tuple[int, ...]
    held_back: tuple[int, ...]
    device: torch.device

    def batch(self, rows: Array) -> Batch:
        """Those rows on the device, in memory of torch's own: its alignment decides the last bits of sums."""
        inputs = {name: self._tensor(array[rows]) for name, array in self.data.arrays.items()}
        labels = None if self.data.labels is None else self._labels(self.data.labels[rows])
        return Batch(inputs, labels)

    def order(self, batch: int, seed: int) -> Order:
        """Which rows each step takes."""
        return Order(self.learnt, min(batch, len(self.learnt)), seed)

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(np.array(values)).clone().to(self.device)

    def _labels(self, values: Array) -> Tensor:
        found = self._tensor(values)
        return found.float() if found.is_floating_point() else found.long()


def divided(data: Dataset, held_back: float, seed: int, device: torch.device) -> Material:
    """The set in two, each class in proportion to its share.

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
    return Material(data, tuple(sorted(set(range(len(data))) - set(chosen))), chosen, device)
