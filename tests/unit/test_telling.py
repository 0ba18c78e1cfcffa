"""Who hears what happened to a step: people as it happens, and its log."""

import logging
from pathlib import Path

import pytest

from enginesmith.pipeline.execution.executor import StepRequest
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.store import retry


def test_notes_and_what_the_store_tells_stand_at_the_top_of_the_log(tmp_path: Path) -> None:
    said: list[str] = []
    step = plan(make({"model": "digits"})).steps[0]
    log = tmp_path / "logs" / "load.log"
    request = StepRequest(
        step, {}, log, lambda: None, lambda text: None, on_note=said.append, earlier_notes=("its entry is damaged",)
    )

    def carry_out() -> None:
        with request.with_notes() as noted:
            noted.on_note("a node was lost")
            log.parent.mkdir()
            log.write_text("what its process wrote\n")
            retry.notify("the store cannot be reached")
            raise ValueError("it fails of its own")

    with pytest.raises(ValueError, match="of its own"):
        carry_out()
    assert said == ["a node was lost", "the store cannot be reached"]
    noted = ("its entry is damaged", "a node was lost", "the store cannot be reached")
    assert log.read_text() == "".join(f"--- {text}\n" for text in noted) + "what its process wrote\n"


def test_where_nothing_happened_there_is_no_log(tmp_path: Path) -> None:
    step = plan(make({"model": "digits"})).steps[0]
    with StepRequest(step, {}, tmp_path / "load.log", lambda: None, lambda text: None).with_notes():
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_no_step_waits_for_is_on_standard_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), retry.notifications_to(pytest.fail):
        pass
    retry.notify("the store cannot be reached")
    assert caplog.messages == ["the store cannot be reached"]
