"""The race: which variants drop out, and what a report tells of them."""

import contextlib
from pathlib import Path
from typing import Any, Self

import pytest

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import NO_TIME, ModelError
from enginesmith.pipeline.measure.rows import LatencyRow, RaceRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.report.run_tables import _status
from enginesmith.pipeline.report.sentences import _describe_search
from enginesmith.pipeline.results.run import VariantRecord
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import race
from enginesmith.pipeline.tasks.base import RECORDS, read_models, scratch_artifact, write_records
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, DROP_HIGH
from enginesmith.pipeline.tasks.race import CHOICE, EARLIER, PRUNED_CHOICE, RACE, Race, Stay, drop_slow, explain_unmade
from runs import small, variant


def row(low: float, median: float, high: float) -> LatencyRow:
    return LatencyRow(batch=1, speedup=Interval(median=median, low=low, high=high))


@pytest.mark.parametrize(
    ("rows", "last", "dropped"),
    [
        ({"a": (1, 1, 1), "b": (1.9, 2, 2.1)}, False, {"a"}),
        ({"a": (1, 1, 1), "b": (1.05, 1.1, 1.2)}, False, set()),
        ({"a": (1, 1, 1), "b": (0.5, 2, 9)}, False, set()),
        ({"a": (1, 1, 1), "b": (1, 1.1, 1.2), "c": (1, 1.2, 1.3)}, True, {"a"}),
        ({"a": (1, 1, 1), "b": (1, 1.1, 1.2), "c": (1, 1.2, 1.3)}, False, set()),
        ({"safe": (1, 1, 1), "b": (4, 4, 4), "c": (4, 4, 4)}, True, set()),
        ({"safe": (4, 4, 4), "also safe": (1, 1, 1)}, False, {"also safe"}),
    ],
)
def test_the_clearly_slower_drop_out_and_the_fastest_lossless_stays(
    rows: dict[str, tuple[float, float, float]], last: bool, dropped: set[str]
) -> None:
    measured = {name: row(*ends) for name, ends in rows.items()}
    reasons = drop_slow(measured, (("safe", "also safe"),), 2, {}, last=last)
    assert set(reasons) == dropped
    assert all(reasons.values())


def test_the_dense_one_of_a_pruned_one_that_stays_stays_beside_it() -> None:
    measured = {
        name: row(speed, speed, speed) for name, speed in {"a-pruned": 4, "a": 2, "b-pruned": 2, "b": 1}.items()
    }
    assert set(drop_slow(measured, (), 3, {"a-pruned": "a", "b-pruned": "b"})) == {"b-pruned", "b"}


def test_the_fastest_that_hardly_loses_anything_stays_beside_the_lossless_one(tmp_path: Path) -> None:
    speeds = {"int8": 5, "nncf": 4.9, "int8-dynamic": 4.8, "bf16": 4, "slow-bf16": 3.9, "fp32": 2}
    measured = {name: row(speed, speed, speed) for name, speed in speeds.items()}
    safe = ("bf16", "slow-bf16", "fp32")
    assert set(drop_slow(measured, (("fp32",), safe), 3, {})) == {"slow-bf16"}
    assert set(drop_slow(measured, (("fp32",), ("fp32",)), 3, {})) == {"bf16", "slow-bf16"}
    inputs = {}
    for name, high in {"bf16": 0.002, "int8": 0.003}.items():
        quality = {"metric": "close", "value": 0.9, "baseline": 0.9, "drop": 0.001, "drop_high": high, "samples": 100}
        (tmp_path / name).mkdir()
        write_records(tmp_path / name, [quality])
        inputs[f"{name} {CHOICE}"] = scratch_artifact("record", tmp_path / name / RECORDS, None)
    task = Race(engines={}, lossless=("fp32",), seconds=1, most=3, max_drop=0.01, largest=False, device=Device())
    assert [name for name in speeds if task._hardly_loses(name, inputs)] == ["bf16", "fp32"]
    counted = {**quality, "drop": 0.0, "drop_high": 0.03, "counted": True, "worse": 0, "better": 0, "deviation": 0.0}
    write_records(tmp_path / "int8", [counted])  # of so few samples nothing better can be known
    assert task._hardly_loses("int8", inputs)
    for name, most in {"found": 0.002, "lossy": 0.003, "unknown": None}.items():  # by a search, which judged it itself
        (tmp_path / name).mkdir()
        write_records(tmp_path / name, [{"group": "Conv_1", DROP_HIGH: most}])
        inputs = {f"{name} {ASSIGNMENT}": scratch_artifact("record", tmp_path / name / RECORDS, None)}
        assert task._hardly_loses(name, inputs) is (name == "found")


