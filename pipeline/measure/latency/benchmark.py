"""Measure candidates in interleaved rounds: each in its own process, all open at once, one active at a time.

A machine's speed drifts; candidates measured one after another are compared with the drift included. Here every round
gives each of them a short block in shuffled order, so that the ratio of two blocks of one round is a fair one. The
processes are started anew several times: how fast one is depends on where its memory happens to lie.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import NO_TIME, EnginesmithError, StepCrashed, StepOutOfMemory, StepTimeout
from enginesmith.pipeline.measure.latency.timer import Block, ConcurrentCalls, Ready, serve_session
from enginesmith.pipeline.measure.memory.limits import describe_out_of_memory, try_batch
from enginesmith.pipeline.measure.memory.usage import used_besides
from enginesmith.pipeline.measure.rows import OutOfMemory, Stop
from enginesmith.pipeline.measure.statistics import (
    LEAST_LAUNCHES,
    LEAST_ROUNDS,
    MOST_LAUNCHES,
    TOO_NOISY,
    Timed,
    median_interval,
    rate_interval,
)
from enginesmith.pipeline.system.machine import gpu_states
from enginesmith.pipeline.system.nvidia import GpuState
from enginesmith.pipeline.system.worker import Progress, Worker
from enginesmith.pipeline.tensors import Feeds

_SLOW_BLOCK = 50
"""A session hangs if a block takes this many times its budget, and at least the least limit."""
_LEAST_LIMIT_SECONDS = 60.0
_LEAST_START_SECONDS = 0.1
_OVERRUN = 4
"""The time limit is exceeded by up to so many times itself where fewer rounds were done than an interval takes."""
_GRACE_TO_START, _GRACE_TO_GET_READY, _GRACE_TO_MEASURE = 0.5, 0.8, 0.1
"""Shares of a time of grace: until a session may begin to start; until it has to be ready; and the least measuring."""
_CALLS_EACH = 3
"""Calls that each of several callers makes at least in a round, about."""
_LAUNCHES = 5
"""Launches behind an interval, where there is time."""
_DEAREST_START = 0.5
"""Share of the time limit that starting all sessions may take, for it to be done more than once."""
_LEAST_ROUNDS_EACH = 3
"""Rounds of each of several launches, at least."""
_CHECK_GROWTH = 1.15
"""Rounds between two checks of the stopping rule grow by this factor, as the interval shrinks ever more slowly."""


class LatencySettings(BaseModel, frozen=True, extra="forbid"):
    """Set how long and how exactly to measure each batch size."""

    precision: float = Field(0.02, gt=0)
    """Stop when the 95 % interval of every median is within this share of it."""
    time_limit_seconds: float = Field(30.0, gt=0)
    block_ms: float = Field(80.0, gt=0)
    min_rounds: int = Field(10, ge=2)
    launches: int = Field(MOST_LAUNCHES, ge=1, le=MOST_LAUNCHES)
    """The most times that the processes are started."""
    noisy_extension: float = Field(3.0, ge=1)
    """Up to so many times the time limit is measured while launches disagree so much that medians say nothing."""
    warmup_limit_seconds: float = 3.0
    start_limit_seconds: float = Field(900.0, exclude=True)
    """For loading, and for the first call and warm-up; past it a session counts as hanging."""
    ends_at: float = Field(math.inf, exclude=True)
    """Time of ``time.monotonic`` at which measuring ends."""
    grace_seconds: float = Field(0.0, exclude=True)
    """Time after that in which sessions may still start, and those that have started are measured for a moment."""
    concurrency: tuple[int, ...] = ()
    """Numbers of callers that throughput is measured with, after latency."""
    memory_limit_bytes: int | None = None
    """Limit of what a session takes besides libraries: address space on the CPU, device memory on CUDA."""
    seed: int = 0

    @property
    def starts_until(self) -> float:
        """Time of ``time.monotonic`` at which no session starts any more, also one that began to before."""
        return self.ends_at + _GRACE_TO_GET_READY * self.grace_seconds if self.grace_seconds else math.inf

    @property
    def time_to_start_seconds(self) -> float:
        """Time from now that a session has to load in, or for its first call and warm-up."""
        return min(self.start_limit_seconds, max(self.starts_until - time.monotonic(), _LEAST_START_SECONDS))


@dataclass
class Launch:
    """Collect the measurements of one process."""

    blocks: list[Block] = field(default_factory=list)
    """One for each round."""
    concurrent_calls: dict[int, list[ConcurrentCalls]] = field(default_factory=dict)
    """By the number of callers, one for each round."""


@dataclass(eq=False)
class MeasuredSession:
    """Run a candidate in its own process and keep its measurements at the current batch size."""

    candidate: Candidate
    log: Path
    worker: Worker | None = None
    load_seconds: float | None = None
    ready: Ready | None = None
    """Figures of the first launch."""
    launches: list[Launch] = field(default_factory=list)
    failure: str = ""
    oom: OutOfMemory | None = None
    hangs: str = ""
    """Words on how it ran past a time limit: it is not started again then."""
    starting_seconds: float = 0.0
    gpu_looks: list[tuple[GpuState, ...]] = field(default_factory=list)
    """States of the GPUs right after each block, at all batch sizes: clocks are still those of work then."""
    _opening_seconds: float = 0.0
    _feeds: Feeds = field(default_factory=dict)
    _limit_bytes: int | None = None
    _hang_limit_seconds: float = _LEAST_LIMIT_SECONDS

    def start(self, feeds: Feeds, settings: LatencySettings) -> None:
        """Open the session unless it is open, and make it ready for new feeds."""
        self.launches, self.ready, self.failure, self.oom = [], None, self.hangs, None
        self._feeds, self._hang_limit_seconds = feeds, min(_LEAST_LIMIT_SECONDS, settings.start_limit_seconds)
        if time.monotonic() > settings.ends_at + _GRACE_TO_START * settings.grace_seconds:
            self.failure = self.failure or NO_TIME
        if self.failure:
            return
        with self._failing_alone():
            if self.worker is None:
                before = time.monotonic()
                self.load_seconds = self._open(settings)
                self._opening_seconds = time.monotonic() - before
            before = time.monotonic()
            self.ready = self._make_ready(settings)
            self.starting_seconds = self._opening_seconds + time.monotonic() - before
        if self.hangs and time.monotonic() >= settings.starts_until:
            self.failure = self.hangs = NO_TIME

    def start_anew(self, settings: LatencySettings) -> None:
        """Restart the session in a new process with the same feeds, unless it has failed."""
        if self.failure:
            return
        self.close()
        with self._failing_alone():
            self._open(settings)
            self._make_ready(settings)

    def _open(self, settings: LatencySettings) -> float:
        candidate, self._limit_bytes = self.candidate, settings.memory_limit_bytes
        self.worker = Worker(serve_session, candidate.engine, candidate.artifact, candidate.device, log=self.log)
        seconds: float = self.worker.request("load", self._limit_bytes, timeout_seconds=settings.time_to_start_seconds)
        return seconds

    def _make_ready(self, settings: LatencySettings) -> Ready:
        assert self.worker is not None
        request = ("make_ready", self._feeds, settings.warmup_limit_seconds)
        ready: Ready = self.worker.request(*request, timeout_seconds=settings.time_to_start_seconds)
        self.launches.append(Launch())
        return ready

    def run_block(self, budget_seconds: float) -> None:
        """Time one block of calls."""
        slowest = max((float(block.host_seconds.max()) for block in self.blocks), default=0.0)
        block = self._request(max(budget_seconds, slowest), "block", budget_seconds)
        if block is not None:
            self.launches[-1].blocks.append(block)
        if self.candidate.device.kind == "cuda":
            self.gpu_looks.append(gpu_states())

    def run_callers(self, callers: int, seconds: float) -> None:
        """Time calls of several callers at the same time."""
        calls = self._request(seconds, "call_concurrently", callers, seconds)
        if calls is not None:
            self.launches[-1].concurrent_calls.setdefault(callers, []).append(calls)

    def read_free_memory(self) -> tuple[int, int] | None:
        """Read the bytes that are free on its device, and all that it has; None on the CPU, or if it has failed."""
        on_cuda = self.candidate.device.kind == "cuda"
        free: tuple[int, int] | None = self._request(0.0, "read_free_memory") if on_cuda else None
        return free

    def close_clients(self) -> None:
        """Close the callers' sessions, which would be idle from here on."""
        self._request(0.0, "close_clients")

    def _request(self, seconds: float, *request: Any) -> Any:
        """Request what takes so many seconds, give or take; returns None where the session has failed."""
        if self.worker is not None:
            limit = max(self._hang_limit_seconds, _SLOW_BLOCK * seconds)
            with self._failing_alone():
                return self.worker.request(*request, timeout_seconds=limit)
        return None

    @property
    def blocks(self) -> list[Block]:
        """Blocks of all launches, one for each round."""
        return [block for launch in self.launches for block in launch.blocks]

    @property
    def timed(self) -> list[list[Timed]]:
        """Calls by the host's clock, by launch and round."""
        return [[block.timed for block in launch.blocks] for launch in self.launches]

    def close(self) -> None:
        """End the session's process."""
        if self.worker:
            self.worker.close()
        self.worker = None

    @contextlib.contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Record an error as this candidate's failure at this batch size; the next batch size starts it anew."""
        try:
            yield
        except EnginesmithError as error:
            self.failure, device = str(error), self.candidate.device
            before = None
            if isinstance(error, StepOutOfMemory) and self.worker:
                before = used_besides(device, self.worker.pid)[0]
            self.close()
            if isinstance(error, StepTimeout):
                self.hangs = self.failure
            elif isinstance(error, StepOutOfMemory):
                self.oom = describe_out_of_memory(error, before, device, self._limit_bytes)
            elif isinstance(error, StepCrashed) and self._limit_bytes is not None:
                # some libraries end the process where an allocation fails: it is tried again alone
                with contextlib.suppress(EnginesmithError):
                    self.oom = try_batch(self.candidate, self._feeds, self.log.parent, self._limit_bytes)


