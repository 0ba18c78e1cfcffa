"""A target, in numbers of a module and of its groups: which cuts come nearest to it, and what cannot be met."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import EmptyLayer, UsageError
from enginesmith.pipeline.passes.prune.dependency_graph import by_operators
from enginesmith.pipeline.passes.prune.options import PruneTarget, spell
from enginesmith.pipeline.passes.prune.surgery import Group, Removal, cut_for_now

# Which units go, in which order: a list of cuts, of which a beginning is taken.
#
# A cut takes one group from one allowed number of units to the next lower one. Cuts are ordered by what they cost
# (``global``) or so that all groups shrink alike (``uniform``); groups of one size do not shrink at the same time, so
# that a target is met closely even where channels go in multiples. Cuts to finer multiples come after all others: they
# are taken only where the target is not met without them.

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
    """Return the multiple, half of it, and so on to one."""
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
    """List every cut of one group, units going in ``order``, until no more than ``least`` would stay."""
    cuts: list[Cut] = []
    left = group.units
    for fineness, step in enumerate(steps_of(group, multiple_of)):
        while (lower := (left - 1) // step * step) >= max(least, 1):
            cuts.append(Cut(group.root, tuple(order[group.units - left : group.units - lower]), lower, fineness))
            left = lower
    return cuts


def least_of(group: Group, uniform: bool) -> int:
    """Return units that stay of a group whatever the target is."""
    return 1 if uniform else math.ceil(group.units * LEAST_SHARE)


def ordered(groups: Sequence[Group], importance: Mapping[str, Tensor], multiple_of: int, uniform: bool) -> list[Cut]:
    """Order all cuts of all groups, those that go first in front."""
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
    """List units that are gone after these cuts, by root."""
    gone: dict[str, list[int]] = {}
    for cut in cuts:
        gone.setdefault(cut.root, []).extend(cut.gone)
    return {root: tuple(sorted(units)) for root, units in gone.items()}


def nearest(count: int, left: Callable[[int], float], wanted: float) -> int:
    """Find how many of ``count`` cuts come closest to a share ``wanted``; ``left(n)`` falls with n."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left(middle) > wanted else (low, middle)
    return min((low, high), key=lambda one: abs(left(one) - wanted))


def next_ones(cuts: Sequence[Cut], count: int) -> list[Cut]:
    """List, after the first ``count`` cuts, each group's next one at the same multiple as the next of all."""
    found: dict[str, Cut] = {}
    for cut in cuts[count:]:
        found.setdefault(cut.root, cut)
    return [cut for cut in found.values() if cut.fineness == cuts[count].fineness]


# What a module costs: multiply-accumulates of one run, and parameters.
#
# Operations are counted where PyTorch dispatches them, by the formulas of ``torch.utils.flop_counter``: convolutions,
# matrix products and attention, in whatever way the module calls them; a multiply-add is two of its FLOPs. Recurrent
# layers are no products for it and count as 0.


@dataclass(frozen=True)
class Cost:
    """MACs of one run on the example, and the number of parameters."""

    macs: int
    parameters: int


