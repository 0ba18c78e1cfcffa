"""Numbers of a model's answer that rounding decides: they are found, and they alone are not compared."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from enginesmith.pipeline.engines.torch.session import EagerSession
from enginesmith.pipeline.frameworks.fidelity import OutputFidelity, compare, compare_calls, thresholds_for
from enginesmith.pipeline.frameworks.rounding import (
    COARSE,
    FINE,
    Draw,
    UnstableNumbers,
    find_unstable,
    find_unverified,
    make_records,
    measure_movement,
    spread_bits,
    take_as_right,
)
from enginesmith.pipeline.frameworks.torch import rounding
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Feeds, Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:batch,4"),), outputs=(TensorSpec.parse("y:float32:batch,2"),))
RNG = np.random.default_rng(0)


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.function(x),)


def open_session(module: nn.Module | Callable[[torch.Tensor], torch.Tensor], dtype: str = "float32") -> EagerSession:
    made = module if isinstance(module, nn.Module) else Function(module)
    output = SIGNATURE.outputs[0].model_copy(update={"dtype": dtype})
    signature = SIGNATURE.model_copy(update={"outputs": (output,)})
    return EagerSession(made, signature, Device(), None, lambda: None)


def perturb(function: Callable[[torch.Tensor], torch.Tensor], x: Array, step: float = 2.0**-10) -> Array:
    return open_session(function).perturb({"x": x}, step, 0)["y"]


def test_operations_are_changed_by_about_the_step_and_the_other_way_by_its_negative() -> None:
    x = RNG.standard_normal((64, 4)).astype(np.float32)
    right = 3 * x
    up, down = perturb(lambda x: 3 * x, x), perturb(lambda x: 3 * x, x, -(2.0**-10))
    assert 0 < np.abs(up - right).max() < 8 * 2**-10 * np.abs(right).max()
    assert np.abs(up / right - 1).max() < 8 * 2**-10, "each product by its own size"
    assert np.allclose(up - right, right - down, atol=1e-6)
    sums = perturb(lambda x: x @ torch.eye(4), x)
    assert np.abs(sums / x - 1).max() > 8 * 2**-10, "sums by the size of their products, and somewhat more"


def test_sums_of_products_are_changed_by_the_size_of_their_own() -> None:
    """Rounding does not decide a risk that is computed beside a price by one product."""
    x = (RNG.standard_normal((512, 4)) * [1e6, 1, 1, 1]).astype(np.float32)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    right = (torch.from_numpy(x) @ weight).numpy()
    for function in (
        lambda x: x @ weight,
        lambda x: nn.functional.linear(x, weight.T, torch.zeros(2)),
        lambda x: nn.functional.conv1d(x[:, :, None], weight.T[:, :, None])[:, :, 0],
        lambda x: torch.bmm(x[None], weight[None])[0],
    ):
        apart = np.abs(perturb(function, x) - right)
        assert 0 < apart[:, 1].max() < 0.1 < apart[:, 0].max()
    mixed = perturb(lambda x: x @ torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), x)
    assert np.abs(mixed[:, 1] - x[:, 0] - x[:, 1]).max() > 100, "what large numbers are part of"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.relu(x - 10),
        lambda x: x.masked_fill(x > 0, -1e9),
        lambda x: x.max(1, keepdim=True).values.expand(-1, 2),
        lambda x: torch.cat([x, x.flip(1)], 1),
        lambda x: torch.zeros_like(x) + torch.arange(4),
        lambda x: (x * (x[:, :1] > 0)) @ torch.eye(4).mul(2),
        lambda x: x.masked_fill(x > 0, -torch.inf) * 2,
        lambda x: (torch.ones_like(x) * torch.finfo().min + x).softmax(1),
        lambda x: ((x > 9) * 1e9 - 1e9 + x).softmax(1),
    ],
)
def test_what_is_chosen_and_what_is_0_stays(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = RNG.standard_normal((8, 4)).astype(np.float32)
    wanted = function(torch.from_numpy(x)).numpy()
    changed = perturb(function, x)
    assert np.allclose(changed, wanted, rtol=0.01, atol=0.02)
    assert np.array_equal(changed == 0, wanted == 0)


def test_probabilities_stay_above_0_and_writes_into_views_arrive() -> None:
    def half_written(x: torch.Tensor) -> torch.Tensor:
        found = torch.sigmoid(x - 30)
        found[:, 0] = 7
        return found

    changed = perturb(half_written, np.zeros((64, 4), np.float32))
    assert (changed[:, 0] == 7).all()
    assert (changed > 0).all()
    assert changed[:, 1:].max() > 1e-4, "a function that ends at 1 is computed to a share of 1"


def test_scripted_modules_are_changed_too_and_others_are_not() -> None:
    with warnings.catch_warnings(action="ignore"):  # tracing is deprecated
        traced = torch.jit.trace(Function(torch.tanh), torch.ones(2, 4))
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    assert not np.array_equal(open_session(traced).perturb({"x": x}, 2.0**-10, 0)["y"], np.tanh(x))
    session = open_session(torch.tanh)
    session.forward = lambda x: (torch.tanh(x),)
    assert session.perturb({"x": x}, 2.0**-10, 0) == {}


def test_a_loop_that_ends_at_equal_numbers_is_ended_and_errors_of_the_module_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settle(x: torch.Tensor) -> torch.Tensor:
        before = x + 1
        while not torch.equal(before, x):
            before, x = x, (x + 1 / x) / 2 + 0 * x
        return x

    def insist(x: torch.Tensor) -> torch.Tensor:
        assert torch.equal(x * 3, x + 2 * x)
        return x

    monkeypatch.setattr(rounding, "_MOST_OPERATIONS", 500)
    for function in (settle, insist):
        session = open_session(function)
        feeds = {"x": np.full((1, 4), 2.25, np.float32)}
        assert session.run(feeds)["y"].size
        assert session.perturb(feeds, 2.0**-7, 0) == {}


def find(function: Callable[[torch.Tensor], torch.Tensor], x: Array, dtype: str = "float32") -> tuple[Array, Feeds]:
    session = open_session(function, dtype)
    answer = session.run({"x": x})
    return answer["y"], find_unstable(session.perturb, {"x": x}, answer)


def test_a_class_between_scores_that_are_nearly_0_is_decided_by_rounding() -> None:
    x = np.full((4, 4), -40, np.float32) + RNG.standard_normal((4, 4)).astype(np.float32)
    x[2, 3] = 2
    x[3] = [0.1, 0.11, -1, -1]

    def classify(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x).argmax(1, keepdim=True).expand(-1, 2)

    _, unstable = find(classify, x, "int64")
    bits = spread_bits(unstable["y"], (4, 2))
    assert bits[:, 0].tolist() == [FINE, FINE, 0, COARSE]
    _, floats = find(lambda x: (classify(x) + 3).float(), x)
    assert np.array_equal(spread_bits(floats["y"], (4, 2)), bits)
    assert np.isfinite(floats["y"]["reach"]).all(), "they are whole numbers, too"


def test_floats_that_move_far_are_decided_by_rounding_and_where_most_do_none_is() -> None:
    constant = RNG.standard_normal((20, 4)).astype(np.float32)
    constant[5] = 0.7 + np.float32([0, 1e-7, 0, 0])

    def standardize(x: torch.Tensor) -> torch.Tensor:
        return (3 * x - (3 * x).mean(1, keepdim=True)) / ((3 * x).std(1, keepdim=True) + 1e-9)

    _, unstable = find(standardize, constant)
    assert (spread_bits(unstable["y"], (20, 4)) > 0).any(axis=1).tolist() == [row == 5 for row in range(20)]
    assert find(torch.tanh, constant)[1] == {}
    session, feeds = open_session(standardize), {"x": np.repeat(constant[5:6], 20, axis=0)}
    calm = UnstableNumbers(open_session(torch.tanh).perturb)
    assert calm.find({"x": constant}, {"y": np.tanh(constant)}) == {}
    assert 1e-8 < calm.movements["y"] < 1e-5
    most = UnstableNumbers(session.perturb)
    assert most.find(feeds, session.run(feeds)) == {}
    assert most.unsteady == {"y"}


@pytest.mark.parametrize("width", [1, 2])
def test_near_ties_of_a_topk_are_left_out_where_its_output_is_no_table_of_rows(width: int) -> None:
    """A mixture of experts: the best one's numbers answer, and rounding decides in one sample which one that is."""
    x = RNG.standard_normal((20, 4)).astype(np.float32)
    x[5] = [0.7, 0.7, -1, -1]
    experts = torch.tensor([[1.0, 2.5], [3.25, 4.5], [5.75, 6.5], [7.25, 8.5]])[:, :width]

    def route(x: torch.Tensor) -> torch.Tensor:
        return experts[(0.3 * x).topk(1, dim=1).indices[:, 0]]

    right, marks = find(route, x)
    output = SIGNATURE.outputs[0].model_copy(update={"shape": ("batch", width) if width > 1 else ("batch",)})
    signature = SIGNATURE.model_copy(update={"outputs": (output,), "unordered": {"y": "rows"}})
    shape = (20, width) if width > 1 else (20,)
    reference, unstable = {"y": right.reshape(shape)}, [marks]
    other = {1.0: 3.25, 3.25: 1.0, 2.5: 4.5, 4.5: 2.5}
    for row, passes in ((5, True), (6, False)):
        given = right.copy()
        given[row] = [other.get(number, 0.0) for number in given[row].tolist()]
        calls = [(reference, {"y": given.reshape(shape)})]
        assert compare_calls(calls, thresholds_for("fp32"), signature, unstable=unstable).passed == passes
        assert not compare_calls(calls, thresholds_for("fp32"), signature).passed


