"""Runs side by side: what is told from chance, and by what; what forbids a comparison; what else changed."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow
from enginesmith.pipeline.measure.statistics import Interval, Timed, divide, paired_ratio
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import comparison as rendering
from enginesmith.pipeline.results import comparison, differences
from enginesmith.pipeline.results.comparison import compare, compare_latency
from enginesmith.pipeline.results.run import BuildRecord, ModelRecord, Run, StoredArtifact, VariantRecord
from runs import small

ENGINE = "onnxruntime-fp32"


def about(value: float, share: float = 0.02) -> Interval:
    return Interval(median=value, low=value * (1 - share), high=value * (1 + share))


def row(ms: float, times: float, batch: int = 1, **changes: Any) -> LatencyRow:
    found = LatencyRow(batch=batch, n=100, launches=5, p50_ms=ms, median_ms=about(ms), speedup=about(times))
    return found.model_copy(update=changes)


def variant(*rows: LatencyRow, name: str = ENGINE, **changes: Any) -> VariantRecord:
    found = VariantRecord(
        id=name,
        engine="onnxruntime",
        precision="fp32",
        status="measured",
        latency=rows,
        artifact=StoredArtifact(path="model.onnx", sha256="aa", bytes=1000),
        memory=MemoryRow(device="cpu", batch=1, peak_bytes=100 << 20),
        quality=Quality(metric="top1", value=0.9, baseline=0.91, drop=0.01, drop_low=0.0, drop_high=0.02, samples=100),
        build=BuildRecord(seconds=1.0, host_peak_bytes=None, engine_bytes=1000),
    )
    return found.model_copy(update=changes)


def eager(*rows: LatencyRow) -> VariantRecord:
    return VariantRecord(id="eager", engine="eager", precision="fp32", status="measured", latency=rows)


def run(*variants: VariantRecord, recipe: dict[str, Any] | None = None, **changes: Any) -> Run:
    environment = {
        "processor": "Some CPU",
        "usable_cores": 2,
        "python": "3.11.7",
        "kernel": "6.0",
        "packages": {"torch": "2.11", "onnxruntime": "1.23"},
        **changes.pop("environment", {}),
    }
    values = {
        "recipe": make({"model": "digits", **(recipe or {})}, listed=True),
        "environment": environment,
        "model": ModelRecord(source="digits", sha256="m", signature=None, data="digits/test"),
        "winner": ENGINE,
    }
    return small(eager(row(1.0, 1.0)), *variants, **{**values, **changes})


def pair(before: Run, after: Run, *, any_device: bool = False) -> comparison.Pair:
    return compare([(Path("a"), before), (Path("b"), after)], any_device=any_device).pairs[0]


FIRST = run(variant(row(0.5, 2.0)))


def test_what_is_slower_for_certain_is_told() -> None:
    found = compare_latency(FIRST, run(variant(row(0.55, 1.8))), ENGINE, 1)
    assert (found.significant, round(found.median or 0, 3)) == (True, 1.111)
    assert found.low is not None
    assert 1.05 < found.low < 1.111
    back = compare_latency(run(variant(row(0.55, 1.8))), FIRST, ENGINE, 1)
    assert (back.significant, round(back.median or 0, 3)) == (True, 0.9)


def measured(rng: np.random.Generator, true: float) -> Interval:
    """A speed-up as it is measured: five launches of four rounds, a day's drift, and launches that differ."""
    day = rng.lognormal(0, 0.3)
    sides: list[list[list[Timed]]] = [[], []]
    for _ in range(5):
        for side, seconds in zip(sides, (day * true, day), strict=True):
            launch = seconds * rng.lognormal(0, 0.03)
            side.append([Timed(launch * rng.lognormal(0, 0.01, size=1)) for _ in range(4)])
    return paired_ratio(*sides, seed=0)


def outcomes(true: float, count: int) -> tuple[float, float]:
    """The share of comparisons whose interval holds the true change of a variant's time, and of those that are told
    from no change."""
    rng = np.random.default_rng(7)
    found = [divide(measured(rng, 2.0), measured(rng, 2.0 / true)) for _ in range(count)]
    covering = sum(one.low <= true <= one.high for one in found)
    return covering / count, sum(not one.low <= 1 <= one.high for one in found) / count


