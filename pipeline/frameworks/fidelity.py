"""Compare outputs with the reference's: numbers per output, the worst over all outputs, and a verdict.

SQNR = 10·log10(Σ reference² / Σ (reference − actual)²), in float64, over all samples together. Identical outputs have
no finite one: they get ``SQNR_CAP_DB``, as does everything above it. What would hide wrong numbers behind large ones is
judged apart: the fill of masked places, probabilities beside coordinates in pixels, and columns in other units.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import BaseModel

from enginesmith.pipeline.errors import FidelityError, UsageError
from enginesmith.pipeline.frameworks.records import explain_missing
from enginesmith.pipeline.frameworks.rounding import COARSE, FINE, take_as_right
from enginesmith.pipeline.frameworks.row_sets import MIN_SHARE, Table, are_row_counts, find_tables, pair_rows
from enginesmith.pipeline.tensors import Array, Feeds, Signature, find_fill
from enginesmith.pipeline.units import format_share

SQNR_CAP_DB = 200.0
_CHUNK = 1 << 20
_LEAST_PIXELS, _LEAST_SCORE = 30, 0.1
_COARSEST_DB = 15.0
_ROUNDINGS = 100
"""Roundings of the largest answer from which on a difference between answers is one."""
_COORDINATES = (4, 5, 6)
"""Numbers of a box that are no probabilities: four, with an angle or a distance."""
_MOST_COLUMNS, _OTHER_UNIT = 32, 100.0
"""Columns that may have units of their own, and the quotient of their spans from which on they do."""
_COLUMN_DB, _COLUMN_OF_RANGE = 40.0, 1e-2
"""The most that is asked of columns that are judged apart: it tells lost ones from coarser ones."""
MOST_ROUNDING = 1e-2
"""Share of the range to which an error may be rounding: what moves further by it is not computed in float32."""
_FEWEST_PLACES, _MANY_PLACES, _KEPT_SHARE = 3, 8, 0.5
"""Places that have a whole number in the reference, from which on one of them has to be the same, and from which on
this share: no class may vanish."""
_MOST_VALUES = 64
_SILENT = 1e-4
"""Energy of a sample, of that of the middle one, below which it is silence: what is lost there says nothing."""
_FEWEST_NUMBERS = 8
"""Numbers of a sample from which on their energy is that of the sample: a single one may be near zero by chance."""


class Thresholds(BaseModel, frozen=True, extra="forbid"):
    """Set what an output must reach: floats one of the first two, others the last; none may turn NaN or Inf."""

    min_sqnr_db: float
    max_error_of_range: float
    """Greatest absolute error as a share of the reference's range (max − min)."""
    min_agreement: float = 0.9999
    """Share of equal elements of integer and bool outputs: of 10 000 classes of pixels, one may lie on an edge."""
    right_bits: int = FINE
    """Bits of operations' results that are taken to be right: where rounding decides a number with so many, or with
    more, the numbers that it makes are right."""

    def with_sqnr(self, min_sqnr_db: float | None) -> Self:
        """Put an SQNR, if one was asked for, in the place of the first two."""
        if min_sqnr_db is None:
            return self
        return self.model_copy(update={"min_sqnr_db": min_sqnr_db, "max_error_of_range": 0.0})

    @property
    def allows_rounding(self) -> bool:
        """Tell whether errors of rounding are allowed: by fp32's own limits, unless an SQNR was asked for."""
        return self.right_bits == FINE and self.max_error_of_range > 0

    @property
    def for_columns(self) -> Self:
        """Ask no more of columns that are judged apart than what tells that they are not lost."""
        least = {
            "min_sqnr_db": min(self.min_sqnr_db, _COLUMN_DB),
            "max_error_of_range": max(self.max_error_of_range, _COLUMN_OF_RANGE) if self.max_error_of_range else 0.0,
        }
        return self.model_copy(update=least)

    @property
    def row_tolerance(self) -> float:
        """Share of the range by which rows may differ that are compared as sets: as far as the SQNR allows."""
        return max(self.max_error_of_range, float(10 ** (-self.min_sqnr_db / 20)))


