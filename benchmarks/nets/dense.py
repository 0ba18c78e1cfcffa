"""Three networks whose answers are numbers, not classes; weights as in ``networks.py``.

- ``detector``: one stage, no anchors, a branch for boxes and one for classes, both in one output, as YOLOv8 has them
  (https://docs.ultralytics.com/models/yolov8): pixels up to 640 and probabilities share a tensor.
- ``upscaler``: Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution" (CVPRW 2017): residual
  blocks without normalization, and the pixels of the larger picture in channels.
- ``gauge``: a regression whose answers lie between 1 and 10 000.
"""

from itertools import pairwise

import torch
from networks import CLASSES, PAGE_PIXELS, PAGE_SIZE, SIZE, VALUES, Example, SmallResNet, load_trained
from torch import Tensor, nn

from enginesmith.models.inputs import images
from enginesmith.models.resnet import initialize

_STRIDE = 8
_CELLS = PAGE_SIZE // _STRIDE
_UPSCALER_WIDTH, _UPSCALER_BLOCKS = 32, 6


class Detector(nn.Module):
    """Answer [batch, 4 + classes, cells]: center, width and height in pixels of the page, and probabilities."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64)
        layers: list[nn.Module] = [_activated(3, 16)]
        for before, after in pairwise((16, *widths)):
            layers += [_activated(before, after, stride=2), _activated(after, after)]
        self.backbone = nn.Sequential(*layers)
        self.boxes = nn.Sequential(_activated(64, 64), nn.Conv2d(64, 4, 1))
        self.classes = nn.Sequential(_activated(64, 64), nn.Conv2d(64, CLASSES, 1))
        axis = torch.arange(_CELLS) + 0.5
        self.register_buffer("centers", torch.stack(torch.meshgrid(axis, axis, indexing="xy")).flatten(1))
        initialize(self)
        nn.init.constant_(self.classes[1].bias, -4.0)

    def encode(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes in cells, [batch, 4, cells], and logits [batch, classes, cells]."""
        x = self.backbone(image)
        moved, scaled = self.boxes(x).flatten(2).chunk(2, dim=1)
        return torch.cat([moved + self.centers, scaled.exp()], 1), self.classes(x).flatten(2)

    def forward(self, image: Tensor) -> Tensor:
        boxes, logits = self.encode(image)
        return torch.cat([boxes * (PAGE_PIXELS / _CELLS), logits.sigmoid()], 1)


class Upscaler(nn.Module):
    """From [batch, 3, edge, edge] to twice as many pixels along each edge, both from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        width = _UPSCALER_WIDTH
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(_UPSCALER_BLOCKS)
        )
        self.tail = nn.Sequential(nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, image: Tensor) -> Tensor:
        x: Tensor = self.head(image)
        for block in self.blocks:
            x = x + block(x)
        plain = nn.functional.interpolate(image, scale_factor=2.0, mode="bilinear", align_corners=False)
        larger: Tensor = plain + self.tail(x)
        return larger


class Gauge(nn.Module):
    """Answer one number, [batch, 1], of which the relative error counts: a mean of bins, as logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = SmallResNet(2)
        self.bins = nn.Linear(CLASSES, 1, bias=False)
        self.bins.weight = nn.Parameter(VALUES.log()[None], requires_grad=False)

    def forward(self, image: Tensor) -> Tensor:
        value: Tensor = self.bins(self.classes(image).softmax(-1)).exp()
        return value


def detector() -> tuple[nn.Module, Example]:
    """Digits on a page, up to four."""
    return load_trained(Detector(), "detector"), {"image": images(3, PAGE_SIZE)}


def upscaler() -> tuple[nn.Module, Example]:
    """A picture of twice the size."""
    return load_trained(Upscaler(), "upscaler"), {"image": images(3, SIZE).sigmoid()}


def gauge() -> tuple[nn.Module, Example]:
    """The number that a picture of a digit stands for."""
    return load_trained(Gauge(), "gauge"), {"image": images(3, SIZE)}


def _activated(channels: int, width: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.SiLU(inplace=True))
