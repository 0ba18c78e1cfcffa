"""Faults of TensorRT as its bindings report them, and what becomes of them; run by ``test_tensorrt.py``."""

import gc
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from enginesmith.cli import main
from enginesmith.pipeline.artifact import Artifact, file_digest
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.cuda_allocator import WEIGHTS, WORKSPACE, counting
from enginesmith.pipeline.engines.profiling import ProfileRequest
from enginesmith.pipeline.engines.tensorrt import manifest
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.engines.tensorrt.session import TensorRTSession
from enginesmith.pipeline.errors import BuilderFailed, ModelError, StepOutOfMemory, UnsupportedGraph
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, ShapeRange, Signature, TensorSpec

CUDA = Device(kind="cuda")
RANGES = {"batch": ShapeRange(min=1, opt=4, max=8)}
NET = """
import torch

def net():
    model = torch.nn.Linear(8, 4)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model.eval(), torch.zeros(2, 8)
"""
SAMPLE_BYTES = 4096
"""Activations of one sample, as the library for tests has them."""


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))


@pytest.fixture
def graph(tmp_path: Path) -> Artifact:
    """One product in fp16, and an output whose size only a run decides."""
    texts = ("x:float16:batch,8", "y:float16:batch,4", "found:int64:n")
    x, y, found = (TensorSpec.parse(text) for text in texts)
    signature = Signature(inputs=(x,), outputs=(y, found))
    kinds = {"float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}
    inputs, *outputs = (helper.make_tensor_value_info(it.name, kinds[it.dtype], it.shape) for it in (x, y, found))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="first"),
        helper.make_node("NonZero", ["y"], ["all"], name="find"),
        helper.make_node("Flatten", ["all"], ["found"], name="flat"),
    ]
    weight = numpy_helper.from_array(np.zeros((8, 4), np.float16), "w")
    return saved(tmp_path, helper.make_graph(nodes, "net", [inputs], outputs, [weight]), signature)


@pytest.fixture
def static(tmp_path: Path) -> Artifact:
    """A product whose output sizes are known, as a CUDA graph needs."""
    x, y = (TensorSpec.parse(text) for text in ("x:float32:batch,8", "y:float32:batch,4"))
    ends = [[helper.make_tensor_value_info(it.name, TensorProto.FLOAT, it.shape)] for it in (x, y)]
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="first")
    weight = numpy_helper.from_array(np.zeros((8, 4), np.float32), "w")
    return saved(tmp_path, helper.make_graph([node], "net", *ends, [weight]), Signature(inputs=(x,), outputs=(y,)))


def saved(folder: Path, graph: onnx.GraphProto, signature: Signature) -> Artifact:
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return Artifact(kind="onnx", path=path, sha256=file_digest(path), bytes=path.stat().st_size, signature=signature)


def build(graph: Artifact) -> Artifact:
    out = graph.path.parent / "engine"
    out.mkdir(exist_ok=True)
    effect = TensorRT().build(BuildRequest(graph, out, CUDA, RANGES))
    assert not effect.rejected
    path = out / effect.file
    size = path.stat().st_size
    return Artifact(kind="engine", path=path, sha256=file_digest(path), bytes=size, signature=effect.signature)


@pytest.fixture
def engine(graph: Artifact) -> Artifact:
    return build(graph)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda name: monkeypatch.setenv("STUB_FAULT", name)


@pytest.fixture
def session(engine: Artifact) -> Iterator[TensorRTSession]:
    with TensorRT().load(engine, CUDA) as opened:
        yield opened


def feeds(batch: int = 2) -> dict[str, Array]:
    return {"x": np.ones((batch, 8), np.float16)}


def test_figures_inputs_outputs_and_layers_are_read(engine: Artifact) -> None:
    record = manifest.read(engine.path)
    assert record.audit is not None
    assert (record.audit.products, record.audit.otherwise, record.audit.problems) == ({"fp16": 1}, (), ())
    assert record.figures.activation_bytes == 8 * SAMPLE_BYTES
    assert record.figures.build_device_peak_bytes == 1 << 20


def test_an_engine_in_fp32_is_found(graph: Artifact, fail: Any) -> None:
    fail("wide")
    record = manifest.read(build(graph).path)
    assert record.audit is not None
    assert record.audit.otherwise == ("first fp16 → fp32",)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("parse", UnsupportedGraph, "without a reason"),
        ("build", UnsupportedGraph, "'first'|any implementation"),
    ],
)
def test_a_build_that_fails(graph: Artifact, fail: Any, fault: str, error: type[Exception], message: str) -> None:
    before = torch.cuda.memory_allocated()
    fail(fault)
    with pytest.raises(error, match=message):
        build(graph)
    assert torch.cuda.memory_allocated() == before


