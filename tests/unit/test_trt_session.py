"""What TensorRT sessions hold, for how long, and what is left when something fails; with fakes that mind the rules.

The fake engine doubles x into y, and lists where x is positive, at the addresses it is given. It fails a test that runs
it with too little memory, captures it cold, or leaves it without an address.
"""

import contextlib
import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.pipeline.engines.cuda_allocator import (
    ACTIVATIONS,
    OUTPUTS,
    TRANSFERS,
    WEIGHTS,
    WORKSPACE,
    active,
    counting,
)
from enginesmith.pipeline.engines.tensorrt import loader, session
from enginesmith.pipeline.engines.tensorrt.loader import (
    ActivationMemory,
    Opened,
    RuntimeLog,
    _validate_allowed,
    open_engine,
)
from enginesmith.pipeline.engines.tensorrt.manifest import EngineManifest
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, RunOptions
from enginesmith.pipeline.engines.tensorrt.session import TensorRTSession
from enginesmith.pipeline.engines.tensorrt.versions import capabilities
from enginesmith.pipeline.errors import MissingCapability, ModelError, SignatureError, StepOutOfMemory, UsageError
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:batch,4"),), outputs=(TensorSpec.parse("y:float32:batch,4"),))
UNKNOWN = Signature(inputs=SIGNATURE.inputs, outputs=(*SIGNATURE.outputs, TensorSpec.parse("found:int64:n")))
HERE = Device()  # fakes run on the host, where torch's tensors can be


def named(name: str) -> Any:
    return SimpleNamespace(name=name)


class Base:
    """What TensorRT's callback interfaces are in Python."""


TRT = SimpleNamespace(
    IOutputAllocator=Base,
    IGpuAsyncAllocator=Base,
    ILogger=Base,
    TensorLocation=SimpleNamespace(HOST="host", DEVICE="device"),
    ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user"),
    DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
    CudaGraphStrategy=SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole", DISABLED="off"),
)


class Stream:
    """Counts who waits for it."""

    made = 0

    def __init__(self, device: str) -> None:
        Stream.made += 1
        self.cuda_stream = 0x1000 * Stream.made
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


class Graph:
    """What is captured runs again at the same addresses."""

    capturing: "Graph | None" = None
    fails = False

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.replays = 0

    def capture_begin(self, capture_error_mode: str) -> None:
        Graph.capturing = self

    def capture_end(self) -> None:
        Graph.capturing = None
        if Graph.fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.replays += 1
        for one in self.work:
            one()


