"""What several suites share: one store for the session, and the command line run in this process."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginesmith.cli import main


@dataclass(frozen=True)
class Answer:
    """What a command left: its exit code and what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr


Cli = Callable[..., Answer]
_BRIEFLY = ("--measure-time", "0.3s")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for the whole session: what one test made, another may find there."""
    return tmp_path_factory.mktemp("store")


def _briefly(arguments: list[str]) -> list[str]:
    measures = arguments[:1] in (["optimize"], ["benchmark"]) and "--recipe" not in arguments
    return [*arguments, *_BRIEFLY] if measures and not {"--measure-time", "--help"} & set(arguments) else arguments


@pytest.fixture
def cli(store: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs ``enginesmith ARGUMENTS…`` in this process, so that all commands share one preloaded fork server.

    What escapes the command line as anything but an exit code fails the test with its own trace. Times are measured for
    a moment only, where a test does not say for how long: it has to see that there are numbers, not how good they are.
    """
    monkeypatch.setenv("ENGINESMITH_STORE", str(store))

    def run(*arguments: object) -> Answer:
        handler = signal.getsignal(signal.SIGTERM)
        try:
            result = CliRunner().invoke(main, _briefly([str(argument) for argument in arguments]))
        finally:
            signal.signal(signal.SIGTERM, handler)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run
