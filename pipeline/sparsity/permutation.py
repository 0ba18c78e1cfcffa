"""An order of channels in which two of each four neighbours have more of the magnitude: greedy swaps.

Pool, Yu: Channel Permutations for N:M Sparsity, NeurIPS 2021: swap the pair of channels of different groups of four
that gains most, then the next one whose groups are untouched, until nothing is gained. Bounded here in rows that are
looked at, in channels that are tried against each other at once, and in work, none of which depends on the clock: the
same weights give the same order.
"""

from dataclasses import dataclass

import numpy as np

from enginesmith.pipeline.sparsity.masks import GROUP
from enginesmith.pipeline.tensors import Array

_MOST_ROWS = 2048
_AT_ONCE = 256
"""Channels that are tried against each other; which ones, changes from round to round."""
_WORK = 2 << 30
"""Comparisons that one search may make, two or three seconds of one core."""
_WORTH = 1e-6
"""Gain of a swap, as a share of all magnitude, below which it is not made."""
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Found:
    """The order, new position → old channel, and the magnitude that 2:4 keeps without and with it."""

    order: Array
    before: float
    after: float


def search(magnitudes: Array) -> Found:
    """Look for an order of the columns of rows × channels; the given one, if none is better.

    The number of channels is a multiple of four.
    """
    rows, channels = magnitudes.shape
    sample = np.ascontiguousarray(magnitudes[:: -(-rows // _MOST_ROWS)].T)
    order = np.arange(channels)
    generator = np.random.default_rng(0)
    spent, idle, groups = 0, 0, channels // GROUP
    parts = -(-channels // _AT_ONCE)
    while spent < _WORK and idle < 2 * parts:
        shuffled = generator.permutation(groups) if parts > 1 else np.arange(groups)
        swapped = 0
        for part in np.array_split(shuffled, parts):
            slots = (part[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
            chosen = order[slots]
            swapped += _swap(sample[chosen], chosen)
            order[slots] = chosen
            spent += len(slots) ** 2 * len(sample[0])
        idle = 0 if swapped else idle + (2 if parts == 1 else 1)
    before, after = (_kept(magnitudes, one) for one in (np.arange(channels), order))
    return Found(order, before, after) if after > before else Found(np.arange(channels), before, before)


def _swap(columns: Array, order: Array) -> int:
    """Make the best swaps between groups that no better one has touched, in ``order``; how many."""
    count = len(columns)
    group = np.arange(count) // GROUP
    gain = _gains(columns)
    gain[group[:, None] >= group[None, :]] = 0  # each pair once, and none within a group
    least = _WORTH * float(columns.sum(dtype=np.float64))
    touched: set[int] = set()
    swaps = 0
    candidates = np.flatnonzero(gain > least)
    for index in candidates[np.argsort(-gain.flat[candidates], kind="stable")]:
        first, second = divmod(int(index), count)
        pair = {first // GROUP, second // GROUP}
        if not pair & touched:
            touched |= pair
            order[[first, second]] = order[[second, first]]
            swaps += 1
    return swaps


def _gains(columns: Array) -> Array:
    """What is gained in kept magnitude if two channels change places, channels × channels.

    Of a group without one of its channels let m₁ ≥ m₂ be the largest: with a channel x it keeps m₁ + max(m₂, x).
    """
    count, rows = columns.shape
    fours = columns.reshape(-1, GROUP, rows)
    without = np.stack([np.delete(fours, slot, axis=1) for slot in range(GROUP)], axis=1)
    without.sort(axis=2)
    second = without[:, :, 1].reshape(count, rows)
    largest = without[:, :, 2].sum(axis=2, dtype=np.float64).reshape(count)
    kept = np.empty((count, count))
    step = max(1, _CHUNK // (count * rows))
    for start in range(0, count, step):
        part = second[start : start + step, None, :]
        kept[start : start + step] = np.maximum(part, columns[None]).sum(axis=2, dtype=np.float32)
    kept += largest[:, None]
    now = np.diag(kept)
    gain: Array = kept + kept.T - now[:, None] - now[None, :]
    return gain


def _kept(magnitudes: Array, order: Array) -> float:
    """The magnitude that 2:4 keeps of the columns in an order."""
    total = 0.0
    step = max(1, _CHUNK // magnitudes.shape[1])
    for start in range(0, len(magnitudes), step):
        fours = magnitudes[start : start + step][:, order].reshape(-1, GROUP)
        total += float(np.sort(fours, axis=1)[:, 2:].sum(dtype=np.float64))
    return total
