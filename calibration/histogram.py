"""How large the values of one tensor are, in counts that do not depend on the order in which the values came.

The bins are those of float32 itself: the exponent and the first bits of the mantissa of a value's magnitude. So each is
as fine for its values as any other, and an outlier (an attention mask of -3e38) takes nothing from the rest; linear
bins up to the largest value would put all else into the first one. Nothing has to be known about the values
beforehand and nothing is ever rescaled.
"""

import math

import numpy as np

from enginesmith.pipeline.tensors import Array

_MANTISSA_BITS, _BIAS = 23, 127  # of float32, IEEE 754
_KEPT_BITS = 9
"""512 bins an octave: a step of int8 is four to eight bins wide next to the largest value."""
_SHIFT = _MANTISSA_BITS - _KEPT_BITS
_SMALLEST_EXPONENT = -32
"""Of the first octave that is told from zero."""
_FIRST = (_SMALLEST_EXPONENT + _BIAS) << _KEPT_BITS
_INFINITE = (0xFF << _KEPT_BITS) - _FIRST
"""The first bin of what is no number."""
_AT_ONCE = 1 << 18  # elements: with the bins they fit into an L2 cache, and the work on each chunk outweighs the calls


class Extent:
    """The smallest and the largest finite value, and how many values there were."""

    def __init__(self) -> None:
        self.count = 0
        self.finite = True
        self._minimum, self._maximum = math.inf, -math.inf

    def add(self, values: Array) -> None:
        """Take floats of any shape."""
        self.count += values.size
        low, high = _ends(values)
        if not math.isfinite(low) or not math.isfinite(high):
            self.finite = self.finite and not values.size
            low, high = _ends(values[np.isfinite(values)])
        self._minimum, self._maximum = min(self._minimum, low), max(self._maximum, high)

    @property
    def minimum(self) -> float:
        """The smallest finite value; 0 where there is none."""
        return self._minimum if math.isfinite(self._minimum) else 0.0

    @property
    def maximum(self) -> float:
        """The largest finite value; 0 where there is none."""
        return self._maximum if math.isfinite(self._maximum) else 0.0

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return max(-self.minimum, self.maximum)


class Histogram:
    """Counts of magnitudes; its size depends on the octaves that occur, about 150 KB for what networks compute."""

    def __init__(self) -> None:
        self.extent = Extent()
        self._counts = np.zeros(1, np.int64)

    def add(self, values: Array) -> None:
        """Take floats of any shape; what float32 does not hold counts as infinite."""
        with np.errstate(over="ignore"):
            flat = np.asarray(values).reshape(-1).astype(np.float32, copy=False)
        for start in range(0, flat.size, _AT_ONCE):
            part = np.ascontiguousarray(flat[start : start + _AT_ONCE])
            self.extent.add(part)
            self._count(part)

    def _count(self, part: Array) -> None:
        index = part.view(np.uint32) & np.uint32(0x7FFF_FFFF)
        index >>= np.uint32(_SHIFT)
        np.maximum(index, np.uint32(_FIRST), out=index)
        index -= np.uint32(_FIRST)
        counts = np.bincount(index)
        if counts.size > self._counts.size:
            self._counts = np.pad(self._counts, (0, counts.size - self._counts.size))
        self._counts[: counts.size] += counts

    @property
    def zeros(self) -> int:
        """How many values are zero, or so small that they may as well be (below 2⁻³²)."""
        return int(self._counts[0])

    def magnitudes(self) -> tuple[Array, Array]:
        """Edges (float64[n+1]) and counts (int64[n]) of all finite values that are not zero; the last edge is the
        largest magnitude, or a hair above its bin's lower edge where it is that edge.
        """
        occupied = np.flatnonzero(self._counts[1:_INFINITE])
        if not occupied.size:
            return np.zeros(1), np.zeros(0, np.int64)
        first, last = int(occupied[0]) + 1, int(occupied[-1]) + 1
        bits = (np.arange(first, last + 1, dtype=np.uint32) + np.uint32(_FIRST)) << np.uint32(_SHIFT)
        lower = bits.view(np.float32).astype(np.float64)
        end = max(self.extent.largest, float(lower[-1]) * (1 + 2.0**-20))
        return np.append(lower, end), self._counts[first : last + 1]


def _ends(values: Array) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (math.inf, -math.inf)
