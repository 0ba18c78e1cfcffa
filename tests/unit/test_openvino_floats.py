"""OpenVINO on floats: what casts the graph, what stays in float32, and functions that it computes less exactly."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.pipeline.engines.openvino import session as sessions
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.errors import ModelError, UnsupportedGraph
from enginesmith.pipeline.passes.float16.convert import lower, mark_kept
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.single_stages import precision_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.system.cpu import int8_weight_bits
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.verify import Verify
from graphs import parse_graph, run_model
from openvino_graphs import CPU, FEEDS, WEIGHTS, build

if not (openvino := OpenVINO.available(CPU)).ok:
    pytest.skip(f"{openvino.reason}; {openvino.remedy}", allow_module_level=True)


def test_it_casts_to_bf16_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph stays in float32; only graphs that a user asks for are lowered."""
    monkeypatch.setattr(sessions, "computes_in_bf16", lambda: True)
    values: dict[str, Any] = {"model": "digits", "engines": ["openvino"], "precisions": ["bf16"]}
    made = plan(resolve_recipe(make(values)))
    (variant,) = made.variants
    assert (variant.id, variant.engine.arithmetic, variant.lowering) == ("openvino-bf16", "bf16", None)
    steps = {step.id: step for step in made.steps}
    assert steps["build-openvino-bf16"].inputs["model"] == "simplify"
    assert not {name for name in steps if name.startswith(("precision", "audit"))}
    check = steps["verify-openvino-bf16"].task
    assert isinstance(check, Verify)
    assert check.precision == "bf16"

    written, _ = precision_steps(resolve_recipe(make(values)))
    assert "precision-bf16" in {step.id for step in written}

    made = plan(resolve_recipe(make({**values, "quantization": {"keep": ["head"]}})))
    steps = {step.id: step for step in made.steps}
    assert steps["build-openvino-bf16"].inputs["model"] == "precision-bf16"
    assert steps["build-openvino-bf16"].task.engine == made.variants[0].engine  # type: ignore[attr-defined]
    lowering = steps["precision-bf16"].task
    assert isinstance(lowering, Transform)
    bits = int8_weight_bits()  # 7 on processors without VNNI; in bfloat16 nothing comes of it
    assert lowering.step == Precision(
        precision="bf16", placement="inputs+read outputs", weight_bits=bits, keep=("head",)
    )


def test_a_search_that_would_need_a_later_opset_leaves_the_cast_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion to casts may fail, and OpenVINO's own cast needs no such graph."""
    monkeypatch.setattr(sessions, "computes_in_bf16", lambda: True)
    values = {"model": "digits", "engines": ["openvino"], "precisions": ["bf16"], "budgets": {"max_drop": 0.01}}
    for opset, lowering in ((22, "bf16"), (21, None)):
        (variant,) = plan(resolve_recipe(make({**values, "export": {"opset": opset}}))).variants
        assert (variant.lowering, bool(variant.search), variant.casts) == (lowering, opset == 22, True)


KEPT = """net (float[n, 3, 16, 16] x) => (float[n, 8] y) {
    c0 = Conv (x, w0)
    r0 = Relu(c0)
    c1 = Conv <pads = [1, 1, 1, 1]> (r0, w1, b1)
    g = GlobalAveragePool(c1)
    f = Flatten(g)
    p = Gemm <transB = 1> (f, w4, b4)
    y = MatMul(p, w5)
}"""


def test_the_float_graph_of_a_search_is_no_engine_in_float32_where_it_is_cast() -> None:
    """The audit of openvino-fp32 was that of the other one, with its layers in fp16."""
    values = {"model": "digits", "engines": ["openvino"], "precisions": ["int8+fp16", "fp32"], "min_sqnr_db": 20.0}
    made = plan(resolve_recipe(make(values)))
    floats = {step.id: step.task.engine.floats for step in made.steps if step.id.startswith("build-openvino-fp32")}
    assert floats == {"build-openvino-fp32": "f32", "build-openvino-fp32-fp16": "f16"}


def test_a_graph_with_a_part_in_bfloat16_is_cast_all_the_same(tmp_path: Path) -> None:
    """Nobody asked for float32 in the rest of it."""
    if not sessions.computes_in_bf16():
        pytest.skip("this processor has no instructions for bf16")
    text = KEPT.replace("r0 = Relu(c0)", "low = Cast <to = 16> (c0) wide = Cast <to = 1> (low) r0 = Relu(wide)")
    weights = {
        **WEIGHTS,
        "b1": WEIGHTS["w1"][:, 0, 0, 0],
        "w4": WEIGHTS["w1"][..., 0, 0],
        "w5": WEIGHTS["w1"][..., 1, 1],
    }
    built, _ = build(
        parse_graph(text, 22, named=True, **{**weights, "b4": weights["b1"]}), tmp_path, OpenVINO(floats="bf16")
    )
    assert OpenVINO().facts(built).layers["bf16"] >= 4


