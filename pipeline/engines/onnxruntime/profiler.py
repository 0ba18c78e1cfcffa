"""Time the nodes of an optimized graph by ONNX Runtime's trace, and find the modules whose work they do.

ONNX Runtime drops the metadata of nodes when it optimizes, and names what it fuses as it likes; the values between
nodes mostly keep their names. So a node of the optimized graph stands for those nodes of the graph it was made from
that lie between what it reads and what it writes.

A trace is a list of events with a start and a duration in whole microseconds: ``model_run`` is one inference, and each
node in it is an event ``<node>_kernel_time``. Nodes of a subgraph lie within the event of the node that runs it. On
CUDA a node's event is its launch; what ran on the device is in events of the category ``Kernel``, which builds with
CUDA profiling alone write.
"""

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.engines.profiling import NODE, WARM_CALLS, OperatorTime, Origin, Profiled, Tally, narrowest
from enginesmith.pipeline.errors import MissingCapability, ModelError
from enginesmith.pipeline.frameworks.onnx import model_file, traversal
from enginesmith.pipeline.frameworks.onnx.coverage import CONVERTERS, is_product
from enginesmith.pipeline.frameworks.onnx.traversal import attributes
from enginesmith.pipeline.units import group_values

if TYPE_CHECKING:
    import onnx


_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""torch's word for operators that it made up outside of any module: sizes of inputs."""
_MEMCPY = ("MemcpyToHost", "MemcpyFromHost")
_LAYOUT = ("ReorderInput", "ReorderOutput", "Transpose", "Cast", "Identity", *_MEMCPY)
"""Operators that engines insert without the graph asking for them; the value stays the same."""
_BLOCKED = "_nchwc"
"""Ends the names of ONNX Runtime's convolutions and pools on blocked channels, which begin with the value's name."""
_COPY = re.compile(r"_token_\d+$")
"""Suffix that ONNX Runtime puts behind the name of a node that it made anew."""
_CLAMPS = ("Relu", "Clip")
"""Activations that quantizing does by itself."""
_SUM = 3
"""Input of a blocked convolution that is added to its result."""
_WRAPPER = "model."
"""Prefix of parameters' names when the exporter saw the module within a wrapper."""
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
"""ONNX Runtime's words for types of values, the narrowest first."""
_FLOATS = {"float", "float16", "bfloat16", "double"}
_CONVERT = (*CONVERTERS, "ReorderInput", "ReorderOutput", *_MEMCPY)
_INTEGER = re.compile(r"Integer|^QLinear|^QGemm$|^QAttention$|^DynamicQuantize(?:MatMul|LSTM)$")
"""Operators that compute in int8 whatever they read: weights that are packed are in no event."""
_COARSE_SECONDS = 2e-4
"""Below this, whole microseconds are too coarse for single operators."""

Event = dict[str, Any]


