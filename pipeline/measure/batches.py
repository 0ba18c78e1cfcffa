"""Measure batch sizes that nobody named: larger ones until memory ends, and the largest that fits.

Wherever a batch size does not fit, the next smaller ones are tried: first in fresh processes that only load and call
once, to find the largest that fits; that one is then measured like any other.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.measure.candidate import Candidate
from enginesmith.pipeline.measure.latency import LatencyBenchmark
from enginesmith.pipeline.measure.out_of_memory import largest_fit, try_batch
from enginesmith.pipeline.measure.race import LatencySettings, Progress
from enginesmith.pipeline.tensors import Feeds

FeedsAt = Callable[[int], Feeds]
"""Feeds of any batch size."""


class BatchSweep:
    """Search larger batch sizes once those that were asked for are measured."""

    def __init__(
        self,
        benchmark: LatencyBenchmark,
        candidates: Sequence[Candidate],
        feeds_at: FeedsAt,
        settings: LatencySettings,
        log_folder: Path,
        progress: Progress,
    ) -> None:
        self._benchmark, self._candidates, self._feeds_at = benchmark, candidates, feeds_at
        self._settings, self._logs, self._progress = settings, log_folder, progress

    def run(self, start: int, most: int | None) -> None:
        """Double the batch size from ``start`` up to ``most`` (None: not at all), then look for the largest that fit.

        A candidate that failed for another reason than memory is left alone.
        """
        batch = start
        while most is not None and batch < most and (able := self._measured_at(batch)):
            batch = min(2 * batch, most)
            self._benchmark.measure(batch, self._feeds_at(batch), able)
        for candidate in self._candidates:
            self._find_largest(candidate)

    def _measured_at(self, batch: int) -> list[str]:
        """List the candidates that were measured at this batch size."""
        return [one.id for one in self._candidates if batch in self._measured_batches(one.id)]

    def _measured_batches(self, name: str) -> list[int]:
        return [row.batch for row in self._benchmark.rows(name) if not row.failure]

    def _find_largest(self, candidate: Candidate) -> None:
        """Search between the largest batch size that was measured and the smallest that ran out of memory.

        One that fits by itself may yet fail while it is measured; the search goes on below it then.
        """
        while over := min((row.batch for row in self._benchmark.rows(candidate.id) if row.oom), default=0):
            measured = max((batch for batch in self._measured_batches(candidate.id) if batch < over), default=0)
            largest = largest_fit(lambda batch: self._fits(candidate, batch), measured, over)
            if largest == measured:
                return
            self._benchmark.measure(largest, self._feeds_at(largest), [candidate.id], fresh=True)
            if largest in self._measured_batches(candidate.id):
                return

    def _fits(self, candidate: Candidate, batch: int) -> bool:
        self._progress(f"batch {batch}: does it fit {candidate.id}?")
        try:
            limit = self._settings.memory_limit_bytes
            return try_batch(candidate, self._feeds_at(batch), self._logs, limit) is None
        except EnginesmithError:  # whatever else is wrong at this size, it cannot be used
            return False
