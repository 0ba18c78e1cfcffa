"""Decide which variants may win, which budgets they keep, and which of them wins.

A variant cannot be used if nothing of it is in the precision that it is called after. A pruned or sparse variant may
win only if it is measurably faster than its dense sibling, for a loss that is allowed. What is unknown keeps no budget.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginesmith.pipeline.engines import BASELINES
from enginesmith.pipeline.errors import WrongEngine
from enginesmith.pipeline.measure.rows import LimitRow
from enginesmith.pipeline.recipe.options import Budgets, Objective
from enginesmith.pipeline.results.budgets import BUDGETS, Budget, read_throughput, why_unknown
from enginesmith.pipeline.results.explain import find_shortfall
from enginesmith.pipeline.results.run import VariantRecord, Verdict
from enginesmith.pipeline.system.device import Device

_GAIN = 0.95
"""A floor that is no lower than this share of the dense one's was hardly lowered."""


# Which variants may win.


def why_ineligible(record: VariantRecord) -> str:
    """Explain why a variant cannot win; empty if it can."""
    if record.status != "measured":
        return f"{record.id} was not measured ({record.status}): {record.reason or 'no reason is known'}"
    return f"{record.id} was rejected: {record.rejected}" if record.rejected else ""


def judge_precision(record: VariantRecord, device: Device, *, asked: bool = True) -> VariantRecord:
    """Fail a record of which nothing is in the precision of its name, or note its shortfall.

    A model that came in its precision, so that nobody ``asked`` for one, can be used however the engine computes it.
    """
    shortfall = find_shortfall(record, device)
    if shortfall is None or record.status == "failed":
        return record
    share, text = shortfall
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
    reason = _too_slow(record, others.get(record.dense), batch) or _unknown_loss(record, budgets)
    return record.model_copy(update={"rejected": reason})


def _too_slow(record: VariantRecord, dense: VariantRecord | None, batch: int) -> str:
    row = record.row(batch)
    if row is None:
        return f"it was not measured at batch {batch}"
    ratio = row.speedup_over_dense
    if ratio is None:
        return f"whether it is faster than {record.dense} is not known: {row.reasons.get('speedup_over_dense', '')}"
    if ratio.low > 1:
        return ""
    verdict = "is slower than" if ratio.high < 1 else "is not measurably faster than"
    said = f"it {verdict} {record.dense}: {ratio.times()} at batch {batch}"
    return "; ".join([said, *_explain_bounds(record, dense, batch)])


def _explain_bounds(record: VariantRecord, dense: VariantRecord | None, batch: int) -> Iterator[str]:
    """Explain by the limits of the machine why it is no faster, where they were measured."""
    mine, theirs = _limit(record, batch), _limit(dense, batch) if dense else None
    if mine is None or theirs is None or not mine.floor_ms or not theirs.floor_ms:
        yield "measure with --limits to see what bounds it"
        return
    if mine.bound_by == "launch":
        yield "its time is that of starting operators, of which pruning leaves as many"
    elif mine.bound_by == "memory":
        yield "its time is that of moving data, not of multiplying"
    if mine.floor_ms < _GAIN * theirs.floor_ms:
        yield (
            f"its floor fell from {theirs.floor_ms:.3g} to {mine.floor_ms:.3g} ms, and its time did not follow: narrow "
            "layers fill the machine's vectors and tiles less well; try a larger multiple of channels"
        )


def _limit(record: VariantRecord, batch: int) -> LimitRow | None:
    return next((row for row in record.limits if row.batch == batch), None)


def _unknown_loss(record: VariantRecord, budgets: Budgets) -> str:
    if record.quality is None:
        return "how much accuracy it lost is not known: give labelled data with --eval"
    if budgets.max_drop is None:
        lost = f"it lost {record.quality.drop:.3g} of {record.quality.metric}"
        return f"{lost}, and nothing says how much it may: give --max-drop"
    return ""


# Which budgets a variant keeps.


def judge_budgets(
    record: VariantRecord, budgets: Budgets, batch: int, min_sqnr_db: float | None = None
) -> tuple[Verdict, ...]:
    """Judge a record by each budget that was set; what is unknown does not pass.

    ``min_sqnr_db`` is for records that are compared with the baseline, which leaves out the baseline itself.
    """
    limits: dict[str, float | None] = {**budgets.model_dump(), "min_sqnr_db": min_sqnr_db}
    return tuple(
        _judge(budget, record, batch, limit) for budget in BUDGETS if (limit := limits.get(budget.field)) is not None
    )


