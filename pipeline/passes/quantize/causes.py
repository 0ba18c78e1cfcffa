"""Explain why a group loses much in few bits: by its numbers, by its samples, or by what reads its result.

A value has one scale for all channels and samples, so a few large ones leave the others few levels. A weight has one
scale for each output channel, so there it is the input channels that have to be alike (Nagel et al., "Data-Free
Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 3); section 4 is on shifted means.
"""

import math
from collections.abc import Iterator

import numpy as np

from enginesmith.calibration.ranges import ChannelStatistics, Ranges
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.quantize.layerwise_error import OutputError, OwnError
from enginesmith.pipeline.passes.quantize.precisions import WEAK_DB, Cause
from enginesmith.pipeline.passes.rescale.products import by_channel
from enginesmith.pipeline.tensors import Array

_UNLIKE = 8.0
"""Times the middle channel from which on one is an outlier: it takes three bits from the others."""
_LARGE = 4.0
"""Times the middle channel from which on channels are counted as large, where one is an outlier."""
_OFFSET = 4.0
"""Times what any channel varies by from which on offsets of channels take the levels: two bits."""
_SEEN = 16
"""Numbers of each channel from which on it is known what varies."""
_SHIFTED = 0.5
"""Share of an error that is its mean from which on biases can make up for most of it."""
_PEAK = 40.0
"""Times the root mean square from which on single numbers take the levels of the others: normal ones stay below 6."""


_HIDDEN_DB = 6.0
"""SQNR that samples have less in their mean than all together, where large ones hide what small ones lose."""

