"""Example inputs that nobody gives: drawn, or fitted into what ``--input`` says. Sums: test_torch_model.py."""

import pytest
import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import SignatureError, SourceError
from enginesmith.pipeline.frameworks.torch import factories
from enginesmith.pipeline.frameworks.torch import module as torch_model
from enginesmith.pipeline.frameworks.torch.examples import make_example
from enginesmith.pipeline.frameworks.torch.factories import Built
from enginesmith.pipeline.frameworks.torch.module import LoadOptions
from enginesmith.pipeline.tensors import TensorSpec
from loading import ONE, SOURCE, lambda_module


class Add(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left - right


class Boxes(nn.Module):
    """Takes what models of documents take."""

    def forward(
        self,
        input_ids: Tensor,
        bbox: Tensor | None = None,
        table_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: tuple[Tensor] | None = None,
    ) -> Tensor:
        return input_ids


IDS = torch.tensor([[5, 6, 7, 300], [8, 9, 10, 11]])
BUILT = Built(
    Boxes(), {"input_ids": IDS, "bbox": torch.rand(2, 4, 4)}, takes=("input_ids", "bbox", "table_mask", "position_ids")
)


def draw(built: Built, *inputs: str) -> dict[str, Tensor]:
    return make_example(built, [TensorSpec.parse(text) for text in inputs], {})[0]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "uint16"])
def test_an_example_that_was_made_up_has_the_dtype_and_the_sizes_of_the_inputs(dtype: str) -> None:
    example = draw(BUILT, f"input_ids:{dtype}:batch,6", "bbox:float16:batch,6,4")
    assert {name: str(value.dtype) for name, value in example.items()} == {
        "input_ids": f"torch.{dtype}",
        "bbox": "torch.float16",
    }
    assert example["input_ids"].tolist() == IDS[:, [0, 1, 2, 3, 0, 1]].tolist()
    assert example["bbox"].shape == (2, 6, 4)


@pytest.mark.parametrize(
    "inputs", ["input_ids:uint8:batch,length", "input_ids:bool:batch,length", "input_ids:int64:batch"]
)
def test_an_example_is_drawn_anew_where_its_numbers_do_not_fit(inputs: str) -> None:
    values = draw(BUILT, inputs)["input_ids"]
    assert values.max() <= 1
    assert str(values.dtype) == f"torch.{inputs.split(':')[1]}"


def test_masks_hide_nothing_and_positions_are_in_order() -> None:
    example = draw(
        BUILT, "input_ids:int64:batch,length", "table_mask:float32:batch,length", "position_ids:int64:batch,length"
    )
    assert example["table_mask"].tolist() == [[1.0] * 4] * 2
    assert example["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    other = Built(Boxes())  # of which nobody knows what a bool means
    assert draw(other, "table_mask:int32:batch,64")["table_mask"].all()
    assert not draw(other, "table_mask:bool:batch,64")["table_mask"].all()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("words", "which the forward of Boxes does not have"),
        ("labels", "a target of training"),
        ("encoder_outputs", "which is no tensor"),
    ],
)
def test_an_input_that_the_model_does_not_take_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(SignatureError, match=f"--input names {name}, {reason}") as error:
        draw(BUILT, "input_ids:int64:batch,length", f"{name}:int64:batch,length")
    assert error.value.remedy.startswith("it takes input_ids, bbox, table_mask; and, made from these")
    assert error.value.remedy.endswith(", position_ids")


def test_a_model_that_fails_on_inputs_that_were_made_up_is_told_which_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, spec = nn.Linear(3, 2), TensorSpec.parse("input:float32:batch,4")
    built = Built(layer, {"input": torch.ones(2, 4)}, (spec,), takes=("input", "mask"), usual=("input", "mask"))
    monkeypatch.setattr(factories, "build", lambda source: built)
    for options in (LoadOptions(), LoadOptions(inputs=(spec,))):
        with pytest.raises(SourceError, match=r"on inputs that enginesmith made up \(input float32\[2, 4\]\)") as error:
            torch_model.load(SOURCE, options)
        assert "these are --input input:float32:batch,4, and it may need more of mask; or return" in error.value.remedy


@pytest.mark.parametrize("given", [{}, {"time": 30}])
def test_inputs_are_drawn_with_usual_sizes_where_they_are_known(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int]
) -> None:
    """The batch has two rows whatever is usual; where the size is not known, the error says what to give."""
    layer = lambda_module(nn.Conv1d(1, 2, 9))
    monkeypatch.setattr(factories, "build", lambda source: Built(layer))
    specs = (TensorSpec.parse("x:float32:batch,1,time"),)
    options = LoadOptions(inputs=specs, sizes=given and {**given, "batch": 64})
    if given:
        loaded = torch_model.load(SOURCE, options)
        assert loaded.example["x"].shape == (2, 1, 30)
        assert not any("were drawn" in note for note in loaded.notes)
        return
    with pytest.raises(
        SourceError, match=r"on inputs that enginesmith made up \(x float32\[2, 1, 8\]\) failed"
    ) as error:
        torch_model.load(SOURCE, options)
    assert "OPT, of --shape time=MIN:OPT:MAX" in error.value.remedy


def test_lengths_are_drawn_as_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are 0 are refused, as by packed sequences; others may be too long."""
    monkeypatch.setattr(factories, "build", lambda source: Built(Add()))
    specs = tuple(map(TensorSpec.parse, ("left:float32:batch", "lengths:int64:batch")))
    assert torch_model.load(SOURCE, LoadOptions(inputs=specs)).example["lengths"].tolist() == [1, 1]


def test_what_is_drawn_beside_an_example_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Add()
    monkeypatch.setattr(factories, "build", lambda source: Built(layer, {"left": ONE}, takes=("left", "right")))
    specs = tuple(TensorSpec.parse(f"{name}:float32:batch,width") for name in ("left", "right"))
    for sizes, shape in (({}, ONE.shape), ({"width": 30}, (2, 30))):
        loaded = torch_model.load(SOURCE, LoadOptions(inputs=specs, sizes=sizes))
        assert torch.equal(loaded.example["left"], torch.ones(shape))
        assert loaded.example["right"].shape == shape
        assert not any("were drawn" in note for note in loaded.notes)


def test_a_size_that_nobody_gives_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factories, "build", lambda source: Built(lambda_module(nn.Conv1d(1, 2, 3))))
    loaded = torch_model.load(SOURCE, LoadOptions(inputs=(TensorSpec.parse("x:float32:batch,1,time"),)))
    assert sum(note.startswith("inputs were drawn with time = 8: --shape ") for note in loaded.notes) == 1


def test_a_model_that_lacks_what_it_needs_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, spec = nn.Linear(4, 2), TensorSpec.parse("input:float32:batch,width")
    monkeypatch.setattr(factories, "build", lambda source: Built(layer, remedy="name the token"))
    with pytest.raises(SourceError) as error:
        torch_model.load(SOURCE, LoadOptions(inputs=(spec,)))
    assert error.value.remedy == "name the token"
