"""Rounds, stopping, failures and rows with scripted workers; callers at the same time."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate, Session
from enginesmith.pipeline.errors import ModelError, StepCrashed, StepTimeout
from enginesmith.pipeline.measure.latency import benchmark, timer
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import LatencyResult, measure_latency
from enginesmith.pipeline.measure.latency.timer import Block, ConcurrentCalls, ConcurrentClients, Ready
from enginesmith.pipeline.system.cpu import RunQueue
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Feeds, Signature

Script = Callable[[int], float]
"""Number of the block → seconds of its calls."""


class FakeWorker:
    """Stands for a session's process: two calls a block, seconds by the engine's script; no real time passes."""

    now: ClassVar[float] = 0.0
    """The seconds that the benchmark's clock shows: they pass while a worker loads or is timed."""
    order: ClassVar[list[str]] = []
    open_now: ClassVar[list[str]] = []
    load_seconds: ClassVar[float] = 0.0
    ends: ClassVar[dict[str, int]] = {}
    """By name, the launch that crashes."""
    opened: ClassVar[list[str]] = []

    def __init__(self, body: Any, engine: Any, artifact: Artifact, device: Device, log: Path) -> None:
        self.script, self.log, self.blocks = engine, log, 0
        self.open_now.append(log.stem)
        self.opened.append(log.stem)
        self.launch = self.opened.count(log.stem)

    def request(self, name: str, *arguments: Any, timeout_seconds: float) -> Any:
        assert timeout_seconds > 0
        if name == "load":
            FakeWorker.now += self.load_seconds
            if self.ends.get(self.log.stem) == self.launch:
                raise StepCrashed("its process crashed (SIGSEGV)")
            return 0.5
        if name == "make_ready":
            return Ready(0.25, 9, "the block medians stopped falling", None, None)
        if name == "close_clients":
            return None
        self.order.append(self.log.stem)
        self.blocks += 1
        if name == "call_concurrently":
            callers, budget_seconds = arguments
            FakeWorker.now += budget_seconds
            return ConcurrentCalls(min(callers, 3) / self.script(0), np.full(4 * callers, callers * self.script(0)))
        seconds = np.full(2, self.script(self.blocks))
        FakeWorker.now += float(seconds.sum())
        return Block(seconds, np.array([0.0, 0.5]), float(seconds.sum()), None, 0.004, 0.1, 0.001, preemptions=0)

    def kill(self) -> None:
        self.open_now.remove(self.log.stem)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LatencyResult]:
    monkeypatch.setattr(benchmark, "Worker", FakeWorker)
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(monotonic=lambda: FakeWorker.now))
    FakeWorker.now = 0.0
    FakeWorker.order, FakeWorker.open_now, FakeWorker.opened, FakeWorker.ends = [], [], [], {}

    def call(
        scripts: dict[str, Script],
        batches: tuple[int, ...] = (1,),
        heard: Callable[[str], None] = lambda text: None,
        **settings: Any,
    ) -> LatencyResult:
        artifact = Artifact(kind="torch", path=tmp_path, sha256="", bytes=0)
        candidates = [Candidate(name, script, artifact, Device()) for name, script in scripts.items()]  # type: ignore[arg-type]
        feeds: dict[int, Any] = {batch: {} for batch in batches}
        return measure_latency(candidates, feeds, LatencySettings(**settings), tmp_path, heard)

    return call


def crashing(block: int) -> float:
    if block == 3:
        raise StepCrashed("its process crashed (SIGSEGV)")
    return 0.001


