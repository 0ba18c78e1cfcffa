"""Bias correction: the mean of a product is what it was before its weight was rounded."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.frameworks.onnx.model_file import MODULE_KEY
from enginesmith.pipeline.passes.quantize import bias_correction, layers
from enginesmith.pipeline.tensors import Array

Weights = dict[str, Any]
CHANNELS, OUTPUTS, SIDE = 4, 6, 9


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(weight: Any, step: float = 0.5) -> Any:
    """Rounded down, so that every output loses: the worst that a bias can make up for."""
    return (np.floor(weight / step) * step).astype(np.float32)


def node(operator: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), [output], name=output, **attributes)


def built(nodes: list[Any], weights: Weights, shape: tuple[Any, ...], *outputs: str) -> ir.Model:
    initialisers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs or ("y",)]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    body = helper.make_graph(nodes, "g", [given], infos, initialisers)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return ir.from_proto(model)


def answers(model: ir.Model, x: Any) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


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
    assert bias_correction.correct(model.graph[0], given, rounded(given), mean)
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
        bias_correction.correct(model.graph[0], given, narrow, x.mean((0, 2, 3)))
    assert shifts[0] > 0.1
    assert shifts[1] < 0.02 * shifts[0]
    assert errors[1] < 0.95 * errors[0]


def test_another_reader_of_the_bias_keeps_it() -> None:
    weights = {"w": normal(CHANNELS, CHANNELS), "b": normal(CHANNELS, seed=1)}
    nodes = [node("MatMul", "x w", "p"), node("Add", "p b", "y"), node("Add", "x b", "z")]
    model = built(nodes, weights, (2, CHANNELS), "y", "z")
    x = np.ones((2, CHANNELS), np.float32)
    before = answers(model, x)
    given = weights["w"]
    assert bias_correction.correct(model.graph[0], given, rounded(given), np.ones(CHANNELS))
    after = answers(model, x)
    assert (before[1] == after[1]).all()
    assert (before[0] != after[0]).all()


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
    assert not bias_correction.correct(model.graph[0], weights["w"], rounded(weights["w"]), np.ones(CHANNELS))
    assert ir.to_proto(model).SerializeToString() == given


_HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


def parsed(text: str, **weights: Array) -> ir.Model:
    proto = onnx.parser.parse_model(_HEADER + text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items())
    return ir.from_proto(proto)


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def test_what_a_group_is() -> None:
    model = parsed(
        """net (float[1, 3, 8, 8] x) => (float[1, 5] y) {
            c = Conv(x, w, b)
            f = Flatten(c)
            m = MatMul(f, v)
            a = Add(bias, m)
            y = Gemm <transB = 1> (a, u, d)
        }""",
        w=ones(4, 3, 3, 3),
        b=ones(4),
        v=ones(144, 6),
        bias=ones(6),
        u=ones(5, 6),
        d=ones(5),
    )
    model.graph[0].metadata_props[MODULE_KEY] = "features.0"
    found = layers.find(model)
    assert [(g.operator, g.activations, g.weight, g.bias, g.output, g.parameters) for g in found] == [
        ("Conv", ("x",), "w", "b", "c", 108),
        ("MatMul", ("f",), "v", "bias", "m", 864),
        ("Gemm", ("a",), "u", "d", "y", 30),
    ]
    assert [g.module for g in found] == ["features.0", "", ""]
    assert not any(g.reason for g in found)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = MatMul(x, x)", "two activations"),
        ("y = MatMul(w, x)", "left factor"),
        ("y = MatMul(w, w)", "constants"),
        ("t = Cast <to = 10> (x) h = MatMul(t, half) y = Cast <to = 1> (h)", "float16"),
        ('y = Einsum <equation = "ab,bc->ac"> (x, w)', "Einsum"),
    ],
)
def test_why_there_is_no_quantised_form(body: str, reason: str) -> None:
    model = parsed(
        f"net (float[4, 4] x) => (float[4, 4] y) {{ {body} }}", w=ones(4, 4), half=np.ones((4, 4), np.float16)
    )
    (group,) = layers.find(model)
    assert reason in group.reason


def test_a_weight_that_can_be_fed_is_none() -> None:
    model = parsed("net (float[4, 4] x, float[4, 4] w) => (float[4, 4] y) { y = MatMul(x, w) }", w=ones(4, 4))
    (group,) = layers.find(model)
    assert group.weight is None
    assert group.reason


def test_a_constant_node_is_a_weight() -> None:
    model = parsed(
        "net (float[1, 2] x) => (float[1, 1] y) { w = Constant <value = float[2, 1] {1, 2}> () y = MatMul(x, w) }"
    )
    (group,) = layers.find(model)
    assert (group.weight, group.parameters, group.reason) == ("w", 2, "")


def test_recurrent_weights_count_and_have_a_reason() -> None:
    model = parsed(
        "net (float[5, 1, 3] x) => (float[5, 1, 1, 2] y) { y = LSTM <hidden_size = 2> (x, w, r) }",
        w=ones(1, 8, 3),
        r=ones(1, 8, 2),
    )
    (group,) = layers.find(model)
    assert group.parameters == 40
    assert "recurrent" in group.reason


def test_an_add_that_others_feed_too_is_no_bias() -> None:
    model = parsed(
        "net (float[4, 4] x) => (float[4, 4] y, float[4, 4] m) { m = MatMul(x, w) y = Add(m, b) }",
        w=ones(4, 4),
        b=ones(4),
    )
    assert layers.find(model)[0].bias is None


def test_nodes_get_names_of_their_own_and_the_same_each_time() -> None:
    def names() -> list[str | None]:
        model = parsed(
            "net (float[4, 4] x) => (float[4, 4] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) y = Relu(c) }",
            w=ones(4, 4),
        )
        for node, name in zip(model.graph, ["same", None, "same", "MatMul_2"], strict=True):
            node.name = name
        layers.find(model)
        return [node.name for node in model.graph]

    assert names() == names() == ["same", "Relu_1", "same_2", "MatMul_2"]
