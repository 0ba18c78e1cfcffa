"""Find the numbers of a model's answer that rounding decides: the class of a box whose scores are all nearly 0, say.

The model is computed with each operation's result changed a little, as other implementations round otherwise, and then
with the opposite changes. Of choices between nearly equal values, one of the two is another. They cannot be expected of
an engine, and are not compared.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from enginesmith.pipeline.tensors import Array, Feeds
from enginesmith.pipeline.units import format_share

Perturb = Callable[[Feeds, float, int], dict[str, Array]]
"""Answers with changed operations, as ``Session.perturb`` does."""
FINE, COARSE = 19, 7
"""Bits of the operations' results that are right, where an engine computes in float32, and where it does not."""
_PAIRS = {FINE: 2, COARSE: 1}
_LAST_BITS = 2.0**-22
_DRAWS = 4
_MARGIN = 8
"""Times by which changes of ``FINE`` are larger than what float32 rounds off."""
_ILL = 1e-4
"""Share of an output's range by which a float may move when its operations are rounded, and still be compared."""
_MOST_ILL = 0.1
"""Share of an output's floats that may move further; where more do, all are compared."""


class UnstableNumbers:
    """Find the numbers that rounding decides, call by call, as long as there are any.

    Where the first call has none, and no output has whole numbers alone, the others are taken to have none.
    """

    def __init__(self, perturb: Perturb) -> None:
        self._perturb, self._looking, self._counts = perturb, True, Counter[str]()
        self._sizes = Counter[str]()
        self.unsteady = set[str]()
        """Outputs of which most floats move too far to be expected of an engine, and are compared all the same."""
        self.movements = dict[str, float]()
        """How far rounding in float32 moves each output of floats at most, where it decides no number."""

    def find(self, feeds: Feeds, answer: Feeds) -> dict[str, Array]:
        """Find them in one call, as :func:`find_unstable` does."""
        self._sizes.update({name: value.size for name, value in answer.items()})
        unstable_bits = find_unstable(self._perturb, feeds, answer, self) if self._looking else {}
        self._looking = self._looking and (
            bool(unstable_bits) or any(value.dtype.kind != "f" for value in answer.values())
        )
        self._counts.update({name: int((bits >= FINE).sum()) for name, bits in unstable_bits.items()})
        return unstable_bits

    def describe(self) -> list[str]:
        """Say how many there are in all calls, output by output."""
        return [
            f"rounding decides {format_share(count / self._sizes[name])} of the numbers in the output {name!r}, such "
            "as between two values that are equal but for it: engines may answer others there"
            for name, count in self._counts.items()
            if count
        ]


def find_unstable(
    perturb: Perturb, feeds: Feeds, answer: Feeds, record: UnstableNumbers | None = None
) -> dict[str, Array]:
    """Find the numbers that rounding decides, of whole numbers and of floats that move by far.

    Returns, by output where there are some, an array like it: with how many right bits a number is still another one,
    0 where it never is. Outputs of which most floats move by far, and how far others do, are added to ``record``.
    """
    unstable, record = dict[str, Array](), record or UnstableNumbers(perturb)
    for bits in _PAIRS:
        for number, changed in enumerate(round_otherwise(perturb, feeds, bits)):
            _mark(unstable, answer, changed, bits, record)
            if number and not unstable and all(value.dtype.kind == "f" for value in answer.values()):
                break  # after one pair, which is so with nearly all models
        if not any(_is_whole(value).any() for value in answer.values()):
            break
    return unstable


def round_otherwise(perturb: Perturb, feeds: Feeds, bits: int) -> Iterator[dict[str, Array]]:
    """Answer with so many bits of each operation right, some times; each time, then with the opposite changes."""
    for seed in range(_PAIRS[bits]):
        for sign in (1, -1):
            yield perturb(feeds, sign * 2.0**-bits, seed)


def _mark(unstable: dict[str, Array], answer: Feeds, changed: Feeds, bits: int, record: UnstableNumbers) -> None:
    for name, value in answer.items():
        if name in changed and changed[name].shape == value.shape and value.size:
            moved, far = _find_moved(value, changed[name])
            if bits == FINE and far.mean() > _MOST_ILL:
                record.unsteady.add(name)
            elif bits == FINE:
                moved |= far
            if bits == FINE and value.dtype.kind == "f":
                farthest = find_farthest(value, changed[name], np.asarray(moved, np.uint8)) / _MARGIN
                record.movements[name] = max(record.movements.get(name, 0.0), farthest)
            if moved.any():
                known = unstable.get(name, np.zeros(value.shape, np.uint8))
                unstable[name] = np.maximum(known, np.where(moved, np.uint8(bits), np.uint8(0)))


def _find_moved(value: Array, changed: Array) -> tuple[Array, Array]:
    """Find the whole numbers that have become others, and the floats that have moved by far."""
    if value.dtype.kind != "f":
        return value != changed, np.zeros(value.shape, bool)
    with np.errstate(invalid="ignore"):
        apart, numbers = np.abs(value.astype(np.float64) - changed), np.isfinite(value)
        jumped = _is_whole(value) & (changed == np.round(changed)) & (apart > 0)
        span = float(np.ptp(value[numbers])) if numbers.any() else np.inf
        return np.asarray(jumped), np.asarray(apart > _MARGIN * _ILL * span)


def _is_whole(value: Array) -> Array:
    return np.asarray(value == np.round(value)) & np.isfinite(value) if value.dtype.kind == "f" else value == value


def take_as_right(reference: Feeds, actual: Feeds, unstable: Feeds, bits: int) -> dict[str, Array]:
    """Put the reference's numbers in the place of those that rounding decides, with so many right bits."""
    taken = dict(actual)
    for name, known in unstable.items():
        given = actual.get(name)
        if given is not None and given.shape == known.shape and given.dtype.kind == reference[name].dtype.kind:
            taken[name] = np.where(known >= bits, reference[name], given)
    return taken


def measure_movement(perturb: Perturb, feeds: Feeds, answer: Feeds, unstable: Feeds) -> dict[str, float]:
    """Measure how far outputs of floats move if operations are rounded otherwise; without what is unstable.

    ``answer`` may have some of the outputs alone.
    """
    moved = dict[str, float]()
    for seed in range(_DRAWS):
        for name, value in perturb(feeds, _LAST_BITS, seed).items():
            right = answer.get(name)
            if right is not None and value.dtype.kind == "f" and value.shape == right.shape:
                numbers = np.isfinite(value) & np.isfinite(right)
                marks = np.where(numbers, unstable.get(name, np.uint8(0)), FINE)
                moved[name] = max(moved.get(name, 0.0), find_farthest(right, value, marks))
    return moved


def find_farthest(right: Array, moved: Array, unstable: Array | None) -> float:
    """Find how far a number has moved at most; NaN counts for nothing, nor does what is unstable."""
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(moved.astype(np.float64) - right.astype(np.float64)), nan=0.0)
    return float(apart.max(initial=0.0, where=True if unstable is None else unstable == 0))
