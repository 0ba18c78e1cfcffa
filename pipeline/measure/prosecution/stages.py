"""The forms of a model on the way to an engine, and how their answers are compared."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import BuildRequest, Engine
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.rounding import Perturb
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.measure.prosecution.judging import (
    EXACT,
    OWN_GRAPH,
    Answer,
    Judge,
    make_judge,
    measure_sensitivity,
)
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Feeds, Signature, TensorSpec
from enginesmith.pipeline.units import AddedOption

if TYPE_CHECKING:
    import onnx


OtherGraph = tuple[AddedOption, Callable[[Path], Artifact]]
"""An option, and what makes the graph that it stands for in a folder that is not there yet, or raises EnginesmithError.
"""


@dataclass(frozen=True)
class Stage:
    """One form of the model on the way to the engine."""

    name: str
    answer: Answer
    precision: str
    """Row of the fidelity thresholds."""
    graph: Path | None = None
    differentiate: Callable[[Feeds, Feeds], dict[str, Array]] | None = None
    """Computes its gradient, as ``Session.differentiate`` does."""
    software: str = ""
    """Software that answers, with its version."""
    other_graphs: Callable[[Sequence[str]], Iterator[OtherGraph]] | None = None
    """Lists other graphs that can be made in its place, those first that concern the nodes of these names."""
    perturb: Perturb | None = None
    """Answers with changed operations, as ``Session.perturb`` does."""

    def compute_by_reference(self, feeds: Feeds) -> dict[str, Array]:
        """Answer by onnx's reference evaluator; empty where there is no graph, or it does not take it."""
        if self.graph is None:
            return {}
        try:
            return reduction.compute_by_reference(reduction.read_whole(self.graph), feeds)
        except EnginesmithError:
            return {}


@dataclass(frozen=True)
class Stages:
    """The forms of a model, from the given one to the engine in question."""

    stages: Sequence[Stage]
    """From the given model to the engine."""
    engine: Engine
    device: Device
    seconds: float
    """Time for reducing."""
    truth: Path | None = None
    """Another graph of the model, which is right where it answers like the model."""

    @property
    def own_precision(self) -> str:
        """Key of the thresholds between the engine and its own graph."""
        precision = self.stages[-1].precision
        return precision if precision in EXACT else OWN_GRAPH


@dataclass(frozen=True)
class Reduced:
    """A part of a graph that shows a fault."""

    model: "onnx.ModelProto"
    feeds: dict[str, Array]
    expected: dict[str, Array]
    found: dict[str, Array]
    reference: str
    """Way in which the right answers were computed."""
    tolerance: float
    """Share of its range by which an answer may differ."""
    nodes: tuple[str, ...]
    """Operators and names."""
    whole: int
    compute: reduction.Compute = reduction.compute
    """Computes graphs right on these feeds."""


def differ(precision: str, before: Stage, wanted: Feeds, given: Feeds, feeds: Feeds) -> bool:
    """Tell whether a stage of a precision answers otherwise than the stage before it."""
    judge = make_stage_judge(wanted, precision)
    return bool(judge.find_fault(wanted, given, lambda: measure_sensitivity(before.answer, feeds, precision)))


def make_stage_judge(wanted: Feeds, precision: str) -> Judge:
    outputs = tuple(TensorSpec(name=name, dtype=str(value.dtype), shape=value.shape) for name, value in wanted.items())
    signature = Signature(inputs=(), outputs=outputs)
    return make_judge(signature, precision, samples.find_spans([wanted]))


def is_wrong(
    engine: Engine,
    part: "onnx.ModelProto",
    feeds: Feeds,
    precision: str,
    device: Device,
    place: Path,
    compute: reduction.Compute = reduction.compute,
) -> str:
    """Say what an engine gets wrong of a graph, beside the same without any optimization; nothing if it is right.

    Raises:
        ModelError: it refuses the graph, or its inputs; or the graph cannot be computed.
    """
    wanted = compute(part, feeds)
    with open_engine(engine, part, device, place) as answer:
        given = answer(feeds)
    judge = make_stage_judge(wanted, precision)
    given = {name: given[name] for name in wanted if name in given}
    return judge.find_fault(
        wanted, given, lambda: measure_sensitivity(lambda changed: compute(part, changed), feeds, precision)
    )


@contextlib.contextmanager
def open_engine(engine: Engine, model: "onnx.ModelProto", device: Device, place: Path) -> Iterator[Answer]:
    """Build an engine of a graph in memory, and load it.

    Raises:
        ModelError: it cannot be built.
    """
    built = place / "engine"
    built.mkdir(parents=True)
    path = place / "model.onnx"
    path.write_bytes(model.SerializeToString())
    signature = model_file.signature(path)
    graph = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=signature)
    effect = engine.build(BuildRequest(graph, built, device))
    artifact = Artifact(kind="engine", path=built / effect.file, sha256="", bytes=0, signature=signature)
    with engine.load(artifact, device) as session:
        yield session.run
