"""Time inferences inside the process that runs the session, by one caller or several. No other file does.

A sample is the host's monotonic clock around ``enqueue`` and ``synchronize``; reading it takes about 0.2 µs a call. On
CUDA, after every tenth block, more calls are timed by events on the session's stream: to record two events takes the
host some microseconds, which no sample may contain. Every few milliseconds, between two calls, the kernel is asked how
long the session's threads waited for a core: calls around which they did were disturbed by others.

Each of several callers has a thread, a session of its own on the same weights and, on CUDA, a stream, and calls again
as soon as it has its answer: a closed loop. Nothing is computed from latency; calls that were answered are counted. The
first caller is the thread that latency was measured with, and on a CPU no thread outlives its calls: each that calls
PyTorch has a pool of its own, and where pools have more threads than there are cores, OpenMP no longer spins, which
makes a lone caller 4 times as slow.
"""

import contextlib
import gc
import queue
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Engine, Session
from enginesmith.pipeline.frameworks.samples import check_feeds
from enginesmith.pipeline.measure.memory.limits import explain_out_of_memory, set_memory_limit
from enginesmith.pipeline.measure.statistics import Samples, Timed
from enginesmith.pipeline.system.cpu import RunQueue
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import serve
from enginesmith.pipeline.tensors import Feeds

_MOST_CALLS = 10_000
_WARM_BLOCK_SECONDS = 0.025
_SLICE_SECONDS = 0.004
"""Calls between two readings of the run queue take about so long, one at least."""
_TREND = 0.97
"""Warm-up goes on while the latest blocks are below this share of the ones before them."""
_EVENT_BLOCKS = 10
"""Blocks of which one is followed by calls that events time."""
_MOST_EVENTS = 100
"""Calls that events time after a block, at most."""
_TRANSFERS = 5
_WARM_CALLS = 3
_SETTLE_STEP_SECONDS = 0.001
_SETTLE_LIMIT_SECONDS = 0.5
_TASKS = Path("/proc/self/task")
_now = time.perf_counter_ns


@dataclass(frozen=True)
class Ready:
    """Record the first call, the warm-up and the transfers of a session at one shape."""

    first_call_seconds: float
    warmup_calls: int
    warmup_ended: str
    h2d_seconds: float | None
    d2h_seconds: float | None
    first_call_note: str = ""
    sibling_note: str = ""
    """Names what several callers share, where that holds them up."""


@dataclass(frozen=True)
class Block:
    """Record the seconds of consecutive calls, shape (calls,), and the process's idle time since its last block."""

    host_seconds: Samples
    waited: Samples | None
    """Time that its threads waited for a core, as a share of the time of the few calls around; shape (calls,)."""
    wall_seconds: float
    """From the start of the first call to the end of the last."""
    device_seconds: Samples | None
    """Those of other calls, after the block, by events; None after most blocks, and on the CPU."""
    settle_seconds: float
    idle_seconds: float
    idle_cpu_seconds: float
    preemptions: int
    """Times that the kernel took a core from the process during the block: others wanted it."""

    @property
    def timed(self) -> Timed:
        """Return the calls in the form that statistics take."""
        return Timed(self.host_seconds, self.waited)


def serve_session(connection: Connection, engine: Engine, artifact: Artifact, device: Device) -> None:
    """Serve ``(method of SessionTimer, *arguments)`` requests in a worker until the other end hangs up."""
    timer = SessionTimer(engine, artifact, device)

    def answer(name: str, *arguments: Any) -> Any:
        with explain_out_of_memory(device):
            return getattr(timer, name)(*arguments[:-1])  # without the worker's progress, which nobody looks at

    serve(connection, answer)


