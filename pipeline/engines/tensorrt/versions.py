"""Tell the two flavours apart by one table, by flavour and major version, never by probing for a flag.

What an option does where was measured (engines built with and without it and compared byte for byte, TensorRT-RTX
1.7.1) or is the vendor's word; each entry says so in what people read.
"""

import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

from enginesmith.pipeline.engines.compatibility import Check, check, check_driver, check_packages
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.system.device import Availability, unavailable
from enginesmith.pipeline.system.software import Stack, check_import, numbers
from enginesmith.pipeline.system.software import versions as installed_versions

FlavourName = Literal["tensorrt", "tensorrt_rtx"]


class Capabilities(BaseModel, frozen=True):
    """Describe what one flavour at one major version can do, and what its options do there."""

    builds_without_gpu: bool
    targets: tuple[str, ...] = ()
    """Compute capabilities that can be named ahead of time; none where the engine is for the device it is built on."""
    timing_cache: bool
    runtime_cache: bool
    """True if kernels are compiled at the first run, and kept in a cache of the runtime."""
    captures_graphs: bool
    """True if it makes and replays CUDA graphs by itself."""
    attention_layers_since: tuple[int, ...]
    """The version from which on networks have attention layers, which fused kernels exist for in some types."""
    dies_of_attention_to_itself: bool
    """True if the builder crashes where queries and keys of an attention are one tensor (seen in TensorRT-RTX 1.7)."""
    standard_plugins: bool
    """True if a library of plugins comes along, which some operators of ONNX are made by."""
    workspace_is_a_gate: bool
    """True if a workspace limit only decides if the build ends well, and changes nothing about the engine."""
    no_effect: dict[str, str] = {}
    """Option → what was seen of it, where it is accepted and changes nothing."""
    refused: dict[str, str] = {}
    """Option → why it cannot be had."""


_SEEN = "accepted, and the engine is the same byte for byte"
_NEEDS_GPU = "the builder compiles for it on a device, and fails without one"

_RTX_1 = Capabilities(
    builds_without_gpu=True,
    targets=("sm75", "sm80", "sm86", "sm89", "sm120", "sm121"),
    timing_cache=False,
    runtime_cache=True,
    captures_graphs=True,
    attention_layers_since=(1, 0),
    dies_of_attention_to_itself=True,
    standard_plugins=False,
    workspace_is_a_gate=True,
    no_effect={
        "sparse_weights": _SEEN,
        "optimization_level": _SEEN,
        "aux_streams": "multi-stream assignment is off in this flavour",
        "tiling": _SEEN,
        "tactic_dram": _SEEN,
        "host_code": _SEEN,
        "hardware_compatibility": "unsupported; the engine holds for the targets it lists",
    },
    refused={
        "version_compatible": "its engines do not go from one release to another",
        "timing_cache": "this flavour times nothing: kernels are chosen when the engine runs",
        "locked": "this flavour has no timing cache",
    },
)
_ENTERPRISE = Capabilities(
    builds_without_gpu=False,
    timing_cache=True,
    runtime_cache=False,
    captures_graphs=False,
    attention_layers_since=(10, 14),
    dies_of_attention_to_itself=False,
    standard_plugins=True,
    workspace_is_a_gate=False,
)
_TABLE: Mapping[tuple[FlavourName, int], Capabilities] = {
    ("tensorrt_rtx", 1): _RTX_1,
    ("tensorrt", 10): _ENTERPRISE,
    ("tensorrt", 11): _ENTERPRISE,
}
_OLDEST: Mapping[FlavourName, tuple[int, ...]] = {"tensorrt": (10, 13), "tensorrt_rtx": (1, 0)}
_DISTRIBUTIONS: Mapping[FlavourName, tuple[str, ...]] = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
}
_OLDEST_DRIVERS = {12: "535", 13: "580.65.06"}
"""CUDA's major version → driver: the prerequisites in TensorRT's installation guide."""
_OLDEST_GPU = (7, 5)
NEEDS_DEVICE: Mapping[str, str] = MappingProxyType({"strip_plan": _NEEDS_GPU, "refit": _NEEDS_GPU})
"""Option → why it cannot be had where an engine is built without a device."""


