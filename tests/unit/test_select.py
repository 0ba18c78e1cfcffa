"""Selection: budgets first, then the objective; what is unknown holds no budget."""

from typing import Any

import pytest

from enginesmith.pipeline.errors import NO_TIME
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.roofline import Work
from enginesmith.pipeline.measure.rows import LatencyRow, LimitRow, MemoryRow, StageFidelity
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.results.run import BuildRecord, StoredArtifact, VariantRecord
from enginesmith.pipeline.results.verdicts import (
    find_best_reference,
    format_verdict,
    judge_budgets,
    judge_compression,
    may_lose_more,
    select_winner,
)


def record(name: str, ms: float | None, memory: int | None = 100, size: int = 10, **more: object) -> VariantRecord:
    return VariantRecord(
        id=name,
        engine="onnxruntime",
        precision="fp32",
        status="measured",
        artifact=StoredArtifact(path="model.onnx", sha256="0", bytes=size),
        latency=(LatencyRow(batch=1, p50_ms=ms, throughput_per_s=None if ms is None else 1e3 / ms),),
        memory=MemoryRow(device="cpu", batch=1, peak_bytes=memory),
    ).model_copy(update=more)


EAGER = record("eager", 10.0, 100)
FAST = record("fast", 1.0, 300, 30)
SMALL = record("small", 5.0, 50, 5)


@pytest.mark.parametrize(
    ("objective", "winner"), [("latency", "fast"), ("throughput", "fast"), ("memory", "small"), ("size", "small")]
)
def test_the_objective_decides_among_all(objective: str, winner: str) -> None:
    assert select_winner([EAGER, FAST, SMALL], Budgets(), objective, 1).winner == winner  # type: ignore[arg-type]


@pytest.mark.parametrize(("known", "winner"), [(("a", "b"), "b"), (("a",), "a")])
def test_what_is_faster_round_by_round_wins_over_a_lower_median(known: tuple[str, ...], winner: str) -> None:
    """Medians hold calls that other programs disturbed; without a speed-up of each, they have to do."""
    figures = {"a": (1.0, 3.0), "b": (1.2, 5.0)}
    records = [EAGER.model_copy(update={"latency": (LatencyRow(batch=1, p50_ms=10, speedup=exactly(1.0)),)})]
    for name, (ms, speedup) in figures.items():
        row = LatencyRow(batch=1, p50_ms=ms, speedup=exactly(speedup) if name in known else None)
        records.append(record(name, ms, latency=(row,)))
    assert select_winner(records, Budgets(), "latency", 1).winner == winner


def exactly(speedup: float) -> Interval:
    return Interval(median=speedup, low=speedup, high=speedup)


def test_a_budget_excludes_the_fastest() -> None:
    chosen = select_winner([EAGER, FAST, SMALL], Budgets(max_memory_bytes=200), "latency", 1)
    assert chosen.winner == "small"
    assert [(one.budget, one.actual, one.passed) for one in chosen.verdicts] == [("max_memory_bytes", 50, True)]


@pytest.mark.parametrize(
    ("budgets", "nearest"),
    [
        ({"max_size_bytes": 4}, "small"),
        ({"max_size_bytes": 4, "max_latency_ms": 2.0}, "fast"),  # it misses one of them, the others both
        ({"max_memory_bytes": 40, "max_latency_ms": 6.0}, "small"),
    ],
)
def test_where_none_meets_the_budgets_the_nearest_is_named(budgets: dict[str, float], nearest: str) -> None:
    chosen = select_winner([FAST, EAGER, SMALL], Budgets.model_validate(budgets), "latency", 1)
    assert chosen.winner is None
    assert chosen.reason.startswith(f"no variant meets every budget; of the nearest, {nearest}, ")
    assert chosen.no_winner == "over budget"


