"""Random blocks of modules that random_modules.py puts together: all of them, and those that take any kind of value.

Each takes the source of chance and the sizes of what it is given, behind the batch: an image (channels, height, width),
a sequence (length, channels) or a vector (channels). It returns a module and the sizes of what that makes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from image_blocks import (
    channels_last,
    convolve,
    dense,
    depthwise,
    inception,
    inverted,
    places,
    pool,
    rearrange,
    residual,
    scale,
    shuffle_pixels,
    split,
    squeeze,
    transposed,
)
from random_parts import MOST, DirectConv, DirectLinear, Draw, Made, Part, Shape, make_activation, make_conv
from row_blocks import (
    attend,
    attend_by_hand,
    convolve_rows,
    encode,
    join_rows,
    mix_rows,
    outer,
    pair,
    perceive,
    place_rows,
    project,
    recur,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

Block = Callable[[Draw, Shape], Made]

# Blocks on any value.


def direct(draw: Draw, shape: Shape) -> Made:
    """A layer whose weight is a parameter of its own."""
    after = draw.width()
    if len(shape) == 3:
        return nn.Sequential(DirectConv(shape[0], after), make_activation(draw, after)), (after, *shape[1:])
    return nn.Sequential(DirectLinear(shape[-1], after, draw.chance(0.3)), make_activation(draw, 1)), (
        *shape[:-1],
        after,
    )


def reparametrized(draw: Draw, shape: Shape) -> Made:
    """A layer whose weight is computed from parameters at each call."""
    after = draw.width()
    image = len(shape) == 3
    layer = make_conv(draw, shape[0], after) if image else nn.Linear(shape[-1], after)
    way = draw.choice((parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm))
    made = nn.Sequential(way(layer), make_activation(draw, 1))
    return made, (after, *shape[1:]) if image else (*shape[:-1], after)


def twice(draw: Draw, shape: Shape) -> Made:
    """One layer that is called twice: in a row, or on two values."""
    image = len(shape) == 3
    width = shape[0] if image else shape[-1]
    way = draw.choice(("row", "sum", "join"))
    if way == "join" and 2 * width > MOST:
        way = "sum"
    layer = make_conv(draw, width, width, groups=False) if image else nn.Linear(width, width)
    other = make_conv(draw, width, width, groups=False) if image else nn.Linear(width, width)

    def compute(self: Any, x: Tensor) -> Tensor:
        if way == "row":
            return self.layer(F.relu(self.layer(x)))
        pair = self.layer(x), self.layer(F.relu(self.other(x)))
        return pair[0] + pair[1] if way == "sum" else torch.cat(pair, 1 if image else -1)

    after = 2 * width if way == "join" else width
    return Part(compute, layer=layer, other=other), (after, *shape[1:]) if image else (*shape[:-1], after)


def mix(draw: Draw, shape: Shape) -> Made:
    """Compute something of all channels of a place together, and put it back to them."""
    axis = 1 if len(shape) == 3 else -1
    ways: Sequence[Callable[[Tensor], Tensor]] = (
        lambda x: x - x.mean(axis, keepdim=True),
        lambda x: x.softmax(axis),
        lambda x: F.normalize(x, dim=axis),
        lambda x: x * x.amax(axis, keepdim=True).sigmoid(),
        lambda x: x.cumsum(axis) / x.shape[axis],
        lambda x: x * torch.rsqrt(x.pow(2).mean(axis, keepdim=True) + 1e-6),
        lambda x: x / (1 + x.abs().sum(axis, keepdim=True)),
    )
    take = draw.choice(ways)
    after = draw.width()
    if axis == 1:
        return Part(lambda self, x: take(self.enter(x)), enter=make_conv(draw, shape[0], after)), (after, *shape[1:])
    return Part(lambda self, x: take(self.enter(x)), enter=nn.Linear(shape[-1], after)), (*shape[:-1], after)


def gate(draw: Draw, shape: Shape) -> Made:
    """Multiply what one layer makes by what another one makes."""
    image = len(shape) == 3
    after = draw.width()
    layers = {
        name: make_conv(draw, shape[0], after) if image else nn.Linear(shape[-1], after) for name in ("value", "weight")
    }
    made = Part(lambda self, x: self.value(x) * F.silu(self.weight(x)), **layers)
    return made, (after, *shape[1:]) if image else (*shape[:-1], after)


# From one kind to another.


def to_vector(draw: Draw, shape: Shape) -> Made:
    """Pool or flatten what is given."""
    if len(shape) == 3:
        if math.prod(shape) <= 512 and draw.chance(0.5):
            return nn.Flatten(), (math.prod(shape),)
        return draw.choice(
            (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), Part(lambda self, x: x.amax((2, 3))))
        ), (shape[0],)
    if math.prod(shape) <= 512 and draw.chance(0.2):
        return nn.Flatten(), (math.prod(shape),)
    ways: Sequence[Callable[[Tensor], Tensor]] = (lambda x: x.mean(1), lambda x: x[:, 0], lambda x: x.amax(1))
    take = draw.choice(ways)
    return Part(lambda self, x: take(x)), (shape[-1],)


def to_rows(draw: Draw, shape: Shape) -> Made:
    """Make a sequence of an image's places, or of a vector."""
    if len(shape) == 3:
        return Part(lambda self, x: x.flatten(2).transpose(1, 2)), (shape[1] * shape[2], shape[0])
    length, width = draw.choice((2, 4)), draw.choice((4, 8, 16))
    made = Part(lambda self, x: self.enter(x).unflatten(1, (length, -1)), enter=nn.Linear(shape[0], length * width))
    return made, (length, width)


