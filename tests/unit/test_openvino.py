"""OpenVINO: what runs in which type, what is refused, what stays in the process, what is reported to nobody."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.calibration.ranges import METHODS, Ranges, TensorRange
from enginesmith.pipeline.engines.openvino import engine as module
from enginesmith.pipeline.engines.openvino import session as sessions
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.engines.options import EngineOptions
from enginesmith.pipeline.engines.profiling import ProfileRequest
from enginesmith.pipeline.engines.triton import Message
from enginesmith.pipeline.errors import InvalidGraph, MissingCapability, UnsupportedGraph
from enginesmith.pipeline.frameworks.onnx.coverage import compute_coverage
from enginesmith.pipeline.passes.quantize.qdq import Settings, quantize
from enginesmith.pipeline.system import software
from enginesmith.pipeline.system.cpu import int8_weight_bits
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array
from graphs import NOWHERE, parse_graph, run_model
from openvino_graphs import FEEDS, MATRIX, RNG, WEIGHT, WEIGHTS, build, residual

CPU = Device(threads=1)
if not (openvino := OpenVINO.available(CPU)).ok:
    pytest.skip(f"{openvino.reason}; {openvino.remedy}", allow_module_level=True)


def quantized(
    make: Callable[[], ir.Model] = residual, feeds: dict[str, Array] = FEEDS, *, signed: bool = False
) -> ir.Model:
    """Round it by our rules for OpenVINO, on grids for these feeds."""
    values: dict[str, Array] = {**feeds, **run_model(make(), feeds, optimized=False, every_value=True)}
    limits = {name: (float(value.min()), float(value.max())) for name, value in values.items()}
    tensors = {
        name: TensorRange(minimum=low, maximum=high, count=1, amax=dict.fromkeys(METHODS, max(-low, high)))
        for name, (low, high) in limits.items()
    }
    model = make()
    settings = Settings(placement=OpenVINO.placement, weight_bits=int8_weight_bits(), signed=signed)
    quantize(model, Ranges(model_sha256="", provenance=NOWHERE, tensors=tensors), settings)
    return model


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_that_is_forked_after_a_model_was_closed_can_load_it_again(tmp_path: Path) -> None:
    """OpenVINO kept the threads of closed models for later ones; a forked process has none of them."""
    artifact, _ = build(residual(), tmp_path)
    with OpenVINO().load(artifact, Device(threads=2)) as session:
        expected = session.run(FEEDS)["y"]
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # ends it if it waits
        with OpenVINO().load(artifact, Device(threads=2)) as session:
            os._exit(int(not np.array_equal(session.run(FEEDS)["y"], expected)))
    assert os.waitpid(child, 0)[1] == 0


def test_all_products_of_our_placement_run_in_int8(tmp_path: Path) -> None:
    """Plain, strided and depthwise convolutions with clamps and a sum, and a matrix product; nothing stays beside."""
    model = quantized()
    artifact, notes = build(model, tmp_path)
    record = json.loads((artifact.folder / "audit.json").read_text())
    assert (record["products"], record["asked"], record["floating"]) == ({"int8": 5}, 5, [])
    assert OpenVINO().facts(artifact).layers == record["layers"]
    assert notes == ("products by the type that they run in: 5 int8",)
    with OpenVINO().load(artifact, CPU) as session:
        answers, wanted = session.run(FEEDS)["y"], run_model(model, FEEDS, optimized=False)["y"]
        assert np.square(wanted - answers).sum() < np.square(wanted).sum() / 1e3
        kinds = [layer.kind for layer in module.profiler.read_layers(session.compiled, ())]
    assert not {"Eltwise", "Add"} & set(kinds)  # the sum is part of a convolution


@pytest.mark.parametrize("signed", [False, True])
def test_upsampling_runs_in_int8_beside_convolutions_of_the_same_width(tmp_path: Path, signed: bool) -> None:
    """Their weights have scales along other axes: with one constant for both zero points, all of it ran in floats."""
    text = """net (float[n, 3, 16, 16] x) => (float[n, 8, 16, 16] y) {
        c = Conv <strides = [2, 2], pads = [0, 0, 1, 1]> (x, w0)
        r = Relu(c)
        d = Conv <pads = [1, 1, 1, 1]> (r, w1)
        s = Relu(d)
        u = ConvTranspose <strides = [2, 2]> (s, up)
        y = Conv <pads = [1, 1, 1, 1]> (u, v)
    }"""
    more = {"up": RNG.standard_normal((8, 8, 2, 2), np.float32), "v": RNG.standard_normal((8, 8, 3, 3), np.float32)}
    model = quantized(lambda: parse_graph(text, w0=WEIGHTS["w0"], w1=WEIGHTS["w1"], **more), signed=signed)
    zeros = {node.inputs[2].const_value.dtype for node in model.graph if node.op_type == "QuantizeLinear"}  # type: ignore[union-attr]
    assert (ir.DataType.INT8 in zeros) == signed
    artifact, _ = build(model, tmp_path)
    with OpenVINO(fixed_batches=(4,)).load(artifact, CPU) as session:
        answers, wanted = session.run(FEEDS)["y"], run_model(model, FEEDS, optimized=False)["y"]
        layers = list(module.profiler.read_layers(session.compiled, ()))
    products = [layer.precision for layer in layers if layer.kind in ("Convolution", "Deconvolution")]
    assert products == ["int8"] * 4
    assert np.square(wanted - answers).sum() < np.square(wanted).sum() / 1e3


@pytest.mark.parametrize("bias", ["", ", bias"])
def test_what_several_operators_read_of_an_int8_convolution_is_scaled_once(tmp_path: Path, bias: str) -> None:
    """OpenVINO scales it twice for the Relu where sizes are dynamic and there is no bias."""
    text = f"""net (float[n, 3, 16, 16] x) => (float[n, 8, 8, 8] y) {{
        c = Conv <strides = [2, 2], pads = [0, 0, 1, 1]> (x, w0{bias})
        r = Relu(c)
        d = Conv <pads = [1, 1, 1, 1]> (r, w1)
        s = Sigmoid(c)
        y = Add(d, s)
    }}"""
    more = {"bias": RNG.standard_normal(8, np.float32)} if bias else {}
    model = quantized(lambda: parse_graph(text, w0=WEIGHTS["w0"], w1=WEIGHTS["w1"], **more))
    artifact, _ = build(model, tmp_path)
    wanted = run_model(model, FEEDS, optimized=False)["y"]
    for sizes in ((), (4,)):
        with OpenVINO(fixed_batches=sizes).load(artifact, CPU) as session:
            answers = session.run(FEEDS)["y"]
            layers = [layer.kind for layer in module.profiler.read_layers(session.compiled, ())]
        assert np.square(wanted - answers).sum() < np.square(wanted).sum() / 1e3
        assert "Clamp" not in layers


ACTIVATIONS = ("Elu", "Gelu", "HardSwish", "LeakyRelu", "Mish", "Relu", "Sigmoid", "Tanh")


@pytest.mark.parametrize(
    "activation",
    [*(f"a = {name}(c)" for name in ACTIVATIONS), "a = PRelu(c, slope)"]
    + ["s = Sigmoid(c) a = Mul(c, s)", "s = Sigmoid(c) a = Mul(s, c)"]
    + ["h = HardSwish(c) a = Mul(h, factors)", "s = Sigmoid(c) h = Mul(c, s) a = Mul(factors, h)"],
)
def test_activations_are_part_of_int8_convolutions(tmp_path: Path, activation: str) -> None:
    """Two layers between the rounding of the input and floats at the end: no activation and no rounding beside them."""
    text = f"""net (float[n, 3, 16, 16] x) => (float[n, 8, 8, 8] y) {{
        c = Conv <strides = [2, 2], pads = [0, 0, 1, 1]> (x, w0)
        {activation}
        y = Conv <pads = [1, 1, 1, 1]> (a, w1)
    }}"""
    given = {"slope": np.float32([0.2]), "factors": np.linspace(0.5, 2, 8, dtype=np.float32).reshape(8, 1, 1)}
    used = {name: array for name, array in given.items() if name in activation}
    model = quantized(lambda: parse_graph(text, w0=WEIGHTS["w0"], w1=WEIGHTS["w1"], **used))
    pairs = [node.inputs[0].name for node in model.graph if node.op_type == "QuantizeLinear"]
    assert pairs == ["x", "a"]  # nothing reads the last convolution's output in int8
    artifact, _ = build(model, tmp_path)
    with OpenVINO().load(artifact, CPU) as session:
        layers = list(module.profiler.read_layers(session.compiled, ()))
        answers, wanted = session.run(FEEDS)["y"], run_model(model, FEEDS, optimized=False)["y"]
    assert [layer.precision for layer in layers if layer.kind == "Convolution"] == ["int8", "int8"]
    assert {layer.kind for layer in layers} <= {"Convolution", "FakeQuantize", "Reorder"}
    assert sum(layer.kind == "FakeQuantize" for layer in layers) == 1
    assert np.square(wanted - answers).sum() < np.square(wanted).sum() / 1e3


@pytest.mark.parametrize(
    ("between", "rounded"),
    [
        ("b = MaxPool <kernel_shape = [2, 2]> (a)", "xa"),
        ("b = Slice(a, start, end, axis)", "xa"),
        ("c = Reshape(a, shape) b = Transpose <perm = [0, 1, 3, 2]> (c)", "xa"),
        ("c, d = Split <axis = 1, num_outputs = 2> (a) b = Concat <axis = 1> (d, c)", "xa"),
        ("h = Conv(a, w) b = Concat <axis = 1> (a, h)", "xah"),
    ],
)
def test_numbers_that_are_moved_are_rounded_once(tmp_path: Path, between: str, rounded: str) -> None:
    text = f"net (float[1, 4, 8, 8] x) => (float[1, 4, p, q] y) {{ a = Conv(x, w) {between} y = Conv(b, v) }}"
    depth = 8 if "h = Conv" in between else 4
    given = {"w": RNG.standard_normal((4, 4, 1, 1), np.float32), "v": RNG.standard_normal((4, depth, 1, 1), np.float32)}
    given |= {"start": np.array([1]), "end": np.array([4]), "axis": np.array([2]), "shape": np.array([1, 4, 4, 16])}
    used = {name: array for name, array in given.items() if re.search(rf"\b{name}\b", text)}
    feeds = {"x": RNG.standard_normal((1, 4, 8, 8), np.float32)}
    model = quantized(lambda: parse_graph(text, **used), feeds)
    assert "".join(node.inputs[0].name for node in model.graph if node.op_type == "QuantizeLinear") == rounded
    artifact, notes = build(model, tmp_path)
    assert notes == (f"products by the type that they run in: {2 + (depth == 8)} int8",)
    assert json.loads((artifact.folder / "audit.json").read_text())["asked"] == 2 + (depth == 8)
    assert compute_coverage(tmp_path / "model.onnx", {}).macs == {"int8": 1}
    with OpenVINO().load(artifact, CPU) as session:
        kinds = [layer.kind for layer in module.profiler.read_layers(session.compiled, ())]
        answers, wanted = session.run(feeds)["y"], run_model(parse_graph(text, **used), feeds, optimized=False)["y"]
    rounding = [kind for kind in kinds if kind in ("Subgraph", "FakeQuantize", "Convert", "Eltwise")]
    assert len(rounding) == 1  # that of the input
    assert np.square(wanted - answers).sum() < np.square(wanted).sum() / 300


def test_floats_where_the_graph_asks_for_int8_are_told(tmp_path: Path) -> None:
    model = quantized()
    artifact, _ = build(model, tmp_path)
    with OpenVINO().load(artifact, CPU) as session:
        layers = list(module.profiler.read_layers(session.compiled, ()))
    floats = [module.profiler.Layer(one.name, one.kind, "fp32", one.nodes) for one in layers]
    audit = module.profiler.audit(floats, module.profiler.find_rounded(onnx.load(tmp_path / "model.onnx"))[1])
    assert (audit.products, audit.asked, len(audit.floating)) == ({"fp32": 5}, 5, 5)
    assert "5 of 5 products are int8 in the graph and run in floating point: " in audit.notes[1]


def test_booleans_are_no_int8(tmp_path: Path) -> None:
    graph = """net (float[n, 64] x) => (float[n, 64] y, bool[n, 64] b) {
        y = MatMul(x, w)
        m = Greater(y, z)
        o = Less(x, z)
        b = And(m, o)
    }"""
    artifact, _ = build(parse_graph(graph, w=WEIGHT, z=np.float32(0)), tmp_path)
    assert set(OpenVINO().facts(artifact).layers or ()) == {"fp32"}


def test_inputs_are_not_copied(tmp_path: Path) -> None:
    artifact, _ = build(parse_graph(MATRIX, w=WEIGHT), tmp_path)
    given = np.ones((2, 64), np.float32)
    with OpenVINO().load(artifact, CPU) as session:
        bound = session.bind({"x": given})
        assert bound.tensors[0].data.ctypes.data == given.ctypes.data
        session.enqueue(bound)
        first = session.fetch()["y"]
        given[:] = 2
        session.enqueue(bound)
        np.testing.assert_allclose(session.fetch()["y"], 2 * first)


def test_large_answers_are_arrays_of_their_own(tmp_path: Path) -> None:
    """They are written by the engine itself, not copied; no later call, of either kind, writes into them again."""
    artifact, _ = build(parse_graph(MATRIX, w=WEIGHT), tmp_path)
    rows = sessions._LARGE_BYTES // (64 * 4)
    given = np.ones((rows, 64), np.float32)
    with OpenVINO(fixed_batches=(rows,)).load(artifact, CPU) as session:
        first = session.answer([given])[0]
        assert session.request.get_output_tensor(0).data.ctypes.data == first.ctypes.data
        kept = first.copy()
        np.testing.assert_allclose(session.answer([2 * given])[0], 2 * kept, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(last := session.answer([3 * given])[0], 3 * kept, rtol=1e-4, atol=1e-4)
        bound = session.bind({"x": 4 * given})
        for _ in range(2):
            session.enqueue(bound)
        np.testing.assert_allclose(session.fetch()["y"], 4 * kept, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(first, kept)
        np.testing.assert_allclose(last, 3 * kept, rtol=1e-4, atol=1e-4)


CHAIN = """net (float[n, 16] x) => (float[n, 16] y) {
    a = Gemm <transB = 1> (x, v, b)
    r = Relu(a)
    c = Gemm <transB = 1> (r, w, b)
    s = Slice(x, last, end, one)
    y = Add(s, c)
}"""
BESIDE = """net (float[n, 16] x) => (float[n, 16] y) {
    a = Gemm <transB = 1> (x, v, b)
    c = Gemm <transB = 1> (x, w, b)
    y = Sub(c, a)
}"""
CHAIN_FEEDS = {"x": RNG.standard_normal((2, 16), np.float32)}


def chain(text: str = CHAIN) -> ir.Model:
    given = {name: RNG.standard_normal(shape, np.float32) for name, shape in (("v", (16, 16)), ("w", (16, 16)))}
    given |= {"b": RNG.standard_normal(16, np.float32), "last": np.array([-1]), "end": np.array([16])}
    given["one"] = np.array([1])
    return parse_graph(text, **{name: array for name, array in given.items() if re.search(rf"\b{name}\b", text)})


@pytest.mark.parametrize("low", [True, False])
def test_products_of_fixed_sizes_that_follow_each_other_are_right(tmp_path: Path, low: bool) -> None:
    """OpenVINO would read beyond a column that is added to them in int8, and crash where floats are subtracted."""
    given = chain(CHAIN if low else CHAIN.replace("Add(s, c)", "Sub(c, x)"))
    model = quantized(lambda: given, CHAIN_FEEDS) if low else given
    artifact, _ = build(model, tmp_path)
    engine, wanted = OpenVINO(fixed_batches=(1,)), run_model(model, CHAIN_FEEDS, optimized=False)["y"]
    options = engine.package_facts(artifact.path, CPU).options
    assert options["SNIPPETS_MODE"] == "DISABLE"
    one, assert_close = {"x": CHAIN_FEEDS["x"][:1]}, np.testing.assert_allclose
    with engine.load(artifact, CPU) as session:
        assert_close(session.run(one)["y"], wanted[:1], rtol=1e-4, atol=1e-5)
    described = {"inputs": [{"shape": ["n", 16]}], "outputs": [{"name": "y"}], "options": options}
    answer = runpy.run_path(str(OpenVINO.infer_script()))["_openvino"](artifact.path, described)
    assert_close(answer(one)["y"], wanted[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "fixed", "needed"),
    [
        (CHAIN, True, True),
        (CHAIN, False, False),
        (CHAIN.replace("n, 16", "1, 16"), False, True),
        (CHAIN.replace("n, 16", "n, 3, 16").replace("Gemm <transB = 1> (x, v, b)", "MatMul(x, v)"), True, False),
        (BESIDE, True, False),
    ],
)
def test_only_such_products_need_another_way_of_compiling(tmp_path: Path, text: str, fixed: bool, needed: bool) -> None:
    text = text.replace("Gemm <transB = 1> (r, w, b)", "MatMul(r, w)")
    ir.save(chain(text), tmp_path / "model.onnx")
    found = sessions.find_workarounds(sessions.read_graph(tmp_path / "model.onnx"), fixed=fixed)
    assert found == ({"SNIPPETS_MODE": "DISABLE"} if needed else {})


REDUCED = "net (float[n, 8, 6] x) => (float[n, {size}] y) {{ {reduced} y = BatchNormalization(m, s, b, zero, one) }}"
REDUCED_FEEDS = {"x": RNG.standard_normal((4, 8, 6), np.float32)}


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("reduced", ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceL2"])
@pytest.mark.parametrize(("axis", "size"), [(1, 6), (-1, 8)])
def test_what_follows_a_reduction_is_computed_by_channels(
    tmp_path: Path, axis: int, size: int, reduced: str, low: bool
) -> None:
    """OpenVINO would take the scales of rows: behind the last of three axes always, behind others in int8."""
    given = {name: RNG.standard_normal(size, np.float32) for name in "sb"}
    given |= {"zero": np.zeros(size, np.float32), "one": np.ones(size, np.float32), "axis": np.array([axis])}
    text = REDUCED.format(size=size, reduced=f"m = {reduced} <keepdims = 0> (x, axis)")
    if low:
        text = text.replace("y = Batch", "z = Batch").replace(
            " }", " q = QuantizeLinear(z, r, o) y = DequantizeLinear(q, r, o) }"
        )
        given |= {"r": np.float32(0.1), "o": np.uint8(128)}
    model = parse_graph(text, **given)
    artifact, _ = build(model, tmp_path)
    wanted = run_model(model, REDUCED_FEEDS, optimized=False)["y"]
    with OpenVINO().load(artifact, CPU) as session:
        np.testing.assert_allclose(session.run(REDUCED_FEEDS)["y"], wanted, rtol=1e-4, atol=1e-4 + 0.1 * low)


REDUCTIONS = """net (float[n, 8, 6] x) => (float[n, 8] y, float[6] z, int64 p) {
    y = ReduceMean <keepdims = 0> (x, last)
    k = ReduceMax <keepdims = 1> (x, last)
    a = Add(x, k)
    z = ReduceMin <keepdims = 0> (a, first)
    s = Shape(x)
    p = ReduceProd <keepdims = 0> (s)
}"""


def test_reductions_of_floats_keep_their_axes_and_outputs_their_names(tmp_path: Path) -> None:
    model = parse_graph(REDUCTIONS, last=np.array([-1]), first=np.array([0, 1]))
    artifact, _ = build(model, tmp_path)
    graph = sessions.read_graph(artifact.path)
    kept = {
        node.get_friendly_name(): node.get_attributes()["keep_dims"]
        for node in graph.get_ordered_ops()
        if "Reduce" in node.get_type_name()
    }
    assert kept == {"y": True, "ReduceMax_1": True, "z": True, "p": False}
    feeds = {"x": RNG.standard_normal((3, 8, 6), np.float32)}
    with OpenVINO().load(artifact, CPU) as session:
        found = session.run(feeds)
    for name, wanted in run_model(model, feeds, optimized=False).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


BRANCHES = """<ir_version: 10, opset_import: ["" : 17]> g (float[n, 4] x, bool c) => (float[n, 4] y)
{ y = If (c) <then_branch = a () => (float[n, 4] p) { p = Relu(x) },
              else_branch = b () => (float[n, 4] q) { q = Neg(x) }> }"""


@pytest.mark.parametrize("fixed", [True, False])
def test_what_branches_hold_may_need_another_way_of_compiling(tmp_path: Path, fixed: bool) -> None:
    onnx.save(onnx.parser.parse_model(BRANCHES), tmp_path / "model.onnx")
    found = sessions.find_workarounds(sessions.read_graph(tmp_path / "model.onnx"), fixed=fixed)
    assert bool(found) == fixed


@pytest.mark.parametrize("slices", ["0, 4, 2, 1", "-5, 9, -1, 2"])
def test_elements_are_gathered_from_slices(tmp_path: Path, slices: str) -> None:
    """OpenVINO itself reads past such a slice, finds other sizes than those of the indices, and does not compile."""
    text = "net (float[n, 50, 6] x, int64[n, 10, W] i) => (float[n, 10, W] y) { b = Slice (x, s, e, a, t) y = "
    bounds = [np.array([int(word)]) for word in slices.split(", ")]
    width = len(range(6)[bounds[0][0] : bounds[1][0] : bounds[3][0]])
    text = text.replace("W", str(width)) + "GatherElements <axis = 1> (b, i) }"
    model = parse_graph(text, **dict(zip("seat", bounds, strict=True)))
    feeds = {"x": RNG.standard_normal((3, 50, 6), np.float32), "i": RNG.integers(0, 50, (3, 10, width))}
    wanted = run_model(model, feeds)["y"]
    artifact, _ = build(model, tmp_path)
    with OpenVINO().load(artifact, CPU) as session:
        assert (session.run(feeds)["y"] == wanted).all()


@pytest.mark.parametrize("stored", [True, False])
def test_a_branch_that_answers_nothing_answers_nothing(tmp_path: Path, stored: bool) -> None:
    """Branch as torchvision's NonMaxSuppression of many classes does without a box; OpenVINO alone answers a row."""
    nothing = "" if stored else "e = Constant <value: tensor = int64[0] {}> ()"
    text = f"""net (float[n, 4] x) => (int64[k] y) {{
        w = ReduceMax <keepdims = 0> (x)
        zero = Constant <value_float: float = 0.0> ()
        c = Less (w, zero)
        y = If (c) <then_branch = a () => (int64[k] p) {{ {nothing} p = Identity (e) }},
                    else_branch = b () => (int64[k] q) {{ f = NonZero (x) z = Constant <value_int: int = 0> ()
                                                          q = Gather <axis = 0> (f, z) }}> }}"""
    model = parse_graph(text, **({"e": np.empty(0, np.int64)} if stored else {}))
    artifact, _ = build(model, tmp_path)
    with OpenVINO().load(artifact, CPU) as session:
        for sign in (-1, 1):
            feeds = {"x": np.full((2, 4), sign, np.float32)}
            answer = session.run(feeds)["y"]
            assert answer.shape == run_model(model, feeds)["y"].shape == ((0,) if sign < 0 else (8,))


