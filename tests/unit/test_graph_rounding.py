"""Graphs whose operators' results are changed a little, as another implementation may round them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import baseline, simulation
from enginesmith.pipeline.engines.base import Session
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.rounding import FINE, find_unstable, spread_bits
from enginesmith.pipeline.system.device import Device
from graphs import normal, parse_graph

STEP = 2.0**-FINE
CHOICE = """net (float[n, 4] x) => (int64[n] y, float[n, 4] s) {
    s = Sigmoid(x)
    y = ArgMax <axis = 1, keepdims = 0> (s)
}"""
NETWORK = """net (float[n, 8] x) => (float[n, 6] y) {
    a = MatMul(x, w)
    b = Add(a, u)
    c = Relu(b)
    d = MatMul(c, v)
    e = LeakyRelu(d)
    y = Mul(e, d)
}"""
WEIGHTS = {"w": normal(8, 6), "u": normal(6, seed=1), "v": normal(6, 6, seed=2)}


def opened(folder: Path, text: str, opset: int = 21, **weights: Any) -> Session:
    path = folder / "model.onnx"
    ir.save(parse_graph(text, opset, **weights), path)
    artifact = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    return baseline("onnx").load(artifact, Device())


def test_answers_move_by_about_the_step_and_the_other_way(tmp_path: Path) -> None:
    x = {"x": normal(16, 8, seed=3)}
    with opened(tmp_path, NETWORK, **WEIGHTS) as session:
        (right,) = session.run(x).values()
        still, one, other, again, seeded = (
            session.perturb(x, step, seed)["y"] for step, seed in ((0, 0), (STEP, 0), (-STEP, 0), (STEP, 0), (STEP, 1))
        )
    np.testing.assert_allclose(still, right, rtol=1e-5, atol=1e-6)
    moved = np.abs(one - right).max() / np.ptp(right)
    assert STEP / 4 < moved < 32 * STEP
    np.testing.assert_allclose(one - right, right - other, atol=0.2 * np.abs(one - right).max())
    assert (again == one).all()
    assert (seeded != one).any()


@pytest.mark.parametrize("product", ["Gemm(x, w, u)", "MatMul(x, w)", "Conv(x, v)"])
def test_sums_of_products_are_changed_by_the_size_of_their_own(tmp_path: Path, product: str) -> None:
    """Numbers of a column in a small unit hardly move beside one in a large unit."""
    weights = {"w": np.eye(2, dtype=np.float32), "u": np.zeros(2, np.float32)}
    weights["v"] = weights["w"][:, :, None]
    shape = "n, 2, 1" if "Conv" in product else "n, 2"
    x = (normal(64, 2) * np.float32([1e6, 1.0])).reshape(64, 2, *((1,) if "Conv" in product else ()))
    with opened(tmp_path, f"net (float[{shape}] x) => (float[{shape}] y) {{ y = {product} }}", **weights) as session:
        moved = np.abs(session.perturb({"x": x}, STEP, 0)["y"] - x).reshape(64, 2).max(0)
    assert 0 < moved[1] < 1e-4 < 1 < moved[0]


def test_a_choice_between_equal_scores_is_another_one(tmp_path: Path) -> None:
    """ONNX Runtime levels scores of nearly 0, and takes the first of equal ones."""
    x = np.full((3, 4), -40.0, np.float32)
    x[1, 2] = 1.0
    x[2] = (-3.0, 2.0, 2.0, -1.0)
    with opened(tmp_path, CHOICE) as session:
        unstable = find_unstable(session.perturb, {"x": x}, session.run({"x": x}))
    assert (spread_bits(unstable["y"], (3,)) >= FINE).tolist() == [True, False, True]
    assert "s" not in unstable


@pytest.mark.parametrize(
    ("text", "x"),
    [
        ("{ a = Add(x, x)\n y = Softmax <axis = -1> (a) }", [[1.0, -np.inf, 2.0, -np.inf]]),
        ("{ a = MatMul(x, w)\n y = Relu(a) }", [[np.nan, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]),
        ("{ a = MatMul(x, w)\n y = Add(a, x) }", [[1e9, -1e9, 0.0, 1.0]]),
        ("{ a = MatMul(x, w)\n y = Add(a, x) }", np.zeros((0, 4))),
        ("{ a = Relu(x)\n y = Softmax <axis = -1> (a) }", np.full((4, 4), 3e38)),
    ],
)
def test_masks_and_empty_values_stay(tmp_path: Path, text: str, x: Any) -> None:
    feeds = {"x": np.asarray(x, np.float32)}
    with opened(tmp_path, f"net (float[n, 4] x) => (float[n, 4] y) {text}", w=np.eye(4, dtype=np.float32)) as session:
        (right,), (moved,) = session.run(feeds).values(), session.perturb(feeds, STEP, 0).values()
    assert (np.isnan(moved) == np.isnan(right)).all()
    np.testing.assert_allclose(moved, right, rtol=1e-4, atol=1e-4)


def test_halves_move_by_their_own_rounding_at_least(tmp_path: Path) -> None:
    text = "net (float16[n, 4] x) => (float16[n, 4] y) { y = Mul(x, x) }"
    x = {"x": normal(64, 4).astype(np.float16)}
    with opened(tmp_path, text) as session:
        (right,), (moved,) = session.run(x).values(), session.perturb(x, STEP, 0).values()
    assert moved.dtype == np.float16
    assert 0.2 < (moved != right).mean() <= 1


def test_graphs_that_cannot_be_changed_have_no_answers(tmp_path: Path) -> None:
    with opened(tmp_path, NETWORK, 11, **WEIGHTS) as session:
        assert session.perturb({"x": normal(2, 8)}, STEP, 0) == {}
    path = tmp_path / "model.onnx"
    onnx.checker.check_model(onnx.load(path))
    artifact = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    with simulation().load(artifact, Device()) as session:
        assert session.perturb({"x": normal(2, 8)}, STEP, 0) == {}


@pytest.mark.parametrize("operator", ["ReduceSum <keepdims = 1> (m, axis)", "CumSum(m, one)", "MatMul(m, w)"])
def test_sums_of_whole_numbers_are_exact_and_those_of_others_are_not(tmp_path: Path, operator: str) -> None:
    weights = {"w": np.ones((4, 4), np.float32), "axis": np.array([1]), "one": np.array(1), "zero": np.float32(0)}
    for count, given in enumerate(("c = Greater(x, zero)\n m = Cast <to = 1> (c)", "m = Identity(x)")):
        text = f"net (float[n, 4] x) => (float[n, k] y) {{ {given}\n y = {operator} }}"
        with opened(tmp_path, text, **weights) as session:
            x = {"x": normal(16, 4)}
            changed = session.perturb(x, STEP, 0)["y"] != session.run(x)["y"]
            assert changed.any() == bool(count)


@pytest.mark.parametrize("size", [1.0, 2.0**22])
def test_sums_that_are_too_large_are_not_exact(tmp_path: Path, size: float) -> None:
    """Small results tell nothing: what is added on the way may not be exact."""
    text = "net (float[n, 4] x) => (float[n, 1] y) { y = ReduceSum <keepdims = 1> (x, axis) }"
    x = {"x": np.float32([[1, size, size, -size], [3, 8 * size, -8 * size, 1]])}
    with opened(tmp_path, text, axis=np.array([1])) as session:
        changed = session.perturb(x, STEP, 0)["y"] != session.run(x)["y"]
    assert changed.any() == (size > 1)
