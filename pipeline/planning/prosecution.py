"""Plan to look for inputs on which a variant is wrong."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from enginesmith.pipeline.engines import baseline
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.errors import NO_TIME
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.passes.quantize.precisions import KINDS, RANGES_PER_BATCH
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Plan, Step, StepRef, Variant
from enginesmith.pipeline.planning.variants import ResolvedRecipe
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.finetune import Recover
from enginesmith.pipeline.tasks.measure import VERIFIED
from enginesmith.pipeline.tasks.prosecute import GIVEN, GraphStage, Prosecute
from enginesmith.pipeline.tasks.prune import Prune
from enginesmith.pipeline.tasks.race import Race

PROSECUTE = StepRef("prosecute")
_SECONDS = 3.0
_KEPT, _MOST_KEPT, _STARTING_SECONDS = 0.15, 2, 2.0
"""Largest share of a limited time that is kept for prosecutions; how many it is kept for; the time to begin one."""


def choose_seconds(recipe: Recipe, device: Device) -> float:
    """Choose the time for trying inputs on a variant: by default some seconds on the CPU, and none elsewhere."""
    if recipe.prosecute_seconds is not None:
        return recipe.prosecute_seconds
    return _SECONDS if device.kind == "cpu" else 0.0


def keep_seconds(recipe: Recipe) -> float:
    """Choose the time at the end of a limited one that is kept for trying inputs on the variants that win."""
    seconds = choose_seconds(recipe, recipe.where)
    if not seconds or recipe.time_seconds is None:
        return 0.0
    return min(_KEPT * recipe.time_seconds, _MOST_KEPT * (_STARTING_SECONDS + seconds))


def prosecute_variant_steps(
    resolved: ResolvedRecipe,
    plan: Plan,
    variant: Variant,
    seconds: float,
    late: Collection[str] = (),
    recalled: Collection[StepRef] = (),
) -> tuple[Step, ...]:
    """Plan to compare a variant with its run's model; what leads to it comes from the store where it is there.

    No other variant is needed for that, but what its search was measured beside: those that the variant raced with are
    neither made nor measured. The engine is judged as it is: what the time cut short, as a search, is not continued.
    ``late`` are steps that the run had no time for: the variant was made without them, if it can be. What is
    ``recalled`` has not to be made; then no search is begun for what else the prosecution would use.
    """
    steps = {step.id: _without_rivals(step) for step in plan.steps}
    step = replace(prosecute_step(resolved, plan.steps, replace(variant, verified=()), seconds), id=PROSECUTE)
    if recalled:
        step = _without_searches(step, steps, recalled)
    wanted, waiting = set[StepRef](), list(step.sources)
    while waiting:
        if (ref := waiting.pop()) not in wanted and ref not in recalled:
            wanted.add(ref)
            waiting += steps[ref].sources
    left_out = set(late).difference(plan.leading_to([variant.artifact]))
    new_steps = [replace(each, search=False, as_it_was=True) for each in steps.values() if each.id in wanted]
    return (*(replace(each, unavailable=NO_TIME) if each.id in left_out else each for each in new_steps), step)


def list_makers(plan: Plan, variant: Variant) -> list[StepRef]:
    """List the steps that a variant's artifact went through, from the model to the engine, as its history does."""
    steps, refs = {step.id: step for step in plan.steps}, list[StepRef]()
    ref: StepRef | None = variant.artifact
    while ref is not None and ref in steps:
        refs.insert(0, ref)
        ref = steps[ref].inputs.get("model")
    return refs


def _without_searches(step: Step, steps: Mapping[StepRef, Step], recalled: Collection[StepRef]) -> Step:
    """Leave out of a prosecution the graphs, and what other ones would be made of, that a search would make anew."""

    def is_at_hand(ref: StepRef) -> bool:
        if ref in recalled or ref in (LOAD, REFERENCE):
            return True
        sources = steps[ref].sources
        return len(sources) == 1 and "model" in steps[ref].inputs and is_at_hand(*sources)

    task, graphs, dropped = step.task, list[GraphStage](), set[str]()
    assert isinstance(task, Prosecute)
    for stage in task.graphs:
        roles = set(stage.takes.values())
        missing = {role for role in roles & step.inputs.keys() if not is_at_hand(step.inputs[role])}
        optional = {role for role in roles & step.optional_inputs.keys() if not is_at_hand(step.optional_inputs[role])}
        if not is_at_hand(step.inputs[stage.role]):
            dropped |= {stage.role, *roles}
            continue
        dropped |= roles if missing else optional
        graphs.append(stage.model_copy(update={"task": None, "takes": {}}) if missing else stage)
    inputs, optional_inputs = (
        {role: ref for role, ref in each.items() if role not in dropped} for each in (step.inputs, step.optional_inputs)
    )
    task = task.model_copy(update={"graphs": tuple(graphs)})
    return replace(step, task=task, inputs=inputs, optional_inputs=optional_inputs)


