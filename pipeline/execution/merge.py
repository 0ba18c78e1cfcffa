"""Several plans as one: what they have in common is done once."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.execution.events import Outcome, Outcomes
from enginesmith.pipeline.planning.plan import Plan, Step, StepRef, Variant
from enginesmith.pipeline.recipe.fleet import Place


@dataclass(frozen=True)
class DeduplicatedSteps:
    """One list of steps, and which of them each plan's own steps have become."""

    steps: tuple[Step, ...]
    takers: Mapping[str, tuple[tuple[str, StepRef], ...]]
    """By step, the plans that have it, and their own reference to it."""

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
    takers: dict[str, list[tuple[str, StepRef]]] = defaultdict(list)
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
    own = {"unavailable": step.unavailable, "place": step.place, "label": step.name}
    return Step(step.id.in_run(plan), step.task, needs, wants, **own)


# Which steps of a plan have to run on the machines of its target, and what becomes of them where there are none.


def assign_machines(plan: Plan, place: Place, lacking: str) -> Plan:
    """The plan with what depends on the target's machines put there; ``lacking`` says why there are none, if so."""
    steps = assign_step_machines(plan.steps, place, lacking)
    if not lacking:
        return replace(plan, steps=tuple(steps))
    without: dict[str, str] = {step.id: step.unavailable for step in steps if step.unavailable}

    def told(variant: Variant) -> Variant:
        checked = (variant.artifact, *variant.verified[-1:], variant.memory or "")
        reason = next((without[name] for name in checked if name in without), "")
        return replace(variant, unavailable=variant.unavailable or reason)

    variants = tuple(told(variant) for variant in plan.variants)
    return replace(plan, steps=tuple(steps), baseline=told(plan.baseline), variants=variants)


def assign_step_machines(steps: Sequence[Step], place: Place, lacking: str) -> list[Step]:
    """The same of steps: those that measure, take a GPU or build for the machine, and those that run what was built."""
    engines: set[str] = set()
    """Steps that make an engine which runs only there."""
    found = []
    for step in steps:
        if step.task.machine_specific or not engines.isdisjoint(
            (*step.inputs.values(), *step.optional_inputs.values())
        ):
            if step.task.produces == "engine":
                engines.add(step.id)
            found.append(replace(step, place=place, unavailable=step.unavailable or lacking))
        else:
            found.append(step)
    return found
