"""Sums along the channel axis of one value."""

import numpy as np

from enginesmith.pipeline.tensors import Array

_STATISTICS = ("amax", "mean", "mean_absolute", "mean_square")


class ChannelSums:
    """Sums by channel, taken sample by sample: how many samples come at once does not change a bit of them."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self.axis = axis
        """Counted from the first, once there are values."""
        self._elements = 0
        self._largest = np.zeros(1, np.float32)
        self._sums = np.zeros((3, 1), np.float64)

    def add(self, values: Array) -> None:
        """Take floats whose first axis is the batch (shape [N, …]); one axis alone is the channel itself."""
        self.axis = self._axis % values.ndim
        for sample in values if self.axis else [values]:
            self._add(sample, self.axis - 1 if self.axis else 0)

    def _add(self, sample: Array, axis: int) -> None:
        others = tuple(dim for dim in range(sample.ndim) if dim != axis)
        magnitude = np.abs(sample)
        self._largest = np.maximum(self._largest, magnitude.max(axis=others, initial=0))
        sums = (
            sample.sum(axis=others, dtype=np.float64),
            magnitude.sum(axis=others, dtype=np.float64),
            np.square(sample, dtype=np.float64).sum(axis=others),
        )
        self._sums = self._sums + np.stack(sums)
        self._elements += sample.size // sample.shape[axis]

    def statistics(self) -> dict[str, Array]:
        """The largest magnitude and the means of x, of its magnitude and of its square, each float64[channels]."""
        means = self._sums / max(self._elements, 1)
        return dict(zip(_STATISTICS, (self._largest.astype(np.float64), *means), strict=True))
