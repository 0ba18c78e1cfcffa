"""Render a gate's checks as lines and as Markdown, and annotate runs of GitHub Actions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from enginesmith.pipeline.report.markdown import plain
from enginesmith.pipeline.results.gate_report import FleetGate, Gate


def list_lines(found: Gate) -> list[str]:
    """List a line for each check and caution, and one that sums them up."""
    return _in_one_line([*_said(found), summarize(found)])


def list_fleet_lines(found: FleetGate) -> list[str]:
    """List the checks and cautions of all entries by name, and a line that sums them up."""
    said = [line for name, one in found.entries.items() for line in _said(one, f"{name}: ")]
    return _in_one_line([*said, summarize_fleet(found)])


def _said(found: Gate, who: str = "") -> list[str]:
    judged = [f"{'held' if one.passed else 'BROKEN'}: {who}{one.text}" for one in found.verdicts]
    return [*judged, *(f"note: {who}{text}" for text in found.cautions)]


def _in_one_line(texts: list[str]) -> list[str]:
    return [" ".join(text.split()) for text in texts]


def summarize(found: Gate) -> str:
    """Sum up a gate in one sentence."""
    about = f"{found.variant} of {found.run}" if found.variant else found.run
    broken = len(found.breaches)
    if broken:
        return f"{about}: {broken} of {len(found.verdicts)} broken"
    if found.updated:
        return f"{about} is the baseline in {found.baseline} now"
    return f"{about}: all {len(found.verdicts)} held" if found.verdicts else f"{about}: nothing was judged"


def summarize_fleet(found: FleetGate) -> str:
    """Sum up the gate of a fleet in one sentence."""
    broken = [name for name, one in found.entries.items() if not one.passed]
    if broken:
        return f"{found.fleet}: {len(broken)} of {len(found.entries)} entries broken: {', '.join(broken)}"
    if found.updated:
        return f"{found.fleet} is the baseline in {found.baseline} now"
    total, entries = sum(len(one.verdicts) for one in found.entries.values()), len(found.entries)
    if not total:
        return f"{found.fleet}: nothing was judged"
    return f"{found.fleet}: all {total} held, of {entries} {'entry' if entries == 1 else 'entries'}"


def render(found: Gate) -> str:
    """Render a gate as Markdown."""
    return _markdown(found.run, found.passed, summarize(found), _items(found))


def render_fleet(found: FleetGate) -> str:
    """Render the gate of a fleet as Markdown."""
    items = [item for name, one in found.entries.items() for item in _items(one, f"{plain(name)}: ")]
    return _markdown(found.fleet, found.passed, summarize_fleet(found), items)


def _items(found: Gate, who: str = "") -> list[str]:
    mark = {True: "held", False: "**broken**"}
    items = [f"- {mark[one.passed]}: {who}{plain(one.text)}" for one in found.verdicts]
    return [*items, *(f"- note: {who}{plain(text)}" for text in found.cautions)]


def _markdown(where: str, passed: bool, said: str, items: list[str]) -> str:
    title = f"### Gate: {'passed' if passed else 'broken'}, {plain(Path(where).name)}"
    return "\n".join([title, "", plain(said), "", *items]) + "\n"


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
    return [
        f"::{level} title={_property(title)}::{_message(text)}"
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


def _message(text: str) -> str:
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return short.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
