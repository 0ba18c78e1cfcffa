"""Define the options of pruning: importance, targets, and what to leave alone."""

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.units import Option

_ADVANCED = Option("Variants")

Importance = Literal["l1", "l2", "taylor", "bn", "random"]


class PruneOptions(BaseModel, frozen=True, extra="forbid"):
    """Choices of pruning, beside the target."""

    importance: Annotated[Importance, _ADVANCED] = Field(
        "l2", description="ranking of channels: weights (l1, l2), gradients (taylor), batch-norm scale (bn), or random"
    )
    scope: Annotated[Literal["global", "uniform"], Option("Variants", "--prune-scope")] = Field(
        "global", description="ranking: of all layers together (global), or the same share of each layer (uniform)"
    )
    multiple_of: Annotated[int, _ADVANCED] = Field(
        16, ge=1, le=256, description="keep channel counts multiples of this, if the target can be reached then"
    )
    protect: Annotated[tuple[str, ...], Option("Variants", metavar="NAME")] = Field(
        (), description="layers that keep all outputs: names of modules; may contain *"
    )
    steps: Annotated[int, Option("Variants", "--prune-steps")] = Field(
        1, ge=1, le=100, description="number of pruning steps; importance is computed again before each"
    )
    heads: Annotated[bool, Option("Variants", "--no-heads")] = Field(True, description="prune whole attention heads")


Kind = Literal["ratio", "macs", "params", "latency"]

_QUANTITIES = {"ratio": "channels", "macs": "MACs", "params": "parameters", "latency": "latency"}
_FORMS = "say what is removed: 30% of the channels, macs=-50%, params=-50% or latency=-40%"


class PruneTarget(BaseModel, frozen=True, extra="forbid"):
    """The share of a quantity that is removed from the model that is pruned; ``ratio`` is of its channels.

    A pruning ratio is the share that is removed in torch-pruning and in the literature (Blalock et al., "What is the
    State of Neural Network Pruning?", MLSys 2020, section 3).
    """

    kind: Kind
    value: float = Field(gt=0, lt=1)

    @classmethod
    def parse(cls, text: str) -> "PruneTarget":
        """Read ``30%`` (or ``0.3``), ``macs=-50%``, ``params=-50%`` or ``latency=-40%``.

        Raises:
            UsageError: it is none of these, or no share between 0 and 1.
        """
        kind, _, number = text.partition("=") if "=" in text else ("ratio", "", text)
        name = kind.strip().lower()
        if name not in _QUANTITIES:
            raise UsageError(f"{kind!r} is nothing that pruning can aim at", _FORMS)
        number = number.strip()
        try:
            value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
        except ValueError as error:
            raise UsageError(f"{text!r} is no pruning target: {number!r} is no number", _FORMS) from error
        what = _QUANTITIES[name]
        if name != "ratio":
            if 0 < value < 1 and not number.startswith("-"):
                raise UsageError(
                    f"--prune {text} does not say whether {value:.4g} of the {what} is removed or left",
                    f"write {spell(name, value)} to remove {100 * value:.4g} %, or {spell(name, 1 - value)} to leave "
                    "that much",
                )
            value = -value
        if not (math.isfinite(value) and 0 < value < 1):
            why = f"it is the share of the {what} that is removed, above 0 % and below 100 %"
            if value == 0:
                why = f"none of the {what} would be removed; omit --prune for the dense model"
            elif value == 1:
                why = f"{why}, and 100 % would leave none"
            raise UsageError(f"--prune {text}: {why}", _FORMS)
        return cls.model_validate({"kind": name, "value": round(value, 12)})

    @property
    def slug(self) -> str:
        """Mark in names of variants, in percent removed: ``prune30``, ``prune-macs50``, ``prune-latency40``."""
        percent = f"{100 * self.value:.4g}".replace(".", "_")
        return f"prune{percent}" if self.kind == "ratio" else f"prune-{self.kind}{percent}"

    @property
    def left(self) -> float:
        """Share of the quantity that is left."""
        return 1 - self.value

    def stages(self, count: int) -> tuple["PruneTarget", ...]:
        """Divide the target into ``count`` stages of equal size, each relative to what the one before leaves."""
        lefts = [1 - self.value * index / count for index in range(count + 1)]
        return tuple(PruneTarget(kind=self.kind, value=1 - after / before) for before, after in pairwise(lefts))

    def __str__(self) -> str:
        return spell(self.kind, self.value)


def spell(kind: str, removed: float) -> str:
    """Write the share that is removed as :meth:`PruneTarget.parse` reads it."""
    percent = f"{100 * removed:.6g}%"
    return percent if kind == "ratio" else f"{kind}=-{percent}"
