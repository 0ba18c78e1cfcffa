"""``report.md``: a run on one page, for a pull request or a terminal."""

import re
from collections.abc import Sequence

from enginesmith.pipeline.report import measurements, smaller, tables
from enginesmith.pipeline.run import Run, VariantRecord
from enginesmith.pipeline.units import format_bytes, format_seconds

_STAR = re.compile(r"(?<!\*)\*(?!\*)")
"""A star that marks a name, and no emphasis."""


def render(run: Run) -> str:
    """The run as Markdown."""
    parts = [
        f"# {_plain(run.name)}",
        _STAR.sub(r"\*", tables.verdict(run)),
        _table(tables.COLUMNS, tables.rows(run)),
        _footnotes(run),
        *_remarks(run),
        *_verdicts(run),
        *_failures(run),
        *_engines(run),
        *_measured(run),
        *_smaller(run),
        *_precision(run),
        "## Fidelity",
        f"Outputs against {run.baseline.id} on {_plain(run.model.data or 'unknown')} data.",
        _fidelity(run),
        "## Steps",
        *(_steps(record) for record in run.variants if record.history),
        "## Reproduce",
        f"```\nenginesmith resume {_plain(run.name)}    # with this run directory, or the recipe in its run.json\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _footnotes(run: Run) -> str:
    environment = run.environment
    where = f"{environment.get('processor') or 'unknown CPU'}, {run.recipe.where}"
    stops = {row.stopped_because for record in (run.baseline, *run.variants) for row in record.latency}
    notes = [
        f"Measured on {where}; {_threads(run)}. Speed-up is the median of paired rounds against {run.baseline.id}."
    ]
    notes += [f"Stopped: {'; '.join(sorted(stop for stop in stops if stop))}."] if any(stops) else []
    notes += [f"{_plain(note)}." for note in tables.made_up(run)]
    notes += [f"Warning: {warning}." for warning in environment.get("warnings", [])]
    return "\n".join(notes)


def _threads(run: Run) -> str:
    count = run.recipe.where.thread_count
    return f"{count} thread{'s' if count != 1 else ''}"


def _verdicts(run: Run) -> list[str]:
    if not run.verdicts:
        return []
    rows = [
        (one.budget, f"{one.limit:g}", "unknown" if one.actual is None else f"{one.actual:g}", _yes(one.passed))
        for one in run.verdicts
    ]
    winner = next((one for one in run.variants if one.id == run.winner and one.synthetic_calibration), None)
    whose = [f"Those of {_plain(tables.marked(winner))}."] if winner else []
    return ["## Budgets", *whose, _table(("budget", "limit", "actual", "held"), rows)]


def _failures(run: Run) -> list[str]:
    failed = tables.reasons(run)
    if not failed:
        return []
    lines = [f"- **{_plain(names)}**: {_plain(reason)}" for names, reason in failed]
    return ["## What failed, or is left", "\n".join(lines)]


def _engines(run: Run) -> list[str]:
    """What engines say of themselves; under a workspace sweep, latency against memory."""
    built = [record for record in run.variants if record.build and record.build.activation_bytes is not None]
    if not built:
        return []
    columns = ("variant", "target", "workspace limit", "weights", "activations", "kernels", "p50 ms")
    return ["## Engines", _table(columns, [_engine_row(record) for record in built])]


def _engine_row(record: VariantRecord) -> tuple[str, ...]:
    build = record.build
    assert build is not None
    first = next((row for row in record.latency if row.p50_ms is not None), None)
    kernels = ", ".join(f"{count} {name}" for name, count in (build.layers or {}).items())
    sizes = (build.workspace_limit_bytes, build.weights_bytes, build.activation_bytes)
    return (
        tables.marked(record),
        record.target or "–",
        *(format_bytes(size) for size in sizes),
        kernels or "–",
        f"{tables.ms(first.p50_ms)} (batch {first.batch})" if first else "not measured",
    )


def _remarks(run: Run) -> list[str]:
    lines = [f"- **{_plain(name)}**: {_plain(text)}." for name, text in tables.remarks(run)]
    return ["\n".join(lines)] if lines else []


def _smaller(run: Run) -> list[str]:
    """What was pruned, by group, and how training it back went."""
    rows = smaller.models(run)
    parts = [_table(smaller.MODELS, rows)] if rows else []
    if scanned := smaller.sensitivity(run):
        parts.append(_folded("what each group costs when it is pruned alone", _table(smaller.SENSITIVITY, scanned)))
    for record in smaller.pruned(run):
        for facts in record.pruning:
            parts.append(
                _folded(f"{record.prune}: what each group lost", _table(smaller.GROUPS, smaller.groups(facts)))
            )
        for back in record.recovery:
            line = smaller.drawn([point.metric for point in back.curve])
            parts.append(_folded(f"{record.prune}: {back.metric} {line}", _table(smaller.CURVE, smaller.curve(back))))
    return ["## Pruning", *parts] if parts else []


def _precision(run: Run) -> list[str]:
    """What is computed in which precision, by variant, by group, and how that was found."""
    rows = tables.coverage(run)
    parts = [_table(tables.COVERAGE, rows)] if rows else []
    for record in run.variants:
        if sentence := tables.kept(record):
            parts.append(_folded(sentence, _table(tables.ASSIGNMENT, tables.assignment(record))))
        if record.search:
            parts.append(_folded(f"{tables.marked(record)}: trials", _table(tables.SEARCH, tables.search(record))))
    return ["## Precision", *parts] if parts else []


def _measured(run: Run) -> list[str]:
    """Throughput, memory by part, limits and time by module, as far as they were measured."""
    columns, profile = measurements.profile(run)
    parts = {
        "Throughput": (measurements.THROUGHPUT, measurements.throughput(run)),
        "Memory": (measurements.MEMORY, measurements.memory(run)),
        "Limits of the machine": (measurements.LIMITS, measurements.limits(run)),
        "Time by module": (columns, profile),
    }
    found = [text for title, (heads, rows) in parts.items() if rows for text in (f"## {title}", _table(heads, rows))]
    notes = [f"- {_plain(note)}" for note in measurements.notes(run)]
    return [*found, *(["\n".join(notes)] if notes else [])]


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{_plain(summary)}</summary>\n\n{content}\n\n</details>"


def _fidelity(run: Run) -> str:
    rows = [
        (tables.marked(record), entry.stage, f"{entry.point} (batch {entry.batch})")
        + (_decimal(entry.sqnr_db, 1), _decimal(entry.max_abs_error, 3, "g"), _decimal(entry.argmax_agreement, 4))
        + (_yes(entry.passed),)
        for record in run.variants
        for entry in record.fidelity
    ]
    columns = ("variant", "stage", "at", "SQNR dB", "max abs error", "argmax agreement", "passed")
    return _table(columns, rows) if rows else "Nothing was compared."


def _steps(record: VariantRecord) -> str:
    rows = [
        (entry.step, entry.effect, format_seconds(entry.seconds), format_bytes(entry.host_peak_bytes))
        for entry in record.history
    ]
    notes = [f"- {entry.step}: {_plain(note)}" for entry in record.history for note in entry.notes]
    table = _table(("step", "effect", "time", "host peak"), rows)
    return "\n\n".join([f"**{_plain(tables.marked(record))}**", table, *(["\n".join(notes)] if notes else [])])


def _decimal(value: float | None, digits: int, kind: str = "f") -> str:
    return "–" if value is None else f"{value:.{digits}{kind}}"


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def _plain(text: str) -> str:
    """Text that cannot break out of a table cell or bring markup along."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return _STAR.sub(r"\\*", text)
