"""A small residual network for 8×8 handwritten digits, with weights trained here (see train_digits.py).

The blocks are those of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2 (CIFAR-10).
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from enginesmith.models.checkpoint import load_weights
from enginesmith.models.inputs import images
from enginesmith.models.resnet import BasicBlock, initialize, stage

WEIGHTS = Path(__file__).parent / "weights" / "digits.safetensors"


class Digits(nn.Module):
    """Three stages of 16, 32 and 64 channels over 8×8, 4×4 and 2×2 pixels; 175 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(BasicBlock, 16, 16, 2, stride=1)
        self.layer2 = stage(BasicBlock, 16, 32, 2, stride=2)
        self.layer3 = stage(BasicBlock, 32, 64, 2, stride=2)
        self.fc = nn.Linear(64, 10)
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(image)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def digits(*, weights: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """Load the trained network in eval mode and two example images with values from 0 to 1.

    Raises:
        SourceError: ``weights`` cannot be loaded.
    """
    module = Digits()
    load_weights(module, str(WEIGHTS) if weights is None else weights)
    return module.eval(), {"image": images(1, 8).sigmoid()}
