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


def verdicts(
    record: VariantRecord, budgets: Budgets, batch: int, min_sqnr_db: float | None = None
) -> tuple[Verdict, ...]:
    """Each budget that was set, held against a record; what is unknown does not pass.

    ``min_sqnr_db`` is for records that were held against the baseline, which leaves out the baseline itself.
    """
    limits: dict[str, float | None] = budgets.model_dump()
    row, rates = record.row(batch), [one.throughput_per_s for one in record.latency if one.throughput_per_s is not None]
    actual: dict[str, float | None] = {
        "max_drop": record.quality.drop if record.quality else None,
        "max_memory_bytes": record.peak_bytes,
        "max_latency_ms": row.p50_ms if row else None,
        "max_p99_ms": row.p99_ms if row else None,
        "min_throughput_per_s": max(rates, default=None),
        "max_size_bytes": record.artifact.bytes if record.artifact else None,
        "max_build_seconds": record.build.seconds if record.build else None,
    }
    found = [
        Verdict(budget=name, limit=limit, actual=value, passed=_holds(name, value, limit), reason=reason)
        for name, value in actual.items()
        if (limit := limits[name]) is not None
        for reason in ("" if value is not None else why_unknown(record, name, batch),)
    ]
    return (*found, *([] if min_sqnr_db is None else [_fidelity(record, min_sqnr_db)]))


def _holds(budget: str, value: float | None, limit: float) -> bool:
    if value is None:
        return False
    return value >= limit if budget.startswith("min_") else value <= limit


def _fidelity(record: VariantRecord, min_sqnr_db: float) -> Verdict:
    """The lowest SQNR of all stages and points; outputs that are no floats agree, or they do not."""
    judged = [entry for entry in record.fidelity if not (entry.passed and entry.reason)]
    known = [entry.sqnr_db for entry in judged if entry.sqnr_db is not None]
    lowest = min(known, default=None)
    passed = bool(judged) and all(
        entry.passed if entry.sqnr_db is None else entry.sqnr_db >= min_sqnr_db for entry in judged
    )
    reason = "" if known else "no outputs are floats" if judged else "its outputs were not judged"
    return Verdict(budget="min_sqnr_db", limit=min_sqnr_db, actual=lowest, passed=passed, reason=reason)


def why_unknown(record: VariantRecord, budget: str, batch: int) -> str:
    """Why the number that a budget is about is not known, in the record's own words where it has some."""
    row, memory = record.row(batch), record.memory
    failed = next((one.failure for one in record.latency if one.batch == batch and one.failure), None)
    unmeasured = failed or record.reasons.get("latency") or record.reason or f"it was not measured at batch {batch}"
    return {
        "max_drop": record.reasons.get("quality", "not asked for"),
        "max_memory_bytes": (memory and memory.reasons.get("peak_bytes")) or record.reasons.get("memory", ""),
        "max_latency_ms": unmeasured,
        "max_p99_ms": row.reasons.get("p99_ms", "") if row else unmeasured,
        "min_throughput_per_s": unmeasured,
        "max_size_bytes": "it has no engine file",
        "max_build_seconds": "no engine is built for it",
    }[budget] or "it was not measured"


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


def _missed(one: Verdict) -> str:
    actual = "unknown" if one.actual is None else f"{one.actual:g}"
    return f"{one.budget} {actual} {'<' if one.budget.startswith('min_') else '>'} {one.limit:g}"
