"""Networks of matrix products whose weights and live values are known by construction; no biases, nothing in place."""

import torch
from torch import Tensor, nn


class Chain(nn.Module):
    """One product after another: the value before and the value after are live at once. ``x``: [batch, width]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Shape [batch, width]."""
        for weight in self.weights:
            x = x @ weight
        return x


class Branches(nn.Module):
    """Products of the same input, all of them live until the last is made, then joined. ``x``: [batch, width]."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Shape [batch, width × depth]."""
        return torch.cat([x @ weight for weight in self.weights], dim=1)


class Lookup(nn.Module):
    """Rows of an embedding, of which a call reads few. ``x``: [batch], int64."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(width * depth, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape [batch, width]."""
        rows: Tensor = self.table(x)
        return rows


def chain(width: int, depth: int) -> tuple[nn.Module, Tensor]:
    """A factory: ``products.py:chain(width=1024,depth=8)``."""
    return Chain(width, depth), torch.randn(2, width)


def branches(width: int, depth: int) -> tuple[nn.Module, Tensor]:
    """A factory: ``products.py:branches(width=512,depth=8)``."""
    return Branches(width, depth), torch.randn(2, width)


def lookup(width: int, depth: int) -> tuple[nn.Module, Tensor]:
    """A factory: ``products.py:lookup(width=256,depth=256)``."""
    return Lookup(width, depth), torch.zeros(2, dtype=torch.int64)
