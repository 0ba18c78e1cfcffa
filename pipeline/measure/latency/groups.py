"""Measure sessions in groups where they do not fit on a GPU together, each group with the baseline.

All sessions of a group are open at once, each with a CUDA context, weights and activations of its own. What a session
takes is read from the device as it starts; one that would leave too little free waits for the next group, and so does
one that finds too little: that is no fault of the variant. A speed-up is a ratio to the baseline of the same group. The
dense sibling of a pruned or sparse variant is measured once more in that one's group, if there is room.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from enginesmith.pipeline.measure.latency.benchmark import LatencySettings, MeasuredSession, run_interleaved
from enginesmith.pipeline.measure.rows import Stop
from enginesmith.pipeline.system.worker import Progress
from enginesmith.pipeline.tensors import Feeds

_SPARE_SHARE = 0.05
"""Share of the device that a group leaves free: libraries choose kernels by what is left, and calls take more."""


@dataclass(frozen=True)
class Group:
    """Name the sessions that have been measured together."""

    number: int
    """In the order of time, from 1."""
    sessions: Sequence[MeasuredSession]
    stop: Stop
    """Why it was measured for no longer."""
    alone: bool = False
    """True for one session that does not fit beside the baseline."""


@dataclass
class GroupedRun:
    """Measure sessions at one batch size; on the CPU all are one group."""

    baseline: MeasuredSession | None
    """Part of each group; None where it has no memory for this batch size."""
    batch: int
    settings: LatencySettings
    progress: Progress
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes that sessions took of the device when they were started last, by candidate."""
    dense: Mapping[str, str] = field(default_factory=dict)
    """By candidate, the other one that differs from it only in being dense."""
    _alone: list[MeasuredSession] = field(default_factory=list)

    def run(self, others: Sequence[MeasuredSession], feeds: Feeds) -> Iterator[Group]:
        """Yield each group as soon as it has been measured; several end with every session closed."""
        number = 0
        for group in self._run_together(others, feeds):
            number = group.number
            yield group
        while self._alone:
            number += 1
            sessions = self._start_alone(feeds)
            yield Group(number, sessions, run_interleaved(sessions, self.settings, self.progress), alone=True)
            if number > 1 or self._alone:
                _close(sessions)

    def _run_together(self, others: Sequence[MeasuredSession], feeds: Feeds) -> Iterator[Group]:
        """Yield the groups with the baseline, and collect the sessions that do not fit beside it."""
        waiting, most, number = list(others), max(1, len(others)), 0
        while waiting or (self.baseline and not number):
            group = self._start(waiting, most, feeds, [other for other in others if other not in waiting])
            if waiting and all(session is self.baseline for session in group):  # nothing fits beside it
                self._alone += waiting
                waiting = []
                if number or not self.baseline:
                    return
            started = [session for session in group if not session.failure]
            stop = run_interleaved(group, self.settings, self.progress)
            if len(started) > 1 and any(session.oom and _on_cuda(session) for session in started):
                most = max(1, (len(group) - 1) // 2)
                pair = [session for session in group if session is not self.baseline]
                if len(pair) == 1:  # the baseline and it take turns
                    self._alone += pair
                    waiting.remove(pair[0])
                _close(group)
                continue
            number += 1
            yield Group(number, group, stop)
            waiting = [session for session in waiting if session not in group]
            if waiting or self._alone or number > 1:
                _close(session for session in group if session is not self.baseline or not waiting)

    def _start(
        self, waiting: Sequence[MeasuredSession], most: int, feeds: Feeds, measured: Sequence[MeasuredSession]
    ) -> list[MeasuredSession]:
        """Start the baseline, and beside it as many of those who wait as fit, each with its ``measured`` sibling."""
        group: list[MeasuredSession] = []
        least = 1 if self.baseline is None else 2
        """Sessions that any group has, if they fit at all."""
        siblings = {other.candidate.id: other for other in measured if not other.failure}
        queue = ([self.baseline] if self.baseline else []) + list(waiting)
        while queue and len(group) < most + least - 1:
            session = queue.pop(0)
            before = group[-1].read_free_memory() if group else None
            name = session.candidate.id
            if before and len(group) >= least and before[0] - self.sizes.get(name, 0) < _SPARE_SHARE * before[1]:
                continue
            self.progress(f"batch {self.batch}: warming up {name}")
            session.start(feeds, self.settings)
            if group and _on_cuda(session) and session.oom:  # the others have the memory
                session.close()
                continue
            group.append(session)
            if sibling := siblings.pop(self.dense.get(name, ""), None):
                queue.insert(0, sibling)
            after = session.read_free_memory()
            if not before or not after:
                continue
            self.sizes[name] = before[0] - after[0]
            if len(group) > least and after[0] < _SPARE_SHARE * after[1]:
                group.pop().close()
        return group

    def _start_alone(self, feeds: Feeds) -> list[MeasuredSession]:
        session = self._alone.pop(0)
        if self.baseline:
            self.baseline.close()
        self.progress(f"batch {self.batch}: warming up {session.candidate.id} alone")
        session.start(feeds, self.settings)
        return [session]


def _on_cuda(session: MeasuredSession) -> bool:
    return session.candidate.device.kind == "cuda"


def _close(sessions: Iterable[MeasuredSession]) -> None:
    for session in sessions:
        session.close()
