"""The reduction of graphs to the nodes that are wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.errors import InvalidGraph, ModelError
from enginesmith.pipeline.frameworks.onnx import traversal
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.tensors import Array, Feeds

RNG = np.random.default_rng(0)


def chain(*nodes: onnx.NodeProto, **weights: Array) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(list(nodes), "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


NODE = helper.make_node
SOUND = (
    NODE("Relu", ["x"], ["a"], name="first"),
    NODE("Mul", ["a", "two"], ["b"], name="second"),
    NODE("Add", ["b", "x"], ["c"], name="third"),
    NODE("Tanh", ["c"], ["y"], name="last"),
)
TWO = {"two": np.float32(2)}
FEEDS = {"x": RNG.standard_normal((3, 4)).astype(np.float32)}


def test_any_nodes_are_a_graph() -> None:
    model = chain(*SOUND, **TWO)
    values = reduction.record_values(model, FEEDS)
    for kept in ([1], [0, 2], [2, 3], [0, 1, 2, 3]):
        part, feeds = reduction.take_nodes(model, kept, values)
        onnx.checker.check_model(part, full_check=True)
        for name, value in reduction.compute(part, feeds).items():
            np.testing.assert_allclose(value, values[name])
    with pytest.raises(ModelError, match="not known"):
        reduction.take_nodes(model, [3], FEEDS)


def test_shrinking_finds_the_nodes_that_fail_together() -> None:
    for culprits in ({41}, {3, 77}, {0, 50, 99}):
        calls = []

        def fails(kept: Any, culprits: set[int] = culprits, calls: list[int] = calls) -> bool:
            calls.append(len(kept))
            return culprits <= set(kept)

        assert set(reduction.shrink(100, fails, seconds=60)) == culprits
        assert len(calls) < 400
    assert reduction.shrink(10, lambda kept: True, seconds=0) == list(range(10))


@pytest.mark.parametrize("renamed", [False, True])
def test_the_first_wrong_node_is_found_by_names_and_without(renamed: bool) -> None:
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    if renamed:
        truth = {name if name in "xy" else f"other_{name}": value for name, value in truth.items()}
    wrong = chain(SOUND[0], NODE("Mul", ["a", "three"], ["b"], name="second"), *SOUND[2:], three=np.float32(3))
    part = find_wrong_part(wrong, truth)
    assert part.suspects[0] == 1
    assert (part.nodes, part.value) == (((1, 2, 3), "y") if renamed else ((1,), "b"))
    assert reduction.slice_between(wrong, [1], ["y"]) == [1, 2, 3]


def find_wrong_part(wrong: onnx.ModelProto, truth: Feeds) -> reduction.WrongPart:
    found = reduction.find_wrong_part(wrong, reduction.record_values(wrong, FEEDS), truth, {"y": truth["y"]})
    assert found is not None
    return found


def test_a_dropped_activation_is_named_although_another_value_equals_its_own() -> None:
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    wrong = chain(NODE("Identity", ["x"], ["a"], name="first"), *SOUND[1:], **TWO)
    assert find_wrong_part(wrong, truth).nodes == (0,)
    assert reduction.find_wrong_part(chain(*SOUND, **TWO), truth, truth, {"y": truth["y"]}) is None


def test_the_node_that_computes_is_named_before_those_that_move_numbers() -> None:
    """A pass computes a product with axes in another order, and gets its factor wrong."""
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    inner = [NODE("Transpose", ["a"], ["t"], perm=[1, 0]), NODE("Mul", ["t", "three"], ["u"])]
    wrong = chain(SOUND[0], *inner, NODE("Transpose", ["u"], ["b"], perm=[1, 0]), *SOUND[2:], three=np.float32(3))
    part = find_wrong_part(wrong, truth)
    assert [wrong.graph.node[at].op_type for at in part.suspects] == ["Mul", "Transpose", "Transpose"]
    assert (part.nodes, part.value) == ((1, 2, 3), "b")

    inner[1].input[1] = "two"
    wrong = chain(SOUND[0], *inner, NODE("Transpose", ["u"], ["b"], perm=[0, 1]), *SOUND[2:], **TWO)
    square = {"x": RNG.standard_normal((4, 4)).astype(np.float32)}
    truth = reduction.record_values(chain(*SOUND, **TWO), square)
    values = reduction.record_values(wrong, square)
    found = reduction.find_wrong_part(wrong, values, truth, {"y": truth["y"]})
    assert found is not None
    assert found.nodes == (3,), "the product is right but for the order of its axes"


def test_nodes_that_compute_a_condition_are_not_named_first() -> None:
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    condition = [
        NODE("ReduceMax", ["x"], ["most"], keepdims=0),
        NODE("ReduceMin", ["x"], ["least"], keepdims=0),
        NODE("Greater", ["most", "least"], ["here"]),
    ]
    chosen = [NODE("Mul", ["a", "three"], ["u"]), NODE("Where", ["here", "u", "a"], ["b"])]
    wrong = chain(SOUND[0], *condition, *chosen, *SOUND[2:], three=np.float32(3))
    part = find_wrong_part(wrong, truth)
    assert part.value == "b"
    assert [wrong.graph.node[at].op_type for at in part.suspects][:2] == ["Mul", "Where"]


def test_values_that_a_pass_scales_and_scales_back_are_not_accused() -> None:
    """The first values that differ by their names are 4 times as large by intent; they are divided by 3."""
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    scaled = [NODE("Mul", ["a", "eight"], ["b"]), NODE("Mul", ["x", "four"], ["z"]), NODE("Add", ["b", "z"], ["c"])]
    back = [NODE("Div", ["c", "three"], ["s"]), NODE("Tanh", ["s"], ["y"])]
    wrong = chain(SOUND[0], *scaled, *back, eight=np.float32(8), four=np.float32(4), three=np.float32(3))
    part = find_wrong_part(wrong, truth)
    assert part.value == "y"
    assert [wrong.graph.node[at].op_type for at in part.suspects] == ["Div", "Tanh", "Mul", "Mul", "Add"]


def test_subgraphs_count_as_read() -> None:
    body = helper.make_graph(
        [NODE("Mul", ["outer", "own"], ["z"])],
        "body",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(1), "own")],
    )
    branch = NODE("If", ["condition"], ["y"], then_branch=body, else_branch=body)
    assert set(traversal.list_reads(branch)) == {"condition", "outer"}


def test_a_graph_with_large_weights_in_another_file_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph), file, save_as_external_data=True, location="weights", size_threshold=0)
    assert reduction.read_whole(file).graph.initializer[0].raw_data
    monkeypatch.setattr(reduction, "_LARGEST_BYTES", 1 << 12)
    with pytest.raises(InvalidGraph, match="too large to be cut up"):
        reduction.read_whole(file)
