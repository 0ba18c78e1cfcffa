"""The order in which steps are looked up and done."""

import itertools
import logging
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import Field

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import NO_TIME, OVER_SHARE, StepError, StepKilled, StepTimeout
from enginesmith.pipeline.execution import local, scheduler
from enginesmith.pipeline.execution.events import Event, Outcome, Outcomes
from enginesmith.pipeline.execution.executor import Executor, Result, StepRequest
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.planning.plan import Step, StepRef
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store import retry
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.base import Inputs, Task


class Idle(Task):
    title: ClassVar[str] = "idle"
    produces: ClassVar[Kind] = "record"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        raise AssertionError


class Alone(Idle):
    exclusive: ClassVar[bool] = True


class Desk(Executor):
    """Knows steps whose names begin with ``known``; notes what goes on at the same time."""

    is_local = True
    slots = 1
    max_lookups = 4

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.at_once: list[tuple[str, ...]] = []
        self.together = threading.Barrier(1)
        self._now: list[str] = []
        self._lock = threading.Lock()

    def why_unavailable(self, place: Place) -> str:
        return ""

    def can_start(self, step: Step, running: Collection[Step]) -> bool:
        return True

    def allows_lookups(self, step: Step) -> bool:
        return not step.task.exclusive

    def lookup(self, request: StepRequest) -> Artifact | None:
        self._go_on(f"? {request.step.id}")
        return artifact() if request.step.id.startswith("known") else None

    def execute(self, request: StepRequest) -> Result:
        self._go_on(request.step.id)
        if request.step.id.startswith("bad"):
            raise StepError("it is bad")
        return Result(artifact(), cached=False)

    def _go_on(self, what: str) -> None:
        with self._lock:
            self._now.append(what)
            self.asked.append(what)
            self.at_once.append(tuple(self._now))
        if what.startswith("?"):
            self.together.wait(10)
        time.sleep(0.2 if what.startswith("slow") else 0.002)
        with self._lock:
            self._now.remove(what)

    def stop(self) -> None: ...

    def close(self) -> None: ...


def artifact() -> Artifact:
    return Artifact(kind="record", path=Path("x"), sha256="", bytes=0, signature=None, history=())


@pytest.fixture
def desk() -> Desk:
    return Desk()


def run(desk: Desk, *steps: Step, events: list[Event] | None = None, **options: Any) -> dict[str, Outcome]:
    told = events if events is not None else []
    return Runner(desk, lambda step: Path(step.id), listener=told.append).run(steps, **options)


def test_more_steps_are_looked_up_at_a_time_than_done(desk: Desk) -> None:
    desk.together = threading.Barrier(desk.max_lookups)
    events: list[Event] = []
    outcomes = run(desk, *(Step(f"{word}{n}", Idle()) for word in ("known", "new") for n in range(4)), events=events)
    assert [outcomes[name].cached for name in ("known0", "known3", "new0", "new3")] == [True, True, False, False]
    assert max(sum(name.startswith("?") for name in names) for names in desk.at_once) == desk.max_lookups
    assert max(sum(name[0] != "?" for name in names) for names in desk.at_once) == desk.slots
    assert sorted(event.step.id for event in events if event.kind == "finished") == sorted(outcomes)


def test_a_measurement_is_not_disturbed_by_look_ups(desk: Desk) -> None:
    steps = [
        Step(f"new{n}", Alone() if n % 3 == 0 else Idle(), {"x": f"new{n - 2}"} if n > 1 else {}) for n in range(12)
    ]
    outcomes = run(desk, *steps)
    assert all(outcome.good for outcome in outcomes.values())
    alone = {step.id for step in steps if step.task.exclusive}
    assert all(len(names) == 1 for names in desk.at_once if alone & set(names))


def test_a_store_far_away_is_asked_for_many_steps_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path))
    assert LocalExecutor(Store("memory://team"), 1).max_lookups > 8
    assert LocalExecutor(Store(tmp_path / "store"), 4).max_lookups == 1


