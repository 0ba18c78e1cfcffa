"""Test ``fit``: a measured sweep, trials that are refused, the search over measured peaks, and the end of memory."""

from collections.abc import Callable, Collection
from pathlib import Path

import onnx
import pytest
from onnx import parser

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate, EngineFacts
from enginesmith.pipeline.errors import LimitTooSmall, ModelError, UnsupportedGraph, UsageError
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.measure.latency import rows
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow, OutOfMemory
from enginesmith.pipeline.planning.variants import ResolvedRecipe
from enginesmith.pipeline.recipe import Recipe, make
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import TrialResult
from enginesmith.pipeline.tensors import Feeds, Signature
from enginesmith.pipeline.workflows.fit import BuiltSizes, Fits, MeasuredSizes, fit, keeping

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
    assert (keeping(given, 0.8)[0].variant, keeping(given, 1.0)[0].variant) == ("least", "max")


def test_targets_are_not_mixed() -> None:
    given = run(record("slow", 5, 10), record("fast", 5, 100, target="sm89"))
    assert [one.variant for one in keeping(given, 0.95)] == ["slow", "fast"]


@pytest.mark.parametrize("other", [record("x", None, 10), record("x", 5), record("x", 5, 10, status="failed")])
def test_a_run_without_measured_limits_says_so(other: VariantRecord) -> None:
    with pytest.raises(UsageError, match="no measured variants with workspace limits"):
        keeping(run(other), 0.95)


def tried(
    refusal: Callable[[int], TrialResult | None], monkeypatch: pytest.MonkeyPatch
) -> tuple[BuiltSizes, list[int]]:
    """Sizes whose builds are refused by their limit, and the limits that were tried."""
    limits: list[int] = []

    def trial(self: BuiltSizes, model: ResolvedRecipe, batch: int) -> tuple[TrialResult, Signature]:
        found = None
        if model.recipe.workspace:
            limits.append(int(model.recipe.workspace[0]))
            found = refusal(limits[-1])
        facts = EngineFacts(activation_bytes=74 * MIB, weights_bytes=51 * MIB, workspace_limit_bytes=64 << 30)
        return found or TrialResult(builds=True, facts=facts), Signature(inputs=(), outputs=())

    monkeypatch.setattr(BuiltSizes, "_trial", trial)
    recipe = make({"model": "digits", "engines": ["tensorrt_rtx"], "targets": ["sm86"]})
    return BuiltSizes(recipe, ["digits"], Settings()), limits


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


def net(folder: Path, batch: str = "batch", nodes: str = "a = Neg(x) b = Neg(a) y = Neg(b)") -> Path:
    """A graph whose intermediates and outputs are 1 MiB each for a row."""
    text = f"g (float[{batch}, 512, 512] x) => (float[{batch}, 512, 512] y) {{ {nodes} }}"
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}')
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


Peak = Callable[[int], int]


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fits]:
    """``fit`` for ONNX Runtime with peaks that are computed; 1 MiB of inputs for a row."""

    def answer(memory_bytes: int, *models: Path, peak: Peak, oom: int = 1 << 60, **more: object) -> Fits:
        def measured(self: MeasuredSizes, recipe: Recipe, batch: int) -> tuple[MemoryRow, int]:
            if batch >= oom:
                found = OutOfMemory(message="no room", limit_bytes=1)
                return MemoryRow(device="cpu", batch=batch, failure="no room", oom=found), batch * MIB
            row = MemoryRow(device="cpu", batch=batch, peak_bytes=peak(batch), activation_bytes=peak(batch) - 3 * MIB)
            return row, batch * MIB

        monkeypatch.setattr(MeasuredSizes, "_measure", measured)
        recipe = make({"model": str(models[0]), "engines": ["onnxruntime"], **more})
        return fit(recipe, [str(model) for model in models], memory_bytes, Settings())

    return answer


def grows(batch: int) -> int:
    """A peak that is flat at first, as blocks of an arena are."""
    return 4 * MIB + 2 * MIB * max(batch, 5)


def need(batch: int, peak: Peak = grows) -> int:
    return peak(batch) + batch * MIB


@pytest.mark.parametrize("batch", [1, 2, 7, 64, 1000])
def test_the_largest_batch_is_exact_at_the_boundary(batch: int, fitted: Callable[..., Fits], tmp_path: Path) -> None:
    file = net(tmp_path)
    found = fitted(need(batch), file, peak=grows)
    assert (found.largest_batch, found.needed_bytes) == (batch, need(batch))
    assert found.needed_bytes == sum((found.weights_bytes or 0, found.activation_bytes or 0, found.io_bytes or 0))
    assert fitted(need(batch) - 1, file, peak=grows).largest_batch == (batch - 1 or None)
    assert found.builds < 40
    assert found.source.startswith("measured")
    assert "no limit" in found.workspace_note


def test_a_batch_that_runs_out_of_memory_does_not_fit(fitted: Callable[..., Fits], tmp_path: Path) -> None:
    file = net(tmp_path)
    assert fitted(1 << 40, file, peak=grows, oom=37).largest_batch == 36
    nothing = fitted(1 << 40, file, peak=grows, oom=1)
    assert nothing.largest_batch is None
    assert "a lower bound, as memory ran out: no room" in nothing.reason