def test_a_graph_that_openvino_does_not_know_is_refused(tmp_path: Path) -> None:
    model = parse_graph(MATRIX.replace("MatMul(x, w)", "com.example.Unknown(x, w)"), w=WEIGHT)
    with pytest.raises(UnsupportedGraph, match="Unknown") as error:
        build(model, tmp_path)
    assert error.value.remedy.startswith("take another engine, update openvino, ")  # --opset is not for ONNX files
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(InvalidGraph, match=r"cannot load model\.onnx"):
        sessions.read_graph(tmp_path / "model.onnx")


def test_an_operator_that_is_not_read_again_is_refused_with_another_engine(tmp_path: Path) -> None:
    """Attention of ONNX Runtime's own domain is written to OpenVINO's file, which then cannot be read."""
    head = "net (float[1, 1, 8] x, float[1, 1, 4, 8] k, float[1, 1, 4, 8] v, int32[1] n, int32 t) => (float[1, 1, 8] y)"
    call = "y, u, w = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1> (x, x, x, k, v, n, t)"
    model = parse_graph(f"{head} {{ {call} }}")
    model.opset_imports["com.microsoft"] = 1
    artifact, _ = build(model, tmp_path)
    with pytest.raises(UnsupportedGraph, match="Cannot create GroupQueryAttention") as error:
        OpenVINO().load(artifact, CPU)
    assert error.value.remedy.startswith("take another engine")


