"""Float and quantised computation side by side: the error of a group on exact inputs, and none that it passes on."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.pipeline.frameworks.onnx import evaluator
from enginesmith.pipeline.passes.quantize.layers import QuantizableOp
from enginesmith.pipeline.passes.quantize.search import NOISE, SIGNAL, add_layerwise_error, output_name
from enginesmith.pipeline.tensors import Array

_HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
FLOATING = f"""{_HEADER}
net (float[n, 4] x) => (float[n, 3] y) <float[4, 4] a, float[4, 3] b>
{{ h = MatMul(x, a)  r = Relu(h)  y = MatMul(r, b) }}"""
QUANTISED = f"""{_HEADER}
net (float[n, 4] x) => (float[n, 3] y) <float[4, 4] a, int8[4, 3] b_q, float b_s, float r_s, int8 zero>
{{ h = MatMul(x, a)  r = Relu(h)
   r_q = QuantizeLinear(r, r_s, zero)  r_d = DequantizeLinear(r_q, r_s, zero)
   b_d = DequantizeLinear(b_q, b_s)  y = MatMul(r_d, b_d) }}"""
GROUPS = tuple(
    QuantizableOp(
        name=name, module="", operator="MatMul", activations=(x,), weight=w, bias=None, output=y, parameters=0
    )
    for name, x, w, y in (("first", "x", "a", "h"), ("second", "r", "b", "y"))
)


def parsed(text: str, **weights: Array) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items())
    model = ir.from_proto(proto)
    for index, node in enumerate(model.graph):
        node.name = f"node_{index}"
    return model


@pytest.fixture
def weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {"a": rng.standard_normal((4, 4), np.float32), "b": rng.standard_normal((4, 3), np.float32)}


def joint(weights: dict[str, Array], tmp_path: Path) -> tuple[tuple[QuantizableOp, ...], Path]:
    quantised = parsed(
        QUANTISED,
        a=weights["a"],
        b_q=np.rint(weights["b"] / 0.02).astype(np.int8),
        b_s=np.float32(0.02),
        r_s=np.float32(0.03),
        zero=np.int8(0),
    )
    floating = parsed(FLOATING, **weights)
    done = add_layerwise_error(floating, quantised, GROUPS)
    ir.save(floating, tmp_path / "joint.onnx")
    return done, tmp_path / "joint.onnx"


def test_only_quantised_groups_are_measured(weights: dict[str, Array], tmp_path: Path) -> None:
    assert [group.name for group in joint(weights, tmp_path)[0]] == ["second"]


def test_energies_are_those_of_the_group_alone(weights: dict[str, Array], tmp_path: Path) -> None:
    (group,), path = joint(weights, tmp_path)
    onnx.checker.check_model(path, full_check=True)
    x = np.random.default_rng(1).standard_normal((5, 4), np.float32)
    names = [value.name for value in onnx.load(path).graph.output]
    found = dict(zip(names, evaluator.run_graph(path, {"x": x}), strict=True))
    r = np.maximum(x @ weights["a"], 0)
    exact = r @ weights["b"]
    rounded = (np.clip(np.rint(r / 0.03), -128, 127) * 0.03) @ (np.rint(weights["b"] / 0.02) * 0.02)
    assert found[output_name(group, SIGNAL)] == pytest.approx((exact**2).sum(), rel=1e-4)
    assert found[output_name(group, NOISE)] == pytest.approx(((exact - rounded) ** 2).sum(), rel=1e-3)
