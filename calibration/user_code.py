"""Functions of the user's that are asked for by name: ``module:function`` and ``file.py:function``."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from enginesmith.pipeline.errors import DataError, EnginesmithError

_REFERENCE = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def is_reference(text: str) -> bool:
    """Whether the text names a function in a module or file."""
    return _REFERENCE.fullmatch(text) is not None


def find(text: str, what: str) -> Any:
    """What ``module:function`` or ``file.py:function`` names, as the user's ``what``; the module's code runs.

    Modules are looked for in the current folder first, and those that a file imports also beside it.

    Raises:
        DataError: it is not there, or importing it raises.
    """
    place, _, name = text.rpartition(":")
    with blamed(f"importing the {what}'s module {place}"):
        found = _file(Path(place)) if place.endswith(".py") else _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise DataError(f"{place} has no function {name!r}", f"give the {what} as module:function")
        found = getattr(found, part)
    return found


@contextmanager
def blamed(what: str, remedy: str = "mend it, and try again") -> Iterator[None]:
    """What the user's code raises in here becomes a DataError that says so; our own errors pass.

    Raises:
        DataError: names ``what``, and the type and message of what was raised.
    """
    try:
        yield
    except EnginesmithError:
        raise
    except Exception as error:
        raise DataError(f"{what} raised {type(error).__name__}: {error}", remedy) from error


def _module(place: str) -> ModuleType:
    _look_in(Path.cwd())
    return importlib.import_module(place)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise DataError(f"there is no file {path}", "check the path")
    path = path.absolute()
    name = f"file {path}"  # a name of no module, so that none is hidden
    if name in sys.modules:
        return sys.modules[name]
    _look_in(path.parent)
    _look_in(Path.cwd())
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


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
