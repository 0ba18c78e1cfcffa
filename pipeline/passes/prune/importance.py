"""Rate each unit of a group by torch_pruning's measures; mean 1 within a group, to compare groups.

``l1``/``l2``: Li et al., "Pruning Filters for Efficient ConvNets", ICLR 2017, summed over the layers of a group.
``taylor``: Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019.
``bn``: Liu et al., "Learning Efficient Convolutional Networks through Network Slimming", ICCV 2017.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.passes.prune.options import Importance
from enginesmith.pipeline.passes.prune.surgery import Group

NO_SCALE = "it has no batch normalisation whose scale could be looked at"
_BY_WEIGHT = ("l1", "l2", "taylor")


def rate_units(groups: Sequence[Group], importance: Importance, seed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rate the units of each group, by its root, shape ``(units,)``; and explain why others have no rating.

    Raises:
        ModelError: an importance is not finite.
    """
    measure = _measure(importance)
    found: dict[str, Tensor] = {}
    none: dict[str, str] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for group in groups:
            if importance in _BY_WEIGHT and (layer := _grouped_transposed(group)):
                none[group.root] = (
                    f"importance by {importance} is not known for {layer}, a transposed convolution in groups"
                )
                continue
            by_channel = measure(group.traced)
            if by_channel is None:
                none[group.root] = NO_SCALE
                continue
            values = by_channel.detach().double().cpu()
            units = torch.stack([values[list(unit)].mean() for unit in group.channels])
            if not units.isfinite().all():
                raise ModelError(
                    f"the importance of the channels of {group.root} is not finite", "look at its weights for NaN"
                )
            found[group.root] = units / units.mean().clamp_min(1e-30)
    return found, none


def _grouped_transposed(group: Group) -> str:
    """Return a layer whose weights torch_pruning takes in the wrong order, or nothing."""
    for dep, _ in group.traced:
        layer = dep.target.module
        if isinstance(layer, nn.modules.conv._ConvTransposeNd) and 1 < layer.groups < layer.out_channels:
            return str(dep.target.name).split(" ")[0]
    return ""


def _measure(importance: Importance) -> Any:
    from torch_pruning.pruner import importance as measures

    if importance == "random":
        return measures.RandomImportance()
    if importance == "bn":
        return measures.BNScaleImportance(normalizer=None)
    if importance == "taylor":
        return measures.GroupTaylorImportance(normalizer=None)
    return measures.GroupMagnitudeImportance(p=int(importance[1]), normalizer=None)


# Gradients of a loss over samples, for importance by Taylor's first term.

Forward = Callable[..., tuple[Tensor, ...]]
Sample = tuple[tuple[Tensor, ...], Tensor | None]
"""Inputs in order, and labels of their rows where there are some."""


def collect(model: nn.Module, forward: Forward, samples: Iterable[Sample]) -> None:
    """Leave in each parameter's ``grad`` the mean absolute gradient over the samples.

    Absolute, as the gradients of a trained model cancel out over many samples, and what a channel does to each of them
    is what matters. Parameters that the loss does not depend on get zeros.
    """
    parameters = [value for value in model.parameters() if value.requires_grad]
    sums = [torch.zeros_like(value) for value in parameters]
    count = 0
    for inputs, labels in samples:
        with torch.enable_grad():
            found = torch.autograd.grad(loss(forward(*inputs), labels), parameters, allow_unused=True)
        for total, gradient in zip(sums, found, strict=True):
            if gradient is not None:
                total += gradient.abs()
        count += 1
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total / max(count, 1)


def loss(outputs: tuple[Tensor, ...], labels: Tensor | None) -> Tensor:
    """Cross-entropy where the labels are classes of the first output; else half the mean square of what comes out."""
    first = outputs[0]
    if labels is not None and first.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
        return F.cross_entropy(first.float(), labels.long())
    parts = [value.float().square().mean() for value in outputs if value.is_floating_point() and value.requires_grad]
    return torch.stack(parts).sum() / 2
