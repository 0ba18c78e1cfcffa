"""Half precision on a CPU: rounded as the hardware rounds, held against numpy."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import edit, model_file, validation
from enginesmith.pipeline.passes.float16 import emulation
from enginesmith.pipeline.system.device import Device
from graphs import parse_graph

RNG = np.random.default_rng(0)
BFLOAT16: Any = ml_dtypes.bfloat16
LEVELS: Any = ("disabled", "basic", "extended", "all")


def parsed(text: str, **constants: Any) -> ir.Model:
    return parse_graph(text, 23, named=True, **constants)


def saved(model: ir.Model, folder: Path, **options: Any) -> Artifact:
    folder.mkdir(exist_ok=True)
    edit.save(model, folder, **options)
    validation.check(folder / edit.FILE)
    return Artifact(kind="onnx", path=folder / edit.FILE, sha256="", bytes=0)


def answers(artifact: Artifact, level: Any = "disabled", **feeds: Any) -> dict[str, Any]:
    with OnnxRuntime(graph_optimization=level, emulate=True).load(artifact, Device()) as session:
        return dict(session.run(feeds))


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


MIXED = """(float[N,8] x) => (float[N,4] y) {
    h = Cast<to=16>(x)
    a = MatMul(h, w)
    b = Relu(a)
    c = Add(b, v)
    y = Cast<to=1>(c)
}"""
WEIGHTS = {"w": normal(8, 4, dtype=BFLOAT16), "v": normal(4, dtype=BFLOAT16)}


def bf16(array: Any) -> Any:
    return array.astype(BFLOAT16).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_every_value_is_rounded_as_bfloat16(tmp_path: Path, level: Any) -> None:
    x = normal(5, 8)
    product = bf16(bf16(x) @ WEIGHTS["w"].astype(np.float32))
    expected = bf16(np.maximum(product, 0) + WEIGHTS["v"].astype(np.float32))
    found = answers(saved(parsed(MIXED, **WEIGHTS), tmp_path), level, x=x)["y"]
    np.testing.assert_array_equal(found, expected)


def test_only_what_computes_is_rounded() -> None:
    """Relu's numbers have been rounded before; each constant, and the input, goes up once."""
    model = parsed(MIXED, **WEIGHTS)
    assert emulation.emulate(model)
    names = [node.name for node in model.graph if node.op_type == "Cast"]
    rounded = ["a_rounded", "a_rounded_float32", "c_rounded"]
    assert sorted(name or "" for name in names) == sorted([*rounded, "h", "h_float32", "v_float32", "w_float32", "y"])


def test_overflow_of_float16_shows(tmp_path: Path) -> None:
    """By itself ONNX Runtime may compute both products in float32 and bring the number back."""
    text = """(float16[1,4] x) => (float16[1,4] y) {
        a = MatMul(x, w)
        y = MatMul(a, v)
    }"""
    big, small = (np.eye(4, dtype=np.float16) * np.float16(factor) for factor in (1000, 0.001))
    found = answers(saved(parsed(text, w=big, v=small), tmp_path), x=np.full((1, 4), 100, np.float16))["y"]
    assert found.dtype == np.float16
    assert not np.isfinite(found).any()


def test_weights_stay_on_disk(tmp_path: Path) -> None:
    large = MIXED.replace("[N,4]", "[N,400]")
    wide = {"w": normal(8, 400, dtype=BFLOAT16), "v": normal(400, dtype=BFLOAT16)}
    artifact = saved(parsed(large, **wide), tmp_path / "large", external_data_bytes=0)
    assert model_file.external_files(artifact.path) == ["model.onnx.data"]
    model = edit.load(artifact.path)
    assert emulation.emulate(model)
    assert len(ir.to_proto(model).SerializeToString()) < 8 * 400
    assert answers(artifact, x=normal(5, 8))["y"].shape == (5, 400)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("operator", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_nets_of_float16(tmp_path: Path, operator: str, gates: int, level: Any) -> None:
    text = f"(float16[5,2,3] x) => (float16[5,1,2,6] y) {{ y = {operator}<hidden_size=6>(x, w, r) }}"
    scale = np.float16(0.3)
    constants = {
        "w": normal(1, gates * 6, 3, dtype=np.float16) * scale,
        "r": normal(1, gates * 6, 6, dtype=np.float16) * scale,
    }
    x = normal(5, 2, 3, dtype=np.float16)
    wide = {name: array.astype(np.float32) for name, array in constants.items()}
    floating = saved(parsed(text.replace("float16", "float"), **wide), tmp_path / "float")
    expected = answers(floating, x=x.astype(np.float32))["y"]
    found = answers(saved(parsed(text, **constants), tmp_path / "half"), level, x=x)["y"]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected.astype(np.float16), rtol=2**-10, atol=2**-14)


