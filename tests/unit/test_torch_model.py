"""A loaded module: names of inputs and outputs, and dynamic dimensions."""

import dataclasses
import importlib
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loading
from enginesmith.pipeline.errors import SignatureError, SourceError
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import dims, factories, saved
from enginesmith.pipeline.frameworks.torch import module as torch_model
from enginesmith.pipeline.frameworks.torch.factories import Built
from enginesmith.pipeline.frameworks.torch.module import LoadOptions, flatten
from enginesmith.pipeline.tensors import TensorSpec
from loading import ONE, SOURCE, lambda_module, stored

load = loading.load  # a fixture


LABEL = namedtuple("LABEL", "best score")


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    loss: Tensor | None = None


class Add(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left - right


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


def test_a_detector_of_one_image_has_a_fixed_batch_and_any_number_of_boxes(load) -> None:
    """What it finds in the first image of a batch is all that it answers; a mean of all samples is no such answer."""
    find, example = lambda_module(lambda x: (x[0] - x[0].mean())[x[0] > 0]), torch.tensor([[1.0, 2.0, 3.0, -4.0]])
    loaded = load(find, example)
    assert [str(spec) for spec in (*loaded.signature.inputs, *loaded.signature.outputs)] == [
        "x:float32:1,4",
        "output:float32:output_dim_0",
    ]
    assert any("answers the first sample alone" in note for note in loaded.notes)
    mean = load(lambda_module(lambda x: x.mean(0).cumsum(0)), torch.tensor([[1.0, 2.0, 3.0]]))
    assert [str(spec) for spec in (*mean.signature.inputs, *mean.signature.outputs)] == [
        "x:float32:rows,3",
        "output:float32:3",
    ]
    assert str(load(find, example, "x:float32:batch,4").signature.inputs[0]) == "x:float32:batch,4"


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

    feeds = {"x": torch.ones(3, 4), "table": torch.ones(5, 4)}
    (note,) = load(Table(), feeds).notes
    assert note.endswith("the largest: --input x:float32:length_1,4 --input table:float32:5,4")

    class Tables(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x.reshape(3, 4).sum() + table.reshape(5, 4)

    (note,) = load(Tables(), feeds).notes
    assert note.endswith("all are fixed, and a call counts as one")


def test_edges_are_open_where_they_come_last_and_nodes_from_the_examples_on(load) -> None:
    class Graph(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
            return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] * weight.reshape(-1, 4))

    edges = torch.tensor([[0, 9, 3, 4, 5, 6], [9, 1, 2, 3, 8, 7]])
    (note,) = load(Graph(), {"x": torch.ones(10, 4), "edge_index": edges, "weight": torch.ones(6, 4)}).notes
    options = note.partition("for others: ")[2].split()
    words = ["x:float32:length_1,4", "edge_index:int64:2,length_2", "weight:float32:length_2,4"]
    assert options[1::2] == [*words, "length_1=10:10:MAX", "length_2=6:6:MAX"]
    assert load(Graph(), {"x": torch.ones(10, 4), "edge_index": edges, "weight": torch.ones(6, 4)}, *words).notes == ()


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
        ((ONE, ["text"]), [], SourceError, "'right' is a list, not a tensor"),
        ({"left": ONE, "write": True}, [], SourceError, "'write' is a bool, not a tensor"),
        ((ONE, "text"), [], SourceError, "running the model on its example inputs failed"),
        ((ONE, ONE.bfloat16()), [], SourceError, "bfloat16"),
        ((ONE, torch.ones(5)), [], SourceError, "running the model on its example inputs failed"),
    ],
)
def test_examples_that_do_not_fit(load, example: Any, inputs: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(Add(), example, *inputs)


class Scale(nn.Module):
    def forward(self, x: Tensor, double: bool = True, mask: Tensor | None = None, by: float = 1.0) -> Tensor:
        scaled = x * by * (2 if double else 1)
        return scaled if mask is None else scaled * mask


@pytest.mark.parametrize(
    ("example", "constants", "inputs"),
    [
        ({"x": ONE, "double": False, "by": 3}, {"double": False, "by": 3}, ["x"]),
        ((ONE, False, None, 3.0), {"double": False, "mask": None, "by": 3.0}, ["x"]),
        ((ONE, False, ONE, 3.0), {"double": False, "by": 3.0}, ["x", "mask"]),
    ],
)
def test_arguments_that_are_no_arrays_are_the_same_in_each_call(
    load, example: Any, constants: dict[str, Any], inputs: list[str]
) -> None:
    loaded, extended = load(Scale(), example), load(Scale(), example, append=("softmax",))
    assert extended.signature.constants == constants
    assert loaded.signature.constants == constants
    assert list(loaded.example) == [spec.name for spec in loaded.signature.inputs] == inputs
    assert any(note.startswith("always called with double = False, ") for note in loaded.notes)
    for each in (loaded, extended.without_processing):
        assert torch.equal(each.module(*[ONE * 2] * len(inputs))[0], ONE * (6 if len(inputs) == 1 else 12))


def test_inputs_of_which_the_module_refuses_negative_indices_are_known(load) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(5, 3), nn.Parameter(torch.ones(5, 3))

        def forward(self, words: Tensor, places: Tensor, mask: Tensor) -> Tensor:
            return (self.words(words) + self.places[places]) * mask[..., None]

    numbers = torch.tensor([[1, 2], [3, 4]])
    loaded = load(Tables(), {"words": numbers, "places": numbers, "mask": numbers % 2})
    assert loaded.signature.unsigned == ("words",)
    assert load(Add(), (ONE, ONE)).signature.unsigned == ()


def test_tables_that_inputs_are_indices_of_are_found(load) -> None:
    """As in graphs; the place is one in the state, too, which has fewer."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.few, self.places = nn.Embedding(9, 2), nn.Embedding(7, 2), nn.Embedding(9, 2)

        def forward(self, ids: Tensor, cast: Tensor, shifted: Tensor, place: Tensor, state: Tensor) -> Tensor:
            cast = cast.long()
            read = self.few(ids) + self.words(ids) + self.words(cast) + self.words(shifted + 1) + self.places(place)
            return read + state[place]

    numbers = torch.tensor([[1], [3]])
    given = {"ids": numbers, "cast": numbers.int(), "shifted": numbers, "place": numbers, "state": torch.ones(5, 2)}
    assert load(Step(), given).signature.tables == {"ids": 7, "cast": 9}
    assert load(Add(), (ONE, ONE)).signature.tables == {}


def test_outputs_called_as_an_input_get_names_of_their_own(load) -> None:
    class Recurrent(nn.Module):
        def forward(self, x: Tensor, h: Tensor, h_out: Tensor) -> dict[str, Tensor]:
            return {"h": h + x, "y": x, "h_out": h_out * 2}

    loaded = load(Recurrent(), {"x": ONE, "h": ONE, "h_out": ONE})
    assert [spec.name for spec in loaded.signature.outputs] == ["h_out_out", "y", "h_out_out_out"]
    assert loaded.signature.returns == {"h": "h_out_out", "y": "y", "h_out": "h_out_out_out"}
    assert [float(value[0, 0]) for value in loaded.module(ONE, ONE, ONE)] == [2.0, 1.0, 2.0]


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


@pytest.mark.filterwarnings("ignore")  # of the exporter, which is an old one
def test_the_advice_for_a_torchscript_module_leads_to_a_graph_with_a_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.jit.trace(nn.Linear(3, 2), ONE).save("net.pt")
    with pytest.raises(SourceError, match=r"'net\.pt' is a TorchScript module") as of_file:
        resolve("net.pt")
    module = torch.jit.load("net.pt")
    with pytest.raises(SourceError, match="returned a TorchScript module") as of_factory:
        factories._call(SOURCE, lambda: module)
    for error in (of_file.value, of_factory.value):
        code = error.remedy.partition("give that: ")[2]
        eval(code, {"torch": torch, "module": module, "example": ONE})
        assert [spec.shape for spec in model_file.signature(Path("model.onnx")).inputs] == [("batch", 3)]
        Path("model.onnx").unlink()


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
            return sum((value * scale for value in tensors), torch.zeros(()) if extra is None else extra)

    torch.export.save(torch.export.export(Net(), args, kwargs), tmp_path / "net.pt2")
    loaded = torch_model.load(resolve(f"{tmp_path}/net.pt2"), LoadOptions())
    assert [spec.name for spec in loaded.signature.inputs] == inputs
    torch.testing.assert_close(loaded.answers[0], Net()(*args, **kwargs))


def test_samples_of_the_data_stand_in_for_an_example_that_would_be_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example of the source's own stays; the data's files are no part of the model."""
    spec, data = TensorSpec.parse("x:float32:batch,3"), tmp_path / "seven_rows.py"
    data.write_text("import numpy as np\nrows = np.full((2, 3), 7, np.float32)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def read(specs: Any, choose: Any) -> Any:
        assert (specs, choose) == ((spec,), None)
        monkeypatch.delitem(sys.modules, data.stem, raising=False)
        return {"x": importlib.import_module(data.stem).rows}, (data,)

    def load(built: Built, read: Any = read) -> torch_model.LoadedModel:
        monkeypatch.setattr(factories, "build", lambda source: built)
        return torch_model.load(SOURCE, LoadOptions(inputs=() if built.inputs else (spec,)), read)

    layer, own = nn.Linear(3, 2), {"x": ONE}
    for built, expected in (
        (Built(layer), 7),
        (Built(layer, own, (spec,), takes=("x", "y")), 7),
        (Built(layer, own, (spec,)), 1),
        (Built(layer, own), 1),
    ):
        monkeypatch.delitem(sys.modules, data.stem, raising=False)
        loaded = load(built)
        assert (loaded.example["x"] == expected).all()
        assert data not in loaded.files
    assert not (load(Built(layer), None).example["x"] == 7).any()
    with pytest.raises(SourceError, match="running the model on the first samples of the data failed"):
        load(Built(nn.Linear(4, 2)))


class Cached(nn.Module):
    """Answer sizes that follow two inputs: one output is a sum at every size, one beside the example's alone."""

    def forward(self, ids: Tensor, mask: Tensor, past: Tensor) -> dict[str, Tensor]:
        keys = torch.cat([past, ids], 1) * mask
        return {"keys": keys, "longer": nn.functional.pad(ids, (1, 0)), "often": keys.repeat(1, 1 + ids.shape[1] // 5)}


CACHED = ("ids:float32:batch,length", "mask:float32:batch,past+length", "past:float32:batch,past")


def test_output_dimensions_may_be_sums(load) -> None:
    example = (torch.ones(2, 3), torch.ones(2, 8), torch.ones(2, 5))
    signature = load(Cached(), example, *CACHED).signature
    dims = ["past+length", "length+1", "often_dim_1"]
    assert [spec.shape for spec in signature.outputs] == [("batch", dim) for dim in dims]


def test_a_third_size_with_other_outputs_confirms_no_sum() -> None:
    sums, answered = {("y", 1): "past+length"}, [(2, 9), (2, 9)]
    found = dims._confirm_sums(sums, lambda sizes: answered, ["y"], {"past": 5, "length": 3}, {"past": 6, "length": 4})
    assert found == {}


@pytest.mark.parametrize("example", [None, {"ids": torch.ones(3, 4), "mask": torch.ones(3, 4)}])
def test_an_example_is_made_up_with_sums(load, monkeypatch: pytest.MonkeyPatch, example: Any) -> None:
    """Where the example of a source has no cache, its mask is that of the ids alone."""
    takes = ("ids", "mask", "past") if example else ()
    monkeypatch.setattr(factories, "build", lambda source: Built(Cached(), example, takes=takes))
    inputs = tuple(TensorSpec.parse(text) for text in CACHED)
    given = torch_model.load(SOURCE, LoadOptions(inputs=inputs)).example
    length = 4 if example else 8
    assert [value.shape[1] for value in given.values()] == [length, 8 + length, 8]


def test_an_example_that_does_not_fit_a_sum(load) -> None:
    with pytest.raises(SignatureError, match=r"expected mask.* with past\+length = 5\+3 = 8"):
        load(Cached(), (torch.ones(2, 3), torch.ones(2, 7), torch.ones(2, 5)), *CACHED)


def test_sums_of_an_exported_program_stay_sums(tmp_path: Path) -> None:
    batch, past, length = (torch.export.Dim(name, min=1) for name in ("batch", "past", "length"))
    shapes = ({0: batch, 1: length}, {0: batch, 1: torch.export.Dim.AUTO}, {0: batch, 1: past})

    class Sum(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor, past: Tensor) -> Tensor:
            return torch.cat([past, ids], 1) * mask

    example = (torch.ones(2, 3), torch.ones(2, 8), torch.ones(2, 5))
    torch.export.save(torch.export.export(Sum(), example, dynamic_shapes=shapes), tmp_path / "net.pt2")
    signature = torch_model.load(resolve(f"{tmp_path}/net.pt2"), LoadOptions()).signature
    words = ("ids_dim_1", "past_dim_1")
    assert [spec.shape[1] for spec in signature.inputs] in (
        [words[0], "+".join(order), words[1]] for order in (words, words[::-1])
    )
    assert signature.outputs[0].shape[1] == signature.inputs[1].shape[1]