@pytest.mark.parametrize("waits", ["a", "b"])
def test_no_variant_drops_out_by_a_ratio_of_calls_that_waited_for_a_core(waits: str) -> None:
    """Two threads that wait for each other took 71 instead of 0.21 ms while other programs used the cores."""
    measured = {"a": row(1, 1, 1), "b": row(15_000, 16_000, 18_000)}
    assert drop_slow(measured, (), 1, {}) == {"a": "b is 16000.00× [15000.00, 18000.00] faster"}
    measured[waits] = measured[waits].model_copy(update={"speedup_disturbed": True})
    assert not drop_slow(measured, (), 1, {})
    said = "it is number 2 in speed (by calls that other programs disturbed), and 1 are measured in full"
    assert drop_slow(measured, (), 1, {}, last=True) == {"a": said}


def test_a_noisy_ratio_is_told_by_its_near_end() -> None:
    reasons = drop_slow({"a": row(1, 1, 1), "b": row(2, 6, 20)}, (), 3, {})
    assert reasons == {"a": "b is at least 2.00× faster"}


@pytest.mark.parametrize(
    ("eager", "safe", "best", "said"),
    [
        ((0.9, 1, 1.1), (2, 2, 2), (2.1, 2.1, 2.1), ""),
        ((1, 1, 1), (2, 2, 2), (3, 3, 3), "best is 1.50× [1.50, 1.50] faster than safe"),
        ((1, 1, 1), (4.5, 4.5, 4.5), (5, 5, 5), "best is 5.00× [5.00, 5.00] faster than eager"),
        ((1, 1, 1), (5, 5, 5), (4, 4, 4), "safe is 5.00× [5.00, 5.00] faster than eager"),
        ((1, 1, 1), (2, 2, 2), (1, 3, 9), ""),
        ((1, 1, 1), (2, 2, 2), (9, 30, 90), "best is at least 9.00× faster than eager"),
    ],
)
def test_compiling_is_dropped_where_it_has_never_gained_so_much(
    eager: tuple[float, float, float],
    safe: tuple[float, float, float],
    best: tuple[float, float, float],
    said: str,
) -> None:
    rows = [
        RaceRow(variant=name, lap=1, speedup=row(*ends).speedup)
        for name, ends in {"eager": eager, "safe": safe, "best": best}.items()
    ]
    explained = explain_unmade(rows, ("eager", "safe", "dropped before"), ("eager", "eager-bf16"))
    assert explain_unmade(rows, ("dropped before",), ("eager",)) == ""
    assert said in explained
    assert bool(said) == bool(explained)


def test_compiling_in_bf16_is_judged_by_eager_in_bf16() -> None:
    speeds = {"eager": 1, "eager-bf16": 3, "best": 5}
    rows = [RaceRow(variant=name, lap=1, speedup=row(*[speed] * 3).speedup) for name, speed in speeds.items()]
    assert explain_unmade(rows, ("eager-bf16",), ("eager", "eager-bf16")) == ""
    slow = [*rows[:1], rows[1].model_copy(update={"speedup": row(0.5, 0.5, 0.5).speedup}), rows[2]]
    assert "faster than eager-bf16" in explain_unmade(slow, ("eager-bf16",), ("eager", "eager-bf16"))


@pytest.mark.parametrize("waits", ["other", "best"])
@pytest.mark.parametrize("originals", [("other",), ()])
def test_calls_that_waited_for_a_core_leave_no_variant_unmade(originals: tuple[str, ...], waits: str) -> None:
    """With other programs on the cores, eager was 11 500 × slower than a variant of one thread, else 14 × slower."""
    rows = [RaceRow(variant="other", lap=1, speedup=row(1, 1, 1).speedup)]
    rows.append(RaceRow(variant="best", lap=1, speedup=row(11_500, 11_500, 11_500).speedup))
    assert "best is 11500.00×" in explain_unmade(rows, ("other",), originals)
    waited = [each.model_copy(update={"disturbed": each.variant == waits}) for each in rows]
    assert explain_unmade(waited, ("other",), originals) == ""


