"""How much each unit of a group matters, by torch_pruning's measures; mean 1 within a group, to compare groups.

``l1``/``l2``: Li et al., "Pruning Filters for Efficient ConvNets", ICLR 2017, summed over the layers of a group.
``taylor``: Molchanov et al., "Importance Estimation for Neural Network Pruning", CVPR 2019.
``bn``: Liu et al., "Learning Efficient Convolutional Networks through Network Slimming", ICCV 2017.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.pruning.options import Importance
from enginesmith.pipeline.pruning.structure import Group

NO_SCALE = "it has no batch normalisation whose scale could be looked at"
_BY_WEIGHT = ("l1", "l2", "taylor")


def rank(groups: Sequence[Group], importance: Importance, seed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """For each group's root the importance of its units, shape ``(units,)``; and why others have none.

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
    """A layer whose weights torch_pruning takes in the wrong order, or nothing."""
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