class Context:
    """An execution context that insists on what TensorRT's documents ask of its callers."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.shape: tuple[int, ...] = ()
        self.memory = (0, -1)
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.runs = self.placed = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1,) if name == "found" else self.shape

    def update_device_memory_size_for_shapes(self) -> int:
        return self.engine.needs * self.shape[0]

    def set_device_memory(self, address: int, size: int) -> None:
        self.placed += 1
        self.memory = (address, size)
        if size < self.engine.insists:
            self.engine.log.take("ERROR", "size must be at least that of the profile")

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address != 0

    def set_output_allocator(self, name: str, one: Any) -> bool:
        self.allocators[name] = one  # for good, as the bindings keep it alive
        return True

    def execute_async_v3(self, stream: int) -> bool:
        if self.engine.says:
            self.engine.log.take("ERROR", self.engine.says)
            return False
        assert self.memory[1] >= self.update_device_memory_size_for_shapes()
        work = self._work(dict(self.addresses))
        if Graph.capturing:
            assert self.runs, "the first call loads kernels, which a capture cannot hold"
            Graph.capturing.work.append(work)
        else:
            work()
        self.runs += 1
        return True

    def _work(self, addresses: dict[str, int]) -> Callable[[], None]:
        shape, allocators = self.shape, self.allocators

        def work() -> None:
            x = view(addresses["x"], shape)
            view(addresses["y"], shape)[...] = 2 * x
            if one := allocators.get("found"):
                found = np.flatnonzero(x > 0)
                at = one.reallocate_output_async("found", 0, max(1, found.nbytes), 256, 0x1000)
                ctypes.memmove(at, found.ctypes.data, found.nbytes)
                one.notify_shape("found", found.shape)

        return work


def view(address: int, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    if not count:
        return np.zeros(shape, np.float32)
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).reshape(shape)


class Engine:
    """An engine for up to eight samples."""

    profiles: tuple[tuple[int, int, int], ...] = ((0, 4, 8),)
    needs, most, insists = 100, 1000, 0
    """Bytes of activations: for a sample, for the profile, and what is asked for after all."""
    says = ""
    streamable_weights_size = weight_streaming_budget_v2 = 500
    location, input_dtype = "device", "FLOAT"

    def __init__(self, log: RuntimeLog) -> None:
        self.log = log
        self.made: list[weakref.ref[Context]] = []

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return [(batch, 4) for batch in self.profiles[index]]

    def get_tensor_dtype(self, name: str) -> Any:
        return named({"x": self.input_dtype, "y": "FLOAT", "found": "INT64"}[name])

    def get_tensor_location(self, name: str) -> str:
        return self.location if name == "x" else "device"

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return self.most

    def create_execution_context(self, config: Any) -> Any:
        context = Context(self)
        self.made.append(weakref.ref(context))
        return context

    def create_runtime_config(self) -> Any:
        return Config()

    @property
    def contexts(self) -> list[Context]:
        """Those that are still alive."""
        return [context for one in self.made if (context := one()) is not None]


class Config:
    """A runtime configuration, and the cache of kernels that it hands out."""

    cuda_graph_strategy = ""

    def __init__(self) -> None:
        self.cache = SimpleNamespace(content=b"", taken=b"")

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        assert strategy == "user"

    def create_runtime_cache(self) -> Any:
        def deserialize(data: bytes) -> bool:
            self.cache.taken = self.cache.content = data
            return not data.startswith(b"other")

        self.cache.deserialize, self.cache.serialize = deserialize, lambda: self.cache.content
        return self.cache

    def set_runtime_cache(self, cache: Any) -> bool:
        return True


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUDA as far as sessions use it."""
    Stream.made, Graph.capturing, Graph.fails = 0, None, False
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda one: contextlib.nullcontext())
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *one: None)
    yield
    assert not loader._shared, "the last session leaves shared memory"


@pytest.fixture
def engine() -> Engine:
    return Engine(RuntimeLog())


def open_session(engine: Engine, signature: Signature = SIGNATURE, **options: Any) -> TensorRTSession:
    opened = Opened(engine, object(), object(), Config(), engine.log, captures_itself=False)
    return TensorRTSession(TRT, opened, signature, HERE, RunOptions(**options))


def feeds(batch: int, value: float = 1.0) -> dict[str, Array]:
    return {"x": np.full((batch, 4), value, np.float32)}


