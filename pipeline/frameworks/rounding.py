"""Find the numbers of a model's answer that rounding decides: the class of a box whose scores are all nearly 0, say.

The model is computed with each operation's result changed a little, as other implementations round otherwise, and then
with the opposite changes. Of choices between nearly equal values, one of the two is another. They cannot be expected of
an engine, which may answer one of the numbers that were seen then.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from enginesmith.pipeline.tensors import Array, Feeds, find_fill
from enginesmith.pipeline.units import format_share

Perturb = Callable[[Feeds, float, int], dict[str, Array]]
"""Answers with changed operations, as ``Session.perturb`` does."""
FINE, COARSE = 19, 7
"""Bits of the operations' results that are right, where an engine computes in float32, and where it does not."""
_PAIRS = {FINE: 2, COARSE: 1}
_SEEN = 2 * sum(_PAIRS.values())
_FEW_VALUES = 2
"""Values of a number, with the model's own, up to which an engine's has to be one of them: two classes are nearly
equal. Where there are more, as between many scores of nearly 0, the next may be one that was not seen."""
_REACH = {FINE: 2.0, COARSE: 8.0}
"""How far such a number may be from the model's, as a multiple of how far they were seen to move. Engines of lower
precision than float32 change operations by more than was tried."""
_LAST_BITS = 2.0**-22
_DRAWS = 4
_MARGIN = 8
"""Times by which changes of ``FINE`` are larger than what float32 rounds off."""
_EXPLAINED = 2
"""Times by which changes of ``FINE`` are larger than errors that rounding in float32 may explain. Those of ONNX Runtime
beside eager were up to 4 times as large as the changes are by ``_MARGIN``, the farthest of 8 samples each, in 120 sets
of samples of a network in which constants of 2000 cancel; a quarter of them in the median."""
_OWN_ROUNDINGS = 2
"""Roundings of the largest answer itself that come on top: those of an engine, and of the change."""
_ILL = 1e-4
"""Share of an output's range by which a float may move when its operations are rounded, and still be compared."""
_MOST_ILL = 0.1
"""Share of an output's floats that may move further; where more do, all are compared. Where rounding decides a larger
share of whole numbers, an engine could answer nearly anything there, and the output is not verified."""


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
        """How far rounding in float32 may move each output of floats, where it decides no number."""
        self.is_near_limit = False
        """True where an output of floats moves about as far as engines may be from the reference."""
        self._signal, self._noise = dict[str, float](), dict[str, float]()

    def find(self, feeds: Feeds, answer: Feeds) -> dict[str, Array]:
        """Find them in one call, as :func:`find_unstable` does."""
        self._sizes.update({name: value.size for name, value in answer.items()})
        unstable = find_unstable(self._perturb, feeds, answer, self) if self._looking else {}
        self._looking = self._looking and (
            bool(unstable) or self.is_near_limit or any(value.dtype.kind != "f" for value in answer.values())
        )
        self._counts.update(_count(unstable))
        return unstable

    def add_movement(self, name: str, value: Array, changed: Array, left_out: Array) -> None:
        """Add how far changes of ``FINE`` move an output of floats, but for numbers that are left out."""
        farthest = find_farthest(value, changed, left_out)
        numbers = ~left_out & np.isfinite(changed) & (np.abs(value) < find_fill([value]))
        right = value[numbers].astype(np.float64)
        own = _OWN_ROUNDINGS * 2.0**-24 * float(np.abs(right).max(initial=0.0))
        self.movements[name] = max(self.movements.get(name, 0.0), farthest / _EXPLAINED + own)
        apart = changed[numbers] - right
        self._signal[name] = self._signal.get(name, 0.0) + float(right @ right)
        self._noise[name] = self._noise.get(name, 0.0) + float(apart @ apart) / _EXPLAINED**2
        self.is_near_limit |= farthest > _ILL * _measure_span(value)

    @property
    def sqnr_db(self) -> dict[str, float]:
        """Compute the SQNR that errors which rounding in float32 may explain leave each output of floats."""
        signal, noise = self._signal, self._noise
        return {
            name: 10 * float(np.log10(signal[name] / noise[name])) for name in noise if noise[name] and signal[name]
        }

    def find_unverified(self, in_sets: Collection[str]) -> dict[str, float]:
        """Find outputs of which rounding decides too much, and its share; those compared as sets of rows have none."""
        return _find_unverified(self._counts, self._sizes, in_sets)

    def describe(self, in_sets: Collection[str] = ()) -> list[str]:
        """Say how many there are in all calls, output by output, and which outputs are not verified for that."""
        unverified = self.find_unverified(in_sets)
        return [
            f"rounding decides {format_share(count / self._sizes[name])} of the numbers in the output {name!r}, such "
            "as between two values that are equal but for it: engines may answer others there"
            + (", and this output is not verified" if name in unverified else "")
            for name, count in self._counts.items()
            if count
        ]


