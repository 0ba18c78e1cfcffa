"""The command line, called inside this process: the workers' fork server starts once, and errors keep their class."""

import json
import time
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from enginesmith.cli import main
from enginesmith.pipeline.errors import EnginesmithError, StepError

_PROMISED = (1, 2, 4)
"""Exit codes of a refusal."""


@dataclass(frozen=True)
class Answer:
    """Hold the result of one call of the command line."""

    exit_code: int
    document: Any
    """What ``--json`` printed, None where that is no JSON."""
    error: BaseException | None
    """What was raised on the way to the exit code; one that is no EnginesmithError would have been a traceback."""
    output: str
    seconds: float

    @property
    def failure(self) -> str:
        """The class of a refusal: the error's own word for it, else the name of its type."""
        if self.error is None:
            return ""
        word = getattr(self.error, "failure", "")
        return word or type(self.error).__name__

    @property
    def message(self) -> str:
        """Return the error's message, as the user reads it."""
        return str(self.error.message) if isinstance(self.error, EnginesmithError) else repr(self.error or "")

    @property
    def remedy(self) -> str:
        """Return the error's remedy."""
        return str(self.error.remedy) if isinstance(self.error, EnginesmithError) else ""

    @property
    def broken_promises(self) -> tuple[str, ...]:
        """List broken promises: a traceback, an exit code of no meaning, an error without class or remedy."""
        found = ["a traceback"] if "Traceback (most recent call last)" in self.output else []
        if self.exit_code == 0:
            return (*found, *([] if self.document is not None else ["no JSON document"]))
        if not isinstance(self.error, EnginesmithError):
            return (*found, f"{type(self.error).__name__} reaches the user")
        if type(self.error) is StepError:
            found.append("an error without a class of its own")
        if self.exit_code not in _PROMISED:
            found.append(f"the exit code {self.exit_code}")
        if not self.message.strip() or not self.remedy.strip():
            found.append("no message" if not self.message.strip() else "no remedy")
        if not isinstance(self.document, dict) or self.document.get("remedy") != self.remedy:
            found.append("no JSON document of the error")
        return tuple(found)


def call(*arguments: str) -> Answer:
    """Run ``enginesmith ARGUMENTS --json --quiet``."""
    start = time.perf_counter()
    result = CliRunner().invoke(main, [*arguments, "--json", "--quiet"])
    seconds = time.perf_counter() - start
    raised = result.exception
    error = raised.__context__ if isinstance(raised, SystemExit) and raised.__context__ else raised
    return Answer(result.exit_code, _parsed(result.stdout), error, result.output, seconds)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
