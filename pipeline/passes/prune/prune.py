"""Prune a module to a target, and verify that taking units away does as it should: as if no layer read them.

A module that is cut is compared, on the example, with the whole one in which every weight that reads the units is 0.
The two have to answer alike. That finds errors that a dependency graph cannot see: sizes that are written in a forward,
heads that are split anew, channels that are averaged or that leave the model.

Normalizations over channels see the units that others no longer read; for the comparison those among the layers that
are cut scale by one number each.
"""

import contextlib
import difflib
import fnmatch
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.frameworks.records import PrunedGroup
from enginesmith.pipeline.frameworks.torch import surgery
from enginesmith.pipeline.passes.prune import selection
from enginesmith.pipeline.passes.prune.dependency_graph import Run, run_or_explain, trace
from enginesmith.pipeline.passes.prune.groups import find_groups, is_attention, split_into_heads, through
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.prune.selection import Cost, Counter, PruneBudget
from enginesmith.pipeline.passes.prune.surgery import Group, Parts, Removal, cut, cut_for_now, mask_units
from enginesmith.pipeline.units import group_values

_SHARE = 4
"""One unit in so many is taken away to verify a group."""
_TOLERANCE = 1e-3
"""Tolerated share of the largest number that comes out; single precision adds up in another order after a cut."""
_ROUNDING = 1e-5
"""Share of all that a layer adds up, below which a difference says nothing."""
_DIFFERENT = "the model answers differently without channels that no layer reads: its forward counts on their number"
_MIXING = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
_SHOWN = 4

Progress = Callable[[str], None]


