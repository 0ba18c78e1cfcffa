"""Measure throughput with several callers of one session's weights at the same time.

Each caller has a thread, a session of its own on the same weights and, on CUDA, a stream, and calls again as soon as
it has its answer: a closed loop. Nothing is computed from latency; calls that were answered are counted.
"""

import gc
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginesmith.pipeline.engines.base import Session
from enginesmith.pipeline.measure.statistics import Samples
from enginesmith.pipeline.tensors import Feeds

_WARM_CALLS = 3
_now = time.perf_counter_ns


@dataclass(frozen=True)
class ConcurrentCalls:
    """Hold the rate and the call times of several callers at the same time."""

    calls_per_second: float
    host_seconds: Samples
    """Of each call, of all callers, shape (calls,)."""


class ConcurrentClients:
    """Keep threads that call a session on request; start more as they are needed."""

    def __init__(self, session: Session, feeds: Feeds) -> None:
        self._session, self._feeds = session, feeds
        self._callers: list[_Caller] = []

    def run(self, count: int, seconds: float) -> ConcurrentCalls:
        """Let ``count`` callers call for so long, once at least.

        Raises:
            EnginesmithError: a caller's session raised it.
        """
        while len(self._callers) < count:
            self._callers.append(_Caller(self._session, self._feeds))
            self._callers[-1].answer()
        start = threading.Barrier(count)
        collected = gc.isenabled()
        gc.disable()
        try:
            for caller in self._callers[:count]:
                caller.orders.put((start, seconds))
            found = [caller.answer() for caller in self._callers[:count]]
        finally:
            if collected:
                gc.enable()
        return ConcurrentCalls(sum(rate for rate, _ in found), np.concatenate([taken for _, taken in found]))

    def close(self) -> None:
        """Close their sessions and end the threads."""
        for caller in self._callers:
            caller.orders.put(None)
            caller.thread.join()
        self._callers = []


class _Caller:
    """Run a thread with a session of its own."""

    def __init__(self, session: Session, feeds: Feeds) -> None:
        self.orders: queue.SimpleQueue[tuple[threading.Barrier, float] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._live, args=(session, feeds), daemon=True)
        self.thread.start()

    def answer(self) -> tuple[float, Samples]:
        """Return the last request's calls a second and the seconds of each."""
        found = self._answers.get()
        if isinstance(found, BaseException):
            raise found
        rate, taken = found
        return rate, taken

    def _live(self, session: Session, feeds: Feeds) -> None:
        try:
            with session.sibling() as own:
                bound = own.bind(feeds)
                for _ in range(_WARM_CALLS):
                    own.enqueue(bound)
                    own.synchronize()
                self._answers.put((0.0, np.empty(0)))
                while (order := self.orders.get()) is not None:
                    self._answers.put(_call_repeatedly(own, bound, *order))
        except BaseException as error:  # noqa: BLE001 - another thread's error is raised where it is asked for
            self._answers.put(error)


def _call_repeatedly(session: Session, bound: Any, start: threading.Barrier, seconds: float) -> tuple[float, Samples]:
    """Call until time is over; return calls a second and the seconds of each. The last call may end later."""
    enqueue, synchronize, taken = session.enqueue, session.synchronize, []
    start.wait()
    first = before = _now()
    end = first + int(seconds * 1e9)
    while before < end:
        enqueue(bound)
        synchronize()
        after = _now()
        taken.append(after - before)
        before = after
    return len(taken) / ((before - first) / 1e9), np.array(taken, np.float64) / 1e9
