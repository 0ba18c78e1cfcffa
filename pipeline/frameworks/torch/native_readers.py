"""Wrap functions of libraries that open files from C, C++ or Rust, for which there is no audit event."""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

_READERS = {
    "safetensors": ("safe_open",),
    "torch": ("from_file", "UntypedStorage.from_file"),
    "torch.jit": ("load",),
    "torch.export": ("load",),
}
_OPTIONAL_READERS = {
    "h5py.h5f": ("open",),
    "pyarrow": ("memory_map",),
    "pyarrow.feather": ("read_table",),
    "pyarrow.parquet.core": ("ParquetDataset.__init__", "ParquetFile.__init__"),
    "tokenizers": ("Tokenizer.from_file",),
    "cv2": ("imread",),
    "torchvision.io.image": ("read_file",),
}
"""By module that is wrapped once it is imported, its functions that take a path first, also of classes."""
_LONGEST_PATH = 4096


@contextlib.contextmanager
def track_native_opens(note: Callable[[str | os.PathLike[str]], None]) -> Iterator[None]:
    """Call ``note`` with each path that those functions are given within the block."""
    with contextlib.ExitStack() as stack:
        for library in _READERS:
            importlib.import_module(library)
        for library, names in (*_READERS.items(), *_OPTIONAL_READERS.items()):
            if library in sys.modules:
                stack.enter_context(_wrap_functions(library, names, note))

        def finish_import(library: str) -> None:
            stack.enter_context(_wrap_functions(library, _OPTIONAL_READERS[library], note))

        finder = _Finder(finish_import)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Let the others find a module, and tell when an optional reader was imported."""

    def __init__(self, finish: Callable[[str], None]) -> None:
        self._finish = finish

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _OPTIONAL_READERS:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_finish(module: ModuleType) -> None:
                execute(module)
                self._finish(name)

            setattr(spec.loader, "exec_module", execute_and_finish)  # noqa: B010 - mypy refuses to assign to a method
        return spec


@contextlib.contextmanager
def _wrap_functions(
    library: str, names: Sequence[str], note: Callable[[str | os.PathLike[str]], None]
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for qualified in names:
            kind, _, name = qualified.rpartition(".")
            place: Any = getattr(sys.modules[library], kind, None) if kind else sys.modules[library]
            if not hasattr(place, name):  # in another version of the library
                continue
            opened = getattr(place, name)
            stand_in = _wrap(opened, note)
            if kind:
                own = vars(place).get(name)
                setattr(place, name, stand_in if name == "__init__" else staticmethod(stand_in))
                stack.callback(*((delattr, place, name) if own is None else (setattr, place, name, own)))
            else:
                _replace(name, opened, stand_in)
                stack.callback(_replace, name, stand_in, opened)
        yield


def _replace(name: str, function: Any, other: Any) -> None:
    """Give all modules that hold a function under its name the other one."""
    for place in filter(None, list(sys.modules.values())):
        if read_held(place, name) is function:
            setattr(place, name, other)


def _wrap(opened: Any, note: Callable[[str | os.PathLike[str]], None]) -> Any:
    @functools.wraps(opened, updated=())
    def open_and_note(*args: Any, **kwargs: Any) -> Any:
        for given in (*args[:2], *kwargs.values()):  # a method is given its object first
            if isinstance(given, (str, os.PathLike)) or (isinstance(given, bytes) and len(given) < _LONGEST_PATH):
                note(os.fsdecode(given))
                break
        return opened(*args, **kwargs)

    return open_and_note


def read_held(module: object, name: str) -> Any:
    """Read a name that a module holds, None without it: one that is imported when it is used is left alone."""
    try:
        return vars(module).get(name)
    except TypeError:  # an object of any kind may stand in a module's place
        return None