@pytest.mark.parametrize(("limit", "last"), [(1000.0, "prosecute"), (None, "latency")])
def test_where_time_is_limited_what_latency_does_without_comes_after_it(
    desk: Desk, limit: float | None, last: str
) -> None:
    """Also where it could begin while latency waits for something else."""
    begun = list[str]()
    desk.slots = 1
    runner = Runner(
        desk,
        lambda step: Path(step.id),
        limit,
        lambda event: begun.append(event.step.id.kind) if event.kind == "finished" else None,
    )
    verify, other = Step(StepRef("verify", "a"), Idle()), Step(StepRef("verify", "b"), Idle())
    latency = Step(StepRef("latency"), Alone(), {"a": verify.id, "b": other.id})
    outcomes = runner.run([Step(StepRef("prosecute", "a"), Idle(), {"model": verify.id}), verify, other, latency])
    assert all(outcome.good for outcome in outcomes.values())
    assert begun[-1] == last


class Slow(Desk):
    """Looks the bad step up only once the slow one has begun."""

    slots = 2

    def __init__(self) -> None:
        super().__init__()
        self.slow_began = threading.Event()

    def lookup(self, request: StepRequest) -> Artifact | None:
        if request.step.id == "bad":
            assert self.slow_began.wait(30)
        return super().lookup(request)

    def execute(self, request: StepRequest) -> Result:
        if request.step.id == "slow":
            self.slow_began.set()
        return super().execute(request)


def test_what_is_looked_up_when_it_is_not_worth_doing_any_more_is_skipped() -> None:
    events: list[Event] = []
    later = [Step(f"{word}{n}", Idle()) for n in range(20) for word in ("known", "new")]
    steps = [Step("slow", Idle()), Step("bad", Idle()), *later, Step("last", Idle(), {"x": "new19"})]

    def give_up(new: Outcomes) -> dict[str, str]:
        return dict.fromkeys([step.id for step in steps], "it is bad") if "bad" in new else {}

    outcomes = run(Slow(), *steps, events=events, on_new=give_up)
    assert outcomes["bad"].status == "failed"
    assert outcomes["slow"].status == "done"
    assert {outcome.status for outcome in outcomes.values()} <= {"failed", "done", "skipped"}
    assert outcomes.keys() == {step.id for step in steps}
    ended = [event.outcome for event in events if event.outcome]
    assert [outcomes[outcome.step] for outcome in ended] == ended
    assert {outcome.reason for outcome in outcomes.values() if outcome.status == "skipped"} == {"it is bad"}


