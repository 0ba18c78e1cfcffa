"""Engines by name. An engine is one file in this folder and one line in this table; nothing is imported until used."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from enginesmith.pipeline.errors import UsageError

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.base import Engine

ENGINES: Mapping[str, str] = {
    "eager": "enginesmith.pipeline.engines.eager:Eager",
    "compiled": "enginesmith.pipeline.engines.compiled:Compiled",
    "onnxruntime": "enginesmith.pipeline.engines.onnxruntime:OnnxRuntime",
    "tensorrt": "enginesmith.pipeline.engines.tensorrt:TensorRT",
    "tensorrt_rtx": "enginesmith.pipeline.engines.tensorrt:TensorRTRTX",
}


def engine_class(name: str) -> "type[Engine]":
    """The class of an engine.

    Raises:
        UsageError: no engine has that name.
    """
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}", f"use one of {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    found: type[Engine] = getattr(importlib.import_module(module), attribute)
    return found