def test_less_than_batch_1_fits_nothing(fitted: Callable[..., Fits], tmp_path: Path) -> None:
    found = fitted(MIB, net(tmp_path), peak=grows)
    assert (found.largest_batch, found.needed_bytes, found.activation_bytes) == (None, None, None)
    assert f"({need(1)} bytes)" in found.reason


def test_an_absurd_budget_ends_at_the_largest_batch_that_is_tried(fitted: Callable[..., Fits], tmp_path: Path) -> None:
    found = fitted(1 << 60, net(tmp_path), peak=grows)
    assert (found.largest_batch, found.reason) == (1 << 16, f"larger batches than {1 << 16} were not tried")
    limited = fitted(1 << 60, net(tmp_path), peak=grows, shapes={"batch": "1:2:5"})
    assert limited.largest_batch == 5


def test_several_models_lie_beside_each_other(fitted: Callable[..., Fits], tmp_path: Path) -> None:
    file = net(tmp_path)
    assert fitted(2 * need(7), file, file, peak=grows).largest_batch == 7
    assert fitted(2 * need(7) - 1, file, file, peak=grows).largest_batch == 6


def test_a_module_is_to_be_exported_first() -> None:
    with pytest.raises(UsageError, match="digits is not an ONNX file") as caught:
        fit(make({"model": "digits", "engines": ["onnxruntime"]}), ["digits"], MIB, Settings())
    assert "enginesmith export" in caught.value.remedy


@pytest.mark.parametrize("engines", [["eager"], ["onnxruntime", "tensorrt_rtx"]])
def test_one_engine_that_something_is_known_of(engines: list[str], tmp_path: Path) -> None:
    recipe = make({"model": str(net(tmp_path)), "engines": engines})
    with pytest.raises(UsageError, match=", ".join(engines)) as caught:
        fit(recipe, [recipe.model], MIB, Settings())
    assert "--engine tensorrt_rtx or onnxruntime" in caught.value.remedy


FULL = OutOfMemory(message="no memory")


class Benchmark(rows.LatencyBenchmark):
    """Each candidate has room for so many samples; while it is measured, for ``less`` fewer."""

    def __init__(self, room: dict[str, int], less: int = 0) -> None:
        nothing = Artifact(kind="torch", path=Path("none"), sha256="", bytes=0)
        candidates = [Candidate(name, None, nothing, Device()) for name in room]  # type: ignore[arg-type]
        super().__init__(candidates, LatencySettings(), Path("logs"), lambda text: None)
        self.room, self.less = room, less
        self.measured: dict[str, dict[int, LatencyRow]] = {name: {} for name in room}

    def rows(self, name: str) -> tuple[LatencyRow, ...]:
        return tuple(self.measured[name].values())

    def measure(self, batch: int, feeds: Feeds, only: Collection[str] = (), *, fresh: bool = False) -> None:
        for name in only or self.room:
            fits = batch <= self.room[name] - self.less
            row = LatencyRow(batch=batch) if fits else LatencyRow(batch=batch, failure="no memory", oom=FULL)
            self.measured[name][batch] = row


def swept(
    room: dict[str, int], monkeypatch: pytest.MonkeyPatch, start: int = 1, most: int | None = 1024, less: int = 0
) -> Benchmark:
    benchmark = Benchmark(room, less)
    benchmark.measure(start, {})

    def attempt(candidate: Candidate, feeds: Feeds, folder: Path, limit: int | None) -> OutOfMemory | None:
        size = int(feeds["size"])  # type: ignore[arg-type]
        if size == 13:
            raise ModelError("nothing that is 13")
        return None if size <= room[candidate.id] else FULL

    monkeypatch.setattr(rows, "try_batch", attempt)
    benchmark.sweep(lambda batch: {"size": batch}, start, most)  # type: ignore[dict-item]
    return benchmark


def fitting(benchmark: Benchmark, name: str) -> list[int]:
    return sorted(row.batch for row in benchmark.rows(name) if not row.failure)


def test_a_sweep_ends_with_the_largest_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = swept({"eager": 11, "engine": 40}, monkeypatch)
    assert fitting(benchmark, "eager") == [1, 2, 4, 8, 11]
    assert fitting(benchmark, "engine")[:-1] == [1, 2, 4, 8, 16, 32]
    assert 38 <= fitting(benchmark, "engine")[-1] <= 40
    assert [row.batch for row in benchmark.rows("eager") if row.oom] == [16]


def test_without_a_sweep_only_what_did_not_fit_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = swept({"eager": 100, "engine": 5}, monkeypatch, start=8, most=None)
    assert fitting(benchmark, "eager") == [8]
    assert fitting(benchmark, "engine") == [5]


@pytest.mark.parametrize(
    ("room", "options", "fit"),
    [
        (0, {}, []),
        (10_000, {"most": 48}, [1, 2, 4, 8, 16, 32, 48]),  # the end of the range is measured last
        (11, {"less": 2}, [1, 2, 4, 8, 9]),  # it fits alone, and not while it is measured
        (13, {}, [1, 2, 4, 8, 12]),  # a size that fails otherwise is not used
    ],
)
def test_sizes_of_a_sweep(room: int, options: dict[str, int], fit: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting(swept({"eager": room}, monkeypatch, **options), "eager") == fit
