"""Whether a pruned or sparse variant may win: it has to be measurably faster, for a loss that is allowed."""

from collections.abc import Iterator, Mapping

from enginesmith.pipeline.measure.rows import LimitRow
from enginesmith.pipeline.options import Budgets
from enginesmith.pipeline.run import VariantRecord

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
    return "; ".join([said, *_why(record, dense, batch)])


def _why(record: VariantRecord, dense: VariantRecord | None, batch: int) -> Iterator[str]:
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
