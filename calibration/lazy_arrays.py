"""Map arrays from files: the file is read where a row is, when it is, and never as a whole."""

import hashlib
import json
import math
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import safe_open

from enginesmith.pipeline.tensors import Array

_LOCAL_HEADER = struct.Struct("<26x2H")
"""Header of a zip's member; the last two numbers are the lengths of its name and of what precedes its bytes."""
_SAFETENSORS: Mapping[str, str] = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{
        f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    "BOOL": "bool",
}
_NOT_IN_NUMPY = {"BF16": "bfloat16"}


def npy(path: Path) -> Array:
    """Map the array of an .npy file.

    Raises:
        ValueError: it is damaged, or an .npz file.
    """
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise ValueError("it holds named arrays, as an .npz file does")
        file.seek(0)
        return _array(path, file, 0, path.stat().st_size)


def npz(path: Path, only: str | None = None) -> dict[str, Array]:
    """Map the arrays of an .npz file by name, or the one of that name; compressed ones are read.

    Raises:
        ValueError, zipfile.BadZipFile, zlib.error: it is damaged, or an .npy file.
    """
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise ValueError("it holds one array without a name, as an .npy file does")
        with zipfile.ZipFile(file) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            return {name: _member(path, archive, member) for name, member in members.items() if only in (None, name)}


def npz_headers(path: Path) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Read dtypes and shapes of an .npz file by name; no array is read.

    Raises:
        ValueError, zipfile.BadZipFile, zlib.error: it is damaged.
    """
    headers = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as stream:
                shape, _, dtype = _header(stream)
                headers[member.filename.removesuffix(".npy")] = (dtype, shape)
    return headers


def safetensors(path: Path) -> dict[str, Array]:
    """Map the tensors of a .safetensors file by name.

    Raises:
        SafetensorError: it is damaged.
        TypeError: numpy lacks the dtype of one.
    """
    with safe_open(path, framework="numpy"):  # holds the header against the file
        pass
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in tensors.items():
        if entry["dtype"] not in _SAFETENSORS:
            kind = _NOT_IN_NUMPY.get(entry["dtype"], entry["dtype"])
            raise TypeError(f"{name!r} is {kind}, which numpy lacks")
    return {
        name: _map(path, 8 + length + entry["data_offsets"][0], np.dtype(_SAFETENSORS[entry["dtype"]]), entry["shape"])
        for name, entry in sorted(tensors.items())
    }


def _member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        with archive.open(member) as stream:
            return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
    with path.open("rb") as file:
        file.seek(member.header_offset)
        name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        start = member.header_offset + _LOCAL_HEADER.size + name + extra
        file.seek(start)
        return _array(path, file, start, member.file_size)


def _array(path: Path, file: IO[bytes], start: int, size_bytes: int) -> Array:
    """Map the array in .npy form that begins at ``start``, of so many bytes."""
    shape, fortran, dtype = _header(file)
    offset = file.tell()
    if offset - start + dtype.itemsize * math.prod(shape) > size_bytes:
        raise ValueError(f"it is cut off: {dtype}{list(shape)} does not fit into {size_bytes} bytes")
    return _map(path, offset, dtype, shape, "F" if fortran else "C")


def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects")
    return shape, fortran, dtype


def _map(path: Path, offset: int, dtype: np.dtype[Any], shape: Any, order: Any = "C") -> Array:
    if not math.prod(shape):  # nothing cannot be mapped
        return np.empty(tuple(shape), dtype)
    return np.memmap(path, dtype, "r", offset, tuple(shape), order)


# Arrays whose first axis is the sample: in memory, mapped from a file, or made row by row when they are asked for.

AT_ONCE_BYTES = 16 << 20
"""About as much of an array as is looked at in one go."""


class LazyRows(ABC):
    """Looks like an array as far as its first axis goes; rows are made when they are indexed."""

    finite = False
    """No row can hold NaN or infinity, so that nobody has to look."""

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
        """Return one row for a number; rows for a slice or an array of row numbers."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)

    def origin(self, rows: Array | slice) -> Iterator[bytes]:
        """Identify rows for a digest: by their bytes, or whatever decides them."""
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
    """Pick rows: a copy of what is in memory, else a view that reads them when they are needed."""
    in_memory = isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
    return array[rows] if in_memory else Picked(array, rows)


def cast(array: Rows, dtype: str) -> Rows:
    """Cast the array to another dtype, likewise."""
    if isinstance(array, LazyRows | np.memmap):
        return Cast(array, dtype)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def pieces(array: Rows, at_once_bytes: int | None = None) -> Iterator[tuple[int, Array]]:
    """Yield the array in pieces, each with the number of its first row: a mapped file is never in memory as a whole."""
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    step = max(1, (at_once_bytes or AT_ONCE_BYTES) // max(1, row_bytes))
    for start in range(0, len(array), step):
        yield start, np.ascontiguousarray(array[start : start + step])


def origin(array: Rows, rows: Array | slice = slice(None)) -> Iterator[bytes]:
    """Identify the rows for a digest, by what decides them."""
    if isinstance(array, LazyRows):
        return array.origin(rows)
    return (part.tobytes() for _, part in pieces(array if isinstance(rows, slice) else Picked(array, rows)))


def digest(parts: Iterable[tuple[str, Rows]]) -> str:
    """Compute SHA-256 over names, dtypes, shapes and contents, in the order given."""
    total = hashlib.sha256()
    for name, array in parts:
        total.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        for piece in origin(array):
            total.update(piece)
    return total.hexdigest()
