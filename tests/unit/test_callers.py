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
from enginesmith.pipeline.measure.latency.throughput import ConcurrentClients
from enginesmith.pipeline.system.cpu import RunQueue
from enginesmith.pipeline.tensors import Array, Feeds, Signature

CALL_SECONDS = 0.02


class Served(Session):
    """Siblings share a number of servers, and each call occupies one for a while."""

    signature = Signature(inputs=(), outputs=())

    def __init__(self, servers: threading.Semaphore, seen: list[tuple[str, int]], fails: bool = False) -> None:
        self.servers, self.seen, self.fails = servers, seen, fails

    def sibling(self) -> Self:
        self.seen.append(("opened", threading.get_ident()))
        return type(self)(self.servers, self.seen, self.fails)

    def bind(self, feeds: Feeds) -> Feeds:
        return feeds

    def enqueue(self, bound: Any) -> None:
        if self.fails:
            raise ModelError("it does not run")
        with self.servers:
            time.sleep(CALL_SECONDS)

    def synchronize(self) -> None:
        pass

    def fetch(self) -> dict[str, Array]:
        return {}

    def close(self) -> None:
        self.seen.append(("closed", threading.get_ident()))


def test_calls_of_all_callers_are_counted() -> None:
    seen: list[tuple[str, int]] = []
    callers = ConcurrentClients(Served(threading.Semaphore(2), seen), {})
    one, four = callers.run(1, 0.3), callers.run(4, 0.3)
    callers.close()
    assert one.calls_per_second == pytest.approx(1 / CALL_SECONDS, rel=0.4)
    assert four.calls_per_second == pytest.approx(2 / CALL_SECONDS, rel=0.4)  # as two are served at a time
    assert np.mean(four.host_seconds) == pytest.approx(2 * CALL_SECONDS, rel=0.5)
    assert len({thread for what, thread in seen if what == "opened"}) == 4
    assert {thread for what, thread in seen if what == "opened"} == {
        thread for what, thread in seen if what == "closed"
    }
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_an_error_of_a_caller_is_raised() -> None:
    with pytest.raises(ModelError, match="does not run"):
        ConcurrentClients(Served(threading.Semaphore(1), [], fails=True), {}).run(2, 0.01)


def test_waiting_for_a_core_is_seen() -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    rival = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile 1: pass"])
    os.sched_setaffinity(0, {core})
    try:
        with RunQueue() as queue:
            if not queue.known:
                pytest.skip("the kernel keeps no account of waiting")
            before, end = queue.waited_ns(), time.monotonic() + 0.3
            while time.monotonic() < end:
                pass
            assert queue.waited_ns() - before > 0.03e9
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cores)


def test_without_the_kernels_account_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("enginesmith.pipeline.system.cpu._ENABLED", tmp_path / "none")
    with RunQueue() as queue:
        assert not queue.known
        assert queue.waited_ns() == 0