class Stoppable(Slow):
    """Ends the slow step where it is stopped in time."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = threading.Event()

    def execute(self, request: StepRequest) -> Result:
        if request.step.id == "bad":
            assert self.slow_began.wait(30)
        result = super().execute(request)
        if request.step.id == "slow" and self.stopped.wait(0.2):
            raise StepError("it was ended")
        return result

    def stop(self) -> None:
        self.stopped.set()


@pytest.mark.parametrize(("pointless", "after"), [("slow", ""), ("", ""), ("slow", "slow")])
def test_what_runs_is_ended_where_nothing_else_is_worth_doing(pointless: str, after: str) -> None:
    """Not where another step, as that of another run, waits for it."""
    desk, steps = Stoppable(), [Step("slow", Idle()), Step("bad", Idle())]
    steps += [Step("last", Idle(), {"x": after})] if after else []
    outcomes = run(desk, *steps, on_new=lambda new: {pointless: "it is bad"} if "bad" in new else {})
    ended = bool(pointless and not after)
    assert desk.stopped.is_set() is ended
    assert (outcomes["slow"].status, outcomes["slow"].reason) == (("skipped", "it is bad") if ended else ("done", ""))


class Elsewhere(Desk):
    """Another one does the second step meanwhile; the first look-up has something to tell."""

    max_lookups = 1

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        """What the clock of the scheduler says."""

    def lookup(self, request: StepRequest) -> Artifact | None:
        if request.step.id == "new":
            retry.notify("the store is away")
        again = f"? {request.step.id}" in self.asked
        super().lookup(request)
        return artifact() if again else None

    def execute(self, request: StepRequest) -> Result:
        result = super().execute(request)
        self.seconds += 60
        return result


def test_what_waited_for_its_turn_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Elsewhere()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: desk.seconds))
    outcomes = run(desk, Step("slow", Idle()), Step("later", Idle()))
    assert {name: outcome.cached for name, outcome in outcomes.items()} == {"slow": False, "later": True}
    assert desk.asked.count("? slow") == 1
    assert "later" not in desk.asked


def test_what_a_look_up_was_told_is_for_the_log_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    desk = Elsewhere()
    events: list[Event] = []
    run(desk, Step("new", Idle()), events=events)
    assert Path("new").read_text(encoding="utf-8") == "--- the store is away\n"
    assert [event.text for event in events if event.kind == "note"] == ["the store is away"]


def test_steps_of_a_search_are_not_begun_once_its_time_is_over(desk: Desk) -> None:
    """Results in the store are taken all the same, and the steps that measure existing variants are run."""
    runner = Runner(desk, lambda step: Path(step.id), search_seconds=0.0)
    late = Step(StepRef("new"), Idle(), search=True)
    after = Step(StepRef("after"), Idle(), {"model": late.id}, search=True)
    there = Step(StepRef("known"), Idle(), search=True)
    outcomes = runner.run([late, after, there, Step(StepRef("race"), Idle(), {}, {"a": late.id, "b": there.id})])
    ends = {name: outcome.status for name, outcome in outcomes.items()}
    assert ends == {"new": "skipped", "after": "skipped", "known": "done", "race": "done"}
    assert outcomes["new"].reason == outcomes["after"].reason == NO_TIME


def test_a_step_may_outlast_the_search_that_it_is_of(desk: Desk) -> None:
    runner = Runner(desk, lambda step: Path(step.id), search_seconds=0.0)
    steps = [Step(StepRef(name), Idle(), search=True) for name in ("new", "last resort")]
    first, needed = (step.id for step in steps)
    outcomes = runner.run(steps, on_new=lambda outcomes: runner.outlast_search([needed]) or {})  # type: ignore[func-returns-value]
    assert {name: outcome.status for name, outcome in outcomes.items()} == {first: "skipped", needed: "done"}


class Clock(Desk):
    """Each step takes ten seconds, or as long as it is given where it hangs."""

    max_lookups = 1

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.given = 0.0, dict[str, float | None]()

    def execute(self, request: StepRequest) -> Result:
        self.given[request.step.id] = limit = request.timeout_seconds
        assert limit is not None
        assert request.step.task.left_seconds == limit
        self.seconds += limit if request.step.id == "hangs" else min(limit, 10)
        if request.step.id == "hangs" or 0 < limit < 10:
            raise StepTimeout("it ran past its time limit")
        return super().execute(request)


def test_what_the_time_was_too_short_for_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the least that a step gets, and ended before the time was over."""
    desk = Clock()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: desk.seconds))
    runner = Runner(desk, lambda step: Path(step.id), 12.0, search_seconds=12.0)
    outcomes = runner.run([Step(StepRef("hangs"), Half())])
    assert desk.given == {"hangs": 10}
    assert (outcomes["hangs"].status, outcomes["hangs"].reason) == ("skipped", OVER_SHARE), "two seconds are left"


