"""Mixed precision on graphs small enough to count their casts by hand."""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.frameworks.fidelity import THRESHOLDS, compare
from enginesmith.pipeline.frameworks.onnx import edit, model_file, validation
from enginesmith.pipeline.passes.float16.convert import Lowered, lower
from enginesmith.pipeline.passes.float16.rules import SINK, SOURCE, CastNetwork
from enginesmith.pipeline.system.device import Device
from graphs import operators, parse_graph, run_model

RNG = np.random.default_rng(0)
FLOAT, FLOAT16, BFLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16


def weights(*shape: int, scale: float = 0.3) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def parsed(text: str, opset: int = 23, **constants: Any) -> ir.Model:
    return parse_graph(text, opset, named=True, **constants)


def run(path: Path, **feeds: Any) -> dict[str, Any]:
    return run_model(ir.load(path), feeds, optimized=False)


def saved(model: ir.Model, folder: Path) -> Path:
    """Write a valid file and return its path."""
    folder.mkdir(exist_ok=True)
    edit.save(model, folder)
    validation.check(folder / edit.FILE)
    return folder / edit.FILE


def types(path: Path) -> dict[str, int]:
    """Element type of every value that has one."""
    proto = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True)
    values = (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)
    found = {value.name: value.type.tensor_type.elem_type for value in values}
    return found | {tensor.name: tensor.data_type for tensor in proto.graph.initializer}


def hold(folder: Path, model: ir.Model, feeds: dict[str, Any], **options: Any) -> tuple[Lowered, Path]:
    """Lower to float16, and hold the result against the float graph on the CPU."""
    before = saved(model, folder / "before")
    low = lower(model, "fp16", **options)
    after = saved(model, folder / "after")
    assert model_file.signature(after) == model_file.signature(before)
    assert compare(run(before, **feeds), run(after, **feeds), THRESHOLDS["fp16"]).passed
    return low, after


NET = """(float[N,3,8,8] x) => (float[N,5] y) {
    a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w1, b1)
    b = Relu(a)
    c = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(b, w2)
    d = Add(c, b)
    e = GlobalAveragePool(d)
    f = Flatten(e)
    y = Gemm(f, w3, b3)
}"""
NET_WEIGHTS = {
    "w1": weights(4, 3, 3, 3),
    "b1": weights(4, scale=1e-6),
    "w2": weights(4, 4, 3, 3),
    "w3": weights(4, 5),
    "b3": weights(5),
}


@pytest.mark.parametrize(("dtype", "kind"), [("fp16", FLOAT16), ("bf16", BFLOAT16)])
def test_a_net_is_cast_four_times(tmp_path: Path, dtype: Any, kind: int) -> None:
    """In, up for the pooling, down again, out: with inputs, outputs and the sum in float32 there can be no fewer."""
    model = parsed(NET, **NET_WEIGHTS)
    low = lower(model, dtype)
    path = saved(model, tmp_path)
    assert low.casts == (f"x_{dtype}", "d_fp32", f"e_{dtype}", "y_fp32")
    assert (low.nodes, low.kept) == (("a", "b", "c", "d", "f", "y"), {"e": "adds up many numbers"})
    found = types(path)
    assert {found[name] for name in (*NET_WEIGHTS, "a", "b", "c", "d", "f")} == {kind}
    assert (found["x"], found["y"], found["e"]) == (FLOAT, FLOAT, FLOAT)


def test_bfloat16_weights_are_rounded_to_nearest(tmp_path: Path) -> None:
    model = parsed(NET, **NET_WEIGHTS)
    lower(model, "bf16")
    found = ir.load(saved(model, tmp_path)).graph.initializers["w2"].const_value
    np.testing.assert_array_equal(found.numpy(), NET_WEIGHTS["w2"].astype(ml_dtypes.bfloat16))


