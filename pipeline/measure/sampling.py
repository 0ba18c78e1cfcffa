"""The largest of what is read again and again while something runs: a bound from below, with its interval."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

INTERVAL_SECONDS = 0.002


@dataclass(frozen=True)
class Sampled:
    """What was seen. A peak that is shorter than the interval can be missed."""

    peak: int
    samples: int
    interval_seconds: float
    longest_gap_seconds: float
    """Between two readings, as it really was."""

    def words(self) -> str:
        """How it was sampled."""
        return (
            f"{self.samples} readings, one every {1e3 * self.interval_seconds:g} ms, "
            f"at most {1e3 * self.longest_gap_seconds:.1f} ms apart; shorter peaks are missed"
        )


class Sampler:
    """Reads on a thread of its own while its context is entered, and once more at either end."""

    def __init__(self, read: Callable[[], int], interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._read, self._interval = read, interval_seconds
        self._peak = self._samples = 0
        self._gap, self._latest = 0.0, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)

    @property
    def sampled(self) -> Sampled:
        """What was seen so far."""
        return Sampled(self._peak, self._samples, self._interval, self._gap)

    def __enter__(self) -> Self:
        self._latest = time.monotonic()
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._take()

    def _loop(self) -> None:
        while not self._ended.wait(self._interval):
            self._take()

    def _take(self) -> None:
        value, now = self._read(), time.monotonic()
        self._gap, self._latest = max(self._gap, now - self._latest), now
        self._peak, self._samples = max(self._peak, value), self._samples + 1