class SessionTimer:
    """Time one session; between blocks, wait until its threads are asleep."""

    def __init__(self, engine: Engine, artifact: Artifact, device: Device) -> None:
        self._engine, self._artifact, self._device = engine, artifact, device
        self._session: Session
        self._bound: Any = None
        self._feeds: Feeds = {}
        self._callers: ConcurrentClients | None = None
        self._events: _Events | None = None
        self._blocks = 0
        self._call_seconds = 0.0
        self._asleep_since = (0, 0)

    def load(self, memory_limit_bytes: int | None = None) -> float:
        """Open the session and return the seconds that took. The limit covers memory besides libraries."""
        if memory_limit_bytes is not None:
            self._engine.prime(self._artifact, self._device)
            set_memory_limit(memory_limit_bytes, self._device)
        start = _now()
        self._session = self._engine.load(self._artifact, self._device)
        return _seconds_since(start)

    def make_ready(self, feeds: Feeds, limit_seconds: float) -> Ready:
        """Bind feeds, make the first call, and warm up until the blocks' medians stop falling.

        Raises:
            SignatureError: the feeds do not fit the session.
        """
        check_feeds(self._session.signature, feeds)
        self.close_clients()
        self._feeds, self._bound = feeds, self._session.bind(feeds)
        first = self._timed(1)[0]
        self._call_seconds = float(self._timed(1)[0])
        calls, ended = self._warm_up(limit_seconds)
        stream, self._blocks = self._session.cuda_stream, 0
        most = min(self._calls(_WARM_BLOCK_SECONDS), _MOST_EVENTS)
        self._events = None if stream is None else _Events(stream, self._device, most)
        h2d, d2h = self._transfers(feeds) if stream else (None, None)
        self._settle()
        notes = self._session.first_call_note, self._session.sibling_note
        return Ready(float(first), calls + 2, ended, h2d, d2h, *notes)

    def block(self, budget_seconds: float) -> Block:
        """Time as many calls as fit the budget, one at least, then wait for the session's threads to sleep.

        Where calls are short, one before the first takes the cost of having been asleep; it is not a sample.
        """
        idle_cpu, idle = time.process_time_ns() - self._asleep_since[0], _now() - self._asleep_since[1]
        calls = self._calls(budget_seconds)
        if calls > 3:
            self._timed(1)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, _now()
        host, waited = self._time_slices(calls)
        wall = _seconds_since(start)
        preemptions = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
        self._call_seconds = float(np.median(host))
        on_device = None
        if self._events and self._blocks % _EVENT_BLOCKS == 0:
            on_device = self._events.time_calls(self._session, self._bound, calls)
        self._blocks += 1
        settle = self._settle()
        return Block(host, waited, wall, on_device, settle, idle / 1e9, idle_cpu / 1e9, preemptions)

    def read_free_memory(self) -> tuple[int, int]:
        """Read the bytes that are free on the CUDA device, and all that it has."""
        import torch

        free, total = torch.cuda.mem_get_info(self._device.index)
        return int(free), int(total)

    def call_concurrently(self, callers: int, seconds: float) -> "ConcurrentCalls":
        """Time several callers at the same time, each with a session on the same weights and the feeds made ready."""
        if self._callers is None:
            self._callers = ConcurrentClients(self._session, self._bound, self._feeds)
        calls = self._callers.run(callers, seconds)
        self._settle()
        return calls

    def close_clients(self) -> None:
        """Close the callers' sessions, where there are any."""
        if self._callers is not None:
            self._callers.close()
            self._callers = None

    def _time_slices(self, calls: int) -> tuple[Samples, Samples | None]:
        """Time calls in slices; return their seconds and the share of waiting around each, shapes (calls,)."""
        at_once = self._calls(_SLICE_SECONDS)
        parts, shares = [], []
        with RunQueue() as run_queue:
            for start in range(0, calls, at_once):
                before, since = run_queue.waited_ns(), _now()
                parts.append(self._timed(min(at_once, calls - start)))
                shares.append((run_queue.waited_ns() - before) / (_now() - since))
        waited = np.repeat(shares, [part.size for part in parts]) if run_queue.known else None
        return np.concatenate(parts), waited

    def _calls(self, budget_seconds: float) -> int:
        return max(1, min(_MOST_CALLS, round(budget_seconds / max(self._call_seconds, 1e-9))))

    def _timed(self, calls: int) -> Samples:
        """Time calls; return the seconds of each, shape (calls,)."""
        enqueue, synchronize, bound, clock = self._session.enqueue, self._session.synchronize, self._bound, _now
        taken = [0] * calls
        with _without_collections():
            for call in range(calls):
                start = clock()
                enqueue(bound)
                synchronize()
                taken[call] = clock() - start
        return np.array(taken, np.float64) / 1e9

    def _warm_up(self, limit_seconds: float) -> tuple[int, str]:
        medians: list[float] = []
        calls, start = 0, _now()
        while _seconds_since(start) < limit_seconds:
            taken = self._timed(self._calls(_WARM_BLOCK_SECONDS))
            calls += taken.size
            self._call_seconds = float(np.median(taken))
            medians.append(self._call_seconds)
            if len(medians) >= 4 and min(medians[-2:]) >= _TREND * min(medians[:-2]):
                return calls, "the block medians stopped falling"
        return calls, f"the limit of {limit_seconds:g} s"

    def _transfers(self, feeds: Feeds) -> tuple[float, float]:
        """Time transfers; return the median seconds of feeds to the device and of outputs back."""
        taken = np.empty((2, _TRANSFERS))
        for turn in range(_TRANSFERS):
            start = _now()
            self._session.bind(feeds)
            self._session.synchronize()
            taken[0, turn] = _seconds_since(start)
            start = _now()
            self._session.fetch()
            taken[1, turn] = _seconds_since(start)
        h2d, d2h = np.median(taken, axis=1)
        return float(h2d), float(d2h)

    def _settle(self) -> float:
        """Sleep until the process's threads do too: pools spin on for a while after their last work."""
        start = _now()
        while _others_awake() and _seconds_since(start) < _SETTLE_LIMIT_SECONDS:
            time.sleep(_SETTLE_STEP_SECONDS)
        self._asleep_since = (time.process_time_ns(), _now())
        return _seconds_since(start)


