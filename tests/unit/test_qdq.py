"""Q/DQ pairs: where they are, on which grids, and that ONNX Runtime computes in integers what it is meant to."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.calibration.ranges import METHODS, Ranges, TensorRange
from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.passes.quantize.layers import Quantised
from enginesmith.pipeline.passes.quantize.precision import keep_clamps_apart, keep_weights_floating
from enginesmith.pipeline.passes.quantize.qdq import Settings, quantise
from enginesmith.pipeline.passes.quantize.quantizers import add_to_bias
from enginesmith.pipeline.system.cpu import int8_weight_bits
from enginesmith.pipeline.tensors import Array
from graphs import NOWHERE, count_kernels, parse_graph, run_model, sqnr_db

CPU, GPU = Settings(placement="inputs+outputs"), Settings(placement="inputs")
RUNNABLE = replace(CPU, weight_bits=int8_weight_bits())
"""For kernels that are run: weights that this processor multiplies without overflow."""
_RNG = np.random.default_rng(0)


def random(*shape: int) -> Array:
    return (_RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)


RESIDUAL = """net (float[n, 3, 16, 16] x) => (float[n, 5] y) {
    c0 = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
    r0 = Relu(c0)
    p0 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r0)
    c1 = Conv <pads = [1, 1, 1, 1]> (p0, w1, b1)
    r1 = Clip(c1, zero, six)
    c2 = Conv <pads = [1, 1, 1, 1], group = 8> (r1, w2)
    s = Conv (p0, w3, b1)
    a = Add(c2, s)
    r2 = Relu(a)
    g = GlobalAveragePool(r2)
    f = Flatten(g)
    y = Gemm <transB = 1> (f, w4, b4)
}"""
RESIDUAL_WEIGHTS = {
    "w0": random(8, 3, 3, 3),
    "b0": random(8),
    "w1": random(8, 8, 3, 3) * 6,
    "b1": random(8),
    "w2": random(8, 1, 3, 3),
    "w3": random(8, 8, 1, 1),
    "w4": random(5, 8),
    "b4": random(5),
    "zero": np.float32(0),
    "six": np.float32(6),
}


def residual() -> ir.Model:
    return parse_graph(RESIDUAL, **RESIDUAL_WEIGHTS)


def exact_values(model: ir.Model, inputs: dict[str, Array]) -> dict[str, Array]:
    """Every float value, none of them fused away."""
    return run_model(model, inputs, optimized=False, every_value=True)


def feeds(model: ir.Model) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    shapes = {
        str(value.name): [dim if isinstance(dim, int) else 4 for dim in value.shape or ()]
        for value in model.graph.inputs
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def ranges(model: ir.Model, **given: tuple[float, float]) -> Ranges:
    """Least and greatest numbers on random feeds."""
    inputs = feeds(model)
    found = {
        name: (float(array.min()), float(array.max()))
        for name, array in {**inputs, **exact_values(model, inputs)}.items()
    }
    tensors = {
        name: TensorRange(minimum=low, maximum=high, count=1, amax=dict.fromkeys(METHODS, max(-low, high)))
        for name, (low, high) in {**found, **given}.items()
    }
    return Ranges(model_sha256="", provenance=NOWHERE, tensors=tensors)


def done(make: Callable[[], ir.Model], settings: Settings) -> tuple[ir.Model, Quantised]:
    model = make()
    found = quantise(model, ranges(make()), settings)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model, found


def node(model: ir.Model, output: str) -> ir.Node:
    """The node that writes a value; behind the pair, if it is one that is an output of the graph."""
    return next(one for one in model.graph if any(value.name == output for value in one.outputs))


def reads(model: ir.Model, output: str, index: int = 0) -> str:
    """The operator in front of an input."""
    value = node(model, output).inputs[index]
    producer = value.producer()
    return "" if producer is None else producer.op_type


def grid(model: ir.Model, value: str) -> tuple[float, int, np.dtype[Any]]:
    """Scale, zero point and type that a value is rounded with."""
    (quantiser,) = [n for n in model.graph if n.op_type == "QuantizeLinear" and n.inputs[0].name == value]  # type: ignore[union-attr]
    scale, zero = (one.const_value.numpy() for one in quantiser.inputs[1:])  # type: ignore[union-attr]
    return float(scale), int(zero), zero.dtype


def test_tensorrt_gets_pairs_in_front_of_products_and_nowhere_else() -> None:
    model, found = done(residual, GPU)
    assert len(found.done) == 5
    for output in ("c0", "c1", "c2", "s", "y"):
        assert reads(model, output) == reads(model, output, 1) == "DequantizeLinear"
    assert [reads(model, output) for output in ("r0", "p0", "r1", "r2", "g", "f")] == [
        *("Conv", "Relu", "Conv", "Add", "Relu", "GlobalAveragePool")
    ]
    assert reads(model, "c0", 2) == "", "biases stay floats"
    kinds = {value.const_value.dtype for value in model.graph.initializers.values() if value.const_value}
    assert kinds == {ir.DataType.FLOAT, ir.DataType.INT8}
    assert all(grid(model, value)[1:] == (0, np.int8) for value in ("x", "p0", "r1", "f"))
    zeros = {n.inputs[2] for n in model.graph if n.op_type == "QuantizeLinear"}
    assert len(zeros) == 1, "what is the same is stored once"


def test_tensorrt_rounds_a_shortcut_without_a_convolution_once_for_all() -> None:
    def make() -> ir.Model:
        return parse_graph(
            "net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) { r = Relu(x) c = Conv(r, w) y = Add(r, c) }",
            w=random(4, 4, 1, 1),
        )

    model, found = done(make, GPU)
    assert found.pairs == 1
    assert node(model, "y").inputs[0] is node(model, "c").inputs[0]
    assert reads(model, "y", 1) == "Conv"


def test_onnx_runtime_computes_everything_in_integers(tmp_path: Path) -> None:
    model, found = done(residual, CPU)
    assert not found.left
    kinds = count_kernels(model, feeds(model), tmp_path)
    assert [kinds[f"Q{end}"] for end in ("LinearConv", "LinearAdd", "Gemm", "LinearGlobalAveragePool")] == [4, 1, 1, 1]
    assert not {"Conv", "Add", "Relu", "Clip", "MaxPool", "Gemm"} & set(kinds)
    assert kinds["QuantizeLinear"] == 1


def test_onnx_runtime_rounds_positive_values_with_all_their_bits() -> None:
    model, _ = done(residual, CPU)
    known = ranges(residual()).tensors
    for value in ("r0", "r1", "r2"):
        scale, zero, dtype = grid(model, value)
        assert (zero, dtype) == (0, np.uint8)
        np.testing.assert_allclose(scale, known[value].maximum / 255, rtol=1e-6)
    scale, zero, _ = grid(model, "x")
    np.testing.assert_allclose(
        (-zero * scale, (255 - zero) * scale), (known["x"].minimum, known["x"].maximum), atol=scale
    )


def test_signed_grids_are_around_zero_where_both_signs_occur() -> None:
    """Other values keep all their bits."""
    model, _ = done(residual, replace(CPU, signed=True))
    found = {str(each.inputs[0].name): grid(model, str(each.inputs[0].name)) for each in model.graph
             if each.op_type == "QuantizeLinear"}  # fmt: skip
    limits = ranges(residual()).tensors
    assert {int(known.minimum < 0) for known in limits.values()} == {0, 1}
    for name, (scale, zero, dtype) in found.items():
        known = limits[name]
        if known.minimum < 0:
            assert (zero, dtype) == (0, np.int8)
            assert scale == pytest.approx(max(-known.minimum, known.maximum) / 127)
        else:
            assert (zero, dtype) == (0, np.uint8)


def test_what_hands_numbers_on_has_one_grid() -> None:
    model = residual()
    quantise(model, ranges(residual(), p0=(0.0, 0.1), f=(0.0, 0.1)), CPU)
    assert grid(model, "r0") == grid(model, "p0")
    assert grid(model, "g") == grid(model, "f")
    assert grid(model, "r2") != grid(model, "g")


@pytest.mark.parametrize("settings", [CPU, GPU], ids=["onnxruntime", "tensorrt"])
def test_the_result_is_close_to_the_float_graph_fused_or_not(settings: Settings) -> None:
    exact = exact_values(residual(), feeds(residual()))["y"]
    model, _ = done(residual, settings)
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
    model, found = done(lambda: parse_graph(text, **weights), RUNNABLE)
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

    model, found = done(make, CPU)
    (why,) = found.left.values()
    assert "no int8 kernel for ConvTranspose" in why
    kinds = count_kernels(model, feeds(model), tmp_path)
    assert (kinds["QLinearConv"], kinds["QLinearConcat"], kinds["ConvTranspose"]) == (3, 1, 1)
    assert grid(model, "u") == grid(model, "m"), "what is rounded for the Concat alone has its grid"
    assert grid(model, "r") != grid(model, "m"), "what others read too keeps its own"
    assert not done(make, GPU)[1].left


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

    model, found = done(make, CPU)
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
    model, _ = done(lambda: parse_graph(text, **weights), replace(RUNNABLE, keep=keep))
    simulated = exact_values(model, feeds(model))["y"]
    assert keep_clamps_apart(model) == written_out
    assert behind in {n.op_type for n in model.graph}
    assert count_kernels(model, feeds(model), tmp_path)["QGemm"] == 2 - len(keep)
    assert sqnr_db(exact_values(parse_graph(text, **weights), feeds(model))["y"], simulated) > 25
    assert sqnr_db(simulated, run_model(model, feeds(model))["y"]) > 30


BETWEEN = """net (float[n, 8, 8, 8] x) => (float[n, 8, 8, 8] y) {
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
    """ONNX Runtime rounds it to int8 with one scale, if its product reads what one scale dequantises."""
    last = random(8, 8, 1, 1) / _FACTORS.reshape(1, -1, 1, 1)
    weights = {"w0": random(8, 8, 1, 1), "b0": random(8), "w1": weight, "w2": last}
    weights |= {"b1": random(8) * _FACTORS} if "b1" in kept else {}
    text = BETWEEN.replace("KEPT", kept)
    model, _ = done(lambda: parse_graph(text, named=True, **weights), replace(RUNNABLE, keep=frozenset(["c"])))
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
    model, _ = done(lambda: parse_graph(text, named=True, **weights), replace(RUNNABLE, keep=frozenset(["c"])))
    simulated = exact_values(model, feeds(model))["y"]
    assert keep_weights_floating(model) == 1
    assert sqnr_db(simulated, exact_values(model, feeds(model))["y"]) > 100
    assert count_kernels(model, feeds(model), tmp_path)["QGemm"] == 1


def test_products_in_int8_read_one_scale() -> None:
    model, _ = done(residual, RUNNABLE)
    assert keep_weights_floating(model) == 0


def test_outputs_of_the_graph_keep_name_and_type(tmp_path: Path) -> None:
    def make() -> ir.Model:
        return parse_graph(
            "net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y, float[1, 4, 8, 8] z) { y = Conv(x, w) z = Relu(y) }",
            w=random(4, 4, 1, 1),
        )

    model, _ = done(make, CPU)
    assert [(value.name, value.dtype) for value in model.graph.outputs] == [
        ("y", ir.DataType.FLOAT),
        ("z", ir.DataType.FLOAT),
    ]
    assert reads(model, "z") == "DequantizeLinear"
    assert count_kernels(model, feeds(model), tmp_path)["QLinearConv"] == 1


def test_pairs_are_in_the_order_of_the_graph() -> None:
    names = [f"y{index}" for index in range(32)]  # written by convolutions, and read by no other product
    text = f"net (float[1, 4, 8, 8] x) => ({', '.join(f'float[1, 4, 8, 8] {name}' for name in names)})"
    text += f" {{ {' '.join(f'{name} = Conv(x, w)' for name in names)} }}"
    model, _ = done(lambda: parse_graph(text, w=np.ones((4, 4, 1, 1), np.float32)), CPU)
    assert [name for name in model.graph.initializers if name[:1] == "y"] == [f"{name}_scale" for name in names]


def test_weights_have_a_scale_for_each_output_channel() -> None:
    def make() -> ir.Model:
        return parse_graph(
            """net (float[2, 4, 5, 5] x) => (float[2, 3] y) {
                c = Conv(x, w)
                t = ConvTranspose <group = 2> (c, u)
                d = ConvTranspose <group = 6> (t, e)
                p = GlobalAveragePool(d)
                f = Flatten(p)
                m = MatMul(f, v)
                g = Gemm <transB = 1> (m, a)
                y = Gemm (g, b)
            }""",
            w=random(6, 4, 1, 1),
            u=random(6, 3, 2, 2),
            e=random(6, 1, 2, 2),
            v=random(6, 7),
            a=random(9, 7),
            b=random(9, 3),
        )

    def shapes(settings: Settings) -> dict[str, tuple[tuple[int, ...], int | None]]:
        model, _ = done(make, settings)
        read = {output: node(model, output).inputs[1] for output in ("c", "t", "d", "m", "g", "y")}
        nodes = {output: value.producer() for output, value in read.items()}  # type: ignore[union-attr]
        return {
            output: (tuple(n.inputs[1].shape), n.attributes.get_int("axis", 99))  # type: ignore[union-attr, arg-type, misc]
            for output, n in nodes.items()
        }

    expected = {"c": ((6,), 0), "t": ((3,), 1), "d": ((), 99), "m": ((7,), 1), "g": ((9,), 0), "y": ((3,), 1)}
    assert shapes(GPU) == expected


def test_a_bias_beside_a_dead_channel_survives_integers() -> None:
    weight = random(4, 4, 1, 1)
    weight[1] *= 1e-9
    bias = np.array([0, 2, 0, 0], np.float32)

    def make() -> ir.Model:
        return parse_graph("net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) { y = Conv(x, w, b) }", w=weight, b=bias)

    model, _ = done(make, CPU)
    np.testing.assert_allclose(run_model(model, feeds(model))["y"][:, 1], 2, atol=0.05)


@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        (replace(GPU, keep=frozenset(["Conv_0"])), {}, "the assignment keeps it"),
        (GPU, {"tensors": {"x": None}}, "'x' has no range"),
        (GPU, {"tensors": {"x": {"amax": None}}}, "'x' has no range"),
        (GPU, {"tensors": {"x": {"minimum": 0.0, "maximum": 0.0}}}, "its input 'x' never varies"),
        (GPU, {"tensors": {"x": {"finite": False}}}, "'x' is not finite"),
        (CPU, {"tensors": {"r0": None}}, "its output 'r0' has no range"),
        (GPU, {"weight": np.zeros((8, 3, 3, 3), np.float32)}, "all zero"),
        (GPU, {"weight": np.full((8, 3, 3, 3), np.inf, np.float32)}, "not finite"),
    ],
)
def test_groups_are_left_with_the_reason(settings: Settings, change: dict[str, Any], reason: str) -> None:
    tensors = dict(ranges(residual()).tensors)
    for name, update in change.get("tensors", {}).items():
        if update is None:
            del tensors[name]
        else:
            tensors[name] = tensors[name].model_copy(update=update)
    model = parse_graph(RESIDUAL, **{**RESIDUAL_WEIGHTS, "w0": change.get("weight", RESIDUAL_WEIGHTS["w0"])})
    found = quantise(model, ranges(residual()).model_copy(update={"tensors": tensors}), settings)
    assert reason in found.left["Conv_0"]
    assert "Conv_0" not in {group.name for group in found.done}
    assert node(model, "c0").inputs[1].name == "w0"  # type: ignore[union-attr]
    assert len(found.done) == 4
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_reshaped_value_has_the_range_of_what_it_was() -> None:
    known = ranges(residual())
    tensors = {name: found for name, found in known.tensors.items() if name != "f"}
    found = quantise(residual(), known.model_copy(update={"tensors": tensors}), GPU)
    assert not found.left


