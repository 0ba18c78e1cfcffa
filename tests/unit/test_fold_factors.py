"""Constant factors of channels that are folded into the weights before them, and those that stay."""

from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.rescale.fold_factors import fold_factors
from graphs import normal, parse_graph, run_model

GAMMA = np.array([1e-2, -2.0, 0.5, 30.0], np.float32)
LINEAR = "(float[N,5,3] x) => (float[N,5,4] y) <float[3,4] w, float[4] b, float[4] g>"
WEIGHTS = {"w": normal(3, 4, seed=1), "b": normal(4, seed=2), "g": GAMMA}
LAYER_SCALE = "{ h = MatMul(x, w) s = Add(h, b) y = Mul(s, g) }"


def folded(text: str, x: Any = None, **weights: Any) -> tuple[list[str], float]:
    """Fold; return the operators that are left, and the largest difference of an answer from before, of the range."""
    model = parse_graph(text, **weights)
    edit.infer_shapes(model)
    given = normal(2, 5, 3) if x is None else x
    before = run_model(model, {"x": given}, optimized=False)
    count = edit.node_count(model)
    gone = fold_factors(model)
    after = run_model(model, {"x": given}, optimized=False)
    assert edit.node_count(model) == count - gone
    worst = max(float(np.abs(after[name] - exact).max() / np.abs(exact).max()) for name, exact in before.items())
    return [node.op_type for node in model.graph], worst


@pytest.mark.parametrize(
    "body",
    [
        LAYER_SCALE,
        "{ h = MatMul(x, w) y = Mul(g, h) }",
        "{ h = MatMul(x, w) s = Add(b, h) y = Div(s, g) }",
        "{ h = MatMul(x, w) y = Mul(h, one) } <float one = {0.125}>",
        "{ h = MatMul(x, w) s = Mul(h, g) t = Add(s, b) y = Mul(t, g) }",
    ],
)
def test_a_factor_behind_a_linear_layer_goes_into_its_weight_and_bias(body: str) -> None:
    head, _, tail = body.partition("} <")
    text = LINEAR[:-1] + (", " + tail if tail else ">") + head + ("}" if tail else "")
    operators, difference = folded(text, **WEIGHTS)
    assert not {"Mul", "Div"}.intersection(operators)
    assert difference < 1e-6


def test_a_factor_behind_a_gemm_goes_into_its_own_bias() -> None:
    text = (
        "(float[N,3] x) => (float[N,4] y) <float[4,3] w, float[4] b, float[4] g>"
        "{ h = Gemm <transB = 1, alpha = 0.5, beta = 3.0> (x, w, b) y = Mul(h, g) }"
    )
    weights = {**WEIGHTS, "w": normal(4, 3, seed=1)}
    assert folded(text, normal(2, 3), **weights) == (["Gemm"], pytest.approx(0, abs=1e-6))


def test_a_name_stays_with_its_numbers() -> None:
    """Graphs before and behind a pass are compared by the names of their values."""
    text = LINEAR.replace("y) <", "z) <") + "{ h = MatMul(x, w) s = Add(h, b) y = Mul(s, g) z = Relu(y) }"
    models = [parse_graph(text, **WEIGHTS) for _ in range(2)]
    edit.infer_shapes(models[1])
    assert fold_factors(models[1]) == 1
    before, after = (run_model(each, {"x": normal(2, 5, 3)}, optimized=False, every_value=True) for each in models)
    assert before.keys() & after.keys() == {"y", "z"}
    for name in "yz":
        np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 1])
def test_factors_along_two_axes_stay(size: int) -> None:
    """Behind Flatten, each place of each channel has a factor; with one place, each channel has."""
    text = (
        f"(float[N,2,{size},{size}] x) => (float[N,K] y) <float[4,2,1,1] w, float[4] b, float[{4 * size**2}] g>"
        "{ h = Conv(x, w, b) f = Flatten(h) y = Mul(f, g) }"
    )
    weights = {"w": normal(4, 2, 1, 1, seed=1), "b": normal(4, seed=2), "g": normal(4 * size**2, seed=3)}
    operators, difference = folded(text, normal(2, 2, size, size), **weights)
    assert operators == ["Conv", "Flatten", *(["Mul"] if size > 1 else [])]
    assert difference < 1e-6


