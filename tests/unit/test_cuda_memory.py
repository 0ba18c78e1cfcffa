"""Memory on a device that stands for a GPU: what each instrument shows of engines whose needs are known."""

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.engines.cuda_allocator import ACTIVATIONS, OUTPUTS, TRANSFERS, WEIGHTS, WORKSPACE
from enginesmith.pipeline.engines.onnxruntime import session
from enginesmith.pipeline.engines.tensorrt.loader import allocator, ledger_of
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.measure.memory import cuda, deployment, usage
from enginesmith.pipeline.measure.memory.cuda import CudaPhases, measure_on_cuda
from enginesmith.pipeline.measure.memory.usage import Sampler
from enginesmith.pipeline.measure.rows import MemoryRow
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds

CUDA = Device(kind="cuda")
KIB, MIB = 1 << 10, 1 << 20
SEGMENT = 2 * MIB
CONTEXT, LIBRARIES, OTHERS = 300 * MIB, 100 * MIB, 7 * MIB
FEEDS: Feeds = {"x": np.zeros((8, 125), np.float32)}  # 4000 bytes, 4096 in blocks
WEIGHTS_BYTES, ACTIVATION_BYTES = 3 * MIB + 100, 1 * MIB + 1
WORKSPACE_BYTES = 8 * MIB + 128 * KIB