def test_refusals() -> None:
    model, _ = done(residual, GPU)
    with pytest.raises(InvalidGraph, match="quantized already"):
        quantise(model, ranges(residual()), GPU)
    half = {name: array.astype(np.float16) for name, array in RESIDUAL_WEIGHTS.items()}
    with pytest.raises(InvalidGraph, match="float16, and int8 is made of a float32 graph"):
        quantise(parse_graph(RESIDUAL.replace("float[", "float16["), **half), ranges(residual()), GPU)
    with pytest.raises(InvalidGraph, match="no product that can be in int8"):
        quantise(parse_graph("net (float[4] x) => (float[4] y) { y = Relu(x) }"), ranges(residual()), GPU)
    with pytest.raises(InvalidGraph, match="two activations"):
        quantise(parse_graph("net (float[4, 4] x) => (float[4, 4] y) { y = MatMul(x, x) }"), ranges(residual()), GPU)
    other = ranges(parse_graph("net (float[4] q) => (float[4] o) { o = Relu(q) }"))
    with pytest.raises(UsageError, match="of another model"):
        quantise(residual(), other, GPU)
    with pytest.raises(UsageError, match=r"'c0'.*no such products"):
        quantise(residual(), ranges(residual()), replace(GPU, keep=frozenset(["c0"])))