def test_intervals_hold_the_true_change_and_find_large_ones() -> None:
    covered, false_alarms = outcomes(1.0, 150)
    assert 0.93 <= covered < 1
    assert false_alarms == pytest.approx(1 - covered)
    covered, detected = outcomes(1.15, 60)
    assert covered >= 0.9
    assert detected >= 0.9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ModelRecord(source="digits", sha256="other", signature=None, data="digits/test")}, "other models"),
        ({"environment": {"packages": {"torch": "2.12"}}}, "torch: 2.11 and 2.12"),
        ({"environment": {"python": "3.12"}}, "python: 3.11.7 and 3.12"),
        ({"recipe": {"threads": 1}}, "threads: 0 and 1"),
        ({"environment": {"thread_variables": {"OMP_NUM_THREADS": "1"}}}, "thread_variables.OMP_NUM_THREADS: none and"),
        (
            {"environment": {"other_variables": {"LD_PRELOAD": "libjemalloc.so"}}},
            "other_variables.LD_PRELOAD: none and",
        ),
        ({"environment": {"gpus": [{"name": "X", "driver": "1"}]}}, "gpus"),
    ],
)
def test_another_baseline_is_no_yardstick(changes: dict[str, Any], words: str) -> None:
    found = compare_latency(FIRST, run(variant(row(0.6, 2.0)), **changes), ENGINE, 1)
    assert (found.basis, found.median) == ("milliseconds", pytest.approx(1.2))
    assert words in found.note


def of_model(sha256: str | None, content: str) -> Run:
    model = ModelRecord(source="digits", sha256=sha256, content=content, signature=None, data="digits/test")
    return run(variant(row(0.5, 2.0)), model=model)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (of_model("a", "x"), of_model("b", "x"), True),
        (of_model("a", "x"), of_model("b", "y"), False),
        (of_model("a", ""), of_model("b", ""), False),
        (of_model("a", ""), of_model("a", ""), True),
        (of_model("a", "x"), of_model(None, ""), None),
        (of_model(None, ""), of_model(None, ""), None),
    ],
)
def test_runs_are_of_one_model_by_its_digest_or_its_content(before: Run, after: Run, same: bool | None) -> None:
    assert differences.is_same_model(before, after) is same
    found = pair(before, after)
    assert ("the runs are of different models: what differs may be due to that alone" in found.cautions) == (
        same is False
    )
    one_digest = before.model.sha256 == after.model.sha256
    assert [one.name for one in found.changed.model] == ([] if same or one_digest else ["sha256"])


def test_what_an_older_version_did_not_record_of_a_machine_is_no_difference() -> None:
    older, newer = FIRST, run(variant(row(0.5, 2.0)), environment={"vector_units": "AVX2", "gpus": []})
    assert differences.why_no_yardstick(older, newer) == ""
    assert not pair(older, newer).changed.machine
    cards = [{"name": "A"}, {"name": "A", "mig": True}]
    gpus = [run(variant(row(0.5, 2.0)), environment={"gpus": [card]}) for card in cards]
    assert not pair(*gpus).changed.machine


def test_samples_without_a_digest_are_no_other_samples() -> None:
    def judged(digest: str) -> Run:
        quality = Quality(metric="top1", value=0.9, baseline=0.91, drop=0.01, samples=100, data_sha256=digest)
        return run(variant(row(0.5, 2.0), quality=quality))

    assert not pair(judged(""), judged("a")).changed.data
    assert [one.name for one in pair(judged("a"), judged("b")).changed.data] == ["evaluated samples, sha256"]


def test_other_versions_of_what_the_baseline_does_not_use_leave_it_one() -> None:
    other = run(variant(row(0.6, 2.2)), environment={"packages": {"torch": "2.11", "onnxruntime": "1.24"}})
    assert compare_latency(FIRST, other, ENGINE, 1).basis == "speed-up over eager"


def test_the_baseline_itself_is_compared_in_milliseconds() -> None:
    found = compare_latency(FIRST, run(baseline=eager(row(1.5, 1.0))), "eager", 1)
    assert (found.basis, found.median) == ("milliseconds", 1.5)
    assert found.note.startswith("times in milliseconds are compared")


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (run(), "the other run has no such variant"),
        (
            run(variant(row(1, 2, batch=8))),
            "not measured at batch 1 in the other run, but at 8; run both with the same",
        ),
        (run(variant(LatencyRow(batch=1, failure="out of memory"))), "the other run: out of memory"),
        (run(variant(reasons={"latency": "not asked for"})), "not measured in the other run: not asked for"),
    ],
)
def test_what_was_not_measured_has_a_reason(after: Run, words: str) -> None:
    found = compare_latency(FIRST, after, ENGINE, 1)
    assert (found.median, found.low, found.significant, found.basis) == (None, None, None, None)
    assert words in found.note


