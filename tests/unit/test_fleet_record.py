"""What becomes of entries, and of a fleet: statuses, exit codes, numbers with reasons, fleet.json."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from enginesmith.pipeline.errors import DataError, EnginesmithError, UsageError
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results.fleet import EntryRecord, Found, entry_record
from enginesmith.pipeline.results.run import Run

ROOT = Path(__file__).parents[2]


def test_the_shipped_schema_is_that_of_the_code() -> None:
    shipped = json.loads((ROOT / "pipeline/report/fleet.schema.json").read_text())
    assert shipped == json.loads(json.dumps(records.json_schema())), "run `make documents`"


def test_it_reads_back_as_itself(made_fleets: ModuleType, tmp_path: Path) -> None:
    asked = made_fleets.fleet(recipe={"measure": {"seconds": None}}, skip=["lenet@edge"])
    (one, *_) = asked.entries()
    found = made_fleets.record(asked, made_fleets.entry(one, tmp_path, made_fleets.run(one)), options={"batch": [2]})
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


def test_what_is_not_known_is_left_out_unless_it_is_to_be_done(made_fleets: ModuleType, tmp_path: Path) -> None:
    asked = made_fleets.fleet()
    document = json.loads(made_fleets.record(asked).model_dump_json(by_alias=True))
    document["fleet"]["future"] = 1
    (tmp_path / records.FILE).write_text(json.dumps(document))
    assert records.read(tmp_path).fleet == asked
    with pytest.raises(UsageError, match=r"does not know: fleet\.future"):
        records.read(tmp_path, to_go_on=True)


def made(made_fleets: ModuleType, folder: Path, kind: str) -> EntryRecord:
    (one, *_) = made_fleets.fleet().entries()
    kinds: dict[str, Run | EnginesmithError | None] = {
        "won": made_fleets.run(one),
        "partly": made_fleets.partly(one),
        "breached": made_fleets.breached(one),
        "lacking": made_fleets.ERRORS[0],
        "usage": made_fleets.ERRORS[1],
        "failed": made_fleets.ERRORS[2],
        "built": made_fleets.run(one, winner=None, winner_reason="2 variants are built", complete=False),
        "unmeasured": made_fleets.run(one, winner=None, winner_reason="nothing was measured that has a latency"),
        "waiting": None,
    }
    found = made_fleets.entry(one, folder, kinds[kind])
    assert isinstance(found, EntryRecord)
    return found


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("won", "done", 0),
        ("partly", "done", 0),
        ("unmeasured", "done", 0),
        ("breached", "breached", 3),
        ("lacking", "lacking", 4),
        ("built", "lacking", 4),
        ("failed", "failed", 1),
        ("usage", "failed", 2),
        ("waiting", "pending", 0),
    ],
)
def test_how_an_entry_ends(made_fleets: ModuleType, tmp_path: Path, kind: str, status: str, code: int) -> None:
    found = made(made_fleets, tmp_path, kind)
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
def test_the_exit_code_is_that_of_the_worst(
    made_fleets: ModuleType, tmp_path: Path, kinds: list[str], code: int
) -> None:
    entries = [made(made_fleets, tmp_path / str(number), kind) for number, kind in enumerate(kinds)]
    assert made_fleets.record(made_fleets.fleet(), *entries).exit_code == code


def test_what_was_interrupted_has_not_ended(made_fleets: ModuleType, tmp_path: Path) -> None:
    (one, *_) = made_fleets.fleet().entries()
    begun = made_fleets.run(one, complete=False)
    assert entry_record(one, Found(begun, ended=False), tmp_path).status == "pending"
    assert entry_record(one, Found(begun), tmp_path).status == "done"
    assert entry_record(one, Found(made_fleets.run(one), ended=False), tmp_path).status == "done"


def test_the_winner_has_its_numbers_and_reasons_for_those_it_lacks(made_fleets: ModuleType, tmp_path: Path) -> None:
    found = made(made_fleets, tmp_path, "won").winner
    assert found is not None
    assert (found.id, found.precision, found.batch, found.p50_ms) == (made_fleets.INT8, "int8", 1, 0.5)
    assert found.speedup == made_fleets.about(4.0)
    assert (found.peak_bytes, found.bytes, found.drop, found.reasons) == (100 << 20, 200_000, 0.01, {})
    (one, *_) = made_fleets.fleet().entries()
    bare = made_fleets.variant(made_fleets.INT8, 0.5, 4.0, memory=None, quality=None, reasons={"memory": "not asked"})
    lacking = entry_record(one, Found(made_fleets.run(one, variants=(bare,))), tmp_path).winner
    assert lacking is not None
    assert lacking.reasons["peak_bytes"] == "not asked"
    assert {name for name in ("peak_bytes", "drop", "metric") if getattr(lacking, name) is None} == set(lacking.reasons)
    itself = entry_record(one, Found(made_fleets.run(one, winner="eager")), tmp_path).winner
    assert itself is not None
    assert (itself.speedup, itself.reasons["speedup"]) == (None, "it is the baseline")


def test_logs_of_shared_steps_are_with_a_sibling(made_fleets: ModuleType, tmp_path: Path) -> None:
    first, second, *_ = made_fleets.fleet().entries()
    made_fleets.placed(made_fleets.partly(first), tmp_path, first.name)
    found = entry_record(second, Found(made_fleets.partly(second)), tmp_path, [first.name])
    assert found.failures[0].log == f"runs/{first.name}/logs/export.log"
    assert entry_record(second, Found(made_fleets.partly(second)), tmp_path).failures[0].log is None


def test_what_single_runs_call_options_is_told_as_fields(made_fleets: ModuleType, tmp_path: Path) -> None:
    (one, *_) = made_fleets.fleet().entries()
    failed = made_fleets.entry(one, tmp_path, DataError("--recover needs data", "give some with --calibration DATA"))
    fields = "an option is for all entries: in the fleet file, `recipe: {recover: …, calibration: …}` is for one model"
    assert failed.remedy == failed.failures[0].remedy == f"give some with --calibration DATA; {fields}"
    assert made_fleets.entry(one, tmp_path, made_fleets.ERRORS[0]).remedy == "start one"