def out_of_memory(*given: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 800 bytes.\nmore")


def right(found: TensorRTSession, batch: int, value: float = 1.0) -> None:
    np.testing.assert_array_equal(found.run(feeds(batch, value))["y"], np.full((batch, 4), 2 * value))


def test_the_first_profile_that_takes_the_shapes_is_chosen(engine: Engine) -> None:
    engine.profiles = ((1, 1, 1), (2, 4, 8))
    with open_session(engine) as one:
        for batch in (1, 2, 8, 2):
            right(one, batch)
        assert [context.profile for context in engine.contexts] == [0, 1, 1]
        with pytest.raises(SignatureError, match=r"'x' of shape \[9, 4\]; .* from \[2, 4\] to \[8, 4\]") as caught:
            one.bind(feeds(9))
    assert "--shape" in caught.value.remedy


def test_shapes_that_were_not_used_for_longest_are_forgotten(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MOST_CONTEXTS", 2)
    with open_session(engine) as one:
        for batch in (2, 3, 2, 4, 2):
            right(one, batch)
        assert len(engine.made) == 3
        right(one, 3)
        assert len(engine.made) == 4


def test_every_context_works_in_the_memory_of_the_moment(engine: Engine) -> None:
    with open_session(engine) as one:
        small = one.bind(feeds(2, 3.0))
        one.enqueue(small)
        right(one, 8)
        one.enqueue(small)
        np.testing.assert_array_equal(one.fetch()["y"], np.full((2, 4), 6.0))
        held = (one.activation_memory.address, one.activation_memory.bytes)
        assert [context.memory for context in engine.contexts] == [held, held]
        assert [context.placed for context in engine.contexts] == [2, 1]


def test_outputs_stay_as_they_were_fetched(engine: Engine) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        one.enqueue(bound)
        first = one.fetch()["y"]
        bound.inputs["x"].zero_()
        one.enqueue(bound)
        np.testing.assert_array_equal(first, np.full((2, 4), 2.0))


def test_a_graph_is_captured_after_a_first_call_and_void_once_the_activations_moved(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bound = one.bind(feeds(2))
        one.enqueue(bound)
        assert bound.graph is None
        for expected in (1, 2, 3):
            one.enqueue(bound)
            assert bound.graph.replays == expected
        assert engine.contexts[0].runs == 2  # the first call, and the capture
        old = bound.graph
        right(one, 8)
        one.enqueue(bound)
        assert old.replays == 3
        one.enqueue(bound)
        assert bound.graph is not old
        np.testing.assert_array_equal(one.fetch()["y"], np.full((2, 4), 2.0))


@pytest.mark.parametrize(("asked", "by_itself"), [(False, False), (True, True)])
def test_nothing_is_captured_unless_that_was_asked_for(engine: Engine, asked: bool, by_itself: bool) -> None:
    """Nor of an engine that captures by itself."""
    opened = Opened(engine, object(), object(), Config(), engine.log, captures_itself=by_itself)
    with TensorRTSession(TRT, opened, SIGNATURE, HERE, RunOptions(cuda_graphs=asked)) as one:
        bound = one.bind(feeds(2))
        for _ in range(4):
            one.enqueue(bound)
        assert bound.graph is None


def test_outputs_of_unknown_shape_are_no_part_of_a_graph(engine: Engine) -> None:
    with open_session(engine, UNKNOWN, cuda_graphs=True) as one, pytest.raises(ModelError, match="'found'") as caught:
        one.bind(feeds(2))
    assert "--cuda-graphs" in caught.value.remedy


@pytest.mark.parametrize(
    ("says", "error", "message"),
    [
        ("Error Code 3: no such tactic", ModelError, "did not run this input"),
        ("Error Code 1: Cuda Runtime (out of memory)", StepOutOfMemory, "out of memory"),
    ],
)
def test_a_run_that_tensorrt_does_not_take(engine: Engine, says: str, error: type[Exception], message: str) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        engine.says = says
        with pytest.raises(error, match=message):
            one.enqueue(bound)


def test_a_sibling_has_contexts_and_activations_of_its_own(engine: Engine) -> None:
    with open_session(engine) as one:
        with one.sibling() as other:
            right(one, 2)
            right(other, 8)
            assert (one.activation_memory.bytes, other.activation_memory.bytes) == (200, 800)
            assert len(engine.contexts) == 2
        right(one, 4)


def test_the_engine_goes_with_its_last_session(engine: Engine) -> None:
    opened = Opened(engine, object(), object(), Config(), engine.log, captures_itself=False)
    first = TensorRTSession(TRT, opened, SIGNATURE, HERE, RunOptions())
    second = first.sibling()
    first.close()
    first.close()
    assert opened.engine is engine
    second.close()
    assert opened.engine is None
    assert opened.runtime is None


def test_what_a_session_cannot_do_before_and_after(engine: Engine) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        with pytest.raises(UsageError, match="nothing was run"):
            one.fetch()
    for call in (lambda: one.bind(feeds(2)), lambda: one.enqueue(bound), one.fetch):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_enqueue_neither_waits_nor_moves_memory(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bound = one.bind(feeds(3))
        before = (one._stream.waits, one.activation_memory.generation, one.activation_memory.bytes)
        for _ in range(4):
            one.enqueue(bound)
        assert (one._stream.waits, one.activation_memory.generation, one.activation_memory.bytes) == before


def test_size_that_is_not_taken_is_the_profiles(engine: Engine) -> None:
    engine.insists = 1000
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        assert one.activation_memory.bytes == 1000
        placed = engine.contexts[0].placed
        one.enqueue(bound)
        assert engine.contexts[0].placed == placed


@pytest.mark.parametrize(("most", "held"), [(1000, 1000), (0, 0)])
def test_size_that_is_not_known_for_shapes_is_the_profiles(engine: Engine, most: int, held: int) -> None:
    engine.needs, engine.most = 0, most
    with open_session(engine) as one:
        one.run(feeds(2))
        assert one.activation_memory.bytes == held
        assert engine.contexts[0].memory[1] == held


def test_forgotten_context_lives_as_long_as_something_is_bound(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MOST_CONTEXTS", 2)
    with open_session(engine) as one:
        kept = one.bind(feeds(1, 7.0))
        for batch in (2, 3, 4):
            one.run(feeds(batch))
        gc.collect()
        assert sorted(context.shape[0] for context in engine.contexts) == [1, 3, 4]
        one.enqueue(kept)
        np.testing.assert_array_equal(one.fetch()["y"], np.full((1, 4), 14.0))


def test_contexts_go_when_the_session_closes(engine: Engine) -> None:
    one = open_session(engine)
    bound = one.bind(feeds(2))
    one.enqueue(bound)
    waits = one._stream.waits
    one.close()
    assert one._stream.waits == waits + 1  # not while they run
    assert bound.context.native is None
    assert engine.contexts == []
    assert one.activation_memory.bytes == 0


def test_capture_that_fails_leaves_the_session_usable(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bound = one.bind(feeds(2))
        one.enqueue(bound)
        Graph.fails = True
        with pytest.raises(ModelError, match="during capture") as caught:
            one.enqueue(bound)
        assert "--cuda-graphs" in caught.value.remedy
        np.testing.assert_array_equal(one.run(feeds(2, 4.0))["y"], np.full((2, 4), 8.0))
        Graph.fails = False
        one.enqueue(bound)
        assert bound.graph.replays == 1


def test_call_that_is_refused_while_captured(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bound = one.bind(feeds(2))
        one.enqueue(bound)
        engine.says = "this layer synchronises"
        with pytest.raises(ModelError, match="synchronises"):
            one.enqueue(bound)
        assert bound.graph is None
        assert Graph.capturing is None


def test_graphs_of_two_bounds_of_one_shape(engine: Engine) -> None:
    with open_session(engine, cuda_graphs=True) as one:
        bounds = [one.bind(feeds(2, value)) for value in (1.0, 2.0)]
        for _ in range(3):
            for value, bound in enumerate(bounds, 1):
                one.enqueue(bound)
                np.testing.assert_array_equal(one.fetch()["y"], np.full((2, 4), 2.0 * value))
        assert [bound.graph.replays for bound in bounds] == [2, 2]


def test_memory_of_an_output_of_unknown_shape_is_freed_with_what_was_bound(engine: Engine) -> None:
    with open_session(engine, UNKNOWN) as one:
        rooms = []
        for _ in range(3):
            bound = one.bind(feeds(1))
            one.enqueue(bound)
            rooms.append(weakref.ref(bound.outputs["found"]))
        del bound
        gc.collect()
        assert [room() is None for room in rooms] == [True, True, False]


def test_output_of_unknown_shape_without_elements(engine: Engine) -> None:
    with open_session(engine, UNKNOWN) as one:
        empty = one.run(feeds(1, -1.0))["found"]
        assert (empty.shape, empty.dtype) == ((0,), np.int64)
        np.testing.assert_array_equal(one.run(feeds(1))["found"], [0, 1, 2, 3])


def test_tensor_without_elements_has_an_address(engine: Engine) -> None:
    with open_session(engine) as one:
        assert one.run(feeds(0))["y"].shape == (0, 4)


def test_engines_that_share_activations(engine: Engine) -> None:
    other = Engine(engine.log)
    with open_session(engine, share_activation_memory=True, cuda_graphs=True) as first:
        bound = first.bind(feeds(2, 3.0))
        for _ in range(2):
            first.enqueue(bound)
        with open_session(other, share_activation_memory=True) as second:
            second.run(feeds(8))
            first.enqueue(bound)  # its graph is of memory that moved
            assert bound.graph is None
            assert engine.contexts[0].memory == other.contexts[0].memory
        assert first.activation_memory.bytes == 800  # still in use
        np.testing.assert_array_equal(first.fetch()["y"], np.full((2, 4), 6.0))
    assert first.activation_memory.bytes == 0


def test_activation_memory_grows_and_does_not_shrink() -> None:
    held = ActivationMemory("cpu")
    assert (held.bytes, held.address) == (0, 0)
    held.reserve(0)
    assert held.generation == 0
    held.reserve(100)
    first = (held.generation, held.address)
    held.reserve(60)
    assert (held.generation, held.address, held.bytes) == (*first, 100)
    held.reserve(101)
    assert held.bytes == 101
    assert held.generation > first[0]


def test_the_allocator_takes_and_gives_back_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int, int]] = []
    freed: list[int] = []

    def alloc(size: int, device: int, stream: int) -> int:
        if size > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        taken.append((size, device, stream))
        return 0xABC000

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", alloc)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", freed.append)
    found = loader.allocator(TRT, loader.ledger_of(1))
    stream = 0x7F0000000000
    assert found.allocate_async(10, 256, stream, 1) == found.allocate_async(10, 256, 1, stream) == 0xABC000
    assert found.allocate(20, 256, 1) == 0xABC000
    assert taken == [(10, 1, stream), (10, 1, stream), (20, 1, 0)]
    assert found.allocate(0, 256, 0) == 0
    assert found.allocate(5000, 256, 0) == 0
    assert found.deallocate(0xABC000) is True
    assert found.deallocate_async(0, 0) is True
    assert freed == [0xABC000]
    assert found.reallocate(1, 256, 5) == 0


class Streaming:
    """An engine whose budget is set as it is on TensorRT: a value that it does not take leaves the old one."""

    def __init__(self, whole: int, takes: bool = True) -> None:
        self.streamable_weights_size, self._takes, self._budget = whole, takes, whole

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, value: int) -> None:
        self._budget = value if self._takes else self._budget


@pytest.mark.parametrize(("budget", "streams", "held"), [(None, False, 100), (40, True, 40), (1000, False, 100)])
def test_a_streaming_budget_is_set_up_to_what_there_is(budget: int | None, streams: bool, held: int) -> None:
    engine = Streaming(100)
    assert loader._stream_weights(engine, RunOptions(weight_streaming_budget=budget)) is streams
    assert engine.weight_streaming_budget_v2 == held


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        (Streaming(0), {}, "streams no weights"),
        (Streaming(100, takes=False), {}, "does not take"),
        (Streaming(100), {"cuda_graphs": True}, "CUDA graph"),
    ],
)
def test_streaming_budgets_that_do_not_go(engine: Streaming, options: dict[str, bool], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader._stream_weights(engine, RunOptions(weight_streaming_budget=40, **options))


def test_memory_that_runs_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2, 3.0))
        one.enqueue(bound)
        generation = one.activation_memory.generation
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", out_of_memory)
            with pytest.raises(StepOutOfMemory, match=r"Tried to allocate 800 bytes\."):
                one.bind(feeds(8))
        assert one.activation_memory.generation > generation  # graphs of before are void
        one.enqueue(bound)
        np.testing.assert_array_equal(one.fetch()["y"], np.full((2, 4), 6.0))


