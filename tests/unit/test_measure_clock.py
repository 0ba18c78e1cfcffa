"""The clock in the session's process; percentiles, intervals and speed-ups."""

import gc
import hashlib
import threading
import time
from collections.abc import Callable
from math import comb, gamma, pi, sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Session
from enginesmith.pipeline.errors import SignatureError
from enginesmith.pipeline.measure.latency import timer as clock
from enginesmith.pipeline.measure.latency.timer import SessionTimer
from enginesmith.pipeline.measure.statistics import (
    _STUDENT,
    LEAST_ROUNDS,
    SAMPLE_FLOORS,
    Timed,
    comparable,
    median_interval,
    paired_medians,
    paired_ratio,
    percentile,
)
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Feeds, Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:2"),), outputs=())
FEEDS = {"x": np.ones(2, np.float32)}


class Fake(Session):
    """Calls a function for each inference."""

    signature = SIGNATURE

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def sibling(self) -> "Fake":
        return Fake(self.work)

    def bind(self, feeds: Feeds) -> Feeds:
        return feeds

    def enqueue(self, bound: Any) -> None:
        self.work()

    def synchronize(self) -> None:
        pass

    def fetch(self) -> dict[str, Array]:
        return {}

    def close(self) -> None:
        pass


class FakeEngine:
    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def load(self, artifact: Artifact, device: Device) -> Fake:
        return Fake(self.work)


class Ticking:
    """A clock that moves by one nanosecond with each reading, and otherwise only where a test or a sleep moves it."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        self.now += 1
        return self.now

    process_time_ns = perf_counter_ns

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    ticking = Ticking()
    monkeypatch.setattr(clock, "time", ticking)
    monkeypatch.setattr(clock, "_now", ticking.perf_counter_ns)
    monkeypatch.setattr(clock, "_others_awake", lambda: False)
    return ticking


def timer(work: Callable[[], object]) -> SessionTimer:
    artifact = Artifact(kind="torch", path=Path("none"), sha256="", bytes=0)
    opened = SessionTimer(FakeEngine(work), artifact, Device())  # type: ignore[arg-type]
    opened.load()
    return opened


def nothing() -> None:
    pass


def test_overhead_is_two_readings_of_the_clock_a_call(ticking: Ticking) -> None:
    opened = timer(nothing)
    opened.make_ready(FEEDS, 1e-6)
    before = ticking.now
    np.testing.assert_allclose(opened._timed(2_000), 1e-9)  # of them one is in the sample
    assert ticking.now - before == 2 * 2_000


def test_samples_are_the_calls_own_time(ticking: Ticking) -> None:
    opened = timer(lambda: ticking.sleep(0.01))
    opened.make_ready(FEEDS, 0.01)
    block = opened.block(0.1)
    np.testing.assert_allclose(block.host_seconds, np.full(10, 0.01), rtol=1e-6)
    assert block.wall_seconds == pytest.approx(0.1, rel=1e-4)
    assert block.device_seconds is None


def test_long_calls_are_timed_once_a_block(ticking: Ticking) -> None:
    opened = timer(lambda: ticking.sleep(0.01))
    opened.make_ready(FEEDS, 0.01)
    assert opened.block(0.001).host_seconds.size == 1


def test_garbage_is_not_collected_within_a_block() -> None:
    seen = []
    opened = timer(lambda: seen.append(gc.isenabled()))
    opened.make_ready(FEEDS, 0.01)
    opened.block(0.001)
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_first_call_is_reported_on_its_own(ticking: Ticking) -> None:
    calls: list[None] = []
    opened = timer(lambda: (calls.append(None), ticking.sleep(0.2 if len(calls) == 1 else 1e-5)))
    assert opened.make_ready(FEEDS, 0.02).first_call_seconds == pytest.approx(0.2)
    assert opened.block(0.001).host_seconds.max() == pytest.approx(1e-5, rel=1e-3)


def test_feeds_are_held_against_the_signature() -> None:
    with pytest.raises(SignatureError):
        timer(nothing).make_ready({}, 0.01)


@pytest.mark.parametrize(
    ("medians", "blocks"),
    [([1.0] * 9, 4), ([5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], 7)],
    ids=["steady", "falling"],
)
def test_warm_up_ends_with_falling_medians(monkeypatch: pytest.MonkeyPatch, medians: list[float], blocks: int) -> None:
    opened = timer(nothing)
    coming = iter(medians)
    monkeypatch.setattr(opened, "_timed", lambda calls: np.array([next(coming)]))
    calls, ended = opened._warm_up(60.0)
    assert calls == blocks
    assert "stopped falling" in ended


def test_warm_up_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = timer(nothing)
    monkeypatch.setattr(opened, "_timed", lambda calls: np.array([1.0 / time.perf_counter_ns()]))
    assert "limit" in opened._warm_up(0.0)[1]


def test_block_ends_when_other_threads_are_asleep(ticking: Ticking, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = timer(nothing)
    opened.make_ready(FEEDS, 1e-6)
    awake = iter([True] * 20 + [False])
    monkeypatch.setattr(clock, "_others_awake", lambda: next(awake))
    assert opened.block(1e-6).settle_seconds == pytest.approx(20 * clock._SETTLE_STEP_SECONDS, rel=1e-3)
    monkeypatch.setattr(clock, "_others_awake", lambda: True)
    assert opened.block(1e-6).settle_seconds == pytest.approx(clock._SETTLE_LIMIT_SECONDS, rel=1e-2)


def test_a_thread_that_spins_is_awake() -> None:
    """A thread that spins on after the work, as those of ONNX Runtime and OpenMP do: without Python's lock."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)

    spinning = threading.Thread(target=spin)
    spinning.start()
    deadline = time.monotonic() + 60
    while not (awake := clock._others_awake()) and time.monotonic() < deadline:
        time.sleep(0.001)
    over.set()
    spinning.join()
    while clock._others_awake() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert awake
    assert not clock._others_awake()


