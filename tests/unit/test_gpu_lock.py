"""One process at a time takes times on a GPU: waits, how they end, and what happens where there can be no lock."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.errors import StepError
from enginesmith.pipeline.execution import local
from enginesmith.pipeline.execution.executor import StepRequest
from enginesmith.pipeline.execution.local import Gpus, LocalExecutor
from enginesmith.pipeline.planning.plan import Step, StepRef
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import gpu_lock, nvidia
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.gpu_lock import lock_gpu
from enginesmith.pipeline.tasks.build import Build
from enginesmith.pipeline.tasks.measure import Memory

CUDA = Device(kind="cuda")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the only GPU."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(nvidia, "identify", lambda index: f"gpu{index}")
    monkeypatch.setattr(gpu_lock, "_SLICE_SECONDS", 0.001)
    monkeypatch.setattr(gpu_lock, "_told", set())
    return tmp_path / "enginesmith-gpu-gpu0.lock"


def is_free(file: Path) -> bool:
    with file.open(encoding="utf-8") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.fixture
def release(file: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock, as another process would; returns what drops it."""
    file.touch(mode=0o444)
    descriptor = os.open(file, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield lambda: fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def test_a_gpu_is_locked_for_as_long_as_it_is_measured_on(file: Path) -> None:
    with lock_gpu(0, 1.0, pytest.fail) as waited, lock_gpu(1, 1.0, pytest.fail):
        assert (waited, is_free(file)) == (0.0, False)
    assert is_free(file)
    assert oct(file.stat().st_mode)[-3:] == "644"


def test_a_process_that_measures_is_waited_for_and_named(file: Path, release: Callable[[], None]) -> None:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        release()

    with lock_gpu(0, 600.0, tell) as waited:
        assert waited > 0
        assert not is_free(file)
    assert is_free(file)
    assert told == [f"waiting for another enginesmith process (pid {os.getpid()}) that measures on cuda:0"]


def test_nobody_waits_longer_than_the_limit(file: Path, release: Callable[[], None]) -> None:
    told: list[str] = []
    with lock_gpu(0, 0.0, told.append):
        assert "going on beside it" in told[-1]
    release()
    while not is_free(file):  # until the thread that waited has dropped it
        pass


def test_a_wait_ends_with_the_run(release: Callable[[], None]) -> None:
    with pytest.raises(StepError, match="it was ended"), lock_gpu(0, 600.0, lambda text: None, lambda: True):
        pytest.fail("it was measured")


@pytest.mark.parametrize("link", [True, False])
def test_without_a_file_it_goes_on_and_says_so_once(file: Path, link: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    if link:  # of somebody who wants another file to be opened
        file.symlink_to("elsewhere")
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(file / "missing"))
    for _ in range(2):
        with lock_gpu(0, 1.0, told.append) as waited:
            assert waited == 0.0
    assert len(told) == 1
    assert "are not kept from measuring on cuda:0" in told[0]


def test_a_gpu_that_the_driver_does_not_name_is_not_locked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "identify", lambda index: None)
    with lock_gpu(0, 1.0, pytest.fail):
        assert not file.exists()


def test_waiting_takes_a_part_of_the_time_of_steps_that_measure_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[int, float]] = []

    def wait(index: int, limit_seconds: float, *_: object) -> object:
        waits.append((index, limit_seconds))
        return local.contextlib.nullcontext(8.0)

    monkeypatch.setattr(local, "lock_gpu", wait)
    engine = engine_class("onnxruntime")()
    tasks = [
        Memory(engine=engine, device=CUDA, left_seconds=50.0),
        Build(engine=engine_class("tensorrt")(), device=CUDA),
        Build(engine=engine, device=CUDA),
        Memory(engine=engine, device=Device()),
    ]
    executor, times = LocalExecutor(Store(tmp_path / "store"), 1, Gpus(1)), []
    for task in tasks:
        step = Step(StepRef("a"), task)
        request = StepRequest(step, {}, Path("log"), lambda: None, lambda text: None, timeout_seconds=100.0)
        with executor._lock_gpu(request, 3) as left, executor._lock_gpu(replace(request, timeout_seconds=None), 3):
            times.append((left.timeout_seconds, left.step.task.left_seconds))
    assert waits == [(3, 25.0), (3, 600.0)] * 2
    assert times == [(92.0, 42.0), (92.0, 92.0), (100.0, float("inf")), (100.0, float("inf"))]
