"""Test the losses that training goes by."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.passes.finetune import evaluate, losses
from enginesmith.pipeline.passes.finetune.losses import feature_targets, output_targets
from recovered import batch, model


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
    named = dataclasses.replace(batch(labels=tone), labeled="tone")
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
