"""What a pass is: a pure function from artifact to artifact, with its promises checked before and after."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from enginesmith.calibration.ranges import Method
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import evaluator, model_file
from enginesmith.pipeline.passes.quantize.precisions import Name, Placement
from enginesmith.pipeline.tensors import Array, Feeds, Signature, TensorSpec

Progress = Callable[[str], None]
Records = Mapping[str, Artifact]
Stage = Literal["graph", "request", "sparsity", "rescale", "precision"]
"""Places in a plan, in their order.

``graph``: from what was loaded to the float graph of all engines; ``request``: after those, if ``--pass`` names it;
``sparsity``: each makes a variant of the float graph; ``rescale``: on the way to a precision, with ranges of what it
gets, and new ranges after it; ``precision``: makes the graph that an engine of that precision is built from.
"""


_SHOWN, _NAMES = 5, 3
"""Reasons that are written out, and names for each."""


@dataclass(frozen=True)
class PrecisionRequest:
    """A variant that passes work for: its precision, and its engine's rules."""

    precision: Name = "fp32"
    placement: Placement = "inputs"
    weight_bits: int = 8
    """Bits of int8 weights, where the recipe leaves them to the engine."""


class Pass(BaseModel):
    """A transformation; its fields are its parameters, and with the parent's digest they make its key.

    Same artifact and same parameters give the same bytes: fixed seeds, no timestamps, no machine paths in what is
    written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    consumes: ClassVar[Kind]
    produces: ClassVar[Kind]
    tools: ClassVar[tuple[str, ...]]
    """Distributions whose versions decide what comes out."""
    stage: ClassVar[Stage] = "request"
    reads: ClassVar[tuple[str, ...]] = ()
    """Fields of the recipe that :meth:`requested` is given."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Roles of the records that :meth:`apply` cannot do without."""

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make the passes that a recipe asks for, by the fields that ``reads`` names; one by default."""
        return (cls(),)

    @property
    def step_name(self) -> str:
        """Return the name of the step that applies it."""
        return self.name

    @model_serializer(mode="wrap")
    def _with_name(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Tell passes with equal fields apart, wherever one is a field of a task."""
        return {"pass": self.name, **serialize(self)}

    @abstractmethod
    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Read the artifact, write files into the empty folder ``out``, say what was done.

        ``records`` holds what was found out about the artifact before, by role; most passes need none.
        """


class PrecisionPass(Pass):
    """A pass that computes groups of operators in fewer bits, but those that an ``assignment`` record keeps."""

    precision: Name
    placement: Placement = "inputs"
    """Where Q/DQ pairs go. With ``inputs``, what is beside fp8 and int4 becomes float16."""
    method: Method = "mse"
    """Whose ranges; an assignment may say otherwise."""

    @property
    @abstractmethod
    def remainder(self) -> str:
        """Return the type that operators get which are not quantised."""

    @abstractmethod
    def rounding_inputs(self) -> Self:
        """Return the pass that rounds inputs of products alone, so that the error of each can be told."""


def by_reason(what: str, left: Mapping[str, str]) -> tuple[str, ...]:
    """Sentences on what a pass did not do: names of groups or weights, those of one reason together."""
    found: dict[str, list[str]] = {}
    for name, why in left.items():
        found.setdefault(why, []).append(name)
    notes = []
    for why, names in list(found.items())[:_SHOWN]:
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        notes.append(f"{what}: {', '.join(names[:_NAMES])}{more}: {why}")
    rest = sum(map(len, list(found.values())[_SHOWN:]))
    return (*notes, *([f"{what}: {rest} more, each for a reason of its own"] if rest else []))


# Whether two graphs compute the same, found out by running both with the runtime's own optimisations off.

TOLERANCE = 1e-4  # of the output's range: the project's bound for "equal"
_FIRST, _OTHERS = 2, (3, 16, 64, 224)  # sizes tried for dynamic first dimensions, and for all other ones


def compare(before: Path, after: Path) -> None:
    """Run both on the same feeds; sizes of dynamic dimensions are guessed until the first graph takes them.

    Raises:
        ModelError: their outputs differ, or nothing could be compared.
        MissingCapability: ONNX Runtime is not installed.
    """
    reason = "no feeds"
    for feeds in _candidates(model_file.signature(before)):
        try:
            expected = run(before, feeds)
        except ModelError as error:
            reason = error.message
            continue
        distance = worst(expected, run(after, feeds))
        if distance > TOLERANCE:
            raise ModelError(f"the outputs differ by {distance:.1e} of their range")
        return
    raise ModelError(f"it could not be run for comparison ({reason})")


def run(path: Path, feeds: Feeds) -> list[Array]:
    """Outputs of a graph on the CPU; feeds that it does not read are left out.

    Raises:
        ModelError: it cannot be loaded, or does not take these feeds.
        MissingCapability: ONNX Runtime is not installed.
    """
    library, failures = evaluator.import_library()
    options = library.SessionOptions()
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs = {value.name for value in session.get_inputs()}
        return list(session.run(None, {name: value for name, value in feeds.items() if name in inputs}))
    except failures as error:
        raise ModelError(str(error).splitlines()[0][:200]) from error


def worst(expected: list[Array], found: list[Array]) -> float:
    """The greatest difference of any output as a share of that output's range; infinite where shapes differ."""
    return max((_distance(a, b) for a, b in zip(expected, found, strict=True)), default=0.0)


def _distance(expected: Array, found: Array) -> float:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    same = (expected == found) | ((expected != expected) & (found != found))
    if same.all():
        return 0.0
    if not np.issubdtype(expected.dtype, np.floating):
        return float("inf")
    a, b = (value[~same].astype(np.float64) for value in (expected, found))
    finite = np.abs(expected[np.isfinite(expected)].astype(np.float64))
    span = max(float(finite.max(initial=0.0)), float(np.finfo(expected.dtype).tiny))
    difference = float(np.abs(a - b).max())
    return difference / span if np.isfinite(difference) else float("inf")


def _candidates(signature: Signature) -> Iterator[dict[str, Array]]:
    first = {spec.shape[0] for spec in signature.inputs if spec.shape}
    for other in _OTHERS if set(signature.symbols) - first else _OTHERS[:1]:
        sizes = {symbol: _FIRST if symbol in first else other for symbol in signature.symbols}
        generator = np.random.default_rng(0)
        yield {spec.name: _feed(spec, spec.resolve(sizes), generator) for spec in signature.inputs}


def _feed(spec: TensorSpec, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Normal numbers; zeros and ones for integers, which are valid as tokens, masks and indices alike."""
    dtype = np.dtype(spec.dtype)
    if np.issubdtype(dtype, np.floating):
        return generator.standard_normal(shape, dtype=np.float32).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)