THRESHOLDS: dict[str, Thresholds] = {
    "fp32": Thresholds(min_sqnr_db=90, max_error_of_range=1e-4),
    "tf32": Thresholds(min_sqnr_db=45, max_error_of_range=5e-3, min_agreement=0.99, right_bits=COARSE),
    "fp16": Thresholds(min_sqnr_db=40, max_error_of_range=1e-2, min_agreement=0.99, right_bits=COARSE),
    "bf16": Thresholds(min_sqnr_db=15, max_error_of_range=1e-1, min_agreement=0.9, right_bits=COARSE),
    "fp8": Thresholds(min_sqnr_db=10, max_error_of_range=1e-1, min_agreement=0.9, right_bits=COARSE),
    "int8": Thresholds(min_sqnr_db=10, max_error_of_range=1e-1, min_agreement=0.9, right_bits=COARSE),
    "int4": Thresholds(min_sqnr_db=6, max_error_of_range=2e-1, min_agreement=0.8, right_bits=COARSE),
}
"""fp32's are the project's requirement; the others tell a broken graph from a coarse one."""


class Closeness(BaseModel, frozen=True):
    """List figures of outputs against the reference. What is None has its reason under its name in ``reasons``."""

    sqnr_db: float | None = None
    cosine: float | None = None
    max_abs_error: float | None = None
    max_error_of_range: float | None = None
    argmax_agreement: float | None = None
    """Share of positions whose greatest class is the same: over axis 1 of images (4 axes or more), else the last."""
    finite: bool = True
    """No NaN or Inf but where the reference has the same one."""
    passed: bool = False
    reasons: dict[str, str] = {}


class OutputFidelity(Closeness):
    """Compare one output with the reference."""

    name: str
    agreement: float | None = None
    """Share of equal elements, for integer and bool outputs."""
    paired: float | None = None
    """Share of rows that have a partner on the other side, where rows are chosen by values; figures are of those."""
    is_rounding: bool = False
    """True where the error is beyond the limits, and no larger than what rounding in float32 does to the reference."""
    fault: str = ""
    """The bound that failed, where it is not the one of the figure above: that has nothing wrong then."""
    part: str = ""
    """The part of the output that was judged apart and whose figures these are: ``column 1``; empty for all of it."""


class Fidelity(Closeness):
    """Report the worst over all outputs, number by number, and the outputs themselves."""

    outputs: tuple[OutputFidelity, ...] = ()

    @property
    def paired(self) -> float | None:
        """Return the smallest share of rows that have a partner; None where no output's rows are chosen by values."""
        return min((output.paired for output in self.outputs if output.paired is not None), default=None)

    @property
    def sets(self) -> tuple[str, ...]:
        """List the outputs that are compared as sets of rows."""
        return tuple(output.name for output in self.outputs if output.paired is not None)


def thresholds_for(precision: str, min_sqnr_db: float | None = None) -> Thresholds:
    """Look up the thresholds of a precision; an SQNR that was asked for stands instead of its first two.

    Raises:
        UsageError: it is not known.
    """
    if precision not in THRESHOLDS:
        raise UsageError(f"there is no precision {precision!r}", f"use one of {', '.join(THRESHOLDS)}")
    return THRESHOLDS[precision].with_sqnr(min_sqnr_db)


def find_thresholds(outputs: Iterable[str], precision: str, min_sqnr_db: float | None) -> Thresholds:
    """Find the thresholds of outputs of these dtypes: the precision's, and those of fp16 where one is float16.

    An SQNR that was asked for stands instead of both.
    """
    return thresholds_for("fp16" if "float16" in outputs else precision, min_sqnr_db)


def compare(
    reference: Feeds,
    actual: Feeds,
    thresholds: Thresholds,
    signature: Signature | None = None,
    ranges: Mapping[str, float] = MappingProxyType({}),
    unstable: Feeds = MappingProxyType({}),
    rounding: Mapping[str, float] = MappingProxyType({}),
    quantized_db: Mapping[str, float] = MappingProxyType({}),
) -> Fidelity:
    """Compare outputs with the reference's, by name; errors as in :func:`compare_calls`."""
    return compare_calls([(reference, actual)], thresholds, signature, ranges, [unstable], rounding, quantized_db)


