"""Choose the store, the machines and the number of jobs. None of it changes results."""

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.execution.events import Listener
from enginesmith.pipeline.execution.executor import Executor
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.store.store import Store


@dataclass(frozen=True)
class Settings:
    """Store, executor and number of jobs of a run."""

    store: str | Path | None = None
    """A folder, or the URL of a shared store."""
    reuse: bool = True
    jobs: int = field(default_factory=lambda: min(2, len(os.sched_getaffinity(0))))
    """Steps that run at the same time on one machine; measurements are always alone."""
    time_limit_seconds: float | None = None
    listener: Listener = lambda event: None
    executor: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    """Address of the cluster; None for the one that this machine is a node of."""

    def __post_init__(self) -> None:
        if not isinstance(self.jobs, int) or self.jobs < 1:
            raise UsageError(
                f"jobs: must be a whole number from 1 (given: {self.jobs!r})", "leave it out for the default"
            )

    def open_store(self) -> Store:
        return Store(self.store, reuse=self.reuse)

    def resume_command(self, folder: Path) -> str:
        """Return the command that resumes a run directory, with the same store and executor."""
        given = {"--store": self.store, "--executor": self.executor, "--ray-address": self.ray_address}
        words = [str(word) for name, value in given.items() if value and value != "local" for word in (name, value)]
        return shlex.join(["enginesmith", "resume", str(folder), *words])

    def open_executor(self) -> Executor:
        """Open the executor, a context.

        Raises:
            MissingCapability: the package or the cluster is not available.
        """
        if self.executor == "local":
            return LocalExecutor(self.open_store(), self.jobs)
        from enginesmith.pipeline.execution.ray.executor import RayExecutor

        return RayExecutor(self.open_store(), self.jobs, self.ray_address)
