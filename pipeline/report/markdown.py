"""Render ``report.md``, a summary of a run for a comment on a pull request; report.html has all of it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from urllib.parse import quote

from enginesmith.pipeline.report import run_tables, sentences, tables
from enginesmith.pipeline.report.tables import Table
from enginesmith.pipeline.results import verdicts
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.units import count_words, shorten

MOST_CHARACTERS = 60_000
"""A comment on GitHub holds 65 536."""
_MOST_ROWS, _MOST_LINES, _LONGEST_SUMMARY = 24, 12, 800
"""Rows of the table, entries of a list, and characters of an entry."""
_EMPHASIS = re.compile(r"\*|(?<![^\W_])_+|_+(?![^\W_])")
"""Stars, and underscores at the edge of a word."""
_REFERENCE = re.compile(r"(?<![\w])@(?=\w)|#(?=\d)|:(?=//)|\bwww(?=\.)", re.I)
"""Text that GitHub makes a mention, an issue or a link, wherever it stands; a character of no width cuts it."""
BOLD = ("**failed**", "**not judged**")
"""Words of ours that stand out; the emphasis of any other text is escaped."""


# Markdown that no name or text can break out of.


def render_table(table: Table, most: int | None = None, page: str = "") -> str:
    """Render a table, with links on first cells; beyond ``most`` rows the ``page`` is named that has the rest."""
    lines = [tuple(map(plain, line)) for line in (table.columns, tuple("---" for _ in table.columns))]
    for index, row in enumerate(table.rows[:most]):
        first, *rest = map(plain, row)
        if target := table.links.get((index, 0)):
            text = first.replace("[", "\\[").replace("]", "\\]")
            first = f"[{text}]({quote(target)})"
        lines.append((first, *rest))
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    left = len(table.rows) - (most or len(table.rows))
    return f"{text}\n\nand {left} more rows, in {page}" if left > 0 else text


def render_list(lines: Iterable[str], most: int = _MOST_LINES, page: str = "report.html") -> str:
    """Render lines of Markdown as a list; beyond ``most`` of them the ``page`` is named that has the rest."""
    entries = list(lines)
    left = len(entries) - most
    more = [f"and {left} more, in {page}"] if left > 0 else []
    return "\n".join(f"- {line}" for line in [*entries[:most], *more])


def plain(text: str) -> str:
    """Escape text to one line that cannot break out of a table cell or bring markup along."""
    if text in BOLD:
        return text
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("&", "&amp;").replace("<", "&lt;")
    text = text.replace("`", "\\`").replace("](", "]\\(")
    text = _EMPHASIS.sub(lambda match: "".join(f"\\{mark}" for mark in match[0]), text)
    return _REFERENCE.sub("\\g<0>\u200b", text)


def limit_length(text: str, page: str) -> str:
    """Cut a document to whole lines that a comment holds, naming the page that has the rest."""
    if len(text) > MOST_CHARACTERS:
        end = f"\n\nMore is in {page}."
        head = text[: MOST_CHARACTERS - len(end)]
        text = head[: head.rfind("\n")] + end
    return text.encode("utf-8", "replace").decode() + "\n"


def render(run: Run, gate: str = "") -> str:
    """Render a run as Markdown, with a section on its gate at the top."""
    progress = [f"{summary}; `enginesmith resume` continues"] if (summary := sentences.describe_progress(run)) else []
    cautions = [*progress, *sentences.list_warnings(run), *sentences.list_measurement_notes(run)]
    reasons = sentences.group_by_reason(run)
    failed = [_label(", ".join(map(tables.mark_name, records)), reason) for records, reason in reasons]
    parts = [
        f"# {plain(shorten(run.name))}",
        *([gate.strip(), "## Result"] if gate else []),
        plain(shorten(sentences.summarize(run), _LONGEST_SUMMARY)),
        _render_variants(run),
        render_list(map(plain, sentences.list_footnotes(run))),
        render_list(_label(name, text) for name, text in sentences.list_remarks(run)),
        *_render_budgets(run),
        *_render_section("Cautions", [f"{plain(shorten(text))}." for text in cautions]),
        *_render_section("What failed, or is still to be done", failed),
        _render_fidelity(run),
        _render_machine(run),
        "Charts, every number and step, and how to run it again: report.html.",
    ]
    return limit_length("\n\n".join(part for part in parts if part), "report.html")


def _label(name: str, text: str) -> str:
    return f"**{plain(shorten(name))}**: {plain(shorten(text))}"


def _render_variants(run: Run) -> str:
    """Render all variants, or those that matter where there are many."""
    table = run_tables.tabulate_variants(run)
    if len(table.rows) <= _MOST_ROWS:
        return render_table(_shorten_cells(table))
    # the winner, the Pareto front, and others in their order, as many as there is room for
    room = max(1, _MOST_ROWS // max(1, len(run.baseline.latency)) - 1)
    variant_ids = {record.id for record in run_tables.winner_first(run)[:room]}
    chosen = tuple(record for record in run.variants if record.id in variant_ids)
    few = run_tables.tabulate_variants(run.model_copy(update={"variants": chosen}))
    few = _shorten_cells(replace(few, rows=few.rows[:_MOST_ROWS]))
    return render_table(few) + f"\n\nand {len(run.variants) - len(chosen)} more variants, in report.html"


def _shorten_cells(table: Table) -> Table:
    return replace(table, rows=tuple(tuple(map(shorten, row)) for row in table.rows))


def _render_budgets(run: Run) -> list[str]:
    missing = [
        f"{verdicts.format_title(name)} was not judged: {run.winner_reason}" for name in verdicts.list_unjudged(run)
    ]
    table = run_tables.tabulate_budgets(run)
    if not table.rows and not missing:
        return []
    winner = next((record for record in run.variants if record.id == run.winner and record.synthetic_calibration), None)
    owner = [f"Those of {plain(tables.mark_name(winner))}."] if winner else []
    missed = render_list(f"{plain(shorten(text))}." for text in missing)
    return ["## Budgets of the recipe", *owner, *([render_table(table)] if table.rows else []), missed]


def _render_fidelity(run: Run) -> str:
    """Sum up all comparisons with the reference in one line."""
    judged = [(record, entry) for record in run.requested for entry in record.judged_fidelity]
    if not judged:
        return "Fidelity: nothing was compared."
    good = sum(entry.passed for _, entry in judged)
    known = [(entry.sqnr_db, record, entry) for record, entry in judged if entry.sqnr_db is not None]
    lowest = ""
    if known:
        sqnr, record, entry = min(known, key=lambda row: row[0])
        lowest = f"; the lowest SQNR is {sqnr:.1f} dB ({plain(tables.mark_name(record))} after {plain(entry.stage)})"
    data = plain(shorten(run.model.data or "unknown"))
    return f"Fidelity against {plain(run.baseline.id)} on {data} data: {good} of {len(judged)} checks passed{lowest}."


def _render_machine(run: Run) -> str:
    """Name the machine, and say why measuring stopped."""
    machine = f"{plain(str(run.environment.get('processor') or 'unknown CPU'))}, {run.where}"
    threads = count_words(run.thread_count, "thread")
    speedup = f"Speed-up is the median of paired rounds against {plain(run.baseline.id)}."
    stops = plain("; ".join(sentences.list_stops(run)))
    return f"Measured on {machine}; {threads}. {speedup}" + (f" Stopped: {stops}." if stops else "")


def _render_section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", render_list(lines)] if lines else []
