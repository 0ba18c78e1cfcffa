"""Eager's options: what they refuse, what they cast, and when a CUDA graph is captured.

CUDA's streams and graphs are stood in for; tensors are on the host.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch._dynamo import config
from torch._inductor import config as inductor

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.session import OnnxRuntimeSession
from enginesmith.pipeline.engines.torch import eager
from enginesmith.pipeline.engines.torch.eager import Compiled, Eager
from enginesmith.pipeline.engines.torch.session import EagerSession, GraphedSession, _translate_error
from enginesmith.pipeline.errors import MissingCapability, ModelError, StepOutOfMemory, UsageError
from enginesmith.pipeline.frameworks.fidelity import thresholds_for
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module, saved
from enginesmith.pipeline.system.device import Availability, Device
from enginesmith.pipeline.system.nvidia import CudaDevice
from enginesmith.pipeline.tasks.verify import run_once
from enginesmith.pipeline.tensors import Array, Feeds, Signature, TensorSpec

CPU = Device(threads=1)
SIGNATURE = Signature(
    inputs=(TensorSpec.parse("x:float32:batch,4"), TensorSpec.parse("rows:int64:batch")),
    outputs=(TensorSpec.parse("y:float32:batch,4"),),
)
FACTORY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, rows):
        assert x.dtype == self.linear.weight.dtype and rows.dtype == torch.int64
        return {"y": self.linear(x)[rows]}

def build():
    return Net(), {"x": torch.ones(2, 4), "rows": torch.tensor([0, 1])}
"""


class LibraryError(Exception):
    """A library's own class, which is none of Python's built-in ones."""


def feeds(seed: int = 0) -> Feeds:
    rows = np.arange(3)
    return {"x": np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32), "rows": rows}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("eager")
    (folder / "eager_net.py").write_text(FACTORY)
    source = resolve(f"{folder}/eager_net.py:build")
    options = module.LoadOptions(inputs=SIGNATURE.inputs)
    loaded = module.load(source, options)
    saved.save(loaded, source, options, folder)
    path = folder / saved.RECORD
    return Artifact(kind="torch", path=path, sha256="", bytes=0, signature=loaded.signature)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_module_answers_in_the_models_own_types(artifact: Artifact, dtype: Any) -> None:
    with Eager().load(artifact, CPU) as plain:
        wanted = plain.run(feeds())["y"]
    with Eager(dtype=dtype).load(artifact, CPU) as cast:
        bound = cast.bind(feeds())
        found = cast.run(feeds())["y"]
    assert [str(tensor.dtype) for tensor in bound] == [f"torch.{dtype}", "torch.int64"]
    assert found.dtype == np.float32
    assert not np.array_equal(found, wanted)
    np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({}, "fp32"),
        ({"tf32": True}, "tf32"),
        ({"dtype": "float16"}, "fp16"),
        ({"dtype": "bfloat16", "tf32": True}, "bf16"),
        ({"cuda_graphs": True}, "fp32"),
        ({"tf32": "convolutions"}, "tf32"),
        ({"tf32": "convolutions", "dtype": "float16"}, "fp16"),
    ],
)
def test_each_option_is_held_to_its_own_thresholds(options: dict[str, Any], row: str) -> None:
    assert Eager(**options).arithmetic == row
    assert thresholds_for(row)


def test_products_that_are_rounded_to_tf32_are_named() -> None:
    values: tuple[Any, ...] = (False, "convolutions", True)
    assert [Eager(tf32=value).rounds_to_tf32 for value in values] == ["", "convolutions", "all"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tf32": True}, "TF32 can"),
        ({"cuda_graphs": True}, "replays of CUDA graphs can"),
        ({"tf32": True, "cuda_graphs": True}, "and"),
    ],
)
def test_what_only_cuda_has_is_refused_on_the_cpu(artifact: Artifact, options: dict[str, Any], words: str) -> None:
    with pytest.raises(MissingCapability, match=words) as caught:
        Eager(**options).load(artifact, CPU)
    assert caught.value.remedy


