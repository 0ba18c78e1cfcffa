"""Q/DQ pairs: where they are, on which grids, and why some products are left without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.calibration.ranges import METHODS
from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.quantize.qdq import Settings, quantize
from enginesmith.pipeline.passes.quantize.quantizers import add_to_bias
from enginesmith.pipeline.tensors import Array
from graphs import count_kernels, parse_graph
from qdq_graphs import (
    CPU,
    GPU,
    RESIDUAL,
    RESIDUAL_WEIGHTS,
    feeds,
    find_node,
    grid,
    make_quantized,
    make_random,
    operator_before,
    ranges,
    residual,
)

random = make_random()


def test_tensorrt_gets_pairs_in_front_of_products_and_nowhere_else() -> None:
    model, found = make_quantized(residual, GPU)
    assert len(found.done) == 5
    for output in ("c0", "c1", "c2", "s", "y"):
        assert operator_before(model, output) == operator_before(model, output, 1) == "DequantizeLinear"
    assert [operator_before(model, output) for output in ("r0", "p0", "r1", "r2", "g", "f")] == [
        *("Conv", "Relu", "Conv", "Add", "Relu", "GlobalAveragePool")
    ]
    assert operator_before(model, "c0", 2) == "", "biases stay floats"
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

    model, found = make_quantized(make, GPU)
    assert found.pairs == 1
    assert find_node(model, "y").inputs[0] is find_node(model, "c").inputs[0]
    assert operator_before(model, "y", 1) == "Conv"


def test_onnx_runtime_rounds_positive_values_with_all_their_bits() -> None:
    model, _ = make_quantized(residual, CPU)
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
    model, _ = make_quantized(residual, replace(CPU, signed=True))
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
    quantize(model, ranges(residual(), p0=(0.0, 0.1), f=(0.0, 0.1)), CPU)
    assert grid(model, "r0") == grid(model, "p0")
    assert grid(model, "g") == grid(model, "f")
    assert grid(model, "r2") != grid(model, "g")


def test_outputs_of_the_graph_keep_name_and_type(tmp_path: Path) -> None:
    def make() -> ir.Model:
        return parse_graph(
            "net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y, float[1, 4, 8, 8] z) { y = Conv(x, w) z = Relu(y) }",
            w=random(4, 4, 1, 1),
        )

    model, _ = make_quantized(make, CPU)
    assert [(value.name, value.dtype) for value in model.graph.outputs] == [
        ("y", ir.DataType.FLOAT),
        ("z", ir.DataType.FLOAT),
    ]
    assert operator_before(model, "z") == "DequantizeLinear"
    assert count_kernels(model, feeds(model), tmp_path)["QLinearConv"] == 1


def test_pairs_are_in_the_order_of_the_graph() -> None:
    names = [f"y{index}" for index in range(32)]  # written by convolutions, and read by no other product
    text = f"net (float[1, 4, 8, 8] x) => ({', '.join(f'float[1, 4, 8, 8] {name}' for name in names)})"
    text += f" {{ {' '.join(f'{name} = Conv(x, w)' for name in names)} }}"
    model, _ = make_quantized(lambda: parse_graph(text, w=np.ones((4, 4, 1, 1), np.float32)), CPU)
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
        model, _ = make_quantized(make, settings)
        read = {output: find_node(model, output).inputs[1] for output in ("c", "t", "d", "m", "g", "y")}
        nodes = {output: value.producer() for output, value in read.items()}  # type: ignore[union-attr]
        return {
            output: (tuple(n.inputs[1].shape), n.attributes.get_int("axis", 99))  # type: ignore[union-attr, arg-type, misc]
            for output, n in nodes.items()
        }

    expected = {"c": ((6,), 0), "t": ((3,), 1), "d": ((), 99), "m": ((7,), 1), "g": ((9,), 0), "y": ((3,), 1)}
    assert shapes(GPU) == expected


@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        (replace(GPU, keep=frozenset(["Conv_0"])), {}, "the assignment keeps it"),
        (GPU, {"tensors": {"x": None}}, "'x' has no range"),
        (GPU, {"tensors": {"x": {"amax": None}}}, "'x' has no range"),
        (GPU, {"tensors": {"x": {"minimum": 0.0, "maximum": 0.0}}}, "its input 'x' never varies"),
        (GPU, {"tensors": {"x": {"finite": False}}}, "'x' is not finite"),
        (CPU, {"tensors": {"r0": None}}, "its output 'r0' has no range"),
        (
            replace(GPU, rest="fp16"),
            {"tensors": {"x": {"amax": dict.fromkeys(METHODS, 8.4e6)}}},
            "too large for a scale",
        ),
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
    found = quantize(model, ranges(residual()).model_copy(update={"tensors": tensors}), settings)
    assert reason in found.left["Conv_0"]
    assert "Conv_0" not in {group.name for group in found.done}
    assert find_node(model, "c0").inputs[1].name == "w0"  # type: ignore[union-attr]
    assert len(found.done) == 4
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_a_reshaped_value_has_the_range_of_what_it_was() -> None:
    known = ranges(residual())
    tensors = {name: found for name, found in known.tensors.items() if name != "f"}
    found = quantize(residual(), known.model_copy(update={"tensors": tensors}), GPU)
    assert not found.left


UNPACKED = """net (float[4, 4] x) => (float[4, 4] y) {
    d = DequantizeLinear(w, s)
    t = Transpose<perm = [1, 0]>(d)
    y = MatMul(x, t)
}"""
UNPACKED_TABLE = """net (int64[4] x) => (float[4, 4] y) {
    d = DequantizeLinear(q, s)
    g = Gather(d, x)
    y = MatMul(g, w)
}"""


def test_a_table_that_is_stored_in_few_bits_leaves_products_to_quantize() -> None:
    table = {"q": np.ones((4, 4), np.int8), "s": np.float32(1), "w": np.eye(4, dtype=np.float32)}
    model = parse_graph(UNPACKED_TABLE, **table)
    layers.prepare(model, "int8")
    assert [group.reason for group in layers.find_groups(model)] == [""]


DOUBLE = """net (double[4, 4] x) => (double[4, 4] y) { y = MatMul(x, w) }"""
IN_BODY = """net (float[4, 4] x, bool c) => (float[4, 4] y) {
    y = If(c) <
        then_branch = a () => (float[4, 4] t) { t = MatMul(x, w) },
        else_branch = b () => (float[4, 4] e) { e = Neg(x) }
    >
}"""
FOREIGN = "net (float[4, 4] x) => (float[4, 4] y) { y = com.microsoft.FusedMatMul(x, w) }"


@pytest.mark.parametrize(
    ("text", "dtype", "reason", "remedy"),
    [
        (DOUBLE, np.float64, "MatMul: its weight is double", "export the model in float32"),
        (IN_BODY, np.float32, "MatMul: bodies of branches and loops are left as they are", "use fp32"),
        (FOREIGN, np.float32, "FusedMatMul: it is of the domain 'com.microsoft'", "as it was before FusedMatMul"),
        ("net (float[4, 4] x) => (float[4, 4] y) { y = MatMul(x, x) }", None, "two activations", "use fp16 or fp32"),
        ("net (float[4, 4] x) => (float[4, 4] y) { y = Relu(x) }", None, "no product", "use fp32"),
    ],
)
def test_what_has_nothing_to_quantize_is_told_what_can_work(text: str, dtype: Any, reason: str, remedy: str) -> None:
    weights = {} if dtype is None else {"w": np.ones((4, 4), dtype)}
    model = parse_graph(text, **weights)
    model.opset_imports.setdefault("com.microsoft", 1)
    with pytest.raises(layers.NothingToQuantize) as error:
        quantize(model, ranges(residual()), GPU)
    assert reason in error.value.message
    assert remedy in error.value.remedy
    assert "fp16" not in error.value.remedy or remedy == "use fp16 or fp32"


def test_refusals() -> None:
    model, _ = make_quantized(residual, GPU)
    with pytest.raises(InvalidGraph, match="quantized already"):
        quantize(model, ranges(residual()), GPU)
    half = {name: array.astype(np.float16) for name, array in RESIDUAL_WEIGHTS.items()}
    with pytest.raises(InvalidGraph, match="float16, and int8 is made of a float32 graph"):
        quantize(parse_graph(RESIDUAL.replace("float[", "float16["), **half), ranges(residual()), GPU)
    with pytest.raises(InvalidGraph, match="no product that can be in int8"):
        quantize(parse_graph("net (float[4] x) => (float[4] y) { y = Relu(x) }"), ranges(residual()), GPU)
    with pytest.raises(InvalidGraph, match="two activations"):
        quantize(parse_graph("net (float[4, 4] x) => (float[4, 4] y) { y = MatMul(x, x) }"), ranges(residual()), GPU)
    with pytest.raises(InvalidGraph, match="quantized already: it has a DequantizeLinear"):
        quantize(parse_graph(UNPACKED, w=np.ones((4, 4), np.int8), s=np.float32(1)), ranges(residual()), GPU)
    other = ranges(parse_graph("net (float[4] q) => (float[4] o) { o = Relu(q) }"))
    with pytest.raises(UsageError, match="of another model"):
        quantize(residual(), other, GPU)
    with pytest.raises(UsageError, match=r"'c0'.*no such products"):
        quantize(residual(), ranges(residual()), replace(GPU, keep=frozenset(["c0"])))


@pytest.mark.parametrize("placement", ["inputs+outputs", "inputs"])
def test_fp8_has_its_own_grid(placement: Any) -> None:
    model = parse_graph(RESIDUAL, opset=19, **RESIDUAL_WEIGHTS)
    known = ranges(residual())
    quantize(model, known, replace(GPU, number="fp8", placement=placement, method="mse"))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    scale, zero, dtype = grid(model, "p0")
    assert (zero, dtype) == (0, ml_dtypes.float8_e4m3fn)
    np.testing.assert_allclose(scale, known.tensors["p0"].maximum / 448, rtol=1e-6)
    assert operator_before(model, "r0") == "Conv", "outputs are not rounded, whatever the engine"


def test_scales_fit_what_the_rest_becomes() -> None:
    tiny = ranges(residual(), p0=(0.0, 1e-4), x=(-1.0, 1 / 3))
    model = residual()
    quantize(model, tiny, replace(GPU, rest="fp16"))
    assert (grid(model, "p0")[0], grid(model, "x")[0]) == (np.finfo(np.float16).tiny, float(np.float16(1 / 127)))
    assert model.graph.opset_imports[""] >= 19


def test_corrections_are_added_to_biases() -> None:
    seen: dict[str, tuple[tuple[int, ...], float]] = {}

    def correct(node: ir.Node, given: Array, narrow: Array) -> None:
        seen[str(node.outputs[0].name)] = given.shape, float(np.abs(given - narrow).max())
        if given.shape[0] == 8:
            add_to_bias(node, np.full(8, 0.5, np.float32))

    model = residual()
    quantize(model, ranges(residual()), GPU, correct)
    assert {output: shape for output, (shape, _) in seen.items()}["c2"] == (8, 1, 3, 3)
    assert all(0 < error < 0.02 for _, error in seen.values())
    biases = {output: find_node(model, output).inputs[2].const_value.numpy() for output in ("c0", "c1", "c2", "s", "y")}  # type: ignore[union-attr]
    for output, before in (("c0", "b0"), ("c1", "b1"), ("s", "b1")):
        np.testing.assert_allclose(biases[output], RESIDUAL_WEIGHTS[before] + 0.5)
    np.testing.assert_allclose(biases["c2"], 0.5)
    np.testing.assert_allclose(biases["y"], RESIDUAL_WEIGHTS["b4"])


def test_graphs_as_exporters_leave_them() -> None:
    """Constants in nodes, and weights listed as inputs."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        net (float[1, 2] x, float[2, 2] w) => (float[1, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
            v = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            a = MatMul(x, w)
            b = MatMul(a, v)
            y = MatMul(b, w)
        }"""
    )
    known = ranges(parse_graph("net (float[1, 2] x) => (float[1, 2] a, float[1, 2] b) { a = Relu(x) b = Relu(x) }"))
    model = ir.from_proto(proto)
    found = quantize(model, known, GPU)
    assert [group.activations for group in found.done] == [("x",), ("a",), ("b",)]
    assert [value.name for value in model.graph.inputs] == ["x"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_tensorrt_takes_the_sum_into_the_convolution_that_is_farther_from_the_fork() -> None:
    model, _ = make_quantized(residual, GPU)
    assert operator_before(model, "a", 0) == "Conv"
    assert operator_before(model, "a", 1) == "DequantizeLinear"


def test_methods_give_their_own_ranges() -> None:
    known = ranges(residual())
    amax = {"minmax": 4.0, "percentile": 3.0, "entropy": 2.0, "mse": 1.0}
    tensors = {**known.tensors, "x": known.tensors["x"].model_copy(update={"amax": amax})}
    model = residual()
    quantize(model, known.model_copy(update={"tensors": tensors}), replace(GPU, method="entropy"))
    np.testing.assert_allclose(grid(model, "x")[0], 2 / 127, rtol=1e-6)


def test_a_shared_weight_is_stored_once() -> None:
    def make() -> ir.Model:
        return parse_graph(
            "net (float[1, 4] x) => (float[1, 4] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, w) }", w=random(4, 4)
        )

    model, _ = make_quantized(make, GPU)
    assert sum(v.dtype == ir.DataType.INT8 and len(v.shape or ()) == 2 for v in model.graph.initializers.values()) == 1
    assert "w" not in model.graph.initializers


def test_seven_bits() -> None:
    model, _ = make_quantized(residual, replace(CPU, weight_bits=7))
    levels = [v.const_value.numpy() for v in model.graph.initializers.values() if str(v.name).startswith("w")]  # type: ignore[union-attr]
    assert max(np.abs(one.astype(int)).max() for one in levels if one.dtype == np.int8) == 63


def test_inputs_only() -> None:
    model, found = make_quantized(residual, replace(CPU, inputs_only=True))
    assert found.pairs == 4
    assert operator_before(model, "r0") == "Conv"
    assert operator_before(model, "a", 1) == "Conv"
    assert operator_before(model, "y", 2) == "", "the bias stays a float"
