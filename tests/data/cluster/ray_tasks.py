"""Tasks for nodes of a cluster that behave in ways that matter; nodes find this file by their PYTHONPATH."""

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import Inputs, Task


class Write(Task):
    """Writes its number, and the bytes of what it takes."""

    title: ClassVar[str] = "write"
    produces: ClassVar[Kind] = "record"

    number: int
    seconds: float = 0.0

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        sys.stdout.write(f"number {self.number}\n")
        progress(f"writing {self.number}")
        time.sleep(self.seconds)
        before = "".join(inputs[role].path.read_text() for role in sorted(inputs))
        (out / "number").write_text(f"{before}{self.number}\n")
        return Effect(file="number", summary="it wrote its number")


class WriteQuickly(Write):
    """Do the same in a process that others use too."""

    in_process: ClassVar[bool] = True


class WriteAlone(Write):
    """Do the same with a node to itself."""

    exclusive: ClassVar[bool] = True


class WriteWhile(Write):
    """Writes once a file is gone; until then it shows that it waits."""

    marker: Path
    shown: Path

    @property
    def identity(self) -> dict[str, Any]:
        return {"task": "WriteWhile", "number": self.number}

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        while self.marker.exists():
            (self.shown / f"{self.number}-{os.getpid()}").touch()
            time.sleep(0.05)
        return super().run(inputs, out, progress)


class WriteNamed(Write):
    """Do the same; a file is named in it."""

    file: str


class WriteWithRoom(WriteAlone):
    """With a node to itself; one that was started with FULL_DISK has no space left."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        if "FULL_DISK" in os.environ:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out / "number"))
        return super().run(inputs, out, progress)


class KillRayWorker(Write):
    """Kills the Ray worker that it was given to, as the kernel may, the first time."""

    marker: Path

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        if self.marker.exists():
            self.marker.unlink()
            os.kill(_ray_worker(), signal.SIGKILL)
            time.sleep(60)
        return super().run(inputs, out, progress)


class ShowSurroundings(Write):
    """Writes what its process sees of where it runs."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        variables = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
        (out / "number").write_text(f"{variables} {sorted(path.name for path in Path().iterdir())}")
        return Effect(file="number", summary="it looked around")


def _ray_worker() -> int:
    """The parent of the fork server that this process is a fork of."""
    server = os.getppid()
    return int(Path("/proc", str(server), "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