def test_errors_of_before_are_not_quoted(engine: Engine) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        engine.log.take("ERROR", "Error Code 2: OutOfMemory (of long ago)")
        engine.says = "Cuda Runtime (an illegal memory access was encountered)"
        with pytest.raises(ModelError, match="illegal memory access"):
            one.enqueue(bound)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int32", "bool", "int8", "uint8"])
def test_arrays_come_back_as_they_went(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    np.testing.assert_array_equal(session.to_numpy(session.to_torch(array)), array)
    assert session.to_numpy(session.to_torch(array)).dtype == array.dtype


def test_bfloat16_goes_by_its_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -2.0, math.inf], ml_dtypes.bfloat16)
    tensor = session.to_torch(array)
    assert tensor.dtype == torch.bfloat16
    assert session.to_numpy(tensor).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(session.to_numpy(tensor), array)


def test_an_output_that_no_array_can_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="INT4"):
        session.torch_dtype("INT4")


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_strided_read_only_and_scalar_feeds(shape: tuple[int, ...]) -> None:
    array = np.broadcast_to(np.array(1.5, np.float32), shape)
    tensor = session.to_torch(array[..., ::-1] if shape else array)
    assert (tuple(tensor.shape), tensor.is_contiguous()) == (shape, True)
    np.testing.assert_array_equal(session.to_numpy(tensor), array)