def keep_verified(model: nn.Module, run: Run, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
    """Return the groups that can lose units, and why others cannot, by root."""
    modules = dict(model.named_modules())
    mixing = [group for group in groups if any(isinstance(modules.get(path), _MIXING) for path in group.paths)]
    bad = _try_halves(model, run, [group for group in groups if group not in mixing])
    for group in mixing:
        bad |= _try_halves(model, run, [group])
    good = [group for group in groups if group.root not in bad]
    bad |= _try_halves(
        model, run, [group for group in good if group in mixing], [group for group in good if group not in mixing]
    )
    return [group for group in good if group.root not in bad], bad


def _try_halves(model: nn.Module, run: Run, groups: Sequence[Group], beside: Sequence[Group] = ()) -> dict[str, str]:
    """Try all at once; where that fails, each half. Explain, by root, why groups cannot lose units.

    The others can lose units together with those ``beside`` them.
    """
    together = [*beside, *groups]
    if not groups or not (why := _find_overlap(together) or verify_masking(model, run, together)):
        return {}
    if len(groups) == 1:
        return {groups[0].root: f"{why}{through(groups[0].traced)}"}
    first, second = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    bad = _try_halves(model, run, first, beside)
    good = [group for group in first if group.root not in bad]
    return bad | _try_halves(model, run, second, [*beside, *good])


def _find_overlap(groups: Sequence[Group]) -> str:
    """Find a group that shares a channel of a tensor with one before it, and explain it.

    Each can lose units, and yet all together may empty a layer, or take a channel that another one still has.
    """
    owners: dict[tuple[str, int, int], str] = {}
    for group in groups:
        held = {(part.tensor, part.axis, index) for part in group.slices for unit in part.indices for index in unit}
        if shared := held & owners.keys():
            name, _, _ = first = min(shared)
            return f"it shares channels of {name} with {owners[first]}"
        owners |= dict.fromkeys(held, group.root)
    return ""


def verify_masking(model: nn.Module, run: Run, groups: Sequence[Group]) -> str:
    """Explain why these groups cannot lose units together; nothing where they can.

    Every unit is taken away once, in three parts: a forward may depend on few, as one with a maximum does, or one that
    drops the first channel.
    """
    for parts in zip(*map(_draw, groups), strict=True):
        removals = [Removal(group, units) for group, units in zip(groups, parts, strict=True) if units]
        if removals and (why := _verify_removals(model, run, removals)):
            return why
    return ""


def _verify_removals(model: nn.Module, run: Run, removals: Sequence[Removal]) -> str:
    with _scale_by_numbers(model, removals) as replay, _record_readers(model, removals) as records:
        with mask_units(model, removals):
            expected, why = run_or_explain(model, run)
        if why:
            return f"the model does not run: {why}"
        replay()
        reads = list(records)
        records.clear()
        with cut_for_now(model, removals):
            given, why = run_or_explain(model, run)
    if why:
        return f"the model does not run without some of them: {why}"
    for before, after in zip(expected, given, strict=True):
        if before.shape != after.shape:
            return f"an output becomes {list(after.shape)} instead of {list(before.shape)}"
        if not _are_alike(before, after):
            return _DIFFERENT
    if len(reads) != len(records) or not all(_read_alike(*pair) for pair in zip(reads, records, strict=True)):
        return _DIFFERENT
    return ""


@dataclass(frozen=True)
class _Read:
    """Record the result of one call of a layer that reads channels."""

    value: Tensor
    noise: float
    """Bound of what is lost where single precision adds up large numbers to small ones."""
    axis: int
    removed: tuple[int, ...]
    """Rows of the layer that go, along the axis of its channels."""


@contextlib.contextmanager
def _record_readers(model: nn.Module, removals: Sequence[Removal]) -> Iterator[list[_Read]]:
    """Record what layers that read the units make of them; what else a model computes may hide a difference."""
    records: list[_Read] = []
    modules = dict(model.named_modules())
    parts = [(part, removal) for removal in removals for part in removal.group.slices]
    rows: dict[str, set[int]] = {part.tensor.rpartition(".")[0]: set() for part, _ in parts if part.side == "reads"}
    for part, removal in parts:
        path, _, leaf = part.tensor.rpartition(".")
        if part.side == "makes" and leaf == "weight" and path in rows:
            rows[path].update(removal.along(part))

    def record(removed: tuple[int, ...], layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if given and isinstance(output, Tensor) and output.is_floating_point():
            weight = layer.get_parameter("weight").detach()
            noise = float(given[0].abs().max() * weight.abs().flatten(1).sum(1).max()) if output.numel() else 0.0
            axis = 1 if isinstance(layer, nn.modules.conv._ConvNd) else -1
            records.append(_Read(output.detach(), noise * _ROUNDING, axis, removed))

    with contextlib.ExitStack() as hooks:
        for path, removed in rows.items():
            if isinstance(layer := modules.get(path), (nn.Linear, nn.modules.conv._ConvNd)):
                hooks.enter_context(layer.register_forward_hook(functools.partial(record, tuple(removed))))
        yield records


def _read_alike(before: _Read, after: _Read) -> bool:
    """Compare what a layer made, along the rows that are left."""
    expected = before.value
    if expected.shape != after.value.shape:
        rows = [row for row in range(expected.shape[before.axis]) if row not in set(before.removed)]
        expected = expected.index_select(before.axis, torch.tensor(rows, dtype=torch.long))
    if expected.shape != after.value.shape:  # a layer in groups, whose rows are counted in another way
        return True
    return _are_alike(expected, after.value, before.noise)


def _draw(group: Group) -> tuple[tuple[int, ...], ...]:
    """Divide the units into some, in no pattern that the layers' own could fall in with; the others; and the last.

    The last are those that have to stay while the others go, but for those that a layer has nothing beside. The order
    is by chance, for each group another one: those that fit only if they lose alike must fail.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(group.root.encode()))
    order, stay = group.order_removal(torch.randperm(group.units, generator=generator).tolist())
    few, left = min(max(1, group.units // _SHARE), group.units - stay), group.units - max(1, stay)
    gone: set[int] = set()
    held = [{unit for unit, indices in enumerate(part.indices) if indices} for part in group.slices]
    for unit in order[left:]:
        if all(units - gone - {unit} for units in held if unit in units):
            gone.add(unit)
    return tuple(sorted(order[:few])), tuple(sorted(order[few:left])), tuple(sorted(gone))


def _are_alike(before: Tensor, after: Tensor, noise: float = 0.0) -> bool:
    if not before.is_floating_point():
        return torch.equal(before, after)
    finite = before.isfinite()
    if not torch.equal(finite, after.isfinite()):
        return False
    scale = float(before[finite].abs().max()) if finite.any() else 0.0
    return bool(((before - after)[finite].abs() <= max(_TOLERANCE * scale, noise)).all())


@contextlib.contextmanager
def _scale_by_numbers(model: nn.Module, removals: Sequence[Removal]) -> Iterator[Callable[[], None]]:
    """Make normalizations that are cut scale by one number each within the block.

    Gives a function from whose call on the numbers that were used are used once more, in the same order.
    """
    numbers: list[Tensor] = []
    replayed: list[Iterator[Tensor]] = []

    def scale(x: Tensor) -> Tensor:
        if not replayed:
            numbers.append(x.float().std(unbiased=False).clamp_min(1e-6).to(x.dtype))
        return next(replayed[0]) if replayed else numbers[-1]

    def normalize(module: nn.Module, x: Tensor) -> Tensor:
        y = x / scale(x)
        shape = (-1,) if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) else (-1, *(1,) * (x.dim() - 2))
        weight, bias = module.weight, getattr(module, "bias", None)
        if isinstance(weight, Tensor):
            y = y * weight.reshape(shape)
        return y + bias.reshape(shape) if isinstance(bias, Tensor) else y

    modules, changed = dict(model.named_modules()), []
    for path in sorted({path for removal in removals for path in removal.group.paths}):
        module = modules.get(path)
        if isinstance(module, _MIXING):
            changed.append((module, vars(module).get("forward")))
            vars(module)["forward"] = functools.partial(normalize, module)
    try:
        yield lambda: replayed.append(iter(numbers))
    finally:
        for module, own in changed:
            if own is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = own


ASKED_FOR = "it is protected, as requested"


def protect_groups(groups: Iterable[Group], modules: Sequence[str], patterns: Sequence[str]) -> dict[str, str]:
    """Find the groups, by root, in which a named layer makes channels or changes them; with the reason.

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
    return {
        group.root: ASKED_FOR
        for group in groups
        if any(
            _fits(name, pattern)
            for part in group.slices
            if part.side != "reads"
            for name in (part.tensor, part.tensor.rpartition(".")[0])
            for pattern in patterns
        )
    }


def _fits(path: str, pattern: str) -> bool:
    """Tell whether a path, or a module that it is within, matches a pattern."""
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Pruned:
    """Sizes and history of a pruned module, its cost before and after, and why groups stayed whole, by root."""

    surgery: surgery.Surgery
    before: Cost
    after: Cost
    channels_before: int
    channels_after: int
    whole: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prunable:
    """The groups of a module that can lose units, and why others cannot, by root."""

    groups: tuple[Group, ...]
    whole: dict[str, str]
    replaced: surgery.Replaced = field(default_factory=surgery.Replaced)
    """Attention as it was, in whose place there is the form now that can lose heads."""


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
    prunable = find_prunable(model, run, options, progress)
    before, history = surgery.Before(model), list[PrunedGroup]()
    counter = Counter(model, run)
    first = counter.cost()
    width = sum(group.width for group in prunable.groups)
    whole, now = dict(prunable.whole), width
    notes: tuple[str, ...] = ()
    for step in range(1, options.steps + 1):
        if step > 1:
            prunable = find_again(model, run, prunable)
        if gradients is not None:
            progress("collecting gradients")
            gradients()
        importance, none = selection.rate_units(prunable.groups, options.importance, seed)
        whole |= none
        groups = [group for group in prunable.groups if group.root in importance]
        _validate_any(groups, whole)
        wanted = 1 - (1 - target.left) * step / options.steps
        progress(f"choosing what goes, step {step} of {options.steps}")
        budget = PruneBudget(model, counter, target, {group.root: group for group in groups}, first, width, now)
        last = step == options.steps
        for multiple in selection.halve_multiple(options.multiple_of):
            cuts = selection.order_cuts(groups, importance, multiple, options.scope == "uniform")
            removals = budget.choose(cuts, wanted)
            if not last or budget.is_near(removals, wanted):  # a target that one step misses, the next ones make up for
                break
        if last:
            notes = budget.validate(cuts, removals, wanted, options.multiple_of, {entry.root for entry in history})
        history += [_describe(removal, step, options.importance) for removal in removals]
        cut(model, removals)
        now -= sum(removal.group.count_channels(removal.units) for removal in removals)
    changes = before.difference(model, tuple(history), tuple(prunable.replaced.attention))
    return Pruned(changes, first, counter.cost(), width, now, whole, notes)


def find_prunable(model: nn.Module, run: Run, options: PruneOptions, progress: Progress) -> Prunable:
    """Return the groups of a module that can lose units; each is tried.

    Attention of torch.nn is replaced where its heads may go; the module answers as before.

    Raises:
        ModelError: the module's values cannot be followed, or nothing can go.
        UsageError: a protected layer is not there.
    """
    replaced = surgery.replace(model, surgery.replaceable(model)) if options.heads else surgery.Replaced()
    progress("following the model's values")
    traced, whole = _trace_groups(model, run)
    parts = Parts(model)
    protected_groups = protect_groups(traced, [*parts.modules, *parts.canonical], options.protect)
    whole |= protected_groups
    groups, known = [], dict[tuple[str, ...], int]()
    for group in traced:
        if group.root in protected_groups:
            continue
        candidate = _in_heads(model, run, parts, group, known, options.heads) if is_attention(group) else group
        if isinstance(candidate, str):
            whole[group.root] = candidate
        else:
            groups.append(candidate)
    progress(f"trying to take channels out of {len(groups)} groups")
    good, bad = keep_verified(model, run, groups)
    whole |= bad
    _validate_any(good, whole)
    used = {parts.modules[path] for group in good for path in group.modules if path in parts.modules}
    return Prunable(tuple(good), whole, replaced.put_back(model, used))


def find_again(model: nn.Module, run: Run, before: Prunable) -> Prunable:
    """Find the same groups of a module that was cut since then, with heads as wide as before; each is tried again."""
    traced, _ = _trace_groups(model, run)
    parts = Parts(model)
    known = {group.root: group for group in before.groups}
    groups = []
    for group in traced:
        if (old := known.get(group.root)) is None:
            continue
        ways = split_into_heads(group, parts) if old.unit == "head" else (group,)
        groups += [way for way in ways if _describe_units(way) == _describe_units(old)][:1]
    return Prunable(tuple(keep_verified(model, run, groups)[0]), before.whole, before.replaced)


def _describe_units(group: Group) -> tuple[int, set[tuple[str, str]]]:
    """Return what stays the same of a group when some units go: a head's width, and the names of numbers that change.

    The shapes of products fit other widths of heads, too; a channel is the only width there is otherwise.
    """
    width = len(group.channels[0]) if group.unit == "head" else 1
    return width, {(number.module, number.name) for number in group.attributes}


def _trace_groups(model: nn.Module, run: Run) -> tuple[list[Group], dict[str, str]]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    parts = Parts(model)
    graph, hooks = trace(model, run)
    groups, whole = find_groups(graph, parts)
    paths = {module: path for path, module in reversed(parts.modules.items())}
    whole |= {paths[module]: why for module, why in hooks.unfollowed(lambda module: module in graph.module2node)}
    order = {path: index for index, path in enumerate(parts.modules)}
    return sorted(groups, key=lambda group: order[group.root]), whole


def _in_heads(
    model: nn.Module, run: Run, parts: Parts, group: Group, known: dict[tuple[str, ...], int], wanted: bool
) -> Group | str:
    """Return a group of attention in heads, or why it stays whole.

    The way that is right for one group is taken for all of its kind, which are ``known`` then.
    """
    ways = split_into_heads(group, parts)
    if not wanted or not ways:
        return "attention heads are to stay" if ways else "it is attention of one head, or of an unknown number"
    kind = (*(type(parts.modules[path]).__name__ for path in group.modules), str(group.width), str(len(ways)))
    if kind in known:
        return ways[known[kind]]
    whys = []
    for index, way in enumerate(ways):
        why = verify_masking(model, run, [way])
        if not why:
            known[kind] = index
            return way
        whys.append(why)
    return f"its heads cannot go one by one: {whys[0]}"


def _describe(removal: Removal, step: int, importance: str) -> PrunedGroup:
    group, gone = removal.group, set(removal.units)
    every = group.list_members(range(group.units))
    kept = group.list_members(unit for unit in range(group.units) if unit not in gone)
    return PrunedGroup(
        step=step,
        root=group.root,
        members=removal.members,
        unit=group.unit,
        before=len(every),
        after=len(kept),
        kept=kept,
        importance=importance,
        width=group.width // len(every),
    )


def _validate_any(groups: Sequence[Group], whole: Mapping[str, str]) -> None:
    if groups:
        return
    by_reason = group_values((why, root) for root, why in whole.items())
    shown = "; ".join(f"{', '.join(roots[:3])}: {why}" for why, roots in list(by_reason.items())[:_SHOWN])
    raise ModelError(
        f"no layer of this model can lose channels ({shown or 'it has no convolution and no linear layer'})",
        "`sparsify` sets weights to zero without changing sizes",
    )