def compare_calls(
    calls: Sequence[tuple[Feeds, Feeds]],
    thresholds: Thresholds,
    signature: Signature | None = None,
    ranges: Mapping[str, float] = MappingProxyType({}),
    unstable: Sequence[Feeds] = (),
    rounding: Mapping[str, float] = MappingProxyType({}),
    quantized_db: Mapping[str, float] = MappingProxyType({}),
) -> Fidelity:
    """Compare the outputs of several calls with the reference's; each is the reference's outputs and those in question.

    Samples of all calls are pooled, as those of one larger batch are. Outputs whose rows are chosen by values, as the
    signature tells, are compared as sets of rows: boxes that a NonMaxSuppression leaves. ``ranges`` are those of
    outputs beyond these calls, where they are known; ``unstable`` are numbers that rounding decides, call by call, as
    ``find_unstable`` returns them: what rounding makes of them is right. ``rounding`` is how far rounding in float32
    moves outputs of the reference itself: engines that compute in float32 may be as far from it. ``quantized_db`` is
    the SQNR that is left where the reference's own quantization rounds otherwise: its steps move many numbers by as
    much, and an engine that moves more of them has another scale or zero point.

    Raises:
        FidelityError: an output is missing, or has another shape or another kind of dtype.
    """
    for reference, actual in calls:
        if set(reference) != set(actual):
            raise FidelityError(f"the outputs are {list(actual)}, and the reference's are {list(reference)}")
    unordered = signature.unordered if signature else {}
    tables = find_tables(signature, [reference for reference, _ in calls]) if signature and unordered else ()
    if unstable:  # sets of rows allow for it themselves
        in_tables = {name for table in tables for name in table.outputs}
        marked = [{name: bits for name, bits in marks.items() if name not in in_tables} for marks in unstable]
        judged = zip(calls, marked, strict=True)
        calls = [(right, take_as_right(right, given, marks, thresholds.right_bits)) for (right, given), marks in judged]
    paired = {}
    for table in tables:
        for call in calls:
            _check_table(table, *call)
        paired.update(dict.fromkeys(table.outputs, pair_rows(table, calls, thresholds.row_tolerance)))
    described = {name for table in tables for name in table.outputs if unordered[name] == "rows"}
    outputs = []
    for name in calls[0][0]:
        if name in paired and described and unordered[name] == "positions":
            output = OutputFidelity(name=name, passed=True)
            outputs.append(explain_missing(output, "positions of boxes; the outputs taken from there are compared"))
            continue
        known = ranges.get(name, 0.0)
        if name in paired:
            outputs.append(_compare_rows(name, paired[name].pairs[name], paired[name].share, thresholds, known))
            continue
        pairs = [(reference[name], actual[name]) for reference, actual in calls]
        if name in unordered and are_row_counts(name, tables, [reference for reference, _ in calls]):
            pairs = [(wanted.astype(np.float64), given.astype(np.float64)) for wanted, given in pairs]
        own = rounding.get(name, 0.0) if thresholds.allows_rounding else 0.0
        outputs.append(_compare_output(name, pairs, thresholds, known, own, quantized_db.get(name)))
    worst: dict[str, float | None] = {}
    reasons = {}
    for field, pick in _WORST.items():
        values = [value for output in outputs if (value := getattr(output, field)) is not None]
        worst[field] = pick(values) if values else None
        if not values:
            why = dict.fromkeys(output.reasons.get(field, "") for output in outputs)
            reasons[field] = "; ".join(why) if outputs else "there are no outputs"
    finite, passed = (all(getattr(output, field) for output in outputs) for field in ("finite", "passed"))
    return Fidelity(**worst, finite=finite, passed=passed, outputs=tuple(outputs), reasons=reasons)


def describe_failure(fidelity: Fidelity) -> str:
    """Describe the first output that is too far from the reference."""
    worst = next(output for output in fidelity.outputs if not output.passed)
    if not worst.finite:
        return f"output {worst.name!r} has NaN or Inf where the reference has none"
    name = f"{worst.part} of output {worst.name!r}" if worst.part else f"output {worst.name!r}"
    if worst.paired is not None and worst.paired < 1:
        return f"{100 * worst.paired:.1f} % of the rows in output {worst.name!r} have a partner in the reference"
    if worst.agreement is not None:
        agrees = f"output {worst.name!r} agrees in {100 * worst.agreement:.2f} % of its elements"
        return f"{agrees}, {worst.fault}" if worst.fault else agrees
    error = f"max abs error {worst.max_abs_error:.3g}"
    if worst.max_error_of_range:
        error += f" ({format_share(worst.max_error_of_range)} of the range of the answers)"
    verb = "have" if worst.part.startswith(("columns", "the")) else "has"
    if worst.sqnr_db is None:  # there is no signal that the error could be compared with
        return f"{name} {verb} other numbers than 0, which it is throughout in the reference: {error}"
    return f"{name} {verb} an SQNR of {worst.sqnr_db:.1f} dB, {error}{f', {worst.fault}' if worst.fault else ''}"


