"""``fit`` against what a session of ONNX Runtime really takes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.system.device import Device

MEMORY = 64 << 20
NODES = "a = Conv<pads=[1,1,1,1]>(x, w) b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, v) d = Relu(c) y = GlobalMaxPool(d)"


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """Two convolutions with 1 MiB between them for each row of 64 KiB."""
    text = f"g (float[batch, 4, 64, 64] x) => (float[batch, 64, 1, 1] y) {{ {NODES} }}"
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}')
    for name, channels in (("w", 4), ("v", 64)):
        values = np.random.default_rng(0).standard_normal((64, channels, 3, 3))
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def taken(file: Path, batch: int, logs: Path) -> int:
    """The peak of a session, and its inputs."""
    given = Artifact(kind="onnx", path=file, sha256="", bytes=0, signature=model_file.signature(file))
    feeds = {"x": np.ones((batch, 4, 64, 64), np.float32)}
    row = measure_memory(
        Candidate("net", OnnxRuntime(), given, Device(threads=1)), batch, feeds, logs, lambda text: None
    )
    assert row.peak_bytes is not None, row.reasons
    return row.peak_bytes + feeds["x"].nbytes


@pytest.mark.thorough
def test_what_is_said_to_fit_does_and_twice_as_much_does_not(cli: Callable[..., Any], net: Path) -> None:
    answer = cli("fit", net, "--memory", MEMORY, "--engine", "onnxruntime", "--threads", 1, "--quiet", "--json")
    found = json.loads(answer.stdout)
    assert (answer.code, found["largest_batch"] > 4) == (0, True)
    assert found["source"].startswith("measured")
    needed = taken(net, found["largest_batch"], net.parent)
    assert 0.95 * found["needed_bytes"] < needed < 1.05 * MEMORY
    assert taken(net, math.ceil(1.1 * found["largest_batch"]), net.parent) > MEMORY


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--memory", "lots"), 2, "cannot read the size 'lots'"),
        (("--memory", "1GiB", "--engine", "eager"), 2, "was given eager"),
        (("--memory", "1GiB", "--engine", "onnxruntime", "--engine", "tensorrt"), 2, "onnxruntime, tensorrt"),
        (("--memory", "1KiB", "--engine", "onnxruntime"), 3, "even batch 1 needs"),
        ((), 2, "give --memory SIZE"),
    ],
)
def test_cannot_answer(arguments: tuple[str, ...], code: int, said: str, cli: Callable[..., Any], net: Path) -> None:
    answer = cli("fit", net, "--quiet", *arguments)
    assert answer.code == code
    assert said in answer.text


def test_a_fixed_batch_leaves_nothing_to_find(cli: Callable[..., Any], net: Path) -> None:
    model = onnx.load(net)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(model, net)
    answer = cli("fit", net, "--memory", "1GiB", "--engine", "onnxruntime", "--quiet")
    assert answer.code == 2
    assert "no dynamic batch" in answer.text
