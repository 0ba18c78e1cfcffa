"""Cross-layer equalization: what it does to chains of layers, and what it leaves alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from enginesmith.calibration.ranges import Ranges
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, validation
from enginesmith.pipeline.passes.rescale import products
from enginesmith.pipeline.passes.rescale.equalize import (
    CrossLayerEqualization,
    EqualizationResult,
    equalize_cross_layer,
)
from enginesmith.pipeline.passes.run import run_pass
from graphs import Weights, artifact, difference, evaluate, measure_ranges, node, normal, operators, save_graph, sqnr_db

SIDE, WIDTH = 8, 6


def image(seed: int = 1, channels: int = 3, batch: int = 4) -> Any:
    return np.random.default_rng(seed).standard_normal((batch, channels, SIDE, SIDE), np.float32)


def scales(count: int, decades: float = 3.0) -> Any:
    """Factors spread over some decades, in no order."""
    return 10 ** np.random.default_rng(5).permutation(np.linspace(0, -decades, count)).astype(np.float32)


def depthwise(folder: Path, between: str = "Relu", uneven: float = 3.0, **bounds: Any) -> Path:
    """Pointwise, depthwise, pointwise: channels of the inner values are apart by up to 10^uneven."""
    first, second = scales(WIDTH, uneven), scales(WIDTH, uneven)[::-1]
    weights = {
        "w1": normal(WIDTH, 3, 1, 1) * first[:, None, None, None],
        "b1": normal(WIDTH, seed=1) * first,
        "w2": normal(WIDTH, 1, 3, 3, seed=2) * (second / first)[:, None, None, None],
        "b2": normal(WIDTH, seed=3) * second,
        "w3": normal(4, WIDTH, 1, 1, seed=4) / second[:, None, None],
        **{name: np.float32(value) for name, value in bounds.items()},
    }
    extra = "".join(f" {name}" for name in bounds)
    nodes = [
        node("Conv", "x w1 b1", "a"),
        node(between, f"a{extra}", "b"),
        node("Conv", "b w2 b2", "c", group=WIDTH, pads=[1, 1, 1, 1]),
        node(between, f"c{extra}", "d"),
        node("Conv", "d w3", "y"),
    ]
    return save_graph(folder, nodes, weights, x=("n", 3, SIDE, SIDE))


def written(path: Path, ranges: Ranges | None = None) -> tuple[Path, EqualizationResult]:
    model = edit.load(path)
    done = equalize_cross_layer(model, ranges)
    out = path.parent / "out"
    out.mkdir(exist_ok=True)
    edit.save(model, out)
    validation.check(out / edit.FILE)
    return out / edit.FILE, done


def naive_int8(path: Path, x: Any) -> Path:
    """Every weight and every activation that a Conv reads in int8, one scale for the whole tensor."""
    inner = [one.input[0] for one in onnx.load(path).graph.node if one.op_type == "Conv" and one.input[0] != "x"]
    amax = {name: max(found.amax) for name, found in measure_ranges(path, x, *inner).channels.items()}
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if tensor.name.startswith("w"):
            step = np.abs(value).max() / 127
            tensor.CopyFrom(numpy_helper.from_array(np.rint(value / step) * step, tensor.name))
    model.graph.initializer.append(numpy_helper.from_array(np.int8(0), "zero"))
    nodes = []
    for one in model.graph.node:
        if one.op_type == "Conv" and (name := one.input[0]) in amax:
            model.graph.initializer.append(numpy_helper.from_array(np.float32(amax[name] / 127), f"{name}_scale"))
            nodes.append(node("QuantizeLinear", f"{name} {name}_scale zero", f"{name}_q"))
            nodes.append(node("DequantizeLinear", f"{name}_q {name}_scale zero", f"{name}_dq"))
            one.input[0] = f"{name}_dq"
        nodes.append(one)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    quantized = path.with_name("quantized.onnx")
    onnx.save(model, quantized)
    return quantized


def test_a_badly_scaled_depthwise_net_survives_int8_afterwards(tmp_path: Path) -> None:
    before = depthwise(tmp_path)
    after, done = written(before)
    x = image()
    assert (done.ties, done.products) == (2, 3)
    assert done.ratio_before > 500
    assert done.ratio_after < 30
    assert difference(before, after, x) < 1e-6
    (expected,) = evaluator.run_graph(before, {"x": x})
    lost, kept = (sqnr_db(expected, evaluator.run_graph(naive_int8(path, x), {"x": x})[0]) for path in (before, after))
    assert lost < 15
    assert kept > lost + 15


def test_ranges_agree_in_both_weights_of_a_pair(tmp_path: Path) -> None:
    """The paper's fixed point, equation 10: the range of a channel is the same before and behind it."""
    after, _ = written(depthwise(tmp_path, uneven=1.5))
    first, second, third = (np.abs(one.weights()) for one in products.find(edit.load(after)))
    inner = second.max(axis=(1, 2))
    np.testing.assert_allclose(first.max(axis=(1, 2)), inner, rtol=1e-2)
    np.testing.assert_allclose(third.max(axis=(0, 2)), inner, rtol=1e-2)