COARSE_DRAW = Draw(COARSE, np.array([3]), np.array([9]))


def test_only_numbers_that_rounding_decides_at_a_precision_are_left_out() -> None:
    right, given = {"y": np.int64([1, 2, 3, 4])}, {"y": np.int64([1, 2, 9, 9])}
    unstable = {"y": make_records(right["y"], [Draw(FINE, np.array([2]), np.array([9])), COARSE_DRAW])}
    assert not compare(right, given, thresholds_for("int8")).passed
    assert compare(right, given, thresholds_for("int8"), unstable=unstable).passed
    assert not compare(right, given, thresholds_for("fp32"), unstable=unstable).passed
    given = {"y": np.int64([1, 2, 9, 4])}
    assert compare(right, given, thresholds_for("fp32"), unstable=unstable).passed
    assert not compare(right, {"y": np.int64([9, 2, 9, 4])}, thresholds_for("int8"), unstable=unstable).passed


def test_a_number_is_one_that_was_seen_or_as_near_where_many_were() -> None:
    """A third class is wrong where rounding decides between two; of many nearly equal ones, one more may be right."""
    right = {"y": np.int64([3, 3, 10, 5])}
    draws = [Draw(FINE, np.array([0, 1, 2]), np.array([17, 4, 9])), Draw(FINE, np.array([1]), np.array([5]))]
    unstable = {"y": make_records(right["y"], [*draws, COARSE_DRAW])}
    for given, wanted, bits in (
        ([17, 3, 9, 5], [3, 3, 10, 5], FINE),
        ([9, 7, 17, 9], [9, 3, 17, 9], FINE),
        ([3, -1, 10, 9], [3, 3, 10, 5], COARSE),
        ([3, 8, 10, 8], [3, 8, 10, 8], FINE),
        ([4, 19, 3, 5], [4, 3, 3, 5], COARSE),
    ):
        assert take_as_right(right, {"y": np.int64(given)}, unstable, bits)["y"].tolist() == wanted
    floats = make_records(np.float32([0.5]), [Draw(FINE, np.array([0]), np.float32([1]))])
    taken = take_as_right({"y": np.float32([0.5])}, {"y": np.float32([70])}, {"y": floats}, FINE)
    assert taken["y"].tolist() == [0.5], "rounding moves a float by any distance"
    mask = np.array([True, False])
    taken = take_as_right(
        {"y": mask}, {"y": ~mask}, {"y": make_records(mask, [Draw(FINE, np.array([1]), np.array([True]))])}, FINE
    )
    assert taken["y"].tolist() == [False, False]


COUNTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda mask: mask.sum(-1, keepdim=True),
    lambda mask: mask.cumsum(-1),
    lambda mask: mask.prod(-1, keepdim=True),
    lambda mask: mask @ torch.ones(4, 2),
    lambda mask: nn.functional.linear(mask, torch.ones(2, 4), -torch.ones(2)),
    lambda mask: torch.zeros(8, 2).index_add(1, torch.tensor([0, 1, 1, 0]), mask),
]


@pytest.mark.parametrize("function", COUNTS)
def test_sums_of_whole_numbers_are_exact_and_those_of_others_are_not(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A count of a mask's places in floats is a whole number, in whichever order they are added."""
    x = RNG.standard_normal((8, 4)).astype(np.float32)
    for make, exact in ((lambda x: (x > 0).float(), True), (lambda x: x, False)):
        right = function(make(torch.from_numpy(x))).numpy()
        changed = perturb(lambda x, make=make: function(make(x)), x, 2.0**-7)
        assert np.array_equal(changed, right) == exact


def test_sums_that_are_too_large_and_means_are_not_exact() -> None:
    """Small results tell nothing: what is added on the way may not be exact."""
    for size in (2**22, 2**23):
        x = np.float32([[1, size, -size, 3]])
        assert (perturb(lambda x: x.sum(-1, keepdim=True), x).tolist() == [[4.0]]) == (size < 2**23)
    assert perturb(lambda x: x.mean(-1, keepdim=True), np.float32([[1, 2, 3, 2]])).tolist() != [[2.0]]


@pytest.mark.parametrize(
    ("function", "chooses"),
    [
        (lambda x: x.topk(2, dim=1).values, True),
        (lambda x: x[x[:, 0] > 0], True),
        (lambda x: x[(x[:, 0] > 0).nonzero()[:, 0]], True),
        (lambda x: x.sort(1).values, True),
        (lambda x: x.flip(1).index_put((x > 0,), torch.tensor(0.0)), False),
        (lambda x: x[torch.arange(1)].masked_fill(x > 0, 0), False),
        (lambda x: torch.cond(x.max() > 3.0, torch.relu, torch.tanh, (x,)), True),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_choose_rows_by_values_are_told(
    function: Callable[[torch.Tensor], torch.Tensor], chooses: bool
) -> None:
    session = open_session(function)
    assert session.find_choosing({"x": np.ones((2, 4), np.float32)}) == (None if chooses else frozenset())
    session.signature = session.signature.model_copy(update={"outputs": (TensorSpec.parse("y:float32:boxes,4"),)})
    assert session.find_choosing({"x": np.ones((2, 4), np.float32)}) is None, "how many rows it has tells it"


def test_calls_are_looked_at_as_long_as_there_is_something() -> None:
    tried = []

    def perturb(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        tried.append(step)
        return {"y": np.float32([1.5, 2.5, 8 if step > 0 else 3])}

    steady = UnstableNumbers(lambda feeds, step, seed: tried.append(step) or {})
    for _ in range(3):
        assert steady.find({}, {"y": np.float32([1.5, 2.5, 3])}) == {}
    assert len(tried) == len(set(tried)) == 4, "one call, and one pair of each step"
    assert steady.describe() == []
    found = UnstableNumbers(perturb)
    for _ in range(2):
        unstable = found.find({}, {"y": np.float32([1.5, 2.5, 3])})
        assert spread_bits(unstable["y"], (3,)).tolist() == [0, 0, FINE]
    assert found.describe()[0].startswith("rounding decides 33 % of the numbers in the output 'y'")
    assert found.find_unverified({"z"}) == {"y": pytest.approx(1 / 3)}
    assert find_unverified(unstable, {"y": np.float32([1.5, 2.5, 3])}, ()) == found.find_unverified(())
    assert found.find_unverified({"y"}) == {}, "a set of rows is compared"
    rare = UnstableNumbers(lambda feeds, step, seed: {"y": np.int64([*range(19), 7])})
    rare.find({}, {"y": np.arange(20)})
    assert rare.find_unverified(()) == {}
    assert "not verified" in found.describe()[0]
    assert "not verified" not in found.describe({"y"})[0] + rare.describe()[0]
    whole = UnstableNumbers(lambda feeds, step, seed: tried.append(step) or {})
    tried.clear()
    for _ in range(2):
        whole.find({}, {"y": np.int64([1])})
    assert len(tried) == 12


def test_outputs_that_rounding_moves_far_are_looked_at_in_all_calls() -> None:
    """Large numbers that cancel: an answer of 110 moves 100 times as far as one of 1.1, and decides what is allowed."""
    tried = []

    def perturb(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        tried.append(step)
        return {"y": feeds["x"] * np.float32(1 + 2000 * (1 + seed) * step)}

    cancelling = UnstableNumbers(perturb)
    for size in (1.1, 110.1, 11.1):
        feeds = {"x": np.float32([[size]])}
        assert cancelling.find(feeds, {"y": feeds["x"]}) == {}
    assert len(tried) == 12, "two pairs each"
    assert cancelling.movements["y"] == pytest.approx(110.1 * 4000 * 2.0**-20, rel=1e-3)
    assert cancelling.unsteady == {"y"}
    assert cancelling.sqnr_db["y"] == pytest.approx(10 * np.log10(2 / ((2000**2 + 4000**2) * 2.0**-40)), abs=0.1)
    calm = UnstableNumbers(lambda feeds, step, seed: {"y": feeds["x"] * np.float32(1 + 10 * step)})
    assert calm.find({"x": np.float32([[1.1]])}, {"y": np.float32([[1.1]])}) == {}
    assert not calm.unsteady, "a single number has no range"


class Offsets(nn.Module):
    """Add constants of 2000 to channels, and subtract them again behind a product."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 2)
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.3, generator=generator)
        offsets = 2000 * torch.rand(64, generator=generator)
        self.first.bias.data += offsets
        self.last.bias.data -= self.last.weight.data @ offsets

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.last(self.first(x)).exp(),)


def test_an_answer_may_be_rounded_itself_beside_what_rounding_moves() -> None:
    """Four steps of an output's scale, once more and once less than 4 times the step in float32, are the same."""
    steps = UnstableNumbers(lambda *_: [])
    value = np.float32([8, -2])
    steps.add_movement("y", value, value + np.float32([1, 0]), np.zeros(2, bool))
    assert steps.movements["y"] == 0.5 + 2 * 8 * 2.0**-24


def test_constants_that_cancel_explain_another_order_of_sums_and_no_wrong_bias() -> None:
    module = Offsets()
    session = open_session(module)
    calls = [{"x": RNG.standard_normal((1, 4)).astype(np.float32)} for _ in range(8)]
    answers = [session.run(feeds) for feeds in calls]
    found = UnstableNumbers(session.perturb)
    assert all(found.find(feeds, answer) == {} for feeds, answer in zip(calls, answers, strict=True))

    def judge(other: nn.Module) -> OutputFidelity:
        given = [open_session(other).run(feeds) for feeds in calls]
        pairs = list(zip(answers, given, strict=True))
        return compare_calls(pairs, thresholds_for("fp32"), rounding=found.movements).outputs[0]

    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    reordered = Offsets()
    reordered.first.weight.data, reordered.first.bias.data = module.first.weight[order], module.first.bias[order]
    reordered.last.weight.data = module.last.weight[:, order]
    other = judge(reordered)
    assert other.passed
    assert other.is_rounding
    assert other.sqnr_db is not None
    assert other.sqnr_db < 90
    for bias in ("first", "last"):
        wrong = Offsets()
        getattr(wrong, bias).bias.data[0] *= 1.01
        assert not judge(wrong).passed, bias


def test_outputs_that_are_not_asked_for_do_not_count() -> None:
    """A single number beside the samples' outputs, such as a count of steps, is no sample's."""
    row = np.float32([[0, 1, 2]])
    moved = measure_movement(
        lambda feeds, step, seed: {"y": feeds["x"] + 1, "steps": np.float32(7)}, {"x": row}, {"y": row}, {}
    )
    assert moved == {"y": 1.0}


@pytest.mark.filterwarnings("ignore")
def test_branches_are_run_as_before_after_a_try_to_change_them() -> None:
    """The mode that changes results has no rule for them, and PyTorch keeps what it compiled meanwhile."""
    session = open_session(lambda x: torch.cond(x.max() > 3.0, torch.relu, torch.tanh, (x,)))
    for size in (1, 8):
        row = np.ones((size, 4), np.float32)
        np.testing.assert_allclose(session.run({"x": row})["y"], np.tanh(row), rtol=1e-6)
        assert session.perturb({"x": row}, 2.0**-19, 0) == {}
