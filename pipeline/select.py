"""Who wins: budgets first, then the objective. And the Pareto front, for people who weigh it themselves."""

from collections.abc import Sequence
from dataclasses import dataclass

from enginesmith.pipeline.budgets import read_throughput, verdicts
from enginesmith.pipeline.options import Budgets, Objective
from enginesmith.pipeline.run import VariantRecord, Verdict


@dataclass(frozen=True)
class Selection:
    """The winner's id (None where nobody holds the budgets), why, the front's ids, and the budgets one by one."""

    winner: str | None
    reason: str
    pareto: tuple[str, ...]
    verdicts: tuple[Verdict, ...]


def select(
    records: Sequence[VariantRecord],
    budgets: Budgets,
    objective: Objective,
    batch: int,
    min_sqnr_db: float | None = None,
) -> Selection:
    """Choose among measured records, the baseline being the first; latency counts at ``batch``."""

    def judged(record: VariantRecord) -> tuple[Verdict, ...]:
        return verdicts(record, budgets, batch, min_sqnr_db if record is not records[0] else None)

    usable = [record for record in records if record.status == "measured" and not record.rejected]
    scores = {record.id: _score(record, objective, batch) for record in usable}
    ranked = sorted((record for record in usable if scores[record.id] is not None), key=lambda one: scores[one.id] or 0)
    pareto = _pareto(usable, batch)
    holding = [record for record in ranked if all(one.passed for one in judged(record))]
    if holding:
        return Selection(holding[0].id, _why(holding[0], objective), pareto, judged(holding[0]))
    if ranked:
        best = judged(ranked[0])
        missed = ", ".join(_missed(one) for one in best if not one.passed)
        return Selection(None, f"no variant holds every budget; the best, {ranked[0].id}, has {missed}", pareto, best)
    waiting = [record for record in records if record.status == "built" and record.reason]
    if waiting:
        left = f"{len(waiting)} variants are built and not measured: {waiting[0].reason}"
        return Selection(None, f"{left}; `enginesmith resume` on a machine that has it decides", pareto, ())
    return Selection(None, f"nothing was measured that has a {objective}", pareto, ())


def _score(record: VariantRecord, objective: Objective, batch: int) -> float | None:
    """Smaller is better; None where it is unknown."""
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
    """Records that no other one beats in latency, memory and drop at once."""
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
    return f"{best} among those within the budgets" + ("" if record.id != "eager" else "; no engine does better")


def _missed(one: Verdict) -> str:
    actual = "unknown" if one.actual is None else f"{one.actual:g}"
    return f"{one.budget} {actual} {'<' if one.budget.startswith('min_') else '>'} {one.limit:g}"