def test_bodies_and_their_values(tmp_path: Path) -> None:
    """A branch that reads a value from outside, and gives one in bfloat16."""
    text = """(float[4,4] x, bool c) => (float[4,4] y) {
        h = Cast<to=16>(x)
        a = MatMul(h, w)
        b = If(c) <
            then_branch = t () => (bfloat16[4,4] p) { p = Mul(a, w) },
            else_branch = e () => (bfloat16[4,4] q) { q = Identity(a) }
        >
        y = Cast<to=1>(b)
    }"""
    x, w = normal(4, 4), normal(4, 4, dtype=BFLOAT16)
    artifact = saved(parsed(text, w=w), tmp_path)
    product = bf16(bf16(x) @ w.astype(np.float32))
    for condition, expected in ((True, bf16(product * w.astype(np.float32))), (False, product)):
        found = answers(artifact, x=x, c=np.array(condition))["y"]
        np.testing.assert_array_equal(found, expected)


def test_pairs_and_fills(tmp_path: Path) -> None:
    """Scales of Q/DQ, the type that DequantizeLinear is asked for, and constants made on the fly."""
    text = """(float[N,4] x) => (float[N,4] y) {
        h = Cast<to=16>(x)
        q = QuantizeLinear(h, s, zero)
        d = DequantizeLinear<output_dtype=16>(q, s, zero)
        n = Shape(d)
        f = ConstantOfShape<value = bfloat16[1] {2}>(n)
        m = Mul(d, f)
        y = Cast<to=1>(m)
    }"""
    x, scale = normal(5, 4), np.array(0.0625, BFLOAT16)
    model = parsed(text, s=scale, zero=np.int8(0))
    model.graph.node("f").attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array([2], BFLOAT16)))
    found = answers(saved(model, tmp_path), x=x)["y"]
    np.testing.assert_array_equal(found, np.clip(np.rint(bf16(x) / 0.0625), -128, 127) * 0.125)


@pytest.mark.parametrize(("name", "dtype"), [("FLOAT8E4M3FN", ml_dtypes.float8_e4m3fn), ("INT4", ml_dtypes.int4)])
def test_narrow_weights_need_no_emulation(tmp_path: Path, name: str, dtype: Any) -> None:
    """The runtime has their Q/DQ kernels, so they are as they were."""
    text = "(float[N,4] x) => (float[N,4] y) { d = DequantizeLinear<axis=1>(w, s) y = MatMul(x, d) }"
    w, s = np.rint(normal(4, 4) * 2).astype(dtype), np.full(4, 0.5, np.float32)
    model = parsed(text, w=w, s=s)
    assert not emulation.emulate(model)
    x = normal(3, 4)
    found = answers(saved(model, tmp_path), x=x)["y"]
    np.testing.assert_allclose(found, x @ (w.astype(np.float32) * s), rtol=1e-5)
    assert model.graph.initializers["w"].dtype == ir.DataType[name]


def test_the_engine_emulates_only_when_it_is_asked_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = saved(parsed(MIXED, **WEIGHTS), tmp_path)
    with pytest.raises(InvalidGraph, match="ONNX Runtime has no kernels on the CPU for bfloat16"):
        OnnxRuntime().load(artifact, Device())
    with caplog.at_level(logging.INFO):
        answers(artifact, x=normal(5, 8))
    assert "model.onnx is emulated" in caplog.text


RUN = """
import sys
from pathlib import Path
import numpy as np
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
artifact = Artifact(kind="onnx", path=Path(sys.argv[1]), sha256="", bytes=0)
for level in ("disabled", "basic", "extended", "all"):
    with OnnxRuntime(graph_optimization=level).load(artifact, Device()) as session:
        assert np.isfinite(session.run({"x": np.ones((5, 2, 3), np.float16)})["y"]).all()
"""


@pytest.mark.thorough
def test_the_runtime_itself_survives_a_float16_lstm(tmp_path: Path) -> None:
    """It has crashed there: in a process of its own, at every level of optimization."""
    text = """(float16[5,2,3] x) => (float16[5,2,2,6] y) {
        y = LSTM<hidden_size=6, direction="bidirectional">(x, w, r, b)
    }"""
    shapes = {"w": (2, 24, 3), "r": (2, 24, 6), "b": (2, 48)}
    constants = {name: normal(*shape, dtype=np.float16) for name, shape in shapes.items()}
    artifact = saved(parsed(text.replace("\\\\", ""), **constants), tmp_path)
    done = subprocess.run([sys.executable, "-c", RUN, str(artifact.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