def test_what_a_process_does_between_its_blocks_is_counted() -> None:
    opened = timer(nothing)
    opened.make_ready(FEEDS, 0.01)
    opened.block(0.0001)
    until = time.process_time() + 0.03
    while time.process_time() < until:
        pass
    assert opened.block(0.0001).idle_cpu_seconds >= 0.03


class FakeEvent:
    """CUDA events at the boundary: each records the stream, and they are 2 ms apart."""

    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: object = None

    def record(self, stream: object) -> None:
        self.stream = stream
        self.log.append("event")

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert self.stream is later.stream is not None
        return 2.0


def test_cuda_calls_are_timed_by_events_on_the_sessions_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"stream {handle} of {device}")
    monkeypatch.setattr(Fake, "cuda_stream", 7)
    log = FakeEvent.log
    opened = timer(lambda: log.append("call"))
    ready = opened.make_ready(FEEDS, 0.01)
    created = log.count("event")
    assert created == 2 * clock._MOST_EVENTS
    assert ready.h2d_seconds is not None
    for index in range(2 * clock._EVENT_BLOCKS):
        log.clear()
        block = opened.block(1e-4)
        calls, timed = block.host_seconds.size, 0 if block.device_seconds is None else block.device_seconds.size
        assert timed == (min(calls, clock._MOST_EVENTS) if index % clock._EVENT_BLOCKS == 0 else 0)
        sampled = log[: len(log) - 3 * timed]  # the events are around calls of their own, in no sample
        assert "event" not in sampled
        assert len(sampled) >= calls
        assert log[len(sampled) :] == ["event", "call", "event"] * timed
    np.testing.assert_allclose(opened._events.time_calls(opened._session, None, 3), [0.002] * 3)


def early_stopping_queries(share: float, over_latency: int) -> int:
    """MLPerf: the fewest queries of which so many may be over the bound, at 99 % confidence that `share` are under."""
    queries = over_latency + 1
    while True:
        chances = (comb(queries, k) * (1 - share) ** k * share ** (queries - k) for k in range(over_latency + 1))
        if sum(chances) <= 0.01:
            return queries
        queries += 1


@pytest.mark.parametrize("rank", [90.0, 95.0, 99.0, 99.9])
def test_sample_floors_are_mlperfs(rank: float) -> None:
    assert SAMPLE_FLOORS[rank] == early_stopping_queries(rank / 100, over_latency=1)


@pytest.mark.parametrize("rank", [50.0, 90.0, 95.0, 99.0])
def test_percentiles_are_numpys(rank: float) -> None:
    samples = np.random.default_rng(0).exponential(size=1_001)
    assert percentile(samples, rank) == (np.percentile(samples, rank), "")


@pytest.mark.parametrize(("rank", "floor"), SAMPLE_FLOORS.items())
def test_percentile_below_its_floor_is_none_with_a_reason(rank: float, floor: int) -> None:
    value, reason = percentile(np.ones(floor - 1), rank)
    assert value is None
    assert str(floor) in reason
    assert percentile(np.ones(floor), rank) == (1.0, "")


def test_speedup_is_not_moved_by_drift() -> None:
    """A machine that gets three times slower while it measures: the paired ratio stays what it is."""
    rng = np.random.default_rng(1)
    drift = np.linspace(1, 3, 40)
    slow = [Timed(speed * rng.normal(2.0, 0.01, 20)) for speed in drift]
    fast = [Timed(speed * rng.normal(1.0, 0.01, 20)) for speed in drift]
    found = paired_ratio([slow], [fast], seed=0)
    assert found.low < 2.0 < found.high
    assert found.relative_half_width < 0.01
    assert median_interval([slow], seed=0).relative_half_width > 0.1


