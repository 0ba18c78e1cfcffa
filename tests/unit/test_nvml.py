"""Test the state of GPUs with a module pynvml and a libcuda that are made up."""

import ctypes
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.nvidia import CudaDevice, Driver, GpuState, Nvml

ADDRESSES = ("0000:17:00.0", "0000:65:00.0")
SLICE = uuid.UUID("11111111-2222-3333-4444-555555555555")
WHOLE, PART = 100, 200
"""Handles: of the second device on the bus is WHOLE + 1."""


class NVMLError(Exception):
    """pynvml's; its text is NVML's own."""


class FunctionNotFoundError(NVMLError):
    pass


class Pynvml:
    """The module pynvml: answers by name of the function; an exception is raised, of a dict the argument chooses."""

    NVMLError, NVMLError_FunctionNotFound = NVMLError, FunctionNotFoundError

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "nvmlDeviceGetName": "NVIDIA H100",
            "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 71_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": {1: 1980, 2: 2619},
            "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 2619},
            "nvmlDeviceGetCurrentClocksEventReasons": 0x44,
            "nvmlDeviceGetViolationStatus": {0: violation(2_500_000_000), 1: violation(0)},
            "nvmlDeviceGetPerformanceState": 0,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=12),
            "nvmlDeviceGetComputeMode": 3,
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetMemoryInfo": {WHOLE: memory(80, 30), WHOLE + 1: memory(80, 31), PART: memory(10, 3)},
            "nvmlDeviceGetComputeRunningProcesses": [process(4321, 7), process(4322, None)],
            "nvmlDeviceGetHandleByPciBusId": dict(zip(ADDRESSES, (WHOLE, WHOLE + 1), strict=True)),
            "nvmlDeviceGetHandleByUUID": {f"MIG-{SLICE}": PART},
            **answers,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.answers:
            raise AttributeError(name)
        answer = self.answers[name]

        def call(*arguments: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            if not isinstance(answer, dict):
                return answer
            if arguments[-1] not in answer:
                raise NVMLError("Not Found")
            return answer[arguments[-1]]

        return call


def memory(total: int, used: int) -> SimpleNamespace:
    return SimpleNamespace(total=total, used=used)


def violation(nanoseconds: int) -> SimpleNamespace:
    return SimpleNamespace(violationTime=nanoseconds)


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


class CudaDriver:
    """libcuda.so.1, where CUDA_VISIBLE_DEVICES leaves some devices, in another order."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def cuDeviceGet(self, found: Any, index: ctypes.c_int) -> int:  # noqa: N802
        found._obj.value = index.value
        return 0 if index.value < len(self.addresses) else 101

    def cuDeviceGetPCIBusId(self, found: Any, length: ctypes.c_int, ordinal: ctypes.c_int) -> int:  # noqa: N802
        found.value = self.addresses[ordinal.value].encode()
        return 0

    def cuDeviceGetUuid_v2(self, found: Any, ordinal: ctypes.c_int) -> int:  # noqa: N802
        found._obj[:] = SLICE.bytes
        return 0


def made(*addresses: str, **answers: Any) -> Nvml:
    return Nvml(Pynvml(**answers), CudaDriver(*(addresses or ADDRESSES)))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container whose processes are not numbered as the host's are."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532999]")
    monkeypatch.setattr(nvidia, "_PROC", tmp_path)
    return tmp_path


def test_a_device_is_identified_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = nvidia.Driver(devices=(nvidia.CudaDevice(name="NVIDIA H100", compute_capability=(9, 0)),) * 2)
    monkeypatch.setattr(nvidia, "driver", lambda: shown)
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: CudaDriver(ADDRESSES[0]))
    identify = nvidia.identify.__wrapped__
    assert (identify(0), identify(1), identify(2)) == (str(SLICE), None, None)
    monkeypatch.delattr(CudaDriver, "cuDeviceGetUuid_v2")
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: CudaDriver(ADDRESSES[0]))
    assert identify(0) is None


def test_the_whole_state() -> None:
    state = made().state(0)
    assert state == GpuState(
        name="NVIDIA H100",
        compute_capability="9.0",
        driver="580.65.06",
        pci_bus_id=ADDRESSES[0],
        memory_bytes=80,
        used_bytes=30,
        temperature_celsius=41,
        power_watts=71.5,
        power_limit_watts=700.0,
        sm_clock_mhz=1980,
        sm_clock_max_mhz=1980,
        memory_clock_mhz=2619,
        memory_clock_max_mhz=2619,
        clock_limits=("power limit", "heat (by the hardware)"),
        held_back_by_power_seconds=2.5,
        held_back_by_heat_seconds=0.0,
        performance_state="P0",
        utilization_percent=12,
        compute_mode="exclusive process",
        persistence=True,
        ecc=True,
        mig=False,
        processes=({"pid": 4321, "used_bytes": 7}, {"pid": 4322, "used_bytes": None}),  # type: ignore[arg-type]
    )


def test_devices_are_those_of_cuda_by_their_address() -> None:
    hidden = made(ADDRESSES[1])  # CUDA_VISIBLE_DEVICES=1
    assert (hidden.used_bytes(0), hidden.state(0).pci_bus_id) == (31, ADDRESSES[1])
    turned = made(ADDRESSES[1], ADDRESSES[0])
    assert [turned.used_bytes(index) for index in (0, 1)] == [31, 30]
    with pytest.raises(MissingCapability, match="CUDA shows no cuda:1"):
        hidden.used_bytes(1)
    with pytest.raises(MissingCapability, match=r"does not show cuda:0 .*Not Found"):
        made("0000:99:00.0").used_bytes(0)


def test_what_is_refused_is_none_beside_its_reason() -> None:
    refused = {"nvmlDeviceGetPowerUsage": NVMLError("Not Supported"), "nvmlDeviceGetEccMode": NVMLError("odd")}
    state = made(**refused, nvmlDeviceGetPerformanceState=32).state(0)
    assert (state.power_watts, state.ecc, state.performance_state) == (None, None, None)
    assert state.reasons == {
        "power_watts": "Not Supported",
        "ecc": "odd",
        "performance_state": "the driver does not know it",
    }
    with pytest.raises(MissingCapability, match="Insufficient Permissions"):
        made(nvmlDeviceGetMemoryInfo=NVMLError("Insufficient Permissions")).used_bytes(0)


def test_a_function_that_an_old_driver_lacks() -> None:
    lacking = FunctionNotFoundError("Function Not Found")
    state = made(
        nvmlDeviceGetCurrentClocksEventReasons=lacking,
        nvmlDeviceGetCurrentClocksThrottleReasons=1,
        nvmlDeviceGetViolationStatus=lacking,
    ).state(0)
    assert (state.clock_limits, state.reasons["held_back_by_heat_seconds"]) == (("idle",), "Function Not Found")


def test_a_limit_that_is_newer_than_this() -> None:
    assert made(nvmlDeviceGetCurrentClocksEventReasons=0x1001).state(0).clock_limits == (
        "idle",
        "unknown reason 0x1000",
    )


def test_a_slice_has_its_own_memory_and_the_device_its_clocks() -> None:
    divided = made(nvmlDeviceGetMigMode=[1, 1])
    state = divided.state(0)
    assert (state.mig, state.memory_bytes, state.used_bytes, state.sm_clock_mhz) == (True, 10, 3, 1980)
    assert divided.used_bytes(0) == 3


def test_no_process_is_none() -> None:
    assert made(nvmlDeviceGetComputeRunningProcesses=[]).state(0).processes == ()


def test_bytes_of_a_process(proc: Path) -> None:
    for pid in (4321, 4322):
        (proc / str(pid)).mkdir()
    assert made().process_bytes(0, 4321) == (7, "")
    hidden = (None, "the driver does not tell the memory of single processes here")
    assert made().process_bytes(0, 4322) == hidden
    zero = made(nvmlDeviceGetComputeRunningProcesses=[process(4321, 0)])  # what drivers say in containers
    assert zero.process_bytes(0, 4321) == hidden
    assert "lists no process 1" in made().process_bytes(0, 1)[1]
    refused = made(nvmlDeviceGetComputeRunningProcesses=NVMLError("Insufficient Permissions"))
    assert refused.process_bytes(0, 4321) == (None, "NVML does not list processes: Insufficient Permissions")


def test_numbers_of_the_host_are_not_taken_for_ours(proc: Path) -> None:
    (proc / "4321").mkdir()  # 4322 is the host's number, and so may be 4321
    found, reason = made().process_bytes(0, 4321)
    assert found is None
    assert "as the host does (4322, say)" in reason
    (proc / "self/ns/pid").unlink()
    (proc / "self/ns/pid").symlink_to("pid:[4026531836]")  # the host itself
    assert made().process_bytes(0, 4321) == (7, "")


@pytest.mark.parametrize(
    ("mode", "mps", "ok"), [(0, False, True), (3, False, False), (3, True, True), (1, False, False), (2, True, False)]
)
def test_a_device_for_one_process_alone_is_refused_before_anything_starts(
    mode: int, mps: bool, ok: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvidia, "nvml", lambda: made(nvmlDeviceGetComputeMode=mode))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path if mps else tmp_path / "none"))
    answer = nvidia._check_compute_mode(0)
    assert answer.ok == ok
    assert ok or f"nvidia-smi -i {ADDRESSES[0]} -c DEFAULT" in answer.remedy


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.nvml.cache_clear()
    monkeypatch.setattr(nvidia, "driver", lambda: Driver(reason="there is no driver"))
    with pytest.raises(MissingCapability, match="there is no driver"):
        nvidia.nvml()
    device = CudaDevice(name="NVIDIA H100", compute_capability=(9, 0))
    monkeypatch.setattr(nvidia, "driver", lambda: Driver(version=13000, devices=(device,)))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingCapability, match="unknown: nvidia-ml-py is not installed") as error:
        nvidia.nvml()
    assert "pip install nvidia-ml-py" in error.value.remedy
    refusing = Pynvml(nvmlInit=NVMLError("NVML Shared Library Not Found"))
    monkeypatch.setitem(sys.modules, "pynvml", refusing)
    with pytest.raises(MissingCapability, match="NVML does not start: NVML Shared Library Not Found") as error:
        nvidia.nvml()
    assert "NVIDIA_DRIVER_CAPABILITIES" in error.value.remedy
