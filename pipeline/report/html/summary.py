"""Answer a reviewer's questions on a run in a line each, naming the section that has the rest."""

from collections.abc import Iterator, Sequence

from enginesmith.pipeline import units
from enginesmith.pipeline.report import provenance, sections
from enginesmith.pipeline.report.html.blocks import Fact
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.results import budgets
from enginesmith.pipeline.results.explain import narrowest_type
from enginesmith.pipeline.results.run import NOT_KNOWN, Assignment, Run, VariantRecord
from enginesmith.pipeline.units import format_bytes

_NAMED = 3
"""Groups or variants that are named in a line."""
_DISTURBED = 0.1


def answer_questions(run: Run) -> tuple[Fact, ...]:
    """Answer a reviewer's questions, in the order of the sections."""
    return (
        Fact("Did the budget hold at p99?", _p99(run), "latency"),
        Fact("Which clock, how many rounds?", _clock(run), "method"),
        Fact("Was the machine quiet?", _quiet(run), "environment"),
        Fact("Where does memory go?", _memory(run), "memory"),
        Fact("Where was accuracy lost?", _lost(run), "fidelity"),
        Fact("Which layers stayed in floating point, and why?", _kept(run), "precision"),
        Fact("Which variants failed, were rejected or left?", _out(run), "out"),
        Fact("Calibrated and evaluated on what?", _data(run), "precision"),
        Fact("How far from the hardware's limit?", _limit(run), "limits"),
        Fact("What do I install to run this again?", _install(run), "reproduce"),
    )


def choose_variant(run: Run) -> VariantRecord:
    """Choose the variant that answers are about: the winner, else the fastest, else the baseline."""
    records = {record.id: record for record in run.records}
    if run.winner in records:
        return records[run.winner]
    timed = [(row.p50_ms, one.id) for one in run.variants if (row := one.row(run.deciding_batch)) and row.p50_ms]
    return records[min(timed)[1]] if timed else run.baseline


def _p99(run: Run) -> str:
    record, batch = choose_variant(run), run.deciding_batch
    row = record.row(batch)
    if row is None:
        return f"Not known: {_why(record, 'latency')}."
    if row.p99_ms is None:
        said = f"p99 of {record.id} at batch {batch} is not known: {row.reasons.get('p99_ms', 'too few samples')}"
    else:
        said = f"p99 of {record.id} at batch {batch} is {units.ms(row.p99_ms)} ms"
    asked = run.recipe.budgets
    if judged := next((one for one in run.verdicts if one.budget == "max_p99_ms"), None):
        return f"{'Yes' if judged.passed else 'No'}: {budgets.format_verdict(judged)}."
    if asked.max_latency_ms is None:
        return f"No budget was set on latency; {said}."
    if row.p99_ms is None:
        return f"The budget is on p50, {asked.max_latency_ms:g} ms; {said}."
    within = "within" if row.p99_ms <= asked.max_latency_ms else "above"
    return f"The budget is on p50, {asked.max_latency_ms:g} ms; {said}, {within} it."


def _clock(run: Run) -> str:
    rows = [row for record in run.records for row in record.latency if row.rounds]
    if not rows:
        return f"Nothing was timed: {_why(run.baseline, 'latency')}."
    device = " and CUDA events beside it" if any(row.device_p50_ms is not None for row in rows) else ""
    rounds, launches = _range(row.rounds for row in rows), _range(row.launches for row in rows)
    samples = _range(row.n for row in rows)
    return f"The host's monotonic clock{device}; rounds: {rounds}, launches: {launches}, samples: {samples}."


def _range(counts: Iterator[int | None]) -> str:
    known = [count for count in counts if count is not None]
    if not known:
        return "unknown"
    low, high = min(known), max(known)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _quiet(run: Run) -> str:
    said_of_it = map(str, run.environment.get("warnings", ()))
    warnings = [one for one in said_of_it if not one.startswith(NOT_KNOWN)]
    shares = [row.disturbed_share for one in run.records for row in one.latency]
    known = [share for share in shares if share is not None]
    said = f"at most {max(known):.1%} of a variant's calls were disturbed by others" if known else ""
    if warnings:
        more = f", and {len(warnings) - 1} more" if len(warnings) > 1 else ""
        return f"No: {'; '.join(filter(None, (warnings[0] + more, said)))}."
    if known and max(known) > _DISTURBED:
        return f"Not all the time: {said}; they are left out of medians and speed-ups."
    return f"Yes, nothing is known to the contrary{'; ' if said else ''}{said}."


