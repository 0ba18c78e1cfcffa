"""A detector with its NonMaxSuppression in the graph: from the command line to a bundle, in int8."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.frameworks.rounding import FINE, Draw, make_records

Cli = Callable[..., Any]
EDGE, CELLS, CLASSES = 16, 64, 3
RNG = np.random.default_rng(3)


def write_detector(path: Path) -> None:
    """Two convolutions; boxes by corners and scores of 64 cells; what NonMaxSuppression leaves of them."""
    weights = {
        "first": 0.3 * RNG.standard_normal((16, 3, 3, 3)),
        "second": 0.2 * RNG.standard_normal((4 + CLASSES, 16, 3, 3)),
        "cells": np.array([0, 4 + CLASSES, CELLS]),
        "parts": np.array([4, CLASSES]),
        "most": np.array(10),
        "overlap": np.array(0.5),
        "least": np.array(0.6),
        "batch_and_box": np.array([0, 2]),
    }
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "first"], ["a"], pads=[1] * 4, strides=[2, 2]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "second"], ["c"], pads=[1] * 4),
        node("Reshape", ["c", "cells"], ["found"]),
        node("Split", ["found", "parts"], ["corners", "logits"], axis=1),
        node("Sigmoid", ["logits"], ["probabilities"]),
        node("Transpose", ["corners"], ["all_boxes"], perm=[0, 2, 1]),
        node("NonMaxSuppression", ["all_boxes", "probabilities", "most", "overlap", "least"], ["chosen"]),
        node("Gather", ["chosen", "batch_and_box"], ["places"], axis=1),
        node("GatherND", ["all_boxes", "places"], ["boxes"]),
        node("GatherND", ["probabilities", "chosen"], ["scores"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, EDGE, EDGE])
    outputs = [
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ["n", 4]),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("chosen", TensorProto.INT64, ["n", 3]),
    ]
    constants = [
        numpy_helper.from_array(value.astype(np.float32 if value.dtype.kind == "f" else np.int64), name)
        for name, value in weights.items()
    ]
    graph = helper.make_graph(nodes, "detector", [image], outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    write_detector(tmp_path / "detector.onnx")
    np.savez(tmp_path / "images.npz", image=RNG.standard_normal((48, 3, EDGE, EDGE)).astype(np.float32))
    return tmp_path


@pytest.mark.thorough
def test_a_detector_is_quantized_as_a_whole_and_packaged(detector: Path, cli: Cli) -> None:
    run = detector / "run"
    done = cli(
        *("optimize", detector / "detector.onnx", "--data", detector / "images.npz", "--precision", "int8"),
        *("--engine", "onnxruntime", "--measure-time", "200ms", "--no-memory", "--out", run, "--quiet"),
    )
    assert done.code == 0, done.text
    document = json.loads((run / "run.json").read_text())
    assert document["model"]["signature"]["unordered"] == {"boxes": "rows", "scores": "rows", "chosen": "positions"}
    (int8,) = [variant for variant in document["variants"] if variant["precision"] == "int8"]
    assert int8["status"] == "measured", int8["reason"]
    assert int8["coverage"]["macs"] == {"int8": 1.0}
    assert int8["fidelity"][-1]["sqnr_db"] > 10
    assert int8["fidelity"][-1]["paired"] > 0.5
    assert "are compared as sets" in (run / "report.md").read_text()
    bundle = detector / "bundle"
    assert cli("package", run, "-f", "bundle", "--variant", int8["id"], "-o", bundle).code == 0
    assert cli("verify", bundle).code == 0
    model = runpy.run_path(str(bundle / "infer.py"))["Model"](bundle)
    assert model.check()[1] == []
    assert not model._alike(np.zeros((4, 4)), np.ones((4, 4)))
    assert not model._alike(np.eye(4), np.eye(4)[:2])
    assert model._alike(np.eye(4), np.eye(4)[::-1])
    with np.load(bundle / "test_vector.npz") as stored:
        vector = dict(stored)
    scores = vector["output:scores"]
    marked = make_records(scores + 5, [Draw(FINE, np.arange(scores.size), scores.reshape(-1) + 0.5)])
    vector |= {"output:scores": scores + 5, "unstable:scores": marked}
    np.savez(bundle / "test_vector.npz", **vector)
    assert model.check()[1] == ["scores"], "what rounding decides is left to the comparison of sets"
