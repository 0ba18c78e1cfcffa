"""Judge an answer: whether it is further from another one than the precision and the input's own sensitivity explain.

Each sample of a batch is judged alone, so that one wrong row is not hidden by the others. A difference above the
precision's threshold is compared with the sensitivity: how far the reference's answer moves if the input is changed in
its last digits. What moves as far by itself, as where a mean of equal numbers is subtracted, is no fault. NaN where a
number should be counts as far as the output's range: it is explained where such a change moves the answer as far.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from enginesmith.pipeline.errors import FidelityError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import (
    Fidelity,
    OutputFidelity,
    Thresholds,
    compare,
    compare_calls,
    describe_failure,
    thresholds_for,
)
from enginesmith.pipeline.frameworks.rounding import COARSE, find_farthest, spread_bits
from enginesmith.pipeline.frameworks.row_sets import count_rows
from enginesmith.pipeline.tensors import Array, Feeds, Signature, find_fill, find_infinite
from enginesmith.pipeline.units import format_share

Answer = Callable[[Feeds], dict[str, Array]]

OWN_GRAPH = "own graph"
"""Row between an engine in a low precision and its own graph, computed in float32 with the same rounding steps."""
EXACT = ("fp32", "tf32")
"""Precisions that answer like the model on every input."""
_OWN_GRAPH = Thresholds(min_sqnr_db=20, max_error_of_range=0.05, min_agreement=0.95, right_bits=COARSE)
"""Kernels round ties and sums in another order, and one step of int8 in one layer moves all behind it: OpenVINO's int8
of small convnets is up to 1.2 % of the range from its graph."""
_LEAST_PAIRED = 0.5
"""Share of rows that are chosen likewise in a low precision."""
_FEW_ROWS = 16
"""Rows of both sides, up to which such a share tells nothing: a single box may be just at the threshold of scores."""
_STEPS = {OWN_GRAPH: 2.0**-9, "fp32": 2.0**-22, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}
"""Relative size of the change of an input, by precision: some units in the last place of what is computed in."""
_DRAWS = 3
_EXPLAINED = 16.0
"""Differences up to so many times the movement are explained: what is drawn three times is seldom the worst case."""


class Verdict(NamedTuple):
    """Describe a difference above the threshold: as a fault, or with the reason why it is none; nothing if none is."""

    fault: str = ""
    excuse: str = ""


@dataclass(frozen=True)
class Judge:
    """Compare answers with a reference's."""

    signature: Signature
    thresholds: Thresholds
    precision: str
    """Key of the size of the changes by which the sensitivity is measured."""
    scales: dict[str, float]
    """By output of floats: how large its range is in the samples' answers."""

    def find_fault(self, reference: Feeds, actual: Feeds, sensitivity: Callable[[], dict[str, float]]) -> str:
        """Say what is wrong with an answer, or nothing."""
        return self.judge(reference, actual, sensitivity).fault

    def judge(self, reference: Feeds, actual: Feeds, sensitivity: Callable[[], dict[str, float]]) -> Verdict:
        """Judge an answer; the sensitivity is only asked for where something looks wrong."""
        if set(reference) != set(actual):
            return Verdict(f"the outputs are {', '.join(actual)}, expected {', '.join(reference)}")
        if self.signature.unordered:
            return self._judge_rows(reference, actual, sensitivity)
        moved: dict[str, float] | None = None
        excuse = ""
        for name, wanted in reference.items():
            difference = self._compare(name, wanted, actual[name])
            if difference.excess <= 1:
                continue
            moved = sensitivity() if moved is None else moved
            movement = moved.get(name, 0.0)
            if difference.error > _EXPLAINED * movement:
                return Verdict(difference.text)
            effect = f"moves it by up to {movement:.3g}" if np.isfinite(movement) else "gives it another shape"
            excuse = excuse or f"{difference.text}; rounding alone {effect}"
        return Verdict(excuse=excuse)

    def measure_excess(self, reference: Feeds, actual: Feeds) -> float:
        """Measure the largest difference of an output, in units of what is allowed; 0 for sets of rows."""
        if self.signature.unordered or set(reference) != set(actual):
            return 0.0
        return max(
            (self._compare(name, wanted, actual[name]).excess for name, wanted in reference.items()), default=0.0
        )

    def has_few_rows(self, reference: Feeds, actual: Feeds) -> bool:
        """Tell whether answers are sets of so few rows that a lower precision may choose others of them all."""
        if not self.signature.unordered or self.precision in EXACT:
            return False
        try:
            self._compare_sets(reference, actual)
        except FidelityError:
            return False  # they are no such sets
        return count_rows(self.signature, reference, actual) < _FEW_ROWS

    def find_fault_in_all(self, calls: Sequence[tuple[Feeds, Feeds]]) -> str:
        """Say what is wrong with sets of few rows, pooled, or nothing: where they are few together, too."""
        if sum(count_rows(self.signature, *call) for call in calls) < _FEW_ROWS:
            return ""
        pooled = compare_calls(calls, self.thresholds, self.signature, self.scales)
        if _find_paired(pooled) >= _LEAST_PAIRED:
            return ""
        return f"{_describe_rows(pooled)}, of {len(calls)} inputs with few rows"

    def explains_rows(self, reference: Feeds, actual: Feeds, rounded: Iterable[Feeds]) -> bool:
        """Tell whether rows are others because rounding chooses them: the model's own, rounded otherwise, are, too.

        Each output that is too far from the reference is so then, with half of the likeness at least.
        """
        try:
            ours = self._compare_sets(reference, actual).outputs
            others = [self._compare_sets(reference, each).outputs for each in rounded if each]
        except FidelityError:
            return False
        return all(
            _is_as_near(output, [each for each in outputs if not each.passed])
            for output, *outputs in zip(ours, *others, strict=True)
            if not output.passed
        )

    def _compare_sets(self, reference: Feeds, actual: Feeds) -> Fidelity:
        return compare(reference, actual, self.thresholds, self.signature, self.scales)

    def _judge_rows(self, reference: Feeds, actual: Feeds, sensitivity: Callable[[], dict[str, float]]) -> Verdict:
        try:
            compared = self._compare_sets(reference, actual)
        except FidelityError as error:
            return Verdict(error.message)
        enough = _find_paired(compared) >= _LEAST_PAIRED and self.precision not in EXACT
        if compared.passed or enough:
            return Verdict()
        text = _describe_rows(compared)
        if np.inf in sensitivity().values():
            return Verdict(excuse=f"{text}; rounding alone chooses another number of rows")
        return Verdict(text)

    def _compare(self, name: str, wanted: Array, given: Array) -> "_Difference":
        if wanted.shape != given.shape or (wanted.dtype.kind == "f") != (given.dtype.kind == "f"):
            shapes = (f"{array.dtype}{list(array.shape)}" for array in (given, wanted))
            return _Difference("output {!r} is {}, expected {}".format(name, *shapes), np.inf, np.inf)
        if not wanted.size:
            return _EQUAL
        rows = self._rows(name, wanted), self._rows(name, given)
        if wanted.dtype.kind == "f":
            return self._compare_floats(name, *(side.astype(np.float64) for side in rows))
        share = (rows[0] == rows[1]).mean(axis=1).min()
        if share >= self.thresholds.min_agreement:
            return _EQUAL
        error = float(np.abs(rows[0].astype(np.float64) - rows[1].astype(np.float64)).max())
        text = f"{format_share(1 - share, 3)} of the elements of output {name!r} are others in one sample"
        return _Difference(text, error, np.inf)

    def _compare_floats(self, name: str, wanted: Array, given: Array) -> "_Difference":
        finite = np.isfinite(wanted)
        odd = finite & ~np.isfinite(given)
        if odd.any():
            text = f"output {name!r} has {int(odd.sum())} NaN or infinite numbers where there should be none"
            span = max(self.scales.get(name, 0.0), float(np.ptp(wanted[finite])))
            return _Difference(text, span or np.inf, np.inf)
        fill = np.abs(np.where(finite, wanted, 0)) >= find_fill([wanted])
        if not np.allclose(given[fill], wanted[fill], rtol=self.thresholds.row_tolerance, atol=0, equal_nan=True):
            text = f"output {name!r} has other numbers than {wanted[fill][0]:.3g} in masked places"
            return _Difference(text, float(np.abs(given[fill] - wanted[fill]).max()), np.inf)
        both = finite & np.isfinite(given) & ~fill
        apart = np.where(both, np.abs(np.where(both, wanted - given, 0)), 0)
        error = apart.max(axis=1)
        span = max(self.scales.get(name, 0.0), float(np.ptp(wanted[both])) if both.any() else 0.0) or 1.0
        signal = np.maximum(np.sqrt((np.where(both, wanted, 0) ** 2).mean(axis=1)), span / 10)
        noise = np.sqrt((apart**2).mean(axis=1))
        allowed_noise = signal * 10 ** (-self.thresholds.min_sqnr_db / 20)
        allowed_error = max(self.thresholds.max_error_of_range, 1e-7) * span
        excess = np.minimum(noise / allowed_noise, error / allowed_error)  # both have to be too large
        row = int(np.argmax(np.where(excess > 1, error, -1))) if (excess > 1).any() else int(np.argmax(excess))
        where = f" of sample {row}" if len(error) > 1 else ""
        share = format_share(error[row] / span, 3)
        text = f"output {name!r}{where} is off by up to {error[row]:.3g}, {share} of its range"
        return _Difference(text, float(error[row]), float(excess.max()))

    def _rows(self, name: str, array: Array) -> Array:
        """Return [samples, numbers]; one row where it has no batch."""
        spec = next(spec for spec in self.signature.outputs if spec.name == name)
        leading = {each.as_row.shape[0] for each in self.signature.inputs if each.shape}
        batched = array.ndim > 0 and bool(spec.shape) and spec.as_row.shape[0] in leading
        array = np.moveaxis(array, spec.batch_axis, 0) if batched else array
        return array.reshape(len(array), -1) if batched and len(array) else array.reshape(1, -1)


