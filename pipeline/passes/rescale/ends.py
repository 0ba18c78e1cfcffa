"""Limit and choose factors of channels whose readers take them back, as BatchNormalization does.

An engine may have to write what a product makes with one scale for all channels, also where no product reads it: in
front of BatchNormalization behind an addition, or of a constant factor of each channel. Then no weight behind says how
large channels should be. Each is made as large as it can be without that any value on the way grows, on the data that
were seen: as large as the largest one, where it goes through one value alone.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from enginesmith.calibration.ranges import ChannelStatistics, Ranges
from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.passes.rescale.axes import Labels, find_axis
from enginesmith.pipeline.passes.rescale.labels import ChannelLabels
from enginesmith.pipeline.tensors import Array


class EndLimits(NamedTuple):
    """Say by what channels may be divided that end at what takes factors back; float64, one for each label."""

    smallest: Array
    """0 for channels that end nowhere."""
    levels: Array
    """Divisors of channels that products write, and that nothing reads that would not take factors back; else 1."""


class Spread(NamedTuple):
    """Count values whose channels were made alike; with the largest ratio of two channels where it shrank most."""

    values: int
    before: float
    after: float


def find_limits(channel_labels: ChannelLabels, known: Ranges | None, most: float) -> EndLimits:
    """Find by what channels may be divided where they end; ``levels`` are no less than 1 / ``most``."""
    count = channel_labels.count
    shares = np.zeros(count)
    ended, unknown = np.zeros((2, count), bool)
    for value, labels in channel_labels.ends:
        channels, statistics = labels.reshape(-1), _find_statistics(value, labels, known)
        ended[channels] = True
        unknown[channels] |= statistics is None
    for channels, share in _find_shares(channel_labels, known):
        np.maximum.at(shares, channels, share)
    smallest = np.where(ended, shares, 0)
    free = _find_free(channel_labels) & ended & ~unknown & (shares > 0)
    return EndLimits(smallest, np.where(free, np.maximum(smallest, 1 / most), 1))


def measure_spread(channel_labels: ChannelLabels, known: Ranges | None, factors: Array) -> Spread:
    """Measure the values in which there are channels with another factor than 1."""
    ratios = [
        (_find_ratio(share), _find_ratio(share / factors[channels]))
        for channels, share in _find_shares(channel_labels, known)
        if (factors[channels] != 1).any()
    ]
    before, after = max(ratios, key=lambda each: each[0] / each[1], default=(1.0, 1.0))
    return Spread(len(ratios), before, after)


def _find_ratio(sizes: Array) -> float:
    alive = sizes[sizes > 0]
    return float(alive.max() / alive.min())


def _find_statistics(value: "ir.Value", labels: Labels, known: Ranges | None) -> ChannelStatistics | None:
    """Find what is known of a value by channel, along the axis that its labels differ along."""
    statistics = known.channels.get(value.name or "") if known is not None else None
    axis = find_axis(labels)
    if statistics is None or axis is None or len(statistics.amax) != labels.size:
        return None
    return statistics if statistics.axis % labels.ndim == axis else None


def _find_shares(channel_labels: ChannelLabels, known: Ranges | None) -> Iterator[tuple[Array, Array]]:
    """Iterate over values: the labels of their channels, and how large each is beside the largest one there."""
    for value, labels in channel_labels.values.items():
        statistics = _find_statistics(value, labels, known)
        if statistics is not None and max(statistics.amax) > 0:
            yield labels.reshape(-1), np.array(statistics.amax) / max(statistics.amax)


def _find_free(channel_labels: ChannelLabels) -> Array:
    """Find labels that a product writes, that none reads, and that cost nothing to scale."""
    free = np.zeros(channel_labels.count, bool)
    for _, labels in channel_labels.writers:
        free[labels] = True
    for _, labels in (*channel_labels.readers, *channel_labels.sources, *channel_labels.clips):
        free[labels] = False
    return free & ~channel_labels.fixed
