"""Define the events of a run and the outcomes of its steps, for those who show or record them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import EnginesmithError

Status = Literal["done", "failed", "skipped", "unavailable"]


class ShownTask(Protocol):
    """Describe the task of a step, as far as people are shown it."""

    @property
    def title(self) -> str: ...
    @property
    def expected_seconds(self) -> float | None: ...
    @property
    def exclusive(self) -> bool: ...


class ShownStep(Protocol):
    """Describe a step of a plan, as far as people are shown it."""

    @property
    def id(self) -> str: ...
    @property
    def task(self) -> ShownTask: ...
    @property
    def variant(self) -> str: ...


@dataclass(frozen=True)
class Outcome:
    """Record how a step ended."""

    step: str
    status: Status
    artifact: Artifact | None = None
    cached: bool = False
    error: EnginesmithError | None = None
    reason: str = ""

    @property
    def good(self) -> bool:
        """True if there is an artifact to go on with."""
        return self.artifact is not None and not self.artifact.rejected


@dataclass(frozen=True)
class Event:
    """Announce the device of a run, or that a step is planned, has started, got further or has ended."""

    kind: Literal["device", "planned", "started", "progress", "note", "finished"]
    step: ShownStep
    text: str = ""
    outcome: Outcome | None = None


Listener = Callable[[Event], None]
Outcomes = Mapping[str, Outcome]
