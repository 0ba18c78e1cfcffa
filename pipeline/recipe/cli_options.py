"""List the options of the command line that the fields of a recipe declare, and translate between their names.

``make documents`` writes :func:`list_options` to ``commands/options.json``: ``--help`` has no time to import pydantic.
"""

import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from enginesmith.pipeline.recipe.recipe import Recipe
from enginesmith.pipeline.units import COMMA_LIST, METAVARS, Option, flag_of

Kind = Literal["text", "integer", "number", "choice", "flag", "list", "mapping"]
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def walk_fields(part: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """Yield every field of a recipe with its path (``budgets.max_drop``) and the model that declares it."""
    for name, field in part.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from walk_fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, part, field


def list_options() -> list[dict[str, Any]]:
    """Describe each option as plain values, which ``commands/parameters.py`` makes options of click from."""
    return [_describe(*entry) for entry in walk_fields() if flag_of(entry[1], entry[0].rpartition(".")[2])]


def _describe(path: str, part: type[BaseModel], field: FieldInfo) -> dict[str, Any]:
    option = next(item for item in field.metadata if isinstance(item, Option))
    kind, choices = _kind(field, option)
    default = _default(field)
    flags = option.flags or flag_of(part, path.rpartition(".")[2])
    about = f"do not {field.description}" if flags.startswith("--no-") else field.description or ""
    help_ = about[:1].upper() + about[1:]
    return {
        "field": path,
        "flags": flags,
        "heading": option.heading,
        "everyday": option.everyday,
        "metavar": option.metavar or next((METAVARS[unit] for unit in metadata(field) if unit in METAVARS), None),
        "kind": kind,
        "choices": choices,
        "help": f"{help_}; default {default}." if default else f"{help_}.".replace("….", "…"),
    }


def _kind(field: FieldInfo, option: Option) -> tuple[Kind, list[str]]:
    """Choose how click reads the values of a field, and list the words that it takes, if they are a few."""
    union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(field.annotation) if union else (field.annotation,)
    plain = [typing.get_args(item)[0] if typing.get_origin(item) is typing.Annotated else item for item in members]
    kinds = [kind for kind in plain if kind is not types.NoneType]
    kind: Any = kinds[0] if len(kinds) == 1 else None
    if COMMA_LIST in field.metadata or any(unit in METAVARS for unit in metadata(field)):
        return "text", []
    if kind is bool:
        return ("text" if option.metavar else "flag"), []
    if typing.get_origin(kind) is Literal:
        words = list(_words(kind))
        return ("choice", words) if isinstance(words[0], str) else ("integer", [])
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return "list", [str(word) for word in _words(item)] if typing.get_origin(item) is Literal else []
    if typing.get_origin(kind) is dict:
        return "mapping", []
    return {int: "integer", float: "number"}.get(kind, "text"), []  # type: ignore[return-value]


def metadata(field: FieldInfo) -> Iterator[Any]:
    """Yield the metadata of a field, and of the members of its union."""
    yield from field.metadata
    for member in typing.get_args(field.annotation):
        yield from getattr(member, "__metadata__", ())


def _words(literal: Any) -> Iterator[Any]:
    for word in typing.get_args(literal):
        yield from _words(word) if typing.get_origin(word) is Literal else (word,)


def _default(field: FieldInfo) -> str:
    """Write the default as on the command line; empty where it says nothing, as for flags."""
    value = field.get_default()
    if value is None or isinstance(value, bool) or value in ((), {}, ""):
        return ""
    for unit in metadata(field):
        if unit in METAVARS:
            return f"{value >> 20}MiB" if METAVARS[unit] == "SIZE" else f"{value:g}s"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def option_for(place: tuple[str, ...]) -> str:
    """Name the option that fills a field of the recipe, or the field itself where there is none for it."""
    path = ".".join(place)
    return next((flag_of(part, place[-1]) for known, part, _ in walk_fields() if known == path), "") or path


def fields_for(text: str) -> list[str]:
    """List the fields of a recipe that stand for the options which a text names, as they are written in YAML."""
    known = {flag: row["field"] for row in list_options() for flag in row["flags"].split("/")}
    places = [known[flag].split(".") for flag in _OPTION.findall(text) if flag in known]
    return list(dict.fromkeys(": {".join(place) + ": …" + "}" * (len(place) - 1) for place in places))
