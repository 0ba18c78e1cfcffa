"""Collect statistics of the values that go through a graph, in memory that does not grow with the data."""

from collections.abc import Collection, Mapping

import numpy as np

from enginesmith.calibration.histogram import PERCENTILE, Extent, Histogram, amax
from enginesmith.calibration.ranges import ChannelStatistics, TensorRange
from enginesmith.pipeline.tensors import Array

_STATISTICS = ("amax", "middle", "mean", "mean_absolute", "mean_square")


class ChannelSums:
    """Sums by channel, taken sample by sample: not a bit of them depends on how many samples come at once."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self.axis = axis
        """Channel axis, counted from the first once there are values."""
        self._elements = 0
        self._smallest = np.full(1, np.inf, np.float32)
        self._largest = np.full(1, -np.inf, np.float32)
        self._sums = np.zeros((3, 1), np.float64)

    def add(self, values: Array) -> None:
        """Take floats whose first axis is the batch (shape [N, …]); one axis alone is the channel itself."""
        self.axis = self._axis % values.ndim
        for sample in values if self.axis else [values]:
            self._add(sample, self.axis - 1 if self.axis else 0)

    def _add(self, sample: Array, axis: int) -> None:
        others = tuple(dim for dim in range(sample.ndim) if dim != axis)
        magnitude = np.abs(sample)
        self._smallest = np.minimum(self._smallest, sample.min(axis=others, initial=np.inf))
        self._largest = np.maximum(self._largest, sample.max(axis=others, initial=-np.inf))
        sums = (
            sample.sum(axis=others, dtype=np.float64),
            magnitude.sum(axis=others, dtype=np.float64),
            np.square(sample, dtype=np.float64).sum(axis=others),
        )
        self._sums = self._sums + np.stack(sums)
        self._elements += sample.size // sample.shape[axis]

    def statistics(self) -> dict[str, Array]:
        """Return the largest magnitude, the middle and the means of x, of its magnitude and of its square.

        Each is float64[channels].
        """
        means = self._sums / max(self._elements, 1)
        ends = (self._smallest, self._largest) if self._elements else np.zeros((2, self._sums.shape[1]))
        smallest, largest = (each.astype(np.float64) for each in ends)
        extremes = (np.maximum(-smallest, largest), (smallest + largest) / 2)
        return dict(zip(_STATISTICS, (*extremes, *means), strict=True))


class Collector:
    """Takes values by name; neither their order nor their grouping makes a difference."""

    def __init__(self, histograms: Collection[str], channels: Mapping[str, int]) -> None:
        """``histograms`` names the values that every method is to be known for, ``channels`` the channel axes."""
        self._histograms = {name: Histogram() for name in histograms}
        self._extents = {name: histogram.extent for name, histogram in self._histograms.items()}
        self._channels = {name: ChannelSums(axis) for name, axis in channels.items()}

    def add(self, name: str, values: Array) -> None:
        """Take floats; anything else is passed over."""
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            return
        if name in self._histograms:
            self._histograms[name].add(values)
        else:
            self._extents.setdefault(name, Extent()).add(values)
        if name in self._channels and values.ndim and self._extents[name].finite:
            self._channels[name].add(values)

    def finite(self, name: str) -> bool:
        """Check whether all values so far are finite."""
        return name not in self._extents or self._extents[name].finite

    def tensors(self, percentile: float = PERCENTILE) -> dict[str, TensorRange]:
        """Return the ranges by name, of all values that were there."""
        return {name: self._range(name, percentile) for name, extent in self._extents.items() if extent.count}

    def _range(self, name: str, percentile: float) -> TensorRange:
        extent, histogram = self._extents[name], self._histograms.get(name)
        amaxes = amax(histogram, percentile) if histogram and extent.finite else None
        return TensorRange(
            minimum=_round(extent.minimum),
            maximum=_round(extent.maximum),
            finite=extent.finite,
            count=extent.count,
            amax=amaxes and {method: _round(value) for method, value in amaxes.items()},
        )

    def channels(self) -> dict[str, ChannelStatistics]:
        """Return the ranges of channels by name, of tensors whose values all are finite."""
        return {
            name: ChannelStatistics(
                axis=sums.axis,
                **{what: tuple(map(_round, values.tolist())) for what, values in sums.statistics().items()},
            )
            for name, sums in self._channels.items()
            if name in self._extents and self._extents[name].finite and self._extents[name].count
        }


def _round(value: float) -> float:
    """Round to nine significant digits: float32 keeps them, and sums in another order agree in them."""
    return float(f"{value:.9g}") + 0.0  # the sum makes 0 of -0, which comes first or not
