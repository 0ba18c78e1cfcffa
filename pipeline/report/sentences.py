"""Say in words what a run comes to: its verdict, what to know before believing its numbers, and what became of each
variant."""

from collections.abc import Iterator

from enginesmith.pipeline.measure.statistics import NOISE_REMEDY, SAMPLE_FLOORS, TOO_NOISY, divide
from enginesmith.pipeline.report.tables import describe_drop, mark, mark_name, name_some, shorten_reason, speedup
from enginesmith.pipeline.results import verdicts
from enginesmith.pipeline.results.comparison import MOSTLY_DISTURBED
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.system.machine import BUSY
from enginesmith.pipeline.units import format_bytes, ms

_MOST_NAMED = 3
LONG_TAIL = 20.0
"""p99 over p50 from which the report explains the tail."""
SYNTHETIC = "* calibrated on random data: speed and memory are valid, accuracy is not"


def list_footnotes(run: Run) -> list[str]:
    """Explain stars on variants' names, dashes for a p99, and negative drops, where there are any."""
    negative = any(record.quality and round(record.quality.drop, 4) < 0 for record in run.variants)
    return [
        *([SYNTHETIC] if any(record.synthetic_calibration for record in run.variants) else []),
        *_explain_p99(run),
        *(["a negative drop is an improvement over the original model"] if negative else []),
    ]


def _explain_p99(run: Run) -> Iterator[str]:
    """Say how many calls a p99 takes, and which option gives as many."""
    rows = [row for record in run.records for row in record.latency if row.p50_ms and row.n and row.p99_ms is None]
    if rows:
        row, least = min(rows, key=lambda row: row.n or 0), SAMPLE_FLOORS[99.0]
        remedy = f"{verdicts.options_for_more(run, row, least / (row.n or 1))} --replace"
        yield f"no p99 (–): it needs {least} calls, and there were as few as {row.n}; {remedy} should be enough"


def summarize(run: Run) -> str:
    """Sum up the run in one sentence."""
    if run.winner is None:
        return mark(run, f"No winner{'' if run.complete else ' yet'}: {shorten_reason(run.winner_reason, 300)}.")
    record = next(record for record in run.records if record.id == run.winner)
    row = record.row(run.deciding_batch) or next((row for row in record.latency if row.p50_ms is not None), None)
    if row is None or record.id == run.baseline.id:
        return mark(run, f"{run.winner} wins: {run.winner_reason}.")
    parts = [_compare_latency(record, run.baseline, row.batch)]
    if record.peak_bytes is not None and run.baseline.peak_bytes:
        parts.append(f"uses {100 * record.peak_bytes / run.baseline.peak_bytes:.0f} % of its peak memory")
    if record.quality and record.quality.drop is not None:
        parts.append(describe_drop(record.quality))
    sentences = [", ".join(parts)]
    broken = [verdicts.format_verdict(verdict) for verdict in run.verdicts if not verdict.passed]
    if broken:
        sentences.append(f"{len(broken)} of {len(run.verdicts)} budgets broken: {', '.join(broken)}")
    elif len(run.verdicts) == 1:
        sentences.append(f"it meets the budget for {verdicts.format_title(run.verdicts[0].budget)}")
    elif run.verdicts:
        sentences.append(f"it meets all {len(run.verdicts)} budgets")
    if equal := _find_equally_fast(run, record, row.batch):
        sentences.append(f"it wins by its lower median, which is not measurably lower than that of {equal}")
    return mark(run, "; ".join(sentences) + ".")


def _find_equally_fast(run: Run, winner: VariantRecord, batch: int) -> str:
    """Find another variant that could win and that the winner is not measurably faster than; empty if there is none."""
    mine = winner.row(batch)
    for record in run.variants if run.recipe.objective == "latency" and mine and mine.speedup else ():
        theirs = None if record is winner or verdicts.why_ineligible(record) else record.row(batch)
        if mine and mine.speedup and theirs and theirs.speedup and divide(mine.speedup, theirs.speedup).low <= 1:
            return record.id
    return ""