@pytest.mark.parametrize(
    ("precision", "floats"), [("fp32", "f32"), ("int8", "f32"), ("int8+fp16", "f16"), ("fp16", "f16"), ("bf16", "bf16")]
)
def test_precision_is_explicit(precision: str, floats: str) -> None:
    (configuration,) = OpenVINO.configurations(EngineOptions(), precision)
    engine: Any = configuration.engine
    assert engine.floats == floats
    assert engine.package_facts(Path(), Device()).options["INFERENCE_PRECISION_HINT"] == floats
    assert OpenVINO.from_package(Path(), engine.package_facts(Path(), Device()).options) == engine


def test_triton_gets_the_options_of_the_run() -> None:
    options = OpenVINO(floats="bf16").package_facts(Path(), Device(threads=3)).options
    text = " ".join(Message(OpenVINO.triton().configure(options, "cpu")).lines())
    entries = re.findall(r'key: "(\w+)"\s+value {\s+string_value: "(\w+)"', text)
    wanted = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "3", "HINT_BF16": "YES"}
    assert dict(entries) == wanted


@pytest.mark.parametrize(
    ("floats", "said"), [("f32", "measured in float32"), ("f16", "measured in float16"), ("bf16", "")]
)
def test_triton_is_said_to_compute_in_bfloat16(floats: sessions.FloatType, said: str) -> None:
    remarks = OpenVINO.triton().remark({"options": OpenVINO(floats=floats).package_facts(Path(), CPU).options})
    assert len(remarks) == bool(said)
    assert all(said in text and "computes them in bfloat16" in text for text in remarks)


