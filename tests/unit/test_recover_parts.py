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

from enginesmith.calibration.dataset import Dataset, synthetic
from enginesmith.calibration.options import PartName
from enginesmith.pipeline.errors import DataError, StepOutOfMemory
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.frameworks.torch.surgery import Attention, find_frozen
from enginesmith.pipeline.passes.finetune import batches, evaluate
from enginesmith.pipeline.passes.finetune.batches import Batch, DataParallel, split_data
from enginesmith.pipeline.passes.finetune.loop import plan_time
from enginesmith.pipeline.passes.finetune.losses import call_user_loss
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
from enginesmith.pipeline.tensors import TensorSpec
from recovered import Net, batch, model

CPU = torch.device("cpu")


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


def test_a_loss_of_the_users_may_raise_any_class_and_memory_that_ran_out_stays_what_it_is() -> None:
    class RefusedError(Exception):
        """A library's own class, which is none of Python's built-in ones."""

    def loss(error: Exception) -> None:
        def function(*arguments: Any) -> Any:
            raise error

        module = NamedForward(nn.Linear(2, 2), ("x",), ())
        call_user_loss("f.py:loss", function, module, module, Batch({"x": torch.ones(1, 2)}, None))

    with pytest.raises(DataError, match=r"f.py:loss raised RefusedError: no"):
        loss(RefusedError("no"))
    with pytest.raises(MemoryError):
        loss(MemoryError("2 GiB"))


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
