"""Shares of a graph's work and weights by precision: the row of run.json, and how shares are written."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

QUANTISED = ("int4", "fp4", "int8", "fp8")


HALF = ("fp16", "bf16")


class Coverage(BaseModel):
    """What a graph is computed in. Shares are of all multiply-adds, or all parameters, that could be counted."""

    model_config = ConfigDict(frozen=True)

    total_macs: int
    """Multiply-adds of one inference at the sizes that it was looked at."""
    macs: dict[str, float]
    """Share by the precision that products are computed in, the largest first."""
    operators: dict[str, dict[str, float]]
    """The same share, by operator within each precision."""
    weights: dict[str, float]
    """Share of parameters by the precision they are stored in: matrices and filters, no scales, biases or norms."""
    products: dict[str, int]
    """Number of products by precision, those of unknown size too."""
    unknown_products: int = 0
    """Products that are in no share of multiply-adds, as their shapes are not known."""
    qdq_pairs: int = 0
    """QuantizeLinear with a DequantizeLinear behind it."""
    unfused: int = 0
    """Products computed in floating point on what was quantised just before: of a graph as it is executed."""
    islands: int = 0
    """Connected runs of low-precision operators: between any two of them values change their type."""
    conversions: int = 0
    """Operators that quantise or dequantise activations."""
    casts: int = 0
    """Casts between floating-point types."""
    reorders: int = 0
    """Operators that only lay out values anew: ONNX Runtime's blocks of channels, and transpositions."""

    def share(self, precision: str) -> float:
        """Return share of multiply-adds in a precision."""
        return self.macs.get(precision, 0.0)


def words(shares: Mapping[str, float]) -> str:
    """Return ``int8 97 %, fp32 3 %``."""
    return ", ".join(f"{name} {percent(share)}" for name, share in shares.items()) or "nothing"


def percent(share: float) -> str:
    """Return a share as people read it; what is there is never shown as none, nor what is left as all."""
    if 0 < share < 0.01:
        return "< 1 %"
    if 0.99 < share < 1:
        return "> 99 %"
    return f"{100 * share:.0f} %"
