"""Which values calibration looks at, and reading them out of a graph."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.errors import InvalidGraph, ModelError
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.quantize.activation_capture import (
    CalibrationPoints,
    find_calibration_points,
    open_activation_capture,
)
from enginesmith.pipeline.tensors import Array

FLOAT, INT64, BFLOAT16 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BFLOAT16
WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)
X = np.array([[1, -2, 3, 0.5], [0, 1, 0, -1]], np.float32)

DENSE = (
    helper.make_node("MatMul", ["x", "w"], ["product"]),
    helper.make_node("Relu", ["product"], ["kept"]),
    helper.make_node("Exp", ["kept"], ["y"]),
)
BRANCH = helper.make_graph(
    [helper.make_node("Neg", ["product"], ["inside"])], "b", [], [helper.make_tensor_value_info("inside", FLOAT, None)]
)


def saved(
    folder: Path,
    nodes: tuple[onnx.NodeProto, ...] = DENSE,
    weights: dict[str, Array] | None = None,
    shape: tuple[Any, ...] = ("batch", 4),
    kind: int = FLOAT,
) -> Path:
    """A graph from x to y without types in between."""
    given = [numpy_helper.from_array(value, name) for name, value in (weights or {"w": WEIGHT}).items()]
    ends = [helper.make_tensor_value_info("x", kind, shape)], [helper.make_tensor_value_info("y", kind, None)]
    body = helper.make_graph(nodes, "g", *ends, given)
    path = folder / "model.onnx"
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def seen(folder: Path, *arguments: Any, **options: Any) -> CalibrationPoints:
    return find_calibration_points(edit.load(saved(folder, *arguments, **options)))


def test_values_inputs_and_outputs_are_read_out_in_the_order_they_were_named(tmp_path: Path) -> None:
    with open_activation_capture(saved(tmp_path), ["kept", "x", "y", "product"]) as tapped:
        found = tapped.run({"x": X, "unknown": X})
    assert list(found) == ["kept", "x", "y", "product"]
    np.testing.assert_allclose(found["product"], X @ WEIGHT)
    np.testing.assert_allclose(found["kept"], np.maximum(X @ WEIGHT, 0))
    np.testing.assert_allclose(found["y"], np.exp(np.maximum(X @ WEIGHT, 0)), rtol=1e-6)
    assert found["x"] is X


def test_the_file_stays_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    with open_activation_capture(path, ["product"]) as tapped:
        tapped.run({"x": X})
    assert path.read_bytes() == before


def test_external_weights_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=0)
    monkeypatch.chdir(tmp_path.parent)
    with open_activation_capture(Path(tmp_path.name, path.name), ["product"]) as tapped:
        np.testing.assert_allclose(tapped.run({"x": X})["product"], X @ WEIGHT)


@pytest.mark.parametrize("name", ["nowhere", "inside", "w"])
def test_what_is_not_computed_in_the_main_graph_cannot_be_read_out(tmp_path: Path, name: str) -> None:
    nodes = (*DENSE, helper.make_node("If", ["flag"], ["z"], then_branch=BRANCH, else_branch=BRANCH))
    path = saved(tmp_path, nodes, {"w": WEIGHT, "flag": np.array(True)})
    with pytest.raises(ModelError, match=f"computes no value '{name}'"), open_activation_capture(path, ["kept", name]):
        pass


def test_graphs_and_feeds_that_do_not_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidGraph, match="cannot read"), open_activation_capture(tmp_path / "nothing.onnx", []):
        pass
    path = saved(tmp_path, (helper.make_node("Odd", ["x"], ["y"]),))
    with pytest.raises(ModelError, match="cannot load"), open_activation_capture(path, ["y"]):
        pass
    for feeds in ({}, {"x": X[:, :2]}, {"x": X.astype(np.float64)}):
        with (
            open_activation_capture(saved(tmp_path), ["y"]) as tapped,
            pytest.raises(ModelError, match="failed on these feeds"),
        ):
            tapped.run(feeds)


def test_products_and_what_stands_around_them_are_watched_closely(tmp_path: Path) -> None:
    found = seen(tmp_path)
    assert found.values == found.taps == ("x", "product", "kept", "y")
    assert found.histograms == {"x", "product", "kept"}  # Exp stays in floating point
    assert (found.products, found.channels) == ({"x", "product"}, {"x": -1})


def test_a_convolution_has_its_channels_on_axis_1(tmp_path: Path) -> None:
    nodes = (helper.make_node("Conv", ["x", "w"], ["y"]),)
    found = seen(tmp_path, nodes, {"w": np.ones((2, 4, 1, 1), np.float32)}, shape=("batch", 4, 8, 8))
    assert found.channels == {"x": 1}


@pytest.mark.parametrize(
    ("nodes", "channels"),
    [
        ((helper.make_node("MatMul", ["x", "x"], ["y"]),), {}),
        ((helper.make_node("MatMul", ["w", "x"], ["y"]),), {}),
        ((helper.make_node("Gemm", ["x", "w"], ["y"], transA=1),), {}),
        ((helper.make_node("Gemm", ["x", "w"], ["y"]),), {"x": -1}),
        ((helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(WEIGHT)), DENSE[0]), {"x": -1}),
    ],
)
def test_only_what_meets_a_constant_weight_has_channels(
    tmp_path: Path, nodes: tuple[onnx.NodeProto, ...], channels: dict[str, int]
) -> None:
    assert seen(tmp_path, nodes, {"w": np.ones((4, 4), np.float32)}, shape=(4, 4)).channels == channels


def test_what_is_scaled_along_with_a_product_has_channels(tmp_path: Path) -> None:
    nodes = (
        helper.make_node("MatMul", ["x", "w"], ["made"]),
        helper.make_node("Relu", ["made"], ["kept"]),
        helper.make_node("ReduceMean", ["kept"], ["mean"], axes=[1]),
        helper.make_node("MatMul", ["mean", "v"], ["y"]),
    )
    weights = {"w": np.ones((4, 3), np.float32), "v": np.ones((3, 2), np.float32)}
    assert seen(tmp_path, nodes, weights, shape=("batch", 5, 4)).channels == {"x": -1, "mean": -1, "kept": 2}


def test_what_a_normalization_takes_the_sizes_of_has_channels(tmp_path: Path) -> None:
    nodes = (
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("BatchNormalization", ["a", "g", "g", "g", "g"], ["b"]),
        helper.make_node("Sigmoid", ["b"], ["y"]),
    )
    weights = {"w": np.ones((3, 4, 1, 1), np.float32), "g": np.ones(3, np.float32)}
    assert seen(tmp_path, nodes, weights, ("n", 4, 5, 5)).channels == {"x": 1, "a": 1}


def test_another_shape_of_the_same_numbers_is_read_out_only_for_its_channels(tmp_path: Path) -> None:
    nodes = (
        helper.make_node("Exp", ["x"], ["made"]),
        helper.make_node("Transpose", ["made"], ["turned"], perm=[1, 0]),
        helper.make_node("Identity", ["turned"], ["again"]),
        helper.make_node("MatMul", ["again", "w"], ["product"]),
        helper.make_node("Reshape", ["product", "shape"], ["y"]),
    )
    found = seen(tmp_path, nodes, {"w": WEIGHT, "shape": np.array([-1])}, shape=(4, 4))
    assert found.values == ("x", "made", "turned", "again", "product", "y")
    assert found.same == {"turned": "made", "again": "made", "y": "product"}
    assert found.taps == ("x", "made", "again", "product")
    assert found.histograms == {"made", "product"} == found.products
    assert found.channels == {"again": -1}


def test_only_floats_that_numpy_has_are_watched(tmp_path: Path) -> None:
    nodes = (
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("Cast", ["x"], ["half"], to=BFLOAT16),
        helper.make_node("Cast", ["half"], ["y"], to=FLOAT),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(WEIGHT)),
    )
    assert seen(tmp_path, nodes).values == ("x", "y")
    path = saved(tmp_path, (helper.make_node("MatMul", ["x", "w"], ["y"]),), shape=("b", 4), kind=BFLOAT16)
    assert find_calibration_points(edit.load(path)) == CalibrationPoints((), frozenset(), {}, frozenset(), {})


def test_operators_of_other_domains_are_watched_from_outside(tmp_path: Path) -> None:
    nodes = (helper.make_node("MatMul", ["x", "w"], ["y"], domain="elsewhere"),)
    found = seen(tmp_path, nodes)
    assert found.values == ("x", "y")
    assert not found.histograms