def test_one_factor_is_folded_where_shapes_are_not_known() -> None:
    """Files that ONNX Runtime optimized have operators whose shapes onnx does not infer."""
    text = (
        "(float[N,3] x) => (float[N,4] y) <float[3,4] w, float half = {0.5}>"
        "{ h = MatMul(x, w) s = Mul(h, half) y = Relu(s) }"
    )
    model = parse_graph(text, w=WEIGHTS["w"])
    assert fold_factors(model) == 1
    np.testing.assert_allclose(edit.read(model.graph.initializers["w"]), WEIGHTS["w"] / 2)


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_factor_behind_a_convolution_goes_into_each_group(operator: str, groups: int) -> None:
    text = (
        f"(float[N,4,6,6] x) => (float[N,4,K,L] y) <float[4,{4 // groups},3,3] w, float[4] b, float[1,4,1,1] g>"
        f"{{ h = {operator} <group = {groups}> (x, w, b) y = Mul(h, g) }}"
    )
    weights = {"w": normal(4, 4 // groups, 3, 3, seed=1), "b": normal(4), "g": GAMMA.reshape(1, 4, 1, 1)}
    operators, difference = folded(text, normal(2, 4, 6, 6), **weights)
    assert operators == [operator]
    assert difference < 1e-6


def test_factors_are_followed_through_transposes_and_reshapes() -> None:
    """Layer scale of a layout with channels first behind a layer with channels last, and of single heads."""
    text = (
        "(float[N,6,4] x) => (float[N,4,2,3] y) <float[4,4] w, float[4] b, float[4,1,1] g, float[2,1] k, "
        "int64[4] apart = {0,2,3,4}, int64[4] heads = {0,6,2,2}, int64[3] flat = {0,6,4}>"
        "{ h = MatMul(x, w) a = Reshape(h, heads) p = Mul(a, k) q = Reshape(p, flat) s = Add(q, b)"
        "  r = Reshape(s, apart) t = Transpose <perm = [0,3,1,2]> (r) y = Mul(t, g) }"
    )
    weights = {"w": normal(4, 4), "b": normal(4), "g": GAMMA.reshape(4, 1, 1), "k": np.float32([[3.0], [-7.0]])}
    operators, difference = folded(text, normal(2, 6, 4), **weights)
    assert operators == ["MatMul", "Reshape", "Reshape", "Add", "Reshape", "Transpose"]
    assert difference < 1e-6


@pytest.mark.parametrize(
    "body",
    [
        "{ h = MatMul(x, w) s = Relu(h) y = Mul(s, g) }",  # a negative factor does not pass it
        "{ h = MatMul(x, w) t = Sigmoid(h) u = Mul(h, g) y = Add(t, u) }",  # another reader of the result
        "{ h = MatMul(x, w) z = MatMul(x, w) s = Mul(h, g) y = Add(s, z) }",  # another reader of the weight
        "{ h = MatMul(x, w) s = Softmax(b) y = Mul(h, s) }",  # what is computed
        "{ h = MatMul(x, w) y = Div(g, h) }",
    ],
)
def test_factors_stay_where_something_else_would_be_multiplied(body: str) -> None:
    operators, difference = folded(LINEAR + body, **WEIGHTS)
    assert {"Mul", "Div"}.intersection(operators)
    assert difference == 0


@pytest.mark.parametrize(("axis", "size"), [((5, 1), 5), ((5, 4), 20)])
def test_factors_of_other_axes_stay(axis: tuple[int, ...], size: int) -> None:
    text = LINEAR.replace("float[4] g", f"float[{axis[0]},{axis[1]}] g") + LAYER_SCALE
    weights = {**WEIGHTS, "g": normal(size, seed=4).reshape(axis)}
    assert folded(text, **weights) == (["MatMul", "Add", "Mul"], 0)


def test_a_factor_that_widens_a_single_channel_stays() -> None:
    text = LINEAR.replace("[3,4] w", "[3,1] w").replace("[4] b", "[1] b") + LAYER_SCALE
    weights = {**WEIGHTS, "w": normal(3, 1), "b": normal(1)}
    assert folded(text, **weights) == (["MatMul", "Add", "Mul"], 0)


@pytest.mark.parametrize(
    ("operator", "factor", "left"),
    [
        ("Mul", 0.0, False),  # a block that does nothing
        ("Mul", 1e-6, True),  # its weights would be 0 in float16
        ("Mul", 1e6, True),
        ("Mul", np.inf, True),
        ("Div", 0.0, True),
        ("Div", 1e-39, True),
    ],
)
def test_factors_stay_if_weights_would_leave_the_range_of_float16(operator: str, factor: float, left: bool) -> None:
    model = parse_graph(
        LINEAR + LAYER_SCALE.replace("Mul", operator), **{**WEIGHTS, "g": np.float32([1, factor, 1, 1])}
    )
    edit.infer_shapes(model)
    fold_factors(model)
    assert (model.graph[-1].op_type == operator) is left


def test_a_bias_that_would_overflow_keeps_its_factor() -> None:
    weights = {**WEIGHTS, "b": np.full(4, 1e38, np.float32)}
    model = parse_graph(LINEAR + LAYER_SCALE, **weights)
    edit.infer_shapes(model)
    assert fold_factors(model) == 0


def test_a_bias_that_others_add_too_is_theirs_as_it_was() -> None:
    text = (
        "(float[N,5,3] x) => (float[N,5,4] z, float[N,5,4] y) <float[3,4] w, float[3,4] w2, float[4] b, float[4] g>"
        "{ h = MatMul(x, w) s = Add(h, b) y = Mul(s, g) o = MatMul(x, w2) v = Relu(o) z = Add(v, b) }"
    )
    operators, difference = folded(text, **WEIGHTS, w2=normal(3, 4, seed=8))
    assert "Mul" not in operators
    assert difference < 1e-6


@pytest.mark.parametrize(("shape", "gone"), [((4,), True), ((2, 1, 1), True), ((), True), ((5, 1), False)])
def test_a_factor_behind_a_stack_of_matrices_goes_into_all_of_them(shape: tuple[int, ...], gone: bool) -> None:
    text = "(float[N,1,5,3] x) => (float[N,2,5,4] y) { h = MatMul(x, w) s = Add(h, b) y = Mul(s, g) }"
    weights = {"w": normal(2, 3, 4), "b": normal(2, 1, 4, seed=1), "g": normal(*shape, seed=2)}
    operators, difference = folded(text, normal(2, 1, 5, 3), **weights)
    assert ("Mul" not in operators) == gone
    assert difference < 1e-6