@pytest.mark.parametrize("placement", ["inputs+outputs", "inputs"])
def test_fp8_has_its_own_grid_and_needs_a_newer_opset(placement: Any) -> None:
    model = parse_graph(RESIDUAL, opset=17, **RESIDUAL_WEIGHTS)
    known = ranges(residual())
    quantise(model, known, replace(GPU, number="fp8", placement=placement, method="mse"))
    assert model.graph.opset_imports[""] >= 19
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    scale, zero, dtype = grid(model, "p0")
    assert (zero, dtype) == (0, ml_dtypes.float8_e4m3fn)
    np.testing.assert_allclose(scale, known.tensors["p0"].maximum / 448, rtol=1e-6)
    assert reads(model, "r0") == "Conv", "outputs are not rounded, whatever the engine"


def test_scales_fit_what_the_rest_becomes() -> None:
    tiny = ranges(residual(), p0=(0.0, 1e-4), x=(-1.0, 1 / 3))
    model = residual()
    quantise(model, tiny, replace(GPU, rest="fp16"))
    assert (grid(model, "p0")[0], grid(model, "x")[0]) == (np.finfo(np.float16).tiny, float(np.float16(1 / 127)))
    assert model.graph.opset_imports[""] >= 19


def test_corrections_are_added_to_biases() -> None:
    seen: dict[str, tuple[tuple[int, ...], float]] = {}

    def correct(node: ir.Node, given: Array, narrow: Array) -> None:
        seen[str(node.outputs[0].name)] = given.shape, float(np.abs(given - narrow).max())
        if given.shape[0] == 8:
            add_to_bias(node, np.full(8, 0.5, np.float32))

    model = residual()
    quantise(model, ranges(residual()), GPU, correct)
    assert {output: shape for output, (shape, _) in seen.items()}["c2"] == (8, 1, 3, 3)
    assert all(0 < error < 0.02 for _, error in seen.values())
    biases = {output: node(model, output).inputs[2].const_value.numpy() for output in ("c0", "c1", "c2", "s", "y")}  # type: ignore[union-attr]
    for output, before in (("c0", "b0"), ("c1", "b1"), ("s", "b1")):
        np.testing.assert_allclose(biases[output], RESIDUAL_WEIGHTS[before] + 0.5)
    np.testing.assert_allclose(biases["c2"], 0.5)
    np.testing.assert_allclose(biases["y"], RESIDUAL_WEIGHTS["b4"])


