"""Which steps of a plan have to run on the machines of its target, and what becomes of them where there are none."""

from collections.abc import Sequence
from dataclasses import replace

from enginesmith.pipeline.steps import Place, Plan, Step, Variant


def assign_machines(plan: Plan, place: Place, lacking: str) -> Plan:
    """The plan with what depends on the target's machines put there; ``lacking`` says why there are none, if so."""
    steps = assign_step_machines(plan.steps, place, lacking)
    if not lacking:
        return replace(plan, steps=tuple(steps))
    without = {step.id: step.unavailable for step in steps if step.unavailable}

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
