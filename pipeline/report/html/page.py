"""Render a run as one HTML file that needs no network."""

import base64
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from enginesmith.pipeline.report import charts, provenance, sentences
from enginesmith.pipeline.report.html import sections
from enginesmith.pipeline.report.html.blocks import (
    Block,
    Fact,
    Facts,
    Section,
    Words,
    long_tables,
    script_data,
    within_limits,
)
from enginesmith.pipeline.report.html.sections import Drawings, describe_calibration, draw
from enginesmith.pipeline.report.run_tables import tabulate_losses, tabulate_variants
from enginesmith.pipeline.report.tables import Tone, mark_name, shorten_reason
from enginesmith.pipeline.results import verdicts
from enginesmith.pipeline.results.explain import narrowest_type
from enginesmith.pipeline.results.gate_report import FleetGate, Gate
from enginesmith.pipeline.results.run import Assignment, Run, VariantRecord
from enginesmith.pipeline.units import format_bytes, group_values, ms, name_some

# Sections and a template as one file: all of it is escaped, besides the scripts and the style of ours.

TEMPLATES = Path(__file__).parent / "templates"
LIBRARY, SCRIPT, STYLE = "plotly-basic.min.js", "page.js", "style.css"
"""plotly.js, the script that makes tables sortable and draws charts and long tables, and the page's style.

plotly.js is its "basic" build, which draws scatter, bar and pie traces: the npm package ``plotly.js-basic-dist-min`` as
it stands. A report is about 1.3 MB with it, and would be 5 MB with every trace type.
"""


@functools.cache
def load(name: str) -> Markup:
    """Load a script or the style, marked as safe, so that it stands in the page as it is."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@functools.cache
def write_policy(texts: tuple[str, ...]) -> str:
    """Write a content security policy that allows these scripts and the page's style, and nothing from anywhere."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def lay_out(template: str, parts: Sequence[Section], figures: Mapping[str, Any] | None = None, **values: Any) -> str:
    """Render a page; without ``figures`` for charts it has no library that draws."""
    shown = within_limits(parts)
    scripts = (load(SCRIPT),) if figures is None else (load(LIBRARY), load(SCRIPT))
    return _template(template).render(
        sections=shown,
        charts=script_data(figures or {}),
        tables=script_data(long_tables(shown)),
        policy=Markup(write_policy(scripts)),
        style=load(STYLE),
        library="" if figures is None else load(LIBRARY),
        script=load(SCRIPT),
        **values,
    )


@functools.cache
def _template(name: str) -> Template:
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


# The first screen: the verdict, the budgets, the table of variants, the Pareto front; and answers in a line each.


def _render_variants(run: Run, drawings: Drawings) -> Sequence[Block]:
    return (
        tabulate_variants(run),
        *(Words(f"{note}.") for note in sentences.list_footnotes(run)),
        drawings["pareto"],
    )


SECTIONS: tuple[tuple[str, str, str, Callable[[Run, Drawings], Sequence[Block]]], ...] = (
    ("variants-and-front", "Variants", "Which variant is the best choice?", _render_variants),
    ("glance", "At a glance", "What a reviewer asks first", lambda run, _: (Facts(answer_questions(run)),)),
    ("out", "Failed, rejected or not measured", "Why can this variant not be used?", sections.render_rejected),
    ("latency", "Latency", "How are single calls distributed, and what is the tail?", sections.render_latency),
    ("memory", "Memory", "Where does peak memory go?", sections.render_memory),
    ("sweep", "Batch sizes and callers", "What does a larger batch give?", sections.render_batch_sweep),
    ("fidelity", "Fidelity along the stages", "Where was accuracy lost?", sections.render_fidelity),
    ("sensitivity", "Sensitivity", "Which layers suffer most in low precision?", sections.render_sensitivity),
    ("precision", "Precision", "What was quantized, what was not, and why?", sections.render_precision),
    (
        "smaller",
        "Pruning and training",
        "What was removed, and what did training bring back?",
        sections.render_compression,
    ),
    ("limits", "Distance to the hardware's limit", "How far is it from these limits?", sections.render_limits),
    ("profile", "Where the time goes", "Which modules and operators take the time?", sections.render_profile),
    ("provenance", "Provenance", "Which steps ran, with which tools and results?", sections.render_provenance),
    ("environment", "Environment", "Which machine, and did other programs disturb it?", sections.render_environment),
    ("method", "How things were measured", "Which clock, how many rounds, which memory?", sections.render_method),
    ("reproduce", "Run it again", "What do I install, and what do I run?", sections.render_reproduction),
)
"""Sections in the order of the page: id, heading, the question that people come with, the function that fills it."""


