"""ResNet, v1.5: the stride sits in the 3×3 convolution of a bottleneck.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. State-dict keys are torchvision's.
"""

import torch
from torch import Tensor, nn

from enginesmith.models.checkpoint import load_weights
from enginesmith.models.inputs import images


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, and a shortcut."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        channels_out = width * self.expansion
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.downsample = _projection(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A 7×7 stem, four stages of residual blocks, global average pooling and a linear head."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        grown = block.expansion
        self.layer1 = stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = stage(block, 64 * grown, 128, depths[1], stride=2)
        self.layer3 = stage(block, 128 * grown, 256, depths[2], stride=2)
        self.layer4 = stage(block, 256 * grown, 512, depths[3], stride=2)
        self.fc = nn.Linear(512 * grown, num_classes)
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(image))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def stage(
    block: type[BasicBlock] | type[Bottleneck], channels_in: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    """Chain ``depth`` blocks; the first one changes resolution and channels."""
    first = block(channels_in, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width) for _ in range(depth - 1)))


def initialize(module: nn.Module) -> None:
    """Initialize convolutions by He et al., "Delving Deep into Rectifiers" (ICCV 2015), over the fan-out."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


def resnet18(*, num_classes: int = 1000, weights: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """ResNet-18 in eval mode and two example images.

    Raises:
        SourceError: ``weights`` cannot be loaded.
    """
    return _build(ResNet(BasicBlock, (2, 2, 2, 2), num_classes), weights)


def resnet50(*, num_classes: int = 1000, weights: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """ResNet-50 in eval mode and two example images.

    Raises:
        SourceError: ``weights`` cannot be loaded.
    """
    return _build(ResNet(Bottleneck, (3, 4, 6, 3), num_classes), weights)


def _build(module: ResNet, weights: str | None) -> tuple[nn.Module, dict[str, Tensor]]:
    if weights is not None:
        load_weights(module, weights)
    return module.eval(), {"image": images(3, 224)}


def _projection(channels_in: int, channels_out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and channels_in == channels_out:
        return None
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
        nn.BatchNorm2d(channels_out),
    )
