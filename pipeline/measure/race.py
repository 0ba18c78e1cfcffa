"""Candidates taken through rounds: each in its own process, all open at once, one active at a time.

A machine's speed drifts; candidates measured one after another are compared with the drift included. Here every round
gives each of them a short block in shuffled order, so that the ratio of two blocks of one round is a fair one.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.measure.clock import Block, Ready, serve_session
from enginesmith.pipeline.measure.statistics import LEAST_ROUNDS, Samples, median_interval
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.workers import Worker

Progress = Callable[[str], None]

_SLOW_BLOCK = 50
"""A block that takes this many times what it should, and at least the least limit, is of a session that hangs."""
_LEAST_LIMIT_SECONDS = 60.0
_PATIENCE = 4
"""The time limit is exceeded by up to so many times itself where fewer rounds were done than an interval takes."""
_CHECK_GROWTH = 1.15
"""Rounds between two looks at the stopping rule grow by this factor, as the interval shrinks ever more slowly."""


@dataclass(frozen=True)
class Candidate:
    """Something to measure."""

    id: str
    engine: Engine
    artifact: Artifact
    device: Device


class LatencySettings(BaseModel):
    """How long and how exactly to measure, for each batch size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: float = Field(0.02, gt=0)
    """Stop when the 95 % interval of every median is within this share of it."""
    time_limit_seconds: float = Field(30.0, gt=0)
    block_ms: float = Field(80.0, gt=0)
    min_rounds: int = Field(10, ge=2)
    warmup_limit_seconds: float = 3.0
    start_limit_seconds: float = 900.0
    """For loading, and for the first call and warm-up; past it a session counts as hanging."""
    seed: int = 0


@dataclass
class Contender:
    """A candidate, its process, and what was measured of it at the current batch size."""

    candidate: Candidate
    log: Path
    worker: Worker | None = None
    load_seconds: float | None = None
    ready: Ready | None = None
    blocks: list[Block] = field(default_factory=list)
    failure: str = ""

    def start(self, feeds: Feeds, settings: LatencySettings) -> None:
        """Open the session where it is not open yet, and make it ready for these feeds."""
        self.blocks, self.ready, self.failure = [], None, ""
        limit = settings.start_limit_seconds
        with self._failing_alone():
            if self.worker is None:
                what = (self.candidate.engine, self.candidate.artifact, self.candidate.device)
                self.worker = Worker(serve_session, *what, log=self.log)
                self.load_seconds = self.worker.request("load", timeout_seconds=limit)
            request = ("make_ready", feeds, settings.warmup_limit_seconds)
            self.ready = self.worker.request(*request, timeout_seconds=limit)

    def run_block(self, budget_seconds: float) -> None:
        """Have it timed for one block."""
        if self.worker is None:
            return
        slowest = max((float(block.host_seconds.max()) for block in self.blocks), default=0.0)
        limit = max(_LEAST_LIMIT_SECONDS, _SLOW_BLOCK * max(budget_seconds, slowest))
        with self._failing_alone():
            self.blocks.append(self.worker.request("block", budget_seconds, timeout_seconds=limit))

    @property
    def host_blocks(self) -> list[Samples]:
        """Seconds of each call by the host's clock, an array for each round."""
        return [block.host_seconds for block in self.blocks]

    def close(self) -> None:
        """End its process."""
        if self.worker:
            self.worker.kill()
        self.worker = None

    @contextlib.contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """An error ends this candidate's part at this batch size; the next one starts it anew."""
        try:
            yield
        except EnginesmithError as error:
            self.failure = str(error)
            self.close()


def race(contenders: Sequence[Contender], settings: LatencySettings, progress: Progress) -> str:
    """Rounds of blocks until the stopping rule or the time limit is met; says which."""
    rng = np.random.default_rng(settings.seed)
    deadline = time.monotonic() + settings.time_limit_seconds
    rounds, next_look = 0, settings.min_rounds
    while running := [contender for contender in contenders if not contender.failure]:
        for position in rng.permutation(len(running)):
            running[position].run_block(settings.block_ms / 1e3)
        rounds += 1
        if rounds >= next_look:
            widest = _widest(contenders, settings.seed)
            progress(f"round {rounds}: every median within ±{widest:.1%}")
            if widest <= settings.precision:
                return f"every median's 95 % interval is within ±{settings.precision:.0%}"
            next_look = int(np.ceil(rounds * _CHECK_GROWTH))
        over = time.monotonic() - deadline
        if (over > 0 and rounds >= LEAST_ROUNDS) or over > _PATIENCE * settings.time_limit_seconds:
            return f"the time limit of {settings.time_limit_seconds:g} s"
    return "every candidate failed"


def _widest(contenders: Sequence[Contender], seed: int) -> float:
    """The widest interval among the medians, as a share of its median."""
    alive = (contender.host_blocks for contender in contenders if not contender.failure)
    return max((median_interval(blocks, seed).relative_half_width for blocks in alive), default=0.0)
