"""Graphs in torch: what ONNX Runtime computes, gradients through Q/DQ pairs, and weights put back where they were."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.frameworks.torch.graph import GraphModule, load_graph, save_graph
from graphs import evaluate, node, normal, run_model
from graphs import save_graph as write_graph

QDQ = [
    node("QuantizeLinear", "x xs xz", "xq"),
    node("DequantizeLinear", "xq xs xz", "xd"),
    node("DequantizeLinear", "w ws wz", "wd", axis=0),
    node("DequantizeLinear", "b bs bz", "bd", axis=0),
    node("Conv", "xd wd bd", "c"),
    node("Relu", "c", "r"),
    node("GlobalAveragePool", "r", "g"),
    node("Flatten", "g", "f"),
    node("MatMul", "f m", "p"),
    node("Add", "p n", "y"),
]


SCALES = "model.scales"


def quantized(**changes: Any) -> dict[str, Any]:
    """Weights of the graph above: activations in uint8 with a zero point, weights in int8 by channel."""
    levels = np.clip(np.rint(normal(4, 3, 3, 3) * 50), -127, 127).astype(np.int8)
    levels[:, 0, 0, 0] = 127
    scale = np.asarray([0.01, 0.02, 0.005, 0.03], np.float32)
    return {
        "xs": np.float32(0.02),
        "xz": np.uint8(100),
        "w": levels,
        "ws": scale,
        "wz": np.zeros(4, np.int8),
        "b": np.asarray([100, -2000, 0, 30000], np.int32),
        "bs": scale * np.float32(0.02),
        "bz": np.zeros(4, np.int32),
        "m": normal(4, 5, seed=1),
        "n": normal(5, seed=2),
        **changes,
    }


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return write_graph(tmp_path, QDQ, quantized(), x=("batch", 3, 8, 8))


def step(path: Path, rate: float) -> Any:
    """Load the graph, and go one step of all weights against the square of the output; scales stay."""
    loaded = load_graph(path)
    (output,) = loaded.module(torch.from_numpy(normal(2, 3, 8, 8)))
    output.square().sum().backward()
    with torch.no_grad():
        for name, value in loaded.module.named_parameters():
            value -= 0.0 if name == SCALES else rate * value.grad
    return loaded


def weights(path: Path) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_a_quantized_graph_is_computed_as_by_onnx_runtime(graph: Path) -> None:
    x = normal(2, 3, 8, 8)
    loaded = load_graph(graph)
    (output,) = loaded.module(torch.from_numpy(x))
    assert [spec.name for spec in loaded.signature.inputs] == ["x"]
    np.testing.assert_allclose(output.detach().numpy(), evaluate(graph, x)["y"], atol=1e-5)


def test_experts_are_trained_on_the_steps_of_their_columns(tmp_path: Path) -> None:
    nodes = [*QDQ[:2], node("DequantizeLinear", "w ws wz", "wd", axis=1, block_size=4), node("MatMul", "xd wd", "y")]
    levels = np.clip(np.rint(normal(3, 4, 2) * 50), -127, 127).astype(np.int8)
    scale = np.abs(normal(3, 1, 2, seed=1)) / 50
    given = {"xs": np.float32(0.02), "xz": np.uint8(100), "w": levels, "ws": scale, "wz": np.zeros((3, 1, 2), np.int8)}
    path, out, x = write_graph(tmp_path, nodes, given, opset=21, x=("n", 5, 4)), tmp_path / "out", normal(1, 5, 4)
    out.mkdir()
    loaded = load_graph(path)
    (output,) = loaded.module(torch.from_numpy(x))
    np.testing.assert_allclose(output.detach().numpy(), evaluate(path, x)["y"], atol=1e-5)
    output.square().sum().backward()
    with torch.no_grad():
        for name, value in loaded.module.named_parameters():
            value -= 0.0 if name == SCALES else 1e-3 * value.grad
    save_graph(path, loaded, out, edit.EXTERNAL_DATA_BYTES)
    after = weights(out / edit.FILE)
    assert {name for name in given if not np.array_equal(after[name], given[name])} == {"w"}
    (output,) = loaded.module(torch.from_numpy(x))
    np.testing.assert_allclose(evaluate(out / edit.FILE, x)["y"], output.detach().numpy(), atol=1e-4)


def test_a_pair_without_a_zero_point_rounds_to_uint8(tmp_path: Path) -> None:
    nodes = [node("QuantizeLinear", "x s", "q"), node("DequantizeLinear", "q s", "y")]
    path, x = write_graph(tmp_path, nodes, {"s": np.float32(0.05)}, x=("batch", 4)), normal(3, 4)
    (output,) = load_graph(path).module(torch.from_numpy(x))
    np.testing.assert_allclose(output.detach().numpy(), evaluate(path, x)["y"], atol=1e-6)


def test_all_weights_and_the_scales_of_activations_are_trained(graph: Path) -> None:
    loaded = step(graph, 0.0)
    shapes = sorted(tuple(value.shape) for value in loaded.module.parameters())
    assert shapes == [(1,), (4,), (4, 3, 3, 3), (4, 5), (5,)]
    assert all(float(value.grad.abs().sum()) > 0 for value in loaded.module.parameters())


def test_trained_weights_are_levels_of_the_same_scales(graph: Path, tmp_path: Path) -> None:
    loaded, out = step(graph, 1e-3), tmp_path / "out"
    out.mkdir()
    save_graph(graph, loaded, out, edit.EXTERNAL_DATA_BYTES)
    before, after, x = weights(graph), weights(out / edit.FILE), normal(2, 3, 8, 8, seed=5)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"w", "b", "m", "n"}
    assert {name: after[name].dtype for name in before} == {name: value.dtype for name, value in before.items()}
    (output,) = loaded.module(torch.from_numpy(x))
    # a bias is rounded only when it is written, to a step of 6e-4 at most
    np.testing.assert_allclose(evaluate(out / edit.FILE, x)["y"], output.detach().numpy(), atol=1e-3)


def test_a_trained_scale_is_written_for_its_pair_and_for_the_bias(graph: Path, tmp_path: Path) -> None:
    """A bias in int32 counts in steps of the product of both scales, which ONNX Runtime does not check."""
    loaded, out, x = load_graph(graph), tmp_path / "out", normal(2, 3, 8, 8, seed=5)
    with torch.no_grad():
        dict(loaded.module.named_parameters())[SCALES].fill_(np.log(1.5) / 25)
    out.mkdir()
    save_graph(graph, loaded, out, edit.EXTERNAL_DATA_BYTES)
    after, given = weights(out / edit.FILE), quantized()
    nodes = {made.output[0]: made for made in onnx.load(out / edit.FILE).graph.node}
    assert [after[nodes[name].input[1]] for name in ("xq", "xd")] == pytest.approx([0.03] * 2)
    np.testing.assert_allclose(after[nodes["bd"].input[1]], given["ws"] * after[nodes["xd"].input[1]], rtol=1e-6)
    np.testing.assert_allclose(after["b"], given["b"] / 1.5, atol=0.51)
    (output,) = loaded.module(torch.from_numpy(x))
    np.testing.assert_allclose(evaluate(out / edit.FILE, x)["y"], output.detach().numpy(), atol=1e-3)


@pytest.mark.parametrize("operator", ["Conv", "Gemm"])
def test_biases_of_channels_that_died_still_fit_where_a_scale_shrinks(operator: str, tmp_path: Path) -> None:
    """Their weights have scales so fine that the bias just fits an int32, in steps of the product of both scales."""
    dead = np.asarray([5.0, -3.0, 0.5, 1.0], np.float32)
    fine = np.maximum([0.0, 0.0, 0.01, 0.01], np.abs(dead) / 0.02 / 2**30).astype(np.float32)
    levels = quantized()["w"] if operator == "Conv" else quantized()["w"][:, :, 0, 0].T.copy()
    axis = 0 if operator == "Conv" else 1
    levels = levels // 2  # 7 bits: without VNNI, products of 8 bits overflow in ONNX Runtime
    np.moveaxis(levels, axis, 0)[:2] = 0
    nodes = [*QDQ[:2], node("DequantizeLinear", "w ws wz", "wd", axis=axis)]
    given = quantized(w=levels, ws=fine, b=dead)
    if operator == "Gemm":
        nodes.append(node("DequantizeLinear", "b bs bz", "bd", axis=0))
        given |= {"b": np.rint(dead / (0.02 * fine)).astype(np.int32), "bs": (0.02 * fine).astype(np.float32)}
    nodes.append(node(operator, "xd wd bd" if operator == "Gemm" else "xd wd b", "c"))
    nodes += [node("QuantizeLinear", "c cs cz", "cq"), node("DequantizeLinear", "cq cs cz", "y")]
    given |= {"cs": np.float32(0.05), "cz": np.uint8(128)}
    used = {name for made in nodes for name in made.input}
    shape = ("batch", 3, 8, 8) if operator == "Conv" else ("batch", 3)
    path = write_graph(tmp_path, nodes, {name: value for name, value in given.items() if name in used}, x=shape)
    loaded, out, x = load_graph(path), tmp_path / "out", normal(2, *shape[1:])
    with torch.no_grad():
        dict(loaded.module.named_parameters())[SCALES][0] = np.log(0.4) / 25
    out.mkdir()
    save_graph(path, loaded, out, edit.EXTERNAL_DATA_BYTES)
    (output,), given = loaded.module(torch.from_numpy(x)), {"x": x}
    found = run_model(edit.load(out / edit.FILE), given)["y"]  # in integers: without optimization, it is in floats
    np.testing.assert_allclose(found, output.detach().numpy(), atol=0.0501)  # a step


def test_a_bias_of_one_number_for_all_channels_stays(tmp_path: Path) -> None:
    nodes = [*QDQ[:2], node("DequantizeLinear", "w ws wz", "wd", axis=1), node("Gemm", "xd wd b", "y")]
    given = quantized(w=quantized()["w"][:, :, 0, 0].T.copy(), b=np.asarray([2.0], np.float32))
    used = {name for made in nodes for name in made.input}
    weights_of = {name: value for name, value in given.items() if name in used}
    path, out, x = write_graph(tmp_path, nodes, weights_of, x=("batch", 3)), tmp_path / "out", normal(2, 3)
    loaded = load_graph(path)
    with torch.no_grad():
        dict(loaded.module.named_parameters())[SCALES].fill_(np.log(0.4) / 25)
    out.mkdir()
    save_graph(path, loaded, out, edit.EXTERNAL_DATA_BYTES)
    (output,) = loaded.module(torch.from_numpy(x))
    np.testing.assert_allclose(evaluate(out / edit.FILE, x)["y"], output.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("between", ["Identity", "Relu"])
def test_scales_stay_where_a_bias_counts_in_steps_of_one_that_is_not_known(between: str, tmp_path: Path) -> None:
    nodes = [*QDQ[:2], node(between, "xd", "between"), *QDQ[2:4], node("Conv", "between wd bd", "y")]
    given = {name: value for name, value in quantized().items() if name not in "mn"}
    loaded = load_graph(write_graph(tmp_path, nodes, given, x=("batch", 3, 8, 8)))
    assert SCALES not in dict(loaded.module.named_parameters())


def test_constants_that_are_rounded_keep_their_scale(tmp_path: Path) -> None:
    nodes = [node("QuantizeLinear", "k s z", "q"), node("DequantizeLinear", "q s z", "d"), node("Add", "x d", "y")]
    weights = {"k": normal(4), "s": np.float32(0.02), "z": np.uint8(128)}
    loaded = load_graph(write_graph(tmp_path, nodes, weights, x=("batch", 4)))
    assert SCALES not in dict(loaded.module.named_parameters())


def test_scales_that_are_equal_stay_equal(tmp_path: Path) -> None:
    """Kernels for pooling and concatenation need them so."""
    nodes = [
        *(node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "d")),
        node("MaxPool", "d", "p", kernel_shape=[2, 2]),
        *(node("QuantizeLinear", "p s2 z", "q2"), node("DequantizeLinear", "q2 s2 z", "d2")),
        *(node("QuantizeLinear", "d2 t z", "q3"), node("DequantizeLinear", "q3 t z", "y")),
    ]
    scales = {"s": np.float32(0.02), "s2": np.float32(0.02), "t": np.float32(0.03), "z": np.uint8(9)}
    path, out = write_graph(tmp_path, nodes, scales, x=("batch", 1, 4, 4)), tmp_path / "out"
    out.mkdir()
    loaded = load_graph(path)
    with torch.no_grad():
        dict(loaded.module.named_parameters())[SCALES].copy_(torch.tensor([0.01, -0.01]))
    save_graph(path, loaded, out, edit.EXTERNAL_DATA_BYTES)
    after, made = weights(out / edit.FILE), onnx.load(out / edit.FILE).graph.node
    found = [float(after[each.input[1]]) for each in made if each.op_type.endswith("Linear")]
    expected = np.repeat([0.02 * np.exp(0.25), 0.02 * np.exp(0.25), 0.03 * np.exp(-0.25)], 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    x = normal(2, 1, 4, 4)
    (output,) = loaded.module(torch.from_numpy(x))
    np.testing.assert_allclose(evaluate(out / edit.FILE, x)["y"], output.detach().numpy(), atol=1e-6)


def test_a_scale_learns_the_range_that_is_there(tmp_path: Path) -> None:
    """A scale that is four times too coarse is trained to one with less error than half of it would leave."""
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")]
    path = write_graph(tmp_path, nodes, {"s": np.float32(4 / 128), "z": np.uint8(128)}, x=("batch", 64))
    loaded, x = load_graph(path), torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    optimizer = torch.optim.Adam(loaded.module.parameters(), lr=2e-3)
    errors = []
    for _ in range(100):
        error = (loaded.module(x)[0] - x).square().mean()
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
        errors.append(float(error.detach()))
    assert errors[-1] < errors[0] / 8


def test_without_a_step_the_weights_are_those_of_before(graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_graph(graph, load_graph(graph), out, edit.EXTERNAL_DATA_BYTES)
    before, after = weights(graph), weights(out / edit.FILE)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_weights_of_seven_bits_stay_within_them(tmp_path: Path) -> None:
    given = quantized(w=np.clip(quantized()["w"], -63, 63))
    path, out = write_graph(tmp_path, QDQ, given, x=("batch", 3, 8, 8)), tmp_path / "out"
    out.mkdir()
    save_graph(path, step(path, 10.0), out, edit.EXTERNAL_DATA_BYTES)
    assert np.abs(weights(out / edit.FILE)["w"].astype(int)).max() == 63


def test_values_outside_of_the_grid_pass_no_gradient(graph: Path) -> None:
    loaded = load_graph(graph)
    x = torch.full((1, 3, 8, 8), 50.0, requires_grad=True)
    (output,) = loaded.module(x)
    output.sum().backward()
    assert x.grad is not None
    assert float(x.grad.abs().sum()) == 0.0


def test_zeros_of_a_sparse_weight_stay(tmp_path: Path) -> None:
    sparse = normal(8, 6, seed=3)
    sparse[::2] = 0
    nodes, out = [node("MatMul", "x w", "h"), node("Add", "h b", "y")], tmp_path / "out"
    path = write_graph(tmp_path, nodes, {"w": sparse, "b": normal(6)}, x=("batch", 8))
    out.mkdir()
    loaded = load_graph(path)
    (output,) = loaded.module(torch.from_numpy(normal(4, 8)))
    output.square().sum().backward()
    with torch.no_grad():
        for value in loaded.module.parameters():
            value -= 0.1 * torch.ones_like(value)
    save_graph(path, loaded, out, edit.EXTERNAL_DATA_BYTES)
    found = weights(out / edit.FILE)["w"]
    assert np.array_equal(found == 0, sparse == 0)
    np.testing.assert_allclose(found[1::2], sparse[1::2] - 0.1, atol=1e-6)


@pytest.mark.parametrize("shape", [(6,), (1, 6)])
def test_zeros_of_a_bias_are_trained(tmp_path: Path, shape: tuple[int, ...]) -> None:
    nodes = [node("MatMul", "x w", "h"), node("Add", "h b", "y")]
    path = write_graph(tmp_path, nodes, {"w": normal(8, 6), "b": np.zeros(shape, np.float32)}, x=("batch", 8))
    module = load_graph(path).module.model
    assert isinstance(module, GraphModule)
    assert not module._masks


def test_levels_at_zero_stay_only_where_there_is_a_pattern(tmp_path: Path) -> None:
    """Rounding alone makes many zeros where one channel is large; those may change."""
    by_chance = np.where(np.random.default_rng(0).random((4, 3, 3, 3)) < 0.6, 0, quantized()["w"]).astype(np.int8)
    assert np.mean(by_chance == 0) > 0.5
    path = write_graph(tmp_path, QDQ, quantized(w=by_chance), x=("batch", 3, 8, 8))
    module = load_graph(path).module.model
    assert isinstance(module, GraphModule)
    assert not module._masks
    pattern = np.ones((4, 4, 3, 3), np.int8)
    pattern[:, ::2] = 0
    path = write_graph(tmp_path / "pattern", QDQ, quantized(w=pattern), x=("batch", 4, 8, 8))
    module = load_graph(path).module.model
    assert isinstance(module, GraphModule)
    assert list(module._masks) == ["w"]


@pytest.mark.parametrize("lowest", [-np.inf, -1e5])
def test_masks_and_numbers_are_no_weights(tmp_path: Path, lowest: float) -> None:
    mask = np.asarray([0, lowest, 0, 0], np.float32)
    nodes = [node("Add", "x mask", "a"), node("Softmax", "a", "s"), node("Mul", "s two", "y")]
    path = write_graph(tmp_path, nodes, {"mask": mask, "two": np.float32(2)}, x=("batch", 4))
    assert not list(load_graph(path).module.parameters())


@pytest.mark.parametrize(
    ("nodes", "vector", "trained"),
    [
        ([node("MatMul", "x w", "h"), node("Mul", "h v", "y")], (4,), True),
        ([node("MatMul", "x w", "h"), node("Mul", "v h", "y")], (4, 1), False),
        ([node("MatMul", "x w", "h"), node("Add", "h b", "i"), node("Mul", "i v", "y")], (4,), True),
        ([node("MatMul", "x w", "h"), node("Reshape", "h s", "i"), node("Mul", "i v", "y")], (4,), False),
        (
            [node("MatMul", "x w", "h"), node("Sqrt", "x", "r"), node("Div", "h r", "i"), node("Mul", "i v", "y")],
            (4, 1),
            True,
        ),
        ([node("Conv", "x w1", "h"), node("Mul", "h v", "y")], (4, 1), True),
        ([node("Conv", "x w1", "h"), node("Mul", "h v", "y")], (4,), False),
        ([node("Cos", "x", "h"), node("Mul", "h v", "y")], (4,), False),
    ],
)
def test_vectors_are_trained_along_channels_only(tmp_path: Path, nodes: Any, vector: Any, trained: bool) -> None:
    """Not frequencies of positions, or strides of boxes."""
    constants = {"w": normal(4, 4), "w1": normal(4, 4, 1), "b": normal(4), "s": np.asarray([-1, 4, 4])}
    used = {name: value for name, value in constants.items() if any(name in one.input for one in nodes)}
    path = write_graph(tmp_path, nodes, {**used, "v": normal(*vector, seed=3)}, x=("batch", 4, 4))
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(path)), path)
    module = load_graph(path).module.model
    assert isinstance(module, GraphModule)
    assert (module._constants["v"] in module._parameters) == trained


NORMS = [node("BatchNormalization", f"{x} one zero zero one", y) for x, y in (("x", "a"), ("r", "b"))]
NORMS = [NORMS[0], node("Sigmoid", "a", "r"), NORMS[1], node("Conv", "b w zero", "y")]


def test_statistics_stay_that_are_one_constant_with_weights(tmp_path: Path) -> None:
    """An export merges the bias and the means of a new batch normalization, and its scale and variances."""
    merged = {"one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32), "w": normal(4, 4, 1, 1)}
    path, x = write_graph(tmp_path / "given", NORMS, merged, x=("n", 4, 6, 6)), normal(2, 4, 6, 6)
    loaded = load_graph(path)
    (output,) = loaded.module(torch.from_numpy(x))
    (output - 1).square().sum().backward()
    with torch.no_grad():
        for value in loaded.module.parameters():
            value -= 1e-3 * value.grad
        (trained,) = loaded.module(torch.from_numpy(x))
    save_graph(path, loaded, tmp_path, edit.EXTERNAL_DATA_BYTES)
    np.testing.assert_allclose(evaluate(tmp_path / edit.FILE, x)["y"], trained.numpy(), atol=1e-5)
    stored = weights(tmp_path / edit.FILE)
    first, second = (each for each in onnx.load(tmp_path / edit.FILE).graph.node if each.op_type[:5] == "Batch")
    assert [list(each.input[3:]) for each in (first, second)] == [["zero", "one"]] * 2
    assert (stored["zero"] == 0).all()
    assert (stored["one"] == 1).all()
    own = [stored[each.input[index]] for each in (first, second) for index in (1, 2)]
    assert len({values.tobytes() for values in own} | {stored["zero"].tobytes(), stored["one"].tobytes()}) == 6


def test_zero_points_stay_that_are_one_constant_with_a_bias(tmp_path: Path) -> None:
    """A bias of zeros in int32 and its zero points are equal."""
    merged = quantized(b=np.zeros(4, np.int32))
    del merged["bz"]
    nodes = [node("DequantizeLinear", "b bs b", "bd", axis=0) if each.output[0] == "bd" else each for each in QDQ]
    path = write_graph(tmp_path / "given", nodes, merged, x=("batch", 3, 8, 8))
    save_graph(path, step(path, 1e-2), tmp_path, edit.EXTERNAL_DATA_BYTES)
    stored, (bias,) = (
        weights(tmp_path / edit.FILE),
        [each for each in onnx.load(tmp_path / edit.FILE).graph.node if each.output[0] == "bd"],
    )
    assert (stored[bias.input[2]] == 0).all()
    assert (stored[bias.input[0]] != 0).all()


def test_a_table_that_a_product_has_too_stays_one(tmp_path: Path) -> None:
    nodes = [node("Gather", "t i", "g"), node("Mul", "x g", "m"), node("MatMul", "m t", "y")]
    path = write_graph(tmp_path, nodes, {"t": normal(4, 4), "i": np.asarray([0, 2])}, x=(2, 4))
    assert [name for name, _ in load_graph(path).module.named_parameters()] == ["model.constant 0"]


def test_constants_in_nodes_are_trained_too(tmp_path: Path) -> None:
    value = onnx.numpy_helper.from_array(normal(4, 2), "w")
    nodes = [onnx.helper.make_node("Constant", [], ["w"], "c", value=value), node("MatMul", "x w", "y")]
    path = write_graph(tmp_path, nodes, {}, x=("batch", 4))
    assert [tuple(one.shape) for one in load_graph(path).module.parameters()] == [(4, 2)]


@pytest.mark.parametrize(
    ("nodes", "weights", "message"),
    [
        ([node("NonZero", "x", "i"), node("Unique", "i", "y")], {}, "Unique"),
        (
            [node("QuantizeLinear", "x s z", "q"), node("MatMulInteger", "q q", "m"), node("Identity", "m", "y")],
            {"s": np.float32(1), "z": np.uint8(0)},
            "something else than DequantizeLinear reads it",
        ),
        (
            [node("Abs", "x", "s"), node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")],
            {"z": np.uint8(0)},
            "its scale is no constant",
        ),
        (
            [node("DequantizeLinear", "w s z", "d", axis=0, block_size=2), node("MatMul", "x d", "y")],
            {"w": np.ones((4, 4), np.int8), "s": np.ones((2, 4), np.float32), "z": np.zeros((2, 4), np.int8)},
            "several in a column",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, nodes: Any, weights: Any, message: str) -> None:
    path = tmp_path / "model.onnx"
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            nodes,
            "net",
            [onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
            [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 21)],
    )
    onnx.save(model, path)
    with pytest.raises(ModelError, match=message):
        GraphModule(edit.load(path))


def test_nodes_are_found_by_the_value_that_they_make(graph: Path) -> None:
    module = load_graph(graph).module.model
    paths = [path for path, _ in module.named_modules() if path]
    assert paths == [f"value {name}" for name in ["xq", "xd", "wd", "bd", "c", "r", "g", "f", "p", "y"]]
