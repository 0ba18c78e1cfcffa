"""Digest what a module holds beside its parameters and buffers: numbers, lists, plain tensors, functions, objects.

Two modules that are built alike have the same digest, in another process, too. It tells whether a module that is built
again is the same one, and leads to other engines where a model's code decides by a file, a date or the environment.
"""

import datetime
import enum
import functools
import hashlib
import logging
import os
import pathlib
import random
import re
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from enginesmith.pipeline.store.inputs import is_passing, to_portable_path

_DEEPEST = 150
"""Levels of objects in objects that are looked at."""
_PLAIN = (bool, int, float, complex, bytes, type(None), range, slice, enum.Enum, np.generic)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS, _HOOKS = ("_parameters", "_buffers"), "_hooks"
_DEVICES = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")
"""Names of devices, which depend on the machine: all are taken for the same one."""
_OPAQUE = ("torch.fx", "torch.jit", "torch._C", "_thread")
"""Packages whose objects are told by their class alone."""


class Attributes(NamedTuple):
    """Identify the attributes of a module."""

    digest: str
    complete: bool
    """False where there are objects of which only the class is known."""


UNKNOWN = Attributes("", complete=False)


def digest_attributes(module: nn.Module, beside: Mapping[str, Any] = types.MappingProxyType({})) -> Attributes:
    """Digest the attributes of a module and all modules in it, but for the values of parameters and buffers.

    ``beside`` is what its code may use besides: global names.
    """
    walk = _Walk((*module.parameters(), *module.buffers()))
    walk.add(module)
    walk.add(beside)
    return Attributes(walk.digest.hexdigest(), walk.complete)


class _Walk:
    """Visits values in a fixed order, each object once."""

    def __init__(self, known: Iterable[Any] = ()) -> None:
        self.digest, self.complete = hashlib.sha256(), True
        self._seen = {id(value): number for number, value in enumerate(known)}
        self._kept: list[Any] = []
        """Objects that were visited: another one does not get their identity meanwhile."""
        self._depth = 0

    def add(self, value: Any) -> None:
        """Visit a value."""
        if isinstance(value, (str, torch.device)) and _DEVICES.fullmatch(str(value)):
            self._write("device")
        elif isinstance(value, str):  # a path means the same in another folder
            self._write("str", to_portable_path(value))
        elif isinstance(value, (*_PLAIN, *_OF_TORCH)):
            self._write(type(value).__qualname__, repr(value))
        elif id(value) in self._seen:
            self._write("seen", str(self._seen[id(value)]))
        elif self._depth == _DEEPEST:
            self._add_opaque(value)
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            self._depth += 1
            self._add_object(value)
            self._depth -= 1

    def _add_object(self, value: Any) -> None:
        self._write(_name(type(value)))
        reader = next((read for kinds, read in _READERS if isinstance(value, kinds)), None)
        if reader is not None:
            try:
                parts = list(reader(value))
            except Exception:  # noqa: BLE001 - a class of the user's may be of such a kind and do otherwise
                self._add_opaque(value)
                return
            for part in parts:
                self.add(part)
        elif isinstance(value, Set):
            self._add_set(value)
        elif type(value).__module__.startswith(_OPAQUE) or not hasattr(value, "__dict__"):
            self._add_opaque(value)
        else:
            self.add(vars(value))

    def _add_set(self, values: Set[Any]) -> None:
        parts = []
        for value in values:
            walk = _Walk()
            walk.add(value)
            parts.append(walk.digest.hexdigest())
            self.complete = self.complete and walk.complete
        self._write(*sorted(parts))

    def _add_opaque(self, value: Any) -> None:
        self._write("opaque", _name(type(value)))
        self.complete = False

    def _write(self, *texts: str) -> None:
        for text in texts:
            content = text.encode(errors="surrogatepass")
            self.digest.update(len(content).to_bytes(8, "little") + content)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _read_module(module: nn.Module) -> Iterable[Any]:
    for name, value in vars(module).items():
        yield name
        if name in _TENSORS:
            yield [key if own is not None else [key, None] for key, own in value.items()]
        elif name.endswith(_HOOKS):
            yield list(value.values()) if isinstance(value, Mapping) else value  # keys count all hooks of the process
        elif not name.startswith(("_forward_hooks_", "_forward_pre_hooks_", "_backward_hooks_")):
            yield value


def _read_mapping(mapping: Mapping[Any, Any]) -> Iterable[Any]:
    for name, value in _drop_passing(list(mapping.items())):
        if not (isinstance(name, str) and name.endswith("_hash") and isinstance(value, int)):  # by Python, of a process
            yield from (name, value)


def _drop_passing(items: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Leave passing variables out of a copy of the environment, which holds most of it, and has an order by chance."""
    texts = {name: value for name, value in items if isinstance(name, str) and isinstance(value, str)}
    if not any(map(is_passing, texts)):  # as nearly always: the environment is not looked at
        return items
    same = texts.items() & os.environ.items()
    if 2 * len(same) <= len(os.environ):
        return items
    passing = {name for name, _ in same if is_passing(name)}
    return sorted((item for item in items if item[0] not in passing), key=lambda item: str(item[0]))


def _read_tensor(tensor: Tensor) -> Iterable[Any]:
    yield from (tensor.dtype, tensor.shape, str(tensor.layout))
    if tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized:
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield hashlib.sha256(content.numpy().tobytes()).digest()


def _read_array(array: Any) -> Iterable[Any]:
    yield from (str(array.dtype), array.shape)
    yield array.tolist() if array.dtype.hasobject else array.tobytes()


def _read_function(function: types.FunctionType) -> Iterable[Any]:
    """Yield what two functions of the same code may differ in."""
    yield from (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        yield cell.cell_contents if cell != types.CellType() else None


_READERS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (nn.Module, _read_module),
    (Tensor, _read_tensor),
    (np.ndarray, _read_array),
    (Mapping, _read_mapping),
    ((list, tuple), iter),
    (pathlib.PurePath, lambda value: (str(value),)),
    ((type, types.BuiltinFunctionType, types.MethodDescriptorType), lambda value: (str(value.__qualname__),)),
    (re.Pattern, lambda value: (value.pattern, value.flags)),
    (types.ModuleType, lambda value: (value.__name__,)),
    (types.FunctionType, _read_function),
    (types.MethodType, lambda value: (value.__func__, value.__self__)),
    (functools.partial, lambda value: (value.func, value.args, value.keywords)),
    (torch.Generator, lambda value: (value.get_state(),)),
    (np.random.Generator, lambda value: (value.bit_generator.state,)),
    (random.Random, lambda value: (value.getstate(),)),
    (weakref.ref, lambda value: (value(),)),
    (logging.Logger, lambda value: (value.name,)),
    ((datetime.date, datetime.time), lambda value: (value.isoformat(),)),
)
"""Kind → what its values are made of."""