def render(run: Run, gate: Gate | FleetGate | None = None) -> str:
    """Render the page of a run; ``gate`` is what was judged of it."""
    drawn = charts.charts(run)
    drawings = draw(drawn)
    figures = {chart.id: chart.figure for chart in drawn if chart.figure is not None}
    broken = any(not verdict.passed for verdict in run.verdicts)
    tone: Tone = "bad" if run.winner is None and run.complete else "caution" if run.winner is None or broken else "good"
    left = ", ".join([step.id for step in run.steps if step.status == "pending"][:3]) or "–"
    progress = f"{sentences.describe_progress(run).capitalize()}; next: {left}."
    goes_on = Words(f"{progress} Continue with: {provenance.write_resume_command(run)}", "caution")
    return lay_out(
        "page.html.j2",
        [
            *sections.render_gate(gate),
            *(Section(name, title, question, tuple(fill(run, drawings))) for name, title, question, fill in SECTIONS),
        ],
        {"figures": figures, "light": charts.LIGHT, "dark": charts.DARK},
        run=run,
        verdict=Words(sentences.summarize(run), tone),
        unfinished=() if run.complete else (goes_on,),
        budgets=tuple(_list_budgets(run)),
    )


def _list_budgets(run: Run) -> Iterator[Fact]:
    """List each budget with its number and its limit, and those that were not judged."""
    for verdict in run.verdicts:
        why = f" ({verdict.reason})" if verdict.reason else ""
        actual = f"{verdicts.format_value(verdict.budget, verdict.actual)}{why}, {verdicts.format_limit(verdict)}"
        word = "met" if verdict.passed else "broken"
        yield Fact(verdicts.format_title(verdict.budget), f"{word}: {actual}", "", "good" if verdict.passed else "bad")
    for name in verdicts.list_unjudged(run):
        yield Fact(verdicts.format_title(name), "not judged", "", "caution")


_NAMED = 3
"""Groups or variants that are named in a line."""
_DISTURBED = 0.1


def answer_questions(run: Run) -> tuple[Fact, ...]:
    """Answer a reviewer's questions in a line each, naming the section that has the rest."""
    versions = ", ".join(f"{name} {number}" for name, number in provenance.list_versions(run.environment).items())
    return (
        Fact("Is the latency budget met at p99?", _describe_p99(run), "latency"),
        Fact("Which clock, how many rounds?", _describe_clock(run), "method"),
        Fact("Was the machine quiet?", _describe_disturbance(run), "environment"),
        Fact("Where does memory go?", _describe_memory(run), "memory"),
        Fact("Where was accuracy lost?", _describe_loss(run), "fidelity"),
        Fact("Which layers stayed in floating point, and why?", _list_floating_groups(run), "precision"),
        Fact("Which variants failed, were rejected or not measured?", _count_unmeasured(run), "out"),
        Fact("Calibrated and evaluated on what?", _describe_data(run), "precision"),
        Fact("How far from the hardware's limit?", _describe_limit(run), "limits"),
        Fact("What do I install to run this again?", f"{versions or 'No versions are known'}.", "reproduce"),
    )


def choose_variant(run: Run) -> VariantRecord:
    """Choose the variant that answers are about: the winner, else the fastest, else the baseline."""
    records = {record.id: record for record in run.records}
    if run.winner in records:
        return records[run.winner]
    timed = [(row.p50_ms, entry.id) for entry in run.requested if (row := entry.row(run.deciding_batch)) and row.p50_ms]
    return records[min(timed)[1]] if timed else run.baseline


def _describe_p99(run: Run) -> str:
    record, batch = choose_variant(run), run.deciding_batch
    row = record.row(batch)
    if row is None:
        return f"Not known: {_explain_missing(record, 'latency')}."
    if row.p99_ms is None:
        sentence = f"p99 of {record.id} at batch {batch} is not known: {row.reasons.get('p99_ms', 'too few samples')}"
    else:
        sentence = f"p99 of {record.id} at batch {batch} is {ms(row.p99_ms)} ms"
    budgets = run.recipe.budgets
    if judged := next((verdict for verdict in run.verdicts if verdict.budget == "max_p99_ms"), None):
        return f"{'Yes' if judged.passed else 'No'}: {verdicts.format_verdict(judged)}."
    if budgets.max_latency_ms is None:
        return f"No budget was set on latency; {sentence}."
    if row.p99_ms is None:
        return f"The budget is on p50, {budgets.max_latency_ms:g} ms; {sentence}."
    within = "within" if row.p99_ms <= budgets.max_latency_ms else "above"
    return f"The budget is on p50, {budgets.max_latency_ms:g} ms; {sentence}, {within} it."


def _describe_clock(run: Run) -> str:
    rows = [row for record in run.records for row in record.latency if row.rounds]
    if not rows:
        return f"Nothing was timed: {_explain_missing(run.baseline, 'latency')}."
    device = " and CUDA events beside it" if any(row.device_p50_ms is not None for row in rows) else ""
    rounds, launches = _format_range(row.rounds for row in rows), _format_range(row.launches for row in rows)
    samples = _format_range(row.n for row in rows)
    return f"The host's monotonic clock{device}; rounds: {rounds}, launches: {launches}, samples: {samples}."


def _format_range(counts: Iterator[int | None]) -> str:
    known = sorted({count for count in counts if count is not None})
    return " to ".join(f"{count:,}" for count in dict.fromkeys((known[0], known[-1]))) if known else "unknown"


