"""Export of modules small enough to see through."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxscript import opset18 as op18
from torch.onnx._internal.exporter import _registration

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, ir, model_file, validation
from enginesmith.pipeline.passes.export import agreement, export, names, translations
from enginesmith.pipeline.passes.export.registry import keep_registry
from enginesmith.pipeline.system.device import Device
from exporting import exported, loaded


def affine() -> Any:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    return loaded(module, {"input": torch.ones(1, 4)}, {"input": ("batch", 4)}, ["out:float32:batch,3"])


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export_keeps_names_dimensions_and_module_paths(tmp_path: Path, exporter: str) -> None:
    model = affine()
    effect = exported(tmp_path, model, exporter=exporter)
    validation.check(tmp_path / effect.file)
    assert effect.signature == model.signature
    data = (tmp_path / effect.file).read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in data
    assert Path(__file__).name.encode() not in data
    nodes = onnx.load(tmp_path / effect.file).graph.node
    assert {p.value for node in nodes for p in node.metadata_props if p.key == model_file.MODULE_KEY} == {"0", "1"}
    for batch in (1, 5):  # the example's batch is 1: it must not be taken for a constant
        value = torch.randn(batch, 4)
        found = evaluator.run_graph(tmp_path / effect.file, {"input": value.numpy()})
        assert evaluator.largest_difference([model.module(value)[0].detach().numpy()], found) < 1e-5


def test_the_exporters_table_is_built_once_and_what_one_export_changes_in_it_stays_out_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_registry()
    first, name = _registration.ONNXRegistry.from_torchlib(18), "aten::relu"
    entries = list(first.functions[name])
    monkeypatch.setattr(_registration.onnxscript_apis, "get_torchlib_ops", lambda: pytest.fail("built again"))
    keep_registry()
    first.functions[name].clear()
    second = _registration.ONNXRegistry.from_torchlib(18)
    assert second.functions[name] == entries != []
    del second.functions[name]
    assert _registration.ONNXRegistry.from_torchlib(18).functions[name] == entries


def test_int32_indices_of_an_export_become_int64(tmp_path: Path) -> None:
    """The exporter keeps PyTorch's int32; GatherND and ScatterND of ONNX have int64 only."""

    class Indexed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.tensor([2, 0], dtype=torch.int32))

        def forward(self, x: Any, rows: Any) -> Any:
            changed = x.clone()
            changed[:, self.places] = 2 * x[rows, rows][:, None]
            return changed

    feeds = {"x": torch.randn(3, 3), "rows": torch.tensor([2, 1, 0], dtype=torch.int32)}
    model = loaded(Indexed(), feeds, {"x": (3, 3), "rows": (3,)}, ["y:float32:3,3"])
    exported(tmp_path, model, exporter="dynamo")
    validation.check(tmp_path / edit.FILE)
    assert {"GatherND", "ScatterND"} <= set(model_file.summary(tmp_path / edit.FILE).operators)
    found = evaluator.run_graph(tmp_path / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    assert evaluator.largest_difference([model.module(*feeds.values())[0].numpy()], found) < 1e-6


class Extremes(torch.nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
        pairs = [torch.maximum(first, second), torch.minimum(first, second)]
        bounds = [first.clamp(0, 2_000_000_000), first.clamp(min=5), first.clamp(second, second + 7), first.sign()]
        along = [*first.max(1), *first.min(0), first.amax((0, 2), keepdim=True), first.max(), first.amin((-1, 0))]
        return *pairs, *bounds, *along


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_maxima_of_int64_are_exact(tmp_path: Path, exporter: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"first": ("batch", 5, 6), "second": ("batch", 5, 6)}
    example = {name: torch.arange(60).reshape(2, 5, 6) for name in shapes}
    kinds = [*["batch,5,6"] * 6, *["batch,6"] * 2, *["5,6"] * 2, "1,5,1", "", "5"]
    outputs = [f"out_{at}:int64:{dims}" for at, dims in enumerate(kinds)]
    model = loaded(Extremes(), example, shapes, outputs)
    effect = exported(tmp_path, model, exporter=exporter)
    for high in (0, -3 << 32):  # the upper halves are equal, and the lower ones differ in their first bit
        feeds = {name: high + rng.integers(0, 1 << 32, (3, 5, 6)) for name in shapes}
        wanted = model.module(*map(torch.from_numpy, feeds.values()))
        for found, want in zip(evaluator.run_graph(tmp_path / effect.file, feeds), wanted, strict=True):
            np.testing.assert_array_equal(found, want.numpy())


def test_maxima_of_sizes_and_masks_stay_as_they_are(tmp_path: Path) -> None:
    class Sizes(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            places = torch.arange(value.shape[0]).clamp(max=3)
            return (value > 0).any(1).long().cumsum(0).clamp(min=places) + value.argmax(1).clamp(max=2)

    model = loaded(Sizes(), {"value": torch.ones(2, 4)}, {"value": ("batch", 4)}, ["out:int64:batch"])
    exported(tmp_path, model)
    kinds = {node.op_type for node in onnx.load(tmp_path / edit.FILE).graph.node}
    assert "Where" not in kinds
    assert kinds & {"Clip", "Max", "Min"}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layer", [torch.nn.Conv1d, torch.nn.ConvTranspose1d])
def test_a_normalization_in_bf16_is_folded_into_weights_in_bf16(tmp_path: Path, layer: Any, autocast: bool) -> None:
    class Normalized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(layer(2, 3, 1), torch.nn.BatchNorm1d(3))
            self.layers.to(torch.float32 if autocast else torch.bfloat16)
            with torch.no_grad():
                self.layers[1].running_var.fill_(0.5)  # type: ignore[union-attr, operator]

        def forward(self, x: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return self.layers(x.bfloat16()).float()

    feeds = {"x": torch.randn(2, 2, 5)}
    model = loaded(Normalized().eval(), feeds, {"x": ("batch", 2, 5)}, ["y:float32:batch,3,5"])
    exported(tmp_path, model, exporter="dynamo")
    validation.check(tmp_path / edit.FILE)
    assert "BatchNormalization" not in model_file.summary(tmp_path / edit.FILE).operators
    artifact = Artifact(kind="onnx", path=tmp_path / edit.FILE, sha256="", bytes=0)
    with simulation().load(artifact, Device()) as session:
        found = session.run({"x": feeds["x"].numpy()})["y"]
    expected = model.module(feeds["x"])[0].detach().numpy()
    assert evaluator.largest_difference([expected], [found]) < 2e-2


@pytest.mark.parametrize("function", [torch._is_all_true, torch._is_any_true])
def test_assertions_about_values_are_left_out(tmp_path: Path, function: Any) -> None:
    """So transformers checks what it is given, in models of detectors."""

    class Checked(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            torch._check(function(x < 100).item())
            return 2 * x

    model = loaded(Checked(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    assert exported(tmp_path, model).summary == "1 nodes, opset 23, by the torch.export exporter"


def test_an_operator_without_translation_is_named_with_its_line(tmp_path: Path) -> None:
    class Decomposed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.svd(x.T @ x)[1]

    line = Decomposed.forward.__code__.co_firstlineno + 1
    model = loaded(Decomposed(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:4"])
    with pytest.raises(ExportError, match=rf"_linalg_svd at .*test_export.py:{line} has no translation"):
        exported(tmp_path, model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("compute", "instead"),
    [(lambda x: torch.linalg.qr(x).R, r"torch\.linalg\.cholesky"), (lambda x: torch.cov(x), r"x @ x\.mT / \(n - 1\)")],
)
def test_an_operator_without_translation_has_another_to_write(tmp_path: Path, compute: Any, instead: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return compute(x)

    model = loaded(Module(), {"x": torch.randn(4, 4)}, {"x": (4, 4)}, ["y:float32:4,4"])
    with pytest.raises(ExportError, match="has no translation to ONNX") as error:
        exported(tmp_path, model, exporter="dynamo")
    assert re.search(instead, error.value.remedy)


def test_complex_numbers_are_named_as_what_has_no_translation(tmp_path: Path) -> None:
    class Filtered(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            spectrum = torch.fft.rfft(x)
            return torch.fft.irfft(torch.zeros_like(spectrum) + spectrum, n=4)

    line = Filtered.forward.__code__.co_firstlineno + 2
    model = loaded(Filtered(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    with pytest.raises(ExportError, match=rf"zeros_like at .*:{line} has no translation to ONNX for complex") as error:
        exported(tmp_path, model)
    assert "torch.view_as_real" in error.value.remedy


def test_code_of_this_package_is_not_taken_for_the_model(tmp_path: Path) -> None:
    """The tracing exporter's errors have no frame of the model's."""

    class Searched(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.searchsorted(torch.ones(3), x)

    model = loaded(Searched(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:int64:batch,4"])
    with pytest.raises(ExportError, match=r"^the operator aten::searchsorted has no translation"):
        exported(tmp_path, model, exporter="torchscript")


class RefusedError(Exception):
    """A library's own class, which is none of Python's built-in ones."""


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_module_may_raise_a_class_of_its_own_when_it_is_exported(tmp_path: Path, exporter: str) -> None:
    class Refusing(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            raise RefusedError("not while it is traced")

    model = loaded(Refusing(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    with pytest.raises(ExportError, match="RefusedError: not while it is traced"):
        exported(tmp_path, model, exporter=exporter)
    with pytest.raises(ExportError, match="RefusedError: not while it is traced"):
        export.capture_program(model)
    assert agreement.find_fault(model, model.example, lambda arrays: [], {}) == ""
    assert not agreement.runs(model, {"batch": 3})


def test_remarks_for_those_who_develop_pytorch_are_left_out(tmp_path: Path) -> None:
    class Ordered(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.sort(x, stable=True, descending=True)[0]

    model = loaded(Ordered(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    with pytest.raises(ExportError, match="Out parameter is not supported") as error:
        exported(tmp_path, model, exporter="torchscript")
    assert "feel free" not in error.value.message


def test_a_branch_on_values_is_not_traced_away(tmp_path: Path) -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1 if x.sum() > 0 else x - 1

    model = loaded(Branch(), {"x": torch.ones(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    with pytest.raises(ExportError, match="the trace holds only for the values"):
        exported(tmp_path, model)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_unused_inputs_and_repeated_outputs(tmp_path: Path, exporter: str) -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Any, unused: Any, flag: Any) -> Any:
            return x, x, torch.where(flag, x, -x).sum()

    example = {"x": torch.ones(2, 4), "unused": torch.ones(2, 1), "flag": torch.ones(2, 4, dtype=torch.bool)}
    shapes = {"x": ("batch", 4), "unused": ("batch", 1), "flag": ("batch", 4)}
    outputs = ["a:float32:batch,4", "b:float32:batch,4", "c:float32:"]
    effect = exported(tmp_path, model := loaded(Odd(), example, shapes, outputs), exporter=exporter)
    validation.check(tmp_path / effect.file)
    assert effect.signature == model.signature


def test_the_other_exporter_takes_over_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ExportError("it broke")

    monkeypatch.setattr(export, "_export_program", fail)
    effect = exported(tmp_path, affine())
    assert "TorchScript" in effect.summary
    assert "it broke" in effect.notes[0]
    with pytest.raises(ExportError, match="it broke"):
        exported(tmp_path, affine(), exporter="dynamo")


@pytest.mark.parametrize("exporter", ["torchscript", pytest.param("dynamo", marks=pytest.mark.thorough)])
def test_an_encoder_with_a_padding_mask_is_exported(tmp_path: Path, exporter: str) -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 1)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.encoder(x, src_key_padding_mask=~keep)
            return y * keep[:, :, None]

    x, keep = torch.randn(2, 5, 8), torch.tensor([[True, True, True, False, False], [True] * 5])
    dims = {"x": ("batch", 5, 8), "keep": ("batch", 5)}
    model = loaded(Masked(), {"x": x, "keep": keep}, dims, ["out:float32:batch,5,8"])
    exported(tmp_path, model, exporter=exporter)
    found = evaluator.run_graph(tmp_path / edit.FILE, {"x": x.numpy(), "keep": keep.numpy()})
    assert evaluator.largest_difference([model.module(x, keep)[0].detach().numpy()], found) < 1e-5


class Recurrent(torch.nn.Module):
    def __init__(self, layer: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)[0]
        return y


@pytest.mark.parametrize(
    "layer",
    [torch.nn.RNN, *(pytest.param(layer, marks=pytest.mark.thorough) for layer in (torch.nn.GRU, torch.nn.LSTM))],
)
def test_recurrent_layers_are_exported_at_any_length(tmp_path: Path, layer: type[torch.nn.RNNBase]) -> None:
    x = torch.randn(2, 3, 4)
    model = loaded(Recurrent(layer), {"x": x}, {"x": ("batch", "length", 4)}, ["y:float32:batch,length,6"])
    effect = exported(tmp_path, model)
    assert not effect.notes or "fell back to the TorchScript exporter" in effect.notes[0]  # torch 2.15 needs no other
    assert effect.signature == model.signature
    for batch, length in ((1, 1), (1, 9), (5, 2)):
        feeds = torch.randn(batch, length, 4)
        found = evaluator.run_graph(tmp_path / effect.file, {"x": feeds.numpy()})
        assert evaluator.largest_difference([model.module(feeds)[0].detach().numpy()], found) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["fused", "decomposed"])
def test_a_padding_mask_has_one_row_for_all_queries(tmp_path: Path, attention: str) -> None:
    """Two layers share it, as in every encoder of texts."""

    class Encoder(torch.nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            bias = (1 - keep[:, None, None, :]) * -1e4
            for _ in range(2):
                split = x.unflatten(2, (2, 4)).transpose(1, 2)
                y = torch.nn.functional.scaled_dot_product_attention(split, split, split, attn_mask=bias)
                x = y.transpose(1, 2).flatten(2)
            return x

    torch.manual_seed(0)
    x, keep = torch.randn(2, 5, 8), torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    dims = {"x": ("batch", "length", 8), "keep": ("batch", "length")}
    model = loaded(Encoder(), {"x": x, "keep": keep}, dims, ["out:float32:batch,length,8"])
    exported(tmp_path, model, attention=attention)
    found = model_file.summary(tmp_path / edit.FILE).operators
    assert found.get("Attention", 0) == (2 if attention == "fused" else 0)
    assert found.get("Expand", 0) == (1 if attention == "fused" else 0)
    session = onnxruntime.InferenceSession(tmp_path / edit.FILE, providers=["CPUExecutionProvider"])
    expected = Encoder()(x[:1, :4], keep[:1, :4]).numpy()
    answer = session.run(None, {"x": x[:1, :4].numpy(), "keep": keep[:1, :4].numpy()})[0]
    np.testing.assert_allclose(answer, expected, atol=1e-5)


@pytest.mark.thorough
def test_attention_is_one_operator_or_none(tmp_path: Path) -> None:
    class Attend(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    shape = ("batch", 2, "length", 8)
    model = loaded(Attend(), {"x": torch.randn(2, 2, 5, 8)}, {"x": shape}, ["y:float32:batch,2,length,8"])
    fused = exported(tmp_path / "fused", model)
    written = exported(tmp_path / "written", model, attention="decomposed")
    assert model_file.summary(tmp_path / "fused" / fused.file).operators == {"Attention": 1}
    assert "Softmax" in model_file.summary(tmp_path / "written" / written.file).operators
    evaluator.compare_graphs(tmp_path / "fused" / fused.file, tmp_path / "written" / written.file)


class Decoder(torch.nn.Module):
    """Attend to a cache and what is new; a module may compute the cache's length of the mask, too."""

    def __init__(self, from_mask: bool) -> None:
        super().__init__()
        self.from_mask = from_mask

    def forward(self, mask: torch.Tensor, more: torch.Tensor, ids: torch.Tensor, past: torch.Tensor) -> Any:
        length = mask.shape[1] - ids.shape[1] if self.from_mask else past.shape[1]
        keys = torch.cat([past + torch.arange(length), ids], 1)
        return keys * mask, torch.softmax(keys, 1) * more


@pytest.mark.parametrize("from_mask", [False, True])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript", "program"])
def test_a_mask_may_be_as_long_as_two_inputs_together(tmp_path: Path, exporter: str, from_mask: bool) -> None:
    example = {"mask": torch.ones(1, 6), "more": torch.ones(1, 6), "ids": torch.rand(1, 1), "past": torch.rand(1, 5)}
    words = ("past+length", "length+past", "length", "past")
    dims = {name: ("batch", word) for name, word in zip(example, words, strict=True)}
    model = loaded(Decoder(from_mask), example, dims, [f"{name}:float32:batch,past+length" for name in ("y", "z")])
    if exporter == "program":
        answer = export.capture_program(model).module()
    else:
        assert exported(tmp_path, model, exporter=exporter).signature == model.signature
    for batch, past, length in ((1, 5, 1), (3, 2, 7), (2, 9, 4)):
        feeds = [torch.rand(batch, size) for size in (past + length, past + length, length, past)]
        expected = [value.numpy() for value in model.module(*feeds)]
        if exporter == "program":
            answers = [value.numpy() for value in answer(*feeds)]
        else:
            named = dict(zip(dims, (value.numpy() for value in feeds), strict=True))
            answers = evaluator.run_graph(tmp_path / edit.FILE, named)
        assert evaluator.largest_difference(expected, answers) < 1e-5


def test_a_graph_that_onnxscript_cannot_optimize_is_left_to_the_other_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any) -> None:
        raise RuntimeError("an error of the optimizer") from AttributeError("no ndim")

    monkeypatch.setattr(export, "optimize_graph", fail)
    effect = exported(tmp_path, affine())
    assert "TorchScript" in effect.summary
    assert "onnxscript cannot optimize the exported graph: AttributeError: no ndim" in effect.notes[0]
    with pytest.raises(ExportError, match="no ndim") as error:
        exported(tmp_path, affine(), exporter="dynamo")
    assert "--exporter" in error.value.remedy


class Detector(torch.nn.Module):
    """Keep four of six boxes, those of the best scores, which are all equal for an image of zeros."""

    def forward(self, image: torch.Tensor) -> Any:
        scores = 0.3 * (image.sum() * torch.arange(1, 7) / 6).exp()
        places = scores.topk(4).indices
        return torch.arange(24.0).reshape(6, 4)[places] ** 2, scores[places]


@pytest.mark.parametrize(
    ("level", "places", "fault"),
    [(1.0, [5, 4, 3, 2], ""), (1.0, [4, 5, 2, 3], ""), (1.0, [5, 4, 3, 1], "wrong"), (0.0, [0, 1, 4, 5], "")],
)
def test_boxes_are_compared_as_sets_but_where_rounding_decides_which_are_kept(
    level: float, places: list[int], fault: str
) -> None:
    model = loaded(Detector(), {"image": torch.ones(2)}, {"image": (2,)}, ["box:float32:4,4", "score:float32:4"])

    def answer(feeds: Any) -> list[Any]:
        scores = 0.3 * np.exp(feeds["image"].sum() * np.arange(1, 7, dtype=np.float32) / 6)
        return [np.arange(24, dtype=np.float32).reshape(6, 4)[places] ** 2, scores[places].astype(np.float32)]

    feeds = {"image": torch.full((2,), level)}
    assert agreement.find_fault(model, feeds, answer, {"box": "rows", "score": "rows"}) == fault
    in_order = agreement.find_fault(model, feeds, answer, {})
    assert in_order == ("wrong" if level and places != [5, 4, 3, 2] else "")


@torch.library.custom_op("exporttest::crop", mutates_args=())
def crop(x: torch.Tensor) -> torch.Tensor:
    """Take one pixel, which a RoiAlign computes as well."""
    return x[:, :, 1:2, 2:3].clone()


@crop.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(1, x.shape[1], 1, 1)


def align(x: Any) -> Any:
    boxes = op18.Constant(value=onnx.numpy_helper.from_array(np.array([[2, 1, 3, 2]], np.float32)))
    image = op18.Constant(value=onnx.numpy_helper.from_array(np.array([0])))
    return op18.RoiAlign(x, boxes, image, output_height=1, output_width=1, sampling_ratio=1)


class Crop(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.ops.exporttest.crop(x) * 2


@pytest.mark.parametrize("asked", [23, 21])
def test_an_operator_whose_newest_form_engines_lack_is_exported_in_an_older_opset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    table = translations.list_translations(18)
    monkeypatch.setattr(
        translations, "list_translations", lambda _: {**table, torch.ops.exporttest.crop.default: align}
    )
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    model = loaded(Crop(), {"x": x}, {"x": (1, 2, 3, 4)}, ["y:float32:1,2,1,1"])
    effect = exported(tmp_path, model, opset=asked, exporter="dynamo")
    assert model_file.summary(tmp_path / effect.file).opset == min(asked, 21)
    assert any("opset 21, not 23" in note and "RoiAlign" in note for note in effect.notes) == (asked > 21)
    (answer,) = evaluator.run_graph(tmp_path / effect.file, {"x": x.numpy()})
    assert answer.ravel().tolist() == [12, 36]


class Noisy(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 0.0 * torch.randn_like(x)


def test_random_numbers_are_exported_in_the_opset_that_engines_have_kernels_for(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    model = loaded(Noisy(), {"x": x}, {"x": (2, 3)}, ["y:float32:2,3"])
    effect = exported(tmp_path, model, opset=23, exporter="dynamo")
    assert [note for note in effect.notes if "opset 21, not 23" in note and "RandomNormalLike" in note]
    (answer,) = evaluator.run_graph(tmp_path / effect.file, {"x": x.numpy()})
    assert answer.tolist() == x.tolist()


class _Squeezed(torch.nn.Module):
    """Drop the axis of size 1, in the middle, and none of what has none."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = (x * 2).t()[:, None].squeeze().t()
        return turned.reshape(-1, 3), (x + 1).squeeze().reshape(-1, 3) * 2


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_squeeze_without_an_axis_keeps_a_batch_of_one(tmp_path: Path, exporter: str) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    outputs = ["y:float32:batch,3", "z:float32:batch,3"]
    model = loaded(_Squeezed(), {"x": x}, {"x": ("batch", 3)}, outputs)
    exported(tmp_path, model, exporter=exporter)
    graph = onnx.load(tmp_path / edit.FILE).graph
    assert [len(node.input) for node in graph.node if node.op_type == "Squeeze"] == [2]
    for rows in (1, 2, 4):
        answers = evaluator.run_graph(tmp_path / edit.FILE, {"x": x[:rows].numpy()})
        for answer, wanted in zip(answers, _Squeezed()(x[:rows]), strict=True):
            np.testing.assert_array_equal(answer, wanted.numpy())


def test_a_squeeze_whose_axes_are_not_known_stays() -> None:
    """What a named size of the inputs is not, may be 1; and of an unknown shape, nothing is known."""
    ends = [onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", ["any", 1]), ("y", None))]
    node = onnx.helper.make_node("Squeeze", ["x"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", ends[:1], ends[1:]))
    assert names.name_squeezed_axes(ir.from_proto(model), ["batch"]) == 0
    assert names.name_squeezed_axes(ir.from_proto(model), ["any"]) == 1