@pytest.mark.parametrize(("capability", "ok"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_devices_without_tf32(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], ok: bool) -> None:
    monkeypatch.setattr(Eager, "available", classmethod(lambda cls, device: Availability(ok=True)))
    monkeypatch.setattr(eager.nvidia, "cuda_device", lambda index: CudaDevice(name="T", compute_capability=capability))
    found = Eager(tf32=True).runnable(Device(kind="cuda"))
    assert found.ok == ok
    assert ok or "sm75" in found.reason
    assert Eager().as_shipped(Device(kind="cuda")).runnable(Device(kind="cuda")).ok
    assert Eager.usual_half(Device(kind="cuda")) == ("bf16" if ok else "fp16")


@pytest.mark.parametrize(
    ("capability", "installed", "variables", "words"),
    [
        ((6, 1), "triton gcc Python.h", {}, "needs compute capability 7.0, and cuda:0 is sm61"),
        ((8, 9), "triton Python.h", {}, "no C compiler 'gcc' or 'clang'"),
        ((8, 9), "triton g++ Python.h", {"CXX": "g++"}, "no C compiler"),
        ((8, 9), "triton gcc Python.h", {"CC": "cc-9"}, "no C compiler 'cc-9'"),
        ((8, 9), "gcc Python.h", {}, "triton is not installed"),
        ((8, 9), "triton gcc", {}, "(Python.h) are missing"),
        ((7, 0), "triton clang Python.h", {}, ""),
    ],
)
def test_compiled_on_cuda_needs_what_triton_needs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    installed: str,
    variables: dict[str, str],
    words: str,
) -> None:
    for name in ("available", "installed"):
        monkeypatch.setattr(Eager, name, classmethod(lambda cls, device: Availability(ok=True)))
    monkeypatch.setattr(eager.nvidia, "cuda_device", lambda index: CudaDevice(name="T", compute_capability=capability))
    monkeypatch.setattr(eager.shutil, "which", lambda name: name if name in installed.split() else None)
    monkeypatch.setattr(eager, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(eager.sysconfig, "get_path", lambda name: tmp_path)
    if "Python.h" in installed:
        (tmp_path / "Python.h").touch()
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
        if name in variables:
            monkeypatch.setenv(name, variables[name])
    answer = Compiled.available(Device(kind="cuda"))
    assert (answer.ok, words in answer.reason) == (not words, True)


@pytest.fixture
def tf32_as_it_was() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.usefixtures("tf32_as_it_was")
@pytest.mark.parametrize("tf32", [False, True, "convolutions"])
def test_tf32_is_as_asked_for_products_and_convolutions(monkeypatch: pytest.MonkeyPatch, tf32: Any) -> None:
    """In both of torch's ways to ask, which raise where they disagree."""
    assert torch.backends.cudnn.allow_tf32  # torch's own default, which a float32 baseline cannot leave
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager.allow_tf32(Device(kind="cuda"), matmul=tf32 is True, cudnn=bool(tf32))
        backends = torch.backends
        allowed = [tf32 is True, bool(tf32)]
        assert [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32] == allowed
        assert (torch.get_float32_matmul_precision() == "high") == allowed[0]
        precisions = [backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision]
        assert [one == "tf32" for one in precisions] == allowed


class FakeStream:
    def __init__(self, device: str) -> None:
        self.cuda_stream = id(self)
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


class FakeGraph:
    """Replays what the module computed while it was captured."""

    current: "FakeGraph | None" = None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        assert FakeGraph.current is None
        FakeGraph.current = self

    def capture_end(self) -> None:
        graph, FakeGraph.current = FakeGraph.current, None
        if graph and graph.calls == ["failed"]:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        with torch.inference_mode():
            for call in self.calls:
                call()


class OnHost(Device):
    """A CUDA device whose tensors are on the host."""

    kind: str = "cuda"

    def __str__(self) -> str:
        return "cpu"


class Doubling:
    """y = 2x, and what was asked of it; ``error`` is raised while a graph is captured."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls, self.streams, self.error = 0, [], error  # type: ignore[var-annotated]

    def __call__(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls += 1
        result = x * 2
        if FakeGraph.current:
            if self.error:
                FakeGraph.current.calls = ["failed"]
                raise self.error
            FakeGraph.current.calls.append(lambda: result.copy_(x * 2))
        return (result,)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """Streams in the order in which they became the thread's current one."""
    seen: list[FakeStream] = []
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "set_stream", seen.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(FakeGraph, "current", None)
    return seen


def opened(kind: type[EagerSession], forward: Doubling) -> Any:
    return kind(forward, SIGNATURE, OnHost(), None, lambda: None)  # type: ignore[arg-type]


def doubled(seed: int = 0) -> Array:
    return np.asarray(feeds(seed)["x"] * 2)


def test_work_goes_to_the_sessions_own_stream(current: list[FakeStream]) -> None:
    first = opened(EagerSession, Doubling())
    second = first.sibling()
    bounds = [one.bind(feeds()) for one in (first, second)]
    for one, bound in zip((first, second, first), (*bounds, bounds[0]), strict=True):
        one.enqueue(bound)
        assert current[-1].cuda_stream == one.cuda_stream
    assert first.cuda_stream != second.cuda_stream


def test_the_third_call_is_captured_and_replayed(current: list[FakeStream]) -> None:
    module = Doubling()
    session = opened(GraphedSession, module)
    bound = session.bind(feeds())
    for _ in range(6):
        session.enqueue(bound)
        np.testing.assert_array_equal(session.fetch()["y"], doubled())
    assert module.calls == 3
    assert len(bound.graph.calls) == 1
    assert len(current) >= 6


@pytest.mark.usefixtures("current")
def test_checks_are_of_what_graphs_answer() -> None:
    session = opened(GraphedSession, Doubling())
    np.testing.assert_array_equal(run_once(session, feeds(), replayed=True)["y"], doubled())
    module = Doubling(RuntimeError("operation not permitted when stream is capturing"))
    with pytest.raises(ModelError, match="captured no graph"):
        run_once(opened(GraphedSession, module), feeds(), replayed=True)
    assert run_once(opened(GraphedSession, module), feeds(), replayed=False)


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), ModelError, "not permitted when stream"),
        (LibraryError("a branch on values"), ModelError, "LibraryError: a branch on values"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), StepOutOfMemory, "2 GiB"),
    ],
)
def test_what_cannot_be_captured_is_said_in_words(error: Exception, kind: type[Exception], words: str) -> None:
    session = opened(GraphedSession, Doubling(error))
    bound = session.bind(feeds())
    for _ in range(2):
        session.enqueue(bound)
    with pytest.raises(kind, match=words) as caught:
        session.enqueue(bound)
    assert isinstance(caught.value, StepOutOfMemory) or "without CUDA graphs" in caught.value.remedy  # type: ignore[attr-defined]


