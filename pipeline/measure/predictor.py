"""What a graph will take in ONNX Runtime on the CPU, told from the graph alone; nothing is loaded or run.

The figures are those that ``memory.py`` measures of an engine that ``build`` has written, with the memory arena off:
the graph is the one that is executed, and its weights are mapped from a file. Of a graph that is still to be optimised
they are an estimate, as fusions and layouts are not known yet.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.measure.kernels import workspace
from enginesmith.pipeline.measure.liveness import Step, execution_order, levels, lifetimes, value_bytes
from enginesmith.pipeline.measure.weights import Stored, bodies, initialisers, loading_bytes, weights_of
from enginesmith.pipeline.precision.audit.values import Value, View, view
from enginesmith.pipeline.tensors import total_bytes

if TYPE_CHECKING:
    import onnx

_SESSION_BYTES, _NODE_BYTES, _ATTRIBUTE_BYTES, _WEIGHT_BYTES = 310_000, 3_000, 930, 2_500
"""What a session takes for itself, and for each node, attribute and initialiser: kernels, names, plans.

Slopes of what sessions of ONNX Runtime 1.31.1 keep, on chains of 10 to 400 nodes: elementwise ones, with an attribute,
with a weight each, poolings, convolutions with and without bias, products.
"""
_HEAP_BYTES = 128 << 10
"""Blocks smaller than this lie in the heap, of whose freed end as much is kept (mallopt(3): M_MMAP_THRESHOLD and
M_TRIM_THRESHOLD, as ``resident.py`` sets them)."""
_MOVES_NOTHING = frozenset(("Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze"))


class Prediction(BaseModel):
    """Bytes that a session takes at one set of sizes. Inputs are the caller's, and in none of the peaks."""

    model_config = ConfigDict(frozen=True)

    weights_bytes: int
    """Initialisers as they are stored, each once."""
    kept_bytes: int
    """What a loaded session keeps of them: packed copies, where a kernel has its own layout, instead of what it packed;
    of a mapped table, the part that lookups spread over it bring in."""
    session_bytes: int
    """The session's own objects, and what the heap keeps free."""
    activation_bytes: int
    """The most that lives at one time besides: intermediates, outputs, work space of kernels."""
    workspace_bytes: int
    """Work space of the kernel that runs at that time; part of the activations."""
    io_bytes: int
    """Inputs and outputs."""
    input_bytes: int
    load_bytes: int
    """The most while it is loaded: a weight and its packed copy are there together."""
    peak_bytes: int
    """The most that loading and running take at any time."""
    traffic_bytes: int
    """Least bytes that one inference moves: each weight is read once, each intermediate and output written once, and
    read by each of its readers; values that lie in the memory of another are not moved."""
    peak_at: str
    """The node that runs when the most lives."""
    unknown: tuple[str, ...] = ()
    """What could not be told, and why. If there is any, the activations, the peak and the traffic are lower bounds."""

    @property
    def is_lower_bound(self) -> bool:
        """Whether something is missing in the figures."""
        return bool(self.unknown)


def predict(path: Path, sizes: Mapping[str, int], threads: int = 1, *, mapped: bool = False) -> Prediction:
    """What the graph in a file takes at these sizes of its dynamic dimensions, on so many threads.

    With ``mapped`` its weights count as in the engine that is to be built of it, whose weights lie in another file;
    otherwise as they lie in this one.

    Raises:
        InvalidGraph: the file cannot be read.
        SignatureError: a dynamic dimension of an input has no size.
    """
    model = _structure(path)
    given = onnx_file.signature(path).inputs
    input_bytes = total_bytes(given, sizes)
    seen = view(path, sizes)
    sized = _Sizes(seen, dict(initialisers(model.graph, mapped)))
    kept = weights_of(model, sized.stored, sized.value)
    main = _Graph(model.graph, frozenset(spec.name for spec in given), sized, threads)
    kept_bytes = sum(one.kept for one in kept)
    load = loading_bytes(kept, sum(one.bytes for one in sized.stored.values() if not one.pages))
    running = main.peak()
    session = _session_bytes(model, len(sized.stored)) + running.heap
    return Prediction(
        weights_bytes=sum(one.stored for one in kept),
        kept_bytes=kept_bytes,
        session_bytes=session,
        activation_bytes=running.bytes,
        workspace_bytes=running.workspace,
        io_bytes=input_bytes + sum(sized.bytes(value.name) for value in model.graph.output),
        input_bytes=input_bytes,
        load_bytes=session + load,
        peak_bytes=session + max(load, kept_bytes + running.bytes),
        traffic_bytes=main.traffic() + sum(one.stored for one in kept if one.read_whole),
        peak_at=running.at,
        unknown=sized.unknown(),
    )


def _structure(path: Path) -> "onnx.ModelProto":
    import onnx

    model = onnx_file.skeleton(path)
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _session_bytes(model: "onnx.ModelProto", weights: int) -> int:
    nodes = list(onnx_file.nodes(model))
    attributes = sum(len(node.attribute) for node in nodes)
    return _SESSION_BYTES + _NODE_BYTES * len(nodes) + _ATTRIBUTE_BYTES * attributes + _WEIGHT_BYTES * weights


