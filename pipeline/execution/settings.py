"""How work is carried out: with which store, and on which machines. Nothing here changes what comes out."""

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginesmith.pipeline.execution.events import Listener
from enginesmith.pipeline.execution.executor import Executor
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.store.store import Store


@dataclass(frozen=True)
class Settings:
    """Where and how a job is done."""

    store: str | Path | None = None
    """A folder, or the URL of a store that others use too."""
    reuse: bool = True
    jobs: int = field(default_factory=lambda: min(2, len(os.sched_getaffinity(0))))
    """Steps at the same time on one machine; measurements are always alone."""
    time_limit_seconds: float | None = None
    listener: Listener = lambda event: None
    executor: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    """Of the cluster; None stands for the one that this machine is part of."""

    def open_store(self) -> Store:
        """The store to work with."""
        return Store(self.store, reuse=self.reuse)

    def resuming(self, folder: Path) -> str:
        """The command that goes on in a folder, in the same store and on the same machines."""
        given = {"--store": self.store, "--executor": self.executor, "--ray-address": self.ray_address}
        words = [str(word) for name, value in given.items() if value and value != "local" for word in (name, value)]
        return shlex.join(["enginesmith", "resume", str(folder), *words])

    def open_executor(self) -> Executor:
        """What carries out steps; a context that ends what still runs.

        Raises:
            MissingCapability: the package or the cluster is not there.
        """
        if self.executor == "local":
            return LocalExecutor(self.open_store(), self.jobs)
        from enginesmith.pipeline.execution.ray.executor import RayExecutor

        return RayExecutor(self.open_store(), self.jobs, self.ray_address)
