"""Rounds, stopping, failures and rows with scripted workers."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import NO_TIME, StepCrashed, StepOutOfMemory, StepTimeout
from enginesmith.pipeline.measure.latency import benchmark
from enginesmith.pipeline.measure.latency import rows as latency_rows
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import LatencyBenchmark, LatencyResult
from enginesmith.pipeline.measure.latency.timer import Block, ConcurrentCalls, Ready
from enginesmith.pipeline.measure.rows import OutOfMemory, Stop
from enginesmith.pipeline.system.cpu import RunQueue
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.nvidia import GpuState
from enginesmith.pipeline.tasks import measure as tasks
from enginesmith.pipeline.tasks.race import drop_slow

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
    waited: ClassVar[tuple[float, float]] = (0.0, 0.5)

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
        return Block(seconds, np.array(self.waited), float(seconds.sum()), None, 0.004, 0.1, 0.001, preemptions=0)

    def close(self) -> None:
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
        device: str = "cpu",
        dense: dict[str, str] | None = None,
        **settings: Any,
    ) -> LatencyResult:
        artifact = Artifact(kind="torch", path=tmp_path, sha256="", bytes=0)
        candidates = [Candidate(name, script, artifact, Device(kind=device)) for name, script in scripts.items()]  # type: ignore[arg-type]
        feeds: dict[int, Any] = {batch: {} for batch in batches}
        benchmark = LatencyBenchmark(candidates, LatencySettings(**settings), tmp_path, heard, dense or {})
        with benchmark:
            for batch in batches:
                benchmark.measure(batch, feeds[batch])
            return benchmark.result()

    return call


def crashing(block: int) -> float:
    if block == 3:
        raise StepCrashed("its process crashed (SIGSEGV)")
    return 0.001


def test_stops_once_medians_are_certain(measure: Callable[..., LatencyResult]) -> None:
    rows = measure({"eager": lambda block: 0.004, "fast": lambda block: 0.002}, batches=(8,), min_rounds=10).rows
    fast = rows["fast"][0]
    assert fast.stopped_because == "every median's 95 % interval is within ±2%"
    assert fast.stop == Stop(cause="precise", precision=0.02)
    assert (fast.batch, fast.n, fast.rounds, fast.launches) == (8, 30, 15, 5)
    assert (fast.p50_ms, fast.mean_ms, fast.throughput_per_s) == pytest.approx((2.0, 2.0, 4000.0))
    assert fast.speedup
    assert (fast.speedup.median, fast.speedup.low, fast.speedup.high) == (2.0, 2.0, 2.0)
    assert (fast.load_ms, fast.first_call_ms, fast.warmup_calls) == (500.0, 250.0, 9)
    assert (fast.idle_cpu_share, fast.disturbed_share, fast.speedup_rounds) == (pytest.approx(0.01), 0.5, 15)


@pytest.mark.parametrize(("waited", "noisy"), [((0.0, 0.5), False), ((0.5, 0.5), True)])
def test_a_speed_up_of_disturbed_calls_alone_is_no_result(
    measure: Callable[..., LatencyResult], monkeypatch: pytest.MonkeyPatch, waited: tuple[float, float], noisy: bool
) -> None:
    """The interval is narrow: all calls waited as long."""
    monkeypatch.setattr(FakeWorker, "waited", waited)
    rows = measure({"eager": lambda block: 4.0, "fast": lambda block: 0.002}, time_limit_seconds=1e3).rows
    assert [rows[name][0].speedup_too_noisy for name in rows] == [False, noisy]
    assert rows["fast"][0].speedup
    assert rows["fast"][0].speedup.median == pytest.approx(2000)


class CardWorker(FakeWorker):
    """A process on a card of 100 bytes, of which each candidate takes some when it loads, and more in its blocks."""

    pid = 0
    takes: ClassVar[dict[str, int]] = {}
    grows: ClassVar[dict[str, int]] = {}
    taken: ClassVar[dict[str, int]] = {}
    together: ClassVar[set[str]] = set()

    def _take(self, sizes: dict[str, int]) -> None:
        self.taken[self.log.stem] = sizes[self.log.stem.removeprefix("latency-")]
        if sum(self.taken.values()) > 100:
            raise StepOutOfMemory("CUDA out of memory")

    def request(self, name: str, *arguments: Any, timeout_seconds: float) -> Any:
        if name == "read_free_memory":
            return 100 - sum(self.taken.values()), 100
        if name == "load":
            self._take(self.takes)
        if name == "block":
            self.together.add("".join(sorted(self.taken)).replace("latency-eager", "+").replace("latency-", ""))
            self._take(self.takes | self.grows)
        return super().request(name, *arguments, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        super().close()
        self.taken.pop(self.log.stem, None)


@pytest.mark.parametrize(
    ("takes", "grows", "groups", "alone", "oom"),
    [
        ({"eager": 20, "a": 30, "b": 40}, {}, ["ab+"], "", ""),
        ({"eager": 20, "a": 30, "b": 30, "c": 30, "d": 60}, {}, ["ab+", "c+", "d+"], "", ""),
        ({"eager": 20, "a": 30, "b": 46}, {}, ["a+", "b+"], "", ""),  # 4 % left is too little
        ({"eager": 20, "a": 30, "b": 90}, {}, ["a+", "b"], "b", ""),
        ({"eager": 20, "a": 90}, {}, ["+", "a"], "a", ""),
        ({"eager": 20, "a": 30, "b": 101}, {}, ["a+"], "", "b"),
        ({"eager": 20, "a": 30, "b": 30}, {"b": 60}, ["ab+", "a+", "b+"], "", ""),  # in the rounds, ab+ is too much
        ({"eager": 20, "a": 30}, {"eager": 80}, ["a+", "+", "a"], "a", ""),
    ],
)
def test_what_does_not_fit_on_a_gpu_together_is_measured_in_groups(
    measure: Callable[..., LatencyResult],
    monkeypatch: pytest.MonkeyPatch,
    takes: dict[str, int],
    grows: dict[str, int],
    groups: list[str],
    alone: str,
    oom: str,
) -> None:
    """Groups are named by the letters of their members; + is eager."""
    monkeypatch.setattr(benchmark, "Worker", CardWorker)
    monkeypatch.setattr(benchmark, "used_besides", lambda *_: (None, ""))
    monkeypatch.setattr(benchmark, "describe_out_of_memory", lambda *_: OutOfMemory(message="CUDA out of memory"))
    CardWorker.takes, CardWorker.grows, CardWorker.taken, CardWorker.together = takes, grows, {}, set()
    scripts = {name: (lambda block, seconds=0.004 / (1 + index): seconds) for index, name in enumerate(takes)}
    rows = measure(scripts, device="cuda", time_limit_seconds=1.0).rows
    assert CardWorker.together == set(groups)
    for index, (name, (row,)) in enumerate(rows.items()):
        assert (row.p50_ms is None, row.oom is None) == (name in oom, name not in oom)
        expected = None if name in oom + alone else pytest.approx(1.0 + index)
        assert (row.speedup and row.speedup.median) == expected
        assert (row.group is None) == (len(groups) == 1)
        assert ("does not fit on the GPU together" in row.reasons.get("speedup", "")) == (name in alone)


@pytest.mark.parametrize(
    ("takes", "groups", "told"),
    [
        ({"eager": 20, "a": 30, "b": 30, "c": 30}, {"ab+", "ac+"}, None),  # a, the sibling of c, is in both groups
        ({"eager": 20, "a": 30, "b": 30, "c": 50}, {"ab+", "c+"}, "does not fit on the GPU together with its dense"),
        ({"eager": 20, "a": 30, "b": 30, "c": 70}, {"ab+", "c+"}, "does not fit on the GPU together with its dense"),
        ({"eager": 20, "a": 101, "c": 30}, {"c+"}, "there is no dense variant"),
    ],
)
def test_a_pruned_variant_has_its_dense_sibling_in_its_group(
    measure: Callable[..., LatencyResult],
    monkeypatch: pytest.MonkeyPatch,
    takes: dict[str, int],
    groups: set[str],
    told: str | None,
) -> None:
    monkeypatch.setattr(benchmark, "Worker", CardWorker)
    monkeypatch.setattr(benchmark, "used_besides", lambda *_: (None, ""))
    monkeypatch.setattr(benchmark, "describe_out_of_memory", lambda *_: OutOfMemory(message="CUDA out of memory"))
    CardWorker.takes, CardWorker.grows, CardWorker.taken, CardWorker.together = takes, {}, {}, set()
    scripts = {name: (lambda block, seconds=0.004 / (1 + index): seconds) for index, name in enumerate(takes)}
    rows = measure(scripts, device="cuda", dense={"c": "a"}, time_limit_seconds=1.0).rows
    assert CardWorker.together == groups
    (row,) = rows["c"]
    assert (row.speedup_over_dense and row.speedup_over_dense.median) == (None if told else pytest.approx(4 / 2))
    assert (told or "") in row.reasons.get("speedup_over_dense", "")
    assert [len(rows[name]) for name in takes] == [1] * len(takes)


def test_stops_at_the_time_limit(measure: Callable[..., LatencyResult]) -> None:
    noise = np.random.default_rng(0).uniform(1e-4, 2e-4, 100_000)
    row = measure({"eager": lambda block: noise[len(FakeWorker.order)]}, time_limit_seconds=0.05).rows["eager"][0]
    assert row.stopped_because == "the time limit of 0.05 s"
    assert row.stop == Stop(cause="time limit", seconds=0.05)
    assert row.rounds


def test_a_single_block_is_no_certain_median(measure: Callable[..., LatencyResult]) -> None:
    """A call that stalls takes all the time, and its interval would have no width."""
    row = measure({"eager": lambda block: 0.3}, time_limit_seconds=9.0, launches=1, ends_at=0.2).rows["eager"][0]
    assert (row.rounds, row.stopped_because) == (1, "the time of the whole run")


def test_goes_on_within_a_bound_while_launches_disagree(measure: Callable[..., LatencyResult]) -> None:
    """Each launch is a hundred times as fast or slow as the one before it."""
    said: list[str] = []
    slow = lambda block: 6e-5 * 100 ** (FakeWorker.opened.count("latency-eager") % 2)  # noqa: E731
    row = measure({"eager": slow}, heard=said.append, time_limit_seconds=0.05, noisy_extension=2).rows["eager"][0]
    assert row.stopped_because == "the time limit of 0.1 s, 2 times what was asked for"
    assert row.stop == Stop(cause="time limit", seconds=0.1, extension=2)
    assert row.median_ms
    assert row.median_ms.too_noisy
    assert any(text.endswith("so far one median or more is too noisy to tell") for text in said)
    assert not any("±1" in text for text in said)


@pytest.mark.parametrize("other", [0.002, 0.001])
def test_a_load_that_begins_in_the_middle_is_no_difference_between_candidates(
    measure: Callable[..., LatencyResult], other: float
) -> None:
    """From half of the time on, other programs make all calls three times as long, whosever turn it is."""

    def under_load(seconds: float) -> Script:
        return lambda block: seconds * (3 if FakeWorker.now > 0.1 else 1) * (1 + 0.2 * ((block * 7) % 5))

    settings = {"launches": 1, "block_ms": 25.0, "time_limit_seconds": 0.5, "precision": 0.001}
    rows = measure({"a": under_load(0.002), "b": under_load(other)}, **settings).rows
    assert FakeWorker.now > 0.3
    found = rows["b"][0].speedup
    assert found is not None
    assert found.low <= 0.002 / other <= found.high
    dropped = drop_slow({name: row[0] for name, row in rows.items()}, (), 2, {})
    assert set(dropped) == ({"a"} if other == 0.001 else set())


def test_ends_with_the_time_of_the_whole_run(measure: Callable[..., LatencyResult], monkeypatch: Any) -> None:
    """Candidates that have not started by then have failed; the others have the rows of complete launches."""
    noise = np.random.default_rng(0).lognormal(sigma=0.5, size=9999)
    scripts: dict[str, Script] = dict.fromkeys(["eager", "fast"], lambda block: noise[block])
    monkeypatch.setattr(FakeWorker, "load_seconds", 3.0)
    rows = measure(scripts, (1, 2), time_limit_seconds=100.0, ends_at=30.0).rows
    assert FakeWorker.now < 40
    first, second = rows["fast"]
    assert (first.launches, first.stopped_because, second.failure) == (2, "the time of the whole run", NO_TIME)
    assert second.late
    assert first.p50_ms


def test_what_has_started_late_is_measured_for_a_moment(
    measure: Callable[..., LatencyResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, starting the sessions takes all the time."""
    noise = np.random.default_rng(0).lognormal(sigma=0.5, size=9999)
    scripts: dict[str, Script] = dict.fromkeys(["eager", "fast", "third"], lambda block: 0.01 * noise[block])
    monkeypatch.setattr(FakeWorker, "load_seconds", 6.0)
    settings = {"time_limit_seconds": 10.0, "launches": 1, "ends_at": 9.0}
    rows = measure(scripts, **settings, grace_seconds=30.0).rows
    assert all(row.p50_ms and row.rounds >= 10 for (row,) in rows.values())
    assert FakeWorker.now < 9 + 30
    assert measure(scripts, **settings).rows["third"][0].failure == NO_TIME