def test_sessions_get_the_tuned_options(tmp_path: Path) -> None:
    artifact, _ = build(parse_graph(MATRIX, w=WEIGHT), tmp_path)
    (artifact.folder / "tuning.json").write_text('{"fields": {"session_options": ["INFERENCE_NUM_THREADS=2"]}}')
    for allowed in (2, 1):
        with OpenVINO().load(artifact, Device(threads=allowed)) as session:
            assert session.compiled.get_property("INFERENCE_NUM_THREADS") == allowed


def test_bf16_needs_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for able in (True, False):
        monkeypatch.setattr(sessions, "computes_in_bf16", lambda able=able: able)
        answer = OpenVINO(floats="bf16").runnable(CPU)
        assert (answer.ok, "AVX512_BF16" in answer.reason) == (able, not able)
    with pytest.raises(MissingCapability, match="runs on the CPU only"):
        OpenVINO().require(Device(kind="cuda"))


def test_profile_names_operators_and_their_nodes(tmp_path: Path) -> None:
    model = quantized()
    artifact, _ = build(model, tmp_path)
    request = ProfileRequest(artifact, CPU, FEEDS, 3, tmp_path, tmp_path / "model.onnx")
    profiled = OpenVINO().profile(request)
    products = [each for each in profiled.operators if each.origin.multiplies]
    assert {each.precision for each in products} == {"int8"}
    assert sum(len(each.origin.modules) for each in products) >= 5


