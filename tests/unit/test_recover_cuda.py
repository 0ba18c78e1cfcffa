"""Test what recovery does on CUDA, with a device that is played: times, processes, random numbers, copies."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.passes.finetune import loop
from enginesmith.pipeline.passes.finetune.batches import Batch, SplitData
from enginesmith.pipeline.passes.finetune.options import RecoverOptions, TrainingPlan
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.nvidia import CudaDevice, Driver
from enginesmith.pipeline.tasks import finetune

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


@pytest.mark.parametrize(("index", "size"), [(0, 2), (1, 1), (2, 1)])
def test_gpus_of_the_chosen_ones_kind_share_the_work(
    index: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small one beside them would make each step wait for it, and its memory end larger batches."""
    h100, l4 = CudaDevice(name="H100", compute_capability=(9, 0)), CudaDevice(name="L4", compute_capability=(8, 9))
    monkeypatch.setattr(nvidia, "driver", lambda: Driver(devices=(h100, h100, l4)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    started: list[int] = []

    def start_helpers(task: finetune.Recover, inputs: Mapping[str, Any], begun: Path, size: int) -> None:
        started.append(size)
        raise InterruptedError

    monkeypatch.setattr(finetune, "_start_helpers", start_helpers)
    task = finetune.Recover(options=RecoverOptions(), data="digits", device=Device(kind="cuda", index=index))
    with pytest.raises(InterruptedError):
        task.go_on({}, tmp_path, tmp_path, lambda text: None)
    assert started == [size]


def test_random_numbers_of_the_device_are_as_before_after_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {CUDA: "before"}
    monkeypatch.setattr(torch.cuda, "get_rng_state", state.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, device: state.update({device: value}))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with loop._repeatable(CUDA):
        state[CUDA] = "seeded"
        torch.manual_seed(4)
        assert torch.backends.cudnn.deterministic
    assert state == {CUDA: "before"}
    assert torch.rand(1) == expected
    assert not torch.backends.cudnn.deterministic


def test_rows_are_copied_from_pinned_memory_while_the_processor_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda one: steps.append("pinned") or one)
    monkeypatch.setattr(torch.Tensor, "to", lambda one, where, non_blocking=False: steps.append(non_blocking) or one)
    monkeypatch.setattr(torch.Tensor, "clone", lambda one: pytest.fail("that copies once more"))
    data = Dataset("d", {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}, np.arange(4))
    batch = SplitData(data, (0, 1), (2, 3), CUDA).batch(np.array([2, 0]))
    assert steps == ["pinned", True, "pinned", True]
    assert batch.inputs["x"].tolist() == [[6, 7, 8], [0, 1, 2]]
    assert batch.labels is not None
    assert batch.labels.tolist() == [2, 0]
