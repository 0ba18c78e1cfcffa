"""Why a builder gave nothing: its own words become an error of one of three classes."""

import re
from pathlib import Path

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.engines.trt.build_log import BuildLog
from enginesmith.pipeline.engines.trt.graph_check import node_name
from enginesmith.pipeline.engines.trt.parsing import plain
from enginesmith.pipeline.errors import BuilderFailed, BuildError, LimitTooSmall, UnsupportedGraph
from enginesmith.pipeline.units import format_bytes

_ASKED_FOR = re.compile(r"[Rr]equested size (?:was|of) (\d+)")
_MEMORY = (
    *("OutOfMemory", "insufficient memory", "workspace memory greater", "out of memory"),
    "within workspace limit",
)
_UNSUPPORTED = (
    *("not supported", "unsupported", "Could not find any implementation", "No tactic", "Cannot compile"),
    *("Could not infer output types", "has no runners", "layerImpls.empty", "violate shape"),
)
_OPERATORS = {"deconv": "ConvTranspose"}
"""The compiler's word → the operator it stands for, where it names no node."""
_QUOTED = re.compile(r"'([^']+)'|\bnode (\S+?)[\s.:]|^(?:\[[^]]*\] )?(\S+?): ")
_WHERE = re.compile(
    r"\(?\[[\w./]+\.(?:cpp|hpp|h)\b[^\]]*\]|\b[\w./]+\.(?:cpp|hpp|h):\d+:?|\w+Exception:|\bMyelin\b|I\w+::\w+:"
    r"|\(?\bIn \w+ at\b ?\S*"
)
"""Where in TensorRT's source it was said."""
_LENGTH = 400


def build_error(log: BuildLog, graph: Path, workspace_bytes: int | None, flavour: str) -> BuildError:
    """The error that stands for what is in the log."""
    text = "\n".join(log.errors)
    if any(words in text for words in _MEMORY) or any("insufficient memory" in words for words in log.warnings):
        return _too_small(text + "\n".join(log.warnings), workspace_bytes, flavour)
    said = plain(_WHERE.sub(" ", log.errors[0]))[:_LENGTH] if log.errors else "nothing"
    if "timing cache" in text.lower():
        return BuilderFailed(
            f"a kernel's timing is missing, and the timing cache is locked: {said}", "build once without --locked"
        )
    if any(words in text for words in _UNSUPPORTED):
        node = _node(text, graph)
        remedy = "use another precision for it, or another target; `build --check` tells which targets would do"
        return UnsupportedGraph(f"{flavour} cannot build {node or 'this graph'}: {said}", remedy)
    return BuilderFailed(
        f"{flavour}'s builder failed and said: {said}", "try the model in another precision, or for another target"
    )


def _too_small(text: str, workspace_bytes: int | None, flavour: str) -> LimitTooSmall:
    asked = [int(number) for number in _ASKED_FOR.findall(text)]
    words = f" (it asked for {max(asked)} bytes in all)" if asked else ""
    if workspace_bytes is None:
        return LimitTooSmall(
            f"{flavour}'s builder ran out of memory{words}", "use a smaller largest batch, or a device with more memory"
        )
    return LimitTooSmall(
        f"no engine fits a workspace of {format_bytes(workspace_bytes)}{words}",
        "allow more, or find the smallest that builds with --workspace sweep",
    )


def _node(text: str, graph: Path) -> str:
    """The first node of the graph that the text names, with the module it comes from."""
    nodes = {node.name: node for node in onnx_file.nodes(onnx_file.read(graph)) if node.name}
    for found in _QUOTED.finditer(text):
        name = next(group for group in found.groups() if group)
        if name in nodes:
            return node_name(nodes[name])
    operators = [operator for word, operator in _OPERATORS.items() if word in text]
    return next((node_name(node) for node in nodes.values() if node.op_type in operators), "")
