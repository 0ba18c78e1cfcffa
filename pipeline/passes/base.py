"""What a pass is: a pure function from artifact to artifact, with its promises checked before and after."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import evaluator, model_file
from enginesmith.pipeline.tensors import Array, Feeds, Signature, TensorSpec

Progress = Callable[[str], None]
Records = Mapping[str, Artifact]


_SHOWN, _NAMES = 5, 3
"""Reasons that are written out, and names for each."""


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

    @abstractmethod
    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Read the artifact, write files into the empty folder ``out``, say what was done.

        ``records`` holds what was found out about the artifact before, by role; most passes need none.
        """


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
