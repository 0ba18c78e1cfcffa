"""Look up engines by name. An engine is one file or folder here and one line in this table; or it is a plug-in.

Nothing is imported until an engine is used. ``engines/base.py`` has the contract, docs/extending.md an example.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.system import plugins

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.base import Engine


ENGINES: Mapping[str, str] = {
    "eager": "enginesmith.pipeline.engines.torch.eager:Eager",
    "compiled": "enginesmith.pipeline.engines.torch.eager:Compiled",
    "onnxruntime": "enginesmith.pipeline.engines.onnxruntime.engine:OnnxRuntime",
    "tensorrt": "enginesmith.pipeline.engines.tensorrt.engine:TensorRT",
    "tensorrt_rtx": "enginesmith.pipeline.engines.tensorrt.engine:TensorRTRTX",
}
BASELINES: Mapping[Literal["torch", "onnx"], str] = {"torch": "eager", "onnx": "onnxruntime"}
"""Form of the given model → the engine that runs it as it is, which all others are held against."""
DEFAULT = ("onnxruntime",)
"""What a model is made into where no engine is named."""
DEFAULT_BUILD = "tensorrt_rtx"
"""The engine of commands that build and check files, where none is named."""


def names() -> tuple[str, ...]:
    """List the names of all engines: those of the table, and those of installed plug-ins."""
    return tuple(dict.fromkeys((*ENGINES, *(one.name for one in plugins.installed(plugins.ENGINES)))))


def engine_class(name: str) -> "type[Engine]":
    """Import an engine by name; only a name that the table lacks is looked up among the installed plug-ins.

    Raises:
        UsageError: no engine has that name.
        MissingCapability: it is a plug-in that cannot be loaded, or that is no engine of that name.
    """
    if name in ENGINES:
        module, _, attribute = ENGINES[name].partition(":")
        own: type[Engine] = getattr(importlib.import_module(module), attribute)
        return own
    if not plugins.offered(plugins.ENGINES, name):
        raise UsageError(f"there is no engine {name!r}", f"use one of {', '.join(names())}")
    return _load_plugin(name)


def _load_plugin(name: str) -> "type[Engine]":
    from enginesmith.pipeline.engines.base import Engine

    found = plugins.load(plugins.ENGINES, name)
    if not isinstance(found, type) or not issubclass(found, Engine) or getattr(found, "name", None) != name:
        raise MissingCapability(
            f"the plug-in {name!r} gives {found!r}, which is no engine of that name",
            f"its entry point has to name a subclass of {Engine.__module__}.Engine whose name is {name!r}",
        )
    return found


def baseline(form: Literal["torch", "onnx"]) -> "Engine":
    """Make the engine that runs a given module or graph as it stands, which variants are held against."""
    return engine_class(BASELINES[form]).as_given()


def simulation() -> "Engine":
    """Make the engine that runs a graph as it stands, also where it has no kernels for the types in it."""
    return engine_class(BASELINES["onnx"]).simulating()