@pytest.mark.parametrize(
    ("ms", "ends", "drop", "winner"),
    [
        (1.02, (9.4, 10.2), 0.0, "careful"),
        (1.02, (9.4, 10.2), 0.0079, "lossy"),
        (1.02, (9.75, 9.85), 0.0, "lossy"),
        (1.2, (6.0, 12.0), 0.0, "lossy"),
        (1.02, (9.4, 10.2), 0.02, "lossy"),
        (1.02, (9.4, 10.2), None, "lossy"),
    ],
)
def test_of_equally_fast_ones_the_one_that_loses_less_wins(
    ms: float, ends: tuple[float, float], drop: float | None, winner: str
) -> None:
    def measured(name: str, ms: float, ends: tuple[float, float], drop: float | None) -> VariantRecord:
        row = LatencyRow(batch=1, p50_ms=ms, speedup=Interval(median=10 / ms, low=ends[0], high=ends[1]))
        quality = Quality(metric="top1", value=0.9, baseline=0.9, drop=drop, samples=99) if drop is not None else None
        return record(name, ms, latency=(row,), quality=quality)

    both = [EAGER, measured("lossy", 1.0, (9.9, 10.1), 0.008), measured("careful", ms, ends, drop)]
    chosen = select_winner(both, Budgets(max_drop=0.03), "latency", 1)
    assert chosen.winner == winner
    assert ("accuracy drop" in chosen.reason) == (winner == "careful")
    assert chosen.verdicts[0].actual == (0.008 if winner == "lossy" else drop)


@pytest.mark.parametrize(("disturbed", "winner"), [(False, "risky"), (True, "safe")])
def test_a_speed_up_of_disturbed_calls_is_worth_no_risk(disturbed: bool, winner: str) -> None:
    def measured(name: str, ms: float, high: float) -> VariantRecord:
        row = LatencyRow(batch=1, p50_ms=ms, speedup=exactly(10 / ms), speedup_disturbed=disturbed)
        quality = Quality(metric="top1", value=0.9, baseline=0.9, drop=0.0, drop_high=high, samples=96, counted=True)
        return record(name, ms, latency=(row,), quality=quality)

    both = [EAGER, measured("risky", 1.0, 0.0135), measured("safe", 1.3, 0.0)]
    assert select_winner(both, Budgets(max_drop=0.01), "latency", 1).winner == winner


@pytest.mark.parametrize(
    ("slower", "high", "safe_high", "kind", "winner"),
    [
        (1.08, 0.0135, 0.0, "counted", "safe"),
        (1.08, 0.0095, 0.0, "counted", "risky"),
        (1.08, 0.0135, 0.012, "counted", "risky"),
        (1.3, 0.0135, 0.0, "counted", "risky"),
        (1.3, 0.0135, 0.0, "whole", "risky"),
        (1.3, 0.0135, 0.0, "", "safe"),
        (1.3, 0.0095, 0.0, "", "risky"),
        (1.3, 0.0135, 0.012, "", "risky"),
        (1.3, None, 0.0, "", "risky"),
    ],
)
def test_a_drop_that_may_be_more_than_allowed_has_to_pay(
    slower: float, high: float | None, safe_high: float, kind: str, winner: str
) -> None:
    def measured(name: str, ms: float, drop: float, high: float | None) -> VariantRecord:
        speedup = Interval(median=10 / ms, low=9.9 / ms, high=10.1 / ms)
        row = LatencyRow(batch=1, p50_ms=ms, speedup=speedup)
        quality = Quality(metric="close", value=0.9, baseline=0.9, drop=drop, drop_high=high, samples=96)
        quality = quality.model_copy(update={kind: True} if kind else {})
        return record(name, ms, latency=(row,), quality=quality)

    both = [EAGER, measured("risky", 1.0, 0.0071, high), measured("safe", slower, 0.0, safe_high)]
    chosen = select_winner(both, Budgets(max_drop=0.01), "latency", 1)
    assert chosen.winner == winner
    assert ("surely meet" in chosen.reason) == (winner == "safe")


def test_what_made_no_answer_wrong_counts_as_sure_of_few_samples_too() -> None:
    counts: dict[str, Any] = {"samples": 96, "counted": True, "worse": 0, "better": 0}
    unseen = Quality(metric="top1", value=0.9, baseline=0.9, drop=0, drop_high=0.03, deviation=0.0, **counts)
    seen = unseen.model_copy(update={"drop": 1 / 96, "drop_high": 0.05, "worse": 1, "deviation": 0.1})
    records = [record("x", 1.0, 1, 1, quality=quality) for quality in (unseen, seen)]
    assert [may_lose_more(each, 0.01) for each in records] == [False, True]


