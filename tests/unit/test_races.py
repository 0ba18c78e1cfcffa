"""Test what a store remembers of races, and the order in which the next search tries its variants."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.frameworks.records import Coverage
from enginesmith.pipeline.measure.rows import LatencyRow, RaceRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.planning.plan import Plan
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import Recipe, make
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.store.past_records import PastRecords
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.base import RECORDS, scratch_artifact, write_records
from enginesmith.pipeline.workflows.earlier_races import EarlierRaces, PastRace, Work, expect_times, relative_times
from runs import small

CONVOLUTIONS = {"Conv": 0.98, "Gemm": 0.02}
WORK = Work(operators=CONVOLUTIONS, total_macs=1_000_000, batch=1, threads=1)


def race(work: Work = WORK, **times: float) -> PastRace:
    return PastRace(work=work, times=times)


def races_of(store: Store, machine: str) -> PastRecords[PastRace]:
    return store.past("races", machine, PastRace)


def test_work_is_similar_by_operators_size_batch_and_threads() -> None:
    assert WORK.distance(WORK) == 0
    products = WORK.model_copy(update={"operators": {"MatMul": 1.0}})
    assert WORK.distance(products) == pytest.approx(1)
    assert WORK.distance(WORK.model_copy(update={"total_macs": 8_000_000})) == pytest.approx(0.5)
    assert WORK.distance(WORK.model_copy(update={"batch": 4, "threads": 2})) == pytest.approx(0.5)
    assert products.distance(WORK) == WORK.distance(products)


def test_times_are_expected_from_similar_work_alone_and_the_most_similar_counts_most() -> None:
    near = WORK.model_copy(update={"total_macs": 1_100_000})
    other = WORK.model_copy(update={"operators": {"LSTM": 1.0}})
    known = [race(a=1.0, b=4.0), race(near, a=2.0, c=1.0), race(other, d=1.0)]
    times = expect_times(WORK, known)
    assert times.keys() == {"a", "b", "c"}
    assert times["b"] == pytest.approx(4)
    assert 1 < times["a"] < 2**0.5
    assert expect_times(other, known[:2]) == {}


def test_races_are_remembered_by_machine_newest_first(tmp_path: Path) -> None:
    here, there = (races_of(Store(tmp_path / "store"), name) for name in ("here", "there"))
    assert here.read() == ()
    for count in range(70):
        here.add(race(a=1.0 + count, b=2.0))
    there.add(race(b=1.0, a=3.0))
    assert [one.times["a"] for one in here.read()] == [70.0 - count for count in range(64)]
    here.add(here.read()[5])
    assert len({one.times["a"] for one in here.read()}) == 64
    assert there.read() == (race(b=1.0, a=3.0),)


def test_what_is_damaged_is_ignored_with_a_note_and_replaced(tmp_path: Path) -> None:
    races = races_of(Store(tmp_path), "here")
    races.add(race(a=1.0, b=2.0))
    (file,) = tmp_path.rglob("here.json")
    work = '{"operators": {}, "total_macs": 1, "batch": 1, "threads": 1}'
    file.write_text(f'{{"races": [{{"work": {work}, "times": {{"a": 0}}}}]}}')
    notes: list[str] = []
    assert races.read(notes.append) == ()
    assert notes.pop() == "races/here.json in the store: 1 of 1 records cannot be read, and are ignored"
    races.add(race(a=1.0, b=2.0))
    assert races.read(notes.append) == (race(a=1.0, b=2.0),)
    assert not notes
    for damage in ("", "{", "[]", '{"races": 7}', '{"others": []}', "\udcff"):
        file.write_bytes(damage.encode(errors="surrogateescape"))
        assert races.read(notes.append) == ()
        assert len(notes) == bool(damage)
        notes.clear()


def test_machines_of_one_kind_share_races_in_a_shared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / name))
        races = races_of(Store(f"file://{tmp_path}/shared"), "kind")
        races.add(PastRace(work=WORK, times={"a": 1.0, name: 2.0}))
    assert [*races.read()] == [race(a=1.0, two=2.0), race(a=1.0, one=2.0)]
    store = Store(f"file://{tmp_path}/shared")
    assert [entry.key for entry in store.prune(max_age_seconds=0)] == [f"{tmp_path}/shared/races/kind.json"]
    assert races.read() == ()


def test_races_are_small_files_that_pruning_removes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    races_of(store, "kind").add(race(a=1.0, b=2.0))
    assert [entry.key for entry in store.prune(max_age_seconds=0)] == ["races/kind.json"]


# A run that uses them.


def here(**changes: Any) -> Any:
    facts = {"processor": "P", "vector_units": ("avx2",), "usable_cores": 2, "gpus": None}
    return SimpleNamespace(**{**facts, **changes})


@pytest.fixture
def recipe() -> Recipe:
    values: dict[str, Any] = {"model": "digits", "engines": ["onnxruntime", "openvino"], "precisions": ["fp32", "int8"]}
    values |= {"data": "digits", "budgets": {"max_drop": 0.05}, "time_seconds": 60, "threads": 1, "batch": [1]}
    return make(values)


@pytest.fixture
def planned(recipe: Recipe) -> Plan:
    return plan(resolve_recipe(recipe))


def audited(races: EarlierRaces, folder: Path) -> dict[str, Outcome]:
    folder.mkdir()
    covered = Coverage(
        total_macs=1_000_000, macs={"fp32": 1.0}, operators={"fp32": CONVOLUTIONS}, weights={}, products={}
    )
    write_records(folder, [covered])
    assert races.audit
    return {races.audit: Outcome(races.audit, "done", artifact=scratch_artifact("record", folder / RECORDS, None))}


def raced(**speeds: float) -> Run:
    records = [
        VariantRecord(
            id=name,
            engine="onnxruntime",
            precision="fp32",
            status="built",
            race=(RaceRow(variant=name, lap=1, speedup=Interval(low=speed, median=speed, high=speed)),),
        )
        for name, speed in speeds.items()
    ]
    return small(records[0], *records)


def test_a_search_begins_with_what_was_fast_in_earlier_races(recipe: Recipe, planned: Plan, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    races = EarlierRaces.open(planned, recipe, store, here())
    outcomes = audited(races, tmp_path / "audit")
    assert races.audit == "audit-simplify"
    assert races.order({}) == races.order(outcomes) == ([], "")

    races.remember(raced(**{"onnxruntime-fp32": 1.0, "openvino-fp32": 0.5, "openvino-int8": 4.0}), outcomes)
    order, why = races.order(outcomes)
    assert why.endswith("onnxruntime-fp32, openvino-int8, onnxruntime-int8, …")
    names = ("openvino-int8", "onnxruntime-int8", "openvino-fp32")  # the first variant stays where it is
    steps = [str(step) for step in order]
    assert "verify-onnxruntime-fp32" not in steps
    ends = [f"verify-{name}" for name in names]
    assert [step for step in steps if step in ends] == ends
    assert steps.index("calibrate") < steps.index("build-openvino-int8")
    assert len(order) == len(set(order))
    trials = [step for step in steps if step.startswith("search-int8-") and "dynamic" not in step]
    assert trials == [
        f"search-int8-{engine}-{index}" for engine in ("openvino", "onnxruntime") for index in range(1, 17)
    ]
    assert {step.id for step in planned.steps if step.search} >= set(order)

    for other in (here(processor="Q"), here(vector_units=("avx2", "amx_int8")), here(usable_cores=8)):
        assert EarlierRaces.open(planned, recipe, store, other).order(outcomes) == ([], "")


def test_nothing_is_remembered_of_a_search_without_two_times(recipe: Recipe, planned: Plan, tmp_path: Path) -> None:
    races = EarlierRaces.open(planned, recipe, Store(tmp_path / "store"), here())
    outcomes = audited(races, tmp_path / "audit")
    races.remember(raced(a=1.0), outcomes)
    races.remember(raced(a=1.0, b=2.0), {})
    assert races.races.read() == ()


def test_times_are_those_of_the_first_lap_of_each_variant() -> None:
    def row(name: str, lap: int, speed: float) -> RaceRow:
        return RaceRow(variant=name, lap=lap, speedup=Interval(low=speed, median=speed, high=speed))

    def record(name: str, *rows: RaceRow, speed: float | None = None) -> VariantRecord:
        speedup = speed and Interval(low=speed, median=speed, high=speed)
        latency = (LatencyRow.model_validate({"batch": 1, "speedup": speedup}),) if speed else ()
        return VariantRecord(id=name, engine="e", precision="fp32", status="built", race=rows, latency=latency)

    first = record("a", row("a", 1, 1.0), row("a", 2, 2.0), speed=3.0)
    second, late = record("b", row("b", 1, 2.0), row("b", 2, 2.0), speed=3.0), record("c", row("c", 2, 1.0))
    assert relative_times(small(first, first, second, late)) == {"a": 2.0, "b": 1.0, "c": 2.0}
    measured = [record("a", speed=1.0), record("b", speed=4.0), record("c")]
    assert relative_times(small(measured[0], *measured)) == {"a": 4.0, "b": 1.0}
