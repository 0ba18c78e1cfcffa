"""Define a pass: a pure function from artifact to artifact, which says where it belongs and what it needs."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from enginesmith.calibration.ranges import Method
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.passes.quantize.precisions import Name, Placement
from enginesmith.pipeline.units import AddedOption, group_values, name_some

Progress = Callable[[str], None]
Records = Mapping[str, Artifact]
Stage = Literal["graph", "request", "sparsity", "opset", "rescale", "precision"]
"""Places in a plan, in their order.

``graph``: from what was loaded to the float graph of all engines; ``request``: after those, if ``--pass`` names it;
``sparsity``: each makes a variant of the float graph; ``opset``: on the way to a precision that the graph is too old
for; ``rescale``: on the way to a precision, with ranges of what it gets, and new ranges after it; ``precision``: makes
the graph that an engine of that precision is built from.
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


class Pass(BaseModel, frozen=True, extra="forbid"):
    """A transformation; its fields are its parameters, and with the parent's digest they make its key.

    Same artifact and same parameters give the same bytes: fixed seeds, no timestamps, no machine paths in what is
    written.
    """

    name: ClassVar[str]
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
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

    def list_other_options(self) -> "Iterable[tuple[AddedOption, Pass | None]]":
        """List options with which another graph of the same parent is made, to try if this one turns out wrong.

        Each is beside the pass that has it; None where the option leaves the pass out.
        """
        return ()

    def judging_outputs_apart(self) -> Self:
        """Return the pass for a model whose answers have parts in other units: no large output may hide a small one."""
        return self

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
    """Places of Q/DQ pairs. With ``inputs``, what is beside fp8 and int4 becomes float16."""
    method: Method = "mse"
    """Method whose ranges are taken; an assignment may say otherwise."""

    @property
    @abstractmethod
    def remainder(self) -> str:
        """Type of operators that are not quantized."""

    @abstractmethod
    def explain_kind(self, kind: str) -> str:
        """Explain why operators of a kind stay in floating point; empty if they do not."""

    @abstractmethod
    def rounding_inputs(self) -> Self:
        """Return the pass that rounds inputs of products alone, so that the error of each can be told."""

    @abstractmethod
    def rounding_alone(self) -> Self:
        """Return the pass whose pairs are those of each group alone, if the others are in floating point."""

    @property
    def rounds_outputs(self) -> bool:
        """Tell whether all convolutions that it quantizes write rounded values, whoever reads these."""
        return False

    def rounding_outputs(self) -> Self | None:
        """Return the pass for engines that round all outputs of convolutions, if there are any with such graphs."""
        return None

    @abstractmethod
    def find_writers(self, model: "ir.Model") -> "Mapping[ir.Value, str]":
        """Find the values of its graph that are rounded along with the group which writes them, and these groups."""


def by_reason(what: str, left: Mapping[str, str]) -> tuple[str, ...]:
    """Describe what a pass did not do: names of groups or weights, those of one reason together."""
    names_of = group_values((why, name) for name, why in left.items())
    notes = [f"{what}: {name_some(names, _NAMES)}: {why}" for why, names in list(names_of.items())[:_SHOWN]]
    rest = sum(map(len, list(names_of.values())[_SHOWN:]))
    return (*notes, *([f"{what}: {rest} more, each for a reason of its own"] if rest else []))
