"""Say how Triton Inference Server runs an engine, in the text format of protocol buffers (``model_config.proto``)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = list[tuple[str, Any]]


@dataclass(frozen=True)
class Message:
    """Format a protobuf message as text, its fields in order; a field that is given several times is repeated."""

    fields: list[tuple[str, Any]] = field(default_factory=list)

    def lines(self, indent: str = "") -> Iterator[str]:
        """Yield lines of the text format."""
        for name, value in self.fields:
            if isinstance(value, Message):
                inner = list(value.lines(indent + "  "))
                yield from (f"{indent}{name} {{", *inner, f"{indent}}}") if inner else (f"{indent}{name} {{}}",)
            elif isinstance(value, list):
                yield f"{indent}{name}: [{', '.join(map(str, value))}]"
            else:
                yield f"{indent}{name}: {value}"


@dataclass(frozen=True)
class TritonBackend:
    """A backend of Triton and what its configuration says beyond names and shapes."""

    name: str
    file: str
    """What it calls the file that it loads."""
    platform: str = ""
    configure: Callable[[Mapping[str, Any], str], Fields] = lambda options, device: []
    """From the options of a package and the kind of device: the backend's own fields."""
    remark: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda engine: ()
    """From a package's record of the engine: what people should know, a line each."""


def quoted(text: str) -> str:
    """Quote a string for the text format: quotes, backslashes and control characters escaped, the rest as UTF-8."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char >= " " else f"\\{ord(char):03o}" for char in escaped) + '"'
