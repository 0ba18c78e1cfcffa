"""Define the options of sparsity; light, as recipes and the command line read it."""

from typing import Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from enginesmith.pipeline.errors import UsageError

Pattern = Literal["2:4", "unstructured"]
Scope = Literal["global", "layer"]

_HALF = 0.5
_HOW = "write 2:4, or unstructured=0.5 for half of the weights"


class SparsifyOptions(BaseModel, frozen=True, extra="forbid"):
    """Choices of the weights that become zero, whatever the pattern."""

    scope: Scope = Field(
        "global", description="unstructured: global uses one threshold for all weights, layer uses one for each layer"
    )
    protect: tuple[str, ...] = Field(
        (), description="weights that stay dense: names of weights, nodes or modules; may contain *"
    )


class Sparsity(SparsifyOptions):
    """Pattern of zeros, and the choices of weights for it."""

    pattern: Pattern = "2:4"
    ratio: float = Field(_HALF, ge=0, lt=1)
    """Share of the weights that become zero; 2:4 is always a half."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.pattern == "2:4" and self.ratio != _HALF:
            raise ValueError(f"2:4 is half of the weights, and the ratio is {self.ratio}")
        return self

    @classmethod
    def parse(cls, text: str, options: SparsifyOptions | None = None) -> Self:
        """Parse ``2:4`` or ``unstructured=0.5``.

        Raises:
            UsageError: neither of them, or a ratio outside of [0, 1).
        """
        word, equals, number = text.strip().lower().partition("=")
        if word not in ("2:4", "unstructured") or (word == "2:4") == bool(equals):
            raise UsageError(f"cannot read the sparsity {text!r}", _HOW)
        chosen = (options or SparsifyOptions()).model_dump()
        try:
            return cls.model_validate({**chosen, "pattern": word, "ratio": float(number) if equals else _HALF})
        except ValidationError as error:
            raise UsageError(f"the ratio of {text!r} is not at least 0 and less than 1", _HOW) from error
        except ValueError as error:
            raise UsageError(f"the ratio {number!r} is no number", _HOW) from error

    @property
    def slug(self) -> str:
        """Mark in ids of variants: ``sparse24``, ``sparse50``."""
        return "sparse24" if self.pattern == "2:4" else f"sparse{100 * self.ratio:.4g}".replace(".", "_")

    def __str__(self) -> str:
        return self.pattern if self.pattern == "2:4" else f"{self.pattern}={self.ratio:g}"
