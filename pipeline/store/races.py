"""Remember how long the variants of earlier searches took, so that a search of a similar model tries the fastest first.

    ROOT/races/MACHINE.json     the latest races on machines of one kind

What is fastest on one kind of machine need not be on another one, so that each kind has a file of its own: stores of
several machines can be put together. Of two searches that end at the same moment one may not be remembered.
"""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from enginesmith.pipeline.artifact import write_whole
from enginesmith.pipeline.errors import StoreError, storage_errors
from enginesmith.pipeline.store.remote import SharedStore

FOLDER = "races"
_MOST = 64
"""Races that are remembered; the oldest are forgotten."""
_ALIKE = 0.5
"""Distance below which two models count as similar: half of the work in other operators, or eight times the work."""
_DOUBLINGS = 6.0
"""Times that the work, the batch size or the threads have to be doubled for a distance of 1."""


class Work(BaseModel, frozen=True):
    """What a session has to do in a call, as far as that decides which variant is fast."""

    operators: dict[str, FiniteFloat]
    """Share of the multiply-adds by operator."""
    total_macs: int
    """Multiply-adds of one sample."""
    batch: int
    threads: int

    def distance(self, other: "Work") -> float:
        """Measure how unlike two are: 0 for the same, 1 and more where one says nothing about the other."""
        names = self.operators.keys() | other.operators.keys()
        moved = sum(abs(self.operators.get(name, 0.0) - other.operators.get(name, 0.0)) for name in names) / 2
        sizes = ((self.total_macs, other.total_macs), (self.batch, other.batch), (self.threads, other.threads))
        doublings = sum(abs(math.log2(max(mine, 1) / max(its, 1))) for mine, its in sizes)
        return moved + doublings / _DOUBLINGS


class PastRace(BaseModel, frozen=True):
    """The result of a search: how long each variant took that was raced."""

    work: Work
    times: dict[str, Annotated[float, Field(ge=1, allow_inf_nan=False)]]
    """Time of a call by variant, as a multiple of the fastest one's."""


class _File(BaseModel, frozen=True):
    races: tuple[PastRace, ...] = ()
    """Newest first."""


class PastRaces:
    """The races on machines of one kind, in a folder of this machine or in a shared store."""

    def __init__(self, root: Path, machine: str, shared: SharedStore | None = None) -> None:
        self._place, self._root, self._shared = f"{FOLDER}/{machine}.json", root, shared

    def read(self) -> tuple[PastRace, ...]:
        """Read the races, newest first; none where the file is missing or damaged, or the shared store is away."""
        with contextlib.suppress(OSError, StoreError, ValidationError):
            content = self._shared.read(self._place) if self._shared else (self._root / self._place).read_bytes()
            return _File.model_validate_json(content).races if content else ()
        return ()

    def add(self, race: PastRace) -> None:
        """Put a race before the others, unless it is there.

        Raises:
            StoreError: the store cannot be written.
        """
        before = self.read()
        if race in before:
            return
        content = _File(races=(race, *before)[:_MOST]).model_dump_json().encode()
        if self._shared:
            self._shared.write(self._place, content)
            return
        with storage_errors(f"the store {self._root}"):
            (self._root / FOLDER).mkdir(parents=True, exist_ok=True)
            write_whole(self._root / self._place, content)


def expect_times(work: Work, races: Sequence[PastRace]) -> dict[str, float]:
    """Expect the time of each variant that was in races of similar work, as a multiple of the fastest one's.

    It is the geometric mean over those races, weighted by how similar they are.
    """
    logs: dict[str, float] = {}
    weights: dict[str, float] = {}
    for race in races:
        if (distance := work.distance(race.work)) < _ALIKE:
            for name, time in race.times.items():
                weight = 1 / (0.05 + distance)
                logs[name] = logs.get(name, 0.0) + weight * math.log(time)
                weights[name] = weights.get(name, 0.0) + weight
    return {name: math.exp(logs[name] / weights[name]) for name in logs}
