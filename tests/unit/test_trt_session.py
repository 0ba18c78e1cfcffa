"""Sessions on an engine that stands for TensorRT's: it computes y = 2x on the host, and minds what it is told.

Only TensorRT and CUDA's streams and graphs are stood in for; buffers are torch's own.
"""

import contextlib
import ctypes
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.engines.trt import memory, opening, session
from enginesmith.pipeline.engines.trt.memory import ActivationMemory, activation_memory
from enginesmith.pipeline.engines.trt.opening import Opened, RuntimeLog
from enginesmith.pipeline.engines.trt.options import RunOptions
from enginesmith.pipeline.engines.trt.session import TensorRTSession
from enginesmith.pipeline.errors import ModelError, SignatureError, StepOutOfMemory, UsageError
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:batch,4"),), outputs=(TensorSpec.parse("y:float32:batch,4"),))
HOST = "HOST"
PROFILES = ((1, 1, 1), (2, 4, 8))
BYTES_EACH = 256


class FakeStream:
    cuda_stream = 7

    def __init__(self, device: str) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


class FakeGraph:
    """Replays what contexts ran while it was captured."""

    current: "FakeGraph | None" = None
    replays = 0

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        FakeGraph.current = self

    def capture_end(self) -> None:
        FakeGraph.current = None

    def replay(self) -> None:
        FakeGraph.replays += 1
        for call in self.calls:
            call()


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(FakeGraph, "replays", 0)
    monkeypatch.setattr(memory, "_shared", {})


class Native:
    """An execution context that fails a run which was not set up as it should be."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.profile = -1
        self.batch = 0
        self.memory = (0, 0)
        self.moves = 0
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.runs = 0

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return stream == FakeStream.cuda_stream

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.batch = shape[0]
        return name == "x"

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 4) if self.engine.unknown else (self.batch, 4)

    def update_device_memory_size_for_shapes(self) -> int:
        return BYTES_EACH * self.batch

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory, self.moves = (address, size), self.moves + 1

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return bool(address)

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    def execute_async_v3(self, stream: int) -> bool:
        if self.engine.broken or self.memory[1] < BYTES_EACH * self.batch or not self.memory[0]:
            return False
        run = self._run_at(dict(self.addresses))
        if FakeGraph.current:
            FakeGraph.current.calls.append(run)
        else:
            run()
        return True

    def _run_at(self, addresses: dict[str, int]) -> Any:
        def run() -> None:
            self.runs += 1
            count = 4 * self.batch
            given = np.ctypeslib.as_array((ctypes.c_float * count).from_address(addresses["x"]))
            target = addresses.get("y") or 0
            if self.engine.unknown:
                target = self.allocators["y"].reallocate_output_async("y", 0, 4 * count, 1, 0)
                self.allocators["y"].notify_shape("y", (self.batch, 4))
            np.ctypeslib.as_array((ctypes.c_float * count).from_address(target))[:] = 2 * given

        return run


class Engine:
    num_optimization_profiles = len(PROFILES)

    def __init__(self, unknown: bool = False) -> None:
        self.unknown, self.broken = unknown, False
        self.contexts: list[Native] = []

    def create_execution_context(self, config: Any) -> Native | None:
        self.contexts.append(Native(self))
        return self.contexts[-1]

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        return [(batch, 4) for batch in PROFILES[index]]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="FLOAT")

    def get_tensor_location(self, name: str) -> str:
        return "DEVICE"

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return BYTES_EACH * PROFILES[index][2]


class Base:
    """Stands for the library's classes that ours derive from."""


TRT = SimpleNamespace(IOutputAllocator=Base, IGpuAsyncAllocator=Base, TensorLocation=SimpleNamespace(HOST=HOST))


def opened_on(engine: Engine) -> Opened:
    return Opened(engine, object(), object(), object(), RuntimeLog(), captures_itself=False)


def open_session(engine: Engine, **options: Any) -> TensorRTSession:
    return TensorRTSession(TRT, opened_on(engine), SIGNATURE, Device(), RunOptions(**options))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def plain(engine: Engine) -> Iterator[TensorRTSession]:
    with open_session(engine) as found:
        yield found


