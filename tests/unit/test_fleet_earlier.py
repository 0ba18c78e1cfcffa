"""A fleet beside an earlier one: what became slower, what cannot be compared, and what need not be done again."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from enginesmith.pipeline.recipe.fleet import Entry
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results.fleet import Earlier, EntryChange, State
from enginesmith.pipeline.results.run import Run

STATE = State("of digits", {"data.npz": "d"}, {"torch": "2.11"})


@pytest.fixture
def asked(made_fleets: ModuleType) -> Entry:
    first = made_fleets.fleet().entries()[0]
    assert isinstance(first, Entry)
    return first


@pytest.fixture
def before(made_fleets: ModuleType, asked: Entry, tmp_path: Path) -> Earlier:
    """A fleet of one entry whose winner takes 0.5 ms."""
    return fleet_in(made_fleets, asked, tmp_path / "before", made_fleets.run(asked))


def fleet_in(made_fleets: ModuleType, asked: Entry, folder: Path, found: Any, **changes: Any) -> Earlier:
    entry = made_fleets.entry(asked, folder, found).model_copy(update={"files": {"data.npz": "d"}})
    records.write(made_fleets.record(made_fleets.fleet(), entry, **changes), folder)
    return records.open_fleet(folder)


def beside(made_fleets: ModuleType, before: Earlier, asked: Entry, folder: Path, now: Run | None) -> EntryChange:
    if now is not None:
        made_fleets.placed(now, folder, asked.name)
    return records.compare_entry(before, asked.name, folder / records.RUNS / asked.name, now)


def test_a_slower_winner_is_told_by_its_interval(
    made_fleets: ModuleType, before: Earlier, asked: Entry, tmp_path: Path
) -> None:
    found = beside(made_fleets, before, asked, tmp_path / "now", made_fleets.run(asked, ms=0.6))
    assert (found.winner, found.p50_ms, found.winners, found.note) == (made_fleets.INT8, 0.5, None, "")
    change = next(one for one in found.compared if one.id == made_fleets.INT8).latency[0].change
    assert (change.significant, change.basis) == (True, "speed-up over eager")
    assert change.median == pytest.approx(1.2)
    same = next(one for one in found.compared if one.id == made_fleets.FP32).latency[0].change
    assert same.significant is False


def test_what_few_launches_tell_is_no_verdict(
    made_fleets: ModuleType, before: Earlier, asked: Entry, tmp_path: Path
) -> None:
    slow = made_fleets.variant(
        made_fleets.INT8, 0.6, 3.3, latency=(made_fleets.row(0.6, 3.3).model_copy(update={"launches": 1}),)
    )
    found = beside(made_fleets, before, asked, tmp_path / "now", made_fleets.run(asked, variants=(slow,)))
    change = next(one for one in found.compared if one.id == made_fleets.INT8).latency[0].change
    assert change.significant is None
    assert "not judged" in change.note


def test_another_machine_is_no_yardstick(
    made_fleets: ModuleType, before: Earlier, asked: Entry, tmp_path: Path
) -> None:
    other = made_fleets.run(asked, ms=5.0, environment={**made_fleets.MACHINE, "processor": "Another CPU"})
    found = beside(made_fleets, before, asked, tmp_path / "now", other)
    assert found.note == "other machine: processor was Some CPU, and is Another CPU"
    assert (found.pair, found.winners, found.p50_ms) == (None, None, 0.5)


def test_another_winner_stands_beside_the_one_then(
    made_fleets: ModuleType, before: Earlier, asked: Entry, tmp_path: Path
) -> None:
    now = made_fleets.run(asked, ms=1.0, winner=made_fleets.FP32)
    found = beside(made_fleets, before, asked, tmp_path / "now", now)
    assert found.winners is not None
    row = found.winners.latency[0]
    assert (row.before_p50_ms, row.after_p50_ms, row.change.significant) == (0.5, 0.8, True)
    assert row.change.median == pytest.approx(4.0 / 2.5)


def test_a_winner_after_eager_is_compared_in_milliseconds(
    made_fleets: ModuleType, asked: Entry, tmp_path: Path
) -> None:
    before = fleet_in(made_fleets, asked, tmp_path / "before", made_fleets.run(asked, winner="eager"))
    found = beside(made_fleets, before, asked, tmp_path / "now", made_fleets.run(asked))
    assert found.winners is not None
    change = found.winners.latency[0].change
    assert change.median == pytest.approx(0.25)
    assert change.basis == "milliseconds"
    assert "the baseline itself" in change.note


def test_what_is_missing_then_or_now_is_said(
    made_fleets: ModuleType, before: Earlier, asked: Entry, tmp_path: Path
) -> None:
    assert records.compare_entry(before, "new@cpu", tmp_path, None).note == "not in the last fleet"
    assert beside(made_fleets, before, asked, tmp_path / "now", None).note == "there is no run now"
    failed = fleet_in(made_fleets, asked, tmp_path / "failed", made_fleets.ERRORS[2])
    found = beside(made_fleets, failed, asked, tmp_path / "later", made_fleets.run(asked))
    assert found.note == "there was no run: aten::odd cannot be exported"
    (before.folder / records.RUNS / asked.name / "run.json").unlink()
    found = records.compare_entry(before, asked.name, tmp_path, made_fleets.run(asked))
    assert (found.note, found.winner) == ("its run is no longer there", made_fleets.INT8)


def test_the_last_fleet_is_the_newest_of_its_name(made_fleets: ModuleType, asked: Entry, tmp_path: Path) -> None:
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
        found = None if name == "interrupted" else made_fleets.run(asked)
        fleet_in(made_fleets, asked, tmp_path / name, found, **changes)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / records.FILE).write_text("{")
    now = records.open_fleet(tmp_path / "now").record
    last = records.find_last(tmp_path / "now", now)
    assert last is not None
    assert last.folder.name == "newer"
    part = records.find_last(tmp_path / "now", now.model_copy(update={"only": ("cpu",)}))
    assert part is not None
    assert part.folder.name == "part"
    assert records.find_last(tmp_path / "now", now.model_copy(update={"file": "none.yaml"})) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": {"batch": [4]}}, "its recipe changed: batch"),
        ({"targets": {"cpu": {"resources": {"big": 1}}}}, "its target changed"),
        ({"state": replace(STATE, model_sha256="another")}, "its model changed"),
        ({"state": replace(STATE, model_sha256=None)}, "its model cannot be loaded"),
        ({"state": replace(STATE, files={"data.npz": "e"})}, "data.npz changed"),
        ({"state": replace(STATE, files={})}, "data.npz changed"),
        ({"state": replace(STATE, packages={"torch": "2.12"})}, "torch 2.11 → 2.12"),
        ({"models": {"lenet": {}}}, "it was not there"),
    ],
)
def test_what_has_changed_is_done_again(
    made_fleets: ModuleType, before: Earlier, change: dict[str, Any], words: str
) -> None:
    state = change.pop("state", STATE)
    assert records.find_unchanged(before, made_fleets.fleet(**change).entries()[0], state) == words


@pytest.mark.parametrize(("kind", "words"), [("breached", "it had no winner"), ("begun", "it was not complete")])
def test_only_winners_stand(made_fleets: ModuleType, asked: Entry, tmp_path: Path, kind: str, words: str) -> None:
    found = made_fleets.breached(asked) if kind == "breached" else made_fleets.run(asked, complete=False)
    assert records.find_unchanged(fleet_in(made_fleets, asked, tmp_path, found), asked, STATE) == words


def test_a_run_that_stands_is_linked(before: Earlier, asked: Entry, tmp_path: Path) -> None:
    link = tmp_path / "now" / records.RUNS / asked.name
    for _ in range(2):
        records.take_over(before, asked.name, link)
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert (link / "run.json").is_file()
    again = tmp_path / "third" / records.RUNS / asked.name
    records.write(before.record, tmp_path / "now")
    records.take_over(records.open_fleet(tmp_path / "now"), asked.name, again)
    assert again.resolve() == (before.folder / records.RUNS / asked.name).resolve()
    assert str(before.folder.name) in str(again.readlink()), "a link leads to the run itself, not to another link"
    assert records.compare_entry(before, asked.name, link, before.run(before.record.entries[0])).note.startswith(
        "taken over"
    )
