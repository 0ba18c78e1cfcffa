"""Try inputs until one shows that an engine is wrong: against the model, against its own graph, against itself.

An engine in fp32 has to answer like the model on every allowed input. What a lower precision loses is known for inputs
like the samples alone: on others, the engine is compared with its own graph, which is computed without any
optimization. And a sample has to be answered as it would be alone, whatever else is in its batch.

Between other inputs, the one whose answers differ most, as yet within what is allowed, is changed along the model's
gradient of that difference, where the model has one; and by the gradient of single outputs these are driven to where no
sample brought them, as some faults show at large values alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from pydantic import BaseModel

from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.rounding import (
    Perturb,
    find_unstable,
    measure_movement,
    round_otherwise,
    take_as_right,
)
from enginesmith.pipeline.measure.prosecution.finding import Excuse
from enginesmith.pipeline.measure.prosecution.inputs import OUTLIER, Attempt, InputSpace, generate
from enginesmith.pipeline.measure.prosecution.judging import (
    EXACT,
    OWN_GRAPH,
    Answer,
    Judge,
    Verdict,
    make_judge,
    measure_sensitivity,
    take_row,
)
from enginesmith.pipeline.tensors import Array, Feeds, Signature, format_sizes

MODEL, GRAPH, ALONE = "model", "graph", "alone"
"""Sources of the right answer: the given model, the graph that it was built from, itself on one sample alone."""


class Disagreement(BaseModel, frozen=True, arbitrary_types_allowed=True):
    """An input on which an engine is wrong."""

    walk: str
    note: str
    witness: str
    reason: str
    attempts: int
    feeds: dict[str, Array]
    expected: dict[str, Array]
    found: dict[str, Array] | None
    """None where the engine does not answer."""
    right_on: dict[str, tuple[str, ...]] = {}
    """Inputs that were answered right, by family; of each, at most the first eight."""


_USUAL_WALKS = ("samples", "sizes", "padding")
_GRADIENTS = "gradients"
_MOST_RIGHT, _MOST_EXCUSES = 8, 8
_CLIMB_EVERY, _DRIVE_EVERY = 4, 6
"""Other inputs between two steps along a gradient, and between two that drive an output."""
_MOST_DRIVEN = 64
"""Attempts to drive an output in one search."""
_FIRST_STEP, _SMALLEST_STEP = 0.25, 0.05
"""Sizes of a step, as shares of an input's range."""


@dataclass(frozen=True)
class Subject:
    """An engine, and what its answers are compared with."""

    space: InputSpace
    precision: str
    engine: Answer
    model: Answer
    graph: Answer | None = None
    """The engine's own graph in its precision, where there is one."""
    float_graph: Answer | None = None
    """The graph that the own graph was made from, computed by the same runtime; it has to answer like the model."""
    definition: Answer | None = None
    """The own graph, computed by onnx's evaluator; no answer where that cannot be."""
    rows_apart: bool = True
    """False where the precision depends on the whole batch: ranges that are computed in each call."""
    loss_judged: bool = True
    """False where it is judged elsewhere what a lower precision loses: the engine is compared with its own graph."""
    differentiate: Callable[[Feeds, Feeds], dict[str, Array]] | None = None
    """Computes the model's gradient, as ``Session.differentiate`` does."""
    perturb: Perturb | None = None
    """Answers as the model with changed operations, as ``Session.perturb`` does."""

    def judge(self, precision: str) -> Judge:
        """Make a judge by a precision's thresholds."""
        return make_judge(self.space.signature, precision, self._scales)

    @cached_property
    def _scales(self) -> dict[str, float]:
        return samples.find_spans(self.model(feeds) for feeds in self.space.samples)


@dataclass
class _Climb:
    """An input whose answers differ as far as is still allowed, and the next step from there."""

    excess: float
    feeds: Feeds
    difference: dict[str, Array]
    """By output: what the answer should be, less what it is."""
    step: float = _FIRST_STEP