def test_an_interval_that_says_nothing_is_not_shown() -> None:
    wild = variant(row(1.0, 1.0, speedup=Interval(median=2.7, low=0.15, high=580.0)))
    found = compare_latency(FIRST, run(wild), ENGINE, 1)
    assert found.significant is None
    assert found.note.startswith("too noisy to tell; measure on a quiet machine")
    assert rendering.format_percent(found) == "too noisy to tell"


@pytest.mark.parametrize("side", ["engine", "baseline"])
def test_what_others_disturbed_is_not_judged_by(side: str) -> None:
    shares = {"engine": 0.1, "baseline": 0.1, side: 0.9}
    engine = variant(row(1.0, 1.0, disturbed_share=shares["engine"]))
    after = run(engine, baseline=eager(row(1.0, 1.0, disturbed_share=shares["baseline"])))
    found = compare_latency(FIRST, after, ENGINE, 1)
    assert (found.median, found.significant) == (2.0, None)
    assert "90% of the calls of one side waited" in found.note


@pytest.mark.parametrize("speedup", [None, Interval(median=2.0, low=0.0, high=3.0)])
def test_without_a_speed_up_or_an_interval_what_is_left_is_shown(speedup: Interval | None) -> None:
    found = compare_latency(FIRST, run(variant(row(0.6, 2.0, speedup=speedup))), ENGINE, 1)
    assert found.basis == "milliseconds"
    assert "has no speed-up" in found.note
    bare = row(0.6, 2.0, speedup=None, median_ms=None, reasons={"median_ms": "too few rounds"})
    found = compare_latency(FIRST, run(variant(bare)), ENGINE, 1)
    assert (found.median, found.low, found.significant) == (1.2, None, None)
    assert found.note.endswith("there is no interval: too few rounds")


def test_a_measurement_from_the_store_is_not_a_second_one() -> None:
    found = compare_latency(FIRST, FIRST, ENGINE, 1)
    assert (found.median, found.significant) == (1.0, False)
    assert "took it from the store" in found.note


def test_numbers_beside_latency_are_judged_by_their_own_spread() -> None:
    changed = variant(
        row(0.5, 2.0),
        artifact=StoredArtifact(path="m", sha256="b", bytes=1001),
        memory=MemoryRow(device="cpu", batch=1, peak_bytes=102 << 20),
        quality=Quality(metric="top1", value=0.8, baseline=0.9, drop=0.1, drop_low=0.08, drop_high=0.12, samples=100),
    )
    found = {one.name: one for one in pair(FIRST, run(changed)).variants[1].numbers}
    assert found["peak_bytes"].significant is False, "2 % are within what peaks differ by"
    assert found["size_bytes"].significant is True
    drop = found["drop"]
    assert (drop.significant, round(drop.low or 0, 4)) == (True, round(0.09 - math.hypot(0.02, 0.01), 4))
    assert found["build_seconds"].significant is None
    assert found["sqnr_db"].note == "its outputs were not compared with eager's in both runs"
    more = variant(memory=MemoryRow(device="cpu", batch=1, peak_bytes=110 << 20))
    assert pair(FIRST, run(more)).variants[1].numbers[0].significant is True
    small = variant(memory=MemoryRow(device="cpu", batch=1, peak_bytes=1 << 20))
    smaller = variant(memory=MemoryRow(device="cpu", batch=1, peak_bytes=900 << 10))
    assert pair(run(small), run(smaller)).variants[1].numbers[0].significant is False, "an allocator's grain"
    elsewhere = variant(memory=MemoryRow(device="cpu", batch=8, peak_bytes=1 << 30))
    note = pair(FIRST, run(elsewhere)).variants[1].numbers[0].note
    assert note.startswith("it was measured at batch 1 in the reference, at batch 8 in the other run; run both with")


def test_other_devices_are_refused_unless_told() -> None:
    other = run(variant(row(0.5, 2.0)), environment={"processor": "Another CPU"})
    with pytest.raises(UsageError, match="processor: Some CPU and Another CPU") as refused:
        pair(FIRST, other)
    assert "--any-device" in refused.value.remedy
    found = pair(FIRST, other, any_device=True)
    assert "measured on different devices: processor: Some CPU and Another CPU" in found.cautions
    gpu = variant(row(0.5, 2.0), memory=MemoryRow(device="cuda:0", batch=1, peak_bytes=1))
    with pytest.raises(UsageError, match="device: cpu and cuda"):
        pair(FIRST, run(gpu))
    cards = [run(gpu, environment={"gpus": [{"name": name}]}) for name in ("A", "B")]
    with pytest.raises(UsageError, match=r"gpus\[0\]\.name: A and B"):
        pair(*cards)