@pytest.mark.parametrize("objective", ["throughput", "memory", "size"])
@pytest.mark.parametrize(
    ("gain", "high", "counted", "winner"),
    [(1.08, 0.0135, True, "safe"), (1.08, 0.0095, True, "risky"), (1.3, 0.0135, True, "risky"),
     (1.3, 0.0135, False, "safe")],
)  # fmt: skip
def test_other_objectives_take_no_risk_for_little_either(
    objective: Any, gain: float, high: float, counted: bool, winner: str
) -> None:
    def measured(name: str, scale: float, drop: float, high: float) -> VariantRecord:
        quality = Quality(
            metric="top1", value=0.9, baseline=0.9, drop=drop, drop_high=high, samples=96, counted=counted
        )
        return record(name, scale, int(100 * scale), int(100 * scale), quality=quality)

    both = [EAGER, measured("risky", 1.0, 0.0071, high), measured("safe", gain, 0.0, 0.0)]
    chosen = select_winner(both, Budgets(max_drop=0.01), objective, 1)
    assert chosen.winner == winner
    assert ("surely meet" in chosen.reason) == (winner == "safe")
    worth = measured("worth", 1.05, 0.0071, 0.0135)
    wide = worth.model_copy(update={"quality": Quality.model_validate({**dict(worth.quality or {}), "counted": True})})
    slow = measured("slow", 1.3, 0.0, 0.0)
    taken = select_winner([EAGER, both[1], wide, slow], Budgets(max_drop=0.01), objective, 1)
    assert "as fast as" not in taken.reason
    nothing = record("nothing", 1.0, 0, 0, quality=both[2].quality)
    if objective != "throughput":
        assert select_winner([*both, nothing], Budgets(max_drop=0.01), objective, 1).winner == "nothing"


def test_nobody_wins_when_nobody_holds_the_budgets() -> None:
    chosen = select_winner([EAGER, FAST], Budgets(max_latency_ms=0.5), "latency", 1)
    assert chosen.winner is None
    assert "fast" in chosen.reason
    assert not chosen.verdicts[0].passed


def test_an_unknown_number_holds_no_budget() -> None:
    chosen = select_winner([record("blind", 1.0, None)], Budgets(max_memory_bytes=10**12), "latency", 1)
    assert chosen.winner is None


def test_eager_does_not_win_where_a_better_one_was_not_judged() -> None:
    """No time was left for its accuracy; one whose loss is known to be too large is beaten by eager as before."""
    none = Quality(metric="top1", value=1.0, baseline=1.0, drop=0.0, samples=100)
    eager, budgets = EAGER.model_copy(update={"quality": none}), Budgets(max_drop=0.01)
    unjudged = FAST.model_copy(update={"reasons": {"quality": NO_TIME}, "late_fields": {"quality": "no time"}})
    chosen = select_winner([eager, unjudged], budgets, "latency", 1)
    assert (chosen.winner, chosen.no_winner) == (None, "unjudged")
    why = f"fast is better than eager, but its accuracy drop is unknown ({NO_TIME}), and has to be at most 0.0100"
    assert chosen.reason == why
    careful = FAST.model_copy(update={"quality": none.model_copy(update={"drop": 0.005, "drop_high": 0.02})})
    assert select_winner([eager, careful], budgets, "latency", 1).winner == "eager"
    failing = FAST.model_copy(update={"reasons": {"quality": "its process crashed"}})  # more time would not help
    assert select_winner([eager, failing], budgets, "latency", 1).winner == "eager"
    lossy = unjudged.model_copy(update={"quality": none.model_copy(update={"drop": 0.5})})
    assert select_winner([eager, lossy], budgets, "latency", 1).winner == "eager"


def test_failed_and_unmeasured_variants_never_win() -> None:
    failed = FAST.model_copy(update={"status": "failed"})
    assert select_winner([EAGER, failed, record("blank", None)], Budgets(), "latency", 1).winner == "eager"