class Provenance:
    """Index the graph that an engine was built from: makers, readers and modules of its nodes."""

    def __init__(self, path: Path) -> None:
        """Read an ONNX file.

        Raises:
            InvalidGraph: it cannot be read.
        """
        model = model_file.skeleton(path)
        self._nodes = list(traversal.nodes(model))
        self._constants = {tensor.name for tensor in model.graph.initializer}
        self._makers = {output: node for node in self._nodes for output in node.output if output}
        self._named = {node.name: node for node in self._nodes if node.name}
        self._places = {node.name: place for place, node in enumerate(self._nodes) if node.name}
        self._readers = group_values((value, node) for node in self._nodes for value in node.input)
        noted: dict[str, str] = {}
        for node in self._nodes:
            for entry in node.metadata_props:
                if entry.key == model_file.MODULE_KEY:
                    noted[_key(node)] = "" if entry.value == _NO_MODULE else entry.value
        self._modules = {_key(node): self._module(node, noted) for node in self._nodes}
        """By name of a node's first output."""

    def _module(self, node: "onnx.NodeProto", noted: Mapping[str, str]) -> str:
        """Find a node's module: as noted; of conversions between modules the value's writer's, else its reader's."""
        own = noted.get(_key(node))
        if own is not None:
            return own
        if not noted:
            return f"{NODE}{node.name or _key(node)}"
        if node.op_type not in (*CONVERTERS, "Cast"):
            return ""
        near = [self._makers.get(node.input[0]), *self._readers.get(node.output[0], ())]
        return next((noted[_key(other)] for other in near if other is not None and _key(other) in noted), "")

    def named(self, names: Iterable[str], *, light: bool = False) -> Origin:
        """Find the origin of a kernel's work from the names of the nodes in it; unknown for none.

        A ``light`` kernel multiplies nothing: products that it names are what it prepares or finishes.
        """
        places = {self._places[name] for name in names if name in self._places}
        covered = [self._nodes[place] for place in sorted(places, reverse=True)]
        others = [node for node in covered if not is_product(node)]
        if not light or not others:
            return self._origin(covered)
        if all(node.op_type in CONVERTERS for node in others):
            return self._origin(covered).model_copy(update={"converts": True, "multiplies": False})
        return self._origin(others)

    def of_executed(self, path: Path) -> dict[str, Origin]:
        """Find the origin of each node's work in an optimized file, by the node's name.

        Raises:
            InvalidGraph: it cannot be read.
        """
        executed = list(traversal.nodes(model_file.skeleton(path)))
        same = self._aliases(executed)
        cuts = {same[output] for node in executed for output in node.output if output in same}
        origins = {node.name: self._of_node(node, same, cuts) for node in executed}
        readers: dict[str, set[tuple[str, ...]]] = {}
        for node in reversed(executed):  # what the engine put in front of a single module belongs to that
            beyond = set[tuple[str, ...]]().union(*(readers.get(output, set()) for output in node.output))
            if not origins[node.name].modules and len(beyond) == 1:
                origins[node.name] = Origin(modules=next(iter(beyond)))
            for value in node.input:
                readers.setdefault(value, set()).add(origins[node.name].modules)
        return origins

    def _of_node(self, node: "onnx.NodeProto", same: Mapping[str, str], cuts: set[str]) -> Origin:
        targets = {same[output] for output in node.output if output in same}
        inputs = {same.get(value, value) for value in node.input}
        if targets and targets <= inputs:  # it hands on what it was given, in another layout
            maker = next((self._makers[value] for value in targets if value in self._makers), None)
            return Origin(modules=(self._modules[_key(maker)],) if maker is not None else (), converts=True)
        # nodes that lead to the targets, back to where other nodes of the engine end; the last ones first
        ends = cuts | inputs
        waiting = [value for value in targets if value in self._makers]
        between: dict[str, onnx.NodeProto] = {}
        while waiting:
            maker = self._makers[waiting.pop(0)]
            if _key(maker) not in between:
                between[_key(maker)] = maker
                waiting += [value for value in maker.input if value in self._makers and value not in ends]
        return self._origin(list(between.values()))

    def _origin(self, covered: "list[onnx.NodeProto]") -> Origin:
        """Collect the modules of the products among the nodes, else of the last one; the others are fused into it."""
        if not covered:
            return Origin()
        products = [node for node in covered if is_product(node)]
        main = products or covered[:1]
        modules = tuple(dict.fromkeys(path for node in reversed(main) for path in self._paths(node)))
        also: dict[str, dict[str, None]] = {}
        for node in covered:
            path = self._modules[_key(node)]
            if path not in modules and node.op_type not in (*CONVERTERS, "Constant"):
                also.setdefault(path, {})[node.op_type] = None
        converts = all(node.op_type in CONVERTERS for node in covered)
        fused = {path: tuple(operators) for path, operators in also.items()}
        return Origin(modules=modules, also=fused, multiplies=bool(products), converts=converts)

    def _paths(self, node: "onnx.NodeProto") -> Iterator[str]:
        """Yield a node's module, after that beside it whose weight it has: a BatchNorm is folded into a convolution."""
        path = self._modules[_key(node)]
        parent = path.rpartition(".")[0]
        for value in node.input:
            while value in self._makers and self._makers[value].op_type in CONVERTERS:
                value = self._makers[value].input[0]
            holder = value.removeprefix(_WRAPPER).rpartition(".")[0]
            if value in self._constants and holder and holder.rpartition(".")[0] == parent and NODE not in path:
                yield holder
        yield path

    def _aliases(self, executed: "list[onnx.NodeProto]") -> dict[str, str]:
        """Map values of the optimized graph to their names in this one."""
        known = {*self._makers, *self._constants}
        same = {value: value for node in executed for value in (*node.input, *node.output) if value in known}
        for node in reversed(executed):  # a value in another layout is known by what is made of it
            if node.op_type in _LAYOUT and node.output[0] in same:
                same.setdefault(node.input[0], same[node.output[0]])
        for node in executed:  # other outputs: from the node's name, or from what it was made of
            if not node.output or node.output[0] in same:
                continue
            value = node.name.partition(_BLOCKED)[0]
            if node.op_type in _LAYOUT and node.input[0] in same:
                same[node.output[0]] = same[node.input[0]]
            elif _BLOCKED in node.name and value in self._makers:
                same[node.output[0]] = self._behind_fused(node, value)
            elif (original := self._named.get(_COPY.sub("", node.name))) is not None:
                same[node.output[0]] = self._quantized(original.output[0], same)
        return same

    def _quantized(self, value: str, same: Mapping[str, str]) -> str:
        """Follow a value to its quantized form, where no node of the engine quantizes it by itself."""
        behind, steps = value, self._readers.get(value, ())
        for operators in (_CLAMPS, ("QuantizeLinear",)):
            following = next((step for step in steps if step.op_type in operators and step.output[0] not in same), None)
            if following is not None:
                behind, steps = following.output[0], self._readers.get(following.output[0], ())
        return behind if self._makers[behind].op_type == "QuantizeLinear" else value

    def _behind_fused(self, node: "onnx.NodeProto", value: str) -> str:
        """Follow a value past the sum and the activation that a blocked convolution took in under its own name."""
        wanted: list[tuple[str, ...]] = [("Add", "Sum")] if len(node.input) > _SUM and node.input[_SUM] else []
        if activation := attributes(node).get("activation", b""):
            wanted.append((activation.decode(),))
        for operators in wanted:
            if self._makers[value].op_type not in operators:
                following = (step.output[0] for step in self._readers.get(value, ()) if step.op_type in operators)
                value = next(following, value)
        return value


