"""Example inputs, the same on every call and independent of the caller's random state."""

import torch
from torch import Tensor

BATCH = 2


def images(channels: int, size: int) -> Tensor:
    """Normalized noise images, ``[2, channels, size, size]`` float32."""
    return features(channels, size, size)


def features(*shape: int) -> Tensor:
    """Standard normal numbers, ``[2, *shape]`` float32."""
    return torch.randn(BATCH, *shape, generator=_generator(), device="cpu")


def tokens(vocabulary: int, length: int) -> Tensor:
    """Token ids below ``vocabulary``, ``[2, length]`` int64."""
    return torch.randint(vocabulary, (BATCH, length), generator=_generator(), device="cpu")


def _generator() -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(0)
