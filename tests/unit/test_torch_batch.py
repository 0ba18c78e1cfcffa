"""A module's batch is found: the dimension along which samples are apart."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loading
from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks.samples import batch_symbol, fixed_batch
from enginesmith.pipeline.frameworks.torch import dims, factories
from enginesmith.pipeline.frameworks.torch import module as torch_model
from enginesmith.pipeline.frameworks.torch.factories import Built
from enginesmith.pipeline.frameworks.torch.module import LoadOptions
from enginesmith.pipeline.tensors import TensorSpec
from loading import lambda_module

load = loading.load  # a fixture


class TimeFirst(nn.Module):
    """Work as recurrent layers do by default: [time, batch, features]; with states, [layers, batch, features]."""

    def __init__(self, states: bool, whole: bool) -> None:
        super().__init__()
        self.lstm, self.states, self.whole = nn.LSTM(4, 3, 2), states, whole

    def forward(self, x: Tensor, h: Tensor | None = None, c: Tensor | None = None) -> Any:
        outputs, states = self.lstm(x, None if h is None or c is None else (h, c))
        last = outputs if self.whole else outputs[-1]
        return (last, *states) if self.states else last


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_is_where_samples_are_apart(load, batch: int, whole: bool) -> None:
    """Not along the time, although the outputs of all steps follow that, too."""
    alone = load(TimeFirst(states=False, whole=whole), torch.randn(5, batch, 4))
    assert [spec.shape for spec in alone.signature.inputs] == [(5, "batch", 4)]
    assert alone.signature.outputs[0].shape == ((5, "batch", 3) if whole else ("batch", 3))
    assert "--input x:float32:5,batch,4" in alone.notes[0]
    states = (torch.randn(2, batch, 3), torch.randn(2, batch, 3))
    beside = load(TimeFirst(states=True, whole=whole), (torch.randn(5, batch, 4), *states))
    assert [spec.shape for spec in beside.signature.inputs] == [(5, "batch", 4), *[(2, "batch", 3)] * 2]


class Scale(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh(x * scale)


class Louder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Tensor, factor: Tensor) -> Any:
        return self.lstm(factor * x)[0]


@pytest.mark.parametrize(
    ("module", "examples", "shapes"),
    [
        (nn.MultiheadAttention(8, 2), [(5, 3, 8), (7, 3, 8), (7, 3, 8)], [(5, "batch", 8), *[(7, "batch", 8)] * 2]),
        (nn.Conv2d(3, 5, 1), [(3, 9, 9)], [(3, 9, 9)]),
        (nn.Sequential(nn.Linear(4, 2), nn.Flatten(0, 1)), [(1, 5, 4)], [("batch", 5, 4)]),
        (lambda_module(lambda x: x.argmax()), [(4, 8)], [("rows", 8)]),
        (Scale(), [(32, 10), (10,)], [("batch", 10), (10,)]),
        (Scale(), [(32, 10), ()], [("batch", 10), ()]),
        (Louder(), [(5, 3, 4), ()], [(5, "batch", 4), ()]),
        (lambda_module(lambda x: torch.cat([x, x], 1).sum()), [(2, 0, 8)], [("rows", 0, 8)]),
    ],
    ids=["attention", "pixels", "flat", "number", "table", "rate", "rate of time", "empty"],
)
def test_a_batch_is_moved_only_where_one_dimension_alone_can_be_it(
    load, module: nn.Module, examples: list[tuple[int, ...]], shapes: list[tuple[int | str, ...]]
) -> None:
    loaded = load(module, tuple(torch.randn(shape) for shape in examples))
    assert [spec.shape for spec in loaded.signature.inputs] == shapes
    tables = [spec.name for spec in loaded.signature.inputs if spec.shape == (10,)]
    told = [f"the same for all samples, without a batch: {name!r}" for name in tables]
    assert [note for note in loaded.notes if "for all samples" in note] == told


class EachAgainstEach(nn.Module):
    """A number for each pair of an image and a text of the batch, as CLIP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.flat = nn.Embedding(9, 4), nn.Sequential(nn.Flatten(), nn.Linear(6, 4))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.flat(images) @ self.words(texts).mean(1).T


def test_a_number_for_each_pair_of_the_batch_has_the_batch_twice(load) -> None:
    """Images have more dimensions than texts, which are no table for all that."""
    loaded = load(EachAgainstEach(), {"images": torch.randn(2, 1, 2, 3), "texts": torch.tensor([[1, 2], [3, 4]])})
    assert [spec.shape[0] for spec in loaded.signature.inputs] == ["batch", "batch"]
    assert loaded.signature.outputs[0].shape == ("batch", "batch")


class EachPairOfFeatures(nn.Module):
    """Covariances: no dimension of the input is a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.T @ x / len(x)


def test_a_number_for_each_pair_moves_no_batch(load) -> None:
    """The second dimension stands twice in the answers, and each number but for the diagonal is of two of them."""
    (spec,) = load(EachPairOfFeatures(), {"x": torch.randn(6, 4)}).signature.inputs
    assert spec.shape[1] == 4


class Deep(nn.Module):
    """Two LSTMs: an input and four states, whose batch stands elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LSTM(4, 4, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, h: Tensor, c: Tensor, h2: Tensor, c2: Tensor) -> Any:
        y, states = self.first(x, (h, c))
        y, more = self.second(y, (h2, c2))
        return y, *states, *more


def test_the_batch_of_many_states_is_found(load) -> None:
    """Without listing all sets of dimensions that could be it: of thirty states of one layer there are 2 ** 30."""
    axes = dims._list_axes({str(index): torch.zeros(1, 1, 4) for index in range(30)})
    assert len([*itertools.islice(axes, 5)]) == 5
    loaded = load(Deep(), (torch.randn(3, 5, 4), *(torch.randn(2, 3, 4) for _ in range(4))))
    assert [spec.shape for spec in loaded.signature.inputs] == [("batch", 5, 4), *[(2, "batch", 4)] * 4]


