"""Gradients of a loss over samples, for importance by Taylor's first term."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
