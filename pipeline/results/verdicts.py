"""Decide which budgets a variant keeps, which variants may win, and which of them wins.

To add a budget, declare its field in ``options.Budgets`` and add its row to :data:`BUDGETS`.

A variant cannot be used if nothing of it is in the precision that it is called after. A pruned or sparse variant may
win only if it is measurably faster than its dense sibling, for a loss that is allowed. What is unknown keeps no budget.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginesmith.pipeline.engines import BASELINES
from enginesmith.pipeline.errors import WrongEngine
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval, divide
from enginesmith.pipeline.recipe.options import Budgets, Objective
from enginesmith.pipeline.results.explain import find_shortfall
from enginesmith.pipeline.results.run import BestReference, NoWinner, Run, VariantRecord, Verdict
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.units import format_bytes, format_metric, format_seconds

_LONGER = 1.5
"""Factor of measuring time to advise beyond what the number of samples or launches asks for."""
_LONGEST_SECONDS = 60.0
"""Longest measuring time to advise: on a busy machine, a quiet one helps more than minutes."""


def options_for_more(run: Run, row: LatencyRow, factor: float) -> tuple[str, str]:
    """Name options that measure ``factor`` times the row's samples or launches, and remark on a long time."""
    factor, stop = max(factor * _LONGER, 1.0), row.stop
    seconds = factor * ((stop and stop.seconds) or run.recipe.measure.seconds)
    option = f"--measure-time {5 * math.ceil(min(seconds, _LONGEST_SECONDS) / 5)}s"
    if stop is not None and stop.cause == "precise":  # more time alone would not be used
        option += f" --precision-target {run.recipe.measure.precision / math.sqrt(factor * _LONGER):.2g}"
    slow = f" on a quiet machine (at the speed of this run, it would take {format_seconds(seconds)})"
    return option, slow if seconds > _LONGEST_SECONDS else ""


# Budgets, with one row for each.


@dataclass(frozen=True)
class Budget:
    """One limit that can be set: the number that it is about, and how that is written."""

    field: str
    """Field of ``options.Budgets`` or of the recipe; ``min_…`` is a lower bound, everything else an upper one."""
    title: str
    read: Callable[[VariantRecord, int], float | None]
    """Record and deciding batch size → the number, None where it is unknown."""
    explain: Callable[[VariantRecord, int], str | None]
    """Likewise → why the number is unknown."""
    format: Callable[[float], str]
    measured: str = ""
    """Field of the record that is measured for it, where time may be over before."""

    def allows(self, value: float | None, limit: float) -> bool:
        """Tell whether a number is within the limit; an unknown one is not."""
        if value is None:
            return False
        return value >= limit if self.field.startswith("min_") else value <= limit


def _read_latency(name: str) -> Callable[[VariantRecord, int], float | None]:
    return lambda record, batch: getattr(record.row(batch), name, None)


def read_throughput(record: VariantRecord, batch: int) -> float | None:
    """Read the best throughput of all batch sizes, in samples/s."""
    return max((row.throughput_per_s for row in record.latency if row.throughput_per_s is not None), default=None)


def _explain_latency(record: VariantRecord, batch: int) -> str:
    failed = next((row.failure for row in record.latency if row.batch == batch and row.failure), None)
    return failed or record.reasons.get("latency") or record.reason or f"it was not measured at batch {batch}"


def _explain_p99(record: VariantRecord, batch: int) -> str:
    row = record.row(batch)
    return row.reasons.get("p99_ms", "") if row else _explain_latency(record, batch)


def _format_ms(value: float) -> str:
    return f"{value:.4g} ms"


