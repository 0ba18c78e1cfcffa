"""Read how much memory is in use where a session runs, from another process."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.system.cpu import fields, kibibytes, memory_limit, numbers, text
from enginesmith.pipeline.system.device import Device

_GROUP = 2
"""Where the process group stands after the name in /proc/PID/stat."""


def used_bytes(device: Device) -> tuple[int | None, str]:
    """Bytes in use now, or None and why.

    On CUDA by NVML, which counts every process. On the CPU what counts against the memory limit of this process's
    control group where it has one, else what the other processes of this program have resident (shared pages by
    their share): the rest of the machine takes and frees too much meanwhile for 1 % to mean anything.
    """
    if device.kind != "cuda":
        found = _of_container() or _of_processes(os.getpgrp())
        return found, "" if found is not None else "the kernel does not show what processes have resident"
    try:
        from enginesmith.pipeline.system import nvidia

        return nvidia.nvml().used_bytes(device.index), ""
    except MissingCapability as error:
        return None, str(error)


def used_besides(device: Device, process: int) -> tuple[int | None, str]:
    """Bytes in use now, less what only that process has: what :func:`used_bytes` has to fall to once it has ended."""
    used, why = used_bytes(device)
    own, why_not = _own_bytes(device, process)
    if used is None or own is None:
        return None, why or why_not
    return max(0, used - own), ""


def _own_bytes(device: Device, process: int) -> tuple[int | None, str]:
    """Bytes that end with a process; on the CPU those of pages that no other process shares, 0 where it has ended."""
    if device.kind != "cuda":
        pages = fields(Path(f"/proc/{process}/smaps_rollup"))
        return sum(kibibytes(pages.get(name, "0 kB")) for name in ("Private_Clean", "Private_Dirty")), ""
    try:
        from enginesmith.pipeline.system import nvidia

        return nvidia.nvml().process_bytes(device.index, process)
    except MissingCapability as error:
        return None, str(error)


def killed_by_kernel() -> int | None:
    """Count the processes that the kernel has killed for lack of memory since the machine started; None if untold."""
    return numbers(Path("/proc/vmstat")).get("oom_kill")


def _of_container() -> int | None:
    limit = memory_limit()
    return None if limit is None or limit.left_bytes is None else limit.limit_bytes - limit.left_bytes


def _of_processes(group: int) -> int | None:
    """Proportional set sizes of a process group, which is where workers and their server are (proc_pid_smaps(5)).

    This process is left out: what it takes meanwhile is not a session's.
    """
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        after_name = (text(folder / "stat") or "").rpartition(") ")[2].split()
        ours = len(after_name) > _GROUP and int(after_name[_GROUP]) == group
        if ours and folder.name != str(os.getpid()):
            found += kibibytes(fields(folder / "smaps_rollup").get("Pss", "0 kB"))
    return found or None


# Sampling: the largest of repeated readings while something runs, a bound from below, with its interval.

INTERVAL_SECONDS = 0.002


@dataclass(frozen=True)
class Sampled:
    """What was seen. A peak that is shorter than the interval can be missed."""

    peak: int
    samples: int
    interval_seconds: float
    longest_gap_seconds: float
    """Between two readings, as it really was."""

    def words(self) -> str:
        """Describe how it was sampled."""
        return (
            f"{self.samples} readings, one every {1e3 * self.interval_seconds:g} ms, "
            f"at most {1e3 * self.longest_gap_seconds:.1f} ms apart; shorter peaks are missed"
        )


class Sampler:
    """Reads on a thread of its own while its context is entered, and once more at either end."""

    def __init__(self, read: Callable[[], int], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._read, self._interval = read, interval_seconds
        self._peak = self._samples = 0
        self._gap, self._latest = 0.0, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)

    @property
    def sampled(self) -> Sampled:
        """What was seen so far."""
        return Sampled(self._peak, self._samples, self._interval, self._gap)

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
        while not self._ended.wait(self._interval):
            self._take()

    def _take(self) -> None:
        value, now = self._read(), time.monotonic()
        self._gap, self._latest = max(self._gap, now - self._latest), now
        self._peak, self._samples = max(self._peak, value), self._samples + 1
