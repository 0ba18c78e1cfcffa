"""Who wins: budgets first, then the objective. And the Pareto front, for people who weigh it themselves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginesmith.pipeline.engines import BASELINES
from enginesmith.pipeline.measure.rows import LimitRow
from enginesmith.pipeline.recipe.options import Budgets, Objective
from enginesmith.pipeline.results.budgets import read_throughput, verdicts
from enginesmith.pipeline.results.run import VariantRecord, Verdict


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
    return f"{best} among those within the budgets" + (
        "" if record.id != BASELINES["torch"] else "; no engine does better"
    )


def _missed(one: Verdict) -> str:
    actual = "unknown" if one.actual is None else f"{one.actual:g}"
    return f"{one.budget} {actual} {'<' if one.budget.startswith('min_') else '>'} {one.limit:g}"


# Whether a pruned or sparse variant may win: it has to be measurably faster, for a loss that is allowed.

_GAIN = 0.95
"""A floor that is no lower than this share of the dense one's was hardly lowered."""


def decide(record: VariantRecord, others: Mapping[str, VariantRecord], budgets: Budgets, batch: int) -> VariantRecord:
    """The record, with why it may not win where that is so; ``others`` by id."""
    if record.dense is None or record.status != "measured":
        return record
    reason = _too_slow(record, others.get(record.dense), batch) or _unknown_loss(record, budgets)
    return record.model_copy(update={"rejected": reason})


def _too_slow(record: VariantRecord, dense: VariantRecord | None, batch: int) -> str:
    row = record.row(batch)
    if row is None:
        return f"it was not measured at batch {batch}"
    found = row.speedup_over_dense
    if found is None:
        return f"whether it is faster than {record.dense} is not known: {row.reasons.get('speedup_over_dense', '')}"
    if found.low > 1:
        return ""
    verdict = "is slower than" if found.high < 1 else "is not measurably faster than"
    said = f"it {verdict} {record.dense}: {found.median:.2f}× [{found.low:.2f}, {found.high:.2f}] at batch {batch}"
    return "; ".join([said, *_decision_why(record, dense, batch)])


def _decision_why(record: VariantRecord, dense: VariantRecord | None, batch: int) -> Iterator[str]:
    """What the limits of the machine say about it, where they were measured."""
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
