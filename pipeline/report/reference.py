"""The reference of recipes as Markdown, made from the models themselves."""

import typing
from collections.abc import Iterator

import yaml
from pydantic import BaseModel

from enginesmith.pipeline.recipe import Recipe

_HEAD = """# The recipe

A recipe says everything that `optimize` is asked to do. `enginesmith init MODEL -o recipe.yaml` writes one with every
default; `enginesmith optimize MODEL --recipe recipe.yaml` follows it, and options on the command line change it. Sizes
and durations may be written as text: `2GiB`, `5ms`, `30s`. A key that is not listed here is an error.

| key | type | default | meaning |
| --- | --- | --- | --- |
"""


def recipe_reference() -> str:
    """docs/recipe.md, whole."""
    return _HEAD + "\n".join(_rows(Recipe, "")) + "\n"


def _rows(part: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in part.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _rows(kind, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else f"`{_plain(field.get_default())}`"
        yield f"| `{prefix}{name}` | {_kind(kind)} | {default} | {field.description} |"


def _plain(value: object) -> str:
    shown = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(shown, default_flow_style=True).removesuffix("...\n").strip()


def _kind(kind: object) -> str:
    origin, arguments = typing.get_origin(kind), [one for one in typing.get_args(kind) if one is not type(None)]
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:
        return " or ".join(_kind(one) for one in arguments)
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names[typing.cast(type, kind)]
