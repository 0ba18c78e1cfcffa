"""Factors of input channels that make products lose least when they are quantised: s in (x/s)·(s·W).

``smooth``: Xiao et al.: SmoothQuant, 2022, arXiv:2211.10438, equation 4: s = max|x|^α / max|W|^(1−α), for activations
with outliers in int8. ``awq``: Lin et al.: AWQ, 2023, arXiv:2306.00978, section 3.2: s = mean|x|^α, for weights in int4
beside exact activations.

The papers run the network to find α. Here each α is judged by the error that rounding should bring into the products,
from the statistics of channels alone; how channels vary together is left out. That is enough to tell good factors
from bad ones, and none are used that should do harm.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from enginesmith.calibration.ranges import ChannelStatistics
from enginesmith.pipeline.precision.quantise.weights import block_size, blocked
from enginesmith.pipeline.tensors import Array

AWQ_EXPONENTS = (0.2, 0.4, 0.6, 0.8)
_LARGEST = 2.0**10
_INT8_LEVELS = 127
_STEP_VARIANCE = 1 / 12  # of the error of rounding, in steps
_CHUNK = 1 << 20  # elements worked on at a time


class Choice(NamedTuple):
    """The best factors, and the energy of the error as a share of the products' without and with them."""

    factors: Array
    before: float
    after: float


def smooth(weights: Sequence[Array], statistics: ChannelStatistics, exponents: Iterable[float]) -> Choice:
    """The best factors for int8 of weights that meet the same activation; ones if none helps.

    Weights are groups × outputs × inputs × places in the kernel.
    """
    amax = np.array(statistics.amax)
    largest = np.max([np.abs(weight).max(axis=(1, 3)).reshape(-1) for weight in weights], axis=0)
    alive = (amax > 0) & (largest > 0)
    base, met = np.where(alive, amax, 1.0), np.where(alive, largest, 1.0)
    tried = (np.where(alive, _limited(base**each / met ** (1 - each)), 1.0) for each in exponents)
    return _best(len(amax), tried, lambda scale: _int8_error(weights, scale, statistics))


def smooth_exponents(*, few: bool) -> tuple[float, ...]:
    """Exponents worth trying; fewer where each channel was seen but a ``few`` times.

    Towards 1 all channels become equally large on the data that they were judged by, and other data are cut off. Held
    against other texts, a sentence encoder lost up to 1.5 dB in single products at 0.7, and 4.7 at 0.9.
    """
    return tuple(step / 10 for step in range(6 if few else 8))


def awq(weights: Sequence[Array], statistics: ChannelStatistics, exponents: Iterable[float]) -> Choice:
    """The best factors for int4 by blocks of inputs; ones if none helps, or the inputs do not divide into blocks."""
    absolute = np.array(statistics.mean_absolute)
    alive = absolute > 0
    block = block_size(len(absolute))
    if not block:
        return Choice(np.ones(len(absolute)), 0.0, 0.0)
    tried = (_centred(np.where(alive, absolute, 1.0) ** each, alive) for each in exponents)
    return _best(len(absolute), tried, lambda scale: _int4_error(weights, scale, statistics, block))


def _best(count: int, tried: Iterable[Array], error: Callable[[Array], float]) -> Choice:
    best = np.ones(count)
    before = least = error(best)
    for scale in tried:
        found = error(scale)
        if found < least:
            best, least = scale, found
    return Choice(best, before, least)


def _centred(values: Array, alive: Array) -> Array:
    """Largest and smallest factor equally far from 1; dead channels at 1."""
    if not alive.any():
        return np.ones(len(values))
    centre = np.sqrt(values[alive].max() * values[alive].min())
    return np.where(alive, _limited(values / centre), 1.0)


def _limited(factors: Array) -> Array:
    return np.clip(factors, 1 / _LARGEST, _LARGEST)


def _int8_error(weights: Sequence[Array], scale: Array, statistics: ChannelStatistics) -> float:
    """Activations with one scale, weights with one for each output."""
    square = np.array(statistics.mean_square)
    step = float((np.array(statistics.amax) / scale).max()) / _INT8_LEVELS
    noise = np.where(square > 0, _STEP_VARIANCE * (step * scale) ** 2, 0)  # of each activation, in units of its own
    total = 0.0
    for weight in weights:
        groups, _, inputs, places = weight.shape
        energy = np.einsum("goik,goik->gi", weight, weight, dtype=np.float64).reshape(-1)
        narrow = scale.astype(np.float32).reshape(groups, 1, inputs, 1)
        steps = np.concatenate([np.abs(part * narrow).max(axis=(2, 3)) for part in _parts(weight)], axis=1)
        power = (square / scale**2).reshape(groups, inputs).sum(axis=1) * places
        lost = _STEP_VARIANCE * power @ ((steps.astype(np.float64) / _INT8_LEVELS) ** 2).sum(axis=1)
        total += _share(float(noise @ energy + lost), float(square @ energy))
    return total / len(weights)


def _int4_error(weights: Sequence[Array], scale: Array, statistics: ChannelStatistics, block: int) -> float:
    """Exact activations, weights (1 × outputs × inputs × 1) in the blocks that they will be stored in."""
    square = np.array(statistics.mean_square)
    narrow, importance = scale.astype(np.float32)[:, None], square / scale**2
    total = 0.0
    for weight in weights:
        lost, energy = np.zeros(len(square)), np.zeros(len(square))
        for part in _parts(weight):
            matrix = part[0, :, :, 0].T * narrow
            energy += _energies(matrix)
            lost += _energies(matrix - blocked(matrix, block, "fp32", importance).wide())
        total += _share(float(importance @ lost), float(importance @ energy))
    return total / len(weights)


def _energies(matrix: Array) -> Array:
    """Sum of squares of each row."""
    found: Array = np.einsum("io,io->i", matrix, matrix, dtype=np.float64)
    return found


def _parts(weight: Array) -> Iterator[Array]:
    """Some outputs at a time, so that what is computed on the way stays small."""
    rows = max(1, _CHUNK * weight.shape[1] // weight.size)
    return (weight[:, start : start + rows] for start in range(0, weight.shape[1], rows))


def _share(error: float, signal: float) -> float:
    return error / signal if signal > 0 else 0.0
