"""Small networks of the usual kinds, with random weights, for engines that are prosecuted; each has a dynamic batch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Example = dict[str, Tensor]
_TOKENS, _WIDTH, _HEADS = 200, 32, 4


class Residual(nn.Module):
    """Convolutions with BatchNorm, a shortcut, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.first = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        logits: Tensor = self.head(F.relu(x + self.second(self.first(x))).mean((2, 3)))
        return logits


class Depthwise(nn.Module):
    """Depthwise convolutions with squeeze-and-excitation and hard-swish."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 24, 1)
        self.depth = nn.Conv2d(24, 24, 3, stride=2, padding=1, groups=24)
        self.squeeze, self.excite = nn.Conv2d(24, 6, 1), nn.Conv2d(6, 24, 1)
        self.narrow, self.head = nn.Conv2d(24, 8, 1), nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = F.hardswish(self.depth(F.hardswish(self.wide(image))))
        x = x * F.hardsigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        logits: Tensor = self.head(self.narrow(x).amax((2, 3)))
        return logits


class Encoder(nn.Module):
    """Tokens with a mask of padding: attention, normalization, GELU, and a mean over what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_TOKENS, _WIDTH), nn.Embedding(64, _WIDTH)
        self.query, self.key, self.value = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.out, self.wide, self.narrow = (
            nn.Linear(_WIDTH, _WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.Linear(4 * _WIDTH, _WIDTH),
        )
        self.before, self.after = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.words(ids) + self.places(torch.arange(length))
        y = self.before(x)
        heads = [part(y).view(batch, length, _HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value)]
        scores = heads[0] @ heads[1].transpose(2, 3) / (_WIDTH // _HEADS) ** 0.5
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
        x = x + self.out((scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(batch, length, -1))
        x = x + self.narrow(F.gelu(self.wide(self.after(x))))
        there = mask[..., None].to(x.dtype)
        mean: Tensor = (x * there).sum(1) / there.sum(1).clamp(min=1)
        return mean


class UNet(nn.Module):
    """Down and up again, with a shortcut that is joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.leaky_relu(self.first(image), 0.1)
        mask: Tensor = self.last(torch.cat([x, F.relu(self.up(F.relu(self.down(x))))], 1))
        return mask


class Speech(nn.Module):
    """Convolutions over time with gates, an LSTM, and the last and the mean state."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(12, 32, 3, padding=1), nn.GroupNorm(4, 32)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(32, 6)

    def forward(self, features: Tensor) -> Tensor:
        x = F.glu(self.norm(self.convolution(features)), dim=1).transpose(1, 2)
        states, _ = self.lstm(x)
        logits: Tensor = self.head(torch.cat([states[:, -1], states.mean(1)], -1)).log_softmax(-1)
        return logits


class Patches(nn.Module):
    """A vision transformer of one block with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, _WIDTH, 4, stride=4), nn.Parameter(torch.randn(1, 1, _WIDTH))
        self.places = nn.Parameter(0.1 * torch.randn(1, 17, _WIDTH))
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 8)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((query @ key.transpose(1, 2) / _WIDTH**0.5).softmax(-1) @ value)
        logits: Tensor = self.head(F.silu(x[:, 0]))
        return logits


class Regression(nn.Module):
    """Features through a gated network; two answers, of which one is a unit vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.gate = nn.LayerNorm(20), nn.Linear(20, 40), nn.Linear(20, 40)
        self.narrow, self.direction = nn.Linear(40, 3), nn.Linear(40, 4)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        y = self.norm(features)
        x = torch.tanh(self.wide(y)) * self.gate(y).sigmoid()
        return {"numbers": self.narrow(x).exp(), "direction": F.normalize(self.direction(x), dim=-1)}


class Upscaler(nn.Module):
    """Twice the size: interpolation, and the pixels of the larger picture in channels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tail = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        plain = F.interpolate(image, scale_factor=2.0, mode="bilinear", align_corners=False)
        larger: Tensor = plain + F.pixel_shuffle(self.tail(F.elu(self.body(image))), 2)
        return larger.clamp(-4, 4)


def _make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def residual() -> tuple[nn.Module, Example]:
    """Make the network with a shortcut."""
    return _make(Residual), {"image": torch.randn(4, 3, 12, 12)}


def depthwise() -> tuple[nn.Module, Example]:
    """Make the network of depthwise convolutions."""
    return _make(Depthwise), {"image": torch.randn(4, 3, 12, 12)}


def encoder() -> tuple[nn.Module, Example]:
    """Make the encoder of tokens."""
    mask = torch.ones(4, 12, dtype=torch.int64)
    mask[1, 7:] = mask[3, 5:] = 0
    return _make(Encoder), {"ids": torch.randint(0, _TOKENS, (4, 12)), "mask": mask}


def unet() -> tuple[nn.Module, Example]:
    """Make the U-Net."""
    return _make(UNet), {"image": torch.randn(2, 1, 16, 16)}


def speech() -> tuple[nn.Module, Example]:
    """Make the network with an LSTM."""
    return _make(Speech), {"features": torch.randn(4, 12, 20)}


def patches() -> tuple[nn.Module, Example]:
    """Make the vision transformer."""
    return _make(Patches), {"image": torch.randn(4, 3, 16, 16)}


def regression() -> tuple[nn.Module, Example]:
    """Make the gated network."""
    return _make(Regression), {"features": torch.randn(4, 20)}


def upscaler() -> tuple[nn.Module, Example]:
    """Make the network of larger pictures."""
    return _make(Upscaler), {"image": torch.rand(2, 3, 10, 10)}


SUSPECTS = ("residual", "depthwise", "encoder", "unet", "speech", "patches", "regression", "upscaler")
