"""From a measured sweep to the smallest workspace that is fast enough, and from trials to the smallest that builds."""

from collections.abc import Callable

import pytest

from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.errors import LimitTooSmall, ModelError, UnsupportedGraph, UsageError
from enginesmith.pipeline.fitting import _Sizes, keeping
from enginesmith.pipeline.job import Settings
from enginesmith.pipeline.measure.latency import LatencyRow
from enginesmith.pipeline.recipe import Recipe, make
from enginesmith.pipeline.run import Run, VariantRecord
from enginesmith.pipeline.tasks.trial import TrialResult
from enginesmith.pipeline.tensors import Signature

MIB = 1 << 20


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


def tried(refusal: Callable[[int], TrialResult | None], monkeypatch: pytest.MonkeyPatch) -> tuple[_Sizes, list[int]]:
    """Sizes whose builds are refused by their limit, and the limits that were tried."""
    limits: list[int] = []

    def trial(self: _Sizes, recipe: Recipe, batch: int) -> tuple[TrialResult, Signature]:
        found = None
        if recipe.workspace:
            limits.append(int(recipe.workspace[0]))
            found = refusal(limits[-1])
        facts = EngineFacts(activation_bytes=74 * MIB, weights_bytes=51 * MIB, workspace_limit_bytes=64 << 30)
        return found or TrialResult(builds=True, facts=facts), Signature(inputs=(), outputs=())

    monkeypatch.setattr(_Sizes, "_trial", trial)
    recipe = make({"model": "digits", "engines": ["tensorrt_rtx"], "targets": ["sm86"]})
    return _Sizes(recipe, ["digits.onnx"], Settings()), limits


def test_the_smallest_workspace_is_searched_above_a_limit_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = TrialResult(builds=False, failure=LimitTooSmall.failure, reason="too small")
    sizes, limits = tried(lambda limit: small if limit < 40 * MIB else None, monkeypatch)
    found, _ = sizes.workspace(8)
    assert found is not None
    assert 40 * MIB <= found < 41 * MIB
    assert min(limits) < 40 * MIB


@pytest.mark.parametrize("failure", [UnsupportedGraph.failure, "wrong result", "internal"])
def test_a_trial_that_fails_otherwise_ends_the_search(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = TrialResult(builds=False, failure=failure, reason="no kernel for it", remedy="another target")
    sizes, limits = tried(lambda limit: broken, monkeypatch)
    with pytest.raises(ModelError, match="no kernel for it") as caught:
        sizes.workspace(8)
    assert caught.value.remedy == "another target"
    assert len(limits) == 1
