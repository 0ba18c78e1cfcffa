"""Compare outputs whose rows are chosen by their values, as sets: the boxes that a NonMaxSuppression leaves.

Rounding changes which rows are chosen, and in what order, where values are nearly equal or near a threshold. So each
row of the reference is paired with the nearest row that was given, and the share of rows with a partner is judged.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginesmith.pipeline.tensors import Array, Feeds, Signature, list_words

MIN_SHARE = 0.98
"""Share of rows that have to have a partner, where the precision does not ask for less."""
_ONE_CLASS, _MOST_CLASSES = 1e-9, 10_000
"""Scale of classes, of which no two are alike, and the largest class."""
_CORNERS = 4
"""Columns of a box, which come first where an output has more."""
_EVEN = 2
"""Rows of both sides in a pair."""


class Table(NamedTuple):
    """Outputs that describe the same rows: a box, its score and its class."""

    outputs: tuple[str, ...]
    batch_axis: int | None
    """Where each sample has rows of its own, along the first of the other axes; None: rows are along the first axis."""


class Paired(NamedTuple):
    """Rows of one table that have a partner, of all calls."""

    pairs: dict[str, list[tuple[Array, Array]]]
    """By output: the reference's rows and their partners, call by call."""
    share: float
    """Rows with a partner, of all rows of both sides."""


def find_tables(signature: Signature, references: Sequence[Feeds]) -> tuple[Table, ...]:
    """Group the outputs whose rows are chosen by values: those that have as many rows as each other in all calls.

    Rows are along the first axis that is not the inputs' batch. Single numbers in a fixed order are no table.
    """
    batches = {spec.as_row.shape[0] for spec in signature.inputs if spec.shape}
    groups: dict[tuple[int | None, tuple[int, ...]], list[str]] = {}
    open_ended = set[str]()
    for spec in signature.outputs:
        if spec.name not in signature.unordered or not spec.shape or spec.shape in [(size,) for size in batches]:
            continue
        batch_axis = spec.batch_axis if len(spec.shape) > 1 and spec.shape[spec.batch_axis] in batches else None
        axis = int(batch_axis == 0)
        rows = tuple(reference[spec.name].shape[axis] for reference in references)
        groups.setdefault((batch_axis, rows), []).append(spec.name)
        if {*list_words(spec.shape[axis])} - {*signature.symbols}:
            open_ended.add(spec.name)
    tables = (Table(tuple(names), batch_axis) for (batch_axis, _), names in groups.items())
    return tuple(t for t in tables if _count_columns(t, references[0]) > 1 or not open_ended.isdisjoint(t.outputs))


def count_rows(signature: Signature, reference: Feeds, actual: Feeds) -> int:
    """Count the rows of both sides that are not repeated, in the table with the fewest; 0 without a table."""
    counts = []
    for table in find_tables(signature, [reference]):
        sides = (side for sample in _iterate_samples(table, reference, actual) for side in sample)
        counts.append(sum(len(_drop_repeated(side)[0]) for side in sides))
    return min(counts, default=0)


def are_row_counts(name: str, tables: Sequence[Table], references: Sequence[Feeds]) -> bool:
    """Tell whether an output is how many rows of a table count, for each sample: of 20 rows, those that do not fill up.

    Those that fill up are equal to each other.
    """
    return references[0][name].dtype.kind in "iu" and any(
        all(_is_row_count(reference[name].reshape(-1), table, reference) for reference in references)
        for table in tables
    )


def _is_row_count(counts: Array, table: Table, reference: Feeds) -> bool:
    samples = [rows for rows, _ in _iterate_samples(table, reference, reference)]
    most, least = ([len(rows[0]) for rows in side] for side in (samples, map(_drop_repeated, samples)))
    if table.batch_axis is None:  # rows of all samples are in one table
        counts = counts.sum(keepdims=True)
    return len(counts) == len(most) and bool(((counts <= most) & (counts >= np.array(least) - 1)).all())


def _count_columns(table: Table, outputs: Feeds) -> int:
    return sum(math.prod(_split_samples(table, outputs[name]).shape[2:]) for name in table.outputs)


def pair_rows(table: Table, calls: Sequence[tuple[Feeds, Feeds]], tolerance: float) -> Paired:
    """Pair the rows of all calls whose floats differ by at most this share of their range, the nearest first.

    Classes have to be equal, and probabilities count from 0 to 1; the rest of an output's columns have one range. Rows
    that are equal in all columns count once, such as those that fill up a table of fixed size. Where a table has no
    floats, rows have to be equal.
    """
    whole = [_drop_repeated(sample) for call in calls for sample, _ in _iterate_samples(table, *call)]
    columns = [[sample[position] for sample in whole] for position in range(len(table.outputs))]
    scales = [_measure_scales(np.concatenate(column)) for column in columns]
    pairs_by_output: dict[str, list[tuple[Array, Array]]] = {name: [] for name in table.outputs}
    paired = rows = 0
    for reference, actual in calls:
        for ours, theirs in _iterate_samples(table, reference, actual):
            ours, theirs = _drop_repeated(ours), _drop_repeated(theirs)
            near = _find_partners(_scale(ours, scales), _scale(theirs, scales), tolerance)
            paired += len(near)
            rows += len(ours[0]) + len(theirs[0])
            for position, name in enumerate(table.outputs):
                pairs_by_output[name].append((ours[position][near[:, 0]], theirs[position][near[:, 1]]))
    return Paired(pairs_by_output, _EVEN * paired / rows if rows else 1.0)


def _iterate_samples(table: Table, reference: Feeds, actual: Feeds) -> Iterator[tuple[list[Array], list[Array]]]:
    """Yield both sides' columns of each sample, or of the whole call: [rows, numbers] for each output."""
    ours, theirs = ([_split_samples(table, side[name]) for name in table.outputs] for side in (reference, actual))
    for sample in range(len(ours[0])):
        yield [_as_rows(array[sample]) for array in ours], [_as_rows(array[sample]) for array in theirs]


def _split_samples(table: Table, array: Array) -> Array:
    """Return [samples, rows, ...]; all rows are of one sample where the table has no batch."""
    return array[np.newaxis] if table.batch_axis is None else np.moveaxis(array, table.batch_axis, 0)


def _as_rows(array: Array) -> Array:
    return array.reshape(len(array), -1) if array.size else np.empty((0, math.prod(array.shape[1:])), array.dtype)


def _drop_repeated(columns: list[Array]) -> list[Array]:
    if not len(columns[0]):
        return columns
    joined = np.concatenate([column.astype(np.float64) for column in columns], axis=1)
    _, first = np.unique(joined, axis=0, return_index=True)
    return [column[np.sort(first)] for column in columns]


def _measure_scales(rows: Array) -> NDArray[np.float64] | None:
    """Return what counts as 1 in each column of an output, [numbers]; None for integers, which are no distances."""
    if rows.dtype.kind != "f":
        return None
    finite = np.isfinite(rows).all(axis=1)
    numbers = (rows[finite] if finite.any() else np.zeros_like(rows)).astype(np.float64)
    scales = np.ones(rows.shape[1])
    first = 0 if len(numbers.T) == 1 else _CORNERS  # of whole numbers, corners may be equal, too: at an image's edge
    classes = np.array([at >= first and _are_classes(column) for at, column in enumerate(numbers.T)], bool)
    scales[classes] = _ONE_CLASS
    others = ~classes & ~((numbers >= 0) & (numbers <= 1)).all(axis=0)
    rest = numbers[:, others]
    if rest.size:
        wide = float(np.ptp(rest)) or float(np.abs(rest).max()) or 1.0
        scales[others] = wide
    return scales


def _are_classes(column: NDArray[np.float64]) -> bool:
    """Tell whether numbers are classes of rows: whole ones, up to 10 000 and above 1, of which half are repeated."""
    whole = (column == np.round(column)).all() and (column >= -1).all() and (column <= _MOST_CLASSES).all()
    return bool(whole and column.max(initial=0) > 1 and 2 * len(np.unique(column)) <= len(column))


def _scale(columns: list[Array], scales: list[NDArray[np.float64] | None]) -> NDArray[np.float64]:
    """Return the floats in units of their scale, [rows, numbers]; all numbers of a table without floats as they are."""
    pairs = [(column.astype(np.float64), scale) for column, scale in zip(columns, scales, strict=True)]
    parts = [column / scale for column, scale in pairs if scale is not None] or [column for column, _ in pairs]
    return np.nan_to_num(np.concatenate(parts, axis=1))


def _find_partners(ours: NDArray[np.float64], theirs: NDArray[np.float64], tolerance: float) -> NDArray[np.int64]:
    """Pair rows one to one by the greatest difference of their numbers, the nearest first; return [pairs, 2]."""
    near: list[tuple[float, int, int]] = []  # the pairs that are near enough, not all that there are
    order = np.argsort(theirs[:, 0], kind="stable")
    ordered, reach = theirs[order], tolerance * (1 + 1e-9) + 1e-12  # a little further, as sums are rounded
    for row, numbers in enumerate(ours):
        low, high = np.searchsorted(ordered[:, 0], (numbers[0] - reach, numbers[0] + reach))
        apart = np.abs(ordered[low:high] - numbers).max(axis=1, initial=0)
        near += ((float(apart[at]), row, int(order[low + at])) for at in np.flatnonzero(apart <= tolerance))
    taken_left, taken_right, pairs = set[int](), set[int](), []
    for _, row, partner in sorted(near):
        if row not in taken_left and partner not in taken_right:
            taken_left.add(row)
            taken_right.add(partner)
            pairs.append((row, partner))
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)