@pytest.mark.parametrize(
    ("runs", "words"),
    [([("a", FIRST)], "nothing to be compared with"), ([("a", FIRST), ("./a", FIRST)], "is given twice")],
)
def test_what_cannot_be_compared(runs: Sequence[tuple[str, Run]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compare([(Path(path), one) for path, one in runs])


def test_what_else_changed_is_listed_field_by_field() -> None:
    other = run(
        variant(row(0.5, 2.0)),
        recipe={"budgets": {"max_drop": 0.01}, "batch": [1, 4]},
        environment={"packages": {"torch": "2.11", "onnxruntime": "1.24", "timm": "1.0"}, "kernel": "6.1"},
        model=ModelRecord(source="digits", sha256="n", signature=None, data="synthetic"),
    )
    found = pair(FIRST, other).changed
    assert [(one.name, one.before, one.after) for one in found.recipe] == [
        ("batch", [1, 8], [1, 4]),
        ("budgets.max_drop", None, 0.01),
    ]
    assert [(one.name, one.before, one.after) for one in found.versions] == [
        ("onnxruntime", "1.23", "1.24"),
        ("timm", None, "1.0"),
    ]
    assert [one.name for one in (*found.model, *found.machine, *found.data)] == ["sha256", "kernel", "measured on"]
    assert not any(fields for _, fields in pair(FIRST, FIRST).changed.sections)


def test_variants_and_batches_of_one_run_alone_are_listed() -> None:
    found = pair(
        run(variant(row(0.5, 2.0), row(1.0, 2.0, batch=8)), variant(name="old")),
        run(variant(row(0.6, 2.0), row(1.0, 2.0, batch=4)), variant(name="new"), complete=False),
    )
    assert (found.only_before, found.only_after) == (("old",), ("new",))
    assert "batch 8 was measured in a alone" in found.cautions
    assert "batch 4 was measured in b alone" in found.cautions
    assert any("b is not complete" in one for one in found.cautions)


def test_many_intervals_are_not_believed_one_by_one() -> None:
    many = [variant(row(0.5, 2.0), name=f"v{index}") for index in range(40)]
    others = [variant(row(0.5, 2.01), name=f"v{index}") for index in range(40)]
    assert any("2 are expected to leave 1 out by chance" in one for one in pair(run(*many), run(*others)).cautions)


def shown(*runs: Run) -> str:
    return rendering.render(compare([(Path(f"run{index}"), one) for index, one in enumerate(runs)]))


def test_what_people_read_has_the_differences_first() -> None:
    text = shown(FIRST, run(variant(row(0.6, 1.6))), FIRST.model_copy(update={"winner": None}))
    assert "- differs for certain: onnxruntime-fp32 is slower at batch 1: +25 % [+22, +29]" in text.splitlines()[:6]
    assert "| p50 at batch 1, ms | 0.5 | 0.6 | +25 % [+22, +29] | slower, by speed-up over eager |" in text
    assert "- no measured difference is certain" in text
    assert "- winner: onnxruntime-fp32 of the reference, none of the other" in text
    assert text.count("- nothing: model, recipe, versions, machine and data are the same") == 2


def test_a_speed_up_that_its_run_calls_too_noisy_is_no_number() -> None:
    text = shown(FIRST, run(variant(row(0.6, 1.6, speedup_disturbed=True))))
    assert "| speed-up at batch 1 | 2.00× [1.96, 2.04] | too noisy to tell |" in text
    assert "- differs for certain" not in text
    assert "- no measured difference is certain" in text


def test_warnings_of_runs_are_said_once_and_a_trifle_of_size_is_no_headline() -> None:
    many = [run(variant(row(0.5, 2.0)), environment={"warnings": [f"it is busy: {load} on 2"]}) for load in (1.5, 3.25)]
    larger = variant(row(0.5, 2.0), artifact=StoredArtifact(path="model.onnx", sha256="ab", bytes=1002))
    text = shown(*many, run(larger))
    assert text.count("it is busy") == text.count("- caution: run0: it is busy: 1.5 on 2") == 1
    assert "a larger size" not in text
    assert "| size | 1000 B | 1002 B | +2 B | a larger |" in text


def test_drops_of_other_data_have_no_difference() -> None:
    """The data that the model record names is the part that trials were judged by."""
    first, second = (
        run(variant(row(1.0, 2.0)), model=FIRST.model.model_copy(update={"data": f"{name} (choice: 9 of 30)"}))
        for name in ("a.npz", "b.npz")
    )
    (own,) = (each for each in pair(first, second).variants if each.id == ENGINE)
    (drop,) = (number for number in own.numbers if number.name == "drop")
    assert rendering._format_difference(drop) == "–"
    assert drop.note == "top1 on 100 samples of a.npz data and top1 on 100 samples of b.npz data cannot be compared"
