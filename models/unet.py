"""U-Net for binary segmentation: an encoder, a decoder, and skips between them.

Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015; half its channels,
padded convolutions and batch normalization, so that the mask is as large as the image.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from enginesmith.models.checkpoint import load_weights
from enginesmith.models.inputs import images
from enginesmith.models.resnet import initialize

WIDTHS = (32, 64, 128, 256, 512)


class UNet(nn.Module):
    """Four levels down by max-pooling and four up by transposed convolutions; logits of one mask for each class."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = _double(3, WIDTHS[0])
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _double(fine, coarse)) for fine, coarse in pairwise(WIDTHS)
        )
        coarse_first = list(pairwise(reversed(WIDTHS)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, stride=2) for coarse, fine in coarse_first)
        self.merge = nn.ModuleList(_double(coarse, fine) for coarse, fine in coarse_first)
        self.head = nn.Conv2d(WIDTHS[0], num_classes, 1)
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


def unet(*, num_classes: int = 1, weights: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """U-Net in eval mode and two example images of 256×256.

    Raises:
        SourceError: ``weights`` cannot be loaded.
    """
    module = UNet(num_classes)
    if weights is not None:
        load_weights(module, weights)
    return module.eval(), {"image": images(3, 256)}


def _double(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )
