"""Describe backends of Triton, and format the text of their configurations."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = list[tuple[str, Any]]
"""Fields of a protobuf message in order; one that is given several times is repeated."""


@dataclass(frozen=True)
class Message:
    """Format a protobuf message as text (``model_config.proto``)."""

    fields: Fields = field(default_factory=list)

    def lines(self, indent: str = "") -> Iterator[str]:
        """Yield lines of the text format."""
        for name, value in self.fields:
            if isinstance(value, Message):
                inner = list(value.lines(indent + "  "))
                yield from (f"{indent}{name} {{", *inner, f"{indent}}}") if inner else (f"{indent}{name} {{}}",)
            else:
                yield f"{indent}{name}: {'[' + ', '.join(map(str, value)) + ']' if isinstance(value, list) else value}"


def quoted(text: str) -> str:
    """Quote a string for protobuf's text format: quotes, backslashes and control characters escaped, the rest UTF-8."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char >= " " else f"\\{ord(char):03o}" for char in escaped) + '"'


@dataclass(frozen=True)
class TritonBackend:
    """Describe a backend of Triton and what its configuration says beyond names and shapes."""

    name: str
    file: str
    """Name that it expects of the file that it loads."""
    platform: str = ""
    configure: Callable[[Mapping[str, Any], str], Fields] = lambda options, device: []
    """From the options of a package and the kind of device: the backend's own fields."""
    group: Callable[[Mapping[str, Any]], Fields] = lambda options: []
    """From the options of a package: more fields of the instance group."""
    remark: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda engine: ()
    """From a package's record of the engine: remarks for people, a line each; they are cautions of the package, too."""
