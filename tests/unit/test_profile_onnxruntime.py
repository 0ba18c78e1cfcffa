"""ONNX Runtime's profiler, and whose work the nodes of its optimized graphs do: on graphs that it optimizes here."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.onnxruntime.profiler import Provenance, profiled, read_trace
from enginesmith.pipeline.engines.profiling import WARM_CALLS, OperatorTime, Profiled, ProfileRequest
from enginesmith.pipeline.errors import MissingCapability, ModelError
from enginesmith.pipeline.frameworks.onnx.model_file import MODULE_KEY
from enginesmith.pipeline.system.device import Device

CPU = Device(threads=1)
HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
BLOCK = """g (float[N,16,8,8] x) => (float[N,10] y) {
    [first] a = Conv <pads = [1,1,1,1]> (x, model__block__conv1__weight)
    [first_relu] b = Relu(a)
    [second] c = Conv <pads = [1,1,1,1]> (b, model__block__conv2__weight)
    [sum] d = Add(c, b)
    [last_relu] e = Relu(d)
    [mean] f = ReduceMean <keepdims = 0> (e, axes)
    [head] y = Gemm <transB = 1> (f, model__head__weight)
}"""
MODULES = {"first": "block.bn1", "second": "block.bn2", "head": "head"} | dict.fromkeys(
    ("first_relu", "sum", "last_relu"), "block"
)
QUANTIZED = """g (float[N,16,8,8] x) => (float[N,16,8,8] y) {
    [q0] xq = QuantizeLinear(x, s, z) [d0] xd = DequantizeLinear(xq, s, z)
    [dw1] w1 = DequantizeLinear(model__one__weight, s, z)
    [one] a = Conv <pads = [1,1,1,1]> (xd, w1) [relu] b = Relu(a)
    [q1] bq = QuantizeLinear(b, s, low) [d1] bd = DequantizeLinear(bq, s, low)
    [dw2] w2 = DequantizeLinear(model__two__weight, s, z)
    [two] c = Conv <pads = [1,1,1,1]> (bd, w2)
    [q2] cq = QuantizeLinear(c, s, z) [d2] y = DequantizeLinear(cq, s, z)
}"""


def write(folder: Path, text: str, constants: dict[str, Any], modules: dict[str, str]) -> Artifact:
    """The text is a graph in ONNX's own syntax, which has no dots in names: two underscores stand for one."""
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(one), name) for name, one in constants.items())
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
        if node.name in modules:
            node.metadata_props.add(key=MODULE_KEY, value=modules[node.name])
    onnx.save(model, folder / "graph.onnx")
    return Artifact(kind="onnx", path=folder / "graph.onnx", sha256="", bytes=0)


def block(folder: Path, modules: dict[str, str]) -> Artifact:
    draw = np.random.default_rng(0).standard_normal
    shapes = {"block.conv1": (16, 16, 3, 3), "block.conv2": (16, 16, 3, 3), "head": (10, 16)}
    weights = {f"model.{name}.weight": draw(shape).astype(np.float32) for name, shape in shapes.items()}
    return write(folder, BLOCK, {**weights, "axes": np.array([2, 3])}, modules)


def profile(graph: Artifact, folder: Path, engine: OnnxRuntime | None = None, *, traced: bool = True) -> Profiled:
    engine = engine or OnnxRuntime()
    out, scratch = folder / "out", folder / "scratch"
    out.mkdir()
    scratch.mkdir()
    effect = engine.build(BuildRequest(graph, out, CPU))
    built = Artifact(kind="engine", path=out / effect.file, sha256="", bytes=0, signature=effect.signature)
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 16, 8, 8)).astype(np.float32)}
    return engine.profile(ProfileRequest(built, CPU, feeds, 5, scratch, graph.path if traced else None))


def by_module(found: Profiled) -> dict[tuple[str, ...], list[OperatorTime]]:
    rows: dict[tuple[str, ...], list[OperatorTime]] = {}
    for one in found.operators:
        rows.setdefault(one.origin.modules, []).append(one)
    return rows


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder = tmp_path_factory.mktemp("block")
    return profile(block(folder, MODULES), folder)


