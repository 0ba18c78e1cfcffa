"""Find and load engines, passes and metrics that other distributions offer as entry points.

A plug-in is used only where its name is given: nothing is imported to list what is installed, and an entry point of a
name that enginesmith itself has is never asked for.
"""

import functools
import importlib.metadata
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from enginesmith.pipeline.errors import MissingCapability

if TYPE_CHECKING:
    from pydantic import BaseModel

ENGINES, PASSES, METRICS = "enginesmith.engines", "enginesmith.passes", "enginesmith.metrics"
_OWN = "enginesmith"
_resolve_own = functools.cache(pkgutil.resolve_name)
"""Imports an own class; plans ask for the same few thousands of times."""


class Plugin(NamedTuple):
    """An entry point of an installed distribution; nothing of it has been imported."""

    name: str
    distribution: str
    version: str


def installed(group: str) -> tuple[Plugin, ...]:
    """List a group's entry points by name, without importing any."""
    return tuple(sorted({_describe(point) for point in _entry_points(group)}))


def offered(group: str, name: str) -> bool:
    """Tell whether a distribution offers an entry point of that name."""
    return bool(_entry_points(group, name))


def load(group: str, name: str) -> Any:
    """Import what an entry point stands for.

    Raises:
        MissingCapability: there is none of that name, several distributions offer it, or importing it fails.
    """
    points = {(_describe(item), item.value): item for item in _entry_points(group, name)}
    if not points:
        raise MissingCapability(f"no installed distribution offers {name!r} in {group}", "install the one that does")
    if len(points) > 1:
        owners = " and ".join(sorted(plugin.distribution for plugin, _ in points))
        raise MissingCapability(f"{name!r} of {group} is offered by {owners}", "uninstall all of them but one")
    ((plugin, value), point) = next(iter(points.items()))
    try:
        return point.load()
    except Exception as error:  # code of others, at the boundary: whatever it raises is told
        raise MissingCapability(
            f"the plug-in {name!r} of {plugin.distribution} {plugin.version} cannot be loaded from {value}: "
            f"{type(error).__name__}: {error}",
            f"fix or reinstall {plugin.distribution}, or leave {name!r} away",
        ) from error


def _entry_points(group: str, name: str = "") -> list[EntryPoint]:
    """List the entry points of a group, or those of a name in it."""
    return [point for point in _read_entry_points(group, tuple(sys.path)) if name in ("", point.name)]


@functools.cache
def _read_entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Read a group's entry points on the path of modules: a file of each distribution is opened, 0.1 s of work."""
    return importlib.metadata.entry_points(group=group)


def load_class(group: str, name: str, table: Mapping[str, str], contract: str) -> type[Any]:
    """Import a class by name: that of ``table``, name → ``module:Class``, else the plug-in of that name.

    ``contract`` is the class that plug-ins have to derive from, written in the same way.

    Raises:
        MissingCapability: it is a plug-in that cannot be loaded, or that is no such class of that name.
    """
    if name in table:
        own: type[Any] = _resolve_own(table[name])
        return own
    base, loaded = pkgutil.resolve_name(contract), load(group, name)
    if not isinstance(loaded, type) or not issubclass(loaded, base) or getattr(loaded, "name", None) != name:
        raise MissingCapability(
            f"the plug-in {name!r} gives {loaded!r}, which is no {base.__name__.lower()} of that name",
            f"its entry point has to name a subclass of {contract.replace(':', '.')} whose name is {name!r}",
        )
    return loaded


def identify_code(value: Any) -> dict[str, str]:
    """Compute what a plug-in's results depend on: its distributions' versions, and a digest of its code.

    ``value`` is a class, a function, or an object; for what is enginesmith's own the answer is empty.
    """
    kind = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    package = kind.__module__.partition(".")[0]
    return {} if package in (_OWN, "builtins") else _identify_package(package)


def identify_plugins(model: "BaseModel") -> dict[str, dict[str, str]]:
    """Identify every plug-in among the values of a model's fields: package → :func:`identify_code`."""
    kinds = {type(value) for value in _walk(model)}
    codes = {kind.__module__.partition(".")[0]: identify_code(kind) for kind in kinds}
    return {package: code for package, code in sorted(codes.items()) if code}


def _walk(value: Any) -> Iterator[Any]:
    fields = getattr(type(value), "model_fields", None)
    if fields is not None:
        yield value
        for name in fields:
            yield from _walk(getattr(value, name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _walk(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _walk(inner)


def _describe(point: EntryPoint) -> Plugin:
    distribution = point.dist
    if distribution is None:
        return Plugin(point.name, "unknown", "unknown")
    return Plugin(point.name, distribution.metadata["Name"] or "unknown", distribution.version)


@functools.cache
def _identify_package(package: str) -> dict[str, str]:
    from enginesmith.pipeline.artifact import file_digest, files_below, json_digest

    owners = importlib.metadata.packages_distributions().get(package, ())
    versions = {name: importlib.metadata.version(name) for name in sorted(set(owners))}
    module = sys.modules[package]
    if not module.__file__:
        return versions
    file = Path(module.__file__)
    if not hasattr(module, "__path__"):
        return {**versions, "code": file_digest(file)}
    names = (name for name in files_below(file.parent) if name.endswith(".py"))
    return {**versions, "code": json_digest({name: file_digest(file.parent / name) for name in names})}