def test_a_graph_that_the_cpu_has_no_kernels_for_is_named_with_its_type(tmp_path: Path) -> None:
    model = parsed(NET, **NET_WEIGHTS)
    lower(model, "bf16")
    for node in model.graph:
        node.metadata_props[model_file.MODULE_KEY] = "encoder.alibi"
    artifact = Artifact(kind="onnx", path=saved(model, tmp_path), sha256="", bytes=0)
    words = r"no kernels on the CPU for bfloat16, .*model\.onnx computes \(\w+ in the module 'encoder\.alibi'\)"
    with pytest.raises(InvalidGraph, match=words) as caught:
        OnnxRuntime.as_given().load(artifact, Device())
    assert "take fp32 or int8 here, if the model itself is in float32; if not, export it" in caught.value.remedy
    assert "module.float()" in caught.value.remedy


def test_an_operator_without_a_kernel_in_float64_is_told_with_a_remedy(tmp_path: Path) -> None:
    model = parsed("(double[N,1,4,4] x) => (double[N,1,2,2] y) { y = Conv(x, w) }", w=np.ones((1, 1, 3, 3)))
    artifact = Artifact(kind="onnx", path=saved(model, tmp_path), sha256="", bytes=0)
    with pytest.raises(InvalidGraph, match="no kernels on the CPU for all of the float64") as caught:
        OnnxRuntime.as_given().load(artifact, Device())
    assert "module.float()" in caught.value.remedy


def test_one_cast_serves_all_readers(tmp_path: Path) -> None:
    """A normalized value that three products read is cast once; their sum goes up once."""
    text = """(float[N,8] x) => (float[N,8] y) {
        n = LayerNormalization(x, one)
        q = MatMul(n, w) k = MatMul(n, w) v = MatMul(n, w)
        qk = Add(q, k) s = Add(qk, v)
        y = Softmax(s)
    }"""
    feeds = {"x": weights(3, 8, scale=1)}
    low, _ = hold(tmp_path, parsed(text, one=np.ones(8, np.float32), w=weights(8, 8)), feeds)
    assert low.casts == ("n_fp16", "s_fp32")


def test_cheap_nodes_among_float32_stay(tmp_path: Path) -> None:
    text = """(float[N,8] x) => (float[N,4] y) {
        n = Softmax(x)
        t = Add(n, one)
        u = Neg(t)
        z = Exp(u)
        m = MatMul(z, w)
        y = Relu(m)
    }"""
    constants = {"one": np.ones(8, np.float32), "w": weights(8, 4)}
    low, path = hold(tmp_path, parsed(text, **constants), {"x": weights(3, 8)})
    assert low.casts == ("z_fp16", "y_fp32")
    assert {low.kept[name] for name in "tu"} == {"its neighbors are in float32"}
    assert types(path)["one"] == FLOAT


def test_shape_arithmetic_stays_exact(tmp_path: Path) -> None:
    """Sizes above 2048 are no numbers of float16; and Resize's scales are float32 by its definition."""
    text = """(float[1,1,4,N] x) => (float[1,1,4,M] y) {
        a = Conv<kernel_shape=[1,1]>(x, w)
        s = Shape(a)
        f = Cast<to=1>(s)
        d = Mul(f, two)
        q = Div(d, f)
        y = Resize<mode="nearest">(a, , q)
    }"""
    constants = {"w": weights(1, 1, 1, 1), "two": np.array([1, 1, 1, 2], np.float32)}
    low, path = hold(tmp_path, parsed(text, **constants), {"x": weights(1, 1, 4, 2051)})
    found = types(path)
    assert {found[name] for name in ("f", "d", "q")} == {FLOAT}
    assert found["a"] == FLOAT16
    assert len(low.casts) == 2


def test_what_makes_float32_by_itself_goes_on_doing_so(tmp_path: Path) -> None:
    text = """(float[N,8] x, int64 n) => (float[N,8] y) {
        a = MatMul(x, w)
        h = HannWindow<output_datatype=1>(n)
        b = Mul(a, h)
        y = MatMul(b, w)
    }"""
    low, _ = hold(tmp_path, parsed(text, w=weights(8, 8)), {"x": weights(3, 8), "n": np.array(8)})
    assert low.casts == ("x_fp16", "h_fp16", "y_fp32")


