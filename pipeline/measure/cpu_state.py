"""The processor as the kernel shows it in /sys and /proc: clocks, topology, what was lost to heat and to a host."""

import contextlib
import math
import os
import platform
import re
import time as clock
from pathlib import Path
from typing import NamedTuple

from enginesmith.pipeline.measure.kernel_files import fields, text

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_NODE_FOLDER = Path("/sys/devices/system/node")
_CPUINFO, _STAT = Path("/proc/cpuinfo"), Path("/proc/stat")
_TICKS_TOLD, _STOLEN = 8, 7
"""Columns of /proc/stat (proc(5)): those before the time of guests, which the user's holds already; the stolen one."""


_PROCESSES = Path("/proc")
_GROUP, _TIMES, _STARTED = 2, slice(11, 15), 19
"""Columns of /proc/PID/stat after the name: group; ticks by the process and by children that have ended; start."""
_LOAD_SECONDS = 60.0
"""Time constant of the load average."""


class Time(NamedTuple):
    """Of all cores together since the start, in seconds."""

    total: float
    stolen: float
    """The host of this virtual machine gave it to others."""


def first_core() -> Path:
    """The folder of a core that this process may run on."""
    return _CPU_FOLDER / f"cpu{min(os.sched_getaffinity(0))}"


def model() -> str:
    """The processor's name."""
    return fields(_CPUINFO).get("model name") or platform.processor() or platform.machine()


def own_load() -> float:
    """Estimate the part of the load average that is of this program: of all processes in its group.

    Each counts with its processor time a second, children that have ended included, as far as the average of a minute
    has come to show it since the process started. Linux's proc(5) has the columns.
    """
    now, ticks, group = clock.clock_gettime(clock.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK"), str(os.getpgid(0))
    load = 0.0
    for entry in _PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            columns = entry.read_text().rpartition(")")[2].split()
            if columns[_GROUP] == group:
                age = max(now - int(columns[_STARTED]) / ticks, 1.0)
                seconds = sum(map(int, columns[_TIMES])) / ticks
                load += seconds / age * (1 - math.exp(-age / _LOAD_SECONDS))
    return load


def is_virtual() -> bool | None:
    """Whether this is a virtual machine, as x86 processors tell; None for others."""
    flags = fields(_CPUINFO).get("flags")
    return None if flags is None else "hypervisor" in flags.split()


def governor() -> str | None:
    """Of the cores that this process may run on; several are joined by a comma."""
    files = (_CPU_FOLDER / f"cpu{core}/cpufreq/scaling_governor" for core in sorted(os.sched_getaffinity(0)))
    return ", ".join(sorted({found for file in files if (found := text(file))})) or None


def frequency_mhz() -> float | None:
    """The kernel's figure for the first core; where it shows none, what /proc/cpuinfo says."""
    found = _megahertz("scaling_cur_freq")
    if found is not None:
        return found
    told = fields(_CPUINFO).get("cpu MHz")
    return float(told) if told else None


def frequency_limits_mhz() -> tuple[float | None, float | None]:
    """The least and the most that the governor may choose."""
    return _megahertz("scaling_min_freq"), _megahertz("scaling_max_freq")


def turbo() -> bool | None:
    """Whether clocks may go above the nominal one; None where the kernel does not show it."""
    no_turbo = text(_CPU_FOLDER / "intel_pstate/no_turbo")
    if no_turbo is not None:
        return no_turbo == "0"
    boost = text(_CPU_FOLDER / "cpufreq/boost")
    return None if boost is None else boost == "1"


def threads_per_core() -> int | None:
    """Hardware threads that share a core (SMT)."""
    listed = text(first_core() / "topology/thread_siblings_list")
    return None if listed is None else _count(listed)


def numa_nodes() -> int | None:
    """Memory nodes; reaching the memory of another one is slower."""
    return len(list(_NODE_FOLDER.glob("node[0-9]*"))) or None


def thermal_throttles() -> int | None:
    """How often cores or the package were slowed down by heat since the start, over all cores."""
    files = _CPU_FOLDER.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    counts = [int(found) for file in files if (found := text(file))]
    return sum(counts) if counts else None


def time() -> Time | None:
    """From the first line of /proc/stat."""
    ticks = (text(_STAT) or "").partition("\n")[0].split()[1:]
    if len(ticks) < _TICKS_TOLD:
        return None
    second = os.sysconf("SC_CLK_TCK")
    return Time(sum(map(int, ticks[:_TICKS_TOLD])) / second, int(ticks[_STOLEN]) / second)


def _megahertz(name: str) -> float | None:
    kilohertz = text(first_core() / "cpufreq" / name)
    return int(kilohertz) / 1e3 if kilohertz and kilohertz.isdecimal() else None


def _count(listed: str) -> int:
    """How many there are in ``0-1,64``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", listed)
    return sum(int(last or first) - int(first) + 1 for first, last in ranges)
