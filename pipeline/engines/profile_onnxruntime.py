"""ONNX Runtime's own profiler: kernel times from the trace that a session writes.

A trace is a list of events with a start and a duration in whole microseconds: ``model_run`` is one inference, and each
node in it is an event ``<node>_kernel_time``. Nodes of a subgraph lie within the event of the node that runs it. On
CUDA a node's event is its launch; what ran on the device is in events of the category ``Kernel``, which builds with
CUDA profiling alone write.
"""

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from enginesmith.pipeline.engines.profiling import WARM_CALLS, OperatorTime, Origin, Profiled, Tally, narrowest
from enginesmith.pipeline.engines.provenance import Provenance
from enginesmith.pipeline.errors import MissingCapability, ModelError
from enginesmith.pipeline.precision.audit.structure import CONVERTERS

_KERNEL = "_kernel_time"
_TYPES = {
    "int4": "int4",
    "uint4": "int4",
    "float8e4m3fn": "fp8",
    "int8": "int8",
    "uint8": "int8",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
}
"""ONNX Runtime's words for what values are, the narrowest first."""
_FLOATS = {"float", "float16", "bfloat16", "double"}
_CONVERT = (*CONVERTERS, "ReorderInput", "ReorderOutput", "MemcpyToHost", "MemcpyFromHost")
_INTEGER = re.compile(r"Integer|^QLinear|^QGemm$|^QAttention$|^DynamicQuantize(?:MatMul|LSTM)$")
"""Operators that compute in int8 whatever they read: weights that are packed are in no event."""
_COARSE_SECONDS = 2e-4
"""Below this, whole microseconds are too coarse for single operators."""

Event = dict[str, Any]


def read_trace(path: Path) -> list[Event]:
    """The events of a trace.

    Raises:
        ModelError: ONNX Runtime did not write a whole one.
    """
    try:
        found: list[Event] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"ONNX Runtime wrote no profile that can be read: {error}", "profile again") from error
    return found


def profiled(events: Sequence[Event], executed: Path, graph: Path | None, *, on_cuda: bool) -> Profiled:
    """The operators of a trace, on their modules; ``executed`` is the graph that the session ran.

    Raises:
        MissingCapability: the session ran on CUDA, and the trace has launches only.
    """
    origins = Provenance.read(graph).of_executed(executed) if graph else {}
    tally, described = Tally(), dict[str, Event]()
    runs = sorted((event for event in events if event["name"] == "model_run"), key=lambda one: int(one["ts"]))
    for run in runs[WARM_CALLS:]:
        tally.begin()
        within = [event for event in events if _kind(event) and _within(event, run)]
        for name, seconds, event in _device_times(within) if on_cuda else _self_times(within):
            tally.add(name, seconds)
            described.setdefault(name, event)
    operators = tuple(
        _operator(name, described[name], origins, *found) for name, found in tally.medians().items() if name
    )
    if on_cuda and not operators:
        raise MissingCapability(
            "this onnxruntime is built without CUDA profiling: it tells when nodes are launched, not how long they run",
            "profile eager or TensorRT, or use a build with onnxruntime_ENABLE_CUDA_PROFILING",
        )
    whole = statistics.median(int(run["dur"]) / 1e6 for run in runs[WARM_CALLS:])
    coarse = whole < _COARSE_SECONDS
    return Profiled(
        operators=operators,
        source="ONNX Runtime's profiler",
        call_seconds=whole,
        notes=("it counts whole microseconds, which is coarse for operators this short",) if coarse else (),
    )


def _kind(event: Event) -> bool:
    return event.get("cat") == "Kernel" or str(event["name"]).endswith(_KERNEL)


def _within(event: Event, other: Event) -> bool:
    start, end = int(event["ts"]), int(event["ts"]) + int(event["dur"])
    return int(other["ts"]) <= start and end <= int(other["ts"]) + int(other["dur"])


def _self_times(events: Sequence[Event]) -> Iterator[tuple[str, float, Event]]:
    """Seconds of each node without the nodes of its subgraphs."""
    left: list[tuple[Event, int]] = []
    ordered = sorted(events, key=lambda one: (int(one["ts"]), -int(one["dur"])))
    stack: list[int] = []
    for event in ordered:
        while stack and not _inside(event, left[stack[-1]][0]):
            stack.pop()
        if stack:
            outer, own = left[stack[-1]]
            left[stack[-1]] = (outer, own - int(event["dur"]))
        stack.append(len(left))
        left.append((event, int(event["dur"])))
    for event, own in left:
        yield _name(event), max(0, own) / 1e6, event


def _inside(event: Event, outer: Event) -> bool:
    """Whether a node runs in another's subgraph; only these operators have one, and neighbours may touch."""
    has_body = outer.get("args", {}).get("op_name") in ("If", "Loop", "Scan", "SequenceMap")
    return has_body and event.get("tid") == outer.get("tid") and _within(event, outer)


def _device_times(events: Sequence[Event]) -> Iterator[tuple[str, float, Event]]:
    """Seconds that each node's kernels ran on the device."""
    nodes = {str(event["name"]): event for event in events if event.get("cat") == "Node"}
    for event in events:
        if event.get("cat") == "Kernel":
            parent = str(event.get("args", {}).get("parent_name", ""))
            yield _name(nodes.get(parent, event)), int(event["dur"]) / 1e6, nodes.get(parent, event)


def _name(event: Event) -> str:
    return str(event["name"]).removesuffix(_KERNEL)


def _operator(name: str, event: Event, origins: Mapping[str, Origin], seconds: float, calls: int) -> OperatorTime:
    given = event.get("args", {})
    operator = str(given.get("op_name") or name)
    origin = origins.get(name, Origin())
    read, written = (_types(given, f"{side}_type_shape") for side in ("input", "output"))
    if operator in _CONVERT or (operator == "Cast" and read | written <= _FLOATS):
        origin = origin.model_copy(update={"converts": True})
    precision = "int8" if _INTEGER.search(operator) else narrowest(read, _TYPES)
    return OperatorTime(
        name=name,
        operator=operator,
        origin=origin,
        precision="" if origin.converts else precision,
        seconds=seconds,
        calls=calls,
    )


def _types(given: Mapping[str, Any], key: str) -> set[str]:
    return {str(word) for one in given.get(key, ()) for word in one}