def test_an_output_counts_as_a_reader_of_float32(tmp_path: Path) -> None:
    """Otherwise the sum would be as cheap in float16: one cast before it instead of one before and one after."""
    text = "(float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) s = Softmax(x) y = Add(a, s) }"
    low, _ = hold(tmp_path, parsed(text, w=weights(8, 8)), {"x": weights(3, 8)})
    assert low.casts == ("x_fp16", "a_fp32")


def test_nodes_that_were_asked_for_stay(tmp_path: Path) -> None:
    model = parsed(NET, **NET_WEIGHTS)
    low, path = hold(tmp_path, model, {"x": weights(2, 3, 8, 8)}, keep={"a"})
    assert low.kept["a"] == "was asked for"
    assert types(path)["w1"] == FLOAT
    assert low.casts == ("a_fp16", "d_fp32", "e_fp16", "y_fp32")


def test_a_node_that_is_not_there_cannot_be_kept() -> None:
    with pytest.raises(UsageError, match="no node 'conv9'"):
        lower(parsed(NET, **NET_WEIGHTS), "fp16", keep={"a", "conv9"})


@pytest.mark.parametrize(("reach", "stays"), [(16_000.0, False), (17_000.0, True), (float("inf"), True)])
def test_what_was_seen_to_be_too_large_stays(reach: float, stays: bool) -> None:
    """Whoever makes or reads a value beyond a quarter of float16's range; bfloat16 has no such bound."""
    low = lower(parsed(NET, **NET_WEIGHTS), "fp16", largest={"c": reach, "x": 1.0})
    assert {"c", "d"} <= set(low.kept) if stays else not {"c", "d"} & set(low.kept)
    assert "a" in low.nodes
    assert not stays or "and float16 ends at 65504" in low.kept["d"]
    assert "c" in lower(parsed(NET, **NET_WEIGHTS), "bf16", largest={"c": reach}).nodes


def test_constants_beyond_float16_stay(tmp_path: Path) -> None:
    text = """(float[N,8] x) => (float[N,8] y) {
        a = MatMul(x, w)
        b = Mul(a, huge)
        c = Div(b, huge)
        d = Max(c, tiny)
        e = Add(d, bias)
        y = MatMul(e, w)
    }"""
    constants = {
        "w": weights(8, 8),
        "huge": np.float32(1e6),
        "tiny": np.float32(1e-12),
        "bias": np.full(8, 1e-6, np.float32),
    }
    low, path = hold(tmp_path, parsed(text, **constants), {"x": weights(3, 8, scale=1)})
    assert set(low.kept) == {"b", "c", "d"}
    assert low.kept["b"] == "'huge' reaches 1e+06, and float16 ends at 65504"
    assert low.kept["d"] == "the constant 'tiny' is at most 1e-12, and all but vanishes in float16"
    assert (types(path)["tiny"], types(path)["bias"]) == (FLOAT, FLOAT16)


ATTENTION = """(float[1,2,4,8] x, bool[1,1,4,4] seen) => (float[1,2,4,8] y) {
    m = Where(seen, zero, lowest)
    q = MatMul(x, w) k = MatMul(x, v)
    y = Attention(q, k, q, m)
}"""
ATTENTION_WEIGHTS = {"zero": np.float32(0), "lowest": np.finfo(np.float32).min, "w": weights(8, 8), "v": weights(8, 8)}


def test_masks_do_not_become_infinite(tmp_path: Path) -> None:
    """A row that sees nothing would be NaN with infinite ones; what it is has no meaning otherwise."""
    seen = np.ones((1, 1, 4, 4), np.bool_)
    seen[..., 1, 2:] = False
    x = weights(1, 2, 4, 8)
    low, path = hold(tmp_path, parsed(ATTENTION, **ATTENTION_WEIGHTS), {"x": x, "seen": seen})
    assert np.isfinite(run(path, x=x, seen=np.zeros_like(seen))["y"]).all()
    assert "y" in low.nodes
    assert "m" in low.kept
    assert operators(path).count("Clip") == 1
    attributes = [
        one.name for node in onnx.load(path).graph.node if node.op_type == "Attention" for one in node.attribute
    ]
    assert "softmax_precision" not in attributes  # TensorRT-RTX 1.7 refuses it


