"""Run a session within a limit of memory, and describe what happened where memory ran out.

On the CPU the limit is on address space and on what of it can be written (RLIMIT_AS and RLIMIT_DATA, getrlimit(2)):
allocators reserve room for later, which takes address space when it is reserved and counts as data when it is used. On
CUDA it is on torch's caching allocator, which PyTorch's engines and TensorRT take their memory from, and on ONNX
Runtime's arena. Without a limit it is the device's own memory that runs out. Once a session's process has ended, what
is in use besides is looked at, too.
"""

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import StepCrashed, StepError, StepOutOfMemory
from enginesmith.pipeline.measure.memory import usage
from enginesmith.pipeline.measure.memory.usage import used_bytes
from enginesmith.pipeline.measure.rows import OutOfMemory
from enginesmith.pipeline.system import oom
from enginesmith.pipeline.system.cpu import free_bytes, text
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Progress, Worker, run
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import format_bytes

_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
_WATCH_SECONDS = 0.005
_BACK_WITHIN = 0.01
_BACK_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_NEAR_BYTES = 16 << 20
"""Two threads' stacks: a library that gets none ends the process, with that much or less left."""
_FINEST = 16
_taken_before: dict[int, int] = {}
"""By device, bytes that torch had taken when it was limited, and may take besides."""
_THREADS = ("thread creation failed", "pthread_create", "can't start new thread")


def set_memory_limit(limit_bytes: int | None, device: Device) -> None:
    """Limit what this process may take from here on; call it when libraries and pools are in (``Engine.prime``).

    On CUDA torch is limited to a share of the device's memory. What it has taken already is not counted; if that has a
    workspace of cuBLAS, the session may have one, too.
    """
    if limit_bytes is None:
        return
    if device.kind == "cuda":
        import torch

        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info(device.index)[1]
        taken = int(torch.cuda.memory_reserved(device.index))
        torch.cuda.set_per_process_memory_fraction(min(1.0, (taken + limit_bytes) / total), device.index)
        _taken_before[device.index] = taken
        cuda_allocator.set_limit(device.index, limit_bytes)
        cuda_allocator.release_workspaces(device.index)
        torch.cuda.empty_cache()
        return
    usage.fill_heap_holes()
    now = usage.read_status("self")
    for kind, counter in _LIMITS:
        _, hard = resource.getrlimit(kind)
        most = now[counter] + limit_bytes
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


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
        cause = oom.find_cause(error)
        if cause is None:
            raise
        free = cause.free_bytes if cause.free_bytes is not None else _read_free(device)
        believable = free is None or cause.asked_bytes is None or free < cause.asked_bytes
        cause.free_bytes = free if believable else None  # else the libraries had freed some before it could be read
        if cause.limited_torch:
            cause.message += _explain_limit(device)
        release()
        if cause is error:
            raise
        raise cause from error


def _explain_limit(device: Device) -> str:
    """Explain why torch may take more than the limit: what it had before the session is not part of it."""
    limit, taken = cuda_allocator.limit_bytes(device.index), _taken_before.get(device.index)
    if limit is None or not taken:
        return ""
    before = f"{format_bytes(taken)} that PyTorch had before the session was loaded (for the workspace of cuBLAS)"
    return f". It may take {format_bytes(limit + taken)}: --memory-limit {format_bytes(limit)}, and {before}"


def _read_free(device: Device) -> int | None:
    """Return the free bytes; below a limit on address space at the fullest, as libraries free memory when they fail."""
    if device.kind == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device.index)[0])
    gap = _read_gap("self")
    return free_bytes() if gap is None else gap


class HeadroomMonitor:
    """Watch from another process how near one comes to its limit on address space while it lives."""

    def __init__(self) -> None:
        self.gap: int | None = None
        """Least bytes that were left; None where there was no limit."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, worker: Worker) -> None:
        self._thread = threading.Thread(target=self._watch, args=(worker.pid,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; :attr:`gap` stays."""
        self._over.set()
        if self._thread:
            self._thread.join()

    def _watch(self, pid: int) -> None:
        while not self._over.wait(_WATCH_SECONDS):
            try:
                gap = _read_gap(str(pid))
            except KeyError:  # it has ended
                return
            if gap is not None:
                self.gap = gap if self.gap is None else min(gap, self.gap)


