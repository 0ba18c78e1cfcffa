"""Merge plans, so that steps that they have in common are done once, and assign steps to the machines of targets."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.execution.events import Outcome, Outcomes
from enginesmith.pipeline.planning.plan import Plan, Step, StepRef, Variant
from enginesmith.pipeline.recipe.fleet import Place


@dataclass(frozen=True)
class DeduplicatedSteps:
    """One list of steps, and the steps of plans that each of them stands for."""

    steps: tuple[Step, ...]
    takers: Mapping[str, tuple[tuple[str, StepRef], ...]]
    """By step, the plans that have it, and their own reference to it."""

    def shared_step(self, plan: str, step: str) -> Step:
        """Find the step that stands for a plan's step."""
        return next(candidate for candidate in self.steps if (plan, step) in self.takers[candidate.id])

    def done_for_others(self, plan: str) -> frozenset[str]:
        """List the steps of a plan that are done for another one, the first that has them."""
        return frozenset(step for takers in self.takers.values() for name, step in takers[1:] if name == plan)

    def by_plan(self, outcomes: Outcomes) -> dict[str, dict[str, Outcome]]:
        """Group outcomes by plan, under the plan's own names."""
        by_plan: dict[str, dict[str, Outcome]] = defaultdict(dict)
        for name, outcome in outcomes.items():
            for plan, step in self.takers[name]:
                by_plan[plan][step] = replace(outcome, step=step)
        return by_plan

    def combine(self, outcomes: Mapping[str, Outcomes]) -> dict[str, Outcome]:
        """Turn outcomes of plans into those of the steps that they share."""
        return {
            name: replace(result, step=name)
            for name, takers in self.takers.items()
            if (result := next((outcomes[plan][step] for plan, step in takers if step in outcomes.get(plan, {})), None))
        }


def deduplicate_steps(plans: Mapping[str, Plan]) -> DeduplicatedSteps:
    """Make one step of those that do the same to the same in the same place, called after the first plan that has it.

    A single plan keeps the names of its steps; among several they are ``PLAN/STEP``.
    """
    by_work: dict[str, Step] = {}
    takers: dict[str, list[tuple[str, StepRef]]] = defaultdict(list)
    for plan_name, plan in plans.items():
        work: dict[str, str] = {}
        for step in plan.steps:
            parts = step.inputs, step.optional_inputs
            sources = [sorted((role, work[name]) for role, name in part.items()) for part in parts]
            task = step.task
            digest = json_digest([task.identity, task.place, sources, repr(step.place), step.unavailable])
            work[step.id] = digest
            if digest not in by_work:
                needs, wants = ({role: by_work[work[name]].id for role, name in part.items()} for part in parts)
                ref, label = (step.id, step.label) if len(plans) == 1 else (step.id.in_run(plan_name), step.name)
                by_work[digest] = Step(  # costs less than a copy that is changed
                    ref, task, needs, wants, step.unavailable, step.place, search=step.search, label=label
                )
            takers[by_work[digest].id].append((plan_name, step.id))
    return DeduplicatedSteps(tuple(by_work.values()), {name: tuple(users) for name, users in takers.items()})


def assign_machines(plan: Plan, place: Place, lacking: str) -> Plan:
    """Put what depends on the target's machines there; ``lacking`` says why there are none, if so."""
    steps = assign_step_machines(plan.steps, place, lacking)
    if not lacking:
        return replace(plan, steps=tuple(steps))
    without: dict[str, str] = {step.id: step.unavailable for step in steps if step.unavailable}

    def add_reason(variant: Variant) -> Variant:
        checked = (variant.artifact, *variant.verified[-1:], variant.memory or "")
        reason = next((without[name] for name in checked if name in without), "")
        return replace(variant, unavailable=variant.unavailable or reason)

    variants = tuple(map(add_reason, plan.variants))
    return replace(plan, steps=tuple(steps), baseline=add_reason(plan.baseline), variants=variants)


def assign_step_machines(steps: Sequence[Step], place: Place, lacking: str) -> list[Step]:
    """Put steps there that measure, take a GPU or build for the machine, and those that run what was built."""
    engines: set[str] = set()
    """Steps that make an engine which runs only there."""
    assigned = []
    for step in steps:
        if step.task.machine_specific or not engines.isdisjoint(step.sources):
            if step.task.produces == "engine":
                engines.add(step.id)
            assigned.append(replace(step, place=place, unavailable=step.unavailable or lacking))
        else:
            assigned.append(step)
    return assigned
