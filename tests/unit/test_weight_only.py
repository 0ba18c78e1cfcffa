"""int4 weights in blocks: they are where engines look for them, and what has no blocks is left."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from enginesmith.calibration.ranges import ChannelStatistics, Provenance, Ranges
from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.passes.quantize.precision import keep_clamps_apart
from enginesmith.pipeline.passes.quantize.qdq import Settings
from enginesmith.pipeline.passes.quantize.quantizers import add_to_bias
from enginesmith.pipeline.passes.quantize.weights import quantise_to_int4
from enginesmith.pipeline.tensors import Array

_RNG = np.random.default_rng(0)


def random(*shape: int) -> Array:
    return (_RNG.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


NET = """net (float[n, 256] x) => (float[n, 40] y) {
    m = MatMul(x, a)
    g = Gemm <transB = 1> (m, b, c)
    r = Relu(g)
    y = MatMul(r, d)
}"""
WEIGHTS: dict[str, Any] = {"a": random(256, 96), "b": random(100, 96), "c": random(100), "d": random(100, 40)}


def parsed(opset: int = 21, text: str = NET, **weights: Any) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>{text}')
    found = weights or WEIGHTS
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in found.items())
    return ir.from_proto(proto)


def run(model: ir.Model, x: Array, save_to: Path | None = None) -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if save_to:
        options.optimized_model_filepath = str(save_to)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    found: Array = session.run(None, {"x": x})[0]
    return found


def decibels(exact: Array, other: Array) -> float:
    return float(10 * np.log10((exact**2).sum() / ((exact - other) ** 2).sum()))


def test_matrices_become_blocks_that_onnx_runtime_multiplies_with(tmp_path: Path) -> None:
    model = parsed()
    done = quantise_to_int4(model, Settings())
    assert keep_clamps_apart(model) == 1
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [group.operator for group in done.done] == ["MatMul", "Gemm"]
    assert list(done.left.values()) == ["its 100 inputs do not divide into blocks of 128, 64, 32"]
    blocks = [n.attributes.get_int("block_size", 0) for n in model.graph if n.op_type == "DequantizeLinear"]
    assert blocks == [128, 32]
    x = _RNG.standard_normal((3, 256)).astype(np.float32)
    real = run(model, x, tmp_path / "optimised.onnx")
    found = Counter(node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
    assert (found["MatMulNBits"], found["DequantizeLinear"], found["MatMul"]) == (2, 0, 1)
    assert decibels(run(parsed(), x), real) > 12


def test_an_old_graph_is_brought_to_the_opset_of_int4() -> None:
    model = parsed(opset=17)
    quantise_to_int4(model, Settings())
    assert model.graph.opset_imports[""] >= 21
    assert model.ir_version >= 10
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_ranges_weigh_the_inputs() -> None:
    importance = tuple(100.0 if index % 128 < 8 else 0.01 for index in range(256))
    known = ChannelStatistics(
        axis=-1, amax=importance, mean=importance, mean_absolute=importance, mean_square=importance
    )
    nowhere = Provenance(data="", digest="", rows=(), seed=0, batch=1)
    x = (_RNG.standard_normal((64, 256)) * np.sqrt(importance)).astype(np.float32)
    text = "net (float[n, 256] x) => (float[n, 96] y) { y = MatMul(x, a) }"
    found = []
    for channels in ({}, {"x": known}):
        model = parsed(text=text, a=WEIGHTS["a"])
        quantise_to_int4(model, Settings(), Ranges(model_sha256="", provenance=nowhere, tensors={}, channels=channels))
        found.append(decibels(run(parsed(text=text, a=WEIGHTS["a"]), x), run(model, x)))
    assert found[1] > found[0] + 0.5


def test_what_is_kept_or_has_no_matrix() -> None:
    model = parsed()
    done = quantise_to_int4(model, Settings(keep=frozenset(["MatMul_0"])))
    assert [group.name for group in done.done] == ["Gemm_1"]
    text = "net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) { y = Conv(x, w) }"
    with pytest.raises(InvalidGraph, match="MatMul, Gemm with a constant float32 weight can"):
        quantise_to_int4(parsed(text=text, w=np.ones((4, 4, 1, 1), np.float32)), Settings())


def test_corrections_see_weights_as_the_node_reads_them() -> None:
    seen: list[tuple[int, ...]] = []

    def correct(node: ir.Node, given: Array, narrow: Array) -> None:
        seen.append(given.shape)
        assert 0 < np.abs(given - narrow).max() < 0.1
        if node.op_type == "Gemm":
            add_to_bias(node, np.full(100, 3.0))

    model = parsed()
    quantise_to_int4(model, Settings(), correct=correct)
    assert seen == [(256, 96), (100, 96)]
    bias = next(node for node in model.graph if node.op_type == "Gemm").inputs[2]
    np.testing.assert_allclose(bias.const_value.numpy(), WEIGHTS["c"] + 3, rtol=1e-6)  # type: ignore[union-attr]
