"""Read what is installed, and what it was built for, from files, without importing anything heavy."""

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from enginesmith.pipeline.errors import broken_package
from enginesmith.pipeline.system.device import Availability, unavailable
from enginesmith.pipeline.system.nvidia import GpuState

Numbers = tuple[int, ...]

_GLIBC = re.compile(r"manylinux_(\d+_\d+)")


class Requirement(NamedTuple):
    """One that a package's metadata names: ``nvidia-cudnn-cu13``, its versions ``~=9.0``, the extra it belongs to."""

    name: str
    versions: str
    extra: str


class Formats(BaseModel, frozen=True):
    """The newest ONNX that something writes or takes."""

    ir: int
    opset: int


class Stack(BaseModel, frozen=True):
    """Versions and abilities of what is installed. None is what is not there, or cannot be known."""

    driver: str | None = None
    """Its version, which NVML tells."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that it knows."""
    driver_reason: str = ""
    gpu_without_driver: bool = False
    gpus: tuple[GpuState, ...] = ()
    versions: dict[str, str] = {}
    torch_cuda: str | None = None
    torch_targets: tuple[str, ...] = ()
    """``sm_90``, ``compute_90``: what torch has kernels for."""
    onnxruntime_cuda: str | None = None
    cudnn: str | None = None
    requirements: dict[str, tuple[Requirement, ...]] = {}
    """Package → NVIDIA's packages that it asks for."""
    packages: dict[str, str] = {}
    """Versions of those of them that are installed, and of TensorRT's parts."""
    variants: dict[str, dict[int, list[str]]] = {}
    """``tensorrt`` → CUDA's major version → distributions."""
    loadable: tuple[str, ...] = ()
    """Libraries that the system's loader finds."""
    glibc: str | None = None
    glibc_needed: dict[str, str] = {}
    written: Formats | None = None
    """By the installed onnx."""
    taken: Formats | None = None
    """By the installed ONNX Runtime, found out by trying."""


@functools.cache
def version(name: str) -> str | None:
    """Return a package's installed version, or None."""
    try:
        return importlib.metadata.version(name)
    except PackageNotFoundError:
        return None


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    return {name: installed for name in names if (installed := version(name))}


def identify(name: str) -> str | None:
    """Return an installed package's version with a digest of its files, or None: one's own keep their version.

    The digests of its files are in its ``RECORD``; scripts are left out, which name the Python of this machine.
    """
    try:
        package = importlib.metadata.distribution(name)
    except PackageNotFoundError:
        return None
    rows = [line.split(",") for line in (package.read_text("RECORD") or "").splitlines()]
    files = sorted(row[0] + row[-2] for row in rows if _is_content(row))
    digest = hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
    return f"{package.version} {digest}" if files else package.version


def _is_content(row: Sequence[str]) -> bool:
    """Tell whether a row of ``RECORD`` is of a file that a package brought, and has its digest."""
    path = row[0].strip('"')
    return len(row) > 2 and bool(row[-2]) and not path.startswith(("..", "/")) and ".dist-info/" not in path


def identities(names: Iterable[str]) -> dict[str, str]:
    """Return the identities of the packages that are installed."""
    return {name: identity for name in names if (identity := identify(name))}


def numbers(text: str) -> Numbers:
    """Read ``9.10.2`` as numbers; what follows them (``+cu130``, ``rc1``) is left out."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", text)[0]))


def find(package: str) -> Path | None:
    """Find the folder that a package would be imported from."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def check_import(package: str, load: Callable[[str], Any] = importlib.import_module) -> Availability:
    """Import an installed package, and tell whether that succeeds."""
    try:
        load(package)
    except Exception as error:  # noqa: BLE001 - code of others, at the boundary: whatever it raises is told
        broken = broken_package(package, str(error))
        return unavailable(broken.message, broken.remedy)
    return Availability(ok=True)


def requirements(package: str, start: str = "nvidia-") -> list[Requirement]:
    """List what an installed package asks for by names that start like that."""
    from packaging import requirements as texts

    listed = []
    for text in importlib.metadata.requires(package) or () if version(package) else ():
        need = texts.Requirement(text)
        if need.name.startswith(start):
            extra = re.search(r'extra == "([^"]+)', str(need.marker))
            listed.append(Requirement(need.name, str(need.specifier), extra[1] if extra else ""))
    return listed


def cuda_variants(package: str) -> dict[int, list[str]]:
    """List a package's distributions by CUDA's major version: tensorrt-cu12, say, and tensorrt-cu12-libs."""
    pattern = re.compile(rf"{package.replace('-', '[-_]')}[-_]cu(\d+)(?:[-_](?:libs|bindings))?", re.IGNORECASE)
    names: dict[int, set[str]] = {}
    for distribution in importlib.metadata.distributions():
        if match := pattern.fullmatch(distribution.metadata["Name"] or ""):
            names.setdefault(int(match[1]), set()).add(match[0].replace("_", "-"))
    return {major: sorted(names[major]) for major in sorted(names)}


def needed_glibc(package: str) -> str | None:
    """Read the C library that a package's wheel was made for: ``2.28`` of a ``manylinux_2_28`` tag."""
    try:
        tags = importlib.metadata.distribution(package).read_text("WHEEL") or ""
    except PackageNotFoundError:
        return None
    return min((match.replace("_", ".") for match in _GLIBC.findall(tags)), key=numbers, default=None)


def loads(library: str) -> bool:
    """Tell whether the system's loader finds a library; it stays loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def cudnn() -> str | None:
    """Read cuDNN's version: of NVIDIA's packages, which torch takes it from; else of what the system's loader finds."""
    packaged = version("nvidia-cudnn-cu13") or version("nvidia-cudnn-cu12")
    if packaged or not loads("libcudnn.so.9"):
        return packaged
    number = int(ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())  # 91501 is 9.15.1
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
