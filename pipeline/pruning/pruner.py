"""From a module and a target to a smaller module and what was done to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.pruning import attention, grouping, multihead, proof, protection, ranking, selection
from enginesmith.pipeline.pruning.counting import Cost, Counter
from enginesmith.pipeline.pruning.cutting import Parts, Removal, cut
from enginesmith.pipeline.pruning.facts import Kept
from enginesmith.pipeline.pruning.goal import Goal
from enginesmith.pipeline.pruning.options import PruneOptions
from enginesmith.pipeline.pruning.record import Before, Surgery
from enginesmith.pipeline.pruning.structure import Group
from enginesmith.pipeline.pruning.target import Target
from enginesmith.pipeline.pruning.tracing import Run, trace

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
    replaced: multihead.Replaced = field(default_factory=multihead.Replaced)
    """What stood where there is the form of attention now that can lose heads."""


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
            "give 30% of the channels, macs=-50% or params=-50%",
        )
    found = find(model, run, options, progress)
    before, history = Before(model), list[Kept]()
    counter = Counter(model, run)
    first = counter.cost()
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
        goal = Goal(model, counter, target, groups, first, width, now)
        last = step == options.steps
        for multiple in selection.halved(options.multiple_of):
            cuts = selection.ordered(groups, importance, multiple, options.scope == "uniform")
            removals = goal.choose(cuts, wanted)
            if not last or goal.is_near(removals, wanted):  # what a step misses, the next ones make up for
                break
        if last:
            notes = goal.held(cuts, removals, wanted, options.multiple_of, {one.root for one in history})
        history += [_kept(removal, step, options.importance) for removal in removals]
        cut(model, removals)
        now -= sum(len(removal.group.channels[unit]) for removal in removals for unit in removal.units)
    surgery = before.difference(model, tuple(history), tuple(found.replaced.attention))
    return Pruned(surgery, first, counter.cost(), width, now, whole, notes)


def find(model: nn.Module, run: Run, options: PruneOptions, progress: Progress = lambda _: None) -> Found:
    """The groups of a module that can lose units; each is tried.

    Attention of torch.nn is replaced where its heads may go; the module answers as before.

    Raises:
        ModelError: the module's values cannot be followed, or nothing can go.
        UsageError: a protected layer is not there.
    """
    replaced = multihead.replace(model, multihead.replaceable(model)) if options.heads else multihead.Replaced()
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
    used = {parts.modules[path] for group in good for path in group.modules if path in parts.modules}
    return Found(tuple(good), whole, replaced.put_back(model, used))


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
    return Found(tuple(groups), before.whole, before.replaced)


def _traced(model: nn.Module, run: Run) -> tuple[list[Group], dict[str, str]]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    parts = Parts(model)
    graph, following = trace(model, run)
    groups, whole = grouping.groups(graph, parts)
    paths = {module: path for path, module in reversed(parts.modules.items())}
    whole |= {paths[module]: why for module, why in following.unfollowed(lambda one: one in graph.module2node)}
    order = {path: index for index, path in enumerate(parts.modules)}
    return sorted(groups, key=lambda group: order[group.root]), whole


class _Heads:
    """What groups with products of two values are made of; the way that is right for one is taken for its kind."""

    def __init__(self, model: nn.Module, run: Run, parts: Parts, wanted: bool) -> None:
        self._model, self._run, self._parts, self._wanted = model, run, parts, wanted
        self._known: dict[tuple[str, ...], int] = {}

    def made(self, group: Group) -> Group | str:
        """The group in heads, where it is attention; or why it stays whole."""
        if not attention.is_attention(group):
            return group
        ways = attention.of_heads(group, self._parts)
        if not self._wanted or not ways:
            return "attention heads are to stay" if ways else "it is attention of one head, or of an unknown number"
        kind = (*(type(self._parts.modules[path]).__name__ for path in group.modules), str(group.width), str(len(ways)))
        if kind in self._known:
            return ways[self._known[kind]]
        whys = []
        for index, way in enumerate(ways):
            why = proof.objection(self._model, self._run, [way])
            if not why:
                self._known[kind] = index
                return way
            whys.append(why)
        return f"its heads cannot go one by one: {whys[0]}"


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
