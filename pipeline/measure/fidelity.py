"""Compare outputs with the reference's: numbers per output, the worst over all outputs, and a verdict.

SQNR = 10·log10(Σ reference² / Σ (reference − actual)²), in float64, over all samples together. Identical outputs have
no finite one: they get ``SQNR_CAP_DB``, as does everything above it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.errors import FidelityError, UsageError
from enginesmith.pipeline.tensors import Array, Feeds

SQNR_CAP_DB = 200.0
_CHUNK = 1 << 20


class Thresholds(BaseModel):
    """What an output must reach: float outputs one of the first two, the others the last; none may turn NaN or Inf."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_sqnr_db: float
    max_error_of_range: float
    """Greatest absolute error as a share of the reference's range (max − min)."""
    min_agreement: float = 1.0
    """Share of equal elements of integer and bool outputs."""


THRESHOLDS: dict[str, Thresholds] = {
    "fp32": Thresholds(min_sqnr_db=90, max_error_of_range=1e-4),
    "tf32": Thresholds(min_sqnr_db=45, max_error_of_range=5e-3, min_agreement=0.99),
    "fp16": Thresholds(min_sqnr_db=40, max_error_of_range=1e-2, min_agreement=0.99),
    "bf16": Thresholds(min_sqnr_db=25, max_error_of_range=5e-2, min_agreement=0.95),
    "fp8": Thresholds(min_sqnr_db=10, max_error_of_range=1e-1, min_agreement=0.9),
    "int8": Thresholds(min_sqnr_db=10, max_error_of_range=1e-1, min_agreement=0.9),
    "int4": Thresholds(min_sqnr_db=6, max_error_of_range=2e-1, min_agreement=0.8),
}
"""fp32's are the project's requirement; the others tell a broken graph from a coarse one."""


class OutputFidelity(BaseModel):
    """One output against the reference. What is None has its reason under its name in ``reasons``."""

    model_config = ConfigDict(frozen=True)

    name: str
    sqnr_db: float | None = None
    cosine: float | None = None
    max_abs_error: float | None = None
    max_error_of_range: float | None = None
    argmax_agreement: float | None = None
    """Share of positions whose greatest class is the same: over axis 1 of images (4 axes or more), else the last."""
    agreement: float | None = None
    """Share of equal elements, for integer and bool outputs."""
    finite: bool = True
    """No NaN or Inf but where the reference has the same one."""
    passed: bool = False
    reasons: dict[str, str] = {}


class Fidelity(BaseModel):
    """The worst over all outputs, number by number, and the outputs themselves."""

    model_config = ConfigDict(frozen=True)

    sqnr_db: float | None = None
    cosine: float | None = None
    max_abs_error: float | None = None
    max_error_of_range: float | None = None
    argmax_agreement: float | None = None
    finite: bool = True
    passed: bool = False
    outputs: tuple[OutputFidelity, ...] = ()
    reasons: dict[str, str] = {}


def thresholds_for(precision: str, min_sqnr_db: float | None = None) -> Thresholds:
    """Look up the thresholds of a precision; an SQNR that was asked for stands instead of its first two.

    Raises:
        UsageError: it is not known.
    """
    if precision not in THRESHOLDS:
        raise UsageError(f"there is no precision {precision!r}", f"use one of {', '.join(THRESHOLDS)}")
    asked = {} if min_sqnr_db is None else {"min_sqnr_db": min_sqnr_db, "max_error_of_range": 0.0}
    return THRESHOLDS[precision].model_copy(update=asked)


def compare(reference: Feeds, actual: Feeds, thresholds: Thresholds) -> Fidelity:
    """Compare outputs with the reference's, by name.

    Raises:
        FidelityError: an output is missing, or has another shape or another kind of dtype.
    """
    return compare_calls([(reference, actual)], thresholds)


def compare_calls(calls: Sequence[tuple[Feeds, Feeds]], thresholds: Thresholds) -> Fidelity:
    """Compare the outputs of several calls with the reference's; each is the reference's outputs and those in question.

    Samples of all calls are pooled, as those of one larger batch are.

    Raises:
        FidelityError: an output is missing, or has another shape or another kind of dtype.
    """
    for reference, actual in calls:
        if set(reference) != set(actual):
            raise FidelityError(f"the outputs are {list(actual)}, and the reference's are {list(reference)}")
    names = calls[0][0]
    outputs = tuple(_output(name, [(one[name], two[name]) for one, two in calls], thresholds) for name in names)
    worst = {
        "sqnr_db": _worst(min, outputs, "sqnr_db"),
        "cosine": _worst(min, outputs, "cosine"),
        "max_abs_error": _worst(max, outputs, "max_abs_error"),
        "max_error_of_range": _worst(max, outputs, "max_error_of_range"),
        "argmax_agreement": _worst(min, outputs, "argmax_agreement"),
    }
    reasons = {name: "; ".join(_reasons(outputs, name)) for name, value in worst.items() if value is None}
    finite, passed = (all(getattr(output, field) for output in outputs) for field in ("finite", "passed"))
    return Fidelity(**worst, finite=finite, passed=passed, outputs=outputs, reasons=reasons)


def _worst(pick: Callable[[Iterable[float]], float], outputs: Sequence[OutputFidelity], field: str) -> float | None:
    values = [value for output in outputs if (value := getattr(output, field)) is not None]
    return pick(values) if values else None


