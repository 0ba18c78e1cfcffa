"""Declare the contract of engines that are built under a limit for intermediate buffers."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Self

from enginesmith.pipeline.engines.base import Engine, EngineFacts

PORTABLE = "portable"
"""The target of engines built ahead of time for every device that their builder knows."""
MAX = "max"
SWEPT = ("min", "2of5", "3of5", "4of5", "5of5")
"""Points of a workspace sweep as they are part of labels: the smallest that builds, four above it on a log scale."""


class WorkspaceEngine(Engine):
    """Build an engine under a limit for intermediate buffers, which can be swept."""

    workspace_bytes: int | None = None
    """Limit of the memory pool for intermediate buffers; None is the builder's default, which the record says."""

    def within(self, limit_bytes: int) -> Self:
        """Copy the engine with this limit."""
        return self.model_copy(update={"workspace_bytes": limit_bytes})

    @classmethod
    def gates_workspace(cls) -> bool:
        """Tell whether the limit only decides if the engine is built: all limits that build give the same engine."""
        return False

    @classmethod
    @abstractmethod
    def smallest_workspace(cls, build: Callable[[int], object], unlimited: EngineFacts) -> int:
        """Find the smallest limit in bytes that builds; the last successful ``build`` was with it.

        ``unlimited`` are the figures of an engine built without a limit. ``build`` raises LimitTooSmall.
        """

    @classmethod
    @abstractmethod
    def workspace_points(cls, unlimited: EngineFacts, smallest: int, count: int) -> tuple[int, ...]:
        """Give ``count`` limits in bytes worth measuring, from the smallest one that builds upwards."""
