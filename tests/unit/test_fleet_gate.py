"""Fleets where single runs are taken: gate entry by entry, compare, inspect, and what is refused with what to give."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from enginesmith import cli
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results import gate as gates
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.workflows import fleet

Make = Callable[..., None]
NAMES = ("digits@cpu", "digits@edge", "lenet@cpu", "lenet@edge")


@pytest.fixture
def make(made_fleets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a fleet of four entries, which take 0.5 ms where nothing else is said of them."""
    monkeypatch.chdir(tmp_path)

    def made(name: str, kinds: dict[str, Run | EnginesmithError | float] | None = None, **changes: Any) -> None:
        asked = made_fleets.fleet(**changes)
        entries = []
        for one in asked.entries():
            kind = (kinds or {}).get(one.name, 0.5)
            found = made_fleets.run(one, ms=kind) if isinstance(kind, float) else kind
            entries.append(made_fleets.entry(one, Path(name), found))
        records.write(made_fleets.record(asked, *entries), Path(name))

    return made


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, list(words))
    return done.exit_code, done.output


def test_every_entry_is_held_against_its_own_budgets_and_those_given(make: Make) -> None:
    make("fleet", overrides={"lenet@cpu": {"budgets": {"max_latency_ms": 0.1}}})
    code, text = said("gate", "fleet", "--max-size", "1MiB")
    assert code == 3
    assert [line for line in text.splitlines() if line.startswith("BROKEN")] == [
        "BROKEN: lenet@cpu: p50 latency is 0.5 ms, and has to be at most 0.1 ms"
    ]
    assert sum(line.startswith("held: ") for line in text.splitlines()) == 4
    assert "fleet: 1 of 4 entries broken: lenet@cpu" in text
    code, text = said("gate", "fleet", "--max-latency", "1ms")
    assert (code, text.splitlines()) == (0, [
        *(f"held: {name}: p50 latency is 0.5 ms, and has to be at most 1 ms" for name in NAMES),
        "fleet: all 4 held, of 4 entries",
    ])  # fmt: skip
    make("other")
    assert said("gate", "other")[1].splitlines()[-1] == "other: nothing was judged"


def test_what_came_to_nothing_is_broken(make: Make, made_fleets: ModuleType) -> None:
    make("fleet", {"lenet@cpu": made_fleets.ERRORS[2], "lenet@edge": made_fleets.ERRORS[0]})
    code, text = said("gate", "fleet", "--max-latency", "1ms", "--json")
    found = json.loads(text)
    assert (code, found["schema"], found["passed"]) == (3, "enginesmith.fleet-gate/1", False)
    assert {name: [one["text"] for one in gate["verdicts"] if not one["passed"]] for name, gate in
            found["entries"].items()} == {
        "digits@cpu": [],
        "digits@edge": [],
        "lenet@cpu": ["failed: aten::odd cannot be exported"],
        "lenet@edge": ["lacking: no node has the accelerator L4"],
    }  # fmt: skip