@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_a_constant_behind_a_writer_counts_as_written(tmp_path: Path, operator: str) -> None:
    """Layer scale on one of the branches that a stream adds up: its weight is large, what it adds is not."""
    s, q = scales(WIDTH), scales(WIDTH, 4.0)[::-1]
    weights = {
        "w1": normal(3, WIDTH) * s,
        "w2": normal(3, WIDTH, seed=1) / q,
        "g": np.array(-s * q if operator == "Mul" else -1 / (s * q)),
        "one": np.float32(-0.5),
        "w3": normal(WIDTH, 4, seed=2) / s[:, None],
    }
    nodes = [node("MatMul", "x w1", "a"), node("MatMul", "x w2", "b"), node(operator, "b g", "c")]
    nodes += [node("Mul", "one c", "d"), node("Add", "a d", "e"), node("MatMul", "e w3", "y")]
    before = save_graph(tmp_path, nodes, weights, x=("n", 3))
    after, done = written(before)
    x = normal(8, 3, seed=7)
    assert difference(before, after, x) < 1e-5
    sums = np.abs(evaluate(after, x, "e")["e"]).max(axis=0)
    assert sums.max() / sums.min() < 8
    assert (done.ratio_before > 500, done.ratio_after < 8) == (True, True)


def chain(word: str) -> tuple[list[onnx.NodeProto], Weights, tuple[Any, ...]]:
    """Two products with something between them; the values between are called ``a``, ``b`` …"""
    uneven = scales(WIDTH)
    rows = {"w1": normal(3, WIDTH) * uneven, "b1": normal(WIDTH), "w2": normal(WIDTH, 4) / uneven[:, None]}
    places = {"w1": normal(WIDTH, 3, 3, 3) * uneven[:, None, None, None], "w2": normal(4, WIDTH, 1, 1)}
    flat, pixels = ("n", 3), ("n", 3, SIDE, SIDE)
    match word:
        case "MatMul":
            nodes = [node("MatMul", "x w1", "a"), node("Add", "b1 a", "b"), node("Relu", "b", "c")]
            return [*nodes, node("MatMul", "c w2", "y")], rows, ("n", 5, 3)
        case "Gemm":
            rows["w1"] = rows["w1"].T.copy()
            nodes = [node("Gemm", "x w1 b1", "a", transB=1, alpha=0.5, beta=2.0), node("LeakyRelu", "a", "b")]
            return [*nodes, node("Gemm", "b w2", "y")], rows, flat
        case "PRelu":
            places["slope"] = normal(WIDTH, 1, 1)
            return [node("Conv", "x w1", "a"), node("PRelu", "a slope", "b"), node("Conv", "b w2", "y")], places, pixels
        case "pooling":
            places |= {"axes": np.array([2, 3]), "w2": rows["w2"], "b1": normal(WIDTH)}
            nodes = [node("Conv", "x w1 b1", "a"), node("MaxPool", "a", "b", kernel_shape=[2, 2], strides=[2, 2])]
            nodes += [node("Relu", "b", "c"), node("ReduceMean", "c axes", "d", keepdims=0)]
            return [*nodes, node("Gemm", "d w2", "y")], places, pixels
        case "flatten":
            nodes = [node("Conv", "x w1", "a"), node("GlobalAveragePool", "a", "b"), node("Flatten", "b", "c")]
            return [*nodes, node("MatMul", "c w2", "y")], {**places, "w2": rows["w2"]}, pixels
        case "residual":  # the product in the middle reads and writes what is added up
            places |= {"w3": normal(WIDTH, WIDTH, 1, 1), "b3": normal(WIDTH)}
            nodes = [node("Conv", "x w1", "a"), node("Relu", "a", "b"), node("Conv", "b w3 b3", "c")]
            return [*nodes, node("Add", "c b", "d"), node("Relu", "d", "e"), node("Conv", "e w2", "y")], places, pixels
        case "concat":  # each of the two that are joined is a tie of its own; one has another reader
            places |= {"w3": normal(WIDTH, 3, 3, 3, seed=7) * 50, "w2": normal(4, 2 * WIDTH, 1, 1) / 50}
            places |= {"w4": normal(4, WIDTH, 1, 1) / 50}
            nodes = [
                node("Conv", "x w1", "a"),
                node("Relu", "a", "b"),
                node("Conv", "x w3", "c"),
                node("Relu", "c", "d"),
            ]
            nodes += [node("Concat", "b d", "e", axis=1), node("Conv", "e w2", "f"), node("Conv", "d w4", "g")]
            return [*nodes, node("Add", "f g", "y")], places, pixels
        case "concat of places":
            nodes = [node("Conv", "x w1", "a"), node("Relu", "a", "b"), node("Concat", "b a", "j", axis=2)]
            return [*nodes, node("Conv", "j w2", "y")], places, pixels
        case "concat with two readers":
            places |= {"w2": normal(4, 2 * WIDTH, 1, 1), "w3": normal(4, 2 * WIDTH, 1, 1)}
            nodes = [node("Conv", "x w1", "a"), node("Relu", "a", "b"), node("Concat", "b a", "j", axis=1)]
            nodes += [node("Conv", "j w2", "c"), node("Relu", "j", "k"), node("Conv", "k w3", "d")]
            return [*nodes, node("Add", "c d", "y")], places, pixels
        case "flatten with places":  # each channel meets 4 rows of the matrix
            places |= {"w2": np.repeat(rows["w2"], 4, axis=0) * normal(4 * WIDTH, 4)}
            nodes = [node("Conv", "x w1", "a"), node("MaxPool", "a", "b", kernel_shape=[3, 3], strides=[2, 2])]
            return [*nodes, node("Flatten", "b", "c"), node("MatMul", "c w2", "y")], places, pixels
        case "channel shuffle":
            places |= {"halves": np.array([WIDTH // 2] * 2), "two": np.array([0, 2, WIDTH // 2, SIDE - 2, SIDE - 2])}
            places |= {"one": np.array([0, WIDTH, SIDE - 2, SIDE - 2])}
            nodes = [node("Conv", "x w1", "a"), node("Split", "a halves", "b c", axis=1), node("Relu", "c", "d")]
            nodes += [node("Concat", "b d", "e", axis=1), node("Reshape", "e two", "f")]
            nodes += [node("Transpose", "f", "g", perm=[0, 2, 1, 3, 4]), node("Reshape", "g one", "h")]
            return [*nodes, node("Conv", "h w2", "y")], places, pixels
        case "pixel shuffle":  # four channels become one, with one factor
            rows_of_blocks = np.repeat(uneven[:, None, None, None], 4, 0)
            places |= {
                "w1": normal(4 * WIDTH, 3, 3, 3) * rows_of_blocks,
                "b1": normal(4 * WIDTH) * rows_of_blocks[:, 0, 0, 0],
            }
            nodes = [node("Conv", "x w1 b1", "a"), node("DepthToSpace", "a", "b", blocksize=2, mode="CRD")]
            return [*nodes, node("Relu", "b", "c"), node("Conv", "c w2", "y")], places, pixels
        case "squeeze-and-excitation":
            places |= {"w3": normal(WIDTH, WIDTH, 1, 1)}
            nodes = [node("Conv", "x w1", "a"), node("Relu", "a", "b"), node("GlobalAveragePool", "b", "c")]
            nodes += [node("Conv", "c w3", "d"), node("Sigmoid", "d", "e"), node("Mul", "b e", "f")]
            return [*nodes, node("Conv", "f w2", "y")], places, pixels
        case "groups":
            places |= {"w1": normal(3, WIDTH, 2, 2) * uneven[:, None, None], "w2": normal(4, WIDTH // 2, 3, 3)}
            nodes = [node("ConvTranspose", "x w1", "a", strides=[2, 2]), node("Relu", "a", "b")]
            return [*nodes, node("Conv", "b w2", "y", group=2)], places, pixels
        case _:
            places |= {"w1": normal(3, 2, 2, 2), "w2": normal(WIDTH, 2, 3, 3), "b1": normal(WIDTH) * uneven}
            places["w1"] = np.repeat(places["w1"], 2, 0) * np.logspace(0, -3, 6, dtype=np.float32)[:, None, None, None]
            nodes = [node("ConvTranspose", "x w1 b1", "a", group=3), node("Relu", "a", "b")]
            return [*nodes, node("ConvTranspose", "b w2", "y", group=2)], places, ("n", WIDTH, SIDE, SIDE)


CHAINS = ("MatMul", "Gemm", "PRelu", "pooling", "flatten", "residual", "groups", "transposed groups", "concat")
CHAINS += ("squeeze-and-excitation", "concat of places", "concat with two readers", "flatten with places")
CHAINS += ("channel shuffle", "pixel shuffle")


@pytest.mark.parametrize("word", CHAINS)
def test_chains_keep_their_function(tmp_path: Path, word: str) -> None:
    nodes, weights, shape = chain(word)
    before = save_graph(tmp_path, nodes, weights, x=shape)
    after, done = written(before)
    assert done.ties == (2 if word == "concat" else 1)
    assert done.ratio_after < done.ratio_before
    x = normal(*(4 if size == "n" else size for size in shape))
    assert difference(before, after, x) < 1e-6
    names = [[value for one in onnx.load(path).graph.node for value in one.output] for path in (before, after)]
    assert names[0] == names[1]
    found = {one.name: numpy_helper.to_array(one) for one in onnx.load(after).graph.initializer}
    assert all((found[name] != weights[name]).any() for name in ("w1", "w2"))


def test_what_a_pixel_shuffle_reads_becomes_more_even(tmp_path: Path) -> None:
    nodes, weights, shape = chain("pixel shuffle")
    before = save_graph(tmp_path, nodes, weights, x=shape)
    after, _ = written(before)
    first, second = (spread(path, image(), "a", "b") for path in (before, after))
    assert all(later < earlier / 20 for earlier, later in zip(first, second, strict=True))


def spoiled(word: str) -> tuple[list[onnx.NodeProto], Weights, str]:
    """A chain with something in it that forbids scaling."""
    weights = {"w1": normal(WIDTH, 3, 1, 1) * scales(WIDTH)[:, None, None, None], "w2": normal(3, WIDTH, 1, 1)}
    first, relu, second = node("Conv", "x w1", "a"), node("Relu", "a", "b"), node("Conv", "b w2", "y")
    match word:
        case "another reader":
            return [first, relu, second, node("Neg", "b", "z")], weights, "y z"
        case "an output":
            return [first, relu, second], weights, "y a"
        case "no homogeneous operator":
            return [first, node("Sigmoid", "a", "b"), second], weights, "y"
        case "a residual":
            return [first, node("Sigmoid", "a", "o"), node("Add", "a o", "b"), second], weights, "y"
        case "a square":  # of one number for each channel
            pool, square = node("GlobalAveragePool", "a", "p"), node("Mul", "p p", "b")
            return [first, pool, square, second], weights, "y"
        case "what is joined has another reader":
            weights |= {"w2": normal(3, 2 * WIDTH, 1, 1)}
            nodes = [first, relu, node("Concat", "b a", "j", axis=1), node("Conv", "j w2", "y"), node("Neg", "j", "z")]
            return nodes, weights, "y z"
        case "a shared weight":
            return [first, relu, second, node("Conv", "x w1", "z")], weights, "y z"
        case _:
            return [first, relu, second, node("Neg", "w2", "z")], weights, "y z"


SPOILED = ("another reader", "an output", "no homogeneous operator", "a residual", "a square", "a shared weight")
SPOILED += ("the second", "what is joined has another reader")


@pytest.mark.parametrize("word", SPOILED)
def test_what_cannot_be_scaled_is_left_alone(tmp_path: Path, word: str) -> None:
    nodes, weights, outputs = spoiled(word)
    before = save_graph(tmp_path, nodes, weights, outputs, x=("n", 3, SIDE, SIDE))
    after, done = written(before)
    assert done.ties == 0
    assert difference(before, after, image()) == 0


def test_without_ranges_a_clip_is_not_passed(tmp_path: Path) -> None:
    after, done = written(depthwise(tmp_path, "Clip", low=0, high=6))
    assert (done.ties, done.clips_left, done.clips_replaced) == (0, 2, 0)
    assert operators(after).count("Clip") == 2


def test_a_clip_without_an_upper_bound_is_a_relu(tmp_path: Path) -> None:
    before = depthwise(tmp_path, "Clip", low=0)
    after, done = written(before)
    assert (done.ties, done.clips_left) == (2, 0)
    assert difference(before, after, image()) < 1e-6


def test_a_clip_that_nothing_reaches_becomes_relu(tmp_path: Path) -> None:
    before = depthwise(tmp_path, "Clip", low=0, high=1e4)
    x = image()
    after, done = written(before, measure_ranges(before, x, "b", "d"))
    assert (done.ties, done.clips_left, done.clips_replaced) == (2, 0, 2)
    assert operators(after) == ["Conv", "Relu", "Conv", "Relu", "Conv"]
    assert done.ratio_after < done.ratio_before / 10
    assert difference(before, after, x) < 1e-6


def test_channels_below_the_bound_of_a_clip_are_scaled_up_to_it(tmp_path: Path) -> None:
    before = depthwise(tmp_path, "Clip", low=0, high=2)
    x = image()
    ranges = measure_ranges(before, x, "b", "d")
    reached = {name: np.array(found.amax) >= 2 for name, found in ranges.channels.items()}
    assert all(0 < cut.sum() < WIDTH for cut in reached.values())
    after, done = written(before, ranges)
    assert (done.ties, done.clips_left, done.clips_replaced) == (2, 0, 0)
    assert difference(before, after, x) < 1e-6
    for name, found in measure_ranges(after, x, "b", "d").channels.items():
        amax, given, cut = np.array(found.amax), np.array(ranges.channels[name].amax), reached[name]
        assert (amax[cut] == 2).all()
        assert (amax[~cut & (given < 1.6)] < 1.6001).all()
        assert (amax > 4 * given).any()


def test_channels_of_any_size_become_alike(tmp_path: Path) -> None:
    sizes = np.geomspace(1e-5, 1, WIDTH, dtype=np.float32)
    weights = {"w1": normal(3, WIDTH) * sizes, "w2": normal(WIDTH, 3, seed=1) / sizes[:, None]}
    nodes = [node("MatMul", "x w1", "a"), node("Relu", "a", "b"), node("MatMul", "b w2", "y")]
    before, x = save_graph(tmp_path, nodes, weights, x=("n", 3)), normal(64, 3, seed=2)
    after, done = written(before, measure_ranges(before, x, "b", axis=-1))
    assert done.ratio_before > 1e4
    assert done.ratio_after < 20
    assert difference(before, after, x) < 1e-6


def test_no_value_grows_on_the_data_that_were_seen(tmp_path: Path) -> None:
    """Weights say that small channels should become large; a bias would make them larger than all others."""
    nodes = [node("Conv", "x w1 b1", "a"), node("Relu", "a", "b"), node("Conv", "b w2", "y")]
    weights = {"w1": normal(WIDTH, 3, 1, 1), "b1": np.ones(WIDTH, np.float32), "w2": normal(3, WIDTH, 1, 1)}
    weights["w1"] *= scales(WIDTH)[:, None, None, None]
    before = save_graph(tmp_path, nodes, weights, x=("n", 3, SIDE, SIDE))
    x = image()
    ranges = measure_ranges(before, x, "b")
    largest = max(ranges.channels["b"].amax)
    blind, _ = written(before)
    assert max(measure_ranges(blind, x, "b").channels["b"].amax) > 3 * largest
    after, done = written(before, ranges)
    assert done.ties == 1
    assert max(measure_ranges(after, x, "b").channels["b"].amax) < 1.0001 * largest
    assert difference(before, after, x) < 1e-6


def idle_net(folder: Path, between: str = "Relu", **bounds: float) -> tuple[Path, Any]:
    """Save a net whose hidden channels 0 and 1 no sample wakes; their columns are far larger than the others become."""
    uneven = scales(WIDTH)
    weights = {
        "w": normal(3, WIDTH) * uneven,
        "b": np.zeros(WIDTH, np.float32),
        "v": normal(WIDTH, 4, seed=1) / uneven[:, None],
    }
    weights["b"][:2], weights["v"][:2] = -100, weights["v"][2:].max() * normal(2, 4, seed=2)
    weights |= {name: np.float32(value) for name, value in bounds.items()}
    extra = "".join(f" {name}" for name in bounds)
    nodes = [
        node("MatMul", "x w", "a"),
        node("Add", "a b", "c"),
        node(between, f"c{extra}", "r"),
        node("MatMul", "r v", "y"),
    ]
    return save_graph(folder, nodes, weights, x=("n", 3)), normal(256, 3, seed=7)


def test_columns_of_channels_that_nothing_wakes_match_the_median_live_one(tmp_path: Path) -> None:
    before, x = idle_net(tmp_path)
    after, _ = written(before, measure_ranges(before, x, "r", axis=-1))
    columns = np.abs(products.find(edit.load(after))[1].weights()).max(axis=(0, 2))
    np.testing.assert_allclose(columns[:2], np.sort(columns[2:])[1], rtol=1e-2)
    assert difference(before, after, x) < 1e-5
    awake = 1e7 * x  # wakes them
    assert (evaluate(before, awake, "r")["r"][:, :2] > 0).any(axis=0).all()
    assert difference(before, after, awake) < 1e-5


def test_a_factor_of_a_channel_that_nothing_wakes_has_a_limit(tmp_path: Path) -> None:
    before, x = idle_net(tmp_path)
    model = edit.load(before)
    huge = np.ones((WIDTH, 1), np.float32)
    huge[0] = 1e6
    products.find(model)[1].scale(inputs=huge[:, 0])
    edit.save(model, tmp_path)
    after, _ = written(tmp_path / edit.FILE, measure_ranges(tmp_path / edit.FILE, x, "r", axis=-1))
    first, second = ([one.weights() for one in products.find(edit.load(path))] for path in (before, after))
    np.testing.assert_allclose(second[0][0], first[0][0] * 1024, rtol=1e-5)


def test_what_nothing_wakes_does_not_come_nearer_to_the_bound_of_a_clip(tmp_path: Path) -> None:
    before, x = idle_net(tmp_path, "Clip", low=0, high=1)
    ranges = measure_ranges(before, x, "r", axis=-1)
    after, done = written(before, ranges)
    assert (done.ties, done.clips_replaced) == (1, 0)
    assert difference(before, after, x) < 1e-5
    rows, given = (np.abs(products.find(edit.load(path))[0].weights()[:2]) for path in (after, before))
    assert (rows <= 1.0001 * given).all()


ENDS: dict[str, Weights] = {
    "BatchNormalization": {f"g{index}": np.abs(normal(WIDTH, seed=index)) + 0.5 for index in range(4)},
    "Mul": {"g": normal(WIDTH, 1, 1)},
}


def pre_activation(folder: Path, word: str) -> Path:
    """Two products, with one sum of theirs, in front of what takes factors back; channels are apart by 1000."""
    given, sizes = ENDS[word], scales(WIDTH)[:, None, None, None]
    weights = {"w1": normal(WIDTH, 3, 1, 1) * sizes, "w2": normal(WIDTH, 3, 1, 1, seed=7) * sizes, **given}
    nodes = [node("Conv", "x w1", "a"), node("Conv", "x w2", "b"), node("Add", "a b", "c")]
    nodes += [node(word, f"{value} {' '.join(given)}", f"{value}2") for value in "ac"]
    return save_graph(
        folder, [*nodes, node("Sigmoid", "a2", "y"), node("Sigmoid", "c2", "z")], weights, "y z", x=("n", 3, 8, 8)
    )


def spread(path: Path, x: Any, *values: str) -> list[float]:
    """Measure the largest over the smallest channel of each value."""
    found = evaluate(path, x, *values)
    sizes = [np.abs(found[name]).max(axis=(0, 2, 3)) for name in values]
    return [float(each.max() / each.min()) for each in sizes]


@pytest.mark.parametrize("word", ENDS)
def test_channels_that_only_normalizations_or_factors_read_become_alike(tmp_path: Path, word: str) -> None:
    before, x = pre_activation(tmp_path, word), image()
    ranges = measure_ranges(before, x, "a", "b", "c")
    after, done = written(before, ranges)
    assert min(spread(before, x, "a", "b", "c")) > 100
    assert max(spread(after, x, "a", "b", "c")) < 10
    assert (done.ties, done.leveled.values) == (0, 3)
    assert done.leveled.after < 10 < 100 < done.leveled.before
    values = evaluate(after, x, "a", "b", "c")
    assert all(np.abs(values[name]).max() <= 1.0001 * max(known.amax) for name, known in ranges.channels.items())
    assert difference(before, after, x) < 1e-5


def test_what_only_one_normalization_reads_becomes_as_large_as_the_largest_channel(tmp_path: Path) -> None:
    weights = {"w": normal(WIDTH, 3, 1, 1) * scales(WIDTH, 2.0)[:, None, None, None], **ENDS["BatchNormalization"]}
    nodes = [node("Conv", "x w", "a"), node("Relu", "a", "r"), node("BatchNormalization", "r g0 g1 g2 g3", "y")]
    before, x = save_graph(tmp_path, nodes, weights, x=("n", 3, SIDE, SIDE)), image()
    after, _ = written(before, measure_ranges(before, x, "r"))
    assert spread(after, x, "r")[0] == pytest.approx(1, rel=1e-4)
    assert written(before)[1].leveled.values == 0  # without ranges, nothing is known of them


@pytest.mark.parametrize("contrast", [1.0, 1e-3])
def test_what_an_instance_normalization_reads_stays(tmp_path: Path, contrast: float) -> None:
    """It adds a number to the variance, which is much beside that of a sample of little contrast, whatever was seen."""
    weights = {"w": normal(WIDTH, 3, 1, 1) * scales(WIDTH, 2.0)[:, None, None, None]}
    weights |= {"g": normal(WIDTH), "s": normal(WIDTH, seed=1)}
    nodes = [node("Conv", "x w", "a"), node("InstanceNormalization", "a g s", "b"), node("Sigmoid", "b", "y")]
    before, x = save_graph(tmp_path, nodes, weights, x=("n", 3, SIDE, SIDE)), image()
    after, done = written(before, measure_ranges(before, 100 * x, "a"))
    assert done.leveled.values == 0
    assert difference(before, after, contrast * x) == 0


def test_what_products_read_beside_a_normalization_does_not_outgrow_the_largest_channel(tmp_path: Path) -> None:
    """The weights alone would make the small channels large."""
    weights = {"w1": normal(WIDTH, 3, 1, 1), "b1": np.ones(WIDTH, np.float32), "w2": normal(3, WIDTH, 1, 1)}
    weights |= {"w1": weights["w1"] * scales(WIDTH)[:, None, None, None], **ENDS["BatchNormalization"]}
    nodes = [node("Conv", "x w1 b1", "a"), node("Relu", "a", "b"), node("Conv", "b w2", "y")]
    nodes.append(node("BatchNormalization", "a g0 g1 g2 g3", "z"))
    before, x = save_graph(tmp_path, nodes, weights, "y z", x=("n", 3, SIDE, SIDE)), image()
    ranges = measure_ranges(before, x, "a")
    after, done = written(before, ranges)
    assert (done.ties, done.leveled.values) == (1, 0)
    assert np.abs(evaluate(after, x, "a")["a"]).max() <= 1.0001 * max(ranges.channels["a"].amax)
    assert difference(before, after, x) < 1e-5


def applied(path: Path, out: Path, records: Mapping[str, Artifact] | None = None, **options: Any) -> Effect:
    out.mkdir(parents=True)
    return run_pass(CrossLayerEqualization(**options), artifact(path), out, lambda text: None, records or {})


def test_the_pass_says_what_it_did_and_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    before = depthwise(tmp_path)
    effect = applied(before, tmp_path / "a", external_data_bytes=0)
    applied(before, tmp_path / "b", external_data_bytes=0)
    assert effect.summary.startswith("equalized 2 sets of channels between 3 products; largest channel ratio ")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert difference(before, tmp_path / "a" / effect.file, image()) < 1e-6


def test_what_has_nothing_to_equalize_is_passed_on(tmp_path: Path) -> None:
    nodes, weights, outputs = spoiled("a residual")
    before = save_graph(tmp_path, nodes, weights, outputs, x=("n", 3, SIDE, SIDE))
    effect = applied(before, tmp_path / "a")
    assert "unchanged" in effect.summary
    assert effect.notes == ("no two neighboring layers have channels to equalize",)
    assert (tmp_path / "a" / effect.file).read_bytes() == before.read_bytes()


def test_the_pass_notes_that_channels_in_front_of_normalizations_are_alike(tmp_path: Path) -> None:
    before = pre_activation(tmp_path, "BatchNormalization")
    record = tmp_path / "ranges.json"
    record.write_text(measure_ranges(before, image(), "a", "b", "c").model_dump_json())
    effect = applied(before, tmp_path / "a", {"ranges": artifact(record, "record")})
    assert effect.notes[0].startswith(
        "channels of 3 values that only normalizations or factors read are more alike now; "
    )
    assert difference(before, tmp_path / "a" / effect.file, image()) < 1e-5


def test_the_pass_notes_what_became_of_clips(tmp_path: Path) -> None:
    before = depthwise(tmp_path, "Clip", low=0, high=1e4)
    assert "2 sets of channels were left alone" in applied(before, tmp_path / "blind").notes[1]
    record = tmp_path / "ranges.json"
    record.write_text(measure_ranges(before, image(), "b", "d").model_dump_json())
    effect = applied(before, tmp_path / "seen", {"ranges": artifact(record, "record")})
    assert "2 Clip nodes became Relu" in effect.notes[0]
    other, records = artifact(before, sha256="other"), {"ranges": artifact(record, "record")}
    with pytest.raises(DataError, match="another model"):
        run_pass(CrossLayerEqualization(), other, tmp_path / "seen", lambda text: None, records)


def test_a_shared_bias_stays_with_its_other_reader(tmp_path: Path) -> None:
    weights = {"w1": normal(WIDTH, 3, 1, 1) * scales(WIDTH)[:, None, None, None], "w2": normal(3, WIDTH, 1, 1)}
    weights |= {"b": normal(WIDTH), "w3": normal(WIDTH, 3, 1, 1, seed=3)}
    nodes = [
        node("Conv", "x w1 b", "a"),
        node("Relu", "a", "c"),
        node("Conv", "c w2", "y"),
        node("Conv", "x w3 b", "z"),
    ]
    before = save_graph(tmp_path, nodes, weights, "y z", x=("n", 3, SIDE, SIDE))
    after, done = written(before)
    assert done.ties == 1
    assert difference(before, after, image()) < 1e-6


def test_a_clip_with_another_lower_bound_is_not_passed(tmp_path: Path) -> None:
    before = depthwise(tmp_path, "Clip", low=-1, high=1e4)
    assert written(before, measure_ranges(before, image(), "b", "d"))[1].clips_left == 2


@pytest.mark.parametrize("bound", ["low", "high"])
def test_a_clip_with_a_computed_bound_is_not_passed(tmp_path: Path, bound: str) -> None:
    nodes, weights, _ = spoiled("another reader")
    nodes[1:2] = [node("ReduceMax", "x", bound, keepdims=0), node("Clip", "a low high", "b")]
    weights |= {name: np.float32(value) for name, value in (("low", 0), ("high", 1e4)) if name != bound}
    before = save_graph(tmp_path, nodes[:-1], weights, x=("n", 3, SIDE, SIDE))
    after, done = written(before, measure_ranges(before, image(), "b"))
    assert (done.ties, done.clips_left) == (0, 1)
    assert difference(before, after, image()) == 0


def test_the_range_of_the_whole_value_is_enough_to_pass_a_clip(tmp_path: Path) -> None:
    before = depthwise(tmp_path, "Clip", low=0, high=1e4)
    ranges = measure_ranges(before, image(), "b", "d").model_copy(update={"channels": {}})
    assert written(before, ranges)[1].clips_replaced == 2


def test_a_clip_that_cuts_every_channel_is_not_passed(tmp_path: Path) -> None:
    before = depthwise(tmp_path, "Clip", low=0, high=1e-5)
    after, done = written(before, measure_ranges(before, image(), "b", "d"))
    assert (done.ties, done.clips_left) == (0, 1)  # behind the second one some channels are 0 throughout
    assert difference(before, after, image()) == 0


def test_channels_of_all_experts_become_alike(tmp_path: Path) -> None:
    sizes = scales(3 * WIDTH).reshape(3, 1, WIDTH)
    weights = {"w": normal(3, 5, WIDTH) * sizes, "b": normal(3, 1, WIDTH, seed=1) * sizes}
    weights["v"] = normal(3, WIDTH, 4, seed=2) / sizes.swapaxes(1, 2)
    nodes = [node("MatMul", "x w", "a"), node("Add", "a b", "c"), node("Relu", "c", "r"), node("MatMul", "r v", "y")]
    before, x = save_graph(tmp_path, nodes, weights, x=("n", 1, 7, 5)), normal(2, 1, 7, 5)
    after, done = written(before)
    assert (done.ties, done.products) == (1, 2)
    assert done.ratio_before > 500
    assert done.ratio_after < 5
    assert difference(before, after, x) < 1e-5


def test_no_channel_of_an_expert_grows_beyond_the_largest_of_all(tmp_path: Path) -> None:
    small, read = np.float32([0.01, 0.01, 1, 1, 1, 1]), np.float32([3, 3, 1, 1, 1, 1])
    weights = {"w": normal(3, 5, WIDTH) * small, "b": normal(3, 1, WIDTH, seed=1)}
    weights["b"][..., small < 1] = 30
    weights["v"] = normal(3, WIDTH, 4, seed=2) * read[:, None]
    nodes = [node("MatMul", "x w", "a"), node("Add", "a b", "c"), node("Relu", "c", "r"), node("MatMul", "r v", "y")]
    before, x = save_graph(tmp_path, nodes, weights, x=("n", 3, 7, 5)), normal(8, 3, 7, 5)
    after, done = written(before, measure_ranges(before, x, "r", axis=-1))
    assert done.ties == 1
    assert evaluate(after, x, "r")["r"].max() <= 1.001 * evaluate(before, x, "r")["r"].max()
    assert difference(before, after, x) < 1e-5
