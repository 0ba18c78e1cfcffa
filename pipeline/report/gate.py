"""Render a gate's checks as lines and as Markdown, and annotate runs of GitHub Actions."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from enginesmith.pipeline.report.markdown import plain
from enginesmith.pipeline.results.gate_report import FleetGate, Gate


def list_broken(found: Gate | FleetGate) -> list[str]:
    """List the checks that failed, by entry where there are several."""
    return [f"{name}{check.text}" for name, gate in _entries(found) for check in gate.breaches]


def list_cautions(found: Gate | FleetGate) -> list[str]:
    """List what has to be known before the checks are believed, by entry where there are several."""
    return [f"{name}{text}" for name, gate in _entries(found) for text in gate.cautions]


def list_lines(found: Gate | FleetGate) -> list[str]:
    """List a line for each check and caution, and one that sums them up."""
    lines = [f"{word}: {text}" for word, text in _items(found, "BROKEN")]
    return [" ".join(line.split()) for line in (*lines, summarize(found))]


def _entries(found: Gate | FleetGate) -> list[tuple[str, Gate]]:
    if isinstance(found, Gate):
        return [("", found)]
    return [(f"{name}: ", gate) for name, gate in found.entries.items()]


def _items(found: Gate | FleetGate, broken: str) -> Iterator[tuple[str, str]]:
    for name, gate in _entries(found):
        yield from (("held" if check.passed else broken, f"{name}{check.text}") for check in gate.verdicts)
        yield from (("note", f"{name}{text}") for text in gate.cautions)


def summarize(found: Gate | FleetGate) -> str:
    """Sum up a gate in one sentence."""
    gates = _entries(found)
    total = sum(len(gate.verdicts) for _, gate in gates)
    if isinstance(found, FleetGate):
        about, entries = found.fleet, len(gates)
        failed = [name for name, gate in found.entries.items() if not gate.passed]
        broken = f"{len(failed)} of {entries} entries broken: {', '.join(failed)}" if failed else ""
        held = f"all {total} held, of {entries} {'entry' if entries == 1 else 'entries'}"
    else:
        about = f"{found.variant} of {found.run}" if found.variant else found.run
        broken = f"{len(found.breaches)} of {total} broken" if found.breaches else ""
        held = f"all {total} held"
    if broken or not found.updated:
        return f"{about}: {broken or (held if total else 'nothing was judged')}"
    return f"{about} is the baseline in {found.baseline} now"


def render(found: Gate | FleetGate) -> str:
    """Render a gate as Markdown."""
    where = found.run if isinstance(found, Gate) else found.fleet
    title = f"### Gate: {'passed' if found.passed else 'broken'}, {plain(Path(where).name)}"
    items = [f"- {word}: {plain(text)}" for word, text in _items(found, "**broken**")]
    return "\n".join([title, "", plain(summarize(found)), "", *items]) + "\n"


# What GitHub Actions shows of a run: annotations in its log, and a summary of the job.

_LONGEST = 4_000
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
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return short.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
