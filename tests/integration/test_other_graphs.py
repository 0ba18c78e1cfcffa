"""Options that make another graph where a step of the plan, or the engine, gets the first one wrong."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
from onnx import numpy_helper

from enginesmith.calibration.ranges import METHODS, Ranges, TensorRange
from enginesmith.pipeline.artifact import Artifact, file_digest
from enginesmith.pipeline.engines import engine_class, simulation
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module, saved
from enginesmith.pipeline.measure.prosecution.finding import Finding
from enginesmith.pipeline.measure.prosecution.locate import locate_fault
from enginesmith.pipeline.measure.prosecution.search import MODEL, Disagreement
from enginesmith.pipeline.measure.prosecution.stages import Stage, Stages
from enginesmith.pipeline.passes.export.export import Export
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.simplify import Simplify
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.prosecute import list_other_graphs
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import AddedOption
from graphs import NOWHERE, node, normal, save_graph

FEEDS = {"x": normal(8, 16)}
NET = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()), {"x": torch.ones(8, 16)}
"""
RECIPE = make({"model": "digits"}, listed=True)


def describe(path: Path, kind: Any = "onnx") -> Artifact:
    signature = model_file.signature(path) if kind == "onnx" else None
    return Artifact(kind=kind, path=path, sha256=file_digest(path), bytes=path.stat().st_size, signature=signature)


def answer_by(path: Path) -> Callable[[Feeds], Any]:
    def answer(feeds: Feeds) -> Any:
        with simulation().load(describe(path), Device()) as session:
            return session.run(feeds)

    return answer


class Quantized(NamedTuple):
    """A float graph of three products, and how it is quantized."""

    given: Artifact
    task: Transform
    inputs: dict[str, Artifact]


@pytest.fixture
def quantized(tmp_path: Path) -> Quantized:
    """The ranges cut off nearly all that the second product takes."""
    products = [node("MatMul", "x one", "a"), node("MatMul", "b two", "c"), node("MatMul", "d three", "y")]
    nodes = [products[0], node("Relu", "a", "b"), products[1], node("Relu", "c", "d"), products[2]]
    weights = {name: normal(16, 16, seed=at) / 4 for at, name in enumerate(("one", "two", "three"))}
    path = save_graph(tmp_path / "float", nodes, weights, x=("batch", 16))
    given = describe(path)
    largest = {"x": 4.0, "a": 4.0, "b": 0.02, "c": 4.0, "d": 4.0, "y": 4.0}
    tensors = {
        name: TensorRange(minimum=-value, maximum=value, count=1, amax=dict.fromkeys(METHODS, value))
        for name, value in largest.items()
    }
    ranges, assignment = tmp_path / "ranges.json", tmp_path / "assignment.json"
    ranges.write_text(Ranges(model_sha256=given.sha256, provenance=NOWHERE, tensors=tensors).model_dump_json())
    assignment.write_text(json.dumps([{"group": one.name, "precision": "int8"} for one in products]))
    records = {"ranges": describe(ranges, "record"), "assignment": describe(assignment, "record")}
    return Quantized(given, Transform(step=Precision(precision="int8")), {"model": given, **records})


def locate(stages: list[Stage], folder: Path, engine: Any = None) -> Finding:
    shown = Disagreement(
        walk="samples",
        note="",
        witness=MODEL,
        reason="wrong",
        attempts=1,
        feeds=FEEDS,
        expected=stages[0].answer(FEEDS),
        found=None,
    )
    return locate_fault(Stages(stages, engine or simulation(), Device(), 30), shown, folder)