@pytest.fixture
def graphs(engine: Engine) -> Iterator[TensorRTSession]:
    with open_session(engine, cuda_graphs=True) as found:
        yield found


def feeds(batch: int, seed: int = 0) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((batch, 4)).astype(np.float32)}


def right(found: TensorRTSession, batch: int, seed: int = 0) -> None:
    np.testing.assert_array_equal(found.run(feeds(batch, seed))["y"], 2 * feeds(batch, seed)["x"])


def test_outputs_are_the_engines(plain: TensorRTSession) -> None:
    right(plain, 1)
    right(plain, 8, seed=1)


def test_the_first_profile_that_takes_the_shapes_is_chosen(plain: TensorRTSession, engine: Engine) -> None:
    for batch in (1, 2, 8):
        right(plain, batch)
    assert [context.profile for context in engine.contexts] == [0, 1, 1]


@pytest.mark.parametrize("batch", [0, 9])
def test_shapes_that_no_profile_takes_are_refused(batch: int, plain: TensorRTSession) -> None:
    with pytest.raises(SignatureError, match=rf"'x' of shape \[{batch}, 4\]; .* from \[2, 4\] to \[8, 4\]") as caught:
        plain.bind(feeds(batch))
    assert "--shape" in caught.value.remedy


@pytest.mark.parametrize(
    ("shape", "limits", "expected"),
    [
        ((2, 4), [(1, 4), (2, 4), (8, 4)], True),
        ((8, 4), [(1, 4), (2, 4), (8, 4)], True),
        ((9, 4), [(1, 4), (2, 4), (8, 4)], False),
        ((2, 5), [(1, 4), (2, 4), (8, 4)], False),
        ((2, 4, 1), [(1, 4), (2, 4), (8, 4)], False),
        ((), [(), (), ()], True),
    ],
)
def test_a_shape_is_within_a_profile_in_every_dimension(shape: Any, limits: Any, expected: bool) -> None:
    assert opening._within(shape, limits) is expected


def test_there_is_one_context_for_each_set_of_shapes(plain: TensorRTSession, engine: Engine) -> None:
    for batch in (2, 5, 2, 5):
        right(plain, batch, seed=batch)
    assert len(engine.contexts) == 2


