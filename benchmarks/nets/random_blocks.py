"""Random blocks of modules that random_modules.py puts together.

Each takes the source of chance and the sizes of what it is given, behind the batch: an image (channels, height, width),
a sequence (length, channels) or a vector (channels). It returns a module and the sizes of what that makes.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

Shape = tuple[int, ...]
_WIDTHS = (2, 3, 4, 6, 8, 8, 12, 16, 16, 20, 24, 32, 32, 48)
_MOST = 96
"""Channels that no block makes more of by joining what it is given."""


class Draw(random.Random):
    """Random choices of one seed."""

    def chance(self, share: float) -> bool:
        """Draw whether something happens."""
        return self.random() < share

    def width(self) -> int:
        """Draw a number of channels."""
        return self.choice(_WIDTHS)

    def divisor(self, *numbers: int) -> int:
        """Draw a number that divides all of these."""
        common = math.gcd(*numbers)
        return self.choice([size for size in range(1, common + 1) if common % size == 0])


class Part(nn.Module):
    """Modules, parameters and numbers by name, and a function as the forward."""

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.compute = compute

    def forward(self, *values: Tensor) -> Any:
        return self.compute(self, *values)


class DirectConv(nn.Module):
    """A convolution whose weight is a parameter of its own."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.kernel, self.shift = nn.Parameter(torch.empty(after, before, 3, 3)), nn.Parameter(torch.empty(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, self.shift, padding=1)


class DirectLinear(nn.Module):
    """A linear layer whose weight is a parameter of its own."""

    def __init__(self, before: int, after: int, matmul: bool) -> None:
        super().__init__()
        self.kernel, self.matmul = nn.Parameter(torch.empty(after, before)), matmul

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel.transpose(0, 1) if self.matmul else F.linear(x, self.kernel)