def test_a_race_begins_with_what_an_earlier_one_dropped(tmp_path: Path) -> None:
    speed = row(1, 1, 1).speedup
    rows = [RaceRow(variant="a", lap=1, speedup=speed), RaceRow(variant="b", lap=1, speedup=speed, dropped="slow"),
            RaceRow(variant="c", lap=0, dropped="it was not made")]  # fmt: skip
    write_records(tmp_path, rows)
    record = scratch_artifact("record", tmp_path / RECORDS, None)
    engine = engine_class("onnxruntime")()
    task = Race(engines=dict.fromkeys("abc", engine), lossless=(), seconds=1, most=0, max_drop=None, largest=False,
                device=Device())  # fmt: skip
    (tmp_path / "out").mkdir()
    effect = task.run({EARLIER: record, "a verified": record, "b verified": record}, tmp_path / "out", print)
    assert read_models(scratch_artifact("record", tmp_path / "out" / RECORDS, None), RaceRow) == rows
    assert effect.summary == "1 of 2 variants are measured in full"
    (tmp_path / "none").mkdir()
    assert task.run({}, tmp_path / "none", print).summary == "no variant races"


def test_what_dropped_out_of_an_earlier_race_stays_out_while_its_engine_is_the_same(tmp_path: Path) -> None:
    record = scratch_artifact("record", tmp_path / RECORDS, None)
    out = RaceRow(variant="a", lap=2, dropped="b is faster", speedup=row(1, 1, 1).speedup, engine_sha256="same")
    other = out.model_copy(update={"variant": "b", "engine_sha256": "older"})
    task = Race(engines=dict.fromkeys("ab", engine_class("onnxruntime")()), lossless=(), seconds=1, most=3,
                max_drop=None, largest=False, device=Device(), earlier=(out, other))  # fmt: skip
    inputs = {name: record.model_copy(update={"sha256": "same"}) for name in "ab"}
    effect = task.run(inputs | {"a verified": record, "b verified": record}, tmp_path, print)
    assert read_models(record, RaceRow) == [out.model_copy(update={"speedup": None})]
    assert effect.summary == "1 of 2 variants are measured in full; 1 had dropped out of an earlier race"
    assert task.identity == task.model_copy(update={"earlier": ()}).identity


def test_what_failed_after_an_earlier_race_is_not_measured_and_drops_nobody(tmp_path: Path) -> None:
    record = scratch_artifact("record", tmp_path / RECORDS, None)
    shared = RaceRow(variant="b", lap=0, dropped="export is wrong, as a showed")
    engines = dict.fromkeys("abc", engine_class("onnxruntime")())
    task = Race(engines=engines, lossless=("a", "b", "c"), seconds=1, most=1,
                max_drop=None, largest=False, device=Device(), failed=("a",), earlier=(shared,),
                unmade={"d": ("a", "b")})  # fmt: skip
    engine = record.model_copy(update={"sha256": "ab"})
    inputs = dict.fromkeys(["a", "b", "a verified", "b verified"], engine)
    effect = task.run(inputs, tmp_path, print)
    assert read_models(record, RaceRow) == [shared, RaceRow(variant="a", lap=0, kept=True)]
    assert effect.summary == "0 of 2 variants are measured in full; 1 had dropped out of an earlier race"
    assert task.identity != task.model_copy(update={"failed": ()}).identity


def test_what_no_time_was_left_for_is_started_before_what_was_measured_in_full() -> None:
    task = Race(engines={}, lossless=(), seconds=1, most=2, max_drop=None, largest=False, device=Device(),
                kept=("a", "c", "d"))  # fmt: skip
    assert task._order("abcde") == ["a", "b", "e", "c", "d"]
    assert task._order("be") == ["b", "e"]


def test_a_second_race_is_run_only_where_something_has_come_since_the_first() -> None:
    task = Race(engines={}, lossless=(), seconds=1, most=1, max_drop=None, largest=False, device=Device())
    assert task._needs_laps("ab", "b", [])
    assert not task._needs_laps("ab", "", [])
    assert task.model_copy(update={"unmade": {"c": ()}})._needs_laps("ab", "", [])


