"""Look up engines by name. An engine is one file or folder here and one line in this table; or it is a plug-in.

Nothing is imported until an engine is used. ``engines/base.py`` has the contract, docs/extending.md an example.
"""

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.system import plugins

if TYPE_CHECKING:
    from pathlib import Path

    from enginesmith.pipeline.engines.base import Engine, EngineFile
    from enginesmith.pipeline.engines.compatibility import Check
    from enginesmith.pipeline.system.machine import Environment
    from enginesmith.pipeline.system.software import Formats, Stack


ENGINES: Mapping[str, str] = {
    "eager": "enginesmith.pipeline.engines.torch.eager:Eager",
    "compiled": "enginesmith.pipeline.engines.torch.eager:Compiled",
    "aotinductor": "enginesmith.pipeline.engines.torch.aotinductor:AOTInductor",
    "onnxruntime": "enginesmith.pipeline.engines.onnxruntime.engine:OnnxRuntime",
    "onnxruntime_tensorrt": "enginesmith.pipeline.engines.onnxruntime.tensorrt:OnnxRuntimeTensorRT",
    "onnxruntime_tensorrt_rtx": "enginesmith.pipeline.engines.onnxruntime.tensorrt:OnnxRuntimeTensorRTRTX",
    "openvino": "enginesmith.pipeline.engines.openvino.engine:OpenVINO",
    "tensorrt": "enginesmith.pipeline.engines.tensorrt.engine:TensorRT",
    "tensorrt_rtx": "enginesmith.pipeline.engines.tensorrt.engine:TensorRTRTX",
}
BASELINES: Mapping[Literal["torch", "onnx"], str] = {"torch": "eager", "onnx": "onnxruntime"}
"""Form of the given model → the engine that runs it as it is, which all others are held against."""
REFERENCES = ("eager", "compiled")
"""Engines that run a module as PyTorch alone can: what a winner is compared with besides plain eager."""
DEFAULT_BUILD = "tensorrt_rtx"
"""The engine of commands that build and check files, where none is named."""
BUILD_FIELDS, RUN_FIELDS = ("targets", "workspace", "tensorrt"), ("tensorrt_run",)
"""Fields of the recipe that say how engines are built and run, which commands have options for."""
PORTABLE_PLACEMENT = "tensorrt"
"""The engine whose rules for Q/DQ pairs are the strictest: a graph that keeps to them runs in every engine."""


def names() -> tuple[str, ...]:
    """List the names of all engines: those of the table, and those of installed plug-ins."""
    return tuple(dict.fromkeys((*ENGINES, *(plugin.name for plugin in plugins.installed(plugins.ENGINES)))))


def engine_class(name: str) -> "type[Engine]":
    """Import an engine by name; only a name that the table lacks is looked up among the installed plug-ins.

    Raises:
        UsageError: no engine has that name.
        MissingCapability: it is a plug-in that cannot be loaded, or that is no engine of that name.
    """
    if name not in ENGINES and not plugins.offered(plugins.ENGINES, name):
        several = (
            f"; for several, repeat the option: --engine {' --engine '.join(name.split(','))}" if "," in name else ""
        )
        raise UsageError(f"there is no engine {name!r}", f"use one of {', '.join(names())}{several}")
    engine: type[Engine] = plugins.load_class(
        plugins.ENGINES, name, ENGINES, "enginesmith.pipeline.engines.base:Engine"
    )
    return engine


def baseline(form: Literal["torch", "onnx"]) -> "Engine":
    """Make the engine that runs a given module or graph unchanged, which variants are held against."""
    return engine_class(BASELINES[form]).as_given()


def simulation() -> "Engine":
    """Make the engine that runs a graph unchanged, also where it has no kernels for the types in it."""
    return engine_class(BASELINES["onnx"]).simulating()


def with_files() -> "tuple[type[Engine], ...]":
    """List the engines of the table that have a file format of their own."""
    return tuple(engine for name in ENGINES if (engine := engine_class(name)).file_suffix)


def read_file(path: "Path") -> "EngineFile":
    """Read what is recorded of a built engine's file.

    Raises:
        UsageError: no engine of the table has files like it.
        ModelError: the record is missing or damaged, or the file is not the one that it describes.
    """
    for engine in with_files():
        if path.suffix == engine.file_suffix and (file := engine.read_file(path)):
            return file
    suffixes = sorted({engine.file_suffix for engine in with_files()})
    raise UsageError(f"{path} is the file of no engine here", f"engine files end in {', '.join(suffixes)}")


def describe_file(path: "Path") -> dict[str, object]:
    """Tell people what is in a built engine's file; errors as in :func:`read_file`."""
    return read_file(path).describe()


def needs_cuda(name: str) -> bool:
    """Tell whether an engine runs on CUDA alone; of a plug-in that is not installed any more, nothing is known."""
    return _is_known(name) and engine_class(name).kinds == ("cuda",)


def can_use_cuda(names: Iterable[str]) -> bool:
    """Tell whether torch, whose buffers all engines use, and one of these can use the first GPU of this machine."""
    from enginesmith.pipeline.system.device import Device

    cuda = Device(kind="cuda")
    if not engine_class(BASELINES["torch"]).installed(cuda).ok:
        return False
    return any(_is_known(name) and engine_class(name).installed(cuda).ok for name in names)


def _is_known(name: str) -> bool:
    return name in ENGINES or plugins.offered(plugins.ENGINES, name)


def title(name: str) -> str:
    """Name an engine as people call it; its name in recipes if that is of a plug-in, which is not loaded for this."""
    return engine_class(name).title if name in ENGINES else name


def packages() -> tuple[str, ...]:
    """List the distributions whose versions are recorded with every run: those of all engines of the table, too."""
    from enginesmith.pipeline.system.machine import PACKAGES

    tools = (tool for name in ENGINES for tool in engine_class(name).tools)
    return tuple(dict.fromkeys((*PACKAGES, *tools)))


def environment() -> "Environment":
    """Describe this machine with the versions of all that engines run on."""
    from enginesmith.pipeline.system import machine

    return machine.environment(packages())


def check_software(stack: "Stack", exported: "Formats | None") -> "list[Check]":
    """Make all checks that what is installed gives reason for; models are exported in that format, if it is known."""
    from enginesmith.pipeline.engines.compatibility import check_machine

    checks = [row for name in ENGINES for row in engine_class(name).check_software(stack, exported)]
    return list({check.name: check for check in (*check_machine(stack), *checks)}.values())


def import_default() -> None:
    """Import what the default engines run on: the fork server calls this, so that no worker has to."""
    from enginesmith.pipeline.engines.options import DEFAULT_ENGINES

    for name in DEFAULT_ENGINES:
        for module in engine_class(name).modules:
            importlib.import_module(module)