def _key(node: "onnx.NodeProto") -> str:
    return next(iter(node.output), node.name)


def read_trace(path: Path) -> list[Event]:
    """Read the events of a trace.

    Raises:
        ModelError: ONNX Runtime did not write a whole one.
    """
    try:
        events: list[Event] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"ONNX Runtime wrote no profile that can be read: {error}", "profile again") from error
    return events


def profiled(events: Sequence[Event], executed: Path, graph: Path | None, *, on_cuda: bool) -> Profiled:
    """Assign the operators of a trace to their modules; ``executed`` is the graph that the session ran.

    Raises:
        MissingCapability: the session ran on CUDA, and the trace has launches only.
    """
    origins = Provenance(graph).of_executed(executed) if graph else {}
    tally, described = Tally(), dict[str, Event]()
    runs = sorted((event for event in events if event["name"] == "model_run"), key=lambda event: int(event["ts"]))
    kinds = [event for event in events if event.get("cat") == "Kernel" or str(event["name"]).endswith(_KERNEL)]
    for run in runs[WARM_CALLS:]:
        tally.begin()
        within = [event for event in kinds if _within(event, run)]
        for name, seconds, event in _device_times(within) if on_cuda else _self_times(within):
            tally.add(name, seconds)
            described.setdefault(name, event)
    medians = tally.medians().items()
    operators = tuple(_operator(name, described[name], origins, *figures) for name, figures in medians if name)
    if on_cuda and not operators:
        message = "this onnxruntime is built without CUDA profiling"
        remedy = "profile eager or TensorRT, or use a build with onnxruntime_ENABLE_CUDA_PROFILING"
        raise MissingCapability(f"{message}: it tells when nodes are launched, not how long they run", remedy)
    whole = statistics.median(int(run["dur"]) / 1e6 for run in runs[WARM_CALLS:])
    coarse = "it counts whole microseconds, which is coarse for operators this short"
    notes = (coarse,) if whole < _COARSE_SECONDS else ()
    return Profiled(operators=operators, source="ONNX Runtime's profiler", call_seconds=whole, notes=notes)


def _within(event: Event, other: Event) -> bool:
    start, end = int(event["ts"]), int(event["ts"]) + int(event["dur"])
    return int(other["ts"]) <= start and end <= int(other["ts"]) + int(other["dur"])


def _self_times(events: Sequence[Event]) -> Iterator[tuple[str, float, Event]]:
    """Yield seconds of each node without the nodes of its subgraphs."""
    ordered = sorted(events, key=lambda event: (int(event["ts"]), -int(event["dur"])))
    own = [int(event["dur"]) for event in ordered]
    stack: list[int] = []
    for place, event in enumerate(ordered):
        while stack and not _inside(event, ordered[stack[-1]]):
            stack.pop()
        if stack:
            own[stack[-1]] -= int(event["dur"])
        stack.append(place)
    for event, microseconds in zip(ordered, own, strict=True):
        yield _name(event), max(0, microseconds) / 1e6, event


def _inside(event: Event, outer: Event) -> bool:
    """Tell if a node runs in another's subgraph; only these operators have one, and neighbors may touch."""
    has_body = outer.get("args", {}).get("op_name") in ("If", "Loop", "Scan", "SequenceMap")
    return has_body and event.get("tid") == outer.get("tid") and _within(event, outer)


def _device_times(events: Sequence[Event]) -> Iterator[tuple[str, float, Event]]:
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
    sides = (given.get(f"{side}_type_shape", ()) for side in ("input", "output"))
    read, written = ({str(word) for entry in entries for word in entry} for entries in sides)
    if operator in _CONVERT or (operator == "Cast" and read | written <= _FLOATS):
        origin = origin.model_copy(update={"converts": True})
    precision = "" if origin.converts else "int8" if _INTEGER.search(operator) else narrowest(read, _TYPES)
    return OperatorTime(name=name, operator=operator, origin=origin, precision=precision, seconds=seconds, calls=calls)