BUDGETS: tuple[Budget, ...] = (
    Budget(
        "max_drop",
        "accuracy drop",
        lambda record, batch: record.quality.drop if record.quality else None,
        lambda record, batch: record.reasons.get("quality", "not asked for"),
        format_metric,
        "quality",
    ),
    Budget(
        "max_memory_bytes",
        "peak memory",
        lambda record, batch: record.peak_bytes,
        lambda record, batch: (
            (record.memory and record.memory.reasons.get("peak_bytes")) or record.reasons.get("memory")
        ),
        format_bytes,
        "memory",
    ),
    Budget("max_latency_ms", "p50 latency", _read_latency("p50_ms"), _explain_latency, _format_ms, "latency"),
    Budget("max_p99_ms", "p99 latency", _read_latency("p99_ms"), _explain_p99, _format_ms, "latency"),
    Budget(
        "min_throughput_per_s",
        "throughput",
        read_throughput,
        _explain_latency,
        lambda value: f"{value:{'.4g' if value < 10_000 else ',.0f'}} samples/s",
        "latency",
    ),
    Budget(
        "max_size_bytes",
        "size",
        lambda record, batch: record.artifact.bytes if record.artifact else None,
        lambda record, batch: "it has no engine file",
        format_bytes,
    ),
    Budget(
        "max_build_seconds",
        "build time",
        lambda record, batch: record.build.seconds if record.build else None,
        lambda record, batch: "no engine is built for it",
        format_seconds,
    ),
    Budget(
        "min_sqnr_db",
        "fidelity",
        lambda record, batch: min(
            (fidelity.sqnr_db for fidelity in record.judged_fidelity if fidelity.sqnr_db is not None), default=None
        ),
        lambda record, batch: "no outputs are floats" if record.judged_fidelity else "its outputs were not judged",
        lambda value: f"SQNR {value:.1f} dB",
    ),
)
_BY_FIELD = {budget.field: budget for budget in BUDGETS}


def why_unknown(record: VariantRecord, field: str, batch: int) -> str:
    """Explain why a budget's number is unknown, in the record's own words where it has some."""
    return _BY_FIELD[field].explain(record, batch) or "it was not measured"


def format_title(field: str) -> str:
    """Name what a budget is about: ``p50 latency``."""
    return _BY_FIELD[field].title if field in _BY_FIELD else field


def format_value(field: str, value: float | None) -> str:
    """Write a number in the budget's unit."""
    if value is None:
        return "unknown"
    return _BY_FIELD[field].format(value) if field in _BY_FIELD else f"{value:g}"


def format_limit(verdict: Verdict) -> str:
    """Write a limit: ``at most 5 ms``."""
    bound = "at least" if verdict.budget.startswith("min_") else "at most"
    return f"{bound} {format_value(verdict.budget, verdict.limit)}"


def format_verdict(verdict: Verdict) -> str:
    """Write a verdict: ``p50 latency is 5.2 ms, and has to be at most 5 ms``; similar numbers are given in full."""
    actual, limit = format_value(verdict.budget, verdict.actual), format_limit(verdict)
    looks_equal = actual == format_value(verdict.budget, verdict.limit)
    if verdict.actual is not None and looks_equal and verdict.actual != verdict.limit:
        actual, limit = f"{actual} ({verdict.actual!r})", f"{limit} ({verdict.limit!r})"
    why = f" ({verdict.reason})" if verdict.reason else ""
    return f"{format_title(verdict.budget)} is {actual}{why}, and has to be {limit}"


def list_unjudged(run: Run) -> list[str]:
    """List budgets that were set and not judged."""
    limits = {**run.recipe.budgets.model_dump(), "min_sqnr_db": run.recipe.min_sqnr_db}
    judged = {verdict.budget for verdict in run.verdicts}
    if run.winner == run.baseline.id:
        judged.add("min_sqnr_db")  # it is what fidelity is measured against
    return [name for name, limit in limits.items() if limit is not None and name not in judged]


# Which variants may win.

_GAIN = 0.95
"""A floor above this share of the dense model's floor counts as hardly lowered."""


def why_ineligible(record: VariantRecord) -> str:
    """Explain why a variant cannot win; empty if it can."""
    if record.reference:
        return f"{record.id} was measured for comparison, and not asked for"
    if record.status != "measured":
        return f"{record.id} was not measured ({record.status}): {record.reason or 'no reason is known'}"
    return f"{record.id} was rejected: {record.rejected}" if record.rejected else ""