def test_a_session_that_starts_too_late_does_not_take_the_time_of_those_that_have_started(
    measure: Callable[..., LatencyResult], monkeypatch: Any
) -> None:
    """Else the whole measurement would be ended from outside, with nothing that it found."""

    def request(worker: FakeWorker, name: str, *arguments: Any, timeout_seconds: float) -> Any:
        if name == "load" and worker.log.stem == "latency-late":
            FakeWorker.now += timeout_seconds
            raise StepTimeout("it ran past its time limit")
        return asked(worker, name, *arguments, timeout_seconds=timeout_seconds)

    asked = FakeWorker.request
    monkeypatch.setattr(FakeWorker, "request", request)
    scripts: dict[str, Script] = dict.fromkeys(["eager", "late", "later"], lambda block: 0.001)
    limits = {"ends_at": 6.0, "grace_seconds": 2.5, "start_limit_seconds": 60.0}
    rows = measure(scripts, (1, 2), time_limit_seconds=10.0, **limits).rows
    assert 8 <= FakeWorker.now < 9
    assert rows["eager"][0].p50_ms
    assert [row.failure for name in ("late", "later") for row in rows[name]] == [NO_TIME] * 4
    FakeWorker.now = 0.0
    early = measure(scripts, ends_at=99.0, grace_seconds=1.0, start_limit_seconds=60.0).rows["late"]
    assert early[0].failure == "it ran past its time limit"


