"""Translations of operators to ONNX, held against PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator
from exporting import exported, loaded
from published_bugs import probes


def assert_answers(folder: Path, feeds: dict[str, Any], wanted: Any, tolerance: float) -> None:
    """Check that the graph in a folder answers the tensors of PyTorch, in their types and shapes."""
    answers = evaluator.run_graph(folder / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    for answer, value in zip(answers, wanted, strict=True):
        assert (answer.dtype, answer.shape) == (value.numpy().dtype, value.shape)
        np.testing.assert_allclose(answer, value.numpy(), rtol=1e-7 if tolerance else 0, atol=tolerance)


def test_rounding_divisions_are_exact(tmp_path: Path) -> None:
    """PyTorch's results are expected: whole numbers beyond float32, and 1.0 // 0.1, which is 9."""

    class Divided(torch.nn.Module):
        def forward(self, key: Any, by: Any, x: Any) -> Any:
            whole = [torch.div(key, by, rounding_mode=mode) for mode in ("floor", "trunc")]
            return (
                *whole,
                torch.div(key, -7, rounding_mode="floor"),
                torch.div(x, 0.1, rounding_mode="floor"),
                x // by,
            )

    steps = torch.arange(-100, 100)
    feeds = {"key": 123_456_789 * steps + 1, "by": steps % 7 - 9, "x": steps / 10}
    names = [f"{name}:{dtype}:200" for name, dtype in zip("abcde", ["int64"] * 3 + ["float32"] * 2, strict=True)]
    model = loaded(Divided(), feeds, dict.fromkeys(feeds, (200,)), names)
    exported(tmp_path, model, exporter="dynamo")
    found = evaluator.run_graph(tmp_path / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    for value, wanted in zip(found, model.module(*feeds.values()), strict=True):
        np.testing.assert_array_equal(value, wanted.numpy())


_MAGNITUDES = 10.0 ** torch.arange(-34, 38, 1.5)


_NUMBERS = torch.cat([_MAGNITUDES, -_MAGNITUDES, torch.linspace(-80, 80, 65), torch.linspace(-2, 2, 65)])


_SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])


_OF_ONE = (
    *(F.logsigmoid, torch.log1p, torch.expm1, torch.erfc, torch.erfinv),
    *(torch.special.expm1, torch.special.erfc, torch.special.log_ndtr),
)
_OF_TWO = (torch.logaddexp, torch.logaddexp2, torch.atan2, torch.hypot)


@pytest.mark.parametrize(("functions", "smallest"), [(_OF_ONE, 1e-37), (_OF_TWO, 1e-7)])
def test_functions_are_exact_at_all_magnitudes(tmp_path: Path, functions: tuple[Any, ...], smallest: float) -> None:
    """OpenVINO's maxima and exponentials of NaN are numbers, so it is compared at the others."""

    class Module(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return tuple(function(*given) for function in functions)

    two = functions is _OF_TWO
    numbers = torch.cat([_SPECIAL, _NUMBERS[::6] if two else _NUMBERS])
    feeds = dict(zip("xy", torch.meshgrid(*[numbers] * (1 + two), indexing="ij"), strict=False))
    shapes = {name: tuple(value.shape) for name, value in feeds.items()}
    text = ",".join(map(str, shapes["x"]))
    model = loaded(Module(), feeds, shapes, [f"out_{at}:float32:{text}" for at in range(len(functions))])
    exported(tmp_path, model, exporter="dynamo")
    arrays = {name: value.numpy() for name, value in feeds.items()}
    answers = evaluator.run_graph(tmp_path / edit.FILE, arrays)
    others = probes.run_openvino(onnx.load(tmp_path / edit.FILE), arrays)
    for function, answer, other in zip(functions, answers, others, strict=True):
        wanted = function(*feeds.values()).numpy()
        is_number = ~np.isnan(wanted)
        np.testing.assert_allclose(answer, wanted, 1e-5, smallest, err_msg=str(function))
        np.testing.assert_allclose(other[is_number], wanted[is_number], 1e-5, smallest, err_msg=str(function))
        if function is torch.atan2:
            np.testing.assert_array_equal(np.signbit(answer[is_number]), np.signbit(wanted[is_number]))


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_small_sigmoids_and_groups_far_from_zero_have_all_digits(tmp_path: Path, exporter: Any) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            s = torch.sigmoid(x)
            return torch.log(s), 1 / s, F.group_norm(x + 200, 2)

    feeds = {"x": torch.linspace(-60.0, -59.0, 64).reshape(2, 4, 8)}
    names = [f"{name}:float32:2,4,8" for name in "abc"]
    exported(tmp_path, loaded(Module(), feeds, {"x": (2, 4, 8)}, names), exporter=exporter)
    found = evaluator.run_graph(tmp_path / edit.FILE, {"x": feeds["x"].numpy()})
    for value, wanted in zip(found, Module()(feeds["x"].double()), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), rtol=2e-5, atol=2e-4)