def opened_from(
    engine: Engine | None, tmp_path: Path, flavour: Any = "tensorrt", says: str = "", **options: Any
) -> Opened:
    """Open a file that the fake runtime takes for ``engine``."""

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger
            self.gpu_allocator = None

        def deserialize_cuda_engine(self, plan: Any) -> Engine | None:
            assert self.gpu_allocator is not None, "weights would not be counted"
            assert bytes(plan) == b"plan"
            if active(0):
                self.gpu_allocator.allocate_async(500, 256, 0x7F0000000000, 0)
            if says:
                self.logger.log(named("ERROR"), says)
            return engine

    path = tmp_path / "model.engine"
    path.write_bytes(b"plan")
    manifest = EngineManifest.model_construct(signature=SIGNATURE, options=BuildOptions(), sha256="0" * 64)
    plugins = staticmethod(lambda log, namespace: True)
    trt = type("Trt", (), {**vars(TRT), "Runtime": Runtime, "init_libnvinfer_plugins": plugins})
    return open_engine(trt, path, manifest, capabilities(flavour), HERE, BuildOptions(), RunOptions(**options))


def test_engine_that_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.engine, and said: generated on an incompatible device"):
        opened_from(None, tmp_path, says="generated on an incompatible device")
    with pytest.raises(StepOutOfMemory):
        opened_from(None, tmp_path, says="Requested amount of GPU memory (9 bytes) could not be allocated.")