def _check_table(table: Table, reference: Feeds, actual: Feeds) -> None:
    """Check that both sides have the same samples and columns, and that outputs of a table have as many rows."""
    axis, first = int(table.batch_axis == 0), actual[table.outputs[0]]
    for name in table.outputs:
        wanted = list(reference[name].shape)
        wanted[axis] = first.shape[axis] if first.ndim > axis else -1
        if wanted != list(actual[name].shape):
            raise _explain_shape(name, reference[name], actual[name])


def _explain_shape(name: str, reference: Array, actual: Array) -> FidelityError:
    wanted, given = (f"{array.dtype}{list(array.shape)}" for array in (reference, actual))
    dropped = reference.ndim != actual.ndim and reference.squeeze().shape == actual.squeeze().shape
    remedy = "they differ in axes of 1: where a model calls squeeze(), which also drops a batch of 1, write squeeze(1)"
    return FidelityError(f"output {name!r} is {given}, and the reference's is {wanted}", remedy if dropped else "")


def _compare_output(
    name: str,
    pairs: "_Pairs",
    thresholds: Thresholds,
    known_range: float,
    rounding: float = 0.0,
    quantized_db: float | None = None,
) -> OutputFidelity:
    for pair in pairs:
        floats = {np.issubdtype(array.dtype, np.floating) for array in pair}
        if pair[0].shape != pair[1].shape or len(floats) > 1:
            raise _explain_shape(name, *pair)
    filled = [pair for pair in pairs if pair[0].size]
    if not filled:
        return explain_missing(OutputFidelity(name=name, passed=True), "the output is empty")
    if np.issubdtype(filled[0][0].dtype, np.floating):
        output = _compare_floats(name, filled, thresholds, known_range, rounding, quantized_db)
        for part in find_parts([wanted for wanted, _ in filled]) if output.passed else ():
            asked = thresholds.for_columns if part.is_columns else thresholds
            apart = _compare_floats(name, part.take(filled), asked, part.span)
            if not apart.passed:
                return apart.model_copy(update={"part": part.name})
        return output
    return _compare_exactly(name, filled, thresholds)


def _compare_rows(
    name: str, pairs: "_Pairs", share: float, thresholds: Thresholds, known_range: float
) -> OutputFidelity:
    """Compare rows with their partners; enough rows of both sides have to have one."""
    output = _compare_output(name, pairs, thresholds, known_range)
    enough = share >= min(MIN_SHARE, thresholds.min_agreement)
    reasons = {**output.reasons, "argmax_agreement": "its rows are chosen by values"}
    changes = {"paired": share, "argmax_agreement": None, "passed": output.passed and enough, "reasons": reasons}
    return output.model_copy(update=changes)


_WORST: dict[str, Callable[[Iterable[float]], float]] = {
    "sqnr_db": min,
    "cosine": min,
    "max_abs_error": max,
    "max_error_of_range": max,
    "argmax_agreement": min,
}
_Pairs = Sequence[tuple[Array, Array]]
"""An output of the reference and of what is compared with it, for each call."""


def _compare_exactly(name: str, pairs: _Pairs, thresholds: Thresholds) -> OutputFidelity:
    equal = sum(int(np.count_nonzero(reference == actual)) for reference, actual in pairs)
    agreement = equal / sum(reference.size for reference, _ in pairs)
    error = max(float(np.abs(wanted - given).max()) for wanted, given in _iterate_chunks(pairs))
    lost = _find_lost_value(pairs) if agreement >= thresholds.min_agreement else None
    fault = "" if lost is None else f"but in hardly any of those that are {lost:g}"
    passed = agreement >= thresholds.min_agreement and lost is None
    output = OutputFidelity(name=name, max_abs_error=error, agreement=agreement, passed=passed, fault=fault)
    return explain_missing(output, f"{pairs[0][0].dtype} outputs are compared by equality")


