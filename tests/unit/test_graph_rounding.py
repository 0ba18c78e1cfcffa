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
from enginesmith.pipeline.frameworks.onnx.rounding import moves_steps
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
    return opened_file(path)


def opened_file(path: Path) -> Session:
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


QUANTIZED = """net (float[n, 8] x) => (float[n, 6] y) {
    a = MatMul(x, w)
    q = QuantizeLinear(a, scale, zero)
    y = DequantizeLinear(q, scale, zero)
}"""


@pytest.mark.parametrize("step", [STEP, 2.0**-22])
def test_what_is_quantized_moves_by_steps_of_its_scale(tmp_path: Path, step: float) -> None:
    """An engine that rounds elsewhere decides otherwise, however right the numbers are that are rounded."""
    scale = {"scale": np.float32(0.1), "zero": np.uint8(128)}
    x = {"x": normal(64, 8, seed=3)}
    with opened(tmp_path, QUANTIZED, w=WEIGHTS["w"], **scale) as session:
        (right,) = session.run(x).values()
        still, one, other = (session.perturb(x, each, 0)["y"] for each in (0, step, -step))
    assert (still == right).all()
    steps = (one - right) / scale["scale"]
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
    assert 0.5 < (np.abs(steps) > 0.5).mean() < 0.95
    assert np.abs(steps).max() < 2.5
    assert np.abs(steps.mean()) < 0.2, "of both signs"
    assert np.corrcoef(steps.ravel(), (other - right).ravel())[0, 1] < -0.5


def test_quantized_weights_and_answers_that_are_steps_themselves_stay(tmp_path: Path) -> None:
    scale = {"scale": np.float32(0.1), "zero": np.uint8(128)}
    text = """net (float[n, 8] x) => (uint8[n, 6] y) {
        q = QuantizeLinear(w, scale, zero)
        v = DequantizeLinear(q, scale, zero)
        a = MatMul(x, v)
        y = QuantizeLinear(a, scale, zero)
    }"""
    x = {"x": normal(16, 8, seed=3)}
    for given in (text, text.replace("uint8[n, 6] y", "float[n, 6] a")):
        with opened(tmp_path, given, w=WEIGHTS["w"], **scale) as session:
            (right,), (moved,) = session.run(x).values(), session.perturb(x, STEP, 0).values()
        np.testing.assert_allclose(moved.astype(np.float32), right.astype(np.float32), atol=1e-4)


@pytest.mark.parametrize(
    "operator",
    [
        "ReduceSum <keepdims = 1> (m, axis)",
        "ReduceL1 <keepdims = 1> (m, axis)",
        "ReduceSumSquare <keepdims = 1> (m, axis)",
        "CumSum(m, one)",
        "MatMul(m, w)",
    ],
)
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


def make_trees(leaves: list[list[float]], label: int, **attributes: Any) -> onnx.ModelProto:
    """Make trees of one split each, at 0 of the input's first number, whose sum a Cast to a dtype reads."""
    nodes = [(tree, node) for tree in range(len(leaves)) for node in range(3)]
    ends = [(tree, node) for tree, node in nodes if node]
    split = [float(not node) for _, node in nodes]
    trees = onnx.helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["leaf"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=[tree for tree, _ in nodes],
        nodes_nodeids=[node for _, node in nodes],
        nodes_featureids=[0] * len(nodes),
        nodes_modes=["LEAF" if node else "BRANCH_LEQ" for _, node in nodes],
        nodes_values=[0.0] * len(nodes),
        nodes_truenodeids=[int(each) for each in split],
        nodes_falsenodeids=[2 * int(each) for each in split],
        target_treeids=[tree for tree, _ in ends],
        target_nodeids=[node for _, node in ends],
        target_ids=[0] * len(ends),
        target_weights=[number for tree in leaves for number in tree],
        **attributes,
    )
    cast = onnx.helper.make_node("Cast", ["leaf"], ["y"], to=label)
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    y = onnx.helper.make_tensor_value_info("y", label, ["n", 1])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    return onnx.helper.make_model(
        onnx.helper.make_graph([trees, cast], "net", [x], [y]), opset_imports=opsets, ir_version=10
    )