def test_a_mask_among_the_weights_is_brought_into_the_range(tmp_path: Path) -> None:
    text = ATTENTION.replace(", bool[1,1,4,4] seen", "").replace("m = Where(seen, zero, lowest)", "")
    mask = np.triu(np.full((1, 1, 4, 4), -np.inf, np.float32), 1)
    model = parsed(text, m=mask, **{name: ATTENTION_WEIGHTS[name] for name in "wv"})
    _, path = hold(tmp_path, model, {"x": weights(1, 2, 4, 8)})
    assert "Clip" not in operators(path)
    content = ir.load(path).graph.initializers["m"].const_value
    assert content.numpy().min() == -65504 / 2


def test_bounds_of_clip_are_brought_into_the_range(tmp_path: Path) -> None:
    text = "(float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = Clip(a, low, high) y = MatMul(b, w) }"
    constants = {"w": weights(8, 8), "low": np.float32(0), "high": np.finfo(np.float32).max}
    low, _ = hold(tmp_path, parsed(text, **constants), {"x": weights(3, 8)})
    assert low.nodes == ("a", "b", "y")


def test_a_weight_of_both_precisions_is_there_twice(tmp_path: Path) -> None:
    text = "(float[8,8] x) => (float[8,8] y) { a = MatMul(x, w) b = Exp(w) c = Mul(a, b) y = Softmax(c) }"
    _, path = hold(tmp_path, parsed(text, w=weights(8, 8)), {"x": weights(8, 8)})
    found = types(path)
    assert (found["w"], found["w_fp16"]) == (FLOAT, FLOAT16)


def test_branches_stay_and_get_float32(tmp_path: Path) -> None:
    text = """(float[4,4] x, bool c) => (float[4,4] y) {
        a = MatMul(x, w)
        b = If(c) <
            then_branch = t () => (float[4,4] p) { p = Exp(a) },
            else_branch = e () => (float[4,4] q) { q = Mul(a, w) }
        >
        y = MatMul(b, w)
    }"""
    feeds = {"x": weights(4, 4), "c": np.array(True)}
    low, path = hold(tmp_path, parsed(text, w=weights(4, 4)), feeds)
    assert (low.kept, low.casts) == ({"b": "has a body of its own"}, ("x_fp16", "a_fp32", "b_fp16", "y_fp32"))
    assert (types(path)["w"], types(path)["w_fp16"]) == (FLOAT, FLOAT16)


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_a_graph_that_is_low_already_is_refused(dtype: str, numpy_dtype: Any) -> None:
    name = {"fp16": "float16", "bf16": "bfloat16"}[dtype]
    text = f"({name}[N,8] x) => ({name}[N,8] y) {{ y = MatMul(x, w) }}"
    with pytest.raises(InvalidGraph, match=f"in {name} already"):
        lower(parsed(text, w=weights(8, 8).astype(numpy_dtype)), "fp16")


def test_an_output_that_goes_on_inside_keeps_its_name(tmp_path: Path) -> None:
    text = "(float[N,8] x) => (float[N,8] a, float[N,8] s) { a = MatMul(x, w) b = MatMul(a, w) s = Softmax(b) }"
    low, path = hold(tmp_path, parsed(text, w=weights(8, 8)), {"x": weights(3, 8)})
    assert low.casts == ("x_fp16", "a_fp32", "b_fp32")
    products = [node for node in onnx.load(path).graph.node if node.op_type == "MatMul"]
    assert products[1].input[0] == "a_fp32"  # the float16 value, as the cast one is the graph's output `a`