def find_unverified(unstable: Mapping[str, Array], answer: Feeds, in_sets: Collection[str]) -> dict[str, float]:
    """Find likewise what rounding decides in one answer, of which :func:`find_unstable` found ``unstable``."""
    return _find_unverified(_count(unstable), {name: value.size for name, value in answer.items()}, in_sets)


def _count(unstable: Mapping[str, Array]) -> dict[str, int]:
    """Count the numbers that rounding in float32 decides, by output."""
    return {name: int((each["bits"] == FINE).sum()) for name, each in unstable.items()}


def _find_unverified(counts: Mapping[str, int], sizes: Mapping[str, int], in_sets: Collection[str]) -> dict[str, float]:
    shares = {name: count / sizes[name] for name, count in counts.items() if name not in in_sets}
    return {name: share for name, share in shares.items() if share > _MOST_ILL}


class Draw(NamedTuple):
    """Record numbers of an output that were others in one perturbed answer."""

    bits: int
    """Bits of the operations' results that were right."""
    places: Array
    """Places of these numbers in the flat output."""
    values: Array
    """Their values in that answer."""


def find_unstable(
    perturb: Perturb, feeds: Feeds, answer: Feeds, record: UnstableNumbers | None = None
) -> dict[str, Array]:
    """Find the numbers that rounding decides, of whole numbers and of floats that move by far.

    Returns records as :func:`make_records` does, by output where there are some. Outputs of which most floats move by
    far, and how far others do, are added to ``record``.
    """
    draws, record = dict[str, list[Draw]](), record or UnstableNumbers(perturb)
    for bits in _PAIRS:
        for number, changed in enumerate(round_otherwise(perturb, feeds, bits)):
            _mark(draws, answer, changed, bits, record)
            calm = not draws and not record.is_near_limit
            if number and calm and all(value.dtype.kind == "f" for value in answer.values()):
                break  # after one pair, which is so with nearly all models
        if not any(_is_whole(value).any() for value in answer.values()):
            break
    return {name: make_records(answer[name], each) for name, each in draws.items()}


def make_records(right: Array, draws: Sequence[Draw]) -> Array:
    """Make records of an output's numbers that rounding decides, a few bytes for each: the outputs may be large.

    Each has its ``place`` in the flat output; the ``bits`` of operations' results that are right where it decides, one
    record for each of ``FINE`` and ``COARSE``; what was ``seen`` there; and the ``reach`` within which other numbers
    may be: 0 where two whole numbers were seen, and without end for floats.
    """
    kind = np.dtype([("place", "i8"), ("bits", "u1"), ("seen", right.dtype, (_SEEN,)), ("reach", "f8")])
    levels = []
    for bits in _PAIRS:
        used = [draw for draw in draws if draw.bits >= bits]
        places = np.unique(np.concatenate([draw.places for draw in used])) if used else np.zeros(0, np.int64)
        records = np.zeros(len(places), kind)
        own = right.reshape(-1)[places]
        records["place"], records["bits"], records["seen"] = places, bits, own[:, np.newaxis]
        for column, draw in enumerate(used):
            records["seen"][np.searchsorted(places, draw.places), column] = draw.values
        records["reach"] = _find_reach(own, records["seen"], bits)
        levels.append(records)
    return np.concatenate(levels)


def _find_reach(own: Array, seen: Array, bits: int) -> Array:
    """Find how far other numbers than those seen may be from the model's own: [numbers]."""
    values = np.concatenate([own[:, np.newaxis], seen], axis=1).astype(np.float64)
    many = (np.diff(np.sort(values, axis=1), axis=1) != 0).sum(axis=1) >= _FEW_VALUES
    farthest = np.abs(values - values[:, :1]).max(axis=1)
    whole = _is_whole(values).all(axis=1)
    most = farthest.max(initial=0.0, where=many & whole)
    return np.where(whole, np.where(many, _REACH[bits] * most, 0.0), np.inf)


