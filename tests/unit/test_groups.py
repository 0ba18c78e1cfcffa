"""Which operators can be in few bits, what they are called, and why others cannot."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.pipeline.frameworks.onnx.model_file import MODULE_KEY
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.tensors import Array

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
    found = layers.find_groups(model)
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
    (group,) = layers.find_groups(model)
    assert reason in group.reason


def test_a_weight_that_can_be_fed_is_none() -> None:
    model = parsed("net (float[4, 4] x, float[4, 4] w) => (float[4, 4] y) { y = MatMul(x, w) }", w=ones(4, 4))
    (group,) = layers.find_groups(model)
    assert group.weight is None
    assert group.reason


def test_a_constant_node_is_a_weight() -> None:
    model = parsed(
        "net (float[1, 2] x) => (float[1, 1] y) { w = Constant <value = float[2, 1] {1, 2}> () y = MatMul(x, w) }"
    )
    (group,) = layers.find_groups(model)
    assert (group.weight, group.parameters, group.reason) == ("w", 2, "")


def test_recurrent_weights_count_and_have_a_reason() -> None:
    model = parsed(
        "net (float[5, 1, 3] x) => (float[5, 1, 1, 2] y) { y = LSTM <hidden_size = 2> (x, w, r) }",
        w=ones(1, 8, 3),
        r=ones(1, 8, 2),
    )
    (group,) = layers.find_groups(model)
    assert group.parameters == 40
    assert "recurrent" in group.reason


def test_an_add_that_others_feed_too_is_no_bias() -> None:
    model = parsed(
        "net (float[4, 4] x) => (float[4, 4] y, float[4, 4] m) { m = MatMul(x, w) y = Add(m, b) }",
        w=ones(4, 4),
        b=ones(4),
    )
    assert layers.find_groups(model)[0].bias is None


def test_nodes_get_names_of_their_own_and_the_same_each_time() -> None:
    def names() -> list[str | None]:
        model = parsed(
            "net (float[4, 4] x) => (float[4, 4] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) y = Relu(c) }",
            w=ones(4, 4),
        )
        for node, name in zip(model.graph, ["same", None, "same", "MatMul_2"], strict=True):
            node.name = name
        layers.find_groups(model)
        return [node.name for node in model.graph]

    assert names() == names() == ["same", "Relu_1", "same_2", "MatMul_2"]
