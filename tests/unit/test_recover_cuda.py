"""What recovery does on CUDA, with a device that is played: times, processes, random numbers, copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginesmith.pipeline.passes.finetune import loop
from enginesmith.pipeline.passes.finetune.batches import Batch
from enginesmith.pipeline.passes.finetune.options import TrainingPlan

CUDA = torch.device("cuda", 0)


class Played:
    """A device that takes two seconds for each call of a network, while the calls return at once."""

    def __init__(self) -> None:
        self.now = self.queued = 0.0

    def monotonic(self) -> float:
        return self.now

    def __call__(self, *inputs: torch.Tensor) -> None:
        self.queued += 2.0

    def synchronize(self, device: torch.device) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


def test_evaluations_are_planned_by_the_time_that_the_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Played()
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(loop, "time", device)
    material = SimpleNamespace(
        learnt=range(100), held_back=range(1000), device=CUDA, batch=lambda rows: Batch({"x": torch.ones(1)}, None)
    )
    teacher = SimpleNamespace(module=device)
    work: Any = SimpleNamespace(
        material=material, models=SimpleNamespace(teacher=teacher), options=SimpleNamespace(seconds=1500.0)
    )
    plan = TrainingPlan.model_construct(micro_batch=4, judged=32, statistics=32)
    assert loop._choose_samples(work, plan).judged == 40, "4 % of the time, in three passes at half a second a sample"
