"""Load functions of the user's by name: ``module:function`` and ``file.py:function``."""

import difflib
import importlib
import importlib.util
import inspect
import re
import symtable
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from enginesmith.pipeline.errors import DataError, EnginesmithError

_ALL_OF_ANOTHER = re.compile(r"^\s*from\s.*\simport\s*\*", re.MULTILINE)
_REFERENCE = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")
_WITH_REST = re.compile(r"((?:.+?\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*):(.+)")


def is_reference(text: str) -> bool:
    """Check whether the text names a function in a module or file."""
    return _REFERENCE.fullmatch(text) is not None


def split_reference(text: str) -> tuple[str, str | None]:
    """Split ``module:function:REST`` before REST; there is none in other texts."""
    match = _WITH_REST.fullmatch(text)
    return (match[1], match[2]) if match else (text, None)


def find(text: str, what: str) -> Any:
    """Load the object that ``module:function`` names, as the user's ``what``; the module's code runs.

    Modules are looked for in the current folder first, and those that a file imports also beside it.

    Raises:
        DataError: it is not there, or importing it raises.
    """
    place, _, name = text.rpartition(":")
    with blame_user_code(f"importing the {what}'s module {place}"):
        target = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    for part in name.split("."):
        if not hasattr(target, part):
            raise DataError(f"{place} has no function {name!r}", f"give the {what} as module:function")
        target = getattr(target, part)
    return target


def check_reference(text: str, what: str) -> None:
    """Check that :func:`find` would find an object, as far as that can be seen while no code runs.

    Names that a module makes for itself only when it runs are left for :func:`find`.

    Raises:
        DataError: there is no such file, module or name, or the file is not Python.
    """
    place, _, name = text.rpartition(":")
    path = _require_file(Path(place)) if place.endswith(".py") else _find_module_file(place, what)
    if path is None or path.suffix != ".py":
        return
    names, first = _list_names(path, what), name.partition(".")[0]
    if names is not None and first not in names:
        near = difflib.get_close_matches(first, names, n=1)
        functions = re.findall(r"^(?:async )?def ([A-Za-z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        listed = f"; {path.name} has {', '.join(functions)}" if functions else ""
        remedy = f"did you mean {place}:{near[0]}?" if near else f"give the {what} as module:function{listed}"
        raise DataError(f"{place} has no function {name!r}", remedy)


def _find_module_file(place: str, what: str) -> Path | None:
    """Find the file of a module without importing it; None where only importing it can tell."""
    top, *inner = place.split(".")
    spec = PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top)
    if spec is None:
        raise DataError(f"there is no module {top!r}", f"give the {what} as module:function or file.py:function")
    for name in inner:
        folders, parent = spec.submodule_search_locations, spec.origin
        spec = PathFinder.find_spec(f"{spec.name}.{name}", list(folders)) if folders else None
        if spec is None:
            names = _list_names(Path(parent), what) if parent and parent.endswith(".py") else None
            if names is not None and name not in names:
                raise DataError(f"there is no module {place!r}", f"give the {what} as module:function")
            return None
    return Path(spec.origin) if spec.origin else None


def _list_names(path: Path, what: str) -> set[str] | None:
    """List the names that a file defines or imports at its top; None if only running it can tell."""
    try:
        text = path.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"cannot read the {what}'s file {path}: {error}", "fix it, and try again") from error
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    has_dynamic_names = "__getattr__" in names or any(symbol.get_name() == "globals" for symbol in symbols)
    return None if has_dynamic_names or _ALL_OF_ANOTHER.search(text) else names


def check_arguments(function: Any, what: str, *names: str) -> None:
    """Check that a function can be called with so many positional arguments.

    Raises:
        DataError: it takes fewer, or needs more.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C that does not tell
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        called = ", ".join(names)
        raise DataError(
            f"{what} takes {signature}, and is called with ({called}): {error}",
            f"write it as `def function({called})`, with a default for each other argument",
        ) from error


def describe_error(error: Exception, function: Any) -> str:
    """Describe what a function of the user's raised, and in which of its lines."""
    file = function.__code__.co_filename if inspect.isfunction(function) else None
    lines = [place.lineno for place in traceback.extract_tb(error.__traceback__) if place.filename == file]
    return f"{type(error).__name__}: {error}" + (f" in line {lines[-1]} of {Path(file).name}" if file and lines else "")


@contextmanager
def blame_user_code(what: str) -> Iterator[None]:
    """Turn errors of the user's code into a DataError that says so; our own errors pass.

    Raises:
        DataError: names ``what``, and the type and message of what was raised.
    """
    try:
        yield
    except EnginesmithError:
        raise
    except Exception as error:
        raise DataError(f"{what} raised {type(error).__name__}: {error}", "fix it, and try again") from error


def _import_module(place: str) -> ModuleType:
    _add_to_path(Path.cwd())
    return importlib.import_module(place)


def _require_file(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"there is no file {path}", "check the path")
    return path


def _import_file(path: Path) -> ModuleType:
    path = _require_file(path).absolute()
    name = f"file {path}"  # a name of no module, so that none is hidden
    if name in sys.modules:
        return sys.modules[name]
    _add_to_path(path.parent)
    _add_to_path(Path.cwd())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