class Heap:
    """Memory that is nowhere; has so many bytes in all."""

    def __init__(self, left: int = 1 << 20) -> None:
        self.left, self.taken = left, 0

    def take(self, size: int, stream: int) -> int:
        self.taken += 1
        return 0x1000 * self.taken if size <= self.left else 0

    def give(self, address: int) -> None:
        pass


def test_what_a_session_takes_is_counted_by_tag(engine: Engine) -> None:
    with counting(0, Heap()) as ledger:
        with open_session(engine, UNKNOWN) as one:
            bound = one.bind(feeds(2))
            assert ledger.account().by_tag == {TRANSFERS: 32, ACTIVATIONS: 200, OUTPUTS: 32}
            one.enqueue(bound)
            assert ledger.account().by_tag[OUTPUTS] == 32 + 64  # eight positions, which only the run tells of
            one.run(feeds(8))
            assert ledger.account().by_tag[ACTIVATIONS] == 800
            del bound
        gc.collect()
        assert ledger.leaks() == {}
        assert ledger.account().unknown_frees == ledger.account().double_frees == 0


def test_memory_that_tensorrt_asks_for_has_the_tag_of_its_time(engine: Engine, tmp_path: Path) -> None:
    with counting(0, Heap()) as ledger:
        found = opened_from(engine, tmp_path)
        assert ledger.account().by_tag == {WEIGHTS: 500}
        with TensorRTSession(TRT, found, SIGNATURE, HERE, RunOptions()) as one:
            one.bind(feeds(2))
            found.allocator.allocate_async(70, 256, 0, 0)
            scratch = engine.contexts[0].temporary_allocator.allocate_async(9, 256, 0, 0)
            assert ledger.account().by_tag[WORKSPACE] == 79
            assert engine.contexts[0].temporary_allocator.deallocate_async(scratch, 0) is True
            assert engine.contexts[0].temporary_allocator.deallocate_async(scratch, 0) is False
        assert (ledger.account().double_frees, ledger.account().unknown_frees) == (1, 0)


