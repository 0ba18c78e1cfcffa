"""The arena's driver: its servers, its rounds, and what it makes of samples; with toys instead of rivals."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.statistics import Timed

ARENA = Path(__file__).parent.parent.parent / "benchmarks" / "arena"
MODULES = ("recipes", "recipes.job", "rounds", "summary", "report")
TOY = """
import subprocess, sys, time
from job import Recipe

def made(seconds):
    def prepare(job):
        job.file("made").write_text("x")

    def open_model(job):
        print("a library says hello", flush=True)
        def call(feeds):
            time.sleep(seconds)
            return [feeds["x"] * 2]
        return call
    return Recipe(prepare, open_model)

def employ(job):
    subprocess.run([sys.executable, "-c", "import time; kept = bytearray(100 << 20); time.sleep(0.5)"])

def refuse(job):
    raise ValueError("no kernel for this")

def hang(job):
    time.sleep(60)

RECIPES = {"fast": made(0.0), "slow": made(0.003), "broken": Recipe(refuse, refuse), "hanging": Recipe(hang, hang)}
RECIPES["parent"] = Recipe(employ, made(0.0).open)
"""


@pytest.fixture(scope="module")
def arena() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ARENA))
        yield SimpleNamespace(**{name.replace("recipes.", ""): importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def toys(arena: SimpleNamespace, tmp_path: Path) -> Any:
    (tmp_path / "toy.py").write_text(TOY)
    for part in ("calibration", "judgement"):
        np.savez(tmp_path / f"{part}.npz", x=np.arange(9, dtype=np.float32).reshape(9, 1), labels=np.zeros(9))
    where = {"folder": str(tmp_path), "model": str(tmp_path), "source": "", "factory": "", "metric": "top1"}
    arena.job.Job(**where, transformer=False, max_drop=0.1, batch=4, threads=1).write(tmp_path / "job.json")
    server = str(ARENA / "recipes" / "server.py")

    def command(mode: str, recipe: str) -> list[str]:
        return [sys.executable, server, mode, str(tmp_path / "job.json"), f"toy:{recipe}"]

    def serve(recipe: str, limit: float = 30.0) -> Any:
        path = {"PYTHONPATH": str(tmp_path)}
        return arena.rounds.Server.start(recipe, command("serve", recipe), path, tmp_path / "log", limit)

    return SimpleNamespace(command=command, serve=serve, folder=tmp_path)


def test_a_server_times_and_answers_whole_batches_whatever_its_library_prints(toys: Any) -> None:
    server = toys.serve("slow")
    opened = server.request("open", warmup_seconds=0.02)
    block = server.request("block", seconds=0.03)
    assert opened["call_seconds"] >= 0.003
    assert len(block["seconds"]) == len(block["waited"]) >= 2
    assert min(block["seconds"]) >= 0.003
    assert server.request("predict", out=str(toys.folder / "out.npy")) == {"rows": 8}
    assert np.load(toys.folder / "out.npy").ravel().tolist() == [2.0 * row for row in range(8)]
    memory = server.request("memory")
    assert 0 <= memory["growth_bytes"] < memory["peak_bytes"]
    server.close()


@pytest.mark.parametrize(
    ("recipe", "limit", "told"), [("broken", 30.0, "ValueError: no kernel for this"), ("hanging", 0.5, "longer than")]
)
def test_a_rival_that_raises_or_hangs_is_ended_and_says_why(
    arena: SimpleNamespace, toys: Any, recipe: str, limit: float, told: str
) -> None:
    server = toys.serve(recipe, limit)
    with pytest.raises(arena.rounds.RivalFailed, match=told):
        server.request("open", warmup_seconds=0.0)
    assert server.process.returncode is not None


def test_rivals_find_what_the_models_import(
    arena: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.setattr(arena.rounds, "CHECKOUT", tmp_path)
    for _ in range(2):
        paths = arena.rounds.variables("torch", [tmp_path / "nets"], 1)["PYTHONPATH"].split(":")
        assert paths[0] == str(tmp_path / "nets")
        assert Path(paths[1], "enginesmith", "models").is_dir()
    assert arena.rounds.variables("", [], 1)["PYTHONPATH"] == ""


def test_the_whole_job_is_done_once_and_its_failure_is_kept(arena: SimpleNamespace, toys: Any) -> None:
    path = {"PYTHONPATH": str(toys.folder)}
    done = arena.rounds.prepare(toys.command("prepare", "fast"), path, toys.folder, 30.0)
    assert (done.failure, (toys.folder / "made").read_text()) == ("", "x")
    assert done.seconds > 0
    assert 2**20 < done.peak_bytes < 100 << 20
    assert arena.rounds.prepare(["false"], path, toys.folder, 30.0) == done
    (toys.folder / "prepared.json").unlink()
    assert arena.rounds.prepare(toys.command("prepare", "parent"), path, toys.folder, 30.0).peak_bytes > 100 << 20
    for recipe, limit, told in (("broken", 30.0, "no kernel for this"), ("hanging", 0.5, "longer than 0")):
        (toys.folder / "prepared.json").unlink()
        failed = arena.rounds.prepare(toys.command("prepare", recipe), path, toys.folder, limit)
        assert told in failed.failure


def test_servers_run_in_the_same_rounds_and_one_that_fails_leaves(arena: SimpleNamespace, toys: Any) -> None:
    names = ("fast", "slow", "broken")
    timings = {name: arena.rounds.Timing() for name in names}
    answers = {"slow": toys.folder / "slow.npy"}
    arena.rounds.run_launch({name: toys.serve(name) for name in names}, timings, 3, 0.01, 0.01, answers)
    assert [len(timings[name].launches) for name in names] == [1, 1, 0]
    assert [len(timings[name].launches[0]) for name in names[:2]] == [3, 3]
    assert timings["broken"].failure == "ValueError: no kernel for this"
    assert timings["slow"].memory["peak_bytes"] > 0
    assert np.load(answers["slow"]).shape == (8, 1)


def entrant(arena: SimpleNamespace, milliseconds: float, drop: float | None = 0.0, failure: str = "") -> Any:
    noise = np.random.default_rng(0).uniform(0.99, 1.01, 8)
    blocks = [[Timed(np.full(5, milliseconds / 1e3 * factor)) for factor in noise]]
    judged = (
        None
        if drop is None
        else Quality(metric="top1", output=None, value=1 - drop, baseline=1.0, drop=drop, samples=9)
    )
    timing = arena.rounds.Timing(launches=blocks, failure=failure)
    return arena.summary.Entrant(timing, arena.rounds.Prepared(milliseconds, 1), judged)


def test_the_fastest_within_the_allowed_loss_wins(arena: SimpleNamespace) -> None:
    cell = arena.summary.summarize(
        {
            "enginesmith": entrant(arena, 3.0),
            "lossy": entrant(arena, 1.0, drop=0.5),
            "best": entrant(arena, 2.0, drop=0.1),
            "unjudged": entrant(arena, 1.5, drop=None),
            "crashed": entrant(arena, 1.0, failure="it ended"),
        },
        max_drop=0.1,
    )
    rows = {row["rival"]: row for row in cell["rows"]}
    assert list(rows) == ["lossy", "unjudged", "best", "enginesmith"]
    assert (cell["winner"], cell["failures"]) == ("best", {"crashed": "it ended"})
    assert [rows[name]["allowed"] for name in rows] == [False, False, True, True]
    assert rows["enginesmith"]["times_the_winner"]["median"] == pytest.approx(1.5)
    assert rows["best"]["times_the_winner"] is None
    assert cell["ours"]["won"] is False
    assert cell["ours"]["reason"] == "best is 1.50 × as fast"
    assert (cell["ours"]["job_seconds"], cell["ours"]["median_rival_job_seconds"]) == (3.0, 1.5)


def test_what_is_far_slower_than_the_fastest_allowed_one_is_not_launched_again(arena: SimpleNamespace) -> None:
    speeds = {"enginesmith": 9.0, "lossy": 1.0, "best": 2.5, "near": 4.5, "far": 6.0}
    entrants = {name: entrant(arena, ms, drop=0.5 if name == "lossy" else 0.0) for name, ms in speeds.items()}
    assert arena.summary.list_hopeless(entrants, 0.1) == ["far"]
    assert arena.summary.list_hopeless({"lossy": entrants["lossy"]}, 0.1) == []
    entrants["best"].timing.launches.append(entrants["best"].timing.launches[0])
    rows = {row["rival"]: row for row in arena.summary.summarize(entrants, 0.1)["rows"]}
    assert (rows["best"]["launches"], rows["far"]["launches"]) == (2, 1)
    assert rows["far"]["times_the_winner"]["median"] == pytest.approx(2.4)


@pytest.mark.parametrize(
    ("ours", "allowed", "won", "reason"),
    [
        (None, True, True, "first"),
        ({"median": 1.02, "low": 0.99, "high": 1.05}, True, True, "within the interval of the first"),
        ({"median": 1.02, "low": 1.01, "high": 1.05}, True, False, "r is 1.02 × as fast"),
        (None, False, False, "it loses more than is allowed"),
    ],
)
def test_a_cell_is_won_first_or_within_the_interval_of_the_first(
    arena: SimpleNamespace, ours: dict[str, float] | None, allowed: bool, won: bool, reason: str
) -> None:
    row = {"rival": "enginesmith", "allowed": allowed, "times_the_winner": ours, "job_seconds": 2.0}
    rival = {"rival": "r", "allowed": True, "times_the_winner": None, "job_seconds": 1.0}
    judged = arena.summary.judge_ours({"winner": "r", "rows": [row, rival], "failures": {}})
    assert (judged["won"], judged["reason"]) == (won, reason)
    missing = arena.summary.judge_ours({"rows": [], "failures": {}})
    cells = [{"machine": name, "ours": one} for name, one in (("a", judged), ("b", missing), ("a", missing))]
    counted = arena.summary.count_by_machine(cells)
    assert counted["a"] == {"cells": 2, "won": int(won), "within_budget": int(allowed), "not_slower_to_make": 0}
    assert counted["b"]["cells"] == 1


def test_what_was_far_behind_in_all_cells_is_not_prepared_again(arena: SimpleNamespace) -> None:
    def cell(**ratios: float) -> dict[str, Any]:
        intervals = {name: {"low": ratio, "median": ratio + 1} for name, ratio in ratios.items()}
        return {"rows": [{"rival": name, "times_the_winner": each} for name, each in intervals.items()]}

    first = {"rows": [{"rival": "first", "times_the_winner": None}]}
    cells = [cell(near=3, far=5, changing=9, enginesmith=9, eager=9), cell(far=7, changing=2), first]
    assert arena.summary.find_far_behind([]) == {}
    assert arena.summary.find_far_behind(cells) == {"far": "it took 6.0 times as long as the winner in another cell"}


def test_the_report_lists_the_cells_that_were_not_won(arena: SimpleNamespace) -> None:
    entrants = {
        "enginesmith": entrant(arena, 3.0),
        "best": entrant(arena, 2.0),
        "gone": entrant(arena, 1.0, failure="x|y"),
    }
    cell = arena.summary.summarize(entrants, 0.1)
    cell |= {"model": "m", "batch": 1, "threads": 0, "max_drop": 0.1, "command": "c", "others": 0.0}
    cells = [{**cell, "machine": "AVX2"}, {**cell, "machine": "AMX"}]
    found = {"cells": cells, "count": arena.summary.count_by_machine(cells), "environments": {"e": ["p==1"]}}
    text = arena.report.markdown(found)
    assert "| AMX | 1 | 0 | 1 | 0 |" in text
    assert "| AVX2 | m, batch 1, all threads | best | best is 1.50 × as fast |" in text
    assert text.index("## AVX2") < text.index("### m, batch 1, all threads") < text.index("## AMX")
    assert "| **best** | 2 [" in text
    assert "| gone | – | | x/y |" in text