_READERS = {
    **dict.fromkeys(("Sin", "Cos"), "where the absolute error counts: a period is 6.28"),
    **dict.fromkeys(
        ("Exp", "Softmax", "LogSoftmax"), "where the absolute error counts: what is off by 0.69 is doubled or halved"
    ),
    **dict.fromkeys(
        ("ArgMax", "ArgMin", "TopK", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
        "where the absolute error counts: it decides between numbers that are nearly the same",
    ),
    **dict.fromkeys(("Div", "Reciprocal"), "as what is divided by: its smallest numbers count most"),
}
"""Operators that make much of errors which are small beside the numbers that they read, and why."""
_DIVISOR = 1
_HANDING_ON = layers.SAME_NUMBERS | {
    *("Cast", "Neg", "Abs", "Add", "Sub", "Mul", "Div", "Where", "Clip", "Relu", "Concat", "Split", "Slice", "Gather"),
    *("Expand", "Pad"),
}
"""Operators behind which an error is of the same size, or multiplied by what a Mul or Div has for it."""


def explain_loss(node: "ir.Node", ranges: Ranges | None, error: OwnError) -> tuple[Cause, str]:
    """Explain the loss of a group: the cause, and a sentence, which is empty where nothing is known.

    It is by its samples, where these lose more than all together do; by its activations or its weight, for which
    ``ranges`` have to be known; by what reads its result, where its own output does not lose much, or its numbers do
    not explain it; or by nothing of that.
    """
    own_db, sample_db = to_decibels(error.energy), to_decibels(error.sample_energy or 0.0)
    unlike = error.sample_energy is not None and sample_db < min(WEAK_DB, own_db - _HIDDEN_DB)
    if unlike and own_db >= WEAK_DB and error.spread >= _UNLIKE:
        return "unlike samples", (
            f"samples differ by {_round(error.spread)} times or more in size, and one scale for all leaves the small "
            "ones few levels: normalize each sample at the model's input"
        )
    cause: Cause = "unknown"
    words = readers = ""
    if ranges is not None:
        cause, words = _explain_numbers(node, ranges, error.shift)
    if own_db >= WEAK_DB or cause in ("unknown", "no outliers"):
        readers = _explain_readers(node, error.size)
    if readers and cause in ("unknown", "no outliers"):
        return "sensitive readers", readers
    if cause == "no outliers" and own_db >= WEAK_DB:
        return (
            cause,
            "no channel stands out, and its own result loses little: what follows makes much of that",
        )
    return cause, "; ".join(filter(None, (words, readers)))


def explain_output_loss(error: OutputError) -> tuple[Cause, str]:
    """Explain what rounding a group's output loses of what is read behind it: the cause, and a sentence."""
    sizes = np.array([size for size in error.sizes if size > 0])
    lost = f"rounding its output leaves what is read behind it an SQNR of {to_decibels(error.energy):.1f} dB"
    if sizes.size < 2 or sizes.max() < _UNLIKE * sizes.min():
        return "no outliers", f"{lost}, although its channels are of similar size"
    times, middle = _round(float(sizes.max() / sizes.min())), _round(float(sizes.max() / np.median(sizes)))
    return "uneven outputs", (
        f"channels of its output are up to {times} times apart, the largest {middle} times the middle one (root mean "
        f"square), and have one scale: {lost}"
    )


def to_decibels(energy: float) -> float:
    """Convert the energy of an error, of that of a signal, to an SQNR in dB."""
    return round(-10 * math.log10(max(energy, 1e-30)), 3)


def _explain_readers(node: "ir.Node", size: float) -> str:
    """Explain that what reads a result makes much of its error, of a root mean square; empty where nothing does."""
    readers = list(_find_readers(node.outputs[0], size))
    if not readers:
        return ""
    why = _READERS[readers[0][0]]
    names = dict.fromkeys(name for name, _ in readers if _READERS[name] == why)
    sizes = [size for name, size in readers if name in names and size is not None]
    off = f", off by {_write(max(sizes))} (root mean square)," if sizes else ""
    return f"its result{off} goes into {' and '.join(names)}, {why}"


def _find_readers(value: "ir.Value", error: float) -> Iterator[tuple[str, float | None]]:
    """Yield operators that make much of an error, each with the error's size there, None where that is not known.

    They are behind a value, or behind operators that hand its errors on.
    """
    waiting: list[tuple[ir.Value, float | None]] = [(value, error)]
    seen = {value}
    while waiting:
        value, size = waiting.pop(0)
        for use in value.uses():
            kind = use.node.op_type
            if kind in _READERS and (kind != "Div" or use.idx == _DIVISOR):
                yield kind, size
            elif kind in _HANDING_ON:
                its_size = _scale(use.node, use.idx, size)
                new = [output for output in use.node.outputs if output not in seen]
                seen.update(new)
                waiting += [(output, its_size) for output in new]


def _scale(node: "ir.Node", index: int, size: float | None) -> float | None:
    """Compute the size of an error behind an operator that hands it on; None where what it is multiplied by varies."""
    if node.op_type not in ("Mul", "Div") or size is None:
        return size
    other = edit.read(node.inputs[1 - index])
    if other is None or other.size != 1:
        return None
    factor = abs(float(other.reshape(())))
    return size * factor if node.op_type == "Mul" else size / factor if factor else None


def _explain_numbers(node: "ir.Node", ranges: Ranges, shift: float) -> tuple[Cause, str]:
    """Explain the loss of a product by its activations, by its weight, or by neither: the cause, and a sentence.

    ``shift`` is the share of its error's energy that is the error's mean by channel.
    """
    value = node.inputs[0]
    name = str(value.name) if value is not None else ""
    known = ranges.tensors.get(name)
    channels = layers.find_channel_statistics(node, ranges) if value is not None else None
    if channels is not None and known is not None and (words := _describe_offsets(channels, known.count)):
        return "constant offsets", words
    if channels is not None and (outliers := _describe_outliers(np.asarray(channels.amax))):
        count, largest, middle = outliers
        share = f"activations to {_write(largest)} in {count} of {len(channels.amax)} channels"
        small = _describe_small(np.asarray(channels.amax), largest, middle)
        return "uneven activations", f"{share}{',' if small else ', and'} to {_write(middle)} in the middle one{small}"
    weight = layers.find_weight(node.inputs[layers.WEIGHT]) if node.op_type in layers.PRODUCTS else None
    if weight is not None and (outliers := _describe_outliers(_input_channels(node, weight.numpy()))):
        count, largest, middle = outliers
        return "uneven weights", (
            f"weights of {count} input channels are up to {largest / middle:.0f} times as large as those of the middle "
            "one, and have the same scale"
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


def _describe_offsets(channels: ChannelStatistics, count: int) -> str:
    """Describe constants that are added to channels; empty where none leaves few levels for what varies.

    ``count`` is how many numbers were seen in all channels together.
    """
    offsets = np.abs(channels.middle)
    varying = np.asarray(channels.amax) - offsets
    vary = float(varying.max(initial=0))
    if count < _SEEN * len(offsets) or vary <= 0 or max(channels.amax) < _OFFSET * vary:
        return ""
    far = offsets > vary
    reach = f"constant offsets of up to {_write(float(offsets.max()))} in {far.sum()} of {len(offsets)} channels"
    return f"{reach} of its input, which vary by ±{_write(float(varying[far].max()))}"


def _write(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _round(times: float) -> str:
    """Write a quotient to two digits."""
    return f"{float(f'{times:.2g}'):.0f}"


def _describe_outliers(sizes: Array) -> tuple[int, float, float] | None:
    """Count the large channels, and return the largest and the middle size; None where none is an outlier."""
    used = sizes[sizes > 0]
    if used.size < 2:
        return None
    largest, middle = float(used.max()), float(np.median(used))
    return (int((used > _LARGE * middle).sum()), largest, middle) if largest >= _UNLIKE * middle else None


def _describe_small(sizes: Array, largest: float, middle: float) -> str:
    """Count the channels that are much smaller than the middle one; empty where none is, or where it has numbers."""
    small = sizes[(sizes > 0) & (sizes * _UNLIKE <= middle)]
    if not small.size:
        return ""
    times = _round(largest / float(small.min()))
    return f", and to no more than {_write(float(small.max()))} in {small.size}: up to {times} times apart"


def _input_channels(node: "ir.Node", weight: Array) -> Array:
    """Return the largest weight of each input channel."""
    if weight.ndim < 2:
        return np.zeros(0, np.float32)
    sizes: Array = np.abs(by_channel(node, weight)).max(axis=(0, 2))
    return sizes