def test_stops_once_medians_are_certain(measure: Callable[..., LatencyResult]) -> None:
    rows = measure({"eager": lambda block: 0.004, "fast": lambda block: 0.002}, batches=(8,), min_rounds=10).rows
    fast = rows["fast"][0]
    assert fast.stopped_because == "every median's 95 % interval is within ±2%"
    assert (fast.batch, fast.n, fast.rounds, fast.launches) == (8, 30, 15, 5)
    assert (fast.p50_ms, fast.mean_ms, fast.throughput_per_s) == pytest.approx((2.0, 2.0, 4000.0))
    assert fast.speedup
    assert (fast.speedup.median, fast.speedup.low, fast.speedup.high) == (2.0, 2.0, 2.0)
    assert (fast.load_ms, fast.first_call_ms, fast.warmup_calls) == (500.0, 250.0, 9)
    assert (fast.idle_cpu_share, fast.disturbed_share, fast.speedup_rounds) == (pytest.approx(0.01), 0.5, 15)


def test_stops_at_the_time_limit(measure: Callable[..., LatencyResult]) -> None:
    noise = np.random.default_rng(0).uniform(1e-4, 2e-4, 100_000)
    row = measure({"eager": lambda block: noise[len(FakeWorker.order)]}, time_limit_seconds=0.05).rows["eager"][0]
    assert row.stopped_because == "the time limit of 0.05 s"
    assert row.rounds


def test_goes_on_within_a_bound_while_launches_disagree(measure: Callable[..., LatencyResult]) -> None:
    """Each launch is a hundred times as fast or slow as the one before it."""
    said: list[str] = []
    slow = lambda block: 6e-5 * 100 ** (FakeWorker.opened.count("latency-eager") % 2)  # noqa: E731
    row = measure({"eager": slow}, heard=said.append, time_limit_seconds=0.05, noisy_extension=2).rows["eager"][0]
    assert row.stopped_because == "the time limit of 0.1 s, 2 times what was asked for"
    assert row.median_ms
    assert row.median_ms.too_noisy
    assert any(text.endswith("so far one median or more is too noisy to tell") for text in said)
    assert not any("±1" in text for text in said)


def test_every_round_has_one_block_of_each_in_shuffled_order(measure: Callable[..., LatencyResult]) -> None:
    measure({name: lambda block: 0.001 for name in "abc"}, min_rounds=12)
    assert len(FakeWorker.order) == 3 * 5 * 3
    rounds = [tuple(FakeWorker.order[start : start + 3]) for start in range(0, len(FakeWorker.order), 3)]
    assert all(sorted(one) == ["latency-a", "latency-b", "latency-c"] for one in rounds)
    assert len(set(rounds)) > 2
    order, FakeWorker.order = FakeWorker.order, []
    measure({name: lambda block: 0.001 for name in "abc"}, min_rounds=12)
    assert FakeWorker.order == order


def test_one_that_crashes_leaves_the_others_measured(measure: Callable[..., LatencyResult]) -> None:
    result = measure({"eager": lambda block: 0.004, "bad": crashing, "good": lambda block: 0.002}, batches=(1, 2))
    for row in result.rows["bad"]:
        assert row.failure
        assert "SIGSEGV" in row.failure
        assert row.p50_ms is None
        assert "SIGSEGV" in row.reasons["p50_ms"]
    assert [row.rounds for row in result.rows["good"]] == [15, 15]
    assert [row.speedup is not None for row in result.rows["good"]] == [True, True]
    assert not FakeWorker.open_now


def test_baseline_that_fails_leaves_no_speedup(measure: Callable[..., LatencyResult]) -> None:
    row = measure({"eager": crashing, "good": lambda block: 0.002}).rows["good"][0]
    assert row.p50_ms == pytest.approx(2.0)
    assert row.speedup is None
    assert row.reasons["speedup"] == "the baseline eager failed"


def test_all_failing_ends_the_race(measure: Callable[..., LatencyResult]) -> None:
    assert measure({"eager": crashing, "bad": crashing}).rows["bad"][0].failure


def test_what_is_missing_has_a_reason(measure: Callable[..., LatencyResult]) -> None:
    row = measure({"eager": lambda block: 0.001}, min_rounds=10).rows["eager"][0]
    assert row.p90_ms is None
    assert row.reasons["p90_ms"] == "p90 takes 64 samples, and there are 30"
    missing = {name for name, value in row if value is None and name not in ("failure", "oom")}
    assert missing == set(row.reasons)


