"""What GitHub Actions shows of a run: annotations in its log, and a summary of the job."""

from collections.abc import Mapping, Sequence
from pathlib import Path

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
