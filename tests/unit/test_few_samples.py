"""Test what training makes of few samples: other images of them, a rate that was tried, batches for enough steps."""

import dataclasses
import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.errors import ModelError, StepOutOfMemory
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.passes.finetune import loop, trainer
from enginesmith.pipeline.passes.finetune.augment import augment, list_images, mirror
from enginesmith.pipeline.passes.finetune.batches import Batch, DataParallel, split_data
from enginesmith.pipeline.passes.finetune.evaluate import AGREEMENT, Evaluator, Work, agreement
from enginesmith.pipeline.passes.finetune.losses import Distil, output_targets
from enginesmith.pipeline.passes.finetune.options import Augmentation, RecoverOptions, TrainingPlan
from enginesmith.pipeline.passes.finetune.trainer import Checkpoints, Models, Trainer
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


@pytest.mark.parametrize(("seconds", "calls"), [(1e-9, 2), (1e9, 32)])
def test_the_teacher_answers_for_mirrored_images_for_a_share_of_the_time(seconds: float, calls: int) -> None:
    slow, seen = work(augment=True, seconds=seconds), list[int]()
    slow.models.teacher.module.register_forward_hook(lambda *called: seen.append(1))
    loop._choose_augmentation(slow, slow.material.batch(np.arange(4)))
    assert len(seen) == calls


def test_single_numbers_among_the_outputs_are_passed_over() -> None:
    found = work(augment=True)
    size = TensorSpec(name="size", dtype="float32", shape=())
    for each in (found.models.student, found.models.average, found.models.teacher):
        module, signature = each.module.model, each.signature
        each.module.call = lambda image, module=module: (image.square().mean(), module(image))
        each.signature = signature.model_copy(update={"outputs": (size, *signature.outputs)})
    samples = found.material.batch(np.arange(8))
    plan = PLAN.model_copy(update={"outputs": output_targets(found.models.teacher, samples)})
    assert [target.name for target in plan.outputs] == ["logits"]
    assert loop._choose_augmentation(found, samples) is not None
    assert Evaluator(found, plan).rate().metric == 1.0


def test_with_single_numbers_alone_the_users_loss_decides() -> None:
    found = work()
    size = TensorSpec(name="size", dtype="float32", shape=())
    for each in (found.models.student, found.models.average, found.models.teacher):
        module = each.module.model
        each.module.call = lambda image, module=module: (module(image).square().mean(),)
        each.signature = each.signature.model_copy(update={"outputs": (size,)})
    assert agreement({}, {}, None) == 1.0
    with pytest.raises(ModelError, match="floating-point numbers for each sample"):
        loop._draft(found)


def test_ids_of_classes_agree_where_they_are_equal() -> None:
    """However far from each other those are that are not."""
    found = work()
    for each in (found.models.student, found.models.average, found.models.teacher):
        module, ids = each.module.model, TensorSpec(name="ids", dtype="int64", shape=("batch",))
        wrong = each is not found.models.teacher
        each.module.call = lambda image, module=module, wrong=wrong: (
            module(image).argmax(1) + 100 * (wrong & (image[:, 0, 0, 0] > 1)),
            module(image),
        )
        each.signature = each.signature.model_copy(update={"outputs": (ids, *each.signature.outputs)})
    targets = output_targets(found.models.teacher, found.material.batch(np.arange(8)))
    images = found.material.batch(np.asarray(found.material.held_back)).inputs["image"]
    right = float((images[:, 0, 0, 0] <= 1).float().mean())
    assert 0 < right < 1
    plan = PLAN.model_copy(update={"judged": 16, "outputs": targets})
    assert Evaluator(found, plan).rate().metric == pytest.approx(right)


def test_an_input_without_a_batch_is_no_image() -> None:
    found = work(augment=True)
    data = dataclasses.replace(
        found.material.data, axes={"table": 0, "image": 0}, shared={"table": np.ones((2, 1, 8, 8), np.float32)}
    )
    found = dataclasses.replace(found, material=dataclasses.replace(found.material, data=data))
    found.models.teacher.module.call = lambda table, image: image.sum((1, 3)) * table.sum()
    how = loop._choose_augmentation(found, found.material.batch(np.arange(4)))
    assert how == Augmentation(inputs=("image",), mirror=True, mix=False)


