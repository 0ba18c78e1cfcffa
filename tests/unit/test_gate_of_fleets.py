"""The gate of a fleet, entry by entry, and what a gate leaves in the folder that it judged."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import fleets
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.report.markdown import plain
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results import gate as gates
from enginesmith.pipeline.results import run as documents
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.workflows import fleet
from gates import record, said, write

Make = Callable[..., None]
NAMES = ("digits@cpu", "digits@edge", "lenet@cpu", "lenet@edge")


@pytest.fixture
def make_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a fleet of four entries, which take 0.5 ms where nothing else is said of them."""
    monkeypatch.chdir(tmp_path)

    def made(name: str, kinds: dict[str, Run | EnginesmithError | float] | None = None, **changes: Any) -> None:
        asked = fleets.fleet(**changes)
        entries = []
        for one in asked.entries():
            kind = (kinds or {}).get(one.name, 0.5)
            found = fleets.run(one, ms=kind) if isinstance(kind, float) else kind
            entries.append(fleets.entry(one, Path(name), found))
        records.write(fleets.record(asked, *entries), Path(name))

    return made


def test_every_entry_is_held_against_its_own_budgets_and_those_given(make_fleet: Make) -> None:
    make_fleet("fleet", overrides={"lenet@cpu": {"budgets": {"max_latency_ms": 0.1}}})
    code, text = said("gate", "fleet", "--max-size", "1MiB")
    assert code == 3
    assert [line for line in text.splitlines() if line.startswith("FAILED")] == [
        "FAILED: lenet@cpu: p50 latency is 0.5 ms, and has to be at most 0.1 ms"
    ]
    assert sum(line.startswith("passed: ") for line in text.splitlines()) == 4
    assert "fleet: 4 passed, 1 failed; the gate fails for 1 of 4 entries: lenet@cpu" in text
    code, text = said("gate", "fleet", "--max-latency", "1ms")
    assert (code, text.splitlines()) == (
        0,
        [
            *(f"passed: {name}: p50 latency is 0.5 ms, and has to be at most 1 ms" for name in NAMES),
            "fleet: all 4 passed, of 4 entries",
        ],
    )
    make_fleet("other")
    assert said("gate", "other")[1].splitlines()[-1] == "other: nothing was judged"


def test_what_came_to_nothing_is_broken(make_fleet: Make) -> None:
    make_fleet("fleet", {"lenet@cpu": fleets.ERRORS[2], "lenet@edge": fleets.ERRORS[0]})
    code, text = said("gate", "fleet", "--max-latency", "1ms", "--json")
    found = json.loads(text)
    assert (code, found["schema"], found["passed"]) == (3, "enginesmith.fleet-gate/1", False)
    assert {
        name: [one["text"] for one in gate["verdicts"] if not one["passed"]] for name, gate in found["entries"].items()
    } == {
        "digits@cpu": [],
        "digits@edge": [],
        "lenet@cpu": ["aten::odd cannot be exported"],
        "lenet@edge": ["not available: no node has the accelerator L4"],
    }


