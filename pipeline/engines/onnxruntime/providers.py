"""List the execution providers of ONNX Runtime that engines run on: their options, and how a session gets them.

The options are those of ONNX Runtime's pages on each provider; their names and values are its own.
"""

import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.system import software
from enginesmith.pipeline.system.device import Device

CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"
_BEHIND = {"use_tf32": "0"}
"""Options of the CUDA provider where it takes what another one leaves."""
_OFF_ON, _ON_OFF = ("0", "1"), ("1", "0")
_FALSE_TRUE = ("False", "True")
"""The only words that onnxruntime's Python binding takes for a switch of the TensorRT provider."""


@dataclass(frozen=True)
class Provider:
    """Describe an execution provider."""

    name: str
    """ONNX Runtime's name for it."""
    engine: str
    """The engine that runs on it, on CUDA."""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options that a recipe may set, and the values that each takes, ONNX Runtime's default first; none for any."""
    behind: tuple[str, ...] = ()
    """Other providers on CUDA that take the nodes it does not, before the CPU."""
    prefix: str = ""
    """Start of the names of its options."""
    plugin: str = ""
    """Python module that brings it, where it is not part of onnxruntime."""
    cache: str = ""
    """Option that names the folder where it keeps engines or kernels for later sessions."""
    imports: tuple[str, ...] = ()
    """Python modules whose import loads the libraries that it is linked against."""


CUDA = Provider(
    CUDA_PROVIDER,
    "onnxruntime",
    {
        "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        "cudnn_conv_use_max_workspace": _ON_OFF,
        "cudnn_conv1d_pad_to_nc1d": _OFF_ON,
        "fuse_conv_bias": _OFF_ON,
        "prefer_nhwc": _OFF_ON,
        "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
        "use_ep_level_unified_stream": _OFF_ON,
        "sdpa_kernel": (),
    },
)
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
FOR_CONVOLUTIONS = ("prefer_nhwc", "fuse_conv_bias", "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace")
FOR_ALL = ("arena_extend_strategy", "use_ep_level_unified_stream")
"""Options of the CUDA provider that may make graphs faster, those that promise most first."""
TENSORRT_MAJOR = 10
"""Major version of libnvinfer that the TensorRT provider of onnxruntime-gpu is linked against (up to 1.31)."""
TENSORRT = Provider(
    "TensorrtExecutionProvider",
    "onnxruntime_tensorrt",
    {
        "trt_builder_optimization_level": ("3", "0", "1", "2", "4", "5"),
        "trt_auxiliary_streams": (),
        "trt_min_subgraph_size": (),
        "trt_op_types_to_exclude": (),
        "trt_layer_norm_fp32_fallback": _FALSE_TRUE,
        "trt_sparsity_enable": _FALSE_TRUE,
        "trt_engine_hw_compatible": _FALSE_TRUE,
        "trt_context_memory_sharing_enable": _FALSE_TRUE,
    },
    behind=(CUDA_PROVIDER,),
    prefix="trt",
    cache="trt_engine_cache_path",
    imports=("tensorrt",),
)
RTX_TARGETS, RTX_SINCE = ((8, 6), (8, 9)), (12, 0)
"""Compute capabilities that the plug-in 0.5 accepts, and the one from which it accepts all: its file
``tensorrt_rtx_provider_options.h``."""
TENSORRT_RTX = Provider(
    "NvTensorRTRTXExecutionProvider",
    "onnxruntime_tensorrt_rtx",
    {
        "nv_max_shared_mem_size": (),
        "nv_op_types_to_exclude": (),
        "nv_weight_streaming_budget": (),
        "nv_persistent_context_memory": _OFF_ON,
    },
    prefix="nv",
    cache="nv_runtime_cache_path",
    plugin="onnxruntime_ep_nv_tensorrt_rtx",
)
PROVIDERS: tuple[Provider, ...] = (CUDA, TENSORRT, TENSORRT_RTX)


