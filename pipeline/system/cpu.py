"""Read the processor from /sys and /proc: clocks, topology, what was lost to heat and to a host."""

import contextlib
import math
import os
import platform
import re
import time as clock
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

# Waiting for a core: the kernel's own account of how long this process's threads wanted one and had none.

_TASKS = Path("/proc/self/task")
_ENABLED = Path("/proc/self/schedstat")
_RECORD_BYTES = 96


class RunQueue:
    """The waiting of all threads that there are when it is opened; a look costs about 3 µs a thread.

    The second figure of ``schedstat`` is time spent on a run queue, in nanoseconds (the kernel's
    Documentation/scheduler/sched-stats.rst). Where the kernel does not keep it, :attr:`known` is false.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        self.known = _ENABLED.is_file()

    def waited_ns(self) -> int:
        """Add up the nanoseconds that the threads waited since they started; 0 where that is not known."""
        total = 0
        for file in self._files:
            with contextlib.suppress(OSError, IndexError):  # the thread ended
                total += int(os.pread(file, _RECORD_BYTES, 0).split()[1])
        return total

    def __enter__(self) -> Self:
        for task in _TASKS.iterdir() if self.known else ():
            with contextlib.suppress(OSError):  # it ended meanwhile
                self._files.append(os.open(task / "schedstat", os.O_RDONLY))
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


# Vector units: instructions for few-bit arithmetic, read from the kernel.

_UNITS = re.compile(r"\b(?:avx|fma|amx|asimd|sve|i8mm|bf16)\w*")


@cache
def vector_units() -> tuple[str, ...]:
    """List the vector extensions, sorted; where the kernel does not tell, what Python knows of the processor."""
    info = Path("/proc/cpuinfo")
    return (
        tuple(sorted(set(_UNITS.findall(info.read_text(encoding="utf-8")))))
        if info.is_file()
        else (platform.processor(),)
    )


def int8_weight_bits() -> int:
    """Find how many bits weights can have beside 8-bit activations without a wrong result.

    x86 processors before VNNI add two products in a saturating 16-bit register (vpmaddubsw): with weights of 8 bits
    that overflows, so they get 7 ("reduce_range" in ONNX Runtime's documentation of quantization).
    """
    units = vector_units()
    x86 = any(unit.startswith("avx") for unit in units)
    return 7 if x86 and not any("vnni" in unit or "amx" in unit for unit in units) else 8


# Small files in which the kernel shows its state; what is not there is None.


def text(path: Path) -> str | None:
    """Read a file's content, stripped; None where there is none."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def fields(path: Path) -> dict[str, str]:
    """Read ``name : value`` lines; the first of each name."""
    rows = [row.partition(":") for row in (text(path) or "").splitlines()]
    return {name.strip(): value.strip() for name, _, value in reversed(rows)}


def numbers(path: Path) -> dict[str, int]:
    """Read ``name number`` lines."""
    rows = (row.split() for row in (text(path) or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}


_CPU_FOLDER = Path("/sys/devices/system/cpu")
_NODE_FOLDER = Path("/sys/devices/system/node")
_CPUINFO, _STAT, _PROCESSES = Path("/proc/cpuinfo"), Path("/proc/stat"), Path("/proc")
_TICKS_TOLD, _STOLEN = 8, 7
"""Columns of /proc/stat (proc(5)): those before the time of guests, which the user's holds already; the stolen one."""
_STATE, _PARENT, _GROUP = 0, 1, 2
"""Columns of /proc/PID/stat after the name."""
_READINGS, _READING_SECONDS = 5, 0.02
"""Readings of the threads that run now, and the time between two of them."""


def _read_first_core(name: str) -> str | None:
    """Read a file of the first core that this process may run on."""
    return text(_CPU_FOLDER / f"cpu{min(os.sched_getaffinity(0))}" / name)


def model() -> str:
    """Read the processor's name; Arm's have numbers in its place, which tell Graviton 2, 3 and 4 apart, say."""
    facts = fields(_CPUINFO)
    codes = [f"{name} {facts[f'CPU {name}']}" for name in ("implementer", "part") if f"CPU {name}" in facts]
    return facts.get("model name") or ", ".join(codes) or platform.processor() or platform.machine()


def count_others() -> float:
    """Count the threads of other programs that run now or wait for a core, as the mean of some readings.

    This program's are those of the processes of its group and of their descendants: Linux's proc(5) has the columns.
    """
    counts = []
    for _ in range(_READINGS):
        rows = {stat.parent.name: _read_columns(stat) for stat in _PROCESSES.glob("[0-9]*/stat")}
        own = {pid for pid, columns in rows.items() if columns[_GROUP] == str(os.getpgid(0))}
        while children := {pid for pid, columns in rows.items() if columns[_PARENT] in own} - own:
            own |= children
        threads = (stat for pid in own for stat in _list_threads(pid))
        running = (text(_PROCESSES / "loadavg") or "0 0 0 0/0").split()[3].partition("/")[0]
        counts.append(max(0, int(running) - sum(_read_columns(stat)[_STATE] == "R" for stat in threads)))
        clock.sleep(_READING_SECONDS)
    return sum(counts) / len(counts)


def _list_threads(pid: str) -> list[Path]:
    """List the files of a process's threads; none where it has ended."""
    try:
        return list((_PROCESSES / pid / "task").glob("*/stat"))
    except OSError:
        return []


def _read_columns(stat: Path) -> list[str]:
    """Read the columns after the name; empty ones where the process has ended."""
    return (text(stat) or "").rpartition(")")[2].split() or ["", "", ""]


def is_virtual() -> bool | None:
    """Tell whether this is a virtual machine, as x86 processors do; None for others."""
    flags = fields(_CPUINFO).get("flags")
    return None if flags is None else "hypervisor" in flags.split()


def governor() -> str | None:
    """Read the governor of the cores that this process may run on; several are joined by a comma."""
    files = (_CPU_FOLDER / f"cpu{core}/cpufreq/scaling_governor" for core in os.sched_getaffinity(0))
    return ", ".join(sorted(set(filter(None, map(text, files))))) or None


def frequency_mhz() -> float | None:
    """Read the first core's clock from the kernel; where it shows none, from /proc/cpuinfo."""
    return _read_megahertz("cur") or float(fields(_CPUINFO).get("cpu MHz") or 0) or None


def frequency_limits_mhz() -> tuple[float | None, float | None]:
    """Read the least and the most that the governor may choose."""
    return _read_megahertz("min"), _read_megahertz("max")


def _read_megahertz(which: str) -> float | None:
    kilohertz = _read_first_core(f"cpufreq/scaling_{which}_freq")
    return int(kilohertz) / 1e3 if kilohertz and kilohertz.isdecimal() else None


def turbo() -> bool | None:
    """Tell whether clocks may go above the nominal one; None where the kernel does not show it."""
    no_turbo, boost = text(_CPU_FOLDER / "intel_pstate/no_turbo"), text(_CPU_FOLDER / "cpufreq/boost")
    if no_turbo is not None:
        return no_turbo == "0"
    return None if boost is None else boost == "1"


def threads_per_core() -> int | None:
    """Count the hardware threads that share a core (SMT), in a list like ``0-1,64``."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", _read_first_core("topology/thread_siblings_list") or "")
    return sum(int(last or first) - int(first) + 1 for first, last in ranges) or None


def fewer_threads(allowed: int) -> tuple[str, ...]:
    """List numbers of threads that may be faster than all that are allowed: the quota's, each core's, half, one."""
    cores, quota = allowed // (threads_per_core() or 1), quota_cores()
    counts = (math.ceil(quota) if quota else 0, cores, cores // 2, 1)
    return tuple(str(count) for count in dict.fromkeys(counts) if 0 < count < allowed)


def numa_nodes() -> int | None:
    """Count memory nodes; reaching the memory of another one is slower."""
    return len(list(_NODE_FOLDER.glob("node[0-9]*"))) or None


def thermal_throttles() -> int | None:
    """Count how often heat slowed cores or the package down since the start, over all cores."""
    files = _CPU_FOLDER.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    counts = [int(count) for file in files if (count := text(file))]
    return sum(counts) if counts else None


def time() -> tuple[float, float] | None:
    """Read the seconds of all cores since the start, in total and those that the host gave to other machines."""
    ticks = (text(_STAT) or "").partition("\n")[0].split()[1:]
    if len(ticks) < _TICKS_TOLD:
        return None
    second = os.sysconf("SC_CLK_TCK")
    return sum(map(int, ticks[:_TICKS_TOLD])) / second, int(ticks[_STOLEN]) / second


def available_bytes() -> int | None:
    """Read the bytes that the machine could still hand out without swapping (MemAvailable, proc_meminfo(5))."""
    row = fields(Path("/proc/meminfo")).get("MemAvailable")
    return kibibytes(row) if row else None


def kibibytes(field: str) -> int:
    """Convert ``12 kB`` to bytes."""
    return int(field.split()[0]) * 1024


# Limits of the container of this process, and how often it was throttled (cgroups(7), both versions).

_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNLIMITED_BYTES = 1 << 60


class MemoryLimit(NamedTuple):
    """The limit that leaves the least, and the bytes that it leaves."""

    limit_bytes: int
    left_bytes: int | None
    """None where the group's use is not shown. Cached files that would give way do not count as used."""


def quota_cores() -> float | None:
    """Read cores' worth of time: the least of all limits; ``cpu.max`` holds ``quota period``, version 1 −1 for none."""
    quotas = [(text(folder / "cpu.max") or "max").split() for folder in _folders("")]
    for folder in _folders("cpu"):
        quotas.append([text(folder / f"cpu.cfs_{name}_us") or "-1" for name in ("quota", "period")])
    return min((int(row[0]) / int(row[1]) for row in quotas if row[0] != "max" and "-1" not in row), default=None)


def memory_limit() -> MemoryLimit | None:
    """Read the limits of all groups; None where no limit is set."""
    files = [(folder, "memory.max", "memory.current", "") for folder in _folders("")]
    old_names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    files += [(folder, *old_names) for folder in _folders("memory")]
    limits = []
    for folder, limit_file, use_file, prefix in files:
        limit, used = text(folder / limit_file), text(folder / use_file)
        if limit and limit != "max" and int(limit) < _UNLIMITED_BYTES:
            counts = numbers(folder / "memory.stat")
            reclaimable = sum(counts.get(f"{prefix}{cached}", 0) for cached in ("inactive_file", "active_file"))
            limits.append(MemoryLimit(int(limit), max(0, int(limit) - int(used) + reclaimable) if used else None))
    return min(limits, key=lambda row: row.limit_bytes if row.left_bytes is None else row.left_bytes, default=None)


def free_bytes() -> int | None:
    """Read the bytes that this process could still take: of the machine, and of its container's limit."""
    limit = memory_limit()
    sizes = (available_bytes(), limit.left_bytes if limit else None)
    return min((size for size in sizes if size is not None), default=None)


def throttling() -> tuple[int, int, float] | None:
    """Read periods of the quota since the group was made, those in which it ran out, and the seconds lost.

    Counts are those of the group that was throttled most; None where no group has a quota or counts.
    """
    rows = []
    for folder in (*_folders(""), *_folders("cpu")):
        counts = numbers(folder / "cpu.stat")
        if periods := counts.get("nr_periods"):
            nanoseconds = counts.get("throttled_usec", 0) * 1e3 or counts.get("throttled_time", 0)
            rows.append((periods, counts["nr_throttled"], nanoseconds / 1e9))
    return max(rows, key=lambda row: row[2], default=None)


def _folders(controller: str) -> list[Path]:
    """List this process's control group and those above it, as far as they are mounted; version 2 has no controller."""
    root = _CGROUP / controller if controller else _CGROUP
    group = Path(_own_group(controller).lstrip("/"))
    return [root / group, *(root / parent for parent in group.parents)]


def _own_group(controller: str) -> str:
    """Find the path of this process's control group; ``controller`` is empty for version 2."""
    for line in (text(_OWN) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == controller or controller in controllers.split(","):
            return path
    return "/"