def test_rounds_that_are_too_few_drop_nobody() -> None:
    assert drop_slow({"a": LatencyRow(batch=1), "b": row(1, 1, 1)}, (), 1, {}, last=True) == {}


def few(milliseconds: float) -> LatencyRow:
    return LatencyRow(batch=1, p50_ms=milliseconds)


class Laps:
    """A benchmark whose rows are known: by lap, the speed of each variant, the time of a call, or why it has none."""

    def __init__(self, laps: list[dict[str, Any]], late_after: int) -> None:
        self.laps, self.late_after, self.lap = laps, late_after, 0

    @property
    def late(self) -> bool:
        return self.lap >= self.late_after

    def measure(self, batch: int, feeds: Any, only: list[str]) -> None:
        self.lap += 1

    def rows(self, name: str) -> list[LatencyRow]:
        found = self.laps[self.lap - 1].get(name, NO_TIME)
        if isinstance(found, LatencyRow):
            return [found]
        return [LatencyRow(batch=1, failure=found) if isinstance(found, str) else row(found, found, found)]


def test_a_race_has_its_time_and_its_rows_name_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Recorded(Laps, contextlib.nullcontext[Any]):
        def __init__(self, candidates: list[Candidate], *rest: object) -> None:
            super().__init__([{"a": 1, "b": 5, "c": 2}], late_after=1)
            given.append([candidate.id for candidate in candidates])

        def __enter__(self) -> Self:
            return self

        def end_in(self, *seconds: float) -> None:
            given.append(seconds)

    monkeypatch.setattr(race, "LatencyBenchmark", Recorded)
    monkeypatch.setattr(race, "measured_feeds", lambda reference: {1: {}})
    engine = engine_class("onnxruntime")()
    task = Race(engines=dict.fromkeys("abcd", engine), lossless=("b",), seconds=1, most=1, max_drop=None, largest=False,
                device=Device(), kept=("a", "b"), left_seconds=10.0, grace_seconds=30.0)  # fmt: skip
    record = scratch_artifact("record", tmp_path / RECORDS, None)
    inputs = {name: record.model_copy(update={"sha256": name.upper()}) for name in "abcd"}
    checked = {f"{name} verified": record for name in "abcd"}
    task.run({"reference": record, **inputs, **checked}, tmp_path, print)
    assert given == [["a", "c", "d", "b"], (9.0, 30.0)]
    measured = [row for row in read_models(record, RaceRow) if row.lap]
    assert {row.variant: row.engine_sha256 for row in measured} == dict(zip("abcd", "ABCD", strict=True))
    given.clear()
    (tmp_path / "again").mkdir()
    first = {EARLIER: record}
    task.run({"reference": record, **first, **inputs, **checked}, tmp_path / "again", print)
    assert given == [], "nothing has come since the first race"


@pytest.mark.parametrize(
    ("laps", "ends"),
    [
        ([{"a": 1, "b": 5, "c": 4, "d": 4.9}], {"c": "b is 1.25× [1.25, 1.25] faster"}),
        ([{"a": 1, "b": 4.7, "c": 4.8, "d": 4.9}], {"b": "it is number 3 in speed, and 2 are measured in full"}),
        (
            [{"a": 1, "b": 4.7, "c": 4.8, "d": 4.9}, {"a": 1}],
            {"b": "it is number 3 in speed, and 2 are measured in full"},
        ),
        ([{"a": 1, "b": 5}], {"c": NO_TIME, "d": NO_TIME}),
        ([{}], {"c": NO_TIME, "d": NO_TIME}),
        ([{"b": "it crashed"}], {"b": "it crashed", "d": NO_TIME}),
        ([{"a": few(9), "b": few(5), "c": few(2), "d": few(1)}], {"b": NO_TIME, "c": NO_TIME}),
        ([{"a": few(9), "b": few(5), "c": few(2), "d": few(4)}, {}], {"b": NO_TIME, "d": NO_TIME}),
        ([{"a": 1, "b": few(5), "c": few(2), "d": few(4)}], {"b": NO_TIME, "d": NO_TIME}),
    ],
)
def test_what_an_earlier_lap_found_counts_where_the_time_was_over(
    laps: list[dict[str, Any]], ends: dict[str, str]
) -> None:
    """Else all would be tuned, in the time that is kept for their latencies; or nothing would be left to measure."""
    task = Race(engines={}, lossless=("a",), seconds=1, most=2, max_drop=None, largest=False, device=Device())
    rows = list(task._run_laps(Laps(laps, len(laps)), [*"abcd"], [], 1, {}, print))  # type: ignore[arg-type]
    found = {each.variant: each.dropped or each.failure for each in rows if each.dropped or each.failure}
    assert found == ends