@dataclass(frozen=True)
class _Difference:
    """Describe how an output differs."""

    text: str
    error: float
    excess: float
    """Size in units of what is allowed: above 1, it is too large."""


_EQUAL = _Difference("", 0.0, 0.0)


def _find_paired(compared: Fidelity) -> float:
    return 1.0 if compared.paired is None else compared.paired


def _describe_rows(compared: Fidelity) -> str:
    """Describe the output of which the fewest rows have a partner: that decides, and not what else is far off."""
    outputs = sorted(compared.outputs, key=lambda output: 1.0 if output.paired is None else output.paired)
    return describe_failure(compared.model_copy(update={"outputs": tuple(outputs)}))


def _is_as_near(output: OutputFidelity, others: Sequence[OutputFidelity]) -> bool:
    """Tell whether an output is about as near to the reference as the farthest of others; False without any."""
    if not others:
        return False
    paired, agreement = (
        (getattr(output, name) or 0.0) >= _LEAST_PAIRED * min(getattr(each, name) or 0.0 for each in others)
        for name in ("paired", "agreement")
    )
    farthest = max(np.inf if each.max_abs_error is None else each.max_abs_error for each in others)  # no row is left
    return paired and agreement and (output.max_abs_error or 0.0) <= _EXPLAINED * farthest


