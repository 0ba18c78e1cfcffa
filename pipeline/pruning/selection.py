"""Which units go, in which order: a list of cuts, of which a beginning is taken.

A cut takes one group from one allowed number of units to the next lower one. Cuts are ordered by what they cost
(``global``) or so that all groups shrink alike (``uniform``); groups of one size do not shrink at the same time, so
that a target is met closely even where channels go in multiples. Cuts to finer multiples come after all others: they
are taken only where the target is not met without them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from enginesmith.pipeline.pruning.structure import Group

LEAST_SHARE = 0.1
"""What a global ranking leaves of each group at least: one of no width cuts the model in two."""


@dataclass(frozen=True)
class Cut:
    """One group's way to fewer units: which go, and after all earlier cuts how many stay."""

    root: str
    gone: tuple[int, ...]
    left: int
    fineness: int = 0
    """How many times the multiple was halved that ``left`` is at."""


def halved(multiple_of: int) -> Iterator[int]:
    """The multiple, half of it, and so on to one."""
    while multiple_of > 1:
        yield multiple_of
        multiple_of //= 2
    yield 1


def steps_of(group: Group, multiple_of: int) -> tuple[int, ...]:
    """Units that go at a time: as many as make the multiple, then half of it, and so on to one; heads go singly."""
    if group.unit == "head":
        return (1,)
    each = group.width // group.units
    return tuple(multiple // math.gcd(multiple, each) for multiple in halved(multiple_of))


def cuts_of(group: Group, order: Sequence[int], multiple_of: int, least: int) -> list[Cut]:
    """Every cut of one group, units going in ``order``, until no more than ``least`` would stay."""
    cuts: list[Cut] = []
    left = group.units
    for fineness, step in enumerate(steps_of(group, multiple_of)):
        while (lower := (left - 1) // step * step) >= max(least, 1):
            cuts.append(Cut(group.root, tuple(order[group.units - left : group.units - lower]), lower, fineness))
            left = lower
    return cuts


def least_of(group: Group, uniform: bool) -> int:
    """Units that stay of a group whatever the target is."""
    return 1 if uniform else math.ceil(group.units * LEAST_SHARE)


def ordered(groups: Sequence[Group], importance: Mapping[str, Tensor], multiple_of: int, uniform: bool) -> list[Cut]:
    """All cuts of all groups, those that go first in front."""
    rated: list[tuple[int, float, int, int, Cut]] = []
    for index, group in enumerate(groups):
        values = importance[group.root]
        order = values.argsort(stable=True).tolist()
        worst = 0.0
        for position, cut in enumerate(cuts_of(group, order, multiple_of, least_of(group, uniform))):
            if uniform:  # where the number of units that should stay is nearer to this cut's than to the one before
                before = cut.left + len(cut.gone)
                rating = 1 - (before + cut.left) / 2 / group.units
            else:
                rating = worst = max(worst, float(values[list(cut.gone)].mean()))
            rated.append((cut.fineness, rating, position, index, cut))
    return [cut for *_, cut in sorted(rated, key=lambda one: one[:4])]


def removed(cuts: Sequence[Cut]) -> dict[str, tuple[int, ...]]:
    """Units that are gone after these cuts, by root."""
    gone: dict[str, list[int]] = {}
    for cut in cuts:
        gone.setdefault(cut.root, []).extend(cut.gone)
    return {root: tuple(sorted(units)) for root, units in gone.items()}


def nearest(count: int, left: Callable[[int], float], wanted: float) -> int:
    """How many of ``count`` cuts come closest to a share ``wanted``; ``left(n)`` falls with the number of cuts."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left(middle) > wanted else (low, middle)
    return min((low, high), key=lambda one: abs(left(one) - wanted))


def next_ones(cuts: Sequence[Cut], count: int) -> list[Cut]:
    """After the first ``count`` cuts, each group's next one that is at the same multiple as the next of all."""
    found: dict[str, Cut] = {}
    for cut in cuts[count:]:
        found.setdefault(cut.root, cut)
    return [cut for cut in found.values() if cut.fineness == cuts[count].fineness]
