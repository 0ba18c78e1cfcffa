"""Selection: budgets first, then the objective; what is unknown holds no budget."""

import pytest

from enginesmith.pipeline.measure.latency import LatencyRow
from enginesmith.pipeline.measure.memory import MemoryRow
from enginesmith.pipeline.recipe import Budgets
from enginesmith.pipeline.run import StoredArtifact, VariantRecord
from enginesmith.pipeline.select import select


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


def test_the_front_holds_what_nobody_beats() -> None:
    slow = record("slow", 20.0, 400)
    assert select([EAGER, FAST, SMALL, slow], Budgets(), "latency", 1).pareto == ("fast", "small")