def _find_lost_value(pairs: _Pairs) -> float | None:
    """Find a value that some places have, and is another one at all or most of them: no rare class may vanish.

    Outputs with many values, such as counts or positions, are not looked at.
    """
    wanted, given = (np.concatenate([pair[side].reshape(-1) for pair in pairs]) for side in (0, 1))
    values, counts = np.unique(wanted, return_counts=True)
    if not 2 <= len(values) <= _MOST_VALUES:
        return None
    lost = (
        float(value)
        for value, count in zip(values, counts, strict=True)
        if count >= _FEWEST_PLACES
        and np.count_nonzero(given[wanted == value] == value) < (_KEPT_SHARE * count if count >= _MANY_PLACES else 1)
    )
    return next(lost, None)


def _compare_floats(
    name: str,
    pairs: _Pairs,
    thresholds: Thresholds,
    known_range: float,
    rounding: float = 0.0,
    quantized_db: float | None = None,
) -> OutputFidelity:
    """Compare by nearness, over the elements that are finite on both sides; the fill of masked places has to be one."""
    signal = noise = power = product = error = 0.0
    size = 0
    low, high, finite, masked = np.inf, -np.inf, True, True
    fill = find_fill([reference for reference, _ in pairs])
    for wanted, given in _iterate_chunks(pairs):
        both = np.isfinite(wanted) & np.isfinite(given)
        if not both.all():
            finite &= bool(np.array_equal(wanted[~both], given[~both], equal_nan=True))
            wanted, given = wanted[both], given[both]
        if (large := np.abs(wanted) >= fill).any():
            masked &= bool(np.allclose(given[large], wanted[large], rtol=thresholds.row_tolerance, atol=0))
            wanted, given = wanted[~large], given[~large]
        if not wanted.size:
            continue
        apart = wanted - given
        size += wanted.size
        signal += float(wanted @ wanted)
        noise += float(apart @ apart)
        power += float(given @ given)
        product += float(wanted @ given)
        error = max(error, float(np.abs(apart).max()))
        low, high = min(low, float(wanted.min())), max(high, float(wanted.max()))
    sqnr: float | None = SQNR_CAP_DB
    cosine: float | None = 1.0
    if noise:
        sqnr = min(SQNR_CAP_DB, 10 * float(np.log10(signal / noise))) if signal else None
        norm = float(np.sqrt(signal) * np.sqrt(power))
        cosine = product / norm if norm else None
    # relative to the range; to the greatest magnitude where all values are one; absolute where that is zero
    of_range = error / (max(high - low, known_range) or abs(high) or 1.0) if error else 0.0
    excess = _explain_lost_differences(
        noise / max(size, 1), known_range, max(abs(low), abs(high)), pairs[0][0].dtype, thresholds
    )
    loud = sqnr is not None and sqnr >= thresholds.min_sqnr_db
    near = (loud and not excess) or of_range <= thresholds.max_error_of_range
    within = of_range <= MOST_ROUNDING if quantized_db is None else sqnr is not None and sqnr >= quantized_db
    is_rounding = not near and error <= rounding and within
    argmax, why_not = _argmax_agreement(pairs)
    output = OutputFidelity(
        name=name,
        sqnr_db=sqnr,
        cosine=cosine,
        max_abs_error=error,
        max_error_of_range=of_range,
        argmax_agreement=argmax,
        finite=finite,
        is_rounding=is_rounding,
        fault=("" if masked else "other numbers in masked places") or (excess if loud and not near else ""),
        passed=finite and masked and (near or is_rounding),
    )
    reasons = {"argmax_agreement": why_not, "agreement": "float outputs are compared by nearness"}
    return explain_missing(output, "the reference is zero everywhere it is finite", reasons)


def _explain_lost_differences(
    mean_square: float, known_range: float, largest: float, dtype: "np.dtype[Any]", thresholds: Thresholds
) -> str:
    """Explain that differences between answers are not kept, which an SQNR does not tell of numbers far from 0.

    The error may be as large as the SQNR allows of numbers around 0 with the same range, whose root mean square is at
    most half of it. Empty where it is, and where that range is not known, or no more than rounding.
    """
    if not known_range > _ROUNDINGS * float(np.finfo(dtype).eps) * largest:
        return ""
    share, allowed = (
        float(np.sqrt(mean_square)) / known_range,
        10 ** (-min(thresholds.min_sqnr_db, _COARSEST_DB) / 20) / 2,
    )
    if share <= allowed:
        return ""
    return f"the root mean square error is {format_share(share, 3)} of the range, above {format_share(allowed, 3)}"