class InputSearch:
    """Try inputs on a subject, in an order that the seed decides."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject, self._seed, self.attempts = subject, seed, 0
        self.walked: dict[str, int] = {}
        self.excused = 0
        """Inputs whose answers differ by more than the thresholds, but no further than rounding explains."""
        self.excuses: tuple[Excuse, ...] = ()
        """Of those, the first eight."""
        self._excuse = ""
        """Excuse of the input that was examined last."""
        self._judges = {name: subject.judge(name) for name in {subject.precision, OWN_GRAPH, "fp32"}}
        self._rng = np.random.default_rng([seed, 1])
        self._climb: _Climb | None = None
        self._driven = 0
        self._right_on: dict[str, tuple[str, ...]] = {}
        self._few: dict[str, list[tuple[Feeds, Feeds]]] = {}
        """By thresholds: answers that are sets of few rows, which are judged together."""

    def run(self, seconds: float, progress: Callable[[str], None] = lambda text: None) -> Disagreement | None:
        """Try inputs for so long, and at least one; return the first that shows a fault."""
        start = time.monotonic()
        for attempt in self._attempts():
            if self.attempts and time.monotonic() - start > seconds:
                break
            progress(f"{attempt.walk}: {attempt.note}")
            self.attempts += 1
            self.walked[attempt.walk] = self.walked.get(attempt.walk, 0) + 1
            if disagreement := self.examine(attempt):
                return disagreement
            if self._excuse:
                self.excused += 1
                excuse = Excuse(walk=attempt.walk, note=attempt.note, reason=self._excuse)
                self.excuses = (*self.excuses, excuse)[:_MOST_EXCUSES]
        return None

    def _attempts(self) -> Iterator[Attempt]:
        for number, attempt in enumerate(generate(self.subject.space, self._seed), 1):
            yield attempt
            if number % _CLIMB_EVERY == 0 and (step := self._take_step()):
                yield step
            if number % _DRIVE_EVERY == 0 and (driven := self._drive_output()):
                yield driven

    def _take_step(self) -> Attempt | None:
        """Change the input whose answers differ most along the gradient of the difference.

        The gradient is the model's alone, as engines have none, so the difference may grow in either direction: both
        are tried, then shorter steps, until it grows; where it does not, another input comes.
        """
        climb = self._climb
        if climb is None:
            return None
        feeds = self._move(climb.feeds, climb.difference, climb.step)
        note = f"a step of {climb.step:+.2g} of the range"
        climb.step = -climb.step if climb.step > 0 else -climb.step / 2
        if climb.step < _SMALLEST_STEP and climb.step > 0:
            self._climb = None
        if all(np.array_equal(feeds[name], value) for name, value in climb.feeds.items()):
            self._climb = None
            return None
        return Attempt(_GRADIENTS, note, feeds, False)

    def _drive_output(self) -> Attempt | None:
        """Go from a sample to the ends of its inputs' ranges, where one number of an output is large or small.

        Every second pair goes to outliers.
        """
        subject, number = self.subject, self._driven
        if subject.differentiate is None or number >= _MOST_DRIVEN:
            return None
        self._driven += 1
        sample = subject.space.samples[number % len(subject.space.samples)]
        outputs = {name: value for name, value in subject.model(sample).items() if value.dtype.kind == "f"}
        name = list(outputs)[number // 2 % len(outputs)] if outputs else ""
        if not name or not outputs[name].size:
            return None
        change = np.zeros_like(outputs[name])
        rows = change.reshape(change.shape[0] if change.ndim else 1, -1)
        place = int(self._rng.integers(rows.shape[1]))
        rows[:, place] = -1 if number % 2 else 1
        feeds = self._move(sample, {name: change}, 1.0)
        note = f"{name}: number {place} of each sample is driven {'down' if number % 2 else 'up'}"
        if number % 4 > 1:
            far = {key: np.asarray(OUTLIER * value) for key, value in feeds.items() if value.dtype.kind == "f"}
            feeds |= {key: value for key, value in far.items() if key not in subject.space.masks}
            note += " by inputs ten times as large"
        return Attempt(_GRADIENTS, note, feeds, False)

    def _move(self, feeds: Feeds, change: Feeds, step: float) -> dict[str, Array]:
        """Move inputs by a share of their ranges, and within them, by the signs of the gradient of a change."""
        moved, space = dict(feeds), self.subject.space
        assert self.subject.differentiate is not None
        for name, slope in self.subject.differentiate(feeds, change).items():
            low, high = space.bounds[name]
            if name not in space.masks and np.isfinite(slope).all():
                values = np.clip(moved[name] + step * (high - low) * np.sign(slope), low, high)
                moved[name] = np.asarray(values, moved[name].dtype)  # operations on a single number give no array
        return moved

    def _note_difference(self, feeds: Feeds, wanted: Feeds, given: Feeds, precision: str) -> None:
        """Keep the input whose answers differ most."""
        excess = self._judges[precision].measure_excess(wanted, given)
        least = self._climb.excess if self._climb else 0.0
        if self.subject.differentiate and least < excess <= 1:  # more than 1 is what the input's own digits explain
            floats = (name for name, value in wanted.items() if value.dtype.kind == "f")
            apart = {name: np.nan_to_num(wanted[name] - given[name], posinf=0, neginf=0) for name in floats}
            self._climb = _Climb(excess, feeds, apart)

    def examine(self, attempt: Attempt) -> Disagreement | None:
        """Run one input on all sides, and say where they disagree."""
        subject, self._excuse = self.subject, ""
        try:
            expected = subject.model(attempt.feeds)
        except EnginesmithError:
            return None  # the model itself does not take it
        if attempt.walk == _GRADIENTS and any(np.isnan(value).any() for value in expected.values()):
            return None  # it was driven to where the model is not defined: to a matrix without an inverse, say
        answers: dict[str, Array] | None = None
        try:
            answers = subject.engine(attempt.feeds)
        except EnginesmithError as error:
            return self._disagree(attempt, MODEL, f"it does not answer: {error.message}", expected, answers)
        comparable = subject.precision in EXACT or (attempt.usual and subject.loss_judged)
        if comparable and (
            reason := self._find_fault(subject.model, attempt.feeds, expected, answers, subject.precision)
        ):
            return self._disagree(attempt, MODEL, reason, expected, answers)
        if subject.precision in EXACT:
            self._note_difference(attempt.feeds, expected, answers, subject.precision)
        fault = None
        if subject.graph and subject.precision not in EXACT:
            fault = self._compare_with_graph(subject.graph, attempt, expected, answers)
        fault = fault or self._examine_row(attempt, expected, answers)
        if fault is None:
            self._right_on[attempt.walk] = (*self._right_on.get(attempt.walk, ()), attempt.note)[:_MOST_RIGHT]
        return fault

    def _compare_with_graph(
        self, graph: Answer, attempt: Attempt, expected: Feeds, found: dict[str, Array]
    ) -> Disagreement | None:
        """Compare with the own graph, as far as the runtime that computes it can be trusted on this input.

        It cannot where it answers otherwise than the model in float already. An engine that answers as it does there is
        wrong; any other is compared with what onnx's evaluator makes of the own graph.
        """
        feeds, precision = attempt.feeds, self.subject.precision
        own = graph(feeds)
        reason = self._find_fault(graph, feeds, own, found, OWN_GRAPH)
        is_far = self._judges[precision].measure_excess(expected, found) > 1
        computed = self._find_wrong_computation(feeds, expected) if reason or is_far else None
        if computed is not None:
            judge, definition = self._judges[precision], self.subject.definition
            if is_far and judge.measure_excess(computed, found) <= 1:
                return self._disagree(attempt, MODEL, judge.find_fault(expected, found, dict), expected, found)
            own = definition(feeds) if definition else {}
            reason = self._find_fault(definition, feeds, own, found, OWN_GRAPH) if definition and own else ""
        if reason:
            return self._disagree(attempt, GRAPH, reason, own, found)
        if own:
            self._note_difference(feeds, own, found, OWN_GRAPH)
        return None

    def _find_wrong_computation(self, feeds: Feeds, expected: Feeds) -> dict[str, Array] | None:
        """Compute the model's graph in float; None where it answers as the model does."""
        if self.subject.float_graph is None:
            return None
        answer = self.subject.float_graph(feeds)
        return answer if self._judge(self.subject.model, feeds, expected, answer, "fp32").fault else None

    def _find_fault(self, answer: Answer, feeds: Feeds, wanted: Feeds, given: Feeds, precision: str) -> str:
        """Say what is wrong with the engine's answer, or nothing; note why a large difference is no fault."""
        verdict = self._judge(answer, feeds, wanted, given, precision)
        self._excuse = self._excuse or verdict.excuse
        return verdict.fault

    def _judge(
        self, answer: Answer, feeds: Feeds, wanted: Feeds, given: Feeds, precision: str, modeled: Feeds | None = None
    ) -> Verdict:
        """Judge an answer beside the one that is wanted, which ``answer`` gives to the feeds.

        Rounding within the model explains differences from ``modeled``, its own answer to the feeds: by default what
        is wanted if ``answer`` is the model, and nothing else.
        """
        judge, perturb, compared = self._judges[precision], self.subject.perturb, given
        if modeled is None and answer is self.subject.model:
            modeled = wanted
        unstable: Feeds = {}
        if perturb and modeled is not None and judge.measure_excess(wanted, given) > 1:
            unstable = find_unstable(perturb, feeds, modeled)
            compared = take_as_right(wanted, given, unstable, judge.thresholds.right_bits)

        def measure() -> dict[str, float]:
            moved = measure_sensitivity(answer, feeds, precision, unstable, self._seed)
            if perturb and modeled is not None and precision in EXACT:
                for name, distance in measure_movement(perturb, feeds, modeled, unstable).items():
                    moved[name] = max(moved.get(name, 0.0), distance)
            return moved

        verdict = judge.judge(wanted, compared, measure)
        if unstable and verdict == Verdict() and (text := judge.find_fault(wanted, given, dict)):
            verdict = Verdict(excuse=f"{text}; rounding alone decides the numbers that differ")
        if verdict.fault and perturb and modeled is not None and judge.signature.unordered:
            rounded = round_otherwise(perturb, feeds, judge.thresholds.right_bits)
            if judge.explains_rows(wanted, compared, rounded):
                verdict = Verdict(excuse=f"{verdict.fault}; rounding alone chooses other rows, too")
        if judge.has_few_rows(wanted, compared):
            calls = self._few.setdefault(precision, [])
            calls.append((wanted, compared))
            if verdict.fault:
                pooled = judge.find_fault_in_all(calls)
                verdict = Verdict(pooled, "" if pooled else f"{verdict.fault}; too few rows to tell")
        return verdict

    def _examine_row(self, attempt: Attempt, expected: Feeds, found: Feeds) -> Disagreement | None:
        """Ask for one sample of the batch alone, where the model itself keeps samples apart."""
        space = self.subject.space
        if not self.subject.rows_apart or space.signature.unordered:
            return None
        if space.batch is None or space.ranges[space.batch].min > 1:
            return None
        rows = _read_size(space, attempt.feeds, space.batch)
        if rows == 1:
            return None
        row = int(self._rng.integers(rows))
        single = take_row(attempt.feeds, space.signature, row)
        outputs = [spec.name for spec in space.signature.outputs if space.batch in spec.shape]
        if not outputs:
            return None
        try:
            alone = self.subject.engine(single)
        except EnginesmithError as error:
            if self._answer_row_by_model(single, expected, row, outputs) is None:
                return None
            shrunk = attempt._replace(feeds=single, note=f"{attempt.note}; sample {row} alone")
            return self._disagree(
                shrunk, MODEL, f"it does not answer: {error.message}", self.subject.model(single), None
            )
        in_batch = take_row({name: found[name] for name in outputs}, space.signature, row)
        chosen = {name: alone[name] for name in outputs}
        precision = "fp32" if self.subject.precision in EXACT else OWN_GRAPH
        if self._judges[precision].measure_excess(chosen, in_batch) <= 1:
            return None
        modeled = self._answer_row_by_model(single, expected, row, outputs)
        if modeled is None:
            return None
        verdict = self._judge(self.subject.engine, single, chosen, in_batch, precision, modeled)
        text = f"sample {row} is answered in another way than alone: "
        if verdict.excuse:
            self._excuse = self._excuse or text + verdict.excuse
        if verdict.fault:
            wanted = {**found, **_with_row({name: found[name] for name in outputs}, space.signature, row, alone)}
            return self._disagree(attempt, ALONE, text + verdict.fault, wanted, found)
        return None

    def _answer_row_by_model(
        self, single: Feeds, expected: Feeds, row: int, outputs: Sequence[str]
    ) -> dict[str, Array] | None:
        """Answer a sample alone; None where the model answers otherwise than in this batch, or not at all.

        Another batch may show that it keeps no samples apart.
        """
        try:
            alone = self.subject.model(single)
        except EnginesmithError:
            return None
        wanted = {name: alone[name] for name in outputs}
        given = take_row({name: expected[name] for name in outputs}, self.subject.space.signature, row)
        shapes = all(wanted[name].shape == given[name].shape for name in outputs)
        return wanted if shapes and not self._judge(self.subject.model, single, wanted, given, "fp32").fault else None

    def _disagree(
        self, attempt: Attempt, witness: str, reason: str, expected: Feeds, found: Feeds | None
    ) -> Disagreement:
        return Disagreement(
            walk=attempt.walk,
            note=attempt.note,
            witness=witness,
            reason=reason,
            attempts=self.attempts,
            feeds=dict(attempt.feeds),
            expected=dict(expected),
            found=None if found is None else dict(found),
        )

    def shrink(self, shown: Disagreement) -> Disagreement:
        """Look for smaller sizes that show a fault of the same kind, one dimension after the other.

        The inputs that were answered right, these included, are listed with it.
        """
        space = self.subject.space
        for name, range_ in space.ranges.items():
            current = _read_size(space, shown.feeds, name)
            for size in [each for each in (range_.min, 2, 3, 4, 8) if range_.min <= each < current]:
                sizes = {other: _read_size(space, shown.feeds, other) for other in space.ranges} | {name: size}
                feeds = samples.resize(shown.feeds, space.signature, sizes)
                note = f"{shown.note}; cut to {format_sizes(sizes)}"
                smaller = self.examine(Attempt(shown.walk, note, feeds, shown.walk in _USUAL_WALKS))
                if smaller and smaller.witness == shown.witness:
                    shown = smaller
                    break
        return shown.model_copy(update={"right_on": self._right_on})


def _with_row(outputs: Feeds, signature: Signature, row: int, alone: Feeds) -> dict[str, Array]:
    """Put the answer to one sample alone in the place of that sample's row."""
    changed = {name: value.copy() for name, value in outputs.items()}
    axes = {spec.name: spec.batch_axis for spec in signature.outputs}
    for name, value in changed.items():
        np.moveaxis(value, axes[name], 0)[row : row + 1] = np.moveaxis(alone[name], axes[name], 0)
    return changed


def _read_size(space: InputSpace, feeds: Feeds, symbol: str) -> int:
    spec = next(spec for spec in space.signature.inputs if symbol in spec.shape)
    return int(feeds[spec.name].shape[spec.shape.index(symbol)])
