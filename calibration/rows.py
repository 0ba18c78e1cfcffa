"""Arrays whose first axis is the sample: in memory, mapped from a file, or made row by row when they are asked for."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from enginesmith.pipeline.tensors import Array

AT_ONCE_BYTES = 16 << 20
"""About as much of an array as is looked at in one go."""


class LazyRows(ABC):
    """Looks like an array as far as its first axis goes; rows are made when they are indexed."""

    finite = False
    """Whether no row can hold NaN or infinity, so that nobody has to look."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, key: Any) -> Array:
        """One row for a number; rows for a slice or an array of row numbers."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)

    def origin(self, rows: Array | slice) -> Iterator[bytes]:
        """What those rows are, for a digest: their bytes, or whatever decides them."""
        yield from (part.tobytes() for _, part in pieces(Picked(self, rows)))


Rows = Array | LazyRows


class Picked(LazyRows):
    """Some rows of another array, in an order of their own."""

    def __init__(self, base: Rows, rows: Array | slice) -> None:
        self._base = base
        self._rows = np.arange(len(base))[rows]
        self.finite = isinstance(base, LazyRows) and base.finite
        super().__init__((len(self._rows), *base.shape[1:]), base.dtype)

    def __getitem__(self, key: Any) -> Array:
        return np.asarray(self._base[self._rows[key]])

    def origin(self, rows: Array | slice) -> Iterator[bytes]:
        yield from origin(self._base, self._rows[rows])


class Cast(LazyRows):
    """Another array in another dtype; what overflows becomes infinite."""

    def __init__(self, base: Rows, dtype: Any) -> None:
        self._base = base
        super().__init__(base.shape, dtype)

    def __getitem__(self, key: Any) -> Array:
        with np.errstate(over="ignore"):
            return np.asarray(self._base[key]).astype(self.dtype)


def pick(array: Rows, rows: Array) -> Rows:
    """Those rows: a copy of what is in memory, and of everything else a view that reads them when they are needed."""
    in_memory = isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
    return array[rows] if in_memory else Picked(array, rows)


def cast(array: Rows, dtype: str) -> Rows:
    """The array in another dtype, likewise."""
    if isinstance(array, LazyRows | np.memmap):
        return Cast(array, dtype)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def pieces(array: Rows, at_once_bytes: int | None = None) -> Iterator[tuple[int, Array]]:
    """The array in pieces, each with the number of its first row: a mapped file is never in memory as a whole."""
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    step = max(1, (at_once_bytes or AT_ONCE_BYTES) // max(1, row_bytes))
    for start in range(0, len(array), step):
        yield start, np.ascontiguousarray(array[start : start + step])


def origin(array: Rows, rows: Array | slice = slice(None)) -> Iterator[bytes]:
    """What decides those rows, for a digest."""
    if isinstance(array, LazyRows):
        return array.origin(rows)
    return (part.tobytes() for _, part in pieces(array if isinstance(rows, slice) else Picked(array, rows)))


def digest(parts: Iterable[tuple[str, Rows]]) -> str:
    """SHA-256 over names, dtypes, shapes and contents, in the order given."""
    total = hashlib.sha256()
    for name, array in parts:
        total.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        for piece in origin(array):
            total.update(piece)
    return total.hexdigest()
