"""Random blocks that take a sequence (length, channels) or a vector (channels), and make another one."""

from typing import Any

import torch
from random_parts import MOST, Draw, HandMadeAttention, Made, Part, Shape, make_activation, make_row_norm
from torch import Tensor, nn
from torch.nn import functional as F


def project(draw: Draw, shape: Shape) -> Made:
    """A linear layer with a normalization and an activation, on a sequence or a vector."""
    after = draw.width()
    norm = make_row_norm(draw, after)
    if len(shape) == 1 and draw.chance(0.4):
        norm = nn.BatchNorm1d(after)
    return nn.Sequential(nn.Linear(shape[-1], after, draw.chance(0.8)), norm, make_activation(draw, 1)), (
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
    return Part(compute, norm=make_row_norm(draw, width), up=up, down=down), shape


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

    return Part(compute, norm=make_row_norm(draw, width), layer=layer, **memory), shape


def attend_by_hand(draw: Draw, shape: Shape) -> Made:
    """Attention whose heads are split by hand beside a residual sum."""
    layer = HandMadeAttention(draw, shape[-1], _heads(draw, shape[-1]))
    return Part(lambda self, x: x + self.layer(self.norm(x)), norm=make_row_norm(draw, shape[-1]), layer=layer), shape


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
    if shape[-1] > MOST // 2:
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
