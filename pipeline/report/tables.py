"""The tables that people read in the terminal and in report.md: one definition of columns and of number formats."""

from collections.abc import Callable

from enginesmith.pipeline.run import Run, VariantRecord
from enginesmith.pipeline.units import format_bytes

COLUMNS = ("variant", "batch", "speed-up [95 %]", "p50 ms", "p99 ms", "peak memory", "size", "drop", "status")


def rows(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant and batch size, the baseline first; columns as in :data:`COLUMNS`."""
    others = [row for record in run.variants for row in _record_rows(record, run.winner, speedup)]
    return [*_record_rows(run.baseline, run.winner, lambda record, batch: "baseline"), *others]


def _record_rows(
    record: VariantRecord, winner: str | None, compared: Callable[[VariantRecord, int], str]
) -> list[tuple[str, ...]]:
    name = f"★ {record.id}" if record.id == winner else record.id
    fixed = (
        format_bytes(record.peak_bytes),
        format_bytes(record.artifact.bytes if record.artifact else None),
        drop(record),
        record.status,
    )
    if not record.latency:
        return [(name, "–", "–", "–", "–", *fixed)]
    return [
        (name if index == 0 else "", str(row.batch), compared(record, row.batch), ms(row.p50_ms), ms(row.p99_ms))
        + (fixed if index == 0 else ("", "", "", "failed" if row.failure else ""))
        for index, row in enumerate(record.latency)
    ]


def speedup(record: VariantRecord, batch: int) -> str:
    """``3.10× [3.02, 3.18]``; a dash where it is unknown."""
    row = record.row(batch)
    if row is None or row.speedup is None:
        return "–"
    return f"{row.speedup.median:.2f}× [{row.speedup.low:.2f}, {row.speedup.high:.2f}]"


def ms(value: float | None) -> str:
    """Milliseconds with three digits that count."""
    if value is None:
        return "–"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def drop(record: VariantRecord) -> str:
    """Loss of the metric; a dash where there is none."""
    if record.quality is None or record.quality.drop is None:
        return "–"
    return f"{record.quality.drop:+.4f}"


def verdict(run: Run) -> str:
    """The run in one sentence."""
    if run.winner is None:
        return f"No winner: {run.winner_reason}."
    record = next(one for one in (run.baseline, *run.variants) if one.id == run.winner)
    row = next((row for row in record.latency if row.p50_ms is not None), None)
    if row is None or record.id == run.baseline.id:
        return f"{run.winner} wins: {run.winner_reason}."
    parts = [_against(record, run.baseline, row.batch)]
    if record.peak_bytes is not None and run.baseline.peak_bytes:
        parts.append(f"uses {100 * record.peak_bytes / run.baseline.peak_bytes:.0f} % of its peak memory")
    if record.quality and record.quality.drop is not None:
        parts.append(f"{record.quality.metric} drop {record.quality.drop:+.4f} on {record.quality.samples} samples")
    return ", ".join(parts) + "."


def _against(record: VariantRecord, baseline: VariantRecord, batch: int) -> str:
    """How the record's latency compares with the baseline's, and no more than was measured."""
    mine, theirs = record.row(batch), baseline.row(batch)
    if mine is not None and mine.speedup is not None:
        return f"{record.id} is {speedup(record, batch)} faster than {baseline.id} at batch {batch}"
    if mine is None or theirs is None:
        return f"{record.id} was measured at batch {batch}, and {baseline.id} was not"
    medians = f"{ms(mine.p50_ms)} ms against {ms(theirs.p50_ms)} ms of {baseline.id} at batch {batch}"
    return f"{record.id} takes {medians}, in too few rounds for an interval"


def cautions(run: Run) -> list[str]:
    """What people have to know before they believe the numbers: the machine's warnings, and what failed."""
    found = [str(warning) for warning in run.environment.get("warnings", ())]
    return [*found, *(f"{names}: {reason}" for names, reason in reasons(run))]


def reasons(run: Run) -> list[tuple[str, str]]:
    """What is wrong with variants, or left to do: those of one reason together, and the reason."""
    together: dict[str, list[str]] = {}
    for record in (run.baseline, *run.variants):
        if record.reason:
            together.setdefault(record.reason.replace(record.id, "…"), []).append(record.id)
    return [(", ".join(names), reason.replace("…", names[0])) for reason, names in together.items()]
