"""Networks with zero weights: a kernel that does nothing leaves the zeros that are right. `products` has others."""

import torch
from torch import nn


def _zero(net: nn.Module) -> nn.Module:
    for value in net.parameters():
        nn.init.zeros_(value)
    return net.eval()


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Linear layers of 70 KB: matrix products, which go through cuBLAS."""
    return _zero(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))), torch.zeros(4, 64)


class Scaled(nn.Module):
    """Element by element only: no library of NVIDIA's takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(1024)), nn.Parameter(torch.zeros(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.scale + self.shift)


def scaled() -> tuple[nn.Module, torch.Tensor]:
    return _zero(Scaled()), torch.zeros(4, 1024)


class Waiting(Scaled):
    """Waits for the device inside its forward: no CUDA graph can hold it, and an export does not see it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            torch.cuda.synchronize()
        return super().forward(x)


def waiting() -> tuple[nn.Module, torch.Tensor]:
    return _zero(Waiting()), torch.zeros(4, 1024)


def products() -> tuple[nn.Module, torch.Tensor]:
    """Linear layers with random weights and nothing between them: products and biases are computed, so answers are."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10)).eval(), torch.zeros(8, 64)
