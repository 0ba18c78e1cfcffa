"""Test what is told while a run is at work: lines of steps, what runs for long, and the time that is left."""

import time
from pathlib import Path

import pytest

from enginesmith.pipeline.artifact import Artifact, HistoryEntry
from enginesmith.pipeline.execution.events import Event, Outcome
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import progress
from enginesmith.pipeline.report.progress import _Board


def test_what_happened_to_a_step_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    step = plan(resolve_recipe(make({"model": "digits"}))).steps[0]
    with progress.show_progress() as listener:
        listener(Event("started", step))
        listener(Event("progress", step, "half of it"))
        listener(Event("note", step, "a node was lost; it is run again"))
    lost = "load: a node was lost; it is run again"
    assert capsys.readouterr().err.splitlines() == ["load: started", lost]
    with progress.show_progress(quiet=True) as listener:
        listener(Event("started", step))
        listener(Event("note", step, "a node was lost; it is run again"))
    assert capsys.readouterr().err.splitlines() == [lost]


def test_skipped_steps_are_counted_and_a_search_that_began_ends(capsys: pytest.CaptureFixture[str]) -> None:
    steps = plan(resolve_recipe(make({"model": "digits", "precisions": ["int8"]}))).steps
    first, second, third, fourth = [step for step in steps if step.task.title == "search"][:4]
    over = HistoryEntry(step="search", parameters={}, tools={}, seconds=0.1, host_peak_bytes=None, effect="it is over")
    made = Artifact(kind="record", path=Path("r.json"), sha256="1", bytes=0, history=(over,))
    with progress.show_progress() as listener:
        listener(Event("started", first))
        for step in (first, second):
            listener(Event("finished", step, outcome=Outcome(step.id, "done", made)))
        for step in (third, fourth):  # that it is over is told once
            listener(Event("started", step))
            listener(Event("finished", step, outcome=Outcome(step.id, "done", made)))
        for step in steps[:3]:
            listener(Event("finished", step, outcome=Outcome(step.id, "skipped", reason="export failed")))
        listener(Event("planned", fourth))
        listener(Event("started", fourth))
    assert capsys.readouterr().err.splitlines() == [
        f"{first.id}: started",
        f"{first.id}: 0.1 s  it is over",
        f"{third.id}: started",
        f"{third.id}: 0.1 s  it is over",
        "skipped: 3 steps, as they need one that did not succeed",
        f"{fourth.id}: started",
    ]


def test_a_step_that_is_planned_again_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    step = plan(resolve_recipe(make({"model": "digits"}))).steps[0]
    with progress.show_progress() as listener:
        listener(Event("planned", step))
        listener(Event("finished", step, outcome=Outcome(step.id, "skipped", reason="another one failed")))
        listener(Event("planned", step))
        listener(Event("started", step))
    assert capsys.readouterr().err.splitlines() == [
        "skipped: 1 step, as it needs one that did not succeed",
        "load: started",
    ]


def test_a_heartbeat_names_only_what_runs_for_long() -> None:
    board = _Board()
    for step, seconds in zip(plan(resolve_recipe(make({"model": "digits"}))).steps, (40, 1), strict=False):
        line = board.take(Event("started", step))
        assert line
        line.started, line.text = time.monotonic() - seconds, "half of it"
    assert [text.partition(" for")[0] for text in board.describe_running()] == ["load: running"]


def test_overall_progress_has_the_time_left_where_every_step_left_is_known() -> None:
    board = _Board()
    steps = plan(resolve_recipe(make({"model": "digits", "batch": [1, 8], "measure": {"seconds": 20}}))).steps
    latency = next(step for step in steps if step.task.title == "latency")
    memory = [step for step in steps if step.task.title == "memory"]
    took = HistoryEntry(step="memory", parameters={}, tools={}, seconds=3.0, host_peak_bytes=None, effect="")
    made = Artifact(kind="record", path=Path("r.json"), sha256="", bytes=0, history=(took,))
    for step in (latency, *memory[:2]):
        assert board.take(Event("planned", step)) is None
    assert board.overall() == "0 of 3 steps"  # nobody knows how long memory takes
    board.take(Event("started", memory[0]))
    board.take(Event("finished", memory[0], outcome=Outcome(memory[0].id, "done", made)))
    assert board.overall() == "1 of 3 steps, about 43 s left"
