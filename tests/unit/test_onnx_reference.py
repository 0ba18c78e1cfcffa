"""onnx's own evaluator, with what it gets wrong mended or named."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import evaluator, reference
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.measure.prosecution.locate import describe_unasked
from enginesmith.pipeline.tensors import Array

RNG = np.random.default_rng(0)


def draw(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


X, SEQUENCES = draw(2, 4, 5, 6), draw(5, 2, 4)
CHANNELS = [np.abs(draw(4)) + 1, draw(4), draw(4), np.abs(draw(4)) + 1]
EVERY = (7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 21)
HALVES, TIMES = np.float32([1, 1, 1.5, 2.5]), np.float32([1, 1, 2, 3])
NONE = np.float32([])
GATES = [draw(1, 12, 4), draw(1, 12, 3), draw(1, 24)]

SOUND: list[tuple[str, tuple[int, ...], list[Array], dict[str, Any]]] = [
    ("BatchNormalization", EVERY, CHANNELS, {}),
    ("BatchNormalization", (9, 11, 13, 14), CHANNELS, {"momentum": 0.5, "epsilon": 0.01}),
    *((name, EVERY, [], {}) for name in ("Softmax", "LogSoftmax", "Hardmax", "Dropout", "Clip", "Flatten", "Squeeze")),
    *((name, EVERY, [], {"axis": axis}) for name in ("Softmax", "LogSoftmax", "Hardmax") for axis in range(4)),
    ("Softmax", (11, 12, 13), [], {"axis": -2}),
    ("Upsample", (9,), [TIMES], {}),
    ("Resize", (11, 13, 19), [NONE, TIMES], {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ("Resize", (11, 13, 19), [NONE, HALVES], {"mode": "linear"}),
    ("Pad", (9, 10), [], {"pads": [0, 0, 1, 2, 0, 0, 2, 1], "value": 1.5}),
    ("Pad", (11, 13), [np.array([0, 0, 1, 2, 0, 0, 2, 1]), np.float32(1.5)], {}),
    ("Clip", (9, 10), [], {"min": -0.5}),
    ("Clip", (11, 13), [np.float32(-0.5)], {}),
    ("Slice", (9,), [], {"starts": [1, -4], "ends": [3, -1], "axes": [1, 3]}),
    ("Slice", (10, 11, 13), [np.array([-1]), np.array([-100]), np.array([3]), np.array([-2])], {}),
    ("Unsqueeze", (9, 11, 12), [], {"axes": [0, 3]}),
    ("ReduceSum", (9, 11, 12), [], {"axes": [1, 3], "keepdims": 0}),
    ("ReduceMean", (9, 11, 13), [], {"axes": [-1 % 4]}),
    ("Cast", (9, 13), [], {"to": onnx.TensorProto.INT32}),
    ("InstanceNormalization", (9, 13), CHANNELS[:2], {}),
    ("LayerNormalization", (17, 21), [draw(6), draw(6)], {}),
    ("AveragePool", (9, 11, 13), [], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("Split", (9, 11), [], {"axis": 3, "split": [6]}),
    ("LSTM", (9, 14), GATES, {"hidden_size": 3, "activations": ["Sigmoid", "Tanh", "Tanh"]}),
]

WRONG: list[tuple[str, int, list[Array], dict[str, Any]]] = [
    ("LSTM", 14, [*GATES, np.int32([5, 3])], {"hidden_size": 3}),
    ("LSTM", 14, GATES, {"hidden_size": 3, "clip": 0.2}),
    ("LSTM", 14, GATES, {"hidden_size": 3, "activations": ["Sigmoid", "Relu", "Tanh"]}),
    ("LSTM", 14, GATES, {"hidden_size": 3, "input_forget": 1}),
    ("LRN", 13, [], {"size": 3}),
    ("MaxPool", 11, [], {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("Resize", 11, [NONE, HALVES], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("Resize", 13, [NONE, np.float32([1, 1, 0.6, 0.5])], {"nearest_mode": "floor"}),
    ("RoiAlign", 10, [np.float32([[0, 0, 3, 3]]), np.array([0])], {"output_height": 2, "sampling_ratio": 2}),
]


def make(
    operator: str, opset: int, constants: list[Array], attributes: dict[str, Any]
) -> tuple[onnx.ModelProto, Array]:
    feed = SEQUENCES if operator == "LSTM" else X[:, :, :, :1] if operator == "Squeeze" else X
    tensors = [numpy_helper.from_array(value, f"c{at}") for at, value in enumerate(constants)]
    node = helper.make_node(operator, ["x", *(each.name for each in tensors)], ["y"], **attributes)
    ends = helper.make_tensor_value_info("x", 1, feed.shape), helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model), feed


@pytest.mark.parametrize("case", SOUND, ids=lambda case: f"{case[0]}{case[3] or ''}")
def test_operators_of_old_opsets_are_computed_as_onnx_runtime_does(case: Any) -> None:
    operator, opsets, constants, attributes = case
    for opset in opsets:
        model, feed = make(operator, opset, constants, attributes)
        (wanted,) = evaluator.run_graph(model.SerializeToString(), {"x": feed})
        given = reduction.compute_by_reference(model, {"x": feed})["y"]
        assert given.dtype == wanted.dtype
        np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-5, err_msg=f"opset {opset}")


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]}{case[3]}")
def test_a_graph_that_onnx_gets_wrong_is_not_judged_by_it(case: Any) -> None:
    model, feed = make(*case)
    (wanted,) = evaluator.run_graph(model.SerializeToString(), {"x": feed})
    (given,) = reference.open_reference(model).run(None, {"x": feed})
    assert evaluator.largest_difference([wanted], [np.asarray(given)]) > 1e-4, "onnx has mended it"
    with pytest.raises(ModelError, match=f"does not compute {case[0]} .* right"):
        reduction.compute_by_reference(model, {"x": feed})
    assert reduction.choose_compute(model, {"x": feed}, 1e-4) is reduction.compute
    assert f"was not asked, as it does not compute {case[0]}" in describe_unasked(model)


def test_constants_in_a_file_beside_are_not_read_to_tell_whether_onnx_is_right(tmp_path: Path) -> None:
    model, _ = make("Resize", 13, [NONE, np.float32([1, 1, 2, 2])], {"mode": "nearest"})
    assert not reference.find_distrusted(model)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    bare = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert "between pixels" in reference.find_distrusted(bare)


@pytest.mark.parametrize("feed", [np.zeros((1, 2, 6, 5), np.int64), "text", None])
def test_feeds_that_onnx_runtime_does_not_take_are_the_models_error(feed: Any) -> None:
    """It raises errors of its own, and of Python, for a dtype, a text or an input that is missing."""
    model, _ = make("Neg", 13, [], {})
    with pytest.raises(ModelError):
        evaluator.run_graph(model.SerializeToString(), {} if feed is None else {"x": feed})
