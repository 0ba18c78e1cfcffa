"""Read what a process has resident from Linux's /proc: the raw counters behind ``peak.py``.

Freed memory is made to return to the kernel: at once for blocks from 128 KiB on (a fixed mmap threshold turns off
glibc's adaptive one, under which eager's peak varied by 10 % from run to run, and what is free inside the heap is taken
out of use, as blocks put there would stay resident), and before each phase for the rest. A number is then what is
live, not what an allocator keeps for later.
"""

import contextlib
import ctypes
import functools
import gc
import re
from collections.abc import Iterable, Iterator
from ctypes import c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

from enginesmith.pipeline.errors import MissingCapability

_HEADER = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+)\s*(.*)\n?")
_ELF = b"\x7fELF"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_FROM_BYTES = 128 * 1024
_RESET_HIGH_WATER = "5"


@dataclass(frozen=True)
class Resident:
    """Resident bytes: what the process wrote, data files it maps, and libraries it maps."""

    written: int
    mapped_data: int
    libraries: int

    @property
    def counted(self) -> int:
        """Everything but libraries, whose pages come in as code is first used."""
        return self.written + self.mapped_data


@dataclass
class Phase:
    """Filled when the phase ends."""

    end: Resident = Resident(0, 0, 0)
    peak: int = 0
    """The most that was counted at any time of the phase, as :attr:`Resident.counted` counts."""
    process_peak: int = 0
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


def fill_heap_holes() -> int:
    """Take free room for large blocks inside the heap out of use, for good; the bytes are never touched, nor resident.

    Call it before what is to be measured: from here on a block of 128 KiB or more is a mapping of its own. glibc looks
    for room in the heap first, whatever its mmap threshold.
    """
    heap = _heap()
    libc = ctypes.CDLL(None)
    if heap is None or not hasattr(libc, "malloc_trim"):  # not Linux, or not glibc
        return 0
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c_void_p, [c_size_t], [c_void_p]
    _trim()
    closed = 0
    while (block := libc.malloc(_MMAP_FROM_BYTES)) in heap:
        closed += _MMAP_FROM_BYTES
    libc.free(block)
    return closed


@contextlib.contextmanager
def phase() -> Iterator[Phase]:
    """Watch the high-water mark of what is done inside.

    Raises:
        MissingCapability: the kernel does not let it be reset.
    """
    reset_high_water()
    found = Phase()
    yield found
    _fill(found)


def reset_high_water() -> None:
    """Hand free memory back, and have the high-water mark begin anew at what is resident then.

    Raises:
        MissingCapability: the kernel does not let it be reset.
    """
    _trim()
    _reset()


def read_high_water() -> int:
    """Read the most that the process had resident since the mark was lowered, libraries and all; cheap to ask for."""
    return _status()["VmHWM"]


def read_phase_so_far() -> Phase:
    """Read a phase as if it began when the mark was lowered and ended now."""
    found = Phase()
    _fill(found)
    return found


def _fill(found: Phase) -> None:
    status = _status()
    found.end = resident()
    found.process_peak = status["VmHWM"]
    found.peak = found.end.counted + status["VmHWM"] - status["VmRSS"]


def resident() -> Resident:
    """Read what is resident now, line by line, as the whole text is a megabyte of its own."""
    with Path("/proc/self/smaps").open() as lines:
        return parse_smaps(lines)


def read_trimmed() -> Resident:
    """Read what is resident once free memory is handed back."""
    _trim()
    return resident()


def parse_smaps(lines: Iterable[str]) -> Resident:
    """Sum up a smaps listing (proc_pid_smaps(5)); a page of a file that the process wrote to is anonymous."""
    written = mapped = libraries = 0
    inode, path, rss = "0", "", 0
    for line in lines:
        if line.startswith("Rss:"):
            rss = _bytes(line)
        elif line.startswith("Anonymous:"):
            own = rss if inode == "0" else _bytes(line)
            written += own
            if _is_library(path):
                libraries += rss - own
            else:
                mapped += rss - own
        elif header := _HEADER.match(line):
            inode, path = header.groups()
    return Resident(written, mapped, libraries)


@functools.cache
def _is_library(path: str) -> bool:
    if ".so" in Path(path).name:
        return True
    with contextlib.suppress(OSError), Path(path).open("rb") as stream:
        return stream.read(4) == _ELF
    return False


def _status() -> dict[str, int]:
    lines = (line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: _bytes(value) for name, value in lines if name in ("VmHWM", "VmRSS")}


def _bytes(field: str) -> int:
    """``Rss:   12 kB`` or ``12 kB`` → bytes."""
    return int(field.split()[-2]) * 1024


def _heap() -> range | None:
    """Addresses of the main heap (proc_pid_maps(5))."""
    with Path("/proc/self/maps").open() as lines:
        ends = next((line.split()[0] for line in lines if line.endswith("[heap]\n")), None)
    return range(*(int(end, 16) for end in ends.split("-"))) if ends else None


def _trim() -> None:
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _reset() -> None:
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_HIGH_WATER)
    except OSError as error:
        raise MissingCapability(
            f"the kernel does not let the memory high-water mark be reset ({error.strerror})",
            "allow writing to /proc/self/clear_refs, for instance by running on Linux outside of a sandbox",
        ) from error
