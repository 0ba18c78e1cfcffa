"""Recipes as YAML."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.recipe.model import Recipe


def read(path: Path) -> dict[str, Any]:
    """The values of a recipe file, not yet checked.

    Raises:
        UsageError: no such file, or not a YAML mapping.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the recipe {path}: {error.strerror}", "check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"{error.problem} in line {error.problem_mark.line + 1}"
        raise UsageError(f"the recipe {path} is not YAML: {reason}", "start from `enginesmith init MODEL`") from error
    if not isinstance(values, dict):
        raise UsageError(f"the recipe {path} is no mapping of names to values", "start from `enginesmith init MODEL`")
    return values


def commented(recipe: Recipe) -> str:
    """The recipe as YAML, every field with what it means."""
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
