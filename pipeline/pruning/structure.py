"""Groups of channels that can only go together, as slices of named tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["makes", "scales", "reads"]


@dataclass(frozen=True)
class Slice:
    """Where the units of a group lie in one tensor: ``indices[unit]`` along ``axis``."""

    tensor: str
    axis: int
    side: Side
    """Whether the tensor's layer makes the channels, changes each of them alone, or reads them."""
    indices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Attribute:
    """A whole number that a module keeps beside its weights, and that shrinks with the group."""

    module: str
    name: str
    each: int
    """How much of it one unit accounts for."""


@dataclass(frozen=True)
class Group:
    """Layers whose channels hang together. A unit is the least that can go: a channel, one of each block, a head."""

    root: str
    """The first layer that makes the channels."""
    unit: Literal["channel", "head"]
    channels: tuple[tuple[int, ...], ...]
    """For each unit, its channels as the layer counts them that importance is found for."""
    slices: tuple[Slice, ...]
    modules: tuple[str, ...]
    """Every module that is cut."""
    attributes: tuple[Attribute, ...] = ()
    traced: Any = field(default=None, compare=False, repr=False)
    """The group as torch_pruning found it."""

    @property
    def units(self) -> int:
        """How many there are."""
        return len(self.channels)

    @property
    def width(self) -> int:
        """Channels in all."""
        return sum(map(len, self.channels))

    @property
    def makers(self) -> tuple[str, ...]:
        """Tensors of the layers that make the channels."""
        return tuple(one.tensor for one in self.slices if one.side == "makes")


Choice = Mapping[str, tuple[int, ...]]
"""Root of a group → the units of it that stay, in order."""
