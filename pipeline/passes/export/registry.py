"""Keep torch.onnx's table of translations, which parses the source of 500 functions each time that it is built."""

import copy
import functools
import sys
from typing import Any


def keep_registry() -> None:
    """Have ``torch.onnx.export`` build its table once in a process, and start from a copy of it each time.

    It takes a second of each export, more than half of one of a small module (torch 2.13, onnxscript 0.7,
    ``ONNXRegistry.from_torchlib``). A process that workers are forked from may build it for all of them.
    """
    from torch.onnx._internal.exporter import _registration

    if isinstance(vars(_registration.ONNXRegistry).get("from_torchlib"), staticmethod):
        return  # this was done before
    from_torchlib = _registration.ONNXRegistry.from_torchlib

    @functools.cache
    def build(knows_torchvision: bool, *args: Any, **options: Any) -> Any:
        return from_torchlib(*args, **options)

    def copy_registry(*args: Any, **options: Any) -> Any:
        # operators of torchvision are in the table if it is imported before, as a module may do meanwhile
        registry = copy.copy(build("torchvision" in sys.modules, *args, **options))
        registry.functions = {target: list(entries) for target, entries in registry.functions.items()}
        return registry

    _registration.ONNXRegistry.from_torchlib = staticmethod(copy_registry)  # type: ignore[method-assign]
