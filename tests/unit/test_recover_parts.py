"""Test what recovery is made of: orders, rates, losses, parts that fit, averages, judgements."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

from enginesmith.calibration.dataset import Dataset, synthetic
from enginesmith.calibration.options import PartName
from enginesmith.pipeline.errors import DataError, ModelError, StepOutOfMemory
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.frameworks.torch.surgery import Attention, find_frozen
from enginesmith.pipeline.passes.finetune import batches, evaluate, losses
from enginesmith.pipeline.passes.finetune.batches import Batch, DataParallel, split_data
from enginesmith.pipeline.passes.finetune.loop import plan_time
from enginesmith.pipeline.passes.finetune.losses import feature_targets, output_targets
from enginesmith.pipeline.passes.finetune.options import RecoverOptions, TrainingPlan
from enginesmith.pipeline.passes.finetune.trainer import (
    Models,
    Progress,
    TimeBudget,
    Trainer,
    learning_rate,
    set_part,
    shrink_step,
    update_average,
)
from enginesmith.pipeline.tensors import Signature, TensorSpec

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two stages of convolutions, the second at half the size, and classes."""

    def __init__(self, width: int = 8, name: str = "logits") -> None:
        super().__init__()
        self.name = name
        self.one = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(width, 4, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {self.name: self.head(self.two(self.one(image)).mean((2, 3)))}


def model(width: int = 8, name: str = "logits", seed: int = 0) -> LoadedModel:
    torch.manual_seed(seed)
    image = TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8))
    answer = TensorSpec(name=name, dtype="float32", shape=("batch", 3))
    module = NamedForward(Net(width, name).eval(), ("image",), (name,))
    return LoadedModel(module, Signature(inputs=(image,), outputs=(answer,)), {"image": torch.zeros(2, 1, 8, 8)})


def batch(count: int = 6, labels: torch.Tensor | dict[str, torch.Tensor] | None = None) -> Batch:
    return Batch({"image": torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))}, labels)


def test_an_epoch_takes_every_row_once_and_each_epoch_in_another_order() -> None:
    order = batches.Order(tuple(range(100, 120)), 5, seed=3)
    epochs = [np.concatenate([order.at(4 * epoch + step) for step in range(4)]) for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100, 120))
    assert epochs[0].tolist() != epochs[1].tolist()
    assert order.at(6).tolist() == batches.Order(tuple(range(100, 120)), 5, seed=3).at(6).tolist()
    assert order.at(6).tolist() != batches.Order(tuple(range(100, 120)), 5, seed=4).at(6).tolist()


RATES = RecoverOptions(warmup=0.1)