def test_fused_nodes_are_on_the_modules_that_they_do_the_work_of(fused: Profiled) -> None:
    """ONNX Runtime keeps no metadata, renames what it lays out in blocks, and fuses sums and activations into it."""
    rows = by_module(fused)
    assert set(rows) == {("block.conv1", "block.bn1"), ("block.conv2", "block.bn2"), ("head",), ("",), *_entry(fused)}
    (second,) = rows["block.conv2", "block.bn2"]
    assert {path: set(found) for path, found in second.origin.also.items()} == {"block": {"Add", "Relu"}}
    assert (second.operator, second.precision, second.calls) == ("Conv", "fp32", 1)
    assert second.origin.multiplies


def _entry(found: Profiled) -> set[tuple[str, ...]]:
    """Make an entry of a profile; a change of layout at the end is listed with the operator that made the value."""
    return {one.origin.modules for one in found.operators if one.operator.startswith("Reorder")}


def test_changes_of_layout_are_conversions_of_the_nearest_module(fused: Profiled) -> None:
    places = {one.operator: one.origin for one in fused.operators if one.operator == "ReorderOutput"}
    assert places["ReorderOutput"].converts
    assert places["ReorderOutput"].modules == ("block",)
    assert not places["ReorderOutput"].multiplies


def test_times_are_those_of_a_call(fused: Profiled) -> None:
    assert fused.call_seconds is not None
    assert 0 < sum(one.seconds for one in fused.operators) <= fused.call_seconds * 1.2
    assert fused.call_seconds > 1e-4 or "microseconds" in fused.notes[0]


def test_quantized_kernels_are_on_their_modules_and_qdq_counts_as_conversion(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).integers
    weights = {f"model.{name}.weight": draw(-9, 9, (16, 16, 3, 3)).astype(np.int8) for name in ("one", "two")}
    constants = {**weights, "s": np.float32(0.1), "z": np.int8(0), "low": np.int8(-128)}
    rows = by_module(
        profile(write(tmp_path, QUANTIZED, constants, {"one": "one", "two": "two", "relu": "act"}), tmp_path)
    )
    (one,) = [found for found in rows["one",] if not found.origin.converts]
    assert (one.operator, one.precision, one.origin.also) == ("QLinearConv", "int8", {"act": ("Relu",)})
    (two,) = [found for found in rows["two",] if not found.origin.converts]
    assert (two.operator, two.origin.also) == ("QLinearConv", {})
    kinds = {found.operator for group in rows.values() for found in group if found.origin.converts}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    assert () not in rows


def test_a_graph_without_modules_is_told_apart_by_its_nodes(tmp_path: Path) -> None:
    rows = by_module(profile(block(tmp_path, {}), tmp_path))
    assert {("node:first",), ("node:second",), ("node:head",)} <= set(rows)


def test_without_the_graph_nothing_is_known_and_nothing_vanishes(tmp_path: Path) -> None:
    found = profile(block(tmp_path, MODULES), tmp_path, traced=False)
    assert set(by_module(found)) == {()}
    assert len(found.operators) == len({one.name for one in found.operators}) >= 4


def test_weights_that_two_modules_share_do_not_tie_them(tmp_path: Path) -> None:
    text = """g (float[N,8] x) => (float[N,8] y) {
        [embed] a = MatMul(x, model__embed__table__weight) [sin] b = Sin(a)
        [decode] y = MatMul(b, model__embed__table__weight)
    }"""
    table = {"model.embed.table.weight": np.eye(8, dtype=np.float32)}
    graph = write(tmp_path, text, table, {"embed": "embed.table", "decode": "head.decoder", "sin": "head"})
    known = Provenance(graph.path)
    assert known.named(["decode"]).modules == ("head.decoder",)
    assert (known.named(["embed", "sin"]).also, known.named(["nowhere"]).modules) == ({"head": ("Sin",)}, ())


