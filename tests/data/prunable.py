"""Small modules for tests of pruning, and pruning in one call."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from enginesmith.pipeline.passes.prune import prune as pruner
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.prune.prune import Pruned

IMAGE = (2, 3, 8, 8)


class Of(nn.Module):
    """Modules by name, and a forward that is handed them."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def head(width: int, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def joined(a: int, b: int) -> nn.Module:
    """Two convolutions whose outputs are joined, and one behind them that is called twice: one group has all units."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = torch.cat([self.a(x), self.b(x)], 1)
        return self.head(self.both(F.relu(self.both(x))))

    both = nn.Conv2d(a + b, a + b, 1)
    return Of(forward, a=nn.Conv2d(3, a, 1), b=nn.Conv2d(3, b, 1), both=both, head=head(a + b))


def prune(model: nn.Module, shape: tuple[int, ...] = IMAGE, target: str = "0.3", **options: object) -> Pruned:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    chosen = PruneOptions.model_validate({"scope": "uniform", "multiple_of": 8, **options})
    return pruner.prune(model.eval(), lambda: (model(x),), PruneTarget.parse(target), chosen)
