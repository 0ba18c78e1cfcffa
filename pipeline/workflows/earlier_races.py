"""Order a search by what earlier ones of similar models found on this machine, and remember what it finds itself.

audit of the graph ── work ─┬─ races of similar work ── expected times ── steps of the fastest variants first
                            └─ race of this run ── times ── store

What is fastest on one kind of machine need not be on another one, so that each kind has records of its own: stores of
several machines can be put together.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.execution.events import Outcomes
from enginesmith.pipeline.frameworks.records import Coverage
from enginesmith.pipeline.planning.plan import Plan, StepRef
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.store.past_records import PastRecord, PastRecords
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system.machine import Environment
from enginesmith.pipeline.tasks.base import read_models
from enginesmith.pipeline.tasks.build import Audit
from enginesmith.pipeline.tasks.race import STAY

_UNKNOWN = 1.5
"""Time that is expected of a variant that nothing is known of, as a multiple of the fastest one's."""
_NAMED = 3
"""Variants that the order is told of."""
_MEASURED = 1_000_000
"""Stands for the full measurement, which comes after all laps."""
_ALIKE = 0.5
"""Distance below which two models count as similar: half of the work in other operators, or eight times the work."""
_DOUBLINGS = 6.0
"""Times that the work, the batch size or the threads have to be doubled for a distance of 1."""


class Work(BaseModel, frozen=True):
    """Describe the work of a session in one call, as far as that decides which variant is fast."""

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


class PastRace(PastRecord, frozen=True):
    """The result of a search: how long each variant took that was raced."""

    work: Work
    times: dict[str, Annotated[float, Field(ge=1, allow_inf_nan=False)]]
    """Time of a call by variant, as a multiple of the fastest one's."""


@dataclass(frozen=True)
class EarlierRaces:
    """The races on machines like this one, as one run uses them."""

    plan: Plan
    recipe: Recipe
    races: PastRecords[PastRace]

    @classmethod
    def open(cls, plan: Plan, recipe: Recipe, store: Store, here: Environment) -> "EarlierRaces":
        """Open the races in a store that were on machines with this processor, and this GPU if the run is on one."""
        gpus = here.gpus or ()
        index = recipe.where.index
        gpu = gpus[index].name if recipe.where.kind == "cuda" and index < len(gpus) else ""
        machine = json_digest([here.processor, here.vector_units, here.usable_cores, gpu])
        return cls(plan, recipe, store.past("races", machine, PastRace))

    @functools.cached_property
    def audit(self) -> StepRef | None:
        """The step that looks at the graph before anything is changed in it."""
        step_ids = (step.id for step in self.plan.steps if isinstance(step.task, Audit) and step.task.engine is None)
        return next(step_ids, None)

    def order(self, outcomes: Outcomes) -> tuple[list[StepRef], str]:
        """List the steps of a search in the order of the expected times of what they lead to, and say why.

        Nothing is listed where no race of similar work is known. The first variant, which loses nothing, stays first.
        """
        work = self._work(outcomes)
        expected = expect_times(work, self.races.read()) if work else {}
        racing = [variant for variant in self.plan.variants if not variant.reference]
        if not any(variant.id in expected for variant in racing):
            return [], ""
        ordered = [*racing[:1], *sorted(racing[1:], key=lambda variant: expected.get(variant.id, _UNKNOWN))]
        steps = {step.id: step for step in self.plan.steps}
        listed: dict[StepRef, None] = {}
        for variant in ordered:
            if (stay := StepRef(STAY, variant.name)) in steps:
                leading = self.plan.leading_to([stay, *variant.search])
                listed |= dict.fromkeys(name for name in leading if steps[name].search)
        first = ", ".join([*(variant.id for variant in ordered[:_NAMED]), *(["…"] if ordered[_NAMED:] else [])])
        return [*listed], f"tried in the order of earlier races of similar models on this machine: {first}"

    def remember(self, run: Run, outcomes: Outcomes) -> None:
        """Add the race of a run.

        Raises:
            StoreError: the store cannot be written.
        """
        times = relative_times(run)
        if (work := self._work(outcomes)) and len(times) > 1:
            self.races.add(PastRace(work=work, times=times))

    def _work(self, outcomes: Outcomes) -> Work | None:
        audited = outcomes.get(self.audit or "")
        covered = read_models(audited.artifact, Coverage) if audited and audited.good and audited.artifact else []
        if not covered:
            return None
        operators: dict[str, float] = {}
        for shares in covered[0].operators.values():
            for name, share in shares.items():
                operators[name] = operators.get(name, 0.0) + share
        batch, threads = max(self.recipe.batch), self.recipe.where.full_thread_count
        return Work(operators=operators, total_macs=covered[0].total_macs, batch=batch, threads=threads)


def relative_times(run: Run) -> dict[str, float]:
    """Find how long each variant took in its first lap, as a multiple of the fastest one's in that lap.

    Where nothing was raced, as few variants were left, it is that of the full measurement.
    """
    laps: dict[int, dict[str, float]] = {}
    for record in run.requested:
        for row in record.race:
            if row.speedup:
                laps.setdefault(row.lap, {})[record.id] = row.speedup.median
        if (latency := next(iter(record.latency), None)) and latency.speedup:
            laps.setdefault(_MEASURED, {})[record.id] = latency.speedup.median
    times: dict[str, float] = {}
    for _, speeds in sorted(laps.items()):
        times = {name: max(speeds.values()) / speed for name, speed in speeds.items()} | times
    return times


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