class Counter:
    """Counts what ``run`` does, which calls ``model`` once, as often as the model's sizes change.

    Where the model runs on tensors without values too, only sizes are worked out, and the counts are the same.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        self._model, self._run = model, run
        self._real = _macs(run, fake=False)
        self._fake = self._can_fake()

    def _can_fake(self) -> bool:
        try:
            return _macs(self._run, fake=True) == self._real
        except Exception:  # noqa: BLE001 - a forward that looks at values raises whatever it likes without them
            return False

    def cost(self) -> Cost:
        """Return the cost as the model is now."""
        return Cost(_macs(self._run, self._fake), self.parameters())

    def parameters(self) -> int:
        """Return numbers in parameters; shared ones count once."""
        return sum(value.numel() for value in self._model.parameters())


def _macs(run: Callable[[], Any], fake: bool) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    without_values = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    plain = (by_operators(), sdpa_kernel(SDPBackend.MATH))
    with torch.no_grad(), without_values, plain[0], plain[1], FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops()) // 2


TOLERANCE = 0.02
"""How far what is left may be from the target."""
_NEAR = 0.25
"""Of what is to go: a target that is missed by more is worth narrower multiples."""
_SHOWN = 3
_WHAT = {"ratio": "channels", "macs": "MACs", "params": "parameters"}


class PruneBudget:
    """What is aimed at in one step, with the groups as they are now.

    ``first`` is what the whole module cost, ``width`` its channels in groups, and ``now`` those that are left.
    """

    def __init__(
        self,
        model: nn.Module,
        counter: Counter,
        target: PruneTarget,
        groups: Sequence[Group],
        first: Cost,
        width: int,
        now: int,
    ) -> None:
        self._model, self._counter, self._target, self._first = model, counter, target, first
        self._groups = {group.root: group for group in groups}
        self._width, self._now = width, now

    def choose(self, cuts: Sequence[Cut], wanted: float) -> list[Removal]:
        """Choose what is removed for ``wanted`` of the quantity to be left, as near as cuts come."""
        known: dict[int, float] = {}

        def left(count: int) -> float:
            if count not in known:
                known[count] = self.left(self._removals(cuts[:count]))
            return known[count]

        count = nearest(len(cuts), left, wanted)
        chosen = self._removals(cuts[:count])
        if abs(left(count) - wanted) <= TOLERANCE:
            return chosen
        begun = count if left(count) > wanted else max(count - 1, 0)
        others = [chosen] + [self._removals([*cuts[:begun], one]) for one in next_ones(cuts, begun)]
        return min(others, key=lambda one: abs(self.left(one) - wanted))

    def left(self, removals: Sequence[Removal]) -> float:
        """Return the share of the target's quantity that is left without these."""
        if self._target.kind == "ratio":
            gone = sum(len(one.group.channels[unit]) for one in removals for unit in one.units)
            return (self._now - gone) / self._width
        with cut_for_now(self._model, removals):
            if self._target.kind == "params":
                return self._counter.parameters() / max(self._first.parameters, 1)
            return self._counter.cost().macs / max(self._first.macs, 1)

    def is_near(self, removals: Sequence[Removal], wanted: float) -> bool:
        """Tell whether what is left is near enough to the target for widths to stay at their multiple."""
        return abs(self.left(removals) - wanted) <= max(TOLERANCE, _NEAR * (1 - wanted))

    def held(
        self,
        cuts: Sequence[Cut],
        removals: Sequence[Removal],
        wanted: float,
        multiple_of: int,
        before: Collection[str] = (),
    ) -> tuple[str, ...]:
        """Note widths that are no multiples, and a target that is not met: cuts may be too coarse.

        ``before`` are the roots of groups that lost channels in earlier steps.

        Raises:
            UsageError: a layer would have to be emptied to meet it.
        """
        what = _WHAT[self._target.kind]
        least = self.left(self._removals(cuts))
        if least - wanted > min(TOLERANCE, wanted):  # a share of next to nothing is not met by a point more
            raise self._would_empty(cuts, least)
        found = self.left(removals)
        notes = list(self._finer(removals, multiple_of, before))
        if abs(found - wanted) > TOLERANCE:
            notes.append(
                f"{found:.1%} of the {what} are left, not {wanted:.1%}: channels go in multiples; "
                "a smaller --multiple-of may come nearer"
            )
        return tuple(notes)

    def _would_empty(self, cuts: Sequence[Cut], least: float) -> UsageError:
        last = {cut.root: index for index, cut in enumerate(cuts)}
        root = min(self._groups, key=lambda one: last.get(one, -1))
        group = self._groups[root]
        stay = min((cut.left for cut in cuts if cut.root == root), default=group.units)
        most = spell(self._target.kind, math.floor((1 - least) * 1000) / 1000)
        return EmptyLayer(
            f"--prune {self._target} would empty a layer, {root} first, of whose {group.units} {group.unit}s "
            f"{stay} at least {'stays' if stay == 1 else 'stay'}: {most} of the {_WHAT[self._target.kind]} "
            "is the most that can be removed",
            "ask for less, or protect fewer layers",
        )

    def _finer(self, removals: Sequence[Removal], multiple_of: int, before: Collection[str]) -> list[str]:
        """Name layers that lost channels, in this step or ``before``, and whose width is no multiple now."""
        gone = {one.group.root: sum(len(one.group.channels[unit]) for unit in one.units) for one in removals}
        found = [
            f"{root} ({width})"
            for root, group in self._groups.items()
            if group.unit == "channel"
            and (root in gone or root in before)
            and (width := group.width - gone.get(root, 0)) % multiple_of
        ]
        if not found:
            return []
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return [f"the target needs widths that are no multiples of {multiple_of}: {', '.join(found[:_SHOWN])}{more}"]

    def _removals(self, cuts: Sequence[Cut]) -> list[Removal]:
        gone = removed(cuts)
        return [Removal(self._groups[root], gone[root]) for root in self._groups if root in gone]
