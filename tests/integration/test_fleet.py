"""Fleets through the command line: shared steps, entries that fail beside others that do not, what is taken over."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
NETS = Path(__file__).parent.parent / "data" / "nets.py"
RECIPE = {
    "precisions": ["fp32"],
    "batch": [1],
    "seed": 8,
    "export": {"exporter": "torchscript"},
    "measure": {"memory": False, "seconds": 0.2},
    "prosecute_seconds": 0,
}
"""With a seed of its own: other tests leave what they made of these networks in the same store."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two networks, one of them in two kinds, and one that is not there; one of three targets has no such GPU."""
    path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    models = {
        "narrow": {"model": f"{NETS}:mlp", "targets": ["here", "there", "b200"]},
        "wide": {"model": f"{NETS}:mlp(width=32)", "targets": ["here"]},
        "gone": {"model": "nowhere.py:build", "targets": ["here"]},
    }
    targets: dict[str, Any] = {
        "here": {},
        "there": {"recipe": {"precisions": ["fp32", "int8-dynamic"]}},
        "b200": {"accelerator": "B200"},
    }
    path.write_text(json.dumps({"recipe": RECIPE, "models": models, "targets": targets}))
    return path


@pytest.fixture(scope="module")
def fleet(file: Path, store: Path, made_fleet: Callable[..., tuple[int, dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
    """The whole of it: its exit code and its record."""
    return made_fleet(file, "--store", store, "--out", file.parent / "first")


@pytest.fixture(scope="module")
def made_fleet() -> Callable[..., tuple[int, dict[str, Any]]]:
    from click.testing import CliRunner

    from enginesmith.cli import main

    def made(*words: object) -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(main, ["optimize", *map(str, words), "--quiet", "--json"])
        return done.exit_code, json.loads(done.stdout)

    return made


def by_name(record: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry for entry in record["entries"]}


def test_what_fails_or_is_lacking_stops_nothing_else(fleet: tuple[int, dict[str, Any]], file: Path) -> None:
    code, record = fleet
    found = by_name(record)
    assert code == 1
    assert {name: entry["status"] for name, entry in found.items()} == {
        "narrow@here": "done",
        "narrow@there": "done",
        "narrow@b200": "lacking",
        "wide@here": "done",
        "gone@here": "failed",
    }
    assert "nowhere.py" in found["gone@here"]["reason"]
    assert "B200" in found["narrow@b200"]["reason"] or "GPU" in found["narrow@b200"]["reason"]
    assert f"`enginesmith resume {file.parent / 'first'} --store " in found["narrow@b200"]["remedy"]
    page = (file.parent / "first" / "fleet.html").read_text()
    assert "runs/narrow%40here/report.html" in page
    assert (file.parent / "first" / "runs" / "narrow@here" / "report.html").is_file()


def test_what_entries_share_is_done_once(fleet: tuple[int, dict[str, Any]], file: Path) -> None:
    found = by_name(fleet[1])
    assert found["narrow@here"]["reused"] == 0
    runs = {name: file.parent / "first" / "runs" / name for name in ("narrow@here", "narrow@there", "wide@here")}
    logs = {name: {path.stem for path in (folder / "logs").glob("*.log")} for name, folder in runs.items()}
    assert "export" in logs["narrow@here"]
    assert "export" not in logs["narrow@there"]
    assert "export" in logs["wide@here"]
    shared = [json.loads((folder / "run.json").read_text()) for folder in runs.values()]
    histories = [[entry["step"] for entry in run["variants"][0]["history"]] for run in shared]
    assert histories[0] == histories[1] == histories[2]


@pytest.mark.thorough
def test_the_same_again_is_answered_from_the_store(
    fleet: tuple[int, dict[str, Any]], file: Path, store: Path, made_fleet: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    code, record = made_fleet(
        file, "--store", store, "--out", file.parent / "again", "--only", "narrow@here", "--only", "narrow@there"
    )
    assert code == 0
    done = by_name(record)
    assert set(done) == {"narrow@here", "narrow@there"}
    assert all(entry["reused"] == entry["steps"] > 0 for entry in done.values())


@pytest.mark.thorough
def test_only_what_has_changed_is_done(
    fleet: tuple[int, dict[str, Any]], file: Path, store: Path, made_fleet: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    changed = json.loads(file.read_text(encoding="utf-8"))
    changed["models"]["wide"]["recipe"] = {"batch": [2]}
    other = file.with_name("changed.yaml")
    other.write_text(json.dumps(changed))
    since = ("--changed-since", file.parent / "first", "--only", "*@here")
    code, record = made_fleet(other, "--store", store, "--out", file.parent / "changed", *since)
    found = by_name(record)
    assert code == 1
    assert found["narrow@here"]["taken_from"]
    assert not found["wide@here"]["taken_from"]
    assert "recipe" in found["wide@here"]["done_because"]
    assert (file.parent / "changed" / "runs" / "narrow@here" / "report.html").is_file()


@pytest.mark.thorough
def test_a_fleet_is_gone_on_with(fleet: tuple[int, dict[str, Any]], file: Path, cli: Cli) -> None:
    done = cli("resume", file.parent / "first", "--json", "--quiet")
    assert done.code == 1
    assert by_name(json.loads(done.stdout)).keys() == by_name(fleet[1]).keys()
