"""NVML, through libraries of C that are made up."""

import ctypes
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.engines import cuda
from enginesmith.pipeline.engines.cuda import CudaDevice, Driver
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.measure import nvml
from enginesmith.pipeline.measure.nvml import GpuState, Nvml
from enginesmith.pipeline.measure.nvml_calls import NOT_AVAILABLE, Process

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 3, 4, 6, 7
ADDRESSES = ("0000:17:00.0", "0000:65:00.0")
SLICE = uuid.UUID("11111111-2222-3333-4444-555555555555")
WHOLE, PART = 100, 200
"""Handles: of the second device on the bus is WHOLE + 1."""


class Library:
    """libnvidia-ml.so.1: answers by name of the function; an answer is a number, several, bytes, or an error code."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "nvmlDeviceGetName": b"NVIDIA H100",
            "nvmlSystemGetDriverVersion": b"580.65.06",
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 71_500,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetClockInfo": {1: 1980, 2: 2619},
            "nvmlDeviceGetMaxClockInfo": {1: 1980, 2: 2619},
            "nvmlDeviceGetCurrentClocksEventReasons": 0x44,
            "nvmlDeviceGetViolationStatus": {0: 2_500_000_000, 1: 0},
            "nvmlDeviceGetPerformanceState": 0,
            "nvmlDeviceGetUtilizationRates": 12,
            "nvmlDeviceGetComputeMode": 3,
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetEccMode": (1, 1),
            "nvmlDeviceGetMigMode": (0, 0),
            "nvmlDeviceGetMemoryInfo": {WHOLE: (80, 30), WHOLE + 1: (80, 31), PART: (10, 3)},
            "nvmlDeviceGetComputeRunningProcesses_v2": [(4321, 7), (4322, NOT_AVAILABLE)],
            **answers,
        }

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == "nvmlDeviceGetHandleByPciBusId_v2":
            return self.by_address
        if name == "nvmlDeviceGetHandleByUUID":
            return self.by_uuid
        if name not in self.answers:
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, self.answers[name], arguments)

    def by_address(self, address: ctypes.c_char_p, found: Any) -> int:
        if (address.value or b"").decode() not in ADDRESSES:
            return NOT_FOUND
        found._obj.value = WHOLE + ADDRESSES.index((address.value or b"").decode())
        return 0

    def by_uuid(self, name: ctypes.c_char_p, found: Any) -> int:
        if name.value != f"MIG-{SLICE}".encode():
            return NOT_FOUND
        found._obj.value = PART
        return 0

    def answer(self, name: str, answer: Any, arguments: tuple[Any, ...]) -> int:
        if isinstance(answer, Exception):
            return int(str(answer))
        if isinstance(answer, bytes):
            arguments[-2].value = answer
        elif isinstance(answer, list):
            return self.listed(answer, *arguments[1:])
        elif isinstance(answer, dict):
            key = arguments[0].value if name == "nvmlDeviceGetMemoryInfo" else arguments[1].value
            self.put(answer[key], arguments[-1])
        else:
            self.put(answer, *(one for one in arguments if hasattr(one, "_obj")))
        return 0

    def put(self, answer: Any, *places: Any) -> None:
        place = places[0]._obj
        if hasattr(place, "total"):
            place.total, place.used = answer
        elif hasattr(place, "violation"):
            place.violation = answer
        elif hasattr(place, "gpu"):
            place.gpu = answer
        else:
            for one, number in zip(places, answer if isinstance(answer, tuple) else (answer,), strict=True):
                one._obj.value = number

    def listed(self, answer: list[tuple[int, int]], count: Any, places: Any) -> int:
        if count._obj.value < len(answer):
            count._obj.value = len(answer)
            return INSUFFICIENT_SIZE
        count._obj.value = len(answer)
        for place, (pid, used) in zip(places or (), answer, strict=False):
            place.pid, place.used = pid, used
        return 0


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
    return Nvml(Library(**answers), CudaDriver(*(addresses or ADDRESSES)))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container whose processes are not numbered as the host's are."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532999]")
    monkeypatch.setattr(nvml, "_PROC", tmp_path)
    return tmp_path


def test_layouts_are_those_of_nvml_h() -> None:
    assert ctypes.sizeof(Process) == 24
    assert (Process.used.offset, Process.gpu_instance.offset) == (8, 16)


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
        utilisation_percent=12,
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
    with pytest.raises(MissingCapability, match=r"does not show cuda:0 .*not found"):
        made("0000:99:00.0").used_bytes(0)


def test_what_is_refused_is_none_beside_its_reason() -> None:
    refused = {"nvmlDeviceGetPowerUsage": ValueError(NOT_SUPPORTED), "nvmlDeviceGetEccMode": ValueError(999)}
    state = made(**refused, nvmlDeviceGetPerformanceState=32).state(0)
    assert (state.power_watts, state.ecc, state.performance_state) == (None, None, None)
    assert state.reasons == {
        "power_watts": "not supported on this device",
        "ecc": "NVML's error 999",
        "performance_state": "the driver does not know it",
    }
    with pytest.raises(MissingCapability, match="no permission"):
        made(nvmlDeviceGetMemoryInfo=ValueError(NO_PERMISSION)).used_bytes(0)


def test_functions_that_an_old_or_a_new_driver_lacks() -> None:
    names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetComputeRunningProcesses_v2")
    library = Library(nvmlDeviceGetCurrentClocksThrottleReasons=1, nvmlDeviceGetComputeRunningProcesses_v3=[(5, 6)])
    for name in (*names, "nvmlDeviceGetViolationStatus"):
        del library.answers[name]
    state = Nvml(library, CudaDriver(*ADDRESSES)).state(0)
    assert state.clock_limits == ("idle",)
    assert [(one.pid, one.used_bytes) for one in state.processes or ()] == [(5, 6)]
    assert "has no nvmlDeviceGetViolationStatus" in state.reasons["held_back_by_heat_seconds"]


def test_a_limit_that_is_newer_than_this() -> None:
    assert made(nvmlDeviceGetCurrentClocksEventReasons=0x1001).state(0).clock_limits == (
        "idle",
        "unknown reason 0x1000",
    )


def test_a_slice_has_its_own_memory_and_the_device_its_clocks() -> None:
    divided = made(nvmlDeviceGetMigMode=(1, 1))
    state = divided.state(0)
    assert (state.mig, state.memory_bytes, state.used_bytes, state.sm_clock_mhz) == (True, 10, 3, 1980)
    assert divided.used_bytes(0) == 3


def test_no_process_is_none() -> None:
    assert made(nvmlDeviceGetComputeRunningProcesses_v2=[]).state(0).processes == ()


def test_bytes_of_a_process(proc: Path) -> None:
    for pid in (4321, 4322):
        (proc / str(pid)).mkdir()
    assert made().process_bytes(0, 4321) == (7, "")
    assert made().process_bytes(0, 4322) == (None, "the driver does not tell the memory of single processes here")
    assert "lists no process 1" in made().process_bytes(0, 1)[1]
    refused = made(nvmlDeviceGetComputeRunningProcesses_v2=ValueError(NO_PERMISSION))
    assert refused.process_bytes(0, 4321) == (None, "NVML does not list processes: no permission")


def test_numbers_of_the_host_are_not_taken_for_ours(proc: Path) -> None:
    (proc / "4321").mkdir()  # 4322 is the host's number, and so may be 4321
    found, reason = made().process_bytes(0, 4321)
    assert found is None
    assert "as the host does (4322, say)" in reason
    (proc / "self/ns/pid").unlink()
    (proc / "self/ns/pid").symlink_to("pid:[4026531836]")  # the host itself
    assert made().process_bytes(0, 4321) == (7, "")


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    nvml.library.cache_clear()
    monkeypatch.setattr(cuda, "driver", lambda: Driver(reason="there is no driver"))
    with pytest.raises(MissingCapability, match="there is no driver"):
        nvml.library()
    device = CudaDevice(name="NVIDIA H100", compute_capability=(9, 0))
    monkeypatch.setattr(cuda, "driver", lambda: Driver(version=13000, devices=(device,)))
    monkeypatch.setattr(nvml.ctypes, "CDLL", absent)
    with pytest.raises(MissingCapability, match="no NVML") as error:
        nvml.library()
    assert "NVIDIA_DRIVER_CAPABILITIES" in error.value.remedy
