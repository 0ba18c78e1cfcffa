"""From the values that go through a graph to the document about them, in memory that does not grow with the data."""

from collections.abc import Collection, Mapping

import numpy as np

from enginesmith.calibration.channels import ChannelSums
from enginesmith.calibration.histogram import Extent, Histogram
from enginesmith.calibration.methods import PERCENTILE, amax
from enginesmith.calibration.ranges import ChannelStatistics, TensorRange
from enginesmith.pipeline.tensors import Array


class Collector:
    """Takes values by name; what comes first and what comes together makes no difference."""

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
        """Whether all values so far are."""
        return name not in self._extents or self._extents[name].finite

    def tensors(self, percentile: float = PERCENTILE) -> dict[str, TensorRange]:
        """By name, of all values that were there."""
        return {name: self._range(name, percentile) for name, extent in self._extents.items() if extent.count}

    def _range(self, name: str, percentile: float) -> TensorRange:
        extent, histogram = self._extents[name], self._histograms.get(name)
        found = amax(histogram, percentile) if histogram and extent.finite else None
        return TensorRange(
            minimum=_rounded(extent.minimum),
            maximum=_rounded(extent.maximum),
            finite=extent.finite,
            count=extent.count,
            amax=found and {method: _rounded(value) for method, value in found.items()},
        )

    def channels(self) -> dict[str, ChannelStatistics]:
        """By name, of those whose values all are finite."""
        return {
            name: ChannelStatistics(
                axis=sums.axis,
                **{what: tuple(map(_rounded, values.tolist())) for what, values in sums.statistics().items()},
            )
            for name, sums in self._channels.items()
            if name in self._extents and self._extents[name].finite and self._extents[name].count
        }


def _rounded(value: float) -> float:
    """Nine significant digits: float32 keeps them, and sums in another order agree in them."""
    return float(f"{value:.9g}") + 0.0  # the sum makes 0 of -0, which comes first or not
