"""Faults at changes of files and network calls: a killed machine, a full disk, another process meanwhile."""

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Killed(BaseException):
    """The machine is killed: what is on the disks stays, and nothing else is done."""


@dataclass
class Trouble:
    """A fault at a file-system or network call, by its number; the calls of a killed machine all fail."""

    kind: str = ""
    at: int = -1
    root: str = "/nowhere"
    meanwhile: Callable[[], None] = lambda: None
    calls: int = 0
    dead: bool = False
    met: bool = False

    def is_due(self, *kinds: str) -> bool:
        """Return whether the fault comes now, or a disk that is full stays full."""
        due = self.kind in kinds and (self.calls == self.at or (self.kind == "full" and self.calls > self.at))
        self.met |= due
        return due

    def call(self) -> None:
        """Count a call that changes something, and meet the fault there."""
        if self.dead:
            raise Killed
        self.calls += 1
        if self.is_due("kill", "power"):
            self.dead = True
            raise Killed
        if self.is_due("meanwhile"):
            self.kind = "done"
            self.meanwhile()


current = Trouble()
"""The fault that comes next."""
_CHANGES = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.utime": 1, "os.truncate": 1}


def _observe(event: str, arguments: tuple[Any, ...]) -> None:
    trouble = current
    if trouble.at < 0 or not (event in _CHANGES or (event == "open" and _writes(arguments))):
        return
    # removal of a tree names files relative to a descriptor
    path = arguments[0] if isinstance(arguments[0], (str, os.PathLike)) else ""
    if os.fspath(path).startswith("/") and not os.fspath(path).startswith(trouble.root):
        return
    trouble.call()
    if event in ("open", "os.mkdir", "os.rename") and trouble.is_due("full"):
        raise OSError(errno.ENOSPC, "No space left on device")


def _writes(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))


_observed: list[bool] = []


def observe_files() -> None:
    """Have each change of a file seen, once for the process; without a fault that costs next to nothing."""
    if not _observed:
        sys.addaudithook(_observe)
        _observed.append(True)


NOBODY = 1 << 30
"""No process has this number."""


def end_process(stores: Iterable[Path]) -> None:
    """Make what a killed process left in its stores that of no process."""
    for folder in (folder for store in stores for folder in (store / "tmp").glob(f"*{os.getpid()}@*")):
        folder.rename(folder.with_name(folder.name.replace(f"{os.getpid()}@", f"{NOBODY}@")))


def tear(folder: Path, known: Collection[int], third: int) -> None:
    """Cut files that are new and were not synced to that many thirds, as a machine may that lost its power."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_ino not in known:
            os.truncate(path, path.stat().st_size * third // 3)


def shift_times(folder: Path, began: int, seconds: float) -> None:
    """Give what was written since the time ``began``, in ns, the times of a clock that is so far ahead."""
    for path in folder.rglob("*"):
        status = path.stat()
        if seconds and began <= status.st_mtime_ns <= began + int(3600e9):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + int(seconds * 1e9)))


def list_files(folder: Path) -> set[int]:
    """List the numbers of all files below a folder."""
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}
