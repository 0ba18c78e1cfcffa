"""Vision Transformer, base size with patches of 16×16 pixels.

Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021. State-dict keys are torchvision's, but for the packed
projection of the attention, which is a Linear here and is renamed on loading.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from enginesmith.models.checkpoint import load_weights
from enginesmith.models.inputs import images

IMAGE = 224
PATCH = 16
WIDTH = 768
HEADS = 12
DEPTH = 12
EPSILON = 1e-6


class Attention(nn.Module):
    """Multi-head self-attention; queries, keys and values come from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # As many heads as the width holds: pruning takes whole ones away.
        heads = [part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.in_proj(x).chunk(3, dim=-1)]
        y: Tensor = self.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return y


class EncoderLayer(nn.Module):
    """Attention and a two-layer perceptron, each normalized before and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, EPSILON)
        self.self_attention = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH, EPSILON)
        # Dropout does nothing in eval mode; it stands here for the keys, mlp.0 and mlp.3.
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class Encoder(nn.Module):
    """Learned positions, the layers in order, and a last normalization."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, length, WIDTH).normal_(std=0.02))
        self.layers = nn.Sequential()
        for index in range(DEPTH):
            self.layers.add_module(f"encoder_layer_{index}", EncoderLayer())
        self.ln = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ln(self.layers(x + self.pos_embedding))
        return y


class VisionTransformer(nn.Module):
    """Patches and a class token through the encoder; the class token's row is classified."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.empty(1, 1, WIDTH).normal_(std=0.02))
        self.conv_proj = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.encoder = Encoder((IMAGE // PATCH) ** 2 + 1)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(WIDTH, num_classes))
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                nn.init.zeros_(part.bias)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.conv_proj(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(image.shape[0], -1, -1), patches], dim=1)
        logits: Tensor = self.heads(self.encoder(tokens)[:, 0])
        return logits


def vit_b16(*, num_classes: int = 1000, weights: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """ViT-B/16 at 224×224 in eval mode and two example images.

    Raises:
        SourceError: ``weights`` cannot be loaded.
    """
    module = VisionTransformer(num_classes)
    if weights is not None:
        load_weights(module, weights, rename=lambda key: key.replace("in_proj_", "in_proj."))
    return module.eval(), {"image": images(3, IMAGE)}
