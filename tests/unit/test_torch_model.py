"""A loaded module: names of inputs and outputs, dynamic dimensions, and what is kept of it."""

import dataclasses
import itertools
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import SignatureError, SourceError, StoreError
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.frameworks.torch import dims, factories, saved
from enginesmith.pipeline.frameworks.torch import module as torch_model
from enginesmith.pipeline.frameworks.torch.factories import Built
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, LoadOptions, flatten
from enginesmith.pipeline.frameworks.torch.saved import parameters_left_empty
from enginesmith.pipeline.tensors import TensorSpec

SOURCE = Source(form="zoo", text="test", target="test")
LABEL = namedtuple("LABEL", "best score")


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    loss: Tensor | None = None


class Add(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left - right


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Loads a module as if a factory had built it."""

    def run(module: nn.Module, example: Any = None, *inputs: str, **processing: tuple[str, ...]) -> LoadedModel:
        monkeypatch.setattr(factories, "build", lambda source: Built(module.eval(), example))
        specs, request = tuple(TensorSpec.parse(text) for text in inputs), ProcessingRequest(**processing)
        return torch_model.load(SOURCE, LoadOptions(inputs=specs, processing=request))

    return run


def lambda_module(function: Any) -> nn.Module:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    return Wrapped()


ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.Dropout(0.5), True),
        (nn.BatchNorm1d(3), True),
        (nn.MultiheadAttention(3, 1, dropout=0.1), True),
        (nn.Dropout(0.0), False),
        (nn.InstanceNorm1d(3), False),
        (nn.Dropout(0.5).eval(), False),
    ],
)
def test_a_module_in_training_mode_is_noted(layer: nn.Module, told: bool) -> None:
    found = factories._call(SOURCE, nn.Sequential(nn.Linear(3, 3), layer))
    assert [note.partition(";")[0] for note in found.notes] == ["the module was in training mode"] * told


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (ONE, ["output"]),
        ((ONE, ONE), ["output_0", "output_1"]),
        ([ONE, (ONE, None, ONE)], ["output_0", "output_1_0", "output_1_2"]),
        ({"a": ONE, "b": {"c": ONE, "d": (ONE,)}}, ["a", "b_c", "b_d_0"]),
        (Output(ONE, (ONE, ONE)), ["logits", "hidden_0", "hidden_1"]),
        (LABEL(ONE, ONE), ["best", "score"]),
        (None, []),
    ],
)
def test_outputs_get_names(value: Any, names: list[str]) -> None:
    tensors, others = flatten(value)
    assert list(tensors) == names
    assert others == []


def test_outputs_that_are_no_tensors_are_named(load) -> None:
    assert flatten({"a": ONE, "b": "text", "c": [3]})[1] == ["b (str)", "c_0 (int)"]
    loaded = load(lambda_module(lambda x: {"y": x, "label": "cat"}), ONE)
    assert any("label (str)" in note for note in loaded.notes)
    with pytest.raises(SourceError, match="returns no tensor"):
        load(lambda_module(lambda x: "cat"), ONE)


@pytest.mark.parametrize(
    "example", [(ONE, ONE * 2), [ONE, ONE * 2], {"right": ONE * 2, "left": ONE}, (ONE.numpy(), ONE.numpy() * 2)]
)
def test_examples_in_every_form(load, example: Any) -> None:
    loaded = load(Add(), example)
    assert set(loaded.example) == {"left", "right"}
    given = [loaded.example[spec.name] for spec in loaded.signature.inputs]
    assert loaded.module(*given)[0].tolist() == (ONE - ONE * 2).tolist()


def test_keyword_only_inputs_and_open_ended_ones(load) -> None:
    class Keywords(nn.Module):
        def forward(self, *, left: Tensor, **others: Tensor) -> Tensor:
            return left - others["right"]

    class Wrapper(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = Add()(*args, **kwargs)
            return found

    for module in (Keywords(), Wrapper()):
        assert load(module, {"right": ONE * 5, "left": ONE}).module(ONE * 5, ONE)[0].tolist() == (ONE * -4).tolist()
    loaded = load(Wrapper(), (ONE, ONE * 5))
    assert list(loaded.example) == ["input_0", "input_1"]
    assert loaded.module(ONE, ONE * 5)[0].tolist() == (ONE * -4).tolist()


def test_the_batch_is_dynamic_unless_the_model_fixes_it(load) -> None:
    loaded = load(nn.Linear(3, 4), ONE)
    assert [str(spec) for spec in (*loaded.signature.inputs, *loaded.signature.outputs)] == [
        "input:float32:batch,3",
        "output:float32:batch,4",
    ]
    assert loaded.dynamic_sizes == {"batch": 2}
    fixed = load(lambda_module(lambda x: x.reshape(2, 3)), ONE)
    assert str(fixed.signature.inputs[0]) == "x:float32:2,3"
    assert any("batch of 2 only" in note for note in fixed.notes)
    single = load(lambda_module(lambda x: x.reshape(1, 3)), ONE[:1])
    assert str(single.signature.inputs[0]) == "x:float32:1,3"
    with pytest.raises(SourceError, match="runs with batch = 2, and with no other"):
        load(lambda_module(lambda x: x.reshape(2, 3)), ONE, "x:float32:batch,3")


def test_sizes_that_could_vary_are_suggested(load) -> None:
    wave = nn.Sequential(nn.Conv1d(1, 2, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2, 2))
    (note,) = load(wave, torch.ones(2, 1, 40), "input:float32:batch,1,40").notes
    assert note.endswith("--input input:float32:batch,1,length --shape length=MIN:40:MAX")
    image = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    (note,) = load(image, torch.ones(2, 3, 16, 16)).notes
    assert "--input input:float32:batch,3,height,width --shape height=MIN:16:MAX --shape width=MIN:16:MAX" in note

    (note,) = load(lambda_module(lambda x: x.mean((1, 2))), torch.ones(2, 8, 8)).notes
    assert "--input x:float32:batch,height,width --shape height=MIN:8:MAX --shape width=MIN:8:MAX" in note
    (note,) = load(lambda_module(lambda x: (x + x.mT).mean((1, 2))), torch.ones(2, 8, 8)).notes
    assert "--input x:float32:batch,length,length --shape length=MIN:8:MAX" in note

    class Both(nn.Module):
        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            return source.mean((1, 2)) + target.mean((1, 2))

    (note,) = load(Both(), {"source": torch.ones(2, 40, 1), "target": torch.ones(2, 14, 1)}).notes
    assert "target:float32:batch,target_length,1 --shape length=MIN:40:MAX --shape target_length=MIN:14:MAX" in note
    (note,) = load(lambda_module(lambda x: x.mean((1, 2))), torch.ones(2, 40, 14)).notes
    assert "--input x:float32:batch,length,length_2 --shape" in note
    fixed = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(76, 2))
    assert load(fixed, torch.ones(2, 1, 40)).notes == ()
    assert load(wave, torch.ones(2, 1, 40), "input:float32:batch,1,length").notes == ()


def test_inputs_without_a_batch_are_fixed_and_said_to_be(load) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4)

        def forward(self, x: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
            return x + self.bag(ids, offsets)

    feeds = {"x": torch.ones(3, 4), "ids": torch.arange(8), "offsets": torch.tensor([0, 2, 5])}
    (note,) = load(Bags(), feeds).notes
    assert "have no batch, as their first sizes differ (x 3, ids 8, offsets 3): all are fixed" in note
    words = note.partition("the largest: --input ")[2].split(" --input ")
    assert words == ["x:float32:length_1,4", "ids:int64:length_2", "offsets:int64:length_1"]
    loaded = load(Bags(), feeds, *words)
    assert (loaded.dynamic_sizes, loaded.notes) == ({"length_1": 3, "length_2": 8}, ())

    class Table(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return (x[:, None] * table.reshape(5, 4)).sum((1, 2), keepdim=True).cumsum(0)

    (note,) = load(Table(), {"x": torch.ones(3, 4), "table": torch.ones(5, 4)}).notes
    assert note.endswith("all are fixed, and a call counts as one")


def test_a_table_beside_samples_leaves_them_a_batch(load) -> None:
    class Nearest(nn.Module):
        def forward(self, x: Tensor, table: Tensor, shift: Tensor) -> Tensor:
            return torch.cdist(x + shift, table)

    for batch in (1, 2):
        feeds = {"x": torch.rand(batch, 4), "table": torch.rand(7, 4), "shift": torch.rand(batch, 4)}
        loaded = load(Nearest(), feeds)
        assert list(map(str, loaded.signature.inputs)) == [
            "x:float32:batch,4",
            "table:float32:7,4",
            "shift:float32:batch,4",
        ]
        assert "the same for all samples, without a batch: 'table'" in loaded.notes


def test_suggested_sizes_are_those_of_the_raw_input(load) -> None:
    image = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    words = {"prepend": ("uint8", "nhwc"), "append": ("softmax",)}
    (note,) = load(image, torch.ones(2, 3, 16, 16), **words).notes
    options = "--input input:uint8:batch,height,width,3 --shape height=MIN:16:MAX --shape width=MIN:16:MAX"
    assert note.endswith(f"for those beside --prepend uint8,nhwc: {options}")
    suggested = load(image, torch.ones(2, 3, 16, 16), "input:uint8:batch,height,width,3", **words)
    assert suggested.signature.symbols == ("batch", "height", "width")
    assert load(image, torch.ones(2, 3, 16, 16), prepend=("resize",)).notes == ()


def test_output_dimensions_follow_the_inputs(load) -> None:
    loaded = load(lambda_module(lambda x: (x.mT, x.sum(), x.repeat(1, 2), x.new_zeros(7))), ONE, "x:float32:n,m")
    shapes = [spec.shape for spec in loaded.signature.outputs]
    assert shapes == [("m", "n"), (), ("n", "output_2_dim_1"), (7,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_a_dtype_that_cannot_be_fed_is_told_with_what_has_it(load, dtype: torch.dtype) -> None:
    word = str(dtype).removeprefix("torch.")
    within = "torch.view_as_complex inside" if dtype.is_complex else f"cast it to {word} inside"
    with pytest.raises(SourceError, match=f"the input 'x' is {word}") as error:
        load(lambda_module(torch.abs), ONE.to(dtype))
    assert within in error.value.remedy
    with pytest.raises(SourceError, match=f"the output 'sum' is {word}") as error:
        load(lambda_module(lambda x: {"same": x, "sum": x.to(dtype)}), ONE)
    assert ("return torch.view_as_real" if dtype.is_complex else "cast it to float32") in error.value.remedy


def test_inputs_are_made_up_from_their_specification(load) -> None:
    loaded = load(nn.Embedding(4, 3), None, "ids:int64:batch,length")
    assert loaded.example["ids"].dtype == torch.int64
    assert tuple(loaded.example["ids"].shape) == (2, 8)
    with pytest.raises(SourceError, match=r"no example inputs.*\n.*--input"):
        load(nn.Linear(3, 4))


@pytest.mark.parametrize(
    ("example", "inputs", "error", "message"),
    [
        ({"left": ONE, "right": ONE}, ["a:float32:2,3", "b:float32:2,3"], SignatureError, "--input names a, b"),
        ((ONE, ONE), ["left:int64:2,3", "right:float32:2,3"], SignatureError, "--input says.*expected left:int64:2,3"),
        ((ONE, torch.ones(4, 3)), ["left:float32:n,3", "right:float32:n,3"], SignatureError, "with n = 2"),
        ((ONE, "text"), [], SourceError, "'right' is a str, not a tensor"),
        ((ONE, ONE.bfloat16()), [], SourceError, "bfloat16"),
        ((ONE, torch.ones(5)), [], SourceError, "running the model on its example inputs failed"),
    ],
)
def test_examples_that_do_not_fit(load, example: Any, inputs: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(Add(), example, *inputs)


def test_outputs_called_as_an_input_get_names_of_their_own(load) -> None:
    class Recurrent(nn.Module):
        def forward(self, x: Tensor, h: Tensor, h_out: Tensor) -> dict[str, Tensor]:
            return {"h": h + x, "y": x, "h_out": h_out * 2}

    loaded = load(Recurrent(), {"x": ONE, "h": ONE, "h_out": ONE})
    assert [spec.name for spec in loaded.signature.outputs] == ["h_out_out", "y", "h_out_out_out"]
    assert loaded.signature.returns == {"h": "h_out_out", "y": "y", "h_out": "h_out_out_out"}
    assert [float(value[0, 0]) for value in loaded.module(ONE, ONE, ONE)] == [2.0, 1.0, 2.0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        return found


def stored(folder: Path) -> Artifact:
    return Artifact(kind="torch", path=folder / saved.RECORD, sha256="", bytes=0)


@pytest.mark.parametrize("part_bytes", [saved._PART_BYTES, 12])
def test_what_is_stored_comes_back_with_its_weights(
    part_bytes: int, load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "_PART_BYTES", part_bytes)
    loaded = load(Tied(), ONE)
    saved.save(loaded, Source(form="zoo", text="digits", target="digits"), LoadOptions(), tmp_path)
    fresh = Tied()
    nn.init.zeros_(fresh.first.weight)
    monkeypatch.setattr(factories, "build", lambda source: Built(fresh.eval().requires_grad_(False)))
    again = saved.load_artifact(stored(tmp_path))
    assert again.signature == loaded.signature
    torch.testing.assert_close(again.module(ONE)[0], loaded.module(ONE)[0])
    assert fresh.second.weight is fresh.first.weight
    assert len(load_file(tmp_path / "state.safetensors")) == len(fresh.state_dict()) - 1  # the tied one once
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert saved.read_example(stored(tmp_path))["x"].tolist() == ONE.tolist()

    monkeypatch.setattr(factories, "build", lambda source: Built(nn.Linear(3, 3)))
    with pytest.raises(SourceError, match="no longer builds the module"):
        saved.load_artifact(stored(tmp_path))


def test_a_full_disk_is_told_from_other_faults(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(message: str) -> None:
        def save_file(*args: object) -> None:
            raise SafetensorError(message)

        monkeypatch.setattr("safetensors.torch.save_file", save_file)

    loaded = load(nn.Linear(3, 3), ONE)
    refuse("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(StoreError, match=r"no space left.*\n.*free some space"):
        saved.save(loaded, SOURCE, LoadOptions(), tmp_path)
    refuse("something else")
    with pytest.raises(SafetensorError):
        saved.save(loaded, SOURCE, LoadOptions(), tmp_path)


class Buffer(nn.Module):
    """Adds as much of a table as the input is long; where it is too short, it makes a longer one."""

    def __init__(self, table: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.ones(x.shape[1])
        return x + self.table[: x.shape[1]]


@pytest.mark.parametrize("table", [None, torch.ones(2), torch.ones(3)])
def test_a_tensor_that_is_made_at_the_first_call_is_named(load, table: Tensor | None) -> None:
    with pytest.raises(SourceError, match=r"makes 'table' when it is called, or changes its size\n.*in __init__"):
        load(Buffer(table), ONE, "x:float32:batch,length")
    assert load(Buffer(torch.ones(4)), ONE, "x:float32:batch,3").signature.inputs[0].shape == ("batch", 3)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda: None, "returned None"),
        (lambda: 7, "returned an int"),
        (lambda: (nn.Linear(2, 2), ONE, ONE), "returned a tuple"),
        (lambda: nn.Linear(2, 2).state_dict(), "state dict"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "'0.weight' has no size before the first call"),
        (lambda: Buffer(torch.eye(2).to_sparse()), "keeps 'table' as sparse_coo"),
        (lambda depth: None, r"missing a required argument: 'depth'\n.*\(depth\)"),
    ],
)
def test_what_a_factory_may_not_give(monkeypatch: pytest.MonkeyPatch, result: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        factories._call(SOURCE, result)


def test_a_tensor_may_be_the_example_of_several_inputs(load, tmp_path: Path) -> None:
    saved.save(load(Add(), (ONE, ONE)), resolve("digits"), LoadOptions(), tmp_path)
    assert [value.tolist() for value in saved.read_example(stored(tmp_path)).values()] == [ONE.tolist()] * 2


@pytest.mark.parametrize(
    ("args", "kwargs", "inputs"),
    [
        ((ONE, None, 2.0), {}, ["x"]),
        ((ONE,), {"scale": 3}, ["x"]),
        (([ONE, ONE * 2],), {}, ["x_0", "x_1"]),
        (({"a": ONE},), {"extra": ONE}, ["x_a", "extra"]),
    ],
)
def test_an_exported_program_gets_its_tensors_and_what_else_it_was_exported_with(
    tmp_path: Path, args: Any, kwargs: Any, inputs: list[str]
) -> None:
    class Net(nn.Module):
        def forward(self, x: Any, extra: Tensor | None = None, scale: float = 1.0) -> Tensor:
            tensors = [x] if isinstance(x, Tensor) else [*x.values()] if isinstance(x, dict) else x
            return sum([value * scale for value in tensors], torch.zeros(()) if extra is None else extra)

    torch.export.save(torch.export.export(Net(), args, kwargs), tmp_path / "net.pt2")
    loaded = torch_model.load(resolve(f"{tmp_path}/net.pt2"), LoadOptions())
    assert [spec.name for spec in loaded.signature.inputs] == inputs
    torch.testing.assert_close(loaded.answers[0], Net()(*args, **kwargs))


NET = """
import torch
from torch import nn

hidden = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight
        self.register_buffer("shift", nn.init.normal_(torch.empty(4)), persistent=False)
        {extra}

    def forward(self, x):
        return self.tied(self.layer(x)) + self.shift {use}

def build():
    return Net(), torch.randn(2, 4)
"""


def round_trip(tmp_path: Path, extra: str = "pass", use: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a module as it was loaded, and as it comes back from its artifact."""
    file = tmp_path / f"net_{tmp_path.name}.py"
    file.write_text(NET.format(extra=extra, use=use))
    source, options = resolve(f"{file}:build"), LoadOptions(seed=3)
    loaded = torch_model.load(source, options)
    saved.save(loaded, source, options, tmp_path)
    artifact = Artifact(kind="torch", path=tmp_path / saved.RECORD, sha256="", bytes=0)
    again = saved.load_artifact(artifact)
    x = torch.randn(5, 4)
    return loaded.module(x)[0], again.module(x)[0]


def test_parameters_are_listed_and_buffers_are_filled() -> None:
    with parameters_left_empty():
        layer = nn.Linear(8, 8)
        plain = nn.init.constant_(torch.zeros(3), 2.0)
    with parameters_left_empty():
        assert nn.init.ones_(layer.weight) is layer.weight
    assert not torch.equal(layer.weight, torch.ones(8, 8))
    assert plain.tolist() == [2.0, 2.0, 2.0]
    assert nn.init.constant_(nn.Parameter(torch.zeros(1)), 3.0).item() == 3.0


@pytest.mark.parametrize(
    ("extra", "frozen"),
    [("self.table = nn.Parameter(torch.ones(4), False)", ("table",)), ("self.layer.requires_grad_(False)", ())],
)
def test_parameters_that_the_factory_froze_are_known(tmp_path: Path, extra: str, frozen: tuple[str, ...]) -> None:
    file = tmp_path / f"frozen_{len(frozen)}.py"
    file.write_text(NET.format(extra=extra, use=""))
    source, options = resolve(f"{file}:build"), LoadOptions()
    loaded = torch_model.load(source, options)
    saved.save(loaded, source, options, tmp_path)
    assert loaded.frozen == saved.load_artifact(stored(tmp_path)).frozen == frozen


def test_a_module_that_changes_its_input_gets_copies(tmp_path: Path) -> None:
    file = tmp_path / "in_place.py"
    file.write_text(NET.format(extra="pass", use="+ x.sub_(0.5)"))
    source, options = resolve(f"{file}:build"), LoadOptions(processing=ProcessingRequest(append=("sigmoid",)))
    loaded, x = torch_model.load(source, options), torch.zeros(2, 4)
    saved.save(loaded, source, options, tmp_path)
    for each in (loaded, loaded.without_processing, saved.load_artifact(stored(tmp_path))):
        each.module(x)
        assert x.tolist() == [[0.0] * 4] * 2


def test_tied_weights_and_hidden_buffers_come_back(tmp_path: Path) -> None:
    before, after = round_trip(tmp_path)
    assert torch.equal(before, after)


def test_a_parameter_the_module_does_not_know_of_is_still_filled(tmp_path: Path) -> None:
    secret = "self.secret = [nn.init.ones_(nn.Parameter(torch.empty(4)))]"
    before, after = round_trip(tmp_path, secret, "+ self.secret[0]")
    assert torch.equal(before, after)


class TimeFirst(nn.Module):
    """As recurrent layers are by default: [time, batch, features]; with states, [layers, batch, features]."""

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
        (lambda_module(lambda x: x.argmax()), [(4, 8)], [("batch", 8)]),
        (Scale(), [(32, 10), (10,)], [("batch", 10), (10,)]),
        (Scale(), [(32, 10), ()], [("batch", 10), ()]),
        (Louder(), [(5, 3, 4), ()], [(5, "batch", 4), ()]),
        (lambda_module(lambda x: torch.cat([x, x], 1).sum()), [(2, 0, 8)], [("batch", 0, 8)]),
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
    changed = dims._change(sample)
    assert (changed.shape, changed.dtype) == (sample.shape, sample.dtype)
    assert not torch.equal(changed, sample)
    words = torch.arange(4)[None]
    assert sorted(dims._change(words)[0].tolist()) == [0, 1, 2, 3]


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


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 2), nn.Conv1d(4, 4, 1), lambda_module(lambda x: x - x.mean()), lambda_module(torch.sum)]
)
def test_the_batch_comes_first_where_it_can_and_where_nothing_else_is_one(load, module: nn.Module) -> None:
    loaded = load(module, torch.randn(3, 4, 4) if not isinstance(module, nn.Linear) else torch.randn(3, 4))
    assert loaded.signature.inputs[0].shape[0] == "batch"
    assert not any("the batch is the dimension" in note for note in loaded.notes)
