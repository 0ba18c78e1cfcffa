"""What can be asked of pruning: by what measure of importance, and what to leave alone."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Importance = Literal["l1", "l2", "taylor", "bn", "random"]


class PruneOptions(BaseModel):
    """How pruning chooses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    importance: Importance = Field(
        "l2", description="what channels are ranked by: weights (l1, l2), gradients (taylor), BN scale (bn), or random"
    )
    scope: Literal["global", "uniform"] = Field(
        "global", description="global ranks the channels of all layers together; uniform takes the same share of each"
    )
    multiple_of: int = Field(
        16,
        ge=1,
        le=256,
        description="channels are kept at multiples of this, and at parts of it only where the target needs that",
    )
    protect: tuple[str, ...] = Field(
        (), description="layers whose outputs stay whole: names of modules, * for any part"
    )
    steps: int = Field(1, ge=1, le=100, description="in how many steps; importance is found anew before each")
    heads: bool = Field(True, description="whether whole attention heads are pruned, too")