def test_eager_alone_is_no_result_of_requested_engines() -> None:
    """Not even for an objective that eager has a number of, nor while the others wait for their machine."""
    failed = FAST.model_copy(update={"status": "failed", "reason": "quality-fast: the metric raised KeyError\nits log"})
    for objective in ("latency", "memory"):
        chosen = select_winner([EAGER, failed, failed], Budgets(), objective, 1)  # type: ignore[arg-type]
        assert chosen.winner is None
        assert (
            chosen.reason
            == "every requested engine failed: fast: quality-fast: the metric raised KeyError (and 1 more)"
        )
    built = FAST.model_copy(update={"status": "built", "reason": "no GPU"})
    assert chosen.no_winner == "failed"
    waiting = select_winner([EAGER, built, failed], Budgets(), "latency", 1)
    assert waiting.reason.startswith("1 variant is built")
    assert waiting.no_winner == "not measured yet"
    assert select_winner([EAGER], Budgets(), "latency", 1).winner == "eager", "nothing else was requested"
    both = ([EAGER, other] for other in (failed, built))
    named = [select_winner(records, Budgets(), "latency", 1, baseline_named=True).winner for records in both]
    assert named == ["eager", None], "eager was named, and what is built may still win"


def test_what_nobody_asked_for_never_wins_and_is_no_result() -> None:
    beside = record("compiled-bf16", 0.1, 1, engine="compiled", reference=True)
    chosen = select_winner([EAGER, FAST, beside], Budgets(), "latency", 1)
    assert (chosen.winner, "compiled-bf16" in chosen.pareto) == ("fast", False)
    failed = FAST.model_copy(update={"status": "failed", "reason": "no kernel"})
    assert select_winner([EAGER, failed, beside], Budgets(), "latency", 1).winner is None


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        ("latency", "no variant that was asked for was measured at batch 4, which decides"),
        ("memory", "the memory of no variant that was asked for is known"),
    ],
)
def test_why_nothing_won_is_not_said_of_what_was_measured(objective: Any, reason: str) -> None:
    late = FAST.model_copy(update={"status": "skipped"})
    chosen = select_winner([EAGER, late], Budgets(), objective, 4)
    assert (chosen.reason, chosen.no_winner) == (reason, "no figure")
    nothing = select_winner([EAGER.model_copy(update={"status": "failed"}), late], Budgets(), objective, 4)
    assert nothing.reason == f"nothing was measured that has a {objective}"
    assert nothing.no_winner == "nothing measured"


def test_the_best_reference_is_the_fastest_setting_of_pytorch() -> None:
    def fast(name: str, engine: str, times: float | None, **more: Any) -> VariantRecord:
        ratio = None if times is None else Interval(median=times, low=0.9 * times, high=1.1 * times)
        row = LatencyRow(batch=1, p50_ms=10 / (times or 1), speedup=ratio)
        return record(name, None, engine=engine, latency=(row,), **more)

    eager, winner = record("eager", 10.0, engine="eager"), fast("fast", "onnxruntime", 6.0)
    slow, half = (
        fast("eager-bf16", "eager", 0.5, reference=True),
        fast("compiled-bf16", "compiled", 2.0, reference=True),
    )
    asked = fast("compiled-fp32", "compiled", 3.0)
    best = find_best_reference([eager, winner, slow, half], "fast", 1)
    assert best
    assert best.speedup
    assert (best.variant, round(best.speedup.median, 6)) == ("compiled-bf16", 3.0)
    assert best.speedup.low < 2.7 < 3.3 < best.speedup.high
    for others, wins, name in (
        ((slow, half, asked), "fast", "compiled-fp32"),
        ((slow,), "fast", "eager"),
        ((slow, half, asked), "compiled-fp32", "compiled-fp32"),
    ):
        assert getattr(find_best_reference([eager, winner, *others], wins, 1), "variant", None) == name
    assert find_best_reference([eager, winner, asked], "fast", 1) is None, "nothing was measured for comparison"
    assert find_best_reference([eager, winner, half], None, 1) is None


