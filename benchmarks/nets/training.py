"""Train the networks: one recipe for all that see pictures, one seed, no choice by a judged sample."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .networks import VALUES
from .pictures import pages, pictures, restore

BATCH = 64
SEED = 0
_DECAY = 0.02
_FAINT = 0.4
_CHUNK = 4096
"""Pictures that are made at once."""


@dataclass(frozen=True)
class Phase:
    """``pictures`` of ``size`` pixels, the learning rate up to ``rate`` and down again."""

    pictures: int
    size: int
    rate: float


Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
"""(network, images, ink, labels) → what to minimize."""


def classes(network: nn.Module, image: Tensor, ink: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy, a little smoothed."""
    return F.cross_entropy(network(image), label, label_smoothing=0.05)


def masks(network: nn.Module, image: Tensor, ink: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of each pixel."""
    return F.binary_cross_entropy_with_logits(network(image), (ink > 0.5).float())


def rows(network: nn.Module, image: Tensor, ink: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of a network that reads strokes row by row."""
    return F.cross_entropy(network(strokes(image, ink)), label, label_smoothing=0.05)


def boxes(network: nn.Module, image: Tensor, ink: Tensor, label: Tensor) -> Tensor:
    """Binary cross-entropy of every cell and class, less of what is easy (focal loss), and the distance of boxes.

    The cell at the center of a digit is asked for it.
    """
    data = pages(image, ink, label, np.random.default_rng(int(label.sum()) + int(ink.sum())))
    found, logits = network.encode(data.image)  # type: ignore[operator]
    edge = math.isqrt(found.shape[-1])
    digits = data.digits.clone()
    digits[..., 1:] *= edge
    center, extent = (digits[..., 1:3] + digits[..., 3:]) / 2, digits[..., 3:] - digits[..., 1:3]
    column, row = center.long().unbind(-1)
    page, which = torch.nonzero(digits[..., 0] >= 0, as_tuple=True)
    cell = (row * edge + column)[page, which]
    wanted = torch.zeros_like(logits)
    wanted[page, digits[page, which, 0].long(), cell] = 1
    error = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    hard = (wanted - logits.detach().sigmoid()).abs() ** 2
    box = found[page, :, cell]
    distance = (box[:, :2] - center[page, which]).abs() + (box[:, 2:].log() - extent[page, which].log()).abs()
    loss: Tensor = (error * hard).sum() / len(page) + distance.sum(1).mean()
    return loss


def pixels(network: nn.Module, image: Tensor, ink: Tensor, label: Tensor) -> Tensor:
    """Distance of each pixel of a picture from what is made of the picture at half the size."""
    target = restore(image)
    return F.l1_loss(network(F.avg_pool2d(target, 2)), target)


def values(network: nn.Module, image: Tensor, ink: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of the bins, and the distance of the logarithms."""
    distance = F.smooth_l1_loss(network(image).squeeze(1).log(), VALUES[label].log(), beta=0.1)
    return F.cross_entropy(network.classes(image), label) + distance  # type: ignore[operator]


def strokes(image: Tensor, ink: Tensor) -> Tensor:
    """The digit bright before a faint grey picture, [count, height, width]."""
    return (2 * ink + _FAINT * image.mean(1, keepdim=True)).squeeze(1)


def train(network: nn.Module, loss: Loss, phases: tuple[Phase, ...]) -> nn.Module:
    """Train on pictures of the digits' ``train`` split, none seen twice; small pictures first, which is quicker."""
    network.train()
    for number, phase in enumerate(phases):
        optimizer = torch.optim.AdamW(network.parameters(), weight_decay=_DECAY)
        steps = phase.pictures // BATCH
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, phase.rate, total_steps=steps, pct_start=0.25)
        done = 0
        for chunk in range(0, phase.pictures, _CHUNK):
            data = pictures("train", _CHUNK, phase.size, SEED + 1000 * (number + 1) + chunk // _CHUNK)
            parts = (each.split(BATCH) for each in (data.image, data.ink, data.label))
            for image, ink, label in zip(*parts, strict=True):
                if done == steps:
                    break
                value = loss(network, image, ink, label)
                optimizer.zero_grad()
                value.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                done += 1
    return network.eval()


def linear_head(vectors: Tensor, labels: Tensor, head: nn.Linear) -> None:
    """Fit a linear head on what the encoder says of the training texts."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        loss = F.cross_entropy(head(vectors), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