def test_without_the_package_the_remedy_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.software, "find", lambda name: None)
    answer = OpenVINO.available(CPU)
    assert (answer.ok, answer.reason) == (False, "openvino is not installed")
    assert re.match(r"install it: pip install \S*openvino", answer.remedy)


@pytest.mark.parametrize(
    "package",
    [
        "openvino",
        pytest.param(
            "nncf",
            marks=[
                pytest.mark.thorough,
                pytest.mark.skipif(software.version("nncf") is None, reason="nncf is not installed; pip install nncf"),
            ],
        ),
    ],
)
def test_importing_it_reports_to_nobody(tmp_path: Path, package: str) -> None:
    """Intel's package for telemetry is not even imported, and can still be by others."""
    folder = tmp_path / "openvino_telemetry"
    folder.mkdir()
    (folder / "__init__.py").write_text("print('telemetry is imported')")
    (folder / "backend.py").write_text("backend_ga4 = None")
    code = (
        "import sys; from enginesmith.pipeline.engines.telemetry import import_without_telemetry;"
        f"import_without_telemetry('{package}');"
        "assert 'openvino.tools.ovc' in sys.modules and 'openvino_telemetry' not in sys.modules; print('quiet')"
    )
    path = {"PYTHONPATH": ":".join((str(tmp_path), *sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("quiet\n", 0), done.stderr


def test_named_batch_sizes_are_compiled_apart_and_all_others_are_answered(tmp_path: Path) -> None:
    """A sibling uses what is compiled already."""
    artifact, _ = build(residual(), tmp_path)
    wanted = run_model(residual(), FEEDS, optimized=False)["y"]
    with OpenVINO(fixed_batches=(2,)).load(artifact, CPU) as session, session.sibling() as sibling:
        for size in (2, 3, 2):
            feeds = {"x": FEEDS["x"][:size]}
            np.testing.assert_allclose(session.run(feeds)["y"], wanted[:size], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(session.answer(list(feeds.values()))[0], wanted[:size], rtol=1e-4, atol=1e-5)
            assert session.compiled.input(0).partial_shape.is_dynamic == (size != 2)
        np.testing.assert_allclose(sibling.run({"x": FEEDS["x"][:2]})["y"], wanted[:2], rtol=1e-4, atol=1e-5)
        assert sibling.compiled is session.compiled


@pytest.mark.parametrize(
    ("shape", "fixed"),
    [
        *(("n, 3, 16, 16", True), ("n, 3, h, 16", False), ("2, 3, 16, 16", False), ("2, 3, n, 16", False)),
        *(("2, 3, batch, 16", True), ("2, 3, batch, batch", False)),
    ],
)
def test_only_a_batch_is_fixed(shape: str, fixed: bool, tmp_path: Path) -> None:
    text = f"net (float[{shape}] x) => (float[?, 3, ?, ?] y) {{ y = Relu(x) }}"
    artifact, _ = build(parse_graph(text), tmp_path)
    feeds = {"x": FEEDS["x"][:2]}
    with OpenVINO(fixed_batches=(2, 16)).load(artifact, CPU) as session:
        np.testing.assert_array_equal(session.run(feeds)["y"], np.maximum(feeds["x"], 0))
        asked = not any(isinstance(size, str) for size in artifact.signature.inputs[0].shape)
        assert session.compiled.input(0).partial_shape.is_static == (fixed or asked)


def test_the_batch_sizes_of_a_recipe_reach_the_engine_and_its_packages() -> None:
    (made,) = OpenVINO.configurations(EngineOptions(batch=(1, 2, 3, 4, 5)), "fp32")
    assert isinstance(made.engine, OpenVINO)
    assert made.engine.fixed_batches == (1, 2, 3, 4)
    options = made.engine.package_facts(Path("model.xml"), CPU).options
    assert OpenVINO.from_package(Path(), json.loads(json.dumps(options))).fixed_batches == (1, 2, 3, 4)


def test_a_bundle_answers_fixed_and_other_batch_sizes(tmp_path: Path) -> None:
    artifact, _ = build(residual(), tmp_path)
    wanted, run = run_model(residual(), FEEDS, optimized=False)["y"], runpy.run_path(str(OpenVINO.infer_script()))
    options = OpenVINO(fixed_batches=(2,)).package_facts(artifact.path, CPU).options
    shape, out = ["n", 3, 16, 16], [{"name": "y", "shape": ["n", 5]}]
    answer = run["_openvino"](artifact.path, {"options": options, "inputs": [{"shape": shape}], "outputs": out})
    for size in (2, 3, 2, 1):
        found = answer({"x": FEEDS["x"][:size]})["y"]
        np.testing.assert_allclose(found, wanted[:size], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "fixed"),
    [("5, batch, 4", [[5, 2, 4]]), ("n, 5, 4", [[2, 5, 4]]), ("5, n, 4", []), ("batch, batch, 4", [])],
)
def test_a_bundle_fixes_the_batch_wherever_it_stands(
    shape: str, fixed: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, _ = build(parse_graph(f"net (float[{shape}] x) => (float[{shape}] y) {{ y = Relu(x) }}"), tmp_path)
    made, model = list[list[int]](), sessions.load_openvino().Model
    reshape = model.reshape
    monkeypatch.setattr(model, "reshape", lambda graph, to: (made.append(to[0]), reshape(graph, to)))
    options = OpenVINO(fixed_batches=(2,)).package_facts(artifact.path, CPU).options
    sizes = [int(size) if size.isdecimal() else size for size in shape.split(", ")]
    described = {"inputs": [{"shape": sizes}], "outputs": [{"name": "y"}], "options": options}
    answer = runpy.run_path(str(OpenVINO.infer_script()))["_openvino"](artifact.path, described)
    for batch in (2, 3, 2):
        given = [batch if isinstance(size, str) else size for size in sizes]
        feeds = {"x": RNG.standard_normal(given, np.float32)}
        np.testing.assert_array_equal(answer(feeds)["y"], np.maximum(feeds["x"], 0))
    assert made == fixed
