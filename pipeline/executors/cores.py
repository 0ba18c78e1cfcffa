"""Cores of this machine, claimed by one process at a time: thread pools that share cores would spin against each other.

Claims are locks on files, one a core, so that processes which know nothing of each other keep apart; the kernel drops
them with the process.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def claimed(count: int | None, folder: Path | None = None) -> Iterator[frozenset[int] | None]:
    """So many cores of those that this process may use; None, which is all of them, where there are not more.

    Where fewer are free than wanted, those; where none is, all: nobody waits for a core.
    """
    usable = sorted(os.sched_getaffinity(0))
    if count is None or count >= len(usable):
        yield None
        return
    place = folder or Path(tempfile.gettempdir(), f"enginesmith-cores-{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as locks:
        mine: set[int] = set()
        for core in usable:
            if len(mine) < count and _locked(place / str(core), locks):
                mine.add(core)
        yield frozenset(mine) or None


def _locked(path: Path, locks: contextlib.ExitStack) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    locks.callback(os.close, descriptor)
    return True