def explain_failure(variants: Sequence[VariantRecord], subject: str = "every requested engine") -> str:
    """Explain that every requested engine failed, with the first reason; empty if one did not, or none was requested.

    Eager alone is no result then: it is what the requested engines are compared with.
    """
    if not variants or any(record.status != "failed" for record in variants):
        return ""
    first, *others = variants
    reason = next(iter(first.reason.splitlines()), "no reason is known")
    return f"{subject} failed: {first.id}: {reason}" + (f" (and {len(others)} more)" if others else "")


def judge_precision(record: VariantRecord, device: Device, *, asked: bool = True) -> VariantRecord:
    """Fail a record of which nothing is in the precision of its name, or note its shortfall.

    A file that came in its precision, so that nobody ``asked`` for one, can be used however the engine computes it.
    """
    shortfall = find_shortfall(record, device)
    if shortfall is None or record.status == "failed":
        return record
    share, text = shortfall
    if not asked:
        text = f"its name has the precision that the file is in; {text}"
    if share > 0 or not asked:
        return record.model_copy(update={"shortfall": text})
    return record.model_copy(update={"status": "failed", "reason": text, "failure": WrongEngine.failure})


def judge_compression(
    record: VariantRecord, others: Mapping[str, VariantRecord], budgets: Budgets, batch: int
) -> VariantRecord:
    """Reject a pruned or sparse record that is no faster than its dense sibling, or of unknown loss.

    ``others`` are records by id.
    """
    if record.dense is None or record.status != "measured":
        return record
    reason = _explain_slowness(record, others.get(record.dense), batch)
    if not reason and record.quality is None:
        reason = "how much accuracy it lost is not known: give labeled data with --eval"
    elif not reason and record.quality and budgets.max_drop is None:
        lost = f"it lost {record.quality.drop:.3g} of {record.quality.metric}"
        reason = f"{lost}, and nothing says how much it may: give --max-drop"
    return record.model_copy(update={"rejected": reason})


def _explain_slowness(record: VariantRecord, dense: VariantRecord | None, batch: int) -> str:
    """Explain why it is not faster than its dense sibling; empty if it is."""
    row = record.row(batch)
    if row is None:
        return f"it was not measured at batch {batch}"
    ratio = row.speedup_over_dense
    if ratio is None:
        return f"whether it is faster than {record.dense} is not known: {row.reasons.get('speedup_over_dense', '')}"
    if ratio.low > 1:
        return ""
    verdict = "is slower than" if ratio.high < 1 else "is not measurably faster than"
    sentence = f"it {verdict} {record.dense}: {ratio.times()} at batch {batch}"
    return "; ".join([sentence, *_explain_bounds(record, dense, batch)])


def _explain_bounds(record: VariantRecord, dense: VariantRecord | None, batch: int) -> Iterator[str]:
    """Explain by the limits of the machine why it is no faster, where they were measured."""
    mine, theirs = (
        next((row for row in variant.limits if row.batch == batch), None) if variant else None
        for variant in (record, dense)
    )
    if mine is None or theirs is None or not mine.floor_ms or not theirs.floor_ms:
        yield "measure with --limits to see what bounds it"
        return
    if mine.bound_by == "launch":
        yield "most of its time is spent on starting operators, and pruning does not reduce their number"
    elif mine.bound_by == "memory":
        yield "most of its time is spent on moving data, not on multiplying"
    if mine.floor_ms < _GAIN * theirs.floor_ms:
        yield (
            f"its floor fell from {theirs.floor_ms:.3g} to {mine.floor_ms:.3g} ms, and its measured time did not: "
            "narrow layers use the machine's vectors and tiles less well; try a larger --multiple-of"
        )


def judge_budgets(
    record: VariantRecord, budgets: Budgets, batch: int, min_sqnr_db: float | None = None
) -> tuple[Verdict, ...]:
    """Judge a record by each budget that was set; what is unknown does not pass.

    ``min_sqnr_db`` judges the records that are compared with the baseline, not the baseline itself. It is applied to
    the SQNR of each stage and shape; outputs that are not floating point pass by their own check.
    """
    limits: dict[str, float | None] = {**budgets.model_dump(), "min_sqnr_db": min_sqnr_db}
    verdicts = []
    for budget in BUDGETS:
        if (limit := limits.get(budget.field)) is not None:
            value, judged = budget.read(record, batch), record.judged_fidelity
            reason = "" if value is not None else why_unknown(record, budget.field, batch)
            passed = budget.allows(value, limit)
            if budget.field == "min_sqnr_db":
                known = (check.passed if check.sqnr_db is None else check.sqnr_db >= limit for check in judged)
                passed = bool(judged) and all(known)
            late = value is None and _is_late(record, budget.measured, batch)
            verdict = Verdict(budget=budget.field, limit=limit, actual=value, passed=passed, reason=reason, late=late)
            verdicts.append(verdict)
    return tuple(verdicts)


