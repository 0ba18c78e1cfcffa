"""Which units go, in which order: a list of cuts, of which a beginning is taken.

A cut takes one group from one allowed number of units to the next lower one. Cuts are ordered by what they cost
(``global``) or so that all groups shrink alike (``uniform``); groups of one size do not shrink at the same time, so
that a target is met closely even where channels go in multiples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from enginesmith.pipeline.pruning.structure import Group

LEAST_SHARE = 0.1
"""What a global ranking leaves of each group at least: one of no width cuts the model in two."""
_FINEST = 4
"""Multiples may be no more than one in so many of a group's channels."""


@dataclass(frozen=True)
class Cut:
    """One group's way to fewer units: which go, and after all earlier cuts how many stay."""

    root: str
    gone: tuple[int, ...]
    left: int


def step_of(group: Group, multiple_of: int) -> int:
    """Units that go at a time: the multiple, halved while it is more than a quarter of the group's channels."""
    if group.unit == "head":
        return 1
    multiple = multiple_of
    while multiple > 1 and multiple * _FINEST > group.width:
        multiple = max(1, multiple // 2)
    each = group.width // group.units
    return multiple // math.gcd(multiple, each)


def cuts_of(group: Group, order: Sequence[int], multiple_of: int, least: int) -> list[Cut]:
    """Every cut of one group, units going in ``order``, until no more than ``least`` would stay."""
    cuts: list[Cut] = []
    step, done, left = step_of(group, multiple_of), 0, group.units
    while True:
        lower = (left - 1) // step * step
        if lower < max(least, 1):
            return cuts
        cuts.append(Cut(group.root, tuple(order[done : group.units - lower]), lower))
        done, left = group.units - lower, lower


def ordered(groups: Sequence[Group], importance: Mapping[str, Tensor], multiple_of: int, uniform: bool) -> list[Cut]:
    """All cuts of all groups, those that go first in front."""
    rated: list[tuple[float, int, int, Cut]] = []
    for index, group in enumerate(groups):
        values = importance[group.root]
        order = values.argsort(stable=True).tolist()
        least = 1 if uniform else math.ceil(group.units * LEAST_SHARE)
        worst = 0.0
        for position, cut in enumerate(cuts_of(group, order, multiple_of, least)):
            if uniform:  # where the number of units that should stay is nearer to this cut's than to the one before
                before = cut.left + len(cut.gone)
                rating = 1 - (before + cut.left) / 2 / group.units
            else:
                rating = worst = max(worst, float(values[list(cut.gone)].mean()))
            rated.append((rating, position, index, cut))
    return [cut for *_, cut in sorted(rated, key=lambda one: one[:3])]


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