def test_a_build_is_stopped(graph: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    from enginesmith.pipeline.engines.tensorrt import builder

    made = builder._monitor

    def cancelled(trt: Any) -> Any:
        monitor = made(trt)
        monitor.cancelled = True
        return monitor

    monkeypatch.setattr(builder, "_monitor", cancelled)
    with pytest.raises(BuilderFailed):
        build(graph)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("deserialize", ModelError, "another kind"),
        ("weights", StepOutOfMemory, "Requested size"),
        ("context", StepOutOfMemory, "made no execution context"),
        ("shapes", ModelError, "cannot tell shapes without x"),
        ("enqueue", ModelError, "did not run this input, and said: .*this call was to fail"),
    ],
)
def test_an_engine_that_does_not_open_or_run(
    engine: Artifact, fail: Any, fault: str, error: type[Exception], message: str
) -> None:
    before = torch.cuda.memory_allocated()
    fail(fault)
    with pytest.raises(error, match=message), TensorRT().load(engine, CUDA) as opened:
        opened.run(feeds())
    gc.collect()  # the error knows the session
    assert torch.cuda.memory_allocated() == before


def test_activations_that_are_too_few_are_the_profiles_at_the_second_try(session: Any, fail: Any) -> None:
    session.run(feeds())
    assert session.activation_memory.bytes == 2 * SAMPLE_BYTES
    fail("memory")
    session.run(feeds())
    assert session.activation_memory.bytes == 8 * SAMPLE_BYTES


def test_outputs_of_a_size_that_a_run_decides(session: TensorRTSession) -> None:
    for batch in (2, 8, 1):
        outputs = session.run(feeds(batch))
        assert (outputs["y"].shape, outputs["found"].shape) == ((batch, 4), (batch,))
        assert not outputs["y"].any()


def test_all_memory_has_a_tag_and_comes_back(engine: Artifact) -> None:
    with counting(0) as ledger:
        with TensorRT().load(engine, CUDA) as opened:
            assert set(ledger.account().by_tag) == {WEIGHTS}
            opened.run(feeds())
            assert ledger.account().peak_by_tag[WORKSPACE] == 512
        account = ledger.account()
    assert (account.current, account.unknown_frees, account.double_frees) == (0, 0, 0)


def test_the_script_of_bundles_runs_it_in_each_profile(graph: Artifact) -> None:
    """Outputs of a size that a run decides included."""
    out = graph.path.parent / "engine"
    out.mkdir()
    options = BuildOptions(profiles=("batch=1:1:1",))
    effect = TensorRT(options=options).build(BuildRequest(graph, out, CUDA, RANGES))
    facts = TensorRT(options=options).package_facts(out / effect.file, CUDA)
    assert graph.signature is not None
    described = {"package": "tensorrt", "plugins": (), "options": facts.options, **graph.signature.model_dump()}
    run = runpy.run_path(str(TensorRT.infer_script()))["_tensorrt"](out / effect.file, described)
    for batch in (1, 2, 8, 1):
        outputs = run(feeds(batch))
        assert (outputs["y"].shape, outputs["found"].shape) == ((batch, 4), (batch,))
        assert not outputs["y"].any()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_that_fails_is_said_and_leaves_the_session_usable(static: Artifact, fail: Any) -> None:
    given = {"x": np.ones((2, 8), np.float32)}
    engine = build(static)
    with TensorRT(cuda_graphs=True).load(engine, CUDA) as opened:
        bound = opened.bind(given)
        opened.enqueue(bound)
        fail("capture")
        with pytest.raises(ModelError, match="CUDA graph") as caught:
            opened.enqueue(bound)
        assert "graphs" in caught.value.remedy
        fail("none")
        for _ in range(3):
            opened.enqueue(bound)
        assert bound.graph is not None
        assert not opened.fetch()["y"].any()


def test_layers_are_profiled(static: Artifact) -> None:
    given = {"x": np.ones((2, 8), np.float32)}
    profiled = TensorRT().profile(ProfileRequest(build(static), CUDA, given, 3, static.path.parent, static.path))
    assert [operator.seconds for operator in profiled.operators] == [0.25e-3]


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    options = ["--device", "cuda", "--engine", "tensorrt", "--measure-time", "0.5s", "--batch", "1"]
    done = CliRunner().invoke(main, ["optimize", "net.py:net", *options, "--no-references", "--out", "run"])
    assert done.exit_code == 0, done.output
    variants = json.loads((tmp_path / "run" / "run.json").read_text())["variants"]
    states = {variant["id"]: variant["status"] for variant in variants}
    assert states == {"tensorrt-fp32": "measured", "tensorrt-fp32-graphs": "measured"}
