"""Choose which units go: rate them, order cuts by that, and take as many as come nearest to the target.

Ratings are torch_pruning's measures; mean 1 within a group, to compare groups.
``l1``/``l2``: Li et al., "Pruning Filters for Efficient ConvNets", ICLR 2017, summed over the layers of a group.
``taylor``: Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019.
``bn``: Liu et al., "Learning Efficient Convolutional Networks through Network Slimming", ICCV 2017.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import EmptyLayer, ModelError, UsageError
from enginesmith.pipeline.frameworks.torch.module import by_operators
from enginesmith.pipeline.passes.finetune.losses import compare_with_labels
from enginesmith.pipeline.passes.prune.options import Importance, PruneTarget, spell
from enginesmith.pipeline.passes.prune.surgery import Group, Removal, cut_for_now
from enginesmith.pipeline.units import name_some

NO_SCALE = "it has no batch normalization whose scale could be looked at"

Sample = tuple[tuple[Tensor, ...], Tensor | None]
"""Inputs in order, and labels of their rows where there are some."""


def rate_units(groups: Sequence[Group], importance: Importance, seed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rate the units of each group, by its root, shape ``(units,)``; and explain why others have no rating.

    Raises:
        ModelError: an importance is not finite.
    """
    from torch_pruning.pruner import importance as measures

    measure: Any = {
        "random": measures.RandomImportance(),
        "bn": measures.BNScaleImportance(normalizer=None),
        "taylor": measures.GroupTaylorImportance(normalizer=None),
        "l1": measures.GroupMagnitudeImportance(p=1, normalizer=None),
        "l2": measures.GroupMagnitudeImportance(p=2, normalizer=None),
    }[importance]
    ratings: dict[str, Tensor] = {}
    none: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for group in groups:
            if importance in ("l1", "l2", "taylor") and (layer := _grouped_transposed(group)):
                none[group.root] = (
                    f"importance by {importance} is not known for {layer}, a transposed convolution in groups"
                )
                continue
            try:
                by_channel = measure(group.traced)
            except (RuntimeError, IndexError):  # the first layer that it rates has only some of the channels
                by_channel = torch.empty(0)
            if by_channel is None:
                none[group.root] = NO_SCALE
                continue
            if len(by_channel) != group.width:
                none[group.root] = f"importance by {importance} is known for some of its channels only"
                continue
            values = by_channel.detach().double().cpu()
            units = torch.stack([values[list(unit)].mean() for unit in group.channels])
            if not units.isfinite().all():
                raise ModelError(
                    f"the importance of the channels of {group.root} is not finite", "look at its weights for NaN"
                )
            ratings[group.root] = units / units.mean().clamp_min(1e-30)
    return ratings, none


def _grouped_transposed(group: Group) -> str:
    """Name a layer whose weights torch_pruning takes in the wrong order; empty if there is none."""
    for dep, _ in group.traced:
        layer = dep.target.module
        if isinstance(layer, nn.modules.conv._ConvTransposeNd) and 1 < layer.groups < layer.out_channels:
            return str(dep.target.name).split(" ")[0]
    return ""


def collect_gradients(model: nn.Module, forward: Callable[..., tuple[Tensor, ...]], samples: Iterable[Sample]) -> None:
    """Leave in each parameter's ``grad`` the mean absolute gradient of a loss over the samples.

    Absolute, as the gradients of a trained model cancel out over many samples, and a channel's effect on each of them
    is all that matters. Parameters that the loss does not depend on get zeros.
    """
    parameters = [value for value in model.parameters() if value.requires_grad]
    sums = [torch.zeros_like(value) for value in parameters]
    count = 0
    for inputs, labels in samples:
        with torch.enable_grad():
            gradients = torch.autograd.grad(_loss(forward(*inputs), labels), parameters, allow_unused=True)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient.abs()
        count += 1
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total / max(count, 1)


def _loss(outputs: tuple[Tensor, ...], labels: Tensor | None) -> Tensor:
    """Compute the loss of the first output where labels fit it; else half the outputs' mean square."""
    if labels is not None and (loss := compare_with_labels(outputs[0], labels)) is not None:
        return loss
    parts = [value.float().square().mean() for value in outputs if value.is_floating_point() and value.requires_grad]
    return torch.stack(parts).sum() / 2


LEAST_SHARE = 0.1
"""Share of each group's units that a global ranking leaves at least: a group of no width cuts the model in two."""


