"""What is ONNX Runtime's own: the engine file, its record, and errors in our words."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.onnxruntime.session import Level
from enginesmith.pipeline.errors import EnginesmithError, InvalidGraph, MissingCapability, ModelError
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.system.device import Device

CPU = Device(threads=1)
FEEDS = {"x": np.ones((2, 64), np.float32)}


def model(folder: Path, operator: str = "Relu", opset: int = 17, domain: str = "") -> Artifact:
    """x · W, then an operator; the weights are in a file beside the graph."""
    weight = numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("MatMul", ["same", "w"], ["h"]),
        helper.make_node(operator, ["h"], ["y"], domain=domain),
    ]
    ends = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64])] for name in "xy")
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    made = helper.make_model(helper.make_graph(nodes, "g", *ends, [weight]), opset_imports=opsets, ir_version=8)
    path = folder / "graph.onnx"
    onnx.save(made, path, save_as_external_data=True, location="graph.bin", size_threshold=0)
    return Artifact(kind="onnx", path=path, sha256="", bytes=0)


def build(engine: OnnxRuntime, artifact: Artifact, out: Path) -> Artifact:
    out.mkdir()
    effect = engine.build(BuildRequest(artifact, out, CPU))
    return Artifact(kind="engine", path=out / effect.file, sha256="", bytes=0, signature=effect.signature)


def test_engine_is_the_optimised_graph(tmp_path: Path) -> None:
    built = build(OnnxRuntime(), model(tmp_path), tmp_path / "out")
    assert model_file.summary(built.path).nodes < 3
    assert sorted(path.name for path in built.folder.iterdir()) == ["engine.json", "model.onnx", "model.onnx.data"]
    with OnnxRuntime().load(built, CPU) as session:
        np.testing.assert_array_equal(session.run(FEEDS)["y"], FEEDS["x"])


def test_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (build(OnnxRuntime(), model(tmp_path), tmp_path / name) for name in ("one", "two"))
    for path in first.folder.iterdir():
        assert path.read_bytes() == (second.folder / path.name).read_bytes()


@pytest.mark.parametrize("engine", [OnnxRuntime(save_optimized=False), OnnxRuntime(graph_optimization="disabled")])
def test_portable_engine_is_the_same_graph(engine: OnnxRuntime, tmp_path: Path) -> None:
    built = build(engine, model(tmp_path), tmp_path / "out")
    assert built.path.read_bytes() == (tmp_path / "graph.onnx").read_bytes()
    with engine.load(built, CPU) as session:
        np.testing.assert_array_equal(session.run(FEEDS)["y"], FEEDS["x"])


@pytest.mark.parametrize(("field", "was"), [("processor", "x86_64 avx512"), ("onnxruntime", "1.0"), ("device", "cuda")])
def test_engine_made_for_something_else_is_refused(tmp_path: Path, field: str, was: str) -> None:
    built = build(OnnxRuntime(), model(tmp_path), tmp_path / "out")
    record = built.folder / "engine.json"
    from enginesmith.pipeline.engines.onnxruntime.engine import _Record

    changed = _Record.model_validate_json(record.read_text()).model_copy(update={field: was})
    record.write_text(changed.model_dump_json())
    with pytest.raises(MissingCapability, match=field) as caught:
        OnnxRuntime().load(built, CPU)
    assert "build it here" in caught.value.remedy


def test_plain_model_can_be_loaded(tmp_path: Path) -> None:
    with OnnxRuntime().load(model(tmp_path), CPU) as session:
        assert session.signature.symbols == ("batch",)
        np.testing.assert_array_equal(session.run(FEEDS)["y"], FEEDS["x"])


@pytest.mark.parametrize(
    ("artifact", "message"),
    [({"operator": "Nonsense"}, "Nonsense"), ({"opset": 99}, "opset"), ({"operator": "F", "domain": "mine"}, "mine")],
    ids=["operator", "opset", "domain"],
)
def test_what_it_does_not_support_is_said(tmp_path: Path, artifact: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        OnnxRuntime().load(model(tmp_path, **artifact), CPU)  # type: ignore[arg-type]
    assert caught.value.remedy


@pytest.mark.parametrize("content", [b"", b"not a model", None], ids=["empty", "text", "truncated"])
def test_damaged_file_is_an_invalid_graph(tmp_path: Path, content: bytes | None) -> None:
    artifact = model(tmp_path)
    artifact.path.write_bytes(artifact.path.read_bytes()[:100] if content is None else content)
    with pytest.raises(InvalidGraph):
        OnnxRuntime().load(artifact, CPU)


def test_weights_that_are_missing(tmp_path: Path) -> None:
    artifact = model(tmp_path)
    (tmp_path / "graph.bin").unlink()
    with pytest.raises(EnginesmithError, match=r"graph\.(bin|onnx)"):
        OnnxRuntime().load(artifact, CPU)


def test_call_that_fails_inside_is_a_model_error(tmp_path: Path) -> None:
    with OnnxRuntime().load(model(tmp_path), CPU) as session, pytest.raises(ModelError, match="ONNX Runtime failed"):
        session.enqueue(session.bind({"x": np.ones((2, 3), np.float32)}))


@pytest.mark.parametrize("level", ["disabled", "basic", "extended", "all"])
def test_scales_of_float16_are_not_multiplied(level: Level, tmp_path: Path) -> None:
    """ONNX Runtime 1.31 quantises biases by itself, with the product of two scales: 1e-6 is hardly there in float16."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4, 64)).astype(np.float16)
    weight = generator.integers(-127, 128, (64, 64)).astype(np.int8)
    bias = generator.standard_normal(64).astype(np.float16)
    small, scale = np.float16(4e-4), np.float16(0.03)
    text = """<ir_version: 10, opset_import: ["" : 23]> g (float16[N,64] x) => (float16[N,64] y) {
        q = QuantizeLinear(x, scale, zero) d = DequantizeLinear(q, scale, zero)
        v = DequantizeLinear(weight, small)
        a = Gemm(d, v, bias)
        b = QuantizeLinear(a, scale, zero) y = DequantizeLinear(b, scale, zero)
    }"""
    proto = onnx.parser.parse_model(text)
    constants = {"scale": scale, "zero": np.int8(0), "weight": weight, "small": small, "bias": bias}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(one), name) for name, one in constants.items())
    onnx.save(proto, tmp_path / "graph.onnx")
    built = build(
        OnnxRuntime(graph_optimization=level),
        Artifact(kind="onnx", path=tmp_path / "graph.onnx", sha256="", bytes=0),
        tmp_path / "out",
    )
    quantised = np.clip(np.rint(x.astype(np.float32) / scale), -128, 127) * np.float32(scale)
    expected = quantised @ (weight.astype(np.float32) * np.float32(small)) + bias
    with OnnxRuntime(graph_optimization=level).load(built, CPU) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, atol=0.05)


@pytest.mark.parametrize(("tf32", "option", "row"), [(False, "0", "fp32"), (True, "1", "tf32")])
def test_float32_is_float32_on_cuda_too(tf32: bool, option: str, row: str) -> None:
    """By itself the CUDA provider rounds to TF32."""
    from enginesmith.pipeline.engines.onnxruntime import session

    name, options = session._providers(Device(kind="cuda"), 7, tf32)[0]
    assert (name, options["use_tf32"]) == ("CUDAExecutionProvider", option)
    engine = OnnxRuntime(tf32=tf32)
    assert engine.arithmetic == row
    assert engine.runnable(Device()).ok != tf32
