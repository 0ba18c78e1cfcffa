"""Parts of recipes, the later over the earlier: mappings by key, everything else as a whole."""

from collections.abc import Mapping
from typing import Any


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The layers as one; a null takes away what those before it said, so that the recipe's default holds again."""
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            before = result.get(name)
            if isinstance(value, Mapping):
                result[name] = merged(before if isinstance(before, Mapping) else {}, value)
            elif value is None:
                result.pop(name, None)
            else:
                result[name] = value
    return result
