"""Data held against the inputs of a model: names, dtypes, ranks, sizes, and numbers that say something.

Everything looks at a few rows at a time, and no longer than it has to: sets may be larger than memory.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from enginesmith.calibration.rows import LazyRows, Rows, cast, pieces
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array, TensorSpec

CASTS = {("float64", "float32"), ("int32", "int64")}
_FIRST_LOOK_BYTES = 1 << 20
"""Most data differ within that; images are not decoded for more."""
LABELS = "labels"
"""The array of labels, where no other was named."""
_LIKELY_LABELS = ("label", "y", "target", "targets", "class", "classes", LABELS)
_REAL = "give samples like those that the model will see"


def checked(source: str, arrays: Mapping[str, Rows], inputs: Sequence[TensorSpec]) -> dict[str, Rows]:
    """The arrays in the order of ``inputs``, cast where that is safe.

    Raises:
        DataError: names ``source`` and says what was given, what was expected, and what to do.
    """
    _check_names(source, arrays, [spec.name for spec in inputs])
    feeds: dict[str, Rows] = {}
    sizes: dict[str, int] = {}
    for spec in inputs:
        _check_shape(source, spec, arrays[spec.name], sizes)
        feeds[spec.name] = _cast(source, spec, arrays[spec.name])
    _check_rows(source, feeds)
    for name, array in feeds.items():
        _check_finite(source, name, array)
    return feeds


def check_names(source: str, names: Iterable[str], inputs: Sequence[TensorSpec], labels: str | None) -> None:
    """Check that arrays of a file are those of the inputs, and perhaps the labels; without inputs, nothing is.

    Raises:
        DataError: others are there, or some are missing.
    """
    wanted = [spec.name for spec in inputs]
    if wanted:
        _check_names(source, {*names} - ({labels or LABELS} - {*wanted}), wanted)


def _check_names(source: str, names: Iterable[str], wanted: Sequence[str]) -> None:
    if set(names) != set(wanted):
        raise DataError(
            f"{source} holds {_listed(names)}, and the model takes {_listed(wanted)}",
            _likely_labels(names, wanted)
            + "name the arrays after the model's inputs, and leave out what is neither an input nor the labels",
        )


def _likely_labels(given: Iterable[str], wanted: Sequence[str]) -> str:
    """Suggest the array that may hold the labels, where all inputs are there: of a usual name, or the only other."""
    others = sorted({*given} - {*wanted}) if {*wanted} <= {*given} else []
    likely = [name for name in _LIKELY_LABELS if name in others] or (others if len(others) == 1 else [])
    return f"did you mean --labels {likely[0]}? Else " if likely else ""


def _check_shape(source: str, spec: TensorSpec, array: Rows, sizes: dict[str, int]) -> None:
    """The first axis is the sample; a word stands for the same size wherever it occurs."""
    fits = array.ndim == len(spec.shape) and array.ndim > 0
    for dim, size in zip(spec.shape[1:], array.shape[1:], strict=False):
        fits = fits and size == (sizes.setdefault(dim, size) if isinstance(dim, str) else dim)
    if not fits:
        expected = ["samples", *(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape[1:])]
        raise DataError(
            f"{source}: {spec.name!r} has the shape {list(array.shape)}, expected [{', '.join(map(str, expected))}]",
            f"give rows that fit {spec}, one sample along the first axis",
        )


def _cast(source: str, spec: TensorSpec, array: Rows) -> Rows:
    given = str(array.dtype)
    if given == spec.dtype:
        return array
    if (given, spec.dtype) not in CASTS:
        raise DataError(f"{source}: {spec.name!r} is {given}, expected {spec.dtype}", f"save it as {spec.dtype}")
    return cast(array, spec.dtype)  # what overflows becomes infinite, and that is refused below


def check_labels(source: str, name: str, labels: Rows, rows: int) -> Array:
    """The labels, one for each row.

    Raises:
        DataError: there are more or fewer, or they are no numbers and no words.
    """
    if labels.ndim == 0 or len(labels) != rows:
        raise DataError(
            f"{source}: {name!r} has the shape {list(labels.shape)}, and the inputs have {rows} rows",
            "give one label for each row",
        )
    return np.asanyarray(labels)


def notes_on(source: str, feeds: Mapping[str, Rows]) -> tuple[str, ...]:
    """Inputs in floats that are zero in every row: a recurrent state may be, an image may not.

    Raises:
        DataError: all inputs are zero in every row.
    """
    zero = [name for name, array in feeds.items() if array.dtype.kind == "f" and _is_zero(array)]
    others = (array for array in feeds.values() if array.dtype.kind != "f")
    if len(zero) == sum(array.dtype.kind == "f" for array in feeds.values()) and all(map(_is_zero, others)):
        raise DataError(f"{source} holds nothing but zeros in {_listed(feeds)}", _REAL)
    return tuple(f"{name!r} is zero in all rows of {source}" for name in zero)


def notes_on_variety(source: str, feeds: Mapping[str, Rows]) -> tuple[str, ...]:
    """Inputs in floats that are the same in every row, of a set that ranges are to be taken from.

    Raises:
        DataError: no input varies, so the rows are one sample many times.
    """
    if len(next(iter(feeds.values()))) == 1:
        return (f"{source} has one row: ranges from one sample are not to be relied on",)
    same = [name for name, array in feeds.items() if _is_same(array)]
    if len(same) == len(feeds):
        raise DataError(f"{source}: calibration samples of {_listed(feeds)} are all the same", _REAL)
    return tuple(
        f"calibration samples of {name!r} are all the same in {source}"
        for name in same
        if feeds[name].dtype.kind == "f"
    )


def _is_zero(array: Rows) -> bool:
    return not any(part.any() for _, part in pieces(array, _FIRST_LOOK_BYTES))


def _is_same(array: Rows) -> bool:
    first = np.asarray(array[:1])
    return all((part == first).all() for _, part in pieces(array, _FIRST_LOOK_BYTES))


def _check_rows(source: str, feeds: Mapping[str, Rows]) -> None:
    counts = {name: len(array) for name, array in feeds.items()}
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(f"{source}: the arrays differ in their number of rows: {given}", "give each the same rows")
    if not all(array.size for array in feeds.values()):
        raise DataError(f"{source} is empty", "give at least one sample")


def _check_finite(source: str, name: str, array: Rows) -> None:
    if array.dtype.kind in "biu" or (isinstance(array, LazyRows) and array.finite):
        return
    for start, part in pieces(array):
        finite = np.isfinite(part)
        if not finite.all():
            row = start + int(np.flatnonzero(~finite.reshape(len(finite), -1).all(1))[0])
            raise DataError(
                f"{source}: {name!r} holds NaN or infinity, first in row {row}",
                "remove those rows, or scale the values into the range of the dtype",
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
