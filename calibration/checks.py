"""Data held against the inputs of a model: names, dtypes, ranks, sizes, and numbers that are numbers."""

from collections.abc import Sequence

import numpy as np

from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array, Feeds, TensorSpec

CASTS = {("float64", "float32"), ("int32", "int64")}
_CHECKED_AT_ONCE = 1 << 22  # elements


def checked(source: str, arrays: Feeds, inputs: Sequence[TensorSpec]) -> Feeds:
    """The arrays in the order of ``inputs``, cast where that is safe.

    Raises:
        DataError: names ``source`` and says what was given, what was expected, and what to do.
    """
    wanted = [spec.name for spec in inputs]
    if set(arrays) != set(wanted):
        raise DataError(
            f"{source} holds {_listed(arrays)}, and the model takes {_listed(wanted)}",
            "name the arrays after the model's inputs, and leave out what is neither an input nor the labels",
        )
    feeds: dict[str, Array] = {}
    sizes: dict[str, int] = {}
    for spec in inputs:
        _check_shape(source, spec, arrays[spec.name], sizes)
        feeds[spec.name] = _cast(source, spec, arrays[spec.name])
    _check_rows(source, feeds)
    for name, array in feeds.items():
        _check_finite(source, name, array)
    return feeds


def _check_shape(source: str, spec: TensorSpec, array: Array, sizes: dict[str, int]) -> None:
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


def _cast(source: str, spec: TensorSpec, array: Array) -> Array:
    given = str(array.dtype)
    if given == spec.dtype:
        return array
    if (given, spec.dtype) not in CASTS:
        raise DataError(f"{source}: {spec.name!r} is {given}, expected {spec.dtype}", f"save it as {spec.dtype}")
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and that is refused below
        return array.astype(spec.dtype)


def _check_rows(source: str, feeds: Feeds) -> None:
    counts = {name: len(array) for name, array in feeds.items()}
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(f"{source}: the arrays differ in their number of rows: {given}", "give each the same rows")
    if not all(array.size for array in feeds.values()):
        raise DataError(f"{source} is empty", "give at least one sample")


def _check_finite(source: str, name: str, array: Array) -> None:
    if array.dtype.kind in "biu":
        return
    step = max(1, _CHECKED_AT_ONCE // array[0].size)
    for start in range(0, len(array), step):
        finite = np.isfinite(array[start : start + step])
        if not finite.all():
            row = start + int(np.flatnonzero(~finite.reshape(len(finite), -1).all(1))[0])
            raise DataError(
                f"{source}: {name!r} holds NaN or infinity, first in row {row}",
                "remove those rows, or scale the values into the range of the dtype",
            )


def _listed(names: Sequence[str] | Feeds) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
