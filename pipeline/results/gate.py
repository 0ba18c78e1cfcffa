"""Check a run against budgets and a stored baseline, a sentence for each check.

A regression is worse by more than the tolerance, *and* its interval leaves out that nothing changed. What cannot be
judged counts as broken, with the reason: a gate that lets through what it does not know is none.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from enginesmith.pipeline.errors import EnginesmithError, UsageError
from enginesmith.pipeline.measure.statistics import NOISE_REMEDY, TOO_NOISY, Interval
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.results import comparison, remeasure, verdicts
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.comparison import MetricDelta, Quantity, compare_latency, compare_metrics
from enginesmith.pipeline.results.gate_report import Gate, GateCheck
from enginesmith.pipeline.results.remeasure import Limits, Stored
from enginesmith.pipeline.results.verdicts import judge_budgets, why_ineligible
from enginesmith.pipeline.units import format_bytes, ms

DEFAULT_SECONDS = 20.0
"""The longest time for measuring again: what ``benchmarks/gate_power.py`` is run with."""

_TOLERANCE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_HELD: dict[Quantity, tuple[str, Callable[[float], str]]] = {
    "peak_bytes": ("peak memory", format_bytes),
    "size_bytes": ("size", format_bytes),
    "drop": ("loss of quality", lambda value: f"{value:+.4f}"),
}
"""What is held against the baseline besides latency, and how it is written."""


@dataclass(frozen=True)
class Demands:
    """Hold what a run is checked against."""

    budgets: Budgets
    min_sqnr_db: float | None = None
    tolerance: float = 0.05
    """Share by which a number may be worse than the baseline's."""
    any_machine: bool = False
    measure: bool = True
    """Whether latency may be measured again, side by side."""
    seconds: float = DEFAULT_SECONDS
    progress: Callable[[str], None] = lambda text: None


def parse_tolerance(text: str) -> float:
    """Parse the share in ``5%``.

    Raises:
        UsageError: it is no percentage, or one that nothing could exceed.
    """
    match = _TOLERANCE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"cannot read the tolerance {text!r}", "write it in per cent: --tolerance 5%")
    if not float(match[1]) < 100:
        raise UsageError(f"a tolerance of {text} lets nearly everything through", "give less than 100%")
    return float(match[1]) / 100


def gate(folder: Path, demands: Demands, variant: str | None = None, baseline: Path | None = None) -> Gate:
    """Judge a run by budgets and, where one is given, by a baseline run.

    Raises:
        UsageError: one of them is no run, nothing was measured, or there is no such variant.
    """
    after = stored_in(folder, variant)
    if after is None:
        return _without_winner(folder, demands)
    if baseline is None:
        before = None
    elif (before := stored_in(baseline, variant)) is None:
        raise UsageError(
            f"the baseline {baseline} has no winner: {runs.read(baseline).winner_reason}",
            "name a variant of it with --variant, or give another run",
        )
    found = [*_status(after), *_budgets(after, demands)]
    if before is not None:
        found += _regressions(before, after, demands)
    return Gate(
        run=str(folder),
        variant=after.record.id,
        baseline=None if baseline is None else str(baseline),
        baseline_variant=before and before.record.id,
        tolerance=demands.tolerance,
        passed=all(one.passed for one in found),
        verdicts=tuple(found),
        cautions=tuple(_cautions(before, after, found)),
    )


def stored_in(folder: Path, variant: str | None) -> Stored | None:
    """Read a run and its variant of that name, else the winner; None without a winner.

    Raises:
        UsageError: there is no such run or variant, or nothing was measured in it.
    """
    run = runs.read(folder)
    if not any(record.status == "measured" for record in run.records):
        failed = run.baseline.reason.partition("\n")[0] if run.baseline.status == "failed" else ""
        why = failed or run.winner_reason or run.baseline.reason or "the run is not complete"
        raise UsageError(
            f"nothing was measured in {folder}: {why}",
            f"`enginesmith resume {folder}` on a machine that can measure it",
        )
    name = variant or run.winner
    if name is None:
        return None
    return Stored(folder if folder.is_dir() else folder.parent, run, runs.find_record(run, name))


def _without_winner(folder: Path, demands: Demands) -> Gate:
    run = runs.read(folder)
    broken = GateCheck(name="winner", against="run", passed=False, text=f"the run has no winner: {run.winner_reason}")
    return Gate(run=str(folder), variant=None, tolerance=demands.tolerance, passed=False, verdicts=(broken,))


def _status(after: Stored) -> Iterator[GateCheck]:
    """Fail a variant that was not measured or must not be used, whatever its numbers are."""
    if reason := why_ineligible(after.record):
        yield GateCheck(name="status", against="run", passed=False, text=reason)


def _budgets(after: Stored, demands: Demands) -> Iterator[GateCheck]:
    sqnr = demands.min_sqnr_db if after.record.id != after.run.baseline.id else None
    for one in judge_budgets(after.record, demands.budgets, after.run.deciding_batch, sqnr):
        yield GateCheck(
            name=one.budget,
            against="budget",
            passed=one.passed,
            text=verdicts.format_verdict(one),
            limit=one.limit,
            actual=one.actual,
        )


def _regressions(before: Stored, after: Stored, demands: Demands) -> Iterator[GateCheck]:
    if after.record.status == "measured":
        yield _latency(before, after, demands)
    for one in compare_metrics(before.run, after.run, before.record, after.record):
        if one.name in _HELD and one.before is not None:
            yield _quantity(one, demands.tolerance)