@pytest.mark.parametrize(("fixed", "at_once"), [(None, 8), (1, 1), (5, 5)])
def test_many_samples_are_mirrored_and_few_at_a_time(fixed: int | None, at_once: int) -> None:
    """They are from all over the data, which may be in order of classes; memory is not planned by then."""
    found = dataclasses.replace(work(3, augment=True), fixed=fixed)
    seen: list[torch.Tensor] = []
    hook = found.models.teacher.module.register_forward_hook(lambda module, given, values: seen.append(given[0]))
    loop._choose_augmentation(found, found.material.batch(np.arange(at_once)))
    hook.remove()
    assert {len(images) for images in seen} == {at_once}
    images = torch.cat(seen)
    assert len(images) == 2 * (64 // at_once * at_once)
    last = torch.from_numpy(found.material.data.arrays["image"][[found.material.learnt[-1]]])
    assert bool((images == last).all((1, 2, 3)).any())


def with_norms(found: Work) -> Work:
    """Put a batch norm over the classes behind each of the models."""
    for each in (found.models.student, found.models.average, found.models.teacher):
        model = each.module.model
        model.add_module("norm", nn.BatchNorm1d(8).eval())
        each.module.call = lambda image, model=model: model.norm(model(image))
    return found


@pytest.mark.parametrize(
    "fixed", [1, 5, 40]
)  # one value for each channel has no variance; 32 samples would be enough for statistics
def test_a_model_that_is_fixed_to_one_batch_gets_no_other(
    fixed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_choose_samples", lambda found, plan: plan)
    found = dataclasses.replace(with_norms(work(epochs=1, seconds=600, learning_rate=1e-3)), fixed=fixed)
    sizes: set[int] = set()
    for each in (found.models.student, found.models.average, found.models.teacher):
        each.module.register_forward_hook(lambda module, given, values: sizes.add(len(given[0])))
    record = loop.recover(found, DataParallel(torch.device("cpu")), tmp_path, "data", lambda text: None)
    assert record is not None
    assert record.plan.micro_batch == fixed
    assert sizes == {fixed}


def steps(count: int, **changes: Any) -> list[torch.Tensor]:
    """Images that the loss is given in each of some steps."""
    found, seen = work(), []

    def loss(student: NamedForward, teacher: NamedForward, batch: Batch) -> torch.Tensor:
        seen.append(batch.inputs["image"])
        return student(*batch.inputs.values())[0].square().mean()

    plan = PLAN.model_copy(update={"steps": count, **changes})
    team = DataParallel(torch.device("cpu"))
    training = Trainer(found.models, found.material, loss, found.options, plan, 0, team, lambda: None)
    for _ in range(count):
        training.advance()
    return seen


def test_a_step_learns_from_changed_images_and_the_next_one_from_others() -> None:
    how = Augmentation(inputs=("image",), mirror=True, mix=True)
    plain, first, second = steps(2), steps(2, augmentation=how), steps(2, augmentation=how)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(plain, first, strict=True))
    corners = [(images[:, 0, 0, 0] == given[:, 0, 0, 0]).tolist() for images, given in zip(first, plain, strict=True)]
    assert not torch.equal(first[0], first[1])
    assert corners[0] != corners[1]  # other samples are left as they are


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


@pytest.mark.parametrize(("taken", "batch", "paced"), [(0.1, 64, [32]), (1.6, 32, [32, 16])])
def test_the_batch_is_that_of_all_processes(
    taken: float, batch: int, paced: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller one is timed anew."""
    timed: list[int] = []

    def pace(training: Trainer, threads: int) -> tuple[float, int]:
        timed.append(training.plan.batch)
        return taken * training.plan.batch / 32, 1

    monkeypatch.setattr(loop, "pace", pace)
    monkeypatch.setattr(loop, "_choose_samples", lambda found, plan: plan)
    found = dataclasses.replace(work(seconds=100), processes=2)
    loop.prepare(found, checkpoints := Checkpoints(tmp_path, "data"), "data")
    progress = checkpoints.last()
    assert progress is not None
    assert (progress.plan.batch, progress.plan.micro_batch) == (batch, batch // 2)
    assert timed == paced


@pytest.mark.parametrize(("sample_seconds", "largest"), [(0.01, 64), (0.1, 8)])
def test_a_batch_is_not_timed_where_that_would_take_much_of_the_time(
    sample_seconds: float, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of 64 are 2 or 19 of 100 seconds, as a step of 8 shows; 100 steps of 64 are 64 or 640."""
    clock, stepped = [0.0], set[int]()

    def advance(self: Trainer, **options: bool) -> float:
        clock[0] += sample_seconds * self.plan.batch
        stepped.add(self.plan.batch)
        return 0.0

    monkeypatch.setattr(Trainer, "advance", advance)
    for module in (loop, trainer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = work(seconds=100)
    (checkpoints := Checkpoints(tmp_path, "data")).keep_best(found.models.average.module, 0)
    plan, seconds, _ = loop._fit_pace(found, PLAN, checkpoints)
    assert (plan.batch, max(stepped), min(stepped)) == (largest, largest, 8)
    assert seconds == pytest.approx(sample_seconds * largest)


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


def test_trials_are_no_longer_than_the_passes_that_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, float]] = []

    def note(found: Work, plan: TrainingPlan, evaluator: Evaluator) -> float:
        tried.append((plan.steps, plan.learning_rate))
        return 1.0

    monkeypatch.setattr(loop, "_try_plan", note)
    rates = (1e-2, 1e-3)
    assert choose(work(rates=rates, seconds=100, epochs=3), tmp_path) == 1e-3  # of equal ones the lowest
    assert tried == [(12, 1e-2), (12, 1e-3)]  # four steps in a pass
    assert choose(work(rates=rates, seconds=100, epochs=1), tmp_path) == 1e-3
    assert len(tried) == 2  # four steps tell nothing


def test_trials_take_the_memory_of_one_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was planned for: what was timed before them is gone, and each goes before the next."""
    made: list[weakref.ref[Trainer]] = []
    make = loop._train_alone

    def note(found: Work, plan: TrainingPlan) -> Trainer:
        assert not any(each() for each in made)
        made.append(weakref.ref(training := make(found, plan)))
        return training

    monkeypatch.setattr(loop, "_train_alone", note)
    monkeypatch.setattr(loop, "pace", lambda training, threads: (0.02, 1))
    loop.prepare(work(rates=(1e-2, 1e-3), seconds=10), Checkpoints(tmp_path, "data"), "data")
    assert len(made) == 4  # of the smallest batch and of the whole one, timed; and two trials


def test_the_rate_that_was_chosen_stands_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = work(rates=(30.0, 1e-2))
    monkeypatch.setattr(loop, "_choose_rate", lambda *given: 0.125)
    monkeypatch.setattr(loop, "pace", lambda training, threads: (0.1, 1))
    loop.prepare(found, checkpoints := Checkpoints(tmp_path, "data"), "data")
    progress = checkpoints.last()
    assert progress is not None
    plan = progress.plan
    assert plan.learning_rate == 0.125
    assert max(trainer.learning_rate(plan, step, found.options) for step in range(plan.steps)) == 0.125


def recovered(folder: Path, stop: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, Any]:
    """Recover with changed images; the process may be ended once, after some steps."""
    folder.mkdir()
    advance = Trainer.advance

    def ended(training: Trainer, *, smaller: bool = True) -> float:
        if training.step == stop:
            raise KeyboardInterrupt
        return advance(training, smaller=smaller)

    for each in (ended, advance) if stop else (advance,):
        monkeypatch.setattr(Trainer, "advance", each)
        found = work(augment=True, epochs=4, batch=16, checkpoint_seconds=0, seconds=600, evaluations=4)
        with torch.no_grad():
            for model in (found.models.student, found.models.average):
                model.module.model.scale.copy_(torch.linspace(0.5, 1.5, 8))
        monkeypatch.setattr(loop, "pace", lambda training, threads: (1e-3, 1))
        monkeypatch.setattr(loop, "_choose_samples", lambda found, plan: plan)
        try:
            record = loop.recover(found, DataParallel(torch.device("cpu")), folder, "data", lambda text: None)
        except KeyboardInterrupt:
            continue
    return found.models.average.module.model.scale.detach(), record


def test_a_recovery_that_goes_on_changes_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, plain = recovered(tmp_path / "whole", None, monkeypatch)
    parts, resumed = recovered(tmp_path / "parts", 7, monkeypatch)
    assert (
        plain.plan.augmentation == resumed.plan.augmentation == Augmentation(inputs=("image",), mirror=True, mix=True)
    )
    assert plain.best_step > 0
    assert torch.equal(whole, parts)
    assert [point.loss for point in plain.curve] == [point.loss for point in resumed.curve]


def tried(evaluate: Any, **changes: Any) -> tuple[float, Work, list[LoadedModel]]:
    """Try a plan of one step; an evaluation is as given."""
    found = work()
    targets = output_targets(found.models.teacher, found.material.batch(np.arange(8)))
    plan = PLAN.model_copy(update={"batch": 16, "micro_batch": 8, "outputs": targets, **changes})
    counted: list[LoadedModel] = []
    evaluator: Any = SimpleNamespace(find_statistics=counted.append, evaluate=evaluate)
    return loop._try_plan(found, plan, evaluator), found, counted


@pytest.mark.parametrize("frozen", [True, False])
def test_trials_begin_as_the_training_will_where_norms_keep_their_statistics(frozen: bool) -> None:
    loss, found, counted = tried(lambda: (SimpleNamespace(loss=0.5), 0.0), frozen_norms=frozen)
    assert loss == 0.5
    assert counted == ([found.models.student] if frozen else [])


def test_a_trial_whose_evaluation_does_not_fit_the_memory_is_passed_over() -> None:
    def evaluate() -> Any:
        raise StepOutOfMemory("too much")

    assert tried(evaluate)[0] == math.inf


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


class Rare(nn.Module):
    """A probability that varies, and one of a class that is in no sample."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        flat = image.flatten(1)
        return torch.stack([flat[:, :5].sigmoid(), flat[:, 5:10] * 1e-6], 1)


@pytest.mark.parametrize(("factor", "least"), [(1.0, 1e-4), (1e-3, 0.0417e-8)])
def test_a_number_that_hardly_varies_does_not_count_for_all(factor: float, least: float) -> None:
    signature = loaded(2).signature
    answer = TensorSpec(name="values", dtype="float32", shape=("batch", 2, 5))
    module = NamedForward(nn.Sequential(Rare(), Times(factor)), ("image",), ())
    teacher = LoadedModel(module, Signature(inputs=signature.inputs, outputs=(answer,)), {})
    (target,) = output_targets(teacher, work().material.batch(np.arange(64)))
    assert target.axis == 1
    assert target.scales[1] == pytest.approx(least, rel=0.01)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor
