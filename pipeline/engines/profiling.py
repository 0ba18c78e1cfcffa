"""Describe what engines tell of their operators in a profile: seconds, types, and the modules they came from."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds

BETWEEN = "(between operators)"
"""Time on the CPU in which no operator ran: a module's own code in Python, and torch's between its calls."""
NODE = "node:"
"""Starts the path of what has no module: a graph that nobody exported from PyTorch here is told apart by its nodes."""
WARM_CALLS = 3
"""Calls before those that count: the first ones allocate, compile and pick kernels."""


@dataclass(frozen=True)
class ProfileRequest:
    """Bundle what a profiler works with."""

    artifact: Artifact
    device: Device
    feeds: Feeds
    calls: int
    """Inferences that count."""
    scratch: Path
    graph: Path | None = None
    """The ONNX file that the engine was built from, whose nodes say which module they came from."""


class Origin(BaseModel, frozen=True):
    """Locate the modules of the model that an operator's work comes from."""

    modules: tuple[str, ...] = ()
    """Paths of the modules whose main work it does; several where it does that of several; empty if unknown."""
    also: dict[str, tuple[str, ...]] = {}
    """Light operators that are fused into it, by the module that they came from."""
    multiplies: bool = False
    """True if a product (a convolution, a matrix product, attention) is known to be part of it."""
    converts: bool = False
    """True if it only changes types or layouts: quantizes, dequantizes, casts or reorders for the engine's own sake."""


class OperatorTime(BaseModel, frozen=True):
    """Describe an operator or kernel of an engine."""

    name: str
    """The engine's own name, distinct within the profile."""
    operator: str
    """Its kind: ``aten::conv2d``, ``FusedConv``, or the kernel's name."""
    origin: Origin
    precision: str = ""
    """Type that it computes in, taken for the narrowest that it reads; empty where the profiler does not tell."""
    seconds: float
    """Median over the inferences that were profiled, of all runs in one."""
    calls: int = 1
    """Times that it runs in one inference."""


class Profiled(BaseModel, frozen=True):
    """Collect the figures of one profiler."""

    operators: tuple[OperatorTime, ...]
    source: str
    call_seconds: float | None
    """Median of a whole profiled inference; None where the profiler sees operators alone."""
    notes: tuple[str, ...] = ()


@dataclass
class Tally:
    """Collect seconds of operators by name, inference by inference."""

    inferences: list[dict[str, tuple[float, int]]] = field(default_factory=list)
    """Seconds, and runs."""

    def begin(self) -> None:
        """Begin a new inference, to which all that is added from now on belongs."""
        self.inferences.append({})

    def add(self, name: str, seconds: float, *, run: bool = True) -> None:
        """Add a run of an operator, or a part of one; before the first inference nothing counts."""
        if self.inferences:
            before, runs = self.inferences[-1].get(name, (0.0, 0))
            self.inferences[-1][name] = (before + seconds, runs + run)

    def medians(self) -> dict[str, tuple[float, int]]:
        """Compute median seconds and runs of an inference, in order of first appearance; absent counts as zero."""
        medians = {}
        for name in dict.fromkeys(name for inference in self.inferences for name in inference):
            seconds, runs = zip(*(inference.get(name, (0.0, 0)) for inference in self.inferences), strict=True)
            medians[name] = (statistics.median(seconds), round(statistics.median(runs)))
        return medians


def narrowest(types: Iterable[str], names: Mapping[str, str]) -> str:
    """Translate an engine's words for types into ours for the first of them in ``names``; empty if none is there."""
    given = set(types)
    return next((short for word, short in names.items() if word in given), "")