class HandMadeAttention(nn.Module):
    """Attention whose heads are split by hand, in one of the ways that people write it."""

    def __init__(self, draw: Draw, width: int, heads: int) -> None:
        super().__init__()
        bias = draw.chance(0.7)
        self.way = draw.choice(("three", "packed-chunk", "packed-unbind", "packed-split", "grouped", "written"))
        self.num_heads, self.fused, self.size = heads, draw.chance(0.5), width // heads
        if draw.chance(0.5):
            self.head_dim, self.all_head_size = width // heads, width
        if self.way.startswith("packed"):
            self.qkv = nn.Linear(width, 3 * width, bias)
        elif self.way == "grouped":
            self.kv_heads = draw.divisor(heads)
            self.query = nn.Linear(width, width, bias)
            self.key, self.value = (nn.Linear(width, self.kv_heads * self.size, bias) for _ in range(2))
        else:
            self.query, self.key, self.value = (nn.Linear(width, width, bias) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.written = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        if self.way == "packed-unbind":
            q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            if self.way == "packed-chunk":
                parts: Sequence[Tensor] = self.qkv(x).chunk(3, -1)
            elif self.way == "packed-split":
                packed = self.qkv(x)
                parts = packed.split(packed.shape[-1] // 3, -1)
            else:
                parts = [layer(x) for layer in (self.query, self.key, self.value)]
            if self.way == "grouped":
                heads: tuple[int, ...] = (self.num_heads, self.kv_heads, self.kv_heads)
            else:
                heads = (self.written if self.way == "written" else self.num_heads,) * 3
            q, k, v = (
                part.view(batch, length, count, -1).transpose(1, 2) for part, count in zip(parts, heads, strict=True)
            )
        if self.way == "grouped":
            k, v = (part.repeat_interleave(self.num_heads // self.kv_heads, 1) for part in (k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


Made = tuple[nn.Module, Shape]
Block = Callable[[Draw, Shape], Made]


def _activation(draw: Draw, width: int) -> nn.Module:
    made: Sequence[Callable[[], nn.Module]] = (
        *(nn.ReLU, nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.Identity),
        *(lambda: nn.PReLU(width), lambda: nn.PReLU(1), lambda: nn.LeakyReLU(0.1), lambda: nn.ReLU(inplace=True)),
    )
    return draw.choice(made)()


def _image_norm(draw: Draw, width: int) -> nn.Module:
    made: Sequence[Callable[[], nn.Module]] = (
        *(lambda: nn.BatchNorm2d(width),) * 4,
        lambda: nn.BatchNorm2d(width, affine=False),
        lambda: nn.GroupNorm(draw.divisor(width), width),
        lambda: nn.GroupNorm(1, width, affine=draw.chance(0.8)),
        lambda: nn.InstanceNorm2d(width, affine=draw.chance(0.5)),
        *(nn.Identity,) * 3,
    )
    return draw.choice(made)()


def _row_norm(draw: Draw, width: int) -> nn.Module:
    made: Sequence[Callable[[], nn.Module]] = (
        *(lambda: nn.LayerNorm(width),) * 4,
        lambda: nn.LayerNorm(width, elementwise_affine=False),
        lambda: nn.LayerNorm(width, bias=False),
        lambda: nn.RMSNorm(width),
        *(nn.Identity,) * 2,
    )
    return draw.choice(made)()


def _conv(draw: Draw, before: int, after: int, *, groups: bool = True, bias: bool | None = None) -> nn.Conv2d:
    """Make a convolution that keeps height and width."""
    size, dilation = draw.choice((1, 1, 3, 3, 5)), draw.choice((1, 1, 1, 2))
    blocks = draw.divisor(before, after) if groups and draw.chance(0.25) else 1
    padding = dilation * (size // 2)
    mode = "replicate" if draw.chance(0.05) else "zeros"
    with_bias = draw.chance(0.7) if bias is None else bias
    return nn.Conv2d(before, after, size, 1, padding, dilation, groups=blocks, bias=with_bias, padding_mode=mode)


def _unit(draw: Draw, before: int, after: int) -> nn.Module:
    """Make a convolution, a normalization and an activation."""
    return nn.Sequential(_conv(draw, before, after), _image_norm(draw, after), _activation(draw, after))


# Blocks on images.


def convolve(draw: Draw, shape: Shape) -> Made:
    """A convolution, perhaps with a stride, a normalization and an activation."""
    channels, height, width = shape
    after = draw.width()
    unit = _unit(draw, channels, after)
    if min(height, width) >= 8 and draw.chance(0.35):
        unit[0].stride = (2, 2)  # type: ignore[index, union-attr]
        height, width = (height + 1) // 2, (width + 1) // 2
    return unit, (after, height, width)


def depthwise(draw: Draw, shape: Shape) -> Made:
    """A convolution of each channel alone, perhaps to two each."""
    channels, times = shape[0], 2 if draw.chance(0.2) and shape[0] * 2 <= _MOST else 1
    layer = nn.Conv2d(channels, channels * times, 3, padding=1, groups=channels, bias=draw.chance(0.5))
    return nn.Sequential(layer, _image_norm(draw, channels * times), _activation(draw, channels * times)), (
        channels * times,
        *shape[1:],
    )


def residual(draw: Draw, shape: Shape) -> Made:
    """Two convolutions, and what they are given is added; a projection in between at times."""
    channels, inner = shape[0], draw.width()
    project = draw.chance(0.3)
    after = draw.width() if project else channels
    first, second = _unit(draw, channels, inner), _unit(draw, inner, after)
    parts = {"shortcut": _conv(draw, channels, after, groups=False)} if project else {}

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
    if shape[0] > _MOST // 2:
        return convolve(draw, shape)
    growth, front = draw.choice((2, 4, 8, 16)), draw.chance(0.3)

    def compute(self: Any, x: Tensor) -> Tensor:
        y = self.grow(x)
        return torch.cat((y, x) if front else (x, y), 1)

    return Part(compute, grow=_unit(draw, shape[0], growth)), (shape[0] + growth, *shape[1:])


def inception(draw: Draw, shape: Shape) -> Made:
    """Several convolutions of the same, joined, and normalized together."""
    widths = [draw.choice((2, 4, 8, 12, 16)) for _ in range(draw.choice((2, 3)))]
    branches = nn.ModuleList(_unit(draw, shape[0], width) for width in widths)
    norm = _image_norm(draw, sum(widths))

    def compute(self: Any, x: Tensor) -> Tensor:
        return self.norm(torch.cat([branch(x) for branch in self.branches], 1))

    return Part(compute, branches=branches, norm=norm), (sum(widths), *shape[1:])


def split(draw: Draw, shape: Shape) -> Made:
    """Split the channels, change a part, join them again, and perhaps shuffle them."""
    channels = draw.choice((4, 8, 12, 16, 24, 32))
    left = channels // 2 if draw.chance(0.6) else draw.choice((1, channels // 4, 3 * channels // 4))
    branch = _unit(draw, channels - left, channels - left)
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

    return Part(compute, enter=_conv(draw, shape[0], channels), branch=branch), (channels, *shape[1:])


def shuffle_pixels(draw: Draw, shape: Shape) -> Made:
    """Make pixels of channels, or channels of pixels."""
    channels, height, width = shape
    if height * width <= 64:
        after = draw.choice((1, 2, 4, 8))
        layers = nn.Sequential(nn.Conv2d(channels, after * 4, 3, padding=1), nn.PixelShuffle(2))
        return layers, (after, height * 2, width * 2)
    if channels * 4 <= _MOST and height % 2 == width % 2 == 0:
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
    return nn.Sequential(layer, _image_norm(draw, after), _activation(draw, after)), (after, height * 2, width * 2)


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


def direct(draw: Draw, shape: Shape) -> Made:
    """A layer whose weight is a parameter of its own."""
    after = draw.width()
    if len(shape) == 3:
        return nn.Sequential(DirectConv(shape[0], after), _activation(draw, after)), (after, *shape[1:])
    return nn.Sequential(DirectLinear(shape[-1], after, draw.chance(0.3)), _activation(draw, 1)), (*shape[:-1], after)


def reparametrized(draw: Draw, shape: Shape) -> Made:
    """A layer whose weight is computed from parameters at each call."""
    after = draw.width()
    image = len(shape) == 3
    layer = _conv(draw, shape[0], after) if image else nn.Linear(shape[-1], after)
    way = draw.choice((parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm))
    made = nn.Sequential(way(layer), _activation(draw, 1))
    return made, (after, *shape[1:]) if image else (*shape[:-1], after)


def twice(draw: Draw, shape: Shape) -> Made:
    """One layer that is called twice: in a row, or on two values."""
    image = len(shape) == 3
    width = shape[0] if image else shape[-1]
    way = draw.choice(("row", "sum", "join"))
    if way == "join" and 2 * width > _MOST:
        way = "sum"
    layer = _conv(draw, width, width, groups=False) if image else nn.Linear(width, width)
    other = _conv(draw, width, width, groups=False) if image else nn.Linear(width, width)

    def compute(self: Any, x: Tensor) -> Tensor:
        if way == "row":
            return self.layer(F.relu(self.layer(x)))
        pair = self.layer(x), self.layer(F.relu(self.other(x)))
        return pair[0] + pair[1] if way == "sum" else torch.cat(pair, 1 if image else -1)

    after = 2 * width if way == "join" else width
    return Part(compute, layer=layer, other=other), (after, *shape[1:]) if image else (*shape[:-1], after)


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
        if 1 <= after <= _MOST and not (name in even and channels % 2) and channels > 1
    ]
    if not fitting:
        return convolve(draw, shape)
    take, after = ways[draw.choice(fitting)]
    return Part(lambda self, x: take(self.enter(x)), enter=_conv(draw, channels, channels)), (after, *shape[1:])


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
        return Part(lambda self, x: take(self.enter(x)), enter=_conv(draw, shape[0], after)), (after, *shape[1:])
    return Part(lambda self, x: take(self.enter(x)), enter=nn.Linear(shape[-1], after)), (*shape[:-1], after)


def gate(draw: Draw, shape: Shape) -> Made:
    """Multiply what one layer makes by what another one makes."""
    image = len(shape) == 3
    after = draw.width()
    layers = {
        name: _conv(draw, shape[0], after) if image else nn.Linear(shape[-1], after) for name in ("value", "weight")
    }
    made = Part(lambda self, x: self.value(x) * F.silu(self.weight(x)), **layers)
    return made, (after, *shape[1:]) if image else (*shape[:-1], after)


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
    factors, norm = nn.Parameter(torch.empty(channels)), _row_norm(draw, channels)
    grow, shrink = nn.Linear(channels, inner), nn.Linear(inner, channels)
    return Part(compute, alone=alone, norm=norm, grow=grow, shrink=shrink, factors=factors), shape


def forget_height(draw: Draw, shape: Shape) -> Made:
    """A forward with written sizes, which makes a vector of an image."""
    channels, height, width = shape
    after, size = draw.width(), math.prod(shape)
    if draw.chance(0.5):
        return Part(lambda self, x: self.out(x.reshape(-1, size)), out=nn.Linear(size, after)), (after,)

    def compute(self: Any, x: Tensor) -> Tensor:
        return self.out(x.reshape(-1, channels, height * width).mean(2))

    return Part(compute, out=nn.Linear(channels, after)), (after,)


# Blocks on sequences.


def project(draw: Draw, shape: Shape) -> Made:
    """A linear layer with a normalization and an activation, on a sequence or a vector."""
    after = draw.width()
    norm = _row_norm(draw, after)
    if len(shape) == 1 and draw.chance(0.4):
        norm = nn.BatchNorm1d(after)
    return nn.Sequential(nn.Linear(shape[-1], after, draw.chance(0.8)), norm, _activation(draw, 1)), (
        *shape[:-1],
        after,
    )


def perceive(draw: Draw, shape: Shape) -> Made:
    """A perceptron beside a residual sum, gated at times."""
    width, inner, gated = shape[-1], draw.choice((8, 16, 24, 32, 48)), draw.chance(0.4)

    def compute(self: Any, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        if gated:
            a, b = y.chunk(2, -1)
            return x + self.down(F.silu(a) * b)
        return x + self.down(F.gelu(y))

    up, down = nn.Linear(width, inner * 2 if gated else inner), nn.Linear(inner, width)
    return Part(compute, norm=_row_norm(draw, width), up=up, down=down), shape


def _heads(draw: Draw, width: int) -> int:
    fitting = [heads for heads in (1, 2, 3, 4, 8) if width % heads == 0 and width // heads >= 2]
    return draw.choice(fitting or [1])


def attend(draw: Draw, shape: Shape) -> Made:
    """Attention of torch.nn beside a residual sum."""
    width = shape[-1]
    first, weights, bias = draw.chance(0.7), draw.chance(0.3), draw.chance(0.8)
    other = draw.chance(0.2)
    sizes = {"kdim": width, "vdim": width} if draw.chance(0.1) else {}
    if other:
        sizes = {"kdim": 8, "vdim": 8}
    layer = nn.MultiheadAttention(width, _heads(draw, width), bias=bias, batch_first=first, **sizes)
    memory = {"memory": nn.Linear(width, 8)} if other else {}

    def compute(self: Any, x: Tensor) -> Tensor:
        y = self.norm(x)
        given = y if first else y.transpose(0, 1)
        from_where = self.memory(given) if other else given
        y = self.layer(given, from_where, from_where, need_weights=weights)[0]
        return x + (y if first else y.transpose(0, 1))

    return Part(compute, norm=_row_norm(draw, width), layer=layer, **memory), shape


def attend_by_hand(draw: Draw, shape: Shape) -> Made:
    """Attention whose heads are split by hand beside a residual sum."""
    layer = HandMadeAttention(draw, shape[-1], _heads(draw, shape[-1]))
    return Part(lambda self, x: x + self.layer(self.norm(x)), norm=_row_norm(draw, shape[-1]), layer=layer), shape


def encode(draw: Draw, shape: Shape) -> Made:
    """A layer of a transformer of torch.nn."""
    width = shape[-1]
    layer = nn.TransformerEncoderLayer(
        width,
        _heads(draw, width),
        draw.choice((16, 32)),
        batch_first=True,
        norm_first=draw.chance(0.5),
        activation=draw.choice(("relu", "gelu")),
    )
    return nn.TransformerEncoder(layer, 2) if draw.chance(0.2) else layer, shape


def recur(draw: Draw, shape: Shape) -> Made:
    """A recurrent layer, perhaps in both directions."""
    hidden, both = draw.choice((4, 8, 12)), draw.chance(0.4)
    kind = draw.choice((nn.LSTM, nn.LSTM, nn.GRU))
    layer = kind(shape[-1], hidden, draw.choice((1, 1, 2)), batch_first=True, bidirectional=both)
    return Part(lambda self, x: self.layer(x)[0], layer=layer), (shape[0], hidden * (1 + both))


def convolve_rows(draw: Draw, shape: Shape) -> Made:
    """A convolution along a sequence, of each channel alone at times."""
    after, alone = draw.width(), draw.chance(0.3)
    after = shape[-1] if alone else after
    layer = nn.Conv1d(shape[-1], after, 3, padding=1, groups=shape[-1] if alone else 1)
    norm = draw.choice((nn.Identity(), nn.BatchNorm1d(after)))
    made = Part(
        lambda self, x: F.relu(self.norm(self.layer(x.transpose(1, 2)))).transpose(1, 2), layer=layer, norm=norm
    )
    return made, (shape[0], after)


def place_rows(draw: Draw, shape: Shape) -> Made:
    """Add a parameter for each place, or put a row of parameters in front."""
    if draw.chance(0.5):
        places = nn.Parameter(torch.empty(1, *shape))
        return Part(lambda self, x: x + self.places, places=places), shape
    token = nn.Parameter(torch.empty(1, 1, shape[-1]))

    def compute(self: Any, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)

    return Part(compute, token=token), (shape[0] + 1, shape[1])


def mix_rows(draw: Draw, shape: Shape) -> Made:
    """A perceptron over the places of a sequence, as in MLP-Mixer."""
    inner = draw.width()
    up, down = nn.Linear(shape[0], inner), nn.Linear(inner, shape[0])
    made = Part(lambda self, x: x + self.down(F.gelu(self.up(x.transpose(1, 2)))).transpose(1, 2), up=up, down=down)
    return made, shape


def join_rows(draw: Draw, shape: Shape) -> Made:
    """Join what is given with what a linear layer makes of it."""
    if shape[-1] > _MOST // 2:
        return project(draw, shape)
    growth = draw.choice((2, 4, 8, 16))
    made = Part(lambda self, x: torch.cat([x, self.grow(x)], -1), grow=nn.Linear(shape[-1], growth))
    return made, (*shape[:-1], shape[-1] + growth)


def outer(draw: Draw, shape: Shape) -> Made:
    """Multiply each of some features by each of some others."""
    sizes, after = [draw.choice((2, 4, 8)) for _ in range(2)], draw.width()

    def compute(self: Any, x: Tensor) -> Tensor:
        return self.out((self.left(x)[:, :, None] * self.right(x)[:, None, :]).flatten(1))

    layers = [nn.Linear(shape[0], size) for size in sizes]
    return Part(compute, left=layers[0], right=layers[1], out=nn.Linear(sizes[0] * sizes[1], after)), (after,)


def pair(draw: Draw, shape: Shape) -> Made:
    """A bilinear layer."""
    after = draw.width()
    return Part(lambda self, x: self.layer(x, x), layer=nn.Bilinear(shape[0], shape[0], after)), (after,)


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