def test_where_something_else_decides_too_nobody_is_dropped_for_speed() -> None:
    task = Race(engines={}, lossless=(), seconds=1, most=4, by_speed=False, max_drop=None, largest=False,
                device=Device())  # fmt: skip
    laps: Any = Laps([{"a": 1, "b": 5, "c": "it crashed", "d": 4.9}], 2)
    rows = list(task._run_laps(laps, [*"abcd"], [], 1, {}, print))
    assert {each.variant: each.dropped or each.failure for each in rows} == {
        "a": "",
        "b": "",
        "c": "it crashed",
        "d": "",
    }


def test_too_large_a_loss_drops_a_variant_before_the_first_lap(tmp_path: Path) -> None:
    quality = {"metric": "top1", "title": "top-1", "value": 0.9, "baseline": 0.95, "drop": 0.05, "samples": 100}
    write_records(tmp_path, [quality])
    task = Race(engines={}, lossless=(), seconds=1, most=3, max_drop=0.01, largest=False, device=Device())
    inputs = {"a choice": scratch_artifact("record", tmp_path / RECORDS, None)}
    judged = task._judge_drop("a", inputs, "a choice")
    assert judged is not None
    assert judged.dropped == "its accuracy on the samples for choosing: the drop of 0.0500 is more than 0.01"
    assert task._judge_drop("b", inputs, "b choice") is None
    assert task.model_copy(update={"kept": ("a",)})._judge_drop("a", inputs, "a choice") is None


def test_a_pruned_variant_is_made_if_its_dense_one_is_left_and_its_module_is_good_enough(tmp_path: Path) -> None:
    quality = {"metric": "top1", "title": "top-1", "value": 0.4, "baseline": 0.95, "drop": 0.55, "samples": 100}
    speed = row(1, 1, 1).speedup
    inputs, device = {}, Device()
    for name, records in {
        "race": [
            RaceRow(variant="a", lap=1, speedup=speed),
            RaceRow(variant="b", lap=1, speedup=speed, dropped="slow"),
        ],
        "quality": [quality],
    }.items():
        (tmp_path / name).mkdir()
        write_records(tmp_path / name, records)
        inputs[name] = scratch_artifact("record", tmp_path / name / RECORDS, None)
    engines = dict.fromkeys(("a", "b"), engine_class("onnxruntime")())
    dense = {"a-pruned": "a", "b-pruned": "b"}
    task = Race(
        engines=engines, lossless=(), seconds=1, most=0, max_drop=0.01, largest=False, device=device, dense=dense
    )
    verified = {EARLIER: inputs["race"], "a verified": inputs["race"], "b verified": inputs["race"]}
    task.run(verified, tmp_path, print)
    said = {
        each.variant: each.dropped
        for each in read_models(scratch_artifact("record", tmp_path / RECORDS, None), RaceRow)
    }
    assert said == {"a": "", "b": "slow", "b-pruned": "it was not made: b is out of the race"}
    last = task.model_copy(update={"engines": engines | {"a-pruned": engines["a"]}})
    last.run({**verified, PRUNED_CHOICE: inputs["quality"]}, tmp_path, print)
    said = {
        each.variant: each.dropped
        for each in read_models(scratch_artifact("record", tmp_path / RECORDS, None), RaceRow)
    }
    assert said["a-pruned"] == "its accuracy on the samples for choosing: the drop of 0.5500 is more than 0.01"