class _Events:
    """Keep pairs of CUDA events on the session's own stream, each created by being recorded once."""

    def __init__(self, stream: int, device: Device, most: int) -> None:
        from torch import cuda

        # Without its device, torch takes the stream for one of the thread's current device, which cuda:1 need not be.
        self._stream = cuda.ExternalStream(stream, device=str(device))  # type: ignore[no-untyped-call]
        self._pairs = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(most)]  # type: ignore[no-untyped-call]
        for event in (event for pair in self._pairs for event in pair):
            event.record(self._stream)

    def time_calls(self, session: Session, bound: Any, calls: int) -> Samples:
        """Time so many calls, or as many as there are pairs; return the device's seconds of each, shape (calls,)."""
        used = self._pairs[:calls]
        for before, after in used:
            before.record(self._stream)
            session.enqueue(bound)
            after.record(self._stream)
            session.synchronize()
        return np.array([before.elapsed_time(after) for before, after in used], np.float64) / 1e3


def _others_awake() -> bool:
    """Tell whether a thread besides the caller runs or wants to: a spinning one does, even while preempted."""
    own = str(threading.get_native_id())
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if task.name != own and (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "R":
                return True
    return False


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _seconds_since(start: int) -> float:
    return (_now() - start) / 1e9


# Several callers


@dataclass(frozen=True)
class ConcurrentCalls:
    """Record the rate and the call times of several callers at the same time."""

    calls_per_second: float
    host_seconds: Samples
    """Time of each call, of all callers, shape (calls,)."""


class ConcurrentClients:
    """Keep threads that call a session on request, besides this one; start more as they are needed."""

    def __init__(self, session: Session, bound: Any, feeds: Feeds) -> None:
        """Take the session of this thread, with ``feeds`` bound to it."""
        self._session, self._bound, self._feeds = session, bound, feeds
        self._callers: list[_Caller] = []

    def run(self, count: int, seconds: float) -> ConcurrentCalls:
        """Let ``count`` callers call for so long, once at least.

        Raises:
            EnginesmithError: a caller's session raised it.
        """
        others = count - 1
        if self._session.cuda_stream is None:
            self._end_callers(others)
        while len(self._callers) < others:
            self._callers.append(_Caller(self._session, self._feeds))
            self._callers[-1].answer()
        start = threading.Barrier(count)
        with _without_collections():
            for caller in self._callers[:others]:
                caller.orders.put((start, seconds))
            own = _call_repeatedly(self._session, self._bound, start, seconds)
            rates, taken = zip(own, *(caller.answer() for caller in self._callers[:others]), strict=True)
        return ConcurrentCalls(sum(rates), np.concatenate(taken))

    def close(self) -> None:
        """Close their sessions and end the threads."""
        self._end_callers(0)
        self._session.release_idle_memory()

    def _end_callers(self, left: int) -> None:
        for caller in self._callers[left:]:
            caller.orders.put(None)
            caller.thread.join()
        del self._callers[left:]


class _Caller:
    def __init__(self, session: Session, feeds: Feeds) -> None:
        self.orders: queue.SimpleQueue[tuple[threading.Barrier, float] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._live, args=(session, feeds), daemon=True)
        self.thread.start()

    def answer(self) -> tuple[float, Samples]:
        """Return the last request's calls a second and the seconds of each."""
        answer: tuple[float, Samples] | BaseException = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

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