def test_the_rate_rises_and_falls_to_nothing() -> None:
    plan = PLAN.model_copy(update={"steps": 100, "learning_rate": 1.0})
    rates = [learning_rate(plan, step, RATES) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[10] == 1.0
    assert (rates[55], rates[100]) == (pytest.approx(0.5), pytest.approx(0.0))


def test_a_schedule_that_is_cut_goes_on_without_a_jump() -> None:
    plan = PLAN.model_copy(update={"steps": 100})
    cut = plan.shorten(40, 70)
    twice = cut.shorten(50, 55)
    assert (cut.steps, twice.steps) == (70, 55)
    assert learning_rate(cut, 40, RATES) == learning_rate(plan, 40, RATES)
    assert learning_rate(cut, 55, RATES) == pytest.approx(learning_rate(plan, 70, RATES))
    assert learning_rate(twice, 50, RATES) == learning_rate(cut, 50, RATES)
    assert learning_rate(twice, 55, RATES) == pytest.approx(0.0)


def test_a_plan_that_ends_too_late_is_cut_to_what_there_is_time_for() -> None:
    plan = PLAN.model_copy(update={"steps": 100, "evaluate_every": 20})
    kept = TimeBudget(100.0, 40.0, 1.0, _reviewed=-math.inf)
    kept.add_step(30.0)  # the first does what is done once
    assert kept.steps_in_time(plan, 50) == 100  # nobody knows yet
    kept.add_step(1.0)
    assert kept.steps_in_time(plan, 50) == 100
    assert kept.steps_in_time(plan, 30) == 100  # so soon after it was looked at
    late = dataclasses.replace(kept, _reviewed=-math.inf)
    assert 30 + 54 <= late.steps_in_time(plan, 30) <= 30 + 57
    over = dataclasses.replace(kept, before=200.0, _reviewed=-math.inf)
    assert over.steps_in_time(plan, 30) == 31


@pytest.mark.parametrize(
    ("own", "earlier", "seconds"), [(100.0, 0.0, 100.0), (100.0, 70.0, 30.0), (20.0, 70.0, 20.0), (20.0, 130.0, 0.0)]
)
def test_a_process_has_what_earlier_ones_left_and_no_more_than_its_own_time(
    own: float, earlier: float, seconds: float
) -> None:
    work: Any = SimpleNamespace(options=RecoverOptions(seconds=own), total_seconds=100.0)
    progress = Progress(fingerprint="", plan=PLAN, teacher=1.0, seconds=earlier + 5.0, evaluation_seconds=1.0)
    budget = plan_time(work, progress, earlier)
    assert (budget.seconds, budget.before, budget.evaluation_seconds) == (seconds, 5.0, 1.0)


def trainer(loss: Callable[..., torch.Tensor], within: Callable[[], None] = lambda: None) -> Trainer:
    images = np.random.default_rng(0).standard_normal((40, 1, 8, 8)).astype(np.float32)
    models = Models(model(), model(), model(seed=1))
    models.ready(CPU)
    plan = PLAN.model_copy(update={"steps": 8, "batch": 8, "micro_batch": 8})
    material = split_data(Dataset("set", {"image": images}), 0.2, 0, CPU)
    return Trainer(models, material, loss, RecoverOptions(batch=8), plan, 0, DataParallel(CPU), within)


def test_outputs_have_the_sample_first_while_training() -> None:
    class Turned(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image.flatten(1).T

    def turned() -> LoadedModel:
        loaded = model()
        answer = TensorSpec(name="logits", dtype="float32", shape=(64, "batch"))
        signature = loaded.signature.model_copy(update={"outputs": (answer,)})
        return dataclasses.replace(loaded, module=NamedForward(Turned(), ("image",), ()), signature=signature)

    models, images = Models(turned(), turned(), turned()), torch.rand(5, 1, 8, 8)
    models.ready(CPU)
    assert torch.equal(models.student.module(images)[0], images.flatten(1))
    models.restore()
    assert torch.equal(models.student.module(images)[0], images.flatten(1).T)


def test_samples_are_learnt_from_where_the_model_has_its_batch() -> None:
    states = np.random.default_rng(0).random((9, 2, 3), np.float32)
    material = split_data(Dataset("set", {"h": states}, axes={"h": 1}), 0.3, 0, CPU)
    assert torch.equal(material.batch(np.array([4, 0])).inputs["h"][:, 0], torch.from_numpy(states[4]))


def test_what_the_user_froze_stays() -> None:
    models = Models(dataclasses.replace(model(), frozen=("one.0.weight",)), model(), model(seed=1))
    models.ready(CPU)
    trained = {name for name, value in models.student.module.model.named_parameters() if value.requires_grad}
    assert trained == {name for name, _ in Net().named_parameters()} - {"one.0.weight"}


def test_what_was_frozen_in_an_attention_that_was_replaced_stays() -> None:
    net = nn.Sequential(nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, kdim=4, vdim=4))
    net[0], net[1] = Attention(net[0]), Attention(net[1])
    given = ("0.in_proj_weight", "0.in_proj_bias", "1.k_proj_weight", "1.out_proj.weight")
    found = find_frozen(net, given) & {name for name, _ in net.named_parameters()}
    parts = [f"0.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    assert found == {*parts, "1.k_proj.weight", "1.out_proj.weight"}


def test_recurrent_layers_drop_nothing_out() -> None:
    """They are in training mode only because cuDNN needs it, and no other layer drops anything out, either."""
    steps = trainer(lambda student, teacher, batch: student(batch.inputs["image"])[0].square().mean())
    steps.student.model.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    steps.models.average.module.model.lstm = average = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    steps.follow(steps.plan)
    lstm, given = steps.student.model.lstm, torch.randn(5, 1, 4)
    assert lstm.training
    assert torch.equal(lstm(given)[0], lstm(given)[0])
    assert average.dropout == 0.5


def test_whole_numbers_among_the_parameters_stay() -> None:
    steps = trainer(lambda student, teacher, batch: student(batch.inputs["image"])[0].square().mean())
    places = [nn.Parameter(torch.arange(3), requires_grad=False) for _ in range(2)]
    for loaded, own in zip((steps.models.student, steps.models.average), places, strict=True):
        loaded.module.model.places = own
    before = steps.models.average.module.model.head.weight.clone()
    steps.advance()
    assert places[1].tolist() == [0, 1, 2]
    assert not torch.equal(steps.models.average.module.model.head.weight, before)


def test_labels_that_are_words_are_not_learnt_from() -> None:
    data = Dataset("set", {"x": np.zeros((9, 1), np.float32)}, np.array(["cat", "dog", "cow"] * 3))
    assert split_data(data, 0.3, 0, CPU).batch(np.arange(4)).labels is None


def test_inputs_without_a_batch_keep_their_place() -> None:
    specs = [TensorSpec.parse("table:float32:2,8,8,8"), TensorSpec.parse("x:float32:batch,3")]
    data = synthetic(specs, {"table": np.ones((2, 8, 8, 8), np.float32), "x": np.ones((2, 3), np.float32)}, {}, 9, 0)
    found = split_data(data, 0.3, 0, CPU).batch(np.arange(4))
    assert {name: len(value) for name, value in found.inputs.items()} == {"table": 2, "x": 4}
    assert [*found.inputs] == ["table", "x"]


@pytest.mark.parametrize(
    "spoil",
    [lambda value: value / 0.0, lambda value: value + math.nan, lambda value: value + (value * 0).sqrt()],
    ids=["both", "loss only", "gradients only"],
)
def test_a_step_that_is_not_finite_changes_no_weight(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    steps = trainer(lambda student, teacher, batch: student(batch.inputs["image"])[0].square().mean())
    assert math.isfinite(steps.advance())
    loss, before = steps.loss, [value.detach().clone() for value in steps.student.parameters()]
    average = [value.clone() for value in steps.models.average.module.parameters()]
    steps.loss = lambda student, teacher, batch: spoil(loss(student, teacher, batch))
    assert math.isnan(steps.advance())
    assert all(torch.equal(*pair) for pair in zip(before, steps.student.parameters(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(average, steps.models.average.module.parameters(), strict=True))
    assert steps.step == 2
    steps.loss = loss
    assert math.isfinite(steps.advance())


def test_a_step_that_took_more_than_is_allowed_is_done_in_smaller_parts() -> None:
    seen: list[int] = []

    def within() -> None:
        if max(seen) > 4:
            seen.clear()
            raise StepOutOfMemory("9 MiB were taken, of 4 MiB that were allowed", "")

    def loss(student: nn.Module, teacher: nn.Module, batch: Batch) -> torch.Tensor:
        seen.append(len(batch.inputs["image"]))
        answer: torch.Tensor = student(batch.inputs["image"])[0]
        return answer.square().mean()

    steps = trainer(loss, within)
    assert math.isfinite(steps.advance())
    assert (steps.step, steps.plan.micro_batch) == (1, 4)
    assert seen == [4, 4]


def test_what_is_judged_is_not_learnt_from() -> None:
    labels = np.repeat(np.arange(2), 10)
    found = split_data(Dataset("set", {"image": np.zeros((20, 1))}, labels), 0.3, 0, CPU)
    assert sorted(found.learnt + found.held_back) == list(range(20))
    assert np.bincount(labels[list(found.held_back)]).tolist() == [3, 3]
    with pytest.raises(DataError, match="1 sample"):
        split_data(Dataset("set", {"image": np.zeros((1, 1))}), 0.3, 0, CPU)


def test_choice_is_judged_where_data_was_split() -> None:
    whole = Dataset("set", {"image": np.zeros((20, 1))})
    parts: dict[PartName, np.ndarray] = {"calibration": np.array([3, 8]), "choice": np.array([9, 1, 0])}
    both = whole.take(np.array([3, 8, 9, 1, 0]), "both")
    found = split_data(dataclasses.replace(both, parts=parts), 0.3, 0, CPU)
    assert (found.learnt, found.held_back) == ((0, 1), (2, 3, 4))


def test_distilling_classes_is_the_divergence_of_softened_probabilities() -> None:
    student, teacher, given = model(seed=1), model(), batch()
    (target,) = output_targets(teacher, given)
    assert (target.name, target.kind) == ("logits", "classes")
    with torch.no_grad():
        found = losses.Distil([target], [], ["logits"], 2.0)(student.module, teacher.module, given)
        ours, theirs = (F.softmax(one.module(given.inputs["image"])[0] / 2, 1) for one in (student, teacher))
    assert found.item() == pytest.approx(4 * (theirs * (theirs / ours).log()).sum(1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("name", ["logits", "numbers"])
def test_places_that_both_models_mask_teach_nothing_and_spoil_nothing(name: str) -> None:
    """Training is the same with and without them, unless everything is masked."""
    student, teacher, given = model(name=name, seed=1), model(name=name), batch()
    plain = losses.Distil(output_targets(teacher, given), [], [name], 2.0)(student.module, teacher.module, given)
    for loaded in (student, teacher):
        head = loaded.module.model.head
        head.register_forward_hook(lambda module, args, value: F.pad(value, (0, 2), value=-math.inf))
    (target,) = output_targets(teacher, given)
    assert math.isfinite(target.scale)
    assert target.axis is None
    found = losses.Distil([target], [], [name], 2.0)(student.module, teacher.module, given)
    assert found.item() == pytest.approx(plain.item(), rel=1e-5)
    found.backward()
    assert all(value.grad.isfinite().all() for value in student.module.parameters())


def test_numbers_that_both_models_mask_do_not_count_against_their_agreement() -> None:
    theirs = {"y": np.array([[[1.0, -np.inf, 3.0]]])}
    assert evaluate.agreement({"y": np.array([[[1.0, -np.inf, 2.0]]])}, theirs, None) == pytest.approx(0.5)


def test_labels_that_number_an_outputs_columns_make_it_classes() -> None:
    teacher = model(name="box")
    assert output_targets(teacher, batch(labels=torch.tensor([0, 1, 2, 0, 1, 2])))[0].kind == "classes"
    assert output_targets(teacher, batch(labels=torch.tensor([0, 1, 9, 0, 1, 2])))[0].kind == "values"


def test_outputs_without_numbers_cannot_be_distilled() -> None:
    teacher = model()
    teacher.module.model.head = nn.Flatten()  # what it answers then is replaced
    teacher.module.register_forward_hook(lambda module, given, values: (values[0].argmax(1),))
    with pytest.raises(ModelError, match="no output of the model has floating-point numbers"):
        output_targets(teacher, batch())


def test_ends_of_stages_are_compared_and_maps_where_channels_are_gone() -> None:
    given = batch()
    same = {one.name: one.kind for one in feature_targets(model(seed=1), model(), given)}
    assert same == {"one": "values", "two": "values"}
    pruned = {one.name: one.kind for one in feature_targets(model(width=5), model(), given)}
    assert pruned == {"one": "maps", "two": "values"}


def test_features_are_zero_for_the_teacher_itself_and_reach_the_weights_of_others() -> None:
    given = batch()
    student, teacher = model(width=5, seed=1), model()
    features = feature_targets(student, teacher, given)
    loss = losses.Distil(output_targets(teacher, given), features, ["logits"], 1.0)
    assert loss(teacher.module, teacher.module, given).item() == pytest.approx(0.0, abs=1e-6)
    without = losses.Distil(output_targets(teacher, given), [], ["logits"], 1.0)
    found = loss(student.module, teacher.module, given)
    assert found > without(student.module, teacher.module, given)
    found.backward()
    assert student.module.model.one[0].weight.grad.abs().max() > 0
    assert not student.module.model.two._forward_hooks


def test_supervised_is_cross_entropy_or_squared_error() -> None:
    student, labels = model(), torch.tensor([0, 1, 2, 0, 1, 2])
    logits = student.module(batch().inputs["image"])[0]
    found = losses.Supervised(["logits"])(student.module, student.module, batch(labels=labels))
    assert found.item() == pytest.approx(F.cross_entropy(logits, labels).item())
    numbers = torch.zeros(6, 3)
    found = losses.Supervised(["logits"])(student.module, student.module, batch(labels=numbers))
    assert found.item() == pytest.approx(logits.square().mean().item())


def compare(output: torch.Tensor, labels: torch.Tensor) -> float:
    """Compute the loss of an output, whatever the model."""
    student: Any = lambda image: (output,)  # noqa: E731
    return losses.Supervised(["y"])(student, student, batch(labels=labels)).item()


def test_the_cross_entropy_of_probabilities_is_that_of_their_logits() -> None:
    logits, labels = torch.randn(6, 3, 2), torch.tensor([[0, 1], [1, 2], [2, -100]] * 2)
    expected = F.cross_entropy(logits, labels).item()
    assert compare(logits, labels) == pytest.approx(expected, rel=1e-5)
    assert compare(logits.softmax(1), labels) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("shape", "axis"), [((6, 4, 4), 2), ((6, 4, 4, 4), 1)], ids=["tokens", "pixels"])
def test_classes_are_found_where_they_are_as_many_as_places(shape: tuple[int, ...], axis: int) -> None:
    """They are the last axis of tokens, and the second one of images, as the labels' shape does not tell."""
    labels = torch.randint(0, 4, shape[:-1], generator=torch.Generator().manual_seed(0))
    right = 20.0 * F.one_hot(labels, 4).movedim(-1, axis)
    assert compare(right, labels) < 1e-6
    assert compare(right.transpose(1, 2), labels) > 1
    assert (losses._kind("y", right, labels) == "classes") == (axis == 2), (
        "distillation knows classes along the last one"
    )


@pytest.mark.parametrize(
    ("shape", "labels"),
    [
        ((4, 3), torch.tensor([[0, 1, 1]] * 4)),
        ((4,), torch.tensor([3, 1, 0, 7])),
        ((4, 1), torch.tensor([3, 1, 0, 7])),
        ((4, 1), torch.tensor([3.0, 1.0, 0.0, 7.0])),
        ((4,), torch.tensor([[3.0], [1.0], [0.0], [7.0]])),
    ],
    ids=["several classes", "whole", "whole in a column", "in a column", "labels in a column"],
)
def test_numbers_fit_an_output_of_their_shape(shape: tuple[int, ...], labels: torch.Tensor) -> None:
    assert compare(torch.ones(shape), labels) == pytest.approx((labels.float() - 1).square().mean().item())


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (None, "needs labels"),
        (torch.tensor([0, 1, 2, 0, 1, 3]), "from 0 to 3, and the model has 3 classes"),
        (torch.zeros(6, 2), r"float32 and shape \[6, 2\] do not fit the output 'y' of float32 and shape \[6, 3\]"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: torch.Tensor | None, said: str) -> None:
    student = model().module
    with pytest.raises(DataError, match=said):
        losses.Supervised(["y"])(student, student, batch(labels=labels))


@pytest.mark.parametrize("form", ["logits", "probabilities"])
def test_one_number_for_what_is_there_or_not_has_a_cross_entropy(form: str) -> None:
    logits, labels = torch.tensor([[[-8.0, 3.0], [2.0, -30.0]]] * 2), torch.tensor([[[0, 1], [1, 255]]] * 2)
    output = (logits if form == "logits" else logits.sigmoid())[:, None]
    student: Any = lambda image: (output,)  # noqa: E731
    loss = losses.Supervised(["y"], frozenset("y"))(student, student, batch(labels=labels))
    counted = F.binary_cross_entropy_with_logits(logits[:, [0, 0, 1], [0, 1, 0]], torch.tensor([[0.0, 1, 1]] * 2))
    assert loss.item() == pytest.approx(counted.item(), rel=1e-4)
    assert losses.are_binary(labels.numpy())
    assert not losses.are_binary(labels.float().numpy())
    assert not losses.are_binary(labels.numpy() + 1)


def test_places_without_a_label_teach_nothing() -> None:
    logits, labels = torch.randn(6, 3, 2), torch.tensor([[0, 1], [1, 255], [2, -100]] * 2)
    expected = F.cross_entropy(logits, labels.masked_fill(labels == 255, -100)).item()
    assert compare(logits, labels) == pytest.approx(expected, rel=1e-5)


def test_each_output_learns_from_its_own_labels() -> None:
    """One array is for the output that is judged; of several, each is for the output of its name."""
    outputs = torch.randn(6, 3), torch.randn(6, 4)
    student: Any = lambda image: outputs  # noqa: E731
    kind, tone = torch.tensor([0, 1, 2] * 2), torch.tensor([3, 0, 1] * 2)
    loss = losses.Supervised(["kind", "tone"])
    alone = [F.cross_entropy(value, labels).item() for value, labels in zip(outputs, (kind, tone), strict=True)]
    named = dataclasses.replace(batch(labels=tone), labelled="tone")
    assert loss(student, student, named).item() == pytest.approx(alone[1])
    both = loss(student, student, batch(labels={"tone": tone, "kind": kind, "other": tone}))
    assert both.item() == pytest.approx(sum(alone))
    with pytest.raises(DataError, match="needs labels"):
        loss(student, student, batch(labels={"other": tone}))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda student, teacher, batch: batch["nothing"], "raised KeyError"),
        (lambda student, teacher, batch: torch.ones(2) + torch.ones(3), "raised RuntimeError: The size of tensor a"),
        (lambda student, teacher, batch: 0.5, "returned a float"),
        (lambda student, teacher, batch: teacher(batch["image"])["logits"], r"tensor of shape \[6, 3\]"),
        (lambda student, teacher, batch: torch.zeros(()), "depends on no weight"),
    ],
)
def test_what_a_loss_of_the_users_must_not_do_is_said(function: Callable[..., object], said: str) -> None:
    student = model().module
    with pytest.raises(DataError, match=said):
        losses.call_user_loss("own:loss", function, student, student, batch())


def test_a_loss_of_the_users_gets_modules_and_arrays_by_name() -> None:
    student, teacher = model(seed=1).module, model().module

    def own(student: nn.Module, teacher: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels: Any = batch["labels"]
        assert (labels["tone"] if isinstance(labels, dict) else labels).shape == (6,)
        apart: torch.Tensor = student(batch["image"])["logits"] - teacher(batch["image"])["logits"]
        return apart.square().mean()

    for labels in (torch.zeros(6), {"tone": torch.zeros(6)}):
        found = losses.call_user_loss("own:loss", own, student, teacher, batch(labels=labels))
        assert found.requires_grad
        assert found.item() > 0


def test_a_method_that_there_is_not_is_refused_with_the_nearest() -> None:
    assert RecoverOptions(method="losses.py:own").method == "losses.py:own"
    with pytest.raises(ValidationError, match="did you mean distil"):
        RecoverOptions(method="distill")


class Limited:
    """A step that takes 10 bytes and 4 for each sample; half of them where activations are computed again."""

    def __init__(self, device_bytes: int = 10**9) -> None:
        self.device_bytes = device_bytes
        self.tried: list[tuple[int, bool]] = []

    def attempt(self, size: int, again: bool) -> None:
        self.tried.append((size, again))
        self.taken = 10 + (2 if again else 4) * size
        if self.taken > self.device_bytes:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    def meter(self, action: Callable[[], None]) -> int:
        action()
        return self.taken


def test_the_largest_part_below_a_limit_is_found_without_going_far_above() -> None:
    step = Limited()
    assert batches.largest_part(batches.part_sizes(64, None), step.attempt, step.meter, 100) == (16, False)
    assert max(size for size, _ in step.tried) == 16
    assert batches.largest_part(batches.part_sizes(64, None), step.attempt, step.meter, 10**6) == (64, False)


def test_activations_are_computed_again_where_one_sample_is_too_much() -> None:
    step = Limited()
    assert batches.largest_part(batches.part_sizes(64, None), step.attempt, step.meter, 13) == (1, True)
    with pytest.raises(StepOutOfMemory, match="even one sample at a time: it takes 12 B"):
        batches.largest_part(batches.part_sizes(64, None), step.attempt, step.meter, 11)


PLAN = TrainingPlan(steps=1, batch=32, micro_batch=32, evaluate_every=1, judged=1, statistics=1, processes=1, threads=1)


def test_a_plan_shrinks_until_it_cannot() -> None:
    half = shrink_step(PLAN)
    assert (half.micro_batch, half.frozen_norms) == (16, False)
    assert (shrink_step(half).micro_batch, shrink_step(half).frozen_norms) == (8, True)
    one = PLAN.model_copy(update={"micro_batch": 1})
    assert shrink_step(one).checkpointed
    with pytest.raises(StepOutOfMemory):
        shrink_step(shrink_step(one))
    assert set_part(PLAN.model_copy(update={"batch": 1}), 1).frozen_norms  # a single value has no variance
    fixed = PLAN.model_copy(update={"least_part": 32})
    assert shrink_step(fixed).checkpointed


def test_computing_activations_again_changes_no_gradient() -> None:
    gradients = []
    for again in (False, True):
        student = model().module
        if again:
            assert batches.compute_again(student.model) == 5
        student(batch().inputs["image"])[0].sum().backward()
        gradients.append(student.model.one[0].weight.grad.clone())
        batches.keep_activations(student.model)
        assert not any("forward" in vars(one) for one in student.modules())
    assert torch.equal(*gradients)


def test_a_forward_that_a_module_was_given_is_there_again_after_computing_again() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plain = net[0].forward
    net[0].forward = given = lambda x: 2 * plain(x)
    x = torch.ones(1, 4)
    expected = net(x)
    batches.keep_activations(net)
    assert vars(net[0])["forward"] is given
    batches.compute_again(net)
    assert torch.equal(net(x), expected)
    batches.keep_activations(net)
    assert [vars(one).get("forward") for one in net] == [given, None]


def test_statistics_are_those_of_the_samples() -> None:
    module = (loaded := model()).module
    norm = module.model.one[1]
    samples = [batch(8), batch(8)]
    evaluate.find_statistics(loaded, samples)
    values = module.model.one[0](samples[0].inputs["image"])
    torch.testing.assert_close(norm.running_mean, values.mean((0, 2, 3)))
    torch.testing.assert_close(norm.running_var, values.var((0, 2, 3)))
    assert not norm.training
    assert norm.momentum == 0.1


def test_statistics_of_norms_that_the_user_froze_stay() -> None:
    given, frozen = [batch(16)], ("one.1.weight", "one.1.bias")
    models = Models(*(dataclasses.replace(model(), frozen=frozen) for _ in range(3)))
    models.ready(CPU)
    norm, student = models.average.module.model.one[1], models.student.module.model.one[1]
    evaluate.find_statistics(models.average, given)
    assert norm.num_batches_tracked == 0
    material = split_data(Dataset("set", {"image": given[0].inputs["image"].numpy()}), 0.3, 0, CPU)
    loss = lambda student, teacher, batch: student(batch.inputs["image"])[0].square().mean()  # noqa: E731
    Trainer(models, material, loss, RecoverOptions(), PLAN, 0, DataParallel(CPU), lambda: None).advance()
    assert not student.training
    assert student.num_batches_tracked == 0
    half = dataclasses.replace(model(), frozen=frozen[:1])  # the other one is trained
    evaluate.find_statistics(half, given)
    assert half.module.model.one[1].num_batches_tracked == 1


def test_statistics_of_single_values_stay() -> None:
    module = (loaded := model()).module
    module.model.head = nn.Sequential(nn.Linear(4, 3), norm := nn.BatchNorm1d(3))
    norm.eval().running_var.fill_(7.0)
    evaluate.find_statistics(loaded, [batch(1), batch(1)])
    assert norm.running_var.tolist() == [7.0] * 3
    assert module.model.one[1].num_batches_tracked == 2
    assert not norm.training


def test_a_verdict_is_by_the_metric_and_then_by_the_loss() -> None:
    good = evaluate.Verdict(0.9, 0.5, 1.0)
    assert evaluate.Verdict(0.9, 0.4, 1.0).better_than(good)
    assert not evaluate.Verdict(0.8, 0.1, 1.0).better_than(good)
    assert not evaluate.Verdict(float("nan"), 0.1, 1.0).better_than(good)
    assert evaluate.Verdict(0.8, 0.9, -1.0).better_than(evaluate.Verdict(0.9, 0.5, -1.0))


def test_the_average_of_all_weights_moves_at_once_and_as_each_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, now = model(seed=1).module, model(seed=2).module
    for name, value in now.named_parameters():
        value.requires_grad_(not name.endswith("bias"))
    weight = 1 - 11 / 20
    expected = [
        kept.lerp(value, weight) if value.requires_grad else kept.clone()
        for kept, value in zip(mean.parameters(), now.parameters(), strict=True)
    ]
    calls: list[int] = []
    at_once = torch._foreach_lerp_
    monkeypatch.setattr(
        torch, "_foreach_lerp_", lambda means, *others: calls.append(len(means)) or at_once(means, *others)
    )
    update_average(mean, now, 0.999, 10)
    assert calls == [sum(value.requires_grad for value in now.parameters())]
    for kept, wanted in zip(mean.parameters(), expected, strict=True):
        assert torch.equal(kept, wanted), "to the last bit"