def _quantity(one: MetricDelta, tolerance: float) -> GateCheck:
    """Check memory and size by the tolerance, and quality by its interval alone, as a loss may be near 0."""
    title, shown = _HELD[one.name]
    assert one.before is not None
    common = {"name": one.name, "against": "baseline", "before": one.before, "actual": one.after}
    if one.after is None or one.significant is None:
        text = f"{title} cannot be held against the baseline's {shown(one.before)}: {one.note or 'no reason is known'}"
        return GateCheck.model_validate({**common, "passed": False, "text": text})
    allowed = 0.0 if one.name == "drop" else tolerance * abs(one.before)
    broken = one.significant and one.after - one.before > allowed
    said = f"{title} is {shown(one.after)}, the baseline's {shown(one.before)}"
    if one.name != "drop" and one.before:
        said += f" ({one.after / one.before - 1:+.1%}; {100 * tolerance:g} % more is allowed)"
    return GateCheck.model_validate({**common, "passed": not broken, "text": said})


def _latency(before: Stored, after: Stored, demands: Demands) -> GateCheck:
    """Check latency by measuring side by side where that can be done, else by what both runs stored."""
    apart = comparison.compare_devices(before.run, after.run)
    if apart and not demands.any_machine:
        where = "; ".join(f"{one.name} {one.before} and {one.after}" for one in apart)
        said = f"latency was measured on different machines ({where}); --any-machine compares it all the same"
        return GateCheck(name="latency_ms", against="baseline", passed=False, text=said)
    if remeasure.same(before, after):
        said = "the engine is the baseline's, byte for byte: its latency is the same"
        return GateCheck(name="latency_ms", against="baseline", passed=True, text=said, basis="the same engine")
    why = remeasure.why_not(before, after, any_machine=demands.any_machine) if demands.measure else "--no-measure"
    if not why:
        try:
            return _measured(before, after, demands)
        except EnginesmithError as error:
            why = error.message
    return _from_stored(before, after, demands, why)


def _measured(before: Stored, after: Stored, demands: Demands) -> GateCheck:
    def decided(ratio: Interval) -> bool:
        return ratio.high < 1 + demands.tolerance or ratio.low > 1 + demands.tolerance

    limits = Limits(demands.seconds, decided, demands.progress)
    found = remeasure.remeasure(before, after, after.run.deciding_batch, limits)
    basis = f"measured side by side now, {found.launches} launches of each at batch {found.batch}"
    return _judged(found.ratio, found.before_ms, found.after_ms, demands.tolerance, basis)


def _from_stored(before: Stored, after: Stored, demands: Demands, why: str) -> GateCheck:
    """Judge latency by what both runs stored; a missing interval is a breach."""
    batch = after.run.deciding_batch
    change = compare_latency(before.run, after.run, before.record.id, batch, after.record.id)
    basis = f"from what both runs stored, by {change.basis}" if change.basis else "from what both runs stored"
    basis = "; ".join(filter(None, [f"{basis} ({why})", change.note]))
    rows = [stored.record.row(batch) for stored in (before, after)]
    before_ms, after_ms = (row.p50_ms if row else None for row in rows)
    if change.median is None:
        said = f"latency cannot be held against the baseline's: {change.note}"
        return GateCheck(name="latency_ms", against="baseline", passed=False, text=said, basis=basis)
    if change.too_noisy:
        return _too_noisy(before_ms, after_ms, basis)
    if change.low is None or change.high is None or change.significant is None:
        slower = change.median > 1 + demands.tolerance
        text = f"latency is {change.median - 1:+.1%} against the baseline's, {basis}"
        return GateCheck(
            name="latency_ms",
            against="baseline",
            passed=not slower,
            text=text,
            before=before_ms,
            actual=after_ms,
            basis=basis,
        )
    ratio = Interval(median=change.median, low=change.low, high=change.high)
    return _judged(ratio, before_ms, after_ms, demands.tolerance, basis)


def _judged(ratio: Interval, before: float | None, after: float | None, tolerance: float, basis: str) -> GateCheck:
    if ratio.too_noisy:
        return _too_noisy(before, after, basis)
    broken = ratio.median > 1 + tolerance and ratio.low > 1
    ends = f"[{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]"
    said = f"latency is {ratio.median - 1:+.1%} {ends} against the baseline's ({ms(after)} ms, {ms(before)} ms)"
    unsure = "" if broken or ratio.high <= 1 + tolerance else "more than that cannot be ruled out; "
    return GateCheck(
        name="latency_ms",
        against="baseline",
        passed=not broken,
        text=f"{said}; {100 * tolerance:g} % more is allowed; {unsure}{basis}",
        before=before,
        actual=after,
        change=ratio,
        basis=basis,
    )


def _too_noisy(before: float | None, after: float | None, basis: str) -> GateCheck:
    """Fail the check: what cannot be judged is not let through."""
    text = f"latency cannot be held against the baseline's: {TOO_NOISY}; {NOISE_REMEDY}; {basis}"
    return GateCheck(
        name="latency_ms", against="baseline", passed=False, text=text, before=before, actual=after, basis=basis
    )


def _cautions(before: Stored | None, after: Stored, found: list[GateCheck]) -> Iterator[str]:
    if not found:
        yield "nothing was judged: no budget is set, and no baseline is given"
    if after.record.synthetic_calibration:
        yield "calibrated on made-up data: its accuracy says nothing of real data"
    if before is None:
        return
    if before.record.id != after.record.id:
        yield f"{after.record.id} is held against {before.record.id}, the baseline's winner"
    if before.run.model.source != after.run.model.source:
        yield f"the run is of {after.run.model.source}, and the baseline of {before.run.model.source}"
    changed = comparison.list_differences(before.run, after.run)
    for one in changed.versions:
        yield f"{one.name} is {one.after}, and was {one.before}"
    for name, number in (("peak memory", before.record.peak_bytes), ("quality", before.record.quality)):
        if number is None:
            yield f"{name} was not measured in the baseline, so nothing is held against it"
