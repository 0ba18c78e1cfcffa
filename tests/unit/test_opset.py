"""Conversion of old graphs, once, before anything in them is named or measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import evaluator, model_file
from enginesmith.pipeline.passes.opset import ConvertOpset, convert_opset
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.single_stages import precision_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from graphs import normal

DOUBLE = np.array([1, 1, 2, 2], np.float32)


def save_old(path: Path, body: str, opset: int, **weights: Any) -> Path:
    """Save a graph with nodes without names, as old exporters wrote them."""
    text = f'<ir_version: 5, opset_import: ["": {opset}]> g (float[n, 2, 7, 9] x) => (float[n, 2, h, w] y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, 1, value.shape))
    onnx.save(model, path)
    return path


def artifact(path: Path) -> Artifact:
    return Artifact(kind="onnx", path=path, sha256="this", bytes=0, signature=model_file.signature(path))


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(
    ("operator", "opset", "scales"),
    [
        ("Resize", 10, DOUBLE),
        ("Resize", 10, np.array([1, 1, 0.7, 0.6], np.float32)),
        ("Upsample", 9, np.array([1, 1, 1.5, 2], np.float32)),
        ("Upsample", 7, None),
    ],
)
def test_old_resizing_computes_the_same_in_a_new_opset(
    tmp_path: Path, mode: str, operator: str, opset: int, scales: Any
) -> None:
    if scales is None:
        path = save_old(
            tmp_path / "old.onnx", f'y = {operator} <mode = "{mode}", scales = [1.0, 1.0, 2.0, 3.0]> (x)', 7
        )
    else:
        path = save_old(tmp_path / "old.onnx", f'y = {operator} <mode = "{mode}"> (x, s)', opset, s=scales)
    run_pass(ConvertOpset(opset=13), artifact(path), tmp_path, lambda _: None)
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 13
    feeds = {"x": normal(2, 2, 7, 9)}
    before, after = (evaluator.run_graph(one, feeds) for one in (path, tmp_path / "model.onnx"))
    np.testing.assert_allclose(after[0], before[0], atol=1e-5)


def test_what_cannot_be_converted_is_passed_on_and_refused_by_the_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **how: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr("onnxscript.version_converter.convert_version", refuse)
    given = artifact(save_old(tmp_path / "old.onnx", "y = Relu(x)", 9))
    effect = run_pass(ConvertOpset(opset=11), given, tmp_path, lambda _: None)
    assert effect.notes == ("the graph cannot be converted from opset 9 to 11",)
    assert (tmp_path / "model.onnx").read_bytes() == given.path.read_bytes()
    with pytest.raises(InvalidGraph, match=r"has opset 9, int8-dynamic needs opset 11, and it cannot be converted"):
        run_pass(Precision(precision="int8-dynamic"), given, tmp_path, lambda _: None)


def test_a_graph_that_is_new_enough_stays_as_it_is() -> None:
    model = ir.Model(ir.Graph((), (), nodes=(), opset_imports={"": 21}), ir_version=10)
    assert convert_opset(model, 13)
    assert model.opset_imports[""] == 21


PLANS: list[Callable[[Any], Any]] = [lambda found: plan(found).steps, lambda found: precision_steps(found)[0]]


@pytest.mark.parametrize("steps_of", PLANS)
@pytest.mark.parametrize(
    ("opset", "precision", "least"),
    [(9, "int8", 13), (13, "int8", 0), (13, "int8+fp16", 19), (9, "int8-dynamic", 11), (13, "bf16", 22)],
)
def test_an_old_graph_is_converted_once_before_its_ranges_are_taken(
    tmp_path: Path, steps_of: Callable[[Any], Any], opset: int, precision: str, least: int
) -> None:
    """The step and its check are planned only where a precision needs them; everything else reads what it makes."""
    path = save_old(tmp_path / "old.onnx", "c = Conv(x, v) y = Relu(c)", opset, v=normal(2, 2, 1, 1))
    asked = {"precisions": [precision], "synthetic_calibration": True, "engines": ["onnxruntime"]}
    steps = {step.id: step for step in steps_of(resolve_recipe(make({"model": str(path), **asked})))}
    made = [name for name in steps if name.startswith(("opset", "verify-opset"))]
    assert made == ([f"opset-{least}", f"verify-opset-{least}"] if least else [])
    readers = [name for name in steps if name.startswith(("calibrate", "sensitivity", "search", "precision"))]
    graph = made[0] if made else steps[readers[0]].inputs["model"]
    assert {steps[name].inputs["model"] for name in readers} == {graph}


def test_an_exported_graph_is_converted_where_the_recipe_asks_for_an_older_opset() -> None:
    def ids(**values: Any) -> list[str]:
        return [
            step.id for step in plan(resolve_recipe(make({"model": "digits", "precisions": ["bf16"], **values}))).steps
        ]

    assert "opset-22" not in ids()
    assert "opset-22" in ids(export={"opset": 20})


@pytest.mark.parametrize("quantizers", [["own"], ["nncf"]])
def test_each_maker_of_int8_gets_the_converted_graph(
    tmp_path: Path, quantizers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginesmith.pipeline.planning.planner.require_nncf", lambda: None)
    path = save_old(tmp_path / "old.onnx", "y = Conv(x, v)", 9, v=normal(2, 2, 1, 1))
    asked: dict[str, Any] = {"precisions": ["int8"], "quantization": {"quantizers": quantizers}}
    steps = plan(resolve_recipe(make({"model": str(path), "synthetic_calibration": True, **asked}))).steps
    assert [str(step.inputs["model"]) for step in steps if step.id.startswith("precision-")] == ["opset-13"]


def test_a_graph_that_the_library_cannot_convert_is_left_as_it_was() -> None:
    """It only logs that: the Resize of opset 10 stays one, with two inputs."""
    x, y = (helper.make_tensor_value_info(name, 1, ["n", 1, 4, 4]) for name in "xy")
    nodes = [helper.make_node("Affine", ["x"], ["a"]), helper.make_node("Resize", ["a", "scales"], ["y"])]
    scales = numpy_helper.from_array(np.ones(4, np.float32), "scales")
    graph = helper.make_graph(nodes, "old", [x], [y], [scales])
    model = ir.serde.deserialize_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)]))
    assert not convert_opset(model, 13)
    assert model.opset_imports[""] == 10
