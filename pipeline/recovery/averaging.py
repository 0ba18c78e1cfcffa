"""The moving average of the weights, and statistics of batch norms that belong to it."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from enginesmith.pipeline.recovery.material import Batch
from enginesmith.pipeline.torch_model import NamedForward

_WARM = 10
"""The average follows closely at first: the decay at step s is at most (1 + s) / (10 + s)."""


def norms(module: nn.Module) -> list[_BatchNorm]:
    """Batch norms that keep statistics."""
    return [one for one in module.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]


@torch.no_grad()
def update(average: NamedForward, module: NamedForward, decay: float, step: int) -> None:
    """One step of the average; buffers are taken as they are, and statistics are found anew when they are needed."""
    weight = 1 - min(decay, (1 + step) / (_WARM + step))
    for mean, value in zip(average.parameters(), module.parameters(), strict=True):
        mean.lerp_(value.detach().to(mean.dtype), weight)
    for kept, now in zip(average.buffers(), module.buffers(), strict=True):
        if 0 not in kept.stride() or kept.numel() <= 1:
            kept.copy_(now)


@torch.no_grad()
def find_statistics(module: NamedForward, batches: Iterable[Batch]) -> None:
    """Mean and variance of every batch norm, over all of the batches, with the weights as they are now."""
    found = norms(module)
    if not found:
        return
    momenta = [one.momentum for one in found]
    for one in found:
        one.reset_running_stats()
        one.momentum = None  # a plain mean over the batches
        one.train()
    try:
        for batch in batches:
            module(*batch.inputs.values())
    finally:
        for one, momentum in zip(found, momenta, strict=True):
            one.momentum = momentum
            one.eval()
