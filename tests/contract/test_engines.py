"""Test what every engine promises, held against each of them with one small model.

It has two inputs, one of them integers, two outputs, one of them integers, and a dynamic batch.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.base import BuildRequest, Candidate, Engine, Session
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.errors import MissingCapability, SignatureError, UsageError
from enginesmith.pipeline.frameworks.fidelity import thresholds_for
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module as torch_model
from enginesmith.pipeline.frameworks.torch import saved
from enginesmith.pipeline.measure.latency.timer import serve_session
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Worker
from enginesmith.pipeline.tensors import Array, ShapeRange, Signature, TensorSpec
from enginesmith.pipeline.workflows.load import LoadedModel, Stored

CPU = Device(threads=1)
RANGES = {"batch": ShapeRange(min=1, opt=2, max=5)}
SIGNATURE = Signature(
    inputs=tuple(TensorSpec.parse(text) for text in ("x:float32:batch,4", "ids:int64:batch,3")),
    outputs=tuple(TensorSpec.parse(text) for text in ("scores:float32:batch,5", "best:int64:batch")),
)
FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.linear = nn.Linear(4, 5)

    def forward(self, x, ids):
        scores = self.linear(x + self.table(ids).mean(1))
        return {"scores": scores, "best": scores.argmax(-1)}

def build():
    return Net(), {"x": torch.ones(2, 4), "ids": torch.ones(2, 3, dtype=torch.int64)}
"""
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


def where(engine: Engine | type[Engine]) -> Device:
    """The CPU, and a CUDA device for engines that run only there."""
    return CPU if "cpu" in engine.kinds else Device(kind=engine.kinds[0], threads=1)


def feeds(batch: int, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((batch, 4)).astype(np.float32), "ids": rng.integers(0, 11, (batch, 3))}


@pytest.fixture(scope="module")
def torch_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("torch")
    (folder / "contract_net.py").write_text(FACTORY)
    source = resolve(f"{folder}/contract_net.py:build")
    options = torch_model.LoadOptions(inputs=SIGNATURE.inputs)
    loaded = torch_model.load(source, options)
    saved.save(loaded, source, options, folder)
    path = folder / saved.RECORD
    return Artifact(kind="torch", path=path, sha256="", bytes=0, signature=loaded.signature)


@pytest.fixture(scope="module")
def module(torch_artifact: Artifact) -> torch.nn.Module:
    return saved.load_artifact(torch_artifact).module


