"""Selection: budgets first, then the objective; what is unknown holds no budget."""

import pytest

from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow, StageFidelity
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.results.budgets import verdicts
from enginesmith.pipeline.results.run import BuildRecord, StoredArtifact, VariantRecord
from enginesmith.pipeline.results.select import select


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
    assert select([EAGER, FAST, SMALL], Budgets(), objective, 1).winner == winner  # type: ignore[arg-type]


def test_a_budget_excludes_the_fastest() -> None:
    chosen = select([EAGER, FAST, SMALL], Budgets(max_memory_bytes=200), "latency", 1)
    assert chosen.winner == "small"
    assert [(one.budget, one.actual, one.passed) for one in chosen.verdicts] == [("max_memory_bytes", 50, True)]


def test_nobody_wins_when_nobody_holds_the_budgets() -> None:
    chosen = select([EAGER, FAST], Budgets(max_latency_ms=0.5), "latency", 1)
    assert chosen.winner is None
    assert "fast" in chosen.reason
    assert not chosen.verdicts[0].passed


def test_an_unknown_number_holds_no_budget() -> None:
    chosen = select([record("blind", 1.0, None)], Budgets(max_memory_bytes=10**12), "latency", 1)
    assert chosen.winner is None


def test_failed_and_unmeasured_variants_never_win() -> None:
    failed = FAST.model_copy(update={"status": "failed"})
    assert select([EAGER, failed, record("blank", None)], Budgets(), "latency", 1).winner == "eager"


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
            (found,) = verdicts(full, Budgets(**{budget: limit}), 1)
            assert (found.budget, found.actual, found.passed) == (budget, number, passed)
        (unknown,) = verdicts(record("x", None, None).model_copy(update={"artifact": None}), Budgets(**{budget: 1}), 1)
        assert (unknown.actual, unknown.passed) == (None, False)
        assert unknown.reason


def test_fidelity_is_a_budget_of_what_is_held_against_the_baseline() -> None:
    told = check(3.0, reason="changed on purpose")
    good = FAST.model_copy(update={"fidelity": (check(60.0), check(40.0), told)})
    assert [(one.actual, one.passed) for one in verdicts(good, Budgets(), 1, 40.0)] == [(40.0, True)]
    assert [one.passed for one in verdicts(good, Budgets(), 1, 41.0)] == [False]
    whole = FAST.model_copy(update={"fidelity": (check(None),)})
    assert [(one.actual, one.passed) for one in verdicts(whole, Budgets(), 1, 40.0)] == [(None, True)]
    assert [one.passed for one in verdicts(FAST, Budgets(), 1, 40.0)] == [False], "nobody judged its outputs"
    assert select([EAGER, good], Budgets(), "latency", 1, 41.0).winner == "eager", "it is what others are held against"
    assert select([EAGER, good], Budgets(), "latency", 1, 40.0).verdicts[0].budget == "min_sqnr_db"


def test_the_front_holds_what_nobody_beats() -> None:
    slow = record("slow", 20.0, 400)
    assert select([EAGER, FAST, SMALL, slow], Budgets(), "latency", 1).pareto == ("fast", "small")