@pytest.mark.parametrize(("floats", "precision"), [("bf16", "bf16"), ("f16", "fp16")])
def test_what_the_graph_has_in_float32_is_computed_in_it(
    tmp_path: Path, floats: sessions.FloatType, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of thousands leaves few bits for the sum. Where float32 is lost, nothing is built."""
    if {"f16": "FP16", "bf16": "BF16"}[floats] not in sessions.core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip(f"this processor has no instructions for {precision}")
    able, kept = OpenVINO(floats=floats), ("c1", "p", "y")
    more = {"b1": np.full(8, 3e3, np.float32), "w4": WEIGHTS["w1"][..., 0, 0], "b4": WEIGHTS["w1"][:, 0, 0, 0]}

    def make_model() -> ir.Model:
        return parse_graph(KEPT, 22, named=True, **{**WEIGHTS, **more, "w5": WEIGHTS["w1"][..., 1, 1]})

    def measure_error(name: str, *keep: str) -> tuple[float, dict[str, int]]:
        folder, model = tmp_path / name, make_model()
        folder.mkdir()
        mark_kept(model, lower(model, precision, keep=keep))
        built, notes = build(model, folder, able)
        assert not [note for note in notes if "float32" in note]
        with able.load(built, CPU) as session:
            answer = session.run(FEEDS)["y"]
        error = np.abs(answer - run_model(make_model(), FEEDS)["y"]).max()
        ends: dict[str, Any] = {"MODEL": str(built.path), "INPUTS": [*FEEDS], "OUTPUTS": ["y"], "inputs": FEEDS}
        exec(able.reproduce(CPU), ends)
        np.testing.assert_allclose(ends["found"]["y"], answer, atol=max(error / 100, 1e-5))
        return float(error), OpenVINO().facts(built).layers

    (low, _), (high, layers) = measure_error("low"), measure_error("high", *kept)
    assert high < low / 8
    assert layers[precision] > 0
    main = tmp_path / "high" / "engine" / "model.xml"
    loaded = OpenVINO.from_package(main, able.package_facts(main, CPU).options)
    assert loaded.floats == ("f16" if floats == "f16" else "f32")  # type: ignore[attr-defined]
    monkeypatch.setattr(sessions, "mark_float32", lambda graph, nodes: None)
    monkeypatch.setattr(sessions, "choose_hint", lambda graph, floats: floats)
    with pytest.raises(ModelError, match=f"computes c1, p, y in {floats}, which the graph has in float32"):
        measure_error("lost", *kept)


SOFTPLUS = """net (float[{size}] x) => (float[{size}] y) {{ {body} }}"""
WRITTEN_OUT = "e = Exp(x) s = Add({}) y = Log(s)"
IN_A_BRANCH = """c = ReduceMax <keepdims = 0> (x) b = Greater(c, one)
    y = If (b) <then_branch = a () => (float[n] p) { p = Softplus(x) },
        else_branch = d () => (float[n] q) { q = Neg(x) }>
"""


@pytest.mark.parametrize(
    "body", ["y = Softplus(x)", WRITTEN_OUT.format("e, one"), WRITTEN_OUT.format("one, e"), IN_A_BRANCH]
)
@pytest.mark.parametrize("size", ["n", 603])
def test_softplus_has_all_digits(tmp_path: Path, size: int | str, body: str) -> None:
    """OpenVINO's own is 0 or negative below -12, so a logarithm of it is NaN."""
    model = parse_graph(SOFTPLUS.format(size=size, body=body), one=np.float32(1))
    artifact, _ = build(model, tmp_path)
    x = np.concatenate([np.linspace(-80, 120, 601), [-np.inf, np.inf]]).astype(np.float32)
    wide = x.astype(np.float64)
    with OpenVINO().load(artifact, CPU) as session:
        found = session.run({"x": x})["y"]
    wanted = np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide)))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("size", ["n", 3])
def test_softplus_may_get_axes_from_its_constant(tmp_path: Path, size: int | str) -> None:
    text = f"net (float[{size}] x) => (float[1, 1, {size}] y) {{ {WRITTEN_OUT.format('one, e')} }}"
    artifact, _ = build(parse_graph(text, one=np.ones((1, 1, 1), np.float32)), tmp_path)
    x = np.float32([-20, -13, 50])
    with OpenVINO().load(artifact, CPU) as session:
        found = session.run({"x": x})["y"]
    np.testing.assert_allclose(found, np.logaddexp(0, x.astype(np.float64))[None, None], rtol=1e-6)


