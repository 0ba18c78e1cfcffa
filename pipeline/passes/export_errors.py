"""What went wrong in an export, in one sentence: the operator, the line of the model's code, and what to do."""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginesmith.pipeline.tensors import Signature, TensorSpec

_OPERATOR = (
    re.compile(r"OpOverload\(op='([\w.]+)'"),
    re.compile(r"unrecognized namespace ([\w:]+)"),
    re.compile(r"Exporting the operator '([\w:]+)'"),
    re.compile(r"(?:Could not find|Missing) .*?'?(\w+::\w+)'?"),
)
_STATIC = re.compile(r"static shape of (\d+) for dimension (.+)\.shape\[(\d+)\]")
_POSITION = re.compile(r"\[(\d+)\]$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TOOLS = ("torch", "onnx", "onnxscript", "onnx_ir", "enginesmith")
_HERE = Path(__file__).resolve().parents[2]
_REMEDY_OPERATOR = "rewrite that line with operators that ONNX has, or register a translation with torch.onnx"
_REMEDY_DATA = "the path through the code depends on values: use torch.where or torch.cond, or fix the value"
_REMEDY = "the whole trace is in the step's log; try the other one with --exporter"

Reason = tuple[str, str]


def explain(error: BaseException) -> Reason:
    """Message and remedy for an exporter's exception."""
    chain = list(_chain(error))
    text = "\n".join(str(link) for link in chain)
    operator = next((found[1] for pattern in _OPERATOR if (found := pattern.search(text))), "")
    place = next((line for link in reversed(chain) if (line := _place(link))), "")
    where = f" at {place}" if place else ""
    if operator:
        return f"the operator {operator}{where} has no translation to ONNX", _REMEDY_OPERATOR
    first = chain[-1]
    reason = f"{type(first).__name__}: {_first_line(first)}"
    remedy = _REMEDY_DATA if "data-dependent" in text else _REMEDY
    return f"the model cannot be exported{where}: {reason}", remedy


def fixed_dimension(error: BaseException, signature: "Signature") -> Reason | None:
    """Message and remedy if the reason is that the module fixes a dimension which was to be dynamic."""
    for link in _chain(error):
        if found := _STATIC.search(str(link)):
            position = _POSITION.search(found[2])
            spec = signature.inputs[int(position[1]) if position else 0]
            return fixed(spec, int(found[3]), int(found[1]))
    return None


def fixed(spec: "TensorSpec", axis: int, size: int) -> Reason:
    """Message and remedy for one dimension that came out fixed."""
    shape = ",".join(str(size if position == axis else dim) for position, dim in enumerate(spec.shape))
    return (
        f"the model works only with {spec.shape[axis]} = {size} (dimension {axis} of input {spec.name!r})",
        f"make it fixed with --input {spec.name}:{spec.dtype}:{shape}, or remove that size from the model's code",
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what caused it, the root cause last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:300]


def _place(error: BaseException) -> str:
    """``file:line`` of the innermost frame that is the model's own code."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    recorded = _FRAME.findall(_recorded_stack(error.__traceback__))
    for file, line in reversed([*frames, *recorded]):
        if _is_model_code(file):
            return f"{file}:{line}"
    return ""


def _recorded_stack(trace: TracebackType | None) -> str:
    """The stack that torch.export noted for the graph node in translation, if a frame has one in its hands."""
    found = ""
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        meta = getattr(node, "meta", None)
        if isinstance(meta, dict):
            found = str(meta.get("stack_trace") or found)
        trace = trace.tb_next
    return found


def _is_model_code(file: str) -> bool:
    import sysconfig

    path = Path(file)
    if file.startswith("<") or path.is_relative_to(_HERE / "pipeline"):
        return False
    if "site-packages" in path.parts:
        package = path.parts[len(path.parts) - path.parts[::-1].index("site-packages")]
        return package not in _TOOLS
    return not path.is_relative_to(sysconfig.get_path("stdlib"))
