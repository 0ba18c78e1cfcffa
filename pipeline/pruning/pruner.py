"""From a module and a target to a smaller module and what was done to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.pruning import attention, grouping, proof, protection, ranking, selection
from enginesmith.pipeline.pruning.counting import Cost, Counter
from enginesmith.pipeline.pruning.cutting import Parts, Removal, cut, cut_for_now
from enginesmith.pipeline.pruning.options import PruneOptions
from enginesmith.pipeline.pruning.record import Before, Kept, Surgery
from enginesmith.pipeline.pruning.structure import Group
from enginesmith.pipeline.pruning.target import Target
from enginesmith.pipeline.pruning.tracing import Run, trace

TOLERANCE = 0.02
"""How far what is left may be from the target."""
_SHOWN = 4

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Pruned:
    """What was done: sizes and history, the cost before and after, and what stayed whole for which reason."""

    surgery: Surgery
    before: Cost
    after: Cost
    channels_before: int
    channels_after: int
    whole: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """The groups of a module that can lose units, and why others cannot, by root."""

    groups: tuple[Group, ...]
    whole: dict[str, str]


def prune(
    model: nn.Module,
    run: Run,
    target: Target,
    options: PruneOptions,
    *,
    seed: int = 0,
    gradients: Callable[[], None] | None = None,
    progress: Progress = lambda _: None,
) -> Pruned:
    """Make a module smaller, in place.

    ``run`` calls it on its example; ``gradients`` leaves those of a loss in its parameters, which ``taylor`` needs.

    Raises:
        ModelError: its values cannot be followed, or nothing in it can go.
        UsageError: the target cannot be met, or a protected layer is not there.
    """
    if target.kind == "latency":
        raise UsageError(
            f"--prune {target} needs an engine to be measured on, and there is none here",
            "give macs=, params= or a share of channels",
        )
    before, history = Before(model), list[Kept]()
    counter = Counter(model, run)
    first = counter.cost()
    found = find(model, run, options, progress)
    width = sum(group.width for group in found.groups)
    whole, now = dict(found.whole), width
    notes: tuple[str, ...] = ()
    for step in range(1, options.steps + 1):
        if step > 1:
            found = again(model, run, found)
        if gradients is not None:
            progress("collecting gradients")
            gradients()
        importance, none = ranking.rank(found.groups, options.importance, seed)
        whole |= none
        groups = [group for group in found.groups if group.root in importance]
        _hold_any(groups, whole)
        wanted = 1 - (1 - target.left) * step / options.steps
        progress(f"choosing what goes, step {step} of {options.steps}")
        goal = _Goal(model, counter, target, groups, first, width, now)
        cuts = selection.ordered(groups, importance, options.multiple_of, options.scope == "uniform")
        removals = goal.choose(cuts, wanted)
        if step == options.steps:
            notes = goal.held(cuts, removals, wanted)
        history += [_kept(removal, step, options.importance) for removal in removals]
        cut(model, removals)
        now -= sum(len(removal.group.channels[unit]) for removal in removals for unit in removal.units)
    return Pruned(before.difference(model, tuple(history)), first, counter.cost(), width, now, whole, notes)


def find(model: nn.Module, run: Run, options: PruneOptions, progress: Progress = lambda _: None) -> Found:
    """The groups of a module that can lose units; each is tried.

    Raises:
        ModelError: the module's values cannot be followed, or nothing can go.
        UsageError: a protected layer is not there.
    """
    progress("following the model's values")
    traced, whole = _traced(model, run)
    parts = Parts(model)
    kept = protection.protected(traced, [*parts.modules, *parts.canonical], options.protect)
    whole |= kept
    groups, heads = [], _Heads(model, run, parts, options.heads)
    for group in traced:
        if group.root in kept:
            continue
        made = heads.made(group)
        if isinstance(made, str):
            whole[group.root] = made
        else:
            groups.append(made)
    progress(f"trying to take channels out of {len(groups)} groups")
    good, bad = proof.proven(model, run, groups)
    whole |= bad
    _hold_any(good, whole)
    return Found(tuple(good), whole)


def again(model: nn.Module, run: Run, before: Found) -> Found:
    """The same groups of a module that was cut since then."""
    traced, _ = _traced(model, run)
    parts = Parts(model)
    known = {group.root: group for group in before.groups}
    groups = []
    for group in traced:
        if (old := known.get(group.root)) is None:
            continue
        ways = attention.of_heads(group, parts) if old.unit == "head" else (group,)
        names = {(one.module, one.name) for one in old.attributes}
        groups += [way for way in ways if {(one.module, one.name) for one in way.attributes} == names][:1]
    return Found(tuple(groups), before.whole)


def _traced(model: nn.Module, run: Run) -> tuple[list[Group], dict[str, str]]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    parts = Parts(model)
    groups, whole = grouping.groups(trace(model, run), parts)
    order = {path: index for index, path in enumerate(parts.modules)}
    return sorted(groups, key=lambda group: order[group.root]), whole


class _Heads:
    """What groups with products of two values are made of; what is found of one holds for others of its kind."""

    def __init__(self, model: nn.Module, run: Run, parts: Parts, wanted: bool) -> None:
        self._model, self._run, self._parts, self._wanted = model, run, parts, wanted
        self._known: dict[tuple[str, ...], int | str] = {}

    def made(self, group: Group) -> Group | str:
        """The group in heads, where it is attention; or why it stays whole."""
        if not attention.is_attention(group):
            return group
        ways = attention.of_heads(group, self._parts)
        if not self._wanted or not ways:
            return "attention heads are to stay" if ways else "it is attention of one head, or of an unknown number"
        kind = (*(type(self._parts.modules[path]).__name__ for path in group.modules), str(group.width), str(len(ways)))
        if kind not in self._known:
            self._known[kind] = self._right(ways)
        index = self._known[kind]
        return index if isinstance(index, str) else ways[index]

    def _right(self, ways: Sequence[Group]) -> int | str:
        why = ""
        for index, way in enumerate(ways):
            why = proof.objection(self._model, self._run, [way])
            if not why:
                return index
        return f"its heads cannot go one by one: {why}"


class _Goal:
    """A target, in numbers of a module and of its groups."""

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

        return self._removals(cuts[: selection.nearest(len(cuts), left, wanted)])

    def left(self, removals: Sequence[Removal]) -> float:
        """The share of the target's quantity that is left without these."""
        if self._target.kind == "ratio":
            gone = sum(len(one.group.channels[unit]) for one in removals for unit in one.units)
            return (self._now - gone) / self._width
        with cut_for_now(self._model, removals):
            if self._target.kind == "params":
                return self._counter.parameters() / max(self._first.parameters, 1)
            return self._counter.cost().macs / max(self._first.macs, 1)

    def held(self, cuts: Sequence[selection.Cut], removals: Sequence[Removal], wanted: float) -> tuple[str, ...]:
        """What to know where the target is not met: cuts may be too coarse for it.

        Raises:
            UsageError: a layer would have to be emptied to meet it.
        """
        what = {"ratio": "channels", "macs": "MACs", "params": "parameters"}[self._target.kind]
        least = self.left(self._removals(cuts))
        if least - wanted > TOLERANCE:
            fewest = min(self._groups.values(), key=lambda group: group.units)
            raise UsageError(
                f"--prune {self._target} would empty a layer: {least:.1%} of the {what} are the least that can be "
                f"left; the smallest group is {fewest.root} with {fewest.units} {fewest.unit}s",
                "ask for less, protect fewer layers, or take a smaller --multiple-of",
            )
        found = self.left(removals)
        if abs(found - wanted) <= TOLERANCE:
            return ()
        return (
            f"{found:.1%} of the {what} are left, not {wanted:.1%}: channels go in multiples; take fewer at a time",
        )

    def _removals(self, cuts: Sequence[selection.Cut]) -> list[Removal]:
        gone = selection.removed(cuts)
        return [Removal(self._groups[root], gone[root]) for root in self._groups if root in gone]


def _kept(removal: Removal, step: int, importance: str) -> Kept:
    group, gone = removal.group, set(removal.units)
    kept = tuple(unit for unit in range(group.units) if unit not in gone)
    return Kept(
        step=step,
        root=group.root,
        members=group.modules,
        unit=group.unit,
        before=group.units,
        after=len(kept),
        kept=kept,
        importance=importance,
    )


def _hold_any(groups: Sequence[Group], whole: Mapping[str, str]) -> None:
    if groups:
        return
    by_reason: dict[str, list[str]] = {}
    for root, why in whole.items():
        by_reason.setdefault(why, []).append(root)
    shown = "; ".join(f"{', '.join(roots[:3])}: {why}" for why, roots in list(by_reason.items())[:_SHOWN])
    raise ModelError(
        f"no layer of this model can lose channels ({shown or 'it has no convolution and no linear layer'})",
        "`sparsify` sets weights to zero without changing sizes",
    )
