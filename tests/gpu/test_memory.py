"""The ledger on a device: what engines of known needs take, by the ledger, by torch's allocator and by the driver."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact, file_digest
from enginesmith.pipeline.engines import cuda_allocator, engine_class
from enginesmith.pipeline.engines.base import BuildRequest, Engine
from enginesmith.pipeline.engines.cuda_allocator import ACTIVATIONS, TRANSFERS, UNTAGGED, WEIGHTS, counting
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import MissingCapability, UnsupportedGraph
from enginesmith.pipeline.measure.memory import cuda
from enginesmith.pipeline.measure.memory.cuda import CudaPhases, measure_on_cuda, read_device_used, read_moment
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds, ShapeRange, Signature, TensorSpec

CUDA = Device(kind="cuda")
MIB = 1 << 20
WIDE, BATCH = 1024, 512
ROWS = WIDE * 4
INPUT_BYTES = BATCH * ROWS
"""2 MiB, as each of the activations: of multiples of that, torch's allocator leaves no remainder unsplit."""
WEIGHTS_BYTES = 2 * WIDE * ROWS
SIGNATURE = Signature(
    inputs=(TensorSpec.parse(f"x:float32:batch,{WIDE}"),), outputs=(TensorSpec.parse(f"y:float32:batch,{WIDE}"),)
)


class Scaled(torch.nn.Module):
    """Element by element only, as matrix products bring cuBLAS's workspace along."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(WIDE, WIDE) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x + self.weights[0][0]
        second = first * self.weights[1][0]
        return first + second


class Plain(Eager):
    """Eager on a module that is at hand."""

    def load(self, artifact: Artifact, device: Device) -> Any:
        from enginesmith.pipeline.engines.torch.session import EagerSession

        self.enter_thread(device)
        module = Scaled().eval().to(str(device))
        torch.cuda.synchronize()
        return EagerSession(lambda x: (module(x),), SIGNATURE, device, None, lambda: self.enter_thread(device))

    def prime(self, artifact: Artifact, device: Device) -> None:
        torch.ones(8, device=str(device)).sum().item()


@pytest.fixture
def graph(tmp_path: Path) -> Artifact:
    """x · W₁, ReLU, · W₂: 8 MiB of weights."""
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal((WIDE, WIDE)).astype(np.float32) / WIDE for name in ("first", "second")}
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "second"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDE]) for name in "xy"]
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    opsets = [helper.make_opsetid("", 17)]
    made = helper.make_graph(nodes, "net", ends[:1], ends[1:], held)
    model = helper.make_model(made, opset_imports=opsets, ir_version=8)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return Artifact(kind="onnx", path=path, sha256=file_digest(path), bytes=path.stat().st_size, signature=SIGNATURE)


@pytest.fixture
def feeds() -> dict[str, Any]:
    return {"x": np.ones((BATCH, WIDE), np.float32)}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The device's use returns: what a test leaves is a fault of what it tests."""
    torch.cuda.init()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.memory_allocated() <= before
    assert cuda_allocator.active(0) is None


@pytest.fixture
def onnxruntime() -> Engine:
    found = engine_class("onnxruntime").available(CUDA)
    if not found.ok:
        pytest.skip(f"ONNX Runtime cannot use CUDA here: {found.reason}")
    return engine_class("onnxruntime")()


def sound(seen: CudaPhases) -> None:
    """Check what holds of every engine."""
    assert seen.counted
    assert (seen.leaked, seen.account.unknown_frees, seen.account.double_frees) == (0, 0, 0)
    assert seen.closed.allocated == seen.start.allocated
    found = cuda.list_lenses(seen)
    assert found["allocator_reserved"].bytes >= found["allocator"].bytes
    assert found["device_peak"].bytes > 0  # it is sampled, and misses short peaks on a busy machine
    assert cuda.split_peak(seen) is not None


def test_eager_takes_what_it_is_made_of(feeds: Feeds) -> None:
    seen = measure_on_cuda(Plain(), Artifact.model_construct(kind="torch"), CUDA, feeds)
    sound(seen)
    parts = cuda.split_peak(seen)
    assert parts.weights == WEIGHTS_BYTES
    assert parts.activations == 3 * INPUT_BYTES  # first, second and the sum
    assert parts.peak == WEIGHTS_BYTES + 3 * INPUT_BYTES
    assert cuda.count_inputs(seen) == INPUT_BYTES
    assert seen.run.requested - seen.start.requested == parts.peak + INPUT_BYTES


