"""``report.md``: what a run comes to, short enough for a comment on a pull request; report.html has all of it."""

import re
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from enginesmith.pipeline.report import sections, tables
from enginesmith.pipeline.results import budgets
from enginesmith.pipeline.results.run import Run, VariantRecord

# Markdown that no name or text can break out of.

_STAR = re.compile(r"(?<!\*)\*(?!\*)")
"""A star that marks a name, and no emphasis."""

_REFERENCE = re.compile(r"(?<![\w])@(?=\w)|#(?=\d)")
"""What GitHub makes a mention of somebody, or of an issue, wherever it stands; nothing that is seen goes in between."""


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], links: Sequence[str] = ()) -> str:
    """A table whose cells are text; ``links`` are the files that rows' first cells lead to, an empty one to none."""
    lines = [tuple(map(plain, line)) for line in (columns, tuple("---" for _ in columns), *rows)]
    for index, target in enumerate(links, start=2):
        lines[index] = (link(lines[index][0], target), *lines[index][1:])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def link(text: str, target: str) -> str:
    """Markdown as a link to a file beside the document; without a target as it is."""
    return f"[{text.replace('[', chr(92) + '[').replace(']', chr(92) + ']')}]({quote(target)})" if target else text


def plain(text: str) -> str:
    """Text on one line that cannot break out of a table cell or bring markup along."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("&", "&amp;").replace("<", "&lt;")
    text = text.replace("`", "\\`").replace("](", "]\\(")
    return stars(_REFERENCE.sub("\\g<0>\u200b", text))


def stars(text: str) -> str:
    """The same for stars alone."""
    return _STAR.sub(r"\\*", text)


MOST_CHARACTERS = 60_000
"""A comment on GitHub holds 65 536."""
_MOST_ROWS, _MOST_LINES, _LONGEST = 24, 12, 400
"""Rows of the table, entries of a list, and characters of an entry."""


def render(run: Run) -> str:
    """The run as Markdown."""
    parts = [
        f"# {plain(_short(run.name))}",
        plain(_short(tables.verdict(run), 2 * _LONGEST)),
        _variants(run),
        _list(map(plain, tables.made_up(run))),
        _list(f"**{plain(_short(name))}**: {plain(_short(text))}" for name, text in tables.remarks(run)),
        *_budgets(run),
        *_section(
            "Cautions",
            [
                *_unfinished(run),
                *_warnings(run),
                *sections.disturbed(run),
                *sections.explain_tails(run),
                *sections.out_of_memory(run),
            ],
        ),
        *_failures(run),
        _fidelity(run),
        _where(run),
        _more(run),
    ]
    text = "\n\n".join(part for part in parts if part)
    return fitting(text, "report.html")


def _variants(run: Run) -> str:
    """The table of all variants, or of those that matter where there are many."""
    rows = tables.rows(run)
    if len(rows) <= _MOST_ROWS:
        return table(tables.COLUMNS, [_cells(row) for row in rows])
    chosen = _first(run)
    few = tables.rows(run.model_copy(update={"variants": chosen}))[:_MOST_ROWS]
    left = len(run.variants) - len(chosen)
    return table(tables.COLUMNS, [_cells(row) for row in few]) + f"\n\nand {left} more variants, in report.html"


def _first(run: Run) -> tuple[VariantRecord, ...]:
    """The winner, those that nobody beats, and others in their order, as many as there is room for."""
    batches = max(1, len(run.baseline.latency))
    room = max(1, _MOST_ROWS // batches - 1)
    first = [one for one in run.variants if one.id == run.winner]
    first += [one for one in run.variants if one.id in run.pareto and one not in first]
    first += [one for one in run.variants if one not in first]
    kept = first[:room]
    return tuple(one for one in run.variants if one in kept)


def _cells(row: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_short(cell) for cell in row)


def _budgets(run: Run) -> list[str]:
    missing = [
        f"{budgets.format_title(name)} was not judged: {run.winner_reason}" for name in budgets.list_unjudged(run)
    ]
    rows = budgets.verdict_rows(run)
    if not rows and not missing:
        return []
    winner = next((one for one in run.variants if one.id == run.winner and one.synthetic_calibration), None)
    whose = [f"Those of {plain(tables.marked(winner))}."] if winner else []
    return ["## Budgets", *whose, *([table(budgets.COLUMNS, rows)] if rows else []), _list(map(_entry, missing))]


def _unfinished(run: Run) -> list[str]:
    """What is said of a run that was interrupted, or has steps for another machine."""
    if run.complete:
        return []
    done = sum(step.status != "pending" for step in run.steps)
    return [f"this run is not complete: {done} of {len(run.steps)} steps have ended; `enginesmith resume` goes on"]


def _warnings(run: Run) -> list[str]:
    """What the machine and the run warn of; what failed has a part of its own."""
    failed = {f"{names}: {reason}" for names, reason in tables.reasons(run)}
    return [text for text in tables.cautions(run) if text not in failed]


def _failures(run: Run) -> list[str]:
    lines = [f"**{plain(_short(names))}**: {plain(_short(reason))}" for names, reason in tables.reasons(run)]
    return ["## What failed, or is left", _list(lines)] if lines else []


def _fidelity(run: Run) -> str:
    """All comparisons in one line, and each that did not pass."""
    judged = [(one, entry) for one in run.variants for entry in one.fidelity if not (entry.passed and entry.reason)]
    if not judged:
        return "Fidelity: nothing was compared."
    good = sum(entry.passed for _, entry in judged)
    known = [(entry.sqnr_db, one, entry) for one, entry in judged if entry.sqnr_db is not None]
    lowest = ""
    if known:
        sqnr, one, entry = min(known, key=lambda found: found[0])
        lowest = f"; the lowest SQNR is {sqnr:.1f} dB ({plain(tables.marked(one))} after {plain(entry.stage)})"
    data = plain(_short(run.model.data or "unknown"))
    return f"Fidelity against {plain(run.baseline.id)} on {data} data: {good} of {len(judged)} checks passed{lowest}."


def _where(run: Run) -> str:
    """What it was measured on, and why measuring stopped."""
    count = run.recipe.where.thread_count
    machine = f"{plain(str(run.environment.get('processor') or 'unknown CPU'))}, {run.recipe.where}"
    stops = {row.stopped_because for record in (run.baseline, *run.variants) for row in record.latency}
    known = sorted(stop for stop in stops if stop)
    threads = f"{count} thread{'s' if count != 1 else ''}"
    said = (
        f"Measured on {machine}; {threads}. Speed-up is the median of paired rounds against {plain(run.baseline.id)}."
    )
    return said + (f" Stopped: {plain('; '.join(known))}." if known else "")


def _more(run: Run) -> str:
    """What report.html has besides."""
    parts = {
        "latency distributions": any(record.latency for record in run.variants),
        "memory by part": any(record.memory for record in run.variants),
        "fidelity by stage": any(record.fidelity for record in run.variants),
        "what is computed in which precision": any(record.coverage or record.assignment for record in run.variants),
        "what was pruned, and how it was trained back": any(record.pruning for record in run.variants),
        "throughput by callers": any(row.concurrency for record in run.variants for row in record.latency),
        "limits of the machine": any(record.limits for record in run.variants),
        "time by operator": any(record.profile for record in run.variants),
        "every step, and how to run it again": True,
    }
    return f"In report.html: {', '.join(name for name, there in parts.items() if there)}."


def _section(title: str, texts: Sequence[str]) -> list[str]:
    return [f"## {title}", _list(map(_entry, texts))] if texts else []


def _entry(text: str) -> str:
    return f"{plain(_short(text))}."


def _list(lines: Iterator[str] | Sequence[str]) -> str:
    """Entries of Markdown, not too many of them."""
    found = list(lines)
    left = len(found) - _MOST_LINES
    more = [f"and {left} more, in report.html"] if left > 0 else []
    return "\n".join(f"- {line}" for line in [*found[:_MOST_LINES], *more])


def _short(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def fitting(text: str, page: str) -> str:
    """A document that a comment holds, of whole lines so that no table or name is cut in two; the rest is in a page."""
    if len(text) > MOST_CHARACTERS:
        end = f"\n\nMore is in {page}."
        kept = text[: MOST_CHARACTERS - len(end)]
        text = kept[: kept.rfind("\n")] + end
    return text.encode("utf-8", "replace").decode() + "\n"
