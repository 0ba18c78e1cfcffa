"""Read and check the manifest beside each engine: what it is, what it was made of, and where it may run."""

import struct
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.artifact import file_digest
from enginesmith.pipeline.engines.base import MemoryFigures
from enginesmith.pipeline.engines.tensorrt.layers import Audit
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.engines.tensorrt.versions import FlavourName, installed_version
from enginesmith.pipeline.errors import MissingCapability, ModelError, warn_caller
from enginesmith.pipeline.system.nvidia import cuda_device, driver
from enginesmith.pipeline.system.software import numbers
from enginesmith.pipeline.tensors import Signature

_REMEDY = "build it for this machine: `enginesmith build` from the same graph"
_HEADER = struct.Struct("<4s20x4B4xI20xQ")
"""Magic number, four parts of the version, bits of the targets, and bytes of the weights."""
_TARGET_BITS = {"sm75": 1, "sm80": 2, "sm86": 4, "sm89": 8, "sm120": 16, "sm121": 32}


class EngineManifest(BaseModel, frozen=True):
    """Record everything that is known of an engine file."""

    schema_name: Literal["enginesmith.engine/1"] = "enginesmith.engine/1"
    engine: FlavourName
    version: str
    target: str | None
    """The target that was asked for; None for the device that it was built on."""
    compute_capabilities: tuple[str, ...]
    device: str | None = None
    """The device that it was built on, where there was one."""
    driver: int | None = None
    sha256: str
    bytes: int
    model_sha256: str
    """Digest of the graph that it was built from, with its weights."""
    timing_cache_sha256: str | None = None
    workspace_limit_bytes: int
    workspace_asked_bytes: int | None
    """None where the builder's default held."""
    options: BuildOptions
    profiles: tuple[dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]], ...]
    """Input → smallest, usual and largest shape, for each profile."""
    signature: Signature
    figures: MemoryFigures
    audit: Audit | None
    notes: tuple[str, ...] = ()


def path_beside(engine: Path) -> Path:
    """Name the file of an engine's manifest."""
    return engine.with_name(engine.name + ".json")


def read(engine: Path) -> EngineManifest:
    """Read the manifest of an engine file, which has to be the one that it was written for.

    Raises:
        ModelError: there is none, it is damaged, or the engine is not the one it describes.
    """
    path = path_beside(engine)
    try:
        manifest = EngineManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        remedy = "keep the manifest beside the engine: an engine without one is not loaded, as engines are code"
        raise ModelError(f"{engine} has no manifest ({path.name}: {error.strerror})", remedy) from error
    except ValidationError as error:
        raise ModelError(f"the manifest {path} is damaged", "build the engine again") from error
    if not engine.is_file():
        raise ModelError(f"there is no engine {engine}", "check the path")
    size, again = engine.stat().st_size, "copy it again, with its manifest"
    if size != manifest.bytes:
        message = f"its manifest says {manifest.bytes}: it is truncated, or another engine"
        raise ModelError(f"{engine} has {size} bytes and {message}", again)
    if file_digest(engine) != manifest.sha256:
        raise ModelError(f"{engine} is not the engine that its manifest describes", again)
    header = read_header(engine) if manifest.engine == "tensorrt_rtx" else None
    if header and (header.version, header.compute_capabilities) != (manifest.version, manifest.compute_capabilities):
        claim, real = (f"{it.version} for {', '.join(it.compute_capabilities)}" for it in (manifest, header))
        remedy = "the manifest was changed: copy it again, with its engine"
        raise ModelError(f"the manifest says {claim}, and the engine itself {real}", remedy)
    return manifest


def validate_machine(manifest: EngineManifest, index: int) -> None:
    """Refuse an engine that this machine cannot run, and say what differs; warn of one that was built on another GPU.

    Raises:
        MissingCapability: another version of TensorRT, or a device that it was not built for.
    """
    if reason := misfit(manifest, index):
        raise MissingCapability(f"the engine cannot run here: {reason}", _REMEDY)
    if doubt := find_doubt(manifest, index):
        warn_caller(f"the engine may be slower here than one that is built here, or fail: {doubt}")