def installed_version(flavour: FlavourName) -> str | None:
    """Return the version of the installed package, without importing it."""
    return next(iter(installed_versions(_DISTRIBUTIONS[flavour]).values()), None)


def importable(flavour: FlavourName, *, load: bool = True) -> Availability:
    """Check that the package is there, in a version that is known, and if ``load`` that its libraries load."""
    version, package = installed_version(flavour), _DISTRIBUTIONS[flavour][0]
    if version is None:
        return unavailable(f"the package {package} is not installed", f"install it: pip install {package}")
    parts = numbers(version)
    if parts < _OLDEST[flavour] or (flavour, parts[0]) not in _TABLE:
        known = " and ".join(sorted(f"{major}.x" for name, major in _TABLE if name == flavour))
        oldest = ".".join(map(str, _OLDEST[flavour]))
        remedy = f"install {known}, from {oldest} on: pip install '{package}>={oldest}'"
        return unavailable(f"{flavour} {version} is not a version this release knows", remedy)
    return check_import(flavour) if load else Availability(ok=True)


def module(flavour: FlavourName) -> Any:
    """Import the flavour's Python module; both have the same names.

    Raises:
        MissingCapability: it is not installed, or not usable.
    """
    availability = importable(flavour)
    if not availability.ok:
        raise MissingCapability(availability.reason, availability.remedy)
    return importlib.import_module(flavour)


def capabilities(flavour: FlavourName, version: str | None = None) -> Capabilities:
    """Look up the table's row for the installed version, or the newest known one where none is."""
    installed = version or installed_version(flavour)
    majors = [major for name, major in _TABLE if name == flavour]
    major = numbers(installed)[0] if installed else max(majors)
    return _TABLE[flavour, major if major in majors else max(majors)]


def check_software(stack: Stack, name: str) -> Iterator[Check]:
    """Check the driver, the packages and the GPUs for one flavour, by the name of its distribution."""
    variants = stack.variants.get(name, {})
    if not variants:
        return
    newest = max(variants)
    older = newest > 12 and (numbers(stack.torch_cuda or "") or (12,))[0] <= 12  # torch needs the driver, too
    fix = f"pip uninstall -y {' '.join(variants[newest])} && pip install {name}-cu12" if older else ""
    yield from check_driver(stack, name, str(newest), _OLDEST_DRIVERS, fix)
    parts = [part for some in variants.values() for part in some]
    if len(variants) > 1:
        known = stack.driver_cuda[0] if stack.driver_cuda else newest
        wanted = max((major for major in variants if major <= known), default=min(variants))
        present, needed = " and ".join(f"cu{major}" for major in variants), "one of them: they overwrite each other"
        fix = f"pip uninstall -y {name} {' '.join(parts)} && pip install {name}-cu{wanted}"
        yield check(f"packages of {name}", present, needed, False, fix)
    else:
        pinned = [need for part in (name, *parts) for need in stack.requirements.get(part, ())]
        fix = f"pip install --force-reinstall {name}-cu{newest}"
        yield check_packages(stack, f"parts of {name}", pinned, fix)
    targets = capabilities("tensorrt_rtx", stack.versions.get(name)).targets
    for index, gpu in enumerate(stack.gpus):
        capability = numbers(gpu.compute_capability)
        if name == "tensorrt":
            fits, needed = capability >= _OLDEST_GPU, "7.5 or newer"
            fix = "pip install onnxruntime-gpu: TensorRT has no kernels for this GPU"
        else:
            fits, needed = "sm" + "".join(map(str, capability)) in targets, ", ".join(targets)
            fix = "pip install tensorrt: the other flavour has kernels for this GPU"
        present = f"{gpu.name}: compute capability {gpu.compute_capability}"
        yield check(f"{name} on cuda:{index}", present, needed, fits, fix)