def _memory(run: Run) -> str:
    record = choose_variant(run)
    row = record.memory
    if row is None or row.peak_bytes is None:
        return f"Not known: {(row and row.reasons.get('peak_bytes')) or _why(record, 'memory')}."
    whole = run.baseline.peak_bytes
    share = (
        f", {row.peak_bytes / whole:.0%} of that of {run.baseline.id}" if whole and record is not run.baseline else ""
    )
    parts = f"weights {format_bytes(row.weights_bytes)}, activations {format_bytes(row.activation_bytes)}"
    return f"{record.id} at batch {row.batch}: peak {format_bytes(row.peak_bytes)}{share}; {parts}."


def _lost(run: Run) -> str:
    rows = sections.tabulate_losses(run).rows
    mine = next((row for row in rows if row[0] == marked(choose_variant(run))), next(iter(rows), None))
    if mine is None:
        return "No outputs were held against the baseline's."
    name, stage, fall, worst, metric = mine
    where = f"most at {stage}, SQNR {fall} dB" if fall != "–" else f"nowhere to speak of: SQNR is at least {worst} dB"
    return f"{name}: {where}{f'; {metric}' if metric != '–' else ''}."


def _kept(run: Run) -> str:
    found = []
    for record in run.variants:
        low = narrowest_type(record.precision)
        kept = [one for one in record.assignment if narrowest_type(one.precision) != low]
        if kept:
            reasons = "; ".join(_because(kept))
            found.append(f"{marked(record)}: {len(kept)} of {len(record.assignment)}: {reasons}.")
        elif record.assignment:
            found.append(f"{marked(record)}: none of {len(record.assignment)}.")
    if not found:
        return "No variant was quantised group by group."
    more = [f"Other variants: {len(found) - _NAMED}, see below."] if len(found) > _NAMED else []
    return "\n".join([*found[:_NAMED], *more])


def _because(kept: Sequence[Assignment]) -> Iterator[str]:
    """Groups by the reason that they stayed for."""
    together: dict[str, list[str]] = {}
    for one in kept:
        together.setdefault(one.why, []).append(one.module or one.group)
    for index, (why, names) in enumerate(together.items()):
        if index == _NAMED:
            yield f"and {len(together) - _NAMED} more reasons"
            return
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{', '.join(names[:_NAMED])}{more}{f' ({why})' if why else ''}"


def _out(run: Run) -> str:
    counts = {
        "failed": sum(record.status == "failed" for record in run.variants),
        "rejected": sum(bool(record.rejected) for record in run.variants),
        "skipped": sum(record.status == "skipped" for record in run.variants),
        "built, not measured": sum(record.status == "built" for record in run.variants),
    }
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{said} of {len(run.variants)}." if said else "None."


def _data(run: Run) -> str:
    parts = []
    if any(record.assignment or record.synthetic_calibration for record in run.variants):
        made_up = any(record.synthetic_calibration for record in run.variants)
        parts.append(f"ranges from {'made-up data' if made_up else describe_calibration(run)}")
    quality = next((one.quality for one in (choose_variant(run), *run.variants) if one.quality), None)
    if quality:
        parts.append(f"{quality.metric} on {quality.samples} samples of {run.recipe.data or run.model.data}")
    parts.append(f"outputs and latency on {run.model.data or 'unknown'} data")
    return f"{'; '.join(parts)}."


def describe_calibration(run: Run) -> str:
    """Name the data that ranges were taken from, as the step says."""
    step = next((one for one in run.steps if one.id.startswith("calibrate") and one.effect), None)
    return step.effect if step else f"{run.recipe.calibration_data or 'no data'}, up to {run.recipe.samples} samples"


def _limit(run: Run) -> str:
    record = choose_variant(run)
    row = next((one for one in record.limits if one.batch == run.deciding_batch), next(iter(record.limits), None))
    if row is None:
        return f"Not known: {_why(record, 'limits')}."
    if row.measured_over_floor is None:
        return f"Not known: {row.reasons.get('measured_over_floor', row.summary)}."
    return f"{record.id} at batch {row.batch} takes {row.measured_over_floor:.3g}× its floor, bound by {row.bound_by}."


def _install(run: Run) -> str:
    known = provenance.list_versions(run.environment)
    return (
        f"{', '.join(f'{name} {version}' for name, version in known.items())}." if known else "No versions are known."
    )


def _why(record: VariantRecord, field: str) -> str:
    return record.reasons.get(field) or record.reason or "not asked for"
