"""Read how much memory is in use where a session runs, and what this process has resident.

Freed memory of this process is made to return to the kernel: at once for blocks from 128 KiB on (a fixed mmap threshold
turns off glibc's adaptive one, under which eager's peak varied by 10 % from run to run, and what is free inside the
heap is taken out of use, as blocks put there would stay resident), and before each phase for the rest. A number is then
what is live, not what an allocator keeps for later.
"""

import contextlib
import ctypes
import functools
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from ctypes import c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.system.cpu import fields, kibibytes, memory_limit, text
from enginesmith.pipeline.system.device import Device

_GROUP = 2
"""Position of the process group after the name in /proc/PID/stat."""


def used_bytes(device: Device) -> tuple[int | None, str]:
    """Read the bytes in use now, or None and why.

    On CUDA by NVML, which counts every process. On the CPU what counts against the memory limit of this process's
    control group where it has one, else what the other processes of this program have resident (shared pages by
    their share): the rest of the machine takes and frees too much meanwhile for 1 % to mean anything.
    """
    if device.kind == "cuda":
        try:
            from enginesmith.pipeline.system import nvidia

            return nvidia.nvml().used_bytes(device.index), ""
        except MissingCapability as error:
            return None, str(error)
    limit = memory_limit()
    of_container = limit.limit_bytes - limit.left_bytes if limit and limit.left_bytes is not None else 0
    used = of_container or _sum_process_group(os.getpgrp())
    return used or None, "" if used else "the kernel does not show what processes have resident"


def used_besides(device: Device, process: int) -> tuple[int | None, str]:
    """Read the bytes in use now without those that only that process has: what is left once it has ended."""
    used, why = used_bytes(device)
    own, why_not = read_own_bytes(device, process)
    if used is None or own is None:
        return None, why or why_not
    return max(0, used - own), ""


def read_own_bytes(device: Device, process: int) -> tuple[int | None, str]:
    """Read the bytes that end with a process, or None and why.

    On the CPU they are those of pages that no other process shares, 0 where it has ended.
    """
    if device.kind != "cuda":
        pages = fields(Path(f"/proc/{process}/smaps_rollup"))
        return sum(kibibytes(pages.get(name, "0 kB")) for name in ("Private_Clean", "Private_Dirty")), ""
    try:
        from enginesmith.pipeline.system import nvidia

        return nvidia.nvml().process_bytes(device.index, process)
    except MissingCapability as error:
        return None, str(error)


def _sum_process_group(group: int) -> int:
    """Add up the proportional set sizes of a process group, where workers and their server are (proc_pid_smaps(5)).

    This process is left out: what it takes meanwhile is not a session's.
    """
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        after_name = (text(folder / "stat") or "").rpartition(") ")[2].split()
        ours = len(after_name) > _GROUP and int(after_name[_GROUP]) == group
        if ours and folder.name != str(os.getpid()):
            total += kibibytes(fields(folder / "smaps_rollup").get("Pss", "0 kB"))
    return total


# Resident memory of this process, from Linux's /proc

_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+)\s*(.*)\n?")
_ELF = b"\x7fELF"
_COMPILED_MODEL = ".wrapper.so"
"""End of the name of what torch's compiler ahead of time makes of a model."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_FROM_BYTES = 128 * 1024
_RESET_HIGH_WATER = "5"


@dataclass(frozen=True)
class Resident:
    """Count resident bytes: of what the process wrote, of data files that it maps, and of libraries that it maps."""

    written: int
    mapped_data: int
    libraries: int
    unread: int = 0
    """Bytes of data files that it maps and has not read yet: not resident."""

    @property
    def counted(self) -> int:
        """Everything but libraries, whose pages come in as code is first used."""
        return self.written + self.mapped_data


@dataclass(frozen=True)
class Phase:
    """Record what was resident at the end of a phase, and the most at any time of it."""

    end: Resident
    peak: int
    """The most that was counted, as :attr:`Resident.counted` counts."""
    process_peak: int
    """The most that the process had resident, libraries and all."""


def return_freed_memory() -> None:
    """Make freed blocks go back to the kernel at once; call before anything large is allocated.

    Threads share one arena, as each would reserve 64 MiB of address space for its own.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _MMAP_FROM_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)


def fill_heap_holes() -> None:
    """Take free room for large blocks inside the heap out of use, for good; the bytes are never touched, nor resident.

    Call it before what is to be measured: from here on a block of 128 KiB or more is a mapping of its own. glibc looks
    for room in the heap first, whatever its mmap threshold.
    """
    with Path("/proc/self/maps").open(encoding="utf-8") as lines:  # proc_pid_maps(5)
        ends = next((line.split()[0] for line in lines if line.endswith("[heap]\n")), None)
    libc = ctypes.CDLL(None)
    if ends is None or not hasattr(libc, "malloc_trim"):  # not glibc
        return
    heap = range(*(int(end, 16) for end in ends.split("-")))
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c_void_p, [c_size_t], [c_void_p]
    _trim()
    while (block := libc.malloc(_MMAP_FROM_BYTES)) in heap:
        pass
    libc.free(block)