def _is_late(record: VariantRecord, measured: str, batch: int) -> bool:
    """Tell whether a field is unknown because a time was over."""
    late = any(row.late for row in record.latency if row.batch == batch)
    return measured in record.late_fields or (measured == "latency" and late)


# Which variant wins.


_BEST = {
    "latency": "fastest",
    "throughput": "highest throughput",
    "memory": "lowest peak memory",
    "size": "smallest file",
}


_AS_FAST = 1.05
"""Ratio of two medians up to which noise may decide between them."""
_WORTH_A_RISK = 1.1
"""Ratio, at the near end of its interval, for which a share of wrong samples is taken that may be over the limit."""


@dataclass(frozen=True)
class Selection:
    """The winner (None if no variant keeps the budgets), why it won, the Pareto front, and the verdicts by budget."""

    winner: str | None
    reason: str
    pareto: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    no_winner: NoWinner | None = None


def select_winner(
    records: Sequence[VariantRecord],
    budgets: Budgets,
    objective: Objective,
    batch: int,
    min_sqnr_db: float | None = None,
    *,
    baseline_named: bool = False,
) -> Selection:
    """Choose among eligible records: budgets first, then the objective at ``batch``.

    Of those that are as fast as the fastest one, as far as was measured, the one with the smallest accuracy drop wins.
    A drop that meets the budget with an interval that reaches over it wins only if nothing else meets the budget; or,
    where samples are right or wrong, so that the interval is wide even where nothing is lost, if it is better by the
    objective by 1.1 ×.

    The first record is the baseline, which does not win if a variant was requested and none was measured. If its
    engine was named (``baseline_named``), it wins where all others have failed. Eager does not win where no time was
    left to judge a better variant.
    """

    def judged(record: VariantRecord) -> tuple[Verdict, ...]:
        return judge_budgets(record, budgets, batch, min_sqnr_db if record is not records[0] else None)

    eligible = [record for record in records if not why_ineligible(record)]
    scores = _compute_scores(eligible, objective, batch)
    ranked = sorted(
        (record for record in eligible if scores[record.id] is not None), key=lambda record: scores[record.id] or 0
    )
    pareto = _pareto(eligible, batch)
    within = [record for record in ranked if all(verdict.passed for verdict in judged(record))]
    requested = [record for record in records[1:] if not record.reference]
    ends = {record.status for record in requested}
    if ends and "measured" not in ends and not (baseline_named and ends == {"failed"}):
        within = ranked = []
    if within:
        best = _prefer_less_loss(within, objective, batch, budgets.max_drop)
        for record in ranked[: ranked.index(best)] if best.id == BASELINES["torch"] else ():
            if unknown := _explain_unknown(judged(record)):
                why = f"{record.id} is better than {best.id}, but its {unknown}"
                return Selection(None, why, pareto, judged(record), "unjudged")
        alone = "; no engine that does is better" if best.id == BASELINES["torch"] else ""
        why = f"{_BEST[objective]} of all variants that meet the budgets{alone}"
        if may_lose_more(within[0], budgets.max_drop) and not may_lose_more(best, budgets.max_drop):
            why = f"{_BEST[objective]} of those that surely meet the accuracy budget; {within[0].id} may not"
        elif best is not within[0] and objective == "latency":
            why = f"smallest accuracy drop of those that meet the budgets and are as fast as {within[0].id}"
        return Selection(best.id, why, pareto, judged(best))
    if ranked:
        nearest = min(ranked, key=lambda record: _measure_miss(judged(record)))
        broken = judged(nearest)
        missed = "; ".join(format_verdict(verdict) for verdict in broken if not verdict.passed)
        why = f"no variant meets every budget; of the nearest, {nearest.id}, {missed}"
        return Selection(None, why, pareto, broken, "over budget")
    waiting = [record for record in records if record.status == "built" and record.reason]
    if waiting:
        are = "variant is" if len(waiting) == 1 else "variants are"
        left = f"{len(waiting)} {are} built and not measured: {waiting[0].reason}"
        why = f"{left}; `enginesmith resume` on a machine that has it decides"
        return Selection(None, why, pareto, (), "not measured yet")
    if failure := explain_failure(requested or [record for record in records if record.failed_step]):
        return Selection(None, failure, pareto, (), "failed")
    lacking = f"the {objective} of no variant that was asked for is known"
    if all(record.status != "measured" for record in records):
        return Selection(None, f"nothing was measured that has a {objective}", pareto, (), "nothing measured")
    if objective == "latency":
        lacking = f"no variant that was asked for was measured at batch {batch}, which decides"
    return Selection(None, lacking, pareto, (), "no figure")


