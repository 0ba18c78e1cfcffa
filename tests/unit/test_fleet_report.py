"""A fleet as people read it: the terminal's tables, fleet.md, and fleet.html as text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fleets
import pages
import runs
from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.recipe.fleet import Fleet
from enginesmith.pipeline.report import fleet as fleet_markdown
from enginesmith.pipeline.report import fleet as fleet_page
from enginesmith.pipeline.report import fleet_tables, terminal
from enginesmith.pipeline.report.html import page
from enginesmith.pipeline.results import earlier_fleet
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results.fleet import RUNS, EntryRecord, Failure, FleetRecord, Last

EVIL = """<img src=x onerror="document.title='a'"></script><script>x()</script>">'${d}&amp;|`](http://e)"""


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> FleetRecord:
    """Entries of every kind, beside a fleet in which all had a winner of 0.5 ms."""
    found = fleet(tmp_path_factory.mktemp("fleets"))
    assert isinstance(found, FleetRecord)
    return found


def fleet(folder: Path) -> FleetRecord:
    models: dict[str, Any] = {name: {} for name in ("digits", "lenet", "mobilenet_v2")}
    targets = {"cpu": {}, "h100": {"accelerator": "H100"}, "edge": {"resources": {"edge": 1}}}
    asked = fleets.fleet(models=models, targets=targets, skip=["mobilenet_v2@edge"])
    entries = asked.entries()
    before = [fleets.entry(one, folder / "before", fleets.run(one)) for one in entries[:-1]]
    records.write(fleets.record(asked, *before, created="2026-01-01"), folder / "before")
    last = earlier_fleet.open_fleet(folder / "before")
    other = {**fleets.MACHINE, "processor": "Another CPU"}
    synthetic = fleets.variant(fleets.INT8, 0.5, 4.0, synthetic_calibration=True)
    kinds = [
        fleets.run(entries[0], ms=0.6),
        fleets.run(entries[1], ms=0.4),
        fleets.run(entries[2], environment=other),
        fleets.run(entries[3], ms=1.0, winner=fleets.FP32),
        fleets.breached(entries[4]),
        fleets.ERRORS[0],
        fleets.partly(entries[6]),
        fleets.run(entries[7], variants=(synthetic,)),
    ]
    now = folder / "now"
    made: list[EntryRecord] = []
    for entry, kind in zip(entries, kinds, strict=True):
        one = fleets.entry(entry, now, kind)
        run = None if one.run is None else kind
        since = earlier_fleet.compare_entry(last, entry.name, now / RUNS / entry.name, run)
        made.append(one.model_copy(update={"since_last": since}))
    beside = Last(path="../before", created="2026-01-01", without=("gone@cpu",))
    found = fleets.record(asked, *made, last=beside)
    assert isinstance(found, FleetRecord)
    return found


def test_a_row_for_each_entry(some: FleetRecord) -> None:
    rows = fleet_tables.tabulate_entries(some).rows
    assert rows[0][:6] == ("digits@cpu", "done", "onnxruntime-int8", "1", "3.33× [3.27, 3.40]", "0.6")
    assert (rows[0][7:], rows[4][1]) == (("100 MiB", "195 KiB", "+0.0100", "–"), "over budget")
    assert (rows[4][-1], rows[6][1]) == ("broken: p50 latency", "done, 1 of 2 variants failed")
    assert rows[7][2] == "onnxruntime-int8*"


def test_what_became_of_each_entry_is_one_cell(some: FleetRecord) -> None:
    said = [fleet_tables.describe_change(one.since_last) for one in some.entries]
    assert said[0].startswith("slower +20 % [")
    assert said[1].startswith("faster −20 % [")
    assert said[2] == "other machine"
    assert said[3].startswith("slower +60 % [")
    assert said[3].endswith(", was onnxruntime-int8")
    assert (said[4:6], said[6]) == (["no winner now", "there is no run now"], "the same measurement")
    assert said[7] == "not in the last fleet"


def test_certain_changes_are_told_from_others(some: FleetRecord) -> None:
    certain = list(fleet_tables.tabulate_changes(some, certain=True).rows)
    assert {row[0] for row in certain} == {"digits@cpu", "digits@h100", "lenet@cpu"}
    assert ("digits@cpu", "onnxruntime-int8", "p50 at batch 1, ms", "0.5", "0.6") in {row[:5] for row in certain}
    assert any(row[1] == "onnxruntime-fp32, after onnxruntime-int8" for row in certain)
    rest = list(fleet_tables.tabulate_changes(some, certain=False).rows)
    assert {row[0] for row in rest} >= {"mobilenet_v2@cpu", "digits@cpu"}
    assert not set(certain) & set(rest)
    assert [one.name for one in fleet_tables.list_changed(some, slower=True)] == ["digits@cpu", "lenet@cpu"]
    assert [one.name for one in fleet_tables.list_changed(some, slower=False)] == ["digits@h100"]