def _judge(budget: Budget, record: VariantRecord, batch: int, limit: float) -> Verdict:
    value = budget.read(record, batch)
    reason = "" if value is not None else why_unknown(record, budget.field, batch)
    passed = _agrees(record, limit) if budget.field == "min_sqnr_db" else budget.allows(value, limit)
    return Verdict(budget=budget.field, limit=limit, actual=value, passed=passed, reason=reason)


def _agrees(record: VariantRecord, min_sqnr_db: float) -> bool:
    """Judge every stage and shape: by its SQNR, or by its own check where outputs are no floats."""
    judged = record.judged_fidelity
    return bool(judged) and all(
        entry.passed if entry.sqnr_db is None else entry.sqnr_db >= min_sqnr_db for entry in judged
    )


# Which variant wins.


@dataclass(frozen=True)
class Selection:
    """Name the winner (None if no variant keeps the budgets), why, the Pareto front, and the verdicts by budget."""

    winner: str | None
    reason: str
    pareto: tuple[str, ...]
    verdicts: tuple[Verdict, ...]


def select_winner(
    records: Sequence[VariantRecord],
    budgets: Budgets,
    objective: Objective,
    batch: int,
    min_sqnr_db: float | None = None,
) -> Selection:
    """Choose among eligible records, the baseline being the first: budgets first, then the objective at ``batch``."""

    def judged(record: VariantRecord) -> tuple[Verdict, ...]:
        return judge_budgets(record, budgets, batch, min_sqnr_db if record is not records[0] else None)

    eligible = [record for record in records if not why_ineligible(record)]
    scores = {record.id: _score(record, objective, batch) for record in eligible}
    ranked = sorted((one for one in eligible if scores[one.id] is not None), key=lambda one: scores[one.id] or 0)
    pareto = _pareto(eligible, batch)
    within = [record for record in ranked if all(verdict.passed for verdict in judged(record))]
    if within:
        return Selection(within[0].id, _why(within[0], objective), pareto, judged(within[0]))
    if ranked:
        best = judged(ranked[0])
        missed = ", ".join(_missed(verdict) for verdict in best if not verdict.passed)
        return Selection(None, f"no variant holds every budget; the best, {ranked[0].id}, has {missed}", pareto, best)
    waiting = [record for record in records if record.status == "built" and record.reason]
    if waiting:
        left = f"{len(waiting)} variants are built and not measured: {waiting[0].reason}"
        return Selection(None, f"{left}; `enginesmith resume` on a machine that has it decides", pareto, ())
    return Selection(None, f"nothing was measured that has a {objective}", pareto, ())


def _score(record: VariantRecord, objective: Objective, batch: int) -> float | None:
    """Score a record, smaller being better; None where its number is unknown."""
    if objective == "latency":
        row = record.row(batch)
        return row.p50_ms if row else None
    if objective == "throughput":
        rate = read_throughput(record, batch)
        return None if rate is None else -rate
    if objective == "memory":
        return record.peak_bytes
    return record.artifact.bytes if record.artifact else None


def _pareto(records: Sequence[VariantRecord], batch: int) -> tuple[str, ...]:
    """List the records that no other one beats in latency, memory and drop at once."""
    points: dict[str, tuple[float, ...]] = {}
    for record in records:
        if (row := record.row(batch)) and row.p50_ms is not None:
            memory = record.peak_bytes if record.peak_bytes is not None else float("inf")
            drop = record.quality.drop if record.quality and record.quality.drop is not None else 0.0
            points[record.id] = (row.p50_ms, memory, drop)
    return tuple(name for name, point in points.items() if not any(_beats(other, point) for other in points.values()))


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))


def _why(record: VariantRecord, objective: Objective) -> str:
    best = {
        "latency": "lowest median latency",
        "throughput": "highest throughput",
        "memory": "lowest peak memory",
        "size": "smallest file",
    }[objective]
    return f"{best} among those within the budgets" + (
        "" if record.id != BASELINES["torch"] else "; no engine does better"
    )


def _missed(verdict: Verdict) -> str:
    actual = "unknown" if verdict.actual is None else f"{verdict.actual:g}"
    return f"{verdict.budget} {actual} {'<' if verdict.budget.startswith('min_') else '>'} {verdict.limit:g}"
