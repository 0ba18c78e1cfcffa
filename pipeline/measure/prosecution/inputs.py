"""Generate inputs that a model allows and that nobody sampled: sizes, batches, paddings, values, mutated samples.

All come from a seed, in a fixed order: a longer search tries the same inputs first. After the first sample the families
take turns, the one that shows most faults first, so that a search of a few inputs has some of each.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.measure.prosecution.finding import SAMPLES
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature, format_sizes, rows_first

_SIZES = (1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 63, 65, 127, 129, 255, 257)
"""Sizes at which kernels change: ends of tiles, one more and one less, and primes."""
_RANDOM_SIZES = 200
_MOST_ELEMENTS = 1 << 24
"""Elements of one input, above which only the ends of the ranges are tried."""
_JITTER = 0.02
"""Share of an input's standard deviation that is added to rows that are repeated."""
OUTLIER = 10.0
"""Outliers are so many times as large as what samples have."""
_DENORMAL = 1e-40


class Attempt(NamedTuple):
    """An input to try."""

    walk: str
    """Family: ``samples``, ``sizes``, ``values``, ``padding`` or ``mutations``."""
    note: str
    """Description for people: ``batch 7, length 13``."""
    feeds: dict[str, Array]
    usual: bool
    """True where it is made of samples as they are, so that a low precision loses no more than on those."""


@dataclass(frozen=True)
class InputSpace:
    """Describe the inputs that a model allows."""

    signature: Signature
    ranges: Mapping[str, ShapeRange]
    samples: Sequence[Feeds]
    """Feeds of the model's own data, at some allowed sizes."""

    @property
    def batch(self) -> str | None:
        """Dynamic dimension that is the batch."""
        return samples.batch_symbol(self.signature)

    def usual_sizes(self) -> dict[str, int]:
        """Return the usual size of each dynamic dimension."""
        return {name: range_.opt for name, range_ in self.ranges.items()}

    @functools.cached_property
    def sources(self) -> Sequence[Feeds]:
        """Samples that others are made of: those without a dynamic dimension of size 0."""
        names = [spec.name for spec in self.signature.inputs if 0 not in spec.shape]
        return [feeds for feeds in self.samples if all(feeds[name].size for name in names)]

    @functools.cached_property
    def masks(self) -> tuple[str, ...]:
        """Inputs that are zeros and ones in all samples: masks of what is there."""
        return tuple(
            spec.name
            for spec in self.signature.inputs
            if len(spec.shape) > 1
            and 0 not in spec.shape
            and all(np.isin(feeds[spec.name], (0, 1)).all() for feeds in self.samples)
        )

    @functools.cached_property
    def kept(self) -> tuple[str, ...]:
        """Inputs that keep the values of the samples: masks, empty ones, and offsets, which rise from 0 everywhere."""
        empty = (spec.name for spec in self.signature.inputs if 0 in spec.shape)
        offsets = (
            spec.name
            for spec in self.signature.inputs
            if len(spec.shape) == 1 and self.batch not in spec.shape and spec.dtype in ("int32", "int64")
            if all(feeds[spec.name][:1] == 0 and (np.diff(feeds[spec.name]) >= 0).all() for feeds in self.samples)
        )
        return (*self.masks, *empty, *offsets)

    @functools.cached_property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """The least and the greatest number of each input, over all samples."""
        limits = {}
        for spec in self.signature.inputs:
            numbers = _finite(np.concatenate([feeds[spec.name].reshape(-1) for feeds in self.samples]))
            limits[spec.name] = float(numbers.min()), float(numbers.max())
        return limits


def _finite(values: Array) -> Array:
    numbers = values.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    return numbers if numbers.size else np.zeros(1)