def test_what_was_not_ended_is_broken_whatever_its_folder_has(make_fleet: Make) -> None:
    make_fleet("fleet")
    record = records.read(Path("fleet"))
    pending = [one.model_copy(update={"status": "pending", "run": None, "reason": ""}) for one in record.entries]
    records.write(record.model_copy(update={"entries": tuple(pending)}), Path("fleet"))
    assert Path("fleet/runs/digits@cpu/run.json").is_file()
    code, text = said("gate", "fleet", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")
    assert code == 3
    assert "FAILED: digits@cpu: it was not ended\n" in text
    assert not Path("base").exists()


def test_runs_that_another_fleet_took_over_are_not_replaced(make_fleet: Make) -> None:
    make_fleet("before")
    make_fleet("after")
    shutil.rmtree("after/runs/lenet@cpu")
    Path("after/runs/lenet@cpu").symlink_to(Path("before/runs/lenet@cpu").resolve())
    code, text = said("gate", "after", "--baseline", "before", "--update-baseline", "--max-latency", "1ms")
    assert code == 2
    assert "before holds after/runs/lenet@cpu itself" in text
    assert "give another folder" in text


def test_a_baseline_is_a_fleet(make_fleet: Make) -> None:
    make_fleet("before")
    assert said("gate", "before", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")[0] == 0
    assert sorted(path.name for path in Path("base/runs").iterdir()) == list(NAMES)
    make_fleet("after", {"digits@cpu": 0.6}, models={"digits": {}, "lenet": {}, "mobilenet_v2": {}})
    code, text = said("gate", "after", "--baseline", "base", "--no-measure")
    broken = [line for line in text.splitlines() if line.startswith("FAILED")]
    assert (code, len(broken)) == (3, 1)
    assert broken[0].startswith("FAILED: digits@cpu: latency is +20.0%")
    assert "note: mobilenet_v2@cpu: the baseline has no run of it" in text
    assert said("gate", "after", "--baseline", "base", "--update-baseline", "--max-latency", "0.55ms")[0] == 3
    assert len(records.read(Path("base")).entries) == 4, "a broken fleet replaces nothing"
    code, text = said("gate", "after", "--baseline", "base", "--update-baseline", "--max-latency", "1ms")
    assert (code, "after is the baseline in base now" in text) == (0, True)
    assert len(records.read(Path("base")).entries) == 6


@pytest.mark.parametrize(("changes", "options", "code"), [
    ({}, (), 0), ({}, ("--strict",), 3), ({"only": ("digits@*",)}, ("--strict",), 0)
])  # fmt: skip
def test_an_entry_of_the_baseline_that_is_gone_is_told(
    make_fleet: Make, changes: dict[str, Any], options: tuple[str, ...], code: int
) -> None:
    make_fleet("base")
    make_fleet("after", models={"digits": {}})
    path = Path("after", "fleet.json")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    exit_code, text = said("gate", "after", "--baseline", "base", "--no-measure", "--any-machine", *options)
    told = [line for line in text.splitlines() if "the baseline has this entry, and the fleet does not" in line]
    assert [line.split(": ")[1] for line in told] == ([] if changes else ["lenet@cpu", "lenet@edge"])
    assert exit_code == code


def test_whose_measurement_it_is_is_told(make_fleet: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fleet("fleet")
    heard: list[str] = []
    demands = gates.Demands(records.read(Path("fleet")).fleet.entries()[0].recipe.budgets, progress=heard.append)
    real = gates.gate

    def speaking(folder: Path, demands: gates.Demands, **rest: Any) -> Any:
        demands.progress("look 1")
        return real(folder, demands, **rest)

    monkeypatch.setattr(gates, "gate", speaking)
    fleet.gate(Path("fleet"), lambda recipe: demands)
    assert heard == [f"{name}: look 1" for name in NAMES]


def test_two_fleets_are_compared(make_fleet: Make) -> None:
    make_fleet("before")
    make_fleet("after", {"digits@cpu": 0.6})
    code, text = said("compare", "before", "after", "-o", "compare.md")
    assert code == 0
    assert "since the last fleet: compared with ../before" in text
    assert "slower +20 %" in text
    assert "| digits@cpu | onnxruntime-int8 | p50 at batch 1, ms | 0.5 | 0.6 |" in Path("compare.md").read_text(
        encoding="utf-8"
    )
    document = json.loads(said("compare", "before", "after", "--json")[1])
    assert (document["schema"], document["last"]["path"]) == (records.SCHEMA, "../before")
    assert records.read(Path("after")).last is None, "what is in the folder stays as it is"


def test_a_fleet_is_inspected(make_fleet: Make) -> None:
    make_fleet("fleet", {"lenet@cpu": fleets.ERRORS[2]})
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
def test_what_makes_no_sense_is_refused(make_fleet: Make, words: str, told: str) -> None:
    make_fleet("fleet")
    Path("full").mkdir()
    Path("full/notes").touch()
    code, text = said(*words.split())
    assert (code, told in text) == (2, True), text


# What a gate leaves in the folder that it judged.

NAMES_OF_REPORTS = ("report.html", "report.md", "junit.xml")
EVIL = "<img src=x> | [a](javascript:b) @team ![i](http://h) ]]></failure> # `x`\n# head"


def cases(folder: Path) -> dict[str, str]:
    """Outcome of each test case of a gate."""
    root = ElementTree.parse(folder / "junit.xml").getroot()
    found = [case for case in root.iter("testcase") if str(case.get("classname")).endswith("gate")]
    outcomes = [(case, next(iter(case), None)) for case in found]
    return {f"{case.get('classname')}: {case.get('name')}": "" if one is None else one.tag for case, one in outcomes}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_reports_show_the_gate_until_the_run_changes(tmp_path: Path) -> None:
    row = record().latency[0].model_copy(update={"launches": 1})
    base, run = write(tmp_path / "base", record(latency=(row,))), write(tmp_path / "run", record(p50_ms=0.99))
    (run / "notes.txt").write_text("mine")
    before = everything(tmp_path)
    words = ["gate", str(run), "--baseline", str(base), "--no-measure", "--max-size", "1B", "--max-memory", "1GiB"]
    code, text = said(*words)
    assert code == 3
    after = everything(tmp_path)
    assert after.keys() - before.keys() == {f"run/{name}" for name in ("gate.json", *NAMES_OF_REPORTS)}
    page = (run / "report.html").read_text()
    assert "a of " in page.partition("What did the last gate judge?")[2].partition("<section")[0]
    assert text.count("not judged:") == 1
    assert "the baseline has 1" in text
    assert {name: after[name] for name in before} == before
    report = (run / "report.md").read_text()
    assert report.startswith("# run\n\n## Gate: failed\n\na of ")
    assert report.index("| size (budget) | **failed** | size is 1000 B") < report.index(
        "| **not judged** | by its estimate alone"
    )
    assert "| peak memory (budget) | passed |" in report
    assert report.index("## Gate") < report.index("## Result")
    assert cases(run) == {
        "gate: peak memory (budget)": "",
        "gate: size (budget)": "failure",
        "gate: p50 latency (baseline)": "skipped",
        "gate: peak memory (baseline)": "",
        "gate: size (baseline)": "",
    }
    for line in text.splitlines()[:-1]:  # the numbers come from one place
        assert plain(line.partition(": ")[2]) in report
    stored = json.loads((run / "gate.json").read_text())
    assert [check["state"] for check in stored["verdicts"]].count("failed") == 1
    (run / "report.md").unlink()
    assert said("report", str(run), "-f", "md")[0] == 0
    assert (run / "report.md").read_text() == report, "a later report keeps the section"
    assert said("report", str(run), "-f", "md", "-o", str(tmp_path / "public"))[0] == 0
    assert "## Gate: failed" in (tmp_path / "public" / "report.md").read_text()
    assert said("gate", str(run), "--baseline", str(tmp_path / "missing"))[0] == 2
    assert everything(tmp_path).keys() & {"run/gate.json", "run/notes.txt"} == {"run/notes.txt"}
    assert "## Gate" not in (run / "report.md").read_text(), "the last gate judged nothing"
    said(*words)
    write(run, record(p50_ms=0.5))
    said("report", str(run), "-f", "md", "-f", "junit")
    assert "## Gate" not in (run / "report.md").read_text(), "it was of another result"
    assert cases(run) == {}


@pytest.mark.parametrize(
    "words",
    [
        ("--max-latency", "1us", "--measure-time", "0s"),
        ("--measure-time", "soon"),
        ("--max-drop", "much"),
        ("--max-latency", "soon"),
        ("--update-baseline",),
        ("--variant", "none"),
    ],
)
def test_no_earlier_verdict_outlasts_a_gate_that_ends_with_an_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    run = write(tmp_path / "run", record())
    assert said("gate", str(run), "--max-latency", "1s")[0] == 0
    assert "## Gate: passed" in (run / "report.md").read_text()
    assert said("gate", *words, str(run))[0] == 2
    assert not (run / "gate.json").exists()
    assert not [name for name in NAMES_OF_REPORTS if "Gate: passed" in (run / name).read_text()]
    assert cases(run) == {}


def test_a_verdict_is_only_removed_from_the_run_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", record())
    assert said("gate", str(run), "--max-latency", "1s")[0] == 0
    monkeypatch.chdir(run)
    assert said("gate", "nowhere")[0] == 2
    assert (run / "gate.json").exists()


def test_a_fleets_reports_show_the_gate_until_an_entry_changes(make_fleet: Make) -> None:
    make_fleet("fleet", overrides={"lenet@cpu": {"budgets": {"max_latency_ms": 0.1}}})
    said("gate", "fleet/fleet.json", "--max-size", "1MiB", "--json")
    report = Path("fleet/fleet.md").read_text(encoding="utf-8")
    assert "## Gate: failed\n\nfleet" in report
    table = report.partition("| --- | --- | --- |\n")[2]
    assert table.startswith("| lenet@cpu p50 latency (budget) | **failed** |"), "what failed stands first"
    found = cases(Path("fleet"))
    assert len(found) == 5
    assert found["lenet@cpu gate: p50 latency (budget)"] == "failure"
    said("report", "fleet")
    assert Path("fleet/fleet.md").read_text(encoding="utf-8") == report
    changed = documents.read(Path("fleet/runs/lenet@cpu")).model_copy(update={"seconds": 5.0})
    documents.write(changed, Path("fleet/runs/lenet@cpu"))
    said("report", "fleet")
    assert "## Gate" not in Path("fleet/fleet.md").read_text(encoding="utf-8")
    assert cases(Path("fleet")) == {}


def test_no_text_of_a_gate_does_more_than_be_read(tmp_path: Path) -> None:
    run = write(tmp_path / "<b>run|", record(EVIL, status="failed", reason=EVIL), name=EVIL)
    assert said("gate", str(run), "--max-latency", "1ms")[0] != 0
    head, _, _ = (run / "report.md").read_text().partition("## Result")
    assert not re.search(r"<|\]\(|@\w|^# head|(?<!\\)`", head, re.M), head
    assert len([line for line in head.splitlines() if line.startswith("|")]) == 2 + len(cases(run))


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "enginesmith.gate/9", "judged_sha256": null}'])
def test_a_damaged_gate_file_is_as_none(tmp_path: Path, content: str) -> None:
    run = write(tmp_path / "run", record())
    (run / "gate.json").write_text(content)
    assert said("report", str(run), "-f", "md")[0] == 0
    assert "## Gate" not in (run / "report.md").read_text()


def test_reports_that_cannot_be_written_change_no_verdict(tmp_path: Path) -> None:
    run = write(tmp_path / "run", record())
    (run / "gate.json").mkdir()
    code, text = said("gate", str(run), "--max-latency", "2ms")
    assert code == 0
    assert "note: the reports were not written" in text