@pytest.mark.parametrize(
    ("kind", "status", "took"),
    [("build", "failed", 30), ("quality", "skipped", 30), ("prosecute", "skipped", 40)],
)
def test_a_search_goes_on_without_what_only_judges_where_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, kind: str, status: str, took: float
) -> None:
    """It had its share of the time that was left, and the variant is as usable as before."""

    class Hanging(Clock):
        def execute(self, request: StepRequest) -> Result:
            self.seconds += request.timeout_seconds or 0.0
            raise StepTimeout("it ran past its time limit")

    desk, step = Hanging(), Step(StepRef(kind, "a"), Half())
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: desk.seconds))
    for seconds, end in ((60.0, status), (None, "failed")):
        desk.seconds = 0.0
        outcomes = Runner(desk, lambda step: Path(step.id), 60.0, search_seconds=seconds).run([step])
        assert (desk.seconds, outcomes[step.id].status) == (took, end)
        assert (outcomes[step.id].reason == OVER_SHARE) == (end == "skipped"), "half of the time is left"


def test_what_is_done_again_has_the_time_that_is_left(desk: Desk) -> None:
    request = StepRequest(Step(StepRef("a"), Idle()), {}, Path("log"), lambda: None, lambda text: None)
    assert request.after(5.0) is request
    step = replace(request.step, task=Idle(left_seconds=6.0))  # and two seconds of grace
    limited = replace(request, step=step, timeout_seconds=8.0)
    again = limited.after(5.0)
    assert again
    assert (again.timeout_seconds, again.step.task.left_seconds) == (3.0, 1.0)
    late = limited.after(7.0)
    assert late
    assert (late.timeout_seconds, late.step.task.left_seconds) == (1.0, 0.0)
    assert limited.after(8.0) is None


def test_what_was_killed_is_done_again_in_the_time_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def work(executor: LocalExecutor, request: StepRequest, out: Path, partial: Path | None) -> None:
        given.append((request.timeout_seconds, request.step.task.left_seconds))
        raise StepKilled("its process was killed")

    monkeypatch.setattr(LocalExecutor, "_work", work)
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=itertools.count(0, 3).__next__))
    with LocalExecutor(Store(tmp_path / "store"), 1) as executor:
        for limit in (8.0, 3.0):
            step = Step(StepRef("a"), Idle(left_seconds=limit))
            request = StepRequest(step, {}, tmp_path / "log", lambda: None, lambda text: None, timeout_seconds=limit)
            with pytest.raises(StepKilled):
                executor.execute(request)
    assert given == [(8.0, 8.0), (5.0, 5.0), (3.0, 3.0)]


class Half(Idle):
    time_share: float = Field(0.5, exclude=True)


@pytest.mark.parametrize("searches", [True, False])
def test_what_is_left_of_the_time_limits_each_step(monkeypatch: pytest.MonkeyPatch, searches: bool) -> None:
    """A step that hangs has failed, unless it had all the time that was left."""
    desk = Clock()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: desk.seconds))
    runner = Runner(desk, lambda step: Path(step.id), 60.0, search_seconds=40.0 if searches else None)
    steps = [Step(StepRef("first"), Idle()), Step(StepRef("hangs"), Half())]
    steps += [Step(StepRef("next"), Idle()), Step(StepRef("last"), Half()), Step(StepRef("late"), Half())]
    outcomes = runner.run(steps)
    assert desk.given == {"first": 60, "hangs": 25, "next": 25, "last": 10, "late": 5}
    ends = {name: outcome.status for name, outcome in outcomes.items()}
    late = "skipped" if searches else "failed"
    assert ends == {"first": "done", "hangs": "failed", "next": "done", "last": "done", "late": late}
    assert (outcomes["late"].reason == NO_TIME) == searches