def spread_bits(records: Array | None, shape: tuple[int, ...]) -> Array:
    """Spread records over an output of this shape: with how many right bits each number is still another one, or 0."""
    bits = np.zeros(shape, np.uint8)
    if records is not None:
        np.maximum.at(bits.reshape(-1), records["place"], records["bits"])
    return bits


def round_otherwise(perturb: Perturb, feeds: Feeds, bits: int) -> Iterator[dict[str, Array]]:
    """Answer with so many bits of each operation right, some times; each time, then with the opposite changes."""
    for seed in range(_PAIRS[bits]):
        for sign in (1, -1):
            yield perturb(feeds, sign * 2.0**-bits, seed)


def _mark(draws: dict[str, list[Draw]], answer: Feeds, changed: Feeds, bits: int, record: UnstableNumbers) -> None:
    for name, value in answer.items():
        if name in changed and changed[name].shape == value.shape and value.size:
            moved, far = _find_moved(value, changed[name])
            if bits == FINE and far.mean() > _MOST_ILL:
                record.unsteady.add(name)
            elif bits == FINE:
                moved |= far
            if bits == FINE and value.dtype.kind == "f":
                record.add_movement(name, value, changed[name], moved)
            if moved.any():
                draws.setdefault(name, []).append(Draw(bits, np.flatnonzero(moved), changed[name][moved]))


def _find_moved(value: Array, changed: Array) -> tuple[Array, Array]:
    """Find the whole numbers that have become others, and the floats that have moved by far."""
    if value.dtype.kind != "f":
        return value != changed, np.zeros(value.shape, bool)
    with np.errstate(invalid="ignore"):
        apart = np.abs(value.astype(np.float64) - changed)
        jumped = _is_whole(value) & (changed == np.round(changed)) & (apart > 0)
        return np.asarray(jumped), np.asarray(apart > _MARGIN * _ILL * _measure_span(value))


def _measure_span(value: Array) -> float:
    """Measure the range of the numbers that are finite; the largest magnitude where all are one, inf without any."""
    numbers = value[np.isfinite(value)]
    return float(np.ptp(numbers)) or float(np.abs(numbers).max()) if numbers.size else np.inf


def _is_whole(value: Array) -> Array:
    return np.asarray(value == np.round(value)) & np.isfinite(value) if value.dtype.kind == "f" else value == value


def take_as_right(reference: Feeds, actual: Feeds, unstable: Feeds, bits: int) -> dict[str, Array]:
    """Put the reference's numbers in the place of those that rounding decides, with so many right bits.

    ``unstable`` are records as :func:`make_records` makes them. A number that was not seen, and is not within reach of
    the reference's, stays.
    """
    taken = dict(actual)
    for name, records in unstable.items():
        given, right = actual.get(name), reference[name]
        if given is not None and given.shape == right.shape and given.dtype.kind == right.dtype.kind:
            taken[name] = _replace_seen(right, given, records[records["bits"] == bits])
    return taken


def _replace_seen(right: Array, given: Array, records: Array) -> Array:
    taken, places = given.copy(), records["place"]
    wanted, answered = right.reshape(-1)[places], given.reshape(-1)[places]
    with np.errstate(invalid="ignore"):
        near = np.abs(answered.astype(np.float64) - wanted.astype(np.float64)) <= records["reach"]
    near |= np.isinf(records["reach"]) | (records["seen"] == answered[:, np.newaxis]).any(axis=1)
    taken.reshape(-1)[places[near]] = wanted[near]
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
                left_out = (spread_bits(unstable.get(name), right.shape) > 0) | ~numbers
                moved[name] = max(moved.get(name, 0.0), find_farthest(right, value, left_out))
    return moved


def find_farthest(right: Array, moved: Array, left_out: Array) -> float:
    """Find how far a number has moved at most; NaN counts for nothing, nor does what is left out, a mask."""
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(moved.astype(np.float64) - right.astype(np.float64)), nan=0.0)
    return float(apart.max(initial=0.0, where=~left_out))
