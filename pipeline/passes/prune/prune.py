"""From a module and a target to a smaller module and what was done to it."""

import contextlib
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.frameworks.records import PrunedGroup
from enginesmith.pipeline.frameworks.torch import surgery
from enginesmith.pipeline.frameworks.torch.surgery import Before, Surgery
from enginesmith.pipeline.passes.prune import budget
from enginesmith.pipeline.passes.prune.budget import Cost, Counter, PruneBudget
from enginesmith.pipeline.passes.prune.dependency_graph import Run, failure, trace
from enginesmith.pipeline.passes.prune.groups import find_groups, is_attention, split_into_heads, through
from enginesmith.pipeline.passes.prune.importance import rate_units
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.prune.surgery import Group, Parts, Removal, cut, cut_for_now, mask_units

# Whether taking units away does what it should: the same as if no layer read them.
#
# A module that is cut is compared, on the example, with the whole one in which every weight that reads the units is 0.
# The two have to answer alike. That finds what a dependency graph cannot see: sizes that are written in a
# forward, heads
# that are split anew, channels that are averaged or that leave the model.
#
# Normalisations over channels see the units that others no longer read; for the comparison those among the layers that
# are cut scale by one number each.

_SHARE = 4
"""One unit in so many is taken away."""
_TOLERANCE = 1e-3
"""Of the largest number that comes out; single precision adds up in another order after a cut."""
_MIXING = (nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


def keep_verified(model: nn.Module, run: Run, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
    """Return the groups that can lose units, and why others cannot, by root."""
    mixing = [group for group in groups if _mixes(model, group)]
    plain = [group for group in groups if group not in mixing]
    good, bad = _halved(model, run, plain)
    for group in mixing:
        more, worse = _halved(model, run, [group])
        good += more
        bad |= worse
    order = {group.root: index for index, group in enumerate(groups)}
    return sorted(good, key=lambda group: order[group.root]), bad


def _halved(model: nn.Module, run: Run, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
    """Try all at once; where that fails, each half."""
    if not groups:
        return [], {}
    why = verify_masking(model, run, groups)
    if not why:
        return list(groups), {}
    if len(groups) == 1:
        return [], {groups[0].root: f"{why}{through(groups[0].traced)}"}
    middle = len(groups) // 2
    first, second = _halved(model, run, groups[:middle]), _halved(model, run, groups[middle:])
    return first[0] + second[0], {**first[1], **second[1]}


def verify_masking(model: nn.Module, run: Run, groups: Sequence[Group]) -> str:
    """Explain why these groups cannot lose units together; nothing where they can."""
    removals = [Removal(group, _some(group)) for group in groups]
    with _scaling(model, removals) as norms:
        with mask_units(model, removals):
            expected, why = failure(model, run)
        if why:
            return f"the model does not run: {why}"
        norms.replay()
        with cut_for_now(model, removals):
            given, why = failure(model, run)
    if why:
        return f"the model does not run without some of them: {why}"
    for before, after in zip(expected, given, strict=True):
        if before.shape != after.shape:
            return f"an output becomes {list(after.shape)} instead of {list(before.shape)}"
        if not _alike(before, after):
            return (
                "the model answers differently without channels that no layer reads: its forward counts on their number"
            )
    return ""


def _some(group: Group) -> tuple[int, ...]:
    """Choose some units, in no pattern that the layers' own could fall in with."""
    generator = torch.Generator().manual_seed(group.units)
    drawn = torch.randperm(group.units, generator=generator)[: max(1, group.units // _SHARE)]
    return tuple(sorted(drawn.tolist()))


def _alike(before: Tensor, after: Tensor) -> bool:
    if not before.is_floating_point():
        return torch.equal(before, after)
    finite = before.isfinite()
    if not torch.equal(finite, after.isfinite()):
        return False
    scale = float(before[finite].abs().max()) if finite.any() else 0.0
    return bool(((before - after)[finite].abs() <= _TOLERANCE * scale).all())


def _mixes(model: nn.Module, group: Group) -> bool:
    modules = dict(model.named_modules())
    paths = (*group.modules, *(one.module for one in group.attributes))
    return any(isinstance(modules.get(path), _MIXING) for path in paths)


class _Norms:
    """The numbers that normalisations scaled by, to be used once more in the same order."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self._next: Iterator[Tensor] | None = None

    def replay(self) -> None:
        """Begin to give back."""
        self._next = iter(self.kept)

    def scale(self, x: Tensor) -> Tensor:
        """Choose one number for a whole value."""
        if self._next is not None:
            return next(self._next)
        self.kept.append(x.float().std(unbiased=False).clamp_min(1e-6).to(x.dtype))
        return self.kept[-1]


@contextlib.contextmanager
def _scaling(model: nn.Module, removals: Sequence[Removal]) -> Iterator[_Norms]:
    """Make normalisations that are cut scale by one number within the block."""
    modules, norms, changed = dict(model.named_modules()), _Norms(), []
    paths = {path for one in removals for path in (*one.group.modules, *(a.module for a in one.group.attributes))}
    for path in sorted(paths):
        module = modules.get(path)
        if isinstance(module, _MIXING):
            changed.append((module, vars(module).get("forward")))
            vars(module)["forward"] = _affine(module, norms)
    try:
        yield norms
    finally:
        for module, own in changed:
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


def _affine(module: nn.Module, norms: _Norms) -> Callable[[Tensor], Tensor]:
    last = isinstance(module, nn.LayerNorm)

    def forward(x: Tensor) -> Tensor:
        y = x / norms.scale(x)
        shape = (-1,) if last else (-1, *(1,) * (x.dim() - 2))
        weight, bias = module.weight, module.bias
        if isinstance(weight, Tensor):
            y = y * weight.reshape(shape)
        return y + bias.reshape(shape) if isinstance(bias, Tensor) else y

    return forward


# Layers that people name, whose channels stay.

ASKED_FOR = "it is to stay whole, as was asked for"


def protected(groups: Iterable[Group], modules: Sequence[str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the groups, by root, in which a named layer makes channels or changes them; with the reason.

    A pattern is the path of a module or parameter, which stands for all that is below it too; ``*`` is any part.

    Raises:
        UsageError: a pattern fits nothing in the model.
    """
    known = [path for path in modules if path]
    for pattern in patterns:
        if not any(_fits(path, pattern) for path in known):
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise UsageError(
                f"no layer of the model is called {pattern!r}", f"such as {', '.join(near or known[:3])}; * is any part"
            )
    found = {}
    for group in groups:
        names = {one.tensor.rpartition(".")[0] for one in group.slices if one.side != "reads"}
        names |= {one.tensor for one in group.slices if one.side != "reads"}
        if any(_fits(name, pattern) for name in names for pattern in patterns):
            found[group.root] = ASKED_FOR
    return found


def _fits(path: str, pattern: str) -> bool:
    """Tell whether a path, or a module that it is within, is what a pattern stands for."""
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


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
    replaced: surgery.Replaced = field(default_factory=surgery.Replaced)
    """What stood where there is the form of attention now that can lose heads."""


def prune(
    model: nn.Module,
    run: Run,
    target: PruneTarget,
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
    before, history = Before(model), list[PrunedGroup]()
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
        importance, none = rate_units(found.groups, options.importance, seed)
        whole |= none
        groups = [group for group in found.groups if group.root in importance]
        _hold_any(groups, whole)
        wanted = 1 - (1 - target.left) * step / options.steps
        progress(f"choosing what goes, step {step} of {options.steps}")
        goal = PruneBudget(model, counter, target, groups, first, width, now)
        last = step == options.steps
        for multiple in budget.halved(options.multiple_of):
            cuts = budget.ordered(groups, importance, multiple, options.scope == "uniform")
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
    """Return the groups of a module that can lose units; each is tried.

    Attention of torch.nn is replaced where its heads may go; the module answers as before.

    Raises:
        ModelError: the module's values cannot be followed, or nothing can go.
        UsageError: a protected layer is not there.
    """
    replaced = surgery.replace(model, surgery.replaceable(model)) if options.heads else surgery.Replaced()
    progress("following the model's values")
    traced, whole = _traced(model, run)
    parts = Parts(model)
    kept = protected(traced, [*parts.modules, *parts.canonical], options.protect)
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
    good, bad = keep_verified(model, run, groups)
    whole |= bad
    _hold_any(good, whole)
    used = {parts.modules[path] for group in good for path in group.modules if path in parts.modules}
    return Found(tuple(good), whole, replaced.put_back(model, used))


def again(model: nn.Module, run: Run, before: Found) -> Found:
    """Return the same groups of a module that was cut since then."""
    traced, _ = _traced(model, run)
    parts = Parts(model)
    known = {group.root: group for group in before.groups}
    groups = []
    for group in traced:
        if (old := known.get(group.root)) is None:
            continue
        ways = split_into_heads(group, parts) if old.unit == "head" else (group,)
        names = {(one.module, one.name) for one in old.attributes}
        groups += [way for way in ways if {(one.module, one.name) for one in way.attributes} == names][:1]
    return Found(tuple(groups), before.whole, before.replaced)


def _traced(model: nn.Module, run: Run) -> tuple[list[Group], dict[str, str]]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    parts = Parts(model)
    graph, following = trace(model, run)
    groups, whole = find_groups(graph, parts)
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
        """Return the group in heads, where it is attention; or why it stays whole."""
        if not is_attention(group):
            return group
        ways = split_into_heads(group, self._parts)
        if not self._wanted or not ways:
            return "attention heads are to stay" if ways else "it is attention of one head, or of an unknown number"
        kind = (*(type(self._parts.modules[path]).__name__ for path in group.modules), str(group.width), str(len(ways)))
        if kind in self._known:
            return ways[self._known[kind]]
        whys = []
        for index, way in enumerate(ways):
            why = verify_masking(self._model, self._run, [way])
            if not why:
                self._known[kind] = index
                return way
            whys.append(why)
        return f"its heads cannot go one by one: {whys[0]}"


def _kept(removal: Removal, step: int, importance: str) -> PrunedGroup:
    group, gone = removal.group, set(removal.units)
    kept = tuple(unit for unit in range(group.units) if unit not in gone)
    return PrunedGroup(
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
