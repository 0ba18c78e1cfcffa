"""Arrays mapped from files: the file is read where a row is, when it is, and never as a whole."""

import json
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import safe_open

from enginesmith.pipeline.tensors import Array

_LOCAL_HEADER = struct.Struct("<26x2H")
"""Of a zip's member: the last two numbers are the lengths of its name and of what else comes before its bytes."""
_SAFETENSORS: Mapping[str, str] = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{
        f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    "BOOL": "bool",
}
_NOT_IN_NUMPY = {"BF16": "bfloat16"}


def npy(path: Path) -> Array:
    """The array of an .npy file.

    Raises:
        ValueError: it is damaged, or an .npz file.
    """
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            raise ValueError("it holds named arrays, as an .npz file does")
        file.seek(0)
        return _array(path, file, 0, path.stat().st_size)


def npz(path: Path, only: str | None = None) -> dict[str, Array]:
    """The arrays of an .npz file by name, or the one of that name; compressed ones are read.

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
    """Dtypes and shapes of an .npz file by name; no array is read.

    Raises:
        ValueError, zipfile.BadZipFile, zlib.error: it is damaged.
    """
    found = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as stream:
                shape, _, dtype = _header(stream)
                found[member.filename.removesuffix(".npy")] = (dtype, shape)
    return found


def safetensors(path: Path) -> dict[str, Array]:
    """The tensors of a .safetensors file by name.

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
    """What stands in .npy form from ``start`` on, in so many bytes."""
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