def test_onnxruntime_is_counted_to_the_byte(onnxruntime: Engine, graph: Artifact, feeds: Feeds) -> None:
    seen = measure_on_cuda(onnxruntime, graph, CUDA, feeds)
    sound(seen)
    parts = cuda.split_peak(seen)
    assert seen.account.peak == seen.run.requested - seen.start.requested  # all that torch gave went through the ledger
    assert WEIGHTS_BYTES <= parts.weights < WEIGHTS_BYTES + MIB
    assert 2 * INPUT_BYTES <= parts.activations < 4 * INPUT_BYTES + 64 * MIB  # cuBLAS may have a workspace
    tags = seen.account.peak_by_tag
    assert WEIGHTS_BYTES <= tags[WEIGHTS] < WEIGHTS_BYTES + MIB
    assert tags[ACTIVATIONS] >= 2 * INPUT_BYTES
    assert tags.get(TRANSFERS, INPUT_BYTES) == INPUT_BYTES


def test_onnxruntime_answers_the_same_when_it_is_counted(onnxruntime: Engine, graph: Artifact, feeds: Feeds) -> None:
    with onnxruntime.load(graph, CUDA) as session:
        plain = session.run(feeds)["y"]
    with counting(0) as ledger:
        with onnxruntime.load(graph, CUDA) as session:
            assert session.cuda_stream == 0
            np.testing.assert_array_equal(session.run(feeds)["y"], plain)
            assert ledger.account().current > WEIGHTS_BYTES
        assert ledger.leaks() == {}


def test_onnxruntime_allocates_by_itself_when_it_is_not_counted(
    onnxruntime: Engine, graph: Artifact, feeds: Feeds
) -> None:
    before = read_moment(CUDA).allocated
    with onnxruntime.load(graph, CUDA):
        assert read_moment(CUDA).allocated == before


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_rtx"])
def test_tensorrt_is_counted_to_the_byte(
    name: str, graph: Artifact, feeds: Feeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))
    kind = engine_class(name)
    if not (found := kind.available(CUDA)).ok:
        pytest.skip(f"{name}: {found.reason}")
    built = _built(kind, graph, tmp_path / "engine")
    seen = measure_on_cuda(kind(), built, CUDA, feeds)
    sound(seen)
    tags = seen.account.peak_by_tag
    assert 0.9 * WEIGHTS_BYTES < tags[WEIGHTS] < 2 * WEIGHTS_BYTES
    assert tags[TRANSFERS] == INPUT_BYTES
    assert seen.run.requested - seen.start.requested - seen.account.peak <= MIB  # but for the session's own byte or so
    assert tags.get(UNTAGGED, 0) == 0


def test_a_build_peaks_above_what_its_engine_weighs(
    graph: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))
    kind = engine_class("tensorrt")
    if not (found := kind.available(CUDA)).ok:
        pytest.skip(f"tensorrt: {found.reason}")
    facts = kind().facts(_built(kind, graph, tmp_path / "engine"))
    assert facts.build_device_peak_bytes is not None
    assert facts.build_device_peak_bytes > WEIGHTS_BYTES // 2


def test_the_devices_use_returns(feeds: Feeds) -> None:
    measure_on_cuda(Plain(), Artifact.model_construct(kind="torch"), CUDA, feeds)  # modules are loaded by this
    torch.cuda.empty_cache()
    before = read_device_used(CUDA)
    seen = measure_on_cuda(Plain(), Artifact.model_construct(kind="torch"), CUDA, feeds)
    torch.cuda.empty_cache()
    assert abs(read_device_used(CUDA) - before) <= 2 * MIB
    assert cuda.list_lenses(seen)["device_closed"].bytes <= 2 * MIB


def _built(kind: type[Engine], graph: Artifact, out: Path) -> Artifact:
    out.mkdir()
    ranges = {"batch": ShapeRange(min=1, opt=BATCH, max=BATCH)}
    try:
        effect = kind().build(BuildRequest(graph, out, CUDA, ranges))
    except (MissingCapability, UnsupportedGraph) as error:
        pytest.skip(f"{kind.name} refuses: {error.message}")
    path = out / effect.file
    size = path.stat().st_size
    return Artifact(kind="engine", path=path, sha256=file_digest(path), bytes=size, signature=effect.signature)