def _describe_disturbance(run: Run) -> str:
    others = run.environment.get("cautions", ())
    warnings = [text for text in run.environment.get("warnings", ()) if text not in others]
    shares = [row.disturbed_share for entry in run.records for row in entry.latency if row.disturbed_share is not None]
    disturbance = f"at most {max(shares):.1%} of a variant's calls were disturbed by others" if shares else ""
    if warnings:
        more = f", and {len(warnings) - 1} more" if len(warnings) > 1 else ""
        return f"No: {'; '.join(filter(None, (warnings[0] + more, disturbance)))}."
    if shares and max(shares) > _DISTURBED:
        used = "they are left out of medians and speed-ups, unless too few others were measured"
        return f"Not all the time: {disturbance}; {used}."
    return f"Yes, no disturbance was found{'; ' if disturbance else ''}{disturbance}."


def _describe_memory(run: Run) -> str:
    record = choose_variant(run)
    row = record.memory
    if row is None or row.peak_bytes is None:
        return f"Not known: {(row and row.reasons.get('peak_bytes')) or _explain_missing(record, 'memory')}."
    whole = run.baseline.peak_bytes if record is not run.baseline else None
    share = f", {row.peak_bytes / whole:.0%} of that of {run.baseline.id}" if whole else ""
    parts = f"weights {format_bytes(row.weights_bytes)}, activations {format_bytes(row.activation_bytes)}"
    taken = ""
    if row.deployment_bytes and row.device_bytes:
        sizes = f"{format_bytes(row.deployment_bytes)} of the GPU's {format_bytes(row.device_bytes)}"
        taken = f"a deployment takes {sizes}, so that {row.deployments_per_device} fit; "
    return f"{record.id} at batch {row.batch}: {taken}peak {format_bytes(row.peak_bytes)}{share}; {parts}."


def _describe_loss(run: Run) -> str:
    rows = tabulate_losses(run).rows
    mine = next((row for row in rows if row[0] == mark_name(choose_variant(run))), next(iter(rows), None))
    if mine is None:
        return "No outputs were compared with those of the original model."
    name, stage, fall, worst, metric = mine
    where = f"most at {stage}, SQNR {fall} dB" if fall != "–" else f"nowhere by much: SQNR is at least {worst} dB"
    return f"{name}: {where}{f'; {metric}' if metric != '–' else ''}."


def _list_floating_groups(run: Run) -> str:
    answers = []
    for record in (record for record in run.variants if record.assignment):
        low, total = narrowest_type(record.precision), len(record.assignment)
        groups = [group for group in record.assignment if narrowest_type(group.precision) != low]
        reasons = f"{len(groups)} of {total}: {'; '.join(_group_by_reason(groups))}" if groups else f"none of {total}"
        answers.append(f"{mark_name(record)}: {reasons}.")
    if not answers:
        return "No variant was quantized group by group."
    more = [f"Other variants: {len(answers) - _NAMED}, see below."] if len(answers) > _NAMED else []
    return "\n".join([*answers[:_NAMED], *more])


def _group_by_reason(groups: Sequence[Assignment]) -> Iterator[str]:
    together = group_values((group.why, group.module or group.group) for group in groups)
    for why, names in list(together.items())[:_NAMED]:
        yield name_some(names, _NAMED) + (f" ({why})" if why else "")
    if len(together) > _NAMED:
        yield f"and {len(together) - _NAMED} more reasons"


def _count_unmeasured(run: Run) -> str:
    ends = [record.status for record in run.requested]
    counts = {
        "failed": ends.count("failed"),
        "rejected": sum(bool(record.rejected) for record in run.requested),
        "skipped": ends.count("skipped"),
        "built, not measured": ends.count("built"),
        f"not measured at batch {run.deciding_batch}, which decides": sum(
            record.status == "measured" and bool(record.failure_at(run.deciding_batch)) for record in run.requested
        ),
    }
    summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{summary} of {len(run.requested)}." if summary else "None."


def _describe_data(run: Run) -> str:
    parts = []
    if any(record.assignment or record.synthetic_calibration for record in run.variants):
        made_up = any(record.synthetic_calibration for record in run.variants)
        parts.append(f"ranges from {'random data' if made_up else describe_calibration(run)}")
    quality = next((record.quality for record in (choose_variant(run), *run.variants) if record.quality), None)
    if quality:
        parts.append(f"{quality.title} on {quality.basis} of {run.recipe.evaluation_data or run.model.data}")
    parts.append(f"outputs and latency on {run.model.data or 'unknown'} data")
    return f"{'; '.join(parts)}."


def _describe_limit(run: Run) -> str:
    record = choose_variant(run)
    row = next((limit for limit in record.limits if limit.batch == run.deciding_batch), next(iter(record.limits), None))
    if row is None:
        return f"Not known: {_explain_missing(record, 'limits')}."
    if row.measured_over_floor is None:
        return f"Not known: {row.reasons.get('measured_over_floor', row.summary)}."
    return f"{record.id} at batch {row.batch} takes {row.measured_over_floor:.3g}× its floor, bound by {row.bound_by}."


def _explain_missing(record: VariantRecord, field: str) -> str:
    return shorten_reason(record.reasons.get(field) or record.reason or "not asked for")