class Gpu:
    """A device with torch's caching allocator: blocks of 512 bytes, segments of 2 MiB, peaks that can be reset."""

    total = 1 << 33

    def __init__(self) -> None:
        self.outside = OTHERS
        self.blocks: dict[int, int] = {}
        self.addresses = itertools.count(0x7F0000000000, 0x1000000)
        self.now = {"allocated": 0, "requested": 0, "reserved": 0}
        self.most = dict(self.now)

    def context(self) -> None:
        if self.outside < CONTEXT:
            self.outside += CONTEXT + LIBRARIES

    def take(self, size: int, device: int = 0, stream: int = 0) -> int:
        address = next(self.addresses)
        self.blocks[address] = size
        self._add(size, 1)
        self.now["reserved"] = max(self.now["reserved"], -(-self.now["allocated"] // SEGMENT) * SEGMENT)
        self.most = {name: max(self.most[name], value) for name, value in self.now.items()}
        return address

    def give(self, address: int) -> None:
        self._add(self.blocks.pop(address), -1)

    def _add(self, size: int, sign: int) -> None:
        self.now["allocated"] += sign * (-(-size // 512) * 512)
        self.now["requested"] += sign * size

    def reset(self, device: int) -> None:
        self.most = dict(self.now)

    def empty_cache(self) -> None:
        self.now["reserved"] = -(-self.now["allocated"] // SEGMENT) * SEGMENT

    def used(self) -> int:
        return self.outside + self.now["reserved"]

    def stats(self, device: int) -> dict[str, int]:
        return {
            f"{name}_bytes.all.{which}": value
            for which, values in (("current", self.now), ("peak", self.most))
            for name, value in values.items()
        }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    device = Gpu()
    functions = {
        "caching_allocator_alloc": device.take,
        "caching_allocator_delete": device.give,
        "memory_stats": device.stats,
        "reset_peak_memory_stats": device.reset,
        "mem_get_info": lambda index: (device.total - device.used(), device.total),
        "empty_cache": device.empty_cache,
        "synchronize": lambda index: None,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(cuda, "used_bytes", lambda one: (device.used(), ""))
    answers = SimpleNamespace(process_bytes=lambda index, pid: (device.used() - OTHERS, ""))
    monkeypatch.setattr(nvidia, "nvml", lambda: answers)
    return device


class Session:
    """Inputs, outputs and activations that are taken from wherever ``taken`` and ``given`` say."""

    signature = SimpleNamespace(check=lambda feeds: None)

    def __init__(self, engine: "Eager") -> None:
        self.engine, self.weights = engine, engine.take(WEIGHTS_BYTES)
        self.bound: list[int] = []

    def bind(self, feeds: Feeds) -> list[int]:
        self.bound = [self.engine.take(array.nbytes) for array in feeds.values()]
        return self.bound

    def enqueue(self, bound: list[int]) -> None:
        self.engine.give(self.engine.take(ACTIVATION_BYTES))
        self.engine.gpu.outside += self.engine.modules
        self.engine.modules = 0

    def synchronize(self) -> None:
        time.sleep(0.005)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *error: object) -> None:
        for address in (*self.bound, self.weights):
            if address not in self.engine.kept:
                self.engine.give(address)


class Eager:
    """Takes memory as torch's own tensors do."""

    memory_from_torch: ClassVar[bool] = True
    session: ClassVar[type[Session]] = Session
    said = EngineFacts()

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.modules = gpu, 11 * MIB
        self.take, self.give = gpu.take, gpu.give
        self.kept: set[int] = set()

    def prime(self, artifact: Artifact, device: Device) -> None:
        self.gpu.context()

    def load(self, artifact: Artifact, device: Device) -> Any:
        return self.session(self)

    def facts(self, artifact: Artifact) -> EngineFacts:
        return self.said


class OrtLike(Eager):
    """Calls the functions whose addresses the options of ONNX Runtime's provider have; else it has an arena."""

    memory_from_torch: ClassVar[bool] = False

    def load(self, artifact: Artifact, device: Device) -> Any:
        options = session.counted_options(device.index)
        if options:
            self.take = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(options["gpu_external_alloc"]))
            self.give = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(options["gpu_external_free"]))
        else:
            self.take, self.give = self._from_arena, lambda address: None
        return self.session(self)

    def _from_arena(self, size: int) -> int:
        self.gpu.outside += 1 << (size - 1).bit_length()
        return 1


class TrtSession(Session):
    """Weights by the runtime's allocator, activations and outputs as torch's tensors, scratch memory when it runs."""

    def __init__(self, engine: "Trt") -> None:
        self.own = allocator(SimpleNamespace(IGpuAsyncAllocator=object), ledger_of(0), WEIGHTS)
        engine.take = lambda size: int(self.own.allocate_async(size, 256, 0, 0))
        engine.give = lambda address: self.own.deallocate_async(address, 0)
        super().__init__(engine)
        self.own.tag = WORKSPACE

    def bind(self, feeds: Feeds) -> list[int]:
        taken = {TRANSFERS: FEEDS["x"].nbytes, ACTIVATIONS: ACTIVATION_BYTES, OUTPUTS: 800}
        self.tensors = [SimpleTensor(self.engine.gpu, size) for size in taken.values()]
        for tag, tensor in zip(taken, self.tensors, strict=True):
            cuda_allocator.follow(tensor, tag)
        return []

    def enqueue(self, bound: list[int]) -> None:
        self.engine.give(self.engine.take(5000))

    def __exit__(self, *error: object) -> None:
        self.tensors = []
        super().__exit__(*error)


class SimpleTensor:
    """Device memory as a torch tensor holds it."""

    device = torch.device("cuda:0")

    def __init__(self, gpu: Gpu, size: int) -> None:
        self.gpu, self.size, self.address = gpu, size, gpu.take(size)

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 1

    def __del__(self) -> None:
        self.gpu.give(self.address)


class Trt(Eager):
    session: ClassVar[type[Session]] = TrtSession
    said = EngineFacts(weights_bytes=3 * MIB, activation_bytes=2 * MIB)


@pytest.fixture(autouse=True)
def own_callbacks() -> Iterator[None]:
    yield
    session._callbacks.cache_clear()  # those of the next test are for another device


def measured(engine: Any, kind: Any = "onnx") -> CudaPhases:
    return measure_on_cuda(engine, Artifact.model_construct(kind=kind), CUDA, FEEDS)


def row(seen: CudaPhases) -> MemoryRow:
    return MemoryRow(device="cuda:0", batch=8, **seen.summarize())


def lenses(seen: CudaPhases) -> dict[str, int]:
    return {name: lens.bytes for name, lens in row(seen).lenses.items()}


def blocks(size: int) -> int:
    return -(-size // 512) * 512


@pytest.mark.parametrize("kind", [Eager, OrtLike])
def test_figures_are_those_of_what_was_taken(kind: type[Eager], gpu: Gpu) -> None:
    seen = measured(kind(gpu))
    found = row(seen)
    assert (found.weights_bytes, found.activation_bytes) == (blocks(WEIGHTS_BYTES), blocks(ACTIVATION_BYTES))
    assert found.peak_bytes == blocks(WEIGHTS_BYTES) + blocks(ACTIVATION_BYTES)
    shown = lenses(seen)
    asked = WEIGHTS_BYTES + ACTIVATION_BYTES
    assert (shown["allocator_requested"], shown["allocator_reserved"]) == (asked, 6 * MIB)
    assert shown["allocator_current"] == blocks(WEIGHTS_BYTES) + 4096
    assert (shown["allocator_closed"], shown["device_closed"]) == (0, 11 * MIB)
    assert all(lens.source and lens.note for lens in found.lenses.values())


def test_eager_is_split_by_phase(gpu: Gpu) -> None:
    shown = lenses(measured(Eager(gpu)))
    assert (shown["allocator_weights"], shown["allocator_transfers"]) == (blocks(WEIGHTS_BYTES), 4096)
    assert shown["allocator_activations"] == blocks(ACTIVATION_BYTES)
    assert "allocator_untagged" not in shown


def test_onnxruntime_is_split_by_the_ledger(gpu: Gpu) -> None:
    seen = measured(OrtLike(gpu))
    shown = lenses(seen)
    assert (shown["allocator_weights"], shown["allocator_transfers"]) == (WEIGHTS_BYTES, FEEDS["x"].nbytes)
    assert shown["allocator_activations"] == ACTIVATION_BYTES
    assert seen.account.peak == seen.run.requested  # nothing went past the ledger
    assert (seen.leaked, seen.account.unknown_frees, seen.account.double_frees) == (0, 0, 0)


def test_tensorrt_is_split_by_the_ledger(gpu: Gpu) -> None:
    seen = measured(Trt(gpu), "engine")
    shown, found = lenses(seen), row(seen)
    tags = {name: shown[f"allocator_{name}"] for name in (WEIGHTS, TRANSFERS, ACTIVATIONS, OUTPUTS, WORKSPACE)}
    own = {TRANSFERS: 4000, OUTPUTS: 800, WORKSPACE: 5000}
    assert tags == {WEIGHTS: WEIGHTS_BYTES, ACTIVATIONS: ACTIVATION_BYTES, **own}
    assert seen.account.peak == seen.run.requested
    assert found.activation_bytes == blocks(ACTIVATION_BYTES) + blocks(800) + blocks(5000)
    assert shown["engine"] == 5 * MIB
    assert "3 MiB" in found.lenses["engine"].note
    assert shown["allocator_closed"] == 0


def test_differences_between_instruments_are_explained(gpu: Gpu) -> None:
    seen = measured(Eager(gpu))
    shown = lenses(seen)
    assert shown["device"] == shown["device_peak"] == 6 * MIB + 11 * MIB
    assert (shown["modules"], shown["context"]) == (11 * MIB, CONTEXT + LIBRARIES)
    assert shown["process"] == CONTEXT + LIBRARIES + 17 * MIB
    note = row(seen).lenses["device"].note
    assert "6 MiB that torch's allocator took (3 MiB in blocks in use, 3 MiB kept back" in note
    assert "and 11 MiB of kernels" in note
    assert "every 2 ms" in row(seen).lenses["device_peak"].note


def test_memory_that_others_gave_back_meanwhile_is_named(gpu: Gpu) -> None:
    engine = Eager(gpu)
    engine.modules = -5 * MIB
    seen = measured(engine)
    assert lenses(seen)["modules"] == -5 * MIB
    assert "5 MiB that others gave back" in row(seen).lenses["device"].note


def test_peak_while_loading_counts_too(gpu: Gpu) -> None:
    class Copying(Session):
        def __init__(self, engine: Eager) -> None:
            super().__init__(engine)
            engine.give(engine.take(10 * MIB))

    engine = Eager(gpu)
    engine.session = Copying  # type: ignore[misc]
    seen = measured(engine)
    assert row(seen).peak_bytes == blocks(WEIGHTS_BYTES) + 10 * MIB
    assert lenses(seen)["allocator_weights"] == blocks(WEIGHTS_BYTES) + 10 * MIB


def test_what_a_session_leaves_behind_is_told(gpu: Gpu) -> None:
    class Leaking(Session):
        def __exit__(self, *error: object) -> None:
            self.engine.kept = {self.weights}
            super().__exit__(*error)
            self.engine.give(self.bound[0])
            self.engine.give(0xDEAD)

    engine = OrtLike(gpu)
    engine.session = Leaking  # type: ignore[misc]
    seen = measured(engine)
    assert seen.leaked == WEIGHTS_BYTES
    assert lenses(seen)["allocator_closed"] == blocks(WEIGHTS_BYTES)
    note = row(seen).lenses["allocator_closed"].note
    assert "1 given back twice, 1 given back and never taken, 3 MiB that the engine took and did not give back" in note


def test_workspaces_of_cublas_and_the_first_call_are_told_apart(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes a workspace for each stream that multiplies: at priming, and when the session is first called."""
    workspaces: list[int] = []

    class Multiplying(Session):
        def enqueue(self, bound: list[int]) -> None:
            if len(workspaces) == 0:
                workspaces.append(gpu.take(WORKSPACE_BYTES))
                gpu.give(gpu.take(5 * MIB))  # tried kernels
            super().enqueue(bound)

    class Primed(Eager):
        session: ClassVar[type[Session]] = Multiplying

        def prime(self, artifact: Artifact, device: Device) -> None:
            super().prime(artifact, device)
            workspaces.append(gpu.take(WORKSPACE_BYTES))

    def clear() -> None:
        while workspaces:
            gpu.give(workspaces.pop())

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    found = row(measured(Primed(gpu)))
    shown = {name: lens.bytes for name, lens in found.lenses.items()}
    assert (found.peak_bytes, found.activation_bytes) == (blocks(WEIGHTS_BYTES) + 5 * MIB, 5 * MIB)
    assert (shown["allocator_libraries"], shown["allocator_closed"]) == (WORKSPACE_BYTES, 0)
    assert shown["allocator_current"] == blocks(WEIGHTS_BYTES) + 4096
    steady = blocks(WEIGHTS_BYTES) + blocks(ACTIVATION_BYTES)
    assert (shown["first_call_peak"], shown["steady_peak"]) == (blocks(WEIGHTS_BYTES) + 5 * MIB, steady)
    assert "a deployment of PyTorch takes them" in found.lenses["allocator_libraries"].note


def test_an_allocator_without_blocks_counts_what_was_asked_for(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics of PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync have 0 as requested bytes."""
    without = lambda device: {name: size * ("requested" not in name) for name, size in gpu.stats(device).items()}  # noqa: E731
    monkeypatch.setattr(torch.cuda, "memory_stats", without)
    shown = lenses(measured(Eager(gpu)))
    assert shown["allocator_requested"] == shown["allocator"]


@pytest.mark.parametrize(
    ("own", "readings", "expected"),
    [((3 * MIB, "2 readings"), (), 3 * MIB), ((None, "hidden"), (90, 90, 20, 20), 70), ((None, "hidden"), (90,), None)],
)
def test_a_deployment_is_what_its_process_takes(
    own: tuple[int | None, str],
    readings: tuple[int, ...],
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    served = deployment._Serving(*own, device_bytes=200, shares_system_memory=False)
    seen = itertools.chain(readings, itertools.repeat(readings[-1] if readings else 0))

    class Process:
        def __init__(self, body: Any, *args: Any, log: Path) -> None:
            self.request = lambda *message, timeout_seconds: served if "candidate" in body.__name__ else next(seen)

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def close(self) -> None:
            pass

    clock = itertools.count()
    monkeypatch.setattr(deployment, "time", SimpleNamespace(sleep=lambda _: None, monotonic=lambda: next(clock)))
    monkeypatch.setattr(deployment, "Worker", Process)
    candidate = SimpleNamespace(id="x", device=CUDA)
    fields = deployment.measure_deployment(candidate, FEEDS, tmp_path, 1.0, None)  # type: ignore[arg-type]
    assert (fields["deployment_bytes"], fields["device_bytes"]) == (expected, 200)
    assert fields["deployments_per_device"] == (None if expected is None else 200 // expected)
    reasons = "hidden, and the use of the device did not change"
    assert set(fields.get("reasons", {}).values()) == (set() if expected else {reasons})


def test_an_engine_that_allocates_past_the_ledger_has_the_devices_figure(gpu: Gpu) -> None:
    class Own(OrtLike):
        def load(self, artifact: Artifact, device: Device) -> Any:
            self.take, self.give = self._from_arena, lambda address: None
            return self.session(self)

    found = row(measured(Own(gpu)))
    assert found.peak_bytes == found.lenses["device_peak"].bytes == 4 * MIB + 4 * KIB + 4 * (2 * MIB) + 11 * MIB
    assert (found.weights_bytes, found.activation_bytes) == (None, None)
    assert "allocates by itself" in found.reasons["weights_bytes"]
    assert not any(name.startswith("allocator") for name in found.lenses)


def test_inputs_that_lie_elsewhere_are_not_taken_off(gpu: Gpu) -> None:
    class Elsewhere(Session):
        def bind(self, feeds: Feeds) -> list[int]:
            return []

    engine = OrtLike(gpu)
    engine.session = Elsewhere  # type: ignore[misc]
    found = row(measured(engine))
    assert found.activation_bytes == blocks(ACTIVATION_BYTES)


def test_lenses_that_cannot_work_say_why(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise MissingCapability("there is no NVML (libnvidia-ml.so.1)")

    monkeypatch.setattr(nvidia, "nvml", missing)
    monkeypatch.setattr(cuda, "used_bytes", usage.used_bytes)
    found = row(measured(Eager(gpu)))
    assert {"process", "context"}.isdisjoint(found.lenses)
    assert "no NVML" in found.reasons["process"]
    assert "no NVML" in found.reasons["context"]


def test_processes_that_the_driver_hides(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = SimpleNamespace(process_bytes=lambda index, pid: (None, "the driver lists no process 7"))
    monkeypatch.setattr(nvidia, "nvml", lambda: hidden)
    found = row(measured(Eager(gpu)))
    assert found.reasons["process"] == "the driver lists no process 7"


def test_limits_are_set_when_the_libraries_are_in(gpu: Gpu) -> None:
    seen: list[int] = []
    engine = Eager(gpu)
    measure_on_cuda(engine, Artifact.model_construct(kind="torch"), CUDA, FEEDS, lambda: seen.append(gpu.used()))  # type: ignore[arg-type]
    assert seen == [OTHERS + CONTEXT + LIBRARIES]


def test_a_sampler_sees_what_is_there_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    over = threading.Event()

    def read() -> int:
        seen.append((1, 9, 2)[min(len(seen), 2)])
        if len(seen) == 5:
            over.set()
        return seen[-1]

    # a second passes with each reading, and the second one is 4 s late
    monkeypatch.setattr(usage, "time", SimpleNamespace(monotonic=lambda: len(seen) + 4.0 * (len(seen) > 1)))
    with Sampler(read, interval_seconds=0.001) as sampler:
        assert over.wait(60)
    sampled = sampler.sampled
    assert (sampled.peak, sampled.samples, sampled.longest_gap_seconds) == (9, len(seen), 5.0)
    assert "one every 1 ms, at most 5000.0 ms apart" in sampled.words()


def test_a_sampler_reads_at_both_ends() -> None:
    values = iter((5, 7))
    with Sampler(lambda: next(values), interval_seconds=60) as sampler:
        pass
    assert (sampler.sampled.peak, sampler.sampled.samples) == (7, 2)