class Part(NamedTuple):
    """Name numbers of an output that are judged apart, as larger ones would hide that they are lost."""

    name: str
    """``column 1``, ``columns 0, 2``, or ``the probabilities``."""
    axis: int
    places: tuple[int, ...]
    """Places of its numbers along the axis."""
    span: float
    """Range of its numbers (max − min)."""
    is_columns: bool
    """True for quantities in another unit, of which no more is asked than that they are not lost."""

    def take(self, pairs: _Pairs) -> _Pairs:
        """Take its numbers from both sides of each call."""
        return [(wanted.take(self.places, self.axis), given.take(self.places, self.axis)) for wanted, given in pairs]


def find_parts(references: Sequence[Array]) -> list[Part]:
    """Find the parts of a float output that are judged apart: a detector's probabilities, else columns in other units.

    ``references`` are the reference's answers, call by call.
    """
    filled = [reference for reference in references if reference.size]
    probabilities = _find_probabilities(filled) if filled else None
    return [probabilities] if probabilities else list(_split_by_unit(filled)) if filled else []


def measure_losses(name: str, pairs: _Pairs, parts: Sequence[Part], batch: int = 1) -> dict[str, float]:
    """Measure the energy of the errors of a value and of its parts, of the reference's energy there, from 0 to 1.

    It is 1 where shapes differ, or numbers are not finite any more. Keys are names for people; ``name`` is the whole's.
    Where a value's first axis is a ``batch`` of several samples, it is measured sample by sample, too: large samples
    hide what small ones lose.
    """
    if any(wanted.shape != given.shape for wanted, given in pairs):
        return {name: 1.0}
    filled = [pair for pair in pairs if pair[0].size]
    taken = {name: filled, **{f"{part.name} of {name}": part.take(filled) for part in parts}} if filled else {}
    figures = {key: _compare_floats(name, numbers, THRESHOLDS["int8"], 0.0) for key, numbers in taken.items()}
    losses = {
        key: min(1.0, 10 ** (-each.sqnr_db / 10)) if each.finite and each.sqnr_db is not None else 1.0
        for key, each in figures.items()
    }
    by_sample = _measure_by_sample(filled, batch)
    return losses if by_sample is None else {**losses, f"{name}, sample by sample": by_sample}


def _measure_by_sample(pairs: _Pairs, batch: int) -> float | None:
    """Measure the mean loss of samples along the first axis; None where that is not the batch, or samples are small."""
    if batch < 2 or not pairs or any(wanted.shape[:1] != (batch,) for wanted, _ in pairs):
        return None
    fill = find_fill([wanted for wanted, _ in pairs])
    samples = [sample for pair in pairs for sample in zip(*pair, strict=True)]
    signal, noise = np.array([_measure_energies(*sample, fill) for sample in samples]).T
    return average_over_samples(signal, noise, pairs[0][0].size / batch)


def _measure_energies(wanted: Array, given: Array, fill: float) -> tuple[float, float]:
    """Measure the energies of what is wanted and of its error, where both are finite and do not fill masked places."""
    signal = noise = 0.0
    for right, other in _iterate_chunks([(wanted, given)]):
        used = np.isfinite(right) & np.isfinite(other) & (np.abs(right) < fill)
        if not used.all():
            right, other = right[used], other[used]
        apart = other - right
        signal += float(right @ right)
        noise += float(apart @ apart)
    return signal, noise


def find_audible(energies: Array) -> Array:
    """Find the samples that are no silence, by the energy of each: bools, [samples]."""
    some = energies[energies > 0]
    return (energies > 0) & (energies >= _SILENT * np.median(some)) if some.size else energies > 0


