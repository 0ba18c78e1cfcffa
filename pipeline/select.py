"""Who wins: budgets first, then the objective. And the Pareto front, for people who weigh it themselves."""

from collections.abc import Sequence
from dataclasses import dataclass

from enginesmith.pipeline.options import Budgets, Objective
from enginesmith.pipeline.run import VariantRecord, Verdict


@dataclass(frozen=True)
class Selection:
    """The winner's id (None where nobody holds the budgets), why, the front's ids, and the budgets one by one."""

    winner: str | None
    reason: str
    pareto: tuple[str, ...]
    verdicts: tuple[Verdict, ...]


def select(records: Sequence[VariantRecord], budgets: Budgets, objective: Objective, batch: int) -> Selection:
    """Choose among measured records, the baseline being the first; latency counts at ``batch``."""
    usable = [record for record in records if record.status == "measured" and not record.rejected]
    scores = {record.id: _score(record, objective, batch) for record in usable}
    ranked = sorted((record for record in usable if scores[record.id] is not None), key=lambda one: scores[one.id] or 0)
    pareto = _pareto(usable, batch)
    holding = [record for record in ranked if all(one.passed for one in verdicts(record, budgets, batch))]
    if holding:
        return Selection(holding[0].id, _why(holding[0], objective), pareto, verdicts(holding[0], budgets, batch))
    if ranked:
        best = verdicts(ranked[0], budgets, batch)
        missed = ", ".join(
            f"{one.budget} {_number(one.actual)} > {_number(one.limit)}" for one in best if not one.passed
        )
        return Selection(None, f"no variant holds every budget; the best, {ranked[0].id}, has {missed}", pareto, best)
    waiting = [record for record in records if record.status == "built" and record.reason]
    if waiting:
        left = f"{len(waiting)} variants are built and not measured: {waiting[0].reason}"
        return Selection(None, f"{left}; `enginesmith resume` on a machine that has it decides", pareto, ())
    return Selection(None, f"nothing was measured that has a {objective}", pareto, ())


def verdicts(record: VariantRecord, budgets: Budgets, batch: int) -> tuple[Verdict, ...]:
    """Each budget that was set, held against a record; what is unknown does not pass."""
    row = record.row(batch)
    actual: dict[str, float | None] = {
        "max_drop": record.quality.drop if record.quality else None,
        "max_memory_bytes": record.peak_bytes,
        "max_latency_ms": row.p50_ms if row else None,
    }
    limits: dict[str, float | None] = budgets.model_dump()
    return tuple(
        Verdict(budget=name, limit=limit, actual=value, passed=value is not None and value <= limit)
        for name, value in actual.items()
        if (limit := limits[name]) is not None
    )


def _score(record: VariantRecord, objective: Objective, batch: int) -> float | None:
    """Smaller is better; None where it is unknown."""
    if objective == "latency":
        row = record.row(batch)
        return row.p50_ms if row else None
    if objective == "throughput":
        rates = [row.throughput_per_s for row in record.latency if row.throughput_per_s is not None]
        return -max(rates) if rates else None
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


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