def test_interval_covers_the_true_median_about_19_times_in_20() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        found = median_interval([[Timed(block) for block in rng.normal(1.0, 0.1, (30, 1))]], seed=0)
        hits += found.low <= 1.0 <= found.high
    assert 180 <= hits <= 199


def test_same_seed_same_interval() -> None:
    values = np.random.default_rng(3).normal(1.0, 0.1, (12, 5))
    blocks = [Timed(block) for block in values]
    assert median_interval([blocks], seed=7) == median_interval([blocks], seed=7)


def disturbed(rng: np.random.Generator, seconds: float, slowed: float, share: float) -> Timed:
    """A block of 20 calls, of which some waited for a core and took longer."""
    waited = np.where(rng.random(20) < share, 0.4, 0.001)
    return Timed(np.where(waited > 0.1, slowed, 1.0) * rng.normal(seconds, 0.01 * seconds, 20), waited)


def test_speedup_is_that_of_calls_that_nobody_disturbed() -> None:
    """One side suffers more from a busy neighbor than the other: eager's threads wait for each other."""
    rng = np.random.default_rng(5)
    slow = [disturbed(rng, 2.0, slowed=6.0, share=0.6) for _ in range(40)]
    fast = [disturbed(rng, 1.0, slowed=1.5, share=0.6) for _ in range(40)]
    found = paired_ratio([slow], [fast], seed=0)
    assert found.low < 2.0 < found.high
    assert found.relative_half_width < 0.02
    assert median_interval([slow], seed=0).median == pytest.approx(2.0, rel=0.01)


def test_medians_beside_a_ratio_are_of_the_same_calls() -> None:
    """One side has a few undisturbed calls, the other none."""
    waited = np.array([0.0] + [0.7] * 5)
    some, none = np.array([4.5] + [18.0] * 5), np.full(6, 18.0)
    calm, busy = [[Timed(some, waited)] * 15] * 4, [[Timed(none, np.full(6, 0.7))] * 15] * 4
    assert paired_medians(busy, calm) == [18.0, 18.0]
    assert paired_ratio(busy, calm, seed=0).median == 1.0
    assert median_interval(calm, seed=0).median == 4.5


def test_rounds_count_where_both_sides_have_undisturbed_calls() -> None:
    quiet, busy = Timed(np.ones(4), np.zeros(4)), Timed(np.full(4, 9.0), np.ones(4))
    ours = [quiet] * LEAST_ROUNDS + [busy, quiet]
    theirs = [quiet] * LEAST_ROUNDS + [quiet, busy]
    judged = [launch for (launch,) in comparable([ours], [theirs])]
    assert [len(side) for side in judged] == [LEAST_ROUNDS] * 2
    assert max(block.max() for side in judged for block in side) == 1.0


def test_launches_without_undisturbed_calls_are_left_out() -> None:
    quiet, busy = Timed(np.ones(4), np.zeros(4)), Timed(np.full(4, 9.0), np.ones(4))
    (judged,) = comparable([[quiet] * 4 + [busy], [busy] * 2, [quiet] * 2, [quiet]])
    assert [len(launch) for launch in judged] == [4, 2, 1]
    (judged,) = comparable([[quiet] * 9, [busy] * 2, [quiet]])
    assert [len(launch) for launch in judged] == [9, 2, 1]  # two launches are too few


def launched(rng: np.random.Generator, launches: int, rounds: int = 20) -> list[list[Timed]]:
    """Processes that differ by 5 % among each other, and by 1 % within."""
    speeds = rng.normal(1.0, 0.05, launches)
    return [[Timed(rng.normal(speed, 0.01, 5)) for _ in range(rounds)] for speed in speeds]


@pytest.mark.parametrize("launches", [3, 5, 10])
def test_interval_of_several_launches_covers_what_others_would_be(launches: int) -> None:
    rng = np.random.default_rng(6)
    found = [median_interval(launched(rng, launches), seed=0) for _ in range(200)]
    assert 182 <= sum(one.low <= 1.0 <= one.high for one in found) <= 199
    assert all(one.low <= one.median <= one.high for one in found)


def test_interval_of_one_launch_is_of_that_launch() -> None:
    rng = np.random.default_rng(6)
    found = [median_interval(launched(rng, 1), seed=0) for _ in range(50)]
    assert sum(one.low <= 1.0 <= one.high for one in found) < 25


def test_students_t_has_its_quantiles() -> None:
    """By the definition: 97.5 % of Student's density lie below."""
    for freedom, quantile in enumerate(_STUDENT, start=1):
        at = np.linspace(0, quantile, 20_001)
        height = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
        density = height * (1 + at**2 / freedom) ** (-(freedom + 1) / 2)
        assert np.trapezoid(density, at) == pytest.approx(0.475, abs=5e-5)
