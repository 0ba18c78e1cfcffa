"""Cut a graph down to the nodes that show a fault.

Any set of nodes is a graph: what it reads and does not compute becomes an input, fed with the value that the whole
graph computed there. So nodes are taken away as long as the rest shows the fault (delta debugging: Zeller and
Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE Trans. Software Engineering 28, 2002).

Where a graph as it is written is wrong, and not what an engine makes of it, its values are compared with those of the
graph that it was made from: the fault is between right values and the first wrong one that mends an output if it is set
right.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.errors import InvalidGraph, ModelError
from enginesmith.pipeline.frameworks.onnx import evaluator, model_file, reference, traversal
from enginesmith.pipeline.tensors import Array, Feeds

if TYPE_CHECKING:
    import onnx

_SAME = 1e-4
"""Share of a value's range within which two are equal."""
_SAME_NAMES = 0.8
"""Share of the values whose names both graphs have, from which a name is taken to mean the same in both."""
Compute = Callable[..., dict[str, Array]]
"""Computes a graph in memory: :func:`compute`, or :func:`compute_by_reference`."""
_LARGEST_BYTES = 1 << 30
_LARGEST_REFERENCE_BYTES, _MOST_NODES = 1 << 24, 300


def read_whole(path: Path) -> "onnx.ModelProto":
    """Read a graph with all its weights, to be cut up in memory.

    Raises:
        InvalidGraph: it is too large for that, or cannot be read.
    """
    import onnx

    model = model_file.read(path)
    if model_file.count_weight_bytes(model) > _LARGEST_BYTES:
        raise InvalidGraph(f"{path.name} is too large to be cut up")
    onnx.load_external_data_for_model(model, str(path.parent))
    return model


def compute(model: "onnx.ModelProto", feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Array]:
    """Compute outputs of a graph in memory as it is written, without any optimization; those that are no arrays, not.

    Raises:
        ModelError: ONNX Runtime does not take it.
    """
    names = list(outputs or [value.name for value in model.graph.output])
    values = evaluator.run_graph(model.SerializeToString(), feeds, names, threads=1)
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, np.ndarray)}


def compute_by_reference(
    model: "onnx.ModelProto", feeds: Feeds, outputs: Sequence[str] | None = None
) -> dict[str, Array]:
    """Compute as :func:`compute` does, by onnx's reference evaluator: slowly, and with no kernel of a runtime.

    Raises:
        ModelError: the graph is too large for that, or the evaluator does not take it, or may compute it wrong.
    """
    import onnx

    if model_file.count_weight_bytes(model) > _LARGEST_REFERENCE_BYTES or len(model.graph.node) > _MOST_NODES:
        raise ModelError("the graph is too large for onnx's reference evaluator")
    if doubtful := reference.find_distrusted(model):
        raise ModelError(f"onnx's reference evaluator does not compute {doubtful} right")
    names = list(outputs or [value.name for value in model.graph.output])
    failures = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, onnx.checker.ValidationError)
    try:
        given = {key: feeds[key] for key in (value.name for value in model.graph.input)}
        values = reference.open_reference(model).run(names, given)
    except failures as error:
        raise ModelError(f"onnx's reference evaluator does not take the graph: {error}") from error
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, np.ndarray)}


def choose_compute(model: "onnx.ModelProto", feeds: Feeds, tolerance: float) -> Compute:
    """Choose what computes a graph right on these feeds: ONNX Runtime, unless onnx's evaluator answers otherwise.

    Raises:
        ModelError: ONNX Runtime does not take it.
    """
    given = compute(model, feeds)
    try:
        wanted = compute_by_reference(model, feeds)
    except ModelError:
        return compute
    return compute if all(are_equal(given[name], wanted[name], tolerance) for name in wanted) else compute_by_reference


def record_values(model: "onnx.ModelProto", feeds: Feeds, compute: Compute = compute) -> dict[str, Array]:
    """Compute every value of the main graph.

    Raises:
        ModelError: as in :func:`compute`.
    """
    import onnx

    shown, known = onnx.ModelProto(), {value.name for value in model.graph.output}
    shown.CopyFrom(model)
    for node in model.graph.node:
        for name in node.output:
            if name and name not in known:
                shown.graph.output.append(onnx.ValueInfoProto(name=name))
                known.add(name)
    return {**feeds, **compute(shown, feeds)}


