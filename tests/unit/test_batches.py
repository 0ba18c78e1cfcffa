"""Larger batch sizes until memory ends, with sessions that fit or do not by a rule."""

from collections.abc import Collection
from pathlib import Path

import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.measure.latency import rows
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.rows import LatencyRow, OutOfMemory
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds

FULL = OutOfMemory(message="no memory")


class LatencyBenchmark:
    """Each candidate has room for so many samples; while it is measured, for ``less`` fewer."""

    def __init__(self, room: dict[str, int], less: int = 0) -> None:
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
) -> LatencyBenchmark:
    benchmark = LatencyBenchmark(room, less)
    benchmark.measure(start, {})

    def attempt(candidate: Candidate, feeds: Feeds, folder: Path, limit: int | None) -> OutOfMemory | None:
        size = int(feeds["size"])  # type: ignore[arg-type]
        if size == 13:
            raise ModelError("nothing that is 13")
        return None if size <= room[candidate.id] else FULL

    monkeypatch.setattr(rows, "try_batch", attempt)
    nothing = Artifact(kind="torch", path=Path("none"), sha256="", bytes=0)
    candidates = [Candidate(name, None, nothing, Device()) for name in room]  # type: ignore[arg-type]
    settings = LatencySettings()
    sweep = rows.BatchSweep(
        benchmark,  # type: ignore[arg-type]
        candidates,
        lambda batch: {"size": batch},  # type: ignore[dict-item]
        settings,
        Path("logs"),
        lambda text: None,
    )
    sweep.run(start, most)
    return benchmark


def fitting(benchmark: LatencyBenchmark, name: str) -> list[int]:
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


def test_what_has_no_room_at_all_ends_without_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting(swept({"eager": 0}, monkeypatch), "eager") == []


def test_the_end_of_the_range_is_measured_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting(swept({"eager": 10_000}, monkeypatch, most=48), "eager") == [1, 2, 4, 8, 16, 32, 48]


def test_what_fits_alone_and_not_while_it_is_measured_is_searched_below(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting(swept({"eager": 11}, monkeypatch, less=2), "eager") == [1, 2, 4, 8, 9]


def test_a_size_that_fails_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitting(swept({"eager": 13}, monkeypatch), "eager") == [1, 2, 4, 8, 12]
