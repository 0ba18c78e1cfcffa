"""From a measured sweep to the smallest workspace that is fast enough."""

import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.fitting import keeping
from enginesmith.pipeline.measure.latency import LatencyRow
from enginesmith.pipeline.run import Run, VariantRecord


def record(
    name: str, limit: int | None, *rates: float, target: str = "sm86", status: str = "measured"
) -> VariantRecord:
    rows = tuple(LatencyRow(batch=1 << index, throughput_per_s=rate) for index, rate in enumerate(rates))
    return VariantRecord.model_construct(
        id=name,
        engine="tensorrt_rtx",
        precision="fp16",
        workspace_limit_bytes=limit,
        target=target,
        status=status,
        latency=rows,
    )


def run(*records: VariantRecord) -> Run:
    return Run.model_construct(name="r", variants=records)


def test_smallest_workspace_is_the_smallest_of_those_that_are_fast_enough() -> None:
    given = run(record("max", 900, 50, 100), record("middle", 60, 50, 96), record("least", 5, 50, 80))
    (kept,) = keeping(given, 0.95)
    assert (kept.variant, kept.workspace_bytes, kept.speed_share) == ("middle", 60, 0.96)
    assert keeping(given, 0.8)[0].variant == "least"
    assert keeping(given, 1.0)[0].variant == "max"


def test_targets_are_not_mixed() -> None:
    given = run(record("slow", 5, 10), record("fast", 5, 100, target="sm89"))
    assert [one.variant for one in keeping(given, 0.95)] == ["slow", "fast"]


@pytest.mark.parametrize("other", [record("x", None, 10), record("x", 5), record("x", 5, 10, status="failed")])
def test_a_run_without_measured_limits_says_so(other: VariantRecord) -> None:
    with pytest.raises(UsageError, match="no measured variants with workspace limits"):
        keeping(run(other), 0.95)