def test_a_blocked_convolution_that_took_in_a_sum_keeps_the_name_of_its_own_value(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 writes the blocks of ResNet-18 so: the sum and the activation are in attributes and inputs."""
    text = """g (float[N,16,8,8] x) => (float[N,16,8,8] h) {
        [first] a = Conv (x, w1) [first_relu] b = Relu(a)
        [second] c = Conv (b, w2) [sum] d = Add(c, b) [last_relu] e = Relu(d)
        [third] h = Conv (e, w3)
    }"""
    modules = {"first": "one.conv", "second": "one.conv2", "third": "two"}
    graph = write(tmp_path, text, {}, modules | dict.fromkeys(("first_relu", "sum", "last_relu"), "one"))
    blocked = "com.microsoft.nchwc"
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["t1"], name="b_nchwc", domain=blocked, activation="Relu"),
        helper.make_node("Conv", ["t1", "w2", "", "t1"], ["t2"], name="c_nchwc", domain=blocked, activation="Relu"),
        helper.make_node("Conv", ["t2", "w3"], ["t3"], name="h_nchwc", domain=blocked),
        helper.make_node("ReorderOutput", ["t3"], ["h"], name="ReorderOutput", domain=blocked),
    ]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [])), tmp_path / "executed.onnx")
    found = Provenance(graph.path).of_executed(tmp_path / "executed.onnx")
    assert (found["b_nchwc"].also, found["c_nchwc"].modules) == ({"one": ("Relu",)}, ("one.conv2",))
    assert {path: set(kinds) for path, kinds in found["c_nchwc"].also.items()} == {"one": {"Add", "Relu"}}
    assert (found["h_nchwc"].modules, found["h_nchwc"].also) == (("two",), {})
    assert (found["ReorderOutput"].modules, found["ReorderOutput"].converts) == (("two",), True)


def event(name: str, start: int, duration: int, category: str = "Node", **arguments: Any) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": duration, "cat": category, "tid": 1, "args": arguments}


def trace(*nodes: dict[str, Any]) -> list[dict[str, Any]]:
    """Write the same call once more than those that warm up; times run from its start."""
    events = []
    for call in range(WARM_CALLS + 1):
        shift = 1000 * call
        events += [event("model_run", shift, 900, "Session")]
        events += [{**node, "ts": node["ts"] + shift} for node in nodes]
    return events


def times(found: Profiled) -> dict[str, float]:
    return {one.name: round(one.seconds * 1e6) for one in found.operators}


def test_nodes_of_a_loop_do_not_count_twice(tmp_path: Path) -> None:
    events = trace(
        event("loop_kernel_time", 0, 500, op_name="Loop"),
        event("inner_kernel_time", 10, 100, op_name="Add"),
        event("inner_kernel_time", 200, 100, op_name="Add"),
        event("after_kernel_time", 500, 50, op_name="Mul"),
    )
    found = profiled(events, tmp_path, None, on_cuda=False)
    assert times(found) == {"loop": 300, "inner": 200, "after": 50}
    assert {one.name: one.calls for one in found.operators}["inner"] == 2


def test_on_cuda_device_time_counts_and_launches_do_not(tmp_path: Path) -> None:
    node = event("conv_kernel_time", 10, 5, op_name="Conv", input_type_shape=[{"float16": [1]}])
    kernels = [event("cudnn_kernel", start, 70, "Kernel", parent_name="conv_kernel_time") for start in (100, 200)]
    found = profiled(trace(node, *kernels), tmp_path, None, on_cuda=True)
    assert times(found) == {"conv": 140}
    assert (found.operators[0].operator, found.operators[0].precision) == ("Conv", "fp16")
    with pytest.raises(MissingCapability, match="CUDA profiling"):
        profiled(trace(node), tmp_path, None, on_cuda=True)


def test_casts_between_floats_are_conversions(tmp_path: Path) -> None:
    def cast(name: str, read: str, written: str) -> dict[str, Any]:
        return event(
            f"{name}_kernel_time",
            0,
            5,
            op_name="Cast",
            input_type_shape=[{read: [1]}],
            output_type_shape=[{written: [1]}],
        )

    for read, expected in (("float16", True), ("int64", False)):
        (one,) = profiled(trace(cast("c", read, "float")), tmp_path, None, on_cuda=False).operators
        assert one.origin.converts == expected


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[{")
    with pytest.raises(ModelError, match="profile"):
        read_trace(tmp_path / "trace.json")
