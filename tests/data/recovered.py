"""A small network, its samples, and the record of both that training takes."""

import torch
from torch import nn

from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.passes.finetune.batches import Batch
from enginesmith.pipeline.tensors import Signature, TensorSpec


class Net(nn.Module):
    """Two stages of convolutions, the second at half the size, and classes."""

    def __init__(self, width: int = 8, name: str = "logits") -> None:
        super().__init__()
        self.name = name
        self.one = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(width, 4, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {self.name: self.head(self.two(self.one(image)).mean((2, 3)))}


def model(width: int = 8, name: str = "logits", seed: int = 0) -> LoadedModel:
    torch.manual_seed(seed)
    image = TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8))
    answer = TensorSpec(name=name, dtype="float32", shape=("batch", 3))
    module = NamedForward(Net(width, name).eval(), ("image",), (name,))
    return LoadedModel(module, Signature(inputs=(image,), outputs=(answer,)), {"image": torch.zeros(2, 1, 8, 8)})


def batch(count: int = 6, labels: torch.Tensor | dict[str, torch.Tensor] | None = None) -> Batch:
    return Batch({"image": torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))}, labels)
