"""Run a session alone in a process, and describe what happened where it ran out of memory.

Its process has ended by then, and what was in use is in use no more, which is looked at and said too. With a limit
(``holding.py``) all of this happens on any machine; without one it is the device's own memory that ran out.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginesmith.pipeline.errors import StepCrashed, StepError, StepOutOfMemory
from enginesmith.pipeline.measure.latency.candidate import Candidate
from enginesmith.pipeline.measure.memory.limits import HeadroomMonitor, explain_out_of_memory, set_memory_limit
from enginesmith.pipeline.measure.memory.rss import return_freed_memory
from enginesmith.pipeline.measure.memory.usage import killed_by_kernel, used_besides, used_bytes
from enginesmith.pipeline.measure.rows import OutOfMemory
from enginesmith.pipeline.system import oom
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Progress, run
from enginesmith.pipeline.tensors import Feeds

__all__ = [
    "OutOfMemory",
    "explain_out_of_memory",
    "largest_fit",
    "outcome",
    "run_limited",
    "set_memory_limit",
    "try_batch",
    "used_besides",
    "used_bytes",
]

_BACK_WITHIN = 0.01
_BACK_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_NEAR_BYTES = 16 << 20
"""Two threads' stacks: a library that gets none ends the process, with that much or less left."""
_FINEST = 16
_THREADS = ("thread creation failed", "pthread_create", "can't start new thread")


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
    before, kills = used_bytes(device)[0], killed_by_kernel()
    said_before = log.stat().st_size if log.is_file() else 0
    monitor = HeadroomMonitor()
    try:
        return run(
            function,
            *args,
            log=log,
            prepare=return_freed_memory,
            on_start=monitor.start,
            timeout_seconds=timeout_seconds,
        )
    except StepOutOfMemory as error:
        found, now = error, killed_by_kernel()
        if kills is not None and now is not None and now > kills:
            found = StepOutOfMemory(f"the kernel killed a process for lack of memory: {error.message}", error.remedy)
    except StepCrashed as error:
        monitor.stop()
        if limit_bytes is None:
            raise
        why = _explain_crash(log.read_bytes()[said_before:].decode(errors="replace"), monitor.gap, limit_bytes)
        if not why:
            raise
        found = StepOutOfMemory(f"{why}: {error.message}", error.remedy, free_bytes=monitor.gap)
    finally:
        monitor.stop()
    return outcome(found, before, device, limit_bytes)


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
    found: OutOfMemory | None = run_limited(
        _call_once,
        candidate,
        feeds,
        memory_limit_bytes,
        device=candidate.device,
        log=log_folder / f"fit-{candidate.id}.log",
        limit_bytes=memory_limit_bytes,
    )
    return found


def _call_once(candidate: Candidate, feeds: Feeds, memory_limit_bytes: int | None, progress: Progress) -> None:
    engine, artifact, device = candidate.engine, candidate.artifact, candidate.device
    engine.prime(artifact, device)
    set_memory_limit(memory_limit_bytes, device)
    with explain_out_of_memory(device), engine.load(artifact, device) as session:
        session.run(feeds)


def _nothing(progress: Progress) -> None:
    pass


def outcome(error: StepError, before: int | None, device: Device, limit_bytes: int | None) -> OutOfMemory:
    """Describe a session that did not fit; waits a while for its memory to be back."""
    after, why = _read_used_again(before, device)
    reasons: dict[str, str] = {}
    if why:
        reasons |= dict.fromkeys(("used_before_bytes", "used_after_bytes", "given_back"), why)
    given_back = None if before is None or after is None else after <= before * (1 + _BACK_WITHIN)
    if given_back is False:
        reasons["given_back"] = "its process has ended; what is in use besides, others have taken since"
    asked, free = getattr(error, "asked_bytes", None), getattr(error, "free_bytes", None)
    if asked is None:
        reasons["asked_bytes"] = "what ran out of memory did not say how much it had asked for"
    if free is None:
        reasons["free_bytes"] = "it was not told, and memory was free again before it could be read"
    if limit_bytes is None:
        reasons["limit_bytes"] = "no limit was set: it had all the memory that was free"
    return OutOfMemory(
        message=error.message,
        asked_bytes=asked,
        free_bytes=free,
        limit_bytes=limit_bytes,
        used_before_bytes=before,
        used_after_bytes=after,
        given_back=given_back,
        reasons=reasons,
    )


def _read_used_again(before: int | None, device: Device) -> tuple[int | None, str]:
    """Read the bytes in use once they are back to within 1 % of before, or the least within a few seconds."""
    deadline = time.monotonic() + _BACK_SECONDS
    least, why = used_bytes(device)
    while before is not None and least is not None and least > before * (1 + _BACK_WITHIN):
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)
        least = min(least, used_bytes(device)[0] or least)
    return least, why


def _explain_crash(said: str, gap: int | None, limit_bytes: int) -> str:
    """Say why a crash under a limit is taken for lack of memory; empty where nothing speaks for it."""
    if oom.says_out_of_memory(said) or "MemoryError" in said:
        return "it ended itself when an allocation failed"
    if gap is None or gap > max(_NEAR_BYTES, limit_bytes // 20):
        return ""
    if any(words in said.lower() for words in _THREADS):
        return "it ended itself when there was no room for a thread's stack"
    return f"it crashed with {gap} bytes left below its limit"