def test_float64_is_left_alone(tmp_path: Path) -> None:
    text = """(float[N,8] x, double[N,8] z) => (float[N,8] y, double[N,8] d) {
        a = MatMul(x, w) y = Relu(a) d = MatMul(z, v)
    }"""
    feeds = {"x": weights(3, 8), "z": weights(3, 8).astype(np.float64)}
    model = parsed(text, w=weights(8, 8), v=weights(8, 8).astype(np.float64))
    low, _ = hold(tmp_path, model, feeds)
    assert low.nodes == ("a", "y")
    assert low.kept["d"] == "computes in float64, and only float32 is lowered"


def test_casts_and_constants_of_the_graph_change_with_it(tmp_path: Path) -> None:
    """A cast from integers goes to float16 at once; one from float16 to itself disappears."""
    text = """(int64[N,8] i) => (float[N,8] y) {
        x = Cast<to=1>(i)
        k = Constant<value_float=2.0>()
        s = Shape(i)
        z = ConstantOfShape<value = float[1] {0.5}>(s)
        a = Mul(x, k)
        b = Add(a, z)
        c = MatMul(b, w)
        h = Cast<to=10>(c)
        f = Cast<to=1>(h)
        y = Softmax(f)
    }"""
    low, path = hold(tmp_path, parsed(text, w=weights(8, 8)), {"i": np.arange(16).reshape(2, 8)})
    assert not low.casts
    assert [name for name in operators(path) if name == "Cast"] == ["Cast"] * 2
    found = types(path)
    assert {found[name] for name in ("x", "z", "k", "c")} == {FLOAT16}


def test_outer_products_are_no_products(tmp_path: Path) -> None:
    """Rotary embeddings multiply positions by frequencies: angles of thousands need every bit."""
    text = """(int64[1,N] p) => (float[1,N,4] y) {
        f = Cast<to=1>(p)
        axis = Constant<value_ints=[-1]>()
        u = Unsqueeze(f, axis)
        a = MatMul(u, w)
        y = Sin(a)
    }"""
    low = lower(parsed(text, w=weights(1, 1, 4)), "fp16")
    assert low.nodes == low.casts == ()


def test_large_tables_go_low_and_small_ones_follow_their_neighbors() -> None:
    text = "(int64[N] i) => (float[N,512] y) { a = Gather(t, i) y = Softmax(a) }"
    assert lower(parsed(text, t=weights(512, 512)), "fp16").nodes == ("a",)
    assert lower(parsed(text, t=weights(4, 512)), "fp16").nodes == ()


def test_bfloat16_has_operators_of_its_own(tmp_path: Path) -> None:
    text = "(float[1,2,4,4] x) => (float[1,2,8,8] y) { y = ConvTranspose<strides=[2,2], kernel_shape=[2,2]>(x, w) }"
    assert lower(parsed(text, w=weights(2, 2, 2, 2)), "fp16").nodes == ("y",)
    low = lower(parsed(text, w=weights(2, 2, 2, 2)), "bf16")
    assert low.kept == {"y": "engines have it in float16 and not in bfloat16"}
    text = "(float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = HardSwish(a) y = MatMul(b, w) }"
    assert set(lower(parsed(text, w=weights(8, 8)), "bf16").kept) == {"b"}
    old = lower(parsed(NET, opset=21, **NET_WEIGHTS), "bf16")
    assert old.kept["a"] == "Conv of opset 21 has no bfloat16 form"
    assert "y" in old.nodes


PAIRS = """(float[N,8] x) => (float[N,8] y) {
    xq = QuantizeLinear(x, sx, zero) xd = DequantizeLinear(xq, sx, zero)
    wd = DequantizeLinear<axis=1>(w, sw)
    a = MatMul(xd, wd)
    b = Add(a, bias)
    bq = QuantizeLinear(b, sb, zero) bd = DequantizeLinear(bq, sb, zero)
    c = MatMul(bd, v)
    s = Softmax(c)
    sq = QuantizeLinear(s, ss, zero) sd = DequantizeLinear(sq, st, zero)
    y = MatMul(sd, v)
}"""
PAIR_WEIGHTS = {
    "zero": np.int8(0),
    "w": RNG.integers(-127, 128, (8, 8)).astype(np.int8),
    "sw": np.array([0.01] * 7 + [1e-5], np.float32),
    "bias": weights(8),
    "v": weights(8, 8),
    "sx": np.float32(0.031),
    "sb": np.float32(0.052),
    "ss": np.float32(1e-6),
    "st": np.float32(1e-6),
}


