"""How far a model is to be pruned."""

import math
from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from enginesmith.pipeline.errors import UsageError

Kind = Literal["ratio", "macs", "params", "latency"]

_QUANTITIES = {"macs": "MACs", "params": "parameters", "latency": "latency"}
_FORMS = "give a share of the channels as in 0.3, or what is to be left: macs=0.5, params=0.5 or latency=0.6"


class Target(BaseModel):
    """How far to prune.

    ``ratio`` is the share of channels that go; ``macs``, ``params`` and ``latency`` are what is left, as shares of what
    the model that is pruned has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    value: float = Field(gt=0, lt=1)

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read ``0.3``, ``macs=0.5``, ``params=0.5`` or ``latency=0.6``.

        Raises:
            UsageError: it is none of these, or no share between 0 and 1.
        """
        kind, _, number = text.partition("=") if "=" in text else ("ratio", "", text)
        name = kind.strip().lower()
        if name not in ("ratio", "macs", "params", "latency"):
            raise UsageError(f"{kind!r} is nothing that pruning can aim at", _FORMS)
        try:
            value = float(number)
        except ValueError as error:
            raise UsageError(f"{text!r} is no pruning target: {number!r} is no number", _FORMS) from error
        if not (math.isfinite(value) and 0 < value < 1):
            raise UsageError(f"--prune {text}: {_out_of_range(name, value)}", _FORMS)
        return cls.model_validate({"kind": name, "value": value})

    @property
    def slug(self) -> str:
        """For names of variants: ``prune30``, ``prune-macs50``, ``prune-latency60``."""
        percent = f"{100 * self.value:.4g}".replace(".", "_")
        return f"prune{percent}" if self.kind == "ratio" else f"prune-{self.kind}{percent}"

    @property
    def left(self) -> float:
        """What is left of the target's quantity, as a share."""
        return 1 - self.value if self.kind == "ratio" else self.value

    def stages(self, count: int) -> tuple["Target", ...]:
        """The same target in ``count`` stages of equal size, each relative to what the one before leaves."""
        lefts = [1 - (1 - self.left) * index / count for index in range(count + 1)]
        shares = [after / before for before, after in pairwise(lefts)]
        return tuple(Target(kind=self.kind, value=1 - one if self.kind == "ratio" else one) for one in shares)

    def __str__(self) -> str:
        """As it is given."""
        return f"{self.value:g}" if self.kind == "ratio" else f"{self.kind}={self.value:g}"


def _out_of_range(kind: str, value: float) -> str:
    """Why no model can be pruned to ``value``."""
    if kind == "ratio":
        if value == 0:
            return "none of the channels would go; leave --prune away for the dense model"
        range_is = "it is the share of the channels that goes, in [0, 1)"
        return f"{range_is}, and 1 would leave none" if value == 1 else range_is
    what = _QUANTITIES[kind]
    if value == 1:
        return f"all of the {what} would be left; leave --prune away for the dense model"
    range_is = f"it is the share of the {what} that is left, in (0, 1]"
    return f"{range_is}, and 0 would leave none" if value == 0 else range_is