@pytest.mark.parametrize(
    ("ends_at", "stopped"),
    [
        (6.0, "the time of the whole run"),
        (12.0, "the time limit of 10 s"),
        (99.0, "the time limit of 20 s, 2 times what was asked for"),
    ],
)
def test_only_what_had_less_than_its_own_time_was_cut_short(
    measure: Callable[..., LatencyResult], ends_at: float, stopped: str
) -> None:
    """If launches disagree, the measurement would go on for twice as long."""
    slow = lambda block: 6e-3 * 100 ** (FakeWorker.opened.count("latency-eager") % 2)  # noqa: E731
    settings = {"time_limit_seconds": 10.0, "noisy_extension": 2, "ends_at": ends_at}
    (row,) = measure({"eager": slow}, **settings).rows["eager"]
    assert (row.stopped_because, row.cut) == (stopped, ends_at == 6.0)


def test_the_time_of_grace_is_one_for_all_batch_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Once the time is over, each further size would have begun its own."""
    given: list[tuple[float, float]] = []

    class Ended(LatencyBenchmark):
        def end_in(self, seconds: float, grace_seconds: float = 0.0) -> None:
            given.append((seconds, grace_seconds))
            if len(given) == 4:
                raise KeyboardInterrupt

        def measure(self, *_: object, **__: object) -> None:
            FakeWorker.now += 8

    FakeWorker.now = 0.0
    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=lambda: FakeWorker.now))
    monkeypatch.setattr(tasks, "LatencyBenchmark", Ended)
    monkeypatch.setattr(tasks, "measured_feeds", lambda reference: {1: {}, 2: {}, 4: {}, 8: {}})
    task = tasks.Latency.model_construct(
        engines={"eager": None},  # type: ignore[dict-item]
        device=Device(),
        settings=LatencySettings(),
        dense={},
        left_seconds=10.0,
        grace_seconds=30.0,
    )
    made = Artifact(kind="torch", path=tmp_path, sha256="", bytes=0)
    with pytest.raises(KeyboardInterrupt):
        task.run({"eager": made, "reference": made}, tmp_path, print)
    assert given == [(2.25, 30.0), (pytest.approx(1 / 3), 30.0), (-7.0, 30.0), (-15.0, 30.0)]


@pytest.mark.parametrize(("seconds", "cut"), [(0.5, True), (1000.0, False)])
def test_a_latency_that_was_cut_short_is_measured_again(
    measure: Callable[..., LatencyResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, cut: bool
) -> None:
    for module in (tasks, latency_rows):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: FakeWorker.now))
    monkeypatch.setattr(tasks, "measured_feeds", lambda reference: {1: {}})
    monkeypatch.setattr(tasks, "_make_larger_feeds", lambda reference, model: None)
    task = tasks.Latency.model_construct(
        engines={"eager": lambda block: 0.01 + 0.01 * (block % 7)},  # type: ignore[dict-item]
        device=Device(),
        settings=LatencySettings(time_limit_seconds=10.0),
        dense={},
        left_seconds=seconds,
    )
    made = Artifact(kind="torch", path=tmp_path, sha256="", bytes=0)
    assert task.run({"eager": made, "reference": made}, tmp_path, lambda text: None).incomplete is cut


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


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_gpus_are_looked_at_after_each_block_and_not_for_the_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    working = (GpuState(name="NVIDIA L4", clock_limits=("power limit",), sm_clock_mhz=900),)
    monkeypatch.setattr(benchmark, "gpu_states", lambda: working)
    device: Any = SimpleNamespace(kind=kind)
    session = benchmark.MeasuredSession(SimpleNamespace(device=device), Path("log"))  # type: ignore[arg-type]
    session.worker = SimpleNamespace(request=lambda *request, timeout_seconds: None)  # type: ignore[assignment]
    session.launches.append(benchmark.Launch())
    for _ in range(3):
        session.run_block(0.08)
    assert session.gpu_looks == ([working] * 3 if kind == "cuda" else [])


@pytest.mark.parametrize(
    ("seconds", "grace", "start"),
    [(100.0, 0.0, 50.0), (15.0, 0.0, 10.0), (4.0, 0.0, 4.0), (4.0, 30.0, 10.0), (9999.0, 0.0, 900.0)],
)
def test_a_session_that_may_hang_has_a_part_of_the_time_to_start(
    tmp_path: Path, seconds: float, grace: float, start: float
) -> None:
    benchmark = LatencyBenchmark([], LatencySettings(), tmp_path, print)
    benchmark.end_in(seconds, grace)
    assert benchmark._settings.start_limit_seconds == start
    assert not benchmark.late
    benchmark.end_in(-1.0)
    assert benchmark.late