def _without_rivals(step: Step) -> Step:
    """Let everyone stay in a race, which then needs no variant; other steps are as they were."""
    if not isinstance(step.task, Race):
        return step
    nobody: dict[str, Any] = {"engines": {}, "unmade": {}, "dense": {}, "originals": ()}
    return replace(step, task=step.task.model_copy(update=nobody), inputs={}, optional_inputs={})


def prosecute_step(
    resolved: ResolvedRecipe,
    steps: Sequence[Step],
    variant: Variant,
    seconds: float,
    *,
    required: bool = True,
    beside: bool = False,
) -> Step:
    """Plan to look for inputs on which a variant is wrong, once it answers the samples right.

    A variant of a model that was pruned, made sparse or trained is compared with that. ``required`` is as in the task,
    and ``beside`` is True where other variants are prosecuted at the same time.
    """
    by_id = {step.id: step for step in steps}
    given, chain = _list_graphs(by_id, variant)
    kind = KINDS[variant.lowering].threshold if variant.lowering else resolved.find_threshold(variant.engine)
    runtime = baseline("onnx")
    reference = by_id[variant.verified[-1]].inputs[REFERENCE] if variant.verified else REFERENCE
    needs = {"model": variant.artifact, GIVEN: given, REFERENCE: reference}
    optional, stages = dict[str, StepRef](), list[GraphStage]()
    for number, ref in enumerate(chain):
        role, graph_step = f"graph {number}", by_id[ref]
        stage = GraphStage(
            role=role, name=str(ref), precision=kind if _lowers(graph_step) else resolved.find_threshold(runtime)
        )
        if isinstance(graph_step.task, Transform):
            takes = {each: f"{role}: {each}" for each in (*graph_step.inputs, *graph_step.optional_inputs)}
            stage = stage.model_copy(update={"task": graph_step.task, "takes": takes})
            needs |= {takes[each]: source for each, source in graph_step.inputs.items()}
            optional |= {takes[each]: source for each, source in graph_step.optional_inputs.items()}
        needs[role] = ref
        stages.append(stage)
    if variant.verified:
        needs[VERIFIED] = variant.verified[-1]
    task = prosecute_task(resolved.source, resolved.recipe.seed, variant.engine, kind, stages, seconds)
    rows_apart = variant.lowering not in RANGES_PER_BATCH
    changes: dict[str, Any] = {
        "device": variant.device,
        "rows_apart": rows_apart,
        "required": required,
        "shares_cores": beside,
    }
    if given != LOAD:
        changes["given_engine"] = baseline("torch" if by_id[given].task.produces == "torch" else "onnx").exact()
    task = task.model_copy(update=changes)
    return Step(StepRef("prosecute", variant.name), task, needs, optional, unavailable=variant.unavailable)


def prosecute_task(
    source: Source, seed: int, engine: Engine, precision: str, stages: Sequence[GraphStage], seconds: float
) -> Prosecute:
    """Make the task for an engine of a model, on the CPU."""
    return Prosecute(
        engine=engine,
        given_engine=baseline("torch" if source.is_torch else "onnx").exact(),
        device=Device(),
        precision=precision,
        graphs=tuple(stages),
        seconds=seconds,
        seed=seed,
    )


def _list_graphs(steps: dict[StepRef, Step], variant: Variant) -> tuple[StepRef, list[StepRef]]:
    """Find the model that a variant should answer like, and list the graphs between that and the engine."""
    refs, ref = list[StepRef](), variant.artifact if variant.artifact in steps else None
    if ref is not None and steps[ref].task.produces == "engine":  # others run the model itself
        ref = steps[ref].inputs.get("model")
    while ref is not None and ref != LOAD:
        if _changes_answers(steps[ref]):
            return ref, refs
        if not isinstance(steps[ref].task, Transform) and steps[ref].task.produces != "onnx":
            break
        refs.insert(0, ref)
        ref = steps[ref].inputs.get("model")
    return LOAD, refs


def _changes_answers(step: Step) -> bool:
    """Tell whether what a step makes is another model, which answers otherwise than what it was made from."""
    if isinstance(step.task, Transform):
        return step.task.step.stage == "sparsity"
    return isinstance(step.task, Prune | Recover)


def _lowers(step: Step) -> bool:
    graph_pass = step.task.step if isinstance(step.task, Transform) else None
    return graph_pass is None or graph_pass.stage == "precision"
