"""Bias correction: the mean of a product is what it was before its weight was rounded."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.calibration.ranges import ChannelStatistics, Provenance, Ranges
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.quantize.layers import find_channel_statistics
from enginesmith.pipeline.passes.quantize.quantizers import correct_bias
from graphs import Weights, build_graph, node, normal, parse_graph, run_model

CHANNELS, OUTPUTS, SIDE = 4, 6, 9


def built(nodes: list[Any], weights: Weights, shape: tuple[int, ...], outputs: str = "y") -> ir.Model:
    return ir.from_proto(build_graph(nodes, weights, outputs, x=shape))


def answers(model: ir.Model, x: Any) -> list[Any]:
    return list(run_model(model, {"x": x}).values())


def rounded(weight: Any, step: float = 0.5) -> Any:
    """Rounded down, so that every output loses: the worst that a bias can make up for."""
    return (np.floor(weight / step) * step).astype(np.float32)


def product(word: str) -> tuple[ir.Model, tuple[int, ...], int]:
    """A product ``y`` with the weight ``w``, the shape of its input, and the axis of its channels."""
    pixels = (2, CHANNELS, SIDE, SIDE)
    places: Weights = {"w": normal(OUTPUTS, CHANNELS, 3, 3), "b": normal(OUTPUTS, seed=1)}
    square: Weights = {"w": normal(CHANNELS, CHANNELS), "b": normal(CHANNELS, seed=1)}
    match word:
        case "Conv":
            return built([node("Conv", "x w b", "y")], places, pixels), pixels, 1
        case "Conv without bias":
            return built([node("Conv", "x w", "y")], {"w": places["w"]}, pixels), pixels, 1
        case "Conv with groups":
            places["w"] = normal(OUTPUTS, CHANNELS // 2, 3, 3)
            return built([node("Conv", "x w b", "y", group=2)], places, pixels), pixels, 1
        case "ConvTranspose":
            places |= {"w": normal(CHANNELS, OUTPUTS // 2, 4, 4)}
            nodes = [node("ConvTranspose", "x w b", "y", group=2, strides=[2, 2], pads=[3, 3, 3, 3])]
            return built(nodes, places, pixels), pixels, 1
        case "Gemm":
            nodes = [node("Gemm", "x w b", "y", transB=1, alpha=0.5, beta=4.0)]
            return built(nodes, square, (2, CHANNELS)), (2, CHANNELS), -1
        case "Gemm without bias":
            return built([node("Gemm", "x w", "y")], {"w": square["w"]}, (2, CHANNELS)), (2, CHANNELS), -1
    nodes = [node("MatMul", "x w", "p"), node("Add", "b p", "y")]
    return built(nodes, square, (2, 3, CHANNELS)), (2, 3, CHANNELS), -1


CASES = ("Conv", "Conv without bias", "Conv with groups", "ConvTranspose", "Gemm", "Gemm without bias", "MatMul")


@pytest.mark.parametrize("word", CASES)
def test_an_input_that_is_its_mean_gives_what_it_gave(word: str) -> None:
    model, shape, axis = product(word)
    mean = normal(CHANNELS, seed=2) + 3
    x = np.zeros(shape, np.float32) + mean.reshape(-1, *(1,) * (len(shape) - 2 if axis == 1 else 0))
    (expected,) = answers(model, x)
    weight = model.graph.initializers["w"]
    given = weight.const_value.numpy()
    weight.const_value = ir.tensor(rounded(given), name="w")
    (lost,) = answers(model, x)
    assert np.abs(expected - lost).max() > 1
    assert correct_bias(model.graph[0], given, rounded(given), mean)
    (found,) = answers(model, x)
    axes = tuple(range(found.ndim)[:1] if axis == -1 else (0, 2, 3))
    np.testing.assert_allclose(found.mean(axes), expected.mean(axes), atol=2e-4)


def test_the_mean_shift_of_real_activations_goes() -> None:
    """Behind a Relu the means are far from 0, and what is lost is not noise alone."""
    shape = (64, CHANNELS, SIDE, SIDE)
    model = built([node("Conv", "x w", "y")], {"w": normal(OUTPUTS, CHANNELS, 3, 3)}, shape)
    x = np.maximum(normal(*shape) + normal(CHANNELS, 1, 1, seed=5), 0)
    (expected,) = answers(model, x)
    weight = model.graph.initializers["w"]
    given = weight.const_value.numpy()
    step = np.abs(given).max() / 7
    narrow = (np.rint(given / step) * step).astype(np.float32)
    weight.const_value = ir.tensor(narrow, name="w")
    shifts, errors = [], []
    for _ in range(2):
        error = answers(model, x)[0] - expected
        shifts.append(np.abs(error.mean((0, 2, 3))).max())
        errors.append((error**2).mean())
        correct_bias(model.graph[0], given, narrow, x.mean((0, 2, 3)))
    assert shifts[0] > 0.1
    assert shifts[1] < 0.02 * shifts[0]
    assert errors[1] < 0.95 * errors[0]


def test_another_reader_of_the_bias_keeps_it() -> None:
    weights = {"w": normal(CHANNELS, CHANNELS), "b": normal(CHANNELS, seed=1)}
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b", "y"), node("Add", "x b", "z")]
    model = built(nodes, weights, (2, CHANNELS), "y z")
    x = np.ones((2, CHANNELS), np.float32)
    before = answers(model, x)
    given = weights["w"]
    assert correct_bias(model.graph[0], given, rounded(given), np.ones(CHANNELS))
    after = answers(model, x)
    assert (before[1] == after[1]).all()
    assert (before[0] != after[0]).all()


def test_a_bias_that_is_an_output_stays_as_it_is() -> None:
    weights = {"w": normal(OUTPUTS, CHANNELS, 3, 3), "b": normal(OUTPUTS, seed=1)}
    model = built([node("Conv", "x w b", "y")], weights, (2, CHANNELS, SIDE, SIDE), "y b")
    x = np.ones((2, CHANNELS, SIDE, SIDE), np.float32)
    before = answers(model, x)
    assert correct_bias(model.graph[0], weights["w"], rounded(weights["w"]), np.ones(CHANNELS))
    after = answers(model, x)
    assert (before[1] == after[1]).all()
    assert (before[0] != after[0]).all()


def test_branches_get_numbers_of_their_own() -> None:
    model = parse_graph(
        """net (bool c, float[2] x) => (float[2] y, float[2] b) {
            y = If (c) <
                then_branch = t () => (float[2] p) { p = Add(x, b) },
                else_branch = e () => (float[2] q) { q = Sub(x, b) }>
        }""",
        b=np.ones(2, np.float32),
    )
    for name, factor in (("then_branch", 3.0), ("else_branch", 5.0)):
        edit.multiply(model.graph[0].attributes[name].as_graph()[0], 1, np.float32(factor))
    x = np.zeros(2, np.float32)
    for condition, expected in ((True, 3), (False, -5)):
        found = run_model(model, {"c": np.array(condition), "x": x})
        assert [found["y"].tolist(), found["b"].tolist()] == [[expected] * 2, [1, 1]]


@pytest.mark.parametrize("word", ["no addition", "two readers", "a computed addend"])
def test_where_there_is_no_place_nothing_is_done(word: str) -> None:
    weights = {"w": normal(CHANNELS, CHANNELS), "b": normal(CHANNELS, seed=1)}
    first = node("MatMul", "x w", "p")
    nodes = {
        "no addition": [first, node("Relu", "p", "y")],
        "two readers": [first, node("Relu", "p", "r"), node("Add", "p r", "y")],
        "a computed addend": [first, node("Add", "p x", "y")],
    }[word]
    model = built(nodes, weights, (2, CHANNELS))
    given = ir.to_proto(model).SerializeToString()
    assert not correct_bias(model.graph[0], weights["w"], rounded(weights["w"]), np.ones(CHANNELS))
    assert ir.to_proto(model).SerializeToString() == given


@pytest.mark.parametrize("weight", [(CHANNELS,), (CHANNELS, CHANNELS, CHANNELS), (2, 3, CHANNELS, OUTPUTS)])
def test_a_weight_that_is_no_matrix_is_left_out(weight: tuple[int, ...]) -> None:
    weights = {"w": normal(*weight), "b": normal(weight[-1], seed=1)}
    model = built([node("MatMul", "x w", "p"), node("Add", "p b", "y")], weights, (2, CHANNELS, CHANNELS))
    given = ir.to_proto(model).SerializeToString()
    assert not correct_bias(model.graph[0], weights["w"], rounded(weights["w"]), np.ones(CHANNELS))
    assert ir.to_proto(model).SerializeToString() == given


@pytest.mark.parametrize("shaped", [True, False])
def test_statistics_of_another_axis_are_not_taken(shaped: bool) -> None:
    """A convolution sums over the first axis behind the batch, a matrix product over the last: here both have 4."""
    weights: Weights = {"k": normal(OUTPUTS, CHANNELS, 1), "w": normal(CHANNELS, CHANNELS)}
    model = built([node("Conv", "x k", "y"), node("MatMul", "x w", "z")], weights, (2, CHANNELS, CHANNELS), "y z")
    if not shaped:
        model.graph.inputs[0].shape = None
    provenance, found = Provenance(data="random", digest="", rows=(), seed=0, batch=1), {}
    for axis in (1, 2):
        sums = (1.0,) * CHANNELS
        known = ChannelStatistics(axis=axis, amax=sums, middle=sums, mean=sums, mean_absolute=sums, mean_square=sums)
        ranges = Ranges(model_sha256="", provenance=provenance, tensors={}, channels={"x": known})
        found[axis] = [each.op_type for each in model.graph if find_channel_statistics(each, ranges) is known]
    assert found == {1: ["Conv"], 2: ["MatMul"]}