def measure_sensitivity(
    answer: Answer, feeds: Feeds, precision: str, unstable: Feeds = MappingProxyType({}), seed: int = 0
) -> dict[str, float]:
    """Measure how far each output moves if the floats of the feeds are changed in their last digits.

    ``unstable`` are numbers that rounding decides anyway, as ``find_unstable`` returns them: they are left out.
    """
    first, moved = answer(feeds), dict[str, float]()
    for changed in _change_floats(feeds, _STEPS.get(precision, _STEPS["fp32"]), seed):
        for name, value in answer(changed).items():
            if value.shape == first[name].shape and value.size:
                left_out = spread_bits(unstable.get(name), value.shape) > 0
                moved[name] = max(moved.get(name, 0.0), find_farthest(first[name], value, left_out))
            elif value.shape != first[name].shape:
                moved[name] = np.inf
    return moved


def _change_floats(feeds: Feeds, step: float, seed: int) -> Iterator[dict[str, Array]]:
    """Draw feeds whose floats differ by such a share, some times; none where there are no floats.

    Numbers that stand for infinity stay: where a mask has nothing else, a change would make it choose one place.
    """
    rng = np.random.default_rng(seed)
    for _ in range(_DRAWS if any(value.dtype.kind == "f" for value in feeds.values()) else 0):
        changed = dict(feeds)
        for name, value in feeds.items():
            if value.dtype.kind == "f":
                factor = 1 + step * rng.standard_normal(value.shape)
                with np.errstate(over="ignore"):  # the largest number may become infinite
                    moved = np.asarray(value.astype(np.float64) * factor).astype(value.dtype)
                changed[name] = np.where(find_infinite(value), value, moved)
        yield changed


def make_judge(signature: Signature, precision: str, scales: dict[str, float]) -> Judge:
    """Make a judge by a precision's thresholds, or by those between an engine and its own graph."""
    return Judge(signature, _find_thresholds(precision), precision, scales)


def find_tolerance(precision: str) -> float:
    """Look up the share of an output's range by which an answer may differ."""
    return _find_thresholds(precision).max_error_of_range


def _find_thresholds(precision: str) -> Thresholds:
    return _OWN_GRAPH if precision == OWN_GRAPH else thresholds_for(precision)


def take_row(feeds: Feeds, signature: Signature, row: int) -> dict[str, Array]:
    """Take one sample of a batch: of each input and output that has that dimension."""
    batch = samples.batch_symbol(signature)
    specs = (*signature.inputs, *signature.outputs)
    axes = {spec.name: spec.shape.index(batch) for spec in specs if batch in spec.shape}
    return {name: value.take([row], axis=axes[name]) if name in axes else value for name, value in feeds.items()}
