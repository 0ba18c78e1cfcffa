"""Keep processes that know nothing of each other from measuring on the same GPU at the same time.

Each GPU has a file in the folder for temporary files, and whoever measures holds a lock on it, which the kernel drops
with the process. The file is opened for reading alone, so that those of other users serve as well.
"""

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from enginesmith.pipeline.errors import StepError
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.units import format_seconds

LONGEST_SECONDS = 600.0
"""Longest wait for another process: a measurement takes less, and nothing keeps a process from holding a lock."""
_SLICE_SECONDS = 0.2
"""Pause between two looks at whether the wait was ended."""
_PROC_LOCKS = Path("/proc/locks")
_told: set[Path] = set()
"""Files that cannot be made, which was told."""


@contextlib.contextmanager
def lock_gpu(
    index: int,
    limit_seconds: float,
    tell: Callable[[str], None],
    ended: Callable[[], bool] = lambda: False,
) -> Iterator[float]:
    """Lock a GPU of this machine among enginesmith's processes; yields the seconds of waiting.

    After ``limit_seconds`` of waiting it goes on without the lock, and so it does where no file can be made; ``tell``
    says so. ``ended`` is asked meanwhile whether the wait is to be ended.

    Raises:
        StepError: the wait was ended.
    """
    identity = nvidia.identify(index)
    if identity is None:
        yield 0.0
        return
    path = Path(tempfile.gettempdir(), f"enginesmith-gpu-{identity}.lock")
    try:
        descriptor = _open(path)
    except OSError as error:
        if path not in _told:
            _told.add(path)
            reason = os.strerror(error.errno or 0).lower()
            tell(f"other processes are not kept from measuring on cuda:{index} at the same time: {path}: {reason}")
        yield 0.0
        return
    try:
        yield _wait(descriptor, index, limit_seconds, tell, ended)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Open a file that whoever comes first makes.

    The kernel may refuse to open another user's file for making it (``fs.protected_regular``), so that is tried last.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            os.fchmod(descriptor, 0o644)  # whatever the umask is: other users measure, too
            return descriptor
        return os.open(path, flags)


def _wait(
    descriptor: int, index: int, limit_seconds: float, tell: Callable[[str], None], ended: Callable[[], bool]
) -> float:
    """Wait for the lock on an open file; returns the seconds that took."""
    begun = time.monotonic()
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 0.0
    pid = find_holder(descriptor)
    other = f"another enginesmith process{f' (pid {pid})' if pid else ''} that measures on cuda:{index}"
    tell(f"waiting for {other}")
    locked = threading.Event()
    # The kernel gives the lock to those who wait in their order; one who looks again and again may never have it. Where
    # the wait ends first, the thread closes the file as soon as it has the lock, which drops it.
    threading.Thread(target=_lock, args=(os.dup(descriptor), locked), daemon=True).start()
    while not locked.wait(_SLICE_SECONDS):
        if ended():
            raise StepError("it was ended")
        if time.monotonic() - begun > limit_seconds:
            waited = format_seconds(time.monotonic() - begun)
            tell(f"waited {waited} for {other}: going on beside it, which makes times longer")
            break
    return time.monotonic() - begun


def _lock(descriptor: int, locked: threading.Event) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.close(descriptor)  # the lock stays while the file is open elsewhere, and is dropped with that
    locked.set()


def find_holder(descriptor: int) -> int | None:
    """Find the process that holds the lock on an open file; None if the kernel does not tell."""
    inode = f":{os.fstat(descriptor).st_ino}"
    try:
        lines = _PROC_LOCKS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    held = (line.split() for line in lines if "->" not in line)  # an arrow marks those that wait
    # 1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF
    pids = (int(words[4]) for words in held if words[1] == "FLOCK" and words[5].endswith(inode))
    return next((pid for pid in pids if pid > 0), None)