@pytest.mark.parametrize(
    ("leaves", "attributes", "moves"),
    [
        ([[1.0, 2.0], [11.0, 12.0]], {}, False),
        ([[0.1, 0.7]], {}, False),
        ([[0.1, 0.7]], {"base_values": [0.5]}, True),
        ([[0.1, 0.7], [0.2, 0.4]], {}, True),
        ([[1.0, 2.0], [11.0, 12.0]], {"aggregate_function": "AVERAGE"}, True),
        ([[1.0, 2.0]], {"post_transform": "LOGISTIC"}, True),
        ([[2.0**24, 2.0], [11.0, 12.0]], {}, True),
    ],
)
def test_leaves_of_a_tree_stay_and_sums_of_fractions_are_rounded(
    tmp_path: Path, leaves: list[list[float]], attributes: dict[str, Any], moves: bool
) -> None:
    onnx.save(make_trees(leaves, onnx.TensorProto.FLOAT, **attributes), tmp_path / "model.onnx")
    with opened_file(tmp_path / "model.onnx") as session:
        x = {"x": normal(16, 4)}
        assert (session.perturb(x, STEP, 0)["y"] != session.run(x)["y"]).any() == moves


def test_a_whole_number_that_comes_from_a_leaf_is_not_decided_by_rounding(tmp_path: Path) -> None:
    onnx.save(make_trees([[1.0, 2.0]], onnx.TensorProto.INT64), tmp_path / "model.onnx")
    with opened_file(tmp_path / "model.onnx") as session:
        x = {"x": normal(16, 4)}
        assert find_unstable(session.perturb, x, session.run(x)) == {}


LINEAR = "coefficients = [1.0, 0.5, 1.0, 1.0], kernel_type = 'LINEAR', kernel_params = [1.0, 0.0, 1.0], rho = [0.1]"


@pytest.mark.parametrize(
    ("operator", "moves"),
    [
        ("ai.onnx.ml.LabelEncoder <keys_floats = [12.0], values_floats = [0.3], default_float = 0.7> (x)", False),
        ("ai.onnx.ml.Imputer <imputed_value_floats = [0.3], replaced_value_float = 1.0> (x)", False),
        ("ai.onnx.ml.Binarizer <threshold = 0.5> (x)", False),
        ("ai.onnx.ml.Scaler <offset = [0.5, 0.5, 0.5, 0.5], scale = [0.1, 0.1, 0.1, 0.1]> (x)", True),
        ("ai.onnx.ml.Normalizer <norm = 'L2'> (x)", True),
        (f"ai.onnx.ml.SVMRegressor <one_class = 1, {LINEAR}> (x)", False),
        (f"ai.onnx.ml.SVMRegressor <{LINEAR}> (x)", True),
        ("Hardmax(x)", False),
        ('Resize <mode = "nearest"> (x, , scales)', False),
        ('Resize <mode = "linear"> (x, , scales)', True),
    ],
)
def test_operators_of_other_exporters_that_choose_numbers_do_not_round(
    tmp_path: Path, operator: str, moves: bool
) -> None:
    operator = operator.replace("'", '"')
    header = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3]>'
    model = onnx.parser.parse_model(
        f"{header} net (float[n, 4] x) => (float[n, k] y) <float[2] scales = {{1.0, 2.0}}> {{ y = {operator} }}"
    )
    onnx.save(model, tmp_path / "model.onnx")
    with opened_file(tmp_path / "model.onnx") as session:
        x = {"x": normal(16, 4)}
        assert (session.perturb(x, STEP, 0)["y"] != session.run(x)["y"]).any() == moves


def test_a_mask_of_infinity_leaves_choices_as_they_are(tmp_path: Path) -> None:
    text = """net (float[n, 8] x) => (int64[n] y, float[n, 8] s) {
        s = Add(x, mask)
        p = Softmax <axis = -1> (s)
        y = ArgMax <axis = 1, keepdims = 0> (p)
    }"""
    mask = np.float32([0, 0, 0, *[-np.inf] * 5])
    x = {"x": normal(16, 8)}
    with opened(tmp_path, text, mask=mask) as session:
        right = session.run(x)
        marks = find_unstable(session.perturb, x, right)
        assert (spread_bits(marks.get("y"), (16,)) < FINE).all()
        assert (np.isneginf(session.perturb(x, -STEP, 0)["s"]) == np.isneginf(right["s"])).all()


@pytest.mark.parametrize(
    ("body", "end", "moves"),
    [
        ("q = QuantizeLinear(x, one, zero) y = DequantizeLinear(q, one, zero)", "float", True),
        ("q = QuantizeLinear(w, one, zero) d = DequantizeLinear(q, one, zero) y = Add(x, d)", "float", False),
        ("y = QuantizeLinear(x, one, zero)", "uint8", False),
    ],
)
def test_steps_of_computed_numbers_alone_are_moved(body: str, end: str, moves: bool) -> None:
    constants = {"one": np.float32(1), "zero": np.uint8(0), "w": np.ones(4, np.float32)}
    used = {name: value for name, value in constants.items() if name in body}
    model = parse_graph(f"net (float[n, 4] x) => ({end}[n, 4] y) {{ {body} }}", **used)
    assert moves_steps(model) is moves
