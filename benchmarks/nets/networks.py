"""Small networks with the weights that lie beside this file: FOLDER/networks.py:resnet20 reads resnet20.safetensors.

``workbench.py`` trains them and puts a copy of this file where the weights are. ResNet-20 and ResNet-56: He et al.,
"Deep Residual Learning for Image Recognition" (CVPR 2016), section 4.2. The mobile network is MobileNetV2 with strides
for 32×32 pixels.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from enginesmith.models.inputs import features, images, tokens
from enginesmith.models.mobilenet import InvertedResidual
from enginesmith.models.resnet import BasicBlock, initialize, stage

CLASSES = 10
SIZE, SEGMENTED_SIZE = 32, 64
PAGE_SIZE, PAGE_PIXELS = 64, 640
"""Edge of a page as the detector gets it, and of the page itself, in which its boxes are."""
VALUES = torch.logspace(0, 4, CLASSES)
"""What each digit stands for in the gauge's pictures."""
TOKENS = 64
_UNET_WIDTHS = (16, 32, 64, 128)
_MOBILE_STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 2, 2), (6, 64, 3, 2), (6, 96, 2, 1), (6, 160, 1, 1))
"""Expansion, output channels, repeats, stride of the first."""
_MOBILE_HEAD = 640
_VOCABULARY = 30522

Example = Mapping[str, Tensor]


class SmallResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels, each of ``depth`` blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(BasicBlock, 16, 16, depth, stride=1)
        self.layer2 = stage(BasicBlock, 16, 32, depth, stride=2)
        self.layer3 = stage(BasicBlock, 32, 64, depth, stride=2)
        self.fc = nn.Linear(64, CLASSES)
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(image)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class SmallMobileNet(nn.Module):
    """Inverted residuals with depthwise convolutions and ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_activated(3, 32)]
        channels = 32
        for expansion, width, repeats, stride in _MOBILE_STAGES:
            for index in range(repeats):
                layers.append(InvertedResidual(channels, width, stride if index == 0 else 1, expansion))
                channels = width
        layers.append(_activated(channels, _MOBILE_HEAD, 1))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(_MOBILE_HEAD, CLASSES)
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(image).mean((2, 3)))
        return logits


class SmallUNet(nn.Module):
    """Three levels down and three up; logits of one mask."""

    def __init__(self) -> None:
        super().__init__()
        widths = _UNET_WIDTHS
        self.stem = _double(3, widths[0])
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _double(a, b)) for a, b in pairwise(widths))
        upwards = list(pairwise(reversed(widths)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in upwards)
        self.merge = nn.ModuleList(_double(a, b) for a, b in upwards)
        self.head = nn.Conv2d(widths[0], 1, 1)
        initialize(self)

    def forward(self, image: Tensor) -> Tensor:
        levels = [self.stem(image)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x: Tensor = levels.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), levels.pop()], dim=1))
        mask: Tensor = self.head(x)
        return mask


class Sequence(nn.Module):
    """Two bidirectional LSTM layers over the rows of a picture, the mean over time, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, 128, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(256, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        states, _ = self.lstm(rows)
        logits: Tensor = self.fc(states.mean(1))
        return logits


class Gated(nn.Module):
    """Two GRU layers over the rows of a picture, the last state, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(SIZE, 160, num_layers=2, batch_first=True)
        self.fc = nn.Linear(160, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        states, _ = self.gru(rows)
        logits: Tensor = self.fc(states[:, -1])
        return logits


class Encoder(nn.Module):
    """MiniLM: 6 layers of 384, the mean over the tokens that count, brought to length 1."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        self.bert = BertModel(BertConfig(vocab_size=_VOCABULARY, **sizes), add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        counts = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * counts).sum(1) / counts.sum(1).clamp(min=1)
        return nn.functional.normalize(mean, dim=1)


class TextClassifier(nn.Module):
    """The encoder and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.fc = nn.Linear(384, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.encoder(input_ids, attention_mask))
        return logits


def resnet20() -> tuple[nn.Module, Example]:
    """A digit before a photo, 32×32: 10 classes."""
    return load_trained(SmallResNet(3), "resnet20"), {"image": images(3, SIZE)}


def resnet56() -> tuple[nn.Module, Example]:
    """A digit before a photo, by 56 layers."""
    return load_trained(SmallResNet(9), "resnet56"), {"image": images(3, SIZE)}


def mobilenet() -> tuple[nn.Module, Example]:
    """A digit before a photo, by depthwise convolutions."""
    return load_trained(SmallMobileNet(), "mobilenet"), {"image": images(3, SIZE)}


def unet() -> tuple[nn.Module, Example]:
    """The digit's pixels in a picture of 64×64."""
    return load_trained(SmallUNet(), "unet"), {"image": images(3, SEGMENTED_SIZE)}


def lstm() -> tuple[nn.Module, Example]:
    """A digit read row by row."""
    return load_trained(Sequence(), "lstm"), {"rows": features(SIZE, SIZE)}


def gru() -> tuple[nn.Module, Example]:
    """A digit read row by row, with a state that goes one way."""
    return load_trained(Gated(), "gru"), {"rows": features(SIZE, SIZE)}


def minilm() -> tuple[nn.Module, Example]:
    """Which part of Python's library a docstring is from: 10 classes."""
    return load_trained(TextClassifier(), "minilm"), _text()


def minilm_embedding() -> tuple[nn.Module, Example]:
    """The embedding of a sentence, as the model came."""
    return load_trained(Encoder(), "minilm_embedding"), _text()


def _text() -> Example:
    return {"input_ids": tokens(_VOCABULARY, TOKENS), "attention_mask": torch.ones(2, TOKENS, dtype=torch.int64)}


def load_trained(module: nn.Module, name: str) -> nn.Module:
    """Load the weights that lie beside this file."""
    module.load_state_dict(load_file(Path(__file__).with_name(f"{name}.safetensors")))
    return module.eval()


def _activated(channels_in: int, channels_out: int, size: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, padding=size // 2, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU6(inplace=True),
    )


def _double(channels_in: int, channels_out: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for first in (channels_in, channels_out):
        convolution = nn.Conv2d(first, channels_out, 3, padding=1, bias=False)
        parts += [convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)
