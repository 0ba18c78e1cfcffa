"""Check a run against budgets and a stored baseline, a sentence for each check, and keep runs and fleets as baselines.

A regression is worse by more than the tolerance, *and* its interval leaves out that nothing changed. Latency passes if
its estimate is within the tolerance and its interval ends below twice the tolerance: so much more is ruled out then,
at 97.5 %. The metric may be worse by the allowed drop. What is missing or too imprecise is not judged, which is neither
passed nor failed. The gate fails on it, with one exception: a difference from the baseline that is within the tolerance
by its estimate alone; ``strict`` fails on that, too.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import copy_folder, replace_folder
from enginesmith.pipeline.errors import EnginesmithError, ModelError, UsageError, storage_errors
from enginesmith.pipeline.measure.quality import Quality, sign_of
from enginesmith.pipeline.measure.statistics import LEAST_LAUNCHES, NOISE_REMEDY, SAMPLE_FLOORS, TOO_NOISY, Interval
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.results import differences, remeasure, verdicts
from enginesmith.pipeline.results import fleet as fleets
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.comparison import (
    MetricDelta,
    Quantity,
    compare_latency,
    compare_metrics,
    spread_of_peaks,
)
from enginesmith.pipeline.results.earlier_fleet import Earlier
from enginesmith.pipeline.results.fleet import RUNS
from enginesmith.pipeline.results.gate_report import CheckState, Gate, GateCheck
from enginesmith.pipeline.results.package import describe
from enginesmith.pipeline.results.remeasure import Stored
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.results.verdicts import explain_failure, judge_budgets, why_ineligible
from enginesmith.pipeline.units import format_bytes, format_metric, ms

DEFAULT_SECONDS = 20.0
"""The longest time for measuring again: what ``benchmarks/gate_power.py`` is run with."""

_NO_BUDGET = "nothing was judged: neither the recipe nor an option sets a budget"
_TOLERANCE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_COMPARED: dict[Quantity, tuple[str, Callable[[float], str]]] = {
    "peak_bytes": ("peak memory", format_bytes),
    "size_bytes": ("size", format_bytes),
    "drop": ("accuracy drop", lambda value: format_metric(value, "+")),
}
"""Number that is compared with the baseline, besides latency → its name, and how it is written."""
_SIDES = ("the baseline", "the run")


@dataclass(frozen=True)
class Demands:
    """Rules that a run is checked by."""

    budgets: Budgets
    min_sqnr_db: float | None = None
    tolerance: float = 0.05
    """Share by which a number may be worse than the baseline's."""
    any_machine: bool = False
    measure: bool = True
    """True where latency may be measured again, side by side."""
    seconds: float = DEFAULT_SECONDS
    progress: Callable[[str], None] = lambda text: None
    strict: bool = False
    trust: bool = False
    """True where engines with machine code are loaded to measure them: the user trusts who made both runs."""


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
        UsageError: one of them is no run, nothing was measured in the baseline, or there is no such variant.
    """
    run = runs.read(folder)
    failure, unmeasured = explain_failure(run.asked_for), why_unmeasured(folder, run)
    if text := failure or unmeasured:
        check = GateCheck(name="engines", against="run", state="failed" if failure else "unjudged", text=text)
        return Gate(run=str(folder), variant=None, tolerance=demands.tolerance, usable=False, verdicts=(check,))
    after = stored_in(folder, variant)
    if after is None:
        text = f"the run has no winner: {run.winner_reason}{_next_command(folder, run)}"
        failed = GateCheck(name="winner", against="run", state="failed", text=text)
        return Gate(run=str(folder), variant=None, tolerance=demands.tolerance, verdicts=(failed,))
    before = stored_in(baseline, variant) if baseline else None
    if baseline and before is None:
        raise UsageError(
            f"the baseline {baseline} has no winner: {runs.read(baseline).winner_reason}",
            "name a variant of it with --variant, or give another run",
        )
    checks = [
        *_check_engines(after),
        *_check_engine_file(after),
        *_check_budgets(after, demands),
        *(_check_regressions(before, after, demands) if before else ()),
    ]
    if demands.strict:
        if not checks:
            checks = [GateCheck(name="budgets", against="run", state="unjudged", text=_NO_BUDGET)]
        checks = [check.model_copy(update={"required": True}) for check in checks]
    return Gate(
        run=str(folder),
        variant=after.record.id,
        baseline=None if baseline is None else str(baseline),
        baseline_variant=before and before.record.id,
        tolerance=demands.tolerance,
        verdicts=tuple(checks),
        cautions=tuple(_cautions(before, after, checks)),
    )


def stored_in(folder: Path, variant: str | None) -> Stored | None:
    """Read a run and its variant of that name, else the winner; None without a winner.

    Raises:
        UsageError: there is no such run or variant, or nothing was measured in it.
    """
    run = runs.read(folder)
    if unmeasured := why_unmeasured(folder, run):
        raise UsageError(unmeasured, "give another run")
    name = variant or run.winner
    if name is None:
        return None
    return Stored(folder if folder.is_dir() else folder.parent, run, runs.find_record(run, name))


def why_unmeasured(folder: Path, run: Run) -> str:
    """Explain why nothing was measured in a run, and what to do; empty if something was."""
    if any(record.status == "measured" for record in run.records):
        return ""
    failed = run.baseline.reason.partition("\n")[0] if run.baseline.status == "failed" else ""
    known = "" if run.no_winner == "nothing measured" else run.winner_reason
    missing = run.baseline.reason or run.baseline.reasons.get("latency", "no reason is known")
    why = failed or known or (missing.partition("\n")[0] if run.complete else "the run is not complete")
    return f"nothing was measured in {folder}: {why}{_next_command(folder, run)}"


def _next_command(folder: Path, run: Run) -> str:
    """Name the command that helps a run without a winner, as the end of a sentence; empty where the run names it."""
    if run.no_winner == "not measured yet":
        return ""
    if not run.complete or not any(record.status == "measured" for record in run.records):
        return f"; to continue: `enginesmith resume {folder}`"
    stored = [Stored(folder, run, record) for record in run.variants if record.status == "measured"]
    advice = [_advise_on_p99(each) for each in stored] if run.recipe.budgets.max_p99_ms else []
    judge = f"; to judge one variant: `enginesmith gate {folder} --variant {stored[0].record.id}`" if stored else ""
    return next(filter(None, advice), judge)


def _check_engines(after: Stored) -> Iterator[GateCheck]:
    """Report requested engines of which nothing was measured, although no variant of them failed.

    One that was dropped in the race was judged there, and nobody asked for those that a search found.
    """
    interrupted = any(not step.reached for step in after.run.steps)
    listed = after.run.recipe.variants == "listed" or interrupted
    for engine, records in _group_by_engine(after.run):
        skipped = (record for record in records if record.status == "skipped" and listed and not record.dropped)
        left = next((record for record in records if record.status == "built"), None) or next(skipped, None)
        if left is not None and not any(record.status == "measured" for record in records):
            resume = f"; `enginesmith resume {after.folder}` measures it" if not after.run.complete else ""
            text = f"{engine} was not measured ({left.status}): {left.reason or 'no reason is known'}{resume}"
            # an engine for another machine may stay open here, and one that an interruption left may not
            yield GateCheck(name="engines", against="run", state="unjudged", required=interrupted, text=text)


def _check_engine_file(after: Stored) -> Iterator[GateCheck]:
    """Report an engine that is not the one that was measured; where the run was taken along without it, nothing."""
    stored = after.record.artifact
    if stored is not None and (after.folder / stored.path).is_file():
        try:
            describe.check_engine_file(after.folder, stored)
        except ModelError as error:
            text = f"{error.message}; {error.remedy}"
            yield GateCheck(name="engine", against="run", state="failed", text=text)


def _group_by_engine(run: Run) -> Iterator[tuple[str, list[VariantRecord]]]:
    for engine in dict.fromkeys(record.engine for record in run.requested):
        yield engine, [record for record in run.requested if record.engine == engine]


def _check_budgets(after: Stored, demands: Demands) -> Iterator[GateCheck]:
    """Fail a variant that was not measured or must not be used, whatever its numbers are, and judge its budgets."""
    if reason := why_ineligible(after.record):
        yield GateCheck(name="status", against="run", state="failed", text=reason)
    eager, sqnr = after.record.id == after.run.baseline.id, demands.min_sqnr_db
    if eager and sqnr is not None:
        text = "fidelity has no SQNR: eager is what the variants are compared with"
        yield GateCheck(name="min_sqnr_db", against="budget", state="passed", text=text, limit=sqnr)
    for verdict in judge_budgets(after.record, demands.budgets, after.run.deciding_batch, None if eager else sqnr):
        state: CheckState = "passed" if verdict.passed else "unjudged" if verdict.actual is None else "failed"
        text = verdicts.format_verdict(verdict) + (_advise_on_p99(after) if verdict.budget == "max_p99_ms" else "")
        common = {"text": text, "limit": verdict.limit, "actual": verdict.actual}
        yield GateCheck.model_validate({"name": verdict.budget, "against": "budget", "state": state, **common})


def _advise_on_p99(stored: Stored) -> str:
    """Name the command that measures enough samples for a p99; empty where that is not what is missing."""
    row, floor = stored.record.row(stored.run.deciding_batch), SAMPLE_FLOORS[99.0]
    if row is None or row.p99_ms is not None or not row.n:
        return ""
    return f"; measure for longer: {_command(stored, *verdicts.options_for_more(stored.run, row, floor / row.n))}"


def _command(stored: Stored, options: str, remark: str) -> str:
    return f"`enginesmith optimize {stored.run.model.source} … {options} --out {stored.folder} --replace`{remark}"


def _check_regressions(before: Stored, after: Stored, demands: Demands) -> Iterator[GateCheck]:
    if after.record.status == "measured":
        yield _check_latency(before, after, demands)
    for metric in compare_metrics(before.run, after.run, before.record, after.record, _SIDES):
        if metric.name == "metric" and after.record.quality and metric.before is not None and metric.after is not None:
            yield _check_metric(metric, after.record.quality, demands.budgets.max_drop or 0.0)
        elif metric.name in _COMPARED and metric.before is not None:
            yield _check_quantity(metric, metric.before, demands.tolerance)
        elif metric.name in _COMPARED and metric.after is not None and metric.name != "size_bytes":  # eager has no file
            text = f"{_COMPARED[metric.name][0]} was not measured in the baseline, so it is not compared"
            yield GateCheck(name=metric.name, against="baseline", state="unjudged", required=False, text=text)


def _check_quantity(metric: MetricDelta, before: float, tolerance: float) -> GateCheck:
    """Check memory and size by the tolerance, and quality by its interval alone, as a loss may be near 0."""
    title, shown = _COMPARED[metric.name]
    allowed = 0.0 if metric.name == "drop" else tolerance * abs(before)
    worse = metric.after is None or not metric.comparable or metric.after - before > allowed
    if metric.after is None or metric.significant is None:
        state: CheckState = "unjudged"
        own = f"{title} of {shown(metric.after)}" if metric.after is not None else title
        text = f"{own} cannot be compared with the baseline's {shown(before)}: {metric.note or 'no reason is known'}"
    else:
        state = "failed" if metric.significant and worse else "passed"
        text = f"{title} is {shown(metric.after)}, the baseline's {shown(before)}"
        if metric.name != "drop" and before:
            text += f" ({_format_change(metric.after / before)}; {100 * tolerance:g} % more is allowed"
            same = f", and peaks of one engine lie up to {format_bytes(spread_of_peaks(before))} apart"
            text += f"{same if worse and state == 'passed' else ''})"
    required, after = worse or state != "unjudged", metric.after
    return GateCheck(
        name=metric.name, against="baseline", state=state, required=required, text=text, before=before, actual=after
    )


def _check_metric(metric: MetricDelta, quality: Quality, allowed: float) -> GateCheck:
    """Check that the metric is not worse than the baseline's by more than is allowed.

    Drops are against each run's own model: one that was trained again may lose nothing in its engine and yet be worse.
    """
    assert metric.before is not None
    assert metric.after is not None
    worse = sign_of(quality.metric) * (metric.before - metric.after) > allowed
    text = f"{quality.title} is {format_metric(metric.after)}, the baseline's {format_metric(metric.before)}"
    state: CheckState = "failed" if worse else "passed"
    if worse and metric.significant is None:
        state, text = "unjudged", f"{text}: {metric.note}"
    elif worse and not metric.significant:
        state, text = "passed", f"{text}, which {quality.samples} samples cannot tell apart"
    return GateCheck(
        name="metric", against="baseline", state=state, text=text, before=metric.before, actual=metric.after
    )


def _format_change(ratio: float) -> str:
    return f"{ratio - 1:+.1%}".replace("-", "−")


def _make_latency_check(state: CheckState, text: str, **more: Any) -> GateCheck:
    return GateCheck(name="latency_ms", against="baseline", state=state, text=text, **more)


def _check_latency(before: Stored, after: Stored, demands: Demands) -> GateCheck:
    """Check latency by measuring side by side where that can be done, else by what both runs stored."""
    apart = differences.compare_devices(before.run, after.run)
    if apart and not demands.any_machine:
        where = "; ".join(map(str, apart))
        text = f"latency was measured on different machines ({where}); --any-machine compares it anyway"
        return _make_latency_check("unjudged", text)
    if remeasure.same(before, after):
        if changed := differences.compare_runtimes(before.run, after.run, after.record.engine):
            what = ", ".join(f"{version.name} is {version.after}, and was {version.before}" for version in changed)
            why = f"the engine is the baseline's, and measured now, both would run on the same runtime: {what}"
            return _compare_stored_latency(before, after, demands, why)
        text = "the engine is the baseline's, byte for byte: its latency is the same"
        return _make_latency_check("passed", text, basis="the same engine")
    if demands.measure:
        why = remeasure.why_not(before, after, any_machine=demands.any_machine, trust=demands.trust)
    else:
        why = "--no-measure"
    if not why:
        try:
            return _measure_latency(before, after, demands)
        except EnginesmithError as error:
            why = error.message
    return _compare_stored_latency(before, after, demands, why)


def _measure_latency(before: Stored, after: Stored, demands: Demands) -> GateCheck:
    def decided(ratio: Interval) -> bool:
        return ratio.high < 1 + demands.tolerance or ratio.low > 1 + demands.tolerance

    batch, trust = after.run.deciding_batch, demands.trust
    result = remeasure.remeasure(
        before, after, batch, seconds=demands.seconds, decided=decided, progress=demands.progress, trust=trust
    )
    basis = f"measured side by side now, {result.launches} launches of each at batch {batch}"
    return _judge_ratio(result.ratio, result.before_ms, result.after_ms, demands.tolerance, basis)


def _compare_stored_latency(before: Stored, after: Stored, demands: Demands, why: str) -> GateCheck:
    """Judge latency by what both runs stored; without an interval that can be judged by, it is not judged."""
    batch = after.run.deciding_batch
    change = compare_latency(before.run, after.run, before.record.id, batch, after.record.id, _SIDES)
    basis = f"from what both runs stored, by {change.basis}" if change.basis else "from what both runs stored"
    basis = "; ".join(filter(None, [f"{basis} ({why})", change.note]))
    rows = [side.record.row(batch) for side in (before, after)]
    before_ms, after_ms = (row.p50_ms if row else None for row in rows)
    if change.median is None:
        message = f"latency cannot be compared with the baseline's: {change.note}"
        return _make_latency_check("unjudged", message, basis=basis)
    if change.low is not None and change.high is not None and (change.too_noisy or change.significant is not None):
        ratio = Interval(median=change.median, low=change.low, high=change.high)
        return _judge_ratio(ratio, before_ms, after_ms, demands.tolerance, basis)
    advice = [
        f"measure the {which} again for longer: {_command(side, *options)}"
        for which, side, row in (("baseline", before, rows[0]), ("run", after, rows[1]))
        if row and (row.launches or 0) < LEAST_LAUNCHES
        for options in [verdicts.options_for_more(side.run, row, LEAST_LAUNCHES / (row.launches or 1))]
    ]
    than = f"{abs(change.median - 1):.1%} {'higher' if change.median > 1 else 'lower'} than the baseline's"
    text = "; ".join([f"by its estimate alone, latency is {than}", basis, *advice])
    common = {"before": before_ms, "actual": after_ms, "basis": basis}
    return _make_latency_check("unjudged", text, required=change.median > 1 + demands.tolerance, **common)


def _judge_ratio(ratio: Interval, before: float | None, after: float | None, tolerance: float, basis: str) -> GateCheck:
    """Judge the ratio of times; one whose interval is too wide to decide is not judged."""
    common = {"before": before, "actual": after, "basis": basis}
    if ratio.too_noisy:
        text = f"latency cannot be compared with the baseline's: {TOO_NOISY}; {NOISE_REMEDY}; {basis}"
        return _make_latency_check("unjudged", text, **common)
    worse = ratio.median > 1 + tolerance
    unclear = ratio.low <= 1 if worse else ratio.high > 1 + 2 * tolerance
    state: CheckState = "unjudged" if unclear else "failed" if worse else "passed"
    ends = f"[{_format_change(ratio.low)}, {_format_change(ratio.high)}]"
    alone = f"medians: {ms(after)} and {ms(before)} ms"
    summary = f"latency is {_format_change(ratio.median)} {ends} against the baseline's ({alone})"
    why = f"the interval is too wide to decide; {NOISE_REMEDY}; " if unclear else ""
    text = f"{summary}; {100 * tolerance:g} % more is allowed; {why}{basis}"
    return _make_latency_check(state, text, **common, required=worse or not unclear, change=ratio)


def _cautions(before: Stored | None, after: Stored, checks: list[GateCheck]) -> Iterator[str]:
    if not checks:
        yield _NO_BUDGET
    for engine, records in _group_by_engine(after.run):
        if failure := explain_failure(records, engine):
            yield failure
    if after.record.synthetic_calibration:
        yield "calibrated on random data: its accuracy says nothing about real data"
    if before is None:
        return
    if before.record.id != after.record.id:
        yield f"{after.record.id} is compared with {before.record.id}, the baseline's winner"
    if before.run.model.source != after.run.model.source:
        yield f"the run is of {after.run.model.source}, and the baseline of {before.run.model.source}"
    elif differences.is_same_model(before.run, after.run) is False:
        yield f"{after.run.model.source} has other weights or other code than in the baseline"
    changed = differences.list_differences(before.run, after.run)
    for version in changed.versions:
        yield f"{version.name} is {version.after}, and was {version.before}"


# Keep a run or a fleet as the baseline of later ones: as much of it as they are held against.

_FILES = ("run.json", "samples.npz")


def check_replaceable(source: Path, target: Path, read: Callable[[Path], object] = runs.read) -> None:
    """Insist on a folder that is new, empty, or holds what ``read`` reads, and nothing of what is to be kept.

    Raises:
        UsageError: it is something else, or has the source or a run that a fleet took over in it.
    """
    for folder in (source, *sorted(source.glob(f"{RUNS}/*"))):
        if folder.resolve().is_relative_to(target.resolve()):
            raise UsageError(f"{target} holds {folder} itself", "give another folder: --baseline DIR")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise UsageError(f"{target} is a file", "give a folder: --baseline DIR")
    try:
        read(target)
    except UsageError as error:
        raise UsageError(
            f"{target} is there already, and is no baseline: {error.message}", "give a new folder: --baseline DIR"
        ) from error


def keep(source: Stored, target: Path) -> None:
    """Make a run the baseline in the folder ``target``, whole or not at all; what was the baseline is gone then.

    Raises:
        UsageError: there is something else in that folder.
        StoreError: it cannot be written.
    """
    check_replaceable(source.folder, target)
    with storage_errors(f"the baseline {target}"), replace_folder(target) as whole:
        _copy(source, whole)


def keep_fleet(fleet: Earlier, winners: Mapping[str, Stored], target: Path) -> None:
    """Make a fleet the baseline in the folder ``target``, with the winners of its entries by name.

    Raises:
        UsageError, StoreError: as for a run.
    """
    check_replaceable(fleet.folder, target, fleets.read)
    with storage_errors(f"the baseline {target}"), replace_folder(target) as whole:
        for name, source in winners.items():
            _copy(source, whole / RUNS / name)
        fleets.write(fleet.record.model_copy(update={"last": None}), whole)


def _copy(source: Stored, whole: Path) -> None:
    """Copy the document, the samples, and the files of the variant that later runs are compared with."""
    whole.mkdir(parents=True)
    record = source.record
    paths = [Path(stored.path) for stored in (record.artifact, record.graph, record.test_vector) if stored]
    if outside := next((path for path in paths if path.is_absolute() or ".." in path.parts), None):
        raise UsageError(f"the run names a file outside of its folder: {str(outside)!r}", "run optimize again")
    for folder in sorted({path.parent for path in paths} - {Path()}):
        if (source.folder / folder).is_dir():
            copy_folder(source.folder / folder, whole / folder)
    for name in sorted({*_FILES, *(str(path) for path in paths if path.parent == Path())}):
        if (source.folder / name).is_file():
            shutil.copy2(source.folder / name, whole / name)
