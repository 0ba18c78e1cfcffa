"""A pruned variant wins only where it is measurably faster than its dense sibling, for a loss that is allowed."""

from typing import Any

import pytest

from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.roofline import Work
from enginesmith.pipeline.measure.rows import LatencyRow, LimitRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.results.run import VariantRecord
from enginesmith.pipeline.results.select import decide, select

ALLOWED = Budgets(max_drop=0.01)
DENSE = "onnxruntime-fp32"


def record(name: str, ms: float, over_dense: tuple[float, float, float] | None = None, **more: Any) -> VariantRecord:
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
    return record(f"{DENSE}-prune30", 1.0, ratio, dense=DENSE, quality=quality, **more)


def limit(floor_ms: float, bound_by: str) -> LimitRow:
    unknown = dict.fromkeys(("measured_ms", "arithmetic_ms", "memory_ms", "launch_ms", "measured_over_floor"))
    found = {"floor_ms": floor_ms, "bound_by": bound_by, "summary": ""}
    return LimitRow.model_validate({"batch": 1, "work": Work(batch=1, flops={}, least_bytes=0), **unknown, **found})


def decided(one: VariantRecord, dense: VariantRecord | None = None, budgets: Budgets = ALLOWED) -> str:
    return decide(one, {DENSE: dense or record(DENSE, 2.0)}, budgets, 1).rejected


def test_one_that_is_faster_within_the_budget_is_accepted() -> None:
    assert not decided(pruned(1.5, 1.2, 1.8))


def test_dense_variants_are_left_alone() -> None:
    assert decide(record(DENSE, 2.0), {}, Budgets(), 1) == record(DENSE, 2.0)


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
        (limit(0.5, "arithmetic"), limit(1.0, "arithmetic"), "larger multiple of channels"),
    ],
)
def test_the_reason_is_what_bounds_it(mine: LimitRow, dense: LimitRow, said: str) -> None:
    assert said in decided(pruned(1.0, 0.9, 1.1, limits=(mine,)), record(DENSE, 2.0, limits=(dense,)))


def test_without_a_pair_it_is_not_known() -> None:
    assert "not known: the other one failed" in decided(pruned())


def test_a_loss_that_nobody_knows_or_allowed_cannot_win() -> None:
    assert "--eval" in decided(pruned(2.0, 1.8, 2.2, labels=False))
    assert "it lost 0.005 of top1, and nothing says how much it may" in decided(
        pruned(2.0, 1.8, 2.2), budgets=Budgets()
    )


def test_rejected_ones_never_win() -> None:
    dense = record(DENSE, 2.0)
    slow = decide(pruned(1.0, 0.9, 1.1), {DENSE: dense}, Budgets(), 1)
    assert select([dense, slow], Budgets(), "latency", 1).winner == DENSE
    assert select([dense, slow], Budgets(), "latency", 1).pareto == (DENSE,)
