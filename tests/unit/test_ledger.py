"""The ledger of device memory on an allocator that stands for torch's: tags, peaks, and what was given back wrongly."""

import ctypes
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.cuda_allocator import (
    ACTIVATIONS,
    TRANSFERS,
    UNTAGGED,
    WEIGHTS,
    Block,
    CudaAllocationTracker,
    counting,
)
from enginesmith.pipeline.engines.onnxruntime import session
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.system.device import Device


class Heap:
    """Gives the lowest address that is free, so that addresses come again; has so many bytes in all."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.left = size
        self.taken: dict[int, int] = {}
        self.streams: list[int] = []

    def take(self, size: int, stream: int) -> int:
        if size > self.left:
            return 0
        address = next(number for number in range(0x1000, 1 << 30, 0x1000) if number not in self.taken)
        self.left -= size
        self.taken[address] = size
        self.streams.append(stream)
        return address

    def give(self, address: int) -> None:
        self.left += self.taken.pop(address)


@pytest.fixture
def heap() -> Heap:
    return Heap()


@pytest.fixture
def ledger(heap: Heap) -> CudaAllocationTracker:
    return CudaAllocationTracker(heap)


def test_what_is_in_use_is_counted_by_tag(ledger: CudaAllocationTracker, heap: Heap) -> None:
    with ledger.tagged(WEIGHTS):
        weights = ledger.allocate(1000)
        with ledger.tagged(TRANSFERS):
            ledger.allocate(30, stream=7)
        ledger.allocate(200, tag=ACTIVATIONS)
    ledger.allocate(4)
    found = ledger.account()
    assert (found.current, found.peak, found.taken) == (1234, 1234, 4)
    assert found.by_tag == {WEIGHTS: 1000, TRANSFERS: 30, ACTIVATIONS: 200, UNTAGGED: 4}
    assert heap.streams == [0, 7, 0, 0]
    assert ledger.free(weights)
    assert ledger.account().by_tag == {TRANSFERS: 30, ACTIVATIONS: 200, UNTAGGED: 4}
    assert heap.left == (1 << 20) - 234


def test_the_peak_is_split_as_it_was_at_its_time(ledger: CudaAllocationTracker) -> None:
    ledger.allocate(100, tag=WEIGHTS)
    first = ledger.allocate(50, tag=ACTIVATIONS)
    ledger.free(first)
    ledger.allocate(30, tag=TRANSFERS)
    found = ledger.account()
    assert (found.current, found.peak) == (130, 150)
    assert found.peak_by_tag == {WEIGHTS: 100, ACTIVATIONS: 50}
    ledger.reset_peak()
    assert (ledger.account().peak, ledger.account().peak_by_tag) == (130, {WEIGHTS: 100, TRANSFERS: 30})


def test_what_is_given_back_wrongly_is_counted_and_not_passed_on(ledger: CudaAllocationTracker, heap: Heap) -> None:
    address = ledger.allocate(10)
    assert ledger.free(address)
    assert not ledger.free(address)
    assert not ledger.free(0xDEAD)
    found = ledger.account()
    assert (found.double_frees, found.unknown_frees, found.current) == (1, 1, 0)
    assert heap.left == 1 << 20
    assert ledger.allocate(20) == address  # the same address again, and this is its first time to be given back
    assert ledger.free(address)
    assert ledger.account().double_frees == 1


def test_what_was_not_given_back_is_found(ledger: CudaAllocationTracker) -> None:
    early = ledger.allocate(10, tag=WEIGHTS)
    since = ledger.account().taken
    gone, left = ledger.allocate(20), ledger.allocate(30, tag=ACTIVATIONS)
    ledger.free(gone)
    assert ledger.leaks(since) == {left: Block(30, ACTIVATIONS, 3)}
    assert set(ledger.leaks()) == {early, left}


def test_no_bytes_and_too_many(ledger: CudaAllocationTracker) -> None:
    assert ledger.allocate(0) == 0
    assert ledger.allocate(1 << 30) == 0
    found = ledger.account()
    assert (found.taken, found.peak) == (0, 0)


def test_a_tensor_counts_until_it_is_gone(ledger: CudaAllocationTracker) -> None:
    tensor = torch.empty(100, dtype=torch.float32)
    ledger.follow(tensor, ACTIVATIONS)
    ledger.follow(torch.empty(0), ACTIVATIONS)
    assert ledger.account().by_tag == {ACTIVATIONS: 400}
    del tensor
    gc.collect()
    found = ledger.account()
    assert (found.current, found.peak, found.taken) == (0, 400, 1)


def test_threads_share_one_account(ledger: CudaAllocationTracker) -> None:
    def work() -> None:
        for _ in range(200):
            ledger.free(ledger.allocate(8))

    class Safe(Heap):
        lock = threading.Lock()
        last = 0

        def take(self, size: int, stream: int) -> int:
            with self.lock:
                self.last += 1
                return self.last

        def give(self, address: int) -> None:
            pass

    ledger._memory = Safe()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = ledger.account()
    assert (found.current, found.taken, found.double_frees, found.unknown_frees) == (0, 800, 0, 0)


def test_a_device_is_counted_while_that_is_asked_for(heap: Heap) -> None:
    tensor = torch.empty(4)
    with counting(0, heap) as outer:
        assert cuda_allocator.active(0) is outer
        assert cuda_allocator.active(1) is None
        with counting(0, heap) as inner:
            assert cuda_allocator.active(0) is inner
        assert cuda_allocator.active(0) is outer
        cuda_allocator.follow(tensor, WEIGHTS)
        cuda_allocator.follow(SimpleNamespace(device=torch.device("cuda:1")), WEIGHTS)
        assert outer.account().current == 16
    assert cuda_allocator.active(0) is None


def functions(options: dict[str, str]) -> tuple[Any, Any]:
    """Return what ONNX Runtime makes of the addresses, by the types that its sources cast them to."""
    take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(options["gpu_external_alloc"]))
    give = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(options["gpu_external_free"]))
    return take, give


def test_a_counted_provider_takes_memory_through_the_ledger(heap: Heap) -> None:
    with counting(0, heap) as ledger:
        (cuda, options), _ = OnnxRuntime()._providers(Device(kind="cuda"), 7)
        assert cuda == "CUDAExecutionProvider"
        assert "user_compute_stream" not in options  # which the provider refuses beside an allocator
        take, give = functions(options)
        with ledger.tagged(WEIGHTS):
            address = take(4096)
        assert ledger.account().by_tag == {WEIGHTS: 4096}
        assert take(1 << 30) is None
        give(None)
        results: list[int] = []
        other = threading.Thread(target=lambda: results.append(take(16)))  # a thread that Python did not start, as well
        other.start()
        other.join()
        give(results[0])
        assert ledger.account().current == 4096
    give(address)  # of the ledger that it came from, though nothing is counted now
    assert (ledger.account().current, heap.taken) == (0, {})


def test_a_provider_that_is_not_counted_is_as_in_production() -> None:
    (_, options), _ = OnnxRuntime()._providers(Device(kind="cuda", index=1), 7)
    assert (options["device_id"], options["user_compute_stream"]) == ("1", "7")
    assert not any("external" in name for name in options)
    assert session.counted_options(0) == {}


def test_an_arena_keeps_to_the_limit_unless_it_is_counted(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_allocator, "_limits", {})
    given = [("CUDAExecutionProvider", {"device_id": "0"}), ("CPUExecutionProvider", {})]
    assert session.within_limit(given, Device(kind="cuda")) == given
    cuda_allocator.set_limit(0, 1 << 20)
    (_, cuda), cpu = session.within_limit(given, Device(kind="cuda"))
    arena = {"gpu_mem_limit": "1048576", "arena_extend_strategy": "kSameAsRequested"}
    assert (cuda, cpu) == ({"device_id": "0", **arena}, given[1])
    assert session.within_limit(given, Device(kind="cuda", index=1)) == given
    with counting(0, heap):  # then it is torch's memory that is limited
        assert session.within_limit(given, Device(kind="cuda")) == given


def test_errors_of_cuda_stay_out_of_c(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int, stream: int) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(heap, "take", fail)
    with counting(0, heap):
        take, _ = functions(session.counted_options(0))
        assert take(8) is None


def test_torch_gives_zero_where_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, device: int, stream: int) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", refuse)
    assert cuda_allocator.TorchMemory(0).take(8, 0) == 0