def parse_settings(texts: Iterable[str], engines: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Read ``NAME=VALUE,VALUE`` into values by name, for the providers of these engines.

    Raises:
        UsageError: none of the providers has that option, or it does not take that value.
    """
    known = {name: values for row in PROVIDERS if row.engine in engines for name, values in row.settings.items()}
    settings: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, given = text.partition("=")
        values = tuple(dict.fromkeys(part.strip() for part in given.split(",")))
        if name not in known:
            message = f"no provider of ONNX Runtime here has the option {name!r}"
            raise UsageError(message, f"use one of {', '.join(known)}")
        wrong = [value for value in values if not value or (known[name] and value not in known[name])]
        if wrong:
            choices = " or ".join(known[name]) or "a value"
            raise UsageError(f"the option {name} of ONNX Runtime does not take {wrong[0]!r}", f"give {name}={choices}")
        settings[name] = tuple(dict.fromkeys((*settings.get(name, ()), *values)))
    return settings


def combine_settings(
    provider: Provider, settings: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each combination of the values asked for, as ``NAME=VALUE``, with a word for what is not the default."""
    own = {name: values for name, values in settings.items() if name in provider.settings}
    for values in itertools.product(*own.values()):
        chosen = dict(zip(own, values, strict=True))
        other = [name for name, value in chosen.items() if provider.settings[name][:1] != (value,)]
        yield tuple(f"{name}={chosen[name]}" for name in other), "-".join(f"{name}_{chosen[name]}" for name in other)


def packaged_settings(provider: Provider, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Read a package's options of the provider as ``NAME=VALUE``: those alone that a recipe may set, too."""
    return known_settings(provider, next(iter(options.get("session", {}).get("provider_options", ())), {}))


def known_settings(provider: Provider, given: Mapping[str, str]) -> tuple[str, ...]:
    """Choose the options that a recipe may set, too, as ``NAME=VALUE``: others may load libraries."""
    own = {name: values for name, values in provider.settings.items() if name in given}
    return tuple(f"{name}={given[name]}" for name, values in own.items() if not values or given[name] in values)


def session_providers(
    provider: Provider, device: Device, options: Mapping[str, str], stream: int | None = None
) -> list[tuple[str, dict[str, str]]]:
    """List a session's providers with their options; each takes the nodes that those before it did not take.

    ``stream`` is the CUDA stream that it works on, one of its own if there is none.
    """
    cpu: tuple[str, dict[str, str]] = (CPU_PROVIDER, {})
    if device.kind == "cpu":
        return [cpu]
    own = {"device_id": str(device.index), **({"user_compute_stream": str(stream)} if stream else {})}
    return [(provider.name, {**own, **options}), *((name, {**own, **_BEHIND}) for name in provider.behind), cpu]


def load_libraries(name: str) -> None:
    """Load what a provider needs besides CUDA's libraries, where Python packages bring it.

    Raises:
        MissingCapability: a package is not installed.
    """
    row = next((row for row in PROVIDERS if row.name == name), CUDA)
    try:
        for module in filter(None, (*row.imports, row.plugin)):
            importlib.import_module(module)
    except ImportError as error:
        if not row.plugin and software.loads(f"libnvinfer.so.{TENSORRT_MAJOR}"):
            return  # from the system
        raise MissingCapability(f"{row.engine} lacks a package: {error}", "enginesmith doctor says which") from error


def attach_plugin(chosen: Any, name: str, options: Mapping[str, str], device: Device) -> bool:
    """Add a provider that a plug-in brings to a session's options; False, and nothing added, for the others.

    Raises:
        MissingCapability: ONNX Runtime does not load the plug-in, or the plug-in finds no such device.
    """
    import onnxruntime as ort

    row = next((row for row in PROVIDERS if row.name == name and row.plugin), None)
    if row is None:
        return False
    plugin = importlib.import_module(row.plugin)
    try:
        if name not in {ep_device.ep_name for ep_device in ort.get_ep_devices()}:
            ort.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
    except Exception as error:  # of onnxruntime's own, which have no common class
        raise MissingCapability(f"ONNX Runtime does not load {row.plugin}: {error}", "update the driver") from error
    devices = [ep_device for ep_device in ort.get_ep_devices() if ep_device.ep_name == name]
    if device.index >= len(devices):
        raise MissingCapability(f"{row.plugin} finds no {device} that it supports", "use onnxruntime")
    given = {key: value for key, value in options.items() if key != "device_id"}  # the device says which
    if "user_compute_stream" in given:
        given["has_user_compute_stream"] = "1"
    chosen.add_provider_for_devices([devices[device.index]], given)
    return True