def _compare_latency(record: VariantRecord, baseline: VariantRecord, batch: int) -> str:
    """Compare medians; says ``faster`` only if the interval leaves out that it is not."""
    mine, theirs = record.row(batch), baseline.row(batch)
    if mine is None or (theirs is None and mine.speedup is None):
        return f"{record.id} was measured at batch {batch}, and {baseline.id} was not"
    if mine.speedup is None:
        medians = (
            f"{ms(mine.p50_ms)} ms against {ms(theirs.p50_ms if theirs else None)} ms of {baseline.id} at batch {batch}"
        )
        return f"{record.id} takes {medians}, in too few rounds for an interval"
    times, beside = speedup(record, batch), f"{baseline.id} at batch {batch}"
    if mine.speedup.too_noisy:
        return f"{record.id} has a speed-up over {beside} that is {times}"
    if mine.speedup.low > 1:
        return f"{record.id} is {times} faster than {beside}"
    unsure = " (which may be no difference)" if mine.speedup.high >= 1 else ""
    return f"{record.id} has {times} the speed of {beside}{unsure}"


# What became of variants, and why.


def list_reasons(run: Run) -> list[str]:
    """Say what is wrong with variants or left to do: ``names: reason``, variants of one reason together."""
    return [f"{', '.join(map(mark_name, records))}: {reason}" for records, reason in group_by_reason(run)]


def group_by_reason(run: Run) -> list[tuple[list[VariantRecord], str]]:
    """Group the variants that failed, fall short or are left by their reason."""
    groups: dict[str, list[VariantRecord]] = {}
    for record in run.records:
        if reason := record.reason or record.shortfall:
            groups.setdefault(reason.replace(record.id, "…"), []).append(record)
    return [(records, mark(run, reason.replace("…", records[0].id))) for reason, records in groups.items()]


def list_remarks(run: Run) -> list[tuple[str, str]]:
    """Say by variant why it is rejected, and whether low precision, pruning and zeros paid."""
    rejected = [(record, f"rejected: {record.rejected}") for record in run.variants if record.rejected]
    remarks = [(record, text) for record in run.variants for text in record.remarks]
    return [(mark_name(record), mark(run, text)) for record, text in (*rejected, *remarks)]


# What to know before believing the numbers.


def list_warnings(run: Run) -> list[str]:
    """List what the machine and the run warn of."""
    return [*map(str, run.environment.get("warnings", ())), *_warn_of_fixed_batch(run), *_list_source_notes(run)]


def _warn_of_fixed_batch(run: Run) -> Iterator[str]:
    measured = {row.batch for row in run.baseline.latency}
    missing = [batch for batch in run.recipe.batch if batch not in measured]
    if measured and missing:
        at = ", ".join(map(str, sorted(measured)))
        asked = ", ".join(map(str, run.recipe.batch))
        name = mark_name(run.baseline)
        yield f"{name} was measured at batch {at}, and --batch {asked} was asked for: its size is fixed"


def _list_source_notes(run: Run) -> list[str]:
    """List what loading and exporting the model noted, each note once."""
    entries = (entry for record in run.records for entry in record.history if entry.step in ("load", "export"))
    return list(dict.fromkeys("; ".join(entry.notes) for entry in entries if entry.notes))


def describe_progress(run: Run) -> str:
    """Say how far a run came that was interrupted or has steps for another machine; empty if it is complete."""
    done = sum(step.status != "pending" for step in run.steps)
    return "" if run.complete else f"this run is not complete: {done} of {len(run.steps)} steps have ended"


def list_stops(run: Run) -> list[str]:
    """List the reasons why measuring stopped, each once."""
    return sorted({row.stopped_because for record in run.records for row in record.latency if row.stopped_because})


def list_unreported(run: Run) -> Iterator[str]:
    """Say which figures engines do not report, all fields of one reason together."""
    groups: dict[str, dict[str, None]] = {}
    for record in run.variants:
        for name, reason in (record.build.reasons if record.build else {}).items():
            groups.setdefault(reason, {})[name.removesuffix("_bytes").replace("_", " ")] = None
    for reason, names in groups.items():
        yield f"No {', '.join(names)}: {reason}"