def test_quantized_graphs_have_their_rest_in_float16(tmp_path: Path) -> None:
    """Q/DQ pairs change types by themselves: what comes from and goes to float32 needs no cast."""
    constants = PAIR_WEIGHTS | {"sw": np.full(8, 2**-7, np.float32), "ss": np.float32(2**-7), "st": np.float32(2**-7)}
    low, path = hold(tmp_path, parsed(PAIRS, **constants), {"x": weights(3, 8, scale=1)})
    found = types(path)
    assert low.casts == ("c_fp32", "y_fp32")
    assert set(low.kept) == {"xq", "s", "sq"}
    assert {found[name] for name in ("xd", "wd", "a", "b", "bd", "sd", "sw", "sb")} == {FLOAT16}
    assert (found["w"], found["xq"], found["zero"]) == (TensorProto.INT8,) * 3


def test_sums_between_pairs_are_in_float16(tmp_path: Path) -> None:
    """Though they could be in float32 without a cast: a residual connection would take twice the memory."""
    text = """(float[N,8] x) => (float[N,8] y) {
        a = MatMul(x, w)
        aq = QuantizeLinear(a, s, zero) ad = DequantizeLinear(aq, s, zero)
        b = MatMul(ad, w)
        bq = QuantizeLinear(b, s, zero) bd = DequantizeLinear(bq, s, zero)
        ae = DequantizeLinear(aq, s, zero)
        c = Add(ae, bd)
        d = Relu(c)
        dq = QuantizeLinear(d, s, zero) dd = DequantizeLinear(dq, s, zero)
        y = MatMul(dd, w)
    }"""
    constants = {"w": weights(8, 8), "s": np.float32(0.03125), "zero": np.int8(0)}
    low, _ = hold(tmp_path, parsed(text, **constants), {"x": weights(3, 8)})
    assert not low.kept
    assert low.casts == ("x_fp16", "y_fp32")


def test_both_halves_of_a_pair_have_the_same_scale(tmp_path: Path) -> None:
    """Also where one is float32: no scale is below float16's normal numbers, and weights make up for theirs."""
    model = parsed(PAIRS, **PAIR_WEIGHTS)
    lower(model, "fp16")
    path = saved(model, tmp_path)
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    for name, other in (("sx", "sx_fp16"), ("ss", "st")):
        assert (str(found[name].dtype), str(found[other].dtype)) == ("float32", "float16")
        assert found[name] == found[other]
    tiny = np.finfo(np.float16).tiny
    assert (found["ss"], found["sw"][-1]) == (tiny, tiny)
    before = PAIR_WEIGHTS["w"] * PAIR_WEIGHTS["sw"]
    after = found["w"].astype(np.float32) * found["sw"].astype(np.float32)
    assert np.abs(before - after).max() <= np.abs(before).max() * 2**-11 + tiny / 2


def test_blocks_of_int4_go_low(tmp_path: Path) -> None:
    levels = RNG.integers(-7, 8, (32, 4)).astype(ml_dtypes.int4)
    scale = np.abs(weights(2, 4)) / 7
    scale[0, 0] = 1e-6
    text = "(float[N,32] x) => (float[N,4] y) { d = DequantizeLinear<axis=0, block_size=16>(w, s) y = MatMul(x, d) }"
    model = parsed(text, s=scale)
    value = ir.val("w", const_value=ir.tensor(levels, name="w"))
    model.graph.register_initializer(value)
    node = model.graph[0]
    node.replace_input_with(0, value)
    low, path = hold(tmp_path, model, {"x": weights(3, 32)})
    assert low.nodes == ("d", "y")
    assert types(path)["s"] == FLOAT16


