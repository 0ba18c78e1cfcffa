"""What GitHub reads from a log: one line each, whatever the text is."""

from pathlib import Path

import pytest

from enginesmith.pipeline.commands.context import announce
from enginesmith.pipeline.report import gate


def test_annotations_are_one_line_each() -> None:
    found = gate.annotations("gate: a, b", ["too slow\n::error::made up\r100 %"], ["busy"])
    assert found == [
        "::error title=gate%3A a%2C b::too slow%0A::error::made up%0D100 %25",
        "::warning title=gate%3A a%2C b::busy",
    ]


def test_long_texts_are_cut() -> None:
    (line,) = gate.annotations("t", ["x" * 10_000], [])
    assert len(line) < 4_100


def test_the_summary_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    file.write_text("before\n")
    environment = {"GITHUB_STEP_SUMMARY": str(file)}
    gate.append_summary(environment, "# one\n")
    gate.append_summary(environment, "# two \ud800")
    assert file.read_text() == "before\n# one\n\n# two ?\n\n"
    gate.append_summary({}, "nowhere")
    gate.append_summary({"GITHUB_STEP_SUMMARY": ""}, "nowhere")


def test_only_their_runner_is_told() -> None:
    assert gate.is_here({"GITHUB_ACTIONS": "true"})
    assert not gate.is_here({})
    assert not gate.is_here({"GITHUB_ACTIONS": "false"})


def test_a_summary_that_cannot_be_written_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "missing" / "summary"))
    announce("gate", [], [], "# one\n")
    assert f"{tmp_path}/missing/summary" in capsys.readouterr().err
