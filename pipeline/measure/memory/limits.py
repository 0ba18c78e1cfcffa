"""Hold a process to a limit of memory, and see how near to it the process came.

On the CPU the limit is on address space and on what of it can be written (RLIMIT_AS and RLIMIT_DATA, getrlimit(2)):
allocators reserve room for later, which takes address space when it is reserved and counts as data when it is used.
On CUDA it is on torch's caching allocator, which eager and TensorRT take their memory from.
"""

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from enginesmith.pipeline.errors import StepOutOfMemory
from enginesmith.pipeline.measure.memory import rss
from enginesmith.pipeline.measure.memory.rss import fill_heap_holes
from enginesmith.pipeline.system import oom
from enginesmith.pipeline.system.cpu import available_bytes, fields, kibibytes, text
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Worker
from enginesmith.pipeline.units import format_bytes

_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
_WATCH_SECONDS = 0.005


def set_memory_limit(limit_bytes: int | None, device: Device) -> None:
    """Limit what this process may take from here on; call it when libraries and pools are in (``Engine.prime``)."""
    if limit_bytes is None:
        return
    if device.kind == "cuda":
        _limit_device(limit_bytes, device.index)
        return
    fill_heap_holes()
    now = _status("self")
    for kind, counter in _LIMITS:
        _, hard = resource.getrlimit(kind)
        most = now[counter] + limit_bytes
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _limit_device(limit_bytes: int, index: int) -> None:
    """Limit torch to a share of the device's memory; what it has taken already is not counted."""
    import torch

    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(index)[1]
    allowed = torch.cuda.memory_reserved(index) + limit_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), index)


def release() -> None:
    """End a limit on the CPU, so that there is room to answer."""
    for kind, _ in _LIMITS:
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (hard, hard))


@contextlib.contextmanager
def explain_out_of_memory(device: Device) -> Iterator[None]:
    """Add to errors for lack of memory how much was free; the limit on the CPU ends there.

    Raises:
        StepOutOfMemory: something inside did not get its memory.
    """
    try:
        yield
    except Exception as error:
        found = oom.find_cause(error)
        if found is None:
            raise
        free = found.free_bytes if found.free_bytes is not None else _left(device)
        believable = free is None or found.asked_bytes is None or free < found.asked_bytes
        found.free_bytes = free if believable else None  # else the libraries had freed some before it could be read
        release()
        if found is error:
            raise
        raise found from error


def _left(device: Device) -> int | None:
    """Return the free bytes; below a limit on address space at the fullest, as libraries free memory when they fail."""
    if device.kind == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device.index)[0])
    gap = _gap("self")
    return available_bytes() if gap is None else gap


class HeadroomMonitor:
    """How near a process came to its limit on address space, looked at from another one while it lives."""

    def __init__(self) -> None:
        self.gap: int | None = None
        """Bytes; None where there was no limit."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, worker: Worker) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._read_gap, args=(worker.pid,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; :attr:`gap` stays."""
        self._over.set()
        if self._thread:
            self._thread.join()

    def _read_gap(self, pid: int) -> None:
        while not self._over.wait(_WATCH_SECONDS):
            try:
                gap = _gap(str(pid))
            except KeyError:  # it has ended
                return
            if gap is not None:
                self.gap = gap if self.gap is None else min(gap, self.gap)


def _gap(process: str) -> int | None:
    """Return the bytes that a limit on address space left at the fullest; None where there is no limit.

    The high-water mark is of the process's whole life; one above the limit is of before.
    """
    limit = _limit(process)
    if limit is None:
        return None
    now = _status(process)
    return max(0, limit - (now["VmPeak"] if now["VmPeak"] <= limit else now["VmSize"]))


def _limit(process: str) -> int | None:
    """Read the soft limit on address space (proc_pid_limits(5)): ``Max address space  SOFT  HARD  bytes``."""
    name = "Max address space"
    rows = (text(Path(f"/proc/{process}/limits")) or "").splitlines()
    soft = next((row.removeprefix(name).split()[0] for row in rows if row.startswith(name)), "unlimited")
    return int(soft) if soft.isdecimal() else None


def _status(process: str) -> dict[str, int]:
    """Bytes by the names of proc_pid_status(5)."""
    found = fields(Path(f"/proc/{process}/status"))
    return {name: kibibytes(found[name]) for name in ("VmSize", "VmPeak", "VmData")}


# Peak memory of work inside of this process, beyond what it held when the meter was made.


class StepMeter:
    """Run an action and count the bytes that it took: resident ones on the CPU, torch's reserved ones on CUDA."""

    def __init__(self, device: Device, limit_bytes: int | None) -> None:
        """Make it once libraries are loaded, and before anything large is; a limit on CUDA is held from here on."""
        self._device, self._limit = device, limit_bytes
        self._before = self._libraries = 0
        if limit_bytes is None:
            return
        if device.kind == "cuda":
            self._before = self._reserved()
            set_memory_limit(limit_bytes, device)
        else:
            rss.return_freed_memory()
            rss.reset_high_water()
            now = rss.resident()
            self._before, self._libraries = now.counted, now.libraries

    def __call__(self, action: Callable[[], None]) -> int:
        if self._device.kind == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device.index)
            action()
            return int(torch.cuda.max_memory_reserved(self._device.index)) - self._before
        with rss.phase() as found:
            action()
        rss.reset_high_water()  # what was tried is no part of what follows
        return found.peak - self._before

    def check(self) -> None:
        """Look whether the limit was kept since this was last said; on CUDA torch refuses what goes beyond it.

        The kernel's own mark tells cheaply that all is well; only beyond that are libraries, whose pages come in as
        code is first used, told from what was written.

        Raises:
            StepOutOfMemory: more was resident at some time.
        """
        if self._limit is None or self._device.kind == "cuda":
            return
        if rss.read_high_water() - self._libraries - self._before <= self._limit:
            return
        found = rss.read_phase_so_far()
        self._libraries = found.end.libraries
        taken = found.peak - self._before
        if taken > self._limit:
            rss.reset_high_water()
            raise StepOutOfMemory(
                f"{format_bytes(taken)} were taken, of {format_bytes(self._limit)} that were allowed",
                "allow more memory, or use smaller inputs",
                asked_bytes=taken,
                free_bytes=self._limit,
            )

    def _reserved(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved(self._device.index))
