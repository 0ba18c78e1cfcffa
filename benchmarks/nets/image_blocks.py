"""Random blocks that take an image (channels, height, width), and make another one."""

import math
from collections.abc import Callable
from typing import Any

import torch
from random_parts import (
    MOST,
    Draw,
    Made,
    Part,
    Shape,
    make_activation,
    make_conv,
    make_image_norm,
    make_row_norm,
    make_unit,
)
from torch import Tensor, nn
from torch.nn import functional as F


def convolve(draw: Draw, shape: Shape) -> Made:
    """A convolution, perhaps with a stride, a normalization and an activation."""
    channels, height, width = shape
    after = draw.width()
    unit = make_unit(draw, channels, after)
    if min(height, width) >= 8 and draw.chance(0.35):
        unit[0].stride = (2, 2)  # type: ignore[index, union-attr]
        height, width = (height + 1) // 2, (width + 1) // 2
    return unit, (after, height, width)


def depthwise(draw: Draw, shape: Shape) -> Made:
    """A convolution of each channel alone, perhaps to two each."""
    channels, times = shape[0], 2 if draw.chance(0.2) and shape[0] * 2 <= MOST else 1
    layer = nn.Conv2d(channels, channels * times, 3, padding=1, groups=channels, bias=draw.chance(0.5))
    return nn.Sequential(layer, make_image_norm(draw, channels * times), make_activation(draw, channels * times)), (
        channels * times,
        *shape[1:],
    )


