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


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for the whole session: what one test made, another may find there."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def cli(store: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs ``enginesmith ARGUMENTS…`` in this process, so that all commands share one preloaded fork server.

    What escapes the command line as anything but an exit code fails the test with its own trace.
    """
    monkeypatch.setenv("ENGINESMITH_STORE", str(store))

    def run(*arguments: object) -> Answer:
        handler = signal.getsignal(signal.SIGTERM)
        try:
            result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        finally:
            signal.signal(signal.SIGTERM, handler)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run
