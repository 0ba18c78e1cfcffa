"""Rows of run.json about pruning: the model and each group before and after."""

from pydantic import BaseModel, ConfigDict


class _Fixed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Kept(_Fixed):
    """One group of layers that lost channels together, in one step."""

    step: int
    root: str
    """The layer whose output channels are counted."""
    members: tuple[str, ...]
    """Every layer and parameter that was cut with it."""
    unit: str
    """What is counted: channels, or heads."""
    before: int
    after: int
    kept: tuple[int, ...]
    """Indices of the units that stay, among those that there were before the step."""
    importance: str


class Facts(_Fixed):
    """What one pruning did, for people: written beside the pruned model."""

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
    """Of groups that can be pruned."""
    groups: tuple[Kept, ...]
    """Every group that lost units, with those that stay of what there was at first."""
    whole: dict[str, str]
    """First layer of each group that stays as it is → why."""