def _explain_unknown(verdicts: Sequence[Verdict]) -> str:
    """Explain which budgets a variant may meet, for which no time was left; empty if others fail, or none is left."""
    failed = [verdict for verdict in verdicts if not verdict.passed]
    return "; ".join(map(format_verdict, failed)) if all(verdict.late for verdict in failed) else ""


def _measure_miss(verdicts: Sequence[Verdict]) -> tuple[int, float]:
    """Measure how far budgets are missed: how many, and the largest distance as a share of the limit."""
    misses = [
        math.inf if verdict.actual is None else abs(verdict.actual - verdict.limit) / (abs(verdict.limit) or 1.0)
        for verdict in verdicts
        if not verdict.passed
    ]
    return len(misses), max(misses, default=0.0)


def lacks_result(run: Run) -> bool:
    """Tell whether a run has neither a winner nor an engine that is built to be measured elsewhere."""
    return run.winner is None and all(record.status != "built" for record in run.requested)


def _prefer_less_loss(
    ranked: Sequence[VariantRecord], objective: Objective, batch: int, max_drop: float | None
) -> VariantRecord:
    """Choose the best record; of latency, the smallest accuracy drop among those not measurably slower than the best.

    Those come first that surely lose no more than allowed, except after a much better one whose interval must be wide.
    """
    scale = _metric_scale(ranked)
    risks = [record for record in ranked if may_lose_more(record, max_drop)]
    sure = [record for record in ranked if record not in risks]
    worth = next((record for record in risks if sure and _is_worth_a_risk(record, sure[0], objective, batch)), None)
    ranked = ranked[ranked.index(worth) :] if worth else sure or ranked
    fastest = ranked[0]
    if objective != "latency":
        return fastest
    equal = [fastest, *(record for record in ranked[1:] if _is_as_fast(record, fastest, batch))]
    judged = [record for record in equal if record.quality]
    return min(judged, key=lambda record: max(_visible_drop(record, scale), 0.0)) if fastest.quality else fastest


def _is_worth_a_risk(record: VariantRecord, sure: VariantRecord, objective: Objective, batch: int) -> bool:
    if objective == "latency":
        gain = _gain(record, sure, batch)
        times = gain.low if gain else 0.0
    else:
        mine, theirs = (abs(_score(each, objective, batch) or 0.0) for each in (record, sure))
        more, less = (mine, theirs) if objective == "throughput" else (theirs, mine)
        times = more / less if less else 0.0
    wide = record.quality is not None and (record.quality.counted or record.quality.whole)
    return wide and times > _WORTH_A_RISK


def may_lose_more(record: VariantRecord, max_drop: float | None) -> bool:
    """Tell whether a record's accuracy drop may be over the limit, by what its samples show."""
    high = record.quality.seen_high if record.quality else None
    return high is not None and max_drop is not None and high > max_drop


def _metric_scale(records: Sequence[VariantRecord]) -> float:
    return max((abs(record.quality.baseline) for record in records if record.quality), default=0.0) or 1.0