@pytest.mark.parametrize("body", ["s = Softplus(x)", "e = Exp(x) a = Add(e, one) s = Log(a)"])
def test_a_mish_stays_one_operation(tmp_path: Path, body: str) -> None:
    model = parse_graph(SOFTPLUS.format(size="n", body=f"{body} t = Tanh(s) y = Mul(x, t)"), one=np.float32(1))
    artifact, _ = build(model, tmp_path)
    x = np.linspace(-20, 20, 41, dtype=np.float32)
    with OpenVINO().load(artifact, CPU) as session:
        found = session.run({"x": x})["y"]
        kinds = [node.get_rt_info()["layerType"].astype(str) for node in session.compiled.get_runtime_model().get_ops()]
    assert kinds.count("Eltwise") == 1
    np.testing.assert_allclose(found, x * np.tanh(np.log1p(np.exp(x))), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("product", "factor"),
    [
        ("y = Mul(s, t)", "softplus"),
        ("y = Mul(t, one)", "one"),
        ("z = Mul(x, t) y = Div(z, s)", "x"),
        ("a = Mul(x, t) b = Mul(t, x) y = Add(a, b)", "twice"),
    ],
)
def test_softplus_whose_tangent_makes_no_mish_has_all_digits(tmp_path: Path, product: str, factor: str) -> None:
    model = parse_graph(
        SOFTPLUS.format(size="n", body=f"s = Softplus(x) t = Tanh(s) {product}"), one=np.ones(1, np.float32)
    )
    artifact, _ = build(model, tmp_path)
    x = np.linspace(-15, 10, 26, dtype=np.float32)
    s = np.log1p(np.exp(x.astype(np.float64)))
    with OpenVINO().load(artifact, CPU) as session:
        wanted = np.tanh(s) * {"softplus": s, "one": 1, "x": x / s, "twice": 2 * x}[factor]
        np.testing.assert_allclose(session.run({"x": x})["y"], wanted, rtol=1e-5)


def test_other_logarithms_of_sums_stay_as_they_are(tmp_path: Path) -> None:
    text = "net (float[n] x) => (float[n] y) { e = Exp(x) s = Add(e, two) y = Log(s) }"
    artifact, _ = build(parse_graph(text, two=np.float32(2)), tmp_path)
    x = np.linspace(-60, 20, 50, dtype=np.float32)
    with OpenVINO().load(artifact, CPU) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], np.log(2 + np.exp(x)), rtol=1e-5)


@pytest.mark.parametrize("size", ["n", 7])
@pytest.mark.parametrize("order", [1, 2])
def test_short_rows_are_normalized_to_a_length_of_one(tmp_path: Path, size: int | str, order: int) -> None:
    """OpenVINO adds 1.2e-7 to the sum; rows of zeros stay such rows, as in ONNX Runtime."""
    text = f"net (float[{size}, 4] x) => (float[{size}, 4] y) {{ y = LpNormalization <axis = 1, p = {order}> (x) }}"
    artifact, _ = build(parse_graph(text), tmp_path)
    x = np.float32([1, 1e-3, 1e-6, 1e-12, 1e-17, 0, 1e6])[:, None] * np.float32([[3, -4, 12, 1]])
    lengths = np.linalg.norm(x.astype(np.float64), order, axis=1, keepdims=True)
    with OpenVINO().load(artifact, CPU) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], x / np.where(lengths, lengths, 1), rtol=1e-6)


def test_what_a_graph_itself_adds_to_a_norm_stays(tmp_path: Path) -> None:
    text = """net (float[n, 4] x) => (float[n, 4] y) <int64[1] last = {1}> {
        q = Pow(x, two) s = ReduceSum(q, last) a = Add(s, tiny) r = Sqrt(a) y = Div(x, r)
    }"""
    epsilon = np.finfo(np.float32).eps
    artifact, _ = build(parse_graph(text, two=np.float32(2), tiny=epsilon), tmp_path)
    x = np.full((2, 4), 1e-4, np.float32)
    with OpenVINO().load(artifact, CPU) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], x / np.sqrt(4e-8 + epsilon), rtol=1e-5)


SIGNALS = np.random.default_rng(0).standard_normal((3, 4, 6, 2)).astype(np.float32)
TRANSFORMS = [
    ("inverse = 0", 1, np.fft.fft),
    ("inverse = 0", 2, np.fft.fft),
    ("inverse = 1", 1, np.fft.ifft),
    ("inverse = 1", 2, np.fft.ifft),
    ("onesided = 1", 1, np.fft.rfft),
    ("inverse = 1, onesided = 1", 2, np.fft.irfft),
]


