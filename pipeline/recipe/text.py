"""Recipes as YAML."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.recipe.model import Recipe

_MERGE = "tag:yaml.org,2002:merge"
"""The tag of ``<<``, which may stand there several times."""


def read(path: Path, what: str = "recipe", remedy: str = "start from `enginesmith init MODEL`") -> dict[str, Any]:
    """The values of a recipe file, or of a file of another kind that is a mapping, not yet checked.

    Raises:
        UsageError: no such file, or not a YAML mapping, or one that has a name twice.
    """
    try:
        values = yaml.load(path.read_text(), _EachOnce)
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}", "check the path") from error
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
        """As the loader does, of distinct names."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


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