def test_old_pairs_stay_in_float32_with_casts_around(tmp_path: Path) -> None:
    """Before opset 19 scales are float32 by definition."""
    low, path = hold(tmp_path, parsed(PAIRS, opset=17, **PAIR_WEIGHTS), {"x": weights(3, 8)})
    assert low.kept["bq"] == "QuantizeLinear of opset 17 has no float16 form"
    assert types(path)["sb"] == FLOAT


def test_weights_are_converted_when_they_are_written(tmp_path: Path) -> None:
    """Not before, so that there is no second copy of them in memory."""
    model = parsed(NET, **NET_WEIGHTS)
    lower(model, "fp16")
    assert all(isinstance(model.graph.initializers[name].const_value, ir.LazyTensor) for name in NET_WEIGHTS)


def _networks() -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    source = random.Random(0)
    for _ in range(60):
        count = source.randint(3, 8)
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b and source.random() < 0.4]
        yield count, [(a, b, source.randint(1, 3)) for a, b in pairs]


def test_cuts_cost_least() -> None:
    """Against every division there is."""
    for count, charges in _networks():
        network = CastNetwork()
        for _ in range(count - 2):
            network.add_vertex()
        for before, after, cost in charges:
            network.add_edge(before, after, cost)
        divisions = (
            {SOURCE, *(i + 2 for i, bit in enumerate(bits) if bit)} for bits in product((0, 1), repeat=count - 2)
        )
        prices = {frozenset(one): sum(c for a, b, c in charges if a in one and b not in one) for one in divisions}
        found = network.source_side()
        assert SINK not in found
        assert prices[found] == min(prices.values())
        assert all(len(found) <= len(one) for one, price in prices.items() if price == prices[found])


def test_sizes_that_are_computed_in_float_stay_exact(tmp_path: Path) -> None:
    """Nothing of float32 lies around them; they have nothing to do with a product either."""
    text = """(float[1,1,4,N] x) => (float[1,1,4,M] y) {
        a = Conv<kernel_shape=[1,1]>(x, w)
        s = Shape(a)
        f = Cast<to=1>(s)
        d = Mul(f, two)
        i = Cast<to=7>(d)
        y = Resize<mode="nearest">(a, , , i)
    }"""
    constants = {"w": weights(1, 1, 1, 1), "two": np.array([1, 1, 1, 2], np.float32)}
    low, path = hold(tmp_path, parsed(text, **constants), {"x": weights(1, 1, 4, 2051)})
    assert (types(path)["d"], types(path)["a"]) == (FLOAT, FLOAT16)
    assert set(low.kept) == {"f", "d", "i"}


def test_regions_of_interest_stay_exact(tmp_path: Path) -> None:
    text = """(float[1,1,4,4] x) => (float[1,1,8,8] y) {
        a = Conv<kernel_shape=[1,1]>(x, w)
        y = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize">(a, roi, scales)
    }"""
    constants = {
        "w": weights(1, 1, 1, 1),
        "roi": np.array([0, 0, 0.1, 0.2, 1, 1, 0.8, 0.9], np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    low, path = hold(tmp_path, parsed(text, **constants), {"x": weights(1, 1, 4, 4)})
    assert low.nodes == ("a", "y")
    assert (types(path)["roi"], types(path)["scales"]) == (FLOAT, FLOAT)


@pytest.mark.parametrize(
    "text",
    [
        """(float[N,6] x) => (float[N,3] y) {
            s = SplitToSequence<axis=1>(x, two)
            a = SequenceAt(s, one)
            y = MatMul(a, w)
        }""",
        """(float[N,2] x) => (float[N,3] y) {
            o = Optional(x)
            a = OptionalGetElement(o)
            y = MatMul(a, w)
        }""",
    ],
)
def test_sequences_and_optional_values_stay_what_they_are(tmp_path: Path, text: str) -> None:
    """The types of these are not in the file."""
    model = parsed(text, 18, two=np.array(2), one=np.array(1), w=weights(2, 3))
    width = int(model.graph.inputs[0].shape[1])  # type: ignore[index]
    low, _ = hold(tmp_path, model, {"x": weights(4, width)})
    assert low.nodes == ("y",)
    assert set(low.kept.values()) == {"works on sequences"}
