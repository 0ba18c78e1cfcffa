"""Tables of how right the variants are: accuracy on labelled data, and outputs held against the baseline's by stage."""

import itertools

from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.report.tables import marked, points
from enginesmith.pipeline.run import Run, VariantRecord

QUALITY = ("variant", "metric", "value", "baseline", "drop [95 %]", "samples")
FIDELITY = ("variant", "stage", "at", "SQNR dB", "cosine", "max abs error", "argmax agreement", "passed")
LOST = ("variant", "largest fall at", "SQNR dB", "lowest SQNR dB", "metric")
_NOTHING_DB = 3.0
"""A fall by less is no loss that anyone looks for: the noise's power does not even double."""


def quality(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant that was judged on labelled data; columns as in :data:`QUALITY`."""
    return [
        (marked(record), found.metric, f"{found.value:.4f}", f"{found.baseline:.4f}")
        + (f"{found.drop:+.4f}{_interval(found.drop_low, found.drop_high)}", str(found.samples))
        for record in (run.baseline, *run.variants)
        if (found := record.quality)
    ]


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]"


def fidelity(run: Run) -> list[tuple[str, ...]]:
    """A row for each comparison with the reference; columns as in :data:`FIDELITY`."""
    return [_compared(record, entry) for record in run.variants for entry in record.fidelity]


def _compared(record: VariantRecord, entry: StageFidelity) -> tuple[str, ...]:
    return (
        marked(record),
        entry.stage,
        f"{entry.point} (batch {entry.batch})",
        decimal(entry.sqnr_db, 1),
        decimal(entry.cosine, 6),
        decimal(entry.max_abs_error, 3, "g"),
        decimal(entry.argmax_agreement, 4),
        passed(entry),
    )


def passed(entry: StageFidelity) -> str:
    """Whether a comparison was close enough, and why not."""
    if not entry.passed:
        return f"no: {entry.reason}" if entry.reason else "no"
    return f"not judged: {entry.reason}" if entry.reason else "yes"


def decimal(value: float | None, digits: int, kind: str = "f") -> str:
    """A number with so many digits; a dash where it is unknown."""
    return "–" if value is None else f"{value:.{digits}{kind}}"


def lost(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant: the stage at which its outputs fell furthest; columns as in :data:`LOST`."""
    return [
        (marked(record), *_fall(found), points(record.quality) if record.quality else "–")
        for record in run.variants
        if (found := _lowest(record))
    ]


def _lowest(record: VariantRecord) -> dict[str, float]:
    """By stage, the lowest SQNR of all points, where it was judged: what is changed on purpose is no loss."""
    found: dict[str, float] = {}
    for entry in record.fidelity:
        if entry.sqnr_db is not None and not (entry.passed and entry.reason):
            found[entry.stage] = min(entry.sqnr_db, found.get(entry.stage, entry.sqnr_db))
    return found


def _fall(lowest: dict[str, float]) -> tuple[str, str, str]:
    """The stage with the largest fall from the one before it, the SQNR there, and the lowest of all."""
    worst = f"{min(lowest.values()):.1f}"
    pairs = itertools.pairwise(lowest.items())
    falls = [(before - after, stage, before, after) for (_, before), (stage, after) in pairs]
    fall, stage, before, after = max(falls, default=(0.0, "", 0.0, 0.0))
    if fall < _NOTHING_DB:
        return "none to speak of", "–", worst
    return stage, f"{before:.1f} → {after:.1f}", worst
