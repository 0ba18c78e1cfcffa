"""Test what is ONNX Runtime's own: the engine file, its record, and errors in our words."""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime import optimizers
from enginesmith.pipeline.engines.onnxruntime import session as sessions
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.onnxruntime.session import Level
from enginesmith.pipeline.engines.options import EngineOptions, OnnxRuntimeOptions
from enginesmith.pipeline.errors import EnginesmithError, InvalidGraph, MissingCapability, ModelError, UsageError
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.nvidia import Driver
from enginesmith.pipeline.workflows.device import describe

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


def test_engine_is_the_optimized_graph(tmp_path: Path) -> None:
    built = build(OnnxRuntime(), model(tmp_path), tmp_path / "out")
    assert model_file.summary(built.path).nodes < 3
    assert sorted(path.name for path in built.folder.iterdir()) == ["engine.json", "model.onnx"]
    with OnnxRuntime().load(built, CPU) as session:
        np.testing.assert_array_equal(session.run(FEEDS)["y"], FEEDS["x"])


def test_sizes_stay_in_the_graph(tmp_path: Path) -> None:
    """ONNX Runtime cannot load a graph again whose shapes depend on numbers in another file, as those of Split."""
    sizes = numpy_helper.from_array(np.ones(200, np.int64), "sizes")
    weight = numpy_helper.from_array(np.ones((200, 200), np.float32), "w")
    names = [f"y{at}" for at in range(200)]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Split", ["m", "sizes"], names, axis=1)]
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 200])
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 1]) for name in names]
    graph = helper.make_graph(nodes, "g", [given], ends, [sizes, weight])
    path = tmp_path / "graph.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    built = build(OnnxRuntime(), Artifact(kind="onnx", path=path, sha256="", bytes=0), tmp_path / "out")
    assert (built.folder / "model.onnx.data").stat().st_size >= 4 * 200 * 200
    with OnnxRuntime().load(built, CPU) as session:
        answers = session.run({"x": np.ones((2, 200), np.float32)})
    assert answers["y199"].tolist() == [[200.0], [200.0]]


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


@pytest.mark.parametrize("operator", ["RandomUniformLike", "RandomNormalLike", "Bernoulli"])
def test_an_older_opset_is_advised_where_it_has_a_form_with_a_kernel(tmp_path: Path, operator: str) -> None:
    drawn = operator.replace("Bernoulli", "RandomUniformLike")  # a function, in which that one has no kernel
    with pytest.raises(InvalidGraph, match=rf"{drawn}\(22\)") as caught:
        OnnxRuntime().load(model(tmp_path, operator, 22), CPU)
    assert f"opset 21, which has an older form of {drawn}" in caught.value.remedy
    OnnxRuntime().load(model(tmp_path, operator, 21), CPU).close()
    assert "opset" not in sessions._advise_older_opset("Could not find an implementation for Conv(22)"), "of float64"


def test_the_operators_whose_newest_form_has_no_kernel_are_those_of_which_an_older_opset_is_advised() -> None:
    """Compare with all kernels: one whose range has no end is for the form that it begins with alone."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    open_end, newest_loaded = 2**31 - 1, 26
    ranges: dict[str, list[tuple[int, int]]] = {}
    for kernel in get_all_opkernel_def():
        if not kernel.domain:
            ranges.setdefault(kernel.op_name, []).append(tuple(kernel.version_range))
    lacking = {
        f"{name}({version})"
        for name, kernels in ranges.items()
        if defs.has(name) and not (schema := defs.get_schema(name, newest_loaded)).deprecated
        for version in [schema.since_version]
        if not (schema.has_function or schema.has_context_dependent_function)
        and not any(first == version or first < version <= last < open_end for first, last in kernels)
    }
    assert lacking == {*sessions._ONLY_OLDER}


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


@pytest.mark.parametrize(("total", "reader"), [("Add(x, skip)", "LayerNormalization"), ("Add(x, c)", "Gelu")])
def test_sums_stay_apart_from_what_reads_them(total: str, reader: str, tmp_path: Path) -> None:
    """The CPU's kernels for SkipLayerNormalization and BiasGelu take longer than the operators that they replace."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]> g (float[N,4,64] x, float[N,4,64] skip) => (float[N,4,64] y)
        {{ t = {total} y = {reader}({"t" if reader == "Gelu" else "t, c"}) }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(64, np.float32), "c"))
    onnx.save(proto, tmp_path / "graph.onnx")
    built = build(
        OnnxRuntime(), Artifact(kind="onnx", path=tmp_path / "graph.onnx", sha256="", bytes=0), tmp_path / "o"
    )
    assert model_file.summary(built.path).operators == {"Add": 1, reader: 1}


