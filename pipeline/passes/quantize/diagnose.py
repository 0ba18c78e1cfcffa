"""Say why a product loses much in few bits: which of its inputs has numbers that one scale does not fit, and which.

A value has one scale for all channels, so a few large channels leave the others few levels. A weight has one scale for
each output channel, so there it is the input channels that have to be alike (Nagel et al., "Data-Free Quantization
Through Weight Equalization and Bias Correction", ICCV 2019, section 3); section 4 there is on shifted means.
"""

from typing import TYPE_CHECKING

import numpy as np

from enginesmith.calibration.ranges import Ranges
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.quantize.precisions import Cause
from enginesmith.pipeline.passes.rescale.channels import by_channel, inputs_first
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


_UNLIKE = 8.0
"""Times the middle channel from which on one is an outlier: it takes three bits from the others."""
_LARGE = 4.0
"""Times the middle channel from which on channels are counted as large, where one is an outlier."""
_SHIFTED = 0.5
"""Share of an error that is its mean from which on biases can make up for most of it."""
_PEAK = 40.0
"""Times the root mean square from which on single numbers take the levels of the others: normal ones stay below 6."""


def explain_loss(node: "ir.Node", ranges: Ranges, shift: float = 0.0) -> tuple[Cause, str]:
    """Explain the loss of a product by its activations, by its weight, or by neither: the cause, and a sentence.

    ``shift`` is the share of its error's energy that is the error's mean by channel.
    """
    value = node.inputs[0]
    name = str(value.name) if value is not None else ""
    known = ranges.tensors.get(name)
    channels = layers.find_channel_statistics(node, ranges) if value is not None else None
    if channels is not None and (found := _describe_outliers(np.asarray(channels.amax))):
        count, largest, middle = found
        share = f"{count} of {len(channels.amax)} channels"
        words = f"activations to {_write(largest)} in {share}, and to {_write(middle)} in the middle one"
        return "uneven activations", words
    weight = edit.read_constant(node.inputs[layers.WEIGHT]) if node.op_type in layers.PRODUCTS else None
    if weight is not None and (found := _describe_outliers(_input_channels(node, weight.numpy()))):
        count, largest, middle = found
        return "uneven weights", (
            f"weights of {count} input channels are up to {largest / middle:.0f} times as large as those of the middle "
            "one, and an output channel has one scale"
        )
    if shift >= _SHIFTED:
        words = f"{shift:.0%} of its error is the same for all samples: rounding shifts the means of channels"
        return "shifted means", words
    if channels is not None and known is not None:
        rms = float(np.sqrt(np.mean(channels.mean_square)))
        largest = max(abs(known.minimum), abs(known.maximum))
        if rms > 0 and largest > _PEAK * rms:
            words = f"single activations to {_write(largest)}, {largest / rms:.0f} times their root mean square"
            return "single peaks", words
    return "no outliers", "no channel stands out: 8 bits are few for what it computes"


def _write(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _describe_outliers(sizes: Array) -> tuple[int, float, float] | None:
    """Count the large channels, and return the largest and the middle size; None where none is an outlier."""
    used = sizes[sizes > 0]
    if used.size < 2:
        return None
    largest, middle = float(used.max()), float(np.median(used))
    return (int((used > _LARGE * middle).sum()), largest, middle) if largest >= _UNLIKE * middle else None


def _input_channels(node: "ir.Node", weight: Array) -> Array:
    """Return the largest weight of each input channel."""
    if weight.ndim < 2:
        return np.zeros(0, np.float32)
    groups = node.attributes.get_int("group", 1) if "group" in node.attributes else 1
    sizes: Array = np.abs(by_channel(weight, inputs_first=inputs_first(node), groups=groups)).max(axis=(0, 2))
    return sizes
