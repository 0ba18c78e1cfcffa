"""A target, in numbers of a module and of its groups: which cuts come nearest to it, and what cannot be met."""

import math
from collections.abc import Collection, Sequence

from torch import nn

from enginesmith.pipeline.errors import EmptyLayer, UsageError
from enginesmith.pipeline.pruning import selection
from enginesmith.pipeline.pruning.counting import Cost, Counter
from enginesmith.pipeline.pruning.cutting import Removal, cut_for_now
from enginesmith.pipeline.pruning.structure import Group
from enginesmith.pipeline.pruning.target import Target, spell

TOLERANCE = 0.02
"""How far what is left may be from the target."""
_NEAR = 0.25
"""Of what is to go: a target that is missed by more is worth narrower multiples."""
_SHOWN = 3
_WHAT = {"ratio": "channels", "macs": "MACs", "params": "parameters"}


class Goal:
    """What is aimed at in one step, with the groups as they are now.

    ``first`` is what the whole module cost, ``width`` its channels in groups, and ``now`` those that are left.
    """

    def __init__(
        self,
        model: nn.Module,
        counter: Counter,
        target: Target,
        groups: Sequence[Group],
        first: Cost,
        width: int,
        now: int,
    ) -> None:
        self._model, self._counter, self._target, self._first = model, counter, target, first
        self._groups = {group.root: group for group in groups}
        self._width, self._now = width, now

    def choose(self, cuts: Sequence[selection.Cut], wanted: float) -> list[Removal]:
        """What goes for ``wanted`` of the target's quantity to be left, as near as cuts come."""
        known: dict[int, float] = {}

        def left(count: int) -> float:
            if count not in known:
                known[count] = self.left(self._removals(cuts[:count]))
            return known[count]

        count = selection.nearest(len(cuts), left, wanted)
        chosen = self._removals(cuts[:count])
        if abs(left(count) - wanted) <= TOLERANCE:
            return chosen
        begun = count if left(count) > wanted else max(count - 1, 0)
        others = [chosen] + [self._removals([*cuts[:begun], one]) for one in selection.next_ones(cuts, begun)]
        return min(others, key=lambda one: abs(self.left(one) - wanted))

    def left(self, removals: Sequence[Removal]) -> float:
        """The share of the target's quantity that is left without these."""
        if self._target.kind == "ratio":
            gone = sum(len(one.group.channels[unit]) for one in removals for unit in one.units)
            return (self._now - gone) / self._width
        with cut_for_now(self._model, removals):
            if self._target.kind == "params":
                return self._counter.parameters() / max(self._first.parameters, 1)
            return self._counter.cost().macs / max(self._first.macs, 1)

    def is_near(self, removals: Sequence[Removal], wanted: float) -> bool:
        """Whether what is left is near enough to the target for widths to stay at their multiple."""
        return abs(self.left(removals) - wanted) <= max(TOLERANCE, _NEAR * (1 - wanted))

    def held(
        self,
        cuts: Sequence[selection.Cut],
        removals: Sequence[Removal],
        wanted: float,
        multiple_of: int,
        before: Collection[str] = (),
    ) -> tuple[str, ...]:
        """What to know of widths that are no multiples, and of a target that is not met: cuts may be too coarse.

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

    def _would_empty(self, cuts: Sequence[selection.Cut], least: float) -> UsageError:
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
        """Layers that lost channels, in this step or ``before``, and whose width is no multiple now."""
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

    def _removals(self, cuts: Sequence[selection.Cut]) -> list[Removal]:
        gone = selection.removed(cuts)
        return [Removal(self._groups[root], gone[root]) for root in self._groups if root in gone]