def take_nodes(
    model: "onnx.ModelProto", positions: Sequence[int], values: Feeds
) -> tuple["onnx.ModelProto", dict[str, Array]]:
    """Make a graph of some nodes, and the feeds for it.

    Its outputs are the values that the other nodes read, or the whole graph gives.

    Raises:
        ModelError: a value that it reads is not known.
    """
    import onnx
    from onnx import helper

    nodes, others = [model.graph.node[at] for at in positions], set(range(len(model.graph.node))) - set(positions)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    results = {name for node in nodes for name in node.output if name}
    read = list(dict.fromkeys(name for node in nodes for name in traversal.list_reads(node) if name not in results))
    if missing := [name for name in read if name not in weights and name not in values]:
        raise ModelError(f"the value of {missing[0]} is not known")
    wanted = {name for at in others for name in traversal.list_reads(model.graph.node[at])}
    wanted |= {value.name for value in model.graph.output}
    outputs = [name for node in nodes for name in node.output if name in wanted]
    fed = [name for name in read if name not in weights]
    inputs = [_describe(name, values[name], values[name].shape) for name in fed]
    shown = [_describe(name, values[name], [None] * values[name].ndim) for name in outputs if name in values]
    graph = helper.make_graph(nodes, "part", inputs, shown, [weights[name] for name in read if name in weights])
    part = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    part.functions.extend(model.functions)
    assert isinstance(part, onnx.ModelProto)
    return part, {name: values[name] for name in fed}


def _describe(name: str, value: Array, shape: Sequence[int | None]) -> "onnx.ValueInfoProto":
    from onnx import helper

    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), shape)


def shrink(count: int, fails: Callable[[Sequence[int]], bool], seconds: float) -> list[int]:
    """Look for a smallest part of so many nodes that still fails, as the whole does; stop after so many seconds."""
    nodes, parts, end = list(range(count)), 2, time.monotonic() + seconds
    while len(nodes) >= 2 and time.monotonic() < end:
        size = math.ceil(len(nodes) / parts)
        chunks = [nodes[at : at + size] for at in range(0, len(nodes), size)]
        rests = [[node for node in nodes if node not in chunk] for chunk in map(set, chunks)] if parts > 2 else []
        smaller = next((trial for trial in (*chunks, *rests) if time.monotonic() < end and fails(trial)), None)
        if smaller is not None:
            parts = 2 if len(smaller) <= size else max(parts - 1, 2)
            nodes = smaller
        elif parts >= len(nodes):
            break
        else:
            parts = min(len(nodes), 2 * parts)
    return nodes


# Find the nodes that make a graph wrong by the values of another one

_MOVERS = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast"})
_HELPERS = _MOVERS | {"Shape", "Size", "Constant", "ConstantOfShape"}
"""Operators that compute no number of a result: passes add and remove them."""
_MOST_AXES = 4
_MOST_TRIALS = 60


@dataclass(frozen=True)
class WrongPart:
    """The part of a graph that makes it wrong: it takes right values and gives a wrong one."""

    nodes: tuple[int, ...]
    """In the order of the graph."""
    value: str
    """The value that is wrong; what is right is known."""
    suspects: tuple[int, ...]
    """The nodes, the likeliest cause first."""


def find_wrong_part(
    model: "onnx.ModelProto",
    values: Feeds,
    truth: Feeds,
    wanted: Feeds,
    *,
    tolerance: float = _SAME,
    seconds: float = 60.0,
) -> WrongPart | None:
    """Find the nodes that make outputs of a graph wrong; None where no output is.

    A value is right if it equals the truth's of its name; where the graphs have other names, or the truth has none of
    that name, if the truth has any that is equal, also with its axes in another order. Of the values that are wrong by
    their names, the first is taken that mends an output if it is set right: a pass may also scale values, and scale
    them back later.

    ``wanted`` are the right outputs, ``tolerance`` is the share of its range by which a value may differ from the one
    of its name, and ``seconds`` are for setting values right.
    """
    outputs = [name for name, value in wanted.items() if not are_equal(values[name], value, tolerance)]
    if not outputs:
        return None
    truth = {**truth, **{name: wanted[name] for name in outputs}}
    right, wrong = _sort_values(model, values, truth, tolerance)
    right -= set(outputs)
    makers = {name: at for at, node in enumerate(model.graph.node) for name in node.output if name}
    behind = _walk_back(model, makers, right, outputs)
    candidates = sorted({*outputs} | (wrong & behind), key=lambda name: makers.get(name, -1))
    candidates = [name for name in candidates if name in makers]
    if not candidates:
        return None
    value, end = candidates[0], time.monotonic() + seconds
    for name in candidates[:_MOST_TRIALS]:
        if time.monotonic() > end:
            break
        if name in outputs or _mends(model, name, values, truth, outputs, tolerance):
            value = name
            break
    others = [name for name in candidates[: candidates.index(value)] if name not in outputs]
    nodes = sorted({makers[name] for name in _walk_back(model, makers, right, [value])})
    cleared = {makers[name] for name in _walk_back(model, makers, right, others)}
    return WrongPart(tuple(nodes), value, tuple(_order_suspects(model, nodes, cleared, values, values[value].size)))


