"""Stand-ins for CUDA and TensorRT that mind the rules.

The fake engine doubles x into y, and lists where x is positive, at the addresses it is given. It fails a test that runs
it with too little memory, captures it cold, or leaves it without an address.
"""

import contextlib
import ctypes
import enum
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.pipeline.engines.tensorrt import loader
from enginesmith.pipeline.engines.tensorrt.build_log import RuntimeLog
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:batch,4"),), outputs=(TensorSpec.parse("y:float32:batch,4"),))


def named(name: str) -> Any:
    return SimpleNamespace(name=name)


class Base:
    """Stand for TensorRT's callback interfaces."""


class Logger:
    """Stand for its logger."""

    Severity = enum.IntEnum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"], start=0)


TRT = SimpleNamespace(
    IOutputAllocator=Base,
    IGpuAsyncAllocator=Base,
    ILogger=Logger,
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
    """Run what was captured again at the same addresses."""

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
        if self.memory[1] < self.engine.runs_with:
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
    needs, most, insists, runs_with = 100, 1000, 0, 0
    """Bytes of activations: for a sample, for the profile, and what is asked for after all: aloud, or by a run."""
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


class Heap:
    """Memory that is nowhere; has so many bytes in all."""

    def __init__(self, left: int = 1 << 20) -> None:
        self.left, self.taken = left, 0

    def take(self, size: int, stream: int) -> int:
        self.taken += 1
        return 0x1000 * self.taken if size <= self.left else 0

    def give(self, address: int) -> None:
        pass


def replace_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUDA as far as sessions use it; ``torch.cuda.current_stream()`` is the last one that was set."""
    current: list[Stream] = []

    @contextlib.contextmanager
    def stream(one: Stream) -> Iterator[None]:
        before = [*current]
        current[:] = [one]
        yield
        current[:] = before

    Stream.made, Graph.capturing, Graph.fails = 0, None, False
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda one: current.__setitem__(slice(None), [one]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0] if current else None)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", lambda one: contextlib.nullcontext())
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *one: None)
    yield
    assert not loader._shared, "the last session leaves shared memory"