def test_what_was_not_ended_is_broken_whatever_its_folder_has(make: Make) -> None:
    make("fleet")
    record = records.read(Path("fleet"))
    pending = [one.model_copy(update={"status": "pending", "run": None, "reason": ""}) for one in record.entries]
    records.write(record.model_copy(update={"entries": tuple(pending)}), Path("fleet"))
    assert Path("fleet/runs/digits@cpu/run.json").is_file()
    code, text = said("gate", "fleet", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")
    assert code == 3
    assert "BROKEN: digits@cpu: pending: it was not ended" in text
    assert not Path("base").exists()


def test_runs_that_another_fleet_took_over_are_not_replaced(make: Make) -> None:
    make("before")
    make("after")
    shutil.rmtree("after/runs/lenet@cpu")
    Path("after/runs/lenet@cpu").symlink_to(Path("before/runs/lenet@cpu").resolve())
    code, text = said("gate", "after", "--baseline", "before", "--update-baseline", "--max-latency", "1ms")
    assert code == 2
    assert "before holds after/runs/lenet@cpu itself" in text
    assert "give another folder" in text


def test_a_baseline_is_a_fleet(make: Make) -> None:
    make("before")
    assert said("gate", "before", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")[0] == 0
    assert sorted(path.name for path in Path("base/runs").iterdir()) == list(NAMES)
    make("after", {"digits@cpu": 0.6}, models={"digits": {}, "lenet": {}, "mobilenet_v2": {}})
    code, text = said("gate", "after", "--baseline", "base", "--no-measure")
    broken = [line for line in text.splitlines() if line.startswith("BROKEN")]
    assert (code, len(broken)) == (3, 1)
    assert broken[0].startswith("BROKEN: digits@cpu: latency is +20.0%")
    assert "note: mobilenet_v2@cpu: the baseline has no run of it" in text
    assert said("gate", "after", "--baseline", "base", "--update-baseline", "--max-latency", "0.55ms")[0] == 3
    assert len(records.read(Path("base")).entries) == 4, "a broken fleet replaces nothing"
    code, text = said("gate", "after", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")
    assert (code, "after is the baseline in base now" in text) == (0, True)
    assert len(records.read(Path("base")).entries) == 6


def test_whose_measurement_it_is_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make("fleet")
    heard: list[str] = []
    demands = gates.Demands(records.read(Path("fleet")).fleet.entries()[0].recipe.budgets, progress=heard.append)
    real = gates.gate

    def speaking(folder: Path, demands: gates.Demands, **rest: Any) -> Any:
        demands.progress("look 1")
        return real(folder, demands, **rest)

    monkeypatch.setattr(gates, "gate", speaking)
    fleet.gate(Path("fleet"), lambda recipe: demands)
    assert heard == [f"{name}: look 1" for name in NAMES]


def test_two_fleets_are_compared(make: Make) -> None:
    make("before")
    make("after", {"digits@cpu": 0.6})
    code, text = said("compare", "before", "after", "-o", "compare.md")
    assert code == 0
    assert "since the last fleet: held against ../before" in text
    assert "slower +20 %" in text
    assert "| digits@cpu | onnxruntime-int8 | p50 at batch 1, ms | 0.5 | 0.6 |" in Path("compare.md").read_text()
    document = json.loads(said("compare", "before", "after", "--json")[1])
    assert (document["schema"], document["last"]["path"]) == (records.SCHEMA, "../before")
    assert records.read(Path("after")).last is None, "what is in the folder stays as it is"


def test_a_fleet_is_inspected(make: Make, made_fleets: ModuleType) -> None:
    make("fleet", {"lenet@cpu": made_fleets.ERRORS[2]})
    code, text = said("inspect", "fleet")
    assert code == 0
    assert "kind: fleet\n" in text
    assert "  digits@cpu: done: onnxruntime-int8\n" in text
    assert "  lenet@cpu: failed: aten::odd cannot be exported\n" in text
    assert "runs: fleet/runs\n" in text
    assert json.loads(said("inspect", "fleet/fleet.json", "--json")[1])["kind"] == "fleet"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("gate fleet --variant eager", "--variant is of one run: give one of those in fleet/runs"),
        ("gate fleet --update-baseline", "needs --baseline DIR"),
        ("gate fleet --max-latency -1ms", "cannot read the duration"),
        ("gate fleet --baseline fleet --update-baseline", "fleet holds fleet itself"),
        ("gate fleet --baseline full --update-baseline", "full is there already, and is no baseline"),
        ("gate fleet --baseline full/notes --update-baseline", "full/notes is a file"),
        ("gate fleet --baseline fleet/runs/digits@cpu", "is a single run, and a fleet is needed here"),
        ("gate fleet/runs/digits@cpu --baseline fleet", "give one of its own: fleet/runs/digits@cpu, fleet/runs/"),
        ("package fleet -f bundle -o bundle", "fleet is a fleet, and this takes single runs"),
        ("compare fleet fleet/runs/digits@cpu", "is a single run, and a fleet is needed here"),
        ("compare fleet fleet fleet", "two at a time"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Make, words: str, told: str) -> None:
    make("fleet")
    Path("full").mkdir()
    Path("full/notes").touch()
    code, text = said(*words.split())
    assert (code, told in text) == (2, True), text
