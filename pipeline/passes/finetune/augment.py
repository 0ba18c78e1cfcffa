"""Make other samples of images: shifted, mirrored, mixed.

The model that is learnt from answers the changed images, so no label has to fit them. Mixed: Zhang et al., "mixup:
Beyond Empirical Risk Minimization" (ICLR 2018); for distillation: Beyer et al., "Knowledge Distillation: A Good Teacher
Is Patient and Consistent" (CVPR 2022).
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from enginesmith.pipeline.passes.finetune.batches import Batch
from enginesmith.pipeline.passes.finetune.options import Augmentation

_SHIFT = 8
"""Images are shifted by up to this part of their height and width."""
_MOST_CHANNELS, _LEAST_EDGE = 4, 8


def list_images(inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """List the inputs that are images: floats in one to four channels, of eight pixels and more along each edge."""
    return tuple(
        name
        for name, value in inputs.items()
        if value.ndim == 4
        and value.is_floating_point()
        and value.shape[1] <= _MOST_CHANNELS
        and min(value.shape[2:]) >= _LEAST_EDGE
    )


def mirror(batch: Batch, names: tuple[str, ...]) -> Batch:
    """Exchange left and right in all images."""
    mirrored = {name: value.flip(3) if name in names else value for name, value in batch.inputs.items()}
    return dataclasses.replace(batch, inputs=mirrored)


def augment(batch: Batch, how: Augmentation) -> Batch:
    """Shift each image, mirror about half of them, and mix about half with others; torch's seed decides how."""
    count = len(batch.inputs[how.inputs[0]])
    down, right, mixed = torch.rand(3, count)
    mirrored = (torch.rand(count) < 0.5) & how.mirror
    share = torch.where(mixed < 0.5, torch.rand(count), torch.ones(count))
    others = torch.randperm(count)
    inputs = dict(batch.inputs)
    for name in how.inputs:
        value = _move(inputs[name], 2 * down - 1, 2 * right - 1, mirrored)
        if how.mix:
            part = share.to(value).reshape(-1, 1, 1, 1)
            value = part * value + (1 - part) * value[others.to(value.device)]
        inputs[name] = value
    return dataclasses.replace(batch, inputs=inputs)


def _move(images: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """Shift by shares of an eighth of height and width, and mirror some; pixels at the edges are repeated."""
    count, channels, height, width = images.shape
    rows = _places(height, down)
    columns = _places(width, right)
    columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
    samples, planes = torch.arange(count), torch.arange(channels)
    places = (samples[:, None, None, None], planes[None, :, None, None], rows[:, None, :, None], columns[:, None, None])
    return images[tuple(place.to(images.device) for place in places)]


def _places(size: int, shares: Tensor) -> Tensor:
    moved = (shares * (size // _SHIFT)).round().long()
    return (torch.arange(size)[None, :] + moved[:, None]).clamp(0, size - 1)