def misfit(manifest: EngineManifest, index: int) -> str:
    """Say why this machine cannot run the engine; empty if it can."""
    here = installed_version(manifest.engine)
    if here is None:
        return f"{manifest.engine} is not installed, and the engine is of version {manifest.version}"
    lean = manifest.options.version_compatible and manifest.options.host_code  # the runtime that later versions need
    if here != manifest.version and not lean:
        return f"it is of {manifest.engine} {manifest.version}, and {here} is installed"
    if numbers(here) < numbers(manifest.version):
        return f"it is of {manifest.engine} {manifest.version}, and the older {here} is installed"
    device = cuda_device(index)
    if device is None:
        return f"no CUDA device here: {driver().reason or f'there is no cuda:{index}'}"
    runs = not manifest.compute_capabilities or device.target in manifest.compute_capabilities
    if manifest.options.hardware_compatibility == "ampere_plus" and manifest.engine == "tensorrt":
        runs = int(device.target.removeprefix("sm")) >= 80 or not manifest.compute_capabilities
    if runs:
        return ""
    built = ", ".join(manifest.compute_capabilities)
    return f"it is built for {built}, and cuda:{index} is {device.target} ({device.name})"


def find_doubt(manifest: EngineManifest, index: int) -> str:
    """Say on which other model of GPU its kernels were timed; empty if on this one, or if it is built for several.

    TensorRT loads such an engine with a warning (NVIDIA/TensorRT#2900).
    """
    device = cuda_device(index)
    one_model = manifest.engine == "tensorrt" and manifest.options.hardware_compatibility == "none"
    if not one_model or device is None or manifest.device in (None, device.name):
        return ""
    return f"it was built on {manifest.device}, and cuda:{index} is {device.name}"


class Header(BaseModel, frozen=True):
    """Describe the first bytes of a TensorRT-RTX engine; the layout is not documented, and was read off (1.7)."""

    version: str
    compute_capabilities: tuple[str, ...]
    weights_bytes: int


def read_header(engine: Path) -> Header | None:
    """Read the header of a TensorRT-RTX engine; None if it is none."""
    with engine.open("rb") as stream:
        data = stream.read(_HEADER.size)
    magic, *version, bits, weights = _HEADER.unpack(data) if len(data) == _HEADER.size else (b"", 0, 0)
    if magic != b"vtrt":
        return None
    targets = tuple(name for name, bit in _TARGET_BITS.items() if bits & bit)
    return Header(version=".".join(map(str, version)), compute_capabilities=targets, weights_bytes=weights)


def describe(file: Path, manifest: EngineManifest) -> dict[str, Any]:
    """Describe an engine file for people: its manifest, and whether the engine can run here."""
    header = read_header(file) if manifest.engine == "tensorrt_rtx" else None
    reason, doubt = misfit(manifest, 0), find_doubt(manifest, 0)
    profiles = [
        ", ".join(f"{name} {' … '.join(str(list(shape)) for shape in shapes)}" for name, shapes in profile.items())
        for profile in manifest.profiles
    ]
    shown_below = {"schema_name", "signature", "profiles", "audit", "figures", "options"}
    return {
        "kind": "TensorRT engine",
        **manifest.model_dump(mode="json", exclude=shown_below),
        "runs here": f"no: {reason}" if reason else f"yes, but {doubt}" if doubt else "yes",
        "inputs": [str(spec) for spec in manifest.signature.inputs],
        "outputs": [str(spec) for spec in manifest.signature.outputs],
        "profiles": profiles,
        "options": {name: str(value) for name, value in manifest.options.asked.items()},
        "figures": manifest.figures.model_dump(),
        "audit": list(manifest.audit.notes) if manifest.audit else [],
        "header": header.model_dump(mode="json") if header else None,
    }