class _Sizes:
    """Bytes of values and weights by name; remembers what it could not tell."""

    def __init__(self, seen: View, stored: Mapping[str, Stored]) -> None:
        self.value: Callable[[str], Value] = seen.value
        self.stored = stored
        self._missing: dict[str, None] = {}

    def bytes(self, name: str) -> int:
        """0 where it is not known."""
        found = value_bytes(self.value(name))
        if found is None:
            self._missing[name] = None
        return found or 0

    def unknown(self) -> tuple[str, ...]:
        """One sentence, where something is missing."""
        if not self._missing:
            return ()
        names = list(self._missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (f"no size could be inferred of {', '.join(names[:3])}{more}, which count as nothing",)


@dataclass(frozen=True)
class _Peak:
    """When the most lives: all of it, a kernel's share, and what the heap keeps beyond; the node that runs."""

    bytes: int = 0
    workspace: int = 0
    heap: int = 0
    at: str = ""


class _Graph:
    """A graph, or the body of a node: its steps in the order of execution."""

    def __init__(self, graph: "onnx.GraphProto", given: frozenset[str], sized: _Sizes, threads: int) -> None:
        self._graph, self._sized, self._threads = graph, sized, threads
        self._given = given | {value.name for value in graph.input} | set(sized.stored)
        self._nodes: list[onnx.NodeProto] = [node for node in graph.node if node.op_type != "Constant"]
        steps = [_step(index, node) for index, node in enumerate(self._nodes)]
        self._steps = execution_order(steps)
        self._made = {value for step in steps for value in step.outputs}

    def _node(self, step: Step) -> "onnx.NodeProto":
        return self._nodes[step.place]

    def peak(self) -> _Peak:
        """The most that lives at one time, without what is there before."""
        if not self._steps:
            return _Peak()
        outer = {value for step in self._steps for value in step.reads} - self._made
        results = [value.name for value in self._graph.output if value.name in self._made]
        found = lifetimes(self._steps, self._given | outer, results, self._sized.value)
        spans = [(one.first, one.last, self._sized.bytes(one.value)) for one in found]
        scratch = [self._scratch(self._node(step)) for step in self._steps]
        live = levels(spans, len(self._steps))
        at = max(range(len(live)), key=lambda index: live[index] + scratch[index])
        node = self._node(self._steps[at])
        heap = min(_HEAP_BYTES, sum(size for _, _, size in spans if size < _HEAP_BYTES))
        return _Peak(live[at] + scratch[at], scratch[at], heap, node.name or f"{node.op_type} {node.output[0]}")

    def _scratch(self, node: "onnx.NodeProto") -> int:
        """A kernel's work space; of a branch the larger one's peak, of a loop that of one round and what it carries."""
        inner = bodies(node)
        if not inner:
            return workspace(node, self._sized.value, self._threads)
        carried = sum(self._sized.bytes(value.name) for body in inner for value in body.input)
        return carried + max(graph.peak().bytes for graph in self._inside(node))

    def _inside(self, node: "onnx.NodeProto") -> "list[_Graph]":
        given = self._given | self._made
        return [_Graph(body, frozenset(given), self._sized, self._threads) for body in bodies(node)]

    def traffic(self) -> int:
        """Bytes of all values that are written, and of those that are read, weights left out."""
        return sum(self._moved(self._node(step), step) for step in self._steps)

    def _moved(self, node: "onnx.NodeProto", step: Step) -> int:
        inner = self._inside(node)
        if inner:  # of branches the cheaper one, of a loop one round: both are the least
            return min(graph.traffic() for graph in inner)
        if step.operator in _MOVES_NOTHING:
            return 0
        read = {value for value in step.inputs if value and value not in self._sized.stored}
        rows = sum(self._sized.bytes(value) for value in step.outputs) if _looks_up(step, self._sized) else 0
        return rows + sum(self._sized.bytes(value) for value in (*read, *step.outputs))


def _step(place: int, node: "onnx.NodeProto") -> Step:
    return Step(
        operator=node.op_type,
        domain="" if node.domain == "ai.onnx" else node.domain,
        inputs=tuple(node.input),
        outputs=tuple(value for value in node.output if value),
        captured=tuple(sorted({value for body in bodies(node) for value in _free(body)})),
        place=place,
    )


def _looks_up(step: Step, sized: _Sizes) -> bool:
    """Whether it reads rows of a weight, as many bytes as it writes."""
    return step.operator == "Gather" and step.inputs[0] in sized.stored


def _free(graph: "onnx.GraphProto") -> set[str]:
    """Values that a body takes from the graphs around it."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own |= {value for node in graph.node for value in node.output}
    read = {value for node in graph.node for value in node.input if value}
    read |= {value for node in graph.node for body in bodies(node) for value in _free(body)}
    return (read | {value.name for value in graph.output}) - own