def residual(draw: Draw, shape: Shape) -> Made:
    """Two convolutions, and what they are given is added; a projection in between at times."""
    channels, inner = shape[0], draw.width()
    project = draw.chance(0.3)
    after = draw.width() if project else channels
    first, second = make_unit(draw, channels, inner), make_unit(draw, inner, after)
    parts = {"shortcut": make_conv(draw, channels, after, groups=False)} if project else {}

    def compute(self: Any, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + (self.shortcut(x) if project else x)

    return Part(compute, first=first, second=second, **parts), (after, *shape[1:])


def squeeze(draw: Draw, shape: Shape) -> Made:
    """Squeeze-and-excitation, with linear layers or convolutions."""
    channels, inner = shape[0], draw.width()
    linear = draw.chance(0.5)
    down, up = (
        nn.Linear(*sizes) if linear else nn.Conv2d(*sizes, 1) for sizes in ((channels, inner), (inner, channels))
    )

    def compute(self: Any, x: Tensor) -> Tensor:
        y = x.mean((2, 3)) if linear else F.adaptive_avg_pool2d(x, 1)
        y = self.up(F.relu(self.down(y))).sigmoid()
        return x * (y[:, :, None, None] if linear else y)

    return Part(compute, down=down, up=up), shape


def inverted(draw: Draw, shape: Shape) -> Made:
    """An inverted residual block: wide, each channel alone, squeezed, and narrow again."""
    channels, inner = shape[0], draw.choice((16, 24, 32, 48))
    excite = squeeze(draw, (inner, *shape[1:]))[0] if draw.chance(0.5) else nn.Identity()
    body = nn.Sequential(
        nn.Conv2d(channels, inner, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.ReLU6(),
        nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False),
        nn.BatchNorm2d(inner),
        nn.Hardswish(),
        excite,
        nn.Conv2d(inner, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
    )
    return Part(lambda self, x: x + self.body(x), body=body), shape


def dense(draw: Draw, shape: Shape) -> Made:
    """Join what is given with what a convolution makes of it, on either side."""
    if shape[0] > MOST // 2:
        return convolve(draw, shape)
    growth, front = draw.choice((2, 4, 8, 16)), draw.chance(0.3)

    def compute(self: Any, x: Tensor) -> Tensor:
        y = self.grow(x)
        return torch.cat((y, x) if front else (x, y), 1)

    return Part(compute, grow=make_unit(draw, shape[0], growth)), (shape[0] + growth, *shape[1:])


def inception(draw: Draw, shape: Shape) -> Made:
    """Several convolutions of the same, joined, and normalized together."""
    widths = [draw.choice((2, 4, 8, 12, 16)) for _ in range(draw.choice((2, 3)))]
    branches = nn.ModuleList(make_unit(draw, shape[0], width) for width in widths)
    norm = make_image_norm(draw, sum(widths))

    def compute(self: Any, x: Tensor) -> Tensor:
        return self.norm(torch.cat([branch(x) for branch in self.branches], 1))

    return Part(compute, branches=branches, norm=norm), (sum(widths), *shape[1:])


def split(draw: Draw, shape: Shape) -> Made:
    """Split the channels, change a part, join them again, and perhaps shuffle them."""
    channels = draw.choice((4, 8, 12, 16, 24, 32))
    left = channels // 2 if draw.chance(0.6) else draw.choice((1, channels // 4, 3 * channels // 4))
    branch = make_unit(draw, channels - left, channels - left)
    way, shuffled, written = draw.choice(("chunk", "split", "slice")), draw.chance(0.4), draw.chance(0.3)
    even = 2 * left == channels

    def compute(self: Any, x: Tensor) -> Tensor:
        x = self.enter(x)
        if way == "chunk" and even:
            a, b = x.chunk(2, 1)
        elif way == "slice":
            a, b = x[:, :left], x[:, left:]
        else:
            a, b = x.split([left, channels - left], 1)
        y = torch.cat([a, self.branch(b)], 1)
        if not shuffled:
            return y
        count = channels if written else y.shape[1]
        return y.reshape(-1, 2, count // 2, *y.shape[2:]).transpose(1, 2).flatten(1, 2)

    return Part(compute, enter=make_conv(draw, shape[0], channels), branch=branch), (channels, *shape[1:])


def shuffle_pixels(draw: Draw, shape: Shape) -> Made:
    """Make pixels of channels, or channels of pixels."""
    channels, height, width = shape
    if height * width <= 64:
        after = draw.choice((1, 2, 4, 8))
        layers = nn.Sequential(nn.Conv2d(channels, after * 4, 3, padding=1), nn.PixelShuffle(2))
        return layers, (after, height * 2, width * 2)
    if channels * 4 <= MOST and height % 2 == width % 2 == 0:
        return nn.PixelUnshuffle(2), (channels * 4, height // 2, width // 2)
    return pool(draw, shape)


def transposed(draw: Draw, shape: Shape) -> Made:
    """A transposed convolution, in groups at times."""
    channels, height, width = shape
    if height * width > 64:
        return pool(draw, shape)
    after = channels if draw.chance(0.2) else draw.width()
    groups = channels if after == channels and draw.chance(0.5) else draw.divisor(channels, after)
    layer = nn.ConvTranspose2d(channels, after, 2, 2, groups=groups if draw.chance(0.5) else 1)
    return nn.Sequential(layer, make_image_norm(draw, after), make_activation(draw, after)), (
        after,
        height * 2,
        width * 2,
    )


def pool(draw: Draw, shape: Shape) -> Made:
    """Pool, or interpolate."""
    channels, height, width = shape
    if min(height, width) < 4:
        mode = draw.choice(("nearest", "bilinear"))
        return nn.Upsample(scale_factor=2, mode=mode), (channels, height * 2, width * 2)
    kind = draw.choice((nn.MaxPool2d, nn.AvgPool2d))
    return kind(2), (channels, height // 2, width // 2)


def scale(draw: Draw, shape: Shape) -> Made:
    """Multiply each channel by a parameter, and add one."""
    factors, shifts = (nn.Parameter(torch.empty(shape[0], 1, 1)) for _ in range(2))
    return Part(lambda self, x: x * self.factors + self.shifts, factors=factors, shifts=shifts), shape


def rearrange(draw: Draw, shape: Shape) -> Made:
    """Take some channels, repeat them, or put them into another order."""
    channels = shape[0]
    order = draw.sample(range(channels), max(1, channels - draw.choice((0, 1))))
    ways: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "first": (lambda x: x[:, : channels // 2], channels // 2),
        "second": (lambda x: x[:, 1::2], channels // 2),
        "order": (lambda x: x[:, order], len(order)),
        "roll": (lambda x: x.roll(1, 1), channels),
        "flip": (lambda x: x.flip(1), channels),
        "pad": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), channels + 3),
        "repeat": (lambda x: x.repeat(1, 2, 1, 1), channels * 2),
        "repeat each": (lambda x: x.repeat_interleave(2, 1), channels * 2),
        "interleave": (lambda x: torch.stack([x, x.relu()], 2).flatten(1, 2), channels * 2),
        "shuffle": (lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), channels),
        "maximum": (lambda x: x.unflatten(1, (2, -1)).amax(1), channels // 2),
        "sum of neighbors": (lambda x: x.unflatten(1, (-1, 2)).sum(2), channels // 2),
        "glu": (lambda x: F.glu(x, 1), channels // 2),
        "drop first": (lambda x: x[:, 1:], channels - 1),
        "broadcast": (lambda x: x[:, :1] * x, channels),
    }
    even = ("shuffle", "maximum", "sum of neighbors", "glu")
    fitting = [
        name
        for name, (_, after) in ways.items()
        if 1 <= after <= MOST and not (name in even and channels % 2) and channels > 1
    ]
    if not fitting:
        return convolve(draw, shape)
    take, after = ways[draw.choice(fitting)]
    return Part(lambda self, x: take(self.enter(x)), enter=make_conv(draw, channels, channels)), (after, *shape[1:])


def places(draw: Draw, shape: Shape) -> Made:
    """Attention of one head over the places of an image."""
    channels, inner = shape[0], draw.choice((4, 8, 16))

    def compute(self: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).flatten(2) for layer in (self.query, self.key, self.value))
        y = v @ (q.transpose(1, 2) @ k / math.sqrt(inner)).softmax(-1).transpose(1, 2)
        return x + self.out(y.unflatten(2, x.shape[2:]))

    layers = [nn.Conv2d(channels, inner, 1) for _ in range(3)]
    names = ("query", "key", "value")
    return Part(compute, **dict(zip(names, layers, strict=True)), out=nn.Conv2d(inner, channels, 1)), shape


def channels_last(draw: Draw, shape: Shape) -> Made:
    """Linear layers and a normalization over channels that were moved to the end."""
    channels, inner = shape[0], draw.width()

    def compute(self: Any, x: Tensor) -> Tensor:
        y = self.grow(self.norm(self.alone(x).permute(0, 2, 3, 1)))
        return x + (self.factors * self.shrink(F.gelu(y))).permute(0, 3, 1, 2)

    alone = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
    factors, norm = nn.Parameter(torch.empty(channels)), make_row_norm(draw, channels)
    grow, shrink = nn.Linear(channels, inner), nn.Linear(inner, channels)
    return Part(compute, alone=alone, norm=norm, grow=grow, shrink=shrink, factors=factors), shape
