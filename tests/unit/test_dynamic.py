"""Activations quantised as they come: ONNX Runtime's kernels are found, and the results are near the float ones."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.passes.quantize.qdq import Settings
from enginesmith.pipeline.passes.quantize.quantizers import add_to_bias
from enginesmith.pipeline.passes.quantize.weights import quantise_dynamically
from enginesmith.pipeline.system.cpu import int8_weight_bits
from enginesmith.pipeline.tensors import Array

_RNG = np.random.default_rng(0)


def random(*shape: int) -> Array:
    return (_RNG.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


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
WEIGHTS: dict[str, Any] = {
    "wq": random(32, 32),
    "wk": random(32, 32),
    "wg": random(24, 32),
    "wp": random(24, 8),
    "bq": random(32),
    "bg": random(24),
    "rows": np.array([-1, 32]),
    "back": np.array([-1, 6, 8]),
}


def parsed(text: str, **weights: Any) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>{text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items())
    return ir.from_proto(proto)


def run(model: ir.Model, x: Array, save_to: Path | None = None) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if save_to:
        options.optimized_model_filepath = str(save_to)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


RUNNABLE = Settings(weight_bits=int8_weight_bits())
"""What this processor computes without overflow."""


def kernels(model: ir.Model, x: Array, tmp_path: Path) -> Counter[str]:
    run(model, x, tmp_path / "optimised.onnx")
    return Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)


def decibels(exact: Array, other: Array) -> float:
    return float(10 * np.log10((exact**2).sum() / ((exact - other) ** 2).sum()))


def test_matrix_products_become_integer_kernels(tmp_path: Path) -> None:
    x = _RNG.standard_normal((3, 6, 32)).astype(np.float32)
    model = parsed(ENCODER, **WEIGHTS)
    done = quantise_dynamically(model, RUNNABLE)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert not done.left
    assert len(done.done) == 4
    quantisers = [node for node in model.graph if node.op_type == "DynamicQuantizeLinear"]
    assert len(quantisers) == 3, "what two products read is quantised once"
    found = kernels(model, x, tmp_path)
    assert found["MatMulIntegerToFloat"] + found["DynamicQuantizeMatMul"] == 4
    assert not {"MatMul", "Gemm", "Cast"} & set(found)
    (exact,), (other,) = run(parsed(ENCODER, **WEIGHTS), x), run(model, x)
    assert decibels(exact, other) > 30


def test_values_and_products_keep_their_names() -> None:
    model = parsed(ENCODER, **WEIGHTS)
    quantise_dynamically(model, Settings())
    values = {value.name for node in model.graph for value in node.outputs}
    assert {"q", "k", "g", "p"} <= values
    assert {"MatMul_0", "Gemm_5"} <= {node.name for node in model.graph if node.op_type == "MatMulInteger"}


def test_an_lstm_becomes_the_kernel_of_onnx_runtime(tmp_path: Path) -> None:
    text = """net (float[7, 2, 12] x) => (float[7, 2, 2, 10] y, float[2, 2, 10] h) {
        y, h, c = LSTM <hidden_size = 10, direction = "bidirectional"> (x, w, r, b)
    }"""
    weights = {"w": random(2, 40, 12), "r": random(2, 40, 10), "b": random(2, 80)}
    x = _RNG.standard_normal((7, 2, 12)).astype(np.float32)
    model = parsed(text, **weights)
    done = quantise_dynamically(model, Settings())
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [group.operator for group in done.done] == ["LSTM"]
    assert kernels(model, x, tmp_path)["DynamicQuantizeLSTM"] == 1
    for exact, other in zip(run(parsed(text, **weights), x), run(model, x), strict=True):
        assert decibels(exact, other) > 30


def test_seven_bits() -> None:
    model = parsed(ENCODER, **WEIGHTS)
    quantise_dynamically(model, Settings(weight_bits=7))
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
    model = parsed(
        text,
        w=random(4, 4, 1, 1),
        v=random(4, 64),
        zero=np.zeros((64, 64), np.float32),
        batched=random(4, 4, 4),
        last=random(64, 4),
        shape=np.array([4, 4, 4, -1]),
    )
    done = quantise_dynamically(model, Settings())
    assert [reason in why for why in done.left.values()] == [True]
    assert len(done.done) == 1


def test_a_graph_of_convolutions_is_refused() -> None:
    model = parsed("net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) { y = Conv(x, w) }", w=random(4, 4, 1, 1))
    with pytest.raises(InvalidGraph, match="no product that can be in int8-dynamic"):
        quantise_dynamically(model, Settings())


def test_corrections_see_weights_as_they_were() -> None:
    seen: list[tuple[int, ...]] = []

    def correct(node: ir.Node, given: Array, narrow: Array) -> None:
        assert given.shape == narrow.shape
        assert 0 < np.abs(given - narrow).max() < 0.02
        seen.append(given.shape)
        if node.op_type == "Gemm":
            add_to_bias(node, np.full(24, 1.0))

    model = parsed(ENCODER, **WEIGHTS)
    quantise_dynamically(model, RUNNABLE, correct)
    assert seen == [(32, 32), (32, 32), (24, 32), (24, 8)]
    exact = parsed(ENCODER, **{**WEIGHTS, "bg": WEIGHTS["bg"] + 0.5})
    x = _RNG.standard_normal((3, 6, 32)).astype(np.float32)
    assert decibels(run(exact, x)[0], run(model, x)[0]) > 30
