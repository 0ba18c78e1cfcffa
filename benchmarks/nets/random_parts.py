"""Parts that random blocks are made of: the source of chance, layers written by hand, and layers of random kinds."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]
Made = tuple[nn.Module, Shape]
_WIDTHS = (2, 3, 4, 6, 8, 8, 12, 16, 16, 20, 24, 32, 32, 48)
MOST = 96
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


def make_activation(draw: Draw, width: int) -> nn.Module:
    made: Sequence[Callable[[], nn.Module]] = (
        *(nn.ReLU, nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.Identity),
        *(lambda: nn.PReLU(width), lambda: nn.PReLU(1), lambda: nn.LeakyReLU(0.1), lambda: nn.ReLU(inplace=True)),
    )
    return draw.choice(made)()


def make_image_norm(draw: Draw, width: int) -> nn.Module:
    made: Sequence[Callable[[], nn.Module]] = (
        *(lambda: nn.BatchNorm2d(width),) * 4,
        lambda: nn.BatchNorm2d(width, affine=False),
        lambda: nn.GroupNorm(draw.divisor(width), width),
        lambda: nn.GroupNorm(1, width, affine=draw.chance(0.8)),
        lambda: nn.InstanceNorm2d(width, affine=draw.chance(0.5)),
        *(nn.Identity,) * 3,
    )
    return draw.choice(made)()


def make_row_norm(draw: Draw, width: int) -> nn.Module:
    made: Sequence[Callable[[], nn.Module]] = (
        *(lambda: nn.LayerNorm(width),) * 4,
        lambda: nn.LayerNorm(width, elementwise_affine=False),
        lambda: nn.LayerNorm(width, bias=False),
        lambda: nn.RMSNorm(width),
        *(nn.Identity,) * 2,
    )
    return draw.choice(made)()


def make_conv(draw: Draw, before: int, after: int, *, groups: bool = True, bias: bool | None = None) -> nn.Conv2d:
    """Make a convolution that keeps height and width."""
    size, dilation = draw.choice((1, 1, 3, 3, 5)), draw.choice((1, 1, 1, 2))
    blocks = draw.divisor(before, after) if groups and draw.chance(0.25) else 1
    padding = dilation * (size // 2)
    mode = "replicate" if draw.chance(0.05) else "zeros"
    with_bias = draw.chance(0.7) if bias is None else bias
    return nn.Conv2d(before, after, size, 1, padding, dilation, groups=blocks, bias=with_bias, padding_mode=mode)


def make_unit(draw: Draw, before: int, after: int) -> nn.Module:
    """Make a convolution, a normalization and an activation."""
    return nn.Sequential(make_conv(draw, before, after), make_image_norm(draw, after), make_activation(draw, after))
