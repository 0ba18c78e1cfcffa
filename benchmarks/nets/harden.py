"""Networks made hard to quantize, with (nearly) the same float answers: factors go into channels, and out behind them.

Trained networks come to such channels by themselves: batch normalization folded into depthwise convolutions (Nagel et
al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, figure 2), and a few channels
of transformers (Dettmers et al., "LLM.int8()", NeurIPS 2022; Bondarenko et al., "Understanding and Overcoming the
Challenges of Efficient Transformer Quantization", EMNLP 2021). Weights are those of the network it was made from.
"""

from collections.abc import Callable

import attention
import networks
import shuffled
import squeezed
import torch
from networks import Example
from torch import Tensor, nn

from enginesmith.models.mobilenet import InvertedResidual

_FEW, _FACTOR = 3, 64.0
_DECADES = 1.5

Factors = Callable[[int, torch.Generator], Tensor]


def few(channels: int, generator: torch.Generator) -> Tensor:
    """Three channels 64 times as large."""
    found = torch.ones(channels)
    found[torch.randperm(channels, generator=generator)[:_FEW]] = _FACTOR
    return found


def spread(channels: int, generator: torch.Generator) -> Tensor:
    """Every channel by a factor of its own, over three powers of ten."""
    found: Tensor = 10 ** ((torch.rand(channels, generator=generator) * 2 - 1) * _DECADES)
    return found


def mobilenet_bottlenecks() -> tuple[nn.Module, Example]:
    """MobileNetV2 with channels between the blocks that differ by three powers of ten."""
    network, example = networks.mobilenet()
    generator, factors = _generator(), None
    for block in list(network.features)[1:]:
        if not isinstance(block, InvertedResidual):
            _divide_inputs(block[0], factors)
            continue
        layers = block.conv
        first = next(layer for layer in layers.modules() if isinstance(layer, nn.Conv2d))
        if factors is not None:
            _divide_inputs(first, factors)
        if not block.shortcut:
            factors = spread(layers[-1].num_features, generator)
        _multiply_outputs(layers[-1], factors)
    return network, example


def mobilenet_v3_outliers() -> tuple[nn.Module, Example]:
    """MobileNetV3 with uneven channels between the blocks and within them."""
    return _harden_squeezed(*squeezed.mobilenet_v3())


def efficientnet_outliers() -> tuple[nn.Module, Example]:
    """EfficientNet, likewise."""
    return _harden_squeezed(*squeezed.efficientnet())


def _harden_squeezed(network: nn.Module, example: Example) -> tuple[nn.Module, Example]:
    """Spread channels between the blocks, and make three within each 64 times as large.

    Those within have a curve before them, of which little but a ReLU is left, so the answers change a little, too.
    """
    generator, factors = _generator(), None
    for block in list(network.features)[1:]:
        if not isinstance(block, squeezed.Expanded):
            _divide_inputs(block[0], factors)
            continue
        *layers, squeeze, projection, norm = block.layers
        if factors is not None:
            _divide_inputs(layers[0][0], factors)
        inner = few(squeeze.factors[1].in_channels, generator)
        _multiply_outputs(layers[-1][1], inner)
        _divide_inputs(squeeze.factors[1], inner)
        _divide_inputs(projection, inner)
        if not block.shortcut:
            factors = spread(norm.num_features, generator)
        if factors is not None:  # a shortcut from the stem carries what is behind a curve
            _multiply_outputs(norm, factors)
    return network, example