def _visible_drop(record: VariantRecord, scale: float) -> float:
    """Round an accuracy drop to a thousandth of the baseline's metric; less is nothing that anyone sees."""
    return round(record.quality.drop / scale, 3) if record.quality else 0.0


def _is_as_fast(record: VariantRecord, fastest: VariantRecord, batch: int) -> bool:
    """Tell whether a record's median is close to the fastest one's, and their interval leaves open which is faster."""
    ratio = _gain(fastest, record, batch)
    return ratio is not None and ratio.low <= 1 and ratio.median <= _AS_FAST


def _gain(faster: VariantRecord, slower: VariantRecord, batch: int) -> Interval | None:
    """Divide the speeds of two records; None where one of them was not compared with the baseline.

    Where other programs disturbed one of them, the interval leaves all open.
    """
    above, below = faster.row(batch), slower.row(batch)
    if not above or not below or not above.speedup or not below.speedup:
        return None
    ratio = divide(above.speedup, below.speedup)
    disturbed = above.speedup_disturbed or below.speedup_disturbed
    return Interval(median=ratio.median, low=0.0, high=math.inf) if disturbed else ratio


def find_best_reference(records: Sequence[VariantRecord], winner: str | None, batch: int) -> BestReference | None:
    """Find the fastest setting of PyTorch at ``batch``, the baseline and variants that were asked for among them.

    None where none was measured for comparison, or the winner has no latency.
    """
    mine = next((record.row(batch) for record in records if record.id == winner), None)
    able = {records[0].engine, *(record.engine for record in records if record.reference)}
    rows = [(row, record.id) for record in records if record.engine in able and (row := record.row(batch))]
    if mine is None or not any(record.reference and record.row(batch) for record in records):
        return None
    times = _compare_latencies([row for row, _ in rows])
    theirs, name = rows[times.index(min(times))]
    speedup = mine.speedup if name == records[0].id else None
    if mine.speedup and theirs.speedup and name != winner:
        speedup = divide(mine.speedup, theirs.speedup)
    noisy = speedup is not None and (speedup.too_noisy or mine.speedup_too_noisy or theirs.speedup_too_noisy)
    return BestReference(variant=name, batch=batch, speedup=speedup, too_noisy=noisy)


def _compute_scores(records: Sequence[VariantRecord], objective: Objective, batch: int) -> dict[str, float | None]:
    """Score records by id, smaller being better; None where a number is unknown."""
    if objective != "latency":
        return {record.id: _score(record, objective, batch) for record in records}
    rows = {record.id: row for record in records if (row := record.row(batch))}
    times = dict(zip(rows, _compare_latencies(list(rows.values())), strict=True))
    return {record.id: times.get(record.id) for record in records}


def _compare_latencies(rows: Sequence[LatencyRow]) -> list[float]:
    """Return times that can be compared: shares of the baseline's, or medians where one row has no speed-up.

    Speed-ups are of rounds in pairs, and leave out calls that other programs disturbed.
    """
    speedups = [row.speedup.median for row in rows if row.speedup]
    if len(speedups) == len(rows):
        return [1 / speedup for speedup in speedups]
    return [math.inf if row.p50_ms is None else row.p50_ms for row in rows]


def _score(record: VariantRecord, objective: Objective, batch: int) -> float | None:
    """Score a record by another objective than latency, as in ``_compute_scores``."""
    if objective == "throughput":
        rate = read_throughput(record, batch)
        return None if rate is None else -rate
    if objective == "memory":
        return record.peak_bytes
    return record.artifact.bytes if record.artifact else None


def _pareto(records: Sequence[VariantRecord], batch: int) -> tuple[str, ...]:
    """List the records that no other one beats in latency, memory and visible drop at once."""
    points: dict[str, tuple[float, ...]] = {}
    scale = _metric_scale(records)
    for record in records:
        if (row := record.row(batch)) and row.p50_ms is not None:
            memory = record.peak_bytes if record.peak_bytes is not None else float("inf")
            points[record.id] = (row.p50_ms, memory, _visible_drop(record, scale))

    def beats(point: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return point != other and all(mine <= theirs for mine, theirs in zip(point, other, strict=True))

    return tuple(name for name, point in points.items() if not any(beats(other, point) for other in points.values()))
