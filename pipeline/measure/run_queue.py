"""How long this process's threads wanted a core and had none: the kernel's own account of what others took from it."""

import contextlib
import os
from pathlib import Path
from typing import Self

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
        """Nanoseconds that the threads waited, all together, since they started; 0 where that is not known."""
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