def _read_gap(process: str) -> int | None:
    """Return the bytes that a limit on address space left at the fullest; None where there is no limit.

    The soft limit is in proc_pid_limits(5): ``Max address space  SOFT  HARD  bytes``. The high-water mark is of the
    process's whole life; one above the limit is of before.
    """
    name = "Max address space"
    rows = (text(Path(f"/proc/{process}/limits")) or "").splitlines()
    soft = next((row.removeprefix(name).split()[0] for row in rows if row.startswith(name)), "unlimited")
    if not soft.isdecimal():
        return None
    now = usage.read_status(process)
    return max(0, int(soft) - (now["VmPeak"] if now["VmPeak"] <= int(soft) else now["VmSize"]))


class StepMeter:
    """Measure the peak memory of work inside of this process, beyond what it had when the meter was made.

    Resident bytes count on the CPU, torch's reserved ones on CUDA.
    """

    def __init__(self, device: Device, limit_bytes: int | None) -> None:
        """Make it once libraries are loaded, and before anything large is; a limit on CUDA is in force from here on."""
        self._device, self._limit = device, limit_bytes
        self._before = self._libraries = 0
        if limit_bytes is None:
            return
        if device.kind == "cuda":
            import torch

            self._before = int(torch.cuda.memory_reserved(device.index))
            set_memory_limit(limit_bytes, device)
        else:
            usage.return_freed_memory()
            usage.reset_high_water()
            now = usage.resident()
            self._before, self._libraries = now.counted, now.libraries

    def __call__(self, action: Callable[[], None]) -> int:
        """Run an action and return the bytes that it took."""
        if self._device.kind == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device.index)
            action()
            return int(torch.cuda.max_memory_reserved(self._device.index)) - self._before
        usage.reset_high_water()
        action()
        peak = usage.read_phase().peak
        usage.reset_high_water()  # what was tried is no part of what follows
        return peak - self._before

    def check(self) -> None:
        """Check that the limit was kept since this was last said; on CUDA torch refuses what goes beyond it.

        The kernel's own mark tells cheaply that all is well; only beyond that are libraries, whose pages come in as
        code is first used, told from what was written.

        Raises:
            StepOutOfMemory: more was resident at some time.
        """
        if self._limit is None or self._device.kind == "cuda":
            return
        if usage.read_high_water() - self._libraries - self._before <= self._limit:
            return
        phase = usage.read_phase()
        self._libraries = phase.end.libraries
        taken = phase.peak - self._before
        if taken > self._limit:
            usage.reset_high_water()
            raise StepOutOfMemory(
                f"{format_bytes(taken)} were taken, of {format_bytes(self._limit)} that were allowed",
                "allow more memory, or use smaller inputs",
                asked_bytes=taken,
                free_bytes=self._limit,
            )


# A session alone in a process of its own


def run_limited(
    function: Callable[..., Any],
    *args: Any,
    device: Device,
    log: Path,
    limit_bytes: int | None = None,
    timeout_seconds: float | None = None,
) -> Any:
    """Run as :func:`worker.run`; returns an :class:`OutOfMemory` where memory ran out; ``function`` sets its own limit.

    Raises:
        EnginesmithError: anything else that ended it.
    """
    run(_nothing, log=log)  # where workers have no server yet, it starts with this one, and takes memory that it keeps
    before = used_bytes(device)[0]
    said_before = log.stat().st_size if log.is_file() else 0
    monitor = HeadroomMonitor()
    try:
        return run(
            function,
            *args,
            log=log,
            prepare=usage.return_freed_memory,
            on_start=monitor.start,
            timeout_seconds=timeout_seconds,
        )
    except StepOutOfMemory as error:
        cause = error
    except StepCrashed as error:
        monitor.stop()
        if limit_bytes is None:
            raise
        why = _explain_crash(log.read_bytes()[said_before:].decode(errors="replace"), monitor.gap, limit_bytes)
        if not why:
            raise
        cause = StepOutOfMemory(f"{why}: {error.message}", error.remedy, free_bytes=monitor.gap)
    finally:
        monitor.stop()
    return describe_out_of_memory(cause, before, device, limit_bytes)


