"""Operators in few bits; int4 weights in blocks, activations quantized as they come, errors side by side."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.calibration.ranges import ChannelStatistics, Provenance, Ranges
from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import evaluator
from enginesmith.pipeline.frameworks.onnx.model_file import MODULE_KEY
from enginesmith.pipeline.passes.opset import convert_opset
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.quantize.layers import QuantizableOp
from enginesmith.pipeline.passes.quantize.layerwise_error import (
    COUNT,
    NOISE,
    SIGNAL,
    SUM,
    add_layerwise_error,
    find_shift,
    output_name,
)
from enginesmith.pipeline.passes.quantize.precision import keep_clamps_apart
from enginesmith.pipeline.passes.quantize.qdq import Settings
from enginesmith.pipeline.passes.quantize.quantizers import add_to_bias
from enginesmith.pipeline.passes.quantize.weights import quantize_dynamically, quantize_to_int4
from enginesmith.pipeline.system.cpu import int8_weight_bits
from enginesmith.pipeline.tensors import Array
from graphs import count_kernels, parse_graph, run_model, sqnr_db


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def test_what_a_group_is() -> None:
    model = parse_graph(
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
    assert [(g.operator, g.activations, g.output, g.parameters) for g in found] == [
        ("Conv", ("x",), "c", 108),
        ("MatMul", ("f",), "m", 864),
        ("Gemm", ("a",), "y", 30),
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
def test_why_there_is_no_quantized_form(body: str, reason: str) -> None:
    model = parse_graph(
        f"net (float[4, 4] x) => (float[4, 4] y) {{ {body} }}", w=ones(4, 4), half=np.ones((4, 4), np.float16)
    )
    (group,) = layers.find_groups(model)
    assert reason in group.reason


def test_a_weight_that_can_be_fed_is_none() -> None:
    model = parse_graph("net (float[4, 4] x, float[4, 4] w) => (float[4, 4] y) { y = MatMul(x, w) }", w=ones(4, 4))
    (group,) = layers.find_groups(model)
    assert group.activations == ("x", "w")
    assert group.reason


def test_a_constant_node_is_a_weight() -> None:
    model = parse_graph(
        "net (float[1, 2] x) => (float[1, 1] y) { w = Constant <value = float[2, 1] {1, 2}> () y = MatMul(x, w) }"
    )
    (group,) = layers.find_groups(model)
    assert (group.activations, group.parameters, group.reason) == (("x",), 2, "")


def test_recurrent_weights_count_and_have_a_reason() -> None:
    model = parse_graph(
        "net (float[5, 1, 3] x) => (float[5, 1, 1, 2] y) { y = LSTM <hidden_size = 2> (x, w, r) }",
        w=ones(1, 8, 3),
        r=ones(1, 8, 2),
    )
    (group,) = layers.find_groups(model)
    assert group.parameters == 40
    assert "recurrent" in group.reason


def test_an_add_that_others_feed_too_is_no_bias() -> None:
    model = parse_graph(
        "net (float[4, 4] x) => (float[4, 4] y, float[4, 4] m) { m = MatMul(x, w) y = Add(m, b) }",
        w=ones(4, 4),
        b=ones(4),
    )
    assert not add_to_bias(model.graph[0], np.ones(4))


def test_nodes_get_names_of_their_own_and_the_same_each_time() -> None:
    def names() -> list[str | None]:
        model = parse_graph(
            "net (float[4, 4] x) => (float[4, 4] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) y = Relu(c) }",
            w=ones(4, 4),
        )
        for node, name in zip(model.graph, ["same", None, "same", "MatMul_2"], strict=True):
            node.name = name
        layers.find_groups(model)
        return [node.name for node in model.graph]

    assert names() == names() == ["same", "Relu_1", "same_2", "MatMul_2"]


RNG = np.random.default_rng(0)


def random(*shape: int) -> Array:
    return (RNG.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


NET = """net (float[n, 256] x) => (float[n, 40] y) {
    m = MatMul(x, a)
    g = Gemm <transB = 1> (m, b, c)
    r = Relu(g)
    y = MatMul(r, d)
}"""
NET_WEIGHTS: dict[str, Any] = {"a": random(256, 96), "b": random(100, 96), "c": random(100), "d": random(100, 40)}


def test_matrices_become_blocks_that_onnx_runtime_multiplies_with(tmp_path: Path) -> None:
    model = parse_graph(NET, **NET_WEIGHTS)
    done = quantize_to_int4(model, Settings())
    assert keep_clamps_apart(model) == 1
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [group.operator for group in done.done] == ["MatMul", "Gemm"]
    assert list(done.left.values()) == ["its 100 inputs do not divide into blocks of 128, 64, 32"]
    blocks = [n.attributes.get_int("block_size", 0) for n in model.graph if n.op_type == "DequantizeLinear"]
    assert blocks == [128, 32]
    x = RNG.standard_normal((3, 256)).astype(np.float32)
    found = count_kernels(model, {"x": x}, tmp_path)
    assert (found["MatMulNBits"], found["DequantizeLinear"], found["MatMul"]) == (2, 0, 1)
    assert sqnr_db(*(run_model(each, {"x": x})["y"] for each in (parse_graph(NET, **NET_WEIGHTS), model))) > 12


def test_an_old_graph_is_converted_for_int4() -> None:
    model = parse_graph(NET, opset=17, **NET_WEIGHTS)
    model.ir_version = 8
    assert convert_opset(model, 21)
    quantize_to_int4(model, Settings())
    assert model.graph.opset_imports[""] >= 21
    assert model.ir_version >= 10
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_ranges_weigh_the_inputs() -> None:
    importance = tuple(100.0 if index % 128 < 8 else 0.01 for index in range(256))
    known = ChannelStatistics(
        axis=-1, amax=importance, middle=importance, mean=importance, mean_absolute=importance, mean_square=importance
    )
    nowhere = Provenance(data="", digest="", rows=(), seed=0, batch=1)
    x = (RNG.standard_normal((64, 256)) * np.sqrt(importance)).astype(np.float32)
    text = "net (float[n, 256] x) => (float[n, 96] y) { y = MatMul(x, a) }"
    found = []
    for channels in ({}, {"x": known}):
        model = parse_graph(text, a=NET_WEIGHTS["a"])
        quantize_to_int4(model, Settings(), Ranges(model_sha256="", provenance=nowhere, tensors={}, channels=channels))
        exact = run_model(parse_graph(text, a=NET_WEIGHTS["a"]), {"x": x})["y"]
        found.append(sqnr_db(exact, run_model(model, {"x": x})["y"]))
    assert found[1] > found[0] + 0.5


def test_what_is_kept_or_has_no_matrix() -> None:
    model = parse_graph(NET, **NET_WEIGHTS)
    done = quantize_to_int4(model, Settings(keep=frozenset(["MatMul_0"])))
    assert [group.name for group in done.done] == ["Gemm_1"]
    text = "net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) { y = Conv(x, w) }"
    with pytest.raises(InvalidGraph, match="MatMul, Gemm with a constant float32 weight can"):
        quantize_to_int4(parse_graph(text, w=np.ones((4, 4, 1, 1), np.float32)), Settings())


def test_corrections_see_weights_as_the_node_reads_them() -> None:
    seen: list[tuple[int, ...]] = []

    def correct(node: ir.Node, given: Array, narrow: Array) -> None:
        seen.append(given.shape)
        assert 0 < np.abs(given - narrow).max() < 0.1
        if node.op_type == "Gemm":
            add_to_bias(node, np.full(100, 3.0))

    model = parse_graph(NET, **NET_WEIGHTS)
    quantize_to_int4(model, Settings(), correct=correct)
    assert seen == [(256, 96), (100, 96)]
    bias = next(node for node in model.graph if node.op_type == "Gemm").inputs[2]
    np.testing.assert_allclose(bias.const_value.numpy(), NET_WEIGHTS["c"] + 3, rtol=1e-6)  # type: ignore[union-attr]


ENCODER = """net (float[n, 6, 32] x) => (float[n, 6, 8] y) {
    q = MatMul(x, wq)
    qb = Add(q, bq)
    k = MatMul(x, wk)
    m = Mul(qb, k)
    flat = Reshape(m, rows)
    g = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (flat, wg, bg)
    r = Relu(g)
    p = MatMul(r, wp)
    y = Reshape(p, back)
}"""
ENCODER_WEIGHTS: dict[str, Any] = {
    "wq": random(32, 32),
    "wk": random(32, 32),
    "wg": random(24, 32),
    "wp": random(24, 8),
    "bq": random(32),
    "bg": random(24),
    "rows": np.array([-1, 32]),
    "back": np.array([-1, 6, 8]),
}


RUNNABLE = Settings(weight_bits=int8_weight_bits())
"""What this processor computes without overflow."""


def test_matrix_products_become_integer_kernels(tmp_path: Path) -> None:
    x = RNG.standard_normal((3, 6, 32)).astype(np.float32)
    model = parse_graph(ENCODER, **ENCODER_WEIGHTS)
    done = quantize_dynamically(model, RUNNABLE)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert not done.left
    assert len(done.done) == 4
    quantizers = [node for node in model.graph if node.op_type == "DynamicQuantizeLinear"]
    assert len(quantizers) == 3, "what two products read is quantized once"
    found = count_kernels(model, {"x": x}, tmp_path)
    assert found["MatMulIntegerToFloat"] + found["DynamicQuantizeMatMul"] == 4
    assert not {"MatMul", "Gemm", "Cast"} & set(found)
    exact, other = (run_model(each, {"x": x})["y"] for each in (parse_graph(ENCODER, **ENCODER_WEIGHTS), model))
    assert sqnr_db(exact, other) > 30


def test_values_and_products_keep_their_names() -> None:
    model = parse_graph(ENCODER, **ENCODER_WEIGHTS)
    quantize_dynamically(model, Settings())
    values = {value.name for node in model.graph for value in node.outputs}
    assert {"q", "k", "g", "p"} <= values
    assert {"MatMul_0", "Gemm_5"} <= {node.name for node in model.graph if node.op_type == "MatMulInteger"}


def test_an_lstm_becomes_the_kernel_of_onnx_runtime(tmp_path: Path) -> None:
    text = """net (float[7, 2, 12] x) => (float[7, 2, 2, 10] y, float[2, 2, 10] h) {
        y, h, c = LSTM <hidden_size = 10, direction = "bidirectional"> (x, w, r, b)
    }"""
    weights = {"w": random(2, 40, 12), "r": random(2, 40, 10), "b": random(2, 80)}
    x = RNG.standard_normal((7, 2, 12)).astype(np.float32)
    model = parse_graph(text, **weights)
    done = quantize_dynamically(model, Settings())
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [group.operator for group in done.done] == ["LSTM"]
    assert count_kernels(model, {"x": x}, tmp_path)["DynamicQuantizeLSTM"] == 1
    exact, other = (run_model(each, {"x": x}) for each in (parse_graph(text, **weights), model))
    assert min(sqnr_db(exact[name], other[name]) for name in "yh") > 30


def test_seven_bits() -> None:
    model = parse_graph(ENCODER, **ENCODER_WEIGHTS)
    quantize_dynamically(model, Settings(weight_bits=7))
    numbers = {str(name): value.const_value.numpy() for name, value in model.graph.initializers.items()}  # type: ignore[union-attr]
    assert np.abs(numbers["wq_quantized"].astype(int)).max() == 63


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Conv(x, w)", "Conv is slower"),
        ("f = Flatten(x) m = MatMul(f, zero) y = Reshape(m, shape)", "all zero"),
        ("f = Flatten(x) m = Gemm <transA = 1> (f, v) y = Reshape(m, shape)", "transposed"),
        ("m = MatMul(x, x) y = Reshape(m, shape)", "two activations"),
        ("y = MatMul(x, batched)", "no matrix"),
    ],
)
def test_what_is_left_and_why(body: str, reason: str) -> None:
    text = f"net (float[4, 4, 4, 4] x) => (float[a, b, c, d] y) {{ {body} q = Flatten(y) z = MatMul(q, last) }}"
    model = parse_graph(
        text,
        w=random(4, 4, 1, 1),
        v=random(4, 64),
        zero=np.zeros((64, 64), np.float32),
        batched=random(4, 4, 4),
        last=random(64, 4),
        shape=np.array([4, 4, 4, -1]),
    )
    done = quantize_dynamically(model, Settings())
    assert [reason in why for why in done.left.values()] == [True]
    assert len(done.done) == 1


def test_a_graph_of_convolutions_is_refused() -> None:
    model = parse_graph("net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) { y = Conv(x, w) }", w=random(4, 4, 1, 1))
    with pytest.raises(InvalidGraph, match="no product that can be in int8-dynamic"):
        quantize_dynamically(model, Settings())


def test_corrections_see_weights_as_they_were() -> None:
    seen: list[tuple[int, ...]] = []

    def correct(node: ir.Node, given: Array, narrow: Array) -> None:
        assert given.shape == narrow.shape
        assert 0 < np.abs(given - narrow).max() < 0.02
        seen.append(given.shape)
        if node.op_type == "Gemm":
            add_to_bias(node, np.full(24, 1.0))

    model = parse_graph(ENCODER, **ENCODER_WEIGHTS)
    quantize_dynamically(model, RUNNABLE, correct)
    assert seen == [(32, 32), (32, 32), (24, 32), (24, 8)]
    exact = parse_graph(ENCODER, **{**ENCODER_WEIGHTS, "bg": ENCODER_WEIGHTS["bg"] + 0.5})
    x = RNG.standard_normal((3, 6, 32)).astype(np.float32)
    assert sqnr_db(run_model(exact, {"x": x})["y"], run_model(model, {"x": x})["y"]) > 30


FLOATING = """net (float[n, 4] x) => (float[n, 3] y) <float[4, 4] a, float[4, 3] b>
{ h = MatMul(x, a)  r = Relu(h)  y = MatMul(r, b) }"""
QUANTIZED = """net (float[n, 4] x) => (float[n, 3] y) <float[4, 4] a, int8[4, 3] b_q, float b_s, float r_s, int8 zero>
{ h = MatMul(x, a)  r = Relu(h)
   r_q = QuantizeLinear(r, r_s, zero)  r_d = DequantizeLinear(r_q, r_s, zero)
   b_d = DequantizeLinear(b_q, b_s)  y = MatMul(r_d, b_d) }"""
GROUPS = tuple(
    QuantizableOp(name=name, module="", operator="MatMul", activations=(x,), output=y, parameters=0)
    for name, x, y in (("first", "x", "h"), ("second", "r", "y"))
)


@pytest.fixture
def weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {"a": rng.standard_normal((4, 4), np.float32), "b": rng.standard_normal((4, 3), np.float32)}


def joint(weights: dict[str, Array], tmp_path: Path, batch: str = "n, ") -> tuple[tuple[QuantizableOp, ...], Path]:
    quantized = parse_graph(
        QUANTIZED.replace("n, ", batch),
        a=weights["a"],
        b_q=np.rint(weights["b"] / 0.02).astype(np.int8),
        b_s=np.float32(0.02),
        r_s=np.float32(0.03),
        zero=np.int8(0),
    )
    floating = parse_graph(FLOATING.replace("n, ", batch), **weights)
    for model in (floating, quantized):
        for index, node in enumerate(model.graph):
            node.name = f"node_{index}"
    done = add_layerwise_error(floating, quantized, GROUPS)
    ir.save(floating, tmp_path / "joint.onnx")
    return done, tmp_path / "joint.onnx"


def test_only_quantized_groups_are_measured(weights: dict[str, Array], tmp_path: Path) -> None:
    assert [group.name for group in joint(weights, tmp_path)[0]] == ["second"]


def test_the_error_of_a_convolution_is_added_up_by_its_channels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    header = "net (float[n, 2, 4, 4] x) => (float[n, 3, 2, 2] y)"
    w = rng.standard_normal((3, 2, 3, 3)).astype(np.float32)
    floating = parse_graph(header + " <float[3, 2, 3, 3] w> { y = Conv(x, w) }", w=w)
    steps = " { w_d = DequantizeLinear(w_q, w_s)  y = Conv(x, w_d) }"
    w_q = np.rint(w / 0.1).astype(np.int8)
    quantized = parse_graph(header + " <int8[3, 2, 3, 3] w_q, float w_s>" + steps, w_q=w_q, w_s=np.float32(0.1))
    for model in (floating, quantized):
        for index, node in enumerate(model.graph):
            node.name = f"node_{index}"
    group = QuantizableOp(name="conv", module="", operator="Conv", activations=("x",), output="y", parameters=0)
    assert add_layerwise_error(floating, quantized, (group,)) == (group,)
    ir.save(floating, tmp_path / "joint.onnx")
    x = rng.standard_normal((5, 2, 4, 4)).astype(np.float32)
    names = [value.name for value in onnx.load(tmp_path / "joint.onnx").graph.output]
    found = dict(zip(names, evaluator.run_graph(tmp_path / "joint.onnx", {"x": x}), strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    error = np.einsum("nchwij,ocij->nohw", windows, w_q * np.float32(0.1) - w)
    assert found["conv/sum"] == pytest.approx(error.sum(axis=(0, 2, 3)), rel=1e-3, abs=1e-4)
    assert found["conv/count"] == error.size


@pytest.mark.parametrize(
    ("error", "share"),
    [([[1, -2], [1, -2]], 1.0), ([[1, -2], [-1, 2]], 0.0), ([[3, 0], [1, 0]], 0.8), ([[1, -1], [1, 1]], 0.5)],
)
def test_a_shift_is_the_part_of_an_error_that_is_its_mean(error: Any, share: float) -> None:
    array = np.array(error, np.float64)
    assert find_shift(array.sum(axis=0), array.size, (array**2).sum()) == pytest.approx(share)


def test_an_error_that_is_one_row_has_no_mean(weights: dict[str, Array], tmp_path: Path) -> None:
    (group,), path = joint(weights, tmp_path, batch="")
    names = {value.name for value in onnx.load(path).graph.output}
    assert names == {output_name(group.name, what) for what in (SIGNAL, NOISE, COUNT)}
    evaluator.run_graph(path, {"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("opset", [11, 12, 13])
def test_errors_of_old_graphs_are_added_up_by_channel(opset: int) -> None:
    text, weights = "net (float[n, 4] x) => (float[n, 3] y) { y = MatMul(x, w) }", {"w": random(4, 3)}
    exact, floating, quantized = (parse_graph(text, opset, **weights) for _ in range(3))
    quantize_dynamically(quantized, RUNNABLE)
    feeds = {"x": random(5, 4)}
    error = run_model(quantized, feeds)["y"] - run_model(exact, feeds)["y"]
    (group,) = add_layerwise_error(floating, quantized, layers.find_groups(floating))
    found = run_model(floating, feeds)
    assert found[output_name(group.name, SUM)] == pytest.approx(error.sum(axis=0), rel=1e-3, abs=1e-5)
    assert found[output_name(group.name, COUNT)] == error.size


@pytest.mark.parametrize(("outputs", "made"), [("y, h, c", "y"), ("y, h", "h"), ("y, h, c", "c")])
def test_an_lstm_is_measured_by_an_output_that_it_has(outputs: str, made: str) -> None:
    shape = "[5, 1, 2, 4]" if made == "y" else "[1, 2, 4]"
    text = f"net (float[5, 2, 3] x) => (float{shape} {made}) {{ {outputs} = LSTM <hidden_size = 4> (x, w, r) }}"
    weights = {"w": random(1, 16, 3), "r": random(1, 16, 4)}
    exact, floating, quantized = (parse_graph(text, **weights) for _ in range(3))
    for model in (exact, floating, quantized):
        for value in model.graph[0].outputs:
            value.name = value.name if value.name == made else ""
    quantize_dynamically(quantized, RUNNABLE)
    (group,) = add_layerwise_error(floating, quantized, layers.find_groups(floating))
    feeds = {"x": random(5, 2, 3)}
    signal, error = run_model(exact, feeds)[made], run_model(quantized, feeds)[made] - run_model(exact, feeds)[made]
    found = run_model(floating, feeds)
    assert found[output_name(group.name, SIGNAL)] == pytest.approx((signal**2).sum(), rel=1e-4)
    assert found[output_name(group.name, NOISE)] == pytest.approx((error**2).sum(), rel=1e-2)


def test_energies_are_those_of_the_group_alone(weights: dict[str, Array], tmp_path: Path) -> None:
    (group,), path = joint(weights, tmp_path)
    onnx.checker.check_model(path, full_check=True)
    x = np.random.default_rng(1).standard_normal((5, 4), np.float32)
    names = [value.name for value in onnx.load(path).graph.output]
    found = dict(zip(names, evaluator.run_graph(path, {"x": x}), strict=True))
    r = np.maximum(x @ weights["a"], 0)
    exact = r @ weights["b"]
    rounded = (np.clip(np.rint(r / 0.03), -128, 127) * 0.03) @ (np.rint(weights["b"] / 0.02) * 0.02)
    assert found[output_name(group.name, SIGNAL)] == pytest.approx((exact**2).sum(), rel=1e-4)
    assert found[output_name(group.name, NOISE)] == pytest.approx(((exact - rounded) ** 2).sum(), rel=1e-3)
    assert found[output_name(group.name, SUM)] == pytest.approx((rounded - exact).sum(axis=0), rel=1e-3, abs=1e-5)
    assert found[output_name(group.name, COUNT)] == exact.size
