"""Entries of a fleet, its statuses and exit codes, fleet.json, and the comparison with an earlier one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fleets
from enginesmith.pipeline.errors import DataError, EnginesmithError, UsageError
from enginesmith.pipeline.recipe.fleet import Entry
from enginesmith.pipeline.results import earlier_fleet
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results.differences import ModelIdentity
from enginesmith.pipeline.results.earlier_fleet import Earlier, State
from enginesmith.pipeline.results.fleet import EntryChange, EntryRecord, entry_record
from enginesmith.pipeline.results.run import Run, RunResult, Workaround
from enginesmith.pipeline.units import AddedOption

ROOT = Path(__file__).parents[2]


def test_the_shipped_schema_is_that_of_the_code() -> None:
    shipped = json.loads((ROOT / "pipeline/report/fleet.schema.json").read_text())
    assert shipped == json.loads(json.dumps(records.json_schema())), "run `make documents`"


def test_it_reads_back_as_itself(tmp_path: Path) -> None:
    asked = fleets.fleet(recipe={"measure": {"seconds": None}}, skip=["lenet@edge"])
    (one, *_) = asked.entries()
    found = fleets.record(asked, fleets.entry(one, tmp_path, fleets.run(one)), options={"batch": [2]})
    path = records.write(found, tmp_path)
    assert records.read(tmp_path) == records.read(path) == found
    assert path.stat().st_mode & 0o044, "others may read it"
    assert records.is_fleet(tmp_path)
    assert records.is_fleet(path)
    assert not records.is_fleet(tmp_path / "runs")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": "enginesmith.fleet/2"}', "newer schema"),
        ('{"schema": "enginesmith.run/1"}', "not of the schema"),
        ('{"schema": "enginesmith.fleet/1"}', "is damaged: .* is missing"),
        ("{", "is damaged"),
    ],
)
def test_a_damaged_record_is_told(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / records.FILE).write_text(text)
    with pytest.raises(UsageError, match=words):
        records.read(tmp_path)


def test_what_is_not_known_is_left_out_unless_it_is_to_be_done(tmp_path: Path) -> None:
    asked = fleets.fleet()
    document = json.loads(fleets.record(asked).model_dump_json(by_alias=True))
    document["fleet"]["future"] = 1
    (tmp_path / records.FILE).write_text(json.dumps(document))
    assert records.read(tmp_path).fleet == asked
    with pytest.raises(UsageError, match=r"does not have: fleet\.future\n.*optimize FLEET"):
        records.read(tmp_path, to_go_on=True)


def made(folder: Path, kind: str) -> EntryRecord:
    (one, *_) = fleets.fleet().entries()
    kinds: dict[str, Run | EnginesmithError | None] = {
        "won": fleets.run(one),
        "partly": fleets.partly(one),
        "breached": fleets.breached(one),
        "lacking": fleets.ERRORS[0],
        "usage": fleets.ERRORS[1],
        "failed": fleets.ERRORS[2],
        "built": fleets.run(one, winner=None, winner_reason="2 variants are built", complete=False),
        "unmeasured": fleets.run(one, winner=None, winner_reason="no variant that was asked for was measured"),
        "waiting": None,
    }
    found = fleets.entry(one, folder, kinds[kind])
    assert isinstance(found, EntryRecord)
    return found


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("won", "done", 0),
        ("partly", "done", 0),
        ("unmeasured", "failed", 1),
        ("breached", "breached", 3),
        ("lacking", "lacking", 4),
        ("built", "lacking", 4),
        ("failed", "failed", 1),
        ("usage", "failed", 2),
        ("waiting", "pending", 0),
    ],
)
def test_how_an_entry_ends(tmp_path: Path, kind: str, status: str, code: int) -> None:
    found = made(tmp_path, kind)
    assert (found.status, found.exit_code) == (status, code)
    assert bool(found.winner) == (kind in ("won", "partly"))
    assert bool(found.reason) == (kind not in ("won", "partly"))


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        (["won", "partly"], 0),
        (["won", "lacking"], 4),
        (["won", "lacking", "breached"], 3),
        (["won", "lacking", "breached", "failed"], 1),
        (["won", "usage"], 1),
        (["lacking", "usage"], 1),
        (["usage", "failed"], 1),
        (["usage", "usage"], 2),
    ],
)
def test_the_worst_exit_code_counts(tmp_path: Path, kinds: list[str], code: int) -> None:
    entries = [made(tmp_path / str(number), kind) for number, kind in enumerate(kinds)]
    assert fleets.record(fleets.fleet(), *entries).exit_code == code


def test_what_was_interrupted_has_not_ended(tmp_path: Path) -> None:
    (one, *_) = fleets.fleet().entries()
    begun = fleets.run(one, complete=False)
    assert entry_record(one, RunResult(begun, ended=False), tmp_path).status == "pending"
    assert entry_record(one, RunResult(begun), tmp_path).status == "done"
    assert entry_record(one, RunResult(fleets.run(one), ended=False), tmp_path).status == "done"


def test_the_winner_has_its_numbers_and_reasons_for_those_it_lacks(tmp_path: Path) -> None:
    found = made(tmp_path, "won").winner
    assert (found.id, found.precision, found.batch, found.p50_ms) == (fleets.INT8, "int8", 1, 0.5)
    assert found.speedup == fleets.about(4.0)
    assert (found.peak_bytes, found.bytes, found.drop, found.reasons) == (100 << 20, 200_000, 0.01, {})
    (one, *_) = fleets.fleet().entries()
    bare = fleets.variant(fleets.INT8, 0.5, 4.0, memory=None, quality=None, reasons={"memory": "not asked"})
    lacking = entry_record(one, RunResult(fleets.run(one, variants=(bare,))), tmp_path).winner
    assert lacking.reasons["peak_bytes"] == "not asked"
    assert {name for name in ("peak_bytes", "drop", "metric") if getattr(lacking, name) is None} == set(lacking.reasons)
    itself = entry_record(one, RunResult(fleets.run(one, winner="eager")), tmp_path).winner
    assert (itself.speedup, itself.reasons["speedup"]) == (None, "it is the baseline")


def test_logs_of_shared_steps_are_with_a_sibling(tmp_path: Path) -> None:
    first, second, *_ = fleets.fleet().entries()
    fleets.placed(fleets.partly(first), tmp_path, first.name)
    found = entry_record(second, RunResult(fleets.partly(second)), tmp_path, [first.name])
    assert found.failures[0].log == f"runs/{first.name}/logs/export.log"
    assert entry_record(second, RunResult(fleets.partly(second)), tmp_path).failures[0].log is None


def test_what_single_runs_call_options_is_told_as_fields(tmp_path: Path) -> None:
    (one, *_) = fleets.fleet().entries()
    failed = fleets.entry(one, tmp_path, DataError("--recover needs data", "give some with --calibration DATA"))
    fields = "an option is for all entries: in the fleet file, `recipe: {recover: …, calibration: …}` is for one model"
    assert failed.remedy == failed.failures[0].remedy == f"give some with --calibration DATA; {fields}"
    assert fleets.entry(one, tmp_path, fleets.ERRORS[0]).remedy == "start one"


STATE = State(ModelIdentity("of digits", "content of digits"), {"data.npz": "d"}, {"torch": "2.11"})


@pytest.fixture
def asked() -> Entry:
    first = fleets.fleet().entries()[0]
    assert isinstance(first, Entry)
    return first


@pytest.fixture
def before(asked: Entry, tmp_path: Path) -> Earlier:
    """A fleet of one entry whose winner takes 0.5 ms."""
    return fleet_in(asked, tmp_path / "before", fleets.run(asked))


def fleet_in(asked: Entry, folder: Path, found: Any, **changes: Any) -> Earlier:
    entry = fleets.entry(asked, folder, found).model_copy(update={"files": {"data.npz": "d"}})
    records.write(fleets.record(fleets.fleet(), entry, **changes), folder)
    return earlier_fleet.open_fleet(folder)


def beside(before: Earlier, asked: Entry, folder: Path, now: Run | None) -> EntryChange:
    if now is not None:
        fleets.placed(now, folder, asked.name)
    return earlier_fleet.compare_entry(before, asked.name, folder / records.RUNS / asked.name, now)


def test_a_slower_winner_is_told(before: Earlier, asked: Entry, tmp_path: Path) -> None:
    found = beside(before, asked, tmp_path / "now", fleets.run(asked, ms=0.6))
    assert (found.winner, found.p50_ms, found.winners, found.note) == (fleets.INT8, 0.5, None, "")
    change = next(one for one in found.compared if one.id == fleets.INT8).latency[0].change
    assert (change.significant, change.basis) == (True, "speed-up over eager")
    assert change.median == pytest.approx(1.2)
    same = next(one for one in found.compared if one.id == fleets.FP32).latency[0].change
    assert same.significant is False


def test_few_launches_are_no_verdict(before: Earlier, asked: Entry, tmp_path: Path) -> None:
    slow = fleets.variant(fleets.INT8, 0.6, 3.3, latency=(fleets.row(0.6, 3.3).model_copy(update={"launches": 1}),))
    found = beside(before, asked, tmp_path / "now", fleets.run(asked, variants=(slow,)))
    change = next(one for one in found.compared if one.id == fleets.INT8).latency[0].change
    assert change.significant is None
    assert change.note == "a reliable interval needs 3 launches, and the other run has 1; give it more --measure-time"


def test_other_machines_do_not_count(before: Earlier, asked: Entry, tmp_path: Path) -> None:
    other = fleets.run(asked, ms=5.0, environment={**fleets.MACHINE, "processor": "Another CPU"})
    found = beside(before, asked, tmp_path / "now", other)
    assert found.note == "other machine: processor was Some CPU, and is Another CPU"
    assert (found.pair, found.winners, found.p50_ms) == (None, None, 0.5)


def test_another_winner_is_set_beside(before: Earlier, asked: Entry, tmp_path: Path) -> None:
    now = fleets.run(asked, ms=1.0, winner=fleets.FP32)
    found = beside(before, asked, tmp_path / "now", now)
    row = found.winners.latency[0]
    assert (row.before_p50_ms, row.after_p50_ms, row.change.significant) == (0.5, 0.8, True)
    assert row.change.median == pytest.approx(4.0 / 2.5)


def test_a_winner_after_eager_is_compared_in_ms(asked: Entry, tmp_path: Path) -> None:
    before = fleet_in(asked, tmp_path / "before", fleets.run(asked, winner="eager"))
    found = beside(before, asked, tmp_path / "now", fleets.run(asked))
    change = found.winners.latency[0].change
    assert (change.median, change.basis) == (pytest.approx(0.25), "milliseconds")
    assert change.note == "times in milliseconds are compared; the load of the machine may have differed"


def test_what_is_missing_is_said(before: Earlier, asked: Entry, tmp_path: Path) -> None:
    assert earlier_fleet.compare_entry(before, "new@cpu", tmp_path, None).note == "not in the last fleet"
    assert beside(before, asked, tmp_path / "now", None).note == "there is no run now"
    failed = fleet_in(asked, tmp_path / "failed", fleets.ERRORS[2])
    found = beside(failed, asked, tmp_path / "later", fleets.run(asked))
    assert found.note == "there was no run: aten::odd cannot be exported"
    (before.folder / records.RUNS / asked.name / "run.json").unlink()
    found = earlier_fleet.compare_entry(before, asked.name, tmp_path, fleets.run(asked))
    assert (found.note, found.winner) == ("its run is no longer there", fleets.INT8)


def test_the_last_fleet_is_the_newest_of_its_name(asked: Entry, tmp_path: Path) -> None:
    others: dict[str, dict[str, Any]] = {
        "old": {"created": "2026-01-01"},
        "newer": {"created": "2026-01-03"},
        "part": {"created": "2026-01-04", "only": ["cpu"]},
        "other": {"created": "2026-01-05", "file": "other.yaml"},
        "interrupted": {"created": "2026-01-05"},
        "now": {"created": "2026-01-06"},
        "later": {"created": "2026-01-07"},
    }
    for name, changes in others.items():
        found = None if name == "interrupted" else fleets.run(asked)
        fleet_in(asked, tmp_path / name, found, **changes)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / records.FILE).write_text("{")
    now = earlier_fleet.open_fleet(tmp_path / "now").record
    last = earlier_fleet.find_last(tmp_path / "now", now)
    assert last.folder.name == "newer"
    part = earlier_fleet.find_last(tmp_path / "now", now.model_copy(update={"only": ("cpu",)}))
    assert part.folder.name == "part"
    assert earlier_fleet.find_last(tmp_path / "now", now.model_copy(update={"file": "none.yaml"})) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": {"batch": [4]}}, "its recipe changed: batch"),
        ({"targets": {"cpu": {"resources": {"big": 1}}}}, "its target changed"),
        ({"state": replace(STATE, model=ModelIdentity("another", "of another"))}, "its model changed"),
        (
            {"state": replace(STATE, model=ModelIdentity("another", "content of digits"))},
            "its model is loaded otherwise, as by another version of enginesmith",
        ),
        ({"state": replace(STATE, model=None)}, "its model cannot be loaded"),
        ({"state": replace(STATE, files={"data.npz": "e"})}, "data.npz changed"),
        ({"state": replace(STATE, files={})}, "data.npz changed"),
        ({"state": replace(STATE, packages={"torch": "2.12"})}, "torch 2.11 → 2.12"),
        ({"models": {"lenet": {}}}, "it was not there"),
    ],
)
def test_changes_are_done_again(before: Earlier, change: dict[str, Any], words: str) -> None:
    state = change.pop("state", STATE)
    assert earlier_fleet.find_unchanged(before, fleets.fleet(**change).entries()[0], state) == words


@pytest.mark.parametrize(("kind", "words"), [("breached", "it had no winner"), ("begun", "it was not complete")])
def test_only_winners_stand(asked: Entry, tmp_path: Path, kind: str, words: str) -> None:
    found = fleets.breached(asked) if kind == "breached" else fleets.run(asked, complete=False)
    assert earlier_fleet.find_unchanged(fleet_in(asked, tmp_path, found), asked, STATE) == words


def test_an_option_that_was_added_against_a_wrong_engine_is_no_change_of_the_recipe(
    asked: Entry, tmp_path: Path
) -> None:
    option = AddedOption(field="onnxruntime.disabled_optimizers", value="X", words="--ort-disable X")
    added = (Workaround(option=option, variant=fleets.INT8, fault="wrong"),)
    found = fleets.run(asked, recipe=asked.recipe.with_option(option), workarounds=added)
    assert earlier_fleet.find_unchanged(fleet_in(asked, tmp_path, found), asked, STATE) == found


def test_a_run_that_stands_is_linked(before: Earlier, asked: Entry, tmp_path: Path) -> None:
    link = tmp_path / "now" / records.RUNS / asked.name
    for _ in range(2):
        earlier_fleet.take_over(before, asked.name, link)
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert (link / "run.json").is_file()
    again = tmp_path / "third" / records.RUNS / asked.name
    records.write(before.record, tmp_path / "now")
    earlier_fleet.take_over(earlier_fleet.open_fleet(tmp_path / "now"), asked.name, again)
    assert again.resolve() == (before.folder / records.RUNS / asked.name).resolve()
    assert str(before.folder.name) in str(again.readlink()), "a link leads to the run itself, not to another link"
    assert earlier_fleet.compare_entry(before, asked.name, link, before.run(before.record.entries[0])).note.startswith(
        "reused"
    )
