"""Prosecution from the command line: a sound engine, faults in a graph, and a fault of the runtime's own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from published_bugs.case import graph

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from enginesmith.pipeline.execution.settings import Settings
    from enginesmith.pipeline.recipe import make
    from enginesmith.pipeline.workflows import stages

    file = tmp_path_factory.mktemp("prosecuted") / "digits.onnx"
    stages.export(make({"model": "digits"}), file, Settings())
    return file


def prosecute(cli: Cli, *words: object, out: Path, time: str = "1s") -> dict[str, Any]:
    """``time`` is only used up where nothing is found."""
    done = cli("prosecute", *words, "--time", time, "-o", out, "--json", "--quiet")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["evidence"] == (str(out) if found["prosecution"]["finding"] else None)
    assert done.code == (1 if found["prosecution"]["finding"] else 0), done.text
    return found["prosecution"]  # type: ignore[no-any-return]


def test_a_sound_file_is_not_accused(exported: Path, cli: Cli, tmp_path: Path) -> None:
    made = prosecute(cli, "digits", exported, out=tmp_path / "finding")
    assert made["finding"] is None
    assert made["attempts"] >= 9
    assert not (tmp_path / "finding").exists()


@pytest.mark.parametrize("fault", ["bias", "batch"])
def test_a_fault_is_found_named_and_shown(exported: Path, cli: Cli, tmp_path: Path, fault: str) -> None:
    model = onnx.load(exported)
    node = next(node for node in model.graph.node if node.op_type == "Gemm")
    if fault == "bias":
        bias = next(tensor for tensor in model.graph.initializer if tensor.name == node.input[2])
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + np.float32(0.01), bias.name))
    else:  # what it gives is another for batches of five
        name, node.output[0] = node.output[0], "right"
        for key, value in {"first": np.int64(0), "five": np.int64(5), "factor": np.float32(1.01)}.items():
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), key))
        model.graph.node.extend(
            [
                helper.make_node("Shape", [model.graph.input[0].name], ["sizes"]),
                helper.make_node("Gather", ["sizes", "first"], ["batch"]),
                helper.make_node("Equal", ["batch", "five"], ["here"]),
                helper.make_node("Mul", ["right", "factor"], ["wrong"]),
                helper.make_node("Where", ["here", "wrong", "right"], [name]),
            ]
        )
    onnx.save(model, tmp_path / "wrong.onnx")
    finding = prosecute(cli, "digits", tmp_path / "wrong.onnx", out=tmp_path / "finding", time="30s")["finding"]
    assert finding["guilty"] == "graph"
    assert finding["nodes"][0].split()[0] == ("Gemm" if fault == "bias" else "Mul"), "not Shape, which is right"
    assert len(finding["nodes"]) == (1 if fault == "bias" else 5)
    shown = subprocess.run([sys.executable, "-I", tmp_path / "finding" / "repro.py"], capture_output=True, check=False)
    assert shown.returncode == 1, shown.stderr
    issue = (tmp_path / "finding" / "issue.md").read_text()
    assert issue.startswith(
        f"# the ONNX file, which pytorch {torch.__version__} made: wrong result of {finding['nodes'][0]}"
    )
    assert f"The expected values are from eager PyTorch {version('torch')}.\n" in issue  # it may lack +cu130
    assert "numbers differ" in issue
    assert issue.count("- numpy: ") == 1
    assert json.loads((tmp_path / "finding" / "finding.json").read_text()) == finding


def test_a_variant_of_a_run_is_prosecuted(digits_run: Path, cli: Cli, tmp_path: Path) -> None:
    made = prosecute(cli, digits_run, "onnxruntime-fp32", out=tmp_path / "finding")
    assert made["finding"] is None
    assert {"samples", "sizes", "values", "mutations"} <= made["walks"].keys()
    refused = cli("prosecute", digits_run, "openvino-fp8")
    assert refused.code == 2
    assert "onnxruntime-fp32" in refused.stderr


def test_an_engine_is_not_accused_of_a_change_of_its_model(digits_run: Path, cli: Cli, tmp_path: Path) -> None:
    """A script that takes exit code 1 for a fault is not misled either."""
    run = json.loads((digits_run / "run.json").read_text())
    run["model"] |= {"sha256": "of another one", "content": "of another one"}
    shutil.copytree(digits_run, tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    words = ("prosecute", tmp_path / "run", "onnxruntime-fp32", "--time", "1s", "-o", tmp_path / "finding", "--quiet")
    refused = cli(*words)
    assert refused.code == 2, refused.text
    assert f"digits loads as another model than that of {tmp_path / 'run'}: it has changed since then" in refused.stderr
    assert "bring it back as it was, or run optimize again" in refused.stderr
    assert not (tmp_path / "finding").exists()


def test_only_an_earlier_finding_is_replaced(exported: Path, cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "notes.txt").write_text("kept")
    for out in (own, own / "notes.txt"):
        refused = cli("prosecute", "digits", exported, "--time", "1s", "-o", out, "--quiet")
        assert (refused.code, "is no earlier finding" in refused.stderr) == (2, True)
    assert (own / "notes.txt").read_text() == "kept"
    below = cli("prosecute", "digits", exported, "--time", "1s", "-o", own / "notes.txt" / "finding", "--quiet")
    assert (below.code, "notes.txt is no folder" in below.stderr) == (2, True)
    earlier = tmp_path / "finding"
    earlier.mkdir()
    (earlier / "finding.json").write_text("{}")
    assert prosecute(cli, "digits", exported, out=earlier)["finding"] is None
    assert not earlier.exists()


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_file_with_other_names_is_refused(exported: Path, cli: Cli, tmp_path: Path, side: str) -> None:
    model = onnx.load(exported)
    value = getattr(model.graph, side)[0]
    old, value.name = value.name, "other"
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["other" if name == old else name for name in names]
    onnx.save(model, tmp_path / "renamed.onnx")
    refused = cli("prosecute", "digits", tmp_path / "renamed.onnx", "--time", "1s", "-o", tmp_path / "f", "--quiet")
    assert (refused.code, f"the {side}s of the engine are other" in refused.stderr) == (2, True), refused.text


def test_what_cannot_be_prosecuted_is_refused(cli: Cli) -> None:
    alone = cli("prosecute", "digits")
    assert (alone.code, "no engine is named" in alone.stderr) == (2, True)


def test_an_engine_that_is_wrong_is_reduced_to_its_nodes(tmp_path: Path) -> None:
    """An engine that computes a Tanh as its argument, as a fusion might."""
    from enginesmith.pipeline.engines import engine_class
    from enginesmith.pipeline.engines.base import BuildRequest, Engine
    from enginesmith.pipeline.frameworks.onnx import model_file
    from enginesmith.pipeline.measure.prosecution import reduction
    from enginesmith.pipeline.measure.prosecution.locate import locate_fault
    from enginesmith.pipeline.measure.prosecution.search import MODEL, Disagreement
    from enginesmith.pipeline.measure.prosecution.stages import Stage, Stages
    from enginesmith.pipeline.system.device import Device
    from enginesmith.pipeline.units import AddedOption

    kind: Any = engine_class("onnxruntime")
    without_tanh = AddedOption(field="without", value="tanh", words="--without tanh")

    class Wrong(kind):  # type: ignore[misc]
        tanh: bool = True

        def build(self, request: BuildRequest) -> Any:
            model = onnx.load(request.artifact.path)
            for node in model.graph.node if self.tanh else ():
                node.op_type = "Identity" if node.op_type == "Tanh" else node.op_type
            onnx.save(model, request.artifact.path)
            return kind.build(self, request)

        def variations(self) -> Any:
            yield AddedOption(field="words", value="useless", words="a useless option"), self
            yield without_tanh, self.model_copy(update={"tanh": False})

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    names = ["x", *(f"v{index}" for index in range(9)), "y"]
    operators = ["Relu", "Neg", "Abs", "Neg", "Tanh", "Relu", "Neg", "Abs", "Neg", "Softplus"]
    nodes = [
        helper.make_node(operator, [names[index]], [names[index + 1]], name=operator + str(index))
        for index, operator in enumerate(operators)
    ]
    nodes[5].op_type = "Neg"
    model = helper.make_model(
        helper.make_graph(nodes, "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, tmp_path / "model.onnx")
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}

    def right(given: Any) -> dict[str, Any]:
        return reduction.compute(model, given)

    engine: Engine = Wrong()
    stages = [
        Stage("model", right, "fp32"),
        Stage("export", right, "fp32", tmp_path / "model.onnx"),
        Stage("engine", lambda given: {"y": right(given)["y"] + 1}, "fp32"),
    ]
    shown = Disagreement(
        walk="samples",
        note="",
        witness=MODEL,
        reason="wrong",
        attempts=1,
        feeds=feeds,
        expected=right(feeds),
        found=None,
    )
    assert model_file.signature(tmp_path / "model.onnx")
    finding = locate_fault(Stages(stages, engine, Device(), 30), shown, tmp_path / "finding")
    assert (finding.guilty, finding.nodes, finding.whole) == ("engine", ("Tanh Tanh4",), 10)
    assert (finding.workaround, finding.option) == ("--without tanh", without_tanh)
    assert finding.elsewhere == {"standard normal numbers": True, "zeros": False, "ones": True}
    assert finding.reference.endswith("without optimization")


@pytest.mark.thorough
def test_a_workaround_is_added_to_the_recipe(cli: Cli, tmp_path: Path) -> None:
    """ONNX Runtime's DivMulFusion makes 1 / x * c one division, which does not overflow where 1 / x does."""
    model = graph(
        "(float[batch,8] x) => (float[batch,8] y)"
        " <float one = {1.0}, float c = {2e-38}, float low = {-1000.0}, float high = {1000.0}>"
        " { r = Div(one, x) s = Mul(r, c) b = Clip(s, low, high) y = Add(b, x) }"
    )
    onnx.save(model, tmp_path / "net.onnx")
    out = tmp_path / "run"
    words = ("optimize", tmp_path / "net.onnx", "--engine", "onnxruntime", "--batch", "1", "--no-memory")
    words = (*words, "--prosecute", "2s", "--out", out, "--quiet")
    done = cli(*words)
    assert done.code == 0, done.text
    sentence = "--ort-disable DivMulFusion was added: without it, onnxruntime-fp32 is wrong on values (x: denormal)"
    assert sentence in done.stdout
    assert sentence in (out / "report.md").read_text()
    run = json.loads((out / "run.json").read_text())
    (variant,) = run["variants"]
    assert run["winner"]
    assert run["recipe"]["onnxruntime"]["disabled_optimizers"] == ["DivMulFusion"]
    assert (variant["status"], variant["prosecution"]["finding"]) == ("measured", None)
    assert variant["prosecution"]["walks"]["values"] > 12, "denormals were tried again"

    assert "nothing is left to do" in cli("resume", out).text
    again = cli(*words)
    assert (again.code, sentence in again.stdout) == (0, True), again.text
    assert json.loads((out / "run.json").read_text())["created"] == run["created"]
    other = cli(*words, "--seed", "1")
    assert (other.code, "another recipe" in other.stderr) == (2, True), other.text