def check(sqnr_db: float | None, passed: bool = True, reason: str = "") -> StageFidelity:
    unknown = dict.fromkeys(("cosine", "max_abs_error", "argmax_agreement"))
    return StageFidelity(stage="engine", point="min", batch=1, sqnr_db=sqnr_db, passed=passed, reason=reason, **unknown)


def test_every_budget_is_held_against_its_number() -> None:
    built = BuildRecord(seconds=3.0, host_peak_bytes=None, engine_bytes=30)
    row = LatencyRow(batch=1, p50_ms=1.0, p99_ms=2.0, throughput_per_s=1000.0)
    full = FAST.model_copy(update={"build": built, "latency": (row, LatencyRow(batch=8, throughput_per_s=4000.0))})
    for budget, number in (
        ("max_p99_ms", 2.0),
        ("min_throughput_per_s", 4000.0),
        ("max_size_bytes", 30),
        ("max_build_seconds", 3.0),
    ):
        for limit, passed in ((number, True), (number + (1 if budget.startswith("min") else -1), False)):
            (found,) = judge_budgets(full, Budgets(**{budget: limit}), 1)
            assert (found.budget, found.actual, found.passed) == (budget, number, passed)
        (unknown,) = judge_budgets(
            record("x", None, None).model_copy(update={"artifact": None}), Budgets(**{budget: 1}), 1
        )
        assert (unknown.actual, unknown.passed) == (None, False)
        assert unknown.reason


def test_a_small_drop_and_its_limit_are_written_so_that_they_count() -> None:
    lossy = FAST.model_copy(update={"quality": Quality(metric="mse", value=0.1, baseline=0.1, drop=4e-5, samples=9)})
    (verdict,) = judge_budgets(lossy, Budgets(max_drop=0.00002), 1)
    assert format_verdict(verdict) == "accuracy drop is 0.000040, and has to be at most 0.000020"


def test_fidelity_is_a_budget_of_what_is_held_against_the_baseline() -> None:
    told = check(3.0, reason="changed on purpose")
    good = FAST.model_copy(update={"fidelity": (check(60.0), check(40.0), told)})
    assert [(one.actual, one.passed) for one in judge_budgets(good, Budgets(), 1, 40.0)] == [(40.0, True)]
    assert [one.passed for one in judge_budgets(good, Budgets(), 1, 41.0)] == [False]
    whole = FAST.model_copy(update={"fidelity": (check(None),)})
    assert [(one.actual, one.passed) for one in judge_budgets(whole, Budgets(), 1, 40.0)] == [(None, True)]
    assert [one.passed for one in judge_budgets(FAST, Budgets(), 1, 40.0)] == [False], "nobody judged its outputs"
    assert select_winner([EAGER, good], Budgets(), "latency", 1, 41.0).winner == "eager", "it is the reference"
    assert select_winner([EAGER, good], Budgets(), "latency", 1, 40.0).verdicts[0].budget == "min_sqnr_db"


def test_the_front_holds_what_nobody_beats() -> None:
    slow = record("slow", 20.0, 400)
    assert select_winner([EAGER, FAST, SMALL, slow], Budgets(), "latency", 1).pareto == ("fast", "small")


@pytest.mark.parametrize(("drop", "front"), [(2e-6, ("fast",)), (0.002, ("eager", "fast"))])
def test_a_drop_that_nobody_sees_keeps_no_variant_on_the_front(drop: float, front: tuple[str, ...]) -> None:
    lost, none = (Quality(metric="top1", value=0.9, baseline=0.9, drop=each, samples=9) for each in (drop, 0.0))
    records = [record("eager", 2.0, 400, quality=none), FAST.model_copy(update={"quality": lost})]
    assert select_winner(records, Budgets(), "latency", 1).pareto == front


ALLOWED = Budgets(max_drop=0.01)
DENSE = "onnxruntime-fp32"