@pytest.mark.parametrize("sizes", ["3, 4, 6", "b, l, m"])
@pytest.mark.parametrize("opset", [17, 20])
def test_a_fourier_transform_is_along_its_axis(tmp_path: Path, opset: int, sizes: str) -> None:
    """OpenVINO takes axis 1 from opset 20 on, and answers one axis too many for one-sided transforms."""
    lines, wanted, axes = [], dict[str, Any](), (0, 1, 2, -3, None)
    for axis, (attributes, parts, function) in itertools.product(axes, TRANSFORMS):
        listed, given = attributes, "" if axis is None else f", , a{axes.index(axis)}"
        if opset < 20:
            listed, given = listed + ("" if axis is None else f", axis = {axis}"), ""
        lines.append(f"y{len(lines)} = DFT <{listed}> (x{parts}{given})")
        along = {17: 1, 20: 2}[opset] if axis is None else axis % 4
        values = SIGNALS[..., 0] + (1j * SIGNALS[..., 1] if parts == 2 else 0)
        wanted[f"y{len(wanted)}"] = split_parts(function(values, axis=along))
    ends = ", ".join(f"float[{', '.join(f'{name}_{at}' for at in range(4))}] {name}" for name in wanted)
    head = f"net (float[{sizes}, 1] x1, float[{sizes}, 2] x2) => ({ends})"
    constants = {f"a{at}": np.int64(axis) for at, axis in enumerate(axes) if axis is not None}
    model = parse_graph(f"{head} {{ {' '.join(lines)} }}", opset, **constants)
    artifact, _ = build(model, tmp_path)
    with OpenVINO().load(artifact, CPU) as session:
        found = session.run({"x1": SIGNALS[..., :1], "x2": SIGNALS})
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)


def split_parts(values: Any) -> Any:
    """Put the parts of numbers on an axis behind the others, as DFT has them."""
    return np.stack([values.real, values.imag], -1) if np.iscomplexobj(values) else values[..., None]


@pytest.mark.parametrize("length", [4, 9])
def test_a_fourier_transform_heeds_its_length(tmp_path: Path, length: int) -> None:
    text = "net (float[b, l, m, 2] x) => (float[b, l, n, 2] y) { y = DFT (x, n, a) }"
    model = parse_graph(text, 20, n=np.int64(length), a=np.int64(2))
    artifact, _ = build(model, tmp_path)
    with OpenVINO().load(artifact, CPU) as session:
        found = session.run({"x": SIGNALS})["y"]
    wanted = np.fft.fft(SIGNALS[..., 0] + 1j * SIGNALS[..., 1], length, axis=2)
    np.testing.assert_allclose(found, split_parts(wanted), atol=1e-5)


def test_graphs_are_read_whose_sizes_fit_the_axis_of_a_fourier_transform_alone(tmp_path: Path) -> None:
    """A bank of filters follows the transform, also in a branch; nothing of it fits axis 1."""
    text = """net (float[b, 4, 6] x, bool c) => (float[b, 4, 5] y) {
        u = Unsqueeze(x, last)
        d = DFT <onesided = 1> (u, , a)
        q = Mul(d, d)
        p = ReduceSum <keepdims = 0> (q, last)
        y = If(c) <then_branch = yes () => (float[b, 4, 5] t) { t = MatMul(p, w) },
                   else_branch = no () => (float[b, 4, 5] e) {
                       v = DFT <onesided = 1> (u, , a)
                       r = ReduceSum <keepdims = 0> (v, last)
                       e = MatMul(r, w)
                   }>
    }"""
    filters = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32)
    artifact, _ = build(parse_graph(text, 20, a=np.int64(-2), last=np.int64([-1]), w=filters), tmp_path)
    x = np.ascontiguousarray(SIGNALS[..., 0])
    found = np.fft.rfft(x, axis=2)
    with OpenVINO().load(artifact, CPU) as session:
        for condition, wanted in ((True, abs(found) ** 2), (False, found.real + found.imag)):
            answer = session.run({"x": x, "c": np.array(condition)})["y"]
            np.testing.assert_allclose(answer, wanted @ filters, atol=1e-4)


def test_a_computed_axis_of_a_fourier_transform_is_refused(tmp_path: Path) -> None:
    text = "net (float[b, l, m, 2] x, int64 a) => (float[b, l, m, 2] y) { y = DFT (x, , a) }"
    with pytest.raises(UnsupportedGraph, match=r"does not support what is in model\.onnx: .*DFT"):
        build(parse_graph(text, 20), tmp_path)
