"""MobileNetV2: inverted residuals with linear bottlenecks.

Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018. State-dict keys are torchvision's.
"""

from torch import Tensor, nn

from enginesmith.models.checkpoint import load_weights
from enginesmith.models.inputs import images
from enginesmith.models.resnet import initialize

# Table 2 of the paper: expansion, output channels, repeats, stride of the first.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STEM = 32
HEAD = 1280


class InvertedResidual(nn.Module):
    """1×1 up, 3×3 depthwise, 1×1 down without activation; a shortcut where the shape stays."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = channels_in * expansion
        self.shortcut = stride == 1 and channels_in == channels_out
        self.conv = nn.Sequential(
            *([] if expansion == 1 else [_convolution(channels_in, width, 1)]),
            _convolution(width, width, 3, stride, groups=width),
            nn.Conv2d(width, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.shortcut else y


class MobileNetV2(nn.Module):
    """A stem, seven stages of inverted residuals, a 1×1 head, global average pooling and a classifier."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, STEM, 3, stride=2)]
        channels = STEM
        for expansion, width, repeats, stride in STAGES:
            for index in range(repeats):
                layers.append(InvertedResidual(channels, width, stride if index == 0 else 1, expansion))
                channels = width
        layers.append(_convolution(channels, HEAD, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(HEAD, num_classes))
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(image).mean((2, 3)))
        return logits


def mobilenet_v2(*, num_classes: int = 1000, weights: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """MobileNetV2 of width 1.0 in eval mode and two example images.

    Raises:
        SourceError: ``weights`` cannot be loaded.
    """
    module = MobileNetV2(num_classes)
    if weights is not None:
        load_weights(module, weights)
    return module.eval(), {"image": images(3, 224)}


def _convolution(channels_in: int, channels_out: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU6(inplace=True),
    )
