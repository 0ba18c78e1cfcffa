"""Weights that several products read: each is stored once in each precision, whatever its products differ in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.calibration.ranges import METHODS, Ranges, TensorRange
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.frameworks.torch.graph import load_graph, save_graph
from enginesmith.pipeline.passes.float16.convert import lower
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.quantize.layerwise_error import add_switches
from enginesmith.pipeline.passes.quantize.qdq import Settings, quantize
from enginesmith.pipeline.passes.quantize.weights import quantize_dynamically, quantize_to_int4
from enginesmith.pipeline.passes.simplify import rewrite
from enginesmith.pipeline.tensors import Array
from graphs import NOWHERE, channel_statistics, normal, parse_graph, run_model, sqnr_db
from qdq_graphs import ranges

STEPS = """net (float[4, 64] x) => (float[4, 64] y) {
    a = Gemm <transB = 1> (x, w, b)
    at = Tanh(a)
    c = Gemm <transB = 1> (at, w, b)
    ct = Tanh(c)
    y = Gemm <transB = 1> (ct, w, b)
}"""
TIED = """net (int64[4] i, float[4, 64] x) => (float[4, 96] y) {
    g = Gather(w, i)
    m = Mul(x, g)
    t = Transpose <perm = [1, 0]> (w)
    y = MatMul(m, t)
}"""
PLACEMENTS = ("inputs", "inputs+outputs", "inputs+read outputs")


def steps() -> ir.Model:
    return parse_graph(STEPS, w=normal(64, 64) / 8, b=normal(64, seed=1))


def list_stored(model: ir.Model, dtype: ir.DataType = ir.DataType.INT8) -> list[str]:
    """Name the matrices of a type that a graph has."""
    values = model.graph.initializers.values()
    return [str(value.name) for value in values if value.dtype == dtype and len(value.shape or ()) > 1]


def readers(model: ir.Model, operator: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == operator]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_inputs_with_other_ranges_read_one_rounded_weight(placement: Any) -> None:
    model, given = steps(), ranges(steps())
    done = quantize(model, given, Settings(placement=placement))
    assert len(done.done) == 3
    assert list_stored(model) == ["w_quantized"]
    assert "w" not in model.graph.initializers
    widened = [node for node in readers(model, "DequantizeLinear") if node.inputs[0].name == "w_quantized"]
    assert len(widened) == 3, "each product has a DequantizeLinear of its own"
    assert len({tuple(node.inputs) for node in widened}) == 1


def test_a_shared_scale_is_large_enough_for_the_biases_of_all_products() -> None:
    """A channel without weights has the scale with which its bias fits an int32 beside the smallest activations."""
    weight, bias = normal(64, 64) / 8, normal(64, seed=1)
    weight[0], bias[0] = 1e-12, 100.0
    model = parse_graph(STEPS, w=weight, b=bias)
    given = ranges(parse_graph(STEPS, w=weight, b=bias), x=(-50.0, 50.0), at=(-1e-3, 1e-3))
    quantize(model, given, Settings(placement="inputs+outputs"))
    assert list_stored(model) == ["w_quantized"]
    sums = [node.inputs[0].const_value.numpy() for node in readers(model, "DequantizeLinear") if _is_bias(node)]
    assert len(sums) == 3
    assert all(np.abs(each.astype(np.int64)).max() <= 1 << 30 for each in sums)
    steps_ = [node.inputs[1].const_value.numpy() for node in readers(model, "DequantizeLinear") if _is_bias(node)]
    for levels, scale in zip(sums, steps_, strict=True):
        assert levels[0] * scale[0] == pytest.approx(100.0, rel=1e-3)


def _is_bias(node: ir.Node) -> bool:
    return node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.INT32


def test_a_weight_that_a_product_in_float_reads_too_is_there_once_in_both() -> None:
    model = steps()
    (kept, *_) = layers.find_groups(steps())
    done = quantize(model, ranges(steps()), Settings(placement="inputs+outputs", keep=frozenset({kept.name})))
    assert len(done.done) == 2
    assert list_stored(model) == ["w_quantized"]
    assert list_stored(model, ir.DataType.FLOAT) == ["w"]


@pytest.mark.parametrize("shared", ["w", "w2"])
def test_equal_weights_of_other_names_are_one(shared: str) -> None:
    text, weight = STEPS.replace("(ct, w,", f"(ct, {shared},"), normal(64, 64) / 8
    weights = {"w": weight, "w2": weight.copy(), "b": normal(64, seed=1)}
    model, given = parse_graph(text, **weights), ranges(parse_graph(text, **weights))
    _, *kept = (group.name for group in layers.find_groups(parse_graph(text, **weights)))
    quantize(model, given, Settings(placement="inputs+outputs", keep=frozenset(kept)))
    assert list_stored(model) == ["w_quantized"]
    assert list_stored(model, ir.DataType.FLOAT) == ["w"]


def test_a_product_reads_an_embedding_through_a_transpose_in_int8() -> None:
    weight = normal(96, 64) / 8
    feeds = {"i": np.arange(4), "x": normal(4, 64, seed=2)}
    exact = run_model(parse_graph(TIED, w=weight), feeds, optimized=False, every_value=True)
    bounds = {name: (float(exact[name].min()), float(exact[name].max())) for name in ("m", "y")}
    known = {
        name: TensorRange(minimum=low, maximum=high, count=1, amax=dict.fromkeys(METHODS, max(-low, high)))
        for name, (low, high) in bounds.items()
    }
    model = parse_graph(TIED, w=weight)
    done = quantize(
        model,
        Ranges(model_sha256="", provenance=NOWHERE, tensors=known),
        Settings(placement="inputs+outputs", weight_bits=7),
    )
    assert not done.left
    assert done.groups[0].parameters == weight.size
    assert not readers(model, "Transpose")
    assert len(list_stored(model)) == 1
    assert list_stored(model, ir.DataType.FLOAT) == ["w"]
    assert sqnr_db(exact["y"], run_model(model, feeds)["y"]) > 30
    twin = parse_graph(TIED, w=weight)
    layers.find_groups(twin)  # which names the nodes
    switched = add_switches(twin, model)
    off = {**feeds, "enginesmith/switches": np.zeros(len(switched), bool)}
    assert sqnr_db(exact["y"], run_model(model, off)["y"]) > 100, "its float weight is found again"


def test_dynamic_products_and_lstms_share_their_weights() -> None:
    model = steps()
    quantize_dynamically(model, Settings())
    assert list_stored(model) == ["w_quantized"]
    model = parse_graph(
        """net (float[5, 1, 8] x) => (float[5, 1, 1, 8] y) {
            a, h = LSTM <hidden_size = 8> (x, w, r)
            s = Squeeze(a, one)
            y = LSTM <hidden_size = 8> (s, w, r)
        }""",
        w=normal(1, 32, 8),
        r=normal(1, 32, 8, seed=1),
        one=np.array([1]),
    )
    quantize_dynamically(model, Settings())
    assert list_stored(model) == ["w_quantized", "r_quantized"]


def test_an_int4_weight_is_rounded_for_all_its_inputs() -> None:
    """The scales are those with the least error in the sum of what all products lose."""
    feeds = {"x": normal(4, 64, seed=2) * np.geomspace(0.1, 10, 64).astype(np.float32)}
    exact = run_model(steps(), feeds, optimized=False, every_value=True)
    statistics = {name: channel_statistics({**feeds, **exact}[name], -1) for name in ("x", "at", "ct")}
    known = Ranges(model_sha256="", provenance=NOWHERE, tensors={}, channels=statistics)

    def round_for(*names: str) -> Array:
        model = steps()
        own = known.model_copy(update={"channels": {name: known.channels[name] for name in names}})
        quantize_to_int4(model, Settings(), own)
        assert list_stored(model, ir.DataType.INT4) == ["w_quantized"]
        return np.asarray(model.graph.initializers["w_scale"].const_value.numpy())  # type: ignore[union-attr]

    squares = [np.array(statistics[name].mean_square) for name in ("x", "at", "ct")]
    whole = statistics["x"].model_copy(update={"mean_square": tuple(sum(squares))})  # type: ignore[arg-type]
    together = round_for("x", "at", "ct")
    known = known.model_copy(update={"channels": {"x": whole}})
    np.testing.assert_array_equal(together, round_for("x"))


def test_levels_behind_a_scale_that_float16_raises_stay_one() -> None:
    model = parse_graph(STEPS, w=normal(64, 64) * 1e-5, b=normal(64, seed=1))
    given = ranges(parse_graph(STEPS, w=normal(64, 64) * 1e-5, b=normal(64, seed=1)))
    quantize(model, given, Settings(placement="inputs"))
    before = model.graph.initializers["w_scale"].const_value.numpy()  # type: ignore[union-attr]
    assert before.max() < np.finfo(np.float16).tiny
    levels = model.graph.initializers["w_quantized"].const_value.numpy()  # type: ignore[union-attr]
    lower(model, "fp16")
    assert list_stored(model) == ["w_quantized"]
    after = model.graph.initializers["w_quantized"].const_value.numpy()  # type: ignore[union-attr]
    assert np.abs(after).max() < np.abs(levels).max()


@pytest.mark.parametrize("merge", [rewrite, edit.merge_equal_constants])
def test_equal_constants_become_one(merge: Callable[[ir.Model], int]) -> None:
    """A large weight is one, too; another type or shape is not."""
    weight = normal(64, 64)
    model = parse_graph(
        "net (float[4, 64] x) => (float[4, 64] y) { a = MatMul(x, u) b = MatMul(a, v) c = MatMul(b, o) y = Sub(c, l) }",
        u=weight,
        v=weight.copy(),
        o=normal(64, 64, seed=1),
        l=weight.reshape(-1)[:64].copy(),
    )
    merge(model)
    assert sorted(model.graph.initializers) == ["l", "o", "u"]


def test_training_keeps_one_weight_and_one_scale(tmp_path: Path) -> None:
    """The scale of a channel that died grows for all products, so that no levels are read with the old one."""
    weight, bias = normal(64, 64) / 8, normal(64, seed=1)
    weight[0], bias[0] = 0.0, 100.0
    text = STEPS.replace("y = Gemm <transB = 1> (ct, w, b)", "y = Gemm <transB = 1> (ct, w)")
    model = parse_graph(text, w=weight, b=bias)
    given = ranges(parse_graph(text, w=weight, b=bias))
    quantize(model, given, Settings(placement="inputs+outputs", weight_bits=7))
    edit.save(model, tmp_path)
    path, out = tmp_path / edit.FILE, tmp_path / "out"
    loaded = load_graph(path)
    for name, value in loaded.module.named_parameters():
        if name == "model.scales":
            value.data.fill_(np.log(0.5) / 25)
    out.mkdir()
    save_graph(path, loaded, out, edit.EXTERNAL_DATA_BYTES)
    trained = edit.load(out / edit.FILE)
    assert list_stored(trained) == ["w_quantized"]
    levels = trained.graph.initializers["w_quantized"]
    (scale,) = {use.node.inputs[1] for use in levels.uses()}
    given_scale = model.graph.initializers["w_scale"].const_value.numpy()  # type: ignore[union-attr]
    assert scale.const_value.numpy()[0] == pytest.approx(2 * given_scale[0])  # type: ignore[union-attr]


def test_scales_are_trained_where_products_share_a_bias_in_int32(tmp_path: Path) -> None:
    model, span = steps(), (-1.0, 1.0)
    quantize(model, ranges(steps(), x=span, at=span, ct=span), Settings(placement="inputs+outputs", weight_bits=7))
    assert len({node.inputs[0] for node in readers(model, "DequantizeLinear") if _is_bias(node)}) == 1
    edit.save(model, tmp_path)
    assert "model.scales" in dict(load_graph(tmp_path / edit.FILE).module.named_parameters())