@pytest.mark.parametrize(
    ("dtype", "nodes", "left_out"),
    [
        ("float16", "t = Transpose(x) y = MatMul(t, w)", True),
        ("float", "h = Cast<to: int = 10>(x) t = Transpose(h) f = Cast<to: int = 1>(t) y = MatMul(f, w)", True),
        ("int32", "t = Transpose(x) f = Cast<to: int = 1>(t) y = MatMul(f, w)", True),
        ("float", "t = Transpose(x) y = MatMul(t, w)", False),
        ("int32", "f = Cast<to: int = 1>(x) t = Transpose(f) y = MatMul(t, w)", False),
        ("float16", "y = MatMul(x, w)", False),
    ],
)
def test_no_cast_is_swapped_with_the_transpose_before_it(
    dtype: str, nodes: str, left_out: bool, tmp_path: Path
) -> None:
    """ONNX Runtime's MatmulTransposeFusion does, and ends the process (microsoft/onnxruntime#28392)."""
    half = dtype == "float16"
    out = "float16" if half else "float"
    text = f"""<ir_version: 10, opset_import: ["" : 20]> g ({dtype}[8,N] x) => ({out}[M,8] y) {{ {nodes} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(8, dtype=np.float16 if half else np.float32), "w"))
    path = tmp_path / "graph.onnx"
    onnx.save(proto, path)
    names = optimizers.disabled_optimizers(path, CPU)
    assert ("MatmulTransposeFusion" in names) == left_out
    assert {*optimizers.SLOW_ON_CPU} <= {*names}
    assert not optimizers.disabled_optimizers(path, Device(kind="cuda"))
    x = np.arange(64).reshape(8, 8)
    feeds = {"x": x.astype({"float": "float32"}.get(dtype, dtype))}
    with OnnxRuntime().load(Artifact(kind="onnx", path=path, sha256="", bytes=0), CPU) as session:
        np.testing.assert_array_equal(session.run(feeds)["y"], x.T if "Transpose" in nodes else x)


@pytest.mark.parametrize(("level", "without"), [("disabled", ()), ("all", ("MatmulTransposeFusion",))])
def test_a_graph_is_not_parsed_where_that_decides_nothing(
    level: Level, without: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as memory of the engine."""
    text = """<ir_version: 10, opset_import: ["" : 20]> g (float[8,N] x) => (float[8,8] y)
        { t = Transpose(x) y = MatMul(x, t) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "graph.onnx")
    x, options = np.eye(8, dtype=np.float32), sessions.session_options(CPU, level, memory_arena=False)
    monkeypatch.setattr(model_file, "read", None)
    session = sessions.open_session(tmp_path / "graph.onnx", options, CPU, without=without)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x)


@pytest.mark.parametrize("level", ["disabled", "basic", "extended", "all"])
def test_scales_of_float16_are_not_multiplied(level: Level, tmp_path: Path) -> None:
    """ONNX Runtime 1.31 quantizes biases by itself, with the product of two scales: 1e-6 is hardly there in float16."""
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
    quantized = np.clip(np.rint(x.astype(np.float32) / scale), -128, 127) * np.float32(scale)
    expected = quantized @ (weight.astype(np.float32) * np.float32(small)) + bias
    with OnnxRuntime(graph_optimization=level).load(built, CPU) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, atol=0.05)


@pytest.mark.parametrize(("tf32", "option", "row"), [(False, "0", "fp32"), (True, "1", "tf32")])
def test_float32_is_float32_on_cuda_too(tf32: bool, option: str, row: str) -> None:
    """By itself the CUDA provider rounds to TF32."""
    engine = OnnxRuntime(tf32=tf32)
    name, options = engine._providers(Device(kind="cuda"), 7)[0]
    assert (name, options["use_tf32"]) == ("CUDAExecutionProvider", option)
    assert engine.arithmetic == row
    assert engine.runnable(Device()).ok != tf32


def test_options_of_the_provider_are_variants_and_reach_bundles() -> None:
    texts = ["prefer_nhwc=0,1", "cudnn_conv_algo_search=HEURISTIC", "sdpa_kernel=2"]
    asked = EngineOptions(onnxruntime=OnnxRuntimeOptions(provider_options=tuple(texts)))
    made = list(OnnxRuntime.configurations(asked, "fp16"))
    words = "cudnn_conv_algo_search_HEURISTIC-sdpa_kernel_2"
    assert [config.mode for config in made] == [words, f"prefer_nhwc_1-{words}"]
    engine = made[1].engine.model_copy(update={"cuda_graphs": True})
    assert not engine.runnable(Device()).ok
    session = engine.package_facts(Path("none.onnx"), Device(kind="cuda", index=1)).options["session"]
    own = {"prefer_nhwc": "1", "cudnn_conv_algo_search": "HEURISTIC", "sdpa_kernel": "2", "enable_cuda_graph": "1"}
    assert session["provider_options"] == [{"use_tf32": "0", **own}, {}]
    packaged = OnnxRuntime.from_package(Path("none.onnx"), {"session": session})
    assert isinstance(packaged, OnnxRuntime)
    assert sorted(packaged.provider_options) == ["cudnn_conv_algo_search=HEURISTIC", "prefer_nhwc=1", "sdpa_kernel=2"]
    assert engine.package_facts(Path("none.onnx"), Device()).options["session"]["provider_options"] == [{}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefer_nwhc=1", "has the option 'prefer_nwhc'"),
        ("prefer_nhwc=yes", "does not take 'yes'"),
        ("sdpa_kernel", "''"),
    ],
)
def test_options_that_no_provider_has_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        OnnxRuntime.check_options(EngineOptions(onnxruntime=OnnxRuntimeOptions(provider_options=(text,))))


@pytest.mark.parametrize("raised", ["ImportError", "RuntimeError"])
def test_a_broken_onnxruntime_is_found_by_importing_it_alone(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime/__init__.py").write_text(f"raise {raised}('it is half of one')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime")
    assert describe(Device(), ["onnxruntime"]).endswith(": onnxruntime")  # a run's first line imports nothing
    answer = OnnxRuntime.available(Device())
    assert answer.reason == "onnxruntime cannot be imported: it is half of one"
    assert "pip install --force-reinstall 'onnxruntime" in answer.remedy


def test_options_of_cuda_are_refused_where_the_device_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = OnnxRuntimeOptions(provider_options=("prefer_nhwc=1",))
    monkeypatch.setattr(nvidia, "driver", lambda: Driver(reason="there is none"))
    for device in ("cpu", None):  # None: chosen by itself, where there is no GPU
        with pytest.raises(UsageError, match="the device is cpu"):
            OnnxRuntime.check_options(EngineOptions(device=device, onnxruntime=asked))
    OnnxRuntime.check_options(EngineOptions(device="cuda", onnxruntime=asked))


def test_bundles_give_a_copy_of_the_cache_to_the_provider(tmp_path: Path) -> None:
    """The processor's provider takes the option in the place of TensorRT's, and leaves the folder alone."""
    graph = model(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kept.engine").write_bytes(b"engine")
    options = {**OnnxRuntime().package_facts(graph.path, CPU).options, "cache": "trt_engine_cache_path"}
    record: dict[str, Any] = {"options": options}
    run = runpy.run_path(str(OnnxRuntime.infer_script()))["_onnxruntime"](graph.path, record)
    assert run(FEEDS)["y"].shape == (2, 64)
    given = options["session"]["provider_options"][0]["trt_engine_cache_path"]
    assert given != str(tmp_path / "cache")
    assert Path(given, "kept.engine").read_bytes() == b"engine"
    record["scratch"].cleanup()