def test_a_node_that_its_ranges_cut_is_kept_in_float(quantized: Quantized, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    effect = quantized.task.run(quantized.inputs, out, lambda _: None)
    given, made = answer_by(quantized.given.path), answer_by(out / effect.file)
    others = partial(list_other_graphs, quantized.task, quantized.inputs)
    stages = [
        Stage("model", given, "fp32"),
        Stage("simplify", given, "fp32", quantized.given.path),
        Stage("precision", made, "int8", out / effect.file, other_graphs=others),
        Stage("engine", made, "int8"),
    ]
    finding = locate(stages, tmp_path / "finding")
    assert (finding.guilty, finding.workaround) == ("precision", "--keep MatMul_c")
    assert finding.option
    assert RECIPE.with_option(finding.option).quantization.keep == ("MatMul_c",)


def test_a_node_that_the_engine_gets_wrong_in_int8_is_kept_in_float(quantized: Quantized, tmp_path: Path) -> None:
    """An engine that takes the weights of one quantized product the wrong way round."""
    kind: Any = engine_class("onnxruntime")

    class Wrong(kind):  # type: ignore[misc]
        def build(self, request: Any) -> Any:
            model = onnx.load(request.artifact.path)
            makers = {name: one for one in model.graph.node for name in one.output}
            for one in model.graph.node:
                maker = makers.get(one.input[1]) if one.op_type == "MatMul" else None
                if maker is not None and "three" in one.input[1]:
                    weights = next(each for each in model.graph.initializer if each.name == maker.input[0])
                    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights).T.copy(), weights.name))
            onnx.save(model, request.artifact.path)
            return kind.build(self, request)

        def variations(self) -> Any:
            yield from ()

    out = tmp_path / "out"
    out.mkdir()
    effect = quantized.task.run(quantized.inputs, out, lambda _: None)
    made = answer_by(out / effect.file)
    others = partial(list_other_graphs, quantized.task, quantized.inputs)
    stages = [
        Stage("model", made, "fp32"),
        Stage("precision", made, "int8", out / effect.file, other_graphs=others),
        Stage("engine", lambda feeds: {"y": made(feeds)["y"] + 9}, "int8"),
    ]
    finding = locate(stages, tmp_path / "finding", Wrong())
    assert (finding.guilty, finding.workaround) == ("engine", "--keep MatMul_y")


@pytest.mark.thorough
def test_a_graph_that_an_exporter_made_wrong_is_made_by_the_other_one(tmp_path: Path) -> None:
    """A graph in which an activation was lost."""
    (tmp_path / "net.py").write_text(NET)
    source, options = resolve(f"{tmp_path}/net.py:build"), module.LoadOptions()
    loaded = module.load(source, options)
    saved.save(loaded, source, options, tmp_path)
    given = Artifact(kind="torch", path=tmp_path / saved.RECORD, sha256="", bytes=0, signature=loaded.signature)
    task, out = Transform(step=Export(attention="decomposed")), tmp_path / "out"
    out.mkdir()
    effect = task.run({"model": given}, out, lambda _: None)
    wrong = onnx.load(out / effect.file)
    (activation,) = (one for one in wrong.graph.node if one.op_type == "Relu")
    activation.op_type = "Identity"
    onnx.save(wrong, out / effect.file)
    with engine_class("eager")().load(given, Device()) as eager:
        made = answer_by(out / effect.file)
        others = partial(list_other_graphs, task, {"model": given})
        stages = [
            Stage("model", eager.run, "fp32"),
            Stage("export", made, "fp32", out / effect.file, other_graphs=others),
            Stage("engine", made, "fp32"),
        ]
        finding = locate(stages, tmp_path / "finding")
    assert (finding.guilty, finding.workaround) == ("export", "--exporter torchscript")
    assert finding.option
    added = RECIPE.with_option(finding.option)
    assert (added.export.exporter, added.without_option(finding.option)) == ("torchscript", RECIPE)


@pytest.mark.parametrize(
    ("option", "part", "value"),
    [
        (AddedOption(field="simplify", value=False, instead_of=True, words="--no-simplify"), "simplify", False),
        (AddedOption(field="export.opset", value=20, instead_of=23, words="--opset 20"), "export", 20),
    ],
)
def test_an_option_takes_the_place_of_another_and_gives_it_back(option: AddedOption, part: str, value: Any) -> None:
    added = RECIPE.with_option(option)
    assert (getattr(added, part) if part == "simplify" else added.export.opset) == value
    assert added.with_option(option) == added
    assert added.without_option(option) == RECIPE


def test_a_graph_that_simplifying_made_wrong_is_used_as_it_was(quantized: Quantized, tmp_path: Path) -> None:
    wrong = onnx.load(quantized.given.path)
    wrong.graph.node[1].op_type = "Neg"
    onnx.save(wrong, tmp_path / "wrong.onnx")
    given = answer_by(quantized.given.path)
    others = partial(list_other_graphs, Transform(step=Simplify()), {"model": quantized.given})
    stages = [
        Stage("model", given, "fp32"),
        Stage("export", given, "fp32", quantized.given.path),
        Stage("simplify", answer_by(tmp_path / "wrong.onnx"), "fp32", tmp_path / "wrong.onnx", other_graphs=others),
        Stage("engine", given, "fp32"),
    ]
    finding = locate(stages, tmp_path / "finding")
    assert (finding.guilty, finding.workaround) == ("simplify", "--no-simplify")