def describe_profiles(run: Run) -> Iterator[str]:
    """Say whose figures each profile has, what profiling cost and what it does not tell; or why there is none."""
    for record in run.records:
        for profile in record.profile:
            row = record.row(profile.batch)
            if profile.total_ms is None:
                parts: tuple[str, ...] = (profile.reasons["total_ms"],)
            else:
                parts = (f"by {profile.source}", profile.overhead(row.p50_ms if row else None), *profile.notes)
            yield f"profile of {mark_name(record)} at batch {profile.batch}: {'; '.join(filter(None, parts))}"


def describe_out_of_memory(run: Run) -> Iterator[str]:
    """Say for each variant that ran out of memory what it asked for, and the largest batch that fits."""
    for record in run.records:
        full = next((row for row in record.latency if row.oom), None)
        if full is None or full.oom is None:
            continue
        fits = max((row.batch for row in record.latency if not row.failure), default=None)
        asked = f"asked for {format_bytes(full.oom.asked_bytes)}" if full.oom.asked_bytes else "out of memory"
        free = f", {format_bytes(full.oom.free_bytes)} free" if full.oom.free_bytes is not None else ""
        back = {True: "; its memory was released", False: "; it is not known whether its memory was released", None: ""}
        largest = f"the largest batch that fits is {fits}" if fits else "no batch fits"
        yield f"{mark_name(record)}: {largest}; batch {full.batch} {asked}{free}{back[full.oom.given_back]}"


def describe_noise(run: Run) -> Iterator[str]:
    """Say in one sentence what other work on the machine did to the numbers, and what helps."""
    parts = [*_describe_disturbed(run), *_describe_tails(run)]
    if parts:
        yield "; ".join([*parts, NOISE_REMEDY])


def _describe_disturbed(run: Run) -> Iterator[str]:
    """Name speed-ups that tell nothing, or else count medians that are of disturbed calls."""
    rows = [(record, row) for record in run.records for row in record.latency]
    noisy = [f"{mark_name(entry)} at batch {row.batch}" for entry, row in rows if row.speedup and row.speedup.too_noisy]
    shares = [row.disturbed_share for _, row in rows if (row.disturbed_share or 0.0) > MOSTLY_DISTURBED]
    if noisy:
        yield f"the speed-up is {TOO_NOISY} of {name_some(noisy, _MOST_NAMED)}"
    elif shares and not any(str(text).startswith(BUSY) for text in run.environment.get("warnings", ())):
        waited = f"in up to {max(filter(None, shares)):.0%} of their calls threads waited for a core"
        yield f"{len(shares)} of {len(rows)} measurements were disturbed: {waited}"


def _describe_tails(run: Run) -> Iterator[str]:
    """Explain percentiles that are far above the median by the longest of them."""
    tails = [
        (row.p99_ms / row.p50_ms, f"{mark_name(record)} at batch {row.batch} is {ms(row.p99_ms)} ms", ms(row.p50_ms))
        for record in run.records
        for row in record.latency
        if row.p50_ms and row.p99_ms and row.p99_ms > LONG_TAIL * row.p50_ms
    ]
    if tails:
        _, longest, median = max(tails)
        others = f" ({len(tails) - 1} more like it)" if len(tails) > 1 else ""
        said = f"p99 of {longest} beside a p50 of {median} ms{others}"
        yield f"{said}, because calls waited while other programs used the cores"


def list_measurement_notes(run: Run) -> tuple[str, ...]:
    """List what disturbed measurements: other work, and memory that ran out."""
    return (*describe_noise(run), *describe_out_of_memory(run))


def list_notes(run: Run) -> list[str]:
    """List what to know before believing the numbers, the most important first."""
    first = [*_warn_of_fixed_batch(run), *_list_source_notes(run)]
    return [*first, *describe_noise(run), *map(str, run.environment.get("warnings", ()))]