def _sort_values(model: "onnx.ModelProto", values: Feeds, truth: Feeds, tolerance: float) -> tuple[set[str], set[str]]:
    """List the values that are right, and those that are wrong by their names; of the others, neither is known."""
    shared = {name for name, value in values.items() if name in truth and truth[name].shape == value.shape}
    equal = {name for name in shared if are_equal(values[name], truth[name], tolerance)}
    trusted = shared if len(shared) >= _SAME_NAMES * min(len(values), len(truth)) else equal
    moved = {name for node in model.graph.node if node.op_type in _MOVERS for name in node.output}
    right = equal | {tensor.name for tensor in model.graph.initializer} | {value.name for value in model.graph.input}
    for name in values.keys() - trusted - right:
        value = values[name]
        others = [other for other in truth.values() if other.size == value.size]
        if any(are_equal(value, other) for other in others) or (
            name not in moved and any(_is_transposed(value, other) for other in others)
        ):
            right.add(name)
    return right, trusted - equal


def _is_transposed(value: Array, other: Array) -> bool:
    """Tell whether two values have the same numbers, with axes in another order or of size 1."""
    value, other = value.squeeze(), other.squeeze()
    axes = range(other.ndim)
    if value.dtype.kind != "f" or other.ndim > _MOST_AXES or sorted(value.shape) != sorted(other.shape):
        return False
    return any(are_equal(value, other.transpose(order)) for order in itertools.permutations(axes))


def _walk_back(model: "onnx.ModelProto", makers: Mapping[str, int], right: set[str], names: Iterable[str]) -> set[str]:
    """List values and those that they are computed of, up to the right ones."""
    value_names, waiting = set[str](), [name for name in names if name in makers]
    while waiting:
        if (name := waiting.pop()) not in value_names:
            value_names.add(name)
            reads = traversal.list_reads(model.graph.node[makers[name]])
            waiting += [each for each in reads if each in makers and each not in right]
    return value_names


def _mends(
    model: "onnx.ModelProto", name: str, values: Feeds, truth: Feeds, outputs: Sequence[str], tolerance: float
) -> bool:
    """Tell whether some wrong output becomes right if a value is set right."""
    readers = [at for at, node in enumerate(model.graph.node) if name in traversal.list_reads(node)]
    try:
        part, feeds = take_nodes(model, slice_between(model, readers, outputs), {**values, name: truth[name]})
        given = compute(part, feeds)
    except ModelError:
        return False
    return any(are_equal(given[output], truth[output], tolerance) for output in outputs if output in given)


def _order_suspects(
    model: "onnx.ModelProto", nodes: Sequence[int], cleared: set[int], values: Feeds, size: int
) -> list[int]:
    """Order nodes: last those whose values do not matter, and those that compute no number of a result of this size."""

    def rank(at: int) -> tuple[bool, bool, bool, int]:
        node = model.graph.node[at]
        results = [values[name] for name in node.output if name in values]
        numbers = any(value.dtype.kind == "f" and value.size >= min(2, size) for value in results)
        return at in cleared, node.op_type in _HELPERS, not numbers, at

    return sorted(nodes, key=rank)


def are_equal(value: Array, other: Array, tolerance: float = _SAME) -> bool:
    """Tell whether two values are the same but for rounding: within a share of the range."""
    if value.shape != other.shape or value.dtype.kind != other.dtype.kind:
        return False
    if value.dtype.kind != "f":
        return bool(np.array_equal(value, other))
    if not np.array_equal(np.isfinite(value), np.isfinite(other)):
        return False
    apart, span = measure_distance(other, value)
    return float(apart.max(initial=0.0)) <= tolerance * span


def measure_distance(expected: Array, found: Array) -> tuple[Array, float]:
    """Measure the distance of each element, and the range of the expected ones; infinite for another shape.

    Elements that are expected to be NaN or infinite are not compared, as they are not judged.
    """
    right = expected.astype(np.float64)
    finite = np.isfinite(right)
    span = float(np.ptp(right[finite])) if finite.any() else 0.0
    span = span or float(np.abs(right[finite]).max(initial=0)) or 1.0
    if expected.shape != found.shape:
        return np.full(1, np.inf), span
    given = found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where(np.isfinite(given), np.abs(given - right), np.inf)
    return np.where(finite, apart, 0.0), span


def slice_between(model: "onnx.ModelProto", first: Iterable[int], outputs: Iterable[str]) -> list[int]:
    """List the nodes on the ways from some nodes to some outputs."""
    reached, names = set(first), {name for at in first for name in model.graph.node[at].output}
    for at, node in enumerate(model.graph.node):
        if at not in reached and not names.isdisjoint(traversal.list_reads(node)):
            reached.add(at)
            names.update(node.output)
    needed, selection = set(outputs), set[int]()
    for at in range(len(model.graph.node) - 1, -1, -1):
        node = model.graph.node[at]
        if at in reached and not needed.isdisjoint(node.output):
            selection.add(at)
            needed.update(traversal.list_reads(node))
    return sorted(selection)
