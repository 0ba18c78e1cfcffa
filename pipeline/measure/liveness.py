"""When values live in memory, as ONNX Runtime plans it before it runs a graph.

It fixes an order of execution and decides for every value whether it gets memory of its own, lies in an input's, or
takes over the memory of a value that is dead and of the same shape. What is taken over is not given back in between.
After ``GraphViewer`` (graph_viewer.cc) and ``PlannerImpl`` (allocation_planner.cc) of ONNX Runtime; the plan is the
same with the memory arena and without.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from enginesmith.pipeline.precision.audit.values import Value

_ALIASES = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Their result is their first input (``KernelDefBuilder::Alias``)."""
_IN_PLACE = {
    **dict.fromkeys(("Celu", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu", "Selu", "Shrink"), 0),
    **dict.fromkeys(("Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh", "ThresholdedRelu", "Trilu", "Cast"), 0),
    **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND", "ParametricSoftplus", "ScaledTanh"), 0),
}
"""The input that may be overwritten with the first result, if nothing else reads it (``MayInplace``).

Arithmetic (Add, Mul, Neg, Sqrt …) and normalisation are not among them: seen by tracing the allocations of each.
"""
_BLOCKED = "com.microsoft.nchwc"
_BLOCKED_SUM = 3
"""The blocked convolution's input that its result is added to."""


@dataclass(frozen=True)
class Step:
    """A node: what it reads, what the graphs inside of it read, and what it makes."""

    operator: str
    inputs: tuple[str, ...]
    """By position, with an empty name where one is left out."""
    outputs: tuple[str, ...]
    captured: tuple[str, ...] = ()
    domain: str = ""
    place: int = 0
    """In the file."""

    @property
    def reads(self) -> tuple[str, ...]:
        """All that has to be there before it runs."""
        return (*filter(None, self.inputs), *self.captured)


@dataclass(frozen=True)
class Lifetime:
    """Memory that is taken at one step and given back after another; ``value`` is the first that lies there."""

    value: str
    first: int
    last: int


def execution_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps as they are run one after another.

    A depth-first walk from the nodes that nobody reads back to their inputs, the one that stands last in the file
    first.
    """
    makers = {value: index for index, step in enumerate(steps) for value in step.outputs}
    sources = [sorted({makers[value] for value in step.reads if value in makers}) for step in steps]
    read = {index for found in sources for index in found}
    waiting = [(index, False) for index in range(len(steps)) if index not in read]
    seen: set[int] = set()
    order = []
    while waiting:
        index, complete = waiting.pop()
        if complete:
            order.append(steps[index])
        elif index not in seen:
            seen.add(index)
            waiting.append((index, True))
            waiting.extend((source, False) for source in sources[index] if source not in seen)
    return tuple(order)


def lifetimes(
    steps: Sequence[Step], given: Iterable[str], results: Sequence[str], values: Callable[[str], Value]
) -> tuple[Lifetime, ...]:
    """Memory that running ``steps`` in this order takes.

    ``given`` is there before (inputs, weights, values of outer graphs) and takes none. ``results`` live from the first
    step on: a session that is called again writes them where it did before.
    """
    homes = _homes(steps, set(given), results, values)
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for at, step in enumerate(steps):
        for value in step.outputs:
            first.setdefault(homes[value], at)
        for value in step.reads:
            last[homes[value]] = at
    end = len(steps) - 1
    found = []
    for home, start in first.items():
        if home in results:
            found.append(Lifetime(home, 0, end))
        elif homes[home] == home and home not in given:  # what nobody reads is kept until the end of the call
            found.append(Lifetime(home, start, last.get(home, end)))
    return tuple(found)


def _homes(
    steps: Sequence[Step], given: set[str], results: Sequence[str], values: Callable[[str], Value]
) -> dict[str, str]:
    """For each value the one whose memory it lies in."""
    uses = _uses(steps, given, results)
    homes = {value: value for value in uses}
    free: list[str] = []
    for step in steps:
        for position, value in enumerate(step.outputs):
            home = None
            if value not in results:
                home = _overwritten(step, position, homes, uses, values) or _taken_over(value, free, values)
            if home is not None:
                homes[value] = home
                uses[home] += uses[value]
        for value in (*step.reads, *step.outputs):
            home = homes[value]
            uses[home] -= 1
            if uses[home] == 0:
                free.insert(0, home)
    return homes


def _uses(steps: Sequence[Step], given: Iterable[str], results: Iterable[str]) -> Counter[str]:
    """How often each value is read; one for who makes it, and one for the caller, so that his is never taken over."""
    found = Counter(given)
    found.update(value for step in steps for value in (*step.reads, *step.outputs))
    found.update(results)
    return found


def _overwritten(
    step: Step, position: int, homes: Mapping[str, str], uses: Mapping[str, int], values: Callable[[str], Value]
) -> str | None:
    """The home of the input that an output lies in."""
    if position:
        return None
    if step.operator in _ALIASES:
        return homes[step.inputs[0]]
    slot = _BLOCKED_SUM if (step.domain, step.operator) == (_BLOCKED, "Conv") else _IN_PLACE.get(step.operator)
    if slot is None or slot >= len(step.inputs) or not step.inputs[slot]:
        return None
    home = homes[step.inputs[slot]]
    return home if uses[home] == 1 and _alike(values(step.inputs[slot]), values(step.outputs[0])) else None


def _taken_over(value: str, free: list[str], values: Callable[[str], Value]) -> str | None:
    """The dead value of the same shape that died last; it is taken off the list."""
    if not values(value).shape:
        return None
    for home in free:
        if _alike(values(home), values(value)):
            free.remove(home)
            return home
    return None


def _alike(one: Value, other: Value) -> bool:
    """Whether two values have the same known shape and elements of the same size; texts never share memory."""
    size = item_bits(one.dtype)
    return one.shape is not None and one.shape == other.shape and size is not None and size == item_bits(other.dtype)


def item_bits(dtype: str) -> int | None:
    """Bits of one element in memory; None for texts, and for what is not known."""
    if dtype in ("int4", "uint4", "float4e2m1"):
        return 4
    if dtype.startswith("float8") or dtype == "bool":
        return 8
    digits = "".join(filter(str.isdigit, dtype))
    return int(digits) if digits else None


def value_bytes(value: Value) -> int | None:
    """Bytes of a tensor in memory; None where its shape is not known, or its elements are texts."""
    bits = item_bits(value.dtype)
    return None if value.shape is None or bits is None else -(-prod(value.shape) * bits // 8)


def levels(spans: Iterable[tuple[int, int, int]], steps: int) -> list[int]:
    """Bytes that live at each step, of spans of (first step, last step, bytes)."""
    change: defaultdict[int, int] = defaultdict(int)
    for first, last, size in spans:
        change[first] += size
        change[last + 1] -= size
    found, level = [], 0
    for at in range(steps):
        level += change[at]
        found.append(level)
    return found
