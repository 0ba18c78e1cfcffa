"""Tests of the CUDA path without a device: they skip where the runtime of ``make test-cuda`` is not underneath.

Nothing here ran on a GPU. Kernels do nothing on that runtime, so most nets have zero weights: then answers are right.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from .control import Control

HERE = Path(__file__).parent
NETS = HERE / "nets.py"


def pytest_configure() -> None:
    """Have all processes of the session write a log: the fork server hands these settings to its workers."""
    if "ENGINESMITH_STAND_IN" in os.environ:
        handle, path = tempfile.mkstemp(prefix="stand-in-")
        os.close(handle)
        os.environ["ENGINESMITH_STAND_IN_LOG"] = path


def pytest_unconfigure() -> None:
    if "ENGINESMITH_STAND_IN" in os.environ:
        Path(os.environ["ENGINESMITH_STAND_IN_LOG"]).unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    runtime = os.environ.get("ENGINESMITH_STAND_IN", "")
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if not runtime:
            item.add_marker(pytest.mark.skip(reason="needs the CUDA runtime without a device: make test-cuda"))
        elif runtime == "real" and {"card", "runtime_log"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="sets the card, makes faults or reads the simulated runtime's log"))


@pytest.fixture
def runtime_log() -> Callable[[], list[tuple[int, str]]]:
    """Reads what processes of this session wrote so far: process and event."""

    def read() -> list[tuple[int, str]]:
        lines = Path(os.environ["ENGINESMITH_STAND_IN_LOG"]).read_text(encoding="utf-8").splitlines()
        return [(int(pid), event) for pid, _, event in (line.partition(" ") for line in lines)]

    return read


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Control]]:
    """Gives the processes that are started from now on a card of their own: ``card(memory_mib=512, devices=2, …)``.

    Settings are those of the runtime (tests/cuda/README.md), in small letters. The processes share its memory. Workers
    get the settings from their fork server, so that starts again, and once more after the test.
    """
    cards: list[Control] = []

    def give(**settings: Any) -> Control:
        control = Control(tmp_path / f"card{len(cards)}")
        cards.append(control)
        for name, value in (settings | {"control": control.path}).items():
            monkeypatch.setenv(f"ENGINESMITH_STAND_IN_{name.upper()}", str(value))
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        return control

    yield give
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
