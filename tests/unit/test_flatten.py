"""Files with functions of their own and with sparse weights: they are loaded as one graph that answers the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Effect
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, flatten, traversal, validation
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.tasks.load import LoadOnnx
from enginesmith.pipeline.workflows.inspect import inspect

FLOAT, OPSET = TensorProto.FLOAT, helper.make_opsetid("", 17)
X, Y = (helper.make_tensor_value_info(name, FLOAT, ["batch", 4]) for name in "xy")
FEEDS = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
WEIGHT = np.arange(16, dtype=np.float32).reshape(4, 4)


def value(name: str, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, None if dtype == FLOAT else [])


def called(operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, outputs, domain="own", **attributes)


def function(
    name: str, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[onnx.NodeProto], **more: Any
) -> Any:
    imports = more.pop("imports", [OPSET, helper.make_opsetid("own", 1)])
    return helper.make_function("own", name, inputs, outputs, nodes, imports, **more)


def save(
    folder: Path, nodes: Sequence[onnx.NodeProto], functions: Sequence[Any] = (), weights: Any = (), **external: Any
) -> Path:
    stored = [numpy_helper.from_array(array, name) for name, array in dict(weights).items()]
    graph = helper.make_graph(nodes, "g", [X], [Y], stored)
    imports = [OPSET, helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)
    onnx.save(model, folder / "given.onnx", **external)
    return folder / "given.onnx"


def load(path: Path, out: Path) -> tuple[Effect, onnx.ModelProto]:
    out.mkdir()
    effect = LoadOnnx(source=resolve(str(path))).run({}, out, lambda text: None)
    assert [*out.glob("tmp*")] == []
    return effect, onnx.load(out / effect.file)


def _attributes() -> tuple[list[onnx.NodeProto], list[Any]]:
    leaky = helper.make_node("LeakyRelu", ["a"], ["b"])
    leaky.attribute.append(AttributeProto(name="alpha", ref_attr_name="slope", type=AttributeProto.FLOAT))
    inner = function("Inner", ["a"], ["b"], [leaky], attribute_protos=[helper.make_attribute("slope", 0.25)])
    call = called("Inner", ["a"], ["b"])
    call.attribute.append(AttributeProto(name="slope", ref_attr_name="given", type=AttributeProto.FLOAT))
    outer = function("Outer", ["a"], ["b"], [call], attributes=["given"])
    nodes = [called("Inner", ["x"], ["s"]), called("Outer", ["s"], ["t"], given=0.5), called("Outer", ["t"], ["y"])]
    return nodes, [inner, outer]


def _names() -> tuple[list[onnx.NodeProto], list[Any]]:
    inner = [helper.make_node("Relu", ["x"], ["t"]), helper.make_node("Sub", ["t", "x"], ["y"])]
    nodes = [called("F", ["x"], ["t"]), called("F", ["t"], ["F"]), helper.make_node("MatMul", ["F", "w"], ["y"])]
    return nodes, [function("F", ["x"], ["y"], inner)]


def _bodies() -> tuple[list[onnx.NodeProto], list[Any]]:
    """A loop in a function, whose values are called like those outside, and calls in the branches of a choice."""
    ends = [value("i", TensorProto.INT64), value("c", TensorProto.BOOL), value("x")]
    steps = [helper.make_node("Add", ["x", "x"], ["t"]), helper.make_node("Identity", ["c"], ["c2"])]
    body = helper.make_graph(steps, "body", ends, [value("c2", TensorProto.BOOL), value("t")])
    twice = [
        helper.make_node("Constant", [], ["n"], value_int=2),
        helper.make_node("Loop", ["n", "", "a"], ["b"], body=body),
    ]
    branches = {
        f"{side}_branch": helper.make_graph([called("F", ["t"], [side])], side, [], [value(side)])
        for side in ("then", "else")
    }
    nodes = [
        called("F", ["x"], ["t"]),
        helper.make_node("ReduceSum", ["t"], ["i"], keepdims=0),
        helper.make_node("Cast", ["i"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], **branches),
    ]
    return nodes, [function("F", ["a"], ["b"], twice)]


def _names_in_branches() -> tuple[list[onnx.NodeProto], list[Any]]:
    """Branches have a value that is called like one in the function, which is called outside."""
    inner = [helper.make_node("Neg", ["a"], ["t"]), helper.make_node("Relu", ["t"], ["b"])]
    branches = {
        f"{side}_branch": helper.make_graph(
            [helper.make_node("Exp", ["h"], ["t"]), helper.make_node("Neg", ["t"], [side])], side, [], [value(side)]
        )
        for side in ("then", "else")
    }
    nodes = [
        called("F", ["x"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], **branches),
    ]
    return nodes, [function("F", ["a"], ["b"], inner)]


def _older_opset() -> tuple[list[onnx.NodeProto], list[Any]]:
    body = [helper.make_node("Exp", ["a"], ["b"])]
    return [called("F", ["x"], ["y"])], [function("F", ["a"], ["b"], body, imports=[helper.make_opsetid("", 13)])]


@pytest.mark.parametrize("case", [_attributes, _names, _names_in_branches, _bodies, _older_opset])
@pytest.mark.parametrize("external", [False, True])
def test_functions_are_inlined_on_loading(tmp_path: Path, case: Any, external: bool) -> None:
    nodes, functions = case()
    more = {"save_as_external_data": True, "location": "weights", "size_threshold": 0} if external else {}
    path = save(tmp_path, nodes, functions, {"w": WEIGHT}, **more)
    effect, model = load(path, tmp_path / "out")
    assert not model.functions
    assert {node.domain for node in traversal.nodes(model)} == {""}
    assert [entry.domain for entry in model.opset_import] == [""]
    assert effect.notes == (f"functions were inlined: {', '.join(each.name for each in functions)}",)
    validation.check(tmp_path / "out" / effect.file)
    expected, actual = (evaluator.run_graph(file, FEEDS)[0] for file in (path, tmp_path / "out" / effect.file))
    np.testing.assert_array_equal(actual, expected)


def test_a_graph_that_answers_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: Any) -> list[str]:
        names = inline(model)
        model.graph[0].op_type = "Neg"
        return names

    inline = flatten.inline_functions
    monkeypatch.setattr(flatten, "inline_functions", spoil)
    nodes, functions = _older_opset()
    with pytest.raises(ModelError, match="answers something else"):
        load(save(tmp_path, nodes, functions), tmp_path / "out")


def test_inspect_counts_products_and_weights_that_functions_have(tmp_path: Path) -> None:
    body = [helper.make_node("MatMul", ["a", "k"], ["b"])]
    path = save(tmp_path, [called("F", ["x", "w"], ["y"])], [function("F", ["a", "k"], ["b"], body)], {"w": WEIGHT})
    facts = inspect(path)
    assert facts["precision"]["products"] == "1 fp32"
    assert facts["sparsity"]["2:4"] == "0 of 1 weights"
    assert facts["operators"] == {"F": 1, "MatMul": 1}


@pytest.mark.parametrize("places", [[1, 7, 10], [[0, 1], [1, 3], [2, 2]]])
@pytest.mark.parametrize("constant", [False, True])
def test_sparse_weights_are_made_dense_on_loading(tmp_path: Path, places: Any, constant: bool) -> None:
    path = _save_sparse(tmp_path, [4, 4], places, constant=constant)
    validation.check(path)
    effect, model = load(path, tmp_path / "out")
    assert effect.notes == ("sparse weights were made dense: w",)
    assert not model.graph.sparse_initializer
    dense = np.zeros((4, 4), np.float32)
    dense[[0, 1, 2], [1, 3, 2]] = [1.5, -2, 0.5]
    (answer,) = evaluator.run_graph(tmp_path / "out" / effect.file, FEEDS)
    np.testing.assert_allclose(answer, FEEDS["x"] @ dense, rtol=1e-6)
    assert edit.load(tmp_path / "out" / effect.file).graph.outputs[0].name == "y"
    assert inspect(path)["precision"]["products"] == "1 fp32"


def test_large_sparse_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"w of .* sparse weights that take 128 MiB"):
        load(_save_sparse(tmp_path, [4, 8 << 20], [1, 7, 10]), tmp_path / "out")


def _save_sparse(folder: Path, dims: list[int], places: Any, *, constant: bool = False) -> Path:
    values = numpy_helper.from_array(np.array([1.5, -2, 0.5], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(places, np.int64), "places"), dims)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if constant:
        nodes.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    result = helper.make_tensor_value_info("y", FLOAT, ["batch", dims[1]])
    graph = helper.make_graph(nodes, "g", [X], [result], sparse_initializer=[] if constant else [sparse])
    onnx.save(helper.make_model(graph, opset_imports=[OPSET], ir_version=10), folder / "given.onnx")
    return folder / "given.onnx"
