"""Make a wheel small enough to carry to a machine without a network: without the code for other GPUs.

    pip install zstandard lz4
    python benchmarks/gpu/smaller_wheel.py onnxruntime_gpu-….whl --capability 90 --out wheels

onnxruntime-gpu 1.31.1 has 244 MiB; for compute capability 9.0, without kernels of language models, it has 41 MiB.
In the libraries the code for other GPUs, and kernels whose names all have one of the words of ``--without``, become
zeros, which compress to nothing. Nothing moves, and what stays is the vendor's code as it was. A kernel that is gone
cannot be launched: CUDA says error 209, "no kernel image is available". The layout of the containers of code ("fat
binaries") is that of CUDA's fatbinary_section.h and of the entries that cuobjdump lists.
"""

import argparse
import re
import struct
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_LEFT_OUT = ("libnvinfer", "providers_tensorrt", "libonnxruntime.so")
"""TensorRT's provider, and the library for C, which Python's module does not load."""
_WITHOUT = ("Moe", "moe", "MixedInput", "Grouped", "fpA_intB", "FpAIntB", "DqMma")
"""Mixtures of experts and products of floats with int4: half of the code for compute capability 9.0."""
Entry = tuple[int, int, int, int, int]


def entries(library: bytes | bytearray) -> Iterator[Entry]:
    """Offset, size, size when compressed, size when not, and compute capability of each piece of code for a GPU."""
    place = 0
    while (place := library.find(_MAGIC, place)) >= 0:
        _, header, size = struct.unpack_from("<HHQ", library, place + 4)
        entry, place = place + header, place + header + size
        while entry < place:
            own, padded, packed = struct.unpack_from("<IQI", library, entry + 4)
            (capability,) = struct.unpack_from("<I", library, entry + 28)
            (unpacked,) = struct.unpack_from("<Q", library, entry + 56)
            yield entry + own, padded, packed, unpacked, capability
            entry += own + padded


def kernels(library: bytes | bytearray, entry: Entry) -> list[bytes]:
    """Names of the kernels in one entry."""
    import lz4.block
    import zstandard

    offset, padded, packed, unpacked, _ = entry
    code = bytes(library[offset : offset + (packed or padded)])
    if code.startswith(_ZSTANDARD):
        code = zstandard.ZstdDecompressor().decompress(code, max_output_size=unpacked)
    elif unpacked:
        code = lz4.block.decompress(code, uncompressed_size=unpacked)
    return re.findall(rb"\.text\.(\w+)", code)


def shrink(library: bytes, capability: int, without: Sequence[str]) -> bytes:
    """The library, with zeros where code is not wanted."""
    changed, words = bytearray(library), [word.encode() for word in without]
    for entry in list(entries(changed)):
        offset, padded, *_, found = entry
        names = kernels(changed, entry) if found == capability and words else []
        if found != capability or (names and all(any(word in name for word in words) for name in names)):
            changed[offset : offset + padded] = bytes(padded)
    return bytes(changed)


def main() -> None:
    """Write the smaller wheel under the same name, compressed by LZMA, which pip reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--capability", type=int, required=True, help="90 for 9.0")
    parser.add_argument("--without", nargs="*", default=_WITHOUT, help="words in the names of kernels")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / given.wheel.name
    with zipfile.ZipFile(given.wheel) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as smaller:
        for item in whole.infolist():
            if any(word in item.filename for word in _LEFT_OUT):
                continue
            content = whole.read(item)
            if _MAGIC in content:
                content = shrink(content, given.capability, given.without)
            smaller.writestr(item.filename, content)
    print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB, was {given.wheel.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
