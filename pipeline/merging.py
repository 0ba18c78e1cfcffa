"""Several plans as one: what they have in common is done once."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.runner import Outcome, Outcomes
from enginesmith.pipeline.steps import Plan, Step


@dataclass(frozen=True)
class DeduplicatedSteps:
    """One list of steps, and which of them each plan's own steps have become."""

    steps: tuple[Step, ...]
    takers: Mapping[str, tuple[tuple[str, str], ...]]
    """By step, the plans that have it, and what it is called there."""

    def shared_step(self, plan: str, step: str) -> Step:
        """What a plan's step has become."""
        return next(one for one in self.steps if (plan, step) in self.takers[one.id])

    def done_for_others(self, plan: str) -> frozenset[str]:
        """Steps of a plan that are done for the first one that has them, and that is another one."""
        return frozenset(step for takers in self.takers.values() for name, step in takers[1:] if name == plan)

    def by_plan(self, outcomes: Outcomes) -> dict[str, dict[str, Outcome]]:
        """Outcomes by plan, under the plan's own names."""
        found: dict[str, dict[str, Outcome]] = defaultdict(dict)
        for name, outcome in outcomes.items():
            for plan, step in self.takers[name]:
                found[plan][step] = replace(outcome, step=step)
        return found

    def combine(self, outcomes: Mapping[str, Outcomes]) -> dict[str, Outcome]:
        """The other way: outcomes of plans as those of the steps that they share."""
        return {
            name: replace(found, step=name)
            for name, takers in self.takers.items()
            if (found := next((outcomes[plan][step] for plan, step in takers if step in outcomes.get(plan, {})), None))
        }


def deduplicate_steps(plans: Mapping[str, Plan]) -> DeduplicatedSteps:
    """Steps that do the same to the same in the same place become one, called after the first plan that has it.

    A single plan keeps the names of its steps; among several they are ``PLAN/STEP``, and no step is vital to all.
    """
    by_work: dict[str, Step] = {}
    takers: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for plan_name, plan in plans.items():
        work: dict[str, str] = {}
        for step in plan.steps:
            digest = work[step.id] = _work(step, work)
            if digest not in by_work:
                by_work[digest] = step if len(plans) == 1 else _own(step, plan_name, work, by_work)
            takers[by_work[digest].id].append((plan_name, step.id))
    return DeduplicatedSteps(tuple(by_work.values()), {name: tuple(found) for name, found in takers.items()})


def _work(step: Step, before: Mapping[str, str]) -> str:
    """A digest of what is done, to what, and where."""
    task = step.task
    sources = [
        sorted((role, before[name]) for role, name in part.items()) for part in (step.inputs, step.optional_inputs)
    ]
    return json_digest([task.identity, task.place, sources, repr(step.place), step.unavailable])


def _own(step: Step, plan: str, work: Mapping[str, str], by_work: Mapping[str, Step]) -> Step:
    needs, wants = (
        {role: by_work[work[name]].id for role, name in part.items()} for part in (step.inputs, step.optional_inputs)
    )
    return replace(step, id=f"{plan}/{step.id}", label=step.name, inputs=needs, optional_inputs=wants, required=False)
