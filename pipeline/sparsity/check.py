"""Whether zeros are where they were: the pattern of weights in a graph, and in what was made of it.

A weight is found again by its name, by the value that its product makes, or by the product's name; where all of these
have changed, by its zeros: a weight that is zero wherever the given one was, alone or as rows of a larger one, has to
be it, as chance would need one try in 2^n for n zeros. What rounds to zero on the way is no loss.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginesmith.pipeline import graph
from enginesmith.pipeline.sparsity import masks, stored
from enginesmith.pipeline.sparsity.stored import StoredWeight
from enginesmith.pipeline.tensors import Array

_SUFFIX = "_quantized"
_NAMES = 3
_ENOUGH_ZEROS = 64
"""Of a weight that is to be known by them."""


@dataclass(frozen=True)
class WeightFacts:
    """The zeros of one product's weight."""

    name: str
    operator: str
    node: str
    elements: int
    zeros: int
    two_of_four: bool
    """Whether no four neighbours along the axis that is summed over have more than two that are not zero."""


@dataclass(frozen=True)
class Followed:
    """What became of the weights that were 2:4, by name."""

    held: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Those that cannot be found again, of which nothing is said."""

    def __str__(self) -> str:
        total = len(self.held) + len(self.lost) + len(self.missing)
        parts = [f"2:4 held in {len(self.held)} of {total} weights"]
        parts += [f"lost in {_listed(self.lost)}"] if self.lost else []
        parts += [f"not found again: {_listed(self.missing)}"] if self.missing else []
        return "; ".join(parts)


def sparse_weights(path: Path) -> tuple[WeightFacts, ...]:
    """The zeros of the weights of all products in a file, in the order of its nodes; one in memory at a time.

    Raises:
        InvalidGraph: the file cannot be read.
    """
    return tuple(_facts(one) for one in _distinct(path))


def held(before: Path, after: Path) -> list[str]:
    """Names of the weights that are 2:4 in one graph and no more in the graph that was made of it."""
    return list(follow(before, after).lost)


def follow(before: Path, after: Path) -> Followed:
    """What became of the weights of a graph that are 2:4, in the graph that was made of it.

    Raises:
        InvalidGraph: one of the files cannot be read.
    """
    later = _Later(tuple(stored.find(graph.load(after))))
    found: dict[str, list[str]] = {"held": [], "lost": [], "missing": []}
    for one in _distinct(before):
        nonzero = one.readings()[0]
        if nonzero.size and masks.holds(nonzero, 1):
            found[later.state(one, nonzero)].append(one.name)
    return Followed(**{state: tuple(names) for state, names in found.items()})


class _Later:
    """The weights of the graph that was made."""

    def __init__(self, weights: Sequence[StoredWeight]) -> None:
        self._weights = weights
        self._bits: dict[str, tuple[_Bits, ...]] = {}

    def state(self, one: StoredWeight, nonzero: Array) -> str:
        """``held``, ``lost`` or ``missing``."""
        for other in self._weights:
            if not _is_called_like(other, one):
                continue
            readings = other.readings()
            if len(readings) == 1 and readings[0].shape[1] == nonzero.shape[1]:
                return "held" if masks.holds(readings[0], 1) else "lost"
        if nonzero.size - np.count_nonzero(nonzero) < _ENOUGH_ZEROS:
            return "missing"
        found = any(_contains(reading, nonzero) for other in self._weights for reading in self._readings(other))
        return "held" if found else "missing"

    def _readings(self, other: StoredWeight) -> "Iterator[Array]":
        """As packed bits in memory, since many weights may be looked for in it."""
        if other.name not in self._bits:
            self._bits[other.name] = tuple(_Bits.of(reading) for reading in other.readings())
        return (bits.unpacked() for bits in self._bits[other.name])


@dataclass(frozen=True)
class _Bits:
    packed: Array
    shape: tuple[int, int]

    @classmethod
    def of(cls, nonzero: Array) -> "_Bits":
        return cls(np.packbits(nonzero), (nonzero.shape[0], nonzero.shape[1]))

    def unpacked(self) -> Array:
        size = self.shape[0] * self.shape[1]
        return np.unpackbits(self.packed, count=size).astype(bool).reshape(self.shape)


def _is_called_like(other: StoredWeight, one: StoredWeight) -> bool:
    same = other.name in (one.name, f"{one.name}{_SUFFIX}") or other.output == one.output
    return same or bool(one.node and other.node == one.node)


def _contains(reading: Array, nonzero: Array) -> bool:
    """Whether some rows of a weight are zero wherever another one is; beyond its terms there is padding alone."""
    rows, terms = nonzero.shape
    if len(reading) < rows or reading.shape[1] < terms or reading[:, terms:].any():
        return False
    cut = reading[:, :terms]
    return any(not (cut[start : start + rows] & ~nonzero).any() for start in range(0, len(cut) - rows + 1, rows))


def _distinct(path: Path) -> Iterator[StoredWeight]:
    seen: set[str] = set()
    for one in stored.find(graph.load(path)):
        if one.name not in seen:
            seen.add(one.name)
            yield one


def _facts(one: StoredWeight) -> WeightFacts:
    nonzero = one.readings()[0]
    return WeightFacts(
        name=one.name,
        operator=one.operator,
        node=one.node,
        elements=int(nonzero.size),
        zeros=int(nonzero.size - np.count_nonzero(nonzero)),
        two_of_four=masks.holds(nonzero, 1),
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{', '.join(names[:_NAMES])}{more}"
