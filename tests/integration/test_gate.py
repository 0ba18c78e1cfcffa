"""The gate on real runs: engines measured again side by side, baselines kept, and what nobody should give it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
Optimized = Callable[..., Path]
QUICK = ("--batch", "1", "--objective", "size", "--measure-time", "0.3s", "--no-memory")


@pytest.fixture(scope="module")
def fast(optimized: Optimized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the zoo's smallest model."""
    return optimized(tmp_path_factory.mktemp("gate") / "fast", "digits", *QUICK)


@pytest.fixture(scope="module")
def slow(optimized: Optimized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the same in an engine that nothing is made faster in."""
    words = ("--graph-optimization", "disabled", *QUICK)
    return optimized(tmp_path_factory.mktemp("gate") / "slow", "digits", *words)


@pytest.mark.thorough
def test_a_slower_engine_is_caught_by_measuring_both_again(cli: Cli, tmp_path: Path, fast: Path, slow: Path) -> None:
    kept = tmp_path / "kept"
    updated = cli("gate", fast, "--baseline", kept, "--update-baseline")
    assert updated.code == 0, updated.text
    assert "is the baseline" in updated.stdout

    answer = cli("gate", slow, "--baseline", kept, "--measure-time", "3s", "--json")
    latency = next(one for one in json.loads(answer.stdout)["verdicts"] if one["name"] == "latency_ms")
    assert answer.code == 3
    assert not latency["passed"]
    assert latency["basis"].startswith("measured side by side now")
    assert latency["change"]["low"] > 1.05
    assert "iteration 1" in answer.stderr

    answer = cli("gate", fast, "--baseline", slow, "--measure-time", "1s", "--json", "--quiet")
    latency = next(one for one in json.loads(answer.stdout)["verdicts"] if one["name"] == "latency_ms")
    assert latency["passed"], latency
    assert answer.stderr == ""

    same = cli("gate", fast, "--baseline", kept)
    assert same.code == 0, same.text
    assert "byte for byte" in same.stdout


@pytest.mark.thorough
def test_an_engine_that_the_run_did_not_make_is_not_loaded(cli: Cli, tmp_path: Path, fast: Path, slow: Path) -> None:
    shutil.copytree(fast, tmp_path / "fast")
    (weights,) = (tmp_path / "fast" / "variants").glob("*/model.onnx")
    weights.write_bytes(weights.read_bytes() + b" ")
    answer = cli("gate", slow, "--baseline", tmp_path / "fast")
    assert "missing, or not what the run made" in answer.stdout
    assert "from what both runs stored" in answer.stdout
    again = cli("gate", fast, "--baseline", tmp_path / "fast")
    assert "byte for byte" not in again.stdout, "that the digests were the same says nothing of the files"


def test_github_is_told_a_broken_budget(cli: Cli, tmp_path: Path, fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    answer = cli("gate", fast, "--max-latency", "1us", "--max-size", "1GiB")
    assert answer.code == 3
    assert [line for line in answer.stdout.splitlines() if line.startswith("FAILED: p50 latency")]
    assert [line for line in answer.stdout.splitlines() if line.startswith("::error title=gate::p50 latency")]
    assert "| p50 latency (budget) | **failed** | p50 latency is " in summary.read_text()
    assert "::error" not in cli("gate", fast, "--max-latency", "1us", "--json").stdout


def test_what_makes_no_sense_is_refused(cli: Cli, tmp_path: Path, fast: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    for words, said in (
        ((tmp_path / "nowhere",), "there is no run"),
        ((fast, "--baseline", other), "there is no run"),
        ((fast, "--baseline", other, "--update-baseline"), "is no baseline"),
        ((fast, "--baseline", fast, "--update-baseline"), "itself"),
        ((fast, "--update-baseline"), "needs --baseline"),
        ((fast, "--tolerance", "5"), "in per cent"),
        ((fast, "--tolerance", "-5%"), "cannot read the tolerance"),
        ((fast, "--max-latency", "-1ms"), "cannot read the duration"),
        ((fast, "--max-memory", "0"), "greater than 0"),
        ((fast, "--measure-time", "0s"), "no time"),
        ((fast, "--variant", "onnxruntime-fp23"), "did you mean"),
    ):
        answer = cli("gate", *words)
        assert answer.code == 2, (words, answer.text)
        assert said in answer.text, (words, answer.text)
    assert (other / "notes.txt").read_text() == "mine"