def generate(space: InputSpace, seed: int) -> Iterator[Attempt]:
    """Yield inputs without end: each family in turn, and mutations once the others are through."""
    rng = np.random.default_rng(seed)
    given = (Attempt(SAMPLES, f"sample {index}", dict(feeds), True) for index, feeds in enumerate(space.samples))
    yield next(given)
    yield from _zero_floats(space, np.random.default_rng([seed, 2]))  # the draws of the others stay as they were
    walks = [_walk_padding(space, rng), _walk_sizes(space, rng), _walk_values(space, rng), given, _mutate(space, rng)]
    while walks:
        for walk in list(walks):
            try:
                yield next(walk)
            except StopIteration:
                walks.remove(walk)


def make_feeds(space: InputSpace, sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Array]:
    """Make usual feeds of these sizes: rows of the samples in a random order, repeated ones a little changed."""
    given = space.sources[int(rng.integers(len(space.sources)))]
    rows = sizes[space.batch] if space.batch else 0
    leads = {spec.name: spec.batch_axis for spec in space.signature.inputs if space.batch in spec.shape}
    given = rows_first(given, space.signature.inputs)
    feeds = dict(given)
    if leads:
        each = [rows_first(feeds, space.signature.inputs) for feeds in space.sources]
        pool = [feeds for feeds in each if all(feeds[name].shape[1:] == given[name].shape[1:] for name in leads)]
        joined = {name: np.concatenate([feeds[name] for feeds in pool]) for name in leads}
        count = min(len(value) for value in joined.values())
        order = np.concatenate([rng.permutation(count) for _ in range(-(-rows // count))])[:rows]
        for name, axis in leads.items():
            feeds[name] = joined[name][order]
            if rows > count and feeds[name].dtype.kind == "f" and name not in space.masks:
                step = _JITTER * float(np.std(_finite(joined[name])))
                feeds[name][count:] += (step * rng.standard_normal(feeds[name][count:].shape)).astype(feeds[name].dtype)
            feeds[name] = np.moveaxis(feeds[name], 0, axis)
    return samples.resize(feeds, space.signature, sizes)


# Sizes


def _walk_sizes(space: InputSpace, rng: np.random.Generator) -> Iterator[Attempt]:
    """Vary each dimension alone, then go to all corners, then draw sizes at random, each set once."""
    usual, past_sizes = space.usual_sizes(), set[tuple[int, ...]]()
    for sizes in itertools.chain(_single_sizes(space), _corners(space), _random_sizes(space, rng)):
        key = tuple(sizes.values())
        if key in past_sizes or sizes == usual or not _fits(space, sizes):
            continue
        past_sizes.add(key)
        yield Attempt("sizes", format_sizes(sizes), make_feeds(space, sizes, rng), True)


def list_sizes(range_: ShapeRange) -> list[int]:
    """List the sizes of a range that are tried: both ends and next to them, ends of tiles, primes; the ends first."""
    inner = [size for size in _SIZES if range_.min <= size <= range_.max]
    near = [size for size in (range_.min + 1, range_.max - 1) if range_.min <= size <= range_.max]
    return list(dict.fromkeys((range_.min, range_.max, *near, *inner)))


def _single_sizes(space: InputSpace) -> Iterator[dict[str, int]]:
    usual = space.usual_sizes()
    columns = [[{**usual, name: size} for size in list_sizes(range_)] for name, range_ in space.ranges.items()]
    yield from (sizes for row in itertools.zip_longest(*columns) for sizes in row if sizes)


def _corners(space: InputSpace) -> Iterator[dict[str, int]]:
    names = list(space.ranges)[:6]
    for corner in itertools.product(*[(space.ranges[name].min, space.ranges[name].max) for name in names]):
        yield {**space.usual_sizes(), **dict(zip(names, corner, strict=True))}


def _random_sizes(space: InputSpace, rng: np.random.Generator) -> Iterator[dict[str, int]]:
    for _ in range(_RANDOM_SIZES if len(space.ranges) > 1 else 0):
        yield {name: int(rng.choice(list_sizes(range_))) for name, range_ in space.ranges.items()}


def _fits(space: InputSpace, sizes: Mapping[str, int]) -> bool:
    elements = max((int(np.prod(spec.resolve(sizes))) for spec in space.signature.inputs), default=0)
    ends = all(size in (space.ranges[name].min, space.ranges[name].max) for name, size in sizes.items())
    return elements <= _MOST_ELEMENTS or ends


# Values


def _zero_floats(space: InputSpace, rng: np.random.Generator) -> Iterator[Attempt]:
    """Set all floats that are no masks to zero, as silence and black pictures are, in the largest batch."""
    sizes = space.usual_sizes()
    if space.batch and _fits(space, largest := {**sizes, space.batch: space.ranges[space.batch].max}):
        sizes = largest
    feeds = make_feeds(space, sizes, rng)
    names = [name for name, value in feeds.items() if value.dtype.kind == "f" and name not in space.kept]
    if names:
        feeds |= {name: np.zeros_like(feeds[name]) for name in names}
        note = f"{', '.join(names)}: all zeros"
        yield Attempt("values", f"{format_sizes(sizes)}, {note}" if sizes else note, feeds, False)


def _walk_values(space: InputSpace, rng: np.random.Generator) -> Iterator[Attempt]:
    """Set one input after the other to patterns that samples do not have."""
    names = [spec.name for spec in space.signature.inputs if spec.name not in space.kept]
    for pattern in _PATTERNS:
        for name in names:
            base = make_feeds(space, space.usual_sizes(), rng)
            feeds = {**base, name: _fill(pattern, base[name], space.bounds[name], rng)}
            yield Attempt("values", f"{name}: {pattern}", feeds, False)


_PATTERNS = (
    *("least", "greatest", "constant", "ties", "uniform", "checkerboard", "one place", "sorted", "zeros"),
    *("one outlier", "all ten times as large", "denormal", "negative"),
)
"""All but those of the second line are within the range of the samples; zeros are its least, if it has none."""


def _fill(pattern: str, base: Array, bounds: tuple[float, float], rng: np.random.Generator) -> Array:
    """Fill an array like ``base`` by a pattern."""
    low, high = bounds
    if base.dtype.kind == "b":
        low, high = 0, 1
    zero = min(max(0.0, low), high)
    flat = np.full(base.size, zero, np.float64)
    match pattern:
        case "least" | "greatest" | "constant":
            flat[:] = {"least": low, "greatest": high, "constant": (low + high) / 2}[pattern]
        case "ties":
            step = (high - low) / 4 or 1.0
            flat[:] = np.clip(np.round(base.reshape(-1).astype(np.float64) / step) * step, low, high)
        case "uniform":
            flat[:] = rng.uniform(low, high, base.size)
        case "checkerboard":
            flat[0::2], flat[1::2] = low, high
        case "one place":
            flat[rng.integers(base.size)] = high
        case "sorted":
            flat[:] = np.sort(base.reshape(-1).astype(np.float64))
        case "one outlier":
            flat[:] = base.reshape(-1)
            flat[rng.integers(base.size)] = OUTLIER * max(abs(low), abs(high))
        case "all ten times as large":
            flat[:] = OUTLIER * base.reshape(-1).astype(np.float64)
        case "denormal":
            flat[:] = _DENORMAL
        case "negative":
            flat[:] = -base.reshape(-1).astype(np.float64)
    if base.dtype.kind in "iub":  # of whole numbers, none that no sample has: it may not be in a vocabulary
        flat = np.clip(np.round(flat), low, high)
    return flat.reshape(base.shape).astype(base.dtype)


def _walk_padding(space: InputSpace, rng: np.random.Generator) -> Iterator[Attempt]:
    """Empty and fill masks, and cut their tails off: to one place, to half, to another length for each row.

    A row of which nothing is there has an answer only in models that see to it, and is no usual input; there is
    another row beside it, if the batch may have two.
    """
    masks = space.masks
    for note in (_EMPTY_ROW, *_PADDINGS) if masks else ():
        sizes = space.usual_sizes()
        if note == _EMPTY_ROW and space.batch:
            sizes[space.batch] = min(max(2, sizes[space.batch]), space.ranges[space.batch].max)
        feeds = make_feeds(space, sizes, rng)
        for name in masks:
            filled = _fill_places(note, feeds[name].shape, rng)
            feeds[name] = (filled == _is_one_there(space, name)).astype(feeds[name].dtype)
        yield Attempt("padding", f"{', '.join(masks)}: {note}", feeds, note != _EMPTY_ROW)


_PADDINGS = ("all there", "one place each", "half of each", "another length each", "holes")
_EMPTY_ROW = "nothing in the first row"


def _is_one_there(space: InputSpace, mask: str) -> bool:
    """Tell whether 1 stands for what is there, and 0 for padding: by the rows of one value, else by what is usual."""
    rows = [row for feeds in space.samples for row in feeds[mask].reshape(-1, feeds[mask].shape[-1]) != 0]
    whole = [row for row in rows if row.all() or not row.any()]
    return bool(np.concatenate(whole or rows).mean() >= 0.5)


def _fill_places(note: str, shape: Sequence[int], rng: np.random.Generator) -> Array:
    """Return [*shape] of bool: True for what is there."""
    length = shape[-1]
    rows = int(np.prod(shape[:-1]))
    lengths = {
        "all there": np.full(rows, length),
        "one place each": np.ones(rows),
        "half of each": np.full(rows, max(1, length // 2)),
        "another length each": rng.integers(1, length + 1, rows),
        "holes": np.full(rows, length),
        _EMPTY_ROW: np.where(np.arange(rows) == 0, 0, length),
    }[note]
    filled = np.arange(length)[None] < np.asarray(lengths)[:, None]
    if note == "holes":
        filled &= rng.random(filled.shape) < 0.5
        filled[:, 0] = True
    return filled.reshape(shape)


# Mutations of samples


def _mutate(space: InputSpace, rng: np.random.Generator) -> Iterator[Attempt]:
    """Yield changed samples without end, at random allowed sizes, each value within the range of the samples."""
    columns = {name: list_sizes(range_)[:8] for name, range_ in space.ranges.items()}
    for number in itertools.count():
        sizes = space.usual_sizes()
        if number % 2:
            sizes = {name: int(rng.choice(listed)) for name, listed in columns.items()}
        if not _fits(space, sizes):
            continue
        feeds, notes = make_feeds(space, sizes, rng), []
        for spec in space.signature.inputs:
            if feeds[spec.name].size and spec.name not in space.kept:
                kind = str(rng.choice(_MUTATIONS))
                feeds[spec.name] = _change(kind, feeds[spec.name], space.bounds[spec.name], rng)
                notes.append(f"{spec.name} {kind}")
        yield Attempt("mutations", "; ".join(filter(None, (format_sizes(sizes), ", ".join(notes)))), feeds, False)


_MUTATIONS = ("with noise", "rolled", "with a block of another value", "mixed", "scaled", "shuffled", "rows alike")


def _change(kind: str, value: Array, bounds: tuple[float, float], rng: np.random.Generator) -> Array:
    low, high = bounds
    changed = value.astype(np.float64)
    if kind == "with noise":
        changed += rng.choice((0.01, 0.1, 0.5)) * changed.std() * rng.standard_normal(changed.shape)
    elif kind == "rolled" and changed.ndim:
        changed = np.roll(changed, int(rng.integers(1, max(2, changed.shape[-1]))), axis=-1)
    elif kind == "with a block of another value" and changed.ndim:
        start = int(rng.integers(changed.shape[-1]))
        changed[..., start : start + max(1, changed.shape[-1] // 4)] = rng.uniform(low, high)
    elif kind == "mixed" and changed.ndim:
        changed = 0.5 * (changed + changed[::-1])
    elif kind == "scaled":
        changed *= rng.uniform(0.25, 2)
    elif kind == "shuffled" and changed.ndim:
        changed = rng.permutation(changed, axis=-1)
    elif kind == "rows alike" and changed.ndim:
        changed[:] = changed[:1]
    if value.dtype.kind in "iub":
        changed = np.round(changed)
    return np.asarray(changed.clip(low, high)).astype(value.dtype)  # operations on a single number give no array
