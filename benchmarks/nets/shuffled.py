"""A mobile network whose halves of channels are shuffled, at 32×32 pixels; weights as in ``networks.py``.

Ma et al., "ShuffleNet V2" (ECCV 2018): half of the channels of a unit go past it, and the halves are interleaved behind
it, so that a channel comes from one of many layers before, and half of the channels of a value from others than the
rest. With squeeze-and-excitation, as in the larger network of the paper's appendix.
"""

import torch
from networks import CLASSES, SIZE, Example, load_trained
from squeezed import Squeeze
from torch import Tensor, nn

from enginesmith.models.inputs import images
from enginesmith.models.resnet import initialize

_STAGES = ((48, 3), (96, 4), (192, 3))
"""Channels, and units; the first one of each has stride 2."""
_STEM, _HEAD = 24, 384


class Unit(nn.Module):
    """1×1, depthwise, squeeze-and-excitation, 1×1 on half of the channels; with stride 2, on all, beside another way.

    What comes out are the channels of both ways in turn.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        inner, self.split = width // 2, stride == 1
        read = channels // 2 if self.split else channels
        self.branch = nn.Sequential(
            *_normalized(nn.Conv2d(read, inner, 1, bias=False)),
            nn.ReLU(),
            *_normalized(nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)),
            Squeeze(inner, nn.ReLU, nn.Sigmoid),
            *_normalized(nn.Conv2d(inner, inner, 1, bias=False)),
            nn.ReLU(),
        )
        self.past = nn.Sequential(
            *_normalized(nn.Conv2d(read, read, 3, stride, 1, groups=read, bias=False)),
            *_normalized(nn.Conv2d(read, inner, 1, bias=False)),
            nn.ReLU(),
        )
        if self.split:
            self.past = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        past, read = x.chunk(2, dim=1) if self.split else (x, x)
        joined = torch.cat([self.past(past), self.branch(read)], dim=1)
        count, channels, height, width = joined.shape
        return joined.view(count, 2, channels // 2, height, width).transpose(1, 2).reshape(joined.shape)


class ShuffleNet(nn.Module):
    """A stem, three stages, a head and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_normalized(nn.Conv2d(3, _STEM, 3, padding=1, bias=False)), nn.ReLU())
        units, channels = list[Unit](), _STEM
        for width, count in _STAGES:
            units += [Unit(channels, width, 2), *(Unit(width, width, 1) for _ in range(count - 1))]
            channels = width
        self.units = nn.Sequential(*units)
        self.head = nn.Sequential(*_normalized(nn.Conv2d(channels, _HEAD, 1, bias=False)), nn.ReLU())
        self.fc = nn.Linear(_HEAD, CLASSES)
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.head(self.units(self.stem(image))).mean((2, 3)))
        return logits


def _normalized(convolution: nn.Conv2d) -> tuple[nn.Module, nn.Module]:
    return convolution, nn.BatchNorm2d(convolution.out_channels)


def shufflenet() -> tuple[nn.Module, Example]:
    """A digit before a photo, by units whose channels are shuffled."""
    return load_trained(ShuffleNet(), "shufflenet"), {"image": images(3, SIZE)}
