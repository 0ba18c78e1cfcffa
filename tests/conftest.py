"""Test what several suites share: one store for the session, and the command line run in this process."""

import fcntl
import gc
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginesmith.cli import main
from enginesmith.pipeline.artifact import file_digest
from enginesmith.pipeline.system import worker


@dataclass(frozen=True)
class Answer:
    """Hold what a command left: its exit code and what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr


os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # many processes are started here, and each would compile everything
for _name, _value in {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}.items():
    os.environ.setdefault(_name, _value)  # models are small here, and other tests run beside
if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # an export initializes CUDA, and no fork could use it any more
    worker.also_preload(["enginesmith.tests.data.warm_up:export_once"])
Cli = Callable[..., Answer]
_BRIEFLY = {"--measure-time": "0.3s", "--threads": "1"}
_UNTRIED = ("--prosecute", "0s")
_FIND_OR_LIST = {"--engine", "--precision", "--prune", "--sparsity", "--target", "--workspace", "--data", "--time"}


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Have garbage collections look at what tests make, and not at all modules that were imported before."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that this session has: what one of them made, the others find there."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def store(shared: Path) -> Path:
    """A store for the whole session: what one test made, another may find there."""
    return shared / "store"


def _briefly(arguments: list[str]) -> list[str]:
    measures = arguments[:1] in (["optimize"], ["benchmark"]) and not {"--recipe", "--help"} & set(arguments)
    finds = arguments[:1] == ["optimize"] and not _FIND_OR_LIST & set(arguments)
    if measures and finds and not any(word.endswith((".yaml", ".yml")) for word in arguments[1:2]):
        arguments = [*arguments, "--engine", "onnxruntime"]  # one variant is enough where nobody says which
    if measures and arguments[0] == "optimize" and "--prosecute" not in arguments:
        arguments = [*arguments, *_UNTRIED]
    return arguments + [
        word for option, value in _BRIEFLY.items() if measures and option not in arguments for word in (option, value)
    ]


def _run(*arguments: object) -> Answer:
    """Run ``enginesmith ARGUMENTS…``; what escapes as anything but an exit code is raised."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        result = CliRunner().invoke(main, _briefly([str(argument) for argument in arguments]))
    finally:
        signal.signal(signal.SIGTERM, handler)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def cli(store: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs ``enginesmith ARGUMENTS…`` in this process, so that all commands share one preloaded fork server.

    What escapes the command line as anything but an exit code fails the test with its own trace. Where a test does not
    say for how long and by how many threads, it is measured for a moment by one: a test has to see that there are
    numbers, not how good they are.
    """
    monkeypatch.setenv("ENGINESMITH_STORE", str(store))
    return _run


@pytest.fixture(scope="session")
def optimized(store: Path) -> Callable[..., Path]:
    """Makes a run from the session's store, for fixtures that several tests share: ``optimized(OUT, MODEL, …)``."""

    def run(out: Path, *arguments: object) -> Path:
        done = _run("optimize", *arguments, "--quiet", "--store", store, "--out", out)
        assert done.code == 0, done.text
        return out

    return run


@pytest.fixture(scope="session")
def digits_run(optimized: Callable[..., Path], shared: Path) -> Iterator[Path]:
    """A finished run of the zoo's smallest model in fp32 and int8, all of it measured; who changes it copies it."""
    words = ("--precision", "fp32", "--precision", "int8", "--max-drop", "0.01", "--search-steps", "1", "--limits")
    out = shared / "digits" / "run"
    with (shared / "digits.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            optimized(out, "digits", *words)
    digest = file_digest(out / "run.json")
    yield out
    assert file_digest(out / "run.json") == digest, "a test changed the run that others look at too: copy it"
