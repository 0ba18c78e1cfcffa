"""TensorRT on a device: both flavours, from building to running.

Expected values are computed with numpy. What a flavour cannot do on this device is skipped with its own words: of
TensorRT-RTX, for one, there is no build for sm90.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from enginesmith import Settings, optimize
from enginesmith.pipeline.artifact import Artifact, file_digest
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.tensorrt import manifest
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, RunOptions
from enginesmith.pipeline.engines.tensorrt.session import TensorRTSession
from enginesmith.pipeline.errors import MissingCapability, SignatureError, UnsupportedGraph, UsageError
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, ShapeRange, Signature, TensorSpec

CUDA = Device(kind="cuda")
WIDE = 2048
LOW, USUAL, HIGH = 1, 4, 32
MLP = Signature(
    inputs=(TensorSpec.parse(f"x:float32:batch,{WIDE}"),), outputs=(TensorSpec.parse("y:float32:batch,16"),)
)
FOUND = Signature(
    inputs=(TensorSpec.parse("x:float32:batch,4"),),
    outputs=(TensorSpec.parse("y:float32:batch,4"), TensorSpec.parse("found:int64:2,n")),
)
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
_RNG = np.random.default_rng(0)
_SCALE = float(os.environ.get("WEIGHTS_SCALE", "1")) / WIDE**0.5
"""0 on a CUDA runtime without a device, which computes nothing: answers of zero are right there."""
FIRST = (_SCALE * _RNG.standard_normal((WIDE, WIDE))).astype(np.float32)
SECOND = (_SCALE * _RNG.standard_normal((WIDE, 16))).astype(np.float32)
WEIGHTS_BYTES = FIRST.nbytes + SECOND.nbytes

Build = Callable[..., Artifact]


@pytest.fixture(params=["tensorrt", "tensorrt_rtx"])
def kind(request: pytest.FixtureRequest) -> type[TensorRT]:
    """A flavour that is installed and finds the device."""
    found = engine_class(request.param).available(CUDA)
    if not found.ok:
        pytest.skip(f"{request.param}: {found.reason}")
    kind = engine_class(request.param)
    assert issubclass(kind, TensorRT)
    return kind


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing caches and compiled kernels of one test are not there in the next."""
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))


@pytest.fixture
def build(kind: type[TensorRT], tmp_path: Path) -> Build:
    """Builds an engine for the device that is here."""

    def built(graph: Artifact, name: str = "engine", **options: Any) -> Artifact:
        out = tmp_path / name
        out.mkdir()
        ranges = {"batch": ShapeRange(min=LOW, opt=USUAL, max=HIGH)}
        engine = kind(options=BuildOptions(tf32=False, **options))
        try:
            effect = engine.build(BuildRequest(graph, out, CUDA, ranges))
        except (MissingCapability, UnsupportedGraph) as error:
            pytest.skip(f"{kind.name} refuses: {error.message}")
        assert not effect.rejected
        path = out / effect.file
        return Artifact(
            kind="engine", path=path, sha256=file_digest(path), bytes=path.stat().st_size, signature=effect.signature
        )

    return built


@pytest.fixture
def opened(kind: type[TensorRT]) -> Iterator[Callable[..., TensorRTSession]]:
    """Opens sessions, and closes them in the end."""
    sessions: list[TensorRTSession] = []

    def opening(artifact: Artifact, cuda_graphs: bool = False, **run: Any) -> TensorRTSession:
        session = kind(run=RunOptions(**run), cuda_graphs=cuda_graphs).load(artifact, CUDA)
        assert isinstance(session, TensorRTSession)
        sessions.append(session)
        return session

    yield opening
    for session in sessions:
        session.close()


def graph(folder: Path, signature: Signature, nodes: list[onnx.NodeProto], weights: dict[str, Array]) -> Artifact:
    ends = (
        [helper.make_tensor_value_info(spec.name, TYPES[spec.dtype], spec.shape) for spec in side]
        for side in (signature.inputs, signature.outputs)
    )
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(helper.make_graph(nodes, "net", *ends, held), opset_imports=opsets, ir_version=8)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return Artifact(kind="onnx", path=path, sha256=file_digest(path), bytes=path.stat().st_size, signature=signature)


@pytest.fixture
def mlp(tmp_path: Path) -> Artifact:
    """x · W₁, ReLU, · W₂: 16 MiB of weights."""
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"], name="first_product"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "second"], ["y"], name="second_product"),
    ]
    return graph(tmp_path, MLP, nodes, {"first": FIRST, "second": SECOND})


