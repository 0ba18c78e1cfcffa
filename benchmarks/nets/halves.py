"""Networks that answer otherwise in float16, with the float answers of the trained ones that they were made from.

What breaks them is known from published models: squares in normalizations that are written out (T5, LLaMA), a softmax
without its maximum subtracted, sums over pixels before they are divided, variances as differences of means, masks made
by a product with the lowest float32, lengths of small vectors, and angles of large positions (the time steps of
diffusion models).
"""

import attention
import networks
import torch
from networks import Example
from torch import Tensor, nn

_RESIDUAL = 512.0
"""Factor of what shortcuts carry; a normalization takes it out again."""
_SHIFT = 12.0
"""Added to scores of attention, which a softmax does not see."""
_SUMMED = 4096.0
"""Factor of features, of which up to sixteen are added up."""
_SMALL = 1e-4
STEPS = 4000.0


class _PowerNorm(nn.Module):
    """Layer normalization in simple operators, as models write it that come without a fused one."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        y: Tensor = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias
        return y


def swin_powers() -> tuple[nn.Module, Example]:
    """The windowed transformer with shortcuts 512 times as large, and normalizations by squares."""
    network, example = attention.swin()
    _scale(network.patches[-1], _RESIDUAL)
    network.positions.data *= _RESIDUAL
    for stage, merge in zip(network.stages, network.merges, strict=True):
        for windows in stage:
            layer = windows.layer
            _scale(layer.attention.out, _RESIDUAL)
            _scale(layer.mlp[2], _RESIDUAL)
            layer.norm1, layer.norm2 = _PowerNorm(layer.norm1), _PowerNorm(layer.norm2)
        _scale(merge[1], _RESIDUAL)
        merge[0] = _PowerNorm(merge[0])
    network.norm = _PowerNorm(network.norm)
    return network, example


def _scale(product: nn.Module, factor: float) -> None:
    product.weight.data *= factor
    if product.bias is not None:
        product.bias.data *= factor


class _ExponentialAttention(nn.Module):
    """Attention whose softmax is written out, without its maximum subtracted."""

    def __init__(self, part: attention.Attention) -> None:
        super().__init__()
        self.qkv, self.out, self.head_width = part.qkv, part.out, part.head_width

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(-3, -2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-2, -1) * self.head_width**-0.5 + _SHIFT
        shares = torch.exp(scores if mask is None else scores + mask)
        mixed = shares @ value / shares.sum(-1, keepdim=True)
        y: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return y


def swin_exponentials() -> tuple[nn.Module, Example]:
    """The windowed transformer with a softmax of its own."""
    network, example = attention.swin()
    for stage in network.stages:
        for windows in stage:
            windows.layer.attention = _ExponentialAttention(windows.layer.attention)
    return network, example


class _Summed(nn.Module):
    """A classifier of the sum over pixels, which is divided afterwards."""

    def __init__(self, features: nn.Module, fc: nn.Linear) -> None:
        super().__init__()
        self.features, self.fc = features, fc

    def forward(self, image: Tensor) -> Tensor:
        x = self.features(image)
        logits: Tensor = self.fc((x * _SUMMED).sum((2, 3)) / (_SUMMED * x.shape[2] * x.shape[3]))
        return logits


def mobilenet_sums() -> tuple[nn.Module, Example]:
    """MobileNetV2 with the mean over pixels as a sum."""
    network, example = networks.mobilenet()
    return _Summed(network.features, network.fc), example


class _Standardized(nn.Module):
    """A network of pictures from 0 to 255, each of which is brought to a mean of 0 and a deviation of 1."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        x = image.sigmoid() * 32 + 200
        mean = x.mean((1, 2, 3), keepdim=True)
        variance = (x * x).mean((1, 2, 3), keepdim=True) - mean * mean
        logits: Tensor = self.network((x - mean) / torch.sqrt(variance + 1e-6))
        return logits


def mobilenet_variances() -> tuple[nn.Module, Example]:
    """MobileNetV2 behind a standardization by the mean of squares less the square of the mean."""
    network, example = networks.mobilenet()
    return _Standardized(network), example


class _Embedding(nn.Module):
    """MiniLM with its last steps written out: a mask by a product, and a length of small numbers."""

    def __init__(self, encoder: networks.Encoder, *, small: float) -> None:
        super().__init__()
        self.bert, self.small = encoder.bert, small

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        counts = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * counts).sum(1) / counts.sum(1) * self.small
        y: Tensor = mean / (mean.pow(2).sum(-1, keepdim=True).sqrt() + 1e-12)
        return y


def minilm_lengths() -> tuple[nn.Module, Example]:
    """The embedding of a sentence, small before it is brought to length 1."""
    network, example = networks.minilm_embedding()
    return _Embedding(network, small=_SMALL), example


class _Greatest(nn.Module):
    """MiniLM with the greatest of each number over the tokens that count."""

    def __init__(self, encoder: networks.Encoder) -> None:
        super().__init__()
        self.bert = encoder.bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        absent = (1 - attention_mask.unsqueeze(-1).to(states.dtype)) * torch.finfo(torch.float32).min
        return nn.functional.normalize((states + absent).amax(1), dim=1)


def minilm_masks() -> tuple[nn.Module, Example]:
    """The embedding of a sentence by the greatest over its tokens; others are masked by the lowest float32."""
    network, example = networks.minilm_embedding()
    return _Greatest(network), example


class _Timed(nn.Module):
    """MobileNetV2 that is told a time step, by sines and cosines that its features are weighted by."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.features, self.fc = network.features, network.fc
        self.register_buffer("frequencies", torch.logspace(0, -4, self.fc.in_features // 2))

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        angles = step[:, None] * self.frequencies
        logits: Tensor = self.fc(self.features(image).mean((2, 3)) * torch.cat([angles.sin(), angles.cos()], 1))
        return logits


def mobilenet_angles() -> tuple[nn.Module, Example]:
    """MobileNetV2 with a time step from 0 to 4 000."""
    network, example = networks.mobilenet()
    return _Timed(network), {**example, "step": torch.tensor([0.0, STEPS])}