def test_a_search_that_is_late_measures_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race, what leads to the latencies, and accuracy have ten seconds each, and options none, which are kept."""
    desk = Clock()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: desk.seconds))
    names = (
        ("build", "a"),
        ("build", "b"),
        ("race",),
        ("stay", "a"),
        ("tune", "a"),
        ("verify", "a", "tuned"),
        ("latency",),
        ("quality", "a"),
        ("memory",),
    )
    steps = [Step(StepRef(*name), Idle()) for name in names]
    outcomes = Runner(desk, lambda step: Path(step.id), 10.0, search_seconds=10.0).run(steps)
    ends = {name for name, outcome in outcomes.items() if outcome.reason == NO_TIME}
    assert ends == {"build-b", "memory"}
    assert desk.given.pop("tune-a") == 0
    assert set(desk.given.values()) == {10}


class HalfAlone(Half):
    exclusive: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("kind", "limit"), [("race", 100), ("latency", 100), ("tune", 100), ("memory", 50), ("build", 50)]
)
def test_a_race_keeps_to_its_share_by_itself_and_has_time_to_end(
    monkeypatch: pytest.MonkeyPatch, desk: Desk, kind: str, limit: float
) -> None:
    given = []
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(desk, "execute", lambda request: given.append(request) or Desk.execute(desk, request))
    Runner(desk, lambda step: Path(step.id), 100.0, search_seconds=100.0).run([Step(StepRef(kind), HalfAlone())])
    assert [(request.step.task.left_seconds, request.timeout_seconds) for request in given] == [(50, limit)]
    assert given[0].step.task.grace_seconds == (30 if limit == 100 else 0)


@pytest.mark.parametrize("reordered", [True, False])
def test_the_last_of_the_plan_has_more_time_unless_the_order_was_changed(
    monkeypatch: pytest.MonkeyPatch, reordered: bool
) -> None:
    desk = Clock()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: desk.seconds))
    runner = Runner(desk, lambda step: Path(step.id), 110.0)
    steps = [Step(StepRef("first"), Idle()), Step(StepRef("last"), Half(time_share=0.9))]
    runner.run(steps, on_new=lambda new: runner.prefer(["last"]) or {} if reordered else {})
    assert desk.given["last"] == pytest.approx(50 if reordered else 90)


def test_some_of_a_limited_time_is_kept_for_trying_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what every result needs, nothing else begins in it, and what runs is ended before.

    Trying them may take ten seconds more to end.
    """

    class Lenient(Clock):
        def execute(self, request: StepRequest) -> Result:
            limit, grace = request.timeout_seconds, request.step.task.grace_seconds
            given.append((request.step.id, request.step.task.left_seconds, limit))
            assert limit == request.step.task.left_seconds + grace
            self.seconds += min(limit, 10)
            return Desk.execute(self, request)

    desk, given = Lenient(), list[tuple[str, float, float | None]]()
    desk.slots = 1
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: desk.seconds))
    names = (("build", "b"), ("memory", "a"), ("memory", "b"), ("memory", "c"), ("prosecute", "a"), ("prosecute", "b"))
    steps = [Step(StepRef("build", "a"), Idle())]
    steps += [Step(StepRef(*name), Idle(), search=name[0] == "build") for name in names]
    outcomes = Runner(desk, lambda step: Path(step.id), 40.0, search_seconds=40.0, kept_seconds=6.0).run(steps)
    assert given == [
        *(("build-a", 40, 40), ("build-b", 24, 24)),
        *(("memory-a", 14, 14), ("memory-b", 4, 4), ("prosecute-a", 6, 16)),
    ]
    ends = {name for name, outcome in outcomes.items() if outcome.reason == NO_TIME}
    assert ends == {"memory-c", "prosecute-b"}