def test_shapes_that_were_not_used_for_longest_are_forgotten(
    plain: TensorRTSession, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_MOST_CONTEXTS", 2)
    kept = plain.bind(feeds(2))
    for batch in (3, 2, 4, 2):
        right(plain, batch)
    assert len(engine.contexts) == 3
    right(plain, 3)
    assert len(engine.contexts) == 4
    plain.enqueue(kept)
    np.testing.assert_array_equal(plain.fetch()["y"], 2 * feeds(2)["x"])


def test_memory_is_what_the_shapes_need(plain: TensorRTSession) -> None:
    plain.bind(feeds(2))
    assert plain.activation_memory.bytes == 2 * BYTES_EACH


def test_every_context_works_in_the_memory_of_the_moment(plain: TensorRTSession, engine: Engine) -> None:
    small = plain.bind(feeds(2))
    plain.enqueue(small)
    right(plain, 8)
    plain.enqueue(small)
    np.testing.assert_array_equal(plain.fetch()["y"], 2 * feeds(2)["x"])
    held = (plain.activation_memory.address, plain.activation_memory.bytes)
    assert [context.memory for context in engine.contexts] == [held, held]
    assert [context.moves for context in engine.contexts] == [2, 1]


def test_memory_that_stays_is_set_once(plain: TensorRTSession, engine: Engine) -> None:
    bound = plain.bind(feeds(8))
    for _ in range(3):
        plain.enqueue(bound)
    right(plain, 8, seed=1)
    assert engine.contexts[0].moves == 1


def test_inputs_of_each_bound_are_its_own(plain: TensorRTSession) -> None:
    first, second = plain.bind(feeds(2, 1)), plain.bind(feeds(2, 2))
    for bound, seed in ((first, 1), (second, 2), (first, 1)):
        plain.enqueue(bound)
        np.testing.assert_array_equal(plain.fetch()["y"], 2 * feeds(2, seed)["x"])


def test_outputs_stay_as_they_were_fetched(plain: TensorRTSession) -> None:
    bound = plain.bind(feeds(2))
    plain.enqueue(bound)
    first = plain.fetch()["y"]
    bound.inputs["x"].zero_()
    plain.enqueue(bound)
    np.testing.assert_array_equal(first, 2 * feeds(2)["x"])


def test_a_graph_is_captured_after_a_first_call_and_then_replayed(graphs: TensorRTSession, engine: Engine) -> None:
    bound = graphs.bind(feeds(2))
    graphs.enqueue(bound)
    assert bound.graph is None
    for expected in (1, 2, 3):
        graphs.enqueue(bound)
        assert FakeGraph.replays == expected
    assert engine.contexts[0].runs == 4
    np.testing.assert_array_equal(graphs.fetch()["y"], 2 * feeds(2)["x"])


def test_a_graph_is_void_once_the_activations_moved(graphs: TensorRTSession) -> None:
    bound = graphs.bind(feeds(2))
    for _ in range(3):
        graphs.enqueue(bound)
    old = bound.graph
    right(graphs, 8)
    replays = FakeGraph.replays
    graphs.enqueue(bound)
    assert FakeGraph.replays == replays
    graphs.enqueue(bound)
    assert bound.graph is not old
    np.testing.assert_array_equal(graphs.fetch()["y"], 2 * feeds(2)["x"])


def test_a_graph_belongs_to_what_it_was_captured_with(graphs: TensorRTSession) -> None:
    first, second = graphs.bind(feeds(2, 1)), graphs.bind(feeds(2, 2))
    for bound, seed in [(first, 1), (second, 2)] * 4:
        graphs.enqueue(bound)
        np.testing.assert_array_equal(graphs.fetch()["y"], 2 * feeds(2, seed)["x"])
    assert first.graph is not second.graph


def test_nothing_is_captured_unless_that_was_asked_for(plain: TensorRTSession) -> None:
    bound = plain.bind(feeds(2))
    for _ in range(4):
        plain.enqueue(bound)
    assert FakeGraph.replays == 0


def test_an_engine_that_captures_by_itself_is_left_to_it(engine: Engine) -> None:
    opened = opened_on(engine)
    opened.captures_itself = True
    with TensorRTSession(TRT, opened, SIGNATURE, Device(), RunOptions(cuda_graphs=True)) as found:
        bound = found.bind(feeds(2))
        for _ in range(4):
            found.enqueue(bound)
    assert FakeGraph.replays == 0


def test_outputs_of_unknown_shape_are_fetched_in_the_shape_of_the_run() -> None:
    with open_session(Engine(unknown=True)) as found:
        for batch in (3, 8, 3):
            right(found, batch, seed=batch)


def test_outputs_of_unknown_shape_are_no_part_of_a_graph() -> None:
    with (
        open_session(Engine(unknown=True), cuda_graphs=True) as found,
        pytest.raises(ModelError, match="'y'") as caught,
    ):
        found.bind(feeds(2))
    assert "--cuda-graphs" in caught.value.remedy


def test_a_run_that_tensorrt_does_not_take_is_an_error(plain: TensorRTSession, engine: Engine) -> None:
    bound = plain.bind(feeds(2))
    engine.broken = True
    with pytest.raises(ModelError, match="did not run this input"):
        plain.enqueue(bound)


def test_a_lack_of_memory_is_told_by_what_tensorrt_said(plain: TensorRTSession, engine: Engine) -> None:
    def execute(stream: int) -> bool:
        log = plain._opened.log
        log.take("ERROR", "Error Code 1: Cuda Runtime (out of memory)")
        return False

    bound = plain.bind(feeds(2))
    engine.contexts[0].execute_async_v3 = execute  # type: ignore[method-assign]
    with pytest.raises(StepOutOfMemory, match="out of memory"):
        plain.enqueue(bound)


def test_a_sibling_has_contexts_and_activations_of_its_own(plain: TensorRTSession, engine: Engine) -> None:
    with plain.sibling() as other:
        right(plain, 2)
        right(other, 8)
        assert other.activation_memory is not plain.activation_memory
        assert plain.activation_memory.bytes == 2 * BYTES_EACH
    assert len(engine.contexts) == 2
    right(plain, 4)


def test_the_engine_goes_with_its_last_session(engine: Engine) -> None:
    opened = opened_on(engine)
    first = TensorRTSession(TRT, opened, SIGNATURE, Device(), RunOptions())
    second = first.sibling()
    first.close()
    first.close()
    assert opened.engine is engine
    second.close()
    assert opened.engine is None
    assert opened.runtime is None


def test_a_closed_session_is_not_used(plain: TensorRTSession) -> None:
    bound = plain.bind(feeds(2))
    plain.close()
    for call in (lambda: plain.bind(feeds(2)), lambda: plain.enqueue(bound), plain.fetch):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_nothing_can_be_fetched_before_a_run(plain: TensorRTSession) -> None:
    plain.bind(feeds(2))
    with pytest.raises(UsageError, match="nothing was run"):
        plain.fetch()


def test_sessions_that_share_activations_share_one_buffer_and_stream() -> None:
    one, two = (
        open_session(Engine(), share_activation_memory=True),
        open_session(Engine(), share_activation_memory=True),
    )
    assert one.activation_memory is two.activation_memory
    small, large = one.bind(feeds(2)), two.bind(feeds(8))
    for _ in range(2):
        one.enqueue(small)
        np.testing.assert_array_equal(one.fetch()["y"], 2 * feeds(2)["x"])
        two.enqueue(large)
        np.testing.assert_array_equal(two.fetch()["y"], 2 * feeds(8)["x"])
    one.close()
    assert two.activation_memory.bytes == 8 * BYTES_EACH
    two.close()
    assert memory._shared == {}


def test_activation_memory_grows_and_does_not_shrink() -> None:
    held = ActivationMemory("cpu")
    assert (held.bytes, held.address) == (0, 0)
    held.hold(0)
    assert held.generation == 0
    held.hold(100)
    first = (held.generation, held.address)
    held.hold(60)
    assert (held.generation, held.address, held.bytes) == (*first, 100)
    held.hold(101)
    assert held.bytes == 101
    assert held.generation > first[0]


def test_activation_memory_is_freed_by_the_last_to_leave() -> None:
    held = activation_memory("cpu", shared=True)
    assert activation_memory("cpu", shared=True) is held
    assert activation_memory("cpu", shared=False) is not held
    held.hold(100)
    held.leave()
    assert held.bytes == 100
    before = held.generation
    held.leave()
    assert held.bytes == 0
    assert held.generation > before
    assert activation_memory("cpu", shared=True) is not held


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
    found = memory.allocator(TRT, memory.ledger_of(1))
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
    assert opening._stream_weights(engine, RunOptions(weight_streaming_budget=budget)) is streams
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
        opening._stream_weights(engine, RunOptions(weight_streaming_budget=40, **options))


class Cache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data


@pytest.mark.parametrize(
    ("before", "data", "written"), [(0, b"kernels", True), (7, b"kernels", False), (0, b"", False)]
)
def test_kernels_are_kept_by_the_last_session_if_any_are_new(
    before: int, data: bytes, written: bool, tmp_path: Path, engine: Engine
) -> None:
    opened = opened_on(engine)
    opened.cache, opened.cache_file, opened.cached_bytes = Cache(data), tmp_path / "k" / "one.cache", before
    TensorRTSession(TRT, opened, SIGNATURE, Device(), RunOptions()).close()
    assert (tmp_path / "k" / "one.cache").is_file() == written
    assert not written or [path.name for path in (tmp_path / "k").iterdir()] == ["one.cache"]


def test_kernels_that_cannot_be_kept_are_no_error(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "k").touch()
    opened = opened_on(engine)
    opened.cache, opened.cache_file = Cache(b"kernels"), tmp_path / "k" / "one.cache"
    TensorRTSession(TRT, opened, SIGNATURE, Device(), RunOptions()).close()
    assert opened.engine is None


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
