"""Overflow, vanishing guards and cancellation in float16 that samples do not show."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.pipeline.passes.float16.convert import lower
from enginesmith.pipeline.passes.float16.emulation import emulate
from enginesmith.pipeline.passes.float16.rules import is_product
from graphs import parse_graph, run_model

RNG = np.random.default_rng(0)
AXES, TWO = np.array([-1], np.int64), np.array(2, np.float32)
WEIGHTS = {name: RNG.standard_normal((8, 8)).astype(np.float32) / 3 for name in ("w", "v", "u")}
SQUARE = """(float[N,8] x) => (float[N,8] y) {
    h = MatMul(x, w)
    q = Mul(h, h)
    y = MatMul(q, v)
}"""
LAYER_NORM = """(float[N,8] x) => (float[N,8] y) {
    h = MatMul(x, w)
    m = ReduceMean(h, axes)
    c = Sub(h, m)
    p = Pow(c, two)
    s = ReduceMean(p, axes)
    e = Add(s, epsilon)
    r = Sqrt(e)
    n = Div(c, r)
    y = MatMul(n, v)
}"""
NORMALIZE = """(float[N,8] x) => (float[N,8] y) {
    h = MatMul(x, w)
    s = ReduceL2(h, axes)
    e = Clip(s, epsilon)
    n = Div(h, e)
    y = MatMul(n, v)
}"""
VARIANCE = """(float[N,8] x) => (float[N,8] y) {
    h = MatMul(x, w)
    q = Mul(h, h)
    a = ReduceMean(q, axes)
    m = ReduceMean(h, axes)
    b = Mul(m, m)
    d = Sub(a, b)
    k = Add(d, h)
    y = MatMul(k, v)
}"""
ATTENTION = """(float[N,8] x) => (float[N,8] y) {
    a = MatMul(x, w)
    b = MatMul(x, v)
    t = Transpose<perm=[1,0]>(b)
    s = MatMul(a, t)
    p = Softmax(s)
    o = MatMul(p, b)
    z = Add(o, x)
    g = Relu(z)
    y = MatMul(g, u)
}"""


def parsed(text: str, epsilon: float = 1e-5) -> ir.Model:
    constants: dict[str, Any] = {"axes": AXES, "two": TWO, "epsilon": np.array(epsilon, np.float32), **WEIGHTS}
    used = {name: array for name, array in constants.items() if f", {name})" in text}
    return parse_graph(text, 23, named=True, **used)


def observe(text: str, scale: float) -> dict[str, float]:
    """Compute the largest magnitude of every value on samples of this scale."""
    model = parsed(text)
    values = [value for node in model.graph for value in node.outputs]
    model.graph.outputs.extend(value for value in values if not value.is_graph_output())
    x = np.random.default_rng(1).uniform(-scale, scale, (16, 8)).astype(np.float32)
    found = run_model(model, {"x": x}, optimized=False)
    return {name: float(np.abs(array).max()) for name, array in found.items()} | {"x": scale}


def run(model: ir.Model, x: Any) -> Any:
    """Run it with every value rounded to its type, which ONNX Runtime on a CPU leaves out."""
    emulate(model)
    return run_model(model, {"x": x.astype(np.float32)}, optimized=False)["y"]


def test_square_that_overflows_only_on_larger_inputs_stays() -> None:
    """On inputs 3 times the samples' the square exceeds 65504, though on the samples it is less than a sixth of it."""
    largest = observe(SQUARE, 65.0)
    assert 65504 / 9 < largest["q"] < 65504 / 6
    model = parsed(SQUARE)
    low = lower(model, "fp16", largest=largest)
    assert low.kept["q"].startswith(f"'q' may reach {16 * largest['q']:.3g} on inputs 4 times as large as the samples'")
    assert "h" in low.nodes
    x = 3 * np.random.default_rng(1).uniform(-65, 65, (16, 8))
    assert np.isfinite(run(model, x)).all()
    assert "q" not in lower(parsed(SQUARE), "bf16", largest=largest).kept


def test_reader_of_a_large_power_stays() -> None:
    """Pow is in float32 anyway: what must not be is a cast of its result to float16."""
    text = SQUARE.replace("Mul(h, h)", "Pow(h, two)")
    low = lower(parsed(text), "fp16", largest=observe(text, 60.0))
    assert low.kept["y"].startswith("'q' may reach")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_variance_as_a_difference_stays(precision: Any) -> None:
    low = lower(parsed(VARIANCE), precision)
    assert {"q", "b", "d"} <= set(low.kept)
    assert low.kept["d"].startswith("a variance as a difference")
    assert {"h", "y"} <= set(low.nodes)


def test_division_with_a_guard_that_vanishes_stays() -> None:
    """A row of zeros is divided by 1e-12, and would be by 0."""
    model = parsed(NORMALIZE, 1e-12)
    low = lower(model, "fp16")
    assert low.kept["n"] == "divides by what may be 1e-12, which is 0 in float16"
    assert np.isfinite(run(model, np.zeros((2, 8)))).all()


@pytest.mark.parametrize(("epsilon", "stays"), [(1e-5, False), (1e-12, False), (1e-16, True)])
def test_guard_under_a_root_counts_by_its_root(epsilon: float, stays: bool) -> None:
    low = lower(parsed(LAYER_NORM, epsilon), "fp16")
    assert low.kept.get("n", "").startswith("divides by") == stays


@pytest.mark.parametrize("text", [SQUARE, LAYER_NORM, NORMALIZE, VARIANCE, ATTENTION])
def test_products_go_low_where_nothing_can_overflow(text: str) -> None:
    """Samples of an ordinary scale bring no island by bounds; all products are in float16."""
    model = parsed(text)
    products = {node.name for node in model.graph if is_product(node)}
    low = lower(model, "fp16", largest=observe(text, 3.0))
    assert len(products & set(low.nodes)) >= 0.95 * len(products)
    assert not [reason for reason in low.kept.values() if "may reach" in reason or "divides by" in reason]
