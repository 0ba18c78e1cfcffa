"""Two mobile networks with squeeze-and-excitation, at 32×32 pixels; weights as in ``networks.py``.

Howard et al., "Searching for MobileNetV3" (ICCV 2019): hard-swish and a hard sigmoid. Tan and Le, "EfficientNet" (ICML
2019): SiLU and a sigmoid. Both lose several points by plain 8-bit quantization, because a channel's factor multiplies
it before the next product, and the activations keep a thin tail below zero.
"""

from collections.abc import Callable

from networks import CLASSES, SIZE, Example, load_trained
from torch import Tensor, nn

from enginesmith.models.inputs import images
from enginesmith.models.resnet import initialize

_STAGES = ((1, 16, 1, 1, 3), (4, 24, 2, 2, 3), (4, 40, 2, 2, 5), (4, 64, 3, 1, 3), (6, 96, 2, 2, 5))
"""Expansion, output channels, repeats, stride of the first, edge of the depthwise kernel."""
_HEAD = 384
_REDUCTION = 4

Layer = Callable[[], nn.Module]


class Squeeze(nn.Module):
    """Multiply each channel by a factor that two layers make of all channels' means."""

    def __init__(self, channels: int, activation: Layer, gate: Layer) -> None:
        super().__init__()
        few = max(8, channels // _REDUCTION)
        self.factors = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, few, 1), activation(), nn.Conv2d(few, channels, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.factors(x)
        return y


class Expanded(nn.Module):
    """1×1 up, depthwise, squeeze-and-excitation, 1×1 down without activation; a shortcut where the shape stays."""

    def __init__(
        self, channels: int, width: int, stride: int, expansion: int, kernel: int, activation: Layer, gate: Layer
    ) -> None:
        super().__init__()
        inner = channels * expansion
        self.shortcut = stride == 1 and channels == width
        self.layers = nn.Sequential(
            *([] if expansion == 1 else [_convolution(channels, inner, 1, activation)]),
            _convolution(inner, inner, kernel, activation, stride, groups=inner),
            Squeeze(inner, activation, gate),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.shortcut else y


class SqueezedNet(nn.Module):
    """A stem, the stages, a head and a classifier."""

    def __init__(self, activation: Layer, gate: Layer) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 16, 3, activation)]
        channels = 16
        for expansion, width, repeats, stride, kernel in _STAGES:
            for index in range(repeats):
                first = stride if index == 0 else 1
                layers.append(Expanded(channels, width, first, expansion, kernel, activation, gate))
                channels = width
        self.features = nn.Sequential(*layers, _convolution(channels, _HEAD, 1, activation))
        self.fc = nn.Linear(_HEAD, CLASSES)
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(image).mean((2, 3)))
        return logits


def build_mobilenet_v3() -> nn.Module:
    """Build it with random weights."""
    return SqueezedNet(nn.Hardswish, nn.Hardsigmoid)


def build_efficientnet() -> nn.Module:
    """Build it with random weights."""
    return SqueezedNet(nn.SiLU, nn.Sigmoid)


def mobilenet_v3() -> tuple[nn.Module, Example]:
    """A digit before a photo: 10 classes."""
    return load_trained(build_mobilenet_v3(), "mobilenet_v3"), {"image": images(3, SIZE)}


def efficientnet() -> tuple[nn.Module, Example]:
    """A digit before a photo, by squeeze-and-excitation."""
    return load_trained(build_efficientnet(), "efficientnet"), {"image": images(3, SIZE)}


def _convolution(
    channels: int, width: int, kernel: int, activation: Layer, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    convolution = nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), activation())
