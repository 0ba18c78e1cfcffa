"""Callers at the same time, and the kernel's account of waiting."""

import os
import subprocess
import sys
import threading
import time
from typing import Any, Self

import numpy as np
import pytest

from enginesmith.pipeline.engines.base import Session
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.measure.latency import timer
from enginesmith.pipeline.measure.latency.timer import ConcurrentClients
from enginesmith.pipeline.system.cpu import RunQueue
from enginesmith.pipeline.tensors import Array, Feeds, Signature

CALL_SECONDS = 0.02


class Clocks(threading.local):
    """A clock for each thread, which its own calls move."""

    seconds = 0.0


class Served(Session):
    """Siblings whose first timed calls wait for each other; each call moves its thread's clock."""

    signature = Signature(inputs=(), outputs=())

    def __init__(self, seen: list[tuple[str, int]], clocks: Clocks, fails: bool = False) -> None:
        self.seen, self.clocks, self.fails = seen, clocks, fails
        self.together = threading.Barrier(1)
        self.calls = 0

    def sibling(self) -> Self:
        self.seen.append(("opened", threading.get_ident()))
        sibling = type(self)(self.seen, self.clocks, self.fails)
        sibling.together = self.together
        return sibling

    def bind(self, feeds: Feeds) -> Feeds:
        return feeds

    def enqueue(self, bound: Any) -> None:
        if self.fails:
            raise ModelError("it does not run")
        self.calls += 1
        if self.calls == timer._WARM_CALLS + 1:
            self.together.wait(60)  # fails unless the others call at the same time
        self.clocks.seconds += CALL_SECONDS

    def synchronize(self) -> None:
        pass

    def fetch(self) -> dict[str, Array]:
        return {}

    def close(self) -> None:
        self.seen.append(("closed", threading.get_ident()))


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(timer, "_now", lambda: round(clocks.seconds * 1e9))
    return clocks


@pytest.mark.parametrize("count", [1, 4])
def test_calls_of_all_callers_are_counted(count: int, clocks: Clocks) -> None:
    seen: list[tuple[str, int]] = []
    served = Served(seen, clocks)
    served.together = threading.Barrier(count)
    callers = ConcurrentClients(served, {})
    calls = callers.run(count, 14.5 * CALL_SECONDS)
    callers.close()
    assert calls.calls_per_second == pytest.approx(count / CALL_SECONDS)
    np.testing.assert_allclose(calls.host_seconds, np.full(15 * count, CALL_SECONDS))
    assert len({thread for what, thread in seen if what == "opened"}) == count
    assert {thread for what, thread in seen if what == "opened"} == {
        thread for what, thread in seen if what == "closed"
    }
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_an_error_of_a_caller_is_raised(clocks: Clocks) -> None:
    with pytest.raises(ModelError, match="does not run"):
        ConcurrentClients(Served([], clocks, fails=True), {}).run(2, 0.01)


def test_waiting_for_a_core_is_seen() -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    rival = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile 1: pass"])
    os.sched_setaffinity(0, {core})
    try:
        with RunQueue() as queue:
            if not queue.known:
                pytest.skip("the kernel keeps no account of waiting")
            before, end = queue.waited_ns(), time.monotonic() + 60
            while (waited := queue.waited_ns() - before) < 0.03e9 and time.monotonic() < end:
                pass
            assert waited >= 0.03e9
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cores)


def test_without_the_kernels_account_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("enginesmith.pipeline.system.cpu._ENABLED", tmp_path / "none")
    with RunQueue() as queue:
        assert not queue.known
        assert queue.waited_ns() == 0