def test_functions_of_halves_are_computed_in_float32(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return F.logsigmoid(x), torch.logaddexp(x, y), torch.atan2(x, y)

    x, y = torch.linspace(-9, 9, 200).half(), torch.linspace(5, -3, 200).half()
    names = [f"{name}:float16:200" for name in "abc"]
    model = loaded(Module(), {"x": x, "y": y}, {"x": (200,), "y": (200,)}, names)
    exported(tmp_path, model, exporter="dynamo")
    found = evaluator.run_graph(tmp_path / edit.FILE, {"x": x.numpy(), "y": y.numpy()})
    for value, wanted in zip(found, Module()(x.float(), y.float()), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), 6e-4)  # one rounding


def test_running_sums_in_log_space_are_exact(tmp_path: Path) -> None:
    """Their length is dynamic, and what comes first is far below the maximum, or is nothing at all."""

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.logcumsumexp(x, -2)

    x = 300 * torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))
    x[0, :3] = -torch.inf
    x[1, 4, 1] = torch.inf
    model = loaded(Module(), {"x": x}, {"x": (2, "length", 3)}, ["y:float32:2,length,3"])
    exported(tmp_path, model, exporter="dynamo")
    for value in (x, x[:, :4]):
        (found,) = evaluator.run_graph(tmp_path / edit.FILE, {"x": value.numpy()})
        np.testing.assert_allclose(found, torch.logcumsumexp(value, -2).numpy(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_means_and_extremes_by_place_are_those_of_pytorch(tmp_path: Path, dtype: torch.dtype) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any, y: Any, index: Any) -> Any:
            asked = (("mean", True), ("mean", False), ("amax", False), ("amin", False))
            return tuple(x.scatter_reduce(1, index, y, kind, include_self=own) for kind, own in asked)

    draw = torch.Generator().manual_seed(0)
    x, y = ((20 * torch.randn(2, size, generator=draw)).to(dtype) for size in (4, 6))
    if dtype.is_floating_point:
        y[0, 1], y[1, :5] = torch.inf, -torch.inf
    feeds = {"x": x, "y": y, "index": torch.tensor([[0, 1, 1, 3, 0, 0], [2, 2, 2, 2, 2, 0]])}
    shapes = {name: ("batch", value.shape[1]) for name, value in feeds.items()}
    names = [f"{name}:{str(dtype).removeprefix('torch.')}:batch,4" for name in "abcd"]
    model = loaded(Module(), feeds, shapes, names)
    exported(tmp_path, model, exporter="dynamo")
    found = evaluator.run_graph(tmp_path / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    for value, wanted in zip(found, Module()(*feeds.values()), strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), 1e-6)


def test_values_are_put_into_buckets_as_in_pytorch(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, rows: Any, x: Any, number: Any) -> Any:
            order = rows.argsort(-1)
            ordered = rows.sort(-1).values
            return (
                torch.searchsorted(ordered, x),
                torch.searchsorted(ordered, x, side="right", out_int32=True),
                torch.searchsorted(rows, x, right=True, sorter=order),
                torch.searchsorted(ordered[0], 2),
                torch.bucketize(x, ordered[0], right=True),
                torch.bucketize(number, torch.tensor([-5, 0, 3, 3, 2**40])),
            )

    rows = torch.tensor([[3.0, 1, 2, 2], [torch.inf, 0, -torch.inf, 5]])
    x = torch.tensor([[2.0, torch.nan, -9, 3, 7, 2.5], [0.0, torch.inf, -torch.inf, 5, 1, -1]])
    feeds = {"rows": rows, "x": x, "number": torch.tensor([[3, 2**40 - 1, -6], [4, 0, 2**41]])}
    shapes = {name: ("batch", value.shape[1]) for name, value in feeds.items()}
    kinds = ("int64:batch,6", "int32:batch,6", "int64:batch,6", "int64:", "int64:batch,6", "int64:batch,3")
    model = loaded(Module(), feeds, shapes, [f"out_{at}:{kind}" for at, kind in enumerate(kinds)])
    exported(tmp_path, model, exporter="dynamo")
    found = evaluator.run_graph(tmp_path / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    for value, wanted in zip(found, Module()(*feeds.values()), strict=True):
        np.testing.assert_array_equal(value, wanted.numpy())


def test_operators_that_the_exporter_lacks_are_those_of_pytorch(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any, y: Any, number: Any) -> Any:
            extremes = torch.fmax(x, y), torch.fmin(x, y), torch.copysign(x.abs(), y), torch.signbit(y)
            chosen = (
                x.median(1).values,
                x.median(),
                *number.median(0),
                number.median(),
                *number.kthvalue(2, 1, keepdim=True),
            )
            return *extremes, x.cumprod(1), *chosen

    x = torch.tensor([[3.0, -1, 2, 0.5], [torch.inf, 0, -torch.inf, 5], [torch.nan, 2, 1, torch.nan]])
    y = torch.tensor([[1.0, -0.0, torch.nan, 7], [torch.inf, 0.0, 4, -5], [torch.nan, -2, 9, 0]])
    number = torch.tensor([[3, 2**40, -6], [4, 0, 2**41], [1, 9, 9]])
    feeds = {"x": x, "y": y, "number": number}
    shapes = {name: ("batch", value.shape[1]) for name, value in feeds.items()}
    floats, single = "float32:batch,4", "float32:"
    kinds = [floats, floats, floats, "bool:batch,4", floats, "float32:batch", single, "int64:3", "int64:3", "int64:"]
    names = [*kinds, "int64:batch,1", "int64:batch,1"]
    model = loaded(Module(), feeds, shapes, [f"out_{at}:{kind}" for at, kind in enumerate(names)])
    exported(tmp_path, model, exporter="dynamo")
    found = evaluator.run_graph(tmp_path / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    for value, wanted in zip(found, Module()(*feeds.values()), strict=True):
        np.testing.assert_array_equal(value, wanted.numpy())


@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize(
    "how",
    [
        {"n_fft": 50, "hop_length": 20, "window": torch.hann_window(50)},
        {"n_fft": 64, "win_length": 41, "window": torch.hamming_window(41), "normalized": True, "center": False},
        {"n_fft": 33, "win_length": 20, "onesided": False},
        {"n_fft": 1024, "window": torch.hann_window(1024)},
    ],
)
def test_spectra_are_those_of_pytorch_at_any_length(tmp_path: Path, how: dict[str, Any]) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            spectra = torch.stft(x, return_complex=True, **{"window": torch.ones(20), **how})
            return torch.view_as_real(spectra), torch.stft(x[0], return_complex=True, **{"window": None, **how}).abs()

    x = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    bins = how["n_fft"] if how.get("onesided") is False else how["n_fft"] // 2 + 1
    outputs = [f"parts:float32:batch,{bins},frames,2", f"sizes:float32:{bins},frames"]
    model = loaded(Module(), {"x": x}, {"x": ("batch", "length")}, outputs)
    exported(tmp_path, model, exporter="dynamo")
    graph = onnx.load(tmp_path / edit.FILE).graph
    assert any(node.op_type == "STFT" for node in graph.node) is (how["n_fft"] == 1024)
    for value in (x, x[:1, :2345]):
        found = evaluator.run_graph(tmp_path / edit.FILE, {"x": value.numpy()})
        for answer, wanted in zip(found, Module()(value), strict=True):
            np.testing.assert_allclose(answer, wanted.numpy(), atol=1e-4 if how["n_fft"] == 1024 else 2e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("both_ways", [False, True])
def test_an_lstm_with_a_projection_is_exported(tmp_path: Path, both_ways: bool) -> None:
    class Projected(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.LSTM(
                4, 6, 2, batch_first=True, bidirectional=both_ways, proj_size=3, bias=not both_ways
            )

        def forward(self, x: Any, state: Any, cell: Any) -> Any:
            y, (state, cell) = self.layer(x, (state, cell))
            return y, state, cell

    layers = 4 if both_ways else 2
    feeds = {"x": torch.randn(2, 5, 4), "state": torch.randn(layers, 2, 3), "cell": torch.randn(layers, 2, 6)}
    names = [f"y:float32:2,5,{6 if both_ways else 3}", f"h:float32:{layers},2,3", f"c:float32:{layers},2,6"]
    model = loaded(Projected(), feeds, {name: tuple(value.shape) for name, value in feeds.items()}, names)
    exported(tmp_path, model, exporter="dynamo")
    found = evaluator.run_graph(tmp_path / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    wanted = [value.detach().numpy() for value in model.module(*feeds.values())]
    assert evaluator.largest_difference(wanted, found) < 1e-6


class AdaptivePools(torch.nn.Module):
    """Pools to sizes that divide those of the example in one axis, in both and in none."""

    def forward(self, x: Any, volume: Any) -> Any:
        means = F.adaptive_avg_pool2d(x, (3, 5)), F.adaptive_avg_pool2d(x, (4, 2)), F.adaptive_avg_pool3d(volume, 2)
        maxima = (
            *F.adaptive_max_pool2d(x, (3, 5), return_indices=True),
            *F.adaptive_max_pool2d(x[0], (4, 2), return_indices=True),
            *F.adaptive_max_pool3d(volume, (2, 3, 3), return_indices=True),
        )
        return *means, *maxima, F.adaptive_max_pool1d(x[:, 0], 3), F.adaptive_avg_pool1d(x[:, 0], 5)


@pytest.mark.parametrize("sizes", [("height", "width"), (8, 16)])
def test_adaptive_pools_are_those_of_pytorch_at_any_size(tmp_path: Path, sizes: tuple[Any, Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    feeds = {
        "x": torch.randn(2, 3, 8, 16, generator=draw).round(),
        "volume": torch.randn(2, 2, 5, 6, 7, generator=draw),
    }
    shapes = {"x": ("batch", 3, *sizes), "volume": ("batch", 2, 5, 6, 7)}
    kinds = [
        *("float32:batch,3,3,5", "float32:batch,3,4,2", "float32:batch,2,2,2,2"),
        *("float32:batch,3,3,5", "int64:batch,3,3,5", "float32:3,4,2", "int64:3,4,2"),
        *("float32:batch,2,2,3,3", "int64:batch,2,2,3,3", f"float32:batch,{sizes[0]},3", f"float32:batch,{sizes[0]},5"),
    ]
    model = loaded(AdaptivePools(), feeds, shapes, [f"out_{at}:{kind}" for at, kind in enumerate(kinds)])
    exported(tmp_path, model, exporter="dynamo")
    operators = [node.op_type for node in onnx.load(tmp_path / edit.FILE).graph.node]
    assert {"MaxPool", "AveragePool"} <= set(operators) or "height" in sizes, "windows side by side need no more"
    others = [(1, 3, 3, 5), (3, 3, 17, 9)] if "height" in sizes else [(1, 3, 8, 16)]
    for x in (feeds["x"], *(torch.randn(shape, generator=draw).round() for shape in others)):
        arrays = {"x": x.numpy(), "volume": feeds["volume"][[0] * len(x)].numpy()}
        wanted = AdaptivePools()(*map(torch.from_numpy, arrays.values()))
        runs = (
            evaluator.run_graph(tmp_path / edit.FILE, arrays),
            probes.run_openvino(onnx.load(tmp_path / edit.FILE), arrays),
        )
        for answers in runs:
            for answer, value in zip(answers, wanted, strict=True):
                np.testing.assert_allclose(answer, value.numpy(), atol=1e-6)


def test_an_average_pool_to_the_size_of_another_input_is_that_of_pytorch(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any, guide: Any) -> Any:
            return F.adaptive_avg_pool2d(x, guide.shape[1:])

    feeds = {"x": torch.arange(2.0 * 3 * 8 * 6).reshape(2, 3, 8, 6) % 17, "guide": torch.zeros(2, 5, 4)}
    shapes = {"x": ("batch", 3, "height", 6), "guide": ("batch", "rows", "columns")}
    model = loaded(Module(), feeds, shapes, ["y:float32:batch,3,rows,columns"])
    exported(tmp_path, model, exporter="dynamo")
    for height, rows, columns in ((8, 5, 4), (9, 3, 6), (4, 7, 2)):
        arrays = {"x": np.random.default_rng(0).random((1, 3, height, 6), np.float32)}
        arrays["guide"] = np.zeros((1, rows, columns), np.float32)
        (answer,) = evaluator.run_graph(tmp_path / edit.FILE, arrays)
        np.testing.assert_allclose(answer, Module()(*map(torch.from_numpy, arrays.values())).numpy(), atol=1e-6)


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_sums_of_windows_are_divided_by_the_number_that_is_named(tmp_path: Path, ceil_mode: bool) -> None:
    """The third window of 5 would begin behind the input where sizes are rounded up."""

    class Sums(torch.nn.Module):
        def forward(self, x: Any, volume: Any) -> Any:
            plane = F.avg_pool2d(x, (3, 2), (2, 3), 1, ceil_mode, divisor_override=2)
            return (
                plane,
                F.avg_pool2d(x[0], 2, 3, 0, ceil_mode, divisor_override=1),
                F.avg_pool3d(volume, 2, None, 1, ceil_mode, False, divisor_override=5),
            )

    draw = torch.Generator().manual_seed(0)
    feeds = {"x": torch.randn(2, 3, 8, 5, generator=draw), "volume": torch.randn(2, 2, 3, 4, 5, generator=draw)}
    shapes = {"x": ("batch", 3, "height", 5), "volume": ("batch", 2, "depth", 4, 5)}
    kinds = ["batch,3,rows,3", "3,more,2", "batch,2,deep,3,3"]
    model = loaded(Sums(), feeds, shapes, [f"out_{at}:float32:{kind}" for at, kind in enumerate(kinds)])
    exported(tmp_path, model, exporter="dynamo")
    for height, depth in ((8, 3), (9, 4), (11, 2)):
        sized = {"x": torch.randn(2, 3, height, 5), "volume": torch.randn(2, 2, depth, 4, 5)}
        assert_answers(tmp_path, sized, Sums()(*sized.values()), 1e-6)


def test_a_batch_normalization_in_training_takes_the_statistics_of_the_batch(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm2d(3)

        def forward(self, x: Any) -> Any:
            norm = self.norm
            return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)

    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
    model = loaded(Module(), {"x": x}, {"x": ("batch", 3, 5, 5)}, ["y:float32:batch,3,5,5"])
    exported(tmp_path, model, exporter="dynamo")
    assert_answers(tmp_path, {"x": x[:2]}, [F.batch_norm(x[:2], None, None, training=True)], 1e-5)


class Attentions(torch.nn.Module):
    """Attention with one axis before lengths and sizes, with two, and with three."""

    def forward(self, x: Any, mask: Any) -> Any:
        attend = F.scaled_dot_product_attention
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        frames = torch.stack([heads, 2 * heads, -heads], dim=1)
        return (
            attend(x, x + 1, 2 * x),
            attend(x, x, x, attn_mask=mask),
            attend(x, x, x, is_causal=True, scale=0.3),
            attend(heads, heads, heads, attn_mask=mask[:, None] > 0),
            attend(heads, heads[:, :1], heads[:, 1:2]),
            attend(heads, heads[:, :2], heads[:, 1:3], enable_gqa=True),
            attend(frames, frames, 2 * frames),
            attend(frames, frames, frames, attn_mask=mask[:, None, None]),
            attend(frames, frames, frames, attn_mask=mask[0]),
        )


def test_attention_has_any_number_of_axes(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    feeds = {"x": torch.randn(2, 6, 16, generator=draw), "mask": torch.randn(2, 6, 6, generator=draw)}
    shapes = {"x": ("batch", "length", 16), "mask": ("batch", "length", "length")}
    kinds = ["batch,length,16"] * 3 + ["batch,4,length,4"] * 3 + ["batch,3,4,length,4"] * 3
    model = loaded(Attentions(), feeds, shapes, [f"out_{at}:float32:{kind}" for at, kind in enumerate(kinds)])
    exported(tmp_path, model, exporter="dynamo")
    for batch, length in ((2, 6), (1, 9), (3, 4)):
        sized = {"x": torch.randn(batch, length, 16), "mask": torch.randn(batch, length, length)}
        assert_answers(tmp_path, sized, Attentions()(*sized.values()), 1e-5)


def test_extremes_of_all_numbers_are_those_of_pytorch(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (x - x.amin()) / (x.amax() - x.amin(keepdim=True)), x.amax((1, 2)), *x.aminmax()

    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    kinds = ("batch,3,5", "batch", "", "")
    names = [f"out_{at}:float32:{kind}" for at, kind in enumerate(kinds)]
    model = loaded(Module(), {"x": x}, {"x": ("batch", 3, 5)}, names)
    exported(tmp_path, model, exporter="dynamo")
    assert_answers(tmp_path, {"x": x}, Module()(x), 1e-6)


def test_distances_of_rows_are_those_of_pytorch(tmp_path: Path) -> None:
    """Rows that are the same have a distance of 0 where they are few, in PyTorch, too."""

    class Module(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            metrics = [torch.cdist(x, y, p) for p in (0.0, 1.0, 2.0, 3.0, torch.inf)]
            many = torch.cat([x, 2 * x, x - 1, -x, 3 * x, x + 5, x / 2], dim=1)
            return *metrics, torch.cdist(x, x), torch.cdist(many, y), torch.cdist(x[0], y)

    draw = torch.Generator().manual_seed(0)
    feeds = {"x": torch.randn(2, 4, 6, generator=draw), "y": torch.randn(2, 5, 6, generator=draw)}
    shapes = {"x": ("batch", 4, 6), "y": ("batch", 5, 6)}
    kinds = ["batch,4,5"] * 5 + ["batch,4,4", "batch,28,5", "batch,4,5"]
    model = loaded(Module(), feeds, shapes, [f"out_{at}:float32:{kind}" for at, kind in enumerate(kinds)])
    exported(tmp_path, model, exporter="dynamo")
    assert_answers(tmp_path, feeds, Module()(*feeds.values()), 1e-5)


def test_equal_numbers_stay_in_order_where_they_are_sorted(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return *torch.sort(x, dim=1, stable=True), x.argsort(dim=-1, descending=True, stable=True)

    x = torch.randn(2, 30, 20, generator=torch.Generator().manual_seed(0)).round()
    names = [f"out_{at}:{dtype}:batch,30,20" for at, dtype in enumerate(("float32", "int64", "int64"))]
    model = loaded(Module(), {"x": x}, {"x": ("batch", 30, 20)}, names)
    exported(tmp_path, model, exporter="dynamo")
    assert_answers(tmp_path, {"x": x}, Module()(x), 0.0)


# Operators on numbers, [batch, 4, 4], and on whole ones.


def compute_extremes_up_to_each_place(x: Any, n: Any) -> Any:
    return (
        *x.cummax(1),
        *x.cummin(-1),
        *(x > 0).cummax(1),
        *n.cummax(-2),
        *n.int().cummin(2),
        *n.to(torch.uint8).cummax(1),
    )


def write_diagonals(x: Any, n: Any) -> Any:
    x, n, first = x.clone(), n.clone(), x[0].clone()
    x.diagonal(dim1=1, dim2=2).fill_(0)
    x.diagonal(1, -1, -2).mul_(5)
    x.diagonal(-2, 1, 2).add_(1)
    return x, first.fill_diagonal_(3), torch.diagonal_scatter(n, n[:, 0] + 1, dim1=2, dim2=1)


def reduce_slices(x: Any, n: Any) -> Any:
    index = torch.tensor([0, 2, 2])
    ways = [("amax", True), ("amin", False), ("mean", True), ("mean", False), ("prod", True), ("prod", False)]
    kinds = [x.index_reduce(1, index, 2 * x[:, 1:], way, include_self=own) for way, own in ways]
    return *kinds, n.index_reduce(-1, index, 3 * n[..., :3], "amax", include_self=False)


def list_numbers(x: Any, n: Any) -> Any:
    return x.masked_select(x > 0), n.masked_select(x[..., :1] > 0), torch.pdist(x[:, 1]), torch.pdist(x[:, 2], 1.0)


def transpose_convolutions(x: Any, n: Any) -> Any:
    weight = torch.linspace(-1, 1, 4 * 6 * 9).view(4, 6, 3, 3)
    plane = x.unsqueeze(-1) * x.unsqueeze(2)
    convolve = F.conv_transpose2d
    return (
        convolve(plane, weight, weight[0, :, 0, 0], dilation=3, output_padding=2),
        convolve(plane, weight, None, (1, 2), (2, 0), (2, 1), dilation=3),
        convolve(plane, weight, weight[0, :, 1, 1], 2, 2, 3, dilation=4),
        convolve(plane, weight, None, 2, 1, 1),
        F.conv_transpose1d(
            x, weight[..., 0], weight[0, :, 0, 0].repeat(2), padding=1, output_padding=1, groups=2, dilation=2
        ),
    )


def take_types_of_both(x: Any, n: Any) -> Any:
    aliases = torch.divide, torch.multiply, torch.subtract, torch.greater, torch.less, torch.greater_equal
    pairs = (x, n), (n, x), (n, 2.5), (x, 2), (n, n), (x.double(), n), (n, torch.tensor(2.5, dtype=torch.float64))
    results = [alias(*pair) for alias in (*aliases, torch.less_equal) for pair in pairs]
    powers = n.abs() ** x, x.abs() ** n
    return *results, *powers, torch.multiply(x > 0, n), torch.concat([n, x], 1), torch.concatenate([x, n, x > 0], -1)


def keep_axes_of_norms(x: Any, n: Any) -> Any:
    return torch.linalg.norm(x, keepdim=True), torch.linalg.vector_norm(x, 3.0, keepdim=True), x.norm(), x.norm(dim=1)


def solve_matrices(x: Any, n: Any) -> Any:
    matrix, right = x * torch.tensor([1.0, 0.0, 3.0, 1e-3]), n[..., :3].float()
    solve, triangular = torch.linalg.solve, torch.linalg.solve_triangular
    return (
        torch.linalg.inv(x),
        torch.inverse(x.double()),
        *torch.linalg.inv_ex(x),
        solve(x, right),
        solve(x, right.mT, left=False),
        solve(x, right[..., 0]),
        solve(x, torch.ones(4)),
        solve(torch.eye(4).flip(0) + 0.1, right),
        triangular(x, right, upper=True),
        triangular(x, right.mT, upper=False, left=False),
        triangular(matrix, right, upper=False, unitriangular=True),
    )


def factor_matrices(x: Any, n: Any) -> Any:
    square = x @ x.mT + torch.eye(4)
    return (
        torch.linalg.cholesky(square),
        torch.linalg.cholesky(square.double(), upper=True),
        *torch.linalg.cholesky_ex(square),
        torch.det(x),
        torch.linalg.det(x.flip(1)),
        torch.linalg.det(x * torch.tensor([1.0, 0.0, 1.0, 1.0])),
        torch.logdet(square),
        torch.det(F.pad(square, [0, 30, 0, 30]) + torch.eye(34)),
        torch.logdet(-torch.eye(3) * square[:, :1, :1]),
        *torch.linalg.slogdet(x),
    )


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize(
    "compute",
    [
        compute_extremes_up_to_each_place,
        write_diagonals,
        reduce_slices,
        list_numbers,
        transpose_convolutions,
        take_types_of_both,
        keep_axes_of_norms,
        solve_matrices,
        factor_matrices,
    ],
)
def test_operators_are_those_of_pytorch_at_any_batch(tmp_path: Path, compute: Any) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any, n: Any) -> Any:
            return compute(x, n)

    draw = torch.Generator().manual_seed(0)
    x, n = torch.randn(5, 4, 4, generator=draw), torch.randint(1, 5, (5, 4, 4), generator=draw)
    feeds = {"x": x[:2], "n": n[:2]}
    outputs = Module()(*feeds.values())
    texts = [f"out_{at}:{str(value.dtype)[6:]}:{_write_dims(value)}" for at, value in enumerate(outputs)]
    model = loaded(Module(), feeds, dict.fromkeys(feeds, ("batch", 4, 4)), texts)
    exported(tmp_path, model, exporter="dynamo")
    for many in (feeds, {"x": x, "n": n}):
        assert_answers(tmp_path, many, Module()(*many.values()), 2e-4)


def _write_dims(value: Any) -> str:
    sizes = [*value.shape]
    return ",".join(
        map(str, ["batch", *sizes[1:]] if sizes and sizes[0] == 2 else ["any"] if len(sizes) == 1 else sizes)
    )


def test_a_matrix_of_many_rows_is_refused_with_their_number(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.inv(x)

    line = Module.forward.__code__.co_firstlineno + 1
    model = loaded(Module(), {"x": torch.randn(2, 40, 40)}, {"x": ("batch", 40, 40)}, ["y:float32:batch,40,40"])
    with pytest.raises(ExportError, match=rf"up to 32 rows .* has 40 at .*test_translations.py:{line}"):
        exported(tmp_path, model, exporter="dynamo")