def test_trials_of_a_search_share_a_part_of_the_time_which_begins_with_the_first_that_is_made_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trials in the store, of an earlier process, take none of it; another search has its share of the rest."""

    class Trials(Clock):
        def lookup(self, request: StepRequest) -> Artifact | None:
            return artifact() if request.step.id.subject == ("a", 1) else None

        def execute(self, request: StepRequest) -> Result:
            own.append((request.step.task.left_seconds, request.timeout_seconds))
            self.seconds += 20
            return Desk.execute(self, request)

    desk, own = Trials(), list[tuple[float, float | None]]()
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: desk.seconds))
    steps = [Step(StepRef("search", "a", number), Half()) for number in (1, 2, 3, 4, 5)]
    steps += [Step(StepRef("search", "b", 1), Half())]
    Runner(desk, lambda step: Path(step.id), 100.0).run(steps)
    assert own == [(50, 50), (30, 30), (10, 10), (-10, 10), (10, 10)]


def test_nothing_overtakes_a_measurement_that_waits_for_look_ups(desk: Desk) -> None:
    desk.slots = 2
    steps = (Step("first", Idle()), Step("measure", Alone()), Step("build", Idle()))
    told = Runner(desk, lambda step: Path(step.id))
    assert [told._may_start(step, (), {"x"}) for step in steps] == [True, None, True]


class Noting(Desk):
    """Writes a log, has something to note, and fails."""

    def lookup(self, request: StepRequest) -> Artifact | None:
        retry.notify("its entry is damaged")
        return None

    def execute(self, request: StepRequest) -> Result:
        request.on_note("a node was lost")
        request.log.parent.mkdir()
        request.log.write_text("what its process wrote\n")
        retry.notify("the store cannot be reached")
        raise StepError("it fails of its own")


def test_notes_and_what_the_store_tells_stand_at_the_top_of_the_log(tmp_path: Path) -> None:
    events: list[Event] = []
    log = tmp_path / "logs" / "new.log"
    outcomes = Runner(Noting(), lambda step: log, listener=events.append).run([Step("new", Idle())])
    assert outcomes["new"].reason == "it fails of its own"
    noted = ["its entry is damaged", "a node was lost", "the store cannot be reached"]
    assert [event.text for event in events if event.kind == "note"] == noted
    assert log.read_text() == "".join(f"--- {text}\n" for text in noted) + "what its process wrote\n"


def test_where_nothing_happened_there_is_no_log(desk: Desk, tmp_path: Path) -> None:
    assert Runner(desk, lambda step: tmp_path / step.id).run([Step("new", Idle())])["new"].good
    assert list(tmp_path.iterdir()) == []


def test_what_no_step_waits_for_is_on_standard_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), retry.notifications_to(pytest.fail):
        pass
    retry.notify("the store cannot be reached")
    assert caplog.messages == ["the store cannot be reached"]


def test_steps_that_have_not_begun_can_be_put_into_another_order(desk: Desk) -> None:
    desk.max_lookups = 1  # of several at once, any may end first
    runner = Runner(desk, lambda step: Path(step.id))

    def on_new(outcomes: Outcomes) -> dict[str, str]:
        if "first" in outcomes:
            runner.prefer(["late", "first", "middle", "unheard"])
        return {}

    after = {"model": StepRef("first")}
    steps = [
        Step(StepRef("first"), Idle()),
        *(Step(StepRef(name), Idle(), after) for name in ("middle", "early", "late")),
    ]
    runner.run([*steps, Step(StepRef("last"), Idle(), {"model": StepRef("late")})], on_new=on_new)
    assert [name for name in desk.asked if not name.startswith("?")] == ["first", "late", "early", "middle", "last"]


def test_steps_that_have_not_begun_can_get_another_task(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: dict[str, list[Task]] = {}

    def remember(request: StepRequest) -> Artifact | None:
        tasks.setdefault(request.step.id, []).append(request.step.task)
        return None

    monkeypatch.setattr(desk, "lookup", remember)
    monkeypatch.setattr(desk, "execute", lambda request: Result(remember(request) or artifact(), cached=False))
    runner = Runner(desk, lambda step: tmp_path / step.id)

    def on_new(outcomes: Outcomes) -> dict[str, str]:
        if "first" in outcomes:
            runner.change_task("late", Alone())
        return {}

    steps = [Step(StepRef("first"), Idle()), Step(StepRef("late"), Idle(), {"model": StepRef("first")})]
    runner.run(steps, on_new=on_new)
    assert tasks == {"first": [Idle(), Idle()], "late": [Alone(), Alone()]}
