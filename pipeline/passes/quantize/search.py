"""Search for groups that stay in floating point: few measured trials, each step a function of those before.

1. Everything quantised, with the ranges of one method after the other, until one passes.
2. Where none does: with the best method, the most sensitive groups stay in floating point; their number is doubled
   until it passes, then bisected.
3. Of those, the groups with the most work are quantised after all, if that passes too.
4. Where speed was measured: whole kinds of operators that may lose by being quantised stay in floating point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.passes.quantize.layers import QuantizableOp

if TYPE_CHECKING:
    import onnx_ir as ir


Phase = Literal["everything", "sensitive", "give back", "speed"]

_GAIN = 1.02
"""An assignment with less in few bits is preferred where the whole model is faster by this factor for it."""
_MAIN_SHARE = 0.6
"""A kind with more of the work than this is what quantisation is for."""
_WORTHWHILE_SHARE = 0.01
_MOST_KINDS = 3


class GroupFact(BaseModel):
    """What the search knows of a group."""

    model_config = ConfigDict(frozen=True)

    name: str
    module: str
    kind: str
    """Operator; convolutions in groups are a kind of their own."""
    macs: int
    sqnr_db: float | None
    """Of its output with quantised weights and activations, its inputs being exact; None where it has no such form."""
    reason: str = ""
    """Why it stays in floating point anyway."""


class Judgement(BaseModel):
    """How good the answers of a graph are."""

    model_config = ConfigDict(frozen=True)

    passed: bool
    error: float
    """How far off it is, smaller is better: the drop of the metric where there is one, else −SQNR in dB."""
    drop: float | None = None
    sqnr_db: float | None = None
    reason: str = ""
    """Why it did not pass."""


class Trial(Judgement):
    """One assignment that was tried, and what came of it."""

    phase: Phase
    method: str
    kept: tuple[str, ...]
    """Groups in floating point, sorted."""
    why: str
    speedup: float | None = None
    """Against the float graph in the same engine; None where the engine cannot run here."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """What to try next."""

    phase: Phase
    method: str
    kept: frozenset[str]
    why: str


def propose(
    trials: Sequence[Trial], groups: Sequence[GroupFact], methods: Sequence[str], fixed: frozenset[str]
) -> Candidate | None:
    """The next candidate, None where the search is over; ``fixed`` are groups that stay in floating point anyway."""
    groups = [group for group in groups if not group.reason]
    if first := _everything(trials, methods, fixed):
        return first
    if best(trials, groups) is None:
        return _grow(trials, groups, fixed)
    tried = {(trial.method, frozenset(trial.kept)) for trial in trials}
    later = (_bisect(trials, groups, fixed), _give_back(trials, groups, fixed), _speed(trials, groups))
    return next((one for one in later if one and (one.method, one.kept) not in tried), None)


def best(trials: Sequence[Trial], groups: Sequence[GroupFact]) -> Trial | None:
    """Return the fastest trial that passed; of those that are equally fast, the one with the most work quantised."""
    work = {group.name: group.macs for group in groups}
    passed = [trial for trial in trials if trial.passed]
    passed.sort(key=lambda trial: (sum(work.get(name, 0) for name in trial.kept), trial.error))
    found: Trial | None = None
    for trial in passed:
        if found is None or (trial.speedup or 0.0) > _GAIN * (found.speedup or 0.0):
            found = trial
    return found


def _everything(trials: Sequence[Trial], methods: Sequence[str], fixed: frozenset[str]) -> Candidate | None:
    first = [trial for trial in trials if trial.phase == "everything"]
    if any(trial.passed for trial in first) or len(first) == len(methods):
        return None
    method = methods[len(first)]
    return Candidate("everything", method, fixed, f"everything quantised, ranges by {method}")


def _method(trials: Sequence[Trial]) -> str:
    return min((trial for trial in trials if trial.phase == "everything"), key=lambda trial: trial.error).method


def _ranked(groups: Sequence[GroupFact], fixed: frozenset[str]) -> list[str]:
    """Rank groups by the error that they bring in, the worst first."""
    free = [group for group in groups if group.name not in fixed]
    free.sort(key=lambda group: (group.sqnr_db if group.sqnr_db is not None else -1e9, group.macs))
    return [group.name for group in free]


def _counts(trials: Sequence[Trial], fixed: frozenset[str]) -> tuple[int, int | None]:
    """Count the most sensitive groups: the most kept without passing, and the fewest kept with passing."""
    own = [trial for trial in trials if trial.phase == "sensitive"]
    failed = [len(set(trial.kept) - fixed) for trial in own if not trial.passed]
    passed = [len(set(trial.kept) - fixed) for trial in own if trial.passed]
    return max(failed, default=0), min(passed, default=None)


def _sensitive(trials: Sequence[Trial], groups: Sequence[GroupFact], fixed: frozenset[str], count: int) -> Candidate:
    kept = fixed | set(_ranked(groups, fixed)[:count])
    return Candidate(
        "sensitive",
        _method(trials),
        kept,
        f"the {count} most sensitive groups in floating point"
        if count > 1
        else "the most sensitive group in floating point",
    )


def _grow(trials: Sequence[Trial], groups: Sequence[GroupFact], fixed: frozenset[str]) -> Candidate | None:
    most = len(_ranked(groups, fixed))
    failed = _counts(trials, fixed)[0]
    count = min(most, 2 * failed or 1)
    return _sensitive(trials, groups, fixed, count) if failed < most else None


def _bisect(trials: Sequence[Trial], groups: Sequence[GroupFact], fixed: frozenset[str]) -> Candidate | None:
    low, high = _counts(trials, fixed)
    if high is None or high - low <= 1:
        return None
    return _sensitive(trials, groups, fixed, (low + high) // 2)


def _give_back(trials: Sequence[Trial], groups: Sequence[GroupFact], fixed: frozenset[str]) -> Candidate | None:
    """Propose to quantise more: first the half of the kept groups with the most work, then the one with the most."""
    found = best(trials, groups)
    before = [trial for trial in trials if trial.phase == "give back"]
    sensitive = [trial for trial in trials if trial.phase == "sensitive" and trial.passed]
    if found is None or not sensitive or len(before) > 1 or any(trial.passed for trial in before):
        return None
    smallest = min(sensitive, key=lambda trial: len(trial.kept))
    total = sum(group.macs for group in groups)
    kept = [group for group in groups if group.name in smallest.kept and group.name not in fixed]
    kept.sort(key=lambda group: (-group.macs, group.name))
    back = kept[: len(kept) // 2] if not before else kept[:1]
    if len(kept) < 2 or sum(group.macs for group in back) < _WORTHWHILE_SHARE * total:
        return None
    left = frozenset(smallest.kept) - {group.name for group in back}
    return Candidate("give back", smallest.method, left, f"{len(back)} of them quantised after all, for their work")


def _speed(trials: Sequence[Trial], groups: Sequence[GroupFact]) -> Candidate | None:
    found = best(trials, groups)
    if found is None or found.speedup is None:
        return None
    total = sum(group.macs for group in groups) or 1
    work: dict[str, int] = {}
    for group in groups:
        if group.name not in found.kept:
            work[group.kind] = work.get(group.kind, 0) + group.macs
    tried = {trial.why for trial in trials if trial.phase == "speed"}
    for kind in sorted(work, key=lambda one: (work[one], one)):
        why = f"{kind} in floating point, for speed"
        if len(work) > 1 and work[kind] <= _MAIN_SHARE * total and why not in tried and len(tried) < _MOST_KINDS:
            kept = frozenset(found.kept) | {group.name for group in groups if group.kind == kind}
            return Candidate("speed", found.method, kept, why)
    return None


# Float and quantised computation side by side in one graph: what each group alone does to its output.
#
# Every group is computed twice on the same exact inputs, as it is and in few bits; the graph gives the energy of the
# result and of the difference. So one pass over the data tells the error that each group brings in, and none that it
# passes on.

SIGNAL, NOISE = "signal", "noise"


def output_name(group: QuantizableOp, what: str) -> str:
    """Return the joint graph's output that holds the energy of a group's result, or of its error; float32, shape []."""
    return f"{group.name}/{what}"


def add_layerwise_error(
    floating: "ir.Model", quantised: "ir.Model", groups: Sequence[QuantizableOp]
) -> tuple[QuantizableOp, ...]:
    """Turn the float graph into the joint one, in place; says which groups are in it.

    ``quantised`` is the same graph with each group quantised at its inputs alone, so that its values of the same name
    are the same values. It is taken apart.
    """
    ours = {value.name: value for node in floating.graph for value in node.outputs}
    ours |= {value.name: value for value in floating.graph.inputs}
    theirs = {value.name: value for node in quantised.graph for value in node.outputs}
    done = []
    outputs = []
    for group in groups:
        copied = _Copy(floating.graph, ours, group.output)
        twin = theirs.get(group.output)
        if twin is None or not copied.chain(twin):
            continue
        outputs += _energies(floating.graph, group, ours[group.output], copied.last)
        done.append(group)
    floating.graph.outputs.clear()
    floating.graph.outputs.extend(outputs)
    return tuple(done)


class _Copy:
    """Copies the nodes that make one value into another graph, down to the values that both graphs have."""

    def __init__(self, graph: "ir.Graph", known: "dict[str | None, ir.Value]", output: str) -> None:
        self._graph, self._known, self._output = graph, known, output
        self._made: dict[str | None, ir.Value] = {}

    @property
    def last(self) -> "ir.Value":
        """Return the copy of the value that was asked for."""
        return self._made[self._output]

    def chain(self, value: "ir.Value") -> bool:
        """Copy what makes a value; False where that is what the graph has already: nothing is quantised."""
        return self._value(value, outermost=True) is not self._known.get(self._output) and self._narrow

    _narrow = False

    def _value(self, value: "ir.Value", *, outermost: bool = False) -> "ir.Value":
        import onnx_ir as ir

        if value.name in self._made:
            return self._made[value.name]
        if value.name in self._known and not outermost:
            return self._known[value.name]
        node = value.producer()
        if node is None:
            return self._initialiser(value)
        self._narrow = self._narrow or "uantize" in node.op_type
        inputs = [one and self._value(one) for one in node.inputs]
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=f"{self._output}/{node.name}",
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.type, new.shape = f"{self._output}/{old.name}", old.type, old.shape
            self._made[old.name] = new
        self._graph.append(copy)
        return self._made[value.name]

    def _initialiser(self, value: "ir.Value") -> "ir.Value":
        import onnx_ir as ir

        given = self._graph.initializers.get(value.name or "")
        if given is not None and given.dtype == value.dtype:  # a bias or a shape: the same in both
            return given
        copy = ir.Value(
            name=f"{self._output}/{value.name}", type=value.type, shape=value.shape, const_value=value.const_value
        )
        self._graph.register_initializer(copy)
        self._made[value.name] = copy
        return copy


def _energies(graph: "ir.Graph", group: QuantizableOp, exact: "ir.Value", rounded: "ir.Value") -> "list[ir.Value]":
    import onnx_ir as ir

    difference = ir.node("Sub", [rounded, exact])
    squares = [
        ir.node("ReduceSumSquare", [value], {"keepdims": 0}, name=output_name(group, what))
        for value, what in ((exact, SIGNAL), (difference.outputs[0], NOISE))
    ]
    graph.extend([difference, *squares])
    for node, what in zip(squares, (SIGNAL, NOISE), strict=True):
        node.outputs[0].name = output_name(group, what)
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(())
    return [node.outputs[0] for node in squares]
