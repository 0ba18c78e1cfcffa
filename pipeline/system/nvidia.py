"""Read NVIDIA's GPUs: the devices that the CUDA driver shows, and their state from the management library (NVML).

The driver is asked by ctypes, without importing a framework or starting a context; NVML by the package nvidia-ml-py
(``pynvml``). NVML counts all devices in the order of the bus; CUDA hides and renumbers them (CUDA_VISIBLE_DEVICES), so
a device is found by its address on the PCI bus. A slice of a device (MIG) has a handle of its own, which tells its
memory and its processes; the rest belongs to the whole device.
"""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import os
import re
import uuid
from collections.abc import Callable
from ctypes import byref, c_int, create_string_buffer
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.system.device import Availability, unavailable

OTHER_TORCH = (
    "replace it: pip uninstall -y torch && pip install torch; where PIP_EXTRA_INDEX_URL points at "
    "PyTorch's CPU index, unset it first"
)
"""For a torch without CUDA. It satisfies every requirement, so that installing alone leaves it as it is; and pip takes
``2.13.0+cpu`` for newer than ``2.13.0``, wherever it finds both."""
OLDEST_DRIVER = {12: "525.60.13", 13: "580.65.06"}
"""For all releases of a major version, by minor version compatibility: the release notes of the CUDA Toolkit, table of
minimum driver versions (Linux)."""
_CUDA_OF = re.compile(r"^\s*cuda(?:_version)?\b[^=\n]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
_START_ERRORS = {
    100: "it shows no device",
    802: "the system is not ready: is nvidia-fabricmanager running?",
    803: "the library and the kernel's driver differ in version: restart the machine, or the container",
    804: "a package cuda-compat is in use, which this GPU does not support: remove it",
    805: "the server of MPS does not answer",
}
"""Codes of CUresult in cuda.h."""
_NAME_BYTES, _ADDRESS_BYTES, _IDENTITY_BYTES = 256, 32, 16
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h


class CudaDevice(BaseModel, frozen=True):
    """One device as the driver names it."""

    name: str
    compute_capability: tuple[int, int]

    @property
    def target(self) -> str:
        """``sm86`` for compute capability 8.6."""
        return "sm{}{}".format(*self.compute_capability)

    @property
    def file_stem(self) -> str:
        """Name for files that hold for this model of GPU alone."""
        return f"{self.target}-{self.name.replace(' ', '_').replace('/', '_')}"


class Driver(BaseModel, frozen=True):
    """The CUDA driver: its version (13020 is CUDA 13.2) and its devices, or why there are none."""

    version: int | None = None
    devices: tuple[CudaDevice, ...] = ()
    reason: str = ""


def count_alike(index: int = 0) -> int:
    """Count the devices from this one on that are of its kind, up to the first of another kind."""
    devices = driver().devices[index:]
    return sum(1 for _ in itertools.takewhile(lambda device: device == devices[0], devices))


@functools.cache
def driver() -> Driver:
    """Ask the driver once in each process."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(reason="there is no CUDA driver (libcuda.so.1)")
    if code := library.cuInit(0):
        words = f"; {_START_ERRORS[code]}" if code in _START_ERRORS else ""
        return Driver(reason=f"the CUDA driver does not start (cuInit gives {code}{words})")
    version, count = c_int(), c_int()
    if code := library.cuDriverGetVersion(byref(version)) or library.cuDeviceGetCount(byref(count)):
        return Driver(reason=f"the CUDA driver does not say which devices there are (error {code})")
    devices = []
    for index in range(count.value):
        handle, number, name = c_int(), c_int(), create_string_buffer(_NAME_BYTES)
        library.cuDeviceGet(byref(handle), index)
        library.cuDeviceGetName(name, _NAME_BYTES, handle)
        capability = []
        for attribute in _CAPABILITY:
            library.cuDeviceGetAttribute(byref(number), attribute, handle)
            capability.append(number.value)
        devices.append(
            CudaDevice(name=name.value.decode(errors="replace"), compute_capability=(capability[0], capability[1]))
        )
    reason = "" if devices else "the CUDA driver shows no device"
    return Driver(version=version.value, devices=tuple(devices), reason=reason)


def dotted(version: int) -> str:
    """Write the driver's number of a CUDA version as people do: 13.2 for 13020."""
    return f"{version // 1000}.{version % 1000 // 10}"


def cuda_device(index: int) -> CudaDevice | None:
    """Return the device, if it is there."""
    devices = driver().devices
    return devices[index] if index < len(devices) else None


def describe_device(index: int) -> dict[str, Any]:
    """Describe what decides which kernels there are for a device: its model, and the driver."""
    here = cuda_device(index)
    return {"device": here.model_dump() if here else None, "driver": driver().version}


@functools.cache
def identify(index: int) -> str | None:
    """Read the UUID of a device, or of the slice of it that is shown; None if the driver does not tell.

    It is the same in all processes, whichever devices they are shown, and in whatever order.
    """
    if cuda_device(index) is None:
        return None
    try:
        library, ordinal = ctypes.CDLL("libcuda.so.1"), c_int()
    except OSError:
        return None
    identity = None if library.cuDeviceGet(byref(ordinal), c_int(index)) else _read_uuid(library, ordinal)
    return None if identity is None else str(identity)


def _read_uuid(library: Any, ordinal: c_int) -> uuid.UUID | None:
    identity = (ctypes.c_ubyte * _IDENTITY_BYTES)()
    if not hasattr(library, "cuDeviceGetUuid_v2") or library.cuDeviceGetUuid_v2(byref(identity), ordinal):
        return None
    return uuid.UUID(bytes=bytes(identity))


def cuda_of(package: str, file: str) -> str | None:
    """Read the CUDA that a package was built for, as ``13.0``, from one of its files; None where that does not say."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    match = _CUDA_OF.search(path.read_text(encoding="utf-8")) if path and path.is_file() else None
    return match[1] if match else None


@functools.cache
def torch_cuda() -> str | None:
    """Read the CUDA that the installed torch was built for, without importing it; None for a build without CUDA."""
    return cuda_of("torch", "version.py")


def available(index: int) -> Availability:
    """Tell whether engines can use that device: the driver shows it, and fits the torch whose buffers all of them use.

    A package cuda-compat (forward compatibility) brings a newer libcuda.so.1, whose version counts.
    """
    shown = driver()
    if not shown.devices:
        remedy = "install NVIDIA's driver, or start the container with --gpus all"
        return Availability(ok=False, reason=f"no CUDA device here: {shown.reason}", remedy=remedy)
    built_for = torch_cuda()
    if built_for is None:
        return unavailable(
            "the installed torch is built without CUDA, and buffers of all engines come from it", OTHER_TORCH
        )
    major = int(built_for.partition(".")[0])
    if (version := shown.version or 0) // 1000 < major:
        least = OLDEST_DRIVER.get(major, f"for CUDA {major}")
        known, needed = f"it is for CUDA {dotted(version)}", f"the installed torch needs CUDA {major}"
        reason = f"the NVIDIA driver is too old: {known}, and {needed}"
        return unavailable(reason, f"install driver {least} or newer, or use --device cpu")
    if index < len(shown.devices):
        return _check_compute_mode(index)
    remedy = f"use one of cuda:0 … cuda:{len(shown.devices) - 1}"
    return Availability(ok=False, reason=f"there is no cuda:{index}", remedy=remedy)


def _check_compute_mode(index: int) -> Availability:
    """Tell whether several processes may use a device at once: each session has one, and several are open together.

    With MPS they share one context, which NVIDIA's guide for it wants in exclusive mode.
    """
    try:
        state = nvml().state(index)
    except MissingCapability:  # nothing is known of it
        return Availability(ok=True)
    mode = state.compute_mode or ""
    with_mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPES)).exists()
    if mode != "prohibited" and (not mode.startswith("exclusive") or with_mps):
        return Availability(ok=True)
    reason = f"cuda:{index} is in the compute mode {mode!r}, and several processes have to use it at once"
    return Availability(ok=False, reason=reason, remedy=f"sudo nvidia-smi -i {state.pci_bus_id} -c DEFAULT")


_PROC = Path("/proc")
_MPS_PIPES = "/tmp/nvidia-mps"
_HOST_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the kernel's proc_ns.h: where processes have the numbers that the driver knows."""
_SM, _MEMORY = 1, 2
_BY_POWER, _BY_HEAT = 0, 1
_UNKNOWN_STATE = 32
_COMPUTE_MODES = dict(enumerate(("default", "exclusive thread", "prohibited", "exclusive process")))
IDLE = "idle"
CHOSEN = "application clocks"
CLOCK_LIMITS = {
    0x1: IDLE,
    0x2: CHOSEN,
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost with other GPUs",
    0x20: "heat (by the driver)",
    0x40: "heat (by the hardware)",
    0x80: "power brake (by the hardware)",
    0x100: "display clocks",
}
"""nvmlClocksEventReasons…, which were nvmlClocksThrottleReasons…: what keeps clocks from being higher."""


class _UnknownError(Exception):
    """NVML's answer to a question says nothing; the message says why."""


def in_host_namespace() -> bool:
    """Tell whether processes have the numbers here that the driver knows them by, which they have in no container."""
    namespace = _PROC / "self/ns/pid"
    return namespace.is_symlink() and str(namespace.readlink()) == _HOST_NAMESPACE


class GpuProcess(BaseModel, frozen=True):
    """A process that computes on a device, as the driver numbers it; its bytes are None where the driver hides them."""

    pid: int
    used_bytes: int | None
    """Never 0, which drivers give for processes of containers (NVIDIA/open-gpu-kernel-modules#614): a context takes
    some."""


class GpuState(BaseModel, frozen=True):
    """One GPU at one moment. What is None has its reason under its name in ``reasons``."""

    name: str = "unknown GPU"
    compute_capability: str = "unknown"
    driver: str | None = None
    pci_bus_id: str | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    """With what the driver keeps for itself."""
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    clock_limits: tuple[str, ...] | None = None
    """Reasons why clocks are not higher now (throttle reasons)."""
    held_back_by_power_seconds: float | None = None
    """Counted by the driver since it was loaded."""
    held_back_by_heat_seconds: float | None = None
    performance_state: str | None = None
    """P0 is the fastest."""
    utilization_percent: int | None = None
    """Share of the last moments (1/6 to 1 second) in which a kernel ran."""
    compute_mode: str | None = None
    persistence: bool | None = None
    """The driver stays loaded while nothing uses the device."""
    ecc: bool | None = None
    mig: bool | None = None
    """The device is divided; then memory and processes are those of the slice."""
    processes: tuple[GpuProcess, ...] | None = None
    reasons: dict[str, str] = {}


class Nvml:
    """Answer questions about devices as CUDA counts them; ``calls`` is the module pynvml, ``driver`` is libcuda."""

    def __init__(self, calls: Any, driver: Any) -> None:
        self._calls, self._driver = calls, driver

    def state(self, index: int) -> GpuState:
        """Read everything about a device; takes about a millisecond.

        Raises:
            MissingCapability: CUDA or NVML does not know the device.
        """
        address, whole, part = self._find(index)
        answers: dict[str, Any] = {}
        reasons = {}
        for name, ask in self._questions(whole, part).items():
            try:
                answers[name] = ask()
            except (self._calls.NVMLError, _UnknownError) as refusal:
                reasons[name] = str(refusal)
        return GpuState(pci_bus_id=address, **answers, reasons=reasons)

    def used_bytes(self, index: int) -> int:
        """Read the bytes in use, by whomever, on the device or on the slice of it that this process has.

        Raises:
            MissingCapability: NVML does not tell.
        """
        _, _, part = self._find(index)
        try:
            return int(self._calls.nvmlDeviceGetMemoryInfo(part).used)
        except self._calls.NVMLError as refusal:
            raise MissingCapability(f"NVML does not tell the memory of cuda:{index}: {refusal}") from refusal

    def process_bytes(self, index: int, pid: int) -> tuple[int | None, str]:
        """Read the bytes that one process has on a device; or None, and why.

        Raises:
            MissingCapability: CUDA or NVML does not know the device.
        """
        _, _, part = self._find(index)
        try:
            processes = self._processes(part)
        except self._calls.NVMLError as refusal:
            return None, f"NVML does not list processes: {refusal}"
        if not in_host_namespace():
            strange = [process.pid for process in processes if not (_PROC / str(process.pid)).is_dir()]
            if strange:
                example = f"({strange[0]}, say)"
                return None, f"the driver numbers processes as the host does {example}, and this container otherwise"
        own = next((process for process in processes if process.pid == pid), None)
        if own is None:
            return None, f"the driver lists no process {pid} on the device; in a container it may list none at all"
        if own.used_bytes is None:
            return None, "the driver does not tell the memory of single processes here"
        return own.used_bytes, ""

    def _find(self, index: int) -> tuple[str, Any, Any]:
        """Find a device's address, and NVML's handles of the device and of the part that this process may use."""
        ordinal, address = c_int(), create_string_buffer(_ADDRESS_BYTES)
        if self._driver.cuDeviceGet(byref(ordinal), c_int(index)):
            raise MissingCapability(f"CUDA shows no cuda:{index}", "look at CUDA_VISIBLE_DEVICES")
        if self._driver.cuDeviceGetPCIBusId(address, c_int(_ADDRESS_BYTES), ordinal):
            raise MissingCapability(f"CUDA does not tell where cuda:{index} is on the bus")
        name = address.value.decode()
        try:
            whole = self._calls.nvmlDeviceGetHandleByPciBusId(name)
            divided = False
            with contextlib.suppress(self._calls.NVMLError):  # most devices cannot be divided
                divided = bool(self._calls.nvmlDeviceGetMigMode(whole)[0])
            return name, whole, self._slice(ordinal) if divided else whole
        except (self._calls.NVMLError, _UnknownError) as refusal:
            raise MissingCapability(f"NVML does not show cuda:{index} ({name}): {refusal}") from refusal

    def _slice(self, ordinal: c_int) -> Any:
        if (identity := _read_uuid(self._driver, ordinal)) is None:
            raise _UnknownError("the device is divided (MIG), and CUDA does not tell which slice this is")
        return self._calls.nvmlDeviceGetHandleByUUID(f"MIG-{identity}")

    def _questions(self, whole: Any, part: Any) -> dict[str, Callable[[], Any]]:
        """List the questions about a device by the field that the answer goes to."""
        nvml = self._calls

        def held_back_seconds(policy: int) -> float:
            return float(nvml.nvmlDeviceGetViolationStatus(whole, policy).violationTime) / 1e9

        def performance_state() -> str:
            if (number := nvml.nvmlDeviceGetPerformanceState(whole)) == _UNKNOWN_STATE:
                raise _UnknownError("the driver does not know it")
            return f"P{number}"

        return {
            "name": lambda: nvml.nvmlDeviceGetName(whole),
            "compute_capability": lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(whole)),
            "driver": nvml.nvmlSystemGetDriverVersion,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(whole, 0),
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(whole) / 1e3,
            "power_limit_watts": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole) / 1e3,
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(whole, _SM),
            "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, _SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(whole, _MEMORY),
            "memory_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(whole, _MEMORY),
            "clock_limits": lambda: self._clock_limits(whole),
            "held_back_by_power_seconds": lambda: held_back_seconds(_BY_POWER),
            "held_back_by_heat_seconds": lambda: held_back_seconds(_BY_HEAT),
            "performance_state": performance_state,
            "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(whole).gpu,
            "compute_mode": lambda: _COMPUTE_MODES.get(
                mode := nvml.nvmlDeviceGetComputeMode(whole), f"unknown mode {mode}"
            ),
            "persistence": lambda: bool(nvml.nvmlDeviceGetPersistenceMode(whole)),
            "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(whole)[0]),
            "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(whole)[0]),
            "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(part).total,
            "used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(part).used,
            "processes": lambda: self._processes(part),
        }

    def _clock_limits(self, handle: Any) -> tuple[str, ...]:
        """List what keeps clocks down; drivers before 535 only have the second name."""
        try:
            bits = int(self._calls.nvmlDeviceGetCurrentClocksEventReasons(handle))
        except self._calls.NVMLError_FunctionNotFound:
            bits = int(self._calls.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        unknown = bits & ~sum(CLOCK_LIMITS)
        known = tuple(words for bit, words in CLOCK_LIMITS.items() if bits & bit)
        return (*known, f"unknown reason {unknown:#x}") if unknown else known

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        listed = self._calls.nvmlDeviceGetComputeRunningProcesses(handle)
        return tuple(GpuProcess(pid=process.pid, used_bytes=process.usedGpuMemory or None) for process in listed)


@functools.cache
def nvml() -> Nvml:
    """Start NVML, once in each process.

    Raises:
        MissingCapability: there is no CUDA device, or no NVML; says why.
    """
    if not driver().devices:
        raise MissingCapability(f"no CUDA device here: {driver().reason}", "install NVIDIA's driver")
    try:
        import pynvml
    except ImportError as error:
        remedy = "install it: pip install nvidia-ml-py"
        raise MissingCapability("the state of GPUs is unknown: nvidia-ml-py is not installed", remedy) from error
    try:
        pynvml.nvmlInit()
        return Nvml(pynvml, ctypes.CDLL("libcuda.so.1"))
    except (pynvml.NVMLError, OSError) as error:
        remedy = "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        raise MissingCapability(f"NVML does not start: {error}", remedy) from error
