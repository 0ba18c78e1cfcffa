"""Render a gate's checks as lines and as a section of report.md, and annotate runs of GitHub Actions."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from enginesmith.pipeline.report.markdown import BOLD, plain, render_list, render_table
from enginesmith.pipeline.report.tables import Table, make_table
from enginesmith.pipeline.results import verdicts
from enginesmith.pipeline.results.gate_report import FILE, CheckState, FleetGate, Gate, GateCheck
from enginesmith.pipeline.units import shorten

_WORDS: dict[CheckState, str] = {"passed": "passed", "failed": "FAILED", "unjudged": "not judged"}
_MARKS: dict[CheckState, str] = {"passed": "passed", "failed": BOLD[0], "unjudged": BOLD[1]}
_BUDGETS = {
    "latency_ms": "max_latency_ms",
    "peak_bytes": "max_memory_bytes",
    "size_bytes": "max_size_bytes",
    "drop": "max_drop",
}
"""Number that is compared with the baseline → the budget that is about it."""
_MOST_ROWS, _LONGEST = 24, 1_000
"""Rows of the section's table, and characters of a reason."""


def list_failures(gate: Gate | FleetGate) -> list[str]:
    """List the checks that fail the gate, by entry where there are several."""
    return [f"{name}{check.text}" for name, entry in _entries(gate) for check in entry.breaches]


def list_cautions(gate: Gate | FleetGate) -> list[str]:
    """List what was not judged without failing the gate, and what else to know, by entry where there are several."""
    return [
        f"{name}{text}"
        for name, entry in _entries(gate)
        for text in (
            *(f"not judged: {check.text}" for check in entry.verdicts if not (check.passed or check.fails)),
            *entry.cautions,
        )
    ]


def list_lines(gate: Gate | FleetGate) -> list[str]:
    """List a line for each check and caution, and one that sums them up."""
    lines = [f"{word}: {text}" for word, text in _items(gate)]
    return [" ".join(line.split()) for line in (*lines, summarize(gate))]


def _entries(gate: Gate | FleetGate) -> list[tuple[str, Gate]]:
    if isinstance(gate, Gate):
        return [("", gate)]
    return [(f"{name}: ", entry) for name, entry in gate.entries.items()]


def _items(gate: Gate | FleetGate) -> Iterator[tuple[str, str]]:
    for name, entry in _entries(gate):
        yield from ((_WORDS[check.state], f"{name}{check.text}") for check in entry.verdicts)
        yield from (("note", f"{name}{text}") for text in entry.cautions)


def summarize(gate: Gate | FleetGate) -> str:
    """Sum up a gate in one sentence."""
    gates = _entries(gate)
    if isinstance(gate, FleetGate):
        about = gate.fleet
        failing = [name for name, entry in gate.entries.items() if entry.exit_code]
        entries = f" of {len(gates)} {'entry' if len(gates) == 1 else 'entries'}"
        where = f"; the gate fails for {len(failing)}{entries}: {', '.join(failing)}" if failing else f",{entries}"
    else:
        about, where = f"{gate.variant} of {gate.run}" if gate.variant else gate.run, ""
    if gate.updated:
        return f"{about} is the baseline in {gate.baseline} now"
    counts = Counter(check.state for _, entry in gates for check in entry.verdicts)
    if not counts:
        return f"{about}: nothing was judged"
    if counts.keys() == {"passed"}:
        return f"{about}: {'all ' if counts.total() > 1 else ''}{counts.total()} passed{where}"
    parts = [f"{counts[state]} {word.lower()}" for state, word in _WORDS.items() if counts[state]]
    tolerated = "" if gate.exit_code or not counts["unjudged"] else "; --strict fails on what was not judged"
    return f"{about}: {', '.join(parts)}{where}{tolerated}"


def render(gate: Gate | FleetGate) -> str:
    """Render a gate as a section of Markdown, with checks that fail first."""
    rows = tabulate(gate)
    word = ("passed" if rows else "nothing to judge") if gate.passed else "not all judged"
    word = "failed" if gate.exit_code else word
    table = render_table(tabulate_checks(gate, _MARKS), _MOST_ROWS, FILE) if rows else ""
    notes = render_list(map(plain, list_notes(gate)), page=FILE)
    parts = [f"## Gate: {word}", f"{plain(summarize(gate))}.", table, notes]
    return "\n\n".join(part for part in parts if part) + "\n"


def tabulate_checks(gate: Gate | FleetGate, words: Mapping[CheckState, str] = _WORDS) -> Table:
    """List the checks with their results in these ``words`` and their reasons, those that fail the gate first."""
    rows = sorted(tabulate(gate), key=lambda row: (not row[1].fails, row[1].passed))
    cells = (
        {
            "check": f"{entry} {name_check(check)}".strip(),
            "result": words[check.state],
            "reason": shorten(check.text, _LONGEST),
        }
        for entry, check in rows
    )
    return make_table("gate", "Gate", cells)


def list_notes(gate: Gate | FleetGate) -> list[str]:
    """List what else to know, by entry where there are several."""
    return [shorten(f"{name}{text}") for name, entry in _entries(gate) for text in entry.cautions]


def tabulate(gate: Gate | FleetGate) -> list[tuple[str, GateCheck]]:
    """List all checks with the name of their entry, which is empty for a single run."""
    return [(name.removesuffix(": "), check) for name, entry in _entries(gate) for check in entry.verdicts]


def name_check(check: GateCheck) -> str:
    """Name a check by its number and by what that is compared with: ``p50 latency (budget)``."""
    title = verdicts.format_title(_BUDGETS.get(check.name, check.name))
    return title if check.against == "run" else f"{title} ({check.against})"


# What GitHub Actions shows of a run: annotations in its log, and a summary of the job.

_LONGEST_ANNOTATION = 4_000
"""Characters of an annotation; GitHub cuts longer ones anywhere."""


def is_here(environment: Mapping[str, str]) -> bool:
    """Tell whether this process runs in GitHub Actions, which sets ``GITHUB_ACTIONS=true``."""
    return environment.get("GITHUB_ACTIONS") == "true"


def annotate(title: str, errors: Sequence[str], warnings: Sequence[str]) -> list[str]:
    """Write a line for each message, as GitHub reads them from the log ("Workflow commands for GitHub Actions").

    Text of a model or a file cannot end the line or begin a command of its own.
    """
    name = _escape(title).replace(":", "%3A").replace(",", "%2C")
    return [
        f"::{level} title={name}::{_escape(text)}"
        for level, texts in (("error", errors), ("warning", warnings))
        for text in texts
    ]


def append_summary(environment: Mapping[str, str], markdown: str) -> None:
    """Append to the summary of the job, where GitHub named a file for it.

    Raises:
        OSError: it cannot be written.
    """
    if name := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(name).open("a", encoding="utf-8", errors="replace") as summary:
            summary.write(markdown.rstrip("\n") + "\n\n")


def _escape(text: str) -> str:
    return shorten(text, _LONGEST_ANNOTATION).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
