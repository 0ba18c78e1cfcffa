"""What training makes of few samples: other images of them, a rate that was tried, batches that leave enough steps."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.passes.finetune import loop
from enginesmith.pipeline.passes.finetune.augment import augment, list_images, mirror
from enginesmith.pipeline.passes.finetune.batches import Batch, split_data
from enginesmith.pipeline.passes.finetune.evaluate import AGREEMENT, Evaluator, Work
from enginesmith.pipeline.passes.finetune.losses import Distil, output_targets
from enginesmith.pipeline.passes.finetune.options import Augmentation, RecoverOptions, TrainingPlan
from enginesmith.pipeline.passes.finetune.trainer import Checkpoints, Models
from enginesmith.pipeline.tensors import Signature, TensorSpec

PLAN = TrainingPlan(
    steps=1, batch=64, micro_batch=64, evaluate_every=1, judged=8, statistics=8, processes=1, threads=1
)  # fmt: skip


def shifted(count: int = 64, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose pixels are their places, before and after they are changed."""
    image = torch.arange(256.0).reshape(1, 1, 16, 16).repeat(count, 1, 1, 1)
    torch.manual_seed(0)
    chosen = Augmentation(**{"inputs": ("x",), "mirror": False, "mix": False, **how})  # type: ignore[arg-type]
    return image, augment(Batch({"x": image}, None), chosen).inputs["x"]


def test_images_are_shifted_by_at_most_an_eighth() -> None:
    before, after = shifted()
    middle = after[:, 0, 8, 8]
    moved = {(round(float(value - before[0, 0, 8, 8]) / 16), round(float(value)) % 16 - 8) for value in middle}
    assert {abs(part) for pair in moved for part in pair} == {0, 1, 2}
    assert len(moved) > 10
    assert all(set(np.diff(row).tolist()) <= {0.0, 1.0} for row in after[:, 0, 5].numpy())  # edges are repeated


def test_about_half_are_mirrored_where_that_is_allowed() -> None:
    _, after = shifted(200, mirror=True)
    falling = (after[:, 0, 8, 12] < after[:, 0, 8, 4]).float().mean()
    assert 0.35 < float(falling) < 0.65
    _, plain = shifted(200)
    assert bool((plain[:, 0, 8, 12] > plain[:, 0, 8, 4]).all())