@pytest.mark.usefixtures("current")
def test_a_closed_session_lets_go_of_its_graphs() -> None:
    session = opened(GraphedSession, Doubling())
    bound = session.bind(feeds())
    for _ in range(4):
        session.enqueue(bound)
    session.close()
    assert bound.graph is None
    assert bound.outputs == ()
    with pytest.raises(UsageError, match="closed"):
        session.enqueue(bound)


BOTH = Signature(inputs=(TensorSpec.parse("x:float32:2"),), outputs=(TensorSpec.parse("y:float32:2"),))


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what ``work`` does in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    return found[0]


@pytest.fixture
def native() -> ort.InferenceSession:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_on_the_cpu_onnxruntime_has_its_weights_once(native: ort.InferenceSession) -> None:
    def refused() -> OnnxRuntimeSession:
        raise AssertionError("another session was opened")

    first = OnnxRuntimeSession(native, BOTH, CPU, None, refused)
    second = first.sibling()
    assert second._session is native
    assert not first.sibling_note
    first.close()
    np.testing.assert_array_equal(second.run({"x": np.ones(2, np.float32)})["y"], [-1, -1])


def test_on_cuda_onnxruntime_opens_a_session_for_each_stream(native: ort.InferenceSession) -> None:
    again = OnnxRuntimeSession(native, BOTH, CPU, None, lambda: again)
    first = OnnxRuntimeSession(native, BOTH, CPU, object(), lambda: again)
    assert first.sibling() is again
    assert "weights" in first.sibling_note