def average_over_samples(signal: Array, noise: Array, numbers: float) -> float | None:
    """Average the energy of errors, of each sample's own, which counts as 1 at most; silent samples are left out.

    ``signal`` and ``noise`` are energies by sample, [samples]; ``numbers`` is how many numbers a sample has. None where
    these are few, and where all samples are silent.
    """
    audible = find_audible(signal)
    if numbers < _FEWEST_NUMBERS or not audible.any():
        return None
    return float(np.minimum(1.0, noise[audible] / signal[audible]).mean())


def _find_probabilities(references: Sequence[Array]) -> Part | None:
    """Find the probabilities in the head of a detector, [images, numbers, boxes] or [images, boxes, numbers].

    Four to six of the numbers are coordinates, 30 or more in some place; all others are from 0 to 1, and some reach
    0.1. None for other outputs.
    """
    rank = references[0].ndim
    for axis in (1, 2) if rank == 3 else ():
        others = tuple(other for other in range(rank) if other != axis)
        low = np.min([reference.min(others) for reference in references], axis=0)
        high = np.max([reference.max(others) for reference in references], axis=0)
        probable, large = (low >= 0) & (high <= 1), np.maximum(-low, high) >= _LEAST_PIXELS
        if large.sum() in _COORDINATES and (probable | large).all() and high[probable].max(initial=0) >= _LEAST_SCORE:
            return Part("the probabilities", axis, tuple(map(int, np.flatnonzero(probable))), 1.0, is_columns=False)
    return None


def _split_by_unit(references: Sequence[Array]) -> Iterator[Part]:
    """Group columns whose spans are much smaller than others', as a risk's beside a price's; yield the groups.

    Columns are the last axis, or axis 1 of four axes or more; of up to 32, which are quantities rather than features or
    classes. Spans that may be rounding, scores below 0.1, and outputs without numbers from 30 on are not looked at.
    """
    shape = references[0].shape
    axis = 1 if len(shape) >= 4 else -1
    if len(shape) < 2 or not 2 <= shape[axis] <= _MOST_COLUMNS or any(a.shape[axis] != shape[axis] for a in references):
        return
    ends = np.full(shape[axis], np.inf), np.full(shape[axis], -np.inf)
    for reference in references:
        columns = np.moveaxis(reference, axis, -1).reshape(-1, shape[axis])
        finite = np.isfinite(columns)
        np.minimum(ends[0], columns.min(0, initial=np.inf, where=finite), out=ends[0])
        np.maximum(ends[1], columns.max(0, initial=-np.inf, where=finite), out=ends[1])
    varied = ends[1] > ends[0]
    ends = np.where(varied, ends[0], 0.0), np.where(varied, ends[1], 0.0)
    largest = np.maximum(np.abs(ends[0]), np.abs(ends[1]))
    if not largest.max() >= _LEAST_PIXELS:
        return
    spans = ends[1] - ends[0]
    varied &= spans > _ROUNDINGS * float(np.finfo(np.float32).eps) * largest
    varied &= (ends[0] < 0) | (largest >= _LEAST_SCORE)
    order = [int(index) for index in np.argsort(-spans) if varied[index]]
    groups: list[list[int]] = []
    for index in order:
        if groups and spans[groups[-1][-1]] < _OTHER_UNIT * spans[index]:
            groups[-1].append(index)
        else:
            groups.append([index])
    for group in groups[1:]:  # the first has been compared: it is as large as the whole
        places = tuple(sorted(group))
        words = f"column{'s'[: len(places) - 1]} {', '.join(map(str, places))}"
        yield Part(words, axis, places, float(spans[group].max()), is_columns=True)


def _iterate_chunks(pairs: _Pairs) -> Iterator[tuple[Array, Array]]:
    """Yield flat float64 pieces of both sides, so that the copies stay small."""
    for pair in pairs:
        wanted, given = (array.reshape(-1) for array in pair)
        for start in range(0, wanted.size, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            yield wanted[chunk].astype(np.float64), given[chunk].astype(np.float64)


def _argmax_agreement(pairs: _Pairs) -> tuple[float | None, str]:
    """Compute the share of positions with the same greatest class; None and why where there are no classes."""
    shape = pairs[0][0].shape
    axis = 1 if len(shape) >= 4 else -1
    if len(shape) < 2 or shape[axis] < 2:
        return None, "the output has no axis of classes"
    same = [(reference.argmax(axis) == actual.argmax(axis)).reshape(-1) for reference, actual in pairs]
    return float(np.mean(np.concatenate(same))), ""