def test_about_half_are_mixed_with_others() -> None:
    torch.manual_seed(0)
    levels = torch.arange(100.0).reshape(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    how = Augmentation(inputs=("x",), mirror=False, mix=True)
    after = augment(Batch({"x": levels}, None), how).inputs["x"]
    same = (after == levels).all((1, 2, 3))
    assert 0.35 < float(same.float().mean()) < 0.65
    assert 0 <= float(after.min()) <= float(after.max()) <= 99
    assert bool((after.amax((1, 2, 3)) == after.amin((1, 2, 3))).all())


def test_the_same_seed_makes_the_same_images() -> None:
    assert torch.equal(shifted(mirror=True, mix=True)[1], shifted(mirror=True, mix=True)[1])


@pytest.mark.parametrize(
    ("shape", "dtype", "image"),
    [
        ((2, 3, 32, 32), torch.float32, True),
        ((2, 1, 8, 100), torch.float32, True),
        ((2, 16, 32, 32), torch.float32, False),
        ((2, 3, 32), torch.float32, False),
        ((2, 3, 4, 32), torch.float32, False),
        ((2, 3, 32, 32), torch.uint8, False),
    ],
)
def test_what_is_an_image(shape: tuple[int, ...], dtype: torch.dtype, image: bool) -> None:
    assert list_images({"x": torch.zeros(shape, dtype=dtype)}) == (("x",) if image else ())


def test_mirroring_leaves_other_inputs_alone() -> None:
    batch = Batch({"x": torch.arange(64.0).reshape(1, 1, 8, 8), "size": torch.tensor([[1.0, 2.0]])}, None)
    made = mirror(batch, ("x",))
    assert torch.equal(made.inputs["x"][0, 0, 0], torch.arange(7.0, -1, -1))
    assert torch.equal(made.inputs["size"], batch.inputs["size"])


class Sum(nn.Module):
    """One class for each column that is summed, so that a mirrored image has other ones; or for each row."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.sum((1, self.axis)) * self.scale


def loaded(axis: int) -> LoadedModel:
    image = TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8))
    answer = TensorSpec(name="logits", dtype="float32", shape=("batch", 8))
    module = NamedForward(Sum(axis).eval(), ("image",), ())
    return LoadedModel(module, Signature(inputs=(image,), outputs=(answer,)), {})


def work(axis: int = 3, rates: tuple[float, ...] = (2e-3,), **options: Any) -> Work:
    images = np.random.default_rng(0).standard_normal((80, 1, 8, 8)).astype(np.float32)
    material = split_data(Dataset("drawn", {"image": images}, None), 0.2, 0, torch.device("cpu"))
    models = Models(loaded(axis), loaded(axis), loaded(axis))
    models.ready(torch.device("cpu"))
    chosen = RecoverOptions(**{"augment": False, **options})
    meter: Any = SimpleNamespace(check=lambda: None)
    return Work(models, material, chosen, AGREEMENT, 0, 1, 1, meter, None, rates)


@pytest.mark.parametrize(("axis", "mirrored"), [(3, True), (2, False)])
def test_images_are_mirrored_only_if_the_teacher_then_answers_the_same(axis: int, mirrored: bool) -> None:
    found = work(axis, augment=True)
    how = loop._choose_augmentation(found, found.material.batch(np.arange(4)))
    assert how == Augmentation(inputs=("image",), mirror=mirrored, mix=True)


@pytest.mark.parametrize("options", [{"augment": False}, {"augment": True, "method": "supervised"}])
def test_images_stay_as_they_are_where_labels_are_learnt_or_it_is_switched_off(options: dict[str, Any]) -> None:
    found = work(**options)
    assert loop._choose_augmentation(found, found.material.batch(np.arange(4))) is None


@pytest.mark.parametrize(
    ("step_seconds", "batch"),
    [(0.5, 64), (1.2, 32), (4.0, 8), (100.0, 8)],  # 95 s: 190, 79, 24 and no step
)
def test_batches_become_smaller_until_there_is_time_for_enough_steps(step_seconds: float, batch: int) -> None:
    plan = loop._affordable_batch(work(seconds=100), PLAN, step_seconds)
    assert (plan.batch, plan.micro_batch) == (batch, batch)


def test_batches_stay_where_the_number_of_passes_is_given() -> None:
    assert loop._affordable_batch(work(seconds=100, epochs=1), PLAN, 4.0) == PLAN


def choose(found: Work, folder: Path, step_seconds: float = 1e-3) -> float:
    targets = output_targets(found.models.teacher, found.material.batch(np.arange(8)))
    plan = PLAN.model_copy(update={"batch": 16, "micro_batch": 16, "outputs": targets})
    checkpoints = Checkpoints(folder, "data")
    with torch.no_grad():
        for each in (found.models.student, found.models.average):
            each.module.model.scale.fill_(1.1)
    checkpoints.keep_best(found.models.average.module, 0)
    rate = loop._choose_rate(found, plan, checkpoints, Evaluator(found, plan), step_seconds, 1e-3)
    for each in (found.models.student, found.models.average):
        assert torch.equal(each.module.model.scale, torch.full((8,), 1.1))  # as at the start
    return rate


def test_the_rate_that_leads_furthest_in_few_steps_is_chosen(tmp_path: Path) -> None:
    assert choose(work(rates=(30.0, 1e-2, 1e-7), seconds=0.3), tmp_path) == 1e-2


def test_a_rate_that_leads_to_infinity_is_not_chosen(tmp_path: Path) -> None:
    assert choose(work(rates=(math.inf, 1e-7), seconds=0.3), tmp_path) == 1e-7


def test_a_given_rate_is_taken_as_it_is(tmp_path: Path) -> None:
    assert choose(work(rates=(1e-2, 1e-7), seconds=0.3, learning_rate=0.5), tmp_path) == 0.5


def test_without_time_for_trials_the_middle_rate_is_taken(tmp_path: Path) -> None:
    assert choose(work(rates=(30.0, 1e-5, 1e-7), seconds=0.3), tmp_path, step_seconds=1.0) == 1e-5


class Boxes(nn.Module):
    """Two numbers of pixels, and a probability."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        flat = image.flatten(1)
        return torch.stack([flat[:, :5] * 300, flat[:, 5:10] * 200, flat[:, 10:15].sigmoid()], 1)


def test_unlike_numbers_of_an_output_count_alike() -> None:
    signature = loaded(2).signature
    answer = TensorSpec(name="boxes", dtype="float32", shape=("batch", 3, 5))
    module = NamedForward(Boxes(), ("image",), ())
    teacher = LoadedModel(module, Signature(inputs=signature.inputs, outputs=(answer,)), {})
    batch = work().material.batch(np.arange(64))
    (target,) = output_targets(teacher, batch)
    assert target.axis == 1
    pixels, _, probability = target.scales
    assert pixels == pytest.approx(300**2, rel=0.2)
    assert probability < 0.1
    loss = Distil((target,), (), ("boxes",), 1.0)
    theirs = module(batch.inputs["image"])[0]
    for place, size in ((0, 30.0), (2, 0.02)):  # a tenth of how much each of them varies
        ours = theirs.clone()
        ours[:, place] += size
        assert float(loss._compare(target, ours, theirs)) == pytest.approx(0.01 / 3, rel=0.5)


def test_like_numbers_have_one_scale() -> None:
    teacher = loaded(2)
    spec = teacher.signature.outputs[0].model_copy(update={"name": "values"})
    teacher = LoadedModel(teacher.module, Signature(inputs=teacher.signature.inputs, outputs=(spec,)), {})
    (target,) = output_targets(teacher, work().material.batch(np.arange(64)))
    assert (target.kind, target.axis, target.scales) == ("values", None, ())
