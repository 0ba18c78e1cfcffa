"""Rows of run.json about models: a graph's shares of work and weights by precision, and what pruning cut."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel

QUANTIZED = ("int4", "fp4", "int8", "fp8")
HALF = ("fp16", "bf16")
Row = TypeVar("Row", bound=BaseModel)
_SHOWN = 4


def explain_missing(row: Row, otherwise: str, reasons: Mapping[str, str] = MappingProxyType({})) -> Row:
    """Give a reason to every field of a row that is None and is no failure: its own, or ``otherwise``."""
    missing = [name for name, value in row if value is None and name not in ("failure", "oom")]
    return row.model_copy(update={"reasons": {name: reasons.get(name, otherwise) for name in missing}})


class Coverage(BaseModel, frozen=True):
    """A graph's precisions. Shares are of all multiply-adds, or all parameters, that could be counted."""

    total_macs: int
    """Multiply-adds of one inference at the sizes that it was looked at."""
    macs: dict[str, float]
    """Share by the precision that products are computed in, the largest first."""
    operators: dict[str, dict[str, float]]
    """Share by precision, and by operator within each precision."""
    weights: dict[str, float]
    """Share of parameters by the precision they are stored in: matrices and filters, no scales, biases or norms.

    Weights of 8 bits that an engine unpacks for a product in floating point count as floats.
    """
    products: dict[str, int]
    """Number of products by precision, those of unknown size too."""
    unknown_products: int = 0
    """Products that are in no share of multiply-adds, as their shapes are not known."""
    qdq_pairs: int = 0
    """QuantizeLinear with a DequantizeLinear behind it."""
    unfused: int = 0
    """Products computed in floating point on what was quantized just before: of a graph as it is executed."""
    islands: int = 0
    """Connected runs of low-precision operators: between any two of them values change their type."""
    conversions: int = 0
    """Operators that quantize or dequantize activations."""
    casts: int = 0
    """Casts between floating-point types."""
    reorders: int = 0
    """Operators that only lay out values anew: ONNX Runtime's blocks of channels, and transpositions."""
    copies: int = 0
    """Copies between the memory of the host and of the device, between two nodes."""
    assigned: dict[str, dict[str, int]] = {}
    """Nodes by the part of the engine that runs them (ONNX Runtime's execution providers) and by operator.

    The first part is the one that the engine is for. Empty where an engine has one part, or does not tell.
    """

    @property
    def work(self) -> dict[str, float]:
        """Share of the multiply-adds by precision; of the number of products where sizes of some are not known."""
        total = sum(self.products.values())
        return {name: count / total for name, count in self.products.items()} if self.unknown_products else self.macs

    def share(self, precision: str) -> float:
        """Look up the share of multiply-adds in a precision."""
        return self.macs.get(precision, 0.0)


def describe_fallback(assigned: Mapping[str, Mapping[str, int]], copies: int = 0) -> str:
    """Describe the nodes that do not run on the part that the engine is for; empty if there are none."""
    first, *others = assigned or {"": {}}
    total = sum(sum(counts.values()) for counts in assigned.values())
    parts = []
    for name in others:
        counts = sorted(assigned[name].items(), key=lambda item: -item[1])
        listed = ", ".join(f"{count} {operator}" for operator, count in counts[:_SHOWN])
        more = ", …" if len(counts) > _SHOWN else ""
        parts.append(f"{sum(dict(counts).values())} of {total} nodes run on {name}, not on {first} ({listed}{more})")
    if parts and copies:
        parts.append(f"{copies} copies between host and device")
    return "; ".join(parts)


def format_shares(shares: Mapping[str, float]) -> str:
    """Write ``int8 97 %, fp32 3 %``."""
    return ", ".join(f"{name} {format_percent(share)}" for name, share in shares.items()) or "nothing"


def format_percent(share: float) -> str:
    """Write a share as people read it; a little is never shown as none, nor almost all as all."""
    if 0 < share < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


class PrunedGroup(BaseModel, frozen=True, extra="forbid"):
    """One group of layers that lost channels together, in one step."""

    step: int
    root: str
    """The first layer that makes the channels; where the outputs of several are joined, those of all are counted."""
    members: tuple[str, ...]
    """Every layer and parameter that was cut with it."""
    unit: str
    """Noun for one of the units counted: channel, or head."""
    before: int
    after: int
    kept: tuple[int, ...]
    """Indices of the units that stay, among those that there were before the step."""
    importance: str
    width: int
    """Channels of one unit: 1, or the width of a head."""


class PruningFacts(BaseModel, frozen=True, extra="forbid"):
    """Effect of one pruning, for people: written beside the pruned model."""

    target: str
    importance: str
    scope: str
    macs_before: int
    macs_after: int
    """Multiply-accumulates of one sample of the example."""
    parameters_before: int
    parameters_after: int
    channels_before: int
    channels_after: int
    """Channels of groups that can be pruned."""
    groups: tuple[PrunedGroup, ...]
    """Every group that lost units, with those that stay of what there was at first."""
    whole: dict[str, str]
    """First layer of each group that stays as it is → why."""
