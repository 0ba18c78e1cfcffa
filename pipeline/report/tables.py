"""The tables that people read in the terminal and in report.md: one definition of columns and of number formats."""

import re
from collections.abc import Callable, Iterator

from enginesmith.pipeline.frameworks.onnx.shares import Coverage, percent, words
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.results import budgets
from enginesmith.pipeline.results.explain import claimed
from enginesmith.pipeline.results.run import Assignment, Run, VariantRecord
from enginesmith.pipeline.units import format_bytes, ms

COVERAGE = ("variant", "of", "multiply-adds", "weights", "Q/DQ pairs", "not fused", "islands", "conversions", "casts")
ASSIGNMENT = ("group", "module", "operator", "precision", "SQNR dB", "multiply-adds", "why")
SEARCH = ("trial", "ranges", "quantised", "kept", "SQNR dB", "drop", "speed against float", "reaches the goal", "what")
MADE_UP = "* calibrated on made-up data: speed holds, accuracy does not"
_MARK = "*"
_SHARES = ("top1", "top5")
"""Metrics that are shares of the samples, whose differences are told in points."""
COLUMNS = ("variant", "batch", "speed-up [95 %]", "p50 ms", "p99 ms", "peak memory", "size", "drop", "status")


def rows(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant and batch size, the baseline first; columns as in :data:`COLUMNS`.

    Of each variant's, the row of the batch size that decides is the first.
    """
    others = [row for record in run.variants for row in _record_rows(run, record, speedup)]
    return [*_record_rows(run, run.baseline, lambda record, batch: "baseline"), *others]


def deciding_first(run: Run, record: VariantRecord) -> list[LatencyRow]:
    """A record's latencies, that of the batch size that decides before the others."""
    return sorted(record.latency, key=lambda row: (row.batch != run.deciding_batch, row.batch))


def _record_rows(
    run: Run, record: VariantRecord, compared: Callable[[VariantRecord, int], str]
) -> list[tuple[str, ...]]:
    name = f"★ {marked(record)}" if record.id == run.winner else marked(record)
    fixed = (
        format_bytes(record.peak_bytes),
        format_bytes(record.artifact.bytes if record.artifact else None),
        drop(record),
        _status(record),
    )
    if not record.latency:
        return [(name, "–", "–", "–", "–", *fixed)]
    return [
        (name if index == 0 else "", str(row.batch), compared(record, row.batch), ms(row.p50_ms), ms(row.p99_ms))
        + (fixed if index == 0 else ("", "", "", "oom" if row.oom else "failed" if row.failure else ""))
        for index, row in enumerate(deciding_first(run, record))
    ]


def speedup(record: VariantRecord, batch: int) -> str:
    """Format a speed-up as ``3.10× [3.02, 3.18]``; a dash where it is unknown."""
    row = record.row(batch)
    if row is None or row.speedup is None:
        return "–"
    return row.speedup.times()


def rate(value: float | None) -> str:
    """Samples in a second, with four digits that count."""
    if value is None:
        return "–"
    return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


def drop(record: VariantRecord) -> str:
    """Loss of the metric; a dash where there is none."""
    if record.quality is None or record.quality.drop is None:
        return "–"
    return f"{record.quality.drop:+.4f}"


def marked(record: VariantRecord) -> str:
    """A variant's name, with a star where its numbers come from made-up calibration data."""
    return f"{record.id}{_MARK}" if record.synthetic_calibration else record.id


def mark(run: Run, text: str) -> str:
    """The same for every variant that a text names."""
    for record in run.variants:
        if record.synthetic_calibration:
            text = re.sub(rf"(?<![\w+-]){re.escape(record.id)}(?![\w+*-])", marked(record), text)
    return text


def made_up(run: Run) -> list[str]:
    """The footnote on stars, where there are any."""
    return [MADE_UP] if any(record.synthetic_calibration for record in run.variants) else []


def _mostly(record: VariantRecord) -> str:
    """What a variant really is, that is not what its name says."""
    found = record.engine_coverage or record.coverage
    shares = {} if found is None else found.weights if "weights" in record.precision else found.macs
    return next(iter(shares), "something else")


def verdict(run: Run) -> str:
    """The run in one sentence."""
    return mark(run, _verdict(run))


def _verdict(run: Run) -> str:
    if run.winner is None:
        return f"No winner{'' if run.complete else ' yet'}: {run.winner_reason}."
    record = next(one for one in (run.baseline, *run.variants) if one.id == run.winner)
    row = record.row(run.deciding_batch) or next((row for row in record.latency if row.p50_ms is not None), None)
    if row is None or record.id == run.baseline.id:
        return f"{run.winner} wins: {run.winner_reason}."
    parts = [_against(record, run.baseline, row.batch)]
    if record.peak_bytes is not None and run.baseline.peak_bytes:
        parts.append(f"uses {100 * record.peak_bytes / run.baseline.peak_bytes:.0f} % of its peak memory")
    if record.quality and record.quality.drop is not None:
        parts.append(f"{points(record.quality)} on {record.quality.samples} samples")
    return "; ".join([", ".join(parts), *held(run)]) + "."


def points(quality: Quality) -> str:
    """What the metric changed by: ``top1 −0.3 points``; in its own unit where it is no share."""
    if quality.metric not in _SHARES:
        return f"{quality.metric} drop {quality.drop:+.4f}"
    changed = round(-100 * quality.drop, 2)
    return f"{quality.metric} {'±0.0' if not changed else f'{changed:+.2g}'.replace('-', '−')} points"


def held(run: Run) -> list[str]:
    """Whether the budgets are met, in a few words; nothing where none was held against anything."""
    broken = [budgets.format_verdict(one) for one in run.verdicts if not one.passed]
    if broken:
        return [f"{len(broken)} of {len(run.verdicts)} budgets broken: {', '.join(broken)}"]
    if len(run.verdicts) == 1:
        return [f"its budget is met: {budgets.format_title(run.verdicts[0].budget)}"]
    return [f"all {len(run.verdicts)} budgets met"] if run.verdicts else []


def _against(record: VariantRecord, baseline: VariantRecord, batch: int) -> str:
    """How the record's latency compares with the baseline's, and no more than was measured."""
    mine, theirs = record.row(batch), baseline.row(batch)
    if mine is not None and mine.speedup is not None:
        return _compared(record, baseline, mine.speedup, batch)
    if mine is None or theirs is None:
        return f"{record.id} was measured at batch {batch}, and {baseline.id} was not"
    medians = f"{ms(mine.p50_ms)} ms against {ms(theirs.p50_ms)} ms of {baseline.id} at batch {batch}"
    return f"{record.id} takes {medians}, in too few rounds for an interval"


def _compared(record: VariantRecord, baseline: VariantRecord, found: Interval, batch: int) -> str:
    """``faster`` only where the interval leaves out that it is not."""
    times, beside = speedup(record, batch), f"{baseline.id} at batch {batch}"
    if found.too_noisy:
        return f"whether {record.id} is faster than {beside} is {times}"
    if found.low > 1:
        return f"{record.id} is {times} faster than {beside}"
    unsure = " (which may be no difference)" if found.high >= 1 else ""
    return f"{record.id} has {times} the speed of {beside}{unsure}"


def cautions(run: Run) -> list[str]:
    """What people have to know before they believe the numbers: the machine's warnings, and what failed."""
    found = [str(warning) for warning in run.environment.get("warnings", ())]
    return [*found, *_other_batches(run), *(f"{names}: {reason}" for names, reason in reasons(run))]


def _other_batches(run: Run) -> Iterator[str]:
    """A model of fixed batch is measured at that, whatever was asked for."""
    measured = {row.batch for row in run.baseline.latency}
    missing = [batch for batch in run.recipe.batch if batch not in measured]
    if measured and missing:
        at = ", ".join(map(str, sorted(measured)))
        asked = ", ".join(map(str, run.recipe.batch))
        yield f"{marked(run.baseline)} was measured at batch {at}, and --batch {asked} was asked for: its size is fixed"


def reasons(run: Run) -> list[tuple[str, str]]:
    """What is wrong with variants, or left to do: the names of those of one reason together, and the reason."""
    return [(", ".join(map(marked, records)), reason) for records, reason in by_reason(run)]


def by_reason(run: Run) -> list[tuple[list[VariantRecord], str]]:
    """As :func:`reasons`, with the records."""
    together: dict[str, list[VariantRecord]] = {}
    for record in (run.baseline, *run.variants):
        if said := record.reason or record.shortfall:
            together.setdefault(said.replace(record.id, "…"), []).append(record)
    return [(records, mark(run, reason.replace("…", records[0].id))) for reason, records in together.items()]


def _status(record: VariantRecord) -> str:
    if record.rejected:
        return "rejected"
    return f"{record.status}, mostly {_mostly(record)}" if record.shortfall else record.status


def remarks(run: Run) -> list[tuple[str, str]]:
    """Whether low precision, pruning and zeros paid, by variant."""
    rejected = ((record, f"rejected: {record.rejected}") for record in run.variants if record.rejected)
    said = ((record, text) for record in run.variants for text in record.remarks)
    return [(marked(record), mark(run, text)) for record, text in (*rejected, *said)]


def coverage(run: Run) -> list[tuple[str, ...]]:
    """What each graph asks for and each engine runs; columns as in :data:`COVERAGE`."""
    return [
        (marked(record) if index == 0 or record.coverage is None else "", what, *_covered(found))
        for record in (run.baseline, *run.variants)
        for index, (what, found) in enumerate((("graph", record.coverage), ("engine", record.engine_coverage)))
        if found is not None
    ]


def _covered(found: Coverage) -> tuple[str, ...]:
    counts = (found.qdq_pairs, found.unfused, found.islands, found.conversions, found.casts)
    unknown = f", {found.unknown_products} products of unknown size" if found.unknown_products else ""
    return (words(found.macs) + unknown, words(found.weights), *(str(count) for count in counts))


def assignment(record: VariantRecord) -> list[tuple[str, ...]]:
    """What each group is computed in; those first that are not in the precision that the variant is called after."""
    low = claimed(record.precision)
    total = sum(one.macs or 0 for one in record.assignment)
    ordered = sorted(record.assignment, key=lambda one: (claimed(one.precision) == low, -(one.macs or 0), one.group))
    return [_assigned(one, total) for one in ordered]


def _assigned(one: Assignment, total: int) -> tuple[str, ...]:
    sqnr = "–" if one.sqnr_db is None else f"{one.sqnr_db:.1f}"
    work = "–" if one.macs is None or not total else percent(one.macs / total)
    return (one.group, one.module or "–", one.operator, one.precision, sqnr, work, one.why or "–")


def kept(record: VariantRecord) -> str:
    """The assignment in one sentence; empty where there is none."""
    if not record.assignment:
        return ""
    low, total = claimed(record.precision), len(record.assignment)
    count = sum(claimed(one.precision) == low for one in record.assignment)
    return f"{marked(record)}: {count} of {total} groups in {low}"


def search(record: VariantRecord) -> list[tuple[str, ...]]:
    """The trials that led to the assignment; columns as in :data:`SEARCH`."""
    return [
        (
            str(one.step),
            one.method or "–",
            "–" if one.quantised is None else str(one.quantised),
            str(one.kept),
            "–" if one.sqnr_db is None else f"{one.sqnr_db:.1f}",
            "–" if one.drop is None else f"{one.drop:+.4f}",
            "–" if one.speedup is None else f"{one.speedup:.2f}×",
            "yes" if one.passed else f"no: {one.reason}" if one.reason else "no",
            one.why,
        )
        for one in record.search
    ]
