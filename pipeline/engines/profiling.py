"""What an engine's own profiler tells: the time that each of its operators takes, and where in the model it belongs."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.tensors import Feeds

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.base import Device, Session

BETWEEN = "(between operators)"
"""Time on the CPU in which no operator ran: a module's own code in Python, and torch's between its calls."""
NODE = "node:"
"""Starts the path of what has no module: a graph that nobody exported from PyTorch here is told apart by its nodes."""
WARM_CALLS = 3
"""Calls before those that count: the first ones allocate, compile and pick kernels."""


@dataclass(frozen=True)
class ProfileRequest:
    """What is profiled, and with what."""

    artifact: Artifact
    device: "Device"
    feeds: Feeds
    calls: int
    """Inferences that count."""
    scratch: Path
    """An empty folder for what a profiler writes."""
    graph: Path | None = None
    """The ONNX file that the engine was built from, whose nodes say which module they came from."""


class Origin(BaseModel):
    """Where in the model an operator's work comes from."""

    model_config = ConfigDict(frozen=True)

    modules: tuple[str, ...] = ()
    """Paths of the modules whose main work it does; several where it does that of several; empty if unknown."""
    also: dict[str, tuple[str, ...]] = {}
    """Light operators that are fused into it, by the module that they came from."""
    multiplies: bool = False
    """Whether a product (a convolution, a matrix product, attention) is part of it; unknown counts as none."""
    converts: bool = False
    """Whether it only changes types or layouts: quantises, dequantises, casts or reorders for the engine's own sake."""


class OperatorTime(BaseModel):
    """One operator or kernel of an engine."""

    model_config = ConfigDict(frozen=True)

    name: str
    """The engine's own name, distinct within the profile."""
    operator: str
    """Its kind: ``aten::conv2d``, ``FusedConv``, or the kernel's name."""
    origin: Origin
    precision: str = ""
    """What it computes in, by the narrowest type that it reads; empty where the profiler does not tell."""
    seconds: float
    """Of one inference: the median over those that were profiled."""
    calls: int = 1
    """Times that it runs in one inference."""


class Profiled(BaseModel):
    """What one profiler told."""

    model_config = ConfigDict(frozen=True)

    operators: tuple[OperatorTime, ...]
    source: str
    """Whose figures these are."""
    call_seconds: float | None
    """Median of a whole profiled inference; None where the profiler sees operators alone."""
    notes: tuple[str, ...] = ()


@dataclass
class Tally:
    """Seconds of operators by name, inference by inference."""

    inferences: list[dict[str, tuple[float, int]]] = field(default_factory=list)
    """Seconds, and runs."""

    def begin(self) -> None:
        """What is added from now on belongs to a new inference."""
        self.inferences.append({})

    def add(self, name: str, seconds: float, *, run: bool = True) -> None:
        """One run of an operator, or a part of one; before the first inference nothing counts."""
        if self.inferences:
            before, runs = self.inferences[-1].get(name, (0.0, 0))
            self.inferences[-1][name] = (before + seconds, runs + run)

    def medians(self) -> dict[str, tuple[float, int]]:
        """Median seconds of one inference, and runs in it, in the order of first appearance; absent counts as zero."""
        names = dict.fromkeys(name for one in self.inferences for name in one)
        return {name: self._median(name) for name in names}

    def _median(self, name: str) -> tuple[float, int]:
        seconds, runs = zip(*(one.get(name, (0.0, 0)) for one in self.inferences), strict=True)
        return statistics.median(seconds), round(statistics.median(runs))


def warm_up(session: "Session", feeds: Feeds) -> Any:
    """Bind feeds and make the calls that do not count; what was bound."""
    session.signature.check(feeds)
    bound = session.bind(feeds)
    for _ in range(WARM_CALLS):
        session.enqueue(bound)
    session.synchronize()
    return bound


def narrowest(types: Iterable[str], names: Mapping[str, str]) -> str:
    """Of an engine's words for types, ours for the one that comes first in ``names``; empty if none is there."""
    given = set(types)
    return next((short for word, short in names.items() if word in given), "")