@dataclass(frozen=True)
class Cut:
    """One group's way from one allowed number of units to the next lower one."""

    root: str
    gone: tuple[int, ...]
    left: int
    """Units that stay after all earlier cuts and this one."""
    fineness: int = 0
    """Number of times the multiple was halved that ``left`` is at."""


def halve_multiple(multiple_of: int) -> Iterator[int]:
    """List the multiple, half of it, and so on to one."""
    while multiple_of > 1:
        yield multiple_of
        multiple_of //= 2
    yield 1


def _cuts_of(group: Group, order: Sequence[int], multiple_of: int, least: int) -> Iterator[Cut]:
    """List every cut of one group, units going in ``order``, until no more than ``least`` would stay.

    As many units go at a time as make the multiple, then half of it, and so on to one; heads go singly.
    """
    each, left = group.width // group.units, group.units
    steps = [multiple // math.gcd(multiple, each) for multiple in halve_multiple(multiple_of)]
    for fineness, step in enumerate([1] if group.unit == "head" else steps):
        while (lower := (left - 1) // step * step) >= max(least, 1):
            yield Cut(group.root, tuple(order[group.units - left : group.units - lower]), lower, fineness)
            left = lower


def order_cuts(groups: Sequence[Group], importance: Mapping[str, Tensor], multiple_of: int, uniform: bool) -> list[Cut]:
    """Order all cuts of all groups, those that go first in front.

    Cuts are ordered by what they cost or, ``uniform``, so that all groups shrink alike; groups of one size do not
    shrink at the same time, so that a target is met closely even where channels go in multiples. Cuts to finer
    multiples come after all others: they are taken only where the target is not met without them.
    """
    rated: list[tuple[int, float, int, int, Cut]] = []
    for index, group in enumerate(groups):
        values = importance[group.root]
        order, stay = group.order_removal(values.argsort(stable=True).tolist())
        least = max(stay, 1 if uniform else math.ceil(group.units * LEAST_SHARE))
        worst = 0.0
        for position, cut in enumerate(_cuts_of(group, order, multiple_of, least)):
            if uniform:  # where the number of units that should stay is nearer to this cut's than to the one before
                before = cut.left + len(cut.gone)
                rating = 1 - (before + cut.left) / 2 / group.units
            else:
                rating = worst = max(worst, float(values[list(cut.gone)].mean()))
            rated.append((cut.fineness, rating, position, index, cut))
    return [cut for *_, cut in sorted(rated, key=lambda row: row[:4])]


@dataclass(frozen=True)
class Cost:
    """MACs of one run on the example, and the number of parameters."""

    macs: int
    parameters: int


class Counter:
    """Counts the operations of ``run``, which calls ``model`` once, as often as the model's sizes change.

    Operations are counted where PyTorch dispatches them, by the formulas of ``torch.utils.flop_counter``: convolutions,
    matrix products and attention, in whatever way the module calls them; a multiply-add is two of its FLOPs. Recurrent
    layers are no products for it and count as 0. Where the model runs on tensors without values too, only sizes are
    worked out, and the counts are the same.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        self._model, self._run, self._fake = model, run, False
        real = self._macs(fake=False)
        with contextlib.suppress(Exception):  # a forward that looks at values raises whatever it likes without them
            self._fake = self._macs(fake=True) == real

    def cost(self) -> Cost:
        """Count as the model is now."""
        return Cost(self._macs(self._fake), self.parameters())

    def parameters(self) -> int:
        """Count numbers in parameters; shared ones count once."""
        return sum(value.numel() for value in self._model.parameters())

    def _macs(self, fake: bool) -> int:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        without_values = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
        plain = (by_operators(), sdpa_kernel(SDPBackend.MATH))
        trained = [value for value in self._model.parameters() if value.requires_grad]
        with torch.no_grad(), without_values, plain[0], plain[1], FlopCounterMode(display=False) as counter:
            try:  # the counter asks views of parameters that have a gradient for a function which they lack here
                for value in trained:
                    value.requires_grad_(False)
                self._run()
            finally:
                for value in trained:
                    value.requires_grad_()
        return int(counter.get_total_flops()) // 2


TOLERANCE = 0.02
"""Largest difference between the share that is left and the target."""
_NEAR = 0.25
"""Share of the part to be removed: a target that is missed by more is worth narrower multiples."""
_SHOWN = 3
_QUANTITIES = {"ratio": "channels", "macs": "MACs", "params": "parameters"}


@dataclass(frozen=True)
class PruneBudget:
    """The target of one step, with the groups as they are now."""

    model: nn.Module
    counter: Counter
    target: PruneTarget
    groups: Mapping[str, Group]
    first: Cost
    """Cost of the whole module before the first step."""
    width: int
    """Channels in groups before the first step."""
    now: int
    """Channels in groups that are left."""

    def choose(self, cuts: Sequence[Cut], wanted: float) -> list[Removal]:
        """Choose units to remove for ``wanted`` of the quantity to be left, as near as cuts come."""

        @functools.cache
        def left(count: int) -> float:  # falls with the number of cuts
            return self.left(self._removals(cuts[:count]))

        low, high = 0, len(cuts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if left(middle) > wanted else (low, middle)
        count = min((low, high), key=lambda count: abs(left(count) - wanted))
        chosen = self._removals(cuts[:count])
        if abs(left(count) - wanted) <= TOLERANCE:
            return chosen
        begun = count if left(count) > wanted else max(count - 1, 0)
        following: dict[str, Cut] = {}  # each group's next cut
        for cut in cuts[begun:]:
            following.setdefault(cut.root, cut)
        same = [cut for cut in following.values() if cut.fineness == cuts[begun].fineness]
        others = [chosen, *(self._removals([*cuts[:begun], cut]) for cut in same)]
        return min(others, key=lambda removals: abs(self.left(removals) - wanted))

    def left(self, removals: Sequence[Removal]) -> float:
        """Compute the share of the target's quantity that is left without these."""
        if self.target.kind == "ratio":
            gone = sum(removal.group.count_channels(removal.units) for removal in removals)
            return (self.now - gone) / self.width
        with cut_for_now(self.model, removals):
            if self.target.kind == "params":
                return self.counter.parameters() / max(self.first.parameters, 1)
            return self.counter.cost().macs / max(self.first.macs, 1)

    def is_near(self, removals: Sequence[Removal], wanted: float) -> bool:
        """Tell whether the share that is left is near enough to the target for widths to stay at their multiple."""
        return abs(self.left(removals) - wanted) <= max(TOLERANCE, _NEAR * (1 - wanted))

    def validate(
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
        least = self.left(self._removals(cuts))
        if least - wanted > min(TOLERANCE, wanted):  # a share of next to nothing is not met by a point more
            raise self._would_empty(cuts, least)
        notes = []
        gone = {removal.group.root: removal.group.count_channels(removal.units) for removal in removals}
        odd = [
            f"{root} ({width})"
            for root, group in self.groups.items()
            if group.unit == "channel"
            and (root in gone or root in before)
            and (width := group.width - gone.get(root, 0)) % multiple_of
        ]
        if odd:
            notes.append(f"the target needs widths that are no multiples of {multiple_of}: {name_some(odd, _SHOWN)}")
        left = self.left(removals)
        if abs(left - wanted) > TOLERANCE:
            notes.append(
                f"{left:.1%} of the {_QUANTITIES[self.target.kind]} are left, not {wanted:.1%}: channels go in "
                "multiples; a smaller --multiple-of may come nearer"
            )
        return tuple(notes)

    def _would_empty(self, cuts: Sequence[Cut], least: float) -> UsageError:
        last = {cut.root: index for index, cut in enumerate(cuts)}
        root = min(self.groups, key=lambda root: last.get(root, -1))
        group = self.groups[root]
        gone = {unit for cut in cuts if cut.root == root for unit in cut.gone}
        every = len(group.list_members(range(group.units)))
        stay = len(group.list_members(unit for unit in range(group.units) if unit not in gone))
        most = spell(self.target.kind, math.floor((1 - least) * 1000) / 1000)
        return EmptyLayer(
            f"--prune {self.target} would empty a layer: {root} has {every} {group.unit}s and must keep {stay}; "
            f"the largest possible target is {most}",
            "ask for less, or protect fewer layers",
        )

    def _removals(self, cuts: Sequence[Cut]) -> list[Removal]:
        gone: dict[str, list[int]] = {}
        for cut in cuts:
            gone.setdefault(cut.root, []).extend(cut.gone)
        return [Removal(self.groups[root], tuple(sorted(gone[root]))) for root in self.groups if root in gone]
