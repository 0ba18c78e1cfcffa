"""NVIDIA's management library (NVML, libnvidia-ml.so.1) by ctypes: the functions that are needed of it.

Functions, constants and layouts are those of nvml.h of CUDA 12.6; the list of processes was compared from 11.7 on.
"""

import ctypes
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p, create_string_buffer
from typing import Any

_TEXT_BYTES = 96
_INSUFFICIENT_SIZE = 7
_SPARE = 8
"""Places in a list for processes that start between two calls."""
ERRORS = {
    2: "NVML takes the question for invalid",
    3: "not supported on this device",
    4: "no permission",
    6: "not found",
    9: "the driver is not loaded",
    15: "the GPU has fallen off the bus",
    18: "the driver in the kernel and its libraries are of different versions: reboot, or load the driver again",
}
NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE, as bytes of a process."""


class Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t."""

    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes; what is used includes what the driver keeps for itself."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Utilisation(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Violation(ctypes.Structure):
    """nvmlViolationTime_t: microseconds of the clock, nanoseconds below the clocks that were asked for."""

    _fields_ = (("reference", c_ulonglong), ("violation", c_ulonglong))


class RefusedError(Exception):
    """NVML does not answer one question; the message says why."""


class Calls:
    """Questions to NVML as Python functions. Each raises RefusedError where NVML does not answer."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def handle(self, function: str, name: str) -> c_void_p:
        """Of a device, by the function that finds it under that name."""
        found = c_void_p()
        self._ask(function, c_char_p(name.encode()), byref(found))
        return found

    def number(self, function: str, handle: c_void_p, *arguments: int) -> int:
        """What a function gives as one unsigned number."""
        found = c_uint()
        self._ask(function, handle, *map(c_uint, arguments), byref(found))
        return found.value

    def two(self, function: str, handle: c_void_p) -> tuple[int, int]:
        """What a function gives as two unsigned numbers."""
        first, second = c_uint(), c_uint()
        self._ask(function, handle, byref(first), byref(second))
        return first.value, second.value

    def text(self, function: str, *handle: c_void_p) -> str:
        """What a function gives as text."""
        found = create_string_buffer(_TEXT_BYTES)
        self._ask(function, *handle, found, c_uint(_TEXT_BYTES))
        return found.value.decode(errors="replace")

    def memory(self, handle: c_void_p) -> Memory:
        """Of a device or a slice of one."""
        found = Memory()
        self._ask("nvmlDeviceGetMemoryInfo", handle, byref(found))
        return found

    def utilisation(self, handle: c_void_p) -> int:
        """Percent of the last moments in which a kernel ran."""
        found = _Utilisation()
        self._ask("nvmlDeviceGetUtilizationRates", handle, byref(found))
        return int(found.gpu)

    def held_back(self, handle: c_void_p, policy: int) -> float:
        """Seconds, since the driver was loaded, that a policy kept clocks below what was asked for."""
        found = _Violation()
        self._ask("nvmlDeviceGetViolationStatus", handle, c_uint(policy), byref(found))
        return float(found.violation) / 1e9

    def clock_limits(self, handle: c_void_p) -> int:
        """Bits of what keeps clocks down; drivers from 535 on have the first name, all have the second."""
        bits, names = c_ulonglong(), [f"nvmlDeviceGetCurrentClocks{word}Reasons" for word in ("Event", "Throttle")]
        self._ask(self._first(names), handle, byref(bits))
        return bits.value

    def processes(self, handle: c_void_p) -> list[Process]:
        """Those that compute. Version 2 first: version 3 had another layout in early drivers of the 535 branch."""
        name = self._first([f"nvmlDeviceGetComputeRunningProcesses_v{version}" for version in (2, 3)])
        count = c_uint(0)
        if not self._ask(name, handle, byref(count), None, expected=_INSUFFICIENT_SIZE):
            return []
        count.value += _SPARE
        found = (Process * count.value)()
        self._ask(name, handle, byref(count), found)
        return list(found[: count.value])

    def _first(self, names: list[str]) -> str:
        return next((name for name in names if hasattr(self._library, name)), names[-1])

    def _ask(self, function: str, *arguments: Any, expected: int = 0) -> int:
        """Call; an error code other than ``expected`` is a refusal."""
        call = getattr(self._library, function, None)
        if call is None:
            raise RefusedError(f"this driver's NVML has no {function}")
        code = int(call(*arguments))
        if code not in (0, expected):
            raise RefusedError(ERRORS.get(code, f"NVML's error {code}"))
        return code
