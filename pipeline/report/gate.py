"""What a gate found, as people read it: lines in a terminal, and Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from enginesmith.pipeline.report.markdown import plain
from enginesmith.pipeline.results.gate_report import FleetGate, Gate


def lines(found: Gate) -> list[str]:
    """One for each judgement, one for each thing to know, and what that comes to."""
    return _in_one_line([*_said(found), sentence(found)])


def fleet_lines(found: FleetGate) -> list[str]:
    """The same of every entry, by name, and what all of that comes to."""
    said = [line for name, one in found.entries.items() for line in _said(one, f"{name}: ")]
    return _in_one_line([*said, fleet_sentence(found)])


def _said(found: Gate, who: str = "") -> list[str]:
    judged = [f"{'held' if one.passed else 'BROKEN'}: {who}{one.text}" for one in found.verdicts]
    return [*judged, *(f"note: {who}{text}" for text in found.cautions)]


def _in_one_line(texts: list[str]) -> list[str]:
    return [" ".join(text.split()) for text in texts]


def sentence(found: Gate) -> str:
    """The gate in one sentence."""
    about = f"{found.variant} of {found.run}" if found.variant else found.run
    broken = len(found.breaches)
    if broken:
        return f"{about}: {broken} of {len(found.verdicts)} broken"
    if found.updated:
        return f"{about} is the baseline in {found.baseline} now"
    return f"{about}: all {len(found.verdicts)} held" if found.verdicts else f"{about}: nothing was judged"


def fleet_sentence(found: FleetGate) -> str:
    """The gate of a fleet in one sentence."""
    broken = [name for name, one in found.entries.items() if not one.passed]
    if broken:
        return f"{found.fleet}: {len(broken)} of {len(found.entries)} entries broken: {', '.join(broken)}"
    if found.updated:
        return f"{found.fleet} is the baseline in {found.baseline} now"
    total, entries = sum(len(one.verdicts) for one in found.entries.values()), len(found.entries)
    if not total:
        return f"{found.fleet}: nothing was judged"
    return f"{found.fleet}: all {total} held, of {entries} {'entry' if entries == 1 else 'entries'}"


def markdown(found: Gate) -> str:
    """The same for the summary of a job, or a comment."""
    return _markdown(found.run, found.passed, sentence(found), _items(found))


def fleet_markdown(found: FleetGate) -> str:
    """The same of a fleet."""
    items = [item for name, one in found.entries.items() for item in _items(one, f"{plain(name)}: ")]
    return _markdown(found.fleet, found.passed, fleet_sentence(found), items)


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
    """Whether this process runs in GitHub Actions, which says so by ``GITHUB_ACTIONS=true``."""
    return environment.get("GITHUB_ACTIONS") == "true"


def annotations(title: str, errors: Sequence[str], warnings: Sequence[str]) -> list[str]:
    """A line for each, as GitHub reads them from the log ("Workflow commands for GitHub Actions").

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