@pytest.fixture
def finder(tmp_path: Path) -> Artifact:
    """Doubles x, and lists where it is not zero: an output whose shape depends on values."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"], name="double"),
        helper.make_node("NonZero", ["x"], ["found"], name="find"),
    ]
    return graph(tmp_path, FOUND, nodes, {})


def rows(batch: int, seed: int = 0) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((batch, WIDE)).astype(np.float32)}


def agrees(found: Array, feeds: dict[str, Array]) -> None:
    wanted = np.maximum(feeds["x"].astype(np.float64) @ FIRST, 0) @ SECOND
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_digits_agrees_with_eager_at_every_corner(kind: type[TensorRT], tmp_path: Path) -> None:
    values = {"model": "digits", "device": "cuda", "engines": [kind.name], "batch": [1, 8]}
    values |= {"shapes": {"batch": "1:8:32"}, "measure": {"seconds": 3.0}, "tensorrt": {"tf32": False}}
    try:
        run = optimize(make(values), tmp_path / "run", Settings(store=tmp_path / "optimized"))
    except MissingCapability as error:
        pytest.skip(f"{kind.name} refuses: {error.message}")
    (record,) = run.variants
    if "has no target" in str(record):
        pytest.skip(f"{kind.name} has no target for this device")
    assert record.status == "measured", record
    assert {entry.point for entry in record.fidelity} == {"min", "opt", "max"}
    assert all(entry.passed for entry in record.fidelity)
    row = record.row(8)
    assert row.device_p50_ms is not None


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "cuda-graphs"])
def test_every_corner(build: Build, opened: Any, mlp: Artifact, graphs: bool) -> None:
    session = opened(build(mlp), cuda_graphs=graphs)
    for batch in (LOW, USUAL, HIGH, 3, LOW):
        bound = session.bind(rows(batch))
        for _ in range(3):
            session.enqueue(bound)
        agrees(session.fetch()["y"], rows(batch))


def test_bound_feeds_alternate_under_graphs(build: Build, opened: Any, mlp: Artifact) -> None:
    session = opened(build(mlp), cuda_graphs=True)
    cases = [(batch, seed) for batch in (1, 8) for seed in (1, 2)]
    bounds = [session.bind(rows(*case)) for case in cases]
    for _ in range(4):
        for case, bound in zip(cases, bounds, strict=True):
            session.enqueue(bound)
            agrees(session.fetch()["y"], rows(*case))


def test_graphs_answer_as_plain_calls_do(build: Build, opened: Any, mlp: Artifact) -> None:
    built = build(mlp)
    plain, replayed = opened(built), opened(built, cuda_graphs=True)
    bound = replayed.bind(rows(8))
    for _ in range(3):
        replayed.enqueue(bound)
    np.testing.assert_array_equal(replayed.fetch()["y"], plain.run(rows(8))["y"])


def test_identical_rows_have_identical_answers(build: Build, opened: Any, mlp: Artifact) -> None:
    session = opened(build(mlp))
    for batch in (2, USUAL, HIGH):
        answers = session.run({"x": np.repeat(rows(1)["x"], batch, axis=0)})["y"]
        np.testing.assert_array_equal(answers, np.repeat(answers[:1], batch, axis=0))


def test_profiles(build: Build, opened: Any, mlp: Artifact) -> None:
    session = opened(build(mlp, profiles=("batch=1:1:1", "batch=2:4:8")))
    for batch in (1, 8, HIGH, 2, 1):
        agrees(session.run(rows(batch))["y"], rows(batch))
    used = {context.native.active_optimization_profile for context in session._contexts.values()}
    assert used == {0, 1, 2}
    with pytest.raises(SignatureError, match=f"{HIGH + 1}"):
        session.run(rows(HIGH + 1))


def test_output_whose_shape_depends_on_values(build: Build, opened: Any, finder: Artifact) -> None:
    session = opened(build(finder))
    for x in (np.eye(4), np.zeros((2, 4)), np.ones((HIGH, 4)), np.eye(4)[:1]):
        outputs = session.run({"x": x.astype(np.float32)})
        np.testing.assert_array_equal(outputs["found"], np.nonzero(x))
        assert outputs["found"].dtype == np.int64
        np.testing.assert_array_equal(outputs["y"], 2 * x)


def test_activations_shared_by_two_engines(build: Build, opened: Any, mlp: Artifact) -> None:
    first = opened(build(mlp, "first"), share_activation_memory=True)
    second = opened(build(mlp, "second"), share_activation_memory=True)
    assert first.activation_memory is second.activation_memory
    small, large = first.bind(rows(1)), second.bind(rows(HIGH, 1))
    for _ in range(20):  # nobody waits in between
        first.enqueue(small)
        second.enqueue(large)
    agrees(first.fetch()["y"], rows(1))
    agrees(second.fetch()["y"], rows(HIGH, 1))
    first.close()
    agrees(second.run(rows(2))["y"], rows(2))


def test_siblings_run_side_by_side(build: Build, opened: Any, mlp: Artifact) -> None:
    first = opened(build(mlp))
    before = torch.cuda.memory_allocated()
    second = first.sibling()
    bounds = [first.bind(rows(8, 1)), second.bind(rows(8, 2))]
    for _ in range(20):
        first.enqueue(bounds[0])
        second.enqueue(bounds[1])
    agrees(first.fetch()["y"], rows(8, 1))
    agrees(second.fetch()["y"], rows(8, 2))
    assert torch.cuda.memory_allocated() - before < WEIGHTS_BYTES
    first.close()
    agrees(second.run(rows(2))["y"], rows(2))
    second.close()


def test_memory_is_torchs(build: Build, opened: Any, mlp: Artifact) -> None:
    built = build(mlp)
    before = torch.cuda.memory_allocated()
    session = opened(built)
    weights = torch.cuda.memory_allocated() - before
    assert 0.9 * WEIGHTS_BYTES < weights < 2 * WEIGHTS_BYTES
    bound = session.bind(rows(HIGH))
    held = torch.cuda.memory_allocated()
    assert held - before - weights >= session.activation_memory.bytes
    session.enqueue(bound)  # compiles, where anything is left to compile
    session.synchronize()
    assert torch.cuda.memory_allocated() == held
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        session.enqueue(bound)
    session.synchronize()
    assert torch.cuda.max_memory_allocated() == held  # enqueue allocates nothing
    del bound
    session.close()
    assert torch.cuda.memory_allocated() <= before


def test_no_waiting_in_enqueue(build: Build, opened: Any, mlp: Artifact) -> None:
    """While the stream is kept busy, calls return."""
    session = opened(build(mlp))
    bound = session.bind(rows(1))
    session.enqueue(bound)
    session.synchronize()
    done = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.ExternalStream(session.cuda_stream)):
        torch.cuda._sleep(2_000_000_000)  # about a second
        done.record()
    session.enqueue(bound)
    assert not done.query()
    session.synchronize()


def test_weight_streaming_budget(build: Build, opened: Any, mlp: Artifact) -> None:
    built = build(mlp, weight_streaming=True)
    before = torch.cuda.memory_allocated()
    whole = opened(built)
    with_all = torch.cuda.memory_allocated() - before
    agrees(whole.run(rows(8))["y"], rows(8))
    whole.close()
    before = torch.cuda.memory_allocated()
    streamed = opened(built, weight_streaming_budget=0)
    assert torch.cuda.memory_allocated() - before < with_all
    for batch in (1, HIGH):
        agrees(streamed.run(rows(batch))["y"], rows(batch))
    with pytest.raises(UsageError, match="CUDA graph"):
        opened(built, weight_streaming_budget=0, cuda_graphs=True)


def test_budget_for_an_engine_that_streams_nothing(build: Build, opened: Any, mlp: Artifact) -> None:
    with pytest.raises(UsageError, match="streams no weights"):
        opened(build(mlp), weight_streaming_budget=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": "9.9.9"}, "9.9.9"), ({"compute_capabilities": ("sm75",)}, "built for sm75")],
    ids=["version", "target"],
)
def test_engine_for_another_machine(
    build: Build, opened: Any, mlp: Artifact, change: dict[str, Any], message: str
) -> None:
    if torch.cuda.get_device_capability() == (7, 5):
        pytest.skip("this device is an sm75")
    built = build(mlp)
    record = manifest.read(built.path).model_copy(update=change)
    manifest.path_beside(built.path).write_text(record.model_dump_json())
    with pytest.raises(MissingCapability, match=message) as caught:
        opened(built)
    assert "enginesmith build" in caught.value.remedy


def test_compiled_kernels_are_kept(build: Build, opened: Any, mlp: Artifact, kind: type[TensorRT]) -> None:
    if not kind.known().runtime_cache:
        pytest.skip(f"{kind.name} compiles nothing when it runs")
    built = build(mlp)
    cold = opened(built)
    assert not cold._opened.cached_bytes
    cold.run(rows(8))
    cold.close()
    warm = opened(built)
    assert warm._opened.cached_bytes
    agrees(warm.run(rows(8))["y"], rows(8))


def test_second_device(kind: type[TensorRT], build: Build, mlp: Artifact) -> None:
    if torch.cuda.device_count() < 2 or len({torch.cuda.get_device_capability(i) for i in (0, 1)}) > 1:
        pytest.skip("this machine has no two CUDA devices of one kind")
    built = build(mlp)
    with kind().load(built, CUDA) as first, kind().load(built, Device(kind="cuda", index=1)) as second:
        for session in (first, second, first):
            agrees(session.run(rows(4))["y"], rows(4))