Turn = Callable[[MeasuredSession], None]


_LEAST_BLOCKS = 2
"""Blocks of calls from which a median has an interval."""


def run_interleaved(sessions: Sequence[MeasuredSession], settings: LatencySettings, progress: Progress) -> Stop:
    """Measure launches of rounds of blocks until every median is known well enough or time is over; return which.

    The sessions have been started.
    """
    begun, launch = time.monotonic(), 0
    ends_at = max(settings.ends_at, begun + _GRACE_TO_MEASURE * settings.grace_seconds)
    settings = settings.model_copy(update={"ends_at": ends_at})
    starting = sum(session.starting_seconds for session in sessions if not session.failure)
    several = settings.launches >= LEAST_LAUNCHES and starting <= _DEAREST_START * settings.time_limit_seconds
    while True:
        launch += 1
        part = _launch_settings(settings, starting, launch) if several else settings
        _time_blocks(sessions, part, progress)
        if settings.concurrency:
            _time_concurrent_calls(sessions, part, progress)
        alive = [session for session in sessions if not session.failure]
        if not alive:
            return Stop(cause="failed")
        intervals = [median_interval(session.timed, settings.seed) for session in alive]
        width = max(interval.relative_half_width for interval in intervals)
        if any(sum(map(len, session.timed)) < _LEAST_BLOCKS for session in alive):
            width = math.inf  # a single block has no interval
        if width <= settings.precision and (launch >= _LAUNCHES or not several):
            return Stop(cause="precise", precision=settings.precision)
        noisy = any(interval.too_noisy for interval in intervals)
        time_limit, spent = settings.time_limit_seconds, time.monotonic() - begun + starting / 2
        enough, ended = launch >= LEAST_LAUNCHES or not several, time.monotonic() + starting > settings.ends_at
        if ended and not (enough and spent > time_limit):
            return Stop(cause="whole run")
        extension = settings.noisy_extension if noisy and several and not ended else 1
        if ended or not several or (enough and spent > extension * time_limit):
            return Stop(cause="time limit", seconds=extension * time_limit, extension=extension)
        if launch == settings.launches:
            return Stop(cause="launches", launches=launch)
        progress(f"launch {launch + 1}; so far {_describe_width('median', width)}")
        for session in sessions:
            session.start_anew(settings)