def test_graphs_as_exporters_leave_them() -> None:
    """Constants in nodes, weights listed as inputs, and layers as functions."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "layers" : 1]>
        net (float[1, 2] x, float[2, 2] w) => (float[1, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
            v = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            a = MatMul(x, w)
            b = MatMul(a, v)
            y = layers.dense(b, w)
        }
        <domain: "layers", opset_import: ["" : 17]> dense (p, q) => (r) { r = MatMul(p, q) }"""
    )
    known = ranges(parse_graph("net (float[1, 2] x) => (float[1, 2] a, float[1, 2] b) { a = Relu(x) b = Relu(x) }"))
    model = ir.from_proto(proto)
    found = quantise(model, known, GPU)
    assert [group.weight for group in found.done] == ["w", "v", "w"]
    assert [value.name for value in model.graph.inputs] == ["x"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_tensorrt_takes_the_sum_into_the_convolution_that_is_farther_from_the_fork() -> None:
    model, _ = done(residual, GPU)
    assert reads(model, "a", 0) == "Conv"
    assert reads(model, "a", 1) == "DequantizeLinear"


def test_methods_give_their_own_ranges() -> None:
    known = ranges(residual())
    amax = {"minmax": 4.0, "percentile": 3.0, "entropy": 2.0, "mse": 1.0}
    tensors = {**known.tensors, "x": known.tensors["x"].model_copy(update={"amax": amax})}
    model = residual()
    quantise(model, known.model_copy(update={"tensors": tensors}), replace(GPU, method="entropy"))
    np.testing.assert_allclose(grid(model, "x")[0], 2 / 127, rtol=1e-6)


def test_a_shared_weight_is_stored_once() -> None:
    def make() -> ir.Model:
        return parse_graph(
            "net (float[1, 4] x) => (float[1, 4] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, w) }", w=random(4, 4)
        )

    model, _ = done(make, GPU)
    assert sum(v.dtype == ir.DataType.INT8 and len(v.shape or ()) == 2 for v in model.graph.initializers.values()) == 1
    assert "w" not in model.graph.initializers


def test_seven_bits() -> None:
    model, _ = done(residual, replace(CPU, weight_bits=7))
    levels = [v.const_value.numpy() for v in model.graph.initializers.values() if str(v.name).startswith("w")]  # type: ignore[union-attr]
    assert max(np.abs(one.astype(int)).max() for one in levels if one.dtype == np.int8) == 63


def test_inputs_only() -> None:
    model, found = done(residual, replace(CPU, inputs_only=True))
    assert found.pairs == 4
    assert reads(model, "r0") == "Conv"
    assert reads(model, "a", 1) == "Conv"
    assert reads(model, "y", 2) == "", "the bias stays a float"
