"""Which elements of a weight stay: two of four along an axis, or the largest ones anywhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.pipeline.tensors import Array

GROUP, KEPT = 4, 2
_ROWS = 1 << 20
_HALF_BITS = 16
_BINS = 1 << _HALF_BITS


def two_of_four(weight: Array, axis: int) -> Array:
    """True where an element is one of the two largest magnitudes of its four neighbours along ``axis``.

    Of equal ones the first stay. The length of the axis is a multiple of four.
    """
    along = np.moveaxis(weight, axis, -1)
    kept = np.empty(along.shape, bool)
    flat, out = np.ascontiguousarray(along).reshape(-1, GROUP), kept.reshape(-1, GROUP)
    for start in range(0, len(flat), _ROWS):
        out[start : start + _ROWS] = _two_largest(np.abs(flat[start : start + _ROWS].astype(np.float32)))
    return np.moveaxis(kept, -1, axis)


def _two_largest(magnitudes: Array) -> Array:
    """True for those that fewer than two others come before; magnitudes are rows of four."""
    before = np.zeros(magnitudes.shape, np.int8)
    for first in range(GROUP):
        for second in range(first + 1, GROUP):
            ahead = magnitudes[:, first] >= magnitudes[:, second]
            before[:, second] += ahead
            before[:, first] += ~ahead
    return before < KEPT


def holds(nonzero: Array, axis: int) -> bool:
    """Whether no four neighbours along an axis have more than two that are not zero.


    This is TensorRT's own test for eligible weights (developer guide, "Structured Sparsity"), which lengths that are
    no multiple of four fail.
    """
    if nonzero.shape[axis] % GROUP:
        return False
    groups = np.ascontiguousarray(np.moveaxis(nonzero, axis, -1)).reshape(-1, GROUP)
    return bool((groups.sum(axis=1, dtype=np.int8) <= KEPT).all())


@dataclass(frozen=True)
class Threshold:
    """The magnitude below which elements become zero, and how many of those that equal it do, the first ones."""

    magnitude: np.float32
    ties: int

    def mask(self, weight: Array) -> tuple[Array, "Threshold"]:
        """What stays of a weight, and the threshold for the next one: ties that are used up are used up."""
        magnitudes = np.abs(weight.astype(np.float32))
        kept = magnitudes > self.magnitude
        equal = np.flatnonzero(magnitudes == self.magnitude)
        gone = equal[: self.ties]
        kept.flat[equal[self.ties :]] = True
        return kept, Threshold(self.magnitude, self.ties - len(gone))


def threshold(weights: Sequence[Callable[[], Array]], ratio: float) -> Threshold:
    """The threshold that makes exactly ``ratio`` of all elements zero, rounded down.

    Magnitudes of float32 have the order of their bits, so two histograms find the element of that rank: of the upper
    half of the bits, then of the lower half of those with the right upper one. One weight is in memory at a time.
    """
    upper = np.zeros(_BINS, np.int64)
    for read in weights:
        upper += np.bincount(_bits(read()) >> _HALF_BITS, minlength=_BINS)
    rank = int(ratio * int(upper.sum()))
    if rank == 0:
        return Threshold(np.float32(0), 0)
    high, below = _bin(upper, rank)
    lower = np.zeros(_BINS, np.int64)
    for read in weights:
        bits = _bits(read())
        lower += np.bincount(bits[bits >> _HALF_BITS == high] & (_BINS - 1), minlength=_BINS)
    low, less = _bin(lower, rank - below)
    bits = np.array([high << _HALF_BITS | low], np.uint32)
    return Threshold(bits.view(np.float32)[0], rank - below - less)


def _bits(weight: Array) -> Array:
    return np.abs(weight.astype(np.float32)).reshape(-1).view(np.uint32)


def _bin(counts: Array, rank: int) -> tuple[int, int]:
    """The bin with the element of that rank, counted from one, and how many lie in bins before it."""
    total = np.cumsum(counts)
    index = int(np.searchsorted(total, rank))
    return index, int(total[index] - counts[index])