@pytest.mark.parametrize(
    "sample", [torch.ones(1, 4), torch.zeros(1, 4), torch.ones(1, 4).long(), torch.zeros(1, 4).bool()]
)
def test_a_sample_of_one_number_is_changed_too(sample: Tensor) -> None:
    changed = dims._change(sample, sample)
    assert (changed.shape, changed.dtype) == (sample.shape, sample.dtype)
    assert not torch.equal(changed, sample)
    words = torch.arange(4)[None]
    assert sorted(dims._change(words, words)[0].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_sample_has_no_numbers_beyond_those_of_the_example(dtype: torch.dtype) -> None:
    """Not even a sample of one number, which another one has to differ from."""
    for seed in range(8):
        example = (torch.rand(2, 16, 2, generator=torch.Generator().manual_seed(seed)) * 64).to(dtype)
        changed = dims._change(example[:1], example)
        assert example.min() <= changed.min() <= changed.max() <= example.max()
        assert (changed != example[:1]).float().mean() > 0.9
        one = dims._change(example[:1, 0, 0], example[:, 0, 0])
        assert one.dtype == dtype
        assert one != example[0, 0, 0]


class Checking(nn.Module):
    """Refuse points that lie outside an image, and what a test adds to that."""

    def __init__(self, accepts: Callable[[Tensor], bool] = lambda points: True) -> None:
        super().__init__()
        self.body, self.accepts = nn.Linear(2, 8), accepts

    def forward(self, points: Tensor) -> Tensor:
        if not bool(((points >= 0) & (points <= 64)).all()) or not self.accepts(points):
            raise ValueError("points must lie inside the image")
        return self.body(points / 64)


@pytest.mark.parametrize("seed", range(3))
def test_a_module_that_checks_its_values_keeps_the_first_dimension_as_its_batch(load, seed: int) -> None:
    torch.manual_seed(seed)
    loaded = load(Checking(), {"points": torch.rand(2, 16, 2) * 64})
    assert [spec.shape for spec in loaded.signature.inputs] == [("batch", 16, 2)]
    assert not any("samples do not change" in note for note in loaded.notes)


@pytest.mark.parametrize(("batch", "rising"), [(3, True), (1, False)], ids=["another sample", "other places"])
def test_values_of_the_example_are_tried_where_a_module_refuses_others(batch: int, rising: bool) -> None:
    """Time comes first here, so that the second dimension is the batch: only the example's pairs are in order."""

    class InOrder(nn.Module):
        def forward(self, pairs: Tensor) -> Tensor:
            if not bool((pairs[..., 0] < pairs[..., 1]).all()) or (rising and bool((pairs.diff(dim=0) < 0).any())):
                raise ValueError("the first number of a pair has to be less than the second")
            return pairs.cumsum(0)

    torch.manual_seed(0)
    example = {"pairs": torch.rand(5, batch, 2).sort(-1).values.cumsum(0)}
    (spec,), _ = dims.choose_specs(_tupled(InOrder()), example, 1)
    assert spec.shape == (5, "batch", 2)


def test_the_first_dimension_is_the_batch_where_all_other_values_are_refused() -> None:
    """Nothing is known then; that points do not change each other's answers tells nothing of the first dimension."""
    example = {"points": (torch.rand(1, 16, 2) * 64).sort(1).values}
    module = Checking(lambda points: points.shape[1] < 3 or bool((points[:, 1:] >= points[:, :-1]).all()))
    (spec,), note = dims.choose_specs(_tupled(module), example, 1)
    assert (spec.shape, note) == (("batch", 16, 2), "")


def _tupled(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *values: (module(*values),)


class OneAtATime(nn.Module):
    """Takes one sequence, in which each place is told of all others: more rows are read as a longer one."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x.reshape(1, -1, x.shape[-1])
        return x + (whole.softmax(1) * whole).sum((1, 2), keepdim=True)


class Ramp(nn.Module):
    """Divides by zero where an image is one pixel high."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1])[:, None] * (2.0 / (x.shape[1] - 1))


@pytest.mark.parametrize("fill", [torch.ones, torch.zeros, torch.randn])
def test_rows_of_one_number_do_not_hide_what_they_do_to_each_other(load, fill: Any) -> None:
    assert load(OneAtATime(), fill(1, 5, 4)).signature.inputs[0].shape[1:] == (5, 4)
    assert load(TimeFirst(states=False, whole=True), fill(5, 3, 4)).signature.inputs[0].shape == (5, "batch", 4)
    assert load(Ramp(), fill(3, 8, 8)).signature.inputs[0].shape == ("batch", 8, 8)
    ids = torch.zeros(5, 3, dtype=torch.long) if fill is torch.zeros else torch.ones(5, 3, dtype=torch.long)
    words = nn.Sequential(nn.Embedding(9, 4), TimeFirst(states=False, whole=True))
    assert load(words, ids).signature.inputs[0].shape == (5, "batch")


@pytest.mark.parametrize("module", [nn.Linear(4, 2), nn.Conv1d(4, 4, 1), lambda_module(lambda x: x - x.mean())])
def test_the_batch_comes_first_where_it_can_and_where_nothing_else_is_one(load, module: nn.Module) -> None:
    loaded = load(module, torch.randn(3, 4, 4) if not isinstance(module, nn.Linear) else torch.randn(3, 4))
    assert loaded.signature.inputs[0].shape[0] == "batch"
    assert not any("the batch is the dimension" in note for note in loaded.notes)


@pytest.mark.parametrize("word", ["", "batch", "time"])
def test_what_no_output_follows_is_no_batch(load, word: str) -> None:
    """A mean of all rows is one answer, whatever a caller calls them."""
    given = [f"x:float32:{word},4"] if word else []
    loaded = load(lambda_module(lambda x: x.mean(0).cumsum(0)), torch.randn(20, 4), *given)
    assert [spec.shape for spec in loaded.signature.inputs] == [(word or "rows", 4)]
    assert (batch_symbol(loaded.signature), fixed_batch(loaded.signature)) == (None, 1)
    assert any(f"no output follows {word or 'rows'!r}" in note for note in loaded.notes)


@pytest.mark.parametrize(
    "answer", [lambda x: (x.mean(0), x * 2), lambda x: x.mean(1)[x.mean(1) > 0], lambda x: x[:, :2].flatten()]
)
def test_one_output_that_follows_it_makes_it_the_batch(load, answer: Any) -> None:
    """An auxiliary answer for all samples changes nothing, nor rows that values choose, nor several for each sample."""
    loaded = load(lambda_module(answer), torch.randn(20, 4))
    assert batch_symbol(loaded.signature) == "batch"


def test_sizes_that_have_to_be_equal_are_advised_to_have_one_name(load) -> None:
    """Only one more of each is taken, for the rounding."""
    squares = lambda_module(lambda x: (y := nn.functional.avg_pool2d(x, 2)) @ y)
    images = torch.randn(2, 1, 16, 16)
    with pytest.raises(SourceError, match="height = width = 8, and not with height = 8 and width = 16") as caught:
        load(squares, images, "x:float32:batch,1,height,width")
    assert (caught.value.remedy or "").endswith("--input x:float32:batch,1,side,side")
    load(lambda_module(lambda x: x.mean((2, 3))), images, "x:float32:batch,1,height,width")


def test_examples_that_nobody_gave_have_the_usual_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an ``hf:`` model; a factory's own stay as they are, and so does the batch."""
    specs = (TensorSpec.parse("x:float32:batch,1,height,4"),)
    options = LoadOptions(inputs=specs, sizes={"height": 6, "batch": 5})
    for takes, height in (("x",), 6), ((), 4):
        built = Built(lambda_module(lambda x: x.mean((2, 3))), {"x": torch.randn(2, 1, 4, 4)}, takes=takes)
        monkeypatch.setattr(factories, "build", lambda source, built=built: built)
        assert torch_model.load(loading.SOURCE, options).example["x"].shape == (2, 1, height, 4)
