"""Graphs with Q/DQ pairs in ONNX Runtime: it computes in integers what is meant to be, and floats stay floats."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.onnxruntime.optimizers import quantizes_weights_alone
from enginesmith.pipeline.engines.onnxruntime.session import open_session, session_options
from enginesmith.pipeline.engines.triton import Message
from enginesmith.pipeline.passes.quantize.precision import keep_clamps_apart, keep_weights_floating
from enginesmith.pipeline.passes.quantize.qdq import Settings
from enginesmith.pipeline.passes.quantize.quantizers import add_to_bias
from enginesmith.pipeline.planning.variants import list_variants, resolve_recipe
from enginesmith.pipeline.recipe import make as make_recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array
from graphs import count_kernels, normal, parse_graph, run_model, sqnr_db
from qdq_graphs import CPU, GPU, RUNNABLE, exact_values, feeds, find_node, grid, make_quantized, make_random, residual

random = make_random()


def test_onnx_runtime_computes_everything_in_integers(tmp_path: Path) -> None:
    model, found = make_quantized(residual, CPU)
    assert not found.left
    kinds = count_kernels(model, feeds(model), tmp_path)
    assert [kinds[f"Q{end}"] for end in ("LinearConv", "LinearAdd", "Gemm", "LinearGlobalAveragePool")] == [4, 1, 1, 1]
    assert not {"Conv", "Add", "Relu", "Clip", "MaxPool", "Gemm"} & set(kinds)
    assert kinds["QuantizeLinear"] == 1


@pytest.mark.parametrize("settings", [CPU, GPU], ids=["onnxruntime", "tensorrt"])
def test_the_result_is_close_to_the_float_graph_fused_or_not(settings: Settings) -> None:
    exact = exact_values(residual(), feeds(residual()))["y"]
    model, _ = make_quantized(residual, settings)
    simulated, real = exact_values(model, feeds(model))["y"], run_model(model, feeds(model))["y"]
    assert sqnr_db(exact, simulated) > 25
    assert sqnr_db(exact, real) > 25
    assert sqnr_db(simulated, real) > 30


@pytest.mark.parametrize(
    "between",
    [
        "b = MaxPool <kernel_shape = [2, 2]> (a)",
        "b = AveragePool <kernel_shape = [2, 2]> (a)",
        "b = GlobalAveragePool(a)",
        "b = LeakyRelu <alpha = 0.1> (a)",
        "g = Sigmoid(a) b = Mul(a, g)",
        "g = GlobalAveragePool(a) h = Conv(g, w) i = Sigmoid(h) b = Mul(i, a)",
        "h = Conv(a, w) i = Add(h, a) b = Relu(i)",
        'b = Resize <mode = "nearest"> (a, none, twice)',
        "t = Transpose <perm = [0, 1, 3, 2]> (a) b = Clip(t, low, high)",
        "b = Slice(a, start, end, axis)",
        "c, d = Split <axis = 1, num_outputs = 2> (a) b = Concat <axis = 1> (d, c)",
        "c = Reshape(a, shape) b = Transpose <perm = [0, 1, 3, 2]> (c)",
        "c = Concat <axis = 1> (a, a, a, a) b = DepthToSpace <blocksize = 2> (c)",
    ],
)
def test_onnx_runtime_goes_on_in_integers(tmp_path: Path, between: str) -> None:
    text = f"net (float[1, 4, 8, 8] x) => (float[1, 4, p, q] y) {{ a = Conv(x, w, v) {between} y = Conv(b, w) }}"
    given = {
        "w": random(4, 4, 1, 1),
        "v": random(4),
        "none": np.zeros(0, np.float32),
        "twice": np.float32([1, 1, 2, 2]),
        "start": np.array([1]),
        "end": np.array([4]),
        "axis": np.array([2]),
        "shape": np.array([1, 4, 4, 16]),
        "low": np.float32(-0.5),
        "high": np.float32(6),
    }
    read = onnx.parser.parse_graph(text)
    used = {name for one in read.node for name in one.input}
    weights = {name: array for name, array in given.items() if name in used}
    model, found = make_quantized(lambda: parse_graph(text, **weights), RUNNABLE)
    assert not found.left
    kinds = count_kernels(model, feeds(model), tmp_path)
    assert kinds["QLinearConv"] == 2 + ("Conv(a" in between or "Conv(g" in between)
    clamps = "Clip" in between  # with nothing before it that it could be part of
    assert (kinds["QuantizeLinear"], kinds["DequantizeLinear"]) == (1 + clamps, 1 + clamps)
    assert (
        sqnr_db(exact_values(parse_graph(text, **weights), feeds(model))["y"], run_model(model, feeds(model))["y"]) > 25
    )


def test_a_network_with_upsampling(tmp_path: Path) -> None:
    def make() -> ir.Model:
        return parse_graph(
            """net (float[1, 4, 16, 16] x) => (float[1, 4, 16, 16] y) {
                c = Conv(x, w)
                r = Relu(c)
                d = Conv <strides = [2, 2]> (r, w)
                u = ConvTranspose <strides = [2, 2]> (d, t)
                m = Concat <axis = 1> (u, r)
                y = Conv(m, v)
            }""",
            w=random(4, 4, 1, 1),
            t=random(4, 4, 2, 2),
            v=random(4, 8, 1, 1),
        )

    model, found = make_quantized(make, CPU)
    (why,) = found.left.values()
    assert "no int8 kernel for ConvTranspose" in why
    kinds = count_kernels(model, feeds(model), tmp_path)
    assert (kinds["QLinearConv"], kinds["QLinearConcat"], kinds["ConvTranspose"]) == (3, 1, 1)
    assert grid(model, "u") == grid(model, "m"), "what is rounded for the Concat alone has its grid"
    assert grid(model, "r") != grid(model, "m"), "what others read too keeps its own"
    assert not make_quantized(make, GPU)[1].left


@pytest.mark.parametrize("behind", ["y = Relu(u)", "r = Relu(u) y = Conv(r, last)"])
@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((4, 4), "strides = [2, 2], pads = [1, 1, 1, 1]"),
        ((4, 4), "strides = [2, 2], pads = [2, 0, 0, 2]"),
        ((3, 5), "strides = [2, 2], pads = [1, 2, 1, 2], output_padding = [1, 1]"),
        ((5, 5), "strides = [3, 3], pads = [1, 1, 1, 1]"),
    ],
)
@pytest.mark.parametrize("settings", [RUNNABLE, replace(RUNNABLE, signed=True)], ids=["unsigned", "signed"])
def test_onnx_runtime_enlarges_pictures_in_integers(
    tmp_path: Path, settings: Settings, kernel: tuple[int, int], attributes: str, behind: str
) -> None:
    """A ConvTranspose, of which there is no int8 kernel, is a convolution whose channels are moved to pixels."""

    weights = {"first": random(64, 8, 1, 1), "up": random(64, 4, *kernel) * 8, "bias": random(4)}
    weights |= {"last": random(4, 4, 1, 1)} if "last" in behind else {}
    text = f"""net (float[n, 8, h, w] x) => (float[n, 4, height, width] y) {{
        c = Conv(x, first)
        u = ConvTranspose <{attributes}> (c, up, bias)
        {behind}
    }}"""

    def make() -> ir.Model:
        return parse_graph(text, **weights)

    model, found = make_quantized(make, settings)
    assert not found.left
    kinds = count_kernels(model, feeds(model), tmp_path)
    assert (kinds["QLinearConv"], kinds["ConvTranspose"], kinds["Conv"]) == (2 + ("last" in behind), 0, 0)
    exact, rounded = (run_model(each, feeds(model))["y"] for each in (make(), model))
    assert exact.shape == rounded.shape
    assert sqnr_db(exact, rounded) > 25


def test_transformers_get_products_that_write_floats(tmp_path: Path) -> None:
    def make() -> ir.Model:
        return parse_graph(
            """net (float[n, 6, 32] x) => (float[n, 6, 32] y) {
                h = LayerNormalization(x, s)
                m = MatMul(h, w)
                a = Add(m, b)
                g = Gelu(a)
                n2 = MatMul(g, v)
                y = Add(n2, x)
            }""",
            s=np.ones(32, np.float32),
            w=random(32, 64),
            b=random(64),
            v=random(64, 32),
        )

    model, found = make_quantized(make, CPU)
    assert found.pairs == 2
    kinds = count_kernels(model, feeds(model), tmp_path)
    assert (kinds["MatMulIntegerToFloat"], kinds["QuantizeLinear"], kinds["MatMul"]) == (2, 2, 0)
    assert kinds["DequantizeLinear"] == 0


@pytest.mark.parametrize(
    ("keep", "written_out", "behind"),
    [(frozenset(), 0, "QuantizeLinear"), (frozenset(["Gemm_2"]), 1, "Min")],
    ids=["an int8 reader", "a floating reader"],
)
def test_a_clamp_keeps_the_kernels(tmp_path: Path, keep: frozenset[str], written_out: int, behind: str) -> None:
    text = """net (float[n, 16] x) => (float[n, 4] y) {
        g = Gemm (x, w, b)
        r = Clip(g, low, high)
        y = Gemm (r, v)
    }"""
    weights = {"w": random(16, 8), "b": random(8), "v": random(8, 4), "low": np.float32(0), "high": np.float32(1)}
    model, _ = make_quantized(lambda: parse_graph(text, **weights), replace(RUNNABLE, keep=keep))
    simulated = exact_values(model, feeds(model))["y"]
    assert keep_clamps_apart(model) == written_out
    assert behind in {n.op_type for n in model.graph}
    assert count_kernels(model, feeds(model), tmp_path)["QGemm"] == 2 - len(keep)
    assert sqnr_db(exact_values(parse_graph(text, **weights), feeds(model))["y"], simulated) > 25
    assert sqnr_db(simulated, run_model(model, feeds(model))["y"]) > 30


@pytest.mark.parametrize("read", ["Relu(g)", "Add(g, b)"])
def test_what_a_branch_does_with_a_product_is_no_part_of_it(read: str) -> None:
    text = f"""net (float[1, 8] x) => (float[1, 4] y) {{
        g = MatMul(x, w)
        y = If (c) <then_branch = t () => (float[1, 4] p) {{ p = {read} }},
            else_branch = e () => (float[1, 4] q) {{ q = Neg(z) }}>
    }}"""

    def make() -> ir.Model:
        return parse_graph(text, w=random(8, 4), b=random(4), z=random(1, 4), c=np.array(True))

    model, found = make_quantized(make, RUNNABLE)
    assert [group.activations for group in found.done] == [("x",)]
    assert not add_to_bias(find_node(model, "g"), np.ones(4))
    assert keep_clamps_apart(model) == 0
    run_model(model, feeds(model))


BETWEEN = """net (float[1, 8, 8, 8] x) => (float[1, 8, 8, 8] y) {
    a = Conv(x, w0, b0)
    r = Relu(a)
    c = KEPT
    s = Relu(c)
    y = Conv(s, w2, b0)
}"""
_FACTORS = np.geomspace(1e-2, 1, 8, dtype=np.float32)
_UNEVEN = random(8, 8, 1, 1) * _FACTORS.reshape(-1, 1, 1, 1)
"""One scale for all of its channels leaves some of them few levels."""


@pytest.mark.parametrize(
    ("kept", "weight"),
    [
        ("Conv(r, w1)", _UNEVEN),
        ("Conv(r, w1, b1)", _UNEVEN),
        ("Conv <group = 8> (r, w1, b1)", _UNEVEN[:, :1]),
        ("ConvTranspose(r, w1, b1)", _UNEVEN.swapaxes(0, 1)),
    ],
)
def test_a_float_weight_between_pairs_stays_one(kept: str, weight: Array, tmp_path: Path) -> None:
    """ONNX Runtime rounds it to int8 with one scale, if its product reads what one scale dequantizes."""
    last = random(8, 8, 1, 1) / _FACTORS.reshape(1, -1, 1, 1)
    weights = {"w0": random(8, 8, 1, 1), "b0": random(8), "w1": weight, "w2": last}
    weights |= {"b1": random(8) * _FACTORS} if "b1" in kept else {}
    text = BETWEEN.replace("KEPT", kept)
    model, _ = make_quantized(
        lambda: parse_graph(text, named=True, **weights), replace(RUNNABLE, keep=frozenset(["c"]))
    )
    simulated = exact_values(model, feeds(model))["y"]
    wrong = sqnr_db(simulated, run_model(model, feeds(model))["y"])
    assert wrong < 50, "this version of ONNX Runtime leaves the weight alone, so keep_weights_floating can go"
    assert keep_weights_floating(model) == 1
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert sqnr_db(simulated, exact_values(model, feeds(model))["y"]) > 100
    assert sqnr_db(simulated, run_model(model, feeds(model))["y"]) > wrong + 5
    assert count_kernels(model, feeds(model), tmp_path)["QLinearConv"] == 2


def test_a_float_gemm_between_pairs_stays_one(tmp_path: Path) -> None:
    text = """net (float[n, 8, 4, 4] x) => (float[n, 8] y) {
        a = Conv(x, w0, b0)
        g = GlobalAveragePool(a)
        f = Flatten(g)
        c = Gemm <transB = 1> (f, w1)
        y = Gemm (c, w2, b0)
    }"""
    weights = {"w0": random(8, 8, 1, 1), "b0": random(8), "w1": random(6, 8), "w2": random(6, 8)}
    model, _ = make_quantized(
        lambda: parse_graph(text, named=True, **weights), replace(RUNNABLE, keep=frozenset(["c"]))
    )
    simulated = exact_values(model, feeds(model))["y"]
    assert keep_weights_floating(model) == 1
    assert sqnr_db(simulated, exact_values(model, feeds(model))["y"]) > 100
    assert count_kernels(model, feeds(model), tmp_path)["QGemm"] == 1


def test_a_float_gemm_of_a_transposed_input_reads_a_scale_for_each_row() -> None:
    text = """net (float[4, 8, 4, 4] x) => (float[8, 5] y) {
        a = Conv(x, w0, b0)
        g = GlobalAveragePool(a)
        f = Flatten(g)
        c = Gemm <transA = 1> (f, w1)
        y = Gemm (c, w2)
    }"""
    weights = {"w0": random(8, 8, 1, 1), "b0": random(8), "w1": random(4, 6), "w2": random(6, 5)}
    model, _ = make_quantized(
        lambda: parse_graph(text, named=True, **weights), replace(RUNNABLE, keep=frozenset(["c"]))
    )
    simulated = exact_values(model, feeds(model))["y"]
    assert keep_weights_floating(model) == 1
    assert sqnr_db(simulated, exact_values(model, feeds(model))["y"]) > 100
    run_model(model, feeds(model))


@pytest.mark.parametrize(("shape", "quantized"), [((4, 1), False), ((1, 4), True), ((4,), True)])
def test_a_bias_is_one_number_for_each_column(shape: tuple[int, ...], quantized: bool) -> None:
    weights = {"w": random(8, 4), "c": 10 * np.arange(4, dtype=np.float32).reshape(shape)}

    def make() -> ir.Model:
        return parse_graph("net (float[4, 8] x) => (float[4, 4] y) { y = Gemm (x, w, c) }", **weights)

    model, found = make_quantized(make, RUNNABLE)
    assert bool(found.done) == quantized
    exact, other = (run_model(each, feeds(model))["y"] for each in (make(), model))
    assert sqnr_db(exact, other) > 40


def test_products_in_int8_read_one_scale() -> None:
    model, _ = make_quantized(residual, RUNNABLE)
    assert keep_weights_floating(model) == 0


@pytest.mark.parametrize("settings", [CPU, GPU], ids=["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("between", ["Identity", "Relu"])
def test_a_bias_beside_a_dead_channel_survives_integers(settings: Settings, between: str) -> None:
    """ONNX Runtime rounds biases between two pairs to int32 by itself."""
    weight = random(4, 4, 1, 1)
    weight[1] *= 1e-9
    weights = {"w": weight, "b": np.array([0, 2, 0, 0], np.float32), "v": np.eye(4, dtype=np.float32)[..., None, None]}

    def make() -> ir.Model:
        text = f"c = Conv(x, w, b) r = {between}(c) y = Conv(r, v)"
        return parse_graph(f"net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {{ {text} }}", **weights)

    model, _ = make_quantized(make, settings)
    np.testing.assert_allclose(run_model(model, feeds(model))["y"][:, 1], 2, atol=0.05)


FLOAT8 = Settings(number="fp8", placement="inputs+outputs")
CONVOLUTIONS = "net (float[1, 8, 8, 8] x) => (float[1, 8, p, q] y) { a = Conv(x, w, b) BETWEEN y = Conv(r, v) }"
MATRICES = "net (float[4, 8] x) => (float[4, 8] y) { a = Gemm <transB = 1> (x, w, b) BETWEEN y = Gemm(r, v) }"


def answer_as_engine(path: Path, inputs: dict[str, Array]) -> Array:
    """Answer a graph by a session as the engine opens it."""
    (answer,) = open_session(path, session_options(Device(), "all", memory_arena=True), Device()).run(None, inputs)
    return np.asarray(answer)


@pytest.mark.parametrize(
    ("net", "between"),
    [
        (CONVOLUTIONS, "r = Relu(a)"),
        (CONVOLUTIONS, "r = Clip(a, low, high)"),
        (CONVOLUTIONS, "r = Identity(a)"),
        (CONVOLUTIONS, "c = Relu(a) r = MaxPool <kernel_shape = [2, 2]> (c)"),
        (CONVOLUTIONS, "c = Conv(a, v) d = Add(c, a) r = Relu(d)"),
        (CONVOLUTIONS.replace("w, b", "w"), "r = Relu(a)"),
        (MATRICES, "r = Relu(a)"),
        (MATRICES, "r = Clip(a, low, high)"),
        (MATRICES, "r = Identity(a)"),
        (MATRICES, "r = Sigmoid(a)"),
        (MATRICES.replace("Gemm <transB = 1> (x, w, b)", "MatMul(x, w)"), "r = Relu(a)"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-9], ids=["all channels alive", "a dead channel"])
def test_onnx_runtime_computes_pairs_of_float8_as_they_are(
    net: str, between: str, scale: float, tmp_path: Path
) -> None:
    """Its optimizations for pairs of integers drop a Relu before them, lose biases, and end loading."""
    text, kernel = net.replace("BETWEEN", between), (1, 1) if "Conv" in net else ()
    weights = {"w": random(8, 8, *kernel), "b": random(8) + 1, "v": random(8, 8, *kernel)}
    weights |= {"low": np.zeros((), np.float32), "high": np.ones((), np.float32)}
    weights["w"][1] *= scale
    model, done = make_quantized(lambda: parse_graph(text, 22, **weights), FLOAT8)
    assert not done.left
    path, inputs = tmp_path / "float8.onnx", feeds(model)
    ir.save(model, path)
    (wanted,) = ReferenceEvaluator(onnx.load(path)).run(None, dict(inputs))
    assert sqnr_db(wanted, answer_as_engine(path, inputs)) > 100


@pytest.mark.parametrize("as_node", [False, True], ids=["an initializer", "a node"])
def test_a_relu_before_float8_stays_in_graphs_of_others(as_node: bool, tmp_path: Path) -> None:
    text = (
        "(float[4, 8] x) => (float[4, 8] y) { r = Relu(x) q = QuantizeLinear(r, s, z) y = DequantizeLinear(q, s, z) }"
    )
    model = parse_graph(text, 22, s=np.float32(0.01), z=np.zeros((), ml_dtypes.float8_e4m3fn))
    if as_node:
        zero = model.graph.initializers.pop("z")
        node = ir.node("Constant", [], {"value": zero.const_value})
        ir.convenience.replace_all_uses_with(zero, node.outputs[0])
        model.graph.insert_before(model.graph[0], node)
    path = tmp_path / "given.onnx"
    ir.save(model, path)
    assert answer_as_engine(path, feeds(model)).min() == 0


@pytest.mark.parametrize("given", ["n, 1, 6, 16", "n, 3, 6, 16", "6, 16"])
def test_each_column_of_each_expert_has_a_scale_in_an_integer_kernel(tmp_path: Path, given: str) -> None:
    sizes = np.array([0.01, 1, 100]).reshape(3, 1, 1) * np.linspace(0.2, 5, 8)

    def make(opset: int = 21) -> ir.Model:
        text = f"net (float[{given}] x) => (float[{'n, ' * (given[0] == 'n')}3, 6, 8] y) {{ y = MatMul(x, w) }}"
        return parse_graph(text, opset, w=(make_random(5)(3, 16, 8) * sizes).astype(np.float32))

    def lowest(settings: Settings, opset: int = 21) -> float:
        model, _ = make_quantized(lambda: make(opset), settings)
        inputs = feeds(model)
        exact, rounded = exact_values(make(), inputs)["y"], run_model(model, inputs)["y"]
        return min(sqnr_db(exact[..., expert, :, :], rounded[..., expert, :, :]) for expert in range(3))

    model, _ = make_quantized(make, RUNNABLE)
    assert count_kernels(model, feeds(model), tmp_path) == {"QuantizeLinear": 1, "MatMulIntegerToFloat": 1}
    assert lowest(RUNNABLE) > 30
    assert lowest(replace(RUNNABLE, placement="inputs+read outputs")) > 30
    assert lowest(replace(RUNNABLE, inputs_only=True)) > 30
    assert lowest(RUNNABLE, opset=19) < 5, "blocks came later"
    assert lowest(GPU) < 5, "TensorRT has no blocks in int8"


def _save_blocks(path: Path) -> Path:
    """Save a product with an int4 weight in blocks of 16 inputs."""
    levels = np.random.default_rng(1).integers(-7, 8, (64, 32)).astype(ml_dtypes.int4)
    graph = """net (float[n, 64] x) => (float[n, 32] y) {
        v = DequantizeLinear <axis = 0, block_size = 16> (q, s)
        y = MatMul(x, v)
    }"""
    model = parse_graph(graph, 21, s=np.abs(normal(4, 32)) + 0.1, q=levels)
    ir.save(model, path)
    return path


@pytest.mark.parametrize("rounded", [False, True])
def test_activations_beside_weights_in_blocks_are_rounded_where_that_is_asked_for_alone(
    rounded: bool, tmp_path: Path
) -> None:
    """By default ONNX Runtime rounds them to int8, without a word."""
    given = Artifact(kind="onnx", path=_save_blocks(tmp_path / "model.onnx"), sha256="", bytes=0)
    engine, x = OnnxRuntime(int8_activations=rounded), {"x": normal(4, 64, seed=3)}
    (out := tmp_path / "built").mkdir()
    effect = engine.build(BuildRequest(given, out, Device()))
    built = Artifact(kind="engine", path=out / effect.file, sha256="", bytes=0, signature=effect.signature)
    assert {node.op_type for node in ir.load(built.path).graph} == {"MatMulNBits"}
    with OnnxRuntime.as_given().load(given, Device()) as session:
        (right,) = session.run(x).values()
    for artifact in (built, given):  # a package has the graph as it was
        with engine.load(artifact, Device()) as session:
            (answer,) = session.run(x).values()
        assert bool(np.abs(answer - right).max() > 1e-3 * np.abs(right).max()) is rounded
    assert engine.arithmetic == ("int8" if rounded else "fp32")


def test_packages_name_how_products_with_weights_in_blocks_are_computed(tmp_path: Path) -> None:
    entry = "session.qdq_matmulnbits_accuracy_level"
    main = _save_blocks(tmp_path / "model.onnx")
    for rounded, value in ((False, "1"), (True, "4")):
        engine = OnnxRuntime(int8_activations=rounded)
        options = engine.package_facts(main, Device()).options
        assert options["config_entries"] == {entry: value}
        assert OnnxRuntime.from_package(main, options).int8_activations is rounded  # type: ignore[attr-defined]
        backend = engine.triton()
        assert backend is not None
        text = " ".join(Message(backend.configure(options, "cpu")).lines())
        assert ("level: -1" in text) is (entry in "".join(backend.remark({"options": options}))) is not rounded
    older = {**options, "config_entries": {}}
    assert OnnxRuntime.from_package(main, older).int8_activations, "by default"  # type: ignore[attr-defined]
    backend.configure({name: value for name, value in options.items() if name != "config_entries"}, "cpu")


def test_a_package_without_products_with_weights_in_blocks_rounds_no_activations(tmp_path: Path) -> None:
    ir.save(parse_graph("net (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }", 21), main := tmp_path / "model.onnx")
    options = OnnxRuntime().package_facts(main, Device()).options
    assert options["config_entries"] == {}
    assert OnnxRuntime.from_package(main, options).arithmetic == "fp32"


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("v = DequantizeLinear <axis = 0, block_size = 16> (q, s)\n y = MatMul(x, v)", True),
        ("v = DequantizeLinear <axis = 0, block_size = 16> (q, s)\n c = Cast <to = 1> (v)\n y = MatMul(x, c)", True),
        (
            "p = QuantizeLinear(x, u, z)\n b = DequantizeLinear(p, u, z)\n"
            "v = DequantizeLinear <axis = 0, block_size = 16> (q, s)\n y = MatMul(b, v)",
            False,
        ),
        (
            "t = Transpose(s)\n p = QuantizeLinear(t, u, z)\n b = DequantizeLinear(p, u, z)\n"
            "r = MatMul(s, b)\n g = MatMul(r, s)\n o = Slice(g, k, k)\n y = MatMul(x, w)",
            False,
        ),
    ],
)
def test_weights_alone_are_told_from_pairs_on_both_sides(text: str, alone: bool, tmp_path: Path) -> None:
    model = parse_graph(
        f"net (float[n, 64] x) => (float[n, 32] y) {{ {text} }}",
        21,
        s=np.abs(normal(4, 32)),
        w=normal(64, 32),
        u=np.float32(0.1),
        z=np.uint8(128),
        k=np.array([1]),
        q=np.zeros((64, 32), ml_dtypes.int4),
    )
    ir.save(model, tmp_path / "model.onnx")
    assert quantizes_weights_alone(tmp_path / "model.onnx") is alone


@pytest.mark.parametrize(
    ("level", "device", "modes"),
    [
        ("all", "cpu", ["", "int8-activations"]),
        ("disabled", "cpu", ["disabled"]),
        ("all", "cuda", [""]),
    ],
)
def test_int4_is_tried_with_activations_of_both_kinds_where_there_are_kernels(
    level: str, device: str, modes: list[str]
) -> None:
    recipe = make_recipe(
        {"model": "digits", "engines": ["onnxruntime"], "graph_optimization": [level], "device": device}
    )
    assert [config.mode for config in OnnxRuntime.configurations(recipe, "int4-weights")] == modes
    assert len([*OnnxRuntime.configurations(recipe, "fp32")]) == 1


@pytest.mark.parametrize(("precision", "count"), [("fp32", 1), ("int4-weights", 2)])
def test_a_file_that_is_in_int4_keeps_its_floats(precision: str, count: int, tmp_path: Path) -> None:
    model = str(_save_blocks(tmp_path / "model.onnx"))
    recipe = make_recipe(
        {"model": model, "engines": ["onnxruntime"], "precisions": [precision], "device": "cpu"}, listed=True
    )
    assert len([*list_variants(resolve_recipe(recipe), recipe.engines)]) == count
