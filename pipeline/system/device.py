"""Name the device that sessions run on, and whether an engine can be used there."""

import os
from collections.abc import Collection

from pydantic import BaseModel

from enginesmith.pipeline.errors import MissingCapability, UsageError

DEVICE_KINDS = ("cpu", "cuda")


class Availability(BaseModel, frozen=True):
    """Answer to whether an engine can be used here; if not, why, and what to do about it."""

    ok: bool
    reason: str = ""
    remedy: str = ""

    def require(self, problem: str) -> None:
        """Raise MissingCapability for this ``problem`` with the reason, where it cannot be used."""
        if not self.ok:
            raise MissingCapability(f"{problem}: {self.reason}", self.remedy)


def unavailable(reason: str, remedy: str) -> Availability:
    """Make the answer that something cannot be had here."""
    return Availability(ok=False, reason=reason, remedy=remedy)


_ALL_CORES = "ENGINESMITH_CORES"
"""Variable that tells a process with a share of the cores how many there are without it."""


def take_share(cores: Collection[int]) -> None:
    """Let this process, and those that it starts, use some of its cores only."""
    os.environ.setdefault(_ALL_CORES, str(len(os.sched_getaffinity(0))))
    os.sched_setaffinity(0, cores)


class Device(BaseModel, frozen=True):
    """Place where sessions run: ``cpu`` with a number of threads, or ``cuda`` with an index."""

    kind: str = "cpu"
    index: int = 0
    threads: int = 0
    """Threads within an operator on the CPU; 0 means one for each core this process may use."""

    @property
    def thread_count(self) -> int:
        """Number of threads that a session is given; in a process with a share of the cores, at most one for each."""
        cores = len(os.sched_getaffinity(0))
        return min(self.threads or cores, cores) if _ALL_CORES in os.environ else self.threads or cores

    @property
    def full_thread_count(self) -> int:
        """Number of threads of a session that shares the cores with no other process: what code is compiled for."""
        return self.threads or int(os.environ.get(_ALL_CORES) or len(os.sched_getaffinity(0)))

    @classmethod
    def parse(cls, text: str, threads: int = 0) -> "Device":
        """Read ``cpu``, ``cuda`` or ``cuda:1``.

        Raises:
            UsageError: it is none of them.
        """
        kind, _, index = text.partition(":")
        if kind not in DEVICE_KINDS or (index and not index.isdecimal()):
            raise UsageError(f"there is no device {text!r}", "use cpu, cuda or cuda:1")
        return cls(kind=kind, index=int(index or 0), threads=threads)

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.kind == "cuda" else self.kind