def reset_high_water() -> None:
    """Begin a phase: hand free memory back, and have the high-water mark begin anew at what is resident then.

    Raises:
        MissingCapability: the kernel does not let it be reset.
    """
    _trim()
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER, encoding="utf-8")
    except OSError as error:
        raise MissingCapability(
            f"the kernel does not let the memory high-water mark be reset ({error.strerror})",
            "allow writing to /proc/self/clear_refs, for instance by running on Linux outside of a sandbox",
        ) from error


def read_high_water() -> int:
    """Read the most that the process had resident since the mark was reset, libraries and all; cheap to ask for."""
    return read_status()["VmHWM"]


def read_phase() -> Phase:
    """Read a phase that began when the mark was reset and ends now."""
    status, end = read_status(), resident()
    return Phase(end, end.counted + status["VmHWM"] - status["VmRSS"], status["VmHWM"])


def read_status(process: str = "self") -> dict[str, int]:
    """Read bytes by the names of proc_pid_status(5).

    Raises:
        KeyError: the process has ended.
    """
    status = fields(Path(f"/proc/{process}/status"))
    return {name: kibibytes(status[name]) for name in ("VmSize", "VmPeak", "VmData", "VmHWM", "VmRSS")}


def resident() -> Resident:
    """Read what is resident now, line by line, as the whole text is a megabyte of its own."""
    with Path("/proc/self/smaps").open(encoding="utf-8") as lines:
        return parse_smaps(lines)


def read_trimmed() -> Resident:
    """Read what is resident once free memory is handed back."""
    _trim()
    return resident()


def parse_smaps(lines: Iterable[str]) -> Resident:
    """Sum up a smaps listing (proc_pid_smaps(5)); a page of a file that the process wrote to is anonymous."""
    written = mapped = libraries = unread = 0
    inode, path, size, rss = "0", "", 0, 0
    for line in lines:
        if line.startswith("Size:"):
            size = kibibytes(line.removeprefix("Size:"))
        elif line.startswith("Rss:"):
            rss = kibibytes(line.removeprefix("Rss:"))
        elif line.startswith("Anonymous:"):
            own = rss if inode == "0" else kibibytes(line.removeprefix("Anonymous:"))
            written += own
            if _is_library(path):
                libraries += rss - own
            else:
                mapped += rss - own
                unread += size - rss if inode != "0" else 0
        elif header := _HEADER.match(line):
            inode, path = header.groups()
    return Resident(written, mapped, libraries, unread)


@functools.cache
def _is_library(path: str) -> bool:
    """Tell whether a file is a library; the shared object of a model that AOTInductor compiled has its weights."""
    if path.endswith(_COMPILED_MODEL):
        return False
    if ".so" in Path(path).name:
        return True
    with contextlib.suppress(OSError), Path(path).open("rb") as stream:
        return stream.read(4) == _ELF
    return False


def _trim() -> None:
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


# Sampling: the largest of repeated readings while something runs, a bound from below, with its interval.

INTERVAL_SECONDS = 0.002


@dataclass
class Sampled:
    """Keep the largest reading. A peak that is shorter than the interval can be missed."""

    interval_seconds: float
    peak: int = 0
    samples: int = 0
    longest_gap_seconds: float = 0.0
    """The longest time between two readings, as it really was."""

    def words(self) -> str:
        """Describe how it was sampled."""
        return (
            f"{self.samples} readings, one every {1e3 * self.interval_seconds:g} ms, "
            f"at most {1e3 * self.longest_gap_seconds:.1f} ms apart; shorter peaks are missed"
        )


class Sampler:
    """Read on a thread of its own while its context is entered, and once more at either end."""

    def __init__(self, read: Callable[[], int], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self.sampled = Sampled(interval_seconds)
        self._read, self._latest = read, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)

    def __enter__(self) -> Self:
        self._latest = time.monotonic()
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._take()

    def _loop(self) -> None:
        while not self._ended.wait(self.sampled.interval_seconds):
            self._take()

    def _take(self) -> None:
        value, now, sampled = self._read(), time.monotonic(), self.sampled
        sampled.longest_gap_seconds = max(sampled.longest_gap_seconds, now - self._latest)
        sampled.peak, sampled.samples, self._latest = max(sampled.peak, value), sampled.samples + 1, now
