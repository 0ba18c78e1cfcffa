"""Handwritten digits before crops of two photographs: pictures that are real, and hard enough to lose something on.

The digits are the embedded set, its splits kept apart; the photographs are scikit-learn's sample images (they need
Pillow) and tell nothing about the digit.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from enginesmith.calibration.dataset import Split, embedded

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TURN_DEGREES, _ZOOM, _SHIFT = 15.0, (0.9, 1.4), 0.12
_OPACITY = (0.6, 1.0)
_NOISE = 0.04
_MASK = 0.5
_SHOWN, _EDGE = 0.7, 0.3
"""How often a place on a page has a digit, and the ink at the edge of its box."""


@dataclass(frozen=True)
class Pictures:
    """``image`` [count, 3, size, size], normalized; ``ink`` [count, 1, size, size] from 0 to 1; ``label`` [count]."""

    image: Tensor
    ink: Tensor
    label: Tensor

    @property
    def mask(self) -> Tensor:
        """Return the mask of the digit."""
        return self.ink > _MASK


def pictures(split: Split, count: int, size: int, seed: int, rows: slice = slice(None)) -> Pictures:
    """``count`` pictures of the digits ``rows`` of a split, each digit about as often as any other."""
    generator = np.random.default_rng(seed)
    data = embedded("digits", split)
    assert data.labels is not None
    images, labels = data.arrays["image"][rows], data.labels[rows]
    order = np.concatenate([generator.permutation(len(images)) for _ in range(math.ceil(count / len(images)))])[:count]
    ink = _placed(torch.from_numpy(images[order]), size, generator)
    image = _colored(ink, crops(count, size, generator), generator)
    return Pictures(image, ink, torch.from_numpy(labels[order]))


@dataclass(frozen=True)
class Pages:
    """``image`` [count, 3, edge, edge], normalized; ``digits`` [count, 4, 5]: class or -1, and the box's two corners
    in parts of the page's edge.
    """

    image: Tensor
    digits: Tensor


def pages(image: Tensor, ink: Tensor, label: Tensor, generator: np.random.Generator) -> Pages:
    """Put four pictures side by side on each page; in some there is no digit, and the ground alone."""
    count, size = len(image) // 4 * 4, image.shape[-1]
    shown = torch.from_numpy(generator.random(count) < _SHOWN)
    image = torch.where(shown.view(-1, 1, 1, 1), image[:count], normalize(crops(count, size, generator)))
    seen = ink[:count, 0] > _EDGE
    rows, columns = (_extent(seen.any(axis)) for axis in (2, 1))
    boxes = torch.stack([columns[0], rows[0], columns[1], rows[1]], 1)
    corner = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]]).repeat(count // 4, 2) * size
    named = torch.where(shown, label[:count], -1).float()
    digits = torch.cat([named[:, None], (boxes + corner) / (2 * size)], 1)
    tiles = image.view(-1, 2, 2, 3, size, size).permute(0, 3, 1, 4, 2, 5)
    return Pages(tiles.reshape(count // 4, 3, 2 * size, 2 * size), digits.view(-1, 4, 5))


def _extent(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place that is true and the one behind the last, of each row."""
    return seen.int().argmax(1), seen.shape[1] - seen.int().flip(1).argmax(1)


def normalize(image: Tensor) -> Tensor:
    """From pixels between 0 and 1 to what networks get."""
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (_MEAN, _STD))
    return (image - mean) / std


def restore(image: Tensor) -> Tensor:
    """The other way round."""
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (_MEAN, _STD))
    return image * std + mean


def _placed(digit: Tensor, size: int, generator: np.random.Generator) -> Tensor:
    """Each digit enlarged, turned, scaled and moved at random."""
    count = len(digit)
    smooth = F.interpolate(digit, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)
    angle = _uniform(generator, -_TURN_DEGREES, _TURN_DEGREES, count) * math.pi / 180
    zoom = _uniform(generator, *_ZOOM, count)
    across, down = _uniform(generator, -_SHIFT, _SHIFT, count), _uniform(generator, -_SHIFT, _SHIFT, count)
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    matrix = torch.stack([cos, -sin, across * zoom, sin, cos, down * zoom], dim=1).view(count, 2, 3)
    grid = F.affine_grid(matrix, list(smooth.shape), align_corners=False)
    return F.grid_sample(smooth, grid, align_corners=False)


def _colored(ink: Tensor, ground: Tensor, generator: np.random.Generator) -> Tensor:
    """Ink of a color unlike the ground's, more or less opaque, over the ground; noise on everything."""
    count = len(ink)
    colors = _uniform(generator, 0, 1, 2, count, 3, 1, 1)
    apart = (colors - ground.mean((2, 3), keepdim=True)).abs().sum(2, keepdim=True)
    color = torch.where(apart[0] > apart[1], colors[0], colors[1])
    opacity = _uniform(generator, *_OPACITY, count, 1, 1, 1)
    noise = torch.from_numpy(generator.standard_normal(ground.shape, np.float32)) * _NOISE
    return normalize((ground + (color - ground) * ink * opacity + noise).clamp(0, 1))


def crops(count: int, size: int, generator: np.random.Generator) -> Tensor:
    """Squares of the photographs, mirrored at random."""
    found = []
    for _ in range(count):
        photo = _photos()[generator.integers(2)]
        edge = int(generator.integers(size, min(3 * size, *photo.shape[1:])))
        top, left = (int(generator.integers(room - edge)) for room in photo.shape[1:])
        crop = photo[:, top : top + edge, left : left + edge]
        crop = F.interpolate(crop[None], size=(size, size), mode="area")[0]
        found.append(crop.flip(2) if generator.integers(2) else crop)
    return torch.stack(found)


@cache
def _photos() -> tuple[Tensor, ...]:
    """Two photographs, [3, 427, 640] from 0 to 1."""
    from sklearn.datasets import load_sample_images

    images: list[NDArray[np.uint8]] = load_sample_images().images
    return tuple(torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1) for image in images)


def _uniform(generator: np.random.Generator, low: float, high: float, *shape: int) -> Tensor:
    return torch.from_numpy(generator.uniform(low, high, shape).astype(np.float32))