def shufflenet_units() -> tuple[nn.Module, Example]:
    """The shuffled network with uneven channels between the units, and three within each 64 times as large."""
    network, example = shuffled.shufflenet()
    generator = _generator()
    factors = spread(network.stem[1].num_features, generator)
    _multiply_outputs(network.stem[1], factors)
    for unit in network.units:
        past, read = factors.chunk(2) if unit.split else (factors, factors)
        first, first_norm, _, depthwise, depthwise_norm, squeeze, last, last_norm, _ = unit.branch
        before, behind = few(first.out_channels, generator), few(first.out_channels, generator)
        _divide_inputs(first, read)
        _multiply_outputs(first_norm, before)
        depthwise.weight.data /= before.view(-1, 1, 1, 1)
        _multiply_outputs(depthwise_norm, behind)
        _divide_inputs(squeeze.factors[1], behind)
        _divide_inputs(last, behind)
        if not unit.split:
            unit.past[0].weight.data /= past.view(-1, 1, 1, 1)
            past = spread(last.out_channels, generator)
            _multiply_outputs(unit.past[3], past)
        made = spread(last.out_channels, generator)
        _multiply_outputs(last_norm, made)
        factors = torch.stack([past, made], dim=1).reshape(-1)
    _divide_inputs(network.head[0], factors)
    return network, example


def resnet_stages() -> tuple[nn.Module, Example]:
    """ResNet-56 with three channels of each stage, shortcuts included, 64 times as large as the others."""
    network, example = networks.resnet56()
    generator = _generator()
    factors = few(16, generator)
    _multiply_outputs(network.bn1, factors)
    for stage in (network.layer1, network.layer2, network.layer3):
        for block in stage:
            _divide_inputs(block.conv1, factors)
            if block.downsample is not None:
                _divide_inputs(block.downsample[0], factors)
                factors = few(block.conv2.out_channels, generator)
                _multiply_outputs(block.downsample[1], factors)
            _multiply_outputs(block.bn2, factors)
    _divide_inputs(network.fc, factors)
    return network, example


def unet_shortcuts() -> tuple[nn.Module, Example]:
    """U-Net whose shortcuts are 64 times as large as what they are joined with."""
    network, example = networks.unet()
    writers = [network.stem, *(down[1] for down in network.down[:-1])]
    readers = [down[1][0] for down in network.down]
    for writer, reader, merge in zip(writers, readers, [each[0] for each in network.merge][::-1], strict=True):
        width = reader.in_channels
        factors = torch.full((width,), _FACTOR)
        _multiply_outputs(writer[4], factors)
        _divide_inputs(reader, factors)
        _divide_inputs(merge, torch.cat([torch.ones(merge.in_channels - width), factors]))
    return network, example


def vit_outliers() -> tuple[nn.Module, Example]:
    """ViT with three channels of every normalization and of every perceptron 64 times as large."""
    network, example = attention.vit()
    for layer in network.layers:
        _outliers(layer)
    return network, example


def swin_outliers() -> tuple[nn.Module, Example]:
    """The windowed transformer, likewise."""
    network, example = attention.swin()
    for stage in network.stages:
        for windows in stage:
            _outliers(windows.layer)
    return network, example


def _outliers(layer: nn.Module) -> None:
    """Make outliers; those of the perceptron have a GELU before them, so the answers change a little."""
    generator = _generator()
    hidden = few(layer.mlp[0].out_features, generator)
    layer.mlp[0].weight.data *= hidden[:, None]
    layer.mlp[0].bias.data *= hidden
    _divide_inputs(layer.mlp[2], hidden)
    for norm, readers in ((layer.norm1, [layer.attention.qkv]), (layer.norm2, [layer.mlp[0]])):
        factors = few(norm.normalized_shape[0], generator)
        _multiply_outputs(norm, factors)
        for reader in readers:
            _divide_inputs(reader, factors)
    # The values of attention, and what reads them.
    width = layer.attention.out.in_features
    factors = few(width, generator)
    layer.attention.qkv.weight.data[2 * width :] *= factors[:, None]
    layer.attention.qkv.bias.data[2 * width :] *= factors
    _divide_inputs(layer.attention.out, factors)


def _multiply_outputs(norm: nn.Module, factors: Tensor) -> None:
    norm.weight.data *= factors
    norm.bias.data *= factors


def _divide_inputs(product: nn.Module, factors: Tensor) -> None:
    product.weight.data /= factors.view(1, -1, *[1] * (product.weight.dim() - 2))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)
