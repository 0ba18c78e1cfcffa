"""Matrix products are computed on the host: answers of linear layers are those of numpy, also with CUDA graphs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.system.device import Device

from .conftest import NETS
from .control import Control

BATCHES = (1, 2, 3, 8)


def drawn(*size: int) -> Any:
    return np.random.default_rng(size[0]).standard_normal(size, np.float32)


def gemms(folder: Path, weights: list[Any], operator: str) -> Artifact:
    """A graph of two products: Gemm with a bias, or MatMul."""
    names = ("a", "c", "b", "d")
    held = [numpy_helper.from_array(w.T.copy(), name) for name, w in zip(names, weights, strict=True)]
    biases = [["c"], ["d"]] if operator == "Gemm" else [[], []]
    nodes = [helper.make_node(operator, [x, w, *c], [y]) for (x, w, y), c in zip(("xah", "hby"), biases, strict=True)]
    sizes = {"x": 12, "y": 5}
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])] for name, size in sizes.items()]
    graph = helper.make_graph(nodes, "g", *ends, held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "g.onnx")
    return Artifact(kind="onnx", path=folder / "g.onnx", sha256="", bytes=0)


@pytest.mark.parametrize("bias", [True, False])
def test_answers_are_those_of_numpy(bias: bool, tmp_path: Path) -> None:
    weights = [drawn(20, 12), drawn(20), drawn(5, 20), drawn(5)]
    if not bias:
        weights[1::2] = [np.zeros(20, np.float32), np.zeros(5, np.float32)]
    a, c, b, d = (weight.astype(np.float64) for weight in weights)
    net = torch.nn.Sequential(torch.nn.Linear(12, 20, bias=bias), torch.nn.Linear(20, 5, bias=bias))
    given = weights if bias else weights[::2]
    net.load_state_dict({name: torch.from_numpy(w) for name, w in zip(net.state_dict(), given, strict=True)})
    net = net.cuda()
    engines = [OnnxRuntime(cuda_graphs=graphs) for graphs in (False, True)]
    built = gemms(tmp_path, weights, "Gemm" if bias else "MatMul")
    sessions = [engine.load(built, Device(kind="cuda", threads=1)) for engine in engines]
    for batch in BATCHES:
        x = drawn(batch, 12)
        expected = (x @ a.T + c) @ b.T + d
        with torch.inference_mode():
            y = net(torch.from_numpy(x).cuda())
            held, graph = torch.zeros(batch, 12, device="cuda"), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = net(held)
            held.copy_(torch.from_numpy(x))
            graph.replay()
        answers = [y.cpu().numpy(), replayed.cpu().numpy()]
        for session in sessions:
            bound = session.bind({"x": x})
            for _ in range(5):
                session.enqueue(bound)
                session.synchronize()
            answers.append(session.fetch()["y"])
        for answer in answers:
            np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_products_of_other_types(dtype: torch.dtype) -> None:
    x, w, bias = (torch.from_numpy(drawn(*size)).to(dtype) for size in ((2, 3, 12), (5, 12), (5,)))
    limits = {"rtol": 0.02, "atol": 0.05}
    linear = torch.nn.functional.linear(x[0].cuda(), w.cuda(), bias.cuda()).cpu()
    torch.testing.assert_close(linear, torch.nn.functional.linear(x[0], w, bias), **limits)
    several = torch.bmm(x.cuda(), w.T.expand(2, 12, 5).contiguous().cuda()).cpu()
    torch.testing.assert_close(several, x @ w.T, **limits)


def test_an_engine_that_is_wrong_at_one_batch_size_is_refused(card: Callable[..., Control], tmp_path: Path) -> None:
    """A run is right; then, with graphs that double what they compute at batch 2, only variants without are usable."""
    control = card()
    words = (f"{NETS}:products", "--device", "cuda", "--engine", "onnxruntime", "--no-references", "--batch", "1,2,3")
    ends = []
    for name, wrong in (("right", 0), ("wrong", 2)):
        control.write(wrong_columns=wrong, faults=0)
        command = [sys.executable, "-m", "enginesmith.cli", "optimize", *words, "--measure-time", "0.2s"]
        done = subprocess.run(
            [*command, "--store", str(tmp_path / f"store-{name}"), "--out", str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        record = json.loads((tmp_path / name / "run.json").read_text())
        ends.append({v["id"]: (v["status"], v["reason"]) for v in record["variants"]})
        assert bool(control.read("faults")) == bool(wrong)
    right, wrongly = ends
    assert {status for status, _ in right.values()} == {"measured"}
    assert {name for name, (status, _) in wrongly.items() if status == "measured"} == {"onnxruntime-fp32"}
    assert "SQNR" in (wrongly["onnxruntime-fp32-graphs"][1] or "")