def _reasons(outputs: Sequence[OutputFidelity], field: str) -> list[str]:
    return list(dict.fromkeys(output.reasons.get(field, "") for output in outputs)) or ["there are no outputs"]


_Pairs = Sequence[tuple[Array, Array]]
"""An output of the reference and of what is compared with it, for each call."""


def _output(name: str, pairs: _Pairs, thresholds: Thresholds) -> OutputFidelity:
    for reference, actual in pairs:
        floats = [np.issubdtype(array.dtype, np.floating) for array in (reference, actual)]
        if reference.shape != actual.shape or floats[0] != floats[1]:
            given, wanted = (f"{array.dtype}{list(array.shape)}" for array in (actual, reference))
            raise FidelityError(f"output {name!r} is {given}, and the reference's is {wanted}")
    filled = [pair for pair in pairs if pair[0].size]
    if not filled:
        return _with_reasons(OutputFidelity(name=name, passed=True), {}, "the output is empty")
    return (_near if np.issubdtype(filled[0][0].dtype, np.floating) else _exact)(name, filled, thresholds)


def _exact(name: str, pairs: _Pairs, thresholds: Thresholds) -> OutputFidelity:
    equal = sum(int(np.count_nonzero(reference == actual)) for reference, actual in pairs)
    agreement = equal / sum(reference.size for reference, _ in pairs)
    error = max(float(np.abs(one.astype(np.float64) - two).max()) for pair in pairs for one, two in _chunks(*pair))
    found = OutputFidelity(
        name=name, max_abs_error=error, agreement=agreement, passed=agreement >= thresholds.min_agreement
    )
    return _with_reasons(found, {}, f"{pairs[0][0].dtype} outputs are compared by equality")


def _near(name: str, pairs: _Pairs, thresholds: Thresholds) -> OutputFidelity:
    sums = _Sums.of(pairs)
    argmax, why_not = _argmax_agreement(pairs)
    sqnr, error = sums.sqnr_db, sums.error_of_range
    near = (sqnr is not None and sqnr >= thresholds.min_sqnr_db) or error <= thresholds.max_error_of_range
    found = OutputFidelity(
        name=name,
        sqnr_db=sqnr,
        cosine=sums.cosine,
        max_abs_error=sums.error,
        max_error_of_range=error,
        argmax_agreement=argmax,
        finite=sums.finite,
        passed=sums.finite and near,
    )
    zero = "the reference is zero everywhere it is finite"
    return _with_reasons(
        found, {"argmax_agreement": why_not, "agreement": "float outputs are compared by nearness"}, zero
    )


def _with_reasons(found: OutputFidelity, reasons: dict[str, str], otherwise: str) -> OutputFidelity:
    empty = [name for name, value in found if value is None]
    return found.model_copy(update={"reasons": {name: reasons.get(name, otherwise) for name in empty}})


@dataclass
class _Sums:
    """Sums over the elements that are finite on both sides."""

    signal: float = 0.0
    noise: float = 0.0
    power: float = 0.0
    product: float = 0.0
    error: float = 0.0
    low: float = np.inf
    high: float = -np.inf
    finite: bool = True

    @classmethod
    def of(cls, pairs: _Pairs) -> "_Sums":
        sums = cls()
        for pair in pairs:
            for wanted, given in _chunks(*pair):
                sums._add(wanted.astype(np.float64), given.astype(np.float64))
        return sums

    def _add(self, wanted: Array, given: Array) -> None:
        both = np.isfinite(wanted) & np.isfinite(given)
        if not both.all():
            self.finite &= bool(np.array_equal(wanted[~both], given[~both], equal_nan=True))
            wanted, given = wanted[both], given[both]
        if not wanted.size:
            return
        apart = wanted - given
        self.signal += float(wanted @ wanted)
        self.noise += float(apart @ apart)
        self.power += float(given @ given)
        self.product += float(wanted @ given)
        self.error = max(self.error, float(np.abs(apart).max()))
        self.low, self.high = min(self.low, float(wanted.min())), max(self.high, float(wanted.max()))

    @property
    def sqnr_db(self) -> float | None:
        if not self.noise:
            return SQNR_CAP_DB
        return min(SQNR_CAP_DB, 10 * float(np.log10(self.signal / self.noise))) if self.signal else None

    @property
    def cosine(self) -> float | None:
        if not self.noise:
            return 1.0
        norm = float(np.sqrt(self.signal) * np.sqrt(self.power))
        return self.product / norm if norm else None

    @property
    def error_of_range(self) -> float:
        """Relative to the range; to the greatest magnitude where all values are one; absolute where that is zero."""
        if not self.error:
            return 0.0
        return self.error / (self.high - self.low or abs(self.high) or 1.0)


def _chunks(reference: Array, actual: Array) -> Iterator[tuple[Array, Array]]:
    """Flat pieces of both, so that the float64 copies stay small."""
    one, two = reference.reshape(-1), actual.reshape(-1)
    for start in range(0, one.size, _CHUNK):
        yield one[start : start + _CHUNK], two[start : start + _CHUNK]


def _argmax_agreement(pairs: _Pairs) -> tuple[float | None, str]:
    """Return the share of positions with the same greatest class, or None and why there is none."""
    shape = pairs[0][0].shape
    axis = 1 if len(shape) >= 4 else -1
    if len(shape) < 2 or shape[axis] < 2:
        return None, "the output has no axis of classes"
    same = [(reference.argmax(axis) == actual.argmax(axis)).reshape(-1) for reference, actual in pairs]
    return float(np.mean(np.concatenate(same))), ""