def measured(name: str, ms: float, over_dense: tuple[float, float, float] | None = None, **more: Any) -> VariantRecord:
    ratio = dict(zip(("median", "low", "high"), over_dense, strict=True)) if over_dense else None
    row = LatencyRow(
        batch=1,
        p50_ms=ms,
        speedup_over_dense=Interval.model_validate(ratio) if ratio else None,
        reasons={} if ratio else {"speedup_over_dense": "the other one failed"},
    )
    made = VariantRecord(id=name, engine="onnxruntime", precision="fp32", status="measured", latency=(row,))
    return made.model_copy(update=more)


def pruned(*over_dense: float, labels: bool = True, **more: Any) -> VariantRecord:
    quality = Quality(metric="top1", value=0.9, baseline=0.905, drop=0.005, samples=500) if labels else None
    ratio = (over_dense[0], over_dense[1], over_dense[2]) if over_dense else None
    return measured(f"{DENSE}-prune30", 1.0, ratio, dense=DENSE, quality=quality, **more)


def limit(floor_ms: float, bound_by: str) -> LimitRow:
    unknown = dict.fromkeys(("measured_ms", "arithmetic_ms", "memory_ms", "launch_ms", "measured_over_floor"))
    found = {"floor_ms": floor_ms, "bound_by": bound_by, "summary": ""}
    return LimitRow.model_validate({"batch": 1, "work": Work(batch=1, flops={}, least_bytes=0), **unknown, **found})


def decided(one: VariantRecord, dense: VariantRecord | None = None, budgets: Budgets = ALLOWED) -> str:
    return judge_compression(one, {DENSE: dense or measured(DENSE, 2.0)}, budgets, 1).rejected


def test_one_that_is_faster_within_the_budget_is_accepted() -> None:
    assert not decided(pruned(1.5, 1.2, 1.8))


def test_dense_variants_are_left_alone() -> None:
    assert judge_compression(measured(DENSE, 2.0), {}, Budgets(), 1) == measured(DENSE, 2.0)


def test_one_whose_interval_includes_1_is_rejected_with_the_numbers() -> None:
    reason = decided(pruned(1.1, 0.98, 1.2))
    assert "is not measurably faster than onnxruntime-fp32: 1.10× [0.98, 1.20] at batch 1" in reason
    assert "--limits" in reason
    assert "is slower than" in decided(pruned(0.9, 0.85, 0.95))


@pytest.mark.parametrize(
    ("mine", "dense", "said"),
    [
        (limit(1.0, "launch"), limit(1.0, "launch"), "starting operators"),
        (limit(1.0, "memory"), limit(1.02, "memory"), "moving data"),
        (limit(0.5, "arithmetic"), limit(1.0, "arithmetic"), "larger --multiple-of"),
    ],
)
def test_the_reason_is_what_bounds_it(mine: LimitRow, dense: LimitRow, said: str) -> None:
    assert said in decided(pruned(1.0, 0.9, 1.1, limits=(mine,)), measured(DENSE, 2.0, limits=(dense,)))


def test_without_a_pair_it_is_not_known() -> None:
    assert "not known: the other one failed" in decided(pruned())


def test_a_loss_that_nobody_knows_or_allowed_cannot_win() -> None:
    assert "--eval" in decided(pruned(2.0, 1.8, 2.2, labels=False))
    assert "it lost 0.005 of top1, and nothing says how much it may" in decided(
        pruned(2.0, 1.8, 2.2), budgets=Budgets()
    )


def test_rejected_ones_never_win() -> None:
    dense = measured(DENSE, 2.0)
    slow = judge_compression(pruned(1.0, 0.9, 1.1), {DENSE: dense}, Budgets(), 1)
    assert select_winner([dense, slow], Budgets(), "latency", 1).winner == DENSE
    assert select_winner([dense, slow], Budgets(), "latency", 1).pareto == (DENSE,)


def test_a_budget_tells_where_the_time_was_over_before_its_number_was_known() -> None:
    for late in (True, False):
        row = LatencyRow(batch=1, failure=NO_TIME if late else "it hangs", late=late)
        (verdict,) = judge_budgets(FAST.model_copy(update={"latency": (row,)}), Budgets(max_latency_ms=5), 1)
        assert (verdict.passed, verdict.late) == (False, late)
