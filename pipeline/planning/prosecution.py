"""Plan to look for inputs on which an engine is wrong: a file of the user's, or a variant of a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Plan, Step, StepRef, Variant
from enginesmith.pipeline.planning.planner import baseline_of, first_steps, graph_steps, load_task
from enginesmith.pipeline.planning.single_stages import own_engine
from enginesmith.pipeline.planning.variants import ResolvedRecipe, device_for
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.prosecute import GIVEN, TRUTH, GraphStage, Prosecute

PROSECUTE = StepRef("prosecute")
_FILE = StepRef("file")
_PER_BATCH = ("int8-dynamic",)
"""Precisions whose ranges are of the whole batch, so that samples are not answered as they are alone."""


def prosecute_file_steps(
    resolved: ResolvedRecipe, file: str, precision: str | None, seconds: float
) -> tuple[Step, ...]:
    """Plan to hold an ONNX file or an engine's file against the recipe's model.

    Raises:
        UsageError: the file is neither.
    """
    recipe, source = resolved.recipe, resolve(file)
    if source.is_torch:
        raise UsageError(f"{file} is neither an ONNX file nor an engine", "give such a file, or a run and its variant")
    engine = own_engine(source)
    kind = precision or _read_precision(source, engine)
    needs = {"model": _FILE, GIVEN: LOAD, REFERENCE: REFERENCE}
    stages: tuple[GraphStage, ...] = ()
    others: list[Step] = []
    optional: dict[str, StepRef] = {}
    if source.form == "onnx":
        stages = (GraphStage(role="graph", name="graph", precision=kind),)
        needs["graph"] = _FILE
        truth, _, steps = graph_steps(resolved) if resolved.source.is_torch else (LOAD, (), [])
        others = [step for step in steps if isinstance(step.task, Transform)]
        optional[TRUTH] = truth
    task = _task(resolved, engine, kind, stages, seconds)
    load = Step(_FILE, load_task(recipe.model_copy(update={"inputs": ()}), source))
    return (*first_steps(resolved), load, *others, Step(PROSECUTE, task, needs, optional))


def prosecute_variant_steps(resolved: ResolvedRecipe, plan: Plan, variant: Variant, seconds: float) -> tuple[Step, ...]:
    """Plan to hold a variant against its run's model; what leads to it comes from the store where it is there."""
    steps = {step.id: step for step in plan.steps}
    chain = _list_graphs(steps, variant)
    kind = KINDS[variant.lowering].threshold if variant.lowering else variant.engine.arithmetic
    stages = tuple(
        GraphStage(role=f"graph {number}", name=str(ref), precision=kind if _lowers(steps[ref]) else "fp32")
        for number, ref in enumerate(chain)
    )
    needs = {"model": variant.artifact, GIVEN: LOAD, REFERENCE: REFERENCE}
    needs |= {stage.role: ref for stage, ref in zip(stages, chain, strict=True)}
    task = _task(resolved, variant.engine, kind, stages, seconds, variant)
    step = Step(PROSECUTE, task, needs, unavailable=variant.unavailable)
    wanted, waiting = set[StepRef](), list(needs.values())
    while waiting:
        if (ref := waiting.pop()) not in wanted:
            wanted.add(ref)
            waiting += steps[ref].sources
    return (*(replace(each, search=False) for each in plan.steps if each.id in wanted), step)


def _task(
    resolved: ResolvedRecipe,
    engine: Engine,
    precision: str,
    stages: Sequence[GraphStage],
    seconds: float,
    variant: Variant | None = None,
) -> Prosecute:
    return Prosecute(
        engine=engine,
        given_engine=baseline_of(resolved.source).exact(),
        device=variant.device if variant else device_for(resolved.recipe, engine),
        precision=precision,
        graphs=tuple(stages),
        seconds=seconds,
        seed=resolved.recipe.seed,
        rows_apart=variant is None or variant.lowering not in _PER_BATCH,
    )


def _list_graphs(steps: dict[StepRef, Step], variant: Variant) -> list[StepRef]:
    """List the graphs between the model and the engine, from the model on."""
    refs, ref = list[StepRef](), steps[variant.artifact].inputs.get("model") if variant.artifact in steps else None
    while ref is not None and ref != LOAD:
        if not isinstance(steps[ref].task, Transform) and steps[ref].task.produces != "onnx":
            break
        refs.insert(0, ref)
        ref = steps[ref].inputs.get("model")
    return refs


def _lowers(step: Step) -> bool:
    made = step.task.step if isinstance(step.task, Transform) else None
    return made is None or made.stage == "precision"


def _read_precision(source: Source, engine: Engine) -> str:
    from enginesmith.pipeline.frameworks.onnx import model_file
    from enginesmith.pipeline.measure.fidelity import THRESHOLDS

    found = model_file.precision(Path(source.target)) if source.form == "onnx" else engine.arithmetic
    return found if found in THRESHOLDS else "fp32"