def _nothing(progress: Progress) -> None:
    pass


def _explain_crash(log_text: str, gap: int | None, limit_bytes: int) -> str:
    """Explain why a crash under a limit counts as lack of memory; empty where there is no evidence for that."""
    if oom.says_out_of_memory(log_text) or "MemoryError" in log_text:
        return "it ended itself when an allocation failed"
    if gap is None or gap > max(_NEAR_BYTES, limit_bytes // 20):
        return ""
    if any(words in log_text.lower() for words in _THREADS):
        return "it ended itself when there was no room for a thread's stack"
    return f"it crashed with {gap} bytes left below its limit"


def largest_fit(fits: Callable[[int], bool], start: int, over: int) -> int:
    """Find the largest batch that fits, between ``start``, which does, and ``over``, which does not; 0 where none does.

    It stops where the two are 1, or a sixteenth of what fits, apart.
    """
    while over - start > max(1, start // _FINEST):
        middle = (start + over) // 2
        start, over = (middle, over) if fits(middle) else (start, middle)
    return start


def try_batch(
    candidate: Candidate, feeds: Feeds, log_folder: Path, memory_limit_bytes: int | None
) -> OutOfMemory | None:
    """Load and run once in a fresh process; None if that fits.

    Raises:
        EnginesmithError: it failed for another reason.
    """
    log = log_folder / f"fit-{candidate.id}.log"
    options: dict[str, Any] = {"device": candidate.device, "log": log, "limit_bytes": memory_limit_bytes}
    answer: OutOfMemory | None = run_limited(_call_once, candidate, feeds, memory_limit_bytes, **options)
    return answer


def _call_once(candidate: Candidate, feeds: Feeds, memory_limit_bytes: int | None, progress: Progress) -> None:
    engine, artifact, device = candidate.engine, candidate.artifact, candidate.device
    engine.prime(artifact, device)
    set_memory_limit(memory_limit_bytes, device)
    with explain_out_of_memory(device), engine.load(artifact, device) as session:
        session.run(feeds)


def describe_out_of_memory(
    error: StepError, before: int | None, device: Device, limit_bytes: int | None
) -> OutOfMemory:
    """Describe a session that did not fit, once memory is back to within 1 % of before, or after a few seconds.

    ``before`` is what was in use besides.
    """
    deadline = time.monotonic() + _BACK_SECONDS
    after, why = used_bytes(device)
    while before is not None and after is not None and after > before * (1 + _BACK_WITHIN):
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)
        after = min(after, used_bytes(device)[0] or after)
    figures = {
        "asked_bytes": getattr(error, "asked_bytes", None),
        "free_bytes": getattr(error, "free_bytes", None),
        "limit_bytes": limit_bytes,
        "used_before_bytes": before,
        "used_after_bytes": after,
    }
    missing = {
        "asked_bytes": "what ran out of memory did not say how much it had asked for",
        "free_bytes": "it was not told, and memory was free again before it could be read",
        "limit_bytes": "no limit was set: it had all the memory that was free",
    }
    given_back = None if before is None or after is None else after <= before * (1 + _BACK_WITHIN)
    reasons = dict.fromkeys(("used_before_bytes", "used_after_bytes", "given_back"), why) if why else {}
    reasons |= {name: reason for name, reason in missing.items() if figures[name] is None}
    if given_back is False:
        reasons["given_back"] = "its process has ended; what is in use besides, others have taken since"
    return OutOfMemory(message=error.message, given_back=given_back, reasons=reasons, **figures)