def test_what_cannot_be_compared_is_said(some: FleetRecord) -> None:
    said = "\n".join(fleet_tables.describe_last(some))
    assert "compared with ../before" in said
    assert "no longer there: gone@cpu" in said
    assert "digits@edge: other machine: processor was Some CPU, and is Another CPU" in said
    assert "mobilenet_v2@h100: not in the last fleet" in said
    alone = some.model_copy(update={"last": None})
    assert list(fleet_tables.describe_last(alone)) == ["there is no earlier fleet of this file beside this one"]


def test_failures_have_reasons_and_logs(some: FleetRecord) -> None:
    rows = {row[:2]: row for row in fleet_tables.tabulate_failures(some).rows}
    assert rows["lenet@h100", "all"][2:4] == ("over budget", "no variant meets every budget")
    assert rows["lenet@edge", "all"][2:5] == ("not available", "no node has the accelerator L4", "start one")
    assert rows["mobilenet_v2@cpu", "onnxruntime-fp32"][-1] == "runs/mobilenet_v2@cpu/logs/export.log"


def told(one: EntryRecord, **values: Any) -> EntryRecord:
    return one.model_copy(update={"status": "failed", **values})


def test_what_failed_is_told_once(some: FleetRecord, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the whole entry is not told of its variants again, nor that of one entry of its siblings."""
    gone = [Failure(variant=name, reason=f"load: no {EVIL}", log="a b.log") for name in ("eager", "fp32")]
    one = told(some.entries[0], failures=(Failure(variant="", reason=f"no {EVIL}", log="a b.log"), *gone))
    record = some.model_copy(update={"entries": (one, one.model_copy(update={"name": "digits@edge"}))})
    assert [row[:2] for row in fleet_tables.tabulate_failures(record).rows] == [
        ("digits@cpu", "all"),
        ("digits@edge", "all"),
    ]
    assert [row[:2] for row in fleet_tables.group_failures(record)] == [("digits@cpu, digits@edge", "all")]
    terminal.show_fleet(record, Path("runs/nightly"), as_json=False)
    assert capsys.readouterr().out.count("log: 'runs/nightly/a b.log'\n") == 1


def test_variants_that_fail_alike_share_a_row(some: FleetRecord) -> None:
    why = "calibrate: no such file\nin it"
    alike = [Failure(variant=name, reason=why, log="logs/calibrate.log") for name in ("int8", "int8+fp16")]
    said = f"no usable variant is left:\n  int8, int8+fp16: {why}\n  trt: not here"
    one = told(some.entries[0], failures=(Failure(variant="", reason=said, log="logs/calibrate.log"), *alike))
    rows = list(fleet_tables.tabulate_failures(some.model_copy(update={"entries": (one,)})).rows)
    assert rows == [
        ("digits@cpu", "all", "failed", "no usable variant is left:\n  trt: not here", "–", "–"),
        ("digits@cpu", "int8, int8+fp16", "failed", why, "–", "logs/calibrate.log"),
    ]


def test_who_is_called_otherwise_than_in_the_file_is_told(some: FleetRecord) -> None:
    other = some.entries[0].model_copy(update={"model": "nets.py:mlp", "name": "nets.py-mlp@cpu"})
    record = some.model_copy(update={"entries": (other, *some.entries)})
    assert fleet_tables.list_footnotes(record)[1:] == [
        "entries are called as their folders: nets.py-mlp for nets.py:mlp"
    ]
    assert len(fleet_tables.list_footnotes(some)) == 1


def test_the_matrix_has_models_by_targets(some: FleetRecord) -> None:
    matrix = fleet_tables.tabulate_matrix(some)
    rows, links = matrix.rows, matrix.links
    assert matrix.columns == ("model", "cpu", "h100", "edge")
    assert rows[0] == ("digits", "onnxruntime-int8 3.33×", "onnxruntime-int8 5.00×", "onnxruntime-int8 4.00×")
    assert (rows[1][2:], rows[2][3]) == (("over budget", "not available"), "–")
    assert links[0, 1] == "runs/digits@cpu/report.html"
    assert (1, 3) not in links


def test_the_page_leads_to_runs_and_logs(some: FleetRecord) -> None:
    text = fleet_page.render(some)
    elements = pages.Elements(text)
    found = {one.get("href") for one in elements.named("a")}
    assert {"runs/digits%40cpu/report.html", "runs/mobilenet_v2%40cpu/logs/export.log"} <= found
    assert [one["id"] for one in elements.named("section")] == ["winners", "since", "failures", "targets", "again"]
    assert {f"#{one['id']}" for one in elements.named("section")} <= found
    values = {one["data-value"] for one in elements.named("td") if "data-value" in one}
    assert {"0.6", str(100 << 20), "200000", "0.01"} <= values


def test_a_fleet_that_is_not_complete_names_its_own_folder(some: FleetRecord, tmp_path: Path) -> None:
    begun = some.model_copy(
        update={
            "folder": str(tmp_path),
            "entries": tuple(one.model_copy(update={"status": "pending"}) for one in some.entries),
        }
    )
    for folder, place in ((tmp_path, "runs/deep"), (tmp_path / "gone", some.name)):
        record = begun.model_copy(update={"folder": str(folder)})
        fleet_page.write(record, tmp_path / "runs/deep", {}, ["html"])
        assert f"enginesmith resume {place}<" in (tmp_path / "runs/deep/fleet.html").read_text()


def test_the_page_needs_no_network_and_no_more_than_its_own_script(some: FleetRecord) -> None:
    text = fleet_page.render(some)
    elements = pages.Elements(text)
    assert len(text) < 200_000
    assert not any("src" in attributes for _, attributes in elements.all)
    assert re.findall(r"<script>(.*?)</script>", text, re.S) == [page.load(page.SCRIPT)]
    policy = next(one["content"] for one in elements.named("meta") if one.get("http-equiv"))
    assert policy == page.write_policy((page.load(page.SCRIPT),))


def evil(folder: Path) -> FleetRecord:
    """Every free text is one that would like to be markup."""
    values = runs.filled(FleetRecord, EVIL)
    asked = Fleet.model_validate({"models": {EVIL: {}}, "targets": {EVIL: {"resources": {EVIL: 1}}}})
    failed = fleets.entry(asked.entries()[0], folder, ExportError(EVIL, EVIL))
    filled = {**values["entries"][0], "status": "done"}
    return FleetRecord.model_validate({**values, "fleet": asked, "entries": [filled, failed]})


def test_texts_bring_no_markup(some: FleetRecord, tmp_path: Path) -> None:
    found = evil(tmp_path)
    assert found.model_dump_json().count("<img src=x") > 80
    elements = pages.Elements(fleet_page.render(found))
    assert {tag for tag, _ in elements.all} <= {tag for tag, _ in pages.Elements(fleet_page.render(some)).all}
    assert not any(name.startswith("on") for _, attributes in elements.all for name in attributes)
    assert all((one.get("href") or "").startswith(("#", "runs/", "%3Cimg")) for one in elements.named("a"))
    text = fleet_markdown.render_markdown(found)
    assert "<img" not in text
    assert not re.search(r"(?<!\\)\]\(http", text)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    tables = (
        fleet_tables.tabulate_entries(found),
        fleet_tables.tabulate_changes(found, certain=True),
        fleet_tables.tabulate_failures(found),
    )
    assert widths <= {1 + len(table.columns) for table in tables}


def test_markdown_has_it_in_short(some: FleetRecord) -> None:
    text = fleet_markdown.render_markdown(some)
    assert text.startswith("# nightly\n\n6 of 8 entries have a winner")
    assert "| [digits@cpu](runs/digits%40cpu/report.html) | done | onnxruntime-int8 |" in text
    assert "| lenet@edge | not available |" in text
    assert "slower, by speed-up over eager" in text
    assert "## What failed, and why" in text


def test_all_rows_of_a_large_fleet_stand_in_the_page_with_links(some: FleetRecord) -> None:
    many = some.model_copy(
        update={
            "entries": tuple(
                one.model_copy(update={"name": f"{number}-{one.name}", "run": f"runs/{number}"})
                for number, one in enumerate(some.entries * 25)
            )
        }
    )
    text = fleet_page.render(many)
    assert text.count('href="runs/') >= 2 * 200
    assert '"rows":{}' in text


def test_the_terminal_says_the_same(some: FleetRecord, capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.show_fleet(some, Path("runs/nightly"), as_json=False) == 3
    text = capsys.readouterr().out
    for words in (
        fleet_tables.summarize(some),
        "slower: 2",
        "compared with ../before",
        "lenet@edge: not available: no node",
    ):
        assert words in text
    assert "log: runs/nightly/runs/mobilenet_v2@cpu/logs/export.log" in text
    assert "report: runs/nightly/fleet.html" in text
    assert terminal.show_fleet(some, Path("runs/nightly"), as_json=True) == 3
    assert json.loads(capsys.readouterr().out)["schema"] == records.SCHEMA