def test_steps_of_several_variants_continue_while_one_stays(tmp_path: Path) -> None:
    quality = {"metric": "top1", "title": "top-1", "value": 0.94, "baseline": 0.95, "drop": 0.01, "samples": 100}
    write_records(tmp_path, [RaceRow(variant="b", lap=1, dropped="no"), RaceRow(variant="c", lap=1, dropped="slow")])
    record = scratch_artifact("record", tmp_path / RECORDS, None)
    (tmp_path / "out").mkdir()
    assert Stay(variants=("b", "a")).run({RACE: record}, tmp_path / "out", print).rejected == ""
    assert Stay(variants=("b", "c")).run({RACE: record}, tmp_path / "out", print).rejected == "dropped: no"
    (tmp_path / "quality").mkdir()
    write_records(tmp_path / "quality", [quality])
    judged = {RACE: record, CHOICE: scratch_artifact("record", tmp_path / "quality" / RECORDS, None)}
    assert Stay(variants=("a",), max_drop=0.01).run(judged, tmp_path / "out", print).rejected == ""
    rejected = Stay(variants=("a",), max_drop=0.0).run(judged, tmp_path / "out", print).rejected
    assert rejected == "dropped: its accuracy on the samples for choosing: the drop of 0.0100 is more than 0"


@pytest.mark.parametrize(("end", "rejected"), [({}, ""), ({"dropped": "b is 2× faster"}, "dropped: b is 2× faster")])
def test_a_variant_stays_or_ends_with_the_reason(tmp_path: Path, end: dict[str, str], rejected: str) -> None:
    write_records(tmp_path, [RaceRow(variant="b", lap=1, dropped="no"), RaceRow(variant="a", lap=1, **end)])
    inputs = {RACE: scratch_artifact("record", tmp_path / RECORDS, None)}
    assert Stay(variants=("a",)).run(inputs, tmp_path, print).rejected == rejected


def test_a_variant_that_crashes_in_the_race_has_failed(tmp_path: Path) -> None:
    write_records(tmp_path, [RaceRow(variant="a", lap=1, failure="it crashed")])
    with pytest.raises(ModelError, match="it failed in the race: it crashed"):
        Stay(variants=("a",)).run({RACE: scratch_artifact("record", tmp_path / RECORDS, None)}, tmp_path, print)


def test_a_variant_that_no_time_was_left_for_has_not_failed(tmp_path: Path) -> None:
    write_records(tmp_path, [RaceRow(variant="a", lap=1, failure=NO_TIME)])
    inputs = {RACE: scratch_artifact("record", tmp_path / RECORDS, None)}
    assert Stay(variants=("a",)).run(inputs, tmp_path, print).rejected == NO_TIME


def test_the_report_tells_what_became_of_each_variant_and_what_is_left() -> None:
    ends: dict[str, dict[str, Any]] = {
        "a": {"status": "measured", "race": [RaceRow(variant="a", lap=1)]},
        "b": {"status": "skipped", "race": [RaceRow(variant="b", lap=1, dropped="a is faster")]},
        "c": {"status": "skipped", "untried": True, "late": "no time"},
        "d": {"status": "failed", "race": [RaceRow(variant="d", lap=1, dropped="a is faster")]},
        "e": {"status": "skipped", "reason": "only 0 % of the multiply-adds have a form in int8-dynamic"},
        "f": {"status": "built", "reason": "no CUDA device here"},
        "g": {"status": "skipped", "untried": True, "late": "no time to measure"},
        "h": {"status": "measured"},
        "i": {"status": "skipped", "untried": True, "late": "over share"},
    }
    records = [VariantRecord(id=name, engine="openvino", precision="fp32", **end) for name, end in ends.items()]
    records[0] = records[0].model_copy(update={"latency": (LatencyRow(batch=1, p50_ms=1.0),)})
    said = list(_describe_search(small(variant("eager"), *records)))
    assert said == [
        "search: 9 variants: 1 measured in full, 1 not measured at batch 1, which decides, 1 dropped, 1 skipped, "
        "1 built and not measured, 1 failed, 1 not tried, as the time was over, 1 stopped at a share of the time, "
        "1 built and not measured, as the time was over",
        "search: with as much time again, `enginesmith resume` tries c, g, i",
    ]
    assert records[1].dropped == "a is faster"
    states = ["measured", "dropped", "not tried", "failed", "skipped", "built", "not measured"]
    assert [_status(record) for record in records] == [*states, "measured", "not measured"]