def test_throughput_is_counted_for_each_number_of_callers(measure: Callable[..., LatencyResult]) -> None:
    scripts: dict[str, Script] = {"eager": lambda block: 0.004, "fast": lambda block: 0.002}
    row = measure(scripts, batches=(8,), concurrency=(1, 2, 3, 4)).rows["fast"][0]
    assert [level.callers for level in row.concurrency] == [1, 2, 3, 4]
    assert [level.samples_per_s.median for level in row.concurrency] == pytest.approx([4e3, 8e3, 12e3, 12e3])
    assert [level.p50_ms for level in row.concurrency] == pytest.approx([2.0, 4.0, 6.0, 8.0])
    assert (row.throughput_per_s, row.knee, row.p50_ms) == (pytest.approx(12e3), 3, pytest.approx(2.0))


def test_launches_go_on_until_they_agree(measure: Callable[..., LatencyResult]) -> None:
    speeds = [0.010, 0.011, 0.010, 0.009, 0.010, 0.010, 0.0101, 0.0099, *[0.010] * 20]
    script: Script = lambda block: speeds[len(FakeWorker.opened)]  # noqa: E731
    (row,) = measure({"eager": script}, time_limit_seconds=60.0, precision=0.03).rows["eager"]
    assert row.launches == len(FakeWorker.opened) > 5
    assert row.median_ms
    assert row.median_ms.relative_half_width <= 0.03


@pytest.mark.parametrize(("load_seconds", "launches"), [(0.0, 3), (0.3, 1)])
def test_starting_anew_takes_no_longer_than_measuring(
    load_seconds: float, launches: int, measure: Callable[..., LatencyResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).uniform(0.001, 0.003, 100_000)
    monkeypatch.setattr(FakeWorker, "load_seconds", load_seconds)
    script: Script = lambda block: noise[len(FakeWorker.order)]  # noqa: E731
    (row,) = measure({"eager": script}, time_limit_seconds=0.5, precision=1e-6).rows["eager"]
    assert row.stopped_because == "the time limit of 0.5 s"
    assert row.launches
    assert (row.launches >= 3) == (launches == 3)


def test_one_that_crashes_when_it_is_started_again(measure: Callable[..., LatencyResult]) -> None:
    scripts: dict[str, Script] = {"eager": lambda block: 0.004, "bad": lambda block: 0.002}
    FakeWorker.ends["latency-bad"] = 2
    result = measure(scripts)
    assert "SIGSEGV" in (result.rows["bad"][0].failure or "")
    assert result.rows["eager"][0].launches == 5
    assert not FakeWorker.open_now


def test_one_that_hangs_is_not_started_again(measure: Callable[..., LatencyResult]) -> None:
    def hanging(block: int) -> float:
        raise StepTimeout("it ran past its time limit of 60 s")

    rows = measure({"eager": lambda block: 0.004, "stuck": hanging}, batches=(1, 2, 4)).rows["stuck"]
    assert FakeWorker.opened.count("latency-stuck") == 1
    assert ["time limit" in (row.failure or "") for row in rows] == [True] * 3


def test_raw_samples_are_kept_in_order(measure: Callable[..., LatencyResult]) -> None:
    result = measure(
        {"eager": lambda block: block / 1000}, batches=(4,), min_rounds=10, launches=1, time_limit_seconds=0.001
    )
    seconds, calls = result.samples["eager/4/seconds"], result.samples["eager/4/calls"]
    assert seconds.size == calls.sum()
    assert result.samples["eager/4/waited"].size == seconds.size
    np.testing.assert_array_equal(seconds, np.repeat(np.arange(1, len(calls) + 1) / 1000, calls))
    assert result.rows["eager"][0].p50_ms == np.percentile(seconds, 50) * 1e3


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
    assert {one for what, one in seen if what == "opened"} == {one for what, one in seen if what == "closed"}
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