@pytest.fixture(scope="module")
def onnx_artifact(module: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Write the same model by hand, its weights in a file beside it."""
    state = {name.removeprefix("model."): value.numpy() for name, value in module.state_dict().items()}
    nodes = [
        helper.make_node("Gather", ["table.weight", "ids"], ["rows"]),
        helper.make_node("ReduceMean", ["rows"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Add", ["x", "mean"], ["sum"]),
        helper.make_node("Gemm", ["sum", "linear.weight", "linear.bias"], ["scores"], transB=1),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=-1, keepdims=0),
    ]
    ends = [
        [helper.make_tensor_value_info(spec.name, TYPES[spec.dtype], spec.shape) for spec in side]
        for side in (SIGNATURE.inputs, SIGNATURE.outputs)
    ]
    weights = [numpy_helper.from_array(value, name) for name, value in state.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "net", *ends, weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    return Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=SIGNATURE)


INDUCTOR = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning")
MARKS = {"compiled": (INDUCTOR,), "aotinductor": (INDUCTOR, pytest.mark.thorough)}  # it compiles for 20 s and more


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in ENGINES])
def engine(request: pytest.FixtureRequest) -> Engine:
    kind = engine_class(request.param)
    found = kind.available(where(kind))
    if not found.ok:
        pytest.skip(f"{found.reason}; {found.remedy}")
    return kind(options=BuildOptions(tf32=False)) if issubclass(kind, TensorRT) else kind()


@pytest.fixture(scope="module")
def artifact(
    engine: Engine, torch_artifact: Artifact, onnx_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """Make what the engine loads: the torch artifact itself, or the engine built from the graph."""
    if engine.runs_module():
        return torch_artifact
    given = torch_artifact if engine.consumes == "torch" else onnx_artifact
    out = tmp_path_factory.mktemp("engine")
    try:
        effect = engine.build(BuildRequest(given, out, where(engine), RANGES))
    except MissingCapability as error:
        if "cpu" in engine.kinds:
            raise
        pytest.skip(str(error))
    assert effect.summary
    return Artifact(kind="engine", path=out / effect.file, sha256="", bytes=0, signature=effect.signature)


@pytest.fixture(scope="module")
def session(engine: Engine, artifact: Artifact) -> Iterator[Session]:
    """One for all tests, as it takes seconds to compile one."""
    with engine.load(artifact, where(engine)) as opened:
        yield opened


def expected(module: torch.nn.Module, given: dict[str, Array]) -> dict[str, Array]:
    with torch.inference_mode():
        scores, best = module(*(torch.from_numpy(given[spec.name]) for spec in SIGNATURE.inputs))
    return {"scores": scores.numpy(), "best": best.numpy()}


def test_class_is_named_as_in_the_table(engine: Engine) -> None:
    assert ENGINES[engine.name].endswith(f":{type(engine).__name__}")
    assert engine.tools


@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_equal_the_modules(session: Session, module: torch.nn.Module, batch: int) -> None:
    outputs = session.run(feeds(batch))
    wanted = expected(module, feeds(batch))
    assert list(outputs) == ["scores", "best"]
    np.testing.assert_allclose(outputs["scores"], wanted["scores"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs["best"], wanted["best"])
    assert [str(value.dtype) for value in outputs.values()] == ["float32", "int64"]


def test_outputs_stay_as_they_were_fetched(session: Session) -> None:
    first = session.run(feeds(2, seed=1))
    kept = {name: value.copy() for name, value in first.items()}
    session.run(feeds(2, seed=2))
    for name, value in kept.items():
        np.testing.assert_array_equal(first[name], value)


def test_bound_feeds_can_be_enqueued_again(session: Session, module: torch.nn.Module) -> None:
    bound = session.bind(feeds(2))
    session.enqueue(bound)
    session.enqueue(bound)
    session.synchronize()
    np.testing.assert_allclose(session.fetch()["scores"], expected(module, feeds(2))["scores"], rtol=1e-5, atol=1e-6)


def test_feeds_may_be_views_and_read_only(session: Session, module: torch.nn.Module) -> None:
    given = {"x": feeds(4)["x"][::2], "ids": np.broadcast_to(feeds(1)["ids"], (2, 3))}
    assert not given["ids"].flags.writeable
    wanted = expected(module, {name: np.array(value) for name, value in given.items()})
    np.testing.assert_allclose(session.run(given)["scores"], wanted["scores"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones((2, 4), np.float64)}, "float64"),
        ({"x": np.ones((2, 7), np.float32)}, "7"),
        ({"ids": np.ones((3, 3), np.int64)}, "batch"),
        ({"y": np.ones(1, np.float32)}, "y"),
    ],
    ids=["dtype", "shape", "batches-differ", "name"],
)
def test_feeds_that_do_not_fit_are_refused(session: Session, change: dict[str, Array], message: str) -> None:
    with pytest.raises(SignatureError, match=message):
        session.run(feeds(2) | change)


def test_closed_session_is_not_used(engine: Engine, artifact: Artifact) -> None:
    session = engine.load(artifact, where(engine))
    session.close()
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.run(feeds(2))


def test_siblings_answer_at_the_same_time(session: Session, module: torch.nn.Module) -> None:
    together = threading.Barrier(2)

    def answers(seed: int) -> list[dict[str, Array]]:
        with session.sibling() as own:
            bound = own.bind(feeds(3, seed))
            together.wait(60)
            found = []
            for _ in range(50):
                own.enqueue(bound)
                own.synchronize()
                found.append(own.fetch())
            return found

    with ThreadPoolExecutor(2) as threads:
        of_each = list(threads.map(answers, (1, 2)))
    for seed, found in zip((1, 2), of_each, strict=True):
        wanted = expected(module, feeds(3, seed))
        for outputs in found:
            np.testing.assert_allclose(outputs["scores"], wanted["scores"], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(outputs["best"], wanted["best"])


@pytest.mark.parametrize("calls", [20, pytest.param(2_000, marks=pytest.mark.thorough)])
def test_any_thread_is_answered_and_keeps_its_settings(engine: Engine, artifact: Artifact, calls: int) -> None:
    """Eight threads of one loaded model; torch's number of threads is one of each thread's own."""
    before = torch.get_num_threads()
    stored = Stored(Candidate(engine.name, engine, artifact, where(engine)), RANGES, None, thresholds_for("fp32", None))
    with LoadedModel(stored) as model:
        given = [tuple(feeds(1 + seed % 3, seed).values()) for seed in range(12)]
        wanted = [model(*values) for values in given]
        assert torch.get_num_threads() == before

        def work(thread: int) -> bool:
            torch.get_num_threads()  # else torch takes the number of the whole process at the thread's first operator
            torch.set_num_threads(1 + thread % 3)
            for index in range(thread, thread + calls):
                values = given[index % 12]
                if thread % 2:
                    values = tuple(map(torch.from_numpy, values))
                for answer, want in zip(model(*values).values(), wanted[index % 12].values(), strict=True):
                    assert np.array_equal(answer, want), f"call {index} of thread {thread}"
            return torch.get_num_threads() == 1 + thread % 3

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(work, range(8)))
    with pytest.raises(UsageError, match="closed"):
        model(*given[0])


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_torch_compile_leaves_a_loaded_module_alone(engine: Engine, artifact: Artifact) -> None:
    stored = Stored(Candidate(engine.name, engine, artifact, where(engine)), RANGES, None, thresholds_for("fp32", None))
    with LoadedModel(stored) as model:
        module, tensors = model.as_module(), tuple(map(torch.from_numpy, feeds(2).values()))
        wanted = module(*tensors)["scores"] * 2
        compiled = torch.compile(lambda *values: module(*values)["scores"] * 2, backend="aot_eager")
        assert torch.equal(compiled(*tensors), wanted)


def test_siblings_are_closed_in_any_order(engine: Engine, artifact: Artifact, module: torch.nn.Module) -> None:
    wanted = expected(module, feeds(2))["scores"]
    first = engine.load(artifact, where(engine))
    second, third = first.sibling(), first.sibling()
    third.close()
    np.testing.assert_allclose(first.run(feeds(2))["scores"], wanted, rtol=1e-5, atol=1e-6)
    first.close()
    np.testing.assert_allclose(second.run(feeds(2))["scores"], wanted, rtol=1e-5, atol=1e-6)
    second.close()
    for session in (first, second, third):
        with pytest.raises(UsageError, match="closed"):
            session.sibling()


def test_device_that_is_not_there(engine: Engine, artifact: Artifact) -> None:
    with pytest.raises(MissingCapability, match="tpu"):
        engine.load(artifact, Device(kind="tpu"))
    if not type(engine).available(Device(kind="cuda")).ok:
        with pytest.raises(MissingCapability, match="cuda:0") as caught:
            engine.load(artifact, Device(kind="cuda"))
        assert caught.value.remedy


def test_priming_leaves_sessions_as_they_are(engine: Engine, artifact: Artifact, session: Session) -> None:
    before = session.run(feeds(2))
    engine.prime(artifact, where(engine))
    np.testing.assert_array_equal(session.run(feeds(2))["scores"], before["scores"])


def test_session_in_a_fresh_process(engine: Engine, artifact: Artifact, tmp_path: Path) -> None:
    with Worker(serve_session, engine, artifact, where(engine), log=tmp_path / "log") as worker:
        assert worker.request("load", timeout_seconds=300) > 0
        worker.request("make_ready", feeds(2), 0.1, timeout_seconds=300)
        assert worker.request("block", 0.01, timeout_seconds=300).host_seconds.size > 0
        with pytest.raises(SignatureError):
            worker.request("make_ready", {}, 0.1, timeout_seconds=300)


def test_unknown_engine() -> None:
    with pytest.raises(UsageError, match="eagre") as caught:
        engine_class("eagre")
    assert "eager" in caught.value.remedy
