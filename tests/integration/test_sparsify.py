"""Sparse weights through the command line, on the trained digits net: made, told how far off, kept, built."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from enginesmith.pipeline.engines.tensorrt import versions
from enginesmith.pipeline.passes.sparsify import check

Cli = Any

NETS = Path(__file__).parents[1] / "data" / "nets.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparsify")


def test_a_module_becomes_a_2_4_graph_and_stays_one(cli: Cli, folder: Path) -> None:
    out = folder / "sparse.onnx"
    done = cli("sparsify", "digits", "-o", out, "--sparsity", "2:4", "--protect", "model.fc", "--json")
    assert done.code == 0, done.text
    found = json.loads(done.stdout)
    assert "2:4 in 14 of 16 weights" in found["summary"]
    assert "left dense: model.fc.weight: it is protected" in found["summary"]
    assert [entry["step"] for entry in found["history"]][-1] == "sparsify"
    assert all(entry["sqnr_db"] < 60 and entry["passed"] for entry in found["fidelity"])  # told, and not judged
    facts = check.sparse_weights(out)
    assert sum(one.two_of_four for one in facts) == 14
    for tensor in onnx.load(out).graph.initializer:
        if tensor.name.endswith("conv2.weight"):
            assert (np.count_nonzero(numpy_helper.to_array(tensor).reshape(-1, 4, 9), axis=1) <= 2).all()
    lower = folder / "int8.onnx"
    done = cli("precision", out, "-o", lower, "--precision", "int8", "--calibration", "digits", "--search-steps", "1")
    assert done.code == 0, done.text
    assert "2:4 held in 14 of 14 weights" in done.stdout
    assert check.follow(out, lower).lost == ()


@pytest.mark.thorough
def test_how_far_the_answers_may_be(cli: Cli, folder: Path) -> None:
    dense = folder / "dense.onnx"
    assert cli("export", "digits", "-o", dense).code == 0
    done = cli("sparsify", dense, "-o", folder / "far.onnx", "--sparsity", "unstructured=0.9", "--min-sqnr", "40")
    assert done.code == 1
    assert "the result differs from the original" in done.text
    assert "40 dB are asked for" in done.text
    assert "ask for less: --min-sqnr" in done.text
    assert not (folder / "far.onnx").exists()
    near = ("--sparsity", "unstructured=0.05", "--per-layer", "--min-sqnr", "20")
    done = cli("sparsify", dense, "-o", folder / "near.onnx", *near)
    assert done.code == 0, done.text
    assert "unstructured=0.05 in 16 of 16 weights, 5.0%" in done.stdout
    assert cli("inspect", folder / "near.onnx").stdout.count("unstructured=0.05") == 1


@pytest.mark.thorough
def test_weights_that_are_left_are_trained_and_zeros_stay(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "trained.onnx"
    trained = ("--recover", "distil", "--recover-time", "3s", "--data", "digits", "--metric", "top1")
    done = cli("sparsify", "digits", "-o", out, *trained, "--json")
    assert done.code == 0, done.text
    found = json.loads(done.stdout)
    assert [entry["step"] for entry in found["history"]][-2:] == ["sparsify", "recover-sparsify"]
    assert "2:4 in 15 of 16 weights" in found["summary"]
    assert "samples held out" in found["summary"]
    assert sum(one.two_of_four for one in check.sparse_weights(out)) == 15
    refused = cli("sparsify", f"{NETS}:mlp", "-o", tmp_path / "mlp.onnx", "--recover", "distil")
    assert refused.code == 2
    assert "recovery needs data, and there is none" in refused.text
    assert "--data DATA" in refused.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sparsity", "1:2"), "write 2:4, or unstructured=0.5"),
        (("--sparsity", "unstructured=1"), "not at least 0 and less than 1"),
        (("--protect", "model.layer1.0.conv9"), "did you mean model.layer1.0.conv"),
        (("--per-layer",), "a threshold for each layer has no effect"),
        (("--protect", "*"), "all 16 weights of the graph are protected"),
        (("--recover-time", "5s"), "--recover-time has no effect without --recover"),
    ],
)
def test_what_makes_no_sense_is_said(options: tuple[str, ...], words: str, cli: Cli, tmp_path: Path) -> None:
    done = cli("sparsify", "digits", "-o", tmp_path / "m.onnx", *options)
    assert done.code == 2
    assert words in done.text
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.thorough
@pytest.mark.skipif(not versions.importable("tensorrt_rtx").ok, reason="tensorrt-rtx is not installed")
@pytest.mark.parametrize(("precision", "stored"), [("fp16", np.float16), ("int8", np.int8)])
def test_tensorrt_gets_the_same_2_4_zeros(precision: str, stored: type[np.generic], cli: Cli, folder: Path) -> None:
    sparse, lower, engine = (folder / f"{precision}{suffix}" for suffix in (".onnx", "-lower.onnx", ".engine"))
    assert cli("sparsify", f"{NETS}:products", "-o", sparse).code == 0
    asked = ("--engine", "tensorrt_rtx", "--synthetic-calibration", "--min-sqnr", "10")
    done = cli("precision", sparse, "-o", lower, "--precision", precision, *asked)
    assert done.code == 0, done.text
    assert "2:4 held in 3 of 3 weights" in done.stdout
    before, after = product_weights(sparse), product_weights(lower)
    assert list(before) == list(after) == ["Conv", "MatMul", "Gemm"]
    for operator, weight in before.items():
        assert (np.count_nonzero(weight, axis=1) == 2).all()
        assert after[operator].dtype == stored
        bits = after[operator].view(np.uint8 if precision == "int8" else np.uint16)
        assert not bits[weight == 0].any(), operator
    done = cli("build", lower, "-o", engine, "--target", "sm86", "--json")
    assert done.code == 0, done.text
    found = json.loads(done.stdout)["manifest"]
    assert found["options"]["sparse_weights"]
    assert "SPARSE_WEIGHTS is set: 3 of 3 weights of the graph are 2:4" in found["notes"]
    assert any("--sparse-weights has no effect in tensorrt_rtx" in note for note in found["notes"])


def product_weights(path: Path) -> dict[str, Any]:
    """By operator, its weight with every four of the terms that are summed over along axis 1."""
    model = onnx.load(path)
    makers = {name: node for node in model.graph.node for name in node.output}
    stored = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type in ("Conv", "MatMul", "Gemm"):
            name = node.input[1]
            while name not in stored:
                name = makers[name].input[0]
            transposed = any(one.name == "transB" and one.i for one in node.attribute)
            axis = 1 if node.op_type == "Conv" or transposed else 0
            found[node.op_type] = np.ascontiguousarray(np.moveaxis(stored[name], axis, -1)).reshape(-1, 4)
    return found
