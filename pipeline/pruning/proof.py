"""Whether taking units away does what it should: the same as if no layer read them.

A module that is cut is compared, on the example, with the whole one in which every weight that reads the units is 0.
The two have to answer alike. That finds what a dependency graph cannot see: sizes that are written in a forward, heads
that are split anew, channels that are averaged or that leave the model.

Normalisations over channels see the units that others no longer read; for the comparison those among the layers that
are cut scale by one number each.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from enginesmith.pipeline.pruning.cutting import Removal, blinded, cut_for_now
from enginesmith.pipeline.pruning.grouping import through
from enginesmith.pipeline.pruning.structure import Group
from enginesmith.pipeline.pruning.tracing import Run, failure

_SHARE = 4
"""One unit in so many is taken away."""
_TOLERANCE = 1e-3
"""Of the largest number that comes out; single precision adds up in another order after a cut."""
_MIXING = (nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)


def proven(model: nn.Module, run: Run, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
    """The groups that can lose units, and why others cannot, by root."""
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
    why = objection(model, run, groups)
    if not why:
        return list(groups), {}
    if len(groups) == 1:
        return [], {groups[0].root: f"{why}{through(groups[0].traced)}"}
    middle = len(groups) // 2
    first, second = _halved(model, run, groups[:middle]), _halved(model, run, groups[middle:])
    return first[0] + second[0], {**first[1], **second[1]}


def objection(model: nn.Module, run: Run, groups: Sequence[Group]) -> str:
    """Why these groups cannot lose units together; nothing where they can."""
    removals = [Removal(group, _some(group)) for group in groups]
    with _scaling(model, removals) as norms:
        with blinded(model, removals):
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
    """Some units, in no pattern that the layers' own could fall in with."""
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
        """One number for a whole value."""
        if self._next is not None:
            return next(self._next)
        self.kept.append(x.float().std(unbiased=False).clamp_min(1e-6).to(x.dtype))
        return self.kept[-1]


@contextlib.contextmanager
def _scaling(model: nn.Module, removals: Sequence[Removal]) -> Iterator[_Norms]:
    """Within the block the normalisations that are cut scale by one number instead."""
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