def test_eager_shares_the_module() -> None:
    def module(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (-x,)

    entered: list[int] = []
    first = EagerSession(module, BOTH, CPU, None, lambda: entered.append(threading.get_ident()))
    second = in_thread(first.sibling)
    assert second.forward is module
    assert entered
    assert entered != [threading.get_ident()]


class ThroughNumpy(torch.nn.Module):
    """Go through numpy between two graphs, where TorchDynamo expects another tensor than there is in inference mode."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        ones = torch.from_numpy(np.ones(4, dtype=np.float32) * float(x.sum().item() > 0))
        torch._dynamo.graph_break()
        return (2 * x + ones,)


def test_compiled_code_that_refuses_inference_mode_runs_without() -> None:
    signature = Signature(inputs=(TensorSpec.parse("x:float32:4"),), outputs=(TensorSpec.parse("y:float32:4"),))
    session = EagerSession(
        torch.compile(ThroughNumpy(), backend="eager", dynamic=False), signature, CPU, None, lambda: None
    )
    for _ in range(2):
        assert session.run({"x": np.ones(4, np.float32)})["y"].tolist() == [3, 3, 3, 3]
    assert not torch.is_inference(session._outputs[0])
    session.close()


def test_a_module_is_called_in_inference_mode() -> None:
    first = EagerSession(torch.nn.Identity(), BOTH, CPU, None, lambda: None)
    first.forward = lambda x, y: (x + y,)
    first.enqueue((torch.ones(1), torch.ones(1)))
    assert torch.is_inference(first._outputs[0])


def test_a_thread_gets_as_many_openmp_threads_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP has a number for each thread: a new one starts with that of the machine."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: asked.append((count, threading.get_ident())))
    ident = in_thread(lambda: (Eager().enter_thread(Device(threads=3)), threading.get_ident())[1])
    assert asked == [(3, ident)]


def test_a_thread_has_dynamos_and_inductors_settings_too() -> None:
    """They are of a context; one at torch's own would fall back to eager without a word, and draw other numbers."""

    def settings() -> tuple[int, bool, bool | None]:
        Compiled().enter_thread(CPU)
        return config.recompile_limit, config.fail_on_recompile_limit_hit, inductor.fallback_random

    assert in_thread(settings) == (64, True, True)


def test_a_module_that_raises_is_told_with_its_line_and_the_integers_that_it_got(artifact: Artifact) -> None:
    with Eager().load(artifact, CPU) as session, pytest.raises(ModelError) as caught:
        session.run({**feeds(), "rows": np.array([0, 1, 7])})
    assert caught.value.message.startswith("the module raised IndexError: index 7 is out of bounds")
    assert caught.value.message.endswith("(eager_net.py:11)")
    assert caught.value.remedy.endswith("integers may be beyond what it takes (rows from 0 to 7)")


@pytest.mark.parametrize("error", [LibraryError("numbers lie in 0 to 1"), KeyError("x"), MemoryError("2 GiB")])
def test_a_module_may_raise_exceptions_of_any_class(error: Exception) -> None:
    def refuse(*values: Any) -> Any:
        raise error

    session = EagerSession(refuse, SIGNATURE, CPU, None, lambda: None)
    bound = session.bind(feeds())
    with pytest.raises(StepOutOfMemory if isinstance(error, MemoryError) else ModelError) as caught:
        session.enqueue(bound)
    assert str(error) in caught.value.message
    assert isinstance(error, MemoryError) or type(error).__name__ in caught.value.message
    assert session.differentiate(feeds(), {"y": doubled()}) == {}
    session.close()
    with pytest.raises(UsageError):
        session.enqueue(bound)
    with pytest.raises(UsageError):
        session.differentiate(feeds(), {"y": doubled()})


_COMPILED = """RuntimeError when making fake tensor call
  Explanation: Dynamo failed to run FX node with fake tensors: call_function conv2d(*()): got RuntimeError('{}')
from user code:
   File "/nets/cnn.py", line 13, in forward
    x = self.stem(image.float())
"""


@pytest.mark.parametrize("form", ["{}", _COMPILED])
def test_a_module_that_casts_inside_is_told_that_it_has_no_lower_precision(form: str) -> None:
    met = "Input type (float) and bias type (c10::BFloat16) should be the same"
    error = _translate_error(RuntimeError(form.format(met)))
    assert isinstance(error, ModelError)
    assert error.message == f"the module raised RuntimeError: {met}{' (cnn.py:13)' if form == _COMPILED else ''}"
    assert "leave --precision bf16 out" in str(error.remedy)
