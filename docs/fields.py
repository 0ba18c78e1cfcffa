"""Write docs/recipe.md, the reference of recipes, from the fields of the recipe: run by `make documents`."""

import typing

import yaml
from pydantic.fields import FieldInfo

from enginesmith.pipeline.recipe.cli_options import metadata, walk_fields
from enginesmith.pipeline.units import METAVARS

_HEAD = """# The recipe

A recipe has all options of a run of `optimize`. `enginesmith init MODEL -o recipe.yaml` writes one with every default.
`enginesmith optimize MODEL --recipe recipe.yaml` uses it; options on the command line override its values. Sizes
and durations may be written as text: `2GiB`, `5ms`, `30s`; `recover: METHOD` also sets `recovery.method`. A key
that is not listed here is an error.

| key | type | default | meaning |
| --- | --- | --- | --- |
"""


def recipe_reference() -> str:
    """Write the reference as Markdown."""
    return _HEAD + "".join(f"{_row(path, field)}\n" for path, _, field in walk_fields())


def _row(path: str, field: FieldInfo) -> str:
    default = "required"
    if not field.is_required():
        value = field.get_default()
        plain = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()
        default = f"`{text}`"
    unit = next((METAVARS[entry] for entry in metadata(field) if entry in METAVARS), "")
    kind = {"SIZE": "size, in bytes", "TIME": "duration, in ms" if path.endswith("_ms") else "duration, in s"}.get(unit)
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `{path}` | {kind or _kind(field.annotation)} | {default} | {meaning} |"


def _kind(kind: object) -> str:
    origin, arguments = typing.get_origin(kind), [part for part in typing.get_args(kind) if part is not type(None)]
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:
        return " or ".join(map(_kind, arguments))
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names[typing.cast(type, kind)]


if __name__ == "__main__":
    print(recipe_reference(), end="")