def _describe_width(what: str, width: float) -> str:
    return f"every {what} within ±{width:.1%}" if width < 1 else f"one {what} or more is {TOO_NOISY}"


def _launch_settings(settings: LatencySettings, starting_seconds: float, launch: int) -> LatencySettings:
    """Derive the settings of one launch of several. Its own interval may be wider than that of all."""
    limit = settings.time_limit_seconds
    parts = {
        "time_limit_seconds": max(limit / _LAUNCHES - starting_seconds, limit / (2 * _LAUNCHES)),
        "min_rounds": max(_LEAST_ROUNDS_EACH, -(-settings.min_rounds // _LAUNCHES)),
        "precision": settings.precision * _LAUNCHES**0.5,
        "seed": settings.seed + launch,
    }
    return settings.model_copy(update=parts)


def _time_blocks(sessions: Sequence[MeasuredSession], settings: LatencySettings, progress: Progress) -> None:
    def measure_width(alive: Sequence[MeasuredSession]) -> float:
        intervals = (median_interval(session.timed[-1:], settings.seed) for session in alive)
        return max((interval.relative_half_width for interval in intervals), default=0.0)

    turns: list[Turn] = [lambda session: session.run_block(settings.block_ms / 1e3)]
    _run_rounds(sessions, turns, measure_width, settings, "median", progress)


def _time_concurrent_calls(sessions: Sequence[MeasuredSession], settings: LatencySettings, progress: Progress) -> None:
    """Time rounds of concurrent calls: in each round every session is called by each number of callers."""

    def turn(callers: int) -> Turn:
        def run(session: MeasuredSession) -> None:
            slowest = max(float(block.host_seconds.max()) for block in session.blocks)
            session.run_callers(callers, max(settings.block_ms / 1e3, _CALLS_EACH * slowest))

        return run

    def measure_width(alive: Sequence[MeasuredSession]) -> float:
        levels = [rounds for session in alive for rounds in session.launches[-1].concurrent_calls.values()]
        rates = ([calls.calls_per_second for calls in rounds] for rounds in levels)
        return max((rate_interval([launch], settings.seed).relative_half_width for launch in rates), default=0.0)

    turns = [turn(callers) for callers in settings.concurrency]
    _run_rounds(sessions, turns, measure_width, settings, "throughput", progress)
    for session in sessions:
        session.close_clients()


def _run_rounds(
    sessions: Sequence[MeasuredSession],
    turns: Sequence[Turn],
    measure_width: Callable[[Sequence[MeasuredSession]], float],
    settings: LatencySettings,
    what: str,
    progress: Progress,
) -> None:
    """Take each session's turns in rounds, shuffled together, until ``measure_width`` gives little or time is over."""
    rng = np.random.default_rng(settings.seed)
    deadline = time.monotonic() + settings.time_limit_seconds
    rounds, next_check, least = 0, settings.min_rounds, min(LEAST_ROUNDS, settings.min_rounds)
    while running := [session for session in sessions if not session.failure]:
        order = [(session, turn) for session in running for turn in turns]
        for position in rng.permutation(len(order)):
            session, turn = order[position]
            turn(session)
        rounds += 1
        if rounds >= next_check:
            width = measure_width([session for session in running if not session.failure])
            progress(f"round {rounds}: {_describe_width(what, width)}")
            if width <= settings.precision:
                return
            next_check = int(np.ceil(rounds * _CHECK_GROWTH))
        now = time.monotonic()
        late = now > deadline + _OVERRUN * settings.time_limit_seconds or now > settings.ends_at
        if (now > deadline and rounds >= least) or late:
            return