def to_image(draw: Draw, shape: Shape) -> Made:
    """Make an image of a sequence or a vector."""
    if len(shape) == 2:
        length = shape[0]
        height = next(size for size in range(math.isqrt(length), 0, -1) if length % size == 0)
        made = Part(lambda self, x: x.transpose(1, 2).unflatten(2, (height, -1)))
        return made, (shape[1], height, length // height)
    channels, written = draw.choice((2, 4, 8, 16)), draw.chance(0.5)

    def compute(self: Any, x: Tensor) -> Tensor:
        y = self.enter(x)
        return y.view(-1, channels, 4, 4) if written else y.view(y.shape[0], -1, 4, 4)

    return Part(compute, enter=nn.Linear(shape[0], channels * 16)), (channels, 4, 4)


def forget_height(draw: Draw, shape: Shape) -> Made:
    """A forward with written sizes, which makes a vector of an image."""
    channels, height, width = shape
    after, size = draw.width(), math.prod(shape)
    if draw.chance(0.5):
        return Part(lambda self, x: self.out(x.reshape(-1, size)), out=nn.Linear(size, after)), (after,)

    def compute(self: Any, x: Tensor) -> Tensor:
        return self.out(x.reshape(-1, channels, height * width).mean(2))

    return Part(compute, out=nn.Linear(channels, after)), (after,)


BLOCKS: Mapping[int, Sequence[Block]] = {
    3: (
        *(convolve, convolve, convolve, depthwise, residual, residual, squeeze, inverted, dense, inception, split),
        *(shuffle_pixels, transposed, pool, scale, direct, reparametrized, twice, rearrange, rearrange, mix, gate),
        *(places, channels_last),
    ),
    2: (
        *(project, project, perceive, perceive, attend, attend, attend_by_hand, attend_by_hand, encode, recur),
        *(convolve_rows, place_rows, mix_rows, join_rows, direct, reparametrized, twice, mix, gate),
    ),
    1: (project, project, perceive, join_rows, direct, reparametrized, twice, mix, gate, outer, pair),
}


CHANGES: Mapping[int, Sequence[Block]] = {
    3: (to_vector, to_vector, to_rows, forget_height),
    2: (to_vector, to_vector, to_image),
    1: (to_rows, to_image),
}
