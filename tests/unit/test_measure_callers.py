"""Several callers at the same time: what they answer together, and the errors of one."""

import threading
from typing import Any, Self

import numpy as np
import pytest

from enginesmith.pipeline.engines.base import Session
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.measure.latency import timer
from enginesmith.pipeline.measure.latency.timer import ConcurrentClients
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
    callers = ConcurrentClients(served, {}, {})
    calls = callers.run(count, 14.5 * CALL_SECONDS)
    callers.run(1, CALL_SECONDS)
    assert sum(what == "closed" for what, _ in seen) == count - 1, "idle threads would slow this one down"
    callers.close()
    assert calls.calls_per_second == pytest.approx(count / CALL_SECONDS)
    np.testing.assert_allclose(calls.host_seconds, np.full(15 * count, CALL_SECONDS))
    assert len({thread for what, thread in seen if what == "opened"}) == count - 1  # the first one is this thread
    assert {one for what, one in seen if what == "opened"} == {one for what, one in seen if what == "closed"}
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_an_error_of_a_caller_is_raised(clocks: Clocks) -> None:
    with pytest.raises(ModelError, match="does not run"):
        ConcurrentClients(Served([], clocks, fails=True), {}, {}).run(2, 0.01)