def test_nothing_is_counted_unless_that_was_asked_for(engine: Engine) -> None:
    with open_session(engine) as one:
        bound = one.bind(feeds(2))
        with counting(0, Heap()) as ledger:
            one.enqueue(bound)
        assert ledger.account().taken == 0


def test_inputs_that_no_feeds_can_be(engine: Engine, tmp_path: Path) -> None:
    engine.input_dtype = "HALF"
    with pytest.raises(ModelError, match="'x' is HALF, not float32"):
        opened_from(engine, tmp_path)
    engine.input_dtype, engine.location = "FLOAT", "host"
    with pytest.raises(ModelError, match="decide shapes"):
        opened_from(engine, tmp_path)


def test_streaming_has_scratch_and_no_graphs(engine: Engine, tmp_path: Path) -> None:
    found = opened_from(engine, tmp_path, weight_streaming_budget=100)
    with TensorRTSession(TRT, found, SIGNATURE, HERE, RunOptions()) as one:
        one.bind(feeds(2))
        assert one.activation_memory.bytes == 1000
    with pytest.raises(UsageError, match="CUDA graph"):
        opened_from(engine, tmp_path, weight_streaming_budget=100, cuda_graphs=True)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))
    return tmp_path / "store" / "kernels"


@pytest.mark.parametrize(
    ("contents", "warm"),
    [((b"one", b"one"), True), ((b"one", b"one and two"), True), ((b"other", b"ours"), False)],
    ids=["the same", "more", "of another device"],
)
def test_compiled_kernels_from_one_run_to_the_next(
    engine: Engine, tmp_path: Path, kernels: Path, contents: tuple[bytes, bytes], warm: bool
) -> None:
    for expected_warm, content in zip((False, warm), contents, strict=True):
        found = opened_from(engine, tmp_path, "tensorrt_rtx")
        assert bool(found.cached_bytes) == expected_warm
        found.users, found.cache.content = 1, content
        found.leave()
        assert [path.read_bytes() for path in kernels.iterdir()] == [content]


def test_kernels_that_cannot_be_kept_are_no_error(engine: Engine, tmp_path: Path, kernels: Path) -> None:
    kernels.parent.mkdir()
    kernels.touch()
    found = opened_from(engine, tmp_path, "tensorrt_rtx")
    found.users, found.cache.content = 1, b"kernels"
    found.leave()
    assert found.engine is None


@pytest.mark.parametrize(("wanted", "strategy"), [(True, "whole"), (False, "off")])
def test_rtx_is_told_at_first(engine: Engine, tmp_path: Path, kernels: Path, wanted: bool, strategy: str) -> None:
    found = opened_from(engine, tmp_path, "tensorrt_rtx", cuda_graphs=wanted)
    assert found.config.cuda_graph_strategy == strategy
    assert found.config.dynamic_shapes_kernel_specialization_strategy == "eager"


def test_one_logger_for_all_runtimes() -> None:
    trt = type("Trt", (), {"ILogger": Base})
    assert loader._logger(trt) is loader._logger(trt)


def test_host_code_and_plugins_are_the_user_s_to_allow() -> None:
    asked = EngineManifest.model_construct(options=BuildOptions(host_code=True, plugins=("/elsewhere/nms.so",)))
    with pytest.raises(MissingCapability, match="host code"):
        _validate_allowed(asked, BuildOptions(plugins=("nms.so",)))
    with pytest.raises(MissingCapability, match="nms"):
        _validate_allowed(asked, BuildOptions(host_code=True))
    _validate_allowed(asked, BuildOptions(host_code=True, plugins=("here/nms.so",)))
