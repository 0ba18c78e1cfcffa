"""Count magnitudes of the values of one tensor, whatever their order, and choose the range of int8 for them.

The bins are those of float32 itself: the exponent and the first bits of the mantissa of a value's magnitude. So each is
as fine for its values as any other, and an outlier (an attention mask of -3e38) takes nothing from the rest; linear
bins up to the largest value would put all else into the first one. Nothing has to be known about the values
beforehand and nothing is ever rescaled.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from enginesmith.calibration.ranges import Method
from enginesmith.pipeline.tensors import Array

_MANTISSA_BITS, _BIAS = 23, 127  # of float32, IEEE 754
_KEPT_BITS = 9
"""512 bins an octave: a step of int8 is four to eight bins wide next to the largest value."""
_SHIFT = _MANTISSA_BITS - _KEPT_BITS
_SMALLEST_EXPONENT = -32
"""Exponent of the first octave that is told from zero."""
_FIRST = (_SMALLEST_EXPONENT + _BIAS) << _KEPT_BITS
_INFINITE = (0xFF << _KEPT_BITS) - _FIRST
"""The first bin of what is no number."""
_AT_ONCE = 1 << 18  # elements: with the bins they fit into an L2 cache, and the work on each chunk outweighs the calls


class Extent:
    """The smallest and the largest finite value, and the number of values."""

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
        """Number of values that are zero, or so small that they may as well be (below 2⁻³²)."""
        return int(self._counts[0])

    def magnitudes(self) -> tuple[Array, Array]:
        """Return edges (float64[n+1]) and counts (int64[n]) of all finite values that are not zero.

        The last edge is the largest magnitude, or a hair above its bin's lower edge where it is that edge.
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


# The magnitude that int8 should reach to, by several methods, all from one histogram.
#
# Zeros are in none of them but ``percentile``: int8 holds them exactly whatever it reaches to, and after a ReLU they
# would outweigh everything else.

PERCENTILE = 99.99
_LEVELS = 127
"""Steps of symmetric int8 between zero and the end of its range."""
_KL_BINS, _KL_LEVELS, _KL_STRIDE = 2048, 128, 16
_KL_NOTHING = 1e-4
"""Values in a bin that has none, where the last bin is empty but for what lies beyond; as ONNX Runtime takes it."""
_KL_SAME = 1e-9
"""Divergences this close are the same; values on a grid, as pixels are, have none at several ends."""
_MSE_OCTAVES, _MSE_PER_OCTAVE, _MSE_REFINED = 10, 8, 8


def amax(histogram: Histogram, percentile: float = PERCENTILE) -> dict[Method, float]:
    """Compute the end of the range by every method: more than zero, except where all values are zero."""
    edges, counts = histogram.magnitudes()
    largest = histogram.extent.largest
    if not counts.size:  # nothing that is told from zero
        return {"minmax": largest, "percentile": largest, "entropy": largest, "mse": largest}
    methods: Mapping[Method, Callable[[], float]] = {
        "minmax": lambda: largest,
        "percentile": lambda: _percentile(edges, counts, histogram.zeros, percentile),
        "entropy": lambda: _entropy(edges, counts),
        "mse": lambda: _mse(edges, counts),
    }
    return {name: min(method(), largest) for name, method in methods.items()}


def _percentile(edges: Array, counts: Array, zeros: int, percentile: float) -> float:
    """Find the magnitude that this percentage of all values, zeros included, does not exceed.

    Where so many are zero, it is the largest: a range of nothing would serve nobody.
    """
    below = zeros + np.append(0, np.cumsum(counts))
    rank = percentile / 100 * float(below[-1])
    return float(np.interp(rank, below, edges)) if rank > zeros else float(edges[-1])


def _entropy(edges: Array, counts: Array) -> float:
    """Find the end at which clipping and rounding together lose the least information.

    S. Migacz, 8-bit Inference with TensorRT, GPU Technology Conference 2017: of the first i of 2048 linear bins, the
    i whose distribution P, with everything beyond in its last bin, is nearest by Kullback-Leibler divergence to that
    of the same bins in 128 levels; the largest such i. The smallest there is 128, a sixteenth of the largest value.
    Where that comes out, the search goes on with the bins over that sixteenth. An end has to hold half of the values:
    where all are in the last bin, nothing diverges.
    """
    end = float(edges[-1])
    centers = (edges[:-1] + edges[1:]) / 2
    ends = np.arange(_KL_LEVELS, _KL_BINS + 1, _KL_STRIDE)
    while True:
        place = np.minimum(centers * (_KL_BINS / end), _KL_BINS).astype(np.int64)
        grid = np.bincount(place, counts, _KL_BINS + 1)
        inside = np.cumsum(grid)[ends - 1]
        likely = inside >= counts.sum() / 2
        divergences = [
            _divergence(grid[:i], float(grid[i:].sum())) if some else np.inf
            for i, some in zip(ends, likely, strict=True)
        ]
        best = int(ends[np.flatnonzero(np.array(divergences) <= min(divergences) + _KL_SAME)[-1]])
        end *= best / _KL_BINS
        if best > _KL_LEVELS:
            return end


def _divergence(inside: Array, beyond: float) -> float:
    """Compute KL(P‖Q) in nats of bins against themselves in 128 levels."""
    level = np.arange(inside.size) * _KL_LEVELS // inside.size
    reference = inside.copy()
    reference[-1] += beyond
    occupied = reference > 0
    in_level = np.bincount(level, inside, _KL_LEVELS)
    share = in_level / np.maximum(np.bincount(level, occupied, _KL_LEVELS), 1)
    p, q = reference[occupied], np.maximum(share[level[occupied]], _KL_NOTHING)
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q)))


def _mse(edges: Array, counts: Array) -> float:
    """Find the end whose quantization has the least mean squared error; values count as spread evenly in their bins.

    Tried are the largest value and its fractions in equal ratios, then finer ones next to the best.
    """
    end = float(edges[-1])
    first = int(np.searchsorted(edges, end * 2.0 ** -(_MSE_OCTAVES + 9)))  # what is below rounds to zero at every end
    edges = edges[max(first - 1, 0) :]
    density = counts[-(edges.size - 1) :] / np.diff(edges)

    def best(exponents: Array) -> float:
        errors = [_squared_error(edges, density, end * 2.0**exponent) for exponent in exponents]
        return float(exponents[int(np.argmin(errors))])

    coarse = best(-np.arange(_MSE_OCTAVES * _MSE_PER_OCTAVE + 1) / _MSE_PER_OCTAVE)
    step = np.arange(-_MSE_REFINED, _MSE_REFINED + 1) / (_MSE_REFINED * _MSE_PER_OCTAVE)
    return end * float(2.0 ** best(np.minimum(coarse + step, 0.0)))


def _squared_error(edges: Array, density: Array, end: float) -> float:
    """Compute Σ over the values of (x − Q(x))², with Q rounding to 127 levels up to ``end``.

    With u = x/step and k = min(round(u), 127), the integral of (u − k)² from 0 to u is k/12 + (u − k)³/3.
    """
    step = end / _LEVELS
    scaled = edges / step
    nearest = np.minimum(np.rint(scaled), _LEVELS)
    scaled -= nearest
    integral = nearest / 12 + scaled * scaled * scaled / 3
    return float(np.dot(np.diff(integral), density)) * step**3
