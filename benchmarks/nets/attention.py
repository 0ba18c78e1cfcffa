"""Two vision transformers at 32×32 pixels, with weights as in ``networks.py``: one with global attention, one with
shifted windows.

Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021); Liu et al., "Swin Transformer" (ICCV 2021). In a
shifted window, positions that are no neighbors are masked with minus infinity.
"""

import torch
from networks import CLASSES, SIZE, Example, load_trained
from torch import Tensor, nn

from enginesmith.models.inputs import images

_PATCH, _WIDTH, _DEPTH, _HEAD_WIDTH = 4, 128, 4, 32
_SWIN_PATCH, _SWIN_WIDTH, _WINDOW = 4, 96, 4
_SWIN_DEPTHS = (2, 2)
_SWIN_HEAD_WIDTH = 32


class Attention(nn.Module):
    """Multi-head self-attention of [..., tokens, width]; ``mask`` is added to the scores."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(-3, -2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-2, -1) * self.head_width**-0.5
        if mask is not None:
            scores = scores + mask
        y: Tensor = self.out((scores.softmax(-1) @ value).transpose(-3, -2).flatten(-2))
        return y


class Layer(nn.Module):
    """Attention and a perceptron, each behind a normalization, and each added to its input."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, head_width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


def _patches(width: int, patch: int) -> nn.Sequential:
    """Make patches by convolutions, with which a transformer learns from few pictures (Xiao et al., NeurIPS 2021)."""
    layers: list[nn.Module] = []
    channels = 3
    while patch > 1:
        layers += [*_convolution(channels, width // 2, 2), *_convolution(width // 2, width // 2, 1)]
        channels, patch = width // 2, patch // 2
    return nn.Sequential(*layers, *_convolution(channels, channels, 1), nn.Conv2d(channels, width, 1))


def _convolution(channels: int, width: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()


class VisionTransformer(nn.Module):
    """Patches with positions, the layers, a normalization, the mean over patches, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = _patches(_WIDTH, _PATCH)
        self.positions = nn.Parameter(torch.randn(1, (SIZE // _PATCH) ** 2, _WIDTH) * 0.02)
        self.layers = nn.Sequential(*(Layer(_WIDTH, _HEAD_WIDTH) for _ in range(_DEPTH)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.fc = nn.Linear(_WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.fc(self.norm(self.layers(x)).mean(1))
        return logits


class WindowLayer(nn.Module):
    """A layer whose attention stays within windows of [batch, height, width, channels], shifted by half or not."""

    def __init__(self, width: int, edge: int, shift: int) -> None:
        super().__init__()
        self.layer, self.shift = Layer(width, _SWIN_HEAD_WIDTH), shift
        self.register_buffer("mask", _mask_of(edge, shift), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        layer = self.layer
        moved = torch.roll(layer.norm1(x), (-self.shift, -self.shift), (1, 2)) if self.shift else layer.norm1(x)
        windows = moved.reshape(batch, height // _WINDOW, _WINDOW, width // _WINDOW, _WINDOW, channels)
        windows = windows.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        mixed = layer.attention(windows, self.mask)
        mixed = mixed.reshape(batch, height // _WINDOW, width // _WINDOW, _WINDOW, _WINDOW, channels).transpose(2, 3)
        mixed = mixed.reshape(batch, height, width, channels)
        x = x + (torch.roll(mixed, (self.shift, self.shift), (1, 2)) if self.shift else mixed)
        y: Tensor = x + layer.mlp(layer.norm2(x))
        return y


class WindowTransformer(nn.Module):
    """Two stages of windowed layers; between them, four neighbors become one position of twice the width."""

    def __init__(self) -> None:
        super().__init__()
        edge, width = SIZE // _SWIN_PATCH, _SWIN_WIDTH
        self.patches = _patches(width, _SWIN_PATCH)
        self.positions = nn.Parameter(torch.randn(1, edge, edge, width) * 0.02)
        self.stages, self.merges = nn.ModuleList(), nn.ModuleList()
        for depth in _SWIN_DEPTHS:
            self.stages.append(
                nn.Sequential(*(WindowLayer(width, edge, _WINDOW // 2 * (index % 2)) for index in range(depth)))
            )
            self.merges.append(nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)))
            edge, width = edge // 2, 2 * width
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).permute(0, 2, 3, 1) + self.positions
        for stage, merge in zip(self.stages, self.merges, strict=True):
            x = stage(x)
            corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
            x = merge(torch.cat(corners, -1))
        logits: Tensor = self.fc(self.norm(x).mean((1, 2)))
        return logits


def _mask_of(edge: int, shift: int) -> Tensor:
    """Make [windows, 1, positions, positions]: 0, and minus infinity where the shift brought strangers together."""
    region = torch.zeros(edge)
    if shift:
        region[-_WINDOW:-shift], region[-shift:] = 1, 2
    number = region[:, None] * 3 + region[None]
    windows = number.unflatten(0, (-1, _WINDOW)).unflatten(2, (-1, _WINDOW)).transpose(1, 2).reshape(-1, _WINDOW**2)
    strangers = windows[:, :, None] != windows[:, None]
    return torch.zeros(strangers.shape).masked_fill(strangers, float("-inf"))[:, None]


def vit() -> tuple[nn.Module, Example]:
    """A digit before a photo: 10 classes."""
    return load_trained(VisionTransformer(), "vit"), {"image": images(3, SIZE)}


def swin() -> tuple[nn.Module, Example]:
    """A digit before a photo, by a transformer with windows."""
    return load_trained(WindowTransformer(), "swin"), {"image": images(3, SIZE)}
