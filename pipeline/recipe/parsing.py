"""Parse recipes from plain values, as files and options give them."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.recipe import validation
from enginesmith.pipeline.recipe.options import Budgets, Part
from enginesmith.pipeline.recipe.recipe import Recipe
from enginesmith.pipeline.tensors import ShapeRange

_YAML_WORDS = {"Value": "", "tuple": "list", "dicti": "mapping"}


_IN_PYTHON_WORDS = re.compile(r"^Value error, |tuple|dictionary or instance of \w+|dictionary")
"""Python's words in messages of pydantic, which are replaced by those of YAML."""


def make(values: dict[str, Any]) -> Recipe:
    """Make a recipe from plain values, sizes and durations as text included.

    Raises:
        UsageError: a key or a value that does not belong there, or fields that do not fit together.
    """
    recipe = parsed(values)
    validation.validate_recipe(recipe)
    return recipe


def parsed(values: dict[str, Any]) -> Recipe:
    """Make a recipe without checking that its fields go together and that the model exists.

    Raises:
        UsageError: a key or a value that does not belong there.
    """
    try:
        recipe = Recipe.model_validate(_fill_batches(values))
    except ValidationError as error:
        raise _explain_error(error) from error
    _ = recipe.specs, recipe.ranges, recipe.where, recipe.workspace_limits  # each raises its own message
    return recipe


def read_budgets(values: dict[str, Any]) -> tuple[Budgets, float | None]:
    """Read the budgets and the fidelity threshold alone, from values as in :func:`make`.

    Raises:
        UsageError: one is no number, or makes no sense.
    """
    try:
        found = _Demands.model_validate(values)
    except ValidationError as error:
        raise _explain_error(error) from error
    return found.budgets, found.min_sqnr_db


class _Demands(Part):
    """The fields of a recipe that measured numbers are compared with."""

    budgets: Budgets
    min_sqnr_db: float | None


def _fill_batches(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in batches where only their range is given: those of the default within it, else its usual one."""
    shapes = values.get("shapes")
    given = shapes.get("batch") if isinstance(shapes, dict) else None
    if "batch" in values or not isinstance(given, str):
        return values
    range_, default = ShapeRange.parse(given), Recipe.model_fields["batch"].default
    return {**values, "batch": [one for one in default if range_.min <= one <= range_.max] or [range_.opt]}


def _explain_error(error: ValidationError) -> UsageError:
    """Explain a validation error in the words of a recipe."""
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        return _unknown_field(Recipe, first["loc"])
    named = (str(part) for part in first["loc"])
    place = ".".join(part for part in named if part.isalnum() or part.isidentifier()) or "the recipe"
    return UsageError(f"{place}: {plain_words(first['msg'])} (given: {first['input']!r})", "see docs/recipe.md")


def plain_words(message: str) -> str:
    """Rewrite a message of pydantic in the words of YAML."""
    return _IN_PYTHON_WORDS.sub(lambda found: _YAML_WORDS[found[0][:5]], message)


def _unknown_field(part: type[BaseModel], place: Sequence[str | int]) -> UsageError:
    """Make the error for an unknown field, with similar ones."""
    *above, name = (str(one) for one in place)
    for step in above:
        inner = part.model_fields[step].annotation
        assert isinstance(inner, type)
        part = inner
    near = difflib.get_close_matches(name, part.model_fields, n=1)
    return UsageError(
        f"the recipe has no field {name!r}"
        + (f" in {'.'.join(above)}" if above else "")
        + (f"; did you mean {near[0]}?" if near else ""),
        f"the fields are {', '.join(part.model_fields)}",
    )


# Recipes as YAML.

_MERGE = "tag:yaml.org,2002:merge"
"""The tag of ``<<``, which may stand there several times."""


def read(path: Path, what: str = "recipe", remedy: str = "start from `enginesmith init MODEL`") -> dict[str, Any]:
    """Read the values of a recipe file, or of another YAML file that is a mapping, without checking them.

    Raises:
        UsageError: no such file, or not a YAML mapping, or one that has a name twice.
    """
    try:
        values = yaml.load(path.read_text(), _EachOnce)
    except OSError as error:
        raise UsageError(f"the {what} {path} cannot be read: {error.strerror}", "check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"{error.problem} in line {error.problem_mark.line + 1}"
        raise UsageError(f"the {what} {path} is not YAML: {reason}", remedy) from error
    if not isinstance(values, dict):
        raise UsageError(f"the {what} {path} is no mapping of names to values", remedy)
    return values


class _EachOnce(yaml.SafeLoader):
    """YAML of plain values, in which a name that a mapping has twice is an error: the first would be lost unseen."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and refuse a repeated name."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


def commented(recipe: Recipe) -> str:
    """Write a recipe as YAML, with a comment for every field."""
    return "\n".join(_lines(recipe, "")) + "\n"


def _lines(part: BaseModel, indent: str) -> list[str]:
    lines = []
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            about = (type(value).__doc__ or "").partition("\n")[0]
            lines += [f"{indent}# {about}", f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            plain = part.model_dump(mode="json")[name]
            text = yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()
            lines += [f"{indent}# {field.description}", f"{indent}{name}: {text}"]
    return lines
